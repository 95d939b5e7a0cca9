"""Autograd of the gated linear unit, around the operators of `_op.py`. Imports only torch.

    du = dy · act(g)        dx = du W_value + dg W_gate      dW_value = duᵀ x     db_value = Σ_M du
    dg = dy · u · act'(g)                                    dW_gate  = dgᵀ x     db_gate  = Σ_M dg

The operators compute du and dg; the rest are plain matrix products (`_products.py`). Higher-order gradients use the
formula in `reference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._common import (
    apply_function,
    jit_traces,
    recorded_by_operators,
    records_gradients,
    restored,
    save_tensors,
    wants_formula,
)
from . import _host, _op, _products, reference
from ._problem import Halves, Spec, features_out, pair, rows, split_preact

#: Size of both pre-activations from which memory matters more than an additional product: they become two tensors, each
#: freed as soon as it is not needed, and a recomputing backward processes one half of the features at a time. So it does
#: where the products need a copy of what it computes. On a GPU kept ones of float32 stay one tensor: 7 % more memory, but
#: additional products took 3 % more time in tf32.
LARGE_BYTES = 256 << 20
#: Modules of torch's own saved-tensor hooks, which keep a tensor only for backward.
HOOKS_OF_TORCH = ("torch.utils.checkpoint", "torch.autograd.graph")


def needs_autograd(*tensors: Tensor | None) -> bool:
    """Whether a call on these tensors must go through the autograd function."""
    return records_gradients(*tensors) and not recorded_by_operators()


def seen_by_hooks() -> bool:
    """Whether a saved-tensor hook is active that may keep the tensors saved now. Torch's own hooks (checkpoint,
    offload) keep them only for backward."""
    if torch.compiler.is_compiling():
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", None) not in HOOKS_OF_TORCH


def may_overwrite(saved: Tensor, seen: bool) -> bool:
    """Whether a backward may overwrite a saved tensor: not if a hook has seen it, not if the graph is retained, not in
    a traced graph, where the compiler plans memory, and not a DTensor, which may have to be redistributed."""
    if seen or torch.compiler.is_compiling() or type(saved) is not Tensor:
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def overwritten(*saved: Tensor) -> None:
    """Bump the version counters before overwriting: if a backward fails midway and is called again, it must not take
    the overwritten values for the saved ones."""
    torch.autograd.graph.increment_version(saved)


def large(x_MD: Tensor, hidden: int) -> bool:
    """Whether a call with F = `hidden` should save memory (see LARGE_BYTES). Not in a traced graph: the compiler does."""
    if type(x_MD) is not Tensor or torch.compiler.is_compiling():
        return False
    return 2 * x_MD.shape[0] * hidden * x_MD.element_size() >= LARGE_BYTES


def keeps_apart(x_MD: Tensor, hidden: int, separate: bool) -> bool:
    """Whether aligned pre-activations are kept as two tensors. For two weights that costs nothing: each has its own products.
    For one, dW is allocated while du is still there, which takes more memory than it saves if x has fewer rows than features."""
    if not large(x_MD, hidden):
        return False
    on_gpu_in_float32 = x_MD.device.type in _products.DEVICES and x_MD.element_size() == 4
    return separate or (x_MD.shape[0] >= x_MD.shape[1] and not on_gpu_in_float32)


def unaligned(x_MD: Tensor, columns: int) -> bool:
    """Whether the backward's products need padded copies of a gradient of the pre-activations with so many columns."""
    return _products.pads(x_MD) and columns % _products.COLUMN_MULTIPLE != 0


def two_matrices(x_MD: Tensor, hidden: int) -> list[Tensor]:
    """Memory for two matrices (M, F). Their rows are zero-padded to an aligned length where the backward's products would need
    copies."""
    rows = x_MD.shape[0]
    if unaligned(x_MD, hidden):
        return [_products.padded_buffer(x_MD, rows, hidden) for _ in range(2)]
    return [x_MD.new_empty((rows, hidden)) for _ in range(2)]


def input_gradient(dpreact: Tensor, weight: Tensor, weight_gate: Tensor | None, spec: Spec) -> Tensor:
    """dx (M, D) from the gradient of the pre-activations."""
    if spec.fused:
        dx = _products.product(dpreact, weight.view(-1, weight.shape[-1]))
        return _products.cropped(dx, dpreact.shape[0], weight.shape[-1])
    halves = Halves.of(spec, weight, weight_gate)
    return _input_gradient_apart(list(dpreact), halves)


def _input_gradient_apart(parts: Sequence[Tensor], halves: Halves) -> Tensor:
    dx = _products.product(parts[0], halves.value)
    dx = _products.product(parts[1], halves.gate, dx)
    return _products.cropped(dx, parts[0].shape[0], halves.value.shape[1])


def weight_gradient(
    dpreact: Tensor, x: Tensor, weight: Tensor, spec: Spec, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of a single weight tensor and None, or those of value and gate that are wanted."""
    if spec.fused:
        dweight = _products.transposed(dpreact, x)
        return _products.cropped(dweight, dpreact.shape[1], x.shape[1]).view(weight.shape), None
    du, dg = dpreact
    size = du.shape[1], x.shape[1]
    x = _products.operand(x)
    if spec.layout == "separate":
        products = (_products.transposed(d, x) if wanted else None for d, wanted in zip((du, dg), wants, strict=True))
        dvalue, dgate = (None if dw is None else _products.cropped(dw, *size) for dw in products)
        return dvalue, dgate
    # No `out=`: DTensor does not support it before torch 2.13, torch.compile not with strided rows.
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return joined(torch.mm(du.mT, x), torch.mm(dg.mT, x), weight, spec)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for to, part in zip(_value_and_gate(dweight, spec), (du, dg), strict=True):
        _products.transposed(part, x, to)
    return dweight, None


def bias_gradient(dbias: Tensor, bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """The gradients of the bias tensors, in their dtype and shape, from the (2, F) one."""
    dbias = dbias.to(bias.dtype)
    if spec.layout == "separate":
        return dbias[0], dbias[1]
    if spec.gate_first:
        dbias = dbias.flip(0)
    return (dbias if spec.fused else dbias.mT).reshape(bias.shape), None


def _value_and_gate(weight: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    first, second = pair(weight, spec)
    return (second, first) if spec.gate_first else (first, second)


def joined(value: Tensor, gate: Tensor, like: Tensor, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """The gradients of the weight (or bias) tensors from those of value and gate; differentiable."""
    if spec.layout == "separate":
        return value, gate
    halves = (gate, value) if spec.gate_first else (value, gate)
    return torch.stack(halves, dim=0 if spec.fused else 1).reshape(like.shape), None


def kept(x_MD: Tensor, weights: Sequence[Tensor | None], text: str, impl: str) -> tuple[Tensor, Tensor]:
    """y and both pre-activations in one tensor."""
    made = None
    if not torch.compiler.is_compiling():
        made = _host.kept(*_host.arguments_of(x_MD, weights, Spec.decode(text), impl))
    return _op.op_gated_linear_preact(x_MD, *weights, text, impl) if made is None else made


class GatedLinear(torch.autograd.Function):
    """y = u · act(g). Saved for backward: x and the weights, and with `save="preact"` both pre-activations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *weights, text, impl, save = rest
        x_MD = rows(x)
        hidden = features_out(weights[0], weights[1])
        saved: Sequence[Tensor] = ()
        if save == "input":
            y = _op.op_gated_linear(x_MD, *weights, text, impl)
        elif unaligned(x_MD, hidden) or keeps_apart(x_MD, hidden, weights[1] is not None):
            saved = two_matrices(x_MD, hidden)
            y = _op.op_gated_linear_preact_into(x_MD, *weights, text, impl, *[part[:, :hidden] for part in saved])
        else:
            y, *saved = kept(x_MD, weights, text, impl)
        save_tensors(ctx, (x, *weights, *saved))
        ctx.rest = text, impl, seen_by_hooks()
        return shaped(y, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, weight_gate, bias, bias_gate, *saved = restored("gated_linear", ctx)
        text, impl, seen = ctx.rest
        spec = Spec.decode(text)
        if wants_formula(dy):
            halves = Halves.of(spec, weight, weight_gate, bias, bias_gate)
            dx, *parts = reference.gradients(dy, x, halves, spec.activation)
            dweights = joined(parts[0], parts[1], weight, spec)
            dbiases = (None, None) if bias is None else joined(parts[2], parts[3], bias, spec)
            return dx, *dweights, *dbiases, None, None, None
        x_MD, dy_MF = rows(x), rows(dy)
        tensors = weight, weight_gate, bias, bias_gate
        wants_bias = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        # Not `saved and`: Dynamo of torch 2.11 has no truth of tuples.
        overwrites = len(saved) > 0 and may_overwrite(saved[0], seen)
        hidden = dy_MF.shape[1]
        asked = None
        if len(saved) == 1 and not torch.compiler.is_compiling():
            wanted = *ctx.needs_input_grad[:3], wants_bias
            asked = dy_MF, saved[0], overwrites, *wanted, *_host.arguments_of(x, tensors, spec, impl)
            done = _host.gradients(*asked)
            if done is not None:
                return *done, None, None, None
        if len(saved) == 0 and (large(x_MD, hidden) or unaligned(x_MD, 2 * hidden if spec.fused else hidden)):
            return *_backward_by_slices(ctx, dy_MF, x, x_MD, tensors, spec, impl, wants_bias), None, None, None
        if len(saved) == 2:
            if overwrites:
                overwritten(*saved)
            parts = list(saved) if overwrites else [part.clone() for part in saved]
            if not _products.pads(x_MD):
                parts = [part[:, : dy_MF.shape[1]] for part in parts]
            dbias = _op.op_grad_(dy_MF, *[part[:, : dy_MF.shape[1]] for part in parts], text, impl, wants_bias)
            del saved
            return *_products_apart(ctx, x, x_MD, weight, weight_gate, bias, parts, dbias, spec), None, None, None
        if len(saved) == 0:
            dpreact, dbias = _op.op_recompute_grad(dy_MF, x_MD, *tensors, text, impl, wants_bias)
        elif overwrites:
            dpreact = saved[0]
            overwritten(dpreact)
            dbias = _op.op_grad_(dy_MF, *split_preact(dpreact, spec), text, impl, wants_bias)
        else:
            dpreact, dbias = _op.op_grad(dy_MF, saved[0], text, impl, wants_bias)
        if asked is not None:
            _host.remember(_host.BACKWARD, *asked)
        return *backward_products(ctx, x, x_MD, weight, weight_gate, bias, dpreact, dbias, spec), None, None, None


def _backward_by_slices(
    ctx: Any, dy: Tensor, x: Tensor, x_MD: Tensor, tensors: tuple[Any, ...], spec: Spec, impl: str, wants_bias: bool
) -> tuple[Tensor | None, ...]:
    """Backward of save="input" in two halves of the output features, so that at most half of the gradient of the
    pre-activations exists at a time. dW and db are computed by slices; dx is accumulated in its own dtype."""
    weight, weight_gate, bias, _ = tensors
    wants = ctx.needs_input_grad
    halves = Halves.of(spec, *tensors)
    text = Spec(spec.activation, "separate").encode()
    hidden = dy.shape[1]
    dx = None
    dweights = [_new_like(t) if wanted else None for t, wanted in zip((weight, weight_gate), wants[1:3], strict=True)]
    dbias = _op.new_dbias(x_MD, hidden, wants_bias)
    to_weights = dweights if weight_gate is not None or dweights[0] is None else Halves.of(spec, dweights[0])[:2]
    middle = (max(1, hidden // 2) + 127) // 128 * 128  # not 0 for a single feature: no kernel takes an empty matrix
    whole_x = _products.operand(x_MD)
    x_MD = whole_x[:, : x_MD.shape[1]]
    for part in [slice(0, hidden)] if middle >= hidden else [slice(0, middle), slice(middle, hidden)]:
        parts = [None if t is None else t[part] for t in (halves.value_bias, halves.gate_bias)]
        dpreact = two_matrices(x_MD, part.stop - part.start)
        sums = _op.op_recompute_grad_into(
            dy[:, part], x_MD, halves.value[part], halves.gate[part], *parts, text, impl, wants_bias,
            *[matrix[:, : part.stop - part.start] for matrix in dpreact],
        )  # fmt: skip
        with reference.exact(x):
            for du_or_dg, half, to in zip(dpreact, halves[:2], to_weights, strict=True):
                if wants[0]:
                    dx = _products.product(du_or_dg, half[part], dx)
                if to is not None:
                    _products.transposed(du_or_dg, whole_x, to[part])
            del du_or_dg
        if wants_bias:
            dbias[:, part] = sums
        del dpreact  # before the next is allocated
    dbiases = bias_gradient(dbias, bias, spec) if wants_bias else (None, None)
    if dx is not None:
        dx = _products.cropped(dx, *x_MD.shape).view(x.shape)
    return dx, dweights[0], dweights[1], *dbiases


def _products_apart(
    ctx: Any, x: Tensor, x_MD: Tensor, weight: Tensor, weight_gate: Tensor | None, bias: Tensor | None,
    parts: list[Tensor], dbias: Tensor, spec: Spec,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """`backward_products` for du and dg in two tensors. Only `parts` references them, so that each is freed after its
    last product, and du before a dW for both halves is allocated: at most dx and half of dW exist beside both."""
    wants = ctx.needs_input_grad
    ctx.maybe_clear_saved_tensors()  # unless the graph is retained
    halves = Halves.of(spec, weight, weight_gate)
    dx = None
    dweights: list[Tensor | None] = [None, None]
    with reference.exact(x_MD):
        if wants[0]:
            dx = _input_gradient_apart(parts, halves).view(x.shape)
        if wants[1] or wants[2]:
            x_MD = _products.operand(x_MD)
        if weight_gate is not None:
            for i in range(2):
                du_or_dg = parts.pop(0)
                if wants[1 + i]:
                    dweights[i] = _products.cropped(_products.transposed(du_or_dg, x_MD), *weight.shape)
                del du_or_dg
        elif wants[1]:
            of_value = _products.transposed(parts.pop(0), x_MD)
            dweights[0] = dweight = _new_like(weight)
            to = Halves.of(spec, dweight)
            _products.copy_to(of_value, to.value)
            del of_value
            _products.transposed(parts.pop(), x_MD, to.gate)
    dbiases: tuple[Tensor | None, Tensor | None] = (None, None)
    if bias is not None and (wants[3] or wants[4]):
        dbiases = bias_gradient(dbias, bias, spec)
    return dx, *dweights, *dbiases


def _new_like(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def backward_products(
    ctx: Any, x: Tensor, x_MD: Tensor, weight: Tensor, weight_gate: Tensor | None, bias: Tensor | None,
    dpreact: Tensor, dbias: Tensor, spec: Spec,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The wanted ones of dx, dW, dW_gate, db, db_gate, for a function whose first five inputs are x and the weights."""
    wants = ctx.needs_input_grad
    dx = None
    dweights: tuple[Tensor | None, Tensor | None] = (None, None)
    dbiases: tuple[Tensor | None, Tensor | None] = (None, None)
    with reference.exact(x_MD):
        if wants[0]:
            dx = input_gradient(dpreact, weight, weight_gate, spec).view(x.shape)
        if wants[1] or wants[2]:
            dweights = weight_gradient(dpreact, x_MD, weight, spec, (wants[1], wants[2]))
        if bias is not None and (wants[3] or wants[4]):
            dbiases = bias_gradient(dbias, bias, spec)
    return dx, *dweights, *dbiases


def apply(x: Tensor, weights: tuple[Any, ...], text: str, impl: str, save: str) -> Tensor:
    """A validated call, through autograd if needed."""
    if needs_autograd(x, *weights):
        y: Tensor = apply_function(GatedLinear, x, *weights, text, impl, save)
        return y
    return shaped(_op.op_gated_linear(rows(x), *weights, text, impl), x)


def shaped(y_MF: Tensor, x: Tensor) -> Tensor:
    """y with the leading dimensions of x. Like the result of `F.linear` it is not a view, so it may be modified in place."""
    if x.dim() == 2:
        return y_MF
    shape = (*x.shape[:-1], y_MF.shape[-1])
    if jit_traces():  # which records sizes passed to an operator that is called by name as constants
        return y_MF.reshape(shape)
    y: Tensor = torch.ops.aten._unsafe_view(y_MF, shape)
    return y
