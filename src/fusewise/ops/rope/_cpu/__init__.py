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
from typing import Any

import torch
from torch import Tensor

from ...._shared import build
from .._native import packed

SOURCES = tuple(Path(__file__).parent / name for name in ("rope.cpp", "memory.h", "vectors.h", "../plan.h"))


def recipe() -> build.Recipe:
    """What the kernel is built from."""
    return "rope", SOURCES, build.cxx(), build.NATIVE_FLAGS


class _Kernel:
    """The loaded kernel."""

    def __init__(self) -> None:
        library = build.library(*recipe())
        self.run = library.fusewise_rope
        self.run.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p)
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
    """The implementation `impl="cpu"`: rotate every x into its y."""
    plan, call = packed(xs, ys, cos, sin, positions, offsets, cu_seqlens, offset, spec)
    kernel = _kernel()
    kernel.run(plan, call, torch.get_num_threads(), kernel.parallel)


def tell(host: Any) -> None:
    """Tell the quick way on the host (`_host.py`) where the kernel is."""
    kernel = _kernel()
    host.on_cpu(ctypes.cast(kernel.run, ctypes.c_void_p).value, kernel.parallel)
