"""Configurations of the gate's elementwise kernels, which the implementations in Triton and in Gluon share without importing
each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

TILES = (1024, 2048)  # elements of a tile that are worth trying


@dataclass(frozen=True)
class GateConfig:
    """An elementwise kernel: `rows` rows a program, block_m of them by block_f columns at a time."""

    rows: int
    block_m: int
    block_f: int
    num_warps: int = 4


def gate_space(chosen: GateConfig, widths: Iterable[int]) -> list[GateConfig]:
    """All that `fusewise tune` tries with tiles so wide, the heuristic's choice first."""
    every = [GateConfig(r, n // f, f) for f, n, r in product(widths, TILES, (32, 64, 128, 256))]
    return list(dict.fromkeys([chosen, *every]))
