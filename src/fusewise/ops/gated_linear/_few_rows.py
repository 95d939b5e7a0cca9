"""Up to 128 rows: the tiles in which weights are streamed, for the kernels of `_gluon_stream.py` and `_cuda/few_rows.cuh`.

Shape legend: M rows, F features out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

MOST_ROWS = 128  # to which weights are streamed
SHARED = 226 << 10  # bytes of shared memory that the ring may take


@dataclass(frozen=True)
class Config:
    """A tile is `width` features, a multiple of 8; a stage of the ring `chunks` times 64 columns of both its halves."""

    width: int
    chunks: int
    stages: int

    @property
    def half(self) -> int:
        """Rows that a half of the left operand has."""
        return 64 if self.width <= 64 else 128


def columns(rows: int) -> int:
    """Columns of the product for so many rows of x."""
    return max(8, 1 << (rows - 1).bit_length())


def read_rows(rows: int) -> int:
    """Rows of x that are read, at least `rows`. Of more than 64, not all columns of the product: rows that are not there
    would cost as much as those that are."""
    return -(-rows // 16) * 16 if rows > 64 else columns(rows)


def widest(rows: int) -> int:
    """Features of the widest tile: both halves' sums of a wider one would not fit into the registers of four warps."""
    return 128 if columns(rows) <= 64 else 64


def stages(rows: int, width: int, chunks: int) -> int:
    """Stages that shared memory has room for."""
    half = 64 if width <= 64 else 128
    return min(16, (SHARED - 2 * half * columns(rows)) // ((2 * half + columns(rows)) * 64 * 2 * chunks))


def configurations(rows: int, hidden: int, processors: int) -> list[Config]:
    """All that `fusewise tune` tries, the heuristic's choice first."""
    chosen = choose(rows, hidden, processors)
    widths = [w for w in (chosen.width, 32, 56, 64, 112, 128) if w <= widest(rows)]
    others = [Config(w, c, stages(rows, w, c)) for w in widths for c in (1, 2, 4)]
    return list(dict.fromkeys([chosen, *[c for c in others if c.stages >= 3]]))


@functools.lru_cache(maxsize=1024)
def choose(rows: int, hidden: int, processors: int) -> Config:
    """The widest tiles among which F is shared evenly: wide ones read x less often. Up to 64 rows two chunks a stage where
    three such stages fit: they halve the waits (2 % on an H200). Beyond, one: more and shorter stages are 5 to 17 % faster."""

    def busiest(width: int) -> float:
        """What the program with most tiles reads, in rows; of x, which comes from the L2 cache, a quarter counts."""
        tiles = -(-hidden // width)
        return -(-tiles // processors) * (2 * width + columns(rows) / 4)

    widths = range(8, widest(rows) + 1, 8)
    least = min(map(busiest, widths))
    width = max(w for w in widths if busiest(w) <= 1.02 * least)
    chunks = 2 if rows <= 64 and stages(rows, width, 2) >= 3 else 1
    return Config(width, chunks, stages(rows, width, chunks))
