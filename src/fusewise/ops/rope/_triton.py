"""RoPE in Triton: one kernel for q and k together, forward and backward (the transposed rotation).

    (y_a, y_b) = (x_a cos θ − x_b sin θ, x_b cos θ + x_a sin θ)

Shape legend: N = B·T tokens, H heads, P pairs of a head; a tile is (BLOCK_T tokens, BLOCK_H heads, BLOCK_P ≥ P pairs).
Read once: x, and a table row a tile; written once: y. One program a tile, q's tiles first, then k's, so that heads may
differ; cos and sin are read once a token and tile and serve BLOCK_H heads. A thread holds both elements of its pairs,
16 bytes of each where the width allows, so nothing is exchanged between threads; all arithmetic is float32, rounded
once. The kernel moves a few hundred bytes an instruction and is bound by memory: a tile is as large as registers
allow, so that enough loads are in flight, and shrinks only to give every multiprocessor work.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._problem import Operand, Problem, Spec


@dataclass(frozen=True)
class Tile:
    """Tokens and heads of one program."""

    block_t: int
    block_h: int

    def programs(self, tokens: int, heads: int) -> int:
        return triton.cdiv(tokens, self.block_t) * triton.cdiv(heads, self.block_h)


INTERPRETED = triton.knobs.runtime.interpret  # decided when a kernel is decorated
NUM_WARPS = 4
_TILE_BYTES = 16 * 1024


def choose_tile(tokens: int, heads: int, row_bytes: int, processors: int) -> Tile:
    """The tile for `tokens` tokens of `heads` heads whose rotated features take `row_bytes` bytes."""
    rows = max(1, _TILE_BYTES // triton.next_power_of_2(row_bytes))
    block_h = min(rows, _divisor_power_of_2(heads))
    block_t = rows // block_h
    while block_t > 1 and triton.cdiv(tokens, block_t) * triton.cdiv(heads, block_h) < 4 * processors:
        block_t //= 2
    while block_h > 2 and triton.cdiv(tokens, block_t) * triton.cdiv(heads, block_h) < 2 * processors:
        block_h //= 2
    return Tile(block_t, block_h)


def _divisor_power_of_2(heads: int) -> int:
    """The power of two for a tile of heads: the largest that divides them if that is 4 or more, else the next above
    (up to 8): 28 heads are 7 · 4, 71 are 8 · 9 with one idle."""
    divisor = heads & -heads
    return divisor if divisor >= 4 else min(8, triton.next_power_of_2(max(heads, 1)))


@triton.jit
def _sincos(angle):
    """cos and sin of a float64 angle in radians, as float32, to half a unit in the last place of 1.

    Reduced in float64 by quarter turns, then polynomials (Cephes) on [-π/4, π/4]. The float64 work is five operations
    a token and pair, shared by all heads of the tile.
    """
    quarter = angle * 0.6366197723675814
    turns = tl.floor(quarter + 0.5)
    x = ((quarter - turns) * 1.5707963267948966).to(tl.float32)
    x2 = x * x
    sin = x + x * x2 * (-1.6666654611e-1 + x2 * (8.3321608736e-3 + x2 * -1.9515295891e-4))
    cos = 1.0 - 0.5 * x2 + x2 * x2 * (4.166664568298827e-2 + x2 * (-1.388731625493765e-3 + x2 * 2.443315711809948e-5))
    quadrant = turns.to(tl.int64).to(tl.int32) & 3
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
def _table_rows(
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
            rows = tl.load(positions_ptr + index + (axis * stride_pos_a)[None, :], mask[:, None] & pair_mask[None, :], 0)
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
def _cos_sin(
    rows, identity, batch, mask, offs_p,
    cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
    TABLE: tl.constexpr, TABLE_STEP: tl.constexpr, PAIRS: tl.constexpr, INVERSE: tl.constexpr,
    HAS_IDENTITY: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """cos θ and sin θ in float32, (BLOCK_T, BLOCK_P)."""
    pair_mask = (offs_p < PAIRS)[None, :]
    if TABLE == "inv_freq":
        inv_freq = tl.load(cos_ptr + offs_p * TABLE_STEP, offs_p < PAIRS, 0.0)[None, :]
        cos, sin = _sincos(rows.to(tl.float64) * inv_freq.to(tl.float64))
    else:
        inside = (rows >= 0) & (rows < table_rows) & mask[:, None]
        index = rows.to(INDEX) * stride_table_r + (batch.to(INDEX) * stride_table_b)[:, None]
        index = index + (offs_p * TABLE_STEP)[None, :]
        inside = inside & pair_mask
        cos = tl.load(cos_ptr + index, inside, float("nan")).to(tl.float32)
        if TABLE == "angles":
            cos, sin = _sincos(cos.to(tl.float64))
            cos = tl.where(inside, cos, float("nan"))
            sin = tl.where(inside, sin, float("nan"))
        else:
            sin = tl.load(sin_ptr + index, inside, float("nan")).to(tl.float32)
    if TABLE == "inv_freq" or TABLE == "angles":
        cos = cos * scale
        sin = sin * scale
    if INVERSE:
        sin = -sin
    if HAS_IDENTITY:
        cos = tl.where(identity[:, None], 1.0, cos)
        sin = tl.where(identity[:, None], 0.0, sin)
    return cos, sin


@triton.jit
def _copy_span(
    x_ptr, y_ptr, x_base, y_base, mask, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy features [FIRST, FIRST + WIDTH) of every head of the tile."""
    offs = tl.arange(0, BLOCK)[None, None, :]
    inside = mask & (offs < WIDTH)
    tl.store(y_ptr + y_base + FIRST + offs, tl.load(x_ptr + x_base + FIRST + offs, inside), inside)


@triton.jit
def _rotate_tile(
    tile, x_ptr, y_ptr, stride_x_b, stride_x_t, stride_x_h, stride_y_b, stride_y_t, stride_y_h,
    cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
    positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens, all_tokens,
    sequences, search_steps,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, START: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED_IN: tl.constexpr, INTERLEAVED_OUT: tl.constexpr,
    INVERSE: tl.constexpr, TABLE: tl.constexpr, TABLE_STEP: tl.constexpr, SOURCE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr,
    SECTIONS_INTERLEAVED: tl.constexpr, CP_RANK: tl.constexpr, CP_SIZE: tl.constexpr, IN_PLACE: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    offs_n = (tile // head_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_h = (tile % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_p = tl.arange(0, BLOCK_P)
    mask_n = offs_n < all_tokens
    batch = offs_n // tokens
    token = offs_n % tokens

    x_base = (batch.to(INDEX) * stride_x_b + token.to(INDEX) * stride_x_t)[:, None, None] + (
        offs_h.to(INDEX) * stride_x_h
    )[None, :, None]
    y_base = (batch.to(INDEX) * stride_y_b + token.to(INDEX) * stride_y_t)[:, None, None] + (
        offs_h.to(INDEX) * stride_y_h
    )[None, :, None]
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

    rows, identity = _table_rows(
        batch, token, mask_n, offs_p,
        positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens,
        sequences, search_steps,
        SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W, SECTIONS_INTERLEAVED, CP_RANK, CP_SIZE,
    )  # fmt: skip
    cos, sin = _cos_sin(
        rows, identity, batch, mask_n, offs_p,
        cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
        TABLE, TABLE_STEP, PAIRS, INVERSE, SOURCE == "packed", INDEX,
    )  # fmt: skip
    cos = cos[:, None, :]
    sin = sin[:, None, :]

    x_a = x_a.to(tl.float32)
    x_b = x_b.to(tl.float32)
    y_a = (x_a * cos - x_b * sin).to(y_ptr.dtype.element_ty)
    y_b = (x_b * cos + x_a * sin).to(y_ptr.dtype.element_ty)
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
            _copy_span(x_ptr, y_ptr, x_base, y_base, mask, 0, START, triton.next_power_of_2(START))
        REST: tl.constexpr = HEAD_DIM - START - 2 * PAIRS
        if REST > 0:
            _copy_span(x_ptr, y_ptr, x_base, y_base, mask, HEAD_DIM - REST, REST, triton.next_power_of_2(REST))


def _name(proxy: Any) -> str:
    """The kernel's name in profiles: what it rotates and how."""
    c = proxy.constants
    table = c["TABLE"]
    direction = "bwd" if c["INVERSE"] else "fwd"
    pairing = ("interleaved" if c["INTERLEAVED_IN"] else "half") + ("_in_place" if c["IN_PLACE"] else "")
    return f"_rope_kernel_{direction}_{pairing}_{table}_h{c['Q_HEADS']}_{c['K_HEADS']}_d{c['HEAD_DIM']}"


def _metadata(grid: Any, kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a launch moves, for profilers: bytes read and written of q and k."""
    heads = arguments["Q_HEADS"] + arguments["K_HEADS"]
    moved = 2 * heads * arguments["all_tokens"] * arguments["HEAD_DIM"] * arguments["q_ptr"].element_size()
    return {"name": kernel.name, "bytes": moved}


@triton.jit(repr=_name, launch_metadata=_metadata, do_not_specialize=["offset", "tokens", "all_tokens", "sequences",
    "search_steps", "q_tiles", "table_rows"])  # fmt: skip
def _rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, positions_ptr, offsets_ptr, cu_seqlens_ptr, offset,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_q_out_b, stride_q_out_t, stride_q_out_h, stride_k_out_b, stride_k_out_t, stride_k_out_h,
    stride_table_b, stride_table_r, stride_pos_a, stride_pos_b, stride_pos_t,
    table_rows, scale, tokens, all_tokens, sequences, search_steps, q_tiles,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, Q_BLOCK_T: tl.constexpr, Q_BLOCK_H: tl.constexpr,
    K_BLOCK_T: tl.constexpr, K_BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, START: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED_IN: tl.constexpr, INTERLEAVED_OUT: tl.constexpr,
    INVERSE: tl.constexpr, TABLE: tl.constexpr, TABLE_STEP: tl.constexpr, SOURCE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, SECTION_T: tl.constexpr, SECTION_H: tl.constexpr, SECTION_W: tl.constexpr,
    SECTIONS_INTERLEAVED: tl.constexpr, CP_RANK: tl.constexpr, CP_SIZE: tl.constexpr, IN_PLACE: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < q_tiles:
        _rotate_tile(
            program, q_ptr, q_out_ptr, stride_q_b, stride_q_t, stride_q_h,
            stride_q_out_b, stride_q_out_t, stride_q_out_h,
            cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
            positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens,
            all_tokens, sequences, search_steps,
            Q_HEADS, Q_BLOCK_T, Q_BLOCK_H, HEAD_DIM, START, PAIRS, BLOCK_P, INTERLEAVED_IN, INTERLEAVED_OUT, INVERSE,
            TABLE, TABLE_STEP, SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W, SECTIONS_INTERLEAVED, CP_RANK,
            CP_SIZE, IN_PLACE, INDEX,
        )  # fmt: skip
    elif K_HEADS > 0:
        _rotate_tile(
            program - q_tiles, k_ptr, k_out_ptr, stride_k_b, stride_k_t, stride_k_h,
            stride_k_out_b, stride_k_out_t, stride_k_out_h,
            cos_ptr, sin_ptr, stride_table_b, stride_table_r, table_rows, scale,
            positions_ptr, stride_pos_a, stride_pos_b, stride_pos_t, offsets_ptr, cu_seqlens_ptr, offset, tokens,
            all_tokens, sequences, search_steps,
            K_HEADS, K_BLOCK_T, K_BLOCK_H, HEAD_DIM, START, PAIRS, BLOCK_P, INTERLEAVED_IN, INTERLEAVED_OUT, INVERSE,
            TABLE, TABLE_STEP, SOURCE, HAS_OFFSETS, SECTION_T, SECTION_H, SECTION_W, SECTIONS_INTERLEAVED, CP_RANK,
            CP_SIZE, IN_PLACE, INDEX,
        )  # fmt: skip


def unavailable(device_type: str) -> str | None:
    """Why Triton cannot serve tensors of this device type, or None if it can."""
    if INTERPRETED:
        return None
    if device_type == "cpu":
        return "triton compiles for GPUs; on a CPU it runs only interpreted, with TRITON_INTERPRET=1 set before import"
    return None if device_type in ("cuda", "xpu") else f"triton has no backend for device type {device_type}"


def arguments(problem: Problem, processors: int) -> tuple[int, dict[str, Any]]:
    """The grid size and all arguments of the kernel for a problem."""
    spec, operands = problem.spec, problem.operands
    all_tokens = problem.batch * problem.tokens
    row_bytes = 2 * problem.pairs * operands[0].x.element_size()
    tiles = [choose_tile(all_tokens, operand.heads, row_bytes, processors) for operand in operands]
    programs = [tile.programs(all_tokens, operand.heads) for tile, operand in zip(tiles, operands, strict=True)]
    q, k = operands[0], operands[-1]
    sections = spec.sections or (0, 0, 0)
    sequences = 0 if problem.cu_seqlens is None else problem.cu_seqlens.shape[0] - 1
    # A tensor that the call does not have is never read; the table stands in for its pointer.
    return sum(programs), dict(
        q_ptr=q.x, k_ptr=k.x, q_out_ptr=q.y, k_out_ptr=k.y, cos_ptr=problem.cos, sin_ptr=problem.sin,
        positions_ptr=problem.cos if problem.positions is None else problem.positions,
        offsets_ptr=problem.cos if problem.offsets is None else problem.offsets,
        cu_seqlens_ptr=problem.cos if problem.cu_seqlens is None else problem.cu_seqlens,
        offset=problem.offset,
        stride_q_b=q.x_strides[0], stride_q_t=q.x_strides[1], stride_q_h=q.x_strides[2],
        stride_k_b=k.x_strides[0], stride_k_t=k.x_strides[1], stride_k_h=k.x_strides[2],
        stride_q_out_b=q.y_strides[0], stride_q_out_t=q.y_strides[1], stride_q_out_h=q.y_strides[2],
        stride_k_out_b=k.y_strides[0], stride_k_out_t=k.y_strides[1], stride_k_out_h=k.y_strides[2],
        stride_table_b=problem.table_strides[0], stride_table_r=problem.table_strides[1],
        stride_pos_a=problem.position_strides[0], stride_pos_b=problem.position_strides[1],
        stride_pos_t=problem.position_strides[2],
        table_rows=problem.rows, scale=spec.scale, tokens=max(problem.tokens, 1), all_tokens=all_tokens,
        sequences=sequences, search_steps=sequences.bit_length(), q_tiles=programs[0],
        Q_HEADS=q.heads, K_HEADS=k.heads if len(operands) == 2 else 0,
        Q_BLOCK_T=tiles[0].block_t, Q_BLOCK_H=tiles[0].block_h,
        K_BLOCK_T=tiles[-1].block_t, K_BLOCK_H=tiles[-1].block_h,
        HEAD_DIM=problem.head_dim, START=problem.start, PAIRS=problem.pairs,
        BLOCK_P=triton.next_power_of_2(problem.pairs),
        INTERLEAVED_IN=spec.pairs_in == "interleaved", INTERLEAVED_OUT=spec.pairs_out == "interleaved",
        INVERSE=spec.inverse, TABLE="cos_sin" if spec.table == "fused" else spec.table,
        TABLE_STEP=problem.table_strides[2],
        SOURCE="positions" if problem.positions is not None else "packed" if problem.cu_seqlens is not None else "running",
        HAS_OFFSETS=problem.offsets is not None,
        SECTION_T=sections[0], SECTION_H=sections[1], SECTION_W=sections[2],
        SECTIONS_INTERLEAVED=spec.sections_interleaved, CP_RANK=spec.cp_rank, CP_SIZE=spec.cp_size,
        IN_PLACE=q.x.data_ptr() == q.y.data_ptr(),
        INDEX=tl.int64 if _reach(problem) > 2**31 - 1 else tl.int32,
    )  # fmt: skip


def _reach(problem: Problem) -> int:
    """The largest element offset that the kernel computes from any of its pointers."""
    sizes = (problem.batch - 1, problem.tokens - 1)

    def span(heads: int, strides: tuple[int, int, int]) -> int:
        return sum(n * s for n, s in zip((*sizes, heads - 1), strides, strict=True)) + problem.head_dim

    table = 0 if problem.spec.table == "inv_freq" else _extent(problem.cos)
    return max(table, *(span(o.heads, s) for o in problem.operands for s in (o.x_strides, o.y_strides)))


def _extent(x: Tensor) -> int:
    return sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1


@functools.cache
def _processors(device: int) -> int:
    return 132 if device < 0 else torch.cuda.get_device_properties(device).multi_processor_count


# A launch that has run before: the compiled kernel bound to its grid, the arguments that follow the pointers, and the
# distance in bytes from the table to its sine part where both are one tensor. Keyed by all that these depend on.
_PLANS: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], int]] = {}
_PLANS_MAX = 4096


def launch(
    xs: tuple[Tensor, ...],
    ys: tuple[Tensor, ...],
    cos: Tensor,
    sin: Tensor | None,
    positions: Tensor | None,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    offset: int,
    spec: str,
) -> None:
    """The implementation `impl="triton"`: rotate every x into its y on the current stream of their device.

    Triton's own launch specialises and packs some sixty arguments anew at each call. A repeated call finds them bound,
    which leaves the pointers, the offset and the stream.
    """
    q, k, q_out, k_out = xs[0], xs[-1], ys[0], ys[-1]
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr = (
        q.data_ptr(), k.data_ptr(), q_out.data_ptr(), k_out.data_ptr(), cos.data_ptr()
    )  # fmt: skip
    device = q.get_device()
    # Vector loads are compiled for pointers that are multiples of 16; the rare others take the long way.
    if (q_ptr | k_ptr | q_out_ptr | k_out_ptr | cos_ptr) & 15 or not _direct():
        return _launch_unbound(Problem.build(xs, ys, cos, sin, positions, offsets, cu_seqlens, offset, Spec.decode(spec)))
    key = (
        spec, device, len(xs), q.dtype, q.shape, q.stride(), k.shape, k.stride(), q_out.stride(), k_out.stride(),
        q_ptr == q_out_ptr, cos.dtype, cos.shape, cos.stride(),
        None if sin is None else sin.data_ptr() & 15,
        None if positions is None else (positions.dtype, positions.shape, positions.stride(), positions.data_ptr() & 15),
        None if offsets is None else (offsets.dtype, offsets.data_ptr() & 15),
        None if cu_seqlens is None else (cu_seqlens.dtype, cu_seqlens.shape, cu_seqlens.data_ptr() & 15),
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        problem = Problem.build(xs, ys, cos, sin, positions, offsets, cu_seqlens, offset, Spec.decode(spec))
        compiled = _launch_unbound(problem)
        if compiled is not None:
            if len(_PLANS) >= _PLANS_MAX:
                _PLANS.clear()
            grid, bound = arguments(problem, _processors(device))
            _PLANS[key] = compiled[(grid, 1, 1)], tuple(bound.values())[10:], problem.sin.data_ptr() - cos_ptr
        return None
    run, bound_arguments, sin_distance = plan
    pointers = (
        q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, cos_ptr + sin_distance if sin is None else sin.data_ptr(),
        cos_ptr if positions is None else positions.data_ptr(),
        cos_ptr if offsets is None else offsets.data_ptr(),
        cos_ptr if cu_seqlens is None else cu_seqlens.data_ptr(),
    )  # fmt: skip
    stream = torch._C._cuda_getCurrentRawStream(device)
    if device == torch._C._cuda_getDevice():
        run(*pointers, offset, *bound_arguments, stream=stream)
    else:
        with torch.cuda.device(device):
            run(*pointers, offset, *bound_arguments, stream=stream)


def _direct() -> bool:
    """Whether a compiled kernel may be launched past Triton's dispatcher: not interpreted, no profiler hook waiting
    for the arguments by name."""
    runtime = triton.knobs.runtime
    return not (INTERPRETED or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def _launch_unbound(problem: Problem) -> Any:
    """Launch through Triton's dispatcher; returns the compiled kernel, or None where nothing was launched."""
    device = problem.operands[0].x.get_device()
    grid, bound = arguments(problem, _processors(device))
    if grid == 0:
        return None
    if device < 0:
        return _rope_kernel[(grid,)](**bound, num_warps=NUM_WARPS)
    with torch.cuda.device(device):
        return _rope_kernel[(grid,)](**bound, num_warps=NUM_WARPS)
