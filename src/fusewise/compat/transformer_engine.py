"""Drop-in replacements for `transformer_engine.pytorch.attention.rope` and the gates of `transformer_engine_torch` and
`transformer_engine.pytorch.ops`.

    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb      # before
    from transformer_engine.pytorch.ops import GEGLU
    import transformer_engine_torch as tex
    from fusewise.compat.transformer_engine import GEGLU, apply_rotary_pos_emb      # after
    from fusewise.compat import transformer_engine as tex

`freqs` are angles in radians (R, 1, 1, rotary_dim), as `RotaryPositionEmbedding` returns them: `cat(f, f)`, or
`repeat_interleave(f, 2)` if interleaved; row r is position r. Shape legend: B batch, T tokens, H heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops._common import check_count, fail, shown
from ..ops.gated_linear._gate import gate, stacked_gate, stacked_gradient
from ..ops.gated_linear._problem import Activation
from ..ops.gated_linear._validate import check_features
from ..ops.gated_linear.reference import autocast_enabled
from ._check import WRONG, flag, shape_of
from ._transformer_engine_qkv import FusedQKVRoPEFunc as FusedQKVRoPEFunc
from ._transformer_engine_qkv import apply_fused_qkv_rotary_pos_emb as apply_fused_qkv_rotary_pos_emb
from ._transformer_engine_rope import FusedRoPEFunc as FusedRoPEFunc
from ._transformer_engine_rope import RotaryPositionEmbedding as RotaryPositionEmbedding
from ._transformer_engine_rope import apply_rotary_pos_emb as apply_rotary_pos_emb


def _activated(op: str, input: Tensor, quantizer: None, activation: Activation) -> Tensor:
    _check_quantizer(op, quantizer)
    return stacked_gate(input, activation, gate_first=True, op=op, name="input")


def _gradient(op: str, grad: Tensor, fwd_input: Tensor, quantizer: None, activation: Activation) -> Tensor:
    _check_quantizer(op, quantizer)
    return stacked_gradient(grad, fwd_input, activation, gate_first=True, op=op, names=("grad", "fwd_input"))


def _check_quantizer(op: str, quantizer: None) -> None:
    if quantizer is not None:
        fail(op, "quantizer", "be None: the result is not quantised here", shown(quantizer), "quantise the result")


def glu(input: Tensor, quantizer: None) -> Tensor:
    """sigmoid(g) · u with (g, u) the halves of input (..., 2F)."""
    return _activated("glu", input, quantizer, "sigmoid")


def geglu(input: Tensor, quantizer: None) -> Tensor:
    """gelu(g) · u with (g, u) the halves of input (..., 2F) and tanh GELU."""
    return _activated("geglu", input, quantizer, "gelu_tanh")


def reglu(input: Tensor, quantizer: None) -> Tensor:
    """relu(g) · u with (g, u) the halves of input (..., 2F)."""
    return _activated("reglu", input, quantizer, "relu")


def swiglu(input: Tensor, quantizer: None) -> Tensor:
    """silu(g) · u with (g, u) the halves of input (..., 2F)."""
    return _activated("swiglu", input, quantizer, "silu")


def dglu(grad: Tensor, fwd_input: Tensor, quantizer: None) -> Tensor:
    """Gradient (..., 2F) of `glu` given grad (..., F)."""
    return _gradient("dglu", grad, fwd_input, quantizer, "sigmoid")


def dgeglu(grad: Tensor, fwd_input: Tensor, quantizer: None) -> Tensor:
    """Gradient (..., 2F) of `geglu` given grad (..., F)."""
    return _gradient("dgeglu", grad, fwd_input, quantizer, "gelu_tanh")


def dreglu(grad: Tensor, fwd_input: Tensor, quantizer: None) -> Tensor:
    """Gradient (..., 2F) of `reglu` given grad (..., F)."""
    return _gradient("dreglu", grad, fwd_input, quantizer, "relu")


def dswiglu(grad: Tensor, fwd_input: Tensor, quantizer: None) -> Tensor:
    """Gradient (..., 2F) of `swiglu` given grad (..., F)."""
    return _gradient("dswiglu", grad, fwd_input, quantizer, "silu")


class _GateModule(nn.Module):
    """Gate over the last dimension, first half activated; under autocast in the autocast dtype, as in TransformerEngine.

    Args:
        cache_quantized_input: ignored; the input is saved for backward unquantized, so gradients are not rounded to FP8.
    """

    activation: Activation

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = flag(type(self).__name__, "cache_quantized_input", cache_quantized_input)

    def forward(self, input: Tensor) -> Tensor:
        op = type(self).__name__
        return stacked_gate(_autocast(op, input), self.activation, gate_first=True, op=op, name="input")


def _autocast(op: str, x: Tensor) -> Tensor:
    try:
        return x.to(torch.get_autocast_dtype(x.device.type)) if autocast_enabled(x) else x
    except WRONG:
        check_features(op, "input", x)
        raise


class GLU(_GateModule):
    """`glu`."""

    activation = "sigmoid"


class GEGLU(_GateModule):
    """`geglu`."""

    activation = "gelu_tanh"


class ReGLU(_GateModule):
    """`reglu`."""

    activation = "relu"


class SwiGLU(_GateModule):
    """`swiglu`; with glu_interleave_size n, blocks of n gate and n value features alternate in the last dimension."""

    activation = "silu"

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        if glu_interleave_size is not None:
            glu_interleave_size = check_count("SwiGLU", "glu_interleave_size", glu_interleave_size)
        self.glu_interleave_size = glu_interleave_size

    def forward(self, input: Tensor) -> Tensor:
        if self.glu_interleave_size is None:
            return super().forward(input)
        shape = shape_of("SwiGLU", "input", input, 1)
        if shape[-1] % (2 * self.glu_interleave_size):
            blocks_of = f"be whole blocks of 2 · glu_interleave_size = {2 * self.glu_interleave_size} features"
            fail("SwiGLU", "input", blocks_of, tuple(shape), "check glu_interleave_size")
        try:
            blocks = _autocast("SwiGLU", input).unflatten(-1, (-1, 2, self.glu_interleave_size))
        except WRONG:
            check_features("SwiGLU", "input", input)
            raise
        value, gated = blocks[..., 1, :], blocks[..., 0, :]
        return gate(value, gated, self.activation, op="SwiGLU", names=("input", "input")).flatten(-2)
