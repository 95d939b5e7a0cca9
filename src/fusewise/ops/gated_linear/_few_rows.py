"""Few rows: tile widths of the weight-streaming kernels in `_gluon_stream.py` and `_cuda/few_rows.cuh`.

Shape legend: M rows, F features out.
"""

from __future__ import annotations

import functools


def read_rows(rows: int) -> int:
    """Rows of x to load, at least `rows`: a power of two, or above 64 a multiple of 16. Padding rows cost as much as
    real ones."""
    return -(-rows // 16) * 16 if rows > 64 else max(8, 1 << (rows - 1).bit_length())


def busiest(width: int, columns: int, hidden: int, processors: int) -> float:
    """Traffic of the SM with the most tiles of this width, in rows of a weight; x comes from L2 and counts a quarter."""
    tiles = -(-hidden // width)
    return -(-tiles // processors) * (2 * width + columns / 4)


@functools.lru_cache(maxsize=1024)
def choose_width(columns: int, hidden: int, processors: int, widest: int) -> int:
    """Features of a tile, a multiple of 8, for a product with this many columns: the widest that distributes F evenly
    over the SMs, since wider tiles read x less often."""
    costs = {width: busiest(width, columns, hidden, processors) for width in range(8, widest + 1, 8)}
    least = min(costs.values())
    return max(width for width, cost in costs.items() if cost <= 1.02 * least)
