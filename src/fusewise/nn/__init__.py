"""Thin modules over the operations."""

from .gated_linear import GatedLinear as GatedLinear
from .gated_linear import GatedMLP as GatedMLP
from .rope import RotaryEmbedding as RotaryEmbedding
