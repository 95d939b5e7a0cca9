"""The gates and the functional MLP of `liger_kernel.ops` and `liger_kernel.functional`; exported by `compat.liger`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ..ops.gated_linear import gated_mlp
from ..ops.gated_linear._gate import gate, stacked_gate
from ..ops.gated_linear._validate import check_features, validated
from ..ops.gated_linear.reference import as_autocast
from ._check import WRONG, number
from ._shared import unit_stride


def _is_one(name: str, factor: float) -> bool:
    """Whether the multiplier is 1; raise under its argument name if it is not a number."""
    if not isinstance(factor, (int, float)):
        number("liger_swiglu", name, factor)
    return bool(factor == 1.0)


def multiplied(name: str, x: Tensor, factor: float) -> Tensor:
    """x · factor; `name` is the argument name for errors."""
    if _is_one(name, factor):
        return x
    try:
        return x * factor
    except WRONG:
        check_features("liger_swiglu", "a", x)
        number("liger_swiglu", name, factor)
        raise


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """gelu_tanh(a) · b, each (..., F), in their dtype."""
    return gate(b, a, "gelu_tanh", op="liger_geglu", names=("b", "a"))


def geglu(
    a: Tensor, b: Tensor, *, impl: str | None = None, mode: str | None = None, backend: str | None = None
) -> Tensor:
    """`liger_kernel.functional.geglu`; impl, mode and backend are ignored."""
    return liger_geglu(a, b)


class LigerGELUMulFunction:
    """For callers of `LigerGELUMulFunction.apply`; a and b are saved for backward and never overwritten."""

    apply = staticmethod(liger_geglu)


def silu_mul(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    """silu(a · gate_multiplier) · b · down_multiplier; each multiplier other than 1 costs an extra kernel."""
    scaled = multiplied("gate_multiplier", a, gate_multiplier)
    y = gate(b, scaled, "silu", op="liger_swiglu", names=("b", "a"))
    return multiplied("down_multiplier", y, down_multiplier)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) · b, each (..., F), in their dtype."""
    return silu_mul(a, b)


def swiglu(
    a: Tensor,
    b: Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """`liger_kernel.functional.swiglu`; impl, mode and backend are ignored."""
    return silu_mul(a, b, gate_multiplier, down_multiplier)


class LigerSiLUMulFunction:
    """For callers of `LigerSiLUMulFunction.apply`."""

    apply = staticmethod(silu_mul)


def stacked_silu_mul(y: Tensor, in_place: bool = False) -> Tensor:
    """silu(g) · u with (g, u) the halves of y (..., 2F). in_place is ignored: y is never overwritten."""
    return stacked_gate(y, "silu", gate_first=True, op="liger_swiglu", name="y")


class LigerFusedGateUpSiLUMulFunction:
    """For callers of `LigerFusedGateUpSiLUMulFunction.apply`."""

    apply = staticmethod(stacked_silu_mul)


def _mlp(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> Tensor:
    """SwiGLU MLP of (..., D), multipliers as in `LigerSiLUMulFunction`; a gate_multiplier other than 1 disables fusion."""
    weights = {"gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight}
    gate_weight, up_weight, down_weight = (unit_stride(w, name, "gated_mlp") for name, w in weights.items())
    if _is_one("gate_multiplier", gate_multiplier):
        z = gated_mlp(input, gate_weight, up_weight, down_weight, activation="silu")
    else:
        try:
            a, b = functional.linear(input, gate_weight), functional.linear(input, up_weight)
            z = functional.linear(silu_mul(a, b, gate_multiplier), down_weight)
        except WRONG:
            explain_mlp(input, gate_weight, up_weight, down_weight)
            raise
    return multiplied("down_multiplier", z, down_multiplier)


def explain_mlp(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> None:
    """After a matmul failed: raise the error of `gated_mlp` for these arguments."""
    x, gate_weight, up_weight, down_weight = as_autocast(x, gate_weight, up_weight, down_weight)
    weights = {"w_up": up_weight, "w_gate": gate_weight, "b_up": None, "b_gate": None}
    options = "silu", "stacked", False, "preact", "auto"
    validated("gated_mlp", x, {**weights, "w_down": down_weight, "b_down": None}, options)


class LigerMLPFunction:
    """For callers of `LigerMLPFunction.apply`."""

    apply = staticmethod(_mlp)
