"""The elementwise gate alone: values and gradients against float64, and autograd support."""

from __future__ import annotations

import itertools
import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusewise.ops.gated_linear import _gate
from fusewise.ops.gated_linear._gate import gate, stacked_gate, stacked_gate_into, stacked_gradient
from fusewise.ops.gated_linear._problem import ACTIVATIONS

# numpy warnings in the interpreter: exponentials overflow on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = ["triton"] if INTERPRETER else list(_gate.choice.names)
MARKS = [pytest.mark.interpreter] if INTERPRETER else []
IMPLS = [
    pytest.param(name, marks=MARKS) for name in NAMES if _gate.choice.unavailable(name, DEVICE, torch.float32) is None
]

ACT: dict[str, Any] = {
    "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh"), "gelu": functional.gelu, "silu": functional.silu,
    "relu": functional.relu, "sigmoid": torch.sigmoid, "identity": lambda g: g,
}  # fmt: skip


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(shape)).to(DEVICE, dtype)


def outcome(of: Any, leaves: Any, dy: Tensor) -> list[Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y = of(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_rounded_once(found: list[Tensor], truth: list[Tensor], u: Tensor, g: Tensor, dy: Tensor) -> None:
    """Check y, du and dg against float64 within one rounding to their dtype (truncation in Triton's interpreter) and eight
    float32 eps of the product of their factors, gates and slopes counted as at least one."""
    gates = g.double().abs().clamp(min=1)
    sizes = (u.double() * gates, dy.double() * gates, dy.double() * u.double() * gates)
    for result, true, size in zip(found, truth, sizes, strict=True):
        info = torch.finfo(result.dtype)
        unit = info.eps * (2 if INTERPRETER and result.dtype == torch.bfloat16 else 1)
        allowed = 0.51 * unit * true.abs() + 8 * torch.finfo(torch.float32).eps * size.abs() + info.tiny * info.eps
        excess = ((result.double() - true).abs() / allowed).max()
        assert excess <= 1, f"{float(excess)} of what is allowed"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("impl", IMPLS)
def test_values_and_gradients_match_float64(impl: str, activation: str) -> None:
    def eager(u: Tensor, g: Tensor) -> Tensor:
        return u * ACT[activation](g)

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, shape in itertools.product(dtypes, ((1, 1), (37,), (2, 13), (3, 2, 300), (70, 64))):
        u, g, dy = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
        truth = outcome(eager, (u.double(), g.double()), dy.double())
        assert_rounded_once(outcome(lambda u, g: gate(u, g, activation, impl=impl), (u, g), dy), truth, u, g, dy)
        for gate_first in (False, True):
            x = torch.cat((g, u) if gate_first else (u, g), -1)
            y, dx = outcome(lambda x, f=gate_first: stacked_gate(x, activation, gate_first=f, impl=impl), (x,), dy)
            halves = dx.chunk(2, -1)
            assert_rounded_once([y, *(reversed(halves) if gate_first else halves)], truth, u, g, dy)
            assert torch.equal(stacked_gradient(dy, x, activation, gate_first=gate_first, impl=impl), dx)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_into_a_part_of_a_tensor(impl: str, dtype: torch.dtype) -> None:
    for rows, features, first in ((7, 24, 0), (7, 24, 3), (3, 300, 8), (1, 5, 1), (0, 4, 0)):
        x = randn(rows, 2 * features, dtype=dtype)
        around = torch.full((rows, features + 11), 7.0, dtype=dtype, device=DEVICE)
        out = around[:, first : first + features]
        assert stacked_gate_into(x, out, "silu", gate_first=True, impl=impl) is out
        assert torch.equal(out, stacked_gate(x, "silu", gate_first=True, impl=impl))
        assert (around[:, :first] == 7).all() and (around[:, first + features :] == 7).all()
    x, out = randn(5, 2, dtype=dtype), randn(2, 5, dtype=dtype).T[:, :1]  # one feature of any stride
    stacked_gate_into(x, out, "silu", gate_first=True, impl=impl)
    assert torch.equal(out, stacked_gate(x, "silu", gate_first=True, impl=impl))


def test_inference_tensors_are_written_in_inference_mode_only() -> None:
    x = randn(3, 8)
    with torch.inference_mode():
        out = torch.empty(3, 4, device=DEVICE)
        assert torch.equal(stacked_gate_into(x, out, "silu", gate_first=True), stacked_gate(x, "silu", gate_first=True))
    with pytest.raises(
        RuntimeError, match="out must not be an inference tensor outside inference mode, got one; clone out"
    ):
        stacked_gate_into(x, out, "silu", gate_first=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_any_strides_and_no_rows(impl: str) -> None:
    wide = randn(6, 5, 3 * 16)
    views = [
        (wide[..., :16], wide[..., 16:32]),  # equal row strides
        (wide[..., :16], randn(6, 5, 16)),  # different row strides
        (randn(6, 5, 16), wide[..., :16]),
        (randn(16, 6).T, randn(6, 16)),  # strided features
        (randn(1, 16).expand(6, 16), randn(6, 16)),
        (randn(0, 16), randn(0, 16)),
        (randn(16), randn(16)),
    ]
    for u, g in views:
        for dy in (randn(*u.shape), torch.ones((), device=DEVICE).expand(u.shape)):
            found = outcome(lambda *a: gate(*a, "silu", impl=impl), (u, g), dy)
            torch.testing.assert_close(found, outcome(lambda u, g: u * functional.silu(g), (u, g), dy))
    x, dy = wide[:, :3, 8:40], randn(6, 3, 16)
    found = outcome(lambda x: stacked_gate(x, "silu", gate_first=True, impl=impl), (x,), dy)
    torch.testing.assert_close(found, outcome(lambda x: functional.silu(x[..., :16]) * x[..., 16:], (x,), dy))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # raised by torch's forward-mode AD
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_of_any_order_and_transforms(activation: str) -> None:
    u, g = (t.double().requires_grad_() for t in (randn(3, 4), randn(3, 4)))
    x = randn(3, 8).double().requires_grad_()

    def both(u: Tensor, g: Tensor) -> Tensor:
        return gate(u, g, activation)

    for leaves in ((u, g), (u.detach(), g), (u, g.detach())):
        assert torch.autograd.gradcheck(both, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(both, (u, g))
    if not INTERPRETER:
        each = torch.func.vmap(both)(u.detach(), g.detach())
        torch.testing.assert_close(each, both(u, g).detach())
    for gate_first in (False, True):

        def stacked(x: Tensor, gate_first: bool = gate_first) -> Tensor:
            return stacked_gate(x, activation, gate_first=gate_first)

        def gradient(dy: Tensor, x: Tensor, gate_first: bool = gate_first) -> Tensor:
            return stacked_gradient(dy, x, activation, gate_first=gate_first)

        assert torch.autograd.gradgradcheck(stacked, (x,))
        for leaves in ((u, x), (u.detach(), x), (u, x.detach())):
            assert torch.autograd.gradcheck(gradient, leaves)
        assert torch.autograd.gradgradcheck(gradient, (u, x))
        for dtype in (torch.float64, torch.bfloat16) if not INTERPRETER else ():
            whole, dy = (
                x.detach().to(dtype),
                u.detach().to(dtype),
            )  # without gradients: by the operators, not the formula
            torch.testing.assert_close(torch.func.vmap(stacked)(whole), stacked(whole))
            out = torch.empty_like(dy)
            into = partial(stacked_gate_into, activation=activation, gate_first=gate_first)
            torch.func.vmap(into)(whole, out)
            torch.testing.assert_close(out, stacked(whole))
            torch.testing.assert_close(torch.func.vmap(gradient)(dy, whole), gradient(dy, whole))
            _, tangent = torch.func.jvp(gradient, (dy, whole), (dy, torch.zeros_like(whole)))
            torch.testing.assert_close(tangent, gradient(dy, whole))  # which is linear in dy


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivatives_are_as_accurate_as_those_of_eager(activation: str) -> None:
    def derivatives(act: Any, dtype: torch.dtype) -> list[Tensor]:
        g = torch.linspace(-20, 20, 4001, device=DEVICE, dtype=dtype).requires_grad_()
        (first,) = torch.autograd.grad(act(g).sum(), g, create_graph=True)
        if not first.requires_grad:  # of a linear function
            return [first]
        return [first.detach(), torch.autograd.grad(first.sum(), g)[0]]

    def ours(g: Tensor) -> Tensor:
        return gate(torch.ones_like(g), g, activation)

    truth = derivatives(ACT[activation], torch.float64)
    found, usual = (derivatives(act, torch.float32) for act in (ours, ACT[activation]))
    for result, eager, true in zip(found, usual, truth, strict=False):
        error, of_eager = (float((x.double() - true).abs().max()) for x in (result, eager))
        assert error <= 2 * of_eager + torch.finfo(torch.float32).eps * float(true.abs().max())


def test_inputs_are_saved_as_they_are_and_never_written_to() -> None:
    u, g = randn(6, 16).requires_grad_(), randn(6, 16).requires_grad_()
    before, kept = [u.clone(), g.clone()], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        y = gate(u, g, "gelu_tanh")
    assert set(kept) == {u.data_ptr(), g.data_ptr()}
    dy = torch.randn_like(y)
    runs = [torch.autograd.grad(y, (u, g), dy, retain_graph=keep) for keep in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert torch.equal(u, before[0]) and torch.equal(g, before[1])


def test_a_hook_may_bring_back_another_dtype() -> None:
    """Eager code promotes it."""
    u, g = (randn(6, 16, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    dy = torch.randn_like(u)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.float(), lambda t: t):
        y = gate(u, g, "silu")
    expected = torch.autograd.grad(gate(u, g, "silu"), (u, g), dy)
    assert all(map(torch.equal, torch.autograd.grad(y, (u, g), dy), expected))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo
def test_compiles_whole_and_once_for_all_row_counts() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda u, x: gate(u, stacked_gate(x, "silu", gate_first=True), "gelu").sum(), fullgraph=True,
        backend="aot_eager", dynamic=True,
    )  # fmt: skip
    torch._dynamo.utils.counters.clear()
    for rows in (5, 6, 40):
        u, x = randn(2, rows, 16).requires_grad_(), randn(2, rows, 32).requires_grad_()
        inner = functional.silu(x[..., :16]) * x[..., 16:]
        usual = torch.autograd.grad((u * functional.gelu(inner)).sum(), (u, x))
        torch.testing.assert_close(torch.autograd.grad(compiled(u, x), (u, x)), usual, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_writes_into_a_part_of_an_input_with_a_storage_offset(backend: str) -> None:
    """Torch 2.13 takes the storage offset of a part for its start within the graph's input."""
    torch._dynamo.reset()
    x, room = randn(6, 16), randn(3, 6, 24)
    expected = room.clone()
    expected[1, :, 8:16] = stacked_gate(x, "silu", gate_first=True)

    def f(x: Tensor, room: Tensor) -> None:
        stacked_gate_into(x, room[:, 8:16], "silu", gate_first=True)

    torch.compile(f, fullgraph=True, backend=backend)(x, room[1])
    torch.testing.assert_close(room, expected)


@pytest.mark.parametrize("text", ["silu/separate/value_first", "relu/stacked/gate_first"])
def test_opcheck(text: str) -> None:
    pair = (randn(5, 8), randn(5, 8)) if "separate" in text else (randn(5, 16), None)
    for op, args in (
        (torch.ops.fusewise.gate.default, (*pair, text, "auto")),
        (torch.ops.fusewise.gate_grad.default, (randn(5, 8), *pair, text, "auto")),
    ):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


def test_mistakes() -> None:
    u = randn(3, 4)
    for call, error, match in (
        (lambda: gate(u, u.half(), "silu"), TypeError, "gate: gate must have the dtype of value, float32, got float16"),
        (lambda: gate(u, u[:2], "silu", op="f"), ValueError, r"f: gate must have the shape of value, \(3, 4\), got \(2, 4\)"),
        (lambda: gate(u, u, "swish"), ValueError, "gate: activation must be one of gelu_tanh, .*, got 'swish'"),
        (lambda: gate(u.int(), u, "silu"), TypeError, "gate: value must have dtype float32, .*, got int32"),
        (lambda: gate(None, u, "silu"), TypeError, "gate: value must be a torch.Tensor, got NoneType"),
        (lambda: gate(u, None, "silu"), TypeError, "gate: gate must be a torch.Tensor, got NoneType"),
        (lambda: gate(u, u.to("meta"), "silu"), ValueError, "gate: gate must have the device of value, .*, got meta"),
        (lambda: stacked_gate_into(u, None, "silu", gate_first=True), TypeError, "out must be a torch.Tensor, got NoneType"),
        (lambda: gate(u[:, :0], u, "silu"), ValueError, r"gate: value must have at least one feature"),
        (lambda: stacked_gate(randn(3, 5), "silu", gate_first=True), ValueError, "x must have an even last dimension"),
        (lambda: stacked_gradient(u[:, :1], u[:, :3], "silu", gate_first=True), ValueError, "x must have an even last dimension"),
        (lambda: stacked_gradient(u, u, "silu", gate_first=True), ValueError, r"dy must have shape \(3, 2\)"),
        (lambda: stacked_gradient(u[:, :2].half(), u, "silu", gate_first=True), TypeError, "dtype and device of x .*, got .* float16"),
        (lambda: stacked_gradient(u[:, :2].to("meta"), u, "silu", gate_first=True), ValueError, "device of x .*, got .* meta"),
        (lambda: stacked_gradient(None, u, "silu", gate_first=True), TypeError, "dy must be a torch.Tensor, got NoneType"),
        (lambda: gate(u.double(), u.double(), "silu", impl="cpu"), ValueError, "impl must be able to serve the tensors"),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            call()


@pytest.mark.parametrize("impl", IMPLS)
def test_an_exported_gate_takes_other_strides_than_it_was_traced_with(impl: str) -> None:
    class Both(torch.nn.Module):
        def forward(self, u: Tensor, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return gate(u, g, "silu", impl=impl), stacked_gate(x, "silu", gate_first=False, impl=impl)

    traced = randn(6, 6), randn(6, 6), randn(6, 4)
    exported = torch.export.export(Both(), traced).module()
    given = randn(6, 6).T, randn(6, 1).expand(6, 6), randn(4, 6).T
    torch.testing.assert_close(exported(*given), Both()(*given))
