"""How many rows a CPU takes at a time, and so what memory an inference needs there beside y."""

from __future__ import annotations

#: Chunks are multiples of so many rows.
UNIT = 32
#: Both pre-activations of a chunk are about this size: what the gate reads is still in the cache.
CHUNK_BYTES = 16 << 20
#: Rows that a chunk has at least: below that the product reads the weight too often.
CHUNK_ROWS = 512
#: Up to so many rows both halves of one matrix are one product: then the weight is what is read, and a chunk is small.
FEW_ROWS = 64


def rows_of(row_bytes: int) -> int:
    """Rows of a chunk, from the bytes that a row of both pre-activations takes."""
    return max(CHUNK_ROWS, CHUNK_BYTES // max(row_bytes, 1) // UNIT * UNIT)


def scratch_bytes(rows: int, hidden: int, itemsize: int, fused: bool = True) -> int:
    """What an inference needs beside y: the gate's half of a chunk, since the value's is made in y; of few rows both, where
    they are one product."""
    if fused and rows <= FEW_ROWS:
        return 2 * rows * hidden * itemsize
    return min(rows, rows_of(2 * hidden * itemsize)) * hidden * itemsize
