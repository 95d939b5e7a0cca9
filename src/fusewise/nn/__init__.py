"""Thin modules over the operations."""

from .gated_linear import GatedLinear, GatedMLP
from .qk_norm_rope import QKNormRope
from .rope import RotaryEmbedding

__all__ = [
    "GatedLinear",
    "GatedMLP",
    "QKNormRope",
    "RotaryEmbedding",
]
