"""The gated linear units and rotary functions of `diffusers.models`.

    from diffusers.models.activations import GEGLU                # before
    from diffusers.models.embeddings import apply_rotary_emb
    from fusewise.compat.diffusers import GEGLU, apply_rotary_emb # after

Many model files define their own rotary function under the same name, often nested in another function. Here each
convention is one function, named after the model.

GEGLU and SwiGLU run as `gated_linear` with the value first; FeedForward and Flux2FeedForward as `gated_mlp`, which
includes the output projection. Parameters keep their names, so diffusers checkpoints load. A projection that is no
longer a plain `nn.Linear` (LoRA, quantized) is called as a module, and only the gate is fused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..ops._common import fail, shown
from ..ops.gated_linear._gate import stacked_gate
from ..ops.gated_linear._problem import Activation
from ..ops.gated_linear.projections import is_untouched, stacked, stacked_mlp
from ._check import flag, number, whole
from ._diffusers_rope import apply_partial_rotary_emb as apply_partial_rotary_emb
from ._diffusers_rope import apply_partial_rotary_emb_minimax_music3 as apply_partial_rotary_emb_minimax_music3
from ._diffusers_rope import apply_rope_hidream as apply_rope_hidream
from ._diffusers_rope import apply_rope_prx as apply_rope_prx
from ._diffusers_rope import apply_rotary_emb as apply_rotary_emb
from ._diffusers_rope import apply_rotary_emb_anyflow as apply_rotary_emb_anyflow
from ._diffusers_rope import apply_rotary_emb_batched as apply_rotary_emb_batched
from ._diffusers_rope import apply_rotary_emb_joyimage as apply_rotary_emb_joyimage
from ._diffusers_rope import apply_rotary_emb_minimax_h3 as apply_rotary_emb_minimax_h3
from ._diffusers_rope import apply_rotary_emb_qwen as apply_rotary_emb_qwen
from ._diffusers_rope import apply_rotary_emb_qwen_neuron as apply_rotary_emb_qwen_neuron
from ._diffusers_rope import apply_rotary_emb_sana_wm as apply_rotary_emb_sana_wm
from ._diffusers_rope import apply_rotary_emb_transposed as apply_rotary_emb_transposed
from ._diffusers_rope import apply_rotary_emb_wan as apply_rotary_emb_wan
from ._diffusers_rope import apply_rotary_kandinsky5 as apply_rotary_kandinsky5
from ._diffusers_rope import apply_rotary_partial as apply_rotary_partial
from ._diffusers_rope import apply_rotary_pos_emb_kolors as apply_rotary_pos_emb_kolors
from ._diffusers_rope import rope_apply as rope_apply
from ._diffusers_rows import apply_interleaved_rotary_emb as apply_interleaved_rotary_emb
from ._diffusers_rows import apply_rotary_emb_allegro as apply_rotary_emb_allegro
from ._diffusers_rows import apply_rotary_emb_ltx as apply_rotary_emb_ltx
from ._diffusers_rows import apply_rotary_emb_mochi as apply_rotary_emb_mochi
from ._diffusers_rows import apply_split_rotary_emb as apply_split_rotary_emb
from ._shared import fused_activation


def _linear(op: str, inputs: tuple[str, int], outputs: tuple[str, int], bias: bool) -> nn.Linear:
    """Make a projection; `inputs` and `outputs` are (argument name, number of features) of its input and output."""
    return nn.Linear(whole(op, *inputs, 0), whole(op, *outputs, 0), bias=flag(op, "bias", bias))


def _inner_dim(op: str, dim: int, mult: float, inner_dim: int | None) -> int:
    """The hidden width: inner_dim, or else dim · mult."""
    if inner_dim is None:
        return int(whole(op, "dim", dim, 0) * number(op, "mult", mult, 0))
    return whole(op, "inner_dim", inner_dim, 0)


class GEGLU(nn.Module):
    """u · gelu(g) with (u, g) = proj(x) and the exact (erf) GELU; (..., dim_in) to (..., dim_out)."""

    def __init__(self, dim_in: int, dim_out: int, bias: bool = True) -> None:
        super().__init__()
        self.proj = _linear("GEGLU", ("dim_in", dim_in), ("dim_out", 2 * whole("GEGLU", "dim_out", dim_out)), bias)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Further arguments are ignored, as diffusers ignores `scale`."""
        return stacked(hidden_states, self.proj, activation="gelu", gate_first=False)


class SwiGLU(nn.Module):
    """u · silu(g) with (u, g) = proj(x); (..., dim_in) to (..., dim_out). The child module `activation` may be replaced."""

    def __init__(self, dim_in: int, dim_out: int, bias: bool = True) -> None:
        super().__init__()
        self.proj = _linear("SwiGLU", ("dim_in", dim_in), ("dim_out", 2 * whole("SwiGLU", "dim_out", dim_out)), bias)
        self.activation = nn.SiLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        activation = fused_activation(self.activation)
        if activation is not None:
            return stacked(hidden_states, self.proj, activation=activation, gate_first=False)
        value, gate = self.proj(hidden_states).chunk(2, -1)
        y: Tensor = value * self.activation(gate)
        return y


def _unit(unit: nn.Module) -> Activation | None:
    """The activation to fuse into the whole MLP; None if the unit must be called as a module."""
    if not is_untouched(unit):
        return None
    if type(unit) is GEGLU:
        return "gelu"
    return fused_activation(unit.activation) if type(unit) is SwiGLU else None


class FeedForward(nn.Module):
    """`diffusers.models.attention.FeedForward` with a gated unit: activation_fn "geglu" or "swiglu"; others are rejected.

    One operation when dropout is inactive.
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
        op = "FeedForward"
        if not isinstance(activation_fn, str) or activation_fn not in ("geglu", "swiglu"):
            fail(op, "activation_fn", "be geglu or swiglu", shown(activation_fn), "use diffusers' own layer")
        if number(op, "dropout", dropout, 0) > 1:
            fail(op, "dropout", "be a probability, at most 1", shown(dropout), "pass one from 0 to 1")
        inner_dim = _inner_dim(op, dim, mult, inner_dim)
        unit = (GEGLU if activation_fn == "geglu" else SwiGLU)(dim, inner_dim, bias=bias)
        out = _linear(op, ("inner_dim", inner_dim), ("dim", dim) if dim_out is None else ("dim_out", dim_out), bias)
        self.net = nn.ModuleList([unit, nn.Dropout(dropout), out])
        if flag(op, "final_dropout", final_dropout):
            self.net.append(nn.Dropout(dropout))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Further arguments are ignored, as diffusers ignores `scale`."""
        unit, dropout, out, *rest = self.net
        idle = type(dropout) is nn.Dropout and not (dropout.training and dropout.p)
        activation = _unit(unit) if idle and is_untouched(dropout) else None
        if activation is not None:
            x = stacked_mlp(hidden_states, unit.proj, out, activation=activation, gate_first=False)
        else:
            x = out(dropout(unit(hidden_states)))
        for layer in rest:
            x = layer(x)
        return x


class Flux2SwiGLU(nn.Module):
    """silu(g) · u with (g, u) the halves of x (..., 2F). The child module `gate_fn` may be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        activation = fused_activation(self.gate_fn)
        if activation is not None:
            return stacked_gate(x, activation, gate_first=True, op="Flux2SwiGLU")
        gate, value = x.chunk(2, -1)
        y: Tensor = self.gate_fn(gate) * value
        return y


class Flux2FeedForward(nn.Module):
    """The feed-forward layer of FLUX.2 as one operation; linear_in computes (gate, value), in this order."""

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        mult: float = 3.0,
        inner_dim: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        op = "Flux2FeedForward"
        inner_dim = _inner_dim(op, dim, mult, inner_dim)
        dim_out = dim if dim_out is None else whole(op, "dim_out", dim_out, 0) or dim
        self.linear_in = _linear(op, ("dim", dim), ("inner_dim", inner_dim * 2), bias)
        self.act_fn = Flux2SwiGLU()
        self.linear_out = _linear(op, ("inner_dim", inner_dim), ("dim_out", dim_out), bias)

    def forward(self, x: Tensor) -> Tensor:
        own = type(self.act_fn) is Flux2SwiGLU and is_untouched(self.act_fn)
        activation = fused_activation(self.act_fn.gate_fn) if own else None
        if activation is not None:
            return stacked_mlp(x, self.linear_in, self.linear_out, activation=activation, gate_first=True)
        z: Tensor = self.linear_out(self.act_fn(self.linear_in(x)))
        return z


# FLUX.3 has the same two layers.
Flux3SwiGLU, Flux3FeedForward = Flux2SwiGLU, Flux2FeedForward
