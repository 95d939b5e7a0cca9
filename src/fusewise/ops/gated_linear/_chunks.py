"""Products by the platform's library and a gate beside them, some rows at a time: on a CPU, and of float32 on a GPU.

Rows are taken in chunks small enough that the gate finds their pre-activations in the cache. In an inference those of the
value are made in y itself and those of the gate in one chunk beside it; by oneDNN (`_onednn.py`) both in chunks of their
own. Where pre-activations are saved, or their gradient
is made, chunks are slices of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from . import _onednn as onednn
from ._problem import Halves, Preact, Spec, new_preact, split_preact

#: Chunks are multiples of so many rows: the CPU kernel adds up the bias gradient by so many.
ROW_MULTIPLE = 32
#: Both pre-activations of a chunk are about this size: what the gate reads is still in the cache.
CHUNK_BYTES = 16 << 20
#: Rows that a chunk has at least: below that the product reads the weight too often.
CHUNK_ROWS = 512
#: Up to so many rows both halves of one matrix are one product: then the weight is what is read, and a chunk is small.
FEW_ROWS = 64


def rows_of(row_bytes: int) -> int:
    """Rows of a chunk, from the bytes that a row of both pre-activations takes."""
    return max(CHUNK_ROWS, CHUNK_BYTES // max(row_bytes, 1) // ROW_MULTIPLE * ROW_MULTIPLE)


def chunk_bytes(rows: int, row_bytes: int) -> int:
    """Of the largest chunk of so many rows."""
    return min(rows, rows_of(row_bytes)) * row_bytes


def scratch_bytes(rows: int, hidden: int, itemsize: int, fused: bool = True, apart: bool = False) -> int:
    """What an inference needs beside y: the gate's half of a chunk, since the value's is made in y; both where oneDNN makes them,
    `apart`, and of few rows, where they are one product."""
    if fused and rows <= FEW_ROWS:
        return 2 * rows * hidden * itemsize
    return chunk_bytes(rows, 2 * hidden * itemsize) // (1 if apart else 2)


def slices(rows: int, row_bytes: int) -> Iterator[slice]:
    """Slices of the rows, all but the last a multiple of ROW_MULTIPLE."""
    size = rows_of(row_bytes)
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


def part_of(preact: Preact, chunk: slice, spec: Spec) -> Preact:
    """The pre-activations of some rows."""
    if isinstance(preact, tuple):
        return preact[0][chunk], preact[1][chunk]
    return preact[chunk] if spec.fused else preact[:, chunk]


def forward(
    x: Tensor, halves: Halves, spec: Spec, y: Tensor, preact: Preact | None, gate: Callable[[Tensor, Tensor, Tensor], None]
) -> None:  # fmt: skip
    """`forward` of an implementation whose gate alone is `gate(u, g, y)`; y may be u."""
    rows, hidden = y.shape
    if preact is None and spec.fused and rows <= FEW_ROWS:  # one product: the weight is what it reads
        gate(*split_preact(_both(x, halves, spec), spec), y)
        return
    scratch = None
    for chunk in slices(rows, 2 * hidden * x.element_size()):
        if preact is not None:
            part = part_of(preact, chunk, spec)
            products(x[chunk], halves, spec, part)
            gate(*split_preact(part, spec), y[chunk])
            continue
        if onednn.takes(x[chunk], halves.value) and onednn.takes(x[chunk], halves.gate):
            u = onednn.linear(x[chunk], halves.value, halves.value_bias)
            gate(u, onednn.linear(x[chunk], halves.gate, halves.gate_bias), y[chunk])
            continue
        if scratch is None:  # with the row stride of y: a gate knows one for both halves
            scratch = y.new_empty((chunk.stop, y.stride(0)))
        g = scratch[: chunk.stop - chunk.start, :hidden]
        product(x[chunk], halves.value, halves.value_bias, y[chunk])
        product(x[chunk], halves.gate, halves.gate_bias, g)
        gate(y[chunk], g, y[chunk])


def products(x: Tensor, halves: Halves, spec: Spec, preact: Preact) -> None:
    """Both pre-activations of some rows: one product where the halves are one matrix, and they are to be one."""
    if isinstance(preact, tuple) or not spec.fused:
        u, g = split_preact(preact, spec)
        for weight, bias, to in ((halves.value, halves.value_bias, u), (halves.gate, halves.gate_bias, g)):
            product(x, weight, bias, to)
        return
    product(x, *_stacked(halves, spec), preact)


def _both(x: Tensor, halves: Halves, spec: Spec) -> Tensor:
    """Both pre-activations as one new matrix, where the halves are one."""
    weight, bias = _stacked(halves, spec)
    if onednn.takes(x, weight):
        return onednn.linear(x, weight, bias)
    preact = new_preact(x, weight.shape[0] // 2, spec)
    product(x, weight, bias, preact)
    return preact


def _stacked(halves: Halves, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias that halves are of."""
    first, bias = (halves.gate, halves.gate_bias) if spec.gate_first else (halves.value, halves.value_bias)
    rows = 2 * first.shape[0]
    weight = first.as_strided((rows, first.shape[1]), first.stride())
    return weight, None if bias is None else bias.as_strided((rows,), (1,))


def product(x: Tensor, weight: Tensor, bias: Tensor | None, to: Tensor) -> None:
    """x weightᵀ + bias in `to`."""
    if onednn.takes(x, weight):
        to.copy_(onednn.linear(x, weight, bias))
    elif bias is None:
        torch.mm(x, weight.mT, out=to)
    else:
        torch.addmm(bias, x, weight.mT, out=to)
