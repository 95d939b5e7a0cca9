"""What a call must satisfy beyond what RoPE asks of q, k, table and positions: the weights and the normalisation.

Every message has the form `<op>: <argument> must <contract with numbers>, got <value>; <one fix>`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..rope._validate import FLOATS, dtype_of, fail, shape_of
from ..rope._validate import validated as validated_rotation
from ._op import IMPLEMENTATIONS, unavailable
from ._problem import OVERS, Norm

OP = "qk_norm_rope"
MAX_WIDTH = 65536  # features normalised together, which a kernel holds in one block

# Calls that passed, by everything that is looked at here but the values of tensors. The bound is there only against a leak.
_PASSED: set[tuple[Any, ...]] = set()
_PASSED_MAX = 4096


def validated(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    rotation: tuple[Any, ...],
    layout: str,
    norm: tuple[Any, Any, Any],
    impl: Any,
) -> tuple[Any, ...]:
    """Validate a call (`rotation` are the options of `rope` in the order of its DEFAULTS, without impl; `norm` are eps,
    weight_offset and over) and return the arguments that follow the tensors in the operators."""
    call = validated_rotation(OP, q, k, (*rotation, "auto"))[:-1]
    weights = {"q": (q, q_weight), "k": (k, k_weight)}
    key: tuple[Any, ...] | None = None
    if not torch.compiler.is_compiling():
        try:
            key = (
                *[None if x is None else (x.shape, x.dtype, x.device) for x, _ in weights.values()],
                *[None if w is None else (w.shape, w.stride(), w.dtype, w.device) for _, w in weights.values()],
                layout, *norm, *map(type, norm), impl,
            )  # fmt: skip
            if key in _PASSED:
                return *call, *norm, impl
        except (AttributeError, TypeError, RuntimeError):
            key = None  # something is not a strided tensor or cannot be hashed: validation names it
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
    _check_impl(q, impl)
    if key is not None:
        if len(_PASSED) >= _PASSED_MAX:
            _PASSED.clear()
        _PASSED.add(key)
    return *call, float(norm[0]), float(norm[1]), norm[2], impl


def _check_norm(eps: Any, weight_offset: Any, over: Any) -> None:
    for name, value in (("eps", eps), ("weight_offset", weight_offset)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or value != value or abs(value) == float("inf"):  # torch.compile does not trace math.isfinite
            fail(OP, name, "be a finite number", repr(value), f"pass the model's {name}", TypeError)
    if eps < 0:
        fail(OP, "eps", "be at least 0", eps, "pass the model's rms_norm_eps")
    if over not in OVERS:
        fail(OP, "norm", f"be one of {', '.join(OVERS)}", repr(over), "choose one of them")


def _check_weight(name: str, weight: Any, x: Tensor | None, layout: str, norm: Norm) -> None:
    if weight is None:
        return
    if x is None:
        fail(OP, name, "be None where there is no k", "a tensor", "pass k or leave its weight out")
    if not isinstance(weight, Tensor):
        fail(OP, name, "be a torch.Tensor", type(weight).__name__, f"pass a tensor for {name}", TypeError)
    if weight.dtype not in FLOATS:
        kinds = "float32, bfloat16, float16 or float64"
        fail(OP, name, f"have dtype {kinds}", dtype_of(weight), f"call {name}.float()", TypeError)
    if weight.dtype == torch.float64 and x.dtype != torch.float64:
        kinds = "float32, bfloat16 or float16 for such a q"
        fail(OP, name, f"have dtype {kinds}", "float64", f"call {name}.float()", TypeError)
    if weight.device != x.device:
        fail(OP, name, f"be on the device of q, {x.device}", weight.device, f"call {name}.to({str(x.device)!r})")
    width = norm.width(x, layout)
    if weight.layout != torch.strided or shape_of(weight) != (width,) or not weight.is_contiguous():
        strides = "" if weight.layout != torch.strided else f" with strides {weight.stride()}"
        features = "head_dim" if norm.over == "head" else "heads · head_dim"
        fail(
            OP, name, f'be contiguous, of shape ({features},) = ({width},) for norm="{norm.over}"',
            f"shape {shape_of(weight)}{strides}", f"pass one entry for each of the {width} features",
        )  # fmt: skip


def _check_impl(q: Tensor, impl: Any) -> None:
    if impl == "auto":
        return
    if impl not in IMPLEMENTATIONS:
        fail(OP, "impl", f"be auto or one of {', '.join(IMPLEMENTATIONS)}", repr(impl), 'use impl="auto"')
    if torch.compiler.is_compiling():
        return  # the operator checks the device when it runs; a probe of the machine cannot be traced
    reason = unavailable(impl, q.device.type, q.dtype)
    if reason is not None:
        fail(OP, "impl", "be able to serve the tensors", f"{impl!r}: {reason}", 'use impl="auto"')
