"""The device code of `qk_norm_rope` backward in Triton: one kernel for q and k together, and one that adds up what it left
of the weights' gradients.

    dz = Rᵀ dy,   g = dz (w + offset),   x̂ = x r,   dx = r (g − x̂ mean(g x̂)),   dw = Σ dz x̂

Legend and tiles as in `_triton_kernel.py`. Read once from memory: dy and x, of which r is taken again; written once: dx. A
program takes every q_programs-th tile of q, or every k_programs-th of k, and keeps its part of dw in registers, where each
thread adds to sums of its own, until the end: a row of partial sums a program, which the other kernel adds up in a fixed
order.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..rope._triton_kernel import base_of, rotate
from ._triton_kernel import NOT_SPECIALISED
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
def _over_rows(x, ALL: tl.constexpr):
    """The sum over tokens, and over heads unless they have weights of their own: [1, BLOCK_H | 1, .]."""
    x = tl.sum(x, axis=0)
    if not ALL:
        x = tl.sum(x, axis=0)[None, :]
    return x[None, :, :]


@triton.jit
def _backward_tiles(
    program, programs, x_ptr, dy_ptr, dx_ptr, w_ptr, partials_ptr, stride_x_b, stride_x_t, stride_x_h,
    stride_dy_b, stride_dy_t, stride_dy_h, stride_dx_b, stride_dx_t, stride_dx_h,
    order, place, eps, weight_offset,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, START: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED_IN: tl.constexpr, INTERLEAVED_OUT: tl.constexpr,
    ALL: tl.constexpr, HAS_WEIGHT: tl.constexpr, TABLE: tl.constexpr, TABLE_STEP: tl.constexpr, SOURCE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr,
    SECTIONS_INTERLEAVED: tl.constexpr, CP_RANK: tl.constexpr, CP_SIZE: tl.constexpr, X_UNIT: tl.constexpr,
    TABLE_UNIT: tl.constexpr, INDEX: tl.constexpr, FLAT: tl.constexpr, BLOCK_D: tl.constexpr, VECTOR: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
):  # fmt: skip
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    share: tl.constexpr = 1 / (HEAD_DIM * HEADS if ALL and HEADS > 0 else HEAD_DIM)
    tokens, batches, _, _, _, _, _ = order
    tiles = (tokens * batches + BLOCK_T - 1) // BLOCK_T * head_blocks

    # Every feature of x has its partner in dy. The weights are the same for all tiles; all heads' are too many to keep.
    features = tl.arange(0, BLOCK_D)[None, None, :]
    own, partner, pair, rotated, second = features_of(START, PAIRS, BLOCK_D, INTERLEAVED_IN, INTERLEAVED_OUT, VECTOR)
    w_base, w_mask = weights_of(tl.arange(0, BLOCK_H), BLOCK_T, HEADS, HEAD_DIM, ALL)
    if FLAT:
        w_mask = w_mask & (features < HEAD_DIM)
        dw = tl.zeros([BLOCK_T, BLOCK_H, BLOCK_D], tl.float32)
        if HAS_WEIGHT and not ALL:
            w = tl.load(w_ptr + w_base + features, w_mask, 0.0).to(tl.float32)
    else:
        dw_a = tl.zeros([BLOCK_T, BLOCK_H, BLOCK_P], tl.float32)
        dw_b = dw_a
        if HAS_WEIGHT and not ALL:
            w_a, w_b = load_pairs(w_ptr, w_base, w_mask, PAIRS, BLOCK_P, INTERLEAVED_IN)

    for tile in range(program, tiles, programs):
        offs_h = (tile % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        batch, token, mask_n = tokens_of((tile // head_blocks) * BLOCK_T, BLOCK_T, *order)
        x_base = base_of(batch, token, offs_h, stride_x_b, stride_x_t, stride_x_h, X_UNIT, INDEX)
        dy_base = base_of(batch, token, offs_h, stride_dy_b, stride_dy_t, stride_dy_h, X_UNIT, INDEX)
        dx_base = base_of(batch, token, offs_h, stride_dx_b, stride_dx_t, stride_dx_h, X_UNIT, INDEX)
        mask = mask_n[:, None, None]
        if HEADS % BLOCK_H != 0:
            mask = mask & (offs_h < HEADS)[None, :, None]
        mask_r = mask_n[:, None, None] if ALL else mask

        # From here on g has the factor r, which saves a product: dx = g r − x (r² mean(g x r)). Tokens that are not there,
        # of which a tile of one token has none, have NaN for cos and sin, and so do pairs: their g is taken to be 0.
        if FLAT:
            mask = mask & (features < HEAD_DIM)
            x = tl.load(x_ptr + x_base + features, mask, 0.0).to(tl.float32)
            g = tl.load(dy_ptr + dy_base + own, mask, 0.0).to(tl.float32)
            g_partner = tl.load(dy_ptr + dy_base + partner, mask & rotated, 0.0).to(tl.float32)
            cos, sin = turn_of(
                batch, token, mask_n, pair, *place, SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W,
                SECTIONS_INTERLEAVED, CP_RANK, CP_SIZE, TABLE, TABLE_STEP, PAIRS, TABLE_UNIT, INDEX,
            )  # fmt: skip
            cos = tl.where(rotated, cos, 1.0)
            sin = tl.where(rotated, tl.where(second, -sin, sin), 0.0)
            r = reciprocal_rms(total(x * x, ALL), mask_r, eps, share)
            g = tl.fma(g, cos, g_partner * sin) * r
            if BLOCK_T > 1:
                g = tl.where(mask_n[:, None, None], g, 0.0)
            if WEIGHT_GRAD:
                dw += g * x
            if HAS_WEIGHT:
                if ALL:
                    w = tl.load(w_ptr + w_base + features, w_mask, 0.0).to(tl.float32)
                g = g * (w + weight_offset)
            slope = total(g * x, ALL) * share * r * r
            tl.store(dx_ptr + dx_base + features, (g - x * slope).to(dx_ptr.dtype.element_ty), mask)
        else:
            x_a, x_b = load_pairs(x_ptr, x_base, mask, PAIRS, BLOCK_P, INTERLEAVED_IN)
            g_a, g_b = load_pairs(dy_ptr, dy_base, mask, PAIRS, BLOCK_P, INTERLEAVED_OUT)
            offs_p = tl.arange(0, BLOCK_P)
            cos, sin = turn_of(
                batch, token, mask_n, offs_p, *place, SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W,
                SECTIONS_INTERLEAVED, CP_RANK, CP_SIZE, TABLE, TABLE_STEP, PAIRS, TABLE_UNIT, INDEX,
            )  # fmt: skip
            r = reciprocal_rms(total(x_a * x_a + x_b * x_b, ALL), mask_r, eps, share)
            g_a, g_b = rotate(g_a, g_b, cos, -sin)
            g_a, g_b = g_a * r, g_b * r
            if BLOCK_T > 1 or PAIRS != BLOCK_P:
                there = mask_n[:, None, None] & (offs_p < PAIRS)[None, None, :]
                g_a, g_b = tl.where(there, g_a, 0.0), tl.where(there, g_b, 0.0)
            if WEIGHT_GRAD:
                dw_a += g_a * x_a
                dw_b += g_b * x_b
            if HAS_WEIGHT:
                if ALL:
                    w_a, w_b = load_pairs(w_ptr, w_base, w_mask, PAIRS, BLOCK_P, INTERLEAVED_IN)
                g_a, g_b = g_a * (w_a + weight_offset), g_b * (w_b + weight_offset)
            slope = total(g_a * x_a + g_b * x_b, ALL) * share * r * r
            store_pairs(
                dx_ptr, dx_base, mask, g_a - x_a * slope, g_b - x_b * slope, PAIRS, BLOCK_P, INTERLEAVED_IN
            )  # fmt: skip

    if WEIGHT_GRAD:
        offs_h = tl.arange(0, BLOCK_H if ALL else 1)
        w_base = (program * (HEADS if ALL else 1) + offs_h)[None, :, None] * HEAD_DIM
        w_mask = (offs_h < HEADS)[None, :, None]
        if FLAT:
            tl.store(partials_ptr + w_base + features, _over_rows(dw, ALL), w_mask & (features < HEAD_DIM))
        else:
            dw_a, dw_b = _over_rows(dw_a, ALL), _over_rows(dw_b, ALL)
            store_pairs(partials_ptr, w_base, w_mask, dw_a, dw_b, PAIRS, BLOCK_P, INTERLEAVED_IN)


def _name(proxy: Any) -> str:
    """The kernel's name in profiles."""
    c = proxy.constants
    pairing = "interleaved" if c["INTERLEAVED_IN"] else "half"
    over = "all" if c["ALL"] else "head"
    return f"_qk_norm_rope_kernel_bwd_{over}_{pairing}_{c['TABLE']}_h{c['Q_HEADS']}_{c['K_HEADS']}_d{c['HEAD_DIM']}"


def _metadata(grid: Any, kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a launch moves, for profilers: the bytes of x and dy, read, and of dx, written."""
    features = arguments["Q_HEADS"] * arguments["HEAD_DIM"] + arguments["K_HEADS"] * arguments["K_HEAD_DIM"]
    tokens = arguments["tokens"] * arguments["batches"]
    return {"name": kernel.name, "bytes": 3 * tokens * features * arguments["q_ptr"].element_size()}


@triton.jit(repr=_name, launch_metadata=_metadata, do_not_specialize=NOT_SPECIALISED)
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
    """q_out and k_out are the gradients of the outputs, laid out as they."""
    order = (tokens, batches, magic, shift, stripe, stripe_magic, stripe_shift)
    place = (
        positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens, sequences,
        search_steps, cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
    )  # fmt: skip
    program = tl.program_id(0)
    if program < q_programs:
        _backward_tiles(
            program, q_programs, q_ptr, q_out_ptr, dq_ptr, q_weight_ptr, q_partials_ptr,
            stride_q_b, stride_q_t, stride_q_h, stride_q_out_b, stride_q_out_t, stride_q_out_h,
            stride_dq_b, stride_dq_t, stride_dq_h, order, place, eps, weight_offset,
            Q_HEADS, Q_BLOCK_T, Q_BLOCK_H, HEAD_DIM, START, PAIRS, BLOCK_P, INTERLEAVED_IN, INTERLEAVED_OUT,
            ALL, HAS_WEIGHT, TABLE, TABLE_STEP, SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W,
            SECTIONS_INTERLEAVED, CP_RANK, CP_SIZE, X_UNIT, TABLE_UNIT, INDEX,
            FLAT, BLOCK_D, VECTOR, WEIGHT_GRAD,
        )  # fmt: skip
    elif K_HEADS > 0:
        _backward_tiles(
            program - q_programs, k_programs, k_ptr, k_out_ptr, dk_ptr, k_weight_ptr, k_partials_ptr,
            stride_k_b, stride_k_t, stride_k_h, stride_k_out_b, stride_k_out_t, stride_k_out_h,
            stride_dk_b, stride_dk_t, stride_dk_h, order, place, eps, weight_offset,
            K_HEADS, K_BLOCK_T, K_BLOCK_H, K_HEAD_DIM, K_START, PAIRS, BLOCK_P, INTERLEAVED_IN, INTERLEAVED_OUT,
            ALL, HAS_WEIGHT, TABLE, TABLE_STEP, SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W,
            SECTIONS_INTERLEAVED, CP_RANK, CP_SIZE, X_UNIT, TABLE_UNIT, INDEX,
            FLAT, BLOCK_D, VECTOR, WEIGHT_GRAD,
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
    """The gradients of both weights from the rows of partial sums, in a fixed order; one program BLOCK_W columns."""
    blocks: tl.constexpr = (Q_WIDTH + BLOCK_W - 1) // BLOCK_W
    block = tl.program_id(0)
    if block < blocks:
        _sum_columns(block, q_partials_ptr, q_dw_ptr, q_programs, Q_WIDTH, BLOCK_R, BLOCK_W)
    elif K_WIDTH > 0:
        _sum_columns(block - blocks, k_partials_ptr, k_dw_ptr, k_programs, K_WIDTH, BLOCK_R, BLOCK_W)
