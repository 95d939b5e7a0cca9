"""Thin modules over the operations."""

from .rope import RotaryEmbedding as RotaryEmbedding
