"""Gated linear unit for few rows (decode) in Gluon, for Hopper: bound by reading the weights from DRAM once.

    y = u · act(g),   u = x W_valueᵀ + b_value,   g = x W_gateᵀ + b_gate

Shape legend: M rows (1 to 128), D features in, F features out; N columns of a product, M rounded up to a power of two.

Persistent, one program per SM, each with tiles of WIDTH features, a width that distributes F evenly over the SMs. A
producer warp keeps all of shared memory in flight: a ring buffer of stages, each CHUNKS times 64 columns of the WIDTH
rows of both weights, so that adjacent 128-byte segments of a row are requested together; it prefetches the next tile
during the epilogue. Four consumer warps multiply with operands swapped: the weights are the A operand, value stacked on
gate, so that u and g of a feature are in the same thread; x is the B operand, as narrow as M allows. Operand rows
beyond WIDTH, and beyond M rounded up to whole blocks of x, are never loaded: results from stale shared memory are not stored.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ._gluon_gate import gate
from ._gluon_kernel import next_slot, tma_load


@gluon.jit
def _stream(
    maps, memory, ready, free, sizes, WIDTH: gl.constexpr, BLOCK_W: gl.constexpr, X_ROWS: gl.constexpr, BLOCK_X: gl.constexpr,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Producer warp: fill the ring buffer with the operands of all tiles of this program."""
    x_map, value_map, gate_map = maps
    x_ring, w_ring = memory
    F, D = sizes
    HALF: gl.constexpr = w_ring.shape[1] // 2
    BYTES: gl.constexpr = CHUNKS * (X_ROWS + 2 * WIDTH) * 64 * 2
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the ring starts empty: a wait on the phase before the first passes
    for tile in range(gl.program_id(0), gl.cdiv(F, WIDTH), gl.num_programs(0)):
        for d in range(0, D, 64 * CHUNKS):
            mbarrier.wait(free.index(slot), phase)
            full = ready.index(slot)
            mbarrier.expect(full, BYTES)
            for i in gl.static_range(WIDTH // BLOCK_W):
                row = tile * WIDTH + i * BLOCK_W
                for c in gl.static_range(CHUNKS):
                    to = w_ring.index(slot * CHUNKS + c)
                    tma_load(value_map, [row, d + c * 64], full, to.slice(i * BLOCK_W, BLOCK_W, 0))
                    tma_load(gate_map, [row, d + c * 64], full, to.slice(HALF + i * BLOCK_W, BLOCK_W, 0))
            for i in gl.static_range(X_ROWS // BLOCK_X):
                for c in gl.static_range(CHUNKS):
                    to = x_ring.index(slot * CHUNKS + c)
                    tma_load(x_map, [i * BLOCK_X, d + c * 64], full, to.slice(i * BLOCK_X, BLOCK_X, 0))
            slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _finish(
    y_ptr, bias, memory, ready, free, sizes, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, WIDTH: gl.constexpr,
    CHUNKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: main loop and epilogue of every tile, which writes y."""
    x_ring, w_ring = memory
    b_value_ptr, b_gate_ptr, stride_b_value, stride_b_gate = bias
    M, F, D, stride_y = sizes
    ROWS: gl.constexpr = w_ring.shape[1]
    HALF: gl.constexpr = ROWS // 2
    N: gl.constexpr = x_ring.shape[1]
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [HALF // 8, 256 // HALF], [1, 4], [0, 1])
    steps = gl.cdiv(D, 64 * CHUNKS)
    slot = gl.to_tensor(0)
    last = gl.to_tensor(0)  # not `slot`: a variable initialized from another one is not loop-carried
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), gl.cdiv(F, WIDTH), gl.num_programs(0)):
        acc = warpgroup_mma_init(gl.zeros((ROWS, N), gl.float32, BOTH))
        for step in range(steps):
            mbarrier.wait(ready.index(slot), phase)
            for c in gl.static_range(CHUNKS):
                x = x_ring.index(slot * CHUNKS + c).permute((1, 0))
                use = (step > 0) if c == 0 else True
                acc = warpgroup_mma(w_ring.index(slot * CHUNKS + c), x, acc, is_async=True, use_acc=use)
            acc = warpgroup_mma_init(warpgroup_mma_wait(CHUNKS, deps=(acc,)))
            mbarrier.arrive(free.index(last), count=1, pred=step > 0)
            last = slot
            slot, phase = next_slot(slot, phase, STAGES)
        product = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(last), count=1)
        u, g = product.reshape((2, HALF, N)).permute((1, 2, 0)).split()
        u = gl.convert_layout(u, BOTH, assert_trivial=True)
        g = gl.convert_layout(g, BOTH, assert_trivial=True)
        if HAS_BIAS:
            feature = tile * WIDTH + gl.arange(0, HALF, layout=gl.SliceLayout(1, BOTH))
            b_value = gl.load(b_value_ptr + feature * stride_b_value, mask=feature < F, other=0.0)
            b_gate = gl.load(b_gate_ptr + feature * stride_b_gate, mask=feature < F, other=0.0)
            u += gl.expand_dims(b_value.to(gl.float32), 1)
            g += gl.expand_dims(b_gate.to(gl.float32), 1)
        y = gl.convert_layout((u * gate(g, ACTIVATION)[0]).to(y_ptr.dtype.element_ty), STORED)
        inside = gl.arange(0, HALF, layout=gl.SliceLayout(1, STORED))
        feature = tile * WIDTH + inside
        row = gl.arange(0, N, layout=gl.SliceLayout(0, STORED))
        mask = gl.expand_dims((inside < WIDTH) & (feature < F), 1) & gl.expand_dims(row < M, 0)
        gl.store(y_ptr + gl.expand_dims(row, 0) * stride_y + gl.expand_dims(feature, 1), y, mask=mask)


def _name(proxy: Any) -> str:
    """Kernel name shown by profilers."""
    c = proxy.constants
    return f"_gated_linear_few_rows_{c['ACTIVATION']}_{c['WIDTH']}x{64 * c['CHUNKS']}x{c['STAGES']}_gluon"


@gluon.jit(repr=_name, do_not_specialize=["M", "D"])
def few_rows_kernel(
    x_map, value_map, gate_map, b_value_ptr, b_gate_ptr, y_ptr, M, F, D, stride_y, stride_b_value, stride_b_gate,
    ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, WIDTH: gl.constexpr, BLOCK_W: gl.constexpr, HALF: gl.constexpr,
    N: gl.constexpr, X_ROWS: gl.constexpr, BLOCK_X: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Maps are TMA descriptors with blocks of 64 columns by BLOCK_X rows of x (of which X_ROWS are read) or BLOCK_W
    rows of a weight."""
    x_ring = gl.allocate_shared_memory(x_map.dtype, [STAGES * CHUNKS, N, 64], x_map.layout)
    w_ring = gl.allocate_shared_memory(x_map.dtype, [STAGES * CHUNKS, 2 * HALF, 64], value_map.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    memory = (x_ring, w_ring)
    bias = (b_value_ptr, b_gate_ptr, stride_b_value, stride_b_gate)
    gl.warp_specialize(
        [
            (_finish, (y_ptr, bias, memory, ready, free, (M, F, D, stride_y), ACTIVATION, HAS_BIAS, WIDTH, CHUNKS, STAGES)),
            (_stream, ((x_map, value_map, gate_map), memory, ready, free, (F, D), WIDTH, BLOCK_W, X_ROWS, BLOCK_X, CHUNKS, STAGES)),
        ],
        [1],
        [40],
    )  # fmt: skip
