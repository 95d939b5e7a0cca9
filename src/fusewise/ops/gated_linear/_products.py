"""Matrix products of the backward and of MLPs by BLAS, with unaligned operands padded. Imports only torch.

On NVIDIA GPUs a product of tensor cores takes 2.5 to 6 times as long if a row stride is not a multiple of 16 bytes.
With enough rows to pay for it, operands are copied to aligned rows, zero-padded to the next multiple of eight columns
(and rows, if those are the inner dimension), and results are cropped. torch.compile does this itself.

Shape legend: M rows; operands are (M, …) matrices or weights with contiguous columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from ..._shared.gpu import tf32_allowed
from .._choice import Choice
from .._register import register
from . import _onednn as onednn
from ._chunks import rows_of, slices
from ._problem import describable

COLUMN_MULTIPLE = 8  # rows are padded to a multiple of this many columns: 16 bytes, or 32 of float32
LINE = 64  # columns per cache line, or two: each row starts a new one, so that TMA transfers of a row touch no other row's line
#: Rows from which copies pay off: with fewer, the time of a product is little more than that of reading its weight.
ROWS = 512
DEVICES = ("cuda",)

# Each has `copy_into(x, to)` for matrices.
_choice = Choice("gated_linear", ("triton", "reference"))


def pads(x_MD: Tensor) -> bool:
    """Whether padding is worthwhile for products with the rows of x. Not in a traced graph, where the compiler decides."""
    if type(x_MD) is not Tensor or x_MD.device.type not in DEVICES or torch.compiler.is_compiling():
        return False
    on_tensor_cores = x_MD.element_size() == 2 or (x_MD.dtype == torch.float32 and tf32_allowed())
    return x_MD.shape[0] >= ROWS and on_tensor_cores and torch.version.hip is None


def aligned_buffer(like: Tensor, rows: int, columns: int) -> Tensor:
    """Memory for a matrix whose rows start at cache line boundaries."""
    return like.new_empty((rows, -(-columns // LINE) * LINE))[:, :columns]


def padded_buffer(like: Tensor, rows: int, columns: int) -> Tensor:
    """Memory for a matrix including its padding: rows are extended by zeroed columns to the end of their last line."""
    whole = aligned_buffer(like, rows, -(-columns // LINE) * LINE)
    whole[:, columns:].zero_()
    return whole


def aligned_output(x: Tensor) -> Tensor:
    """x itself if TMA supports it, else a new matrix of its shape that TMA supports."""
    return x if describable(x) else aligned_buffer(x, *x.shape)


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it that TMA supports."""
    to = aligned_output(x)
    return x if to is x else copy_to(x, to)


def each(of: Callable[[Tensor], Tensor], *xs: Tensor | None) -> Iterator[Tensor | None]:
    """`of(x)` for each tensor, None for each None."""
    return (None if x is None else of(x) for x in xs)


def padded(x: Tensor, rows: int | None = None) -> Tensor:
    """x, or a copy with aligned rows, zero-padded to the next multiple of eight columns and to `rows` rows."""
    rows = x.shape[0] if rows is None else rows
    if rows == x.shape[0] and x.shape[1] % COLUMN_MULTIPLE == 0 and describable(x):
        return x
    return copy_to(x, aligned_buffer(x, rows, -(-x.shape[1] // COLUMN_MULTIPLE) * COLUMN_MULTIPLE))


def operand(x_MD: Tensor) -> Tensor:
    """x, padded if that is worthwhile: for a caller that multiplies it several times."""
    return padded(x_MD) if pads(x_MD) else x_MD


def product(part_MF: Tensor, weight_FD: Tensor, total: Tensor | None = None) -> Tensor:
    """part · weight, added to `total` if given. The result may have more columns than the weight: see `cropped`."""
    if pads(part_MF):
        part_MF = padded(part_MF)
        weight_FD = padded(weight_FD, part_MF.shape[1])
    if onednn.takes(part_MF, weight_FD.mT):
        if total is None:
            return onednn.linear(part_MF, weight_FD.mT)
        for rows in slices(part_MF.shape[0], rows_of(total.shape[1] * total.element_size())):  # avoids a second `total`
            total[rows].add_(onednn.linear(part_MF[rows], weight_FD.mT))
        return total
    return torch.mm(part_MF, weight_FD) if total is None else total.addmm_(part_MF, weight_FD)


def transposed(part_MF: Tensor, x_MD: Tensor, to: Tensor | None = None) -> Tensor:
    """partᵀ · x, written to `to` if given; else the result may be larger than (F, D): see `cropped`."""
    part_MF, x_MD = operand(part_MF), operand(x_MD)
    if onednn.takes(part_MF.mT, x_MD.mT):
        result = _transposed_in_chunks(part_MF, x_MD)
    elif to is not None and to.shape == (part_MF.shape[1], x_MD.shape[1]):
        return torch.mm(part_MF.mT, x_MD, out=to)
    else:
        result = torch.mm(part_MF.mT, x_MD)
    return result if to is None else copy_to(result, to)


def _transposed_in_chunks(part_MF: Tensor, x_MD: Tensor) -> Tensor:
    """partᵀ · x by oneDNN, in chunks of rows, since oneDNN copies a transposed left operand."""
    first, *others = slices(part_MF.shape[0], rows_of(part_MF.shape[1] * part_MF.element_size()))
    total = onednn.linear(part_MF[first].mT, x_MD[first].mT)
    for rows in others:
        total.add_(onednn.linear(part_MF[rows].mT, x_MD[rows].mT))
    return total


def linear(y_MF: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`functional.linear`, with padded operands if that is worthwhile."""
    if not pads(y_MF):
        return (
            onednn.linear(y_MF, weight, bias) if onednn.takes(y_MF, weight) else functional.linear(y_MF, weight, bias)
        )
    missing = -weight.shape[0] % COLUMN_MULTIPLE
    y = functional.linear(
        padded(y_MF), padded(weight, weight.shape[0] + missing),
        functional.pad(bias, (0, missing)) if bias is not None and missing else bias,
    )  # fmt: skip
    return cropped(y, y_MF.shape[0], weight.shape[0])


def cropped(x: Tensor, rows: int, columns: int) -> Tensor:
    """The first rows and columns of a product, contiguous; the product itself if it has no more."""
    return x if x.shape == (rows, columns) else copy_to(x, x.new_empty((rows, columns)))


def copy_to(x: Tensor, to: Tensor) -> Tensor:
    """Copy x to `to`, cropped or zero-padded to its size, and return it."""
    op_copy_(x, to)
    return to


def _copy(x: Tensor, to: Tensor) -> None:
    device_type, dtype = x.device.type, x.dtype
    # Asked only where it may serve: a call on a CPU imports no Triton.
    there = device_type in DEVICES and _choice.unavailable("triton", device_type, dtype) is None
    fast = there and x.stride(1) == to.stride(1) == 1
    _choice.implementation("triton" if fast else "reference").copy_into(x, to)


op_copy_ = register("gated_linear_copy_(Tensor x, Tensor(a!) to) -> ()", _copy, lambda x, to: None)
