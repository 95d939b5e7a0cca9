"""Unfused path: BLAS products and a separate gate, chunk by chunk of rows. Used on a CPU; a GPU uses `products` in float32.

A CPU's chunks are small enough that the gate finds their pre-activations in cache. In inference the value's pre-activations
are written to y itself and the gate's to one scratch chunk; with oneDNN (`_onednn.py`) both get chunks of their own. If
pre-activations are saved, or their gradient is computed, chunks are slices of those tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from . import _onednn as onednn
from ._problem import Halves, Preact, Spec, new_preact, split_preact

#: Chunks are multiples of this many rows: the unit of the CPU kernel's partial sums of the bias gradient.
ROW_MULTIPLE = 32
#: Approximate size of both pre-activations of a chunk: the gate's inputs are still in cache.
CHUNK_BYTES = 16 << 20
#: Minimum rows of a chunk: with fewer, the product reads the weight too often.
CHUNK_ROWS = 512
#: Up to this many rows both halves of a single matrix are one product: reading the weight dominates, and a chunk is small.
FEW_ROWS = 64
#: Chunks of y's gradient on a GPU, behind a float32 down projection: each product leaves part of the GPU idle at its end.
GPU_CHUNKS = 4


def rows_of(row_bytes: int) -> int:
    """Rows of a chunk, given the bytes of a row of both pre-activations."""
    return max(CHUNK_ROWS, CHUNK_BYTES // row_bytes // ROW_MULTIPLE * ROW_MULTIPLE)


def gpu_rows_of(rows: int) -> int:
    """Rows of a chunk on a GPU, given those of the matrix."""
    return max(CHUNK_ROWS, -(-rows // GPU_CHUNKS))


def chunk_bytes(rows: int, row_bytes: int) -> int:
    """Bytes of the largest chunk of a matrix with this many rows."""
    return min(rows, rows_of(row_bytes)) * row_bytes


def scratch_bytes(rows: int, hidden: int, itemsize: int, fused: bool = True, apart: bool = False) -> int:
    """Scratch memory of an inference: the gate's half of a chunk, since the value's is written to y. Both halves if
    oneDNN computes them (`apart`), and for few rows, where they are one product."""
    if fused and rows <= FEW_ROWS:
        return 2 * rows * hidden * itemsize
    return chunk_bytes(rows, 2 * hidden * itemsize) // (1 if apart else 2)


def slices(rows: int, size: int) -> Iterator[slice]:
    """Slices of the rows, of `size` but for the last."""
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


def part_of(preact: Preact, chunk: slice, spec: Spec) -> Preact:
    """The pre-activations of some rows."""
    if isinstance(preact, tuple):
        return preact[0][chunk], preact[1][chunk]
    return preact[chunk] if spec.fused else preact[:, chunk]


def forward(
    x: Tensor, halves: Halves, spec: Spec, y: Tensor, preact: Preact | None, gate: Callable[[Tensor, Tensor, Tensor], None],
    size: int,
) -> None:  # fmt: skip
    """`forward` of an implementation whose elementwise gate is `gate(u, g, y)`, in chunks of `size` rows; y may be u."""
    rows, hidden = y.shape
    if preact is None and spec.fused and rows <= FEW_ROWS:  # one product: reading the weight dominates
        gate(*split_preact(_both(x, halves, spec), spec), y)
        return
    scratch = None
    for chunk in slices(rows, size):
        if preact is not None:
            part = part_of(preact, chunk, spec)
            products(x[chunk], halves, spec, part)
            gate(*split_preact(part, spec), y[chunk])
            continue
        if onednn.takes(x[chunk], halves.value) and onednn.takes(x[chunk], halves.gate):
            u = onednn.linear(x[chunk], halves.value, halves.value_bias)
            gate(u, onednn.linear(x[chunk], halves.gate, halves.gate_bias), y[chunk])
            continue
        if scratch is None:  # with the row stride of y: a gate takes the same stride for u and g
            scratch = y.new_empty((chunk.stop, y.stride(0)))
        g = scratch[: chunk.stop - chunk.start, :hidden]
        product(x[chunk], halves.value, halves.value_bias, y[chunk])
        product(x[chunk], halves.gate, halves.gate_bias, g)
        gate(y[chunk], g, y[chunk])


def products(x: Tensor, halves: Halves, spec: Spec, preact: Preact) -> None:
    """Both pre-activations of some rows: one product if both the weights and `preact` are single matrices."""
    if isinstance(preact, tuple) or not spec.fused:
        u, g = split_preact(preact, spec)
        for weight, bias, to in ((halves.value, halves.value_bias, u), (halves.gate, halves.gate_bias, g)):
            product(x, weight, bias, to)
        return
    product(x, *_stacked(halves, spec), preact)


def _both(x: Tensor, halves: Halves, spec: Spec) -> Tensor:
    """Both pre-activations as one new matrix, for halves of a single matrix."""
    weight, bias = _stacked(halves, spec)
    if onednn.takes(x, weight):
        return onednn.linear(x, weight, bias)
    preact = new_preact(x, weight.shape[0] // 2, spec)
    product(x, weight, bias, preact)
    return preact


def _stacked(halves: Halves, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """The stacked weight and bias that the halves are views of."""
    first, bias = (halves.gate, halves.gate_bias) if spec.gate_first else (halves.value, halves.value_bias)
    rows = 2 * first.shape[0]
    weight = first.as_strided((rows, first.shape[1]), first.stride())
    return weight, None if bias is None else bias.as_strided((rows,), (1,))


def product(x: Tensor, weight: Tensor, bias: Tensor | None, to: Tensor) -> None:
    """Write x weightᵀ + bias to `to`."""
    if onednn.takes(x, weight):
        to.copy_(onednn.linear(x, weight, bias))
    elif bias is None:
        torch.mm(x, weight.mT, out=to)
    else:
        torch.addmm(bias, x, weight.mT, out=to)
