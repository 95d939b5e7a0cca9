"""Which implementation serves a call of RoPE."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._choice import Choice

# In order of preference. Each has `launch(xs, ys, cos, sin, positions, offsets, cu_seqlens, offset, spec)`, which writes
# the rotation of every x into its y; where y is x it works in place.
IMPLEMENTATIONS = ("triton", "cuda", "cpu", "reference")
choice = Choice("rope", IMPLEMENTATIONS)


def serving(impl: str, xs: tuple[Tensor, ...]) -> Any:
    """The module that serves a call on xs with `impl`, which may be "auto". A named one is taken or refused."""
    return choice.serving(impl, xs[0].device.type, xs[0].dtype)
