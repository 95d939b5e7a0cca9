"""Packs a call of `qk_norm_rope`, or its backward, for native code: the structs of `plan.h`, field by field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct

from torch import Tensor

from ..rope import _native as rope
from ..rope._problem import Rotation, Spec, layout_dims
from ._problem import Norm, check_readable

_PLAN = Struct("3q2d")
_CALL = Struct("2q")
_GRAD_PLAN = Struct("6q")
_GRAD_CALL = Struct("5q")


def planned(
    xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], weights: Sequence[Tensor], rotation: Rotation, norm: Norm
) -> tuple[bytes, int]:
    """The packed plan, and the byte distance from cos to sin if both are in one tensor."""
    plan, sin_distance = rope.planned(xs, ys, rotation)
    check_readable(weights)
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


def planned_backward(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    dxs: Sequence[Tensor],
    weights: Sequence[Tensor],
    rotation: Rotation,
    norm: Norm,
) -> tuple[bytes, int]:
    """As `planned`, for the backward."""
    plan, sin_distance = planned(tuple(xs), tuple(dxs), weights, rotation, norm)
    dims = layout_dims(Spec.decode(rotation[-1]).layout)
    strides = [0 if dim is None else dy.stride(dim) for dy in (dys[0], dys[-1]) for dim in dims]
    return plan + _GRAD_PLAN.pack(*strides), sin_distance


def packed_backward(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    dxs: Sequence[Tensor],
    weights: Sequence[Tensor],
    dweights: Sequence[Tensor],
    rotation: Rotation,
    norm: Norm,
) -> tuple[bytes, Callable[[int], bytes]]:
    """The packed plan, and a function that packs the call with the address of the partial sums."""
    plan, _ = planned_backward(dys, xs, dxs, weights, rotation, norm)
    _, call = packed(tuple(xs), tuple(dxs), weights, rotation, norm)
    pointers = [x.data_ptr() for x in (dys[0], dys[-1])]
    pointers += [x.data_ptr() for x in (dweights[0], dweights[-1])] if dweights else (0, 0)
    return plan, lambda partials: call + _GRAD_CALL.pack(*pointers, partials)
