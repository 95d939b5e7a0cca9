"""`impl="cuda"` of `qk_norm_rope`: the forward kernels in `qk_norm_rope.cu` and `direct.cuh`, which use RoPE's headers, and
their launcher; built and cached like RoPE's. The backward is Triton's: it reads only q and k, so it fits either forward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ...._shared import build, cuda
from ...rope import _cuda as rope
from ...rope import _host
from ...rope._problem import Rotation
from .._native import packed
from .._problem import Norm

FOLDER = Path(__file__).parent
PARTS = tuple(FOLDER / f"qk_norm_rope_{dtype}.cu" for dtype in ("float", "bfloat16", "half"))
HEADERS = tuple(FOLDER / name for name in ("direct.cuh", "sums.cuh", "../plan.h"))
SOURCES = (FOLDER / "qk_norm_rope.cu", *PARTS, *HEADERS, rope.OPERANDS, *rope.HEADERS)
OTHERWISE = "triton"  # which has the backward


def recipe(capabilities: tuple[tuple[int, int], ...]) -> build.Recipe:
    """Build recipe of the library for the given compute capabilities."""
    return "qk-norm-rope-cuda", SOURCES, build.nvcc(), (*cuda.flags(capabilities), cuda.PARTS)


@functools.cache
def _kernel() -> cuda.Library:
    needed = recipe(cuda.present())
    build.ahead(needed, _host.recipe)
    return cuda.Library(needed, "fusewise_qk_norm_rope")


def unavailable(device_type: str) -> str | None:
    """Why the CUDA kernels cannot serve tensors of this device type, or None if they can; builds them if necessary."""
    return cuda.unavailable(device_type, _kernel)


def forward(
    xs: Sequence[Tensor], ys: Sequence[Tensor], weights: Sequence[Tensor], rotation: Rotation, norm: Norm
) -> None:
    """Write the result for every x into its y on the current stream of their device."""
    plan, call = packed(tuple(xs), tuple(ys), weights, rotation, norm)
    _kernel().launch(plan, call, xs[0].get_device(), "qk_norm_rope")


def register(host: Any) -> None:
    """Register the launcher with the host fast path (`rope/_host.py`)."""
    host.on_cuda(_host.NORMED, *_kernel().addresses())
