"""RoPE in CUDA C++: the kernels in `rope.cu`, compiled on first use with the user's nvcc, and their launcher.

The headers serve every operation that rotates.

The library knows nothing of torch: it is handed addresses and a stream, so one build serves every version of torch. It
has machine code for the GPUs of this machine only.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import Tensor

from ...._shared import build, cuda
from .. import _host
from .._native import packed
from .._problem import Rotation

FOLDER = Path(__file__).parent
HEADERS = tuple(
    FOLDER / name for name in ("angles.cuh", "chunk.cuh", "launch.cuh", "memory.cuh", "words.cuh", "../plan.h")
)
SOURCES = (*(FOLDER / name for name in ("rope.cu", "bulk.cuh", "light.cuh", "rows.cuh", "runs.cuh")), *HEADERS)


def recipe(capabilities: tuple[tuple[int, int], ...]) -> build.Recipe:
    """What the library for the given compute capabilities is built from."""
    return "rope-cuda", SOURCES, build.nvcc(), cuda.flags(capabilities)


@functools.cache
def _kernel() -> cuda.Library:
    made = recipe(cuda.present())
    build.ahead(made, _host.recipe)
    return cuda.Library(made, "fusewise_rope")


def unavailable(device_type: str) -> str | None:
    """Why the CUDA kernels cannot serve tensors of this device type, or None if they can; builds them if need be."""
    return cuda.unavailable(device_type, _kernel)


def launch(xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], rotation: Rotation) -> None:
    """The implementation `impl="cuda"`: rotate every x into its y on the current stream of their device."""
    plan, call = packed(xs, ys, rotation)
    _kernel().launch(plan, call, xs[0].get_device(), "rope")


def tell(host: Any) -> None:
    """Tell the quick way on the host (`_host.py`) where the launcher is."""
    host.on_cuda(_host.NEW, *_kernel().addresses())
