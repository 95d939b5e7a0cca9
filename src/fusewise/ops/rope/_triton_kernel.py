"""Triton kernel of RoPE: one launch for q and k, forward and backward (the transposed rotation).

    (y_a, y_b) = (x_a cos θ − x_b sin θ, x_b cos θ + x_a sin θ)

Shape legend: T tokens, H heads, P pairs of a head, F = H · head_dim features of a token. A tile is BLOCK_T tokens by
BLOCK_H heads (or BLOCK_F features); each program processes one tile, reads x and the tile's table rows once and writes
y once. Arithmetic is float32 with one final rounding; angles that do not come from a table are range-reduced in float64.

The kernel is memory-bound: 16-byte vectorized loads and stores, and few registers per thread, so that occupancy is high
and every SM has many loads in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ._triton_angles import PositionForm, Positions, Table, TableForm, cos_and_sin, table_rows_of


class View(NamedTuple):
    """A (batch, token, head, feature) tensor with contiguous features; strides are multiples of `Form.UNIT` elements."""

    ptr: Any
    stride_b: Any
    stride_t: Any
    stride_h: Any


class Order(NamedTuple):
    """Traversal order of the tokens, with the magic numbers for division by batches and by stripe; see
    `batch_and_token`."""

    tokens: Any
    batches: Any
    magic: Any
    shift: Any
    stripe: Any
    stripe_magic: Any
    stripe_shift: Any


class Form(NamedTuple):
    """Compile-time parameters shared by q and k."""

    PAIRS: Any
    BLOCK_P: Any
    INTERLEAVED_IN: Any
    INTERLEAVED_OUT: Any
    IN_PLACE: Any
    UNIT: Any  # strides are given in units of this many elements
    VECTOR: Any  # contiguous, aligned features per access of x and y
    PAIR_VECTOR: Any  # the same for the partner elements and the table entries
    INDEX: Any
    DENSE: Any  # no gap between heads (used by the flat variant only)


@triton.jit
def quotient(n, magic, shift):
    """n // divisor for 0 <= n < 2³¹ by multiplication with a magic number; see `_triton.division`."""
    return (tl.umulhi((n * 2).to(tl.uint32), magic.to(tl.uint32)) >> shift).to(tl.int32)  # the shift must be unsigned


@triton.jit
def batch_and_token(n, order):
    """(batch, token) of the n-th token in traversal order: a stripe of tokens, then the same tokens of the next batch
    entry. Table rows are reused while they are in L2, and accesses stay contiguous over many tiles."""
    number = quotient(n, order.stripe_magic, order.stripe_shift)
    stripe_of_batch = quotient(number, order.magic, order.shift)
    batch = number - stripe_of_batch * order.batches
    return batch, n + (stripe_of_batch - number) * order.stripe


@triton.jit
def base_of(batch, token, offs_h, view, UNIT: tl.constexpr, INDEX: tl.constexpr):
    """Element offset of each head, (BLOCK_T, BLOCK_H, 1)."""
    of_token = batch.to(INDEX) * view.stride_b + token.to(INDEX) * view.stride_t
    return (of_token[:, None, None] + (offs_h.to(INDEX) * view.stride_h)[None, :, None]) * UNIT


@triton.jit
def _load_span(x_ptr, base, mask, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Load features [FIRST, FIRST + WIDTH) of every head as two blocks: the largest power of two, and the remainder."""
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
    """(x_a cos − x_b sin, x_b cos + x_a sin) with an explicit fma: the compiler cannot contract it differently in
    different variants, so in-place and out-of-place results are bitwise equal."""
    return tl.fma(x_a, cos, -(x_b * sin)), tl.fma(x_b, cos, x_a * sin)


@triton.jit
def load_pairs(x_ptr, base, mask, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both elements of the pairs of each head; x_ptr points to the first feature that rotates. (BLOCK_T, BLOCK_H, BLOCK_P)."""
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_P)[None, None, :]
        if PAIRS != BLOCK_P:
            mask = mask & (both < 2 * PAIRS)
        x = tl.load(x_ptr + base + both, mask)
        x_a, x_b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_P, 2)))
    else:
        pairs = tl.arange(0, BLOCK_P)[None, None, :]
        if PAIRS != BLOCK_P:
            mask = mask & (pairs < PAIRS)
        x_a = tl.load(x_ptr + base + pairs, mask)
        x_b = tl.load(x_ptr + base + PAIRS + pairs, mask)
    return x_a, x_b


@triton.jit
def store_pairs(y_ptr, base, mask, y_a, y_b, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_P)[None, None, :]
        if PAIRS != BLOCK_P:
            mask = mask & (both < 2 * PAIRS)
        y = tl.reshape(tl.join(y_a, y_b), (y_a.shape[0], y_a.shape[1], 2 * BLOCK_P))
        tl.store(y_ptr + base + both, y, mask)
    else:
        pairs = tl.arange(0, BLOCK_P)[None, None, :]
        if PAIRS != BLOCK_P:
            mask = mask & (pairs < PAIRS)
        tl.store(y_ptr + base + pairs, y_a, mask)
        tl.store(y_ptr + base + PAIRS + pairs, y_b, mask)


@triton.jit
def _rotate_pairs_tile(
    first_token, tile, x, y, order, positions, table,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, STEPS: tl.constexpr, HEAD_DIM: tl.constexpr,
    START: tl.constexpr, FORM: tl.constexpr, POSITIONS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """General variant: each thread holds both elements of its pairs. No data is exchanged between threads, so it also
    works in place. cos and sin are loaded or computed once per token and shared by all heads of the tile, STEPS blocks
    of BLOCK_H. With STEPS > 1 the blocks are full and all features rotate."""
    head_blocks: tl.constexpr = (HEADS + BLOCK_H * STEPS - 1) // (BLOCK_H * STEPS)
    offs_n = first_token + (tile // head_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_h = (tile % head_blocks) * (BLOCK_H * STEPS) + tl.arange(0, BLOCK_H)
    offs_p = tl.arange(0, FORM.BLOCK_P)
    mask_n = offs_n < order.batches * order.tokens
    batch, token = batch_and_token(offs_n, order)
    x_base = base_of(batch, token, offs_h, x, FORM.UNIT, FORM.INDEX)
    y_base = base_of(batch, token, offs_h, y, FORM.UNIT, FORM.INDEX)
    mask = mask_n[:, None, None]
    if HEADS % BLOCK_H != 0:
        mask = mask & (offs_h < HEADS)[None, :, None]

    # Issue the loads of x first: they are in flight while the table rows are being located.
    x_a, x_b = load_pairs(x.ptr + START, x_base, mask, FORM.PAIRS, FORM.BLOCK_P, FORM.INTERLEAVED_IN)
    REST: tl.constexpr = HEAD_DIM - START - 2 * FORM.PAIRS
    tl.static_assert(STEPS == 1 or (HEADS % (BLOCK_H * STEPS) == 0 and START + REST == 0))
    if not FORM.IN_PLACE:
        if START > 0:
            before, before_tail = _load_span(x.ptr, x_base, mask, 0, START)
        if REST > 0:
            after, after_tail = _load_span(x.ptr, x_base, mask, HEAD_DIM - REST, REST)

    rows, identity = table_rows_of(batch, token, mask_n, offs_p, positions, POSITIONS)
    # With padding lanes (PAIRS < BLOCK_P), loading the table per head would waste the loads of the padding.
    table_heads: tl.constexpr = BLOCK_H if FORM.PAIRS == FORM.BLOCK_P else 1
    cos, sin = cos_and_sin(rows, batch, mask_n, offs_p, table, TABLE, table_heads, "evict_last")

    for step in tl.static_range(STEPS):
        if step + 1 < STEPS:  # in flight while this block is rotated
            offs_h += BLOCK_H
            following = base_of(batch, token, offs_h, x, FORM.UNIT, FORM.INDEX)
            next_a, next_b = load_pairs(x.ptr + START, following, mask, FORM.PAIRS, FORM.BLOCK_P, FORM.INTERLEAVED_IN)
        y_a, y_b = rotate(x_a.to(tl.float32), x_b.to(tl.float32), cos, sin)
        y_a = y_a.to(y.ptr.dtype.element_ty)
        y_b = y_b.to(y.ptr.dtype.element_ty)
        if POSITIONS.SOURCE == "packed":
            y_a = tl.where(identity[:, None, None], x_a, y_a)
            y_b = tl.where(identity[:, None, None], x_b, y_b)
        if FORM.IN_PLACE and FORM.INTERLEAVED_IN != FORM.INTERLEAVED_OUT:
            tl.debug_barrier()  # the whole head must be read before any thread writes to it
        store_pairs(y.ptr + START, y_base, mask, y_a, y_b, FORM.PAIRS, FORM.BLOCK_P, FORM.INTERLEAVED_OUT)
        if step + 1 < STEPS:
            x_a, x_b = next_a, next_b
            y_base = base_of(batch, token, offs_h, y, FORM.UNIT, FORM.INDEX)

    if not FORM.IN_PLACE:
        if START > 0:
            _store_span(y.ptr, y_base, mask, before, before_tail, 0, START)
        if REST > 0:
            _store_span(y.ptr, y_base, mask, after, after_tail, HEAD_DIM - REST, REST)


@triton.jit
def _rotate_flat_tile(
    first_token, tile, x, y, order, positions, table,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, STEPS: tl.constexpr, HEAD_DIM: tl.constexpr,
    START: tl.constexpr, FORM: tl.constexpr, POSITIONS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Out-of-place variant over the flattened features of all heads, for partial rotation and some odd head widths: no
    thread idles and whole cache lines are written. For the half pairing the partner element, f ± P, is a second load
    that hits in L1. BLOCK_H counts features here, and STEPS is 1.
    """
    ALL: tl.constexpr = 2 * FORM.PAIRS == HEAD_DIM
    FEATURES: tl.constexpr = HEADS * HEAD_DIM
    blocks: tl.constexpr = (FEATURES + BLOCK_H - 1) // BLOCK_H
    offs_n = first_token + (tile // blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    feature = (tile % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_n = offs_n < order.batches * order.tokens
    batch, token = batch_and_token(offs_n, order)
    mask = mask_n[:, None]
    if FEATURES % BLOCK_H != 0:
        mask = mask & (feature < FEATURES)[None, :]

    head = feature // HEAD_DIM
    in_head = feature - head * HEAD_DIM
    x_base = ((batch.to(FORM.INDEX) * x.stride_b + token.to(FORM.INDEX) * x.stride_t) * FORM.UNIT)[:, None]
    y_base = ((batch.to(FORM.INDEX) * y.stride_b + token.to(FORM.INDEX) * y.stride_t) * FORM.UNIT)[:, None]
    if FORM.DENSE:
        x_offs = feature.to(FORM.INDEX)
        y_offs = x_offs
    else:
        x_offs = head.to(FORM.INDEX) * (x.stride_h * FORM.UNIT) + in_head
        y_offs = head.to(FORM.INDEX) * (y.stride_h * FORM.UNIT) + in_head
    own = tl.load(x.ptr + x_base + tl.max_contiguous(tl.multiple_of(x_offs, FORM.VECTOR), FORM.VECTOR)[None, :], mask)

    if FORM.INTERLEAVED_IN:
        # One table entry per pair; a thread holds both elements of its pairs.
        half: tl.constexpr = BLOCK_H // 2
        WHOLE: tl.constexpr = (FORM.PAIR_VECTOR + 1) // 2  # pairs; one feature is half a pair
        pair = (((tile % blocks) * half + tl.arange(0, half)) % (HEAD_DIM // 2)) - START // 2
        rotated = mask_n[:, None]
        if not ALL:
            rotated &= tl.max_constancy((pair >= 0) & (pair < FORM.PAIRS), WHOLE)[None, :]
        entry = tl.max_contiguous(tl.multiple_of(pair, WHOLE), WHOLE).to(FORM.INDEX) * TABLE.STEP
    else:
        pair = in_head - START
        second = pair >= FORM.PAIRS
        entry = tl.where(second, pair - FORM.PAIRS, pair)
        rotated = mask
        if not ALL:
            rotated &= tl.max_constancy((pair >= 0) & (pair < 2 * FORM.PAIRS), FORM.PAIR_VECTOR)[None, :]
        entry = tl.max_contiguous(tl.multiple_of(entry, FORM.PAIR_VECTOR), FORM.PAIR_VECTOR).to(FORM.INDEX) * TABLE.STEP
        partner = tl.where(second, x_offs - FORM.PAIRS, x_offs + FORM.PAIRS)
        partner = tl.max_contiguous(tl.multiple_of(partner, FORM.PAIR_VECTOR), FORM.PAIR_VECTOR)
        other = tl.load(x.ptr + x_base + partner[None, :], rotated, 0.0)

    rows, identity = table_rows_of(batch, token, mask_n, pair, positions, POSITIONS)
    inside = (rows >= 0) & (rows < table.rows)
    index = (rows.to(FORM.INDEX) * table.stride_r + (batch.to(FORM.INDEX) * table.stride_b)[:, None]) * TABLE.UNIT
    index = index + entry[None, :]
    cos = tl.load(table.cos_ptr + index, rotated & inside, float("nan"), eviction_policy="evict_last").to(tl.float32)
    sin = tl.load(table.sin_ptr + index, rotated & inside, 0.0, eviction_policy="evict_last").to(tl.float32)
    if TABLE.INVERSE:
        sin = -sin
    if POSITIONS.SOURCE == "packed":
        rotated = rotated & ~identity[:, None]
    if FORM.INTERLEAVED_IN:
        x_a, x_b = tl.split(tl.reshape(own, (BLOCK_T, BLOCK_H // 2, 2)))
        y_a, y_b = rotate(x_a.to(tl.float32), x_b.to(tl.float32), cos, sin)
        y_a = tl.where(rotated, y_a.to(y.ptr.dtype.element_ty), x_a)
        y_b = tl.where(rotated, y_b.to(y.ptr.dtype.element_ty), x_b)
        rotation = tl.join(y_a, y_b).reshape(BLOCK_T, BLOCK_H)
    else:
        signed = tl.where(second[None, :], sin, -sin)
        rotation = tl.fma(own.to(tl.float32), cos, other.to(tl.float32) * signed).to(y.ptr.dtype.element_ty)
        rotation = tl.where(rotated, rotation, own)
    y_offs = tl.max_contiguous(tl.multiple_of(y_offs, FORM.VECTOR), FORM.VECTOR)
    tl.store(y.ptr + y_base + y_offs[None, :], rotation, mask)


def _name(proxy: Any) -> str:
    """Kernel name shown by profilers: direction, pairing, table kind and shape."""
    c = proxy.constants
    direction = "bwd" if c["INVERSE"] else "fwd"
    pairing = "interleaved" if c["INTERLEAVED_IN"] else "half"
    place = "_in_place" if c["IN_PLACE"] else ""
    return f"_rope_kernel_{direction}_{pairing}{place}_{c['TABLE']}_h{c['Q_HEADS']}_{c['K_HEADS']}_d{c['HEAD_DIM']}"


def metadata(times: int) -> Callable[..., dict[str, Any]]:
    """Launch metadata for profilers: the bytes of q and k, which a kernel reads or writes so many times in all."""

    def of_launch(grid: Any, kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        features = arguments["Q_HEADS"] * arguments["HEAD_DIM"] + arguments["K_HEADS"] * arguments["K_HEAD_DIM"]
        tokens = arguments["tokens"] * arguments["batches"]
        return {"name": kernel.name, "bytes": times * tokens * features * arguments["q_ptr"].element_size()}

    return of_launch


@triton.jit(
    repr=_name,
    launch_metadata=metadata(2),
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
    FLAT: tl.constexpr, DENSE: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_BLOCK_T: tl.constexpr,
    Q_BLOCK_H: tl.constexpr, Q_STEPS: tl.constexpr, K_BLOCK_T: tl.constexpr, K_BLOCK_H: tl.constexpr,
    K_STEPS: tl.constexpr, HEAD_DIM: tl.constexpr, START: tl.constexpr, K_HEAD_DIM: tl.constexpr, K_START: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED_IN: tl.constexpr, INTERLEAVED_OUT: tl.constexpr,
    INVERSE: tl.constexpr, TABLE: tl.constexpr, TABLE_STEP: tl.constexpr, SOURCE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr,
    SECTIONS_INTERLEAVED: tl.constexpr, CP_RANK: tl.constexpr, CP_SIZE: tl.constexpr, IN_PLACE: tl.constexpr,
    X_UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr, VECTOR: tl.constexpr, PAIR_VECTOR: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    # Programs for q and k tiles of the same tokens have adjacent ids, so that they share table rows in L2.
    GROUP: tl.constexpr = Q_BLOCK_T if Q_BLOCK_T > K_BLOCK_T else K_BLOCK_T
    Q_WIDTH: tl.constexpr = Q_HEADS * HEAD_DIM if FLAT else Q_HEADS
    K_WIDTH: tl.constexpr = K_HEADS * K_HEAD_DIM if FLAT else K_HEADS
    q_tiles: tl.constexpr = GROUP // Q_BLOCK_T * ((Q_WIDTH + Q_BLOCK_H * Q_STEPS - 1) // (Q_BLOCK_H * Q_STEPS))
    k_tiles: tl.constexpr = GROUP // K_BLOCK_T * ((K_WIDTH + K_BLOCK_H * K_STEPS - 1) // (K_BLOCK_H * K_STEPS))
    first_token = tl.program_id(0) // (q_tiles + k_tiles) * GROUP
    tile = tl.program_id(0) % (q_tiles + k_tiles)
    order = Order(tokens, batches, magic, shift, stripe, stripe_magic, stripe_shift)
    positions = Positions(
        positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens, sequences,
        search_steps,
    )  # fmt: skip
    table = Table(cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale)
    form: tl.constexpr = Form(
        PAIRS, BLOCK_P, INTERLEAVED_IN, INTERLEAVED_OUT, IN_PLACE, X_UNIT, VECTOR, PAIR_VECTOR, INDEX, DENSE
    )
    position_form: tl.constexpr = PositionForm(
        SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W, SECTIONS_INTERLEAVED, CP_RANK, CP_SIZE, INDEX
    )
    table_form: tl.constexpr = TableForm(TABLE, TABLE_STEP, TABLE_UNIT, PAIRS, INVERSE, INDEX)
    rotate_tile: tl.constexpr = _rotate_flat_tile if FLAT else _rotate_pairs_tile
    if tile < q_tiles:
        rotate_tile(
            first_token, tile,
            View(q_ptr, stride_q_b, stride_q_t, stride_q_h),
            View(q_out_ptr, stride_q_out_b, stride_q_out_t, stride_q_out_h),
            order, positions, table,
            Q_HEADS, Q_BLOCK_T, Q_BLOCK_H, Q_STEPS, HEAD_DIM, START, form, position_form, table_form,
        )  # fmt: skip
    elif K_HEADS > 0:
        rotate_tile(
            first_token, tile - q_tiles,
            View(k_ptr, stride_k_b, stride_k_t, stride_k_h),
            View(k_out_ptr, stride_k_out_b, stride_k_out_t, stride_k_out_h),
            order, positions, table,
            K_HEADS, K_BLOCK_T, K_BLOCK_H, K_STEPS, K_HEAD_DIM, K_START, form, position_form, table_form,
        )  # fmt: skip
