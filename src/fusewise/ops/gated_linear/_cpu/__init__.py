"""The gated linear unit on a CPU: the platform's matrix product through torch, and the native gate in `gate.cpp`.

Rows are taken in chunks small enough that the gate finds their pre-activations in the cache. In an inference those of the
value are made in y itself and those of the gate in one chunk beside it; where pre-activations are kept, or their gradient
is made, they are the chunks' place.

Threads are torch's own (`_shared/cpu.py`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

from ...._shared import build, cpu
from .. import _chunks as chunks
from .. import _host
from .._problem import ACTIVATIONS, Halves, Preact, Spec, new_preact, split_preact

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CALL = Struct("17q")  # `Call` of gate.h
_ROWS = chunks.UNIT  # rows of a row of sums, ROWS there


def recipe() -> build.Recipe:
    """What the kernel is built from."""
    sources = tuple(Path(__file__).with_name(name) for name in ("gate.cpp", "gate.h"))
    return "gate", sources, build.cxx(), build.NATIVE_FLAGS


@functools.cache
def _kernel() -> cpu.Kernel:
    kernel = cpu.Kernel(recipe(), "fusewise_gate")
    kernel.run.argtypes = (ctypes.c_char_p,)
    _host.unavailable(kernel)  # loads it where it is built, so that it takes the next call
    return kernel


def unavailable(device_type: str) -> str | None:
    """Why the native kernel cannot serve tensors of this device type, or None if it can; builds it if need be."""
    return cpu.unavailable(device_type, _kernel)


def path(x: Tensor, halves: Halves) -> str:
    """Why calls take longer on the host than they need to, in words; empty if they do not."""
    reason = _host.unavailable(_kernel())
    return "" if reason is None else f"without the quick way on the host of gated_linear and geglu_linear: {reason}"


def forward(x: Tensor, halves: Halves, spec: Spec, y: Tensor, preact: Preact | None) -> None:
    """The implementation `impl="cpu"`; these four as in `reference.py`."""
    rows, hidden = y.shape
    if preact is None and spec.fused and rows <= chunks.FEW_ROWS:  # one product: the weight is what it reads
        preact = new_preact(x, hidden, spec)
        _products(x, halves, spec, preact)
        return _gate(preact, spec, y=y)
    if preact is None:
        return _forward_in_y(x, halves, spec, y)
    for chunk in _chunks(rows, 2 * hidden * x.element_size()):
        part = _rows(preact, chunk, spec)
        _products(x[chunk], halves, spec, part)
        _gate(part, spec, y=y[chunk])


def _forward_in_y(x: Tensor, halves: Halves, spec: Spec, y: Tensor) -> None:
    rows, hidden = y.shape
    scratch = None
    for chunk in _chunks(rows, 2 * hidden * x.element_size()):
        if scratch is None:  # with the row stride of y: the kernel knows one for both halves
            scratch = y.new_empty((chunk.stop, y.stride(0)))
        gate = scratch[: chunk.stop - chunk.start, :hidden]
        _product(x[chunk], halves.value, halves.value_bias, y[chunk])
        _product(x[chunk], halves.gate, halves.gate_bias, gate)
        _run(y[chunk], gate, spec.activation, y=y[chunk])


def gradient(dy: Tensor, preact: Preact, dpreact: Preact, spec: Spec, dbias: Tensor | None) -> None:
    sums = _sums(dy, dbias)
    _gate(preact, spec, dy=dy, dpreact=dpreact, sums=sums)
    _add_up(sums, dbias)


def recompute_gradient(
    dy: Tensor, x: Tensor, halves: Halves, dpreact: Tensor, spec: Spec, dbias: Tensor | None
) -> None:
    sums = _sums(dy, dbias)
    for chunk in _chunks(dy.shape[0], 2 * dy.shape[1] * x.element_size()):
        part = _rows(dpreact, chunk, spec)
        _products(x[chunk], halves, spec, part)
        _gate(part, spec, dy=dy[chunk], dpreact=part, sums=_sums_of(sums, chunk))
    _add_up(sums, dbias)


def down_gradient(
    dz: Tensor, w_down: Tensor, preact: Tensor, y: Tensor, dpreact: Tensor, spec: Spec, dbias: Tensor | None
) -> None:
    sums = _sums(y, dbias)
    for chunk in _chunks(y.shape[0], y.shape[1] * y.element_size()):
        torch.mm(dz[chunk], w_down, out=y[chunk])  # dy, whose place y takes
        _gate(
            _rows(preact, chunk, spec), spec, dy=y[chunk], y=y[chunk], dpreact=_rows(dpreact, chunk, spec),
            sums=_sums_of(sums, chunk),
        )  # fmt: skip
    _add_up(sums, dbias)


def _chunks(rows: int, row_bytes: int) -> Iterator[slice]:
    """Slices of the rows, all but the last a multiple of the rows of a row of sums."""
    size = chunks.rows_of(row_bytes)
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


def _rows(preact: Preact, chunk: slice, spec: Spec) -> Preact:
    if isinstance(preact, tuple):
        return preact[0][chunk], preact[1][chunk]
    return preact[chunk] if spec.fused else preact[:, chunk]


def _products(x: Tensor, halves: Halves, spec: Spec, preact: Preact) -> None:
    """Both pre-activations of some rows: one product where the halves are one matrix, and they are to be one."""
    if isinstance(preact, tuple) or not spec.fused:
        u, g = split_preact(preact, spec)
        for weight, bias, to in ((halves.value, halves.value_bias, u), (halves.gate, halves.gate_bias, g)):
            _product(x, weight, bias, to)
        return
    first, bias = (halves.gate, halves.gate_bias) if spec.gate_first else (halves.value, halves.value_bias)
    rows = 2 * first.shape[0]
    weight = first.as_strided((rows, first.shape[1]), first.stride())
    _product(x, weight, None if bias is None else bias.as_strided((rows,), (1,)), preact)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, to: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.mT, out=to)
    else:
        torch.addmm(bias, x, weight.mT, out=to)


def _sums(dy: Tensor, dbias: Tensor | None) -> Tensor | None:
    """A row of column sums for every `_ROWS` rows."""
    return None if dbias is None else dbias.new_empty((-(-dy.shape[0] // _ROWS), *dbias.shape))


def _sums_of(sums: Tensor | None, chunk: slice) -> Tensor | None:
    return None if sums is None else sums[chunk.start // _ROWS : -(-chunk.stop // _ROWS)]


def _add_up(sums: Tensor | None, dbias: Tensor | None) -> None:
    if sums is not None and dbias is not None:
        torch.sum(sums, 0, out=dbias)


def gate(u: Tensor, g: Tensor, y: Tensor, activation: str) -> None:
    """The gate alone, and its gradient; see `_gate.py`."""
    _run(u, g, activation, y=y)


def gate_gradient_into(dy: Tensor, u: Tensor, g: Tensor, du: Tensor, dg: Tensor, activation: str) -> None:
    _run(u, g, activation, dy=dy, du=du, dg=dg)


def _gate(
    preact: Preact, spec: Spec, *, y: Tensor | None = None, dy: Tensor | None = None, dpreact: Preact | None = None,
    sums: Tensor | None = None,
) -> None:  # fmt: skip
    u, g = split_preact(preact, spec)
    du, dg = (None, None) if dpreact is None else split_preact(dpreact, spec)
    _run(u, g, spec.activation, y=y, dy=dy, du=du, dg=dg, sums=sums)


def _run(
    u: Tensor, g: Tensor, activation: str, *, y: Tensor | None = None, dy: Tensor | None = None, du: Tensor | None = None,
    dg: Tensor | None = None, sums: Tensor | None = None,
) -> None:  # fmt: skip
    rows, columns = u.shape
    if rows == 0:
        return
    kernel = _kernel()
    kernel.run(
        _CALL.pack(
            u.data_ptr(), g.data_ptr(), _pointer(dy), _pointer(y), _pointer(du), _pointer(dg), _pointer(sums),
            u.stride(0), _row_stride(dy), _row_stride(y), _row_stride(du),
            rows, columns, _KINDS[u.dtype], ACTIVATIONS.index(activation), torch.get_num_threads(),
            kernel.parallel,
        )
    )  # fmt: skip


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _row_stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)
