"""The device code of `qk_norm_rope` forward in Triton: one kernel for q and k together, one program a tile.

    r = 1 / sqrt(mean(x²) + eps),   z = x r (w + offset),   (y_a, y_b) = (z_a cos θ − z_b sin θ, z_b cos θ + z_a sin θ)

Shape legend: T tokens, H heads, P pairs of a head; a tile is BLOCK_T tokens by BLOCK_H heads, all heads of its tokens where
they are normalised together (ALL). Read once: x, and the weights and table rows of a tile; written once: y. A thread holds
both elements of its pairs, as in RoPE's kernel, whose helpers these are: nothing but the sums of squares is exchanged.
Features outside the rotary width are two more blocks of the same heads. All arithmetic is float32, rounded once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..rope._triton_angles import cos_and_sin, table_rows_of
from ..rope._triton_kernel import base_of, batch_and_token, rotate


@triton.jit
def tokens_of(first, BLOCK_T: tl.constexpr, tokens, batches, magic, shift, stripe, stripe_magic, stripe_shift):
    """Batch entry and token of each row of a tile, and which rows there are, [BLOCK_T] each."""
    offs_n = first + tl.arange(0, BLOCK_T)
    batch, token = batch_and_token(offs_n, batches, magic, shift, stripe, stripe_magic, stripe_shift)
    return batch, token, offs_n < batches * tokens


@triton.jit
def turn_of(
    batch, token, mask_n, offs_p,
    positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens, sequences,
    search_steps, cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
    SOURCE: tl.constexpr, HAS_OFFSETS: tl.constexpr, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr,
    SECTION_W: tl.constexpr, SECTIONS_INTERLEAVED: tl.constexpr, CP_RANK: tl.constexpr, CP_SIZE: tl.constexpr,
    TABLE: tl.constexpr, TABLE_STEP: tl.constexpr, PAIRS: tl.constexpr, TABLE_UNIT: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """cos θ and sin θ of every token and pair, [BLOCK_T, 1, BLOCK_P]; 1 and 0 past the last sequence."""
    rows, identity = table_rows_of(
        batch, token, mask_n, offs_p,
        positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens, sequences,
        search_steps,
        SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W, SECTIONS_INTERLEAVED, CP_RANK, CP_SIZE,
    )  # fmt: skip
    cos, sin = cos_and_sin(
        rows, batch, mask_n, offs_p, cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
        TABLE, TABLE_STEP, PAIRS, False, TABLE_UNIT, INDEX,
    )  # fmt: skip
    if SOURCE == "packed":
        cos = tl.where(identity[:, None], 1.0, cos)
        sin = tl.where(identity[:, None], 0.0, sin)
    return cos[:, None, :], sin[:, None, :]


@triton.jit
def load_pairs(
    ptr, base, mask, START: tl.constexpr, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Both elements of the pairs of every head in float32, 0 where there is none: [., ., BLOCK_P] each."""
    pairs = tl.arange(0, BLOCK_P)[None, None, :]
    both = tl.arange(0, 2 * BLOCK_P)[None, None, :]
    if INTERLEAVED:
        x = tl.load(ptr + base + START + both, mask & (both < 2 * PAIRS), 0.0)
        a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_P, 2)))
    else:
        a = tl.load(ptr + base + START + pairs, mask & (pairs < PAIRS), 0.0)
        b = tl.load(ptr + base + START + PAIRS + pairs, mask & (pairs < PAIRS), 0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def store_pairs(
    ptr, base, mask, a, b, START: tl.constexpr, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr
):
    pairs = tl.arange(0, BLOCK_P)[None, None, :]
    both = tl.arange(0, 2 * BLOCK_P)[None, None, :]
    a = a.to(ptr.dtype.element_ty)
    b = b.to(ptr.dtype.element_ty)
    if INTERLEAVED:
        y = tl.reshape(tl.join(a, b), (a.shape[0], a.shape[1], 2 * BLOCK_P))
        tl.store(ptr + base + START + both, y, mask & (both < 2 * PAIRS))
    else:
        tl.store(ptr + base + START + pairs, a, mask & (pairs < PAIRS))
        tl.store(ptr + base + START + PAIRS + pairs, b, mask & (pairs < PAIRS))


@triton.jit
def load_span(ptr, base, mask, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Features [FIRST, FIRST + WIDTH) of every head in float32, filled up with 0 to a power of two."""
    offs = tl.arange(0, triton.next_power_of_2(WIDTH))[None, None, :]
    return tl.load(ptr + base + FIRST + offs, mask & (offs < WIDTH), 0.0).to(tl.float32)


@triton.jit
def store_span(ptr, base, mask, y, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    offs = tl.arange(0, y.shape[2])[None, None, :]
    tl.store(ptr + base + FIRST + offs, y.to(ptr.dtype.element_ty), mask & (offs < WIDTH))


@triton.jit
def weights_of(offs_h, BLOCK_T: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ALL: tl.constexpr):
    """The offset of the weights of each row, and which there are, [BLOCK_T, BLOCK_H, 1]: of the shape of a tile, so that a
    thread reads those that it needs, though the rows of a tile may have the same."""
    head = offs_h[None, :, None] + tl.zeros([BLOCK_T, 1, 1], tl.int32)
    return head * (HEAD_DIM if ALL else 0), head < HEADS


@triton.jit
def total(x, ALL: tl.constexpr):
    """The sum over the features of a head, or of a token: [BLOCK_T, BLOCK_H | 1, 1]."""
    x = tl.sum(x, axis=2)
    if ALL:
        x = tl.sum(x, axis=1)[:, None]
    return x[:, :, None]


@triton.jit
def reciprocal_rms(squares, mask, eps, SHARE: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of each row, 1 for one that is not there: it is all zeros, and eps may be 0."""
    return tl.rsqrt(tl.where(mask, squares * SHARE + eps, 1.0))


@triton.jit
def _norm_rotate_tile(
    first_token, tile, x_ptr, y_ptr, w_ptr, stride_x_b, stride_x_t, stride_x_h, stride_y_b, stride_y_t, stride_y_h,
    order, place, eps, weight_offset,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, START: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED_IN: tl.constexpr, INTERLEAVED_OUT: tl.constexpr,
    ALL: tl.constexpr, HAS_WEIGHT: tl.constexpr, TABLE: tl.constexpr, TABLE_STEP: tl.constexpr, SOURCE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr,
    SECTIONS_INTERLEAVED: tl.constexpr, CP_RANK: tl.constexpr, CP_SIZE: tl.constexpr, X_UNIT: tl.constexpr,
    TABLE_UNIT: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    REST: tl.constexpr = HEAD_DIM - START - 2 * PAIRS
    offs_h = (tile % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    batch, token, mask_n = tokens_of(first_token + (tile // head_blocks) * BLOCK_T, BLOCK_T, *order)
    x_base = base_of(batch, token, offs_h, stride_x_b, stride_x_t, stride_x_h, X_UNIT, INDEX)
    y_base = base_of(batch, token, offs_h, stride_y_b, stride_y_t, stride_y_h, X_UNIT, INDEX)
    mask = mask_n[:, None, None]
    if HEADS % BLOCK_H != 0:
        mask = mask & (offs_h < HEADS)[None, :, None]
    w_base, w_mask = weights_of(offs_h, BLOCK_T, HEADS, HEAD_DIM, ALL)

    # All loads of x first, so that they are under way together.
    x_a, x_b = load_pairs(x_ptr, x_base, mask, START, PAIRS, BLOCK_P, INTERLEAVED_IN)
    squares = total(x_a * x_a + x_b * x_b, ALL)
    if START > 0:
        before = load_span(x_ptr, x_base, mask, 0, START)
        squares += total(before * before, ALL)
    if REST > 0:
        after = load_span(x_ptr, x_base, mask, HEAD_DIM - REST, REST)
        squares += total(after * after, ALL)
    r = reciprocal_rms(squares, mask_n[:, None, None] if ALL else mask, eps, 1 / (HEAD_DIM * HEADS if ALL else HEAD_DIM))

    cos, sin = turn_of(
        batch, token, mask_n, tl.arange(0, BLOCK_P), *place,
        SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W, SECTIONS_INTERLEAVED,
        CP_RANK, CP_SIZE, TABLE, TABLE_STEP, PAIRS, TABLE_UNIT, INDEX,
    )  # fmt: skip
    x_a, x_b = x_a * r, x_b * r
    if HAS_WEIGHT:
        w_a, w_b = load_pairs(w_ptr, w_base, w_mask, START, PAIRS, BLOCK_P, INTERLEAVED_IN)
        x_a, x_b = x_a * (w_a + weight_offset), x_b * (w_b + weight_offset)
    y_a, y_b = rotate(x_a, x_b, cos, sin)
    store_pairs(y_ptr, y_base, mask, y_a, y_b, START, PAIRS, BLOCK_P, INTERLEAVED_OUT)
    if START > 0:
        before = before * r
        if HAS_WEIGHT:
            before = before * (load_span(w_ptr, w_base, w_mask, 0, START) + weight_offset)
        store_span(y_ptr, y_base, mask, before, 0, START)
    if REST > 0:
        after = after * r
        if HAS_WEIGHT:
            after = after * (load_span(w_ptr, w_base, w_mask, HEAD_DIM - REST, REST) + weight_offset)
        store_span(y_ptr, y_base, mask, after, HEAD_DIM - REST, REST)


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
            SECTIONS_INTERLEAVED, CP_RANK, CP_SIZE, X_UNIT, TABLE_UNIT, INDEX,
        )  # fmt: skip
    elif K_HEADS > 0:
        _norm_rotate_tile(
            first_token, tile - q_tiles, k_ptr, k_out_ptr, k_weight_ptr, stride_k_b, stride_k_t, stride_k_h,
            stride_k_out_b, stride_k_out_t, stride_k_out_h, order, place, eps, weight_offset,
            K_HEADS, K_BLOCK_T, K_BLOCK_H, K_HEAD_DIM, K_START, PAIRS, BLOCK_P, INTERLEAVED_IN, INTERLEAVED_OUT,
            ALL, HAS_WEIGHT, TABLE, TABLE_STEP, SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W,
            SECTIONS_INTERLEAVED, CP_RANK, CP_SIZE, X_UNIT, TABLE_UNIT, INDEX,
        )  # fmt: skip
