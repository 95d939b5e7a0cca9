"""The gate in Gluon: activations and derivatives for the GEMM epilogues, and two elementwise and reduction kernels.

    du = dy · act(g),   dg = dy · u · act'(g)

`gate_gradient_kernel` is the backward of the gate on its own: it reads u, g and dy from memory once and writes du and
dg once. `add_up_kernel` reduces partial sums of the bias gradient.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def gate(g, ACTIVATION: gl.constexpr):
    """act(g) and act'(g), by base-2 exponentials; the compiler removes whichever is unused."""
    if ACTIVATION == "gelu_tanh":
        # ½ (1 + tanh z) is the sigmoid of 2z, which neither cancels nor saturates early.
        s = _reciprocal(1.0 + _exp2(g * (-2.302208198144325 - 0.1029432396100769 * g * g)))
        a = g * s
        return a, s + a * (1.0 - s) * (1.5957691216057308 + 0.21406444881479645 * g * g)
    elif ACTIVATION == "gelu":
        # Φ(-|g|) = exp(-g²/2) · R(t), t = 1 / (1 + 0.3 |g|): a polynomial without constant term, within 8.3e-6 of R.
        e = _exp2(g * g * -0.7213475204444817)
        t = _reciprocal(1.0 + 0.3 * gl.abs(g))
        r = 0.21603712500373093 - 0.07709744549371036 * t
        r = -0.01694814478679431 + r * t
        r = 0.1441964174765832 + r * t
        r = 0.11374191823647448 + r * t
        r = (0.12007423271297478 + r * t) * t
        below = e * r
        s = gl.where(g < 0.0, below, 1.0 - below)
        return g * s, s + g * (0.3989422804014327 * e)
    elif ACTIVATION == "silu":
        s = _reciprocal(1.0 + _exp2(g * -1.4426950408889634))
        a = g * s
        return a, s + (a - a * s)
    elif ACTIVATION == "relu":
        return gl.where(g <= 0.0, 0.0, g), gl.where(g <= 0.0, 0.0, 1.0)  # propagates NaN
    elif ACTIVATION == "sigmoid":
        s = _reciprocal(1.0 + _exp2(g * -1.4426950408889634))
        return s, s - s * s
    else:
        return g, g * 0.0 + 1.0


@gluon.jit
def gate_gradient(dy, u, g, ACTIVATION: gl.constexpr):
    """act(g), du and dg."""
    a, slope = gate(g, ACTIVATION)
    dg = dy * u
    if ACTIVATION == "relu":
        dg = gl.where(g <= 0.0, 0.0, dg)
    elif ACTIVATION != "identity":
        dg = dg * slope
    return a, dy * a, dg


@gluon.jit
def _load_gate(u_ptr, g_ptr, dy_ptr, row, column, stride_preact, stride_dy, mask):
    u = gl.load(u_ptr + row * stride_preact + column, mask=mask, other=0.0)
    g = gl.load(g_ptr + row * stride_preact + column, mask=mask, other=0.0)
    dy = gl.load(dy_ptr + row * stride_dy + column, mask=mask, other=0.0)
    return u, g, dy


@gluon.jit(do_not_specialize=["M", "rows"])
def gate_gradient_kernel(
    u_ptr, g_ptr, dy_ptr, du_ptr, dg_ptr, dbias_ptr, M, F, rows, stride_preact, stride_dy, stride_dpreact,
    ACTIVATION: gl.constexpr, BIAS_GRAD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_F: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """du and dg from u, g and dy in memory. A program processes `rows` rows by BLOCK_F columns, BLOCK_M rows at a time,
    a thread eight columns in accesses of UNIT elements, the unit of F and the strides: if rows are not 16-byte aligned,
    a warp's accesses coalesce across threads instead of being vectorized. du and dg may alias u and g."""
    COLUMNS: gl.constexpr = BLOCK_F // 8  # threads along a row, filled by warps first
    ACROSS: gl.constexpr = min(COLUMNS, 32)
    layout: gl.constexpr = gl.BlockedLayout(
        [1, UNIT], [32 // ACROSS, ACROSS], [gl.num_warps() * ACROSS // COLUMNS, COLUMNS // ACROSS], [1, 0]
    )
    F = F * UNIT
    stride_preact, stride_dy, stride_dpreact = stride_preact * UNIT, stride_dy * UNIT, stride_dpreact * UNIT
    tiles_f = gl.cdiv(F, BLOCK_F)
    tile_m = gl.program_id(0) // tiles_f
    offs_f = gl.program_id(0) % tiles_f * BLOCK_F + gl.arange(0, BLOCK_F, layout=gl.SliceLayout(0, layout))
    column = gl.expand_dims(offs_f, 0)
    sum_u = gl.zeros((BLOCK_M, BLOCK_F), gl.float32, layout)
    sum_g = gl.zeros((BLOCK_M, BLOCK_F), gl.float32, layout)
    end = gl.minimum(M, (tile_m + 1) * rows)
    offs_m = tile_m * rows + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    row = gl.expand_dims(offs_m, 1).to(gl.int64)
    mask = (row < end) & (column < F)
    u, g, dy = _load_gate(u_ptr, g_ptr, dy_ptr, row, column, stride_preact, stride_dy, mask)
    for _ in range(0, rows, BLOCK_M):
        next_row = row + BLOCK_M
        next_mask = (next_row < end) & (column < F)
        # Prefetch before storing this block: as outputs may alias inputs, the compiler cannot hoist the loads.
        following = _load_gate(u_ptr, g_ptr, dy_ptr, next_row, column, stride_preact, stride_dy, next_mask)
        _, du, dg = gate_gradient(dy.to(gl.float32), u.to(gl.float32), g.to(gl.float32), ACTIVATION)
        gl.store(du_ptr + row * stride_dpreact + column, du.to(du_ptr.dtype.element_ty), mask=mask)
        gl.store(dg_ptr + row * stride_dpreact + column, dg.to(dg_ptr.dtype.element_ty), mask=mask)
        if BIAS_GRAD:
            sum_u += du
            sum_g += dg
        u, g, dy = following
        row = next_row
        mask = next_mask
    if BIAS_GRAD:
        to = dbias_ptr + tile_m.to(gl.int64) * 2 * F + offs_f
        gl.store(to, gl.sum(sum_u, 0), mask=offs_f < F)
        gl.store(to + F, gl.sum(sum_g, 0), mask=offs_f < F)


@gluon.jit(do_not_specialize=["R"])
def add_up_kernel(sums_ptr, to_ptr, R, WIDTH, BLOCK_R: gl.constexpr):
    """Sum over the R rows of (R, WIDTH), 64 columns per program."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    offs = gl.program_id(0) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    rows = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(1, layout))
    total = gl.zeros((BLOCK_R, 64), gl.float32, layout)
    for start in range(0, R, BLOCK_R):
        row = gl.expand_dims(start + rows, 1)
        mask = (row < R) & (gl.expand_dims(offs, 0) < WIDTH)
        total += gl.load(sums_ptr + row.to(gl.int64) * WIDTH + gl.expand_dims(offs, 0), mask=mask, other=0.0)
    gl.store(to_ptr + offs, gl.sum(total, 0), mask=offs < WIDTH)
