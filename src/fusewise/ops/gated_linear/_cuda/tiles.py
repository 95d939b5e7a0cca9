"""Selects the tiles that compute y, by wave quantization: those that leave least of the device idle. The kernels' sizes
are in `tiles.cuh`.

    for_y(160, 14336, processors=132)           -> sideways tiles, of 160 rows
    gluon_takes_less(512, 14336, processors=132)   whether Gluon's are better still

Shape legend: M rows, F features out. The model agrees with measurements on an H200 (docs/notes/gated-linear-h200.md).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from .._few_rows import busiest, choose_width

FEW_COLUMNS = 16, 32, 64, 128, 160, 208  # of a product in the weight-streaming kernel
FEW_ROWS = 160  # up to which it computes y
Y, PREACT, GRADIENT, DOWN, SIDE_208, SIDE_192, SIDE_160, SIDE_144, SIDE_128, GATE, FEW = range(
    11
)  # epilogues, as in plan.h


class Tiles(NamedTuple):
    """Rows and features computed at once, by a cluster of two SMs that share their loads, and columns of a product."""

    epilogue: int
    rows: int
    features: int
    columns: int

    def cost(self, rows: int, hidden: int, at_once: int) -> tuple[int, int]:
        """Waves of tiles, and their cost in columns. Operand loads add a fixed cost per tile, equal to that of 32 columns. If
        at most half of the device has tiles of the last wave, sideways ones are halved."""
        full, left = divmod(-(-rows // self.rows) * -(-hidden // self.features), at_once)
        halved = self.epilogue != Y and 2 * left <= at_once
        last = (self.columns // 2 if halved else self.columns) + 32 if left else 0
        return full + (left > 0), full * (self.columns + 32) + last


UPRIGHT = Tiles(Y, 256, 96, 192)
SIDEWAYS = tuple(
    Tiles(epilogue, rows, 128, rows)
    for epilogue, rows in ((SIDE_208, 208), (SIDE_192, 192), (SIDE_160, 160), (SIDE_144, 144), (SIDE_128, 128))
)
GLUON = Tiles(Y, 128, 64, 128)  # computed by one SM


@functools.lru_cache(maxsize=1024)
def for_y(rows: int, hidden: int, processors: int) -> Tiles:
    """The upright tiles, unless others cost less by more than 5 %."""
    best = UPRIGHT
    for tiles in SIDEWAYS:
        if 20 * tiles.cost(rows, hidden, processors // 2)[1] < 19 * best.cost(rows, hidden, processors // 2)[1]:
            best = tiles
    return best


@functools.lru_cache(maxsize=1024)
def gluon_takes_less(rows: int, hidden: int, processors: int) -> bool:
    """Whether Gluon's tiles cost less, beyond one wave. Blocks without a cluster are 5 % faster at the same cost."""
    rounds, ours = for_y(rows, hidden, processors).cost(rows, hidden, processors // 2)
    return rounds > 1 and 19 * GLUON.cost(rows, hidden, processors)[1] < 20 * ours


def columns_of_few(rows: int) -> int | None:
    """Columns of a product in the weight-streaming kernel (`few_rows.cuh`), or None beyond its rows."""
    return next((n for n in FEW_COLUMNS if rows <= n), None) if rows <= FEW_ROWS else None


@functools.lru_cache(maxsize=1024)
def width_of_few(rows: int, hidden: int, processors: int) -> int:
    """Features of a tile in the weight-streaming kernel. From 33 to 96 rows, tiles of a single warpgroup (up to 64
    features) are 2 % faster at the same cost."""
    columns = columns_of_few(rows) or FEW_ROWS
    narrow, wide = (choose_width(columns, hidden, processors, widest) for widest in (64, 128))
    cost = functools.partial(busiest, columns=columns, hidden=hidden, processors=processors)
    return narrow if 32 < rows <= 96 and cost(narrow) <= 1.15 * cost(wide) else wide
