"""`impl="cpu"` of RoPE: the native kernel in `rope.cpp`, compiled on first use, and its launcher.

It runs on torch's own threads (`_shared/cpu.py`), as many as torch uses at the time of the call.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...._shared import build, cpu
from .._native import packed
from .._problem import Rotation

SOURCES = (*(Path(__file__).parent / name for name in ("rope.cpp", "memory.h", "../plan.h")), cpu.THREADS, cpu.VECTORS)


def recipe() -> build.Recipe:
    """Build recipe of the kernel."""
    return "rope", SOURCES, build.cxx(), build.NATIVE_FLAGS


@functools.cache
def _kernel() -> cpu.Kernel:
    kernel = cpu.Kernel(recipe(), "fusewise_rope")
    kernel.run.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p)
    return kernel


def unavailable(device_type: str) -> str | None:
    """Why the native kernel cannot serve tensors of this device type, or None if it can; builds it if necessary."""
    return cpu.unavailable(device_type, _kernel)


def launch(xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], rotation: Rotation) -> None:
    """Rotate every x into its y."""
    plan, call = packed(xs, ys, rotation)
    kernel = _kernel()
    kernel.run(plan, call, torch.get_num_threads(), kernel.parallel)


def register(host: Any) -> None:
    """Register the kernel with the host fast path (`_host.py`)."""
    kernel = _kernel()
    host.on_cpu(ctypes.cast(kernel.run, ctypes.c_void_p).value, kernel.parallel)
