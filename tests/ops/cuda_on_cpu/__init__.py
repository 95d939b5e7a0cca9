"""The CUDA kernels that rotate, on a CPU: their own source compiled as C++ (`cuda_runtime.h`), so that what they compute, and where
they read and write, is tested where there is no GPU. What they compile to is tested beside this, without one, and how they do on
one there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fusewise._shared import build, cuda
from fusewise.ops._choice import Choice

FOLDER = Path(__file__).parent
HEADERS = tuple(FOLDER / name for name in ("cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h"))
# Products and sums are fused where the source says so. nvcc fuses more, in angles that are computed.
FLAGS = (
    "-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-shared",
    f"-I{FOLDER}", "-x", "c++",
)  # fmt: skip


class Library(cuda.Library):
    """A library of kernels for tensors in the memory of the host."""

    def __init__(self, sources: tuple[Path, ...], name: str) -> None:
        recipe = f"{name}-on-cpu", (*sources, *HEADERS), build.cxx(), FLAGS
        super().__init__(recipe, name)
        self.play = build.library(*recipe).fusewise_on_cpu

    def launch(self, plan: bytes, call: bytes, device: int, op: str) -> None:
        assert self.run(plan, call, None) == 0, op

    def plays(self, *, backwards: bool = False, processors: int = 1) -> Library:
        """A device with so many multiprocessors: of one, little work fills it, so that a thread has several heads. Its threads and
        blocks run in the order of their numbers, or backwards."""
        self.play(backwards, processors)
        return self


@functools.cache
def _library(sources: tuple[Path, ...], name: str) -> Library:
    return Library(sources, name)


def library(implementation: ModuleType, name: str) -> Library:
    """The kernels of an implementation; skips without a compiler."""
    if sys.platform != "linux":
        pytest.skip("fibers are those of Linux")
    try:
        build.cxx()
    except build.BuildError as error:
        pytest.skip(str(error))
    return _library(tuple(path.resolve() for path in implementation.SOURCES), name)


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
