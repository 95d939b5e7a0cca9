"""Packs a RoPE call for native code: the structs `Plan` and `Call` of `plan.h`, field by field."""

from __future__ import annotations

from struct import Struct
from typing import Any

import torch
from torch import Tensor

from ..._shared.memo import Memo
from ._problem import Problem, Rotation

_PLAN = Struct("47qd")
_CALL = Struct("10q")
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TABLES = {"cos_sin": 0, "fused": 0, "angles": 1, "inv_freq": 2}

# Packed plans, and the byte distance from cos to sin if both are in one tensor. Keyed by everything these depend on.
_PLANS: Memo[tuple[Any, ...], tuple[bytes, int]] = Memo(4096)


def planned(xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], rotation: Rotation) -> tuple[bytes, int]:
    """The packed plan, and the byte distance from cos to sin if both are in one tensor; cached."""
    cos, sin, positions, offsets, cu_seqlens, _, spec = rotation
    q, k, q_out, k_out = xs[0], xs[-1], ys[0], ys[-1]
    key = (
        spec, len(xs), q.dtype, q.shape, q.stride(), k.shape, k.stride(), q_out.stride(), k_out.stride(),
        q.data_ptr() == q_out.data_ptr() and k.data_ptr() == k_out.data_ptr(), cos.dtype, cos.shape, cos.stride(),
        None if sin is None else sin.stride(),
        None if positions is None else (positions.dtype, positions.shape, positions.stride()),
        None if offsets is None else (offsets.dtype, offsets.stride()),
        None if cu_seqlens is None else (cu_seqlens.dtype, cu_seqlens.shape, cu_seqlens.stride()),
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        problem = Problem.build(xs, ys, rotation)
        plan = _plan(problem), problem.sin.data_ptr() - cos.data_ptr()
        _PLANS[key] = plan
    return plan


def packed(xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], rotation: Rotation) -> tuple[bytes, bytes]:
    """The packed plan, and the packed call with the pointers and the offset."""
    plan, sin_distance = planned(xs, ys, rotation)
    cos, sin, positions, offsets, cu_seqlens, offset, _ = rotation
    table = cos.data_ptr()
    return plan, _CALL.pack(
        xs[0].data_ptr(), xs[-1].data_ptr(), ys[0].data_ptr(), ys[-1].data_ptr(),
        table, table + sin_distance if sin is None else sin.data_ptr(),
        0 if positions is None else positions.data_ptr(),
        0 if offsets is None else offsets.data_ptr(),
        0 if cu_seqlens is None else cu_seqlens.data_ptr(),
        offset,
    )  # fmt: skip


def _plan(problem: Problem) -> bytes:
    spec, q, k = problem.spec, problem.operands[0], problem.operands[-1]
    return _PLAN.pack(
        len(problem.operands), problem.batch, problem.tokens, problem.pairs,
        q.heads, k.heads, q.head_dim, k.head_dim, q.start, k.start, *q.x_strides, *k.x_strides, *q.y_strides, *k.y_strides,
        KINDS[q.x.dtype], KINDS[problem.cos.dtype],
        spec.pairs_in == "interleaved", spec.pairs_out == "interleaved", spec.inverse,
        all(o.x.data_ptr() == o.y.data_ptr() for o in problem.operands),
        _TABLES[spec.table], *problem.table_strides, problem.rows, *problem.position_strides,
        _wide(problem.positions), _wide(problem.offsets), _wide(problem.cu_seqlens),
        0 if problem.cu_seqlens is None else problem.cu_seqlens.shape[0] - 1,
        spec.sections is not None, *(spec.sections or (0, 0, 0)), spec.sections_interleaved, spec.cp_rank, spec.cp_size,
        spec.scale,
    )  # fmt: skip


def _wide(integers: Tensor | None) -> bool:
    return integers is not None and integers.dtype == torch.int64
