"""`impl="cpu"` of the gated linear unit: BLAS products through torch, and the native gate in `gate.cpp`.

Rows are processed in chunks (`_chunks.py`), on torch's own threads (`_shared/cpu.py`).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

from ...._shared import build, cpu
from .. import _chunks as chunks
from .. import _host
from .._problem import ACTIVATIONS, Halves, Preact, Spec, add_up, new_sums, split_preact

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CALL = Struct("17q")  # `Call` of gate.h
_ROWS = chunks.ROW_MULTIPLE  # rows per row of partial sums, ROWS in gate.cpp


def recipe() -> build.Recipe:
    """Build recipe of the kernel."""
    sources = (*(Path(__file__).with_name(name) for name in ("gate.cpp", "gate.h")), cpu.THREADS, cpu.VECTORS)
    return "gate", sources, build.cxx(), build.NATIVE_FLAGS


@functools.cache
def _built() -> cpu.Kernel:
    kernel = cpu.Kernel(recipe(), "fusewise_gate")
    kernel.run.argtypes = (ctypes.c_char_p,)
    return kernel


def _kernel() -> cpu.Kernel:
    kernel = _built()
    _host.unavailable(kernel)  # loads it once it is built, so that it takes the next call
    return kernel


def unavailable(device_type: str) -> str | None:
    """Why the native kernel cannot serve tensors of this device type, or None if it can; builds it if necessary."""
    return cpu.unavailable(device_type, _kernel)


def path(x: Tensor, halves: Halves) -> str:
    """Explains why the host overhead of calls is higher than necessary; empty if it is not."""
    return _host.explain(_kernel())


def forward(x: Tensor, halves: Halves, spec: Spec, y: Tensor, preact: Preact | None) -> None:
    """`impl="cpu"`: this and the gradients as in `reference.py`."""
    size = chunks.rows_of(2 * y.shape[1] * x.element_size())
    chunks.forward(x, halves, spec, y, preact, lambda u, g, to: gate(u, g, to, spec.activation), size)


def gradient(dy: Tensor, preact: Preact, dpreact: Preact, spec: Spec, dbias: Tensor | None) -> None:
    sums = new_sums(dbias, _parts(dy))
    _gate(preact, spec, dy=dy, dpreact=dpreact, sums=sums)
    add_up(sums, dbias)


def recompute_gradient(
    dy: Tensor, x: Tensor, halves: Halves, dpreact: Preact, spec: Spec, dbias: Tensor | None
) -> None:
    sums = new_sums(dbias, _parts(dy))
    for chunk in chunks.slices(dy.shape[0], chunks.rows_of(2 * dy.shape[1] * x.element_size())):
        part = chunks.part_of(dpreact, chunk, spec)
        chunks.products(x[chunk], halves, spec, part)
        _gate(part, spec, dy=dy[chunk], dpreact=part, sums=_sums_of(sums, chunk))
    add_up(sums, dbias)


def down_gradient(
    dz: Tensor, w_down: Tensor, preact: Tensor, y: Tensor, dpreact: Tensor, spec: Spec, dbias: Tensor | None
) -> None:
    sums = new_sums(dbias, _parts(y))
    for chunk in chunks.slices(y.shape[0], chunks.rows_of(y.shape[1] * y.element_size())):
        chunks.product(dz[chunk], w_down.mT, None, y[chunk])  # dy, which y then overwrites
        _gate(
            chunks.part_of(preact, chunk, spec), spec, dy=y[chunk], y=y[chunk],
            dpreact=chunks.part_of(dpreact, chunk, spec), sums=_sums_of(sums, chunk),
        )  # fmt: skip
    add_up(sums, dbias)


def _parts(y: Tensor) -> int:
    """Parts of the rows with a partial sum each."""
    return -(-y.shape[0] // _ROWS)


def _sums_of(sums: Tensor | None, chunk: slice) -> Tensor | None:
    return None if sums is None else sums[chunk.start // _ROWS : -(-chunk.stop // _ROWS)]


def gate(u: Tensor, g: Tensor, y: Tensor, activation: str) -> None:
    """The gate on its own, and its gradient; see `_gate.py`."""
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
