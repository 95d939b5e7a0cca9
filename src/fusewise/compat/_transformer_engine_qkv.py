"""TransformerEngine's rotary embedding of a packed qkv; exported by `compat.transformer_engine`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops._common import fail, records_gradients, restored, save_tensors, shown, transforms_active, wants_formula
from ..ops.rope import _op, rope
from ..ops.rope._validate import INTS
from ..ops.rope._validate import check_tensor as check_operand
from ._check import WRONG, explain, shape_of, whole
from ._shared import pairing
from ._transformer_engine_rope import angle_table, context_parallel_of


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
    context_parallel = context_parallel_of(op, cp_size, cp_rank)
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
    tables = [angle_table(op, "q_freqs", q_freqs)]
    if k_freqs is not q_freqs:
        tables.append(angle_table(op, "k_freqs", k_freqs))
    call = _folded_positions(qkv, tensor_format, start_positions, context_parallel)
    call["pairing"] = pairing(op, "interleaved", interleaved)
    recorded = records_gradients(qkv)
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


def _widths(op: str, widths: Any) -> tuple[int, ...]:
    try:
        found = tuple(widths)
        if type(sum(found)) is int:  # then all elements are ints
            return found
        return tuple([whole(op, "qkv_split_arg_list", width) for width in found])
    except WRONG:
        contract, fix = "be three ints", "pass the widths of one group"
        fail(op, "qkv_split_arg_list", contract, shown(widths), fix, TypeError)


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
    *outer, groups, _ = qkv.shape  # no -1: torch cannot infer a size where there are no elements
    return q.reshape(*outer, groups * q.shape[2], q.shape[3]), k.reshape(*outer, groups, k.shape[3])


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
        save_tensors(ctx, (*tables, *(call[name] for name in names)))
        ctx.rest = widths, tensor_format, names, {name: x for name, x in call.items() if name not in names}
        ctx.like = qkv.shape, qkv.dtype, qkv.device
        ctx.set_materialize_grads(False)
        # Not views: autograd forbids in-place changes of views returned by a custom function.
        return *(torch.ops.aten._unsafe_view(x, x.shape) for x in _unfold(q, k, qkv)), v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        widths, tensor_format, names, rest = ctx.rest
        saved = restored("rope", ctx)  # once: a checkpoint allows no second unpacking
        count = len(saved) - len(names)
        tables, call = tuple(saved[:count]), dict(zip(names, saved[count:], strict=True))
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
            each = zip((*_rotate(dq, dk, tables, call), dv), widths, strict=True)
            return torch.cat([d.reshape(*shape[:3], width) for d, width in each], -1), *(None,) * (3 + count)
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
