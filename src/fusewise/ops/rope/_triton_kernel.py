"""The device code of RoPE in Triton: one kernel for q and k together, forward and backward (the transposed rotation).

    (y_a, y_b) = (x_a cos θ − x_b sin θ, x_b cos θ + x_a sin θ)

Shape legend: T tokens, H heads, P pairs of a head, F = H · head_dim features of a token; a tile is BLOCK_T tokens by
BLOCK_H heads (or BLOCK_F features). Read once: x, and the table rows of a tile; written once: y. One program a tile.
All arithmetic is float32, rounded once; angles that are not in a table are reduced in float64. The kernel is bound by
memory: a thread moves 16 bytes at a time and few registers are used, so that every multiprocessor is full of threads
with loads under way.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ._triton_angles import cos_and_sin, table_rows_of


@triton.jit
def _quotient(n, magic, shift):
    """n // divisor for 0 <= n < 2³¹ by a multiplication; see `_triton._division`."""
    return tl.umulhi((n * 2).to(tl.uint32), magic.to(tl.uint32)).to(tl.int32) >> shift


@triton.jit
def batch_and_token(n, batches, magic, shift, stripe, stripe_magic, stripe_shift):
    """The place of the n-th token: a stripe of tokens, then the same tokens of the next batch entry, so that table rows
    are used again while they are in the cache, and what is read and written stays contiguous over many tiles."""
    number = _quotient(n, stripe_magic, stripe_shift)
    stripe_of_batch = _quotient(number, magic, shift)
    batch = number - stripe_of_batch * batches
    return batch, n + (stripe_of_batch - number) * stripe


@triton.jit
def base_of(batch, token, offs_h, stride_b, stride_t, stride_h, UNIT: tl.constexpr, INDEX: tl.constexpr):
    """The offset of each head, (BLOCK_T, BLOCK_H, 1)."""
    of_token = batch.to(INDEX) * stride_b + token.to(INDEX) * stride_t
    return (of_token[:, None, None] + (offs_h.to(INDEX) * stride_h)[None, :, None]) * UNIT


@triton.jit
def _load_span(x_ptr, base, mask, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Features [FIRST, FIRST + WIDTH) of every head: the largest power of two of them, and the rest."""
    HEAD: tl.constexpr = triton.next_power_of_2(WIDTH + 1) // 2
    TAIL: tl.constexpr = WIDTH - HEAD if WIDTH > HEAD else 1
    offs = tl.arange(0, HEAD)[None, None, :]
    head = tl.load(x_ptr + base + FIRST + offs, mask)
    offs = tl.arange(0, triton.next_power_of_2(TAIL))[None, None, :]
    tail = tl.load(x_ptr + base + FIRST + HEAD + offs, mask & (offs < WIDTH - HEAD))
    return head, tail


@triton.jit
def _store_span(y_ptr, base, mask, head, tail, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    HEAD: tl.constexpr = head.shape[2]
    offs = tl.arange(0, HEAD)[None, None, :]
    tl.store(y_ptr + base + FIRST + offs, head, mask)
    if WIDTH > HEAD:
        offs = tl.arange(0, tail.shape[2])[None, None, :]
        tl.store(y_ptr + base + FIRST + HEAD + offs, tail, mask & (offs < WIDTH - HEAD))


@triton.jit
def rotate(x_a, x_b, cos, sin):
    """(x_a cos − x_b sin, x_b cos + x_a sin), rounded alike wherever it stands: the fused operation is named, so that
    the compiler has nothing to choose and in place gives the bits of out of place."""
    return tl.fma(x_a, cos, -(x_b * sin)), tl.fma(x_b, cos, x_a * sin)


@triton.jit
def _rotate_pairs_tile(
    first_token, tile, x_ptr, y_ptr, stride_x_b, stride_x_t, stride_x_h, stride_y_b, stride_y_t, stride_y_h,
    cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
    positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens, batches,
    magic, shift, stripe, stripe_magic, stripe_shift, sequences, search_steps,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, START: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED_IN: tl.constexpr, INTERLEAVED_OUT: tl.constexpr,
    INVERSE: tl.constexpr, TABLE: tl.constexpr, TABLE_STEP: tl.constexpr, SOURCE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr,
    SECTIONS_INTERLEAVED: tl.constexpr, CP_RANK: tl.constexpr, CP_SIZE: tl.constexpr, IN_PLACE: tl.constexpr,
    X_UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Any rotation, a thread holding both elements of its pairs: nothing is exchanged between threads, so it works in
    place; cos and sin are read, or computed, once a token and serve all heads of the tile."""
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    offs_n = first_token + (tile // head_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_h = (tile % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_p = tl.arange(0, BLOCK_P)
    mask_n = offs_n < batches * tokens
    batch, token = batch_and_token(offs_n, batches, magic, shift, stripe, stripe_magic, stripe_shift)
    x_base = base_of(batch, token, offs_h, stride_x_b, stride_x_t, stride_x_h, X_UNIT, INDEX)
    y_base = base_of(batch, token, offs_h, stride_y_b, stride_y_t, stride_y_h, X_UNIT, INDEX)
    mask = mask_n[:, None, None]
    if HEADS % BLOCK_H != 0:
        mask = mask & (offs_h < HEADS)[None, :, None]

    # The long loads first, so that they are under way while the rows of the table are found.
    pairs = offs_p[None, None, :]
    both = tl.arange(0, 2 * BLOCK_P)[None, None, :]
    pair_mask = mask
    both_mask = mask
    if PAIRS != BLOCK_P:
        pair_mask = mask & (pairs < PAIRS)
        both_mask = mask & (both < 2 * PAIRS)
    if INTERLEAVED_IN:
        x = tl.load(x_ptr + x_base + START + both, both_mask)
        x_a, x_b = tl.split(tl.reshape(x, (BLOCK_T, BLOCK_H, BLOCK_P, 2)))
    else:
        x_a = tl.load(x_ptr + x_base + START + pairs, pair_mask)
        x_b = tl.load(x_ptr + x_base + START + PAIRS + pairs, pair_mask)

    REST: tl.constexpr = HEAD_DIM - START - 2 * PAIRS
    if not IN_PLACE:
        if START > 0:
            before, before_tail = _load_span(x_ptr, x_base, mask, 0, START)
        if REST > 0:
            after, after_tail = _load_span(x_ptr, x_base, mask, HEAD_DIM - REST, REST)

    rows, identity = table_rows_of(
        batch, token, mask_n, offs_p,
        positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens,
        sequences, search_steps,
        SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W, SECTIONS_INTERLEAVED, CP_RANK, CP_SIZE,
    )  # fmt: skip
    cos, sin = cos_and_sin(
        rows, batch, mask_n, offs_p,
        cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
        TABLE, TABLE_STEP, PAIRS, INVERSE, TABLE_UNIT, INDEX,
    )  # fmt: skip
    cos = cos[:, None, :]
    sin = sin[:, None, :]

    y_a, y_b = rotate(x_a.to(tl.float32), x_b.to(tl.float32), cos, sin)
    y_a = y_a.to(y_ptr.dtype.element_ty)
    y_b = y_b.to(y_ptr.dtype.element_ty)
    if SOURCE == "packed":
        y_a = tl.where(identity[:, None, None], x_a, y_a)
        y_b = tl.where(identity[:, None, None], x_b, y_b)
    if IN_PLACE and INTERLEAVED_IN != INTERLEAVED_OUT:
        tl.debug_barrier()  # a head must be read whole before another thread writes into it
    if INTERLEAVED_OUT:
        y = tl.reshape(tl.join(y_a, y_b), (BLOCK_T, BLOCK_H, 2 * BLOCK_P))
        tl.store(y_ptr + y_base + START + both, y, both_mask)
    else:
        tl.store(y_ptr + y_base + START + pairs, y_a, pair_mask)
        tl.store(y_ptr + y_base + START + PAIRS + pairs, y_b, pair_mask)

    if not IN_PLACE:
        if START > 0:
            _store_span(y_ptr, y_base, mask, before, before_tail, 0, START)
        if REST > 0:
            _store_span(y_ptr, y_base, mask, after, after_tail, HEAD_DIM - REST, REST)


@triton.jit
def _rotate_flat_tile(
    first_token, tile, x_ptr, y_ptr, stride_x_b, stride_x_t, stride_x_h, stride_y_b, stride_y_t, stride_y_h,
    cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
    positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens, batches,
    magic, shift, stripe, stripe_magic, stripe_shift, sequences, search_steps,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, HEAD_DIM: tl.constexpr, START: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, TABLE_STEP: tl.constexpr,
    SOURCE: tl.constexpr, HAS_OFFSETS: tl.constexpr, CP_RANK: tl.constexpr, CP_SIZE: tl.constexpr,
    X_UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr, VECTOR: tl.constexpr, PAIR_VECTOR: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """An out-of-place rotation of a part of the head, over the features of all heads in a row: no thread idles and lines
    are written whole. A half pairing reads the other element of a pair, f ± P, from the first-level cache.

    VECTOR features are contiguous, and so are the partners and table entries of PAIR_VECTOR.
    """
    FEATURES: tl.constexpr = HEADS * HEAD_DIM
    blocks: tl.constexpr = (FEATURES + BLOCK_F - 1) // BLOCK_F
    offs_n = first_token + (tile // blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    feature = (tile % blocks) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_n = offs_n < batches * tokens
    batch, token = batch_and_token(offs_n, batches, magic, shift, stripe, stripe_magic, stripe_shift)
    mask = mask_n[:, None]
    if FEATURES % BLOCK_F != 0:
        mask = mask & (feature < FEATURES)[None, :]

    head = feature // HEAD_DIM
    in_head = feature - head * HEAD_DIM
    x_base = ((batch.to(INDEX) * stride_x_b + token.to(INDEX) * stride_x_t) * X_UNIT)[:, None]
    y_base = ((batch.to(INDEX) * stride_y_b + token.to(INDEX) * stride_y_t) * X_UNIT)[:, None]
    x_offs = head.to(INDEX) * (stride_x_h * X_UNIT) + in_head
    y_offs = head.to(INDEX) * (stride_y_h * X_UNIT) + in_head
    x = tl.load(x_ptr + x_base + tl.max_contiguous(tl.multiple_of(x_offs, VECTOR), VECTOR)[None, :], mask)

    if INTERLEAVED:
        # One table entry a pair; a thread holds both elements.
        half: tl.constexpr = BLOCK_F // 2
        pair = (((tile % blocks) * half + tl.arange(0, half)) % (HEAD_DIM // 2)) - START // 2
        entry = pair
        rotated = (mask_n[:, None]) & tl.max_constancy((pair >= 0) & (pair < PAIRS), PAIR_VECTOR // 2)[None, :]
        entry = tl.max_contiguous(tl.multiple_of(entry, PAIR_VECTOR // 2), PAIR_VECTOR // 2) * TABLE_STEP
    else:
        pair = in_head - START
        second = pair >= PAIRS
        entry = tl.where(second, pair - PAIRS, pair)
        rotated = mask & tl.max_constancy((pair >= 0) & (pair < 2 * PAIRS), PAIR_VECTOR)[None, :]
        entry = tl.max_contiguous(tl.multiple_of(entry, PAIR_VECTOR), PAIR_VECTOR) * TABLE_STEP
        partner = tl.where(second, x_offs - PAIRS, x_offs + PAIRS)
        partner = tl.max_contiguous(tl.multiple_of(partner, PAIR_VECTOR), PAIR_VECTOR)
        x_partner = tl.load(x_ptr + x_base + partner[None, :], rotated, 0.0)

    rows, identity = table_rows_of(
        batch, token, mask_n, pair,
        positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens,
        sequences, search_steps,
        SOURCE, HAS_OFFSETS, 0, 0, 0, False, CP_RANK, CP_SIZE,
    )  # fmt: skip
    inside = (rows >= 0) & (rows < table_rows)
    index = (rows.to(INDEX) * stride_table_r + (batch.to(INDEX) * stride_table_b)[:, None]) * TABLE_UNIT
    index = index + entry[None, :]
    cos = tl.load(cos_ptr + index, rotated & inside, float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + index, rotated & inside, 0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    if SOURCE == "packed":
        rotated = rotated & ~identity[:, None]
    if INTERLEAVED:
        x_a, x_b = tl.split(tl.reshape(x, (BLOCK_T, BLOCK_F // 2, 2)))
        y_a, y_b = rotate(x_a.to(tl.float32), x_b.to(tl.float32), cos, sin)
        y_a = tl.where(rotated, y_a.to(y_ptr.dtype.element_ty), x_a)
        y_b = tl.where(rotated, y_b.to(y_ptr.dtype.element_ty), x_b)
        y = tl.join(y_a, y_b).reshape(BLOCK_T, BLOCK_F)
    else:
        signed = tl.where(second[None, :], sin, -sin)
        y = tl.fma(x.to(tl.float32), cos, x_partner.to(tl.float32) * signed).to(y_ptr.dtype.element_ty)
        y = tl.where(rotated, y, x)
    tl.store(y_ptr + y_base + tl.max_contiguous(tl.multiple_of(y_offs, VECTOR), VECTOR)[None, :], y, mask)


@triton.jit
def _rotate_tile(
    first_token, tile, x_ptr, y_ptr, stride_x_b, stride_x_t, stride_x_h, stride_y_b, stride_y_t, stride_y_h,
    cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
    positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens, batches,
    magic, shift, stripe, stripe_magic, stripe_shift, sequences, search_steps,
    FLAT: tl.constexpr, HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr,
    START: tl.constexpr, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED_IN: tl.constexpr,
    INTERLEAVED_OUT: tl.constexpr, INVERSE: tl.constexpr, TABLE: tl.constexpr, TABLE_STEP: tl.constexpr,
    SOURCE: tl.constexpr, HAS_OFFSETS: tl.constexpr, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr,
    SECTION_W: tl.constexpr, SECTIONS_INTERLEAVED: tl.constexpr, CP_RANK: tl.constexpr, CP_SIZE: tl.constexpr,
    IN_PLACE: tl.constexpr, X_UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr, VECTOR: tl.constexpr,
    PAIR_VECTOR: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    if FLAT:
        _rotate_flat_tile(
            first_token, tile, x_ptr, y_ptr, stride_x_b, stride_x_t, stride_x_h, stride_y_b, stride_y_t, stride_y_h,
            cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
            positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens,
            batches, magic, shift, stripe, stripe_magic, stripe_shift, sequences, search_steps,
            HEADS, BLOCK_T, BLOCK_H, HEAD_DIM, START, PAIRS, INTERLEAVED_IN, INVERSE, TABLE_STEP, SOURCE, HAS_OFFSETS,
            CP_RANK, CP_SIZE, X_UNIT, TABLE_UNIT, VECTOR, PAIR_VECTOR, INDEX,
        )  # fmt: skip
    else:
        _rotate_pairs_tile(
            first_token, tile, x_ptr, y_ptr, stride_x_b, stride_x_t, stride_x_h, stride_y_b, stride_y_t, stride_y_h,
            cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
            positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens,
            batches, magic, shift, stripe, stripe_magic, stripe_shift, sequences, search_steps,
            HEADS, BLOCK_T, BLOCK_H, HEAD_DIM, START, PAIRS, BLOCK_P, INTERLEAVED_IN, INTERLEAVED_OUT, INVERSE,
            TABLE, TABLE_STEP, SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W, SECTIONS_INTERLEAVED, CP_RANK,
            CP_SIZE, IN_PLACE, X_UNIT, TABLE_UNIT, INDEX,
        )  # fmt: skip


def _name(proxy: Any) -> str:
    """The kernel's name in profiles: what it rotates and how."""
    c = proxy.constants
    direction = "bwd" if c["INVERSE"] else "fwd"
    pairing = "interleaved" if c["INTERLEAVED_IN"] else "half"
    place = "_in_place" if c["IN_PLACE"] else ""
    return f"_rope_kernel_{direction}_{pairing}{place}_{c['TABLE']}_h{c['Q_HEADS']}_{c['K_HEADS']}_d{c['HEAD_DIM']}"


def _metadata(grid: Any, kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a launch moves, for profilers: the bytes of q and k, read and written."""
    features = arguments["Q_HEADS"] * arguments["HEAD_DIM"] + arguments["K_HEADS"] * arguments["K_HEAD_DIM"]
    tokens = arguments["tokens"] * arguments["batches"]
    return {"name": kernel.name, "bytes": 2 * tokens * features * arguments["q_ptr"].element_size()}


@triton.jit(
    repr=_name,
    launch_metadata=_metadata,
    do_not_specialize=[
        "offset", "tokens", "batches", "magic", "shift", "stripe", "stripe_magic", "stripe_shift", "sequences", "search_steps", "table_rows"
    ],
)  # fmt: skip
def rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, positions_ptr, offsets_ptr, cu_seqlens_ptr, offset,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_q_out_b, stride_q_out_t, stride_q_out_h, stride_k_out_b, stride_k_out_t, stride_k_out_h,
    stride_table_b, stride_table_r, stride_pos_a, stride_pos_b, stride_pos_t,
    table_rows, scale, tokens, batches, magic, shift, stripe, stripe_magic, stripe_shift, sequences, search_steps,
    FLAT: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_BLOCK_T: tl.constexpr,
    Q_BLOCK_H: tl.constexpr, K_BLOCK_T: tl.constexpr, K_BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr,
    START: tl.constexpr, K_HEAD_DIM: tl.constexpr, K_START: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED_IN: tl.constexpr, INTERLEAVED_OUT: tl.constexpr,
    INVERSE: tl.constexpr, TABLE: tl.constexpr, TABLE_STEP: tl.constexpr, SOURCE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr,
    SECTIONS_INTERLEAVED: tl.constexpr, CP_RANK: tl.constexpr, CP_SIZE: tl.constexpr, IN_PLACE: tl.constexpr,
    X_UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr, VECTOR: tl.constexpr, PAIR_VECTOR: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    # The tiles of q and k that rotate the same tokens are neighbours, so that they share table rows in the cache.
    GROUP: tl.constexpr = Q_BLOCK_T if Q_BLOCK_T > K_BLOCK_T else K_BLOCK_T
    Q_WIDTH: tl.constexpr = Q_HEADS * HEAD_DIM if FLAT else Q_HEADS
    K_WIDTH: tl.constexpr = K_HEADS * K_HEAD_DIM if FLAT else K_HEADS
    q_tiles: tl.constexpr = GROUP // Q_BLOCK_T * ((Q_WIDTH + Q_BLOCK_H - 1) // Q_BLOCK_H)
    k_tiles: tl.constexpr = GROUP // K_BLOCK_T * ((K_WIDTH + K_BLOCK_H - 1) // K_BLOCK_H)
    first_token = tl.program_id(0) // (q_tiles + k_tiles) * GROUP
    tile = tl.program_id(0) % (q_tiles + k_tiles)
    if tile < q_tiles:
        _rotate_tile(
            first_token, tile, q_ptr, q_out_ptr, stride_q_b, stride_q_t, stride_q_h,
            stride_q_out_b, stride_q_out_t, stride_q_out_h,
            cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
            positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens,
            batches, magic, shift, stripe, stripe_magic, stripe_shift, sequences, search_steps,
            FLAT, Q_HEADS, Q_BLOCK_T, Q_BLOCK_H, HEAD_DIM, START, PAIRS, BLOCK_P, INTERLEAVED_IN, INTERLEAVED_OUT,
            INVERSE, TABLE, TABLE_STEP, SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W, SECTIONS_INTERLEAVED,
            CP_RANK, CP_SIZE, IN_PLACE, X_UNIT, TABLE_UNIT, VECTOR, PAIR_VECTOR, INDEX,
        )  # fmt: skip
    elif K_HEADS > 0:
        _rotate_tile(
            first_token, tile - q_tiles, k_ptr, k_out_ptr, stride_k_b, stride_k_t, stride_k_h,
            stride_k_out_b, stride_k_out_t, stride_k_out_h,
            cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
            positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens,
            batches, magic, shift, stripe, stripe_magic, stripe_shift, sequences, search_steps,
            FLAT, K_HEADS, K_BLOCK_T, K_BLOCK_H, K_HEAD_DIM, K_START, PAIRS, BLOCK_P, INTERLEAVED_IN, INTERLEAVED_OUT,
            INVERSE, TABLE, TABLE_STEP, SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W, SECTIONS_INTERLEAVED,
            CP_RANK, CP_SIZE, IN_PLACE, X_UNIT, TABLE_UNIT, VECTOR, PAIR_VECTOR, INDEX,
        )  # fmt: skip
