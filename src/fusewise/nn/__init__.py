"""Thin modules over the operations."""

from .gated_linear import GatedLinear as GatedLinear
from .gated_linear import GatedMLP as GatedMLP
from .qk_norm_rope import QKNormRope as QKNormRope
from .rope import RotaryEmbedding as RotaryEmbedding
