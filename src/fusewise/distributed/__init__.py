"""Sharding rules: how the operators of fusewise run on DTensors. Opt-in, by `register_sharding_rules()`."""

from __future__ import annotations

from . import gated_linear, rope

__all__ = ["register_sharding_rules"]


def register_sharding_rules() -> None:
    """Let the functions of fusewise take DTensors.

    `rope` and `rope_`: sharded by batch or heads or replicated. `gated_linear` and its relatives: by rows, by features
    of the gate, or replicated; see `gated_linear.py`. What is sharded otherwise DTensor redistributes first. All tensors of
    a call are DTensors then, tables and frequencies, too (replicated).

    Example:
        >>> register_sharding_rules()
        >>> q = distribute_tensor(torch.randn(2, 16, 8, 64), mesh, [Shard(2)])  # by heads
        >>> q_rotated = fusewise.rope(q, inv_freq=distribute_tensor(inv_freq, mesh, [Replicate()]))

    The rules belong to the process and stay; calling this again does nothing.
    """
    rope.register()
    gated_linear.register()
