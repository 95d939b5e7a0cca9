"""The CUDA kernel in `rope_and_cache.cu`, on the headers of RoPE's, and its launcher; built and kept as RoPE's are."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...._shared import build
from ...rope import _cuda as rope
from ...rope._native import packed
from .. import _native
from .._problem import CacheProblem

FOLDER = Path(__file__).parent
SOURCES = (FOLDER / "rope_and_cache.cu", FOLDER / "../plan.h", *rope.HEADERS)


def recipe(capabilities: tuple[tuple[int, int], ...]) -> build.Recipe:
    """What the library for the given compute capabilities is built from."""
    return "rope-and-cache-cuda", SOURCES, build.nvcc(), rope.flags(capabilities)


@functools.cache
def _kernel() -> rope.Library:
    library = rope.Library(recipe(rope.present()), "fusewise_rope_and_cache")
    library.run.argtypes = (*[ctypes.c_char_p] * 4, ctypes.c_void_p)
    return library


def unavailable(device_type: str) -> str | None:
    """Why the CUDA kernel cannot serve tensors of this device type, or None if it can; builds it if need be."""
    if (reason := rope.no_gpu(device_type)) is not None:
        return reason
    try:
        _kernel()
    except build.BuildError as error:
        return str(error)
    return None


# Of the calls that have been before: the plan of their places, by all that it depends on.
_PLANS: dict[tuple[Any, ...], bytes] = {}
_PLANS_MAX = 4096


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor | None,
    block_table: Tensor | None,
    *rest: Any,
) -> None:
    """The implementation `impl="cuda"`: rotate and cache on the current stream of the tensors' device."""
    *rotation, write_k = rest
    plan, call = packed((q, k), (q, k), *rotation)
    caches = key_cache, value_cache
    key = (
        write_k, rotation[-1], v.shape, v.stride(), *[(cache.shape, cache.stride()) for cache in caches],
        None if slots is None else (slots.dtype, slots.shape, slots.stride()),
        None if block_table is None else (block_table.dtype, block_table.shape, block_table.stride()),
        rotation[4] is None,
    )  # fmt: skip
    cache_plan = _PLANS.get(key)
    if cache_plan is None:
        problem = CacheProblem.build(q, k, v, key_cache, value_cache, slots, block_table, *rest)
        cache_plan = _native.plan(problem)
        if len(_PLANS) >= _PLANS_MAX:
            _PLANS.clear()
        _PLANS[key] = cache_plan
    cache_call = _native.call(v, *caches, slots, block_table)
    kernel, device = _kernel(), q.get_device()
    stream = torch._C._cuda_getCurrentRawStream(device)
    if device == torch._C._cuda_getDevice():
        code = kernel.run(plan, call, cache_plan, cache_call, stream)
    else:
        with torch.cuda.device(device):
            code = kernel.run(plan, call, cache_plan, cache_call, stream)
    if code:
        raise RuntimeError(
            f'rope_and_cache_: the CUDA launch must succeed, got {kernel.error(code)}; use impl="triton"'
        )
