"""Sharding rules: how the operators of fusewise run on DTensors. Opt-in, by `register_sharding_rules()`."""

from .rope import register_sharding_rules as register_sharding_rules
