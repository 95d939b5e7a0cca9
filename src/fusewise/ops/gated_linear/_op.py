"""Registered operators of the gated linear unit and their dispatch to an implementation.

Imports only torch. The operators take a validated call on x (M, D) and know nothing of autograd, which wraps them
(`_autograd.py`), so that a call without gradients crosses a single operator boundary:

    gated_linear                 y only: kernels that fuse it allocate nothing else
    gated_linear_preact(_into)   y and both pre-activations (into two given matrices)
    gated_linear_grad(_)         dy and the pre-activations -> their gradient and the bias gradient (in place)
    gated_linear_recompute_grad(_into)  dy and x -> the same, from a product that is never stored
    gated_linear_down_grad(_)    the gradient of a down projection's output -> y, and the same

The rest of the backward, dx and dW from the gradient of the pre-activations, is plain matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._choice import Choice
from .._common import apply_function, compute_dtype
from .._register import register
from . import _host, reference
from ._problem import Halves, Preact, Spec, new_preact, rows, split_preact

# Schema of the weights of a call:
#   weight, bias            both halves in one tensor according to `spec`, or the value's if there is a weight_gate
#   weight_gate, bias_gate  the gate's
#   spec                    `Spec.encode()`
#   impl                    the name of an implementation, or "auto"
_WEIGHTS = "Tensor weight, Tensor? weight_gate, Tensor? bias, Tensor? bias_gate, str spec, str impl"

# In order of preference. Each has the four functions of `reference.py`: forward, gradient, recompute_gradient,
# down_gradient; they write to given tensors. `dpreact` may be `preact` itself; `dbias` is (2, F), value first, in the
# compute dtype. An implementation with `lacks` leaves some calls of a function to the one named by its
# `otherwise`; one with `refuses` is asked whether it takes the matrices of a call.
IMPLEMENTATIONS = ("cuda", "gluon", "triton", "cpu", "reference")
choice = Choice("gated_linear", IMPLEMENTATIONS)
implementation, unavailable = choice.implementation, choice.unavailable


def serving(impl: str, kernel: str, spec: Spec, hidden: int, x: Tensor, *others: Tensor) -> Any:
    """The module that serves a call with these matrices and F = `hidden`. `kernel`: "y" or "preact", which keeps the pre-activations;
    "gradient", which recomputes them; "down", behind a down projection; or "gate", the gradient without a product."""
    device_type, dtype = x.device.type, x.dtype
    by_choice = impl == "auto"
    for name in choice.able(device_type, dtype) if by_choice else (impl,):
        module = choice.serving(name, device_type, dtype)
        refuses = getattr(module, "refuses", None)
        if refuses is None:
            return module
        reason = refuses(hidden, (x, *others), spec.activation, kernel, by_choice=by_choice)
        if reason is None:
            return module
        if not by_choice:
            raise choice.refusal(impl, reason)
    raise AssertionError("the reference refuses nothing")


def having(function: str, module: Any, hidden: int, x: Tensor, *others: Tensor) -> Any:
    """The module, or the one it names if it lacks the function for these matrices."""
    lacks = getattr(module, "lacks", None)
    if lacks is None or not lacks(function, hidden, x, *others):
        return module
    return choice.serving(module.otherwise(x.dtype), x.device.type, x.dtype)


def _new_y(x: Tensor, halves: Halves) -> Tensor:
    return x.new_empty((x.shape[0], halves.value.shape[0]))


def new_dbias(x: Tensor, hidden: int, wanted: bool) -> Tensor:
    """Memory for the (2, F) bias gradient; empty if it is not wanted."""
    return x.new_empty((2, hidden) if wanted else (0,), dtype=compute_dtype(x))


def _readable(
    weight: Tensor, weight_gate: Tensor | None, bias: Tensor | None, bias_gate: Tensor | None
) -> tuple[Any, ...]:
    """The weights of a call with the strides that validation demands: an exported program, a `torch.jit` trace or a direct call of an
    operator may have others."""
    biases = (None if b is None else b.contiguous() for b in (bias, bias_gate))
    return rows(weight), None if weight_gate is None else rows(weight_gate), *biases


def _gated_linear(x: Tensor, *weights: Any) -> Tensor:
    *given, text, impl = weights
    spec = Spec.decode(text)
    x, halves = rows(x), Halves.of(spec, *_readable(*given))
    y = _new_y(x, halves)
    with reference.exact(x):
        serving(impl, "y", spec, y.shape[1], x, halves.value, halves.gate).forward(x, halves, spec, y, None)
    _host.remember(_host.ONLY_Y, *_host.arguments_of(x, given, spec, impl))
    return y


def keeping(impl: str, spec: Spec, x: Tensor, halves: Halves) -> Any:
    """The module that serves a forward which keeps the pre-activations."""
    hidden = halves.value.shape[0]
    return having("forward", serving(impl, "preact", spec, hidden, x, halves.value, halves.gate), hidden, x)


def _gated_linear_preact(x: Tensor, *weights: Any) -> tuple[Tensor, Tensor]:
    *tensors, text, impl = weights
    spec = Spec.decode(text)
    x, halves = rows(x), Halves.of(spec, *_readable(*tensors))
    y = _new_y(x, halves)
    preact = new_preact(x, halves.value.shape[0], spec)
    with reference.exact(x):
        keeping(impl, spec, x, halves).forward(x, halves, spec, y, preact)
    _host.remember(_host.KEEPING, *_host.arguments_of(x, tensors, spec, impl))
    return y, preact


def _gated_linear_preact_into(x: Tensor, *rest: Any) -> Tensor:
    *tensors, text, impl, value, gate = rest
    spec = Spec.decode(text)
    halves = Halves.of(spec, *tensors)
    y = _new_y(x, halves)
    with reference.exact(x):
        keeping(impl, spec, x, halves).forward(x, halves, spec, y, (value, gate))
    return y


def taking_gradient(impl: str, spec: Spec, dy: Tensor, preact: Preact, dpreact: Preact) -> Any:
    """The module that serves the gradient of the gate. That is elementwise: a named implementation serves it even if it refuses
    the products."""
    hidden = dy.shape[1]
    by_choice = impl == "auto"
    module = serving(impl, "gate", spec, hidden, dy) if by_choice else choice.serving(impl, dy.device.type, dy.dtype)
    return having("gradient", module, hidden, dy, *split_preact(preact, spec), *split_preact(dpreact, spec))


def _grad(dy: Tensor, preact: Tensor, text: str, impl: str, bias: bool) -> tuple[Tensor, Tensor]:
    dy, preact = rows(dy), preact.contiguous()
    dpreact = torch.empty_like(preact)
    dbias = _grad_into(dy, preact, dpreact, text, impl, bias)
    _host.remember(_host.GRADIENT, dy, preact, text, impl, bias)
    return dpreact, dbias


def _grad_(dy: Tensor, value: Tensor, gate: Tensor, text: str, impl: str, bias: bool) -> Tensor:
    return _grad_into(dy, (value, gate), (value, gate), text, impl, bias)


def _grad_into(dy: Tensor, preact: Preact, dpreact: Preact, text: str, impl: str, bias: bool) -> Tensor:
    spec = Spec.decode(text)
    dbias = new_dbias(dy, dy.shape[1], bias)
    module = taking_gradient(impl, spec, dy, preact, dpreact)
    module.gradient(dy, preact, dpreact, spec, dbias if bias else None)
    return dbias


def _recompute_grad(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dy, x, weights = rows(dy), rows(x), _readable(*rest[:4])
    dpreact = new_preact(x, dy.shape[1], Spec.decode(rest[4]))
    return dpreact, _recompute_into(dpreact, dy, x, *weights, *rest[4:])


def _recompute_grad_into(dy: Tensor, x: Tensor, *rest: Any) -> Tensor:
    *others, value, gate = rest
    return _recompute_into((value, gate), dy, x, *others)


def _recompute_into(dpreact: Preact, dy: Tensor, x: Tensor, *rest: Any) -> Tensor:
    *tensors, text, impl, bias = rest
    spec = Spec.decode(text)
    halves = Halves.of(spec, *tensors)
    hidden = halves.value.shape[0]
    dbias = new_dbias(x, hidden, bias)
    with reference.exact(x):
        module = serving(impl, "gradient", spec, hidden, x, halves.value, halves.gate, dy)
        having("recompute_gradient", module, hidden, x).recompute_gradient(
            dy, x, halves, dpreact, spec, dbias if bias else None
        )
    return dbias


def taking_down_gradient(impl: str, spec: Spec, dz: Tensor, w_down: Tensor) -> Any:
    """The module that serves the same behind a down projection, and y."""
    hidden = w_down.shape[1]
    return having("down_gradient", serving(impl, "down", spec, hidden, dz, w_down), hidden, dz)


def _down_grad(
    dz: Tensor, w_down: Tensor, preact: Tensor, text: str, impl: str, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dz, w_down, preact = rows(dz), rows(w_down), preact.contiguous()
    dpreact = torch.empty_like(preact)
    return _down_grad_into(dz, w_down, preact, dpreact, text, impl, bias)


def _down_grad_(dz: Tensor, w_down: Tensor, preact: Tensor, text: str, impl: str, bias: bool) -> tuple[Tensor, Tensor]:
    y, _, dbias = _down_grad_into(dz, w_down, preact, preact, text, impl, bias)
    return y, dbias


def _down_grad_into(
    dz: Tensor, w_down: Tensor, preact: Tensor, dpreact: Tensor, text: str, impl: str, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    spec = Spec.decode(text)
    hidden = w_down.shape[1]
    y, dbias = dz.new_empty((dz.shape[0], hidden)), new_dbias(dz, hidden, bias)
    with reference.exact(dz):
        module = taking_down_gradient(impl, spec, dz, w_down)
        module.down_gradient(dz, w_down, preact, y, dpreact, spec, dbias if bias else None)
    return y, dpreact, dbias


def _fake_gated_linear(x: Tensor, *weights: Any) -> Tensor:
    return _new_y(x, Halves.of(Spec.decode(weights[4]), *weights[:4]))


def _fake_gated_linear_preact(x: Tensor, *weights: Any) -> tuple[Tensor, Tensor]:
    spec = Spec.decode(weights[4])
    y = _new_y(x, Halves.of(spec, *weights[:4]))
    return y, new_preact(x, y.shape[1], spec)


def _like(preact: Tensor) -> Tensor:
    return torch.empty_like(preact, memory_format=torch.contiguous_format)


def _fake_grad(dy: Tensor, preact: Tensor, text: str, impl: str, bias: bool) -> tuple[Tensor, Tensor]:
    return _like(preact), new_dbias(dy, dy.shape[1], bias)


def _fake_grad_(dy: Tensor, value: Tensor, gate: Tensor, text: str, impl: str, bias: bool) -> Tensor:
    return new_dbias(dy, dy.shape[1], bias)


def _fake_recompute_grad(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return new_preact(x, dy.shape[1], Spec.decode(rest[4])), new_dbias(x, dy.shape[1], rest[-1])


def _fake_recompute_grad_into(dy: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return new_dbias(x, dy.shape[1], rest[6])


def _fake_down_grad(
    dz: Tensor, w_down: Tensor, preact: Tensor, text: str, impl: str, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = w_down.shape[1]
    return dz.new_empty((dz.shape[0], hidden)), _like(preact), new_dbias(dz, hidden, bias)


def _fake_down_grad_(
    dz: Tensor, w_down: Tensor, preact: Tensor, text: str, impl: str, bias: bool
) -> tuple[Tensor, Tensor]:
    hidden = w_down.shape[1]
    return dz.new_empty((dz.shape[0], hidden)), new_dbias(dz, hidden, bias)


_GRAD = "str spec, str impl, bool bias"


def _recorded(x_MD: Tensor, *rest: Any) -> Any:
    from ._autograd import GatedLinear

    *weights, text, impl = rest
    return apply_function(GatedLinear, x_MD, *_readable(*weights), text, impl, "preact")


op_gated_linear = register(
    f"gated_linear(Tensor x, {_WEIGHTS}) -> Tensor", _gated_linear, _fake_gated_linear, recorded=_recorded
)
op_gated_linear_preact = register(
    f"gated_linear_preact(Tensor x, {_WEIGHTS}) -> (Tensor, Tensor)", _gated_linear_preact, _fake_gated_linear_preact
)
op_gated_linear_preact_into = register(
    f"gated_linear_preact_into(Tensor x, {_WEIGHTS}, Tensor(a!) value, Tensor(b!) gate) -> Tensor",
    _gated_linear_preact_into,
    _fake_gated_linear,
)
op_grad = register(f"gated_linear_grad(Tensor dy, Tensor preact, {_GRAD}) -> (Tensor, Tensor)", _grad, _fake_grad)
op_grad_ = register(
    f"gated_linear_grad_(Tensor dy, Tensor(a!) value, Tensor(b!) gate, {_GRAD}) -> Tensor", _grad_, _fake_grad_
)
op_recompute_grad = register(
    f"gated_linear_recompute_grad(Tensor dy, Tensor x, {_WEIGHTS}, bool bias_grad) -> (Tensor, Tensor)",
    _recompute_grad,
    _fake_recompute_grad,
)
op_recompute_grad_into = register(
    f"gated_linear_recompute_grad_into(Tensor dy, Tensor x, {_WEIGHTS}, bool bias_grad, Tensor(a!) value, Tensor(b!) gate) -> Tensor",
    _recompute_grad_into,
    _fake_recompute_grad_into,
)
op_down_grad = register(
    f"gated_linear_down_grad(Tensor dz, Tensor w_down, Tensor preact, {_GRAD}) -> (Tensor, Tensor, Tensor)",
    _down_grad,
    _fake_down_grad,
)
op_down_grad_ = register(
    f"gated_linear_down_grad_(Tensor dz, Tensor w_down, Tensor(a!) preact, {_GRAD}) -> (Tensor, Tensor)",
    _down_grad_,
    _fake_down_grad_,
)
