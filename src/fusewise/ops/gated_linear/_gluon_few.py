"""Few rows in Gluon: configurations and arguments of the kernel in `_gluon_stream.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ._few_rows import choose_width, read_rows

MOST_ROWS = 128  # up to which the few-rows kernel is used
SHARED = 226 << 10  # bytes of shared memory available to the ring buffer
WAY = "few rows"  # part of the lookup key of tuned configurations


@dataclass(frozen=True)
class Config:
    """A tile is `width` features, a multiple of 8; a ring stage is `chunks` times 64 columns of its rows of both weights."""

    width: int
    chunks: int
    stages: int

    @property
    def half(self) -> int:
        """Rows of either half of the A operand."""
        return half(self.width)


def half(width: int) -> int:
    """Rows of either half of the A operand for tiles of `width` features."""
    return 64 if width <= 64 else 128


def columns(rows: int) -> int:
    """Columns of the product (N) for this many rows of x."""
    return max(8, 1 << (rows - 1).bit_length())


def widest(rows: int) -> int:
    """Features of the widest tile: the accumulators of a wider one would not fit into the registers of four warps."""
    return 128 if columns(rows) <= 64 else 64


def stages(rows: int, width: int, chunks: int) -> int:
    """Stages that fit in shared memory."""
    a_rows, n = 2 * half(width), columns(rows)
    return min(16, (SHARED - a_rows * n) // ((a_rows + n) * 64 * 2 * chunks))


def configurations(rows: int, hidden: int, processors: int) -> list[Config]:
    """Search space of `fusewise tune`, the heuristic's choice first."""
    chosen = choose(rows, hidden, processors)
    widths = [w for w in (chosen.width, 32, 56, 64, 112, 128) if w <= widest(rows)]
    others = [Config(w, c, stages(rows, w, c)) for w in widths for c in (1, 2, 4)]
    return list(dict.fromkeys([chosen, *[c for c in others if c.stages >= 3]]))


@functools.lru_cache(maxsize=1024)
def choose(rows: int, hidden: int, processors: int) -> Config:
    """Up to 64 rows two chunks per stage if three such stages fit: that halves the barrier waits (2 % on an H200).
    Beyond, one chunk: more, shorter stages are 5 to 17 % faster."""
    width = choose_width(columns(rows), hidden, processors, widest(rows))
    chunks = 2 if rows <= 64 and stages(rows, width, 2) >= 3 else 1
    return Config(width, chunks, stages(rows, width, chunks))


def arguments(
    x: Tensor, value: Tensor, gate: Tensor, bias: tuple[Tensor | None, Tensor | None], y: Tensor, config: Config,
    processors: int, activation: str, block: Callable[[Tensor, tuple[int, int]], Any],
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """Grid size and all arguments of `few_rows_kernel`; `block` makes a TMA descriptor of a matrix with a block shape."""
    rows, features = x.shape
    hidden = value.shape[0]
    block_w = min(128, config.width & -config.width)
    n, x_rows = columns(rows), read_rows(rows)
    block_x = x_rows & -x_rows
    return min(-(-hidden // config.width), processors), {
        "x_map": block(x, (block_x, 64)), "value_map": block(value, (block_w, 64)), "gate_map": block(gate, (block_w, 64)),
        "b_value_ptr": bias[0], "b_gate_ptr": bias[1], "y_ptr": y, "M": rows, "F": hidden, "D": features,
        "stride_y": y.stride(0), "stride_b_value": 0 if bias[0] is None else bias[0].stride(0),
        "stride_b_gate": 0 if bias[1] is None else bias[1].stride(0),
        "ACTIVATION": activation, "HAS_BIAS": bias[0] is not None, "WIDTH": config.width, "BLOCK_W": block_w,
        "HALF": config.half, "N": n, "X_ROWS": x_rows, "BLOCK_X": block_x, "CHUNKS": config.chunks, "STAGES": config.stages,
    }  # fmt: skip
