"""qk_norm_rope as torch operators: opcheck, fake tensors, torch.compile, CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import fusewise

from ..rope.support import Case, Place, make_table
from .support import NormCase, build

# torch.compile instantiates autograd.Function when it traces one.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

TABLE = make_table("half", 8, 2, torch.float32)


@pytest.fixture(autouse=True)
def _cold() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("norm", ["head", "all"])
@pytest.mark.parametrize("count", [1, 2])
def test_opcheck(norm: str, count: int) -> None:
    """Schema, autograd registration, fake tensors, and the same under aot_dispatch with dynamic shapes."""
    made = build(NormCase(Case(name="opcheck", kv_heads=2 if count == 2 else None, memory="packed"), norm))
    call = (*TABLE.values(), None, None, None, 3, "", 1e-6, 1.0, norm, "reference")
    lists = list(made.xs), list(made.weights)
    torch.library.opcheck(torch.ops.fusewise.qk_norm_rope.default, (*lists, *call))
    torch.library.opcheck(torch.ops.fusewise.qk_norm_rope_grad.default, (list(made.dys), *lists, *call, True))
    torch.library.opcheck(torch.ops.fusewise.qk_norm_rope_grad.default, (list(made.dys), *lists, *call, False))


def test_fake_tensors() -> None:
    """Shape, strides and dtype are right without data."""
    made = build(NormCase(Case(name="fake", layout="bhsd", memory="swapped", dtype="bf16")))
    real = made.call(made.xs, made.weights)
    with FakeTensorMode() as mode:
        fake = fusewise.qk_norm_rope(
            *(mode.from_tensor(x) for x in (*made.xs, *made.weights)),
            **{n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in made.rotation.items()},
        )
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


CASES = {
    "qwen3": NormCase(Case(name="", dtype="bf16"), weight_dtype=torch.bfloat16),
    "gemma3": NormCase(Case(name="", layout="bhsd", memory="swapped"), weight_offset=1.0),
    "olmo2": NormCase(Case(name="", heads=3), "all"),
    "no-weights": NormCase(Case(name="", pairing="interleaved", table="inv_freq"), weight_dtype=None),
    "q-alone": NormCase(Case(name="", kv_heads=None, head_dim=24, rotary_dim=16)),
    "ids": NormCase(Case(name="", options={"positions": torch.tensor([5, 1, 63, 64, 0])})),
}


# Inductor includes what aot_eager does but needs a compiler. aot_eager runs without one, and separates causes of failures. Static
# shapes are a special case of dynamic ones.
@pytest.mark.parametrize(
    ("backend", "name"), [("aot_eager", "qwen3"), *(pytest.param("inductor", n, marks=pytest.mark.slow) for n in CASES)]
)
def test_compiled_gives_the_same_bits(name: str, backend: str) -> None:
    """Forward and backward, fullgraph, with dynamic shapes and for some with static ones."""
    made = build(CASES[name])
    want = made.run("auto")
    for dynamic in (False, True) if name in ("qwen3", "olmo2") else (True,):
        torch._dynamo.reset()
        f: Any = torch.compile(lambda xs, ws: made.call(xs, ws), fullgraph=True, backend=backend, dynamic=dynamic)
        tensors = [x.detach().requires_grad_() for x in (*made.xs, *made.weights)]
        count = len(made.xs)
        ys = f(tuple(tensors[:count]), tuple(tensors[count:]))
        got = (*ys, *torch.autograd.grad(ys, tensors, made.dys))
        for a, b in zip(got, (*want[0], *want[1]), strict=True):
            assert a.stride() == b.stride()
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
            assert torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3)])
def test_compiled_where_some_gradients_are_wanted(wanted: tuple[int, ...]) -> None:
    made = build(NormCase(Case(name="some", batch=1, tokens=3, heads=3, kv_heads=2)))
    tensors = [x.detach().requires_grad_(i in wanted) for i, x in enumerate((*made.xs, *made.weights))]
    needed = [tensors[i] for i in wanted]

    def gradients(f: Any) -> tuple[Tensor, ...]:
        ys = f(tuple(tensors[:2]), tuple(tensors[2:]))
        return torch.autograd.grad(sum(y.square().sum() for y in ys if y.requires_grad), needed)

    call: Any = made.call
    compiled = torch.compile(lambda xs, ws: call(xs, ws), fullgraph=True, backend="aot_eager")
    for found, usual in zip(gradients(compiled), gradients(call), strict=True):
        torch.testing.assert_close(found, usual)


def test_one_graph_for_all_lengths() -> None:
    counter = CompileCounter()
    weight = torch.randn(16)
    f = torch.compile(
        lambda q, k: fusewise.qk_norm_rope(q, k, weight, weight, **TABLE), fullgraph=True, backend=counter
    )
    for tokens in (3, 4, 5, 17, 64):
        f(torch.randn(2, tokens, 4, 16), torch.randn(2, tokens, 2, 16))
    assert counter.frame_count <= 2


@pytest.mark.gpu
# Raised by the capture, and after it.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("norm", ["head", "all"])
def test_cuda_graph(norm: str) -> None:
    """Captured once including backward, replayed on other values."""
    made = build(
        NormCase(Case(name="graph", tokens=64, head_dim=64, dtype="bf16"), norm), Place("triton", "cuda").device
    )
    tensors = [x.detach().requires_grad_() for x in (*made.xs, *made.weights)]

    def step() -> tuple[Tensor, ...]:
        ys = made.call(tuple(tensors[:2]), tuple(tensors[2:]), impl="triton")
        return (*ys, *torch.autograd.grad(ys, tensors, made.dys))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in tensors:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


def test_a_tensor_in_two_places_of_one_call_compiles() -> None:
    x, weight = torch.randn(2, 6, 2, 16, requires_grad=True), torch.randn(16, requires_grad=True)

    def tied(x: Tensor, weight: Tensor) -> Any:
        return fusewise.qk_norm_rope(x, x, weight, weight, **TABLE)

    found, usual = torch.compile(tied, fullgraph=True, backend="aot_eager")(x, weight), tied(x, weight)
    dys = torch.randn_like(x), torch.randn_like(x)
    of_found, of_usual = (torch.autograd.grad(ys, (x, weight), dys) for ys in (found, usual))
    for a, b in zip((*found, *of_found), (*usual, *of_usual), strict=True):
        torch.testing.assert_close(a, b)
