"""TransformerEngine's rotary embedding of one tensor, and its angles; exported by `compat.transformer_engine`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops._common import check_one_of, fail, jit_traces
from ..ops.rope import _op, rope
from ..ops.rope._validate import DEFAULTS, validated
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
    angles = angle_table(op, "freqs", freqs)
    context_parallel = context_parallel_of(op, cp_size, cp_rank)
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


def angle_table(op: str, name: str, freqs: Tensor) -> Tensor:
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


def context_parallel_of(op: str, cp_size: int, cp_rank: int) -> tuple[int, int] | None:
    """The argument `context_parallel` of `rope`; cp_rank is ignored if cp_size is 1, as in TransformerEngine."""
    size = whole(op, "cp_size", cp_size, 1)
    return None if size == 1 else (whole(op, "cp_rank", cp_rank, 0, size - 1), size)


def _contiguous_strides(x: Tensor) -> list[int]:
    strides = [1]
    for size in reversed(x.shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return strides[::-1]


class RotaryPositionEmbedding(nn.Module):
    """Angles for `apply_rotary_pos_emb`: position · rotary_base^(−2i / dim), each twice, float32 (max_seq_len, 1, 1, dim).

    inv_freq is created on the current CUDA device if there is one; on the meta device if that is the default, until `to_empty`.
    With seq_len_interpolation_factor f and pretrained_max_position_embeddings M, positions are scaled by 1 / f, or by
    M / max_seq_len if max_seq_len > M · f. Casting the module to a 16-bit dtype leaves inv_freq in float32.
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
        self._dim = dim
        on_cuda = torch.cuda.is_available() and torch.get_default_device().type != "meta"
        device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else None
        self.register_buffer("inv_freq", self._compute_inv_freq(device))
        self.inv_freq: Tensor

    def _compute_inv_freq(self, device: torch.device | None) -> Tensor:
        steps = torch.arange(0, self._dim, 2, dtype=torch.float32, device=device)
        return 1.0 / self.rotary_base ** (steps / self._dim)

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryPositionEmbedding:
        exact = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device, rounded = self.inv_freq.device, self.inv_freq.itemsize < 4  # as would be positions
        dtype = torch.float32 if rounded else self.inv_freq.dtype
        if exact.is_meta or rounded:  # meta tensors have no data to move
            self.inv_freq = (self._compute_inv_freq(device) if exact.is_meta else exact).to(device, dtype)
        return self

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
