"""RoPE on a CPU: the native kernel in `rope.cpp`, compiled on first use, and its launcher.

Threads are as many as torch uses at the time of the call, and they are torch's own: the kernel is handed the entry of
the OpenMP runtime that torch has loaded, so that there is one pool of threads in the process. In a forked child, where
that runtime's threads are gone, and where there is no such runtime, the kernel starts threads of its own.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from ...._shared import build
from .._problem import Problem, Spec

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TABLES = {"cos_sin": 0, "fused": 0, "angles": 1, "inv_freq": 2}
_PLAN = Struct("47qd")  # `Plan` of rope.cpp
_CALL = Struct("12q")  # `Call`


class _Kernel:
    """The loaded kernel."""

    def __init__(self) -> None:
        sources = [Path(__file__).with_name(name) for name in ("rope.cpp", "memory.h", "vectors.h")]
        library = build.library("rope", sources, build.cxx(), build.NATIVE_FLAGS)
        self.run = library.fusewise_rope
        self.run.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
        self.run.restype = None
        self.parallel = _parallel()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.parallel = 0


def _parallel() -> int:
    """The address of `GOMP_parallel` in the OpenMP runtime that torch loaded, GNU's or LLVM's; 0 if there is none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except AttributeError:
        return 0


@functools.cache
def _kernel() -> _Kernel:
    return _Kernel()


def unavailable(device_type: str) -> str | None:
    """Why the native kernel cannot serve tensors of this device type, or None if it can; builds it if need be."""
    if device_type != "cpu":
        return f"cpu is native code for tensors in the memory of the host, not on device type {device_type}"
    try:
        _kernel()
    except build.BuildError as error:
        return str(error)
    return None


# By all that it depends on: the packed plan, and the distance in bytes from the table to its sine part where both are
# one tensor.
_PLANS: dict[tuple[Any, ...], tuple[bytes, int]] = {}
_PLANS_MAX = 4096


def launch(
    xs: tuple[Tensor, ...],
    ys: tuple[Tensor, ...],
    cos: Tensor,
    sin: Tensor | None,
    positions: Tensor | None,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    spec: str,
) -> None:
    """The implementation `impl="cpu"`: rotate every x into its y. A repeated call finds its plan packed, which leaves
    the pointers and the offset."""
    q, k, q_out, k_out = xs[0], xs[-1], ys[0], ys[-1]
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr = (
        q.data_ptr(), k.data_ptr(), q_out.data_ptr(), k_out.data_ptr(), cos.data_ptr()
    )  # fmt: skip
    key = (
        spec, len(xs), q.dtype, q.shape, q.stride(), k.shape, k.stride(), q_out.stride(), k_out.stride(),
        q_ptr == q_out_ptr and k_ptr == k_out_ptr, cos.dtype, cos.shape, cos.stride(),
        None if positions is None else (positions.dtype, positions.shape, positions.stride()),
        None if offsets is None else offsets.dtype,
        None if cu_seqlens is None else (cu_seqlens.dtype, cu_seqlens.shape),
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        problem = Problem.build(xs, ys, cos, sin, positions, offsets, cu_seqlens, offset, Spec.decode(spec))
        plan = _pack(problem), problem.sin.data_ptr() - cos_ptr
        if len(_PLANS) >= _PLANS_MAX:
            _PLANS.clear()
        _PLANS[key] = plan
    packed, sin_distance = plan
    kernel = _kernel()
    kernel.run(
        packed,
        _CALL.pack(
            q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, cos_ptr + sin_distance if sin is None else sin.data_ptr(),
            0 if positions is None else positions.data_ptr(),
            0 if offsets is None else offsets.data_ptr(),
            0 if cu_seqlens is None else cu_seqlens.data_ptr(),
            offset, torch.get_num_threads(), kernel.parallel,
        ),
    )  # fmt: skip


def _pack(problem: Problem) -> bytes:
    """The problem as `Plan` of rope.cpp."""
    spec, q, k = problem.spec, problem.operands[0], problem.operands[-1]
    return _PLAN.pack(
        len(problem.operands), problem.batch, problem.tokens, problem.pairs,
        q.heads, k.heads, q.head_dim, k.head_dim, q.start, k.start, *q.x_strides, *k.x_strides, *q.y_strides, *k.y_strides,
        _KINDS[q.x.dtype], _KINDS[problem.cos.dtype],
        spec.pairs_in == "interleaved", spec.pairs_out == "interleaved", spec.inverse, all(o.x.data_ptr() == o.y.data_ptr() for o in problem.operands),
        _TABLES[spec.table], *problem.table_strides, problem.rows, *problem.position_strides,
        _wide(problem.positions), _wide(problem.offsets), _wide(problem.cu_seqlens),
        0 if problem.cu_seqlens is None else problem.cu_seqlens.shape[0] - 1,
        spec.sections is not None, *(spec.sections or (0, 0, 0)), spec.sections_interleaved, spec.cp_rank, spec.cp_size,
        spec.scale,
    )  # fmt: skip


def _wide(integers: Tensor | None) -> bool:
    return integers is not None and integers.dtype == torch.int64
