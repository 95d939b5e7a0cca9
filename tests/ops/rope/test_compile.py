"""RoPE under torch.compile: one graph, bitwise equal results and gradients, and no recompilation while a sequence grows.
Operators and in-place graphs are tested in separate files that import helpers from this one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import fusewise
from fusewise.nn import RotaryEmbedding

from .support import Place, assert_bits, make_table, require

# torch.compile instantiates autograd.Function when it traces one.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

TABLE = make_table("half", 8, 2, torch.float32)
COS, SIN = TABLE["cos"], TABLE["sin"]
FREQ = make_table("inv_freq", 8, 2, torch.float32)["inv_freq"]


@pytest.fixture(autouse=True)
def _cold() -> None:
    torch._dynamo.reset()


def tensors(requires_grad: bool = False, tokens: int = 6) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, tokens, 4, 16), torch.randn(2, tokens, 2, 16)
    return q.requires_grad_(requires_grad), k.requires_grad_(requires_grad)


COLD = """
import torch, fusewise
q, k = torch.randn(2, 6, 4, 16), torch.randn(2, 6, 2, 16)
inv_freq = 10000.0 ** -(torch.arange(0, 16, 2) / 16)

@torch.compile(fullgraph=True)
def f(q, k):
    y, z = fusewise.rope(q * 2, k, inv_freq=inv_freq)
    return y + 1, z

leaves = q.requires_grad_(), k.requires_grad_()
y, z = f(*leaves)
(y.sum() + z.square().sum()).backward()
got = y.detach(), z.detach(), q.grad, k.grad
leaves = q.detach().requires_grad_(), k.detach().requires_grad_()
y, z = fusewise.rope(leaves[0] * 2, leaves[1], inv_freq=inv_freq)
y = y + 1
want = y.detach(), z.detach(), *torch.autograd.grad(y.sum() + z.square().sum(), leaves)
for a, b in zip(got, want):
    assert torch.equal(a, b), (a - b).abs().max()
print("right")
"""


@pytest.mark.slow
def test_compiled_is_the_very_first_call() -> None:
    """In a fresh process, before any eager call of the operator: forward, backward, no graph break. By Inductor, which traces
    like aot_eager."""
    done = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "right\n"


CALLS: dict[str, dict[str, Any]] = {
    "table": TABLE,
    "duplicated-interleaved": {**make_table("duplicated", 8, 2, torch.float32, "interleaved"), "pairing": "interleaved"},
    "to-half": {**make_table("fused", 4, 2, torch.float32), "pairing": "interleaved_to_half", "rotary_dim": 8, "rotary_start": -8},
    "frequencies": {"inv_freq": FREQ, "scale": 1.5},
    "offset": {**TABLE, "offset": 3},
    "offsets": {**TABLE, "offset": torch.tensor([3, 9])},
    "ids": {**TABLE, "positions": torch.tensor([5, 1, 63, 64, 0, 2])},
    "sections": {**TABLE, "positions": torch.arange(36).view(3, 2, 6), "sections": (2, 3, 3), "sections_interleaved": True},
    "context-parallel": {**TABLE, "context_parallel": (1, 2)},
    "inverse": {**TABLE, "inverse": True},
}  # fmt: skip


# A trace does not see the implementation, so one runs every call, and another one a call with a table and one without.
@pytest.mark.parametrize(
    ("name", "impl", "dynamic"),
    [
        *((name, "cpu", dynamic) for name in CALLS for dynamic in (False, True)),
        *((name, "reference", True) for name in ("table", "frequencies")),
    ],
)
def test_compiled_gives_the_same_bits(name: str, impl: str, dynamic: bool) -> None:
    """Forward and backward, fullgraph."""
    require(Place(impl, "cpu"))
    kwargs = {**CALLS[name], "impl": impl}
    leaves = tensors(requires_grad=True)
    want = fusewise.rope(*leaves, **kwargs)
    dys = tuple(torch.randn_like(y) for y in want)
    gradients = torch.autograd.grad(want, leaves, dys)
    f = torch.compile(lambda q, k: fusewise.rope(q, k, **kwargs), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    ys = f(*leaves)
    for a, b in zip((*ys, *torch.autograd.grad(ys, leaves, dys)), (*want, *gradients), strict=True):
        assert_bits(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("wanted", [0, 1])
def test_compiled_with_one_that_requires_no_grad(wanted: int) -> None:
    xs = tuple(x.requires_grad_(i == wanted) for i, x in enumerate(tensors()))
    ys = torch.compile(lambda q, k: fusewise.rope(q, k, **TABLE), fullgraph=True, backend="aot_eager")(*xs)
    assert [y.requires_grad for y in ys] == [i == wanted for i in range(2)]
    for got, want in zip(ys, fusewise.rope(*xs, **TABLE), strict=True):
        assert_bits(got, want)
    dy = torch.randn_like(xs[wanted])
    (want,) = torch.autograd.grad(fusewise.rope(xs[wanted], **TABLE), xs[wanted], dy)
    assert_bits(torch.autograd.grad(ys[wanted], xs[wanted], dy)[0], want)


def test_compiled_packed_sequences() -> None:
    x = torch.randn(11, 3, 16)
    cu_seqlens = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    kwargs: dict[str, Any] = {**TABLE, "layout": "thd", "cu_seqlens": cu_seqlens}
    f = torch.compile(lambda x: fusewise.rope(x, **kwargs), fullgraph=True, backend="aot_eager", dynamic=True)
    assert_bits(f(x), fusewise.rope(x, **kwargs))


@pytest.mark.parametrize("table", ["running", "ids", "frequencies"])
def test_no_recompilation_while_the_sequence_grows(table: str) -> None:
    counter = CompileCounter()
    f = torch.compile(fusewise.rope, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 6, 17, 64, 33, 2):
        kwargs: dict[str, Any] = TABLE if table != "frequencies" else {"inv_freq": FREQ}
        if table == "ids":
            kwargs = {**kwargs, "positions": torch.arange(tokens)}
        q, k = tensors(tokens=tokens)
        for a, b in zip(f(q, k, **kwargs), fusewise.rope(q, k, **kwargs), strict=True):
            assert_bits(a, b)
    assert counter.frame_count == 1


def test_no_recompilation_in_a_decode_loop() -> None:
    """The offset is symbolic: one token at a time, one graph."""
    counter = CompileCounter()
    f = torch.compile(
        lambda q, offset: fusewise.rope(q, **TABLE, offset=offset), fullgraph=True, dynamic=True, backend=counter
    )
    q, _ = tensors(tokens=1)
    for offset in (7, 8, 9, 40, 63):
        assert_bits(f(q, offset), fusewise.rope(q, **TABLE, offset=offset))
    assert counter.frame_count == 1


def test_compiled_without_gradients_takes_a_table_that_requires_one() -> None:
    q, k = tensors()
    frequencies = torch.nn.Parameter(FREQ.clone())
    f = torch.compile(fusewise.rope, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for a, b in zip(f(q, k, inv_freq=frequencies), fusewise.rope(q, k, inv_freq=FREQ), strict=True):
            assert_bits(a, b)
    with pytest.raises(Exception, match="rope: inv_freq must not require grad"):
        f(q, k, inv_freq=frequencies)


def test_compiled_errors_are_those_of_the_call() -> None:
    q, k = tensors()
    f = torch.compile(fusewise.rope, backend="eager")
    with pytest.raises(ValueError, match=r"^rope: rotary_dim must be even"):
        f(q, k, **TABLE, rotary_dim=7)


CUBED = torch.randn(2, 6, 4, 16)


def cubed(q: Tensor) -> Tensor:
    return (fusewise.rope(q, cos=COS, sin=SIN) ** 3).sum()


@pytest.mark.parametrize(
    "transformed",
    [
        torch.func.grad(cubed),
        torch.func.grad(lambda q: (torch.func.grad(cubed)(q) ** 2).sum()),
        torch.func.vmap(torch.func.grad(lambda x: cubed(x[None]))),
        lambda q: torch.func.vjp(cubed, q)[1](torch.tensor(2.0))[0],
        lambda q: torch.func.jvp(lambda q: fusewise.rope(q, cos=COS, sin=SIN), (q,), (CUBED,))[1],
    ],
    ids=["grad", "grad-grad", "vmap-grad", "vjp", "jvp"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # raised by torch when it traces jvp
def test_compiled_transforms(transformed: Any) -> None:
    """An operator inside a traced transform would become a constant: silently zero gradients."""
    q = torch.randn(2, 6, 4, 16)
    found = torch.compile(transformed, backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(found, transformed(q), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_compiled_transforms_do_not_recompile_while_the_sequence_grows(pairing: Any) -> None:
    counter = CompileCounter()
    mapped = torch.func.vmap(lambda q: fusewise.rope(q, inv_freq=FREQ, pairing=pairing))
    f = torch.compile(mapped, fullgraph=True, backend=counter)
    for tokens in (5, 6, 17, 64):
        q = torch.randn(3, 2, tokens, 4, 16)
        torch.testing.assert_close(f(q), mapped(q))
    assert counter.frame_count <= 2  # one for the first length, one for all


def test_compiled_with_another_operation_in_between() -> None:
    """The graph preserves the strides of the operator's inputs: a transposed q and its gradient."""
    q, k = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors())

    def f(q: Tensor, k: Tensor) -> Tensor:
        y, z = fusewise.rope(q.cos(), k, **TABLE)
        return torch.einsum("bthd,bshd->bhts", y[:, :, :2], z)

    dy = torch.randn(2, 2, 6, 6)
    want = torch.autograd.grad(f(q, k), (q, k), dy)
    got = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(q, k), (q, k), dy)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_tensor_in_two_places_of_one_call_compiles() -> None:
    q = tensors(requires_grad=True)[0]

    def tied(q: Tensor) -> Any:
        return fusewise.rope(q, q, cos=COS, sin=COS)

    found, usual = torch.compile(tied, fullgraph=True, backend="aot_eager")(q), tied(q)
    dys = torch.randn_like(q), torch.randn_like(q)
    for a, b in zip(
        (*found, *torch.autograd.grad(found, q, dys)), (*usual, *torch.autograd.grad(usual, q, dys)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_one_pair_compiles_where_sizes_are_symbols() -> None:
    q, cos, sin = torch.randn(2, 3, 2, 2), torch.randn(9, 1), torch.randn(9, 1)
    compiled = torch.compile(
        lambda q, cos, sin: fusewise.rope(q, cos=cos, sin=sin), fullgraph=True, backend="aot_eager", dynamic=True
    )
    torch.testing.assert_close(compiled(q, cos, sin), fusewise.rope(q, cos=cos, sin=sin))


@pytest.mark.parametrize("source", ["table", "frequencies", "module", "module with a table"])
def test_compiled_where_the_length_depends_on_data(source: str) -> None:
    """Whether a table is long enough cannot be known there: positions beyond it are NaN."""
    calls: dict[str, Any] = {
        "table": lambda q: fusewise.rope(q, cos=COS[:5], sin=SIN[:5]),
        "frequencies": lambda q: fusewise.rope(q, 2 * q, inv_freq=FREQ)[1],
        "module": RotaryEmbedding(16),
        "module with a table": RotaryEmbedding(16, table="cos_sin", max_positions=5),
    }
    call = calls[source]
    call(torch.zeros(2, 5, 4, 16))  # a module's table is made
    q = tensors(requires_grad=True)[0]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        f = torch.compile(lambda q, kept: call(q[:, kept]), fullgraph=True, backend="aot_eager")
        for count in (3, 0, 1):
            kept = torch.arange(6) < count
            found, usual = f(q, kept), call(q[:, kept])
            assert_bits(found, usual)
            dy = torch.randn_like(usual)
            assert_bits(*(torch.autograd.grad(y, q, dy)[0] for y in (found, usual)))
        if "table" in source:
            y = f(q, torch.ones(6, dtype=torch.bool))
            assert y[:, 5].isnan().all() and y[:, :5].isfinite().all()
