"""Autograd of the gated MLP: the gated linear unit followed by the down projection. Imports only torch.

    z = y W_downᵀ + b_down,   y = u · act(g)

y is not saved: the epilogue of the GEMM that propagates the gradient through W_down recomputes it, and also turns the
pre-activations into their gradient. So the backward is four products (five with save="input") and no elementwise kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._common import apply_function, restored, save_tensors, wants_formula
from . import _autograd, _host, _op, _products, reference
from ._problem import Halves, Spec, rows


class GatedMLP(torch.autograd.Function):
    """z of x (..., D). Saved for backward: x and the weights, and with `save="preact"` both pre-activations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *weights, w_down, b_down, text, impl, save = rest
        x_MD = rows(x)
        if save == "preact":
            y, preact = _autograd.kept(x_MD, weights, text, impl)
        else:
            y, preact = _op.op_gated_linear(x_MD, *weights, text, impl), None
        save_tensors(ctx, (x, *weights, w_down, preact))
        ctx.rest = text, impl, _autograd.seen_by_hooks()
        return _autograd.shaped(_products.linear(y, w_down, b_down), x)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Any, ...]:
        x, weight, weight_gate, bias, bias_gate, w_down, preact = restored("gated_mlp", ctx)
        text, impl, seen = ctx.rest
        spec = Spec.decode(text)
        wants = ctx.needs_input_grad
        if wants_formula(dz):
            return *_differentiable(ctx, dz, x, (weight, weight_gate, bias, bias_gate), w_down, spec), None, None, None
        x_MD, dz_MO = rows(x), rows(dz)
        if preact is None:
            # y is dropped at once: the next product recomputes it.
            preact = _autograd.kept(x_MD, (weight, weight_gate, bias, bias_gate), text, impl)[1]
            overwrite = type(preact) is Tensor and not torch.compiler.is_compiling()
        else:
            overwrite = _autograd.may_overwrite(preact, seen)
        wants_bias = wants[3] or wants[4]
        asked = None
        if not torch.compiler.is_compiling():
            wanted = *wants[:3], wants_bias, wants[5], wants[6], w_down
            call = _host.arguments_of(x, (weight, weight_gate, bias, bias_gate), spec, impl)
            asked = dz_MO, preact, overwrite, *wanted, *call
            done = _host.mlp_gradients(*asked)
            if done is not None:
                return *done, None, None, None
        if overwrite:
            _autograd.overwritten(preact)
            y, dbias = _op.op_down_grad_(dz_MO, w_down, preact, text, impl, wants_bias)
            dpreact = preact
        else:
            y, dpreact, dbias = _op.op_down_grad(dz_MO, w_down, preact, text, impl, wants_bias)
        if asked is not None:
            _host.remember(_host.MLP_BACKWARD, *asked)
        dw_down = db_down = None
        with reference.exact(x):
            if wants[5]:
                dw_down = _products.cropped(_products.transposed(dz_MO, y), *w_down.shape)
            del y  # before the other gradients are allocated
            if wants[6]:
                db_down = dz_MO.sum(0)
        first = _autograd.backward_products(ctx, x, x_MD, weight, weight_gate, bias, dpreact, dbias, spec)
        return *first, dw_down, db_down, None, None, None


def _differentiable(
    ctx: Any, dz: Tensor, x: Tensor, weights: tuple[Any, ...], w_down: Tensor, spec: Spec
) -> tuple[Tensor | None, ...]:
    """The gradients by the formula in plain torch, which can be differentiated again."""
    weight, _, bias, _ = weights
    halves = Halves.of(spec, *weights)
    with reference.exact(x):
        y = reference.formula(x, halves, spec.activation)
        dy = dz @ w_down
        rows_z, rows_y = dz.reshape(-1, dz.shape[-1]), y.reshape(-1, y.shape[-1])
        dw_down, db_down = rows_z.mT @ rows_y, rows_z.sum(0)
    dx, *parts = reference.gradients(dy, x, halves, spec.activation)
    dweights = _autograd.joined(parts[0], parts[1], weight, spec)
    dbiases = (None, None) if bias is None else _autograd.joined(parts[2], parts[3], bias, spec)
    return dx, *dweights, *dbiases, dw_down, db_down if ctx.needs_input_grad[6] else None


def apply(x: Tensor, weights: tuple[Any, ...], down: tuple[Any, ...], text: str, impl: str, save: str) -> Tensor:
    """A validated call, through autograd if needed."""
    if _autograd.needs_autograd(x, *weights, *down):
        z: Tensor = apply_function(GatedMLP, x, *weights, *down, text, impl, save)
        return z
    y = _op.op_gated_linear(rows(x), *weights, text, impl)
    return _autograd.shaped(_products.linear(y, *down), x)


def try_fast_path(arguments: tuple[Any, ...], *down: Any) -> Tensor | None:
    """z, if the host fast path (`_host.py`) serves the unit with these arguments of `gated_linear` and the down
    projection is a plain one, too; None if Python has to validate or raise."""
    x, (w_down, b_down) = arguments[0], down
    given = down if b_down is not None else (w_down,)
    if any(type(t) not in (Tensor, torch.nn.Parameter) for t in (x, *given)) or _autograd.needs_autograd(*given):
        return None
    if any(t.dtype != x.dtype or t.device != x.device or t.layout != torch.strided or t.is_nested for t in given):
        return None
    if any(t.stride()[-1:] != (1,) or 0 in t.shape for t in given):
        return None
    if w_down.dim() != 2 or (b_down is not None and b_down.shape != w_down.shape[:1]):
        return None
    y = _host.gated_linear(*arguments)
    if y is None or y.shape[-1] != w_down.shape[1]:
        return None
    return _autograd.shaped(_products.linear(rows(y), w_down, b_down), y)
