"""Configurations of the gate's elementwise kernels, shared by the Triton and Gluon implementations, which do not import
each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import torch

from .._tuned import Key

TILES = (1024, 2048)  # tile sizes to try, in elements


@dataclass(frozen=True)
class GateConfig:
    """Configuration of an elementwise kernel: `rows` rows per program, in tiles of block_m by block_f."""

    rows: int
    block_m: int
    block_f: int
    num_warps: int = 4


def gate_space(chosen: GateConfig, widths: Iterable[int]) -> list[GateConfig]:
    """Search space of `fusewise tune` with tiles of these widths, the heuristic's choice first."""
    every = [GateConfig(r, n // f, f) for f, n, r in product(widths, TILES, (32, 64, 128, 256))]
    return list(dict.fromkeys([chosen, *every]))


def gate_key(dtype: torch.dtype, rows: int, hidden: int, sums: bool) -> Key:
    """Lookup key of a tuned configuration of the elementwise kernel."""
    return Key("gate", dtype, "sums" if sums else "", rows, 0, hidden)
