"""Warp-specialized GEMM with a gated epilogue in Gluon, for Hopper (TMA and wgmma).

    y = u · act(g),   u = x W_valueᵀ + b_value,   g = x W_gateᵀ + b_gate
    du = dy · act(g),   dg = dy · u · act'(g)

Shape legend: M rows, D features in, F features out. One persistent kernel with four epilogues:

- "y" writes y; "preact" writes y, u and g; "gradient" reads dy and writes du and dg;
- "down" follows another product, dy = dz W_down with dz (M, D) and W_down (D, F): it reads u and g, and writes y, du, dg.

Ping-pong schedule: one producer warp loads tiles of both operands by TMA into a ring buffer of STAGES in shared memory;
two consumer warpgroups alternate on the tensor cores, each computing a whole output tile. While one runs its main loop
the other runs its epilogue, which is hidden as long as it is the shorter. A tile is 128 rows of x by 128 columns of the
product, for the unit u and g of 64 features: the tiles of both weights are adjacent in a stage and form one operand, so
that u and g of a feature are accumulated in the same thread. Tiles are visited in groups of GROUP_M rows of tiles, so
that operands shared by concurrent programs stay in L2.

The epilogue processes pieces of 64 rows by 64 columns, staged through slots in shared memory by TMA, which fills with
zeros beyond the edges of a matrix and clips stores there. Input slots are private to a warpgroup, AHEAD pieces deep;
output slots are shared by both in turns, which leaves more shared memory for the ring: a longer ring stalls less.
Accumulation, bias and gate are in float32, rounded once when stored. Bias gradients are one row of partial sums per 64
rows of a tile, reduced by a second kernel: no atomics, bitwise reproducible.
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

from ._gluon_gate import gate, gate_gradient

# Renamed in newer versions of Triton.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # among a warpgroup's warps

EARLY = gl.constexpr(4)  # k-steps before the end of a tile that a producer arrives at the end of a wave
POLLS = gl.constexpr(64)  # about 50 µs
# Register layout of a piece, as in the accumulator.
PIECE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
# Layout of a piece for column sums: each thread holds two columns by sixteen rows, so that a warp's shared memory reads
# use all banks and two shuffles complete a sum.
SUMS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [8, 0], [16, 0], [32, 0]], [[0, 2], [0, 4], [0, 8], [2, 0], [4, 0]], [[0, 16], [0, 32]], [], [64, 64]
    )
)  # fmt: skip


@gluon.jit
def _tile(tile, tiles_m, tiles_f, GROUP_M: gl.constexpr):
    """(row, column) indices of the tile-th tile, in GROUP_M order."""
    in_group = GROUP_M * tiles_f
    first = tile // in_group * GROUP_M
    rows = gl.minimum(tiles_m - first, GROUP_M)
    return first + tile % in_group % rows, tile % in_group // rows


@gluon.jit
def _left_right(block):
    """The left and right halves of the columns; no data moves between threads."""
    COLUMNS: gl.constexpr = block.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    left, right = block.reshape((block.shape[0], 2, COLUMNS)).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _top_bottom(block):
    """The upper and lower halves of the rows; no data moves between threads."""
    COLUMNS: gl.constexpr = block.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    top, bottom = block.reshape((2, block.shape[0] // 2, COLUMNS)).permute((1, 2, 0)).split()
    return gl.convert_layout(top, layout, assert_trivial=True), gl.convert_layout(bottom, layout, assert_trivial=True)


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The next slot of a ring buffer, and its phase parity."""
    around = slot + 1 == SLOTS
    return gl.where(around, 0, slot + 1), phase ^ around.to(gl.int32)


@gluon.jit
def _wait_for(arrivals, due, polls):
    """Wait until `due` have arrived, reading their number up to `polls` times. Returns `polls`, or 0 if they have not."""
    tries = gl.to_tensor(0)
    while (tries < polls) & (gl.load(arrivals, volatile=True) < due):
        tries += 1
    return gl.where(tries < polls, polls, 0)


@gluon.jit
def _produce(maps, memory, ready, free, arrivals, sizes, EPILOGUE: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr):  # fmt: skip
    """Producer warp: fill the ring buffer with the operands of all tiles of this program.

    With `arrivals`, a zeroed counter in global memory, the producers of all programs begin a wave of tiles together, once
    all are close to the end of the wave before: programs that drift apart share less of what they read. It is a hint, no
    result depends on it: a producer that waited in vain, because others do not run yet, does not wait again."""
    x_map, first_map, second_map = maps
    x_ring, w_ring = memory
    M, F, D = sizes
    COLUMNS: gl.constexpr = 128 if EPILOGUE == "down" else 64
    tiles_m = gl.cdiv(M, 128)
    tiles_f = gl.cdiv(F, COLUMNS)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the ring starts empty: a wait on the phase before the first passes
    due = gl.to_tensor(0)
    polls = gl.to_tensor(POLLS)
    near_end = gl.maximum(0, gl.cdiv(D, BLOCK_D) - EARLY) * BLOCK_D
    for tile in range(gl.program_id(0), tiles_m * tiles_f, gl.num_programs(0)):
        tile_m, tile_f = _tile(tile, tiles_m, tiles_f, GROUP_M)
        if arrivals is not None:
            polls = _wait_for(arrivals, due, polls)
            due += gl.num_programs(0)
        for d in range(0, D, BLOCK_D):
            if arrivals is not None:  # noqa: SIM102 - a compile-time condition around a run-time one
                if d == near_end:
                    gl.atomic_add(arrivals, 1, sem="relaxed")
            mbarrier.wait(free.index(slot), phase)
            full = ready.index(slot)
            mbarrier.expect(full, 2 * 128 * BLOCK_D * 2)
            tma_load(x_map, [tile_m * 128, d], full, x_ring.index(slot))
            weight = w_ring.index(slot)
            if EPILOGUE == "down":
                tma_load(first_map, [d, tile_f * COLUMNS], full, weight)
            else:
                tma_load(first_map, [tile_f * COLUMNS, d], full, weight.slice(0, COLUMNS, 0))
                tma_load(second_map, [tile_f * COLUMNS, d], full, weight.slice(COLUMNS, COLUMNS, 0))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _at(row, column, p, EPILOGUE: gl.constexpr):
    """(row, column) of piece p of the tile at `row` and `column`."""
    if EPILOGUE == "down":
        return row + p // 2 * 64, column + p % 2 * 64
    else:
        return row + p * 64, column


@gluon.jit
def _get(maps, row, column, slots, first, barrier, EPILOGUE: gl.constexpr, pred=True):
    """Start the TMA loads of an epilogue piece, dy or u and g, into the slots from `first` on; they complete on `barrier`."""
    if EPILOGUE == "gradient":
        mbarrier.expect(barrier, 64 * 64 * 2, pred=pred)
        tma_load(maps[0], [row, column], barrier, slots.index(first), pred=pred)
    else:
        mbarrier.expect(barrier, 2 * 64 * 64 * 2, pred=pred)
        tma_load(maps[0], [row, column], barrier, slots.index(first), pred=pred)
        tma_load(maps[1], [row, column], barrier, slots.index(first + 1), pred=pred)


@gluon.jit
def _bias(ptr, column, stride, F):
    """Load the bias of 64 features with few registers per thread: the load stays in flight during the main loop."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offs = column + gl.arange(0, 64, layout=layout)
    return gl.load(ptr + offs * stride, mask=offs < F, other=0.0)


@gluon.jit
def _biased(block, bias):
    return block + gl.expand_dims(bias.load(gl.SliceLayout(0, block.type.layout)), 0)


@gluon.jit
def _sums(row, M, slot, EPILOGUE: gl.constexpr):
    """Column sums of a piece, read back from its output slot, i.e. of the rounded values."""
    block = slot.load(SUMS).to(gl.float32)
    if EPILOGUE == "gradient":  # noqa: SIM102 - a compile-time condition around a run-time one
        if row + 64 > M:  # an infinite bias gives NaN beyond the last row
            inside = row + gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS)) < M
            block = gl.where(gl.expand_dims(inside, 1), block, 0.0)
    return gl.sum(block, 0)


@gluon.jit
def _store_sums(ptr, row, column, M, F, du, dg, EPILOGUE: gl.constexpr):
    """Store the sums of a piece's du and dg into its row of the partial sums (⌈M / 64⌉, 2, F)."""
    offs = column + gl.arange(0, 64, layout=gl.SliceLayout(0, SUMS))
    to = ptr + (row // 64).to(gl.int64) * 2 * F + offs
    mask = (offs < F) & (row < M)
    gl.store(to, _sums(row, M, du, EPILOGUE), mask=mask)
    gl.store(to + F, _sums(row, M, dg, EPILOGUE), mask=mask)


@gluon.jit
def _multiply(x_ring, w_ring, ready, free, block, steps, EPILOGUE: gl.constexpr, STAGES: gl.constexpr):
    """Main loop: accumulate a tile over `steps` stages of the ring. One wgmma stays in flight: after issuing one, wait
    for the previous and release its stage. Returns the accumulator and the last stage, which is still being read."""
    acc = warpgroup_mma_init(gl.zeros((128, 128), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])))
    slot = block % STAGES
    phase = block // STAGES & 1
    last = slot + 0
    for step in range(steps):
        mbarrier.wait(ready.index(slot), phase)
        weight = w_ring.index(slot)
        if EPILOGUE != "down":
            weight = weight.permute((1, 0))
        acc = warpgroup_mma(x_ring.index(slot), weight, acc, is_async=True, use_acc=step > 0)
        acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
        mbarrier.arrive(free.index(last), count=1, pred=step > 0)
        last = slot
        slot, phase = next_slot(slot, phase, STAGES)
    return acc, last


@gluon.jit
def _consume(
    maps, biases, dbias_ptr, memory, slots, bias_slots, arrived, ready, free, turns, sizes, GROUP: gl.constexpr, EPILOGUE: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, BIAS_GRAD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup number GROUP: main loop and epilogue of every other tile of the program."""
    x_ring, w_ring = memory
    out_maps, in_maps = maps
    y_map, u_map, g_map = out_maps
    M, F, D = sizes
    COLUMNS: gl.constexpr = 128 if EPILOGUE == "down" else 64
    READS: gl.constexpr = 2 if EPILOGUE == "down" else 1  # slots per piece
    OWN: gl.constexpr = slots.shape[0] - (2 - GROUP) * AHEAD * READS  # the first input slot of this group
    tiles_m = gl.cdiv(M, 128)
    tiles_f = gl.cdiv(F, COLUMNS)
    steps = gl.cdiv(D, BLOCK_D)
    turn = gl.to_tensor(0)
    for tile in range(gl.program_id(0) + GROUP * gl.num_programs(0), tiles_m * tiles_f, 2 * gl.num_programs(0)):
        tile_m, tile_f = _tile(tile, tiles_m, tiles_f, GROUP_M)
        row = tile_m * 128
        column = tile_f * COLUMNS
        # Prefetch the epilogue's first inputs before the main loop.
        if HAS_BIAS:
            b_value = _bias(biases[0], column, biases[2], F)
            b_gate = _bias(biases[1], column, biases[3], F)
        for i in gl.static_range(AHEAD):
            to_row, to_column = _at(row, column, i, EPILOGUE)
            _get(in_maps, to_row, to_column, slots, OWN + i * READS, arrived.index(GROUP * AHEAD + i), EPILOGUE)
        # Wait until the other group has issued its main loop. Its stages come first in the ring: before that, a parity
        # wait on the stages behind them would mistake an earlier round for this one.
        before = (turn + 1 - GROUP) & 1
        mbarrier.wait(turns.index(GROUP), before)
        acc, last = _multiply(x_ring, w_ring, ready, free, (2 * turn + GROUP) * steps, steps, EPILOGUE, STAGES)
        mbarrier.arrive(turns.index(1 - GROUP), count=1)
        if HAS_BIAS:
            bias_slots.index(2 * GROUP).store(b_value.to(gl.float32))
            bias_slots.index(2 * GROUP + 1).store(b_gate.to(gl.float32))
        product = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(last), count=1)

        top, bottom = _top_bottom(product)
        mbarrier.wait(turns.index(2 + GROUP), before)  # acquire the output slots
        if AHEAD == 0:
            for p in gl.static_range(2):
                u, g = _left_right(top)
                if HAS_BIAS:
                    u = _biased(u, bias_slots.index(2 * GROUP))
                    g = _biased(g, bias_slots.index(2 * GROUP + 1))
                y = u * gate(g, ACTIVATION)[0]
                if EPILOGUE == "preact":
                    tma.store_wait(pendings=0)  # of the piece before
                    slots.index(0).store(y.to(slots.dtype))
                    slots.index(1).store(u.to(slots.dtype))
                    slots.index(2).store(g.to(slots.dtype))
                    fence_async_shared()
                    _tma_store(y_map, [row + p * 64, column], slots.index(0))
                    _tma_store(u_map, [row + p * 64, column], slots.index(1))
                    _tma_store(g_map, [row + p * 64, column], slots.index(2))
                else:
                    slots.index(p).store(y.to(slots.dtype))
                    fence_async_shared()
                    _tma_store(y_map, [row + p * 64, column], slots.index(p))
                top = bottom
        else:
            # A rolled loop that rotates the next piece into the registers of the current one: the code stays small
            # enough for the instruction cache, which both groups share.
            if EPILOGUE == "down":
                now, next_1 = _left_right(top)
                next_2, next_3 = _left_right(bottom)
            else:
                now = top
                next_1 = bottom
            PIECES: gl.constexpr = 2 * READS
            for p in range(PIECES):
                own = OWN + p % AHEAD * READS
                full = arrived.index(GROUP * AHEAD + p % AHEAD)
                mbarrier.wait(full, (turn * PIECES + p) // AHEAD & 1)
                if EPILOGUE == "down":
                    dy = now
                    u = slots.index(own).load(PIECE).to(gl.float32)
                    g = slots.index(own + 1).load(PIECE).to(gl.float32)
                else:
                    dy = slots.index(own).load(PIECE).to(gl.float32)
                    u, g = _left_right(now)
                    if HAS_BIAS:
                        u = _biased(u, bias_slots.index(2 * GROUP))
                        g = _biased(g, bias_slots.index(2 * GROUP + 1))
                _barrier()  # all threads have read the slot: it may be refilled
                next_row, next_column = _at(row, column, p + AHEAD, EPILOGUE)
                _get(in_maps, next_row, next_column, slots, own, full, EPILOGUE, p + AHEAD < PIECES)
                a, du, dg = gate_gradient(dy, u, g, ACTIVATION)
                tma.store_wait(pendings=0)  # of the piece before
                # Write all outputs before a single fence: registers are freed as soon as a few columns are done.
                slots.index(0).store(du.to(slots.dtype))
                slots.index(1).store(dg.to(slots.dtype))
                if EPILOGUE == "down":
                    slots.index(2).store((u * a).to(slots.dtype))
                fence_async_shared()
                this_row, this_column = _at(row, column, p, EPILOGUE)
                _tma_store(u_map, [this_row, this_column], slots.index(0))
                _tma_store(g_map, [this_row, this_column], slots.index(1))
                if EPILOGUE == "down":
                    _tma_store(y_map, [this_row, this_column], slots.index(2))
                if BIAS_GRAD:
                    _store_sums(dbias_ptr, this_row, this_column, M, F, slots.index(0), slots.index(1), EPILOGUE)
                now = next_1
                if EPILOGUE == "down":
                    next_1 = next_2
                    next_2 = next_3
        tma.store_wait(pendings=0)
        mbarrier.arrive(turns.index(3 - GROUP), count=1)
        turn += 1


@gluon.jit
def _first_group(
    maps, biases, dbias_ptr, memory, slots, bias_slots, arrived, ready, free, turns, sizes, EPILOGUE: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, BIAS_GRAD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    _consume(
        maps, biases, dbias_ptr, memory, slots, bias_slots, arrived, ready, free, turns, sizes, 0, EPILOGUE, ACTIVATION, HAS_BIAS,
        BIAS_GRAD, BLOCK_D, STAGES, AHEAD, GROUP_M,
    )  # fmt: skip


@gluon.jit
def _second_group(
    maps, biases, dbias_ptr, memory, slots, bias_slots, arrived, ready, free, turns, sizes, EPILOGUE: gl.constexpr,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, BIAS_GRAD: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    _consume(
        maps, biases, dbias_ptr, memory, slots, bias_slots, arrived, ready, free, turns, sizes, 1, EPILOGUE, ACTIVATION, HAS_BIAS,
        BIAS_GRAD, BLOCK_D, STAGES, AHEAD, GROUP_M,
    )  # fmt: skip


def _name(proxy: Any) -> str:
    """Kernel name shown by profilers: epilogue, activation and tile."""
    c = proxy.constants
    return f"_gated_linear_{c['EPILOGUE']}_{c['ACTIVATION']}_128x128x{c['BLOCK_D']}_gluon"


@gluon.jit(repr=_name, do_not_specialize=["M", "F", "D"])
def gated_linear_kernel(
    x_map, w_value_map, w_gate_map, y_map, u_map, g_map, first_map, second_map, b_value_ptr, b_gate_ptr, dbias_ptr,
    arrivals_ptr, M, F, D, stride_b_value, stride_b_gate,
    EPILOGUE: gl.constexpr, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, BIAS_GRAD: gl.constexpr,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Maps are TMA descriptors. first_map is dy, or u with second_map g; for "down", x is dz and w_value is W_down."""
    dtype: gl.constexpr = x_map.dtype
    WRITES: gl.constexpr = 3 if EPILOGUE == "preact" or EPILOGUE == "down" else 2
    READS: gl.constexpr = 2 if EPILOGUE == "down" else 1
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, 128, BLOCK_D], x_map.layout)
    w_ring = gl.allocate_shared_memory(
        dtype, [STAGES, BLOCK_D, 128] if EPILOGUE == "down" else [STAGES, 128, BLOCK_D], w_value_map.layout
    )  # fmt: skip
    slots = gl.allocate_shared_memory(dtype, [WRITES + 2 * AHEAD * READS, 64, 64], gl.NVMMASharedLayout(128, 16))
    bias_slots = gl.allocate_shared_memory(
        gl.float32, [4, 64 if HAS_BIAS else 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    arrived = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())  # main loop, output slots
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(turns.index(i), count=1)
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    sizes = (M, F, D)
    memory = (x_ring, w_ring)
    maps = ((y_map, u_map, g_map), (first_map, second_map))
    biases = (b_value_ptr, b_gate_ptr, stride_b_value, stride_b_gate)
    gl.warp_specialize(
        [
            (_first_group, (maps, biases, dbias_ptr, memory, slots, bias_slots, arrived, ready, free, turns, sizes, EPILOGUE, ACTIVATION, HAS_BIAS, BIAS_GRAD, BLOCK_D, STAGES, AHEAD, GROUP_M)),
            (_second_group, (maps, biases, dbias_ptr, memory, slots, bias_slots, arrived, ready, free, turns, sizes, EPILOGUE, ACTIVATION, HAS_BIAS, BIAS_GRAD, BLOCK_D, STAGES, AHEAD, GROUP_M)),
            (_produce, ((x_map, w_value_map, w_gate_map), memory, ready, free, arrivals_ptr, sizes, EPILOGUE, BLOCK_D, STAGES, GROUP_M)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
