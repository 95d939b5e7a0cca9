"""Few rows: the tiles in which weights are streamed, for the kernels of `_gluon_stream.py` and `_cuda/few_rows.cuh`.

Shape legend: M rows, F features out.
"""

from __future__ import annotations

import functools


def read_rows(rows: int) -> int:
    """Rows of x that are read, at least `rows`: a power of two, and of more than 64 a multiple of 16. Rows that are not there
    would cost as much as those that are."""
    return -(-rows // 16) * 16 if rows > 64 else max(8, 1 << (rows - 1).bit_length())


def busiest(width: int, columns: int, hidden: int, processors: int) -> float:
    """What the multiprocessor with most tiles of a width reads, in rows of a weight; of x, which comes from the L2 cache, a
    quarter counts."""
    tiles = -(-hidden // width)
    return -(-tiles // processors) * (2 * width + columns / 4)


@functools.lru_cache(maxsize=1024)
def choose_width(columns: int, hidden: int, processors: int, widest: int) -> int:
    """Features of a tile, a multiple of 8, of a product with so many columns: the widest among which F is shared evenly,
    since wide ones read x less often."""
    costs = {width: busiest(width, columns, hidden, processors) for width in range(8, widest + 1, 8)}
    least = min(costs.values())
    return max(width for width, cost in costs.items() if cost <= 1.02 * least)
