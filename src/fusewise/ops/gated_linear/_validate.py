"""Validation of a gated linear call: one check per argument, one error per mistake, all before anything is computed.

Every message has the form `<op>: <argument> must <contract with numbers>, got <value>; <one fix>`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._shared.memo import Memo
from .._common import FLOATS, check_bool, check_one_of, check_strided, dtype_name, fail, jit_traces
from ._op import IMPLEMENTATIONS, unavailable
from ._problem import ACTIVATIONS, LAYOUTS, SAVES, Spec

BOTH = "(2F, D)"  # the form of a weight that holds both halves
GATE_FIRST = "pass True where the first half is the gate"

# Encoded specs of calls that passed validation, keyed by everything except the values of tensors. The bound only guards
# against a leak.
_VALIDATED: Memo[tuple[Any, ...], str] = Memo(4096)


def validated(op: str, x: Tensor, tensors: dict[str, Tensor | None], options: tuple[Any, ...]) -> str:
    """The encoded spec of a call on x. `tensors` are weights and biases by the argument names of the caller, in the
    order weight, weight_gate, bias, bias_gate and, for an MLP, w_down and b_down; `options` are activation, layout,
    gate_first, save and impl."""
    key: tuple[Any, ...] | None = None
    if not (torch.compiler.is_compiling() or jit_traces()):
        try:
            key = (
                op, (x.shape, x.dtype, x.device, x.layout),
                *[None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.layout) for t in tensors.values()],
                *options, type(options[2]),  # the type distinguishes 1 from True
            )  # fmt: skip
            if (spec := _VALIDATED.get(key)) is not None:
                return spec
        except (AttributeError, TypeError, RuntimeError):
            key = None  # an argument is not a strided tensor or not hashable: validation reports it
    spec = _check(op, x, tensors, *options).encode()
    if key is not None:
        _VALIDATED[key] = spec
    return spec


def _check(
    op: str, x: Any, tensors: dict[str, Any], activation: Any, layout: Any, gate_first: Any, save: Any, impl: Any
) -> Spec:
    for name, value, allowed in (
        ("activation", activation, ACTIVATIONS), ("layout", layout, LAYOUTS), ("save", save, SAVES),
        ("impl", impl, ("auto", *IMPLEMENTATIONS)),
    ):  # fmt: skip
        check_one_of(op, name, value, allowed)
    check_bool(op, "gate_first", gate_first, GATE_FIRST)
    check_features(op, "x", x)
    names = list(tensors)
    weight, weight_gate, bias, bias_gate, *down = tensors.values()
    features = x.shape[-1]
    if isinstance(weight, torch.nn.Parameter):  # of a module: where x does not fit, it is x that the caller can change
        _check_like(op, "x", x, weight, names[0])
        if weight.dim() > 0 and features != weight.shape[-1]:
            contract = f"have the last dimension of {names[0]}, (..., D) = {tuple(weight.shape)}"
            fail(op, "x", contract, tuple(x.shape), "pass the features that the layer takes")
    for name, value in zip(names[:2], (weight, weight_gate), strict=True):
        if value is not None or name == names[0]:
            _check_like(op, name, value, x)
            _check_matrix(op, name, value, features, BOTH if weight_gate is None else "(F, D)")
    if weight_gate is None:
        _check_both(op, names[0], weight, layout)
        hidden = weight.shape[0] // 2 if weight.dim() == 2 else weight.shape[0 if layout == "interleaved" else 1]
        if bias_gate is not None:
            fail(
                op,
                names[3],
                f"be None where {names[0]} holds both halves",
                "a tensor",
                f"pass one {names[2]} of {2 * hidden}",
            )
        if bias is not None:
            _check_like(op, names[2], bias, x)
            _check_entries(op, names[2], bias, ((2 * hidden,), tuple(weight.shape[:-1])), "row of the weight")
    else:
        hidden = weight.shape[0]
        if weight_gate.shape != weight.shape:
            fail(
                op, names[1], f"have the shape of {names[0]}, {tuple(weight.shape)}", tuple(weight_gate.shape),
                "pass two (F, D) matrices",
            )  # fmt: skip
        if (bias is None) != (bias_gate is None):
            missing = names[2] if bias is None else names[3]
            fail(op, missing, "be given where the other bias is", "None", "pass both biases or none")
        for name, value in zip(names[2:4], (bias, bias_gate), strict=True):
            if value is not None:
                _check_bias(op, name, value, hidden, x)
        layout = "separate"
    if down:
        _check_down(op, names[4:], down, hidden, x)
    # Under tracing the operator reports this when it runs: the search for an implementation cannot be traced.
    if impl != "auto" and not torch.compiler.is_compiling():
        reason = unavailable(impl, x.device.type, x.dtype)
        if reason is not None:
            fail(op, "impl", "be able to serve the tensors", f"{impl!r}: {reason}", 'use impl="auto"')
    return Spec(activation, layout, gate_first and layout != "separate")


def check_features(op: str, name: str, x: Any) -> None:
    """x must be a strided tensor of floating-point features."""
    check_strided(op, name, x)
    if x.dtype not in FLOATS:
        fail(
            op,
            name,
            "have dtype float32, bfloat16, float16 or float64",
            dtype_name(x.dtype),
            f"convert {name} first",
            TypeError,
        )
    if x.dim() < 1 or x.shape[-1] < 1:
        fail(op, name, "have at least one feature, (..., D)", tuple(x.shape), "pass the features in the last dimension")


def _check_like(op: str, name: str, value: Any, x: Tensor, of: str = "x") -> None:
    check_strided(op, name, value)
    if value.dtype != x.dtype:
        fail(
            op,
            name,
            f"have the dtype of {of}, {dtype_name(x.dtype)}",
            dtype_name(value.dtype),
            f"call {name}.to(torch.{dtype_name(x.dtype)})",
            TypeError,
        )
    if value.device != x.device:
        fail(op, name, f"be on the device of {of}, {x.device}", value.device, f"call {name}.to({str(x.device)!r})")


def _check_matrix(
    op: str, name: str, weight: Tensor, features: int, form: str, contract: str = "the last dimension of x, D"
) -> None:
    both = form == BOTH
    if weight.dim() != 2 and not (both and weight.dim() == 3):
        wanted = "2 or 3 dimensions" if both else "2 dimensions"
        fail(op, name, f"have {wanted}", tuple(weight.shape), f"pass it as {form}")
    if weight.shape[-1] != features:
        fail(
            op, name, f"have {contract} = {features}", tuple(weight.shape),
            "pass it as F.linear takes it, (out, in)",
        )  # fmt: skip
    if weight.shape[-1] != 1 and weight.stride(-1) != 1:
        fail(
            op, name, "have a contiguous last dimension (stride 1)", f"strides {weight.stride()}",
            f"call {name}.contiguous()",
        )  # fmt: skip
    if 0 in weight.shape:
        fail(op, name, "have at least one row", tuple(weight.shape), "pass at least one output feature")


def _check_both(op: str, name: str, weight: Tensor, layout: str) -> None:
    shape = tuple(weight.shape)
    if weight.dim() == 2 and shape[0] % 2:
        fail(op, name, "have an even number of rows, 2F", shape, "stack the value and the gate matrix")
    dim = 0 if layout == "stacked" else 1
    if weight.dim() == 3 and shape[dim] != 2:
        wanted = "(2F, D) or (2, F, D)" if layout == "stacked" else "(2F, D) or (F, 2, D)"
        fail(op, name, f"have shape {wanted} in layout {layout}", shape, "name its layout")
    if weight.dim() == 3 and 1 not in shape[:2] and weight.stride(0) != shape[1] * weight.stride(1):
        fail(
            op, name, "have rows at one distance from each other", f"strides {weight.stride()}",
            "pass the two matrices apart",
        )  # fmt: skip


def _check_bias(op: str, name: str, bias: Any, length: int, x: Tensor) -> None:
    _check_like(op, name, bias, x)
    _check_entries(op, name, bias, ((length,),), "output feature")


def _check_entries(op: str, name: str, bias: Tensor, shapes: tuple[tuple[int, ...], ...], what: str) -> None:
    # Not `in`, which under tracing does not match a number against an equal symbolic size.
    fits = any(tuple(bias.shape) == shape for shape in shapes)
    if not fits or not bias.is_contiguous():
        contract = f"be contiguous, of shape {' or '.join(dict.fromkeys(map(str, shapes)))}"
        fix = f"call {name}.contiguous()" if fits else f"pass an entry for every {what}"
        fail(op, name, contract, f"shape {tuple(bias.shape)} and strides {bias.stride()}", fix)


def _check_down(op: str, names: list[str], down: list[Any], hidden: int, x: Tensor) -> None:
    weight, bias = down
    _check_like(op, names[0], weight, x)
    _check_matrix(op, names[0], weight, hidden, "(O, F)", "as many columns as there are gated features, F")
    if bias is not None:
        _check_bias(op, names[1], bias, weight.shape[0], x)
