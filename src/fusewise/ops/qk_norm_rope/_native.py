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
    return plan + _of_norm(xs, weights, norm), sin_distance


def packed(
    xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], weights: Sequence[Tensor], rotation: Rotation, norm: Norm
) -> tuple[bytes, bytes]:
    """The packed plan, and the packed call with the pointers and the offset."""
    plan, call = rope.packed(xs, ys, rotation)
    pointers = (weights[0].data_ptr(), weights[-1].data_ptr()) if weights else (0, 0)
    return plan + _of_norm(xs, weights, norm), call + _CALL.pack(*pointers)


def _of_norm(xs: tuple[Tensor, ...], weights: Sequence[Tensor], norm: Norm) -> bytes:
    """The packed fields of a plan beyond those of the rotation."""
    check_readable(weights)
    kinds = [rope.KINDS[x.dtype] for x in ((weights[0], weights[-1]) if weights else (xs[0], xs[-1]))]
    return _PLAN.pack(*kinds, norm.over == "all", norm.eps, norm.weight_offset)


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
    return plan + _of_gradients(dys, rotation), sin_distance


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
    plan, call = packed(tuple(xs), tuple(dxs), weights, rotation, norm)
    pointers = [x.data_ptr() for x in (dys[0], dys[-1])]
    pointers += [x.data_ptr() for x in (dweights[0], dweights[-1])] if dweights else (0, 0)
    return plan + _of_gradients(dys, rotation), lambda partials: call + _GRAD_CALL.pack(*pointers, partials)


def _of_gradients(dys: Sequence[Tensor], rotation: Rotation) -> bytes:
    """The packed fields of a backward's plan beyond those of the forward: strides of the incoming gradients."""
    dims = layout_dims(Spec.decode(rotation[-1]).layout)
    return _GRAD_PLAN.pack(*(0 if dim is None else dy.stride(dim) for dy in (dys[0], dys[-1]) for dim in dims))
