"""`impl="cuda"` of RoPE: the kernels in `rope.cu`, compiled on first use with the user's nvcc, and their launcher.

The library does not depend on torch: it receives addresses and a stream, so one build works with every torch version.
It contains machine code only for the GPUs of this machine. The headers are shared by all operations that rotate.
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
    FOLDER / name
    for name in ("angles.cuh", "async.cuh", "chunk.cuh", "launch.cuh", "memory.cuh", "words.cuh", "../plan.h")
)
OPERANDS = FOLDER / "operands.cuh"
PARTS = tuple(FOLDER / f"rope_{dtype}.cu" for dtype in ("float", "bfloat16", "half"))
SOURCES = (
    FOLDER / "rope.cu",
    *PARTS,
    *(FOLDER / name for name in ("bulk.cuh", "light.cuh", "rows.cuh", "runs.cuh")),
    cuda.MBARRIER,
    OPERANDS,
    *HEADERS,
)


def recipe(capabilities: tuple[tuple[int, int], ...]) -> build.Recipe:
    """Build recipe of the library for the given compute capabilities."""
    return "rope-cuda", SOURCES, build.nvcc(), (*cuda.flags(capabilities), cuda.PARTS)


@functools.cache
def _kernel() -> cuda.Library:
    needed = recipe(cuda.present())
    build.ahead(needed, _host.recipe)
    return cuda.Library(needed, "fusewise_rope")


def unavailable(device_type: str) -> str | None:
    """Why the CUDA kernels cannot serve tensors of this device type, or None if they can; builds them if necessary."""
    return cuda.unavailable(device_type, _kernel)


def launch(xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], rotation: Rotation) -> None:
    """Rotate every x into its y on the current stream of their device."""
    plan, call = packed(xs, ys, rotation)
    _kernel().launch(plan, call, xs[0].get_device(), "rope")


def register(host: Any) -> None:
    """Register the launcher with the host fast path (`_host.py`)."""
    host.on_cuda(_host.NEW, *_kernel().addresses())
