"""Packs a call of `qk_norm_rope` for native code: the structs `NormPlan` and `NormCall` of `plan.h`, field by field."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from torch import Tensor

from ..rope import _native as rope
from ..rope._problem import Rotation
from ._problem import Norm

_PLAN = Struct("3q2d")
_CALL = Struct("2q")


def planned(
    xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], weights: Sequence[Tensor], rotation: Rotation, norm: Norm
) -> tuple[bytes, int]:
    """The packed plan, and the byte distance from cos to sin if both are in one tensor."""
    plan, sin_distance = rope.planned(xs, ys, rotation)
    kinds = [rope.KINDS[x.dtype] for x in ((weights[0], weights[-1]) if weights else (xs[0], xs[-1]))]
    return plan + _PLAN.pack(*kinds, norm.over == "all", norm.eps, norm.weight_offset), sin_distance


def packed(
    xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], weights: Sequence[Tensor], rotation: Rotation, norm: Norm
) -> tuple[bytes, bytes]:
    """The packed plan, and the packed call with the pointers and the offset."""
    plan, _ = planned(xs, ys, weights, rotation, norm)
    _, call = rope.packed(xs, ys, rotation)
    pointers = (weights[0].data_ptr(), weights[-1].data_ptr()) if weights else (0, 0)
    return plan, call + _CALL.pack(*pointers)
