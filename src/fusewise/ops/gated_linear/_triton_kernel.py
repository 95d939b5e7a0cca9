"""Triton kernels of the gated linear unit.

    y = u · act(g),   u = x W_valueᵀ + b_value,   g = x W_gateᵀ + b_gate
    du = dy · act(g),   dg = dy · u · act'(g)

Shape legend: M rows, D features in, F features out, O features out of the down projection. The main kernels:

- `gated_linear_kernel`: GEMM with two float32 accumulators, u and g, per tile; bias and gate in the epilogue. It writes
  y, or y and the pre-activations, or, given dy, their gradient and its column sums for the bias.
- `gate_gradient_kernel`: the same gradient from pre-activations in memory: reads u, g, dy once, writes du, dg once.
- `down_gradient_kernel`: dy = dz W_down tile by tile, never stored; its epilogue reads u, g and writes y, du, dg.

Accumulation and epilogue are in float32, rounded once when stored. Bias gradients are one row of partial sums per tile,
reduced afterwards: no atomics, bitwise reproducible. Tiles are visited in groups of GROUP_M rows of tiles, so that
operands shared by concurrent programs stay in L2. With TMA, matrices are tensor descriptors, which are bounds-checked
in hardware; otherwise pointers with masks. With SPLIT, the epilogue processes one half of the columns after the other,
which avoids register spills. Column counts and row strides are in units of UNIT elements (`stride_unit` in `_problem.py`).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _activate(g, ACTIVATION: tl.constexpr):
    """act(g), and the sigmoid or Φ(g) that its derivative reuses, if the activation has one."""
    if ACTIVATION == "gelu_tanh":
        # ½ (1 + tanh z) is the sigmoid of 2z, which neither cancels nor saturates early.
        s = 1.0 / (1.0 + tl.exp(g * (-1.5957691216057308 - 0.07135481627159882 * g * g)))
        return g * s, s
    elif ACTIVATION == "gelu":
        s = 0.5 + 0.5 * tl.erf(g * 0.7071067811865476)
        return g * s, s
    elif ACTIVATION == "silu":
        s = 1.0 / (1.0 + tl.exp(-g))
        return g * s, s
    elif ACTIVATION == "relu":
        return tl.where(g <= 0.0, 0.0, g), g  # propagates NaN
    elif ACTIVATION == "sigmoid":
        s = 1.0 / (1.0 + tl.exp(-g))
        return s, s
    else:
        return g, g


@triton.jit
def _gate_gradient(dy, u, g, ACTIVATION: tl.constexpr):
    """act(g), du and dg."""
    a, s = _activate(g, ACTIVATION)
    if ACTIVATION == "gelu_tanh":
        slope = s + a * (1.0 - s) * (1.5957691216057308 + 0.21406444881479645 * g * g)
    elif ACTIVATION == "gelu":
        slope = s + g * (0.3989422804014327 * tl.exp(-0.5 * g * g))
    elif ACTIVATION == "silu":
        slope = s * (1.0 + g * (1.0 - s))
    elif ACTIVATION == "sigmoid":
        slope = s * (1.0 - s)
    else:
        slope = 1.0
    dg = dy * u * slope
    if ACTIVATION == "relu":
        dg = tl.where(g <= 0.0, 0.0, dg)
    return a, dy * a, dg


@triton.jit
def _tile(tile, tiles_m, tiles_f, GROUP_M: tl.constexpr):
    """(row, column) indices of the tile-th tile, in GROUP_M order."""
    in_group = GROUP_M * tiles_f
    first = tile // in_group * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    return first + tile % in_group % rows, tile % in_group // rows


@triton.jit
def _load(ptr, row, column, stride, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, EVEN_C: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Load the block at (row, column) of a (rows, columns) matrix, zero out of bounds."""
    if TMA:
        return ptr.load([row, column])
    else:
        offs_r = row + tl.arange(0, BLOCK_R)
        offs_c = column + tl.arange(0, BLOCK_C)
        mask = (offs_r < rows)[:, None]
        if not EVEN_C:
            mask = mask & (offs_c < columns)[None, :]
        return tl.load(ptr + offs_r.to(tl.int64)[:, None] * stride + offs_c[None, :], mask, 0.0)


@triton.jit
def _store(ptr, row, column, stride, rows, columns, block, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Store a block, clipped to the bounds of its matrix."""
    if TMA:
        ptr.store([row, column], block.to(ptr.dtype))
    else:
        offs_r = row + tl.arange(0, BLOCK_R)
        offs_c = column + tl.arange(0, BLOCK_C)
        mask = (offs_r < rows)[:, None] & (offs_c < columns)[None, :]
        tl.store(
            ptr + offs_r.to(tl.int64)[:, None] * stride + offs_c[None, :], block.to(ptr.dtype.element_ty), mask
        )  # fmt: skip


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    if UPCAST:  # the interpreter has no bfloat16 product
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _store_sums(dbias_ptr, tile_m, offs_f, F, du, dg):
    """Store the column sums of a tile of du and dg in row `tile_m` of the partial sums (tiles, 2, F)."""
    row_ptr = dbias_ptr + tile_m.to(tl.int64) * 2 * F
    tl.store(row_ptr + offs_f, tl.sum(du, 0), offs_f < F)
    tl.store(row_ptr + F + offs_f, tl.sum(dg, 0), offs_f < F)


@triton.jit
def _halves(block, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr):
    """The left and right halves of the columns."""
    return tl.split(tl.permute(tl.reshape(block, (BLOCK_M, 2, BLOCK_F // 2)), (0, 2, 1)))


@triton.jit
def _epilogue(
    u, g, b_value_ptr, b_gate_ptr, y_ptr, u_ptr, g_ptr, dy_ptr, dbias_ptr, tile_m, row, column, M, F,
    stride_b_value, stride_b_gate, stride_y, stride_preact, stride_dy,
    EPILOGUE: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, BIAS_GRAD: tl.constexpr,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Bias, gate and stores of WIDTH columns of a tile from `column` on."""
    offs_f = column + tl.arange(0, WIDTH)
    if HAS_BIAS:
        mask_f = offs_f < F
        u += tl.load(b_value_ptr + offs_f * stride_b_value, mask_f, 0.0).to(tl.float32)[None, :]
        g += tl.load(b_gate_ptr + offs_f * stride_b_gate, mask_f, 0.0).to(tl.float32)[None, :]
    if EPILOGUE == "gradient":
        dy = _load(dy_ptr, row, column, stride_dy, M, F, BLOCK_M, WIDTH, False, TMA).to(tl.float32)
        _, du, dg = _gate_gradient(dy, u, g, ACTIVATION)
        _store(u_ptr, row, column, stride_preact, M, F, du, BLOCK_M, WIDTH, TMA)
        _store(g_ptr, row, column, stride_preact, M, F, dg, BLOCK_M, WIDTH, TMA)
        if BIAS_GRAD:
            inside = (row + tl.arange(0, BLOCK_M) < M)[:, None]  # an infinite bias gives NaN in the rows beyond
            _store_sums(dbias_ptr, tile_m, offs_f, F, tl.where(inside, du, 0.0), tl.where(inside, dg, 0.0))
    else:
        if EPILOGUE == "preact":
            _store(u_ptr, row, column, stride_preact, M, F, u, BLOCK_M, WIDTH, TMA)
            _store(g_ptr, row, column, stride_preact, M, F, g, BLOCK_M, WIDTH, TMA)
        a, _ = _activate(g, ACTIVATION)
        _store(y_ptr, row, column, stride_y, M, F, u * a, BLOCK_M, WIDTH, TMA)


@triton.jit
def _down_epilogue(
    dy, u_ptr, g_ptr, y_ptr, du_ptr, dg_ptr, dbias_ptr, tile_m, row, column, M, F, stride_preact, stride_y, stride_dpreact,
    ACTIVATION: tl.constexpr, BIAS_GRAD: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """y, du and dg of a tile of dy, WIDTH columns from `column` on."""
    u = _load(u_ptr, row, column, stride_preact, M, F, BLOCK_M, WIDTH, False, TMA).to(tl.float32)
    g = _load(g_ptr, row, column, stride_preact, M, F, BLOCK_M, WIDTH, False, TMA).to(tl.float32)
    a, du, dg = _gate_gradient(dy, u, g, ACTIVATION)
    _store(y_ptr, row, column, stride_y, M, F, u * a, BLOCK_M, WIDTH, TMA)
    _store(du_ptr, row, column, stride_dpreact, M, F, du, BLOCK_M, WIDTH, TMA)
    _store(dg_ptr, row, column, stride_dpreact, M, F, dg, BLOCK_M, WIDTH, TMA)
    if BIAS_GRAD:
        _store_sums(dbias_ptr, tile_m, column + tl.arange(0, WIDTH), F, du, dg)


def _linear_name(proxy: Any) -> str:
    """Kernel name shown by profilers: epilogue, activation and tile."""
    c = proxy.constants
    return f"_gated_linear_{c['EPILOGUE']}_{c['ACTIVATION']}_{c['BLOCK_M']}x{c['BLOCK_F']}x{c['BLOCK_D']}"


def _linear_metadata(grid: Any, kernel: Any, a: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata for profilers: name and FLOPs."""
    return {"name": kernel.name, "flops": 4 * a["M"] * a["F"] * a["D"] * a["UNIT"] ** 2}


@triton.jit(repr=_linear_name, launch_metadata=_linear_metadata, do_not_specialize=["M", "programs"])
def gated_linear_kernel(
    x_ptr, w_value_ptr, w_gate_ptr, b_value_ptr, b_gate_ptr, y_ptr, u_ptr, g_ptr, dy_ptr, dbias_ptr,
    M, F, D, stride_x, stride_w_value, stride_w_gate, stride_b_value, stride_b_gate, stride_y, stride_preact, stride_dy,
    programs,
    EPILOGUE: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, BIAS_GRAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_D: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """EPILOGUE "y" writes y; "preact" writes y, u and g; "gradient" reads dy and writes du and dg to u_ptr and g_ptr."""
    F, D, stride_x, stride_y = F * UNIT, D * UNIT, stride_x * UNIT, stride_y * UNIT
    stride_w_value, stride_w_gate = stride_w_value * UNIT, stride_w_gate * UNIT
    stride_preact, stride_dy = stride_preact * UNIT, stride_dy * UNIT
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_f = tl.cdiv(F, BLOCK_F)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_f, programs):
        tile_m, tile_f = _tile(tile, tiles_m, tiles_f, GROUP_M)
        row = tile_m * BLOCK_M
        column = tile_f * BLOCK_F
        u = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        g = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        for step in tl.range(0, tl.cdiv(D, BLOCK_D)):
            d = step * BLOCK_D
            x = _load(x_ptr, row, d, stride_x, M, D, BLOCK_M, BLOCK_D, EVEN_D, TMA)
            w_value = _load(w_value_ptr, column, d, stride_w_value, F, D, BLOCK_F, BLOCK_D, EVEN_D, TMA)
            w_gate = _load(w_gate_ptr, column, d, stride_w_gate, F, D, BLOCK_F, BLOCK_D, EVEN_D, TMA)
            u = _dot(x, w_value.T, u, UPCAST)
            g = _dot(x, w_gate.T, g, UPCAST)

        if SPLIT:
            u_left, u_right = _halves(u, BLOCK_M, BLOCK_F)
            g_left, g_right = _halves(g, BLOCK_M, BLOCK_F)
            _epilogue(
                u_left, g_left, b_value_ptr, b_gate_ptr, y_ptr, u_ptr, g_ptr, dy_ptr, dbias_ptr, tile_m, row, column, M, F,
                stride_b_value, stride_b_gate, stride_y, stride_preact, stride_dy,
                EPILOGUE, ACTIVATION, HAS_BIAS, BIAS_GRAD, BLOCK_M, BLOCK_F // 2, TMA,
            )  # fmt: skip
            _epilogue(
                u_right, g_right, b_value_ptr, b_gate_ptr, y_ptr, u_ptr, g_ptr, dy_ptr, dbias_ptr, tile_m, row,
                column + BLOCK_F // 2, M, F, stride_b_value, stride_b_gate, stride_y, stride_preact, stride_dy,
                EPILOGUE, ACTIVATION, HAS_BIAS, BIAS_GRAD, BLOCK_M, BLOCK_F // 2, TMA,
            )  # fmt: skip
        else:
            _epilogue(
                u, g, b_value_ptr, b_gate_ptr, y_ptr, u_ptr, g_ptr, dy_ptr, dbias_ptr, tile_m, row, column, M, F,
                stride_b_value, stride_b_gate, stride_y, stride_preact, stride_dy,
                EPILOGUE, ACTIVATION, HAS_BIAS, BIAS_GRAD, BLOCK_M, BLOCK_F, TMA,
            )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def gate_gradient_kernel(
    u_ptr, g_ptr, dy_ptr, du_ptr, dg_ptr, dbias_ptr,
    M, F, stride_preact, stride_dy, stride_dpreact,
    ACTIVATION: tl.constexpr, BIAS_GRAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """A program processes ROWS rows by BLOCK_F columns, BLOCK_M rows at a time. du and dg may alias u and g."""
    F = F * UNIT
    stride_preact, stride_dy, stride_dpreact = stride_preact * UNIT, stride_dy * UNIT, stride_dpreact * UNIT
    tiles_f = tl.cdiv(F, BLOCK_F)
    tile_m = tl.program_id(0) // tiles_f
    offs_f = tl.program_id(0) % tiles_f * BLOCK_F + tl.arange(0, BLOCK_F)
    sum_u = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    sum_g = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    for start in tl.range(0, ROWS, BLOCK_M):
        offs_m = tile_m * ROWS + start + tl.arange(0, BLOCK_M)
        mask = (offs_m < M)[:, None] & (offs_f < F)[None, :]
        row = offs_m.to(tl.int64)[:, None]
        u = tl.load(u_ptr + row * stride_preact + offs_f[None, :], mask, 0.0).to(tl.float32)
        g = tl.load(g_ptr + row * stride_preact + offs_f[None, :], mask, 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * stride_dy + offs_f[None, :], mask, 0.0).to(tl.float32)
        _, du, dg = _gate_gradient(dy, u, g, ACTIVATION)
        tl.store(du_ptr + row * stride_dpreact + offs_f[None, :], du.to(du_ptr.dtype.element_ty), mask)
        tl.store(dg_ptr + row * stride_dpreact + offs_f[None, :], dg.to(dg_ptr.dtype.element_ty), mask)
        if BIAS_GRAD:
            sum_u += du
            sum_g += dg
    if BIAS_GRAD:
        _store_sums(dbias_ptr, tile_m, offs_f, F, sum_u, sum_g)


@triton.jit(do_not_specialize=["M"])
def gate_kernel(
    u_ptr, g_ptr, y_ptr, M, F, stride_u, stride_y,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """y = u · act(g), BLOCK_M rows by BLOCK_F columns per program."""
    F, stride_u, stride_y = F * UNIT, stride_u * UNIT, stride_y * UNIT
    tiles_f = tl.cdiv(F, BLOCK_F)
    offs_m = tl.program_id(0) // tiles_f * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_f = tl.program_id(0) % tiles_f * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (offs_m < M)[:, None] & (offs_f < F)[None, :]
    row = offs_m.to(tl.int64)[:, None]
    u = tl.load(u_ptr + row * stride_u + offs_f[None, :], mask, 0.0).to(tl.float32)
    g = tl.load(g_ptr + row * stride_u + offs_f[None, :], mask, 0.0).to(tl.float32)
    a, _ = _activate(g, ACTIVATION)
    tl.store(y_ptr + row * stride_y + offs_f[None, :], (u * a).to(y_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows", "columns", "to_rows", "to_columns", "stride", "to_stride"])
def copy_kernel(
    from_ptr, to_ptr, rows, columns, to_rows, to_columns, stride, to_stride,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Copy a matrix into another, cropped or padded with zeros to its size. With unaligned rows accesses are single
    elements, but coalesced across threads, with many in flight."""
    columns, stride, to_columns, to_stride = columns * UNIT, stride * UNIT, to_columns * UNIT, to_stride * UNIT
    tiles_c = tl.cdiv(to_columns, BLOCK_C)
    row = (tl.program_id(0) // tiles_c * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    column = (tl.program_id(0) % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    block = tl.load(from_ptr + row * stride + column, (row < rows) & (column < columns), 0.0)
    tl.store(to_ptr + row * to_stride + column, block, (row < to_rows) & (column < to_columns))


def _down_name(proxy: Any) -> str:
    c = proxy.constants
    return f"_gated_linear_down_gradient_{c['ACTIVATION']}_{c['BLOCK_M']}x{c['BLOCK_F']}x{c['BLOCK_O']}"


@triton.jit(repr=_down_name, do_not_specialize=["M", "programs"])
def down_gradient_kernel(
    dz_ptr, w_ptr, u_ptr, g_ptr, y_ptr, du_ptr, dg_ptr, dbias_ptr,
    M, F, OUT, stride_dz, stride_w, stride_preact, stride_y, stride_dpreact, programs,
    ACTIVATION: tl.constexpr, BIAS_GRAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_O: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_OUT: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """dy = dz W_down, (M, OUT) by (OUT, F); du and dg may alias u and g."""
    F, OUT, stride_dz, stride_w = F * UNIT, OUT * UNIT, stride_dz * UNIT, stride_w * UNIT
    stride_preact, stride_y, stride_dpreact = stride_preact * UNIT, stride_y * UNIT, stride_dpreact * UNIT
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_f = tl.cdiv(F, BLOCK_F)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_f, programs):
        tile_m, tile_f = _tile(tile, tiles_m, tiles_f, GROUP_M)
        row = tile_m * BLOCK_M
        column = tile_f * BLOCK_F
        dy = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        for step in tl.range(0, tl.cdiv(OUT, BLOCK_O)):
            o = step * BLOCK_O
            dz = _load(dz_ptr, row, o, stride_dz, M, OUT, BLOCK_M, BLOCK_O, EVEN_OUT, TMA)
            w = _load(w_ptr, o, column, stride_w, OUT, F, BLOCK_O, BLOCK_F, False, TMA)
            dy = _dot(dz, w, dy, UPCAST)
        if SPLIT:
            left, right = _halves(dy, BLOCK_M, BLOCK_F)
            _down_epilogue(
                left, u_ptr, g_ptr, y_ptr, du_ptr, dg_ptr, dbias_ptr, tile_m, row, column, M, F, stride_preact, stride_y,
                stride_dpreact, ACTIVATION, BIAS_GRAD, BLOCK_M, BLOCK_F // 2, TMA,
            )  # fmt: skip
            _down_epilogue(
                right, u_ptr, g_ptr, y_ptr, du_ptr, dg_ptr, dbias_ptr, tile_m, row, column + BLOCK_F // 2, M, F,
                stride_preact, stride_y, stride_dpreact, ACTIVATION, BIAS_GRAD, BLOCK_M, BLOCK_F // 2, TMA,
            )  # fmt: skip
        else:
            _down_epilogue(
                dy, u_ptr, g_ptr, y_ptr, du_ptr, dg_ptr, dbias_ptr, tile_m, row, column, M, F, stride_preact, stride_y,
                stride_dpreact, ACTIVATION, BIAS_GRAD, BLOCK_M, BLOCK_F, TMA,
            )  # fmt: skip
