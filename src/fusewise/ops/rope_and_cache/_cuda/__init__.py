"""`impl="cuda"` of `rope_and_cache_`: the kernels in `rope_and_cache.cu` and `direct.cuh`, which use RoPE's headers,
and their launcher; built and cached like RoPE's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import Tensor

from ...._shared import build, cuda
from ...rope import _cuda as rope
from ...rope import _host
from .._native import packed

FOLDER = Path(__file__).parent
PARTS = tuple(FOLDER / f"rope_and_cache_{dtype}.cu" for dtype in ("float", "bfloat16", "half"))
SOURCES = (FOLDER / "rope_and_cache.cu", *PARTS, FOLDER / "direct.cuh", FOLDER / "../plan.h", *rope.HEADERS)


def recipe(capabilities: tuple[tuple[int, int], ...]) -> build.Recipe:
    """Build recipe of the library for the given compute capabilities."""
    return "rope-and-cache-cuda", SOURCES, build.nvcc(), (*cuda.flags(capabilities), cuda.PARTS)


@functools.cache
def _kernel() -> cuda.Library:
    needed = recipe(cuda.present())
    build.ahead(needed, _host.recipe)
    return cuda.Library(needed, "fusewise_rope_and_cache")


def unavailable(device_type: str) -> str | None:
    """Why the CUDA kernel cannot serve tensors of this device type, or None if it can; builds it if necessary."""
    return cuda.unavailable(device_type, _kernel)


def launch(q: Tensor, *rest: Any) -> None:
    """Rotate and cache on the current stream of the tensors' device; the arguments are those of `CacheProblem.build`."""
    _kernel().launch(*packed(q, *rest), q.get_device(), "rope_and_cache_")


def register(host: Any) -> None:
    """Register the launcher with the host fast path (`rope/_host.py`)."""
    host.on_cuda(_host.CACHED, *_kernel().addresses())
