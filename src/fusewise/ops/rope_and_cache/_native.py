"""A call of `rope_and_cache_` packed for native code: `CachePlan` and `CacheCall` of `plan.h`, in the same order."""

from __future__ import annotations

from struct import Struct
from typing import Any

import torch
from torch import Tensor

from ..._shared.memo import Memo
from ..rope import _native as rope
from ._problem import CacheProblem

_PLAN = Struct("24q")
_CALL = Struct("5q")

# Of the calls that have been before: what their plans have beyond those of the rotation, by all that it depends on.
_PLACES: Memo[tuple[Any, ...], bytes] = Memo(4096)


def planned(q: Tensor, k: Tensor, *rest: Any) -> tuple[bytes, int]:
    """The plan, and the distance in bytes from the table to its sine part where both are one tensor; the arguments are those
    of `CacheProblem.build`. A repeated call finds them."""
    plan, sin_distance = rope.planned((q, k), (q, k), rest[5:-1])
    return plan + _places(q, k, *rest), sin_distance


def packed(q: Tensor, k: Tensor, *rest: Any) -> tuple[bytes, bytes]:
    """The plan and the call, which has the pointers and the offset."""
    plan, call = rope.packed((q, k), (q, k), rest[5:-1])
    return plan + _places(q, k, *rest), call + _CALL.pack(*[0 if x is None else x.data_ptr() for x in rest[:5]])


def _places(q: Tensor, k: Tensor, *rest: Any) -> bytes:
    """What a plan has beyond that of the rotation."""
    v, key_cache, value_cache, slots, table, *rotation, write_k = rest
    key = (
        write_k, rotation[-1], v.shape, v.stride(), *[(cache.shape, cache.stride()) for cache in (key_cache, value_cache)],
        *[None if x is None else (x.dtype, x.shape, x.stride()) for x in (slots, table)], rotation[4] is None,
    )  # fmt: skip
    places = _PLACES.get(key)
    if places is None:
        problem = CacheProblem.build(q, k, *rest)
        places = _PLAN.pack(
            write_k, v.shape[-1], *problem.v_strides, problem.blocks, problem.block_size,
            *key_cache.stride()[:3], *value_cache.stride()[:3],
            slots is not None, problem.mapped, slots is not None and slots.dtype == torch.int64, *problem.slot_strides,
            table is not None, 0 if table is None else table.shape[1], table is not None and table.dtype == torch.int64,
            *((0, 0) if table is None else table.stride()), problem.sequence_is_token,
        )  # fmt: skip
        _PLACES[key] = places
    return places
