"""Few rows in Gluon: the arguments of the kernel in `_gluon_stream.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ._few_rows import Config, columns, read_rows

WAY = "few rows"  # what a tuned configuration is found by, beside the kernel's name


def arguments(
    x: Tensor, value: Tensor, gate: Tensor, bias: tuple[Tensor | None, Tensor | None], y: Tensor, config: Config,
    processors: int, activation: str, block: Callable[[Tensor, tuple[int, int]], Any],
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """The grid size and all arguments of `few_rows_kernel`; `block` makes a TMA descriptor of a matrix in blocks."""
    rows, features = x.shape
    hidden = value.shape[0]
    block_w = min(128, config.width & -config.width)
    n, x_rows = columns(rows), read_rows(rows)
    block_x = x_rows & -x_rows
    return min(-(-hidden // config.width), processors), {
        "x_map": block(x, (block_x, 64)), "value_map": block(value, (block_w, 64)), "gate_map": block(gate, (block_w, 64)),
        "b_value_ptr": bias[0], "b_gate_ptr": bias[1], "y_ptr": y, "M": rows, "F": hidden, "D": features,
        "stride_y": y.stride(0), "stride_b_value": 0 if bias[0] is None else bias[0].stride(0),
        "stride_b_gate": 0 if bias[1] is None else bias[1].stride(0),
        "ACTIVATION": activation, "HAS_BIAS": bias[0] is not None, "WIDTH": config.width, "BLOCK_W": block_w,
        "HALF": config.half, "N": n, "X_ROWS": x_rows, "BLOCK_X": block_x, "CHUNKS": config.chunks, "STAGES": config.stages,
    }  # fmt: skip
