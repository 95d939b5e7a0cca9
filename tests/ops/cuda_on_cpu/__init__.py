"""The CUDA kernels of RoPE on a CPU: their own source compiled as C++ (`cuda_runtime.h`), so that what they compute, and where
they read and write, is tested where there is no GPU. What they compile to is tested beside this, without one, and how they do on
one there."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fusewise._shared import build
from fusewise.ops._choice import Choice

FOLDER = Path(__file__).parent
HEADERS = tuple(FOLDER / name for name in ("cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h"))
# Products and sums are fused where the source says so. nvcc fuses more, in angles that are computed.
FLAGS = (
    "-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-shared",
    f"-I{FOLDER}", "-x", "c++",
)  # fmt: skip


class Library:
    """A library of kernels as `rope._cuda.Library` is one, for tensors in the memory of the host."""

    def __init__(self, sources: tuple[Path, ...], name: str) -> None:
        self.library = build.library(f"{name}-on-cpu", (*sources, *HEADERS), build.cxx(), FLAGS)
        self.run = getattr(self.library, name)
        self.run.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)

    def launch(self, plan: bytes, call: bytes, device: int, op: str) -> None:
        assert self.run(plan, call, None) == 0, op

    def play(self, *, backwards: bool, processors: int) -> None:
        """Threads and blocks in the order of their numbers, or backwards; so many multiprocessors."""
        self.library.fusewise_on_cpu(backwards, processors)


@functools.cache
def _library(sources: tuple[Path, ...], name: str) -> Library:
    return Library(sources, name)


def played(monkeypatch: pytest.MonkeyPatch, cuda: ModuleType, choice: Choice, name: str) -> Library:
    """The implementation `cuda` of an operation serves the memory of the host, for the test; skips without a compiler."""
    if sys.platform != "linux":
        pytest.skip("fibers are those of Linux")
    try:
        build.cxx()
    except build.BuildError as error:
        pytest.skip(str(error))
    library = _library(tuple(path.resolve() for path in cuda.SOURCES), name)
    monkeypatch.setattr(cuda, "_kernel", lambda: library)
    monkeypatch.setattr(cuda, "unavailable", lambda device_type: None)
    monkeypatch.delattr(cuda, "tell")  # the quick way on the host is for GPUs
    for answer in ("unavailable", "choose", "serving"):  # those that are kept are of a machine without these kernels
        uncached: Any = getattr(choice, answer).__wrapped__
        monkeypatch.setattr(choice, answer, uncached)
    return library
