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

# Of a piece whose columns are added up: every thread takes two columns and sixteen rows, so that a warp reads all banks at
# once and two exchanges finish a sum.
SUMS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [8, 0], [16, 0], [32, 0]], [[0, 2], [0, 4], [0, 8], [2, 0], [4, 0]], [[0, 16], [0, 32]], [], [64, 64]
    )
)  # fmt: skip


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
def _get(from_map, row, column, slot, barrier, pred=True):
    """Begin to load a piece into a slot; `barrier` tells when it has arrived."""
    mbarrier.expect(barrier, slot.shape[0] * slot.shape[1] * 2, pred=pred)
    _load(from_map, [row, column], barrier, slot, pred=pred)


@gluon.jit
def _bias(ptr, column, stride, F, WIDTH: gl.constexpr):
    """A part of the bias, spread thinly over the threads: it is on its way through the whole product."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offs = column + gl.arange(0, WIDTH, layout=layout)
    return gl.load(ptr + offs * stride, mask=offs < F, other=0.0)


@gluon.jit
def _biased(block, bias):
    return block + gl.expand_dims(bias.load(gl.SliceLayout(0, block.type.layout)), 0)


@gluon.jit
def _sums(row, M, slot, EPILOGUE: gl.constexpr):
    """The column sums of a piece in its slot, as it is stored."""
    block = slot.load(SUMS).to(gl.float32)
    if EPILOGUE == "gradient":  # noqa: SIM102 - decided when it is compiled, the other when it runs
        if row + 64 > M:  # a bias of ∞ makes NaN beyond the last row
            inside = row + gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS)) < M
            block = gl.where(gl.expand_dims(inside, 1), block, 0.0)
    return gl.sum(block, 0)


@gluon.jit
def _no_sums():
    return gl.zeros((64,), gl.float32, gl.SliceLayout(0, SUMS))


@gluon.jit
def _store_sums(ptr, row, column, F, du, dg):
    """Sums of 64 rows into the row of (M / 64, 2, F) that is theirs. Last of a tile: where pieces are handed to TMA, a
    fence waits for what was stored."""
    offs = column + gl.arange(0, 64, layout=gl.SliceLayout(0, SUMS))
    to = ptr + (row // 64).to(gl.int64) * 2 * F + offs
    gl.store(to, du, mask=offs < F)
    gl.store(to + F, dg, mask=offs < F)


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
    maps, biases, dbias_ptr, memory, slots, bias_slots, arrived, ready, free, ahead, sizes, GROUP: gl.constexpr, EPILOGUE: gl.constexpr,
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
        # While the first products are under way, what the epilogue will need.
        if EPILOGUE == "gradient" or EPILOGUE == "down":
            tma.store_wait(pendings=0)  # of the tile before: by now they have read their slots
            for p in gl.static_range(2):
                _get(first_map, row, column + p * WIDTH, slots.index(SLOT + p), arrived.index(4 * GROUP + p))
                if EPILOGUE == "down":
                    _get(
                        second_map, row, column + p * WIDTH, slots.index(SLOT + 2 + p), arrived.index(4 * GROUP + 2 + p)
                    )
        acc, slot, phase, last = _multiply(
            acc, first, steps, x_ring, w_ring, ready, free, slot, phase, last, GROUP, EPILOGUE, STAGES
        )
        if HAS_BIAS:  # while the last is
            bias_slots.index(2 * GROUP).store(b_value.to(gl.float32))
            bias_slots.index(2 * GROUP + 1).store(b_gate.to(gl.float32))
        product = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(last), count=1)

        left, right = _halves(product)
        if HAS_BIAS:
            left = _biased(left, bias_slots.index(2 * GROUP))
            right = _biased(right, bias_slots.index(2 * GROUP + 1))
        # One piece after the other, in a loop that moves the next into the registers of the last: its code is short enough
        # for the instruction cache, which both groups share.
        if EPILOGUE == "down":
            dy, dy_1 = _halves(left)
            dy_2, dy_3 = _halves(right)
            if BIAS_GRAD:
                du_0, du_1, du_2, du_3 = _no_sums(), _no_sums(), _no_sums(), _no_sums()
                dg_0, dg_1, dg_2, dg_3 = _no_sums(), _no_sums(), _no_sums(), _no_sums()
            for i in range(4):
                at = column + i * WIDTH
                mine = SLOT + i % 2
                other = SLOT + 1 - i % 2
                # The piece before this one has been stored: its slots are for the one after this.
                tma.store_wait(pendings=0)
                more = (i == 1) | (i == 2)
                _get(first_map, row, at + WIDTH, slots.index(other), arrived.index(4 * GROUP + 1 - i % 2), more)
                _get(second_map, row, at + WIDTH, slots.index(other + 2), arrived.index(4 * GROUP + 3 - i % 2), more)
                mbarrier.wait(arrived.index(4 * GROUP + i % 2), i // 2)
                mbarrier.wait(arrived.index(4 * GROUP + 2 + i % 2), i // 2)
                u = slots.index(mine).load(PIECE).to(gl.float32)
                g = slots.index(mine + 2).load(PIECE).to(gl.float32)
                a, du, dg = _gate_gradient(dy, u, g, ACTIVATION)
                # All before the one fence: as soon as a few columns of the three are done, their registers are free.
                slots.index(SLOT + 4).store((u * a).to(slots.dtype))
                slots.index(mine).store(du.to(slots.dtype))
                slots.index(mine + 2).store(dg.to(slots.dtype))
                fence_async_shared()
                _store(y_map, [row, at], slots.index(SLOT + 4))
                _store(u_map, [row, at], slots.index(mine))
                _store(g_map, [row, at], slots.index(mine + 2))
                if BIAS_GRAD:
                    du_0, du_1, du_2, du_3 = du_1, du_2, du_3, _sums(row, M, slots.index(mine), EPILOGUE)
                    dg_0, dg_1, dg_2, dg_3 = dg_1, dg_2, dg_3, _sums(row, M, slots.index(mine + 2), EPILOGUE)
                dy, dy_1, dy_2 = dy_1, dy_2, dy_3
            if BIAS_GRAD:
                _store_sums(dbias_ptr, row, column, F, du_0, dg_0)
                _store_sums(dbias_ptr, row, column + WIDTH, F, du_1, dg_1)
                _store_sums(dbias_ptr, row, column + 2 * WIDTH, F, du_2, dg_2)
                _store_sums(dbias_ptr, row, column + 3 * WIDTH, F, du_3, dg_3)
        else:
            u, next_u = _halves(left)
            g, next_g = _halves(right)
            if EPILOGUE == "gradient":
                mbarrier.wait(arrived.index(4 * GROUP), turn & 1)
                mbarrier.wait(arrived.index(4 * GROUP + 1), turn & 1)
                dy = slots.index(SLOT).load(PIECE)
                next_dy = slots.index(SLOT + 1).load(PIECE)
                if BIAS_GRAD:
                    du_0, du_1, dg_0, dg_1 = _no_sums(), _no_sums(), _no_sums(), _no_sums()
            # With a bias each piece has code of its own: as a loop, a small product takes 4 to 6 % longer. What has none, or
            # three more pieces in registers ("gradient"), is better off looped.
            UNROLL: gl.constexpr = 2 if HAS_BIAS and EPILOGUE != "gradient" else 1
            for turned in range(2 // UNROLL):
                for piece in gl.static_range(UNROLL):
                    i = turned * UNROLL + piece
                    at = column + i * WIDTH
                    if EPILOGUE == "gradient":
                        _, du, dg = _gate_gradient(dy.to(gl.float32), u, g, ACTIVATION)
                        tma.store_wait(pendings=0)
                        slots.index(SLOT).store(du.to(slots.dtype))
                        slots.index(SLOT + 1).store(dg.to(slots.dtype))
                        fence_async_shared()
                        _store(u_map, [row, at], slots.index(SLOT))
                        _store(g_map, [row, at], slots.index(SLOT + 1))
                        if BIAS_GRAD:
                            du_0, du_1 = du_1, _sums(row, M, slots.index(SLOT), EPILOGUE)
                            dg_0, dg_1 = dg_1, _sums(row, M, slots.index(SLOT + 1), EPILOGUE)
                        dy = next_dy
                    elif EPILOGUE == "preact":
                        _put(u_map, row, at, slots.index(SLOT + 3 * i % SLOTS), u, PENDING=SLOTS - 1)
                        _put(g_map, row, at, slots.index(SLOT + (3 * i + 1) % SLOTS), g, PENDING=SLOTS - 1)
                        y = u * _gate(g, ACTIVATION)[0]
                        _put(y_map, row, at, slots.index(SLOT + (3 * i + 2) % SLOTS), y, PENDING=SLOTS - 1)
                    else:
                        _put(y_map, row, at, slots.index(SLOT + i), u * _gate(g, ACTIVATION)[0], PENDING=1)
                    u = next_u
                    g = next_g
            if EPILOGUE == "gradient" and BIAS_GRAD:
                _store_sums(dbias_ptr, row, column, F, du_0, dg_0)
                _store_sums(dbias_ptr, row, column + WIDTH, F, du_1, dg_1)
        turn += 1
    tma.store_wait(pendings=0)


@gluon.jit
def _first_group(
    maps, biases, dbias_ptr, memory, slots, bias_slots, arrived, ready, free, ahead, sizes, EPILOGUE: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, BIAS_GRAD: gl.constexpr, BLOCK_F: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    _consume(
        maps, biases, dbias_ptr, memory, slots, bias_slots, arrived, ready, free, ahead, sizes, 0, EPILOGUE, ACTIVATION, HAS_BIAS,
        BIAS_GRAD, BLOCK_F, BLOCK_D, STAGES, GROUP_M, LEAD,
    )  # fmt: skip


@gluon.jit
def _second_group(
    maps, biases, dbias_ptr, memory, slots, bias_slots, arrived, ready, free, ahead, sizes, EPILOGUE: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, BIAS_GRAD: gl.constexpr, BLOCK_F: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    _consume(
        maps, biases, dbias_ptr, memory, slots, bias_slots, arrived, ready, free, ahead, sizes, 1, EPILOGUE, ACTIVATION, HAS_BIAS,
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
    bias_slots = gl.allocate_shared_memory(
        gl.float32, [4, BLOCK_F if HAS_BIAS else 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
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
            (_first_group, (maps, biases, dbias_ptr, memory, slots, bias_slots, arrived, ready, free, ahead.index(0), sizes, EPILOGUE, ACTIVATION, HAS_BIAS, BIAS_GRAD, BLOCK_F, BLOCK_D, STAGES, GROUP_M, LEAD)),
            (_second_group, (maps, biases, dbias_ptr, memory, slots, bias_slots, arrived, ready, free, ahead.index(0), sizes, EPILOGUE, ACTIVATION, HAS_BIAS, BIAS_GRAD, BLOCK_F, BLOCK_D, STAGES, GROUP_M, LEAD)),
            (_produce, ((x_map, w_value_map, w_gate_map), memory, ready, free, sizes, EPILOGUE, BLOCK_F, BLOCK_D, STAGES, GROUP_M)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
