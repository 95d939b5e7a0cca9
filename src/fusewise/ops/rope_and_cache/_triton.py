"""`impl="triton"` of `rope_and_cache_`: tiles, arguments and launch of the kernel in `_triton_kernel.py`."""

from __future__ import annotations

import math
from typing import Any

import triton

from ..._shared import triton_launch
from ..._shared.gpu import processors_of
from ..._shared.memo import Memo
from ..._shared.triton_launch import launches_directly
from ..._shared.triton_launch import unavailable as unavailable
from ..rope._triton import NUM_WARPS, choose_tiles, division, named_strides
from ._problem import CacheProblem
from ._triton_kernel import rope_and_cache_kernel


def arguments(problem: CacheProblem, processors: int) -> tuple[int, dict[str, Any]]:
    """Grid size and all kernel arguments for a problem."""
    rotation = problem.rotation
    spec, (q, k) = rotation.spec, rotation.operands
    v, key_cache, value_cache = problem.v, problem.key_cache, problem.value_cache
    all_tokens, itemsize = rotation.batch * rotation.tokens, v.element_size()
    block_p = triton.next_power_of_2(rotation.pairs)
    # v has the same tiles as k.
    lanes = triton.cdiv(block_p * itemsize, 16)
    q_tile, k_tile, _ = choose_tiles(all_tokens, (q.heads, k.heads, k.heads), lanes, processors)
    group = max(q_tile.block_t, k_tile.block_t)
    counts = ((q_tile, q.heads), (k_tile, k.heads), (k_tile, k.heads))
    group_tiles = sum(group // tile.block_t * triton.cdiv(heads, tile.block_h) for tile, heads in counts)

    # Triton specializes a stride only on divisibility by 16, but heads of 72 features are divisible by 8: strides are
    # passed divided by a common unit, which is a constexpr.
    key_strides, value_strides = (
        (cache.stride(0), cache.stride(1), cache.stride(2)) for cache in (key_cache, value_cache)
    )
    unit = math.gcd(16, *q.x_strides, *k.x_strides, *problem.v_strides, *key_strides, *value_strides)
    table_unit = math.gcd(16, *rotation.table_strides[:2])
    token_magic, token_shift = division(max(rotation.tokens, 1))
    size = max(problem.block_size, 1)
    size_magic, size_shift = division(size)
    sections = spec.sections or (0, 0, 0)
    sequences = 0 if rotation.cu_seqlens is None else rotation.cu_seqlens.shape[0] - 1
    slots, table = problem.slots, problem.block_table
    # The table stands in for the pointer of an absent tensor, which is never dereferenced.
    return triton.cdiv(all_tokens, group) * group_tiles, dict(
        q_ptr=q.x, k_ptr=k.x, v_ptr=v, key_cache_ptr=key_cache, value_cache_ptr=value_cache,
        slots_ptr=rotation.cos if slots is None else slots, block_table_ptr=rotation.cos if table is None else table,
        cos_ptr=rotation.cos, sin_ptr=rotation.sin,
        positions_ptr=rotation.cos if rotation.positions is None else rotation.positions,
        offsets_ptr=rotation.cos if rotation.offsets is None else rotation.offsets,
        cu_seqlens_ptr=rotation.cos if rotation.cu_seqlens is None else rotation.cu_seqlens,
        offset=rotation.offset,
        **named_strides("q", q.x_strides, unit), **named_strides("k", k.x_strides, unit), **named_strides("v", problem.v_strides, unit),
        **{f"stride_key_{dim}": stride // unit for dim, stride in zip("nsh", key_strides, strict=True)},
        **{f"stride_value_{dim}": stride // unit for dim, stride in zip("nsh", value_strides, strict=True)},
        stride_slot_b=problem.slot_strides[0], stride_slot_t=problem.slot_strides[1],
        stride_row=0 if table is None else table.stride(0), stride_nth=0 if table is None else table.stride(1),
        stride_table_b=rotation.table_strides[0] // table_unit, stride_table_r=rotation.table_strides[1] // table_unit,
        stride_pos_a=rotation.position_strides[0], stride_pos_b=rotation.position_strides[1],
        stride_pos_t=rotation.position_strides[2],
        table_rows=rotation.rows, scale=spec.scale, tokens=rotation.tokens, batches=rotation.batch,
        token_magic=token_magic, token_shift=token_shift, sequences=sequences, search_steps=sequences.bit_length(),
        mapped=problem.mapped, count=problem.blocks * problem.block_size,
        table_blocks=0 if table is None else table.shape[1], size=size, size_magic=size_magic, size_shift=size_shift,
        Q_HEADS=q.heads, K_HEADS=k.heads, Q_BLOCK_T=q_tile.block_t, Q_BLOCK_H=q_tile.block_h,
        K_BLOCK_T=k_tile.block_t, K_BLOCK_H=k_tile.block_h, Q_START=q.start, HEAD_DIM=k.head_dim, START=k.start,
        V_DIM=v.shape[-1], PAIRS=rotation.pairs, BLOCK_P=block_p,
        INTERLEAVED_IN=spec.pairs_in == "interleaved", INTERLEAVED_OUT=spec.pairs_out == "interleaved",
        TABLE="cos_sin" if spec.table == "fused" else spec.table, TABLE_STEP=rotation.table_strides[2],
        SOURCE="positions" if rotation.positions is not None else "running" if rotation.cu_seqlens is None else "packed",
        HAS_OFFSETS=rotation.offsets is not None,
        SECTION_T=sections[0], SECTION_H=sections[1], SECTION_W=sections[2],
        SECTIONS_INTERLEAVED=spec.sections_interleaved,
        PLACES="slots" if slots is not None else "own" if table is None else "table",
        SEQUENCE_IS_TOKEN=problem.sequence_is_token, WRITE_K=problem.write_k, UNIT=unit, TABLE_UNIT=table_unit,
    )  # fmt: skip


POINTERS = 12  # leading pointer arguments of the kernel, which the offset follows

# Bound launches: the compiled kernel with its grid, the arguments after the offset, and the byte distance from cos to
# sin if both are in one tensor. Keyed by everything these depend on.
_PLANS: Memo[tuple[Any, ...], tuple[Any, tuple[Any, ...], int]] = Memo(4096)


def launch(*call: Any) -> None:
    """`impl="triton"`, on the current stream of the tensors' device; the arguments are those of `CacheProblem.build`. A
    repeated call finds all arguments bound except pointers and offset."""
    (
        q,
        k,
        v,
        key_cache,
        value_cache,
        slots,
        block_table,
        cos,
        sin,
        positions,
        offsets,
        cu_seqlens,
        offset,
        spec,
        write_k,
    ) = call
    device, table = q.get_device(), cos.data_ptr()
    data = q, k, v, key_cache, value_cache
    pointers = [x.data_ptr() for x in data]
    bits = table
    for pointer in pointers:
        bits |= pointer
    # Bound launches assume pointers aligned to 16 bytes; the rare others go through Triton's dispatcher.
    if bits & 15 or not launches_directly():
        _launch_unbound(CacheProblem.build(*call))
        return
    key = (
        spec, write_k, device, cos.dtype, cos.shape, cos.stride(), *[(x.dtype, x.shape, x.stride()) for x in data],
        None if sin is None else (sin.stride(), sin.data_ptr() & 15),
        *[
            None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() & 15)
            for x in (slots, block_table, positions, offsets, cu_seqlens)
        ],
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        problem = CacheProblem.build(*call)
        compiled = _launch_unbound(problem)
        if compiled is not None:
            grid, bound = arguments(problem, processors_of(device))
            rest = tuple(bound.values())[POINTERS + 1 :]
            _PLANS[key] = compiled[(grid, 1, 1)], rest, problem.rotation.sin.data_ptr() - table
        return
    run, rest, sin_distance = plan
    others = [table if x is None else x.data_ptr() for x in (slots, block_table, positions, offsets, cu_seqlens)]
    pointers += [*others[:2], table, table + sin_distance if sin is None else sin.data_ptr(), *others[2:]]
    triton_launch.launch_bound(run, device, *pointers, offset, *rest)


def _launch_unbound(problem: CacheProblem) -> Any:
    """Launch through Triton's dispatcher. Returns the compiled kernel, or None if the grid is empty."""
    device = problem.v.get_device()
    grid, bound = arguments(problem, processors_of(device))
    return triton_launch.launch(rope_and_cache_kernel, grid, bound, device, num_warps=NUM_WARPS)
