"""`rope_and_cache_` in CUDA C++: the kernels in `rope_and_cache.cu` and `direct.cuh`, with headers of RoPE's, and their
launcher; built and kept as RoPE's are."""

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
SOURCES = (FOLDER / "rope_and_cache.cu", FOLDER / "direct.cuh", FOLDER / "../plan.h", *rope.HEADERS)


def recipe(capabilities: tuple[tuple[int, int], ...]) -> build.Recipe:
    """What the library for the given compute capabilities is built from."""
    return "rope-and-cache-cuda", SOURCES, build.nvcc(), cuda.flags(capabilities)


@functools.cache
def _kernel() -> cuda.Library:
    made = recipe(cuda.present())
    build.ahead(made, _host.recipe)
    return cuda.Library(made, "fusewise_rope_and_cache")


def unavailable(device_type: str) -> str | None:
    """Why the CUDA kernel cannot serve tensors of this device type, or None if it can; builds it if need be."""
    return cuda.unavailable(device_type, _kernel)


def launch(q: Tensor, *rest: Any) -> None:
    """The implementation `impl="cuda"`: rotate and cache on the current stream of the tensors' device; the arguments are
    those of `CacheProblem.build`."""
    _kernel().launch(*packed(q, *rest), q.get_device(), "rope_and_cache_")


def tell(host: Any) -> None:
    """Tell the quick way on the host (`rope/_host.py`) where the launcher is."""
    host.on_cuda(_host.CACHED, *_kernel().addresses())
