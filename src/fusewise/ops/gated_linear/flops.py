"""FLOP formulas of the gated linear unit for PyTorch's FlopCounterMode.

    from fusewise.ops.gated_linear.flops import register_flop_formulas
    register_flop_formulas()
    with torch.utils.flop_counter.FlopCounterMode() as counter: ...

As for PyTorch's own operators, only products count: 4·M·D·F per forward of x (M, D) to y (M, F), the same again for a
recomputing backward, and 2·M·O·F for the gradient through a down projection to O features. The products for dx and dW
are PyTorch's own and counted as such, including `addmm_`, which PyTorch omits; a gate is not counted.

Registration is explicit since the counter's module imports Triton, which importing fusewise does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _op

Shape = Sequence[int]


def register_flop_formulas() -> None:
    """Register the operators with `torch.utils.flop_counter`, for counters created from now on. Idempotent."""
    from torch.utils import flop_counter

    register: Any = flop_counter.register_flop_formula  # its type in the stubs accepts no function
    for operator, formula in _FORMULAS.items():
        packet = operator._overloadpacket
        if packet not in flop_counter.flop_registry:
            register(packet)(formula)
    aten = torch.ops.aten
    if aten.addmm_ not in flop_counter.flop_registry:
        flop_counter.flop_registry[aten.addmm_] = flop_counter.flop_registry[aten.addmm]


def _forward(x: Shape, *_: Any, out_shape: Any = None) -> int:
    y = out_shape[0] if isinstance(out_shape[0], (tuple, list, torch.Size)) else out_shape
    return 4 * x[0] * x[1] * int(y[1])


def _recompute(dy: Shape, x: Shape, *_: Any, out_shape: Any = None) -> int:
    return 4 * x[0] * x[1] * dy[1]


def _down(dz: Shape, w_down: Shape, *_: Any, out_shape: Any = None) -> int:
    return 2 * dz[0] * dz[1] * w_down[1]


_FORMULAS = {
    _op.op_gated_linear: _forward,
    _op.op_gated_linear_preact: _forward,
    _op.op_gated_linear_preact_into: _forward,
    _op.op_recompute_grad: _recompute,
    _op.op_recompute_grad_into: _recompute,
    _op.op_down_grad: _down,
    _op.op_down_grad_: _down,
}
