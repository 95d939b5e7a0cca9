"""The device code of `qk_norm_rope` forward in Triton: one kernel for q and k together, one program a tile.

    r = 1 / sqrt(mean(x²) + eps),   z = x r (w + offset),   (y_a, y_b) = (z_a cos θ − z_b sin θ, z_b cos θ + z_a sin θ)

Shape legend: T tokens, H heads, P pairs of a head, D features; a tile is BLOCK_T tokens by BLOCK_H heads, all heads of its
tokens where they are normalised together (ALL). Read once from memory: x, and the weights and table rows of a tile; written
once: y. All arithmetic is float32, rounded once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..rope._triton_kernel import base_of, rotate
from ._triton_parts import (
    features_of,
    load_pairs,
    reciprocal_rms,
    store_pairs,
    tokens_of,
    total,
    turn_of,
    weights_of,
)


@triton.jit
def _norm_rotate_tile(
    first_token, tile, x_ptr, y_ptr, w_ptr, stride_x_b, stride_x_t, stride_x_h, stride_y_b, stride_y_t, stride_y_h,
    order, place, eps, weight_offset,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, START: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED_IN: tl.constexpr, INTERLEAVED_OUT: tl.constexpr,
    ALL: tl.constexpr, HAS_WEIGHT: tl.constexpr, TABLE: tl.constexpr, TABLE_STEP: tl.constexpr, SOURCE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr,
    SECTIONS_INTERLEAVED: tl.constexpr, CP_RANK: tl.constexpr, CP_SIZE: tl.constexpr, X_UNIT: tl.constexpr,
    TABLE_UNIT: tl.constexpr, INDEX: tl.constexpr, FLAT: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    share: tl.constexpr = 1 / (HEAD_DIM * HEADS if ALL and HEADS > 0 else HEAD_DIM)
    offs_h = (tile % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    batch, token, mask_n = tokens_of(first_token + (tile // head_blocks) * BLOCK_T, BLOCK_T, *order)
    x_base = base_of(batch, token, offs_h, stride_x_b, stride_x_t, stride_x_h, X_UNIT, INDEX)
    y_base = base_of(batch, token, offs_h, stride_y_b, stride_y_t, stride_y_h, X_UNIT, INDEX)
    w_base, w_mask = weights_of(offs_h, BLOCK_T, HEADS, HEAD_DIM, ALL)
    mask = mask_n[:, None, None]
    if HEADS % BLOCK_H != 0:
        mask = mask & (offs_h < HEADS)[None, :, None]
    mask_r = mask_n[:, None, None] if ALL else mask

    if FLAT:
        # A feature of y is made of the one at its place and its partner in x, and of their weights.
        own, partner, pair, rotated, second = features_of(
            START, PAIRS, BLOCK_D, INTERLEAVED_OUT, INTERLEAVED_IN, VECTOR
        )
        mask = mask & (own < HEAD_DIM)
        x = tl.load(x_ptr + x_base + own, mask, 0.0).to(tl.float32)
        x_partner = tl.load(x_ptr + x_base + partner, mask & rotated, 0.0).to(tl.float32)
        cos, sin = turn_of(
            batch, token, mask_n, pair, *place, SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W,
            SECTIONS_INTERLEAVED, CP_RANK, CP_SIZE, TABLE, TABLE_STEP, PAIRS, TABLE_UNIT, INDEX,
        )  # fmt: skip
        cos = tl.where(rotated, cos, 1.0)
        sin = tl.where(rotated, tl.where(second, sin, -sin), 0.0)
        r = reciprocal_rms(total(x * x, ALL), mask_r, eps, share)
        x, x_partner = x * r, x_partner * r
        if HAS_WEIGHT:
            w_mask = w_mask & (own < HEAD_DIM)
            x *= tl.load(w_ptr + w_base + own, w_mask, 0.0).to(tl.float32) + weight_offset
            x_partner *= tl.load(w_ptr + w_base + partner, w_mask & rotated, 0.0).to(tl.float32) + weight_offset
        y = tl.fma(x, cos, x_partner * sin)
        features = tl.arange(0, BLOCK_D)[None, None, :]
        tl.store(y_ptr + y_base + features, y.to(y_ptr.dtype.element_ty), mask)
    else:
        x_a, x_b = load_pairs(x_ptr, x_base, mask, PAIRS, BLOCK_P, INTERLEAVED_IN)
        cos, sin = turn_of(
            batch, token, mask_n, tl.arange(0, BLOCK_P), *place, SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W,
            SECTIONS_INTERLEAVED, CP_RANK, CP_SIZE, TABLE, TABLE_STEP, PAIRS, TABLE_UNIT, INDEX,
        )  # fmt: skip
        r = reciprocal_rms(total(x_a * x_a + x_b * x_b, ALL), mask_r, eps, share)
        x_a, x_b = x_a * r, x_b * r
        if HAS_WEIGHT:
            w_a, w_b = load_pairs(w_ptr, w_base, w_mask, PAIRS, BLOCK_P, INTERLEAVED_IN)
            x_a, x_b = x_a * (w_a + weight_offset), x_b * (w_b + weight_offset)
        y_a, y_b = rotate(x_a, x_b, cos, sin)
        store_pairs(y_ptr, y_base, mask, y_a, y_b, PAIRS, BLOCK_P, INTERLEAVED_OUT)


def _name(proxy: Any) -> str:
    """The kernel's name in profiles: what it normalises and rotates, and how."""
    c = proxy.constants
    pairing = "interleaved" if c["INTERLEAVED_IN"] else "half"
    over = "all" if c["ALL"] else "head"
    return f"_qk_norm_rope_kernel_fwd_{over}_{pairing}_{c['TABLE']}_h{c['Q_HEADS']}_{c['K_HEADS']}_d{c['HEAD_DIM']}"


def _metadata(grid: Any, kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a launch moves, for profilers: the bytes of q and k, read and written."""
    features = arguments["Q_HEADS"] * arguments["HEAD_DIM"] + arguments["K_HEADS"] * arguments["K_HEAD_DIM"]
    tokens = arguments["tokens"] * arguments["batches"]
    return {"name": kernel.name, "bytes": 2 * tokens * features * arguments["q_ptr"].element_size()}


NOT_SPECIALISED = [
    "offset", "tokens", "batches", "magic", "shift", "stripe", "stripe_magic", "stripe_shift", "sequences", "search_steps",
    "table_rows", "q_programs", "k_programs",
]  # fmt: skip


@triton.jit(repr=_name, launch_metadata=_metadata, do_not_specialize=NOT_SPECIALISED[:-2])
def forward_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr,
    cos_ptr, sin_ptr, positions_ptr, offsets_ptr, cu_seqlens_ptr, offset,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_q_out_b, stride_q_out_t, stride_q_out_h, stride_k_out_b, stride_k_out_t, stride_k_out_h,
    stride_table_b, stride_table_r, stride_pos_a, stride_pos_b, stride_pos_t,
    table_rows, scale, eps, weight_offset,
    tokens, batches, magic, shift, stripe, stripe_magic, stripe_shift, sequences, search_steps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_BLOCK_T: tl.constexpr, Q_BLOCK_H: tl.constexpr,
    K_BLOCK_T: tl.constexpr, K_BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, START: tl.constexpr,
    K_HEAD_DIM: tl.constexpr, K_START: tl.constexpr, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr, INTERLEAVED_OUT: tl.constexpr, ALL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    TABLE: tl.constexpr, TABLE_STEP: tl.constexpr, SOURCE: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr, SECTIONS_INTERLEAVED: tl.constexpr,
    CP_RANK: tl.constexpr, CP_SIZE: tl.constexpr, X_UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr, INDEX: tl.constexpr,
    FLAT: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    order = (tokens, batches, magic, shift, stripe, stripe_magic, stripe_shift)
    place = (
        positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens, sequences,
        search_steps, cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
    )  # fmt: skip
    # The tiles of q and k that rotate the same tokens are neighbours, so that they share table rows in the cache.
    GROUP: tl.constexpr = Q_BLOCK_T if Q_BLOCK_T > K_BLOCK_T else K_BLOCK_T
    q_tiles: tl.constexpr = GROUP // Q_BLOCK_T * ((Q_HEADS + Q_BLOCK_H - 1) // Q_BLOCK_H)
    k_tiles: tl.constexpr = GROUP // K_BLOCK_T * ((K_HEADS + K_BLOCK_H - 1) // K_BLOCK_H)
    first_token = tl.program_id(0) // (q_tiles + k_tiles) * GROUP
    tile = tl.program_id(0) % (q_tiles + k_tiles)
    if tile < q_tiles:
        _norm_rotate_tile(
            first_token, tile, q_ptr, q_out_ptr, q_weight_ptr, stride_q_b, stride_q_t, stride_q_h,
            stride_q_out_b, stride_q_out_t, stride_q_out_h, order, place, eps, weight_offset,
            Q_HEADS, Q_BLOCK_T, Q_BLOCK_H, HEAD_DIM, START, PAIRS, BLOCK_P, INTERLEAVED_IN, INTERLEAVED_OUT,
            ALL, HAS_WEIGHT, TABLE, TABLE_STEP, SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W,
            SECTIONS_INTERLEAVED, CP_RANK, CP_SIZE, X_UNIT, TABLE_UNIT, INDEX, FLAT, BLOCK_D, VECTOR,
        )  # fmt: skip
    elif K_HEADS > 0:
        _norm_rotate_tile(
            first_token, tile - q_tiles, k_ptr, k_out_ptr, k_weight_ptr, stride_k_b, stride_k_t, stride_k_h,
            stride_k_out_b, stride_k_out_t, stride_k_out_h, order, place, eps, weight_offset,
            K_HEADS, K_BLOCK_T, K_BLOCK_H, K_HEAD_DIM, K_START, PAIRS, BLOCK_P, INTERLEAVED_IN, INTERLEAVED_OUT,
            ALL, HAS_WEIGHT, TABLE, TABLE_STEP, SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W,
            SECTIONS_INTERLEAVED, CP_RANK, CP_SIZE, X_UNIT, TABLE_UNIT, INDEX, FLAT, BLOCK_D, VECTOR,
        )  # fmt: skip
