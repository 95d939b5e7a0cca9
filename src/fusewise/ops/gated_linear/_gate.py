"""The gate on its own, y = u · act(g) elementwise, for products computed elsewhere: quantized or adapted projections,
and the compatibility functions for other libraries. Imports only torch.

    du = dy · act(g),   dg = dy · u · act'(g)

u and g are two tensors, or the halves of the last dimension of one. Only these inputs are saved for backward, and they
are never written to. Otherwise as in `api.gated_linear`: float32 arithmetic, one rounding, derivatives of every order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._choice import Choice
from .._common import (
    apply_function,
    check_one_of,
    compute_dtype,
    dtype_name,
    fail,
    restored,
    save_tensors,
    transforms_active,
    wants_formula,
)
from .._overlap import check_apart
from .._register import copies_wrongly, register, with_tail, without_tail
from . import _autograd, reference
from ._problem import ACTIVATIONS, Spec, rows, split_preact
from ._validate import check_features

# Each has `gate(u, g, y, activation)` and `gate_gradient_into(dy, u, g, du, dg, activation)` on (M, F) matrices with
# contiguous columns; u and g have the same row stride, and so have du and dg.
choice = Choice("gated_linear", ("triton", "cpu", "reference"))


def gate(
    value: Tensor,
    gate: Tensor,
    activation: str,
    *,
    op: str = "gate",
    impl: str = "auto",
    names: tuple[str, str] = ("value", "gate"),
) -> Tensor:
    """value · act(gate), (..., F) each, in their dtype; `op` and `names`, of value and gate, are for errors."""
    _check(op, names[0], value, activation)
    _check(op, names[1], gate, activation)
    for what, text in (("shape", tuple), ("dtype", dtype_name), ("device", str)):
        if getattr(gate, what) != getattr(value, what):
            wanted, got = text(getattr(value, what)), text(getattr(gate, what))
            error = TypeError if what == "dtype" else ValueError
            fail(op, names[1], f"have the {what} of {names[0]}, {wanted}", got, "match the two", error)
    return _apply(value, gate, Spec(activation, "separate"), impl)


def stacked_gate(
    x: Tensor, activation: str, *, gate_first: bool, op: str = "stacked_gate", impl: str = "auto", name: str = "x"
) -> Tensor:
    """The gate of x (..., 2F), which holds value and gate side by side: y (..., F). `name` is that of x in errors."""
    _check_stacked(op, name, x, activation)
    return _apply(x, None, Spec(activation, "stacked", gate_first), impl)


def stacked_gate_into(
    x: Tensor,
    out: Tensor,
    activation: str,
    *,
    gate_first: bool,
    op: str = "stacked_gate",
    impl: str = "auto",
    name: str = "x",
) -> Tensor:
    """`stacked_gate` written to `out` (..., F), which may have strided rows; returns it. Records no gradient."""
    _check_stacked(op, name, x, activation)
    check_features(op, "out", out)
    _check_half(op, "out", out, name, x, "allocate it so, or leave it out")
    if _autograd.needs_autograd(out, x):
        fail(op, "out", "not be given where a gradient is recorded", "one that is", "use torch.no_grad(), or no out")
    if transforms_active() or copies_wrongly():
        return out.copy_(stacked_gate(x, activation, gate_first=gate_first, op=op, impl=impl, name=name))
    if not torch.compiler.is_compiling():  # the compiler reads inputs before it writes outputs
        check_apart(op, {"out": out}, {name: x})
        if out.is_inference() and not torch.is_inference_mode_enabled():
            fail(op, "out", "not be an inference tensor outside inference mode", "one", "clone out", RuntimeError)
    try:
        y = out.view(-1, out.shape[-1])
    except RuntimeError:
        y = out
    if y.dim() != 2 or (y.stride(1) != 1 and y.shape[1] > 1):
        contract = "have rows of contiguous features, each as far from the next"
        fail(op, "out", contract, f"strides {tuple(out.stride())}", "pass a contiguous tensor")
    op_gate_out(rows(x), None, Spec(activation, "stacked", gate_first).encode(), impl, with_tail(y))
    return out


def stacked_gradient(
    dy: Tensor,
    x: Tensor,
    activation: str,
    *,
    gate_first: bool,
    op: str = "stacked_gradient",
    impl: str = "auto",
    names: tuple[str, str] = ("dy", "x"),
) -> Tensor:
    """The gradient of `stacked_gate` for dy (..., F), with the shape of x (..., 2F); by the formula if it is
    differentiated."""
    of_y, of_x = names
    _check_stacked(op, of_x, x, activation)
    _check(op, of_y, dy, activation)
    _check_half(op, of_y, dy, of_x, x, "pass the gradient of y")
    spec = Spec(activation, "stacked", gate_first)
    if transforms_active() or _autograd.needs_autograd(dy, x):
        return _differentiable(dy, x, None, spec)[0]
    dx: Tensor = op_gate_grad(rows(dy), rows(x), None, spec.encode(), impl)[0]
    return dx.view(x.shape)


def _check_stacked(op: str, name: str, x: Any, activation: str) -> None:
    _check(op, name, x, activation)
    if x.shape[-1] % 2:
        fail(op, name, "have an even last dimension, 2F", tuple(x.shape), "stack the value and the gate")


def _check_half(op: str, name: str, y: Tensor, of_x: str, x: Tensor, fix: str) -> None:
    """y must be like the gate of x (..., 2F)."""
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    if y.shape != shape or y.dtype != x.dtype or y.device != x.device:
        wanted = f"have shape {shape}, and dtype and device of {of_x} ({dtype_name(x.dtype)}, {x.device})"
        error = ValueError if y.dtype == x.dtype else TypeError
        fail(op, name, wanted, f"{tuple(y.shape)}, {dtype_name(y.dtype)}, {y.device}", fix, error)


def _check(op: str, name: str, x: Any, activation: str) -> None:
    check_one_of(op, "activation", activation, ACTIVATIONS)
    check_features(op, name, x)


def _apply(first: Tensor, second: Tensor | None, spec: Spec, impl: str) -> Tensor:
    if transforms_active():
        u, g = _halves(first, second, spec)
        return _formula(u, g, spec)
    text = spec.encode()
    if _autograd.needs_autograd(first, second):
        y: Tensor = apply_function(_Gate, first, second, text, impl)
        return y
    return _autograd.shaped(op_gate(rows(first), _rows(second), text, impl), first)


class _Gate(torch.autograd.Function):
    """y of u and g, two tensors or the halves of one."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor | None, text: str, impl: str) -> Tensor:
        save_tensors(ctx, (first, second))
        ctx.rest = text, impl
        return _autograd.shaped(op_gate(rows(first), _rows(second), text, impl), first)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        first, second = restored("gate", ctx)
        text, impl = ctx.rest
        if wants_formula(dy):
            return *_differentiable(dy, first, second, Spec.decode(text)), None, None
        dfirst, dsecond = op_gate_grad(rows(dy), rows(first), _rows(second), text, impl)
        return dfirst.view(first.shape), None if second is None else dsecond.view(second.shape), None, None


def _formula(u: Tensor, g: Tensor, spec: Spec) -> Tensor:
    to = compute_dtype(u)
    return (u.to(to) * reference.ACTIVATE[spec.activation](g.to(to))).to(u.dtype)


def _differentiable(dy: Tensor, first: Tensor, second: Tensor | None, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """The gradients in plain torch, which can be differentiated again."""
    to = compute_dtype(first)
    u, g = (half.to(to) for half in _halves(first, second, spec))
    du, dg = (part.to(first.dtype) for part in reference.gate_gradient(dy.to(to), u, g, spec.activation))
    if second is not None:
        return du, dg
    return torch.cat((dg, du) if spec.gate_first else (du, dg), -1), None


def _halves(first: Tensor, second: Tensor | None, spec: Spec) -> tuple[Tensor, Tensor]:
    """u and g."""
    if second is not None:
        return first, second
    left, right = first.chunk(2, -1)
    return (right, left) if spec.gate_first else (left, right)


def _rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else rows(x)


def _matrices(first: Tensor, second: Tensor | None, spec: Spec) -> tuple[Tensor, Tensor]:
    """u and g with contiguous columns (an exported program may receive others) and the same row stride."""
    first, second = rows(first), _rows(second)
    if second is None:
        return split_preact(first, spec)
    if first.stride(0) == second.stride(0):
        return first, second
    return first.contiguous(), second.contiguous()


def _gate_op(first: Tensor, second: Tensor | None, text: str, impl: str) -> Tensor:
    y = _fake_gate(first, second, text, impl)
    _gate_out(first, second, text, impl, y)
    return y


def _gate_out(first: Tensor, second: Tensor | None, text: str, impl: str, y: Tensor) -> None:
    spec = Spec.decode(text)
    u, g = _matrices(first, second, spec)
    choice.serving(impl, u.device.type, u.dtype).gate(u, g, y, spec.activation)


def _gate_out_op(first: Tensor, second: Tensor | None, text: str, impl: str, y: Tensor) -> None:
    _gate_out(first, second, text, impl, without_tail(y, 2))
    if not y.is_inference():  # autograd does not see writes through a pointer
        torch.autograd.graph.increment_version(y)


def _new_gradients(first: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor]:
    """Memory for the gradients: of one matrix with both halves, and an empty tensor; or of u and g."""
    return first.new_empty(first.shape), first.new_empty((0,) if second is None else second.shape)


def _gate_grad_op(dy: Tensor, first: Tensor, second: Tensor | None, text: str, impl: str) -> tuple[Tensor, Tensor]:
    spec = Spec.decode(text)
    u, g = _matrices(first, second, spec)
    gradients = _new_gradients(first, second)
    du, dg = split_preact(gradients[0], spec) if second is None else gradients
    choice.serving(impl, u.device.type, u.dtype).gate_gradient_into(dy, u, g, du, dg, spec.activation)
    return gradients


def _fake_gate(first: Tensor, second: Tensor | None, text: str, impl: str) -> Tensor:
    return first.new_empty(first.shape if second is not None else (first.shape[0], first.shape[1] // 2))


def _fake_gate_grad(dy: Tensor, first: Tensor, second: Tensor | None, text: str, impl: str) -> tuple[Tensor, Tensor]:
    return _new_gradients(first, second)


_ARGUMENTS = "Tensor first, Tensor? second, str spec, str impl"
op_gate = register(
    f"gate({_ARGUMENTS}) -> Tensor", _gate_op, _fake_gate, recorded=lambda *args: apply_function(_Gate, *args)
)
op_gate_out = register(f"gate_out({_ARGUMENTS}, Tensor(a!) y) -> ()", _gate_out_op, lambda *args: None)
op_gate_grad = register(f"gate_grad(Tensor dy, {_ARGUMENTS}) -> (Tensor, Tensor)", _gate_grad_op, _fake_gate_grad)
