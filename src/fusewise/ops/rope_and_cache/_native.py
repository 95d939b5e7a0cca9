"""A call packed for native code: `CachePlan` and `CacheCall` of `plan.h`, in the same order."""

from __future__ import annotations

from struct import Struct
from typing import Any

import torch
from torch import Tensor

from ..rope import _native as rope
from ._problem import CacheProblem

_PLAN = Struct("22q")
_CALL = Struct("5q")

# Of the calls that have been before: the plan of their places, by all that it depends on.
_PLANS: dict[tuple[Any, ...], bytes] = {}
_PLANS_MAX = 4096


def planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor | None,
    block_table: Tensor | None,
    *rest: Any,
) -> tuple[bytes, int]:
    """The plan, and the distance in bytes from the table to its sine part where both are one tensor; the arguments are those
    of `CacheProblem.build`. A repeated call finds them."""
    *rotation, write_k = rest
    plan, sin_distance = rope.planned((q, k), (q, k), *rotation)
    key = (
        write_k, rotation[-1], v.shape, v.stride(), *[(cache.shape, cache.stride()) for cache in (key_cache, value_cache)],
        *[None if x is None else (x.dtype, x.shape, x.stride()) for x in (slots, block_table)], rotation[4] is None,
    )  # fmt: skip
    places = _PLANS.get(key)
    if places is None:
        places = _places(CacheProblem.build(q, k, v, key_cache, value_cache, slots, block_table, *rest))
        if len(_PLANS) >= _PLANS_MAX:
            _PLANS.clear()
        _PLANS[key] = places
    return plan + places, sin_distance


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor | None,
    block_table: Tensor | None,
    *rest: Any,
) -> tuple[bytes, bytes]:
    """The plan and the call, which has the pointers and the offset."""
    plan, _ = planned(q, k, v, key_cache, value_cache, slots, block_table, *rest)
    _, rotation = rope.packed((q, k), (q, k), *rest[:-1])
    return plan, rotation + _CALL.pack(
        v.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
        0 if slots is None else slots.data_ptr(), 0 if block_table is None else block_table.data_ptr(),
    )  # fmt: skip


def _places(problem: CacheProblem) -> bytes:
    slots, table = problem.slots, problem.block_table
    return _PLAN.pack(
        problem.write_k, problem.v.shape[-1], *problem.v_strides, problem.blocks, problem.block_size,
        *problem.key_cache.stride()[:3], *problem.value_cache.stride()[:3],
        problem.mapped, slots is not None and slots.dtype == torch.int64, *problem.slot_strides,
        0 if table is None else table.shape[1], table is not None and table.dtype == torch.int64,
        *((0, 0) if table is None else table.stride()), problem.sequence_is_token,
    )  # fmt: skip
