"""The gated linear units of `diffusers.models`.

    from diffusers.models.activations import GEGLU     # before
    from fusewise.compat.diffusers import GEGLU        # after

GEGLU and SwiGLU are `gated_linear` with the value first, as here; FeedForward and Flux2FeedForward are `gated_mlp` with
their projection out. The parameters and their names are those of diffusers, so that its checkpoints load. A projection
that is no longer a plain `nn.Linear` (LoRA, quantised) is called as it is, and only the gate is fused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..ops._common import fail
from ..ops.gated_linear._gate import stacked_gate
from ..ops.gated_linear._problem import Activation
from ..ops.gated_linear.projections import is_untouched, stacked, stacked_mlp


class GEGLU(nn.Module):
    """u · gelu(g), (u, g) = proj(x), with the erf form; (..., dim_in) to (..., dim_out)."""

    activation: Activation = "gelu"

    def __init__(self, dim_in: int, dim_out: int, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out * 2, bias=bias)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Further arguments are without effect, as `scale` is there."""
        return stacked(hidden_states, self.proj, activation=self.activation, gate_first=False)


class SwiGLU(nn.Module):
    """u · silu(g), (u, g) = proj(x); (..., dim_in) to (..., dim_out)."""

    activation: Activation = "silu"

    def __init__(self, dim_in: int, dim_out: int, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out * 2, bias=bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return stacked(hidden_states, self.proj, activation=self.activation, gate_first=False)


class FeedForward(nn.Module):
    """The feed-forward layer with a gated unit: activation_fn "geglu" or "swiglu", the others are not gated.

    Without dropout at work the whole of it is one operation.
    """

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        mult: int = 4,
        dropout: float = 0.0,
        activation_fn: str = "geglu",
        final_dropout: bool = False,
        inner_dim: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if activation_fn not in ("geglu", "swiglu"):
            fail("FeedForward", "activation_fn", "be geglu or swiglu", repr(activation_fn), "use diffusers' own layer")
        inner_dim = int(dim * mult) if inner_dim is None else inner_dim
        unit = (GEGLU if activation_fn == "geglu" else SwiGLU)(dim, inner_dim, bias=bias)
        out = nn.Linear(inner_dim, dim if dim_out is None else dim_out, bias=bias)
        self.net = nn.ModuleList([unit, nn.Dropout(dropout), out])
        if final_dropout:
            self.net.append(nn.Dropout(dropout))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Further arguments are without effect, as `scale` is there."""
        unit, dropout, out, *rest = self.net
        idle = isinstance(dropout, nn.Dropout) and not (dropout.training and dropout.p)
        if (type(unit) is GEGLU or type(unit) is SwiGLU) and idle and is_untouched(unit) and is_untouched(dropout):
            x = stacked_mlp(hidden_states, unit.proj, out, activation=unit.activation, gate_first=False)
        else:
            x = out(dropout(unit(hidden_states)))
        for layer in rest:
            x = layer(x)
        return x


class Flux2SwiGLU(nn.Module):
    """silu of the first half of x (..., 2F), times the second."""

    def forward(self, x: Tensor) -> Tensor:
        return stacked_gate(x, "silu", gate_first=True, op="Flux2SwiGLU")


class Flux2FeedForward(nn.Module):
    """The feed-forward layer of FLUX.2: linear_in makes the gate and then the value; one operation."""

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        mult: float = 3.0,
        inner_dim: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        inner_dim = int(dim * mult) if inner_dim is None else inner_dim
        self.linear_in = nn.Linear(dim, inner_dim * 2, bias=bias)
        self.act_fn = Flux2SwiGLU()
        self.linear_out = nn.Linear(inner_dim, dim_out or dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if is_untouched(self.act_fn):
            return stacked_mlp(x, self.linear_in, self.linear_out, activation="silu", gate_first=True)
        z: Tensor = self.linear_out(self.act_fn(self.linear_in(x)))
        return z
