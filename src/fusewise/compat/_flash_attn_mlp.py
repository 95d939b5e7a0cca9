"""`flash_attn.modules.mlp.GatedMlp` and the gate of `flash_attn.ops.activations`; exported by `compat.flash_attn`.

Parameters keep their names, so checkpoints load. A projection that is no longer a plain `nn.Linear` is called as a module, and
only the gate is fused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops._common import fail
from ..ops.gated_linear._gate import gate
from ..ops.gated_linear._problem import Activation
from ..ops.gated_linear.projections import stacked_mlp
from ._check import flag, whole
from ._shared import fused_activation, known_activation


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) · y, each (..., F); flash_attn.ops.activations.swiglu."""
    return gate(y, x, "silu", op="swiglu", names=("y", "x"))


class SwiGLUFunction:
    """For callers of `SwiGLUFunction.apply`."""

    apply = staticmethod(swiglu)


# The functions that callers pass to `GatedMlp`.
_ACTIVATIONS: dict[Any, Activation] = {
    functional.sigmoid: "sigmoid", torch.sigmoid: "sigmoid", functional.silu: "silu", functional.relu: "relu",
    torch.relu: "relu", functional.gelu: "gelu",
}  # fmt: skip


def _of_function(activation: Any) -> Activation | None:
    """The activation that a function computes; None if fusewise does not have it."""
    if isinstance(activation, partial):
        if activation.func is not functional.gelu or activation.args or set(activation.keywords) - {"approximate"}:
            return None
        form = activation.keywords.get("approximate", "none")
        return "gelu_tanh" if form == "tanh" else "gelu" if form == "none" else None
    return next((name for function, name in _ACTIVATIONS.items() if function is activation), None)


class GatedMlp(nn.Module):
    """fc2(u · act(g)) with (u, g) = fc1(x), as one operation; flash_attn.modules.mlp.GatedMlp.

    Args:
        hidden_features: rounded up to a multiple of multiple_of; None: 8/3 · in_features.
        activation: sigmoid, silu, relu or gelu of torch.nn.functional, `partial(gelu, approximate="tanh")`, or their modules.
        return_residual: return (y, x).
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Any = functional.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        return_residual: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = "GatedMlp"
        width = whole(op, "in_features", in_features, 0)
        hidden = int(8 * width / 3) if hidden_features is None else whole(op, "hidden_features", hidden_features, 0)
        out = width if out_features is None else whole(op, "out_features", out_features, 0)
        hidden = -(-hidden // whole(op, "multiple_of", multiple_of, 1)) * multiple_of
        if (known_activation if isinstance(activation, nn.Module) else _of_function)(activation) is None:
            contract, got = "be sigmoid, silu, relu or gelu of torch.nn.functional", type(activation).__name__
            fail(op, "activation", contract, getattr(activation, "__name__", got), "use their GatedMlp")
        self.activation = activation
        self.return_residual = flag(op, "return_residual", return_residual)
        self.fc1 = nn.Linear(width, 2 * hidden, flag(op, "bias1", bias1), device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out, flag(op, "bias2", bias2), device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        act = self.activation  # may have been replaced, or have got hooks
        fused = (fused_activation if isinstance(act, nn.Module) else _of_function)(act)
        if fused is not None:
            y = stacked_mlp(x, self.fc1, self.fc2, activation=fused, gate_first=False)
        else:
            value, gated = self.fc1(x).chunk(2, -1)
            y = self.fc2(value * act(gated))
        return (y, x) if self.return_residual else y
