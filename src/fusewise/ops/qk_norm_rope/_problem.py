"""The normalization parameters of a call that are not tensors. The rotation is described by RoPE's `Spec` and `Problem`.

Shape legend: B batch, T tokens, H heads, D features of a head, W features that are normalized together, with a weight
each: D, or H · D of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from .._common import fail
from ..rope._problem import layout_dims

Over = Literal["head", "all"]
OVERS: tuple[str, ...] = get_args(Over)


class Norm(NamedTuple):
    """z = x / sqrt(mean(x²) + eps) · (weight + weight_offset), the mean over the features of a head, or of all heads."""

    eps: float
    weight_offset: float
    over: str

    def width(self, x: Tensor, layout: str) -> int:
        """W, the number of weights for x."""
        return int(x.shape[-1]) if self.over == "head" else int(x.shape[-1] * x.shape[layout_dims(layout)[2]])


def check_readable(weights: Sequence[Tensor]) -> None:
    """Check again that kernels can read the weights, as `Problem.build` checks the other tensors: an exported program may get
    others."""
    for weight in weights:
        if weight.stride(-1) != 1 and weight.shape[-1] > 1:
            contract = "have a contiguous last dimension (stride 1)"
            fail("qk_norm_rope", "a weight", contract, f"strides {weight.stride()}", "call .contiguous()")
