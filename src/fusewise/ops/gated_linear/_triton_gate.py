"""Elementwise Triton kernels of the gated linear unit (gate, its gradient, copies): configurations, arguments and launch.

The kernels are in `_triton_kernel.py`. A repeated call is launched by its bound arguments, see `_start`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import triton
from torch import Tensor

from ..._shared.gpu import processors_of
from ..._shared.memo import Memo
from ..._shared.triton_launch import launch, launch_bound, launches_directly
from ._gate_config import GateConfig, gate_space
from ._problem import stride_unit
from ._triton_kernel import copy_kernel, gate_gradient_kernel, gate_kernel

#: Configuration of copies: 16 elements per thread in flight.
COPY = GateConfig(8, 8, 512, 8)

Called = tuple[int, dict[str, Any]]  # a grid's size and all arguments of its kernel, the tensors first


@lru_cache(4096)
def choose_gate(rows: int, hidden: int, processors: int, *, sums: bool) -> GateConfig:
    """Configuration of the elementwise kernel: few rows per program, which the hardware balances; with `sums` more, so that
    few partial sums are left to reduce, but enough programs for every SM."""
    block_f = min(128, max(16, triton.next_power_of_2(hidden)))
    block_m = 1024 // block_f
    per_program = 64 if sums else 16
    while per_program > block_m and triton.cdiv(rows, per_program) * triton.cdiv(hidden, block_f) < 8 * processors:
        per_program //= 2
    return GateConfig(max(per_program, block_m), block_m, block_f)


def gate_configurations(rows: int, hidden: int, processors: int, *, sums: bool) -> list[GateConfig]:
    """Search space of `fusewise tune` for the elementwise kernel, the heuristic's choice first."""
    chosen = choose_gate(rows, hidden, processors, sums=sums)
    columns = [f for f in (128, 256, 512) if f <= max(128, triton.next_power_of_2(hidden))]
    return gate_space(chosen, columns)


def gate_arguments(
    dy: Tensor, preact: tuple[Tensor, Tensor], dpreact: tuple[Tensor, Tensor], config: GateConfig, activation: str,
    dbias: Tensor | None,
) -> Called:  # fmt: skip
    """Grid size and all arguments of `gate_gradient_kernel`."""
    rows, hidden = dy.shape
    step = stride_unit(dy, *preact, *dpreact)
    return triton.cdiv(rows, config.rows) * triton.cdiv(hidden, config.block_f), {
        "u_ptr": preact[0], "g_ptr": preact[1], "dy_ptr": dy, "du_ptr": dpreact[0], "dg_ptr": dpreact[1],
        "dbias_ptr": dy if dbias is None else dbias, "M": rows, "F": hidden // step,
        "stride_preact": preact[0].stride(0) // step, "stride_dy": dy.stride(0) // step,
        "stride_dpreact": dpreact[0].stride(0) // step, "ACTIVATION": activation, "BIAS_GRAD": dbias is not None,
        "ROWS": config.rows, "BLOCK_M": config.block_m, "BLOCK_F": config.block_f, "UNIT": step,
    }  # fmt: skip


# Bound launches: a compiled kernel with its grid, and the arguments after its tensors, by everything that these depend on.
_PLANS: Memo[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = Memo(4096)


def _start(
    kernel: Any, tensors: tuple[Tensor, ...], config: GateConfig, about: tuple[Any, ...], called: Callable[[], Called]
) -> None:
    """Launch a kernel whose arguments are `tensors` and others; `called` returns all, and `about` is what the others depend on
    besides. Triton's launcher specializes arguments on every call; to cut that host overhead, a repeated call finds them
    bound and only passes addresses and the stream."""
    device = tensors[0].get_device()
    addresses = [x.data_ptr() for x in tensors]
    # Bound launches assume addresses aligned to 16 bytes; the rare others go through Triton's dispatcher.
    direct = launches_directly() and not any(address & 15 for address in addresses)
    key = (kernel, device, config, *about, *[(x.dtype, x.shape, x.stride()) for x in tensors])
    plan = _PLANS.get(key) if direct else None
    if plan is not None:
        run, rest = plan
        return launch_bound(run, device, *addresses, *rest)
    grid, arguments = called()
    compiled = launch(kernel, grid, arguments, device, num_warps=config.num_warps)
    if direct and compiled is not None:
        _PLANS[key] = compiled[(grid, 1, 1)], tuple(arguments.values())[len(tensors) :]


def gate(u: Tensor, g: Tensor, y: Tensor, activation: str) -> None:
    """The gate on its own, and its gradient; see `_gate.py`."""
    rows, hidden = u.shape
    config = choose_gate(rows, hidden, processors_of(u.get_device()), sums=False)
    called = partial(forward_gate_arguments, u, g, y, config, activation)
    _start(gate_kernel, (u, g, y), config, (activation,), called)


def forward_gate_arguments(u: Tensor, g: Tensor, y: Tensor, config: GateConfig, activation: str) -> Called:
    """Grid size and all arguments of `gate_kernel`."""
    rows, hidden = u.shape
    step = stride_unit(u, g, y)
    return triton.cdiv(rows, config.block_m) * triton.cdiv(hidden, config.block_f), {
        "u_ptr": u, "g_ptr": g, "y_ptr": y, "M": rows, "F": hidden // step, "stride_u": u.stride(0) // step,
        "stride_y": y.stride(0) // step, "ACTIVATION": activation, "BLOCK_M": config.block_m, "BLOCK_F": config.block_f,
        "UNIT": step,
    }  # fmt: skip


def gate_gradient_into(dy: Tensor, u: Tensor, g: Tensor, du: Tensor, dg: Tensor, activation: str) -> None:
    rows, hidden = u.shape
    config = choose_gate(rows, hidden, processors_of(u.get_device()), sums=False)
    start_gradient(dy, (u, g), (du, dg), config, activation, None)


def start_gradient(
    dy: Tensor, preact: tuple[Tensor, Tensor], dpreact: tuple[Tensor, Tensor], config: GateConfig, activation: str,
    dbias: Tensor | None,
) -> None:  # fmt: skip
    """Launch the kernel, with partial sums of du and dg per `config.rows` rows in dbias if it is given."""
    tensors = (*preact, dy, *dpreact, dy if dbias is None else dbias)
    called = partial(gate_arguments, dy, preact, dpreact, config, activation, dbias)
    _start(gate_gradient_kernel, tensors, config, (activation, dbias is None), called)


def copy_arguments(x: Tensor, to: Tensor) -> Called:
    """Grid size and all arguments of `copy_kernel`."""
    (rows, columns), (to_rows, to_columns) = x.shape, to.shape
    step = stride_unit(x, to)
    return triton.cdiv(to_rows, COPY.block_m) * triton.cdiv(to_columns, COPY.block_f), {
        "from_ptr": x, "to_ptr": to, "rows": rows, "columns": columns // step, "to_rows": to_rows,
        "to_columns": to_columns // step, "stride": x.stride(0) // step, "to_stride": to.stride(0) // step,
        "BLOCK_M": COPY.block_m, "BLOCK_C": COPY.block_f, "UNIT": step,
    }  # fmt: skip


def copy_into(x: Tensor, to: Tensor) -> None:
    """As in `reference.py`."""
    _start(copy_kernel, (x, to), COPY, (), partial(copy_arguments, x, to))
