"""The gated linear units and rotary functions of `diffusers.models`.

    from diffusers.models.activations import GEGLU                # before
    from diffusers.models.embeddings import apply_rotary_emb
    from fusewise.compat.diffusers import GEGLU, apply_rotary_emb # after

GEGLU and SwiGLU are `gated_linear` with the value first, as here; FeedForward and Flux2FeedForward are `gated_mlp` with
their projection out. The parameters and their names are those of diffusers, so that its checkpoints load. A projection
that is no longer a plain `nn.Linear` (LoRA, quantised) is called as it is, and only the gate is fused.
Shape legend: B batch, S tokens, H heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops._common import fail, shown
from ..ops.gated_linear._gate import stacked_gate
from ..ops.gated_linear._problem import Activation
from ..ops.gated_linear.projections import is_untouched, stacked, stacked_mlp
from ._check import check_tensor, flag, number, shape_of, whole
from ._shared import alike, complex_tables, fused_activation, rotate_pair


def apply_rotary_emb(
    x: Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1, sequence_dim: int = 2
) -> Tensor:
    """Rotate x (B, H, S, D), or (B, S, H, D) with sequence_dim=1; without B it is a batch of one in the result, as there.

    Args:
        freqs_cis: (cos, sin), each (S, D), every angle twice; with use_real=False complex (1 | B, S, D / 2) for x (B, S, H, D).
            What is in float64, as the tables of Lumina, is converted unless x is, too.
        use_real_unbind_dim: -1: pairs (2i, 2i + 1), angles repeated side by side; -2: pairs (i, i + D / 2), `cat(f, f)`.
    """
    op = "apply_rotary_emb"
    if not flag(op, "use_real", use_real):
        return _rotated_by_complex(op, x, freqs_cis, 3)
    if whole(op, "sequence_dim", sequence_dim) not in (1, 2):
        fail(op, "sequence_dim", "be 1 or 2", sequence_dim, "name the dimension of the tokens")
    return _rotated_by_pairs(op, x, freqs_cis, use_real_unbind_dim, "bhsd" if sequence_dim == 2 else "bshd")


def apply_rotary_emb_qwen(x: Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1) -> Tensor:
    """`apply_rotary_emb` as Qwen-Image has it: with use_real=False x (B, S, H, D) and complex freqs_cis (S, D / 2), else x
    (B, H, S, D)."""
    op = "apply_rotary_emb_qwen"
    if not flag(op, "use_real", use_real):
        return _rotated_by_complex(op, x, freqs_cis, 2)
    return _rotated_by_pairs(op, x, freqs_cis, use_real_unbind_dim, "bhsd")


def _rotated_by_pairs(op: str, x: Tensor, tables: Any, unbind_dim: int, layout: str) -> Tensor:
    if whole(op, "use_real_unbind_dim", unbind_dim) not in (-1, -2):
        fail(op, "use_real_unbind_dim", "be -1 or -2", unbind_dim, "pass that of the model")
    if not isinstance(tables, (tuple, list)) or len(tables) != 2:
        fail(op, "freqs_cis", "be (cos, sin)", type(tables).__name__, "pass both tables, or use_real=False", TypeError)
    if len(shape := shape_of(op, "x", x, 3)) == 3:
        x, shape = x[None], torch.Size((1, *shape))
    for name, table in zip(("cos", "sin"), tables, strict=True):
        check_tensor(op, name, table)
        if table.shape != (shape[2 if layout == "bhsd" else 1], shape[3]):
            wanted = f"have shape (S, D) of x, {(shape[2 if layout == 'bhsd' else 1], shape[3])}"
            fail(op, name, wanted, tuple(table.shape), "check sequence_dim, or cut the tables to the tokens")
    cos, sin = alike(op, *(table.to(x.device, _table_dtype(x, table)) for table in tables))
    pairs = "interleaved" if unbind_dim == -1 else "half"
    return rotate_pair(x, None, cos=cos, sin=sin, layout=layout, pairing=pairs, rotary_dim=shape[3])[0]


def _rotated_by_complex(op: str, x: Tensor, freqs_cis: Tensor, dims: int) -> Tensor:
    """x (B, S, H, D), whose heads are missing in freqs_cis of so many dimensions."""
    shape, freqs = shape_of(op, "x", x, 4), shape_of(op, "freqs_cis", freqs_cis)
    if len(freqs) != dims or freqs[-2:] != (shape[1], shape[3] // 2):
        wanted = f"have shape ({'1 | B, ' if dims == 3 else ''}S, D / 2) of x, {(shape[1], shape[3] // 2)}"
        fail(op, "freqs_cis", wanted, tuple(freqs), "pass that of the tokens of x")
    freqs_cis = freqs_cis.to(_table_dtype(x, freqs_cis))
    return rotate_pair(x, None, **complex_tables(freqs_cis), layout="bshd", pairing="interleaved")[0]


def _table_dtype(x: Tensor, table: Tensor) -> torch.dtype:
    """That of the table, in half the bits where it has 64 for a real number and x has not."""
    narrower = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    return table.dtype if x.dtype == torch.float64 else narrower.get(table.dtype, table.dtype)


def _linear(op: str, taken: tuple[str, int], made: tuple[str, int], bias: bool) -> nn.Linear:
    """A projection between two numbers of features, each with the name of the argument that it is from."""
    return nn.Linear(whole(op, *taken, 0), whole(op, *made, 0), bias=flag(op, "bias", bias))


def _inner_dim(op: str, dim: int, mult: float, inner_dim: int | None) -> int:
    """The width of the gate."""
    if inner_dim is None:
        return int(whole(op, "dim", dim, 0) * number(op, "mult", mult, 0))
    return whole(op, "inner_dim", inner_dim, 0)


class GEGLU(nn.Module):
    """u · gelu(g), (u, g) = proj(x), with the erf form; (..., dim_in) to (..., dim_out)."""

    def __init__(self, dim_in: int, dim_out: int, bias: bool = True) -> None:
        super().__init__()
        self.proj = _linear("GEGLU", ("dim_in", dim_in), ("dim_out", 2 * whole("GEGLU", "dim_out", dim_out)), bias)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Further arguments are without effect, as `scale` is there."""
        return stacked(hidden_states, self.proj, activation="gelu", gate_first=False)


class SwiGLU(nn.Module):
    """u · silu(g), (u, g) = proj(x); (..., dim_in) to (..., dim_out). The module `activation` may be replaced."""

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
    """The activation of a unit that is fused with what is behind it; None if it has to be called."""
    if not is_untouched(unit):
        return None
    if type(unit) is GEGLU:
        return "gelu"
    return fused_activation(unit.activation) if type(unit) is SwiGLU else None


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
        """Further arguments are without effect, as `scale` is there."""
        unit, dropout, out, *rest = self.net
        idle = isinstance(dropout, nn.Dropout) and not (dropout.training and dropout.p)
        activation = _unit(unit) if idle and is_untouched(dropout) else None
        if activation is not None:
            x = stacked_mlp(hidden_states, unit.proj, out, activation=activation, gate_first=False)
        else:
            x = out(dropout(unit(hidden_states)))
        for layer in rest:
            x = layer(x)
        return x


class Flux2SwiGLU(nn.Module):
    """silu of the first half of x (..., 2F), times the second. The module `gate_fn` may be replaced."""

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
