"""Native CPU kernels: built on first use, loaded once, run on torch's own threads.

A kernel receives the entry point of the OpenMP runtime that torch has loaded, so that the process has a single thread
pool. In a forked child, where that runtime's threads are gone, or without such a runtime, it receives 0 and starts its
own threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from . import build

THREADS, VECTORS = (Path(__file__).with_name(name) for name in ("threads.h", "vectors.h"))


class Kernel:
    """The function `name` of a library, which returns nothing, and `parallel`, the entry point to pass to it."""

    def __init__(self, recipe: build.Recipe, name: str) -> None:
        self.run = getattr(build.library(*recipe), name)
        self.run.restype = None
        self.parallel = _parallel()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.parallel = 0


def _parallel() -> int:
    """The address of `GOMP_parallel` in the OpenMP runtime that torch loaded, GNU's or LLVM's; 0 if there is none that works."""
    if build.FORKED:
        return 0
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except AttributeError:
        return 0


def unavailable(device_type: str, kernel: Callable[[], Kernel]) -> str | None:
    """Why the kernel that `kernel` loads cannot serve tensors of this device type, or None if it can; builds it if
    necessary."""
    if device_type != "cpu":
        return f"cpu runs on tensors in host memory, not on device type {device_type}"
    try:
        kernel()
    except build.BuildError as error:
        return str(error)
    return None
