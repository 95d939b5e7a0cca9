"""The C++ operators of the fast path: same behavior as the Python operators, registered only once the extension is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fusewise
from fusewise._shared import build
from fusewise.ops.rope import _host, _op, reference
from fusewise.ops.rope._validate import DEFAULTS, validated

from .oracle import Call
from .support import Case, Place, assert_bits, copy_of, in_threads, make, make_table, require
from .test_matrix import CASES
from .test_operators import OPERATORS, SPECS

# torch.compile instantiates autograd.Function when it traces one.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

TABLE = make_table("half", 8, 2, torch.float32)
REST = (TABLE["cos"], TABLE["sin"], None, None, None, 0, "")
operators = torch.ops.fusewise


@pytest.fixture(autouse=True)
def _loaded() -> Iterator[None]:
    """Load the extension, built if needed, with an empty cache."""
    require(Place("cpu", "cpu"))
    try:
        _host.extension()
    except build.BuildError as error:
        pytest.skip(str(error))
    _host.forget()
    yield
    _host.forget()


@pytest.fixture
def past_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After this is called, a launch from Python fails the test."""
    return lambda: monkeypatch.setattr(_op, "_launch", lambda *_: pytest.fail("launched by Python"))


def qk(tokens: int = 4, **more: Any) -> tuple[Tensor, Tensor]:
    return torch.randn(2, tokens, 3, 16, **more), torch.randn(2, tokens, 1, 16, **more)


def arguments(call: Call, impl: str) -> tuple[Any, ...]:
    """The operator arguments after the rotated tensors."""
    options = {**DEFAULTS, **call.kwargs, "impl": impl}
    return validated("rope", call.xs[0], call.xs[1] if len(call.xs) == 2 else None, tuple(options.values()))


def forms(xs: tuple[Tensor, ...], rest: tuple[Any, ...], in_place: bool) -> dict[str, tuple[Tensor, ...]]:
    """Rotate copies of xs by every operator for this number of tensors."""
    name = "rope" if len(xs) == 1 else "rope_qk"
    xs, _ = copy_of(xs)
    new = getattr(operators, name).default(*xs, *rest, *([] for _ in xs))
    new = new if isinstance(new, tuple) else (new,)
    outs = tuple(torch.full_like(y, float("nan")) for y in new)
    assert getattr(operators, f"{name}_out").default(*xs, *rest, *outs) is None
    done = {"new": new, "given": outs}
    if in_place:
        assert getattr(operators, f"{name}_").default(*xs, *rest) is None
        done["in place"] = xs
    for form, ys in done.items():
        for y in ys:
            assert y._version == 0 if form == "new" else y._version > 0
    return done


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_operator_gives_the_bits_of_python(
    case: Case, device: str, past_python: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    require(Place(device, device))  # native implementations are named after their device
    call = make(case, device)
    rest, in_place = arguments(call, device), case.memory != "expanded"
    with _host.through_python():
        want = forms(call.xs, rest, in_place)
    forms(call.xs, rest, in_place)
    past_python()
    for form, ys in forms(call.xs, rest, in_place).items():
        for y, expected in zip(ys, want[form], strict=True):
            assert_bits(y, expected)
            assert y.stride() == expected.stride()
            assert not y.requires_grad


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str, spec: str) -> None:
    """Schema, autograd registration, fake tensor, and the same under aot_dispatch with dynamic shapes."""
    xs = (torch.randn(2, 6, 4, 16), torch.randn(2, 6, 2, 16))[: 2 if "qk" in name else 1]
    outs = tuple(torch.empty_like(x) for x in xs) if "out" in name else () if name.endswith("_") else ([],) * len(xs)
    operator = getattr(operators, name).default
    for _ in range(2):
        torch.library.opcheck(operator, (*xs, *SPECS[spec], "cpu", *outs))


CHANGED: dict[str, Callable[[Tensor, Tensor, list[Any]], tuple[Tensor, Tensor, list[Any]]]] = {
    "another length": lambda q, k, rest: (*qk(5), rest),
    "another dtype": lambda q, k, rest: (q.half(), k.half(), rest),
    "other strides": lambda q, k, rest: (torch.randn(2, 3, 4, 16).transpose(1, 2), k, rest),
    "a shorter table": lambda q, k, rest: (q, k, [rest[0][:9], rest[1][:9], *rest[2:]]),
    "a table of another dtype": lambda q, k, rest: (q, k, [rest[0].half(), rest[1].half(), *rest[2:]]),
    "positions": lambda q, k, rest: (q, k, [*rest[:2], torch.tensor([3, 1, 4, 1]), *rest[3:]]),
    "offsets": lambda q, k, rest: (q, k, [*rest[:3], torch.tensor([3, 1]), *rest[4:]]),
    "another offset": lambda q, k, rest: (q, k, [*rest[:5], 7, *rest[6:]]),
    "inverse": lambda q, k, rest: (q, k, [*rest[:6], "inverse=True"]),
    "a long spec": lambda q, k, rest: (q, k, [*rest[:6], "inverse=True" + " " * 300]),
}


@pytest.mark.parametrize("change", CHANGED)
def test_another_call_is_not_this_one(change: str) -> None:
    q, k = qk()
    for _ in range(2):
        operators.rope_qk(q, k, *REST, "cpu", [], [])
    q, k, rest = CHANGED[change](q, k, list(REST))
    with _host.through_python():
        want = operators.rope_qk(q, k, *rest, "cpu", [], [])
    for _ in range(2):
        for y, expected in zip(operators.rope_qk(q, k, *rest, "cpu", [], []), want, strict=True):
            assert_bits(y, expected)


def test_strides_that_are_asked_for(past_python: Callable[[], None]) -> None:
    q, _ = qk()
    strides = list(q.transpose(1, 2).contiguous().transpose(1, 2).stride())
    for wanted in ([], strides):
        operators.rope(q, *REST, "cpu", wanted)
    past_python()
    y, z = (operators.rope(q, *REST, "cpu", wanted) for wanted in ([], strides))
    assert (list(y.stride()), list(z.stride())) == (list(q.stride()), strides)
    assert_bits(y, z)


def test_in_place_through_outputs_is_told_from_others() -> None:
    """`out` is the input, then is not: reordering in place must read before it writes."""
    q, _ = qk()
    rest = (*REST[:6], "pairing=interleaved_to_half", "cpu")
    want = operators.rope(q, *rest, [])
    for _ in range(2):
        x, y = q.clone(), torch.empty_like(q)
        operators.rope_out(x, *rest, x)
        operators.rope_out(q, *rest, y)
        assert_bits(x, want)
        assert_bits(y, want)


def test_errors_are_those_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    q, _ = qk()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^rope: impl must be able to serve the tensors, got 'triton'"):
            operators.rope(q, *REST, "triton", [])
        with pytest.raises(RuntimeError, match="cos"):
            operators.rope(q)
    assert q._version == 0


def test_what_is_not_native_stays_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """And plans once."""
    asked = []
    monkeypatch.setattr(_host, "serving", lambda *args: asked.append(args) or _op.choice.implementation("reference"))
    q, _ = qk()
    ys = [operators.rope(q, *REST, "reference", []) for _ in range(3)]
    assert len(asked) == 1
    for y in ys:
        assert_bits(y, ys[0])


def test_autograd_and_transforms_are_outside() -> None:
    """vmap, functionalization, inference tensors, and gradients from Python, on top of the C++ operators."""
    q, _ = qk()
    want = fusewise.rope(q, **TABLE, impl="cpu")
    for _ in range(2):
        mapped = torch.func.vmap(lambda x: operators.rope(x, *REST, "cpu", []))(torch.stack([q, q]))
        assert_bits(mapped[1], want)
        assert_bits(torch.func.functionalize(lambda x: operators.rope(x, *REST, "cpu", []))(q), want)
        with torch.inference_mode():
            x = q.clone()
            operators.rope_(x, *REST, "cpu")
            assert_bits(x, want)
        leaf = q.clone().requires_grad_()
        with _host.through_python():
            y = fusewise.rope(leaf, **TABLE, impl="cpu")
        (dq,) = torch.autograd.grad(y, leaf, y.detach())
        torch.testing.assert_close(dq, q)


def test_compiled_graphs_go_past_python(past_python: Callable[[], None]) -> None:
    """fullgraph forward and backward while the sequence grows: one compilation, and no launch from Python for a repeated
    length."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def f(q: Tensor, k: Tensor) -> Any:
        y, z = fusewise.rope(q * 2, k, **TABLE, impl="cpu")
        return y + 1, z

    def run(tokens: int) -> None:
        leaves = tuple(x.requires_grad_() for x in qk(tokens))
        dys = tuple(torch.randn_like(x) for x in leaves)
        got = f(*leaves)
        y, z = reference.rope(leaves[0] * 2, leaves[1], **TABLE)
        y = y + 1
        torch.testing.assert_close(got, (y, z))
        gradients = torch.autograd.grad((y, z), leaves, dys)
        torch.testing.assert_close(torch.autograd.grad(got, leaves, dys), gradients)

    lengths = (5, 6, 17, 33)
    run(lengths[0])
    compiled = counter.frame_count
    for tokens in lengths:
        run(tokens)
    past_python()
    for tokens in lengths:
        run(tokens)
    assert counter.frame_count == compiled


@pytest.mark.parametrize("into", ["in place", "out"])
def test_compiled_writes_go_past_python(into: str, past_python: Callable[[], None]) -> None:
    """Graphs pass tensors that are written to with one more dimension."""
    torch._dynamo.reset()

    def f(x: Tensor, y: Tensor) -> None:
        if into == "in place":
            fusewise.rope_(y[:, :, :3], y[:, :, 3:], **TABLE, impl="cpu")
        else:
            fusewise.rope(x[:, :, :3], x[:, :, 3:], **TABLE, impl="cpu", out=(y[:, :, :3], y[:, :, 3:]))

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = torch.cat(qk(), 2)
        y = x.clone() if into == "in place" else torch.empty_like(x)
        compiled(x, y)
        torch.testing.assert_close(y, reference.rope(x, None, **TABLE))
        past_python()


def test_threads_share_what_is_kept() -> None:
    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(200):
            x = torch.randn(1, 1 + i % 7, 2, 16, generator=generator)
            y = operators.rope(x, *REST, "cpu", [])
            operators.rope_(y, *REST[:6], "inverse=True", "cpu")
            torch.testing.assert_close(y, x)
            if i % 50 == 0:
                _host.forget()

    in_threads(work)


FRESH = """
import torch, fusewise
from fusewise.ops.rope import _host
def in_cpp(): return "operators.h" in torch._C._dispatch_dump("fusewise::rope_qk")
x, f = torch.randn(1, 4, 8, 64), torch.ones(32)
print(in_cpp(), end=" ")
y = torch.ops.fusewise.rope(x, f, None, None, None, None, 0, "table=inv_freq", "reference", [])
print(in_cpp(), end=" ")
for _ in range(2):
    z = torch.ops.fusewise.rope(x, f, None, None, None, None, 0, "table=inv_freq", "cpu", [])
print(in_cpp(), torch.allclose(y, z, atol=1e-5), end=" ")
first = _host.extension()
_host.extension.cache_clear()
print(first is _host.extension())
"""


def test_they_are_registered_when_native_code_has_served_and_once() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120, env=os.environ)
    assert (done.returncode, done.stdout) == (0, "False False True True True\n"), done.stderr


@pytest.mark.gpu
def test_on_the_current_stream_and_the_device_of_the_tensors() -> None:
    """Launches use the caller's stream, can be captured into a CUDA graph, and work on a device that is not current."""
    require(Place("cuda", "cuda"))
    rest = (TABLE["cos"].cuda(), TABLE["sin"].cuda(), *REST[2:], "cuda")
    q = torch.randn(8, 64, 32, 16, device="cuda")
    want = operators.rope(torch.ones_like(q), *rest, [])
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        q.fill_(1)
        y = operators.rope(q, *rest, [])
    stream.synchronize()
    assert_bits(y, want)
    graph = torch.cuda.CUDAGraph()
    q.zero_()
    with torch.cuda.graph(graph):
        y = operators.rope(q, *rest, [])
    q.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert_bits(y, want)
    if torch.cuda.device_count() > 1:
        there = tuple(x.to("cuda:1") if isinstance(x, Tensor) else x for x in rest)
        for _ in range(2):
            y = operators.rope(q.to("cuda:1"), *there, [])
            assert torch.cuda.current_device() == 0
            assert_bits(y.cpu(), want.cpu())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_inductor_on_a_gpu(mode: str, past_python: Callable[[], None]) -> None:
    require(Place("cuda", "cuda"))
    torch._dynamo.reset()
    table = {name: x.cuda() for name, x in TABLE.items()}
    f = torch.compile(lambda q, k: fusewise.rope(q * 2, k, **table, impl="cuda"), fullgraph=True, mode=mode)
    q, k = qk(device="cuda")
    want = fusewise.rope(q * 2, k, **table, impl="cuda")
    with torch.no_grad():
        for i in range(4):
            if i == 2:
                past_python()
            for y, expected in zip(f(q, k), want, strict=True):
                assert_bits(y, expected)
