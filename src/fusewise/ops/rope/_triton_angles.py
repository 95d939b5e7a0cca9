"""Device functions of RoPE in Triton that find cos θ and sin θ: the position of a token, its table row, or its angles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sincos(angle):
    """cos and sin of a float64 angle in radians, as float32, to half a unit in the last place of 1.

    Reduced in float64 by quarter turns, then polynomials (Cephes) on [-π/4, π/4]. The float64 work is five operations
    a token and pair, shared by the heads that a thread has. Conversions of float64 run at a quarter of its rate, so
    that quarter turns are rounded and counted without one: added to 1.5 · 2⁵², they end at the last bit.
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
def table_rows_of(
    batch, token, mask, offs_p,
    positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens, sequences,
    search_steps,
    SOURCE: tl.constexpr, HAS_OFFSETS: tl.constexpr, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr,
    SECTION_W: tl.constexpr, SECTIONS_INTERLEAVED: tl.constexpr, CP_RANK: tl.constexpr, CP_SIZE: tl.constexpr,
):  # fmt: skip
    """The table row of each token, (BLOCK_T, 1), or of each token and pair, (BLOCK_T, BLOCK_P), where pairs follow
    several axes; and which tokens pass through, (BLOCK_T,)."""
    identity = token < 0  # none
    if SOURCE == "positions":
        index = (batch * stride_pos_b + token * stride_pos_t)[:, None]
        if SECTION_T + SECTION_H + SECTION_W == 0:
            rows = tl.load(positions_ptr + index, mask[:, None], 0)
        else:
            if SECTIONS_INTERLEAVED:
                axis = offs_p % 3
                length = tl.where(axis == 1, SECTION_H, SECTION_W)
                axis = tl.where(offs_p < 3 * length, axis, 0)
            else:
                axis = (offs_p >= SECTION_T).to(tl.int32) + (offs_p >= SECTION_T + SECTION_H).to(tl.int32)
            pair_mask = offs_p < SECTION_T + SECTION_H + SECTION_W
            rows = tl.load(
                positions_ptr + index + (axis * stride_pos_a)[None, :], mask[:, None] & pair_mask[None, :], 0
            )
    elif SOURCE == "running":
        row = token
        if CP_SIZE > 1:
            row = _chunk_map(token, tokens, CP_RANK, CP_SIZE)
        row = row + offset
        if HAS_OFFSETS:
            row = row + tl.load(offsets_ptr + batch, mask, 0)
        rows = row[:, None]
    else:
        # Bisect for the last bound at or below the token: invariant bound[low] <= token < bound[high].
        low = tl.zeros_like(token)
        high = low + sequences + 1
        for _ in range(search_steps):
            middle = (low + high) // 2
            below = tl.load(cu_seqlens_ptr + middle, mask & (middle <= sequences), 0) // CP_SIZE <= token
            below = below & (middle <= sequences)
            low = tl.where(below, middle, low)
            high = tl.where(below, high, middle)
        identity = low >= sequences
        start = tl.load(cu_seqlens_ptr + low, mask, 0) // CP_SIZE
        row = token - start
        if CP_SIZE > 1:
            end = tl.load(cu_seqlens_ptr + low + 1, mask & (low < sequences), 0) // CP_SIZE
            row = _chunk_map(row, end - start, CP_RANK, CP_SIZE)
        row = row + offset
        if HAS_OFFSETS:
            row = row + tl.load(offsets_ptr + low, mask & (low < sequences), 0)
        rows = row[:, None]
    return rows, identity


@triton.jit
def cos_and_sin(
    rows, batch, mask, offs_p,
    cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
    TABLE: tl.constexpr, TABLE_STEP: tl.constexpr, PAIRS: tl.constexpr, INVERSE: tl.constexpr,
    UNIT: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """cos θ and sin θ in float32, (BLOCK_T, BLOCK_P)."""
    pair_mask = (offs_p < PAIRS)[None, :]
    if TABLE == "inv_freq":
        inv_freq = tl.load(cos_ptr + offs_p * TABLE_STEP, offs_p < PAIRS, 0.0)[None, :]
        cos, sin = _sincos(rows.to(tl.float64) * inv_freq.to(tl.float64))
    else:
        inside = (rows >= 0) & (rows < table_rows) & mask[:, None]
        index = (rows.to(INDEX) * stride_table_r + (batch.to(INDEX) * stride_table_b)[:, None]) * UNIT
        index = index + (offs_p * TABLE_STEP)[None, :]
        inside = inside & pair_mask
        if TABLE == "angles":
            cos, sin = _sincos(tl.load(cos_ptr + index, inside, 0.0).to(tl.float64))
            cos = tl.where(inside, cos, float("nan"))
            sin = tl.where(inside, sin, float("nan"))
        else:
            cos = tl.load(cos_ptr + index, inside, float("nan")).to(tl.float32)
            sin = tl.load(sin_ptr + index, inside, float("nan")).to(tl.float32)
    if TABLE == "inv_freq" or TABLE == "angles":
        cos = cos * scale
        sin = sin * scale
    if INVERSE:
        sin = -sin
    return cos, sin
