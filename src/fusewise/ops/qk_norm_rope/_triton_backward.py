"""Triton backward kernels of `qk_norm_rope`: one launch for q and k, and one that reduces the partial weight gradients.

    dz = Rᵀ dy,   g = dz (w + offset),   x̂ = x r,   dx = r (g − x̂ mean(g x̂)),   dw = Σ dz x̂

Legend and tiles as in `_triton_kernel.py`. dy and x are read once (r is recomputed from x), dx is written once. The
kernel is persistent: a program processes every q_programs-th tile of q, or every k_programs-th of k, and accumulates
its part of dw in per-thread registers. At the end it stores one row of partial sums, which `sum_kernel` reduces in a
fixed order.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..rope._triton_angles import PositionForm, Positions, Table, TableForm
from ..rope._triton_kernel import Order, View, base_of, metadata, rotate
from ._triton_kernel import NOT_SPECIALIZED
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
def _over_rows(x, ALL: tl.constexpr):
    """Sum over tokens, and over heads unless each head has its own weights: [1, BLOCK_H | 1, .]."""
    x = tl.sum(x, axis=0)
    if not ALL:
        x = tl.sum(x, axis=0)[None, :]
    return x[None, :, :]


@triton.jit
def _backward_tiles(
    program, programs, x, dy, dx, w_ptr, partials_ptr, order, positions, table, eps, weight_offset,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, START: tl.constexpr,
    FORM: tl.constexpr, POSITIONS: tl.constexpr, TABLE: tl.constexpr, WEIGHT_GRAD: tl.constexpr,
):  # fmt: skip
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    share: tl.constexpr = 1 / (HEAD_DIM * HEADS if FORM.ALL and HEADS > 0 else HEAD_DIM)
    tiles = (order.tokens * order.batches + BLOCK_T - 1) // BLOCK_T * head_blocks

    # Features of x and their partners in dy. The weights are the same for all tiles and stay in registers, except those
    # of all heads (ALL), which are too many.
    features = tl.arange(0, FORM.BLOCK_D)[None, None, :]
    own, partner, pair, rotated, second = features_of(
        START, FORM.PAIRS, FORM.BLOCK_D, FORM.INTERLEAVED_IN, FORM.INTERLEAVED_OUT, FORM.VECTOR
    )
    w_base, w_mask = weights_of(tl.arange(0, BLOCK_H), BLOCK_T, HEADS, HEAD_DIM, FORM.ALL)
    if FORM.FLAT:
        w_mask = w_mask & (features < HEAD_DIM)
        dw = tl.zeros([BLOCK_T, BLOCK_H, FORM.BLOCK_D], tl.float32)
        if FORM.HAS_WEIGHT and not FORM.ALL:
            w = tl.load(w_ptr + w_base + features, w_mask, 0.0).to(tl.float32)
    else:
        dw_a = tl.zeros([BLOCK_T, BLOCK_H, FORM.BLOCK_P], tl.float32)
        dw_b = dw_a
        if FORM.HAS_WEIGHT and not FORM.ALL:
            w_a, w_b = load_pairs(w_ptr, w_base, w_mask, FORM.PAIRS, FORM.BLOCK_P, FORM.INTERLEAVED_IN)

    for tile in range(program, tiles, programs):
        offs_h = (tile % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        batch, token, mask_n = tokens_of((tile // head_blocks) * BLOCK_T, BLOCK_T, order)
        x_base = base_of(batch, token, offs_h, x, FORM.UNIT, FORM.INDEX)
        dy_base = base_of(batch, token, offs_h, dy, FORM.UNIT, FORM.INDEX)
        dx_base = base_of(batch, token, offs_h, dx, FORM.UNIT, FORM.INDEX)
        mask = mask_n[:, None, None]
        if HEADS % BLOCK_H != 0:
            mask = mask & (offs_h < HEADS)[None, :, None]
        mask_r = mask_n[:, None, None] if FORM.ALL else mask

        # From here on g includes the factor r, which saves a product: dx = g r − x (r² mean(g x r)). Masked tokens
        # (none in a tile of one token) and masked pairs have NaN for cos and sin: their g is set to 0.
        if FORM.FLAT:
            mask = mask & (features < HEAD_DIM)
            own_x = tl.load(x.ptr + x_base + features, mask, 0.0).to(tl.float32)
            g = tl.load(dy.ptr + dy_base + own, mask, 0.0).to(tl.float32)
            g_partner = tl.load(dy.ptr + dy_base + partner, mask & rotated, 0.0).to(tl.float32)
            cos, sin = turn_of(batch, token, mask_n, pair, positions, table, POSITIONS, TABLE)
            cos = tl.where(rotated, cos, 1.0)
            sin = tl.where(rotated, tl.where(second, -sin, sin), 0.0)
            r = reciprocal_rms(total(rounded_product(own_x, own_x), FORM.ALL), mask_r, eps, share)
            g = tl.fma(g, cos, g_partner * sin) * r
            if BLOCK_T > 1:
                g = tl.where(mask_n[:, None, None], g, 0.0)
            if WEIGHT_GRAD:
                dw += g * own_x
            if FORM.HAS_WEIGHT:
                if FORM.ALL:
                    w = tl.load(w_ptr + w_base + features, w_mask, 0.0).to(tl.float32)
                g = g * (w + weight_offset)
            slope = total(rounded_product(g, own_x), FORM.ALL) * share * r * r
            tl.store(dx.ptr + dx_base + features, (g - own_x * slope).to(dx.ptr.dtype.element_ty), mask)
        else:
            x_a, x_b = load_pairs(x.ptr, x_base, mask, FORM.PAIRS, FORM.BLOCK_P, FORM.INTERLEAVED_IN)
            g_a, g_b = load_pairs(dy.ptr, dy_base, mask, FORM.PAIRS, FORM.BLOCK_P, FORM.INTERLEAVED_OUT)
            offs_p = tl.arange(0, FORM.BLOCK_P)
            cos, sin = turn_of(batch, token, mask_n, offs_p, positions, table, POSITIONS, TABLE)
            r = reciprocal_rms(total(x_a * x_a + x_b * x_b, FORM.ALL), mask_r, eps, share)
            g_a, g_b = rotate(g_a, g_b, cos, -sin)
            g_a, g_b = g_a * r, g_b * r
            if BLOCK_T > 1 or FORM.PAIRS != FORM.BLOCK_P:
                there = mask_n[:, None, None] & (offs_p < FORM.PAIRS)[None, None, :]
                g_a, g_b = tl.where(there, g_a, 0.0), tl.where(there, g_b, 0.0)
            if WEIGHT_GRAD:
                dw_a += g_a * x_a
                dw_b += g_b * x_b
            if FORM.HAS_WEIGHT:
                if FORM.ALL:
                    w_a, w_b = load_pairs(w_ptr, w_base, w_mask, FORM.PAIRS, FORM.BLOCK_P, FORM.INTERLEAVED_IN)
                g_a, g_b = g_a * (w_a + weight_offset), g_b * (w_b + weight_offset)
            slope = total(g_a * x_a + g_b * x_b, FORM.ALL) * share * r * r
            store_pairs(
                dx.ptr, dx_base, mask, g_a - x_a * slope, g_b - x_b * slope, FORM.PAIRS, FORM.BLOCK_P, FORM.INTERLEAVED_IN
            )  # fmt: skip

    if WEIGHT_GRAD:
        offs_h = tl.arange(0, BLOCK_H if FORM.ALL else 1)
        w_base = (program * (HEADS if FORM.ALL else 1) + offs_h)[None, :, None] * HEAD_DIM
        w_mask = (offs_h < HEADS)[None, :, None]
        if FORM.FLAT:
            tl.store(partials_ptr + w_base + features, _over_rows(dw, FORM.ALL), w_mask & (features < HEAD_DIM))
        else:
            dw_a, dw_b = _over_rows(dw_a, FORM.ALL), _over_rows(dw_b, FORM.ALL)
            store_pairs(partials_ptr, w_base, w_mask, dw_a, dw_b, FORM.PAIRS, FORM.BLOCK_P, FORM.INTERLEAVED_IN)


def _name(proxy: Any) -> str:
    """Kernel name shown by profilers."""
    c = proxy.constants
    pairing = "interleaved" if c["INTERLEAVED_IN"] else "half"
    over = "all" if c["ALL"] else "head"
    return f"_qk_norm_rope_kernel_bwd_{over}_{pairing}_{c['TABLE']}_h{c['Q_HEADS']}_{c['K_HEADS']}_d{c['HEAD_DIM']}"


@triton.jit(repr=_name, launch_metadata=metadata(3), do_not_specialize=NOT_SPECIALIZED)
def backward_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr, dq_ptr, dk_ptr, q_partials_ptr, k_partials_ptr,
    cos_ptr, sin_ptr, positions_ptr, offsets_ptr, cu_seqlens_ptr, offset,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_q_out_b, stride_q_out_t, stride_q_out_h, stride_k_out_b, stride_k_out_t, stride_k_out_h,
    stride_dq_b, stride_dq_t, stride_dq_h, stride_dk_b, stride_dk_t, stride_dk_h,
    stride_table_b, stride_table_r, stride_pos_a, stride_pos_b, stride_pos_t,
    table_rows, scale, eps, weight_offset,
    tokens, batches, magic, shift, stripe, stripe_magic, stripe_shift, sequences, search_steps, q_programs, k_programs,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_BLOCK_T: tl.constexpr, Q_BLOCK_H: tl.constexpr,
    K_BLOCK_T: tl.constexpr, K_BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, START: tl.constexpr,
    K_HEAD_DIM: tl.constexpr, K_START: tl.constexpr, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr, INTERLEAVED_OUT: tl.constexpr, ALL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    TABLE: tl.constexpr, TABLE_STEP: tl.constexpr, SOURCE: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr, SECTIONS_INTERLEAVED: tl.constexpr,
    CP_RANK: tl.constexpr, CP_SIZE: tl.constexpr, X_UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr, INDEX: tl.constexpr,
    FLAT: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr, WEIGHT_GRAD: tl.constexpr,
):  # fmt: skip
    """q_out and k_out are the gradients of the outputs."""
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
    program = tl.program_id(0)
    if program < q_programs:
        _backward_tiles(
            program, q_programs,
            View(q_ptr, stride_q_b, stride_q_t, stride_q_h),
            View(q_out_ptr, stride_q_out_b, stride_q_out_t, stride_q_out_h),
            View(dq_ptr, stride_dq_b, stride_dq_t, stride_dq_h),
            q_weight_ptr, q_partials_ptr, order, positions, table, eps, weight_offset,
            Q_HEADS, Q_BLOCK_T, Q_BLOCK_H, HEAD_DIM, START, form, position_form, table_form, WEIGHT_GRAD,
        )  # fmt: skip
    elif K_HEADS > 0:
        _backward_tiles(
            program - q_programs, k_programs,
            View(k_ptr, stride_k_b, stride_k_t, stride_k_h),
            View(k_out_ptr, stride_k_out_b, stride_k_out_t, stride_k_out_h),
            View(dk_ptr, stride_dk_b, stride_dk_t, stride_dk_h),
            k_weight_ptr, k_partials_ptr, order, positions, table, eps, weight_offset,
            K_HEADS, K_BLOCK_T, K_BLOCK_H, K_HEAD_DIM, K_START, form, position_form, table_form, WEIGHT_GRAD,
        )  # fmt: skip


@triton.jit
def _sum_columns(
    block, partials_ptr, dw_ptr, programs, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr
):
    offs_w = block * BLOCK_W + tl.arange(0, BLOCK_W)
    rows = tl.arange(0, BLOCK_R)
    sums = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    for first in range(0, programs, BLOCK_R):
        there = (first + rows < programs)[:, None] & (offs_w < WIDTH)[None, :]
        sums += tl.load(partials_ptr + ((first + rows) * WIDTH)[:, None] + offs_w[None, :], there, 0.0)
    tl.store(dw_ptr + offs_w, tl.sum(sums, axis=0).to(dw_ptr.dtype.element_ty), offs_w < WIDTH)


@triton.jit(do_not_specialize=["q_programs", "k_programs"])
def sum_kernel(
    q_partials_ptr, k_partials_ptr, q_dw_ptr, k_dw_ptr, q_programs, k_programs,
    Q_WIDTH: tl.constexpr, K_WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Reduce the rows of partial sums to the gradients of both weights in a fixed order, BLOCK_W columns per program."""
    blocks: tl.constexpr = (Q_WIDTH + BLOCK_W - 1) // BLOCK_W
    block = tl.program_id(0)
    if block < blocks:
        _sum_columns(block, q_partials_ptr, q_dw_ptr, q_programs, Q_WIDTH, BLOCK_R, BLOCK_W)
    elif K_WIDTH > 0:
        _sum_columns(block - blocks, k_partials_ptr, k_dw_ptr, k_programs, K_WIDTH, BLOCK_R, BLOCK_W)
