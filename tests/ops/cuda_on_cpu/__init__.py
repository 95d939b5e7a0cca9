"""The CUDA kernels on a CPU: their own source compiled as C++ (`cuda_runtime.h`), so that what they compute, where they read and
write, and what they wait for is tested where there is no GPU. Of Hopper's machinery there is a machine (`hopper.cuh`). What they
compile to is tested beside this, without a GPU, too, and how they do on one there."""

from __future__ import annotations

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

FOLDER = Path(__file__).parent
HEADERS = tuple(sorted(path for path in FOLDER.iterdir() if path.suffix in (".h", ".cuh")))
# Products and sums are fused where the source says so. nvcc fuses more, in angles that are computed.
FLAGS = (
    "-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-shared",
    f"-I{FOLDER}", "-x", "c++",
)  # fmt: skip


class Library(cuda.Library):
    """A library of kernels for tensors in the memory of the host."""

    def __init__(self, sources: tuple[Path, ...], name: str, flags: tuple[str, ...]) -> None:
        recipe = f"{name}-on-cpu", (*sources, *HEADERS), build.cxx(), (*FLAGS, *flags)
        super().__init__(recipe, name)
        self.play = build.library(*recipe).fusewise_on_cpu

    def launch(self, plan: bytes, call: bytes, device: int, op: str) -> None:
        code = self.run(plan, call, None)
        assert code == 0, f"{op}: {self.error(code)}"

    def plays(self, *, backwards: bool = False, processors: int = 1, late: bool = False) -> Library:
        """A device with so many multiprocessors: of one, little work fills it, so that a thread has several heads. Its threads and
        blocks run in the order of their numbers, or backwards; what is asynchronous is done at once, or late."""
        self.play(backwards, processors, late)
        return self


@functools.cache
def _library(sources: tuple[Path, ...], name: str, flags: tuple[str, ...]) -> Library:
    root = os.path.commonpath([source.parent for source in sources])
    with tempfile.TemporaryDirectory() as folder:
        return Library(
            tuple(_copied(source, Path(folder) / source.relative_to(root)) for source in sources), name, flags
        )


def _copied(source: Path, copy: Path) -> Path:
    """A source, or what stands for it here, with launches that are C++."""
    instead = FOLDER / source.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    text = (instead if instead.exists() else source).read_text()
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
def serving(implementation: ModuleType, choice: Choice, kernels: Library) -> Iterator[None]:
    """`impl="cuda"` of an operation takes them for tensors of a CPU. Every call goes through Python."""
    answers: tuple[Any, ...] = (
        choice.unavailable,
        choice.choose,
        choice.serving,
    )  # kept, of a machine without these kernels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementation, "_kernel", lambda: kernels)
        patch.setattr(implementation, "unavailable", lambda device_type: None)
        patch.delattr(implementation, "tell")
        for answer in answers:
            answer.cache_clear()
        yield
    for answer in answers:
        answer.cache_clear()
