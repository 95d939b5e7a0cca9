"""Reference implementation of the gated linear unit in plain torch: differentiable, on any device, in float64 for float64.

    y = u · act(g),    u = x W_valueᵀ + b_value,    g = x W_gateᵀ + b_gate

and its gradient for dy:

    du = dy · act(g)        dx = du W_value + dg W_gate      dW_value = duᵀ x     db_value = Σ_M du
    dg = dy · u · act'(g)                                    dW_gate  = dgᵀ x     db_gate  = Σ_M dg

Everything in float32 (float64 for float64 tensors), rounded once at the end. Written for readability; every kernel is
tested against it. Shape legend as in `_problem.py`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .._common import compute_dtype
from ._problem import Halves, Preact, Spec, split_preact

#: act(g), by name.
ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh"),
    # erfc avoids cancellation for negative gates; functional.gelu may return NaN for +∞ on a CPU.
    "gelu": lambda g: 0.5 * g * torch.erfc(g * -math.sqrt(0.5)),
    "silu": functional.silu,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "identity": lambda g: g,
}


def formula(x: Tensor, halves: Halves, activation: str) -> Tensor:
    """y of x (..., D), in the dtype of x."""
    with exact(x):
        u, g = preactivations(x, halves)
        return (u * ACTIVATE[activation](g)).to(x.dtype)


def preactivations(x: Tensor, halves: Halves) -> tuple[Tensor, Tensor]:
    """u and g of x (..., D), in the compute dtype."""
    to = compute_dtype(x)

    def linear(weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x.to(to), weight.to(to), None if bias is None else bias.to(to))

    return linear(halves.value, halves.value_bias), linear(halves.gate, halves.gate_bias)


def derivative(g: Tensor, activation: str) -> Tensor:
    """act'(g), differentiable in turn."""
    if activation == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * g**2)
        # s = (1 + tanh) / 2 and 1 - s, neither from a difference: in float32 the derivative of s (1 - s) would lose all digits.
        s, rest = torch.sigmoid(2 * inner), torch.sigmoid(-2 * inner)
        return s + 2 * g * (s * rest) * slope
    if activation == "gelu":
        return 0.5 * torch.erfc(g * -math.sqrt(0.5)) + g * torch.exp(-0.5 * g**2) / math.sqrt(2 * math.pi)
    if activation == "silu":
        s = torch.sigmoid(g)
        return s * (1 + g * (1 - s))
    if activation == "relu":
        return torch.where(g <= 0, 0.0, torch.ones_like(g))
    if activation == "sigmoid":
        s = torch.sigmoid(g)
        return s * (1 - s)
    return torch.ones_like(g)


def gate_gradient(dy: Tensor, u: Tensor, g: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """du and dg from dy; everything (M, F) in one dtype."""
    if activation == "relu":  # multiplying infinities by a derivative of zero would give NaN
        return dy * ACTIVATE["relu"](g), torch.where(g <= 0, 0.0, dy * u)
    return dy * ACTIVATE[activation](g), dy * u * derivative(g, activation)


def gradients(dy: Tensor, x: Tensor, halves: Halves, activation: str) -> tuple[Tensor, ...]:
    """dx, dW_value, dW_gate, db_value, db_gate as a differentiable function of everything, in the dtype of x."""
    with exact(x):
        to = compute_dtype(x)
        u, g = preactivations(x, halves)
        du, dg = gate_gradient(dy.to(to), u, g, activation)
        dx = du @ halves.value.to(to) + dg @ halves.gate.to(to)
        du, dg, rows = (part.reshape(-1, part.shape[-1]) for part in (du, dg, x.to(to)))
        return tuple(part.to(x.dtype) for part in (dx, du.mT @ rows, dg.mT @ rows, du.sum(0), dg.sum(0)))


def autocast_enabled(x: Tensor) -> bool:
    """Whether autocast is enabled for the device of x; torch cannot tell for meta tensors."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def as_autocast(x: Any, *tensors: Any) -> tuple[Any, ...]:
    """The tensors as autocast would pass them to `F.linear`: floating-point ones, except float64, cast to its dtype."""
    if not isinstance(x, Tensor) or not autocast_enabled(x):
        return x, *tensors
    dtype = torch.get_autocast_dtype(x.device.type)

    def cast(t: Any) -> Any:
        eligible = isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
        return t.to(dtype) if eligible and t.device.type == x.device.type else t

    return tuple(cast(t) for t in (x, *tensors))


def exact(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Disables autocast: the computation chooses its dtypes explicitly."""
    return torch.autocast(x.device.type, enabled=False) if autocast_enabled(x) else contextlib.nullcontext()


# impl="reference": the functions that `_op.py`, `_gate.py` and `_products.py` require of an implementation.


def unavailable(device_type: str) -> str | None:
    """The reference serves every device."""
    return None


def forward(x: Tensor, halves: Halves, spec: Spec, y: Tensor, preact: Preact | None) -> None:
    u, g = preactivations(x, halves)
    y.copy_(u * ACTIVATE[spec.activation](g))
    if preact is not None:
        for to, part in zip(split_preact(preact, spec), (u, g), strict=True):
            to.copy_(part)


def gradient(dy: Tensor, preact: Preact, dpreact: Preact, spec: Spec, dbias: Tensor | None) -> None:
    u, g = (part.to(compute_dtype(dy)) for part in split_preact(preact, spec))
    _write(dy, u, g, dpreact, spec, dbias)


def copy_into(x: Tensor, to: Tensor) -> None:
    """Copy x (rows, columns) to another matrix, cropped or zero-padded to its size; see `_products.py`."""
    rows, columns = min(x.shape[0], to.shape[0]), min(x.shape[1], to.shape[1])
    if to.shape != (rows, columns):
        to.zero_()
    to[:rows, :columns].copy_(x[:rows, :columns])


def gate(u: Tensor, g: Tensor, y: Tensor, activation: str) -> None:
    to = compute_dtype(u)
    y.copy_(u.to(to) * ACTIVATE[activation](g.to(to)))


def gate_gradient_into(dy: Tensor, u: Tensor, g: Tensor, du: Tensor, dg: Tensor, activation: str) -> None:
    to = compute_dtype(u)
    for out, part in zip((du, dg), gate_gradient(dy.to(to), u.to(to), g.to(to), activation), strict=True):
        out.copy_(part)


def recompute_gradient(
    dy: Tensor, x: Tensor, halves: Halves, dpreact: Preact, spec: Spec, dbias: Tensor | None
) -> None:
    _write(dy, *preactivations(x, halves), dpreact, spec, dbias)


def down_gradient(
    dz: Tensor, w_down: Tensor, preact: Tensor, y: Tensor, dpreact: Tensor, spec: Spec, dbias: Tensor | None
) -> None:
    to = compute_dtype(dz)
    u, g = (part.to(to) for part in split_preact(preact, spec))
    y.copy_(u * ACTIVATE[spec.activation](g))
    _write(dz.to(to) @ w_down.to(to), u, g, dpreact, spec, dbias)


def _write(dy: Tensor, u: Tensor, g: Tensor, dpreact: Preact, spec: Spec, dbias: Tensor | None) -> None:
    parts = gate_gradient(dy.to(u.dtype), u, g, spec.activation)
    for i, (to, part) in enumerate(zip(split_preact(dpreact, spec), parts, strict=True)):
        to.copy_(part)
        if dbias is not None:
            dbias[i].copy_(part.sum(0))
