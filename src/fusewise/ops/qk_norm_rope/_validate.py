"""Validation of `qk_norm_rope` beyond RoPE's own (q, k, table, positions): the weights and the normalization.

Every message has the form `<op>: <argument> must <contract with numbers>, got <value>; <one fix>`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._shared.memo import Memo
from .._common import FLOATS, as_int, check_number, check_one_of, fail, jit_traces, kinds, recording
from ..rope._validate import check_tensor, given_table, shape_of, validated_as_far
from ._op import choice
from ._problem import OVERS, Norm

OP = "qk_norm_rope"
MAX_WIDTH = 65536  # features normalized together, which a kernel processes as one block

# Calls that passed validation, keyed by everything except the values of tensors and of an int offset: the encoded spec
# and the largest valid offset. The bound only guards against a leak.
_PASSED: Memo[tuple[Any, ...], tuple[str, float]] = Memo(4096)


def validated(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    rotation: tuple[Any, ...],
    layout: str,
    norm: tuple[Any, Any, Any],
    impl: Any,
) -> tuple[tuple[Any, ...], float]:
    """Validate a call (`rotation` are the options of `rope` in the order of its DEFAULTS, without impl; `norm` are eps,
    weight_offset and over) and return the arguments that follow the tensors in the operators, and the largest int
    offset for which it is valid."""
    cos, sin, cos_sin, angles, inv_freq, positions, offset, cu_seqlens, *rest = rotation
    offset = as_int(offset)
    offsets = offset if isinstance(offset, Tensor) else None
    key: tuple[Any, ...] | None = None
    if not (torch.compiler.is_compiling() or jit_traces()):
        try:
            key = (
                *[
                    None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.layout, x.is_neg(), x.requires_grad)
                    for x in (q, k, q_weight, k_weight, cos, sin, cos_sin, angles, inv_freq, positions, offsets, cu_seqlens)
                ],
                type(offset), recording(), *rest, *norm, *kinds(rest), *kinds(norm), impl,
            )  # fmt: skip
            passed = _PASSED.get(key)
            first = 0 if offsets is not None else offset
            if passed is not None and 0 <= first <= passed[1]:
                tensors = given_table(cos, cos_sin, angles, inv_freq), sin, positions, offsets, cu_seqlens
                return (*tensors, first, passed[0], float(norm[0]), float(norm[1]), norm[2], impl), passed[1]
        except (AttributeError, TypeError, RuntimeError):
            key = None  # an argument is not a strided tensor or not hashable: validation reports it
    call, reach = validated_as_far(OP, q, k, (*rotation, "auto"))
    weights = {"q": (q, q_weight), "k": (k, k_weight)}
    _check_norm(*norm)
    for name, (x, weight) in weights.items():
        if x is not None and Norm(*norm).width(x, layout) > MAX_WIDTH:
            fail(
                OP, name, f'have at most {MAX_WIDTH} features a token for norm="all"', shape_of(x),
                "normalise before and call rope",
            )  # fmt: skip
        _check_weight(f"{name}_weight", weight, x, layout, Norm(*norm))
    if k is not None and (q_weight is None) != (k_weight is None):
        missing = "q_weight" if q_weight is None else "k_weight"
        fail(OP, missing, "be given where the other weight is", "None", "pass both weights or none")
    choice.check(OP, q, impl)
    if key is not None:
        _PASSED[key] = call[-2], reach
    return (*call[:-1], float(norm[0]), float(norm[1]), norm[2], impl), reach


def _check_norm(eps: Any, weight_offset: Any, over: Any) -> None:
    for name, value in (("eps", eps), ("weight_offset", weight_offset)):
        check_number(OP, name, value, f"pass the model's {name}")
    if eps < 0:
        fail(OP, "eps", "be at least 0", eps, "pass the model's rms_norm_eps")
    check_one_of(OP, "norm", over, OVERS)


def _check_weight(name: str, weight: Any, x: Tensor | None, layout: str, norm: Norm) -> None:
    if weight is None:
        return
    if x is None:
        fail(OP, name, "be None where there is no k", "a tensor", "pass k or leave its weight out")
    check_tensor(OP, name, weight, FLOATS, x.device)
    if weight.dtype == torch.float64 and x.dtype != torch.float64:
        contract = "have dtype float32, bfloat16 or float16 for such a q"
        fail(OP, name, contract, "float64", f"call {name}.float()", TypeError)
    width = norm.width(x, layout)
    if shape_of(weight) != (width,) or not weight.is_contiguous():
        features = "head_dim" if norm.over == "head" else "heads · head_dim"
        fix = (
            f"call {name}.contiguous()"
            if shape_of(weight) == (width,)
            else f"pass an entry for each of {width} features"
        )
        fail(
            OP, name, f'be contiguous, of shape ({features},) = ({width},) for norm="{norm.over}"',
            f"shape {shape_of(weight)} with strides {weight.stride()}", fix,
        )  # fmt: skip
