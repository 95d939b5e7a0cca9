"""Which tiles make y: those that leave least of the device idle. The kernels' sizes are in `tiles.cuh`.

    for_y(160, 14336, processors=132)           -> tiles on their side, of 160 rows
    gluon_takes_less(512, 14336, processors=132)   whether Gluon's are better still

Shape legend: M rows, F features out. The count agrees with what an H200 took (docs/notes/gated-linear-h200.md).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from .._few_rows import busiest, choose_width

FEW_ROWS = 160  # to which y has a kernel that streams the weights
Y, PREACT, GRADIENT, DOWN, SIDE_192, SIDE_160, SIDE_128, GATE, FEW = range(9)  # epilogues, as in plan.h


class Tiles(NamedTuple):
    """Rows and features that are made at once, by two multiprocessors which share their reads, and columns of a product."""

    epilogue: int
    rows: int
    features: int
    columns: int

    def cost(self, rows: int, hidden: int, at_once: int) -> tuple[int, int]:
        """Rounds of tiles, and what they take in columns. Fewer columns take more time each, since both operands are
        read for all: by as much as 32 more would."""
        rounds = -(-(-(-rows // self.rows) * -(-hidden // self.features)) // at_once)
        return rounds, rounds * (self.columns + 32)


UPRIGHT = Tiles(Y, 256, 96, 192)
SIDEWAYS = Tiles(SIDE_192, 192, 128, 192), Tiles(SIDE_160, 160, 128, 160), Tiles(SIDE_128, 128, 128, 128)
GLUON = Tiles(Y, 128, 64, 128)  # of one multiprocessor


@functools.lru_cache(maxsize=1024)
def for_y(rows: int, hidden: int, processors: int) -> Tiles:
    """Upright ones, unless others take less by more than a twentieth."""
    best = UPRIGHT
    for tiles in SIDEWAYS:
        if 20 * tiles.cost(rows, hidden, processors // 2)[1] < 19 * best.cost(rows, hidden, processors // 2)[1]:
            best = tiles
    return best


@functools.lru_cache(maxsize=1024)
def gluon_takes_less(rows: int, hidden: int, processors: int) -> bool:
    """Beyond one round. A block that waits for no other one takes a twentieth less for the same count."""
    rounds, ours = for_y(rows, hidden, processors).cost(rows, hidden, processors // 2)
    return rounds > 1 and 19 * GLUON.cost(rows, hidden, processors)[1] < 20 * ours


def columns_of_few(rows: int) -> int | None:
    """Columns of a product where weights are streamed (`few_rows.cuh`), None where they are not."""
    return next((n for n in (16, 32, 64, 128, FEW_ROWS) if rows <= n), None)


@functools.lru_cache(maxsize=1024)
def width_of_few(rows: int, hidden: int, processors: int) -> int:
    """Features of a tile where weights are streamed. From 33 to 96 rows those of one group of warps, up to 64, are
    2 % quicker for the same count."""
    columns = columns_of_few(rows) or FEW_ROWS
    narrow, wide = (choose_width(columns, hidden, processors, widest) for widest in (64, 128))
    cost = functools.partial(busiest, columns=columns, hidden=hidden, processors=processors)
    return narrow if 32 < rows <= 96 and cost(narrow) <= 1.15 * cost(wide) else wide
