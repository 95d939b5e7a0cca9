"""The gated MLP of projections in modules: fused if they are plain nn.Linear modules, otherwise called as modules.

A quantized, adapted, sharded or parametrized projection, or one with hooks or its own forward, is more than its weight:
it is called, and only the gate is fused. So a model can be modified after construction (PEFT, bitsandbytes, accelerate,
tensor parallelism) and still computes what its modules define.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .._common import unit_stride
from ._gate import gate as gate_of_both
from ._gate import stacked_gate
from ._problem import Activation, Save
from .api import gated_linear, gated_mlp

_FORWARD = nn.Linear.forward


def is_plain(*projections: nn.Module) -> bool:
    """Whether calling each of them is equivalent to `F.linear` with its weight and bias. Some programs that adapt models
    replace the forward of the class."""
    return nn.Linear.forward is _FORWARD and all(
        type(p) is nn.Linear and is_untouched(p) and _is_memory(p.weight) for p in projections
    )


def _is_memory(weight: Tensor) -> bool:
    """Whether the weight is a plain tensor or a DTensor of such, not a quantized or sparse subclass that overrides
    `F.linear` (as in torchao or torch.sparse)."""
    kind = type(weight)
    return weight.layout == torch.strided and (
        not hasattr(kind, "__tensor_flatten__") or kind.__module__.startswith("torch.distributed.tensor")
    )


def is_untouched(module: nn.Module) -> bool:
    """Whether calling the module runs its class's forward only: no hooks, also no global ones, and no patched forward."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and not _has_any_global_hook() and "forward" not in vars(module)


def _parameters(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, copied if a parametrization or load_state_dict(assign=True) left them without contiguous rows."""
    return unit_stride(linear.weight), None if linear.bias is None else unit_stride(linear.bias)


def mlp(
    x: Tensor, gate: Any, up: Any, down: Any, *, activation: Activation, save: Save = "preact",
    impl: str = "auto",
) -> Tensor:  # fmt: skip
    """down(up(x) · act(gate(x))) of three modules, x (..., D); activation, save and impl as in `gated_mlp`."""
    if is_plain(gate, up) and (gate.bias is None) == (up.bias is None):
        (w_gate, b_gate), (w_up, b_up) = _parameters(gate), _parameters(up)
        if is_plain(down):
            w_down, b_down = _parameters(down)
            return gated_mlp(
                x,
                w_gate,
                w_up,
                w_down,
                b_gate=b_gate,
                b_up=b_up,
                b_down=b_down,
                activation=activation,
                save=save,
                impl=impl,
            )
        y = gated_linear(x, w_up, b_up, w_gate=w_gate, b_gate=b_gate, activation=activation, save=save, impl=impl)
    else:
        gated, value = gate(x), up(x)  # in this order, as in eager code: adapters may draw random numbers
        to = torch.promote_types(value.dtype, gated.dtype)  # a called projection may return another, as in eager code
        y = gate_of_both(value.to(to), gated.to(to), activation, impl=impl)
    z: Tensor = down(y)
    return z


def stacked_mlp(
    x: Tensor, both: Any, down: Any, *, activation: Activation, gate_first: bool, save: Save = "preact",
    impl: str = "auto",
) -> Tensor:  # fmt: skip
    """The same with one projection, `both`, for value and gate: (..., 2F), the gate first if `gate_first`."""
    if is_plain(both, down):
        (w_gate, b_gate), (w_down, b_down) = _parameters(both), _parameters(down)
        return gated_mlp(
            x, w_gate, None, w_down, b_gate=b_gate, b_down=b_down, gate_first=gate_first, activation=activation, save=save,
            impl=impl,
        )  # fmt: skip
    z: Tensor = down(stacked(x, both, activation=activation, gate_first=gate_first, save=save, impl=impl))
    return z


def stacked(
    x: Tensor, both: Any, *, activation: Activation, gate_first: bool, save: Save = "preact", impl: str = "auto"
) -> Tensor:
    """value · act(gate), (..., F), of the two halves of the output of one projection, `both`, for x (..., D)."""
    if is_plain(both):
        weight, bias = _parameters(both)
        return gated_linear(x, weight, bias, activation=activation, gate_first=gate_first, save=save, impl=impl)
    return stacked_gate(both(x), activation, gate_first=gate_first, impl=impl)
