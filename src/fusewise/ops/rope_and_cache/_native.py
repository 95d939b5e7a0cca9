"""What a call has beyond its rotation, packed for native code: `CachePlan` and `CacheCall` of `plan.h`, in the same order."""

from __future__ import annotations

from struct import Struct

import torch
from torch import Tensor

from ._problem import CacheProblem

PLAN = Struct("22q")
_CALL = Struct("5q")


def plan(problem: CacheProblem) -> bytes:
    slots, table = problem.slots, problem.block_table
    return PLAN.pack(
        problem.write_k, problem.v.shape[-1], *problem.v_strides, problem.blocks, problem.block_size,
        *problem.key_cache.stride()[:3], *problem.value_cache.stride()[:3],
        problem.mapped, slots is not None and slots.dtype == torch.int64, *problem.slot_strides,
        0 if table is None else table.shape[1], table is not None and table.dtype == torch.int64,
        *((0, 0) if table is None else table.stride()), problem.sequence_is_token,
    )  # fmt: skip


def call(v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor | None, table: Tensor | None) -> bytes:
    return _CALL.pack(
        v.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
        0 if slots is None else slots.data_ptr(), 0 if table is None else table.data_ptr(),
    )  # fmt: skip
