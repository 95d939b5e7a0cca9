"""Triton device functions that compute a token's position and load or compute its cos θ and sin θ."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Positions(NamedTuple):
    """Source of token positions: runtime arguments."""

    ptr: Any
    stride_a: Any  # axis
    stride_b: Any
    stride_t: Any
    offsets_ptr: Any
    cu_seqlens_ptr: Any
    offset: Any
    tokens: Any
    sequences: Any
    search_steps: Any


class PositionForm(NamedTuple):
    """Source of token positions: compile-time parameters."""

    SOURCE: Any  # "positions", "running" or "packed"
    HAS_OFFSETS: Any
    SECTION_T: Any
    SECTION_H: Any
    SECTION_W: Any
    SECTIONS_INTERLEAVED: Any
    CP_RANK: Any
    CP_SIZE: Any
    INDEX: Any


class Table(NamedTuple):
    """Source of cos θ and sin θ (a table, or angles or frequencies in place of cos): runtime arguments."""

    cos_ptr: Any
    sin_ptr: Any
    stride_b: Any
    stride_r: Any
    rows: Any
    scale: Any


class TableForm(NamedTuple):
    """Source of cos θ and sin θ: compile-time parameters."""

    KIND: Any  # "cos_sin", "angles" or "inv_freq"
    STEP: Any
    UNIT: Any  # strides are given in units of this many elements
    PAIRS: Any
    INVERSE: Any
    INDEX: Any


@triton.jit
def _sincos(angle):
    """cos and sin of a float64 angle in radians, as float32, to within half an ulp of 1 below 2²⁹.

    Range reduction by quarter turns in float64, then polynomials (Cephes) on [-π/4, π/4]. The float64 work is five
    operations per token and pair, shared by a thread's heads. Float64 conversions run at a quarter of the float64 rate,
    so quarter turns are rounded and counted without one: adding 1.5 · 2⁵² leaves the integer in the low mantissa bits.
    """
    quarter = angle * 0.6366197723675814
    counted = quarter + 6755399441055744.0
    turns = counted - 6755399441055744.0
    x = ((quarter - turns) * 1.5707963267948966).to(tl.float32)
    x2 = x * x
    sin = x + x * x2 * (-1.6666654611e-1 + x2 * (8.3321608736e-3 + x2 * -1.9515295891e-4))
    cos = 1.0 - 0.5 * x2 + x2 * x2 * (4.166664568298827e-2 + x2 * (-1.388731625493765e-3 + x2 * 2.443315711809948e-5))
    quadrant = counted.to(tl.int64, bitcast=True).to(tl.int32) & 3
    swap = (quadrant & 1) == 1
    c = tl.where(swap, sin, cos)
    s = tl.where(swap, cos, sin)
    return tl.where((quadrant == 1) | (quadrant == 2), -c, c), tl.where(quadrant >= 2, -s, s)


@triton.jit
def _chunk_map(token, length, CP_RANK: tl.constexpr, CP_SIZE: tl.constexpr):
    """The position of a local token under load-balanced context parallelism; see `reference._chunk_map`."""
    half = length // 2
    return token + tl.where(token >= half, (2 * CP_SIZE - 2 - CP_RANK) * half, CP_RANK * half)


@triton.jit
def sequence_of(token, mask, positions, CP_SIZE: tl.constexpr):
    """The last sequence that starts at or before the token, by binary search: bound[low] <= token < bound[high]."""
    low = tl.zeros_like(token)
    high = low + positions.sequences + 1
    for _ in range(positions.search_steps):
        middle = (low + high) // 2
        there = middle <= positions.sequences
        below = (tl.load(positions.cu_seqlens_ptr + middle, mask & there, 0) // CP_SIZE <= token) & there
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def table_rows_of(batch, token, mask, offs_p, positions, FORM: tl.constexpr):
    """Table row of each token, (BLOCK_T, 1), or with M-RoPE sections of each token and pair, (BLOCK_T, BLOCK_P); and a
    mask (BLOCK_T,) of tokens that pass through unrotated."""
    identity = token < 0  # none
    if FORM.SOURCE == "positions":
        index = (batch.to(FORM.INDEX) * positions.stride_b + token.to(FORM.INDEX) * positions.stride_t)[:, None]
        if FORM.SECTION_T + FORM.SECTION_H + FORM.SECTION_W == 0:
            rows = tl.load(positions.ptr + index, mask[:, None], 0)
        else:
            if FORM.SECTIONS_INTERLEAVED:
                axis = offs_p % 3
                length = tl.where(axis == 1, FORM.SECTION_H, FORM.SECTION_W)
                axis = tl.where(offs_p < 3 * length, axis, 0)
            else:
                axis = (offs_p >= FORM.SECTION_T).to(tl.int32) + (offs_p >= FORM.SECTION_T + FORM.SECTION_H).to(
                    tl.int32
                )
            pair_mask = offs_p < FORM.SECTION_T + FORM.SECTION_H + FORM.SECTION_W
            index = index + (axis.to(FORM.INDEX) * positions.stride_a)[None, :]
            rows = tl.load(positions.ptr + index, mask[:, None] & pair_mask[None, :], 0)
    elif FORM.SOURCE == "running":
        row = token
        if FORM.CP_SIZE > 1:
            row = _chunk_map(token, positions.tokens, FORM.CP_RANK, FORM.CP_SIZE)
        row = row + positions.offset
        if FORM.HAS_OFFSETS:
            row = row + tl.load(positions.offsets_ptr + batch, mask, 0).to(tl.int64)  # an int32 sum could wrap
        rows = row[:, None]
    else:
        low = sequence_of(token, mask, positions, FORM.CP_SIZE)
        identity = low >= positions.sequences
        start = tl.load(positions.cu_seqlens_ptr + low, mask, 0) // FORM.CP_SIZE
        row = token - start
        if FORM.CP_SIZE > 1:
            end = tl.load(positions.cu_seqlens_ptr + low + 1, mask & (low < positions.sequences), 0) // FORM.CP_SIZE
            row = _chunk_map(row, end - start, FORM.CP_RANK, FORM.CP_SIZE)
        row = row + positions.offset
        if FORM.HAS_OFFSETS:
            offset = tl.load(positions.offsets_ptr + low, mask & (low < positions.sequences), 0)
            row = row + offset.to(tl.int64)
        rows = row[:, None]
    return rows, identity


@triton.jit
def cos_and_sin(
    rows, batch, mask, offs_p, table, FORM: tl.constexpr, HEADS: tl.constexpr, EVICTION: tl.constexpr
):  # fmt: skip
    """cos θ and sin θ in float32, (BLOCK_T, 1, BLOCK_P). From a table with HEADS > 1, (BLOCK_T, HEADS, BLOCK_P): each
    thread loads its own 16 bytes for every head and does not wait for another thread's."""
    pair_mask = (offs_p < FORM.PAIRS)[None, :]
    entry = offs_p.to(FORM.INDEX) * FORM.STEP
    if FORM.KIND == "inv_freq":
        inv_freq = tl.load(table.cos_ptr + entry, offs_p < FORM.PAIRS, 0.0)[None, :]
        cos, sin = _sincos(rows.to(tl.float64) * inv_freq.to(tl.float64))
    else:
        inside = (rows >= 0) & (rows < table.rows) & mask[:, None]
        index = (rows.to(FORM.INDEX) * table.stride_r + (batch.to(FORM.INDEX) * table.stride_b)[:, None]) * FORM.UNIT
        index = index + entry[None, :]
        inside = inside & pair_mask
        if FORM.KIND == "angles":
            cos, sin = _sincos(tl.load(table.cos_ptr + index, inside, 0.0).to(tl.float64))
            cos = tl.where(inside, cos, float("nan"))
            sin = tl.where(inside, sin, float("nan"))
        else:
            if HEADS > 1:
                shape: tl.constexpr = (index.shape[0], HEADS, index.shape[1])
                index = tl.broadcast_to(index[:, None, :], shape)
                inside = tl.broadcast_to(inside[:, None, :], shape)
            cos = tl.load(table.cos_ptr + index, inside, float("nan"), eviction_policy=EVICTION).to(tl.float32)
            sin = tl.load(table.sin_ptr + index, inside, float("nan"), eviction_policy=EVICTION).to(tl.float32)
    if FORM.KIND == "inv_freq" or FORM.KIND == "angles":
        cos = cos * table.scale
        sin = sin * table.scale
    if FORM.INVERSE:
        sin = -sin
    if HEADS == 1 or FORM.KIND == "inv_freq" or FORM.KIND == "angles":
        cos = cos[:, None, :]
        sin = sin[:, None, :]
    return cos, sin
