"""The C++ operators of the fast path: what torch.compile's graphs call, with the results of the Python operators."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from fusewise import gated_linear, gated_mlp
from fusewise.ops.gated_linear import _cuda, _op
from fusewise.ops.gated_linear._problem import Spec

from ..rope.support import assert_bits, in_threads
from .host_calls import B, Named, W, X, by_python, load, of_mlp, operands, requiring, trained

# torch.compile instantiates autograd.Function when it traces one.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

OPERATORS = {"gated_linear": _op.op_gated_linear, "gated_linear_preact": _op.op_gated_linear_preact}
FORMS = ["stacked", "stacked bias", "separate", "separate bias", "stacked bias strided"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

each_operator = pytest.mark.parametrize("name", OPERATORS)
# An impl is named after each.
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    monkeypatch.setattr(_cuda, "_gluon_is_there", lambda: False)  # it would serve some calls of `impl="cuda"`, too


@pytest.fixture
def past_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After this is called, a call that Python computes fails the test."""

    def forbid() -> None:
        for name in ("serving", "taking_gradient"):
            monkeypatch.setattr(_op, name, lambda *_: pytest.fail("computed by Python"))

    return forbid


def given(made: dict[str, Any], gate_first: bool = False, impl: str = "auto", activation: str = "silu") -> tuple[Any, ...]:  # fmt: skip
    """The arguments of an operator for the `operands` of a call."""
    x, gate = made["x"], made.get("w_gate")
    spec = Spec(activation, "stacked" if gate is None else "separate", gate_first)
    return x, made["weight"], gate, made.get("bias"), made.get("b_gate"), spec.encode(), impl


def results(name: str, *arguments: Any) -> tuple[Tensor, ...]:
    found = OPERATORS[name](*arguments)
    return found if isinstance(found, tuple) else (found,)


@each_device
@each_operator
@pytest.mark.parametrize("form", FORMS)
def test_they_give_the_bits_of_python(name: str, form: str, device: str, past_python: Callable[[], None]) -> None:
    """Few rows and many, which a CPU takes in chunks; the second is large enough for oneDNN."""
    calls = []
    for dtype in DTYPES if device == "cpu" else DTYPES[1:]:
        for rows, features, hidden in ((3, 48, 40), (16, 512, 264), (70, 32, 56), (600, 8, 4104)):
            made = operands((rows,), features, hidden, dtype, form, device)
            if device == "cuda" and "strided" in form:
                made["weight"] = torch.cat((made["weight"], made["weight"]), -1)[:, :features]
                made["x"] = made["x"].contiguous()
            for gate_first in (False, True)[: 1 if "separate" in form else 2]:
                arguments = given(made, gate_first, device)
                calls.append((arguments, by_python(results, name, *arguments)))
                results(name, *arguments)  # on a GPU Python serves the first one
    past_python()
    for arguments, expected in calls:
        for ours, theirs in zip(results(name, *arguments), expected, strict=True):
            assert_bits(ours, theirs)
            assert ours.stride() == theirs.stride() and not ours.requires_grad


def of_gradient(
    rows: int, hidden: int, dtype: torch.dtype, device: str, layout: str = "stacked", *, gate_first: bool = False,
    bias: bool = True, impl: str = "", strided: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `gated_linear_grad`; with `strided` a dy whose rows are parts of longer ones."""
    dy = torch.randn(rows, hidden * (1 + strided)).to(device, dtype)[:, :hidden]
    preact = torch.randn((rows, 2 * hidden) if layout == "stacked" else (2, rows, hidden)).to(device, dtype)
    return dy, preact, Spec("gelu", layout, gate_first).encode(), impl or device, bias


@each_device
@pytest.mark.parametrize("layout", ["stacked", "separate"])
def test_the_gradient_has_the_bits_of_python(layout: str, device: str, past_python: Callable[[], None]) -> None:
    """One partial sum and several."""
    calls = []
    for dtype in DTYPES if device == "cpu" else DTYPES[1:]:
        for rows, hidden in ((1, 8), (7, 40), (100, 264)):
            for gate_first, bias, strided in ((False, True, False), (True, True, True), (True, False, False)):
                arguments = of_gradient(
                    rows, hidden, dtype, device, layout, gate_first=gate_first, bias=bias, strided=strided
                )
                calls.append((arguments, by_python(_op.op_grad, *arguments)))
                _op.op_grad(*arguments)
    past_python()
    for arguments, expected in calls:
        for ours, theirs in zip(_op.op_grad(*arguments), expected, strict=True):
            assert_bits(ours, theirs)
            assert ours.stride() == theirs.stride() and ours.shape == theirs.shape


@pytest.mark.parametrize("layout", ["stacked", "separate"])
def test_opcheck_of_the_gradient(layout: str) -> None:
    torch.library.opcheck(_op.op_grad, of_gradient(6, 24, torch.float32, "cpu", layout))


@pytest.mark.parametrize(
    "odd",
    [
        of_gradient(3, 8, torch.float64, "cpu", impl="auto"),
        of_gradient(0, 8, torch.float32, "cpu"),
        of_gradient(3, 8, torch.float32, "cpu", "interleaved"),
        of_gradient(3, 8, torch.float32, "cpu", impl="reference"),
    ],
    ids=["float64", "no rows", "interleaved", "reference"],
)
def test_odd_gradients_are_pythons(odd: tuple[Any, ...]) -> None:
    for ours, theirs in zip(_op.op_grad(*odd), by_python(_op.op_grad, *odd), strict=True):
        assert_bits(ours, theirs)
        assert ours.stride() == theirs.stride()


def test_operators_that_make_new_tensors_take_any_strides() -> None:
    """As kernels do not; with the results of dense copies."""
    spec, dense = "gelu/stacked/value_first", torch.Tensor.contiguous
    dy, preact, w_down = torch.randn(8, 5).T, torch.randn(16, 5).T, torch.randn(8, 6).T
    x, weight, bias = torch.randn(5, 12)[:, ::2], torch.randn(6, 16).T, torch.randn(32)[::2]
    calls = [
        (_op.op_grad, (dy, preact, spec, "cpu", True)),
        (_op.op_down_grad, (torch.randn(6, 5).T, w_down, preact, spec, "cpu", True)),
        (_op.op_gated_linear_preact, (x, weight, None, bias, None, spec, "cpu")),
        (_op.op_recompute_grad, (dy, x, weight, None, bias, None, spec, "cpu", True)),
    ]
    for operator, arguments in calls:
        expected = operator(*(dense(a) if isinstance(a, Tensor) else a for a in arguments))
        for ours, theirs in zip(operator(*arguments), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
            assert ours.stride() == theirs.stride()
        torch.library.opcheck(operator, arguments)


@each_operator
@pytest.mark.parametrize("form", FORMS)
def test_opcheck(name: str, form: str) -> None:
    """Schema, autograd registration, fake tensor, and the same under aot_dispatch with dynamic shapes."""
    made = operands((6,), 16, 24, torch.float32, form)
    torch.library.opcheck(OPERATORS[name], given(made))


@each_device
@pytest.mark.parametrize("function", [gated_linear, gated_mlp])
def test_compiled_inference_goes_past_python(function: Any, device: str, past_python: Callable[[], None]) -> None:
    torch._dynamo.reset()
    made = operands((4,), 48, 40, torch.bfloat16, "separate bias", device)
    made = made if function is gated_linear else of_mlp(made, 24)
    counter = CompileCounterWithBackend("aot_eager")

    def call(x: Tensor) -> Tensor:
        y: Tensor = function(**{**made, "x": x}, activation="silu", impl=device)
        return y * 2

    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    inputs = [torch.randn(rows, 48).to(device, torch.bfloat16) for rows in (4, 7, 2)]
    with torch.no_grad():
        expected = by_python(lambda: [call(x) for x in inputs])
        for x in inputs:
            compiled(x)
        past_python()
        for x, y in zip(inputs, expected, strict=True):
            assert_bits(compiled(x), y)
    assert counter.frame_count == 1


@each_device
@pytest.mark.parametrize("function", [gated_linear, gated_mlp])
def test_compiled_training_has_the_gradients_of_python(
    function: Any, device: str, past_python: Callable[[], None]
) -> None:
    """The unit's by C++; behind a down projection by the Python operator."""
    torch._dynamo.reset()
    made = operands((6,), 48, 40, torch.bfloat16, "separate bias", device)
    made = requiring(made if function is gated_linear else of_mlp(made, 24))
    upstream = torch.randn(6, 40 if function is gated_linear else 24).to(device, torch.bfloat16)
    options = {"activation": "silu", "impl": device}
    expected = by_python(trained, made, upstream, function, **options)
    compiled = torch.compile(lambda **tensors: function(**tensors, **options), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for ours, theirs in zip(trained(made, upstream, compiled), expected, strict=True):
            assert_bits(ours, theirs)
        if function is gated_linear:
            past_python()


@each_device
def test_gradients_are_recorded(device: str, past_python: Callable[[], None]) -> None:
    """By Python, if a tensor requires them; where they are off, past it."""
    made = operands((5,), 48, 40, torch.bfloat16, "stacked bias", device)
    arguments = given(made, impl=device)
    results("gated_linear", *arguments)
    for place in (0, 1, 3):
        leaf = arguments[place].clone().requires_grad_()
        asked = *arguments[:place], leaf, *arguments[place + 1 :]
        y = _op.op_gated_linear(*asked)
        assert y.requires_grad
        y.float().square().sum().backward()
        reference = leaf.detach().clone().requires_grad_()
        tensors = *arguments[:place], reference, *arguments[place + 1 : 5]
        expected = gated_linear(tensors[0], tensors[1], tensors[3], activation="silu", impl=device)
        expected.float().square().sum().backward()
        assert_bits(leaf.grad, reference.grad)
    past_python()
    with torch.no_grad():
        assert not _op.op_gated_linear(*asked).requires_grad
    with torch.inference_mode():
        assert _op.op_gated_linear(*asked).is_inference()


ODD: dict[str, Callable[[], dict[str, Any]]] = {
    "a subclass": lambda: {"x": X.as_subclass(Named)},
    "float64": lambda: {"x": X.double(), "weight": W.double(), "bias": B.double()},
    "no rows": lambda: {"x": X[:0]},
    "strided features": lambda: {"x": torch.randn(3, 16)[:, ::2]},
    "rows in two dimensions": lambda: {"x": torch.randn(2, 3, 8)},
    "a strided bias": lambda: {"bias": torch.randn(24)[::2]},
    "a strided weight": lambda: {"weight": torch.randn(8, 12).T},
    "a weight in three dimensions": lambda: {"weight": W.view(2, 6, 8)},
    "interleaved": lambda: {"spec": "silu/interleaved/value_first"},
    "the reference": lambda: {"impl": "reference"},
}


@each_operator
@pytest.mark.parametrize("odd", ODD)
def test_odd_calls_are_pythons(odd: str, name: str) -> None:
    made = {"x": X, "weight": W, "bias": B, **ODD[odd]()}
    *tensors, spec, impl = given(made)
    arguments = *tensors, made.get("spec", spec), made.get("impl", impl)
    for ours, theirs in zip(results(name, *arguments), by_python(results, name, *arguments), strict=True):
        assert_bits(ours, theirs)
        assert type(ours) is type(theirs) and ours.stride() == theirs.stride()


@each_operator
@pytest.mark.parametrize("spec", ["", "/", "silu", "silu/stacked", "silu/value_first", "silu/stacked/", "Silu/stacked/value_first", "silu/separate/x/value_first", "gate_first"])  # fmt: skip
def test_a_spec_that_is_none_is_pythons_to_name(spec: str, name: str) -> None:
    with pytest.raises(KeyError, match=repr(spec)):
        OPERATORS[name](X, W, None, None, None, spec, "cpu")


@each_operator
def test_another_impl_is_pythons_to_name(name: str) -> None:
    with pytest.raises(ValueError, match="gated_linear: impl must "):
        OPERATORS[name](X, W, None, None, None, "silu/stacked/value_first", "cuda")


def test_threads_call_at_once() -> None:
    arguments = given(operands((70,), 32, 56, torch.float32, "stacked bias"))
    expected = results("gated_linear_preact", *arguments)

    def work(_: int) -> None:
        for _ in range(100):
            for ours, theirs in zip(results("gated_linear_preact", *arguments), expected, strict=True):
                assert_bits(ours, theirs)

    in_threads(work)


FRESH = """
import torch, fusewise
from fusewise.ops.gated_linear import _host, _op
def in_cpp(): return "operators.h" in torch._C._dispatch_dump("fusewise::gated_linear")
x, weight = torch.randn(4, 8), torch.randn(12, 8)
print(in_cpp(), end=" ")
y = torch.ops.fusewise.gated_linear(x, weight, None, None, None, "silu/stacked/value_first", "reference")
_host.extension()
print(in_cpp(), end=" ")
z = torch.ops.fusewise.gated_linear(x, weight, None, None, None, "silu/stacked/value_first", "cpu")
print(torch.allclose(y, z, atol=1e-5), end=" ")
_host.extension.cache_clear()
_host.extension()
print(torch.equal(z, torch.ops.fusewise.gated_linear(x, weight, None, None, None, "silu/stacked/value_first", "cpu")))
"""


def test_they_are_registered_once_the_extension_is_there() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120, env=os.environ)
    assert (done.returncode, done.stdout) == (0, "False True True True\n"), done.stderr
    assert "Overriding" not in done.stderr


@pytest.mark.gpu
def test_on_the_current_stream_and_in_a_graph(past_python: Callable[[], None]) -> None:
    arguments = given(operands((64,), 512, 1024, torch.bfloat16, "stacked bias", "cuda"), impl="cuda")
    expected = {name: [results(name, *arguments), results(name, *arguments)][1] for name in OPERATORS}
    past_python()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        found = {name: results(name, *arguments) for name in OPERATORS}
    for t in (t for ys in found.values() for t in ys):
        t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = arguments[0].clone()
        after = {name: results(name, late, *arguments[1:]) for name in OPERATORS}
    stream.synchronize()
    for name, theirs in expected.items():
        for ours in (found[name], after[name]):
            assert all(map(torch.equal, ours, theirs))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_compiled_by_inductor_on_a_gpu(mode: str, past_python: Callable[[], None]) -> None:
    torch._dynamo.reset()
    made = operands((32,), 256, 512, torch.bfloat16, "separate bias", "cuda")
    compiled = torch.compile(lambda x: gated_linear(**{**made, "x": x * 2}, activation="silu", impl="cuda") + 1, fullgraph=True, mode=mode)  # fmt: skip
    with torch.no_grad():
        expected = gated_linear(**{**made, "x": made["x"] * 2}, activation="silu", impl="cuda") + 1
        for _ in range(2):
            compiled(made["x"])
        past_python()
        for _ in range(3):
            assert_bits(compiled(made["x"]).clone(), expected)
