"""The device code of the gated linear unit in Gluon, for Hopper.

    y = u · act(g),   u = x W_valueᵀ + b_value,   g = x W_gateᵀ + b_gate
    du = dy · act(g),   dg = dy · u · act'(g)

Shape legend: M rows, D features in, F features out. One kernel with four epilogues:

- "y" writes y; "preact" writes y, u and g; "gradient" reads dy and writes du and dg;
- "down" is behind another product, dy = dz W_down with dz (M, D) and W_down (D, F): it reads u and g and writes y, du, dg.

A program holds 128 rows of x. Its warps have roles: one brings blocks of both operands into a ring of shared memory by TMA;
two groups of four multiply 64 rows each with both halves of the weight, which lie in the ring as one block, so that a
single wgmma of 256 columns makes u and g of 128 features. Each group takes a block when it has arrived and gives it back
when it has read it, at its own pace: while one is in its epilogue the other has the tensor cores to itself. Programs
walk over tiles in groups of GROUP_M rows of tiles, so that what they read together stays in the cache.

The epilogue works on pieces of 64 columns. What it reads and writes passes through a group's own SLOTS blocks of shared
memory, by TMA, which loads zeros beyond the edges of a matrix and stores nothing there. Accumulation, bias and gate are in
float32, rounded once where they are stored. The sums for the bias are one row for 64 rows of the tile, added up
afterwards: no atomics, the same bits every time.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ._gluon_gate import _gate, _gate_gradient

# Triton 3.7 renamed the copies.
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def _tile(tile, tiles_m, tiles_f, GROUP_M: gl.constexpr):
    """The tile of rows and of columns of a program's turn."""
    in_group = GROUP_M * tiles_f
    first = tile // in_group * GROUP_M
    rows = gl.minimum(tiles_m - first, GROUP_M)
    return first + tile % in_group % rows, tile % in_group // rows


@gluon.jit
def _halves(block):
    """The left and the right half of the columns: registers of the same threads."""
    ROWS: gl.constexpr = block.shape[0]
    COLUMNS: gl.constexpr = block.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS // 2, 16])
    left, right = block.reshape((ROWS, 2, COLUMNS // 2)).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _next(slot, phase, SLOTS: gl.constexpr):
    """The next place in a ring, and the parity of its round."""
    around = slot + 1 == SLOTS
    return gl.where(around, 0, slot + 1), phase ^ around.to(gl.int32)


@gluon.jit
def _produce(maps, memory, ready, free, sizes, EPILOGUE: gl.constexpr, BLOCK_F: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr):  # fmt: skip
    """Fill the ring, tile after tile, as far ahead of the consumers as it is long."""
    x_map, first_map, second_map = maps
    x_ring, w_ring = memory
    M, F, D = sizes
    ROWS: gl.constexpr = x_ring.shape[1]
    BYTES: gl.constexpr = (x_ring.shape[1] * x_ring.shape[2] + w_ring.shape[1] * w_ring.shape[2]) * 2
    tiles_m = gl.cdiv(M, ROWS)
    tiles_f = gl.cdiv(F, BLOCK_F)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the ring is free at first: a wait for the round before passes
    for tile in range(gl.program_id(0), tiles_m * tiles_f, gl.num_programs(0)):
        tile_m, tile_f = _tile(tile, tiles_m, tiles_f, GROUP_M)
        for d in range(0, D, BLOCK_D):
            mbarrier.wait(free.index(slot), phase)
            full = ready.index(slot)
            mbarrier.expect(full, BYTES)
            _load(x_map, [tile_m * ROWS, d], full, x_ring.index(slot))
            weight = w_ring.index(slot)
            if EPILOGUE == "down":
                _load(first_map, [d, tile_f * BLOCK_F], full, weight)
            else:
                _load(first_map, [tile_f * BLOCK_F, d], full, weight.slice(0, BLOCK_F, 0))
                _load(second_map, [tile_f * BLOCK_F, d], full, weight.slice(BLOCK_F, BLOCK_F, 0))
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _put(to_map, row, column, slot, block, PENDING: gl.constexpr):
    """Store a piece through a slot, once no more than PENDING earlier stores are still reading theirs."""
    tma.store_wait(pendings=PENDING)
    slot.store(block.to(slot.dtype))
    fence_async_shared()
    _store(to_map, [row, column], slot)


@gluon.jit
def _get(from_map, row, column, slot, barrier):
    """Begin to load a piece into a slot; `barrier` tells when it has arrived."""
    mbarrier.expect(barrier, slot.shape[0] * slot.shape[1] * 2)
    _load(from_map, [row, column], barrier, slot)


@gluon.jit
def _bias(ptr, column, stride, F, WIDTH: gl.constexpr):
    """A part of the bias, spread thinly over the threads: it is held through the whole product."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offs = column + gl.arange(0, WIDTH, layout=layout)
    return gl.load(ptr + offs * stride, mask=offs < F, other=0.0)


@gluon.jit
def _biased(block, bias):
    layout: gl.constexpr = gl.SliceLayout(0, block.type.layout)
    return block + gl.expand_dims(gl.convert_layout(bias.to(gl.float32), layout), 0)


@gluon.jit
def _store_sums(ptr, row, column, M, F, slot):
    """The column sums of a piece in its slot, as it is stored, into a row of (M / 64, F) with two of them to a row of 2F."""
    # Every thread takes two columns and sixteen rows: all banks are read at once, and two exchanges finish a sum.
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [8, 0], [16, 0], [32, 0]], [[0, 2], [0, 4], [0, 8], [2, 0], [4, 0]], [[0, 16], [0, 32]], [], [64, 64]
    )  # fmt: skip
    block = slot.load(layout).to(gl.float32)
    if row + 64 > M:  # a bias of ∞ makes NaN beyond the last row
        inside = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)) < M
        block = gl.where(gl.expand_dims(inside, 1), block, 0.0)
    offs = column + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    gl.store(ptr + (row // 64).to(gl.int64) * 2 * F + offs, gl.sum(block, 0), mask=offs < F)


@gluon.jit
def _multiply(acc, start, stop, x_ring, w_ring, ready, free, slot, phase, last, GROUP: gl.constexpr, EPILOGUE: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The blocks from `start` to `stop` of a tile's product. The last stays under way: when one is issued, the one before
    it has read its block, which is given back."""
    for step in range(start, stop):
        mbarrier.wait(ready.index(slot), phase)
        weight = w_ring.index(slot)
        if EPILOGUE != "down":
            weight = weight.permute((1, 0))
        acc = warpgroup_mma(x_ring.index(slot).slice(GROUP * 64, 64, 0), weight, acc, is_async=True, use_acc=step > 0)
        acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
        mbarrier.arrive(free.index(last), count=1, pred=step > 0)
        last = slot
        slot, phase = _next(slot, phase, STAGES)
    return acc, slot, phase, last


@gluon.jit
def _consume(
    maps, biases, dbias_ptr, memory, slots, arrived, ready, free, ahead, sizes, GROUP: gl.constexpr, EPILOGUE: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, BIAS_GRAD: gl.constexpr, BLOCK_F: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    """The products and the epilogue of 64 rows of each tile, those of the group with number GROUP."""
    x_ring, w_ring = memory
    y_map, u_map, g_map, first_map, second_map = maps
    M, F, D = sizes
    ROWS: gl.constexpr = x_ring.shape[1]
    WIDTH: gl.constexpr = 64
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    PIECE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    SLOTS: gl.constexpr = slots.shape[0] // 2
    SLOT: gl.constexpr = GROUP * SLOTS  # the first of this group's
    tiles_m = gl.cdiv(M, ROWS)
    tiles_f = gl.cdiv(F, BLOCK_F)
    steps = gl.cdiv(D, BLOCK_D)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    if GROUP == 1:  # so that the two are never in their epilogues at once
        mbarrier.wait(ahead, 0)
    for tile in range(gl.program_id(0), tiles_m * tiles_f, gl.num_programs(0)):
        tile_m, tile_f = _tile(tile, tiles_m, tiles_f, GROUP_M)
        row = tile_m * ROWS + GROUP * 64
        column = tile_f * BLOCK_F
        if HAS_BIAS:
            b_value = _bias(biases[0], column, biases[2], F, BLOCK_F)
            b_gate = _bias(biases[1], column, biases[3], F, BLOCK_F)
        acc = warpgroup_mma_init(gl.zeros((64, 256), gl.float32, WIDE))
        first = gl.minimum(LEAD, steps)
        acc, slot, phase, last = _multiply(
            acc, 0, first, x_ring, w_ring, ready, free, slot, phase, slot, GROUP, EPILOGUE, STAGES
        )
        if GROUP == 0:
            mbarrier.arrive(ahead, count=1, pred=turn == 0)
        if EPILOGUE == "gradient" or EPILOGUE == "down":
            tma.store_wait(pendings=0)  # of the tile before: by now they have read their slots
            for i in gl.static_range(2):
                _get(first_map, row, column + i * WIDTH, slots.index(SLOT + i), arrived.index(4 * GROUP + i))
                if EPILOGUE == "down":
                    _get(
                        second_map, row, column + i * WIDTH, slots.index(SLOT + 2 + i), arrived.index(4 * GROUP + 2 + i)
                    )
        acc, slot, phase, last = _multiply(
            acc, first, steps, x_ring, w_ring, ready, free, slot, phase, last, GROUP, EPILOGUE, STAGES
        )
        product = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(last), count=1)

        left, right = _halves(product)
        if HAS_BIAS:
            left = _biased(left, b_value)
            right = _biased(right, b_gate)
        left, next_left = _halves(left)
        right, next_right = _halves(right)
        if EPILOGUE == "down":
            quarters = (left, next_left, right, next_right)
            for i in gl.static_range(4):
                at = column + i * WIDTH
                if i == 1 or i == 2:  # what the piece before this one left has been stored: make room for the next
                    tma.store_wait(pendings=0)
                    _get(
                        first_map, row, at + WIDTH, slots.index(SLOT + 1 - i % 2), arrived.index(4 * GROUP + 1 - i % 2)
                    )
                    _get(
                        second_map, row, at + WIDTH, slots.index(SLOT + 3 - i % 2), arrived.index(4 * GROUP + 3 - i % 2)
                    )
                u_slot = slots.index(SLOT + i % 2)
                g_slot = slots.index(SLOT + 2 + i % 2)
                mbarrier.wait(arrived.index(4 * GROUP + i % 2), i // 2)
                mbarrier.wait(arrived.index(4 * GROUP + 2 + i % 2), i // 2)
                u = u_slot.load(PIECE).to(gl.float32)
                a, du, dg = _gate_gradient(quarters[i], u, g_slot.load(PIECE).to(gl.float32), ACTIVATION)
                _put(y_map, row, at, slots.index(SLOT + 4), u * a, PENDING=2)
                _put(u_map, row, at, u_slot, du, PENDING=2)
                _put(g_map, row, at, g_slot, dg, PENDING=2)
                if BIAS_GRAD:
                    _store_sums(dbias_ptr, row, at, M, F, u_slot)
                    _store_sums(dbias_ptr + F, row, at, M, F, g_slot)
        else:
            first_slot = slots.index(SLOT)
            second_slot = slots.index(SLOT + 1)
            if EPILOGUE == "gradient":
                mbarrier.wait(arrived.index(4 * GROUP), turn & 1)
                _, du, dg = _gate_gradient(first_slot.load(PIECE).to(gl.float32), left, right, ACTIVATION)
                _put(u_map, row, column, first_slot, du, PENDING=2)
                if BIAS_GRAD:
                    _store_sums(dbias_ptr, row, column, M, F, first_slot)
                mbarrier.wait(arrived.index(4 * GROUP + 1), turn & 1)
                _, next_du, next_dg = _gate_gradient(
                    second_slot.load(PIECE).to(gl.float32), next_left, next_right, ACTIVATION
                )
                _put(u_map, row, column + WIDTH, second_slot, next_du, PENDING=2)
                if BIAS_GRAD:
                    _store_sums(dbias_ptr, row, column + WIDTH, M, F, second_slot)
                _put(g_map, row, column, first_slot, dg, PENDING=1)
                if BIAS_GRAD:
                    _store_sums(dbias_ptr + F, row, column, M, F, first_slot)
                _put(g_map, row, column + WIDTH, second_slot, next_dg, PENDING=1)
                if BIAS_GRAD:
                    _store_sums(dbias_ptr + F, row, column + WIDTH, M, F, second_slot)
            elif EPILOGUE == "preact":
                for i in gl.static_range(2):
                    u = (left, next_left)[i]
                    g = (right, next_right)[i]
                    at = column + i * WIDTH
                    _put(u_map, row, at, slots.index(SLOT + 3 * i % SLOTS), u, PENDING=SLOTS - 1)
                    _put(g_map, row, at, slots.index(SLOT + (3 * i + 1) % SLOTS), g, PENDING=SLOTS - 1)
                    _put(
                        y_map,
                        row,
                        at,
                        slots.index(SLOT + (3 * i + 2) % SLOTS),
                        u * _gate(g, ACTIVATION)[0],
                        PENDING=SLOTS - 1,
                    )
            else:
                _put(y_map, row, column, first_slot, left * _gate(right, ACTIVATION)[0], PENDING=1)
                _put(y_map, row, column + WIDTH, second_slot, next_left * _gate(next_right, ACTIVATION)[0], PENDING=1)
        turn += 1
    tma.store_wait(pendings=0)


@gluon.jit
def _first_group(
    maps, biases, dbias_ptr, memory, slots, arrived, ready, free, ahead, sizes, EPILOGUE: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, BIAS_GRAD: gl.constexpr, BLOCK_F: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    _consume(
        maps, biases, dbias_ptr, memory, slots, arrived, ready, free, ahead, sizes, 0, EPILOGUE, ACTIVATION, HAS_BIAS,
        BIAS_GRAD, BLOCK_F, BLOCK_D, STAGES, GROUP_M, LEAD,
    )  # fmt: skip


@gluon.jit
def _second_group(
    maps, biases, dbias_ptr, memory, slots, arrived, ready, free, ahead, sizes, EPILOGUE: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, BIAS_GRAD: gl.constexpr, BLOCK_F: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    _consume(
        maps, biases, dbias_ptr, memory, slots, arrived, ready, free, ahead, sizes, 1, EPILOGUE, ACTIVATION, HAS_BIAS,
        BIAS_GRAD, BLOCK_F, BLOCK_D, STAGES, GROUP_M, LEAD,
    )  # fmt: skip


def _name(proxy: Any) -> str:
    """The kernel's name in profiles: what it writes, with which gate."""
    c = proxy.constants
    return f"_gated_linear_{c['EPILOGUE']}_{c['ACTIVATION']}_128x{c['BLOCK_F']}x{c['BLOCK_D']}_gluon"


@gluon.jit(repr=_name, do_not_specialize=["M", "F", "D"])
def gated_linear_kernel(
    x_map, w_value_map, w_gate_map, y_map, u_map, g_map, first_map, second_map, b_value_ptr, b_gate_ptr, dbias_ptr,
    M, F, D, stride_b_value, stride_b_gate,
    EPILOGUE: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, BIAS_GRAD: gl.constexpr,
    BLOCK_F: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP_M: gl.constexpr,
    LEAD: gl.constexpr,
):  # fmt: skip
    """Maps are TMA descriptors. first_map is of dy, or of u with second_map of g; for "down" x is dz, w_value is W_down."""
    ROWS: gl.constexpr = 128
    dtype: gl.constexpr = x_map.dtype
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_D], x_map.layout)
    w_ring = gl.allocate_shared_memory(
        dtype, [STAGES, BLOCK_D, BLOCK_F] if EPILOGUE == "down" else [STAGES, 2 * BLOCK_F, BLOCK_D], w_value_map.layout
    )  # fmt: skip
    slots = gl.allocate_shared_memory(dtype, [2 * SLOTS, 64, 64], gl.NVMMASharedLayout(128, 16))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    arrived = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    ahead = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(8):
        mbarrier.init(arrived.index(i), count=1)
    mbarrier.init(ahead.index(0), count=1)
    fence_async_shared()
    sizes = (M, F, D)
    memory = (x_ring, w_ring)
    maps = (y_map, u_map, g_map, first_map, second_map)
    biases = (b_value_ptr, b_gate_ptr, stride_b_value, stride_b_gate)
    gl.warp_specialize(
        [
            (_first_group, (maps, biases, dbias_ptr, memory, slots, arrived, ready, free, ahead.index(0), sizes, EPILOGUE, ACTIVATION, HAS_BIAS, BIAS_GRAD, BLOCK_F, BLOCK_D, STAGES, GROUP_M, LEAD)),
            (_second_group, (maps, biases, dbias_ptr, memory, slots, arrived, ready, free, ahead.index(0), sizes, EPILOGUE, ACTIVATION, HAS_BIAS, BIAS_GRAD, BLOCK_F, BLOCK_D, STAGES, GROUP_M, LEAD)),
            (_produce, ((x_map, w_value_map, w_gate_map), memory, ready, free, sizes, EPILOGUE, BLOCK_F, BLOCK_D, STAGES, GROUP_M)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
