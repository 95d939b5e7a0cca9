"""Sharding rules that let the operators of fusewise run on DTensors. Opt-in, by `register_sharding_rules()`."""

from __future__ import annotations

from . import gated_linear, rope

__all__ = ["register_sharding_rules"]


def register_sharding_rules() -> None:
    """Let the functions of fusewise accept DTensors.

    `rope` and `rope_`: sharded by batch or heads, or replicated. `gated_linear` and related functions: by rows, by
    gated features, or replicated; see `gated_linear.py`. DTensor redistributes other placements first. All tensors of a
    call must be DTensors then, including tables and frequencies (replicated).

    Example:
        >>> register_sharding_rules()
        >>> q = distribute_tensor(torch.randn(2, 16, 8, 64), mesh, [Shard(2)])  # by heads
        >>> q_rotated = fusewise.rope(q, inv_freq=distribute_tensor(inv_freq, mesh, [Replicate()]))

    The rules are process-wide and permanent; calling this again does nothing.
    """
    rope.register()
    gated_linear.register()
