"""`impl="cuda"` of `qk_norm_rope`: the kernels in `qk_norm_rope.cu`, `direct.cuh` and `backward.cuh`, which use RoPE's headers,
and their launcher; built and cached like RoPE's. The backward kernels serve the calls of most models. That of all others is
Triton's: it reads only q and k, so it fits either forward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...._shared import build, cuda
from ...rope import _cuda as rope
from ...rope import _host
from ...rope._problem import Rotation
from .._native import packed, packed_backward
from .._problem import Norm

FOLDER = Path(__file__).parent
PARTS = tuple(FOLDER / f"qk_norm_rope_{dtype}.cu" for dtype in ("float", "bfloat16", "half"))
HEADERS = tuple(FOLDER / name for name in ("backward.cuh", "direct.cuh", "sums.cuh", "../plan.h"))
SOURCES = (FOLDER / "qk_norm_rope.cu", *PARTS, *HEADERS, rope.OPERANDS, *rope.HEADERS)
OTHERWISE = "triton"  # serves the backward of calls that no kernel here does


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


def backward(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    dxs: Sequence[Tensor],
    weights: Sequence[Tensor],
    dweights: Sequence[Tensor],
    rotation: Rotation,
    norm: Norm,
) -> bool:
    """Write the gradient of every x, and of every weight unless `dweights` is empty. Returns whether there is a kernel for
    the call."""
    if any(dy.stride(-1) != 1 and dy.shape[-1] > 1 for dy in dys):  # from an exported program
        return False
    plan, call = packed_backward(dys, xs, dxs, weights, dweights, rotation, norm)
    kernel, x = _kernel(), xs[0]
    count = kernel.function("partials", c_int64, c_char_p, c_char_p, c_int)(plan, call(0), max(x.get_device(), 0))
    if count < 0:
        return False
    partials = torch.empty(count, dtype=torch.float32, device=x.device)
    run = kernel.function("backward", c_int, c_char_p, c_char_p, c_void_p)
    kernel.launch(plan, call(partials.data_ptr()), x.get_device(), "qk_norm_rope", run)
    return True


def register(host: Any) -> None:
    """Register the launcher with the host fast path (`rope/_host.py`)."""
    kernel = _kernel()
    host.on_cuda(_host.NORMED, *kernel.addresses(), *kernel.addresses("backward", "partials"))
