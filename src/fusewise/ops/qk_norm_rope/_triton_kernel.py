"""Triton forward kernel of `qk_norm_rope`: one launch for q and k, one program per tile.

    r = 1 / sqrt(mean(x²) + eps),   z = x r (w + offset),   (y_a, y_b) = (z_a cos θ − z_b sin θ, z_b cos θ + z_a sin θ)

Shape legend: T tokens, H heads, P pairs of a head, D features; a tile is BLOCK_T tokens by BLOCK_H heads, with ALL all
heads of its tokens, which are then normalized together. A program reads x and the weights and table rows of its tile
once, and writes y once. Arithmetic is float32 with one final rounding.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..rope._triton_angles import PositionForm, Positions, Table, TableForm
from ..rope._triton_kernel import Order, View, base_of, metadata, rotate
from ._triton_parts import (
    Form,
    features_of,
    load_pairs,
    reciprocal_rms,
    rounded_product,
    store_pairs,
    tokens_of,
    total,
    turn_of,
    weights_of,
)


@triton.jit
def _norm_rotate_tile(
    first_token, tile, x, y, w_ptr, order, positions, table, eps, weight_offset,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, START: tl.constexpr,
    FORM: tl.constexpr, POSITIONS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    share: tl.constexpr = 1 / (HEAD_DIM * HEADS if FORM.ALL and HEADS > 0 else HEAD_DIM)
    offs_h = (tile % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    batch, token, mask_n = tokens_of(first_token + (tile // head_blocks) * BLOCK_T, BLOCK_T, order)
    x_base = base_of(batch, token, offs_h, x, FORM.UNIT, FORM.INDEX)
    y_base = base_of(batch, token, offs_h, y, FORM.UNIT, FORM.INDEX)
    w_base, w_mask = weights_of(offs_h, BLOCK_T, HEADS, HEAD_DIM, FORM.ALL)
    mask = mask_n[:, None, None]
    if HEADS % BLOCK_H != 0:
        mask = mask & (offs_h < HEADS)[None, :, None]
    mask_r = mask_n[:, None, None] if FORM.ALL else mask

    if FORM.FLAT:
        # A feature of y is computed from the corresponding feature of x and its partner, and their weights.
        own, partner, pair, rotated, second = features_of(
            START, FORM.PAIRS, FORM.BLOCK_D, FORM.INTERLEAVED_OUT, FORM.INTERLEAVED_IN, FORM.VECTOR
        )
        mask = mask & (own < HEAD_DIM)
        own_x = tl.load(x.ptr + x_base + own, mask, 0.0).to(tl.float32)
        partner_x = tl.load(x.ptr + x_base + partner, mask & rotated, 0.0).to(tl.float32)
        cos, sin = turn_of(batch, token, mask_n, pair, positions, table, POSITIONS, TABLE)
        cos = tl.where(rotated, cos, 1.0)
        sin = tl.where(rotated, tl.where(second, sin, -sin), 0.0)
        r = reciprocal_rms(total(rounded_product(own_x, own_x), FORM.ALL), mask_r, eps, share)
        z, z_partner = own_x * r, partner_x * r
        if FORM.HAS_WEIGHT:
            w_mask = w_mask & (own < HEAD_DIM)
            z *= tl.load(w_ptr + w_base + own, w_mask, 0.0).to(tl.float32) + weight_offset
            z_partner *= tl.load(w_ptr + w_base + partner, w_mask & rotated, 0.0).to(tl.float32) + weight_offset
        rotation = tl.fma(z, cos, z_partner * sin)
        features = tl.arange(0, FORM.BLOCK_D)[None, None, :]
        tl.store(y.ptr + y_base + features, rotation.to(y.ptr.dtype.element_ty), mask)
    else:
        x_a, x_b = load_pairs(x.ptr, x_base, mask, FORM.PAIRS, FORM.BLOCK_P, FORM.INTERLEAVED_IN)
        cos, sin = turn_of(batch, token, mask_n, tl.arange(0, FORM.BLOCK_P), positions, table, POSITIONS, TABLE)
        r = reciprocal_rms(total(x_a * x_a + x_b * x_b, FORM.ALL), mask_r, eps, share)
        x_a, x_b = x_a * r, x_b * r
        if FORM.HAS_WEIGHT:
            w_a, w_b = load_pairs(w_ptr, w_base, w_mask, FORM.PAIRS, FORM.BLOCK_P, FORM.INTERLEAVED_IN)
            x_a, x_b = x_a * (w_a + weight_offset), x_b * (w_b + weight_offset)
        y_a, y_b = rotate(x_a, x_b, cos, sin)
        store_pairs(y.ptr, y_base, mask, y_a, y_b, FORM.PAIRS, FORM.BLOCK_P, FORM.INTERLEAVED_OUT)


def _name(proxy: Any) -> str:
    """Kernel name shown by profilers: norm, pairing, table kind and shape."""
    c = proxy.constants
    pairing = "interleaved" if c["INTERLEAVED_IN"] else "half"
    over = "all" if c["ALL"] else "head"
    return f"_qk_norm_rope_kernel_fwd_{over}_{pairing}_{c['TABLE']}_h{c['Q_HEADS']}_{c['K_HEADS']}_d{c['HEAD_DIM']}"


NOT_SPECIALIZED = [
    "offset", "tokens", "batches", "magic", "shift", "stripe", "stripe_magic", "stripe_shift", "sequences", "search_steps",
    "table_rows", "q_programs", "k_programs",
]  # fmt: skip


@triton.jit(repr=_name, launch_metadata=metadata(2), do_not_specialize=NOT_SPECIALIZED[:-2])
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
    # Programs for q and k tiles of the same tokens have adjacent ids, so that they share table rows in L2.
    GROUP: tl.constexpr = Q_BLOCK_T if Q_BLOCK_T > K_BLOCK_T else K_BLOCK_T
    q_tiles: tl.constexpr = GROUP // Q_BLOCK_T * ((Q_HEADS + Q_BLOCK_H - 1) // Q_BLOCK_H)
    k_tiles: tl.constexpr = GROUP // K_BLOCK_T * ((K_HEADS + K_BLOCK_H - 1) // K_BLOCK_H)
    first_token = tl.program_id(0) // (q_tiles + k_tiles) * GROUP
    tile = tl.program_id(0) % (q_tiles + k_tiles)
    order = Order(tokens, batches, magic, shift, stripe, stripe_magic, stripe_shift)
    positions = Positions(
        positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens, sequences,
        search_steps,
    )  # fmt: skip
    table = Table(cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale)
    form: tl.constexpr = Form(
        PAIRS, BLOCK_P, INTERLEAVED_IN, INTERLEAVED_OUT, ALL, HAS_WEIGHT, X_UNIT, INDEX, FLAT, BLOCK_D, VECTOR
    )
    position_form: tl.constexpr = PositionForm(
        SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W, SECTIONS_INTERLEAVED, CP_RANK, CP_SIZE, INDEX
    )
    table_form: tl.constexpr = TableForm(TABLE, TABLE_STEP, TABLE_UNIT, PAIRS, False, INDEX)
    if tile < q_tiles:
        _norm_rotate_tile(
            first_token, tile,
            View(q_ptr, stride_q_b, stride_q_t, stride_q_h),
            View(q_out_ptr, stride_q_out_b, stride_q_out_t, stride_q_out_h),
            q_weight_ptr, order, positions, table, eps, weight_offset,
            Q_HEADS, Q_BLOCK_T, Q_BLOCK_H, HEAD_DIM, START, form, position_form, table_form,
        )  # fmt: skip
    elif K_HEADS > 0:
        _norm_rotate_tile(
            first_token, tile - q_tiles,
            View(k_ptr, stride_k_b, stride_k_t, stride_k_h),
            View(k_out_ptr, stride_k_out_b, stride_k_out_t, stride_k_out_h),
            k_weight_ptr, order, positions, table, eps, weight_offset,
            K_HEADS, K_BLOCK_T, K_BLOCK_H, K_HEAD_DIM, K_START, form, position_form, table_form,
        )  # fmt: skip
