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

from typing import Any

import torch
from torch import Tensor, nn

from ..ops._common import check_count, check_one_of, fail, jit_traces, shown, transforms_active, wants_formula
from ..ops.gated_linear._gate import gate, stacked_gate, stacked_gradient
from ..ops.gated_linear._problem import Activation
from ..ops.gated_linear._validate import check_features
from ..ops.gated_linear.reference import autocast_enabled
from ..ops.rope import _op, rope
from ..ops.rope._validate import DEFAULTS, INTS, validated
from ..ops.rope._validate import check_tensor as check_operand
from ._check import WRONG, explain, flag, number, shape_of, whole
from ._shared import pairing, unit_stride


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate the first rotary_dim features of t; the result and its gradient are contiguous for any strides of t.

    Args:
        t: (T, B, H, D) for sbhd, (B, T, H, D) for bshd, (tokens, H, D) for thd.
        freqs: (R, 1, 1, rotary_dim), or (R, B, 1, rotary_dim) for per-sequence angles.
        start_positions: (B,), the position of each sequence's first token.
        interleaved: pairs (2i, 2i + 1), GPT-J style; else (i, i + rotary_dim / 2), NeoX style.
        fused: ignored; always one launch in float32 arithmetic.
        cu_seqlens: (B + 1,), used only for thd: boundaries of the whole sequences, also with cp_size > 1.
        cp_size, cp_rank: load-balanced context parallelism; rank r holds chunks r and 2 cp_size − 1 − r.
    """
    op = "apply_rotary_pos_emb"
    check_one_of(op, "tensor_format", tensor_format, ("sbhd", "bshd", "thd"))
    if tensor_format == "thd":
        if cu_seqlens is None:
            fail(op, "cu_seqlens", "be given for thd", None, "pass the bounds of the sequences")
    else:
        cu_seqlens = None
    try:
        contiguous = t.is_contiguous()
    except WRONG:
        explain(op, "t", t)
        raise
    angles = _angles(op, "freqs", freqs)
    context_parallel = _context_parallel(op, cp_size, cp_rank)
    if isinstance(start_positions, Tensor) and start_positions.layout == torch.strided:
        start_positions = start_positions.contiguous()
    elif cu_seqlens is None and t.dim() == 4:
        positions = t.shape[1 if tensor_format == "bshd" else 0] * (1 if context_parallel is None else cp_size)
        if positions > angles.shape[-2]:
            contract = f"have a row for each of {positions} positions"
            fail(op, "freqs", contract, f"{angles.shape[-2]} rows", "make them for longer sequences")
    call = {
        "angles": angles,
        "offset": 0 if start_positions is None else start_positions,
        "cu_seqlens": cu_seqlens,
        "context_parallel": context_parallel,
        "layout": tensor_format,
        "pairing": pairing(op, "interleaved", interleaved),
        "rotary_dim": angles.shape[-1],
    }
    if contiguous or jit_traces():  # a jit trace cannot record the strides passed to the operator
        rotated: Tensor = rope(t.contiguous(), **call)
        return rotated
    # `rope` keeps the stride order of its input, so call the operator with contiguous output strides instead.
    t = unit_stride(t, "t")
    arguments = validated("rope", t, None, tuple({**DEFAULTS, **call}.values()))
    rotated = _op.rotate(t, None, arguments, (_contiguous_strides(t), []))
    return rotated


class FusedRoPEFunc:
    """For callers of `FusedRoPEFunc.apply`: `apply_rotary_pos_emb` with another argument order."""

    @staticmethod
    def apply(
        t: Tensor, freqs: Tensor, start_positions: Tensor | None = None, tensor_format: str = "sbhd",
        interleaved: bool = False, cu_seqlens: Tensor | None = None, cp_size: int = 1, cp_rank: int = 0,
    ) -> Tensor:  # fmt: skip
        return apply_rotary_pos_emb(
            t, freqs, tensor_format, start_positions, interleaved, True, cu_seqlens, cp_size, cp_rank
        )


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: list[int],
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed qkv (T, B, G, W) or (B, T, G, W) and rotate q and k.

    One launch if q_freqs is k_freqs, else one each. Extra small kernels compute the (B · T,) positions for bshd with B > 1,
    and the B · G offsets for start_positions. Backward allocates one gradient: the same launches, and a copy for v.

    Args:
        qkv: contiguous; each of the G groups has w_q features of its q heads, w_k of its k head and w_v of its v head.
        qkv_split_arg_list: [w_q, w_k, w_v].
        cu_seqlens: ignored, as in TransformerEngine, which uses it only for thd.

    Returns:
        q (…, G · w_q / w_k, w_k) and k (…, G, w_k), contiguous, and v, a view of qkv (TransformerEngine: a copy).

    Raises:
        TypeError, ValueError: also for thd, and for start_positions with cp_size > 1, as in TransformerEngine.
    """
    op = "apply_fused_qkv_rotary_pos_emb"
    if not isinstance(tensor_format, str) or tensor_format not in ("sbhd", "bshd"):
        fail(op, "tensor_format", "be sbhd or bshd", shown(tensor_format), "use apply_rotary_pos_emb for thd")
    context_parallel = _context_parallel(op, cp_size, cp_rank)
    shape = shape_of(op, "qkv", qkv)
    if start_positions is not None:
        check_operand(op, "start_positions", start_positions, INTS, qkv.device)
        if context_parallel is not None:
            fix = "use apply_rotary_pos_emb"
            fail(op, "start_positions", "be None with cp_size > 1", tuple(start_positions.shape), fix)
    widths = _widths(op, qkv_split_arg_list)
    right = len(widths) == 3 and len(shape) == 4 and sum(widths) == shape[-1] and min(widths) >= 0 < widths[1]
    if not right or widths[0] % widths[1]:
        got, fix = f"{list(widths)} for shape {tuple(shape)}", "pass the widths of one group"
        contract = "be [w_q, w_k, w_v] that sum to the last dimension of a 4-D qkv, w_q a multiple of w_k"
        fail(op, "qkv_split_arg_list", contract, got, fix)
    batch = shape[1 if tensor_format == "sbhd" else 0]
    if start_positions is not None and tuple(start_positions.shape) != (batch,):
        fix = "pass the first position of every sequence"
        fail(op, "start_positions", f"have shape ({batch},), one a sequence", tuple(start_positions.shape), fix)
    try:
        contiguous = qkv.is_contiguous()
    except WRONG:
        explain(op, "qkv", qkv)
        raise
    if not contiguous:
        fail(op, "qkv", "be contiguous", f"strides {qkv.stride()}", "call qkv.contiguous()")
    tables = [_angles(op, "q_freqs", q_freqs)]
    if k_freqs is not q_freqs:
        tables.append(_angles(op, "k_freqs", k_freqs))
    call = _folded_positions(qkv, tensor_format, start_positions, context_parallel)
    call["pairing"] = pairing(op, "interleaved", interleaved)
    recorded = qkv.requires_grad and torch.is_grad_enabled()
    if recorded and not torch.compiler.is_compiling() and not transforms_active():
        split: tuple[Tensor, Tensor, Tensor] = _split_rotate(qkv, widths, tensor_format, call, *tables)
        return split
    q, k, v = _fold(qkv, widths, tensor_format)
    q, k = _rotate(q, k, tuple(tables), call)
    return *_unfold(q, k, qkv), v


class FusedQKVRoPEFunc:
    """For callers of `FusedQKVRoPEFunc.apply`: `apply_fused_qkv_rotary_pos_emb` with another argument order."""

    @staticmethod
    def apply(
        qkv: Tensor, q_freqs: Tensor, k_freqs: Tensor, qkv_split_arg_list: list[int], start_positions: Tensor | None = None,
        tensor_format: str = "sbhd", interleaved: bool = False, cp_size: int = 1, cp_rank: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        angles, parallel = (q_freqs, k_freqs, qkv_split_arg_list), (None, cp_size, cp_rank)
        return apply_fused_qkv_rotary_pos_emb(qkv, *angles, tensor_format, start_positions, interleaved, *parallel)


def _angles(op: str, name: str, freqs: Tensor) -> Tensor:
    """View (R, 1, 1, W) as a table (R, W), and (R, B, 1, W) as (B, R, W)."""
    shape = shape_of(op, name, freqs)
    if len(shape) != 4 or shape[2] != 1:
        fix = "pass what RotaryPositionEmbedding returns"
        fail(op, name, "have shape (R, 1, 1, rotary_dim)", tuple(shape), fix)
    try:
        return freqs.flatten(1) if shape[1] == 1 else freqs.squeeze(2).transpose(0, 1)
    except WRONG:
        explain(op, name, freqs)
        raise


def _context_parallel(op: str, cp_size: int, cp_rank: int) -> tuple[int, int] | None:
    """The argument `context_parallel` of `rope`; cp_rank is ignored if cp_size is 1, as in TransformerEngine."""
    size = whole(op, "cp_size", cp_size, 1)
    return None if size == 1 else (whole(op, "cp_rank", cp_rank, 0, size - 1), size)


def _widths(op: str, widths: Any) -> tuple[int, ...]:
    try:
        found = tuple(widths)
        if type(sum(found)) is int:  # then all elements are ints
            return found
        return tuple([whole(op, "qkv_split_arg_list", width) for width in found])
    except WRONG:
        contract, fix = "be three ints", "pass the widths of one group"
        fail(op, "qkv_split_arg_list", contract, shown(widths), fix, TypeError)


def _contiguous_strides(x: Tensor) -> list[int]:
    strides = [1]
    for size in reversed(x.shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return strides[::-1]


# Packed qkv: the q heads of consecutive groups are separated by k and v heads, so batch, token, group and head need one
# stride each, one more than `rope` supports. As qkv is contiguous, (T, B, G) folds into T tokens and B · G batch entries,
# (B, T, G) into B · T tokens and G batch entries; both are layout sbhd with the q heads of a group as heads.


def _fold(qkv: Tensor, widths: tuple[int, ...], tensor_format: str) -> tuple[Tensor, Tensor, Tensor]:
    """View qkv as q (N, M, q heads per group, w_k), k (N, M, 1, w_k) and v, with (N, M) = (T, B · G) or (B · T, G)."""
    w_q, w_k, w_v = widths
    folded = qkv.flatten(1, 2) if tensor_format == "sbhd" else qkv.flatten(0, 1)
    q = folded.narrow(-1, 0, w_q).view(*folded.shape[:2], w_q // w_k, w_k)
    return q, folded.narrow(-1, w_q, w_k).unsqueeze(-2), qkv.narrow(-1, w_q + w_k, w_v)


def _unfold(q: Tensor, k: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `_fold` for contiguous q and k."""
    outer = qkv.shape[:2]
    return q.reshape(*outer, -1, q.shape[-1]), k.reshape(*outer, -1, k.shape[-1])


def _folded_positions(
    qkv: Tensor, tensor_format: str, start: Tensor | None, context_parallel: tuple[int, int] | None
) -> dict[str, Any]:
    """The arguments of `rope` for the positions of the folded tokens."""
    if tensor_format == "sbhd" or qkv.shape[0] == 1:
        offset = 0 if start is None else start.repeat_interleave(qkv.shape[2])
        return {"layout": "sbhd", "offset": offset, "context_parallel": context_parallel}
    batch, tokens = qkv.shape[:2]
    positions = torch.arange(tokens, device=qkv.device, dtype=torch.int32)
    if context_parallel is not None:
        if tokens % 2:
            contract = "cut every rank's tokens into two equal chunks"
            fail("apply_fused_qkv_rotary_pos_emb", "cp_size", contract, f"{tokens} tokens", "pad to an even number")
        (cp_rank, cp_size), half = context_parallel, tokens // 2
        first, second = cp_rank * half, (2 * cp_size - 2 - cp_rank) * half
        positions = positions + torch.where(positions < half, first, second).to(torch.int32)
    if start is not None:
        return {"layout": "sbhd", "positions": (positions + start[:, None]).flatten()}
    return {"layout": "sbhd", "positions": positions.repeat(batch)}


class _SplitRotate(torch.autograd.Function):
    """Split and rotate; backward writes the gradients of q, k and v directly into one gradient of qkv."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, widths: Any, tensor_format: str, call: Any, *tables: Tensor) -> Any:
        q, k, v = _fold(qkv, widths, tensor_format)
        q, k = _rotate(q, k, tables, call)
        names = [name for name, value in call.items() if isinstance(value, Tensor)]
        ctx.save_for_backward(*tables, *(call[name] for name in names))
        ctx.rest = widths, tensor_format, names, {name: x for name, x in call.items() if name not in names}
        ctx.like = qkv.shape, qkv.dtype, qkv.device
        ctx.set_materialize_grads(False)
        # Not views: autograd forbids in-place changes of views returned by a custom function.
        return *(torch.ops.aten._unsafe_view(x, x.shape) for x in _unfold(q, k, qkv)), v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        widths, tensor_format, names, rest = ctx.rest
        count = len(ctx.saved_tensors) - len(names)
        tables, call = ctx.saved_tensors[:count], dict(zip(names, ctx.saved_tensors[count:], strict=True))
        shape, dtype, device = ctx.like
        dqkv = torch.empty(shape, dtype=dtype, device=device)
        parts = _fold(dqkv, widths, tensor_format)
        dq, dk, dv = (
            part.new_zeros(part.shape) if d is None else _op.readable(d).contiguous()
            for d, part in zip(grads, parts, strict=True)
        )
        dq, dk = dq.view(parts[0].shape), dk.view(parts[1].shape)
        call = {**call, **rest, "inverse": True}
        # Double backward or vmap: use differentiable operations.
        if any(wants_formula(d) for d in grads if d is not None):
            dq, dk = (d.reshape(*shape[:3], -1) for d in _rotate(dq, dk, tables, call))
            return torch.cat((dq, dk, dv.reshape(*shape[:3], -1)), -1), *(None,) * (3 + count)
        _rotate(dq, dk, tables, call, parts[:2])
        parts[2].copy_(dv)
        return dqkv, *(None,) * (3 + count)


def _rotate(
    q: Tensor, k: Tensor, tables: tuple[Tensor, ...], call: dict[str, Any], out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate q and k, in one launch if they share one table."""
    if len(tables) == 1:
        width = tables[0].shape[-1]
        rotated: tuple[Tensor, Tensor] = rope(q, k, angles=tables[0], out=out, rotary_dim=width, **call)
        return rotated
    outs = (None, None) if out is None else out
    q, k = (
        rope(x, angles=table, out=y, rotary_dim=table.shape[-1], **call)
        for x, table, y in zip((q, k), tables, outs, strict=True)
    )
    return q, k


_split_rotate: Any = _SplitRotate.apply


class RotaryPositionEmbedding(nn.Module):
    """Angles for `apply_rotary_pos_emb`: position · rotary_base^(−2i / dim), each twice, float32 (max_seq_len, 1, 1, dim).

    inv_freq is created on the current CUDA device if there is one. With seq_len_interpolation_factor f and
    pretrained_max_position_embeddings M, positions are scaled by 1 / f, or by M / max_seq_len if max_seq_len > M · f.
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        op = "RotaryPositionEmbedding"
        number(op, "dim", dim, 0)
        if number(op, "rotary_percent", rotary_percent, 0) < 1.0:
            dim = int(dim * rotary_percent)
        number(op, "rotary_base", rotary_base)
        for name, value in (
            ("seq_len_interpolation_factor", seq_len_interpolation_factor),
            ("pretrained_max_position_embeddings", pretrained_max_position_embeddings),
        ):
            if value is not None and number(op, name, value) <= 0:
                fail(op, name, "be above 0 or None", value, "leave it out")
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base, self.interleaved = rotary_base, flag(op, "interleaved", interleaved)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
        self.register_buffer("inv_freq", 1.0 / rotary_base ** (steps / dim))
        self.inv_freq: Tensor

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles of positions offset, …, offset + max_seq_len − 1; float32 also under autocast."""
        op = "RotaryPositionEmbedding"
        if not (jit_traces() and isinstance(max_seq_len, Tensor)):  # a size, which the trace keeps
            max_seq_len = whole(op, "max_seq_len", max_seq_len, 0)
        if not isinstance(offset, Tensor):
            number(op, "offset", offset)
        elif shape := tuple(shape_of(op, "offset", offset)):
            fail(op, "offset", "be an int", f"a tensor of shape {shape}", "pass the first position")
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=self.inv_freq.dtype) + offset
        factor, trained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and trained is not None:
            positions = positions * (trained / max_seq_len if max_seq_len > trained * factor else 1 / factor)
        angles = positions[:, None] * self.inv_freq  # not a matmul: autocast would round it
        twice = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return twice[:, None, None]


def _activated(op: str, input: Tensor, quantizer: None, activation: Activation) -> Tensor:
    if quantizer is not None:
        fail(op, "quantizer", "be None: the result is not quantised here", quantizer, "quantise the result")
    return stacked_gate(input, activation, gate_first=True, op=op, name="input")


def _gradient(op: str, grad: Tensor, fwd_input: Tensor, quantizer: None, activation: Activation) -> Tensor:
    if quantizer is not None:
        fail(op, "quantizer", "be None: the result is not quantised here", quantizer, "quantise the result")
    return stacked_gradient(grad, fwd_input, activation, gate_first=True, op=op, names=("grad", "fwd_input"))


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
            check_count("SwiGLU", "glu_interleave_size", glu_interleave_size)
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
