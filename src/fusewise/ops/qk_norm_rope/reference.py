"""Reference implementation of `qk_norm_rope` in plain torch: differentiable, on any device, in float64 for float64 tensors.

    y = R z,   z = x̂ · (w + offset),   x̂ = x · r,   r = 1 / sqrt(mean(x²) + eps)

with R the rotation of `fusewise.ops.rope.reference`. Written for readability; every kernel is tested against it. Shape
legend as in `_problem.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._common import compute_dtype, unit_stride
from ..rope._problem import Rotation, layout_dims, transposed_spec
from ..rope.reference import formula as rope
from ._problem import Norm


def formula(xs: Sequence[Tensor], weights: Sequence[Tensor], rotation: Rotation, norm: Norm) -> list[Tensor]:
    """y for each of one or two x, which all have a weight, or none."""
    layout = _layout(rotation)
    zs = []
    for x, weight in _with_weights(xs, weights):
        x_hat, _ = _normalized(x, layout, norm)
        zs.append(x_hat if weight is None else x_hat * _scale(weight, x, layout, norm))
    return [y.to(x.dtype) for y, x in zip(_rotated(zs, rotation), xs, strict=True)]


def gradients(
    dys: Sequence[Tensor], xs: Sequence[Tensor], weights: Sequence[Tensor], rotation: Rotation, norm: Norm
) -> tuple[list[Tensor], list[Tensor]]:
    """dx for each x and dw for each weight, as a differentiable composition of torch functions.

    dz = Rᵀ dy,   g = dz · (w + offset),   dx = r · (g − x̂ mean(g x̂)),   dw = Σ dz x̂ over all rows
    """
    layout = _layout(rotation)
    *tensors, spec = rotation
    transposed: Rotation = (*tensors, transposed_spec(spec))  # type: ignore[assignment]
    dzs = _rotated([dy.to(compute_dtype(dy)) for dy in dys], transposed)
    dxs, dweights = [], []
    for dz, (x, weight) in zip(dzs, _with_weights(xs, weights), strict=True):
        x_hat, r = _normalized(x, layout, norm)
        g = dz if weight is None else dz * _scale(weight, x, layout, norm)
        dx = r * (g - x_hat * (g * x_hat).mean(_dims(layout, norm), keepdim=True))
        dxs.append(dx.to(x.dtype))
        if weight is not None:
            kept = (x.dim() - 1,) if norm.over == "head" else (layout_dims(layout)[2], x.dim() - 1)
            summed = (dz * x_hat).sum([dim for dim in range(x.dim()) if dim not in kept])
            dweights.append(summed.reshape(weight.shape).to(weight.dtype))
    return dxs, dweights


def forward(
    xs: Sequence[Tensor], ys: Sequence[Tensor], weights: Sequence[Tensor], rotation: Rotation, norm: Norm
) -> None:
    """`impl="reference"`: write the result for every x into its y."""
    for y, result in zip(ys, formula(xs, weights, rotation, norm), strict=True):
        y.copy_(result)


def backward(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    dxs: Sequence[Tensor],
    weights: Sequence[Tensor],
    dweights: Sequence[Tensor],
    rotation: Rotation,
    norm: Norm,
) -> bool:
    """Write the gradient of every x, and of every weight unless `dweights` is empty. Returns whether it serves the call."""
    of_xs, of_weights = gradients(dys, xs, weights, rotation, norm)
    for to, result in zip((*dxs, *dweights), (*of_xs, *of_weights), strict=False):
        to.copy_(result)
    return True


def _layout(rotation: Rotation) -> str:
    """The layout in an encoded spec, parsed from the text: torch.compile would trace through the cache of `Spec.decode`."""
    words = [word.removeprefix("layout=") for word in rotation[-1].split() if word.startswith("layout=")]
    return words[0] if words else "bshd"


def _with_weights(xs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    return [(x, weights[i] if weights else None) for i, x in enumerate(xs)]


def _dims(layout: str, norm: Norm) -> tuple[int, ...]:
    return (-1,) if norm.over == "head" else (layout_dims(layout)[2], -1)


def _normalized(x: Tensor, layout: str, norm: Norm) -> tuple[Tensor, Tensor]:
    """x̂ and r in the compute dtype."""
    x = x.to(compute_dtype(x))
    r = torch.rsqrt(x.square().mean(_dims(layout, norm), keepdim=True) + norm.eps)
    return x * r, r


def _scale(weight: Tensor, x: Tensor, layout: str, norm: Norm) -> Tensor:
    """w + offset, shaped to broadcast against x."""
    scale = weight.to(compute_dtype(x)) + norm.weight_offset
    if norm.over == "head":
        return scale
    heads = scale.view(x.shape[layout_dims(layout)[2]], x.shape[-1])
    return heads[:, None] if layout == "bhsd" else heads


def _rotated(zs: list[Tensor], rotation: Rotation) -> list[Tensor]:
    z, k = unit_stride(zs[0]), unit_stride(zs[1]) if len(zs) == 2 else None
    rotated = rope(z, k, rotation)
    return [rotated] if k is None else list(rotated)
