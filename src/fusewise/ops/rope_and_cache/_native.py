"""Packs a call of `rope_and_cache_` for native code: the structs `CachePlan` and `CacheCall` of `plan.h`, field by field."""

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

# The packed fields of plans beyond those of the rotation. Keyed by everything these depend on.
_PLACES: Memo[tuple[Any, ...], bytes] = Memo(4096)


def planned(q: Tensor, k: Tensor, *rest: Any) -> tuple[bytes, int]:
    """The packed plan, and the byte distance from cos to sin if both are in one tensor; cached. The arguments are those
    of `CacheProblem.build`."""
    plan, sin_distance = rope.planned((q, k), (q, k), rest[5:-1])
    return plan + _places(q, k, *rest), sin_distance


def packed(q: Tensor, k: Tensor, *rest: Any) -> tuple[bytes, bytes]:
    """The packed plan, and the packed call with the pointers and the offset."""
    plan, call = rope.packed((q, k), (q, k), rest[5:-1])
    return plan + _places(q, k, *rest), call + _CALL.pack(*[0 if x is None else x.data_ptr() for x in rest[:5]])


def _places(q: Tensor, k: Tensor, *rest: Any) -> bytes:
    """The packed fields of a plan beyond those of the rotation."""
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
