"""Reference implementation of `rope_and_cache_` in plain torch, on any device, in float64 for float64 tensors; every
kernel is tested against it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..rope import reference as rotation
from ._problem import CacheProblem


def launch(*arguments: Any) -> None:
    """`impl="reference"`; the arguments are those of `CacheProblem.build`."""
    problem = CacheProblem.build(*arguments)
    q, k = (operand.x for operand in problem.rotation.operands)
    q_rotated, k_rotated = rotation.rotate(problem.rotation)
    slots_BT = token_slots(problem)
    for cache, x in ((problem.key_cache, k_rotated), (problem.value_cache, problem.v)):
        _write(cache, rotation.to_bthd(x, problem.rotation.spec), slots_BT)
    q.copy_(q_rotated)
    if problem.write_k:
        k.copy_(k_rotated)


def token_slots(problem: CacheProblem) -> Tensor:
    """The slot of every token, int64 (B, T); -1 for none."""
    of, size = problem.rotation, problem.block_size
    device = problem.v.device
    token = torch.arange(of.tokens, device=device)
    if problem.slots is not None:
        slots = torch.full((of.batch, of.tokens), -1, device=device)
        slots[:, : problem.mapped] = problem.slots
    else:
        rows, _ = rotation.token_rows(of)
        position = rows[:, :, 0].expand(of.batch, of.tokens)
        sequence = _sequences(problem, token)
        block, entry = position.div(max(size, 1), rounding_mode="floor"), position % max(size, 1)
        if problem.block_table is None:
            slots = torch.where(block == 0, sequence * size + entry, -1)
        else:
            count, width = problem.block_table.shape
            there = (block >= 0) & (block < width) & (sequence < count)
            if count and width:
                safe = sequence.clamp(max=count - 1).expand_as(block), block.clamp(0, width - 1)
                table = problem.block_table.long()[safe]
                there &= (table >= 0) & (table < problem.blocks)
                slots = torch.where(there, table * size + entry, -1)
            else:
                slots = torch.full_like(position, -1)
    if of.cu_seqlens is not None:
        slots = torch.where(token >= of.cu_seqlens[-1], -1, slots)
    return torch.where((slots >= 0) & (slots < problem.blocks * size), slots, -1)


def _sequences(problem: CacheProblem, token: Tensor) -> Tensor:
    """The sequence of every token, int64 (B | 1, T | 1)."""
    of = problem.rotation
    if of.cu_seqlens is not None:
        return (torch.searchsorted(of.cu_seqlens.long(), token, right=True) - 1).clamp(min=0)[None]
    return token[None] if problem.sequence_is_token else torch.arange(of.batch, device=token.device)[:, None]


def _write(cache: Tensor, x_BTHD: Tensor, slots_BT: Tensor) -> None:
    there = slots_BT >= 0
    slots, size = slots_BT[there], max(cache.shape[1], 1)
    cache[slots // size, slots % size] = x_BTHD[there]
