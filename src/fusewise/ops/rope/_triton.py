"""Host side of the Triton RoPE: tile sizes, kernel arguments and launch of `_triton_kernel.rope_kernel`.

`choose_access` selects the kernel variant (pairs or flat) and the vector widths, `choose_tiles` and `choose_flat_tiles`
the tile shapes, `arguments` packs the launch. `launch` caches bound launches: a repeated call only passes pointers, the
offset and the stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..._shared import triton_launch
from ..._shared.gpu import processors_of
from ..._shared.memo import Memo
from ..._shared.triton_launch import launches_directly
from ..._shared.triton_launch import unavailable as unavailable
from .._common import span
from ._problem import Problem, Rotation
from ._triton_kernel import rope_kernel

NUM_WARPS = 4
THREADS = 32 * NUM_WARPS
PROGRAMS = 2048 // THREADS  # that a multiprocessor can hold
# A stripe of tokens (see `_triton_kernel.batch_and_token`) covers as many tokens as the larger of two limits allows:
STRIPE_BYTES = 16 * 2**20  # x and y traffic of a stripe; well below the L2 size, so that its table rows stay in L2
STRIPE_TABLE_BYTES = 2 * 2**20  # table bytes read by a stripe; re-reading so few costs less than shorter stripes


@dataclass(frozen=True)
class Tile:
    """The tile that one program rotates of one tensor: `block_t` tokens by `steps` blocks of `block_h` heads."""

    block_t: int
    block_h: int  # in the flat variant: flattened features instead of heads
    steps: int = 1

    def across(self, width: int) -> int:
        """Tiles for all `width` heads (or features) of a token."""
        return int(triton.cdiv(width, self.block_h * self.steps))


def choose_tiles(tokens: int, heads: tuple[int, ...], lanes: int, processors: int) -> list[Tile]:
    """One tile per tensor for heads that occupy `lanes` threads each, a thread holding 16 bytes of either half."""
    rows = max(1, THREADS // lanes)
    blocks = [min(rows, _divisor_power_of_2(count)) for count in heads]
    return _fill_device([Tile(rows // block, block) for block in blocks], tokens, heads, 4 * processors)


def choose_sharing_tiles(tokens: int, heads: tuple[int, ...], lanes: int, processors: int) -> list[Tile]:
    """Tiles whose threads rotate two or three heads with the cos and sin they computed, which costs more instructions
    than the rest of the rotation; not where that leaves the GPU fewer programs than it can hold."""
    alone = choose_tiles(tokens, heads, lanes, processors)
    tiles = []
    for tile, count in zip(alone, heads, strict=True):
        block_t, block_h = tile.block_t, tile.block_h
        steps = next((n for n in (2, 3) if count % (n * block_h) == 0), 1)
        if steps == 1 and count % block_h == 0 and block_h > 1:
            block_t, block_h, steps = 2 * block_t, block_h // 2, 2
        tiles.append(Tile(block_t, block_h, steps))
    programs = sum(triton.cdiv(tokens, tile.block_t) * tile.across(n) for tile, n in zip(tiles, heads, strict=True))
    return tiles if programs >= PROGRAMS * processors else alone


def _divisor_power_of_2(heads: int) -> int:
    """Heads per tile, a power of two: the largest that divides `heads` if at least 4, else the next above (up to 8):
    28 heads are 7 · 4; 71 are 8 · 9 with one padding head."""
    divisor = heads & -heads
    return divisor if divisor >= 4 else min(8, triton.next_power_of_2(max(heads, 1)))


def choose_flat_tiles(tokens: int, features: tuple[int, ...], itemsize: int, processors: int) -> list[Tile]:
    """One tile per tensor over the flattened features of a token, 16 bytes per thread."""
    elements = THREADS * 16 // itemsize
    tiles = []
    for width in features:
        divisor = width & -width
        block = min(elements, divisor if divisor >= elements // 4 else triton.next_power_of_2(max(width, 2)))
        tiles.append(Tile(elements // block, block))
    return _fill_device(tiles, tokens, features, 2 * processors)


def _fill_device(tiles: list[Tile], tokens: int, widths: tuple[int, ...], programs: int) -> list[Tile]:
    """Halve the tokens per tile until the tensors together make at least `programs` programs, enough to fill the GPU."""

    def count(tile: Tile, width: int) -> int:
        return int(triton.cdiv(tokens, tile.block_t)) * tile.across(width)

    while max(t.block_t for t in tiles) > 1 and sum(map(count, tiles, widths)) < programs:
        longest = max(t.block_t for t in tiles)
        tiles = [Tile(t.block_t // 2, t.block_h) if t.block_t == longest else t for t in tiles]
    return tiles


@dataclass(frozen=True)
class Access:
    """How threads access the elements of heads.

    flat: iterate over the flattened features of a token, the partner element read through L1, instead of over pairs.
    dense: no gap between the heads, so a token is one contiguous row of features.
    unit: strides are passed divided by it. Triton specializes a stride only on divisibility by 16, but heads of 72
    features are divisible by 8; multiplying by a constexpr unit passes that on.
    vector: elements per access; pair_vector: elements per access to one half of the pairs.
    """

    flat: bool
    dense: bool
    unit: int
    vector: int
    pair_vector: int


def choose_access(problem: Problem, *, in_place: bool, table: str) -> Access:
    spec, operands = problem.spec, problem.operands
    itemsize, starts = operands[0].x.element_size(), [operand.start for operand in operands]
    partial = any(2 * problem.pairs < operand.head_dim for operand in operands)
    aligned = spec.pairing == "half" or (spec.pairing == "interleaved" and all(start % 2 == 0 for start in starts))
    unit = math.gcd(16, *(stride for operand in operands for stride in operand.x_strides + operand.y_strides))
    vector = math.gcd(16 // itemsize, unit, *(operand.head_dim for operand in operands))
    pair_vector = math.gcd(vector, problem.pairs * (1 if spec.pairing == "half" else 2), *starts)
    # Fully rotated heads use the flat variant only where it was measured to be faster: not for 2-byte elements, nor for
    # less aligned halves.
    narrow = spec.pairing == "half" and (pair_vector, itemsize) == (2, 4)
    flat = (partial or narrow) and aligned and table == "cos_sin" and spec.sections is None and not in_place
    dense = flat and narrow and all(o.heads <= 1 or o.x_strides[2] == o.y_strides[2] == o.head_dim for o in operands)
    if dense:  # a token is one row of features: only the batch and token strides limit the alignment
        unit = math.gcd(16, *(stride for o in operands for stride in o.x_strides[:2] + o.y_strides[:2]))
        vector = math.gcd(16 // itemsize, unit)
    elif not flat and pair_vector < vector:
        # Limit the width to what both halves allow: a layout chosen for the better aligned half leaves gaps between the
        # threads' accesses to the other.
        unit = math.gcd(unit, pair_vector)
    return Access(flat, dense, unit, vector, pair_vector)


def arguments(problem: Problem, processors: int) -> tuple[int, dict[str, Any]]:
    """Grid size and all kernel arguments for a problem."""
    spec, operands = problem.spec, problem.operands
    q, k = operands[0], operands[-1]
    in_place = all(operand.x.data_ptr() == operand.y.data_ptr() for operand in operands)  # an empty one has address 0
    table = "cos_sin" if spec.table == "fused" else spec.table
    access = choose_access(problem, in_place=in_place, table=table)
    all_tokens = problem.batch * problem.tokens
    itemsize = q.x.element_size()
    block_p = triton.next_power_of_2(problem.pairs)

    widths = tuple(operand.heads * (operand.head_dim if access.flat else 1) for operand in operands)
    if access.flat:
        tiles = choose_flat_tiles(all_tokens, widths, itemsize, processors)
    else:
        # Elements of 4 bytes take as long to move as their angles to compute.
        shared = table != "cos_sin" and itemsize == 2 and all(2 * problem.pairs == o.head_dim for o in operands)
        choose = choose_sharing_tiles if shared else choose_tiles
        tiles = choose(all_tokens, widths, triton.cdiv(block_p * itemsize, 16), processors)
    group = max(tile.block_t for tile in tiles)
    group_tiles = sum(group // t.block_t * t.across(w) for t, w in zip(tiles, widths, strict=True))

    batches = max(problem.batch, 1)
    magic, shift = division(batches)
    bytes_per_token = 2 * itemsize * sum(operand.heads * operand.head_dim for operand in operands)
    table_bytes = {"cos_sin": 2, "angles": 1, "inv_freq": 0}[table] * problem.pairs * problem.cos.element_size()
    stripe = _stripe(problem.batch, problem.tokens, bytes_per_token, None if access.flat else table_bytes)
    stripe_magic, stripe_shift = division(stripe)
    table_unit = math.gcd(16, *problem.table_strides[:2])
    sections = spec.sections or (0, 0, 0)
    sequences = 0 if problem.cu_seqlens is None else problem.cu_seqlens.shape[0] - 1
    # The table stands in for the pointer of an absent tensor, which is never dereferenced.
    return triton.cdiv(all_tokens, group) * group_tiles, dict(
        q_ptr=q.x, k_ptr=k.x, q_out_ptr=q.y, k_out_ptr=k.y, cos_ptr=problem.cos, sin_ptr=problem.sin,
        positions_ptr=problem.cos if problem.positions is None else problem.positions,
        offsets_ptr=problem.cos if problem.offsets is None else problem.offsets,
        cu_seqlens_ptr=problem.cos if problem.cu_seqlens is None else problem.cu_seqlens,
        offset=problem.offset,
        **named_strides("q", q.x_strides, access.unit), **named_strides("k", k.x_strides, access.unit),
        **named_strides("q_out", q.y_strides, access.unit), **named_strides("k_out", k.y_strides, access.unit),
        stride_table_b=problem.table_strides[0] // table_unit, stride_table_r=problem.table_strides[1] // table_unit,
        stride_pos_a=problem.position_strides[0], stride_pos_b=problem.position_strides[1],
        stride_pos_t=problem.position_strides[2],
        table_rows=problem.rows, scale=spec.scale, tokens=max(problem.tokens, 1), batches=batches,
        magic=magic, shift=shift, stripe=stripe, stripe_magic=stripe_magic, stripe_shift=stripe_shift,
        sequences=sequences, search_steps=sequences.bit_length(),
        FLAT=access.flat, DENSE=access.dense, Q_HEADS=q.heads, K_HEADS=k.heads if len(operands) == 2 else 0,
        Q_BLOCK_T=tiles[0].block_t, Q_BLOCK_H=tiles[0].block_h, Q_STEPS=tiles[0].steps,
        K_BLOCK_T=tiles[-1].block_t, K_BLOCK_H=tiles[-1].block_h, K_STEPS=tiles[-1].steps,
        HEAD_DIM=q.head_dim, START=q.start, K_HEAD_DIM=k.head_dim, K_START=k.start,
        PAIRS=problem.pairs, BLOCK_P=block_p,
        INTERLEAVED_IN=spec.pairs_in == "interleaved", INTERLEAVED_OUT=spec.pairs_out == "interleaved",
        INVERSE=spec.inverse, TABLE=table, TABLE_STEP=problem.table_strides[2],
        SOURCE="positions" if problem.positions is not None else "running" if problem.cu_seqlens is None else "packed",
        HAS_OFFSETS=problem.offsets is not None,
        SECTION_T=sections[0], SECTION_H=sections[1], SECTION_W=sections[2],
        SECTIONS_INTERLEAVED=spec.sections_interleaved, CP_RANK=spec.cp_rank, CP_SIZE=spec.cp_size,
        IN_PLACE=in_place, X_UNIT=access.unit, TABLE_UNIT=table_unit,
        VECTOR=access.vector, PAIR_VECTOR=access.pair_vector,
        INDEX=tl.int64 if reach_of(problem) > 2**31 - 1 else tl.int32,
    )  # fmt: skip


def division(divisor: int) -> tuple[int, int]:
    """(magic, shift) with n // divisor == (2 · n · magic >> 32) >> shift for 0 <= n < 2³¹; magic as an int32's bits."""
    shift = (divisor - 1).bit_length()
    magic = -(-(1 << (31 + shift)) // divisor)
    return magic - (1 << 32) if magic >= 1 << 31 else magic, shift


def _stripe(batch: int, tokens: int, bytes_per_token: int, table_bytes: int | None) -> int:
    """Tokens per stripe: all tokens if they fit in L2, else the largest equal share that moves at most STRIPE_BYTES or,
    at `table_bytes` per token, reads at most STRIPE_TABLE_BYTES of the table. If equal shares need more than twice as
    many stripes as unequal ones would, there are no stripes: short ones are slower than none."""
    stripes = triton.cdiv(tokens * bytes_per_token, STRIPE_BYTES)
    if table_bytes is not None:
        stripes = min(stripes, triton.cdiv(tokens * table_bytes, STRIPE_TABLE_BYTES))
    if batch <= 1 or stripes <= 1:
        return max(tokens, 1)
    return tokens // next((n for n in range(stripes, 2 * stripes + 1) if tokens % n == 0), 1)


def named_strides(name: str, strides: tuple[int, int, int], unit: int) -> dict[str, int]:
    return {f"stride_{name}_{dim}": stride // unit for dim, stride in zip("bth", strides, strict=True)}


def reach_of(problem: Problem) -> int:
    """The largest element offset that the kernel computes from any of its pointers."""
    sizes = (problem.batch, problem.tokens)
    read = [span(x.shape, x.stride()) for x in (problem.cos, problem.positions) if x is not None]
    heads = [
        span((*sizes, o.heads), strides) - 1 + o.head_dim
        for o in problem.operands
        for strides in (o.x_strides, o.y_strides)
    ]
    return max(*read, *heads)


POINTERS = 9  # leading pointer arguments of the kernel, which the offset follows

# Bound launches: the compiled kernel with its grid, the arguments after the offset, and the byte distance from cos to
# sin if both are in one tensor. Keyed by everything these depend on.
_PLANS: Memo[tuple[Any, ...], tuple[Any, tuple[Any, ...], int]] = Memo(4096)


def launch(xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], rotation: Rotation) -> None:
    """`impl="triton"`: rotate every x into its y on the current stream of their device.

    Triton's launcher specializes and packs some sixty arguments on every call. To cut that host overhead, a repeated
    call reuses the bound launch and passes only pointers, offset and stream.
    """
    cos, sin, positions, offsets, cu_seqlens, offset, spec = rotation
    q, k, q_out, k_out = xs[0], xs[-1], ys[0], ys[-1]
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr = (
        q.data_ptr(), k.data_ptr(), q_out.data_ptr(), k_out.data_ptr(), cos.data_ptr()
    )  # fmt: skip
    device = q.get_device()
    # Bound launches assume pointers aligned to 16 bytes; the rare others go through Triton's dispatcher.
    if (q_ptr | k_ptr | q_out_ptr | k_out_ptr | cos_ptr) & 15 or not launches_directly():
        problem = Problem.build(xs, ys, rotation)
        _launch_unbound(problem)
        return
    key = (
        spec, device, len(xs), q.dtype, q.shape, q.stride(), k.shape, k.stride(), q_out.stride(), k_out.stride(),
        q_ptr == q_out_ptr, k_ptr == k_out_ptr, cos.dtype, cos.shape, cos.stride(),
        None if sin is None else (sin.stride(), sin.data_ptr() & 15),
        None if positions is None else (positions.dtype, positions.shape, positions.stride(), positions.data_ptr() & 15),
        None if offsets is None else (offsets.dtype, offsets.stride(), offsets.data_ptr() & 15),
        None if cu_seqlens is None else (cu_seqlens.dtype, cu_seqlens.shape, cu_seqlens.stride(), cu_seqlens.data_ptr() & 15),
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        problem = Problem.build(xs, ys, rotation)
        compiled = _launch_unbound(problem)
        if compiled is not None:
            grid, bound = arguments(problem, processors_of(device))
            rest = tuple(bound.values())[POINTERS + 1 :]
            _PLANS[key] = compiled[(grid, 1, 1)], rest, problem.sin.data_ptr() - cos_ptr
        return
    run, bound_arguments, sin_distance = plan
    pointers = (
        q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, cos_ptr + sin_distance if sin is None else sin.data_ptr(),
        cos_ptr if positions is None else positions.data_ptr(),
        cos_ptr if offsets is None else offsets.data_ptr(),
        cos_ptr if cu_seqlens is None else cu_seqlens.data_ptr(),
    )  # fmt: skip
    triton_launch.launch_bound(run, device, *pointers, offset, *bound_arguments)


def _launch_unbound(problem: Problem) -> Any:
    """Launch through Triton's dispatcher. Returns the compiled kernel, or None if the grid is empty."""
    device = problem.operands[0].x.get_device()
    grid, bound = arguments(problem, processors_of(device))
    return triton_launch.launch(rope_kernel, grid, bound, device, num_warps=NUM_WARPS)
