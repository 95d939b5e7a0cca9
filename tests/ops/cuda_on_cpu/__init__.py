"""The CUDA kernels on a CPU: their source compiled as C++ (`cuda_runtime.h`), to test results, memory accesses and
synchronization without a GPU. `hopper.cuh` simulates TMA and barriers, `wgmma.cuh` products. Machine code is tested separately, also
without a GPU, and execution on a GPU where there is one."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fusewise._shared import build, cuda
from fusewise.ops._choice import Choice
from fusewise.ops.rope import _host

FOLDER = Path(__file__).parent
HEADERS = tuple(sorted(path for path in FOLDER.iterdir() if path.suffix in (".h", ".cuh")))
# FMA only where the source requests it. nvcc contracts more, in computed angles.
FLAGS = (
    "-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-shared",
    f"-I{FOLDER}", "-x", "c++",
)  # fmt: skip


class Library(cuda.Library):
    """A library of kernels for tensors in host memory."""

    def __init__(self, sources: tuple[Path, ...], name: str, flags: tuple[str, ...]) -> None:
        recipe = f"{name}-on-cpu", (*sources, *HEADERS), build.cxx(), (*FLAGS, *flags)
        super().__init__(recipe, name)
        self.play, self._waits = self.library.fusewise_on_cpu, getattr(self.library, "fusewise_waits", None)

    def launch(self, plan: bytes, call: bytes, device: int, op: str, run: Any = None) -> None:
        code = (run or self.run)(plan, call, None)
        assert code == 0, f"{op}: {self.error(code)}"

    def waits(self) -> tuple[int, int]:
        """Waits of clusters for each other since the last call: those that ended in step, and those that timed out."""
        found = (ctypes.c_int * 2)()
        self._waits(found)
        return found[0], found[1]

    def plays(
        self, *, backwards: bool = False, processors: int = 1, shared: int = 227 << 10, late: bool = False, mistake: int = -1
    ) -> Library:  # fmt: skip
        """Configure the simulated device: its number of SMs (with one, little work fills it, so that a thread handles several
        heads), the bytes of shared memory of a block, the order of threads and blocks, and whether asynchronous operations run
        at once or as late as possible. `mistake`: which of those in the source is made."""
        self.play(backwards, processors, shared, late, mistake)
        return self


@functools.cache
def _library(sources: tuple[Path, ...], name: str, flags: tuple[str, ...]) -> Library:
    root = os.path.commonpath([source.parent for source in sources])
    with tempfile.TemporaryDirectory() as folder:
        return Library(
            tuple(_copied(source, Path(folder) / source.relative_to(root)) for source in sources), name, flags
        )


def _copied(source: Path, copy: Path) -> Path:
    """Copy a source, or its replacement from this folder, with launches rewritten as C++ and no memory of the device, which
    changes from test to test."""
    instead = FOLDER / source.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    text = (
        (instead if instead.exists() else source).read_text().replace("static Device known[64];", "Device known[64];")
    )
    copy.write_text(re.sub(r"([\w.]+)<<<(.*)>>>\(", r"on_cpu::launch(\1, \2, ", text))
    return copy


def library(implementation: ModuleType, name: str, *flags: str) -> Library:
    """The kernels of an implementation; skips without a compiler."""
    if sys.platform != "linux":
        pytest.skip("fibers are those of Linux")
    try:
        build.cxx().needed()
    except build.BuildError as error:
        pytest.skip(str(error))
    return _library(tuple(path.resolve() for path in implementation.SOURCES), name, flags)


@contextmanager
def through_host(implementation: ModuleType, choice: Choice, kernels: Library) -> Iterator[None]:
    """Make every call of an operation use these kernels for CPU tensors, with RoPE's host extension, whose cache is empty;
    skips without the extension."""
    try:
        _host.extension()
    except build.BuildError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementation, "_kernel", lambda: kernels)
        patch.setattr(choice, "serving", lambda *_: implementation)
        _host.forget()
        yield
    _host.forget()


@contextmanager
def serving(implementation: ModuleType, choice: Choice, kernels: Library) -> Iterator[None]:
    """Make `impl="cuda"` of an operation use these kernels for CPU tensors. Every call goes through Python."""
    answers: tuple[Any, ...] = (
        choice.unavailable,
        choice.choose,
        choice.serving,
    )  # caches that hold answers without these kernels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementation, "_kernel", lambda: kernels)
        patch.setattr(implementation, "unavailable", lambda device_type: None)
        patch.delattr(implementation, "register")
        for answer in answers:
            answer.cache_clear()
        yield
    for answer in answers:
        answer.cache_clear()
