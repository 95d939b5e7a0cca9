"""`impl="gluon"` of the gated linear unit, for Hopper: configurations, arguments and launch of the Gluon kernels.

The kernels are in `_gluon_kernel.py` (GEMM), `_gluon_stream.py` (few rows, configured by `_gluon_few.py`) and
`_gluon_gate.py` (elementwise). Bound launches are cached, so that a repeated call only sets addresses and the stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..._shared import cuda
from ..._shared.gpu import processors_of
from ..._shared.memo import Memo
from ..._shared.triton_launch import INTERPRETED, launch, launch_bound, launches_directly
from .._tuned import Key, Tuned
from . import _gluon_few as few
from ._gate_config import GateConfig, gate_key, gate_space
from ._gluon_gate import add_up_kernel, gate_gradient_kernel
from ._gluon_kernel import gated_linear_kernel
from ._gluon_stream import few_rows_kernel
from ._problem import ALIGNED, Halves, Preact, Spec, new_sums, no_rows, odd, split_preact, stride_unit
from ._products import aligned, aligned_output, copy_to, each

CAPABILITY = cuda.HOPPER
ROWS = 128  # rows of a tile
PIECE = (64, 64)  # block that the epilogue reads and writes at a time
NUM_WARPS = 4
FEW_ROWS = 64  # up to which, with gradients, tiles would be mostly padding
PROGRAMS_EACH = 4  # programs of the elementwise kernel per SM
DTYPES = (torch.bfloat16, torch.float16)
# Per epilogue, the k-steps of a program from which on, and those of a tile, programs that drift apart cost more than keeping
# them in step does: measured on an H100. With the memory of an H200, 1.4 times as fast, they do not cost more.
DRIFT = {"y": (1100, 1), "preact": (1000, 20), "gradient": (1100, 1), "down": (3500, 64)}
FAST_MEMORY = 4.5e12  # bytes/s from which on programs may drift apart: between 3.35 of an H100 and 4.9 of an H200, where less is lost


@dataclass(frozen=True)
class Config:
    """Configuration of the GEMM. A tile is 128 rows by 128 columns of the product; a stage is `block_d` deep."""

    stages: int
    ahead: int  # input pieces of the epilogue that a warpgroup prefetches; 0 if it has no inputs
    block_d: int = 64
    group_m: int = 8
    in_step: bool = False  # whether programs begin each wave of tiles together


def columns(epilogue: str) -> int:
    """Output columns of a tile: for the unit, half of the product's columns, which hold u and g."""
    return 128 if epilogue == "down" else 64


def configurations(epilogue: str) -> list[Config]:
    """All configurations worth trying."""
    read = {"y": [], "preact": [], "gradient": [Config(6, 1)], "down": [Config(4, 2)]}[epilogue]
    return [
        replace(config, group_m=group_m, in_step=in_step)
        for config in (choose(epilogue), *read) for group_m in (4, 8, 16) for in_step in (False, True)
    ]  # fmt: skip


def choose(epilogue: str, *, in_step: bool = False) -> Config:
    """Configuration of the GEMM, for every shape but for `in_step`. The ring gets the shared memory that the epilogue's
    slots leave; one stage fewer costs up to a tenth."""
    stages, ahead = {"y": (6, 0), "preact": (6, 0), "gradient": (5, 2), "down": (5, 1)}[epilogue]
    return Config(stages, ahead, in_step=in_step)


def drifts(epilogue: str, rows: int, depth: int, hidden: int, processors: int) -> bool:
    """Whether programs compute so many tiles that by drifting apart they lose more than by waiting for each other."""
    least, least_of_tile = DRIFT[epilogue]
    tiles: int = triton.cdiv(rows, ROWS) * triton.cdiv(hidden, columns(epilogue))
    steps: int = triton.cdiv(depth, 64)
    return steps >= least_of_tile and tiles * steps >= least * processors


@functools.cache
def _has_fast_memory(device: int) -> bool:
    if device < 0:  # as an H200
        return True
    of = triton.runtime.driver.active.utils.get_device_properties(device)
    return bool(2e3 * of["mem_clock_rate"] * of["mem_bus_width"] / 8 >= FAST_MEMORY)  # two bits per cycle and wire


def _default(key: Key, device: int) -> Config:
    """The heuristic's choice for the GEMM of a launch."""
    size = key.rows, key.inner, key.hidden, processors_of(device)
    return choose(key.kernel, in_step=not _has_fast_memory(device) and drifts(key.kernel, *size))


def _arrivals(x: Tensor) -> Tensor:
    """A counter at zero for one launch: a kept one could be that of a launch on another stream, of a CUDA graph's memory, or a
    tensor of inference mode, which cannot be zeroed outside it."""
    return x.new_zeros(1, dtype=torch.int32)


def choose_gate(rows: int, hidden: int, processors: int, *, sums: bool) -> GateConfig:
    """Configuration of the elementwise kernel: narrow, tall tiles; with sums, for as many rows as leave little to reduce.
    Where those are few or not aligned, equally many programs for each SM."""
    narrow = min(128, max(16, triton.next_power_of_2(hidden)))
    tall = max(256 if sums else 32, 2048 // narrow)
    programs = triton.cdiv(rows, tall) * triton.cdiv(hidden, narrow)
    if programs >= 2 * processors and hidden % 8 == 0 and rows > 1024 * sums:
        return GateConfig(tall, 2048 // narrow, narrow)
    block_f = min(1024 if sums else 256, max(16, triton.next_power_of_2(hidden)))
    block_m = 1024 // block_f
    stripes = max(1, PROGRAMS_EACH * processors // triton.cdiv(hidden, block_f))
    per_program = triton.cdiv(rows, stripes) if sums else min(128, triton.cdiv(rows, 2 * stripes))
    return GateConfig(max(block_m, per_program), block_m, block_f)


def gate_configurations(rows: int, hidden: int, processors: int, *, sums: bool) -> list[GateConfig]:
    """Search space of `fusewise tune` for the elementwise kernel, the heuristic's choice first."""
    chosen = choose_gate(rows, hidden, processors, sums=sums)
    columns = [f for f in (128, 256, 512, 1024) if f <= max(128, triton.next_power_of_2(hidden))]
    return gate_space(chosen, columns)


def _space(key: Key, device: int) -> list[Any]:
    if key.way == few.WAY:
        return few.configurations(key.rows, key.hidden, processors_of(device))
    if key.kernel == "gate":
        return gate_configurations(key.rows, key.hidden, processors_of(device), sums=key.way == "sums")
    if key.kernel not in ("y", "preact", "gradient", "down"):
        return []
    return list(dict.fromkeys([_default(key, device), *configurations(key.kernel)]))


TUNED: Tuned[Any] = Tuned(
    "gated_linear", "gluon",
    [Path(__file__).with_name(f"{name}.py") for name in ("_gluon", "_gluon_gate", "_gluon_kernel", "_gluon_few", "_few_rows", "_gluon_stream", "_gate_config")],
    _space,
)  # fmt: skip


def unavailable(device_type: str) -> str | None:
    """Why Gluon cannot serve tensors of this device type, or None if it can."""
    if device_type != "cuda" or torch.version.hip is not None:
        return "gluon has kernels for NVIDIA Hopper GPUs only"
    if INTERPRETED:
        return "gluon's asynchronous matmuls cannot be interpreted, and TRITON_INTERPRET=1 is set"
    return cuda.not_hopper("gluon")


def refuses(hidden: int, matrices: tuple[Tensor, ...], activation: str, kernel: str, *, by_choice: bool) -> str | None:
    """Why a call of a kernel ("y", "preact", "gradient", "down" or "gate") with these matrices, x first, and F = `hidden` is left to
    another implementation, or None if it is not. Every call is supported; with `by_choice` (impl="auto") those that run faster
    elsewhere are left."""
    rows = matrices[0].shape[0]
    if not by_choice or rows > few.MOST_ROWS:
        return None
    if rows <= FEW_ROWS and kernel != "y":
        return f"with gradients, up to {FEW_ROWS} rows are too few for its tiles"
    if odd(hidden, matrices):
        return f"{ALIGNED}, and copying others pays off only from {few.MOST_ROWS + 1} rows on"
    return None


def path(x: Tensor, halves: Halves) -> str:
    """For `explain_dispatch`: copies, and which configurations for this shape are tuned."""
    hidden = halves.value.shape[0]
    keys = [Key(e, x.dtype, "", x.shape[0], x.shape[1], hidden) for e in ("y", "preact", "gradient")]
    if x.shape[0] <= few.MOST_ROWS:
        keys[0] = keys[0]._replace(way=few.WAY)
    sums = halves.value_bias is not None
    tuned = TUNED.explain(x.get_device(), [*keys, gate_key(x.dtype, x.shape[0], hidden, sums)])
    copies = f"{ALIGNED}: other matrices are copied" if odd(hidden, (x, halves.value, halves.gate)) else ""
    return "; ".join(filter(None, (copies, tuned)))


@functools.cache
def _layout(block: tuple[int, int], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(
        list(block), {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    )


def _map(x: Tensor | None, block: tuple[int, int]) -> Any:
    """The TMA descriptor of x with this block shape."""
    return None if x is None else TensorDescriptor.from_tensor(x, list(block), _layout(block, x.dtype))


def arguments(
    x: Tensor, value: Tensor, gate: Tensor | None, config: Config, processors: int, *, epilogue: str, activation: str,
    hidden: int, y: Tensor | None, outputs: Sequence[Tensor | None], inputs: Sequence[Tensor | None],
    bias: tuple[Tensor | None, Tensor | None], sums: Tensor | None, arrivals: Tensor | None = None,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """Grid size and all arguments of `gated_linear_kernel`. `outputs` are u and g or their gradients, `inputs` the
    inputs of the epilogue: dy, or u and g; `arrivals` a zero, if programs keep in step."""
    rows, features = x.shape
    width = columns(epilogue)
    block_w = (config.block_d, width) if epilogue == "down" else (width, config.block_d)
    u, g = outputs
    return min(triton.cdiv(rows, ROWS) * triton.cdiv(hidden, width), processors), {
        "x_map": _map(x, (ROWS, config.block_d)), "w_value_map": _map(value, block_w), "w_gate_map": _map(gate, block_w),
        "y_map": _map(y, PIECE), "u_map": _map(u, PIECE), "g_map": _map(g, PIECE),
        "first_map": _map(inputs[0], PIECE), "second_map": _map(inputs[1], PIECE),
        "b_value_ptr": bias[0], "b_gate_ptr": bias[1], "dbias_ptr": sums, "arrivals_ptr": arrivals,
        "M": rows, "F": hidden, "D": features,
        "stride_b_value": 0 if bias[0] is None else bias[0].stride(0),
        "stride_b_gate": 0 if bias[1] is None else bias[1].stride(0),
        "EPILOGUE": epilogue, "ACTIVATION": activation, "HAS_BIAS": bias[0] is not None, "BIAS_GRAD": sums is not None,
        "BLOCK_D": config.block_d, "STAGES": config.stages, "AHEAD": config.ahead, "GROUP_M": config.group_m,
    }  # fmt: skip


class Plan(NamedTuple):
    """A bound launch: the compiled kernel with its grid, its descriptors without addresses, and the arguments after the
    pointers, of which the first is to be a counter if programs keep in step."""

    run: Any
    maps: tuple[TensorDescriptor | None, ...]
    rest: tuple[Any, ...]
    in_step: bool


# Keyed by everything they depend on, including the state of the tuned configurations.
_PLANS: Memo[tuple[Any, ...], Plan] = Memo(1024)


def _launch(
    epilogue: str, activation: str, x: Tensor, value: Tensor, gate: Tensor | None, hidden: int, *, y: Tensor | None = None,
    outputs: tuple[Tensor, Tensor] | None = None, inputs: tuple[Tensor | None, Tensor | None] = (None, None),
    bias: tuple[Tensor | None, Tensor | None] = (None, None), dbias: Tensor | None = None,
) -> None:  # fmt: skip
    rows, device = x.shape[0], x.get_device()
    if rows == 0:
        return no_rows(dbias)
    sums = new_sums(dbias, triton.cdiv(rows, PIECE[0]))
    x, value = aligned(x), aligned(value)
    gate, *read = each(aligned, gate, *inputs)
    written = (y, *(outputs or (None, None)))
    buffers = tuple(each(aligned_output, *written))
    matrices = (x, value, gate, *buffers, *read)
    pointers = (*bias, sums)
    key = (
        epilogue, activation, device, x.dtype, TUNED.state,
        *[None if t is None else (t.shape, t.stride()) for t in matrices],
        *[None if t is None else (t.stride(), t.data_ptr() & 15) for t in pointers],
    )  # fmt: skip

    def called() -> tuple[int, dict[str, Any]]:
        size = Key(epilogue, x.dtype, "", rows, x.shape[1], hidden)
        config: Config = TUNED.find(device, size) or _default(size, device)
        return arguments(
            x, value, gate, config, processors_of(device), epilogue=epilogue, activation=activation,
            hidden=hidden, y=buffers[0], outputs=buffers[1:], inputs=read, bias=bias, sums=sums,
            arrivals=_arrivals(x) if config.in_step else None,
        )  # fmt: skip

    _start(gated_linear_kernel, key, x, matrices, pointers, called)
    for to, buffer in zip(written, buffers, strict=True):
        if to is not None and buffer is not None and to is not buffer:
            copy_to(buffer, to)
    if dbias is not None and sums is not None:
        _add_up(sums, dbias)


def _at(tensor: Tensor | None, of: TensorDescriptor | None) -> TensorDescriptor | None:
    """A descriptor like `of`, of this tensor. Unlike `dataclasses.replace` or `copy.copy`, in less than a microsecond."""
    if of is None:
        return None
    found = object.__new__(TensorDescriptor)
    found.__dict__.update(of.__dict__, base=tensor)
    return found


def _start(
    kernel: Any, key: tuple[Any, ...], x: Tensor, matrices: tuple[Tensor | None, ...], pointers: tuple[Tensor | None, ...],
    called: Callable[[], tuple[int, dict[str, Any]]],
) -> None:  # fmt: skip
    """Launch a kernel whose arguments are the matrices, as descriptors, the pointers, and what `called` returns after
    these. Triton's launcher specializes all arguments on every call; to cut that host overhead, a repeated call finds
    them bound under its key and only sets addresses and the stream."""
    device = x.get_device()
    plan = _PLANS.get(key) if launches_directly() else None
    if plan is not None:
        bound = [_at(tensor, of) for tensor, of in zip(matrices, plan.maps, strict=True)]
        rest = (_arrivals(x), *plan.rest[1:]) if plan.in_step else plan.rest
        return launch_bound(plan.run, device, *bound, *pointers, *rest)
    grid, given = called()
    compiled = launch(kernel, grid, given, device, num_warps=NUM_WARPS)
    values = tuple(given.values())
    maps = tuple(_at(None, value) for value in values[: len(matrices)])
    rest, in_step = values[len(matrices) + len(pointers) :], given.get("arrivals_ptr") is not None
    _PLANS[key] = Plan(compiled[(grid, 1, 1)], maps, (None, *rest[1:]) if in_step else rest, in_step)


def _few_rows(x: Tensor, halves: Halves, activation: str, y: Tensor) -> None:
    rows, features = x.shape
    hidden, device = y.shape[1], x.get_device()
    bias = (halves.value_bias, halves.gate_bias)
    x, value, gate = map(aligned, (x, halves.value, halves.gate))
    matrices, pointers = (x, value, gate), (*bias, y)
    key = (
        few.WAY, activation, device, x.dtype, TUNED.state, *[(t.shape, t.stride()) for t in matrices],
        *[None if t is None else (t.stride(), t.data_ptr() & 15) for t in pointers],
    )  # fmt: skip

    def called() -> tuple[int, dict[str, Any]]:
        processors = processors_of(device)
        found: few.Config | None = TUNED.find(device, Key("y", x.dtype, few.WAY, rows, features, hidden))
        config = found or few.choose(rows, hidden, processors)
        return few.arguments(x, value, gate, bias, y, config, processors, activation, _map)

    _start(few_rows_kernel, key, x, matrices, pointers, called)


def _add_up(sums: Tensor, dbias: Tensor) -> None:
    width = dbias.numel()
    arguments = {"sums_ptr": sums, "to_ptr": dbias, "R": sums.shape[0], "WIDTH": width, "BLOCK_R": 32}
    launch(add_up_kernel, triton.cdiv(width, 64), arguments, sums.get_device(), num_warps=NUM_WARPS)


def forward(x: Tensor, halves: Halves, spec: Spec, y: Tensor, preact: Preact | None) -> None:
    """`impl="gluon"`: this and the gradients as in `reference.py`."""
    if preact is None and 0 < x.shape[0] <= few.MOST_ROWS:
        return _few_rows(x, halves, spec.activation, y)
    _launch(
        "y" if preact is None else "preact", spec.activation, x, halves.value, halves.gate, halves.value.shape[0], y=y,
        outputs=None if preact is None else split_preact(preact, spec), bias=(halves.value_bias, halves.gate_bias),
    )  # fmt: skip


def recompute_gradient(
    dy: Tensor, x: Tensor, halves: Halves, dpreact: Preact, spec: Spec, dbias: Tensor | None
) -> None:
    _launch(
        "gradient", spec.activation, x, halves.value, halves.gate, halves.value.shape[0], inputs=(dy, None),
        outputs=split_preact(dpreact, spec), bias=(halves.value_bias, halves.gate_bias), dbias=dbias,
    )  # fmt: skip


def down_gradient(
    dz: Tensor, w_down: Tensor, preact: Tensor, y: Tensor, dpreact: Tensor, spec: Spec, dbias: Tensor | None
) -> None:
    _launch(
        "down", spec.activation, dz, w_down, None, w_down.shape[1], y=y, outputs=split_preact(dpreact, spec),
        inputs=split_preact(preact, spec), dbias=dbias,
    )  # fmt: skip


def gate_arguments(
    dy: Tensor, preact: tuple[Tensor, Tensor], dpreact: tuple[Tensor, Tensor], config: GateConfig, activation: str,
    sums: Tensor | None,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """Grid size and all arguments of `gate_gradient_kernel`."""
    rows, hidden = dy.shape
    step = stride_unit(dy, *preact, *dpreact)
    return triton.cdiv(rows, config.rows) * triton.cdiv(hidden, config.block_f), {
        "u_ptr": preact[0], "g_ptr": preact[1], "dy_ptr": dy, "du_ptr": dpreact[0], "dg_ptr": dpreact[1], "dbias_ptr": sums,
        "M": rows, "F": hidden // step, "rows": config.rows, "stride_preact": preact[0].stride(0) // step,
        "stride_dy": dy.stride(0) // step, "stride_dpreact": dpreact[0].stride(0) // step, "ACTIVATION": activation,
        "BIAS_GRAD": sums is not None, "BLOCK_M": config.block_m, "BLOCK_F": config.block_f, "UNIT": step,
    }  # fmt: skip


def gradient(dy: Tensor, preact: Preact, dpreact: Preact, spec: Spec, dbias: Tensor | None) -> None:
    rows, hidden = dy.shape
    if rows == 0:
        return no_rows(dbias)
    device = dy.get_device()
    key = gate_key(dy.dtype, rows, hidden, dbias is not None)
    config = TUNED.find(device, key) or choose_gate(rows, hidden, processors_of(device), sums=dbias is not None)
    sums = new_sums(dbias, triton.cdiv(rows, config.rows))
    grid, called = gate_arguments(
        dy, split_preact(preact, spec), split_preact(dpreact, spec), config, spec.activation, sums
    )
    launch(gate_gradient_kernel, grid, called, device, num_warps=config.num_warps)
    if dbias is not None and sums is not None:
        _add_up(sums, dbias)
