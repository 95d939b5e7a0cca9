"""Triton kernel of `rope_and_cache_`: rotates q and k in place and writes k and v to the KV cache, in one launch.

Shape legend: T tokens of all batch entries, H heads, P pairs of a head, D features; a tile is BLOCK_T tokens by BLOCK_H
heads of one of q, k and v. A program reads x and the table rows, positions and slots of its tile once, and writes each
output once. Arithmetic is float32 with one final rounding. Memory-bound; with few tokens bound by the latency of the
dependent chain position, table row, store: the loads of x and the slot are issued before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..rope._triton_angles import PositionForm, Positions, Table, TableForm, cos_and_sin, sequence_of, table_rows_of
from ..rope._triton_kernel import View, base_of, load_pairs, quotient, rotate, store_pairs


class Slots(NamedTuple):
    """The cache slot of a token: given explicitly, or by the block table of its sequence."""

    ptr: Any
    stride_b: Any
    stride_t: Any
    block_table_ptr: Any
    stride_row: Any
    stride_nth: Any
    mapped: Any  # tokens with an entry in slots
    count: Any  # total number of slots
    table_blocks: Any  # blocks per row of the block table
    size: Any  # slots per block, or per sequence
    size_magic: Any
    size_shift: Any


class Form(NamedTuple):
    """Compile-time parameters shared by q, k and v."""

    PAIRS: Any
    BLOCK_P: Any
    INTERLEAVED_IN: Any
    INTERLEAVED_OUT: Any
    PLACES: Any  # "slots", "table" (block table) or "own" (sequence i has block i)
    SEQUENCE_IS_TOKEN: Any
    UNIT: Any  # strides are given in units of this many elements


@triton.jit
def _place_of(batch, token, mask, slots, positions, FORM: tl.constexpr, POSITIONS: tl.constexpr):
    """Cache block and entry in it of each token, int64 (BLOCK_T,), and a mask of the tokens that have one."""
    if POSITIONS.SOURCE == "packed":
        mask = mask & (token < tl.load(positions.cu_seqlens_ptr + positions.sequences))
    if FORM.PLACES == "slots":
        index = batch.to(tl.int64) * slots.stride_b + token.to(tl.int64) * slots.stride_t
        slot = tl.load(slots.ptr + index, mask & (token < slots.mapped), -1).to(tl.int64)
    else:
        rows, _ = table_rows_of(batch, token, mask, tl.arange(0, 1), positions, POSITIONS)
        position = tl.reshape(rows, token.shape).to(tl.int64)
        sequence = batch
        if POSITIONS.SOURCE == "packed":
            sequence = sequence_of(token, mask, positions, 1)
        elif FORM.SEQUENCE_IS_TOKEN:
            sequence = token
        if FORM.PLACES == "table":
            mask = mask & (position >= 0) & (position < slots.size.to(tl.int64) * slots.table_blocks)
            position = position.to(tl.int32)
            nth = quotient(position, slots.size_magic, slots.size_shift)
            index = sequence.to(tl.int64) * slots.stride_row + nth.to(tl.int64) * slots.stride_nth
            block = tl.load(slots.block_table_ptr + index, mask, -1).to(tl.int64)
            block = tl.where((block >= 0) & (block < slots.count), block, -1)  # so that no product below exceeds 2⁶²
            slot = block * slots.size + (position - nth * slots.size)  # of block -1: negative
        else:
            slot = tl.where(
                (position >= 0) & (position < slots.size), sequence.to(tl.int64) * slots.size + position, -1
            )
    there = mask & (slot >= 0) & (slot < slots.count)
    slot = slot.to(tl.int32)
    block = quotient(slot, slots.size_magic, slots.size_shift)
    return block.to(tl.int64), (slot - block * slots.size).to(tl.int64), there


@triton.jit
def _copy(x_ptr, x_base, cache_ptr, cache_base, mask, there, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Copy features [FIRST, FIRST + WIDTH) of every head to the cache."""
    offs = tl.arange(0, triton.next_power_of_2(WIDTH))[None, None, :]
    inside = offs < WIDTH
    x = tl.load(x_ptr + x_base + FIRST + offs, mask & inside)
    tl.store(cache_ptr + cache_base + FIRST + offs, x, there & inside)


def _name(proxy: Any) -> str:
    """Kernel name shown by profilers: pairing, table kind, slot source and shape."""
    c = proxy.constants
    pairing = "interleaved" if c["INTERLEAVED_IN"] else "half"
    return (
        f"_rope_and_cache_kernel_{pairing}_{c['TABLE']}_{c['PLACES']}_h{c['Q_HEADS']}_{c['K_HEADS']}_d{c['HEAD_DIM']}"
    )


@triton.jit(
    repr=_name,
    do_not_specialize=[
        "offset", "tokens", "batches", "token_magic", "token_shift", "sequences", "search_steps", "table_rows", "mapped", "count",
        "table_blocks", "size", "size_magic", "size_shift",
    ],
)  # fmt: skip
def rope_and_cache_kernel(
    q_ptr, k_ptr, v_ptr, key_cache_ptr, value_cache_ptr, slots_ptr, block_table_ptr,
    cos_ptr, sin_ptr, positions_ptr, offsets_ptr, cu_seqlens_ptr, offset,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t, stride_v_h,
    stride_key_n, stride_key_s, stride_key_h, stride_value_n, stride_value_s, stride_value_h,
    stride_slot_b, stride_slot_t, stride_row, stride_nth,
    stride_table_b, stride_table_r, stride_pos_a, stride_pos_b, stride_pos_t,
    table_rows, scale, tokens, batches, token_magic, token_shift, sequences, search_steps, mapped, count, table_blocks,
    size, size_magic, size_shift,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_BLOCK_T: tl.constexpr, Q_BLOCK_H: tl.constexpr,
    K_BLOCK_T: tl.constexpr, K_BLOCK_H: tl.constexpr, Q_START: tl.constexpr, HEAD_DIM: tl.constexpr,
    START: tl.constexpr, V_DIM: tl.constexpr, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr, INTERLEAVED_OUT: tl.constexpr, TABLE: tl.constexpr, TABLE_STEP: tl.constexpr,
    SOURCE: tl.constexpr, HAS_OFFSETS: tl.constexpr, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr,
    SECTION_W: tl.constexpr, SECTIONS_INTERLEAVED: tl.constexpr, PLACES: tl.constexpr,
    SEQUENCE_IS_TOKEN: tl.constexpr, WRITE_K: tl.constexpr, UNIT: tl.constexpr, TABLE_UNIT: tl.constexpr,
):  # fmt: skip
    # Programs for q, k and v tiles of the same tokens have adjacent ids.
    GROUP: tl.constexpr = Q_BLOCK_T if Q_BLOCK_T > K_BLOCK_T else K_BLOCK_T
    q_tiles: tl.constexpr = GROUP // Q_BLOCK_T * ((Q_HEADS + Q_BLOCK_H - 1) // Q_BLOCK_H)
    k_tiles: tl.constexpr = GROUP // K_BLOCK_T * ((K_HEADS + K_BLOCK_H - 1) // K_BLOCK_H)
    first_token = tl.program_id(0) // (q_tiles + 2 * k_tiles) * GROUP
    tile = tl.program_id(0) % (q_tiles + 2 * k_tiles)
    slots = Slots(
        slots_ptr, stride_slot_b, stride_slot_t, block_table_ptr, stride_row, stride_nth, mapped, count, table_blocks,
        size, size_magic, size_shift,
    )  # fmt: skip
    positions = Positions(
        positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens, sequences,
        search_steps,
    )  # fmt: skip
    table = Table(cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale)
    form: tl.constexpr = Form(PAIRS, BLOCK_P, INTERLEAVED_IN, INTERLEAVED_OUT, PLACES, SEQUENCE_IS_TOKEN, UNIT)
    position_form: tl.constexpr = PositionForm(
        SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W, SECTIONS_INTERLEAVED, 0, 1, tl.int64
    )
    table_form: tl.constexpr = TableForm(TABLE, TABLE_STEP, TABLE_UNIT, PAIRS, False, tl.int64)
    key_cache = View(key_cache_ptr, stride_key_n, stride_key_s, stride_key_h)
    if tile < q_tiles:
        _rotate_tile(
            first_token, tile, View(q_ptr, stride_q_b, stride_q_t, stride_q_h), key_cache,
            batches, token_magic, token_shift, slots, positions, table,
            Q_HEADS, Q_BLOCK_T, Q_BLOCK_H, 0, Q_START, True, False, form, position_form, table_form,
        )  # fmt: skip
    elif tile < q_tiles + k_tiles:
        _rotate_tile(
            first_token, tile - q_tiles, View(k_ptr, stride_k_b, stride_k_t, stride_k_h), key_cache,
            batches, token_magic, token_shift, slots, positions, table,
            K_HEADS, K_BLOCK_T, K_BLOCK_H, HEAD_DIM, START, WRITE_K, True, form, position_form, table_form,
        )  # fmt: skip
    else:
        batch, token, offs_h, mask_n, mask = _rows_of(
            first_token, tile - q_tiles - k_tiles, tokens, batches, token_magic, token_shift,
            K_HEADS, K_BLOCK_T, K_BLOCK_H,
        )  # fmt: skip
        block, entry, there = _place_of(batch, token, mask_n, slots, positions, form, position_form)
        v = View(v_ptr, stride_v_b, stride_v_t, stride_v_h)
        value_cache = View(value_cache_ptr, stride_value_n, stride_value_s, stride_value_h)
        x_base = base_of(batch, token, offs_h, v, UNIT, tl.int64)
        cache_base = base_of(block, entry, offs_h, value_cache, UNIT, tl.int64)
        _copy(v_ptr, x_base, value_cache_ptr, cache_base, mask, mask & there[:, None, None], 0, V_DIM)


@triton.jit
def _rows_of(
    first_token, tile, tokens, batches, token_magic, token_shift,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Batch entry, token and heads of a tile, the mask of its tokens, and that of tokens and heads, (BLOCK_T, BLOCK_H, 1)."""
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    offs_n = first_token + (tile // head_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_h = (tile % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_n = offs_n < batches * tokens
    batch = quotient(offs_n, token_magic, token_shift)
    mask = mask_n[:, None, None] & (offs_h < HEADS)[None, :, None]
    return batch, offs_n - batch * tokens, offs_h, mask_n, mask


@triton.jit
def _rotate_tile(
    first_token, tile, x, cache, batches, token_magic, token_shift, slots, positions, table,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, START: tl.constexpr,
    IN_PLACE: tl.constexpr, CACHED: tl.constexpr,
    FORM: tl.constexpr, POSITIONS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Rotate a tile of q or k, and write it in place, to the cache, or both."""
    batch, token, offs_h, mask_n, mask = _rows_of(
        first_token, tile, positions.tokens, batches, token_magic, token_shift, HEADS, BLOCK_T, BLOCK_H
    )
    offs_p = tl.arange(0, FORM.BLOCK_P)
    x_base = base_of(batch, token, offs_h, x, FORM.UNIT, tl.int64)
    x_a, x_b = load_pairs(x.ptr + START, x_base, mask, FORM.PAIRS, FORM.BLOCK_P, FORM.INTERLEAVED_IN)

    # The loads of position and slot overlap; the table row depends on the position.
    rows, identity = table_rows_of(batch, token, mask_n, offs_p, positions, POSITIONS)
    if CACHED:
        block, entry, there = _place_of(batch, token, mask_n, slots, positions, FORM, POSITIONS)
        cache_base = base_of(block, entry, offs_h, cache, FORM.UNIT, tl.int64)
        cached = mask & there[:, None, None]
        if START > 0:
            _copy(x.ptr, x_base, cache.ptr, cache_base, mask, cached, 0, START)
        if HEAD_DIM > START + 2 * FORM.PAIRS:
            _copy(
                x.ptr,
                x_base,
                cache.ptr,
                cache_base,
                mask,
                cached,
                START + 2 * FORM.PAIRS,
                HEAD_DIM - START - 2 * FORM.PAIRS,
            )

    cos, sin = cos_and_sin(rows, batch, mask_n, offs_p, table, TABLE, 1, "")
    y_a, y_b = rotate(x_a.to(tl.float32), x_b.to(tl.float32), cos, sin)
    y_a = y_a.to(x.ptr.dtype.element_ty)
    y_b = y_b.to(x.ptr.dtype.element_ty)
    if POSITIONS.SOURCE == "packed":
        y_a = tl.where(identity[:, None, None], x_a, y_a)
        y_b = tl.where(identity[:, None, None], x_b, y_b)

    if IN_PLACE:
        if FORM.INTERLEAVED_IN != FORM.INTERLEAVED_OUT:
            tl.debug_barrier()  # the whole head must be read before any thread writes to it
        store_pairs(x.ptr + START, x_base, mask, y_a, y_b, FORM.PAIRS, FORM.BLOCK_P, FORM.INTERLEAVED_OUT)
    if CACHED:
        store_pairs(cache.ptr + START, cache_base, cached, y_a, y_b, FORM.PAIRS, FORM.BLOCK_P, FORM.INTERLEAVED_OUT)
