"""Selects the tiles of a product: those that leave least of the device idle, by wave quantization. Their sizes are in
`tiles.cuh` and `few_rows.cuh`.

    width_of_stream(64, 14336, processors=132)               -> 56: tiles of 56 features of the kernel that streams the weights
    width_of_stream(320, 14336, processors=132)              -> None: others are better
    for_y(320, 14336, processors=132)                        -> sideways tiles, of 160 rows
    gluon_takes_less("y", 512, 4096, 14336, processors=132)  -> True: Gluon's are better still
    choose("y", 512, 4096, 14336, 132, gluon=True)           -> all of these together

Shape legend: M rows, D features in (depth), F features out (hidden). Costs are in columns of a product of 64 features; they agree
with measurements on an H200 (docs/notes/gated-linear-h200.md).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from .._few_rows import busiest, choose_width

STREAM_COLUMNS = 16, 32, 64, 128, 160, 208  # of a product in the weight-streaming kernel
STREAM_ROWS = 128  # up to which it always computes y, with pre-activations or without
GROUP_M = 8  # rows of tiles per group of the raster order
LOADS = 16  # cost of a tile, whatever its columns
MEMORY = 2.7  # cost of reading both weights of a feature, while all SMs read
# Epilogues, as in plan.h.
Y, PREACT, GRADIENT, DOWN, SIDE_208, SIDE_192, SIDE_160, SIDE_144, SIDE_128, GATE, FEW, TF32_Y, TF32_PREACT = range(13)


class Tiles(NamedTuple):
    """Rows and features computed at once, by a cluster of two SMs that share their loads, and columns of a product."""

    epilogue: int
    rows: int
    features: int
    columns: int

    def cost(self, rows: int, hidden: int, at_once: int) -> int:
        """The waves' cost per step of 64 in depth. Operand loads add the equivalent of LOADS columns per tile. If at most half of the
        device has tiles of the last wave, sideways ones are halved, which loads as much of the weights for each half; that costs
        more if other waves precede it."""
        full, left = divmod(-(-rows // self.rows) * -(-hidden // self.features), max(1, at_once))
        halved = self.epilogue != Y and 2 * left <= at_once
        last = (self.columns // 2 + (48 if full else 40) if halved else self.columns + LOADS) if left else 0
        return full * (self.columns + LOADS) + last


UPRIGHT = Tiles(Y, 256, 96, 192)
SIDEWAYS = tuple(
    Tiles(epilogue, rows, 128, rows)
    for epilogue, rows in ((SIDE_208, 208), (SIDE_192, 192), (SIDE_160, 160), (SIDE_144, 144), (SIDE_128, 128))
)


def of(epilogue: int) -> Tiles | None:
    """The tiles of a kernel in raster order, or None: FEW streams the weights, GATE has no product."""
    if epilogue in (GATE, FEW):
        return None
    upright = UPRIGHT._replace(features=192) if epilogue == DOWN else UPRIGHT
    return next((tiles for tiles in SIDEWAYS if tiles.epilogue == epilogue), upright)


@dataclass(frozen=True)
class Config:
    """What computes a product: "upright" or, for y alone, "sideways" tiles of `size` rows, or "stream", the weight-streaming
    kernel with tiles of `size` features, which also keeps pre-activations; or "gluon", whose kernel it is then."""

    tiles: str
    size: int = 0


class Race(NamedTuple):
    """What is known of a kernel here beside Gluon's of the same name, whose tiles are of 128 rows by 128 columns, for one SM each.

    The epilogue of a tile overlaps the next tile's main loop: it costs what it is longer than that, and at the end `tail`.
    """

    features: int  # of a tile here, 256 rows high; Gluon's has two thirds of it
    tail: int  # steps of 64 in depth that the last epilogue takes
    least: int  # steps that a tile takes here, because of its epilogue
    gluon: float  # Gluon's time at the same cost
    empty: float  # cost of a row beyond M in Gluon's tiles, where TMA fills in zeros, over that of a real one, less 1
    ragged: float = 0.0  # share of a tile here that is saved by one of at most 64 rows: it stores less


RACES = {
    "y": Race(96, 8, 0, 0.98, 0.1),
    "preact": Race(96, 12, 0, 1.02, 0.5, 0.4),
    "gradient": Race(96, 24, 16, 1.04, 0.5),
    "down": Race(192, 48, 40, 1.0, 0.5),
}


def choose(kernel: str, rows: int, depth: int, hidden: int, processors: int, *, gluon: bool) -> Config:
    """The heuristic's choice for a kernel: "y", "preact", "gradient" or "down"; `gluon`: whether Gluon's may be taken."""
    if streams(kernel, rows) and (width := width_of_stream(rows, hidden, processors)) is not None:
        return Config("stream", width)
    if gluon and gluon_takes_less(kernel, rows, depth, hidden, processors):
        return Config("gluon")
    tiles = for_y(rows, hidden, processors) if kernel == "y" else UPRIGHT
    return Config("upright") if tiles is UPRIGHT else Config("sideways", tiles.rows)


def streams(kernel: str, rows: int) -> bool:
    """Whether the weight-streaming kernel may compute a kernel: beyond y alone, where the others' tiles are mostly padding."""
    return rows <= (STREAM_COLUMNS[-1] if kernel == "y" else STREAM_ROWS if kernel == "preact" else 0)


def configurations(kernel: str, rows: int, depth: int, hidden: int, processors: int, *, gluon: bool) -> list[Config]:
    """All that can compute a kernel, the heuristic's choice first."""
    found = [choose(kernel, rows, depth, hidden, processors, gluon=gluon), Config("upright")]
    if kernel == "y":
        found += [Config("sideways", tiles.rows) for tiles in SIDEWAYS]
    if streams(kernel, rows):
        columns = next(n for n in STREAM_COLUMNS if rows <= n)
        found += [Config("stream", choose_width(columns, hidden, processors, widest)) for widest in (64, 128)]
    return list(dict.fromkeys([*found, Config("gluon")] if gluon else found))


@functools.lru_cache(maxsize=1024)
def for_y(rows: int, hidden: int, processors: int) -> Tiles:
    """The upright tiles, unless others cost less by more than 1 %: only upright ones keep in step in a large product."""
    best = min(SIDEWAYS, key=lambda tiles: tiles.cost(rows, hidden, processors // 2))
    upright, sideways = (tiles.cost(rows, hidden, processors // 2) for tiles in (UPRIGHT, best))
    return best if sideways < 0.99 * upright else UPRIGHT


@functools.lru_cache(maxsize=1024)
def gluon_takes_less(kernel: str, rows: int, depth: int, hidden: int, processors: int) -> bool:
    """Whether Gluon's tiles cost less in a kernel: "y", "preact", "gradient" or "down"."""
    race, steps = RACES[kernel], depth / 64
    tiles = for_y(rows, hidden, processors) if kernel == "y" else UPRIGHT._replace(features=race.features)
    theirs = Tiles(Y, 128, race.features * 2 // 3, 128)
    empty = -rows % theirs.rows / (rows + -rows % theirs.rows)
    ours = tiles.cost(rows, hidden, processors // 2) * max(steps, race.least)
    if 0 < rows % tiles.rows <= 64:
        ours *= 1 - race.ragged / -(-rows // tiles.rows)
    ours += tiles.columns * race.tail
    cost = theirs.cost(rows, hidden, processors) * steps * (1 + race.empty * empty) + theirs.columns * race.tail
    return race.gluon * cost < ours


@functools.lru_cache(maxsize=1024)
def width_of_stream(rows: int, hidden: int, processors: int) -> int | None:
    """Features of a tile in the weight-streaming kernel (`few_rows.cuh`), or None if tiles of the other kernels cost less. Up
    to 64 features need a single warpgroup, which from 33 to 128 rows is 3 % faster at the same cost, unless it reads much more of x."""
    columns = next((n for n in STREAM_COLUMNS if rows <= n), None)
    if columns is None:
        return None
    of = {"columns": columns, "hidden": hidden, "processors": processors}
    narrow, wide = (choose_width(widest=widest, **of) for widest in (64, 128))
    gain = _stream_cost(wide, **of) - _stream_cost(narrow, **of)
    traffic = [busiest(width, **{**of, "columns": rows}) for width in (narrow, wide)]
    level = gain == 0 and rows <= STREAM_ROWS and traffic[0] <= 1.1 * traffic[1]
    width = narrow if rows > 32 and (gain > 0 or level) else wide
    if rows <= STREAM_ROWS:
        return width
    least = MEMORY * hidden / processors + 48  # for any kernel
    others = max(least, for_y(rows, hidden, processors).cost(rows, hidden, processors // 2))
    return width if _stream_cost(width, **of) <= others else None


def _stream_cost(width: int, columns: int, hidden: int, processors: int) -> float:
    """Of the SM with the most tiles, each of which is limited by memory or by the products of its warpgroups."""
    tiles, warpgroups = -(-hidden // width), -(-width // 64)
    return -(-tiles // processors) * (max(MEMORY * width, warpgroups * columns) + 4 * warpgroups)
