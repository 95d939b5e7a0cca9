"""Parts of a packed tensor, as q and k of qkv, rotated in place, with a gradient: what flash_attn's functions do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..ops._common import transforms_active, wants_formula
from ..ops.rope import _op, rope, rope_
from ..ops.rope._validate import DEFAULTS, validated
from ..ops.rope._written import check_written
from ._check import explain

# A part of a packed tensor along its dimension 2: a whole entry (3 of qkv, 2 of kv), or (first head, number of heads).
Part = int | tuple[int, int]
# The parts that are rotated with the tables of q and of k (None: with those of q, or not there), and what is left.
Parts = tuple[Part | None, Part | None, Part | None]
Q: Parts = (None, None, None)
KV: Parts = (0, None, 1)


def rotate_in_place(x: Tensor, parts: Parts, call: dict[str, Any], tables_k: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rotate the parts of x in place; return x, or what carries its gradient."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        explain("apply_rotary_emb", "x", x)
    recorded = x.requires_grad and torch.is_grad_enabled()
    if transforms_active() or (recorded and torch.compiler.is_compiling()):
        return _overwritten(x, parts, call, tables_k)
    if not recorded:
        _rotate_parts(x, None, parts, call, tables_k)
        return x
    covered = x
    if x._is_view():
        # Of a tensor seen through a view that covers it, as a projection is, autograd can follow the tensor itself; of
        # a part it copies the gradient of the whole. (A view of the result, as x has a history of its own to replay.) A
        # tensor without a gradient, though, leaves it to a view that asked for one later.
        base = x._base
        if base is not None and base.requires_grad and base.dtype == x.dtype and base.numel() == x.numel():
            covered = base if base.is_contiguous() and x.is_contiguous() else x
    rotated: Tensor = _rotate_parts_in_place(covered, x.shape, parts, call, tables_k)
    return rotated if covered is x else rotated.view(x.shape)


def _source(x: Tensor) -> Tensor:
    """The tensor that x is a view of, or x."""
    return x if x._base is None else x._base


def _alone(x: Tensor) -> bool:
    """Whether x is no view that was made with others at once, as by split, or without gradients: of those autograd cannot
    follow a write."""
    return not x._is_view() or torch._C._autograd._get_creation_meta(x) == torch._C._autograd.CreationMeta.DEFAULT


def _take(x: Tensor, part: Part | None) -> Tensor:
    """A view of a part; of all of x without one."""
    if part is None:
        return x
    return x.select(2, part) if isinstance(part, int) else x.narrow(2, *part)


def _groups(
    x: Tensor, parts: Parts, call: dict[str, Any], tables_k: tuple[Tensor, Tensor] | None
) -> list[tuple[tuple[Part | None, ...], dict[str, Any]]]:
    """The launches: which parts go together, with which arguments."""
    q, k, _ = parts
    if k is None:
        return [((q,), call)]
    if tables_k is not None:
        cos_k, sin_k = tables_k
        return [((q,), call), ((k,), {**call, "cos": cos_k, "sin": sin_k, "rotary_dim": 2 * cos_k.shape[1]})]
    if isinstance(q, tuple) and isinstance(k, tuple):  # q and k heads are neighbours: one tensor
        return [(((0, k[0] + k[1]),), call)]
    return [((q, k), call)]


def alike_in_kind(table: Tensor, other: Tensor) -> bool:
    """Whether what can be rotated with one table can be with the other."""
    return (
        table.shape == other.shape
        and table.dtype == other.dtype
        and table.device == other.device
        and table.layout == other.layout
        and table.requires_grad == other.requires_grad
    )


def check_all(x: Tensor, parts: Parts, call: dict[str, Any], tables_k: tuple[Tensor, Tensor] | None) -> None:
    """Check all launches: the first is not to write where another is going to be refused."""
    for together, arguments in _groups(x, parts, call, tables_k):
        for part in together:
            options = tuple({**DEFAULTS, **arguments}.values())
            validated("rope_", _take(x, part), None, options)
            if not torch.compiler.is_compiling():
                check_written("rope_", (_take(x, part),), options)


def _rotate_parts(
    x: Tensor, y: Tensor | None, parts: Parts, call: dict[str, Any], tables_k: tuple[Tensor, Tensor] | None
) -> None:
    """Write the rotation of the parts of x into those of y, and the rest of x into that of y; in place without a y."""
    if x.dim() == 5 and parts[1] is not None and x.stride(2) == x.shape[3] * x.stride(3):
        heads = x.shape[3]
        if y is None or y.stride(2) == heads * y.stride(3):  # (3, H) is one dimension of heads
            x, y = x.flatten(2, 3), None if y is None else y.flatten(2, 3)
            parts = ((0, heads), (heads, heads), (2 * heads, heads))
    for together, arguments in _groups(x, parts, call, tables_k):
        views = [_take(x, part) for part in together]
        if y is None:
            rope_(views[0], views[1] if len(views) == 2 else None, **arguments)
        else:
            out: Any = tuple(_take(y, part) for part in together)
            rope(views[0], views[1] if len(views) == 2 else None, **arguments, out=out)
    if y is not None and parts[2] is not None:
        _take(y, parts[2]).copy_(_take(x, parts[2]))


def _save(ctx: Any, parts: Parts, call: dict[str, Any], tables_k: tuple[Tensor, Tensor] | None) -> None:
    names = [name for name, value in call.items() if isinstance(value, Tensor)]
    ctx.save_for_backward(*(call[name] for name in names), *(tables_k or ()))
    ctx.rest = parts, names, {name: value for name, value in call.items() if name not in names}


def _transposed(ctx: Any) -> tuple[Parts, dict[str, Any], Any]:
    """The arguments of the backward call: those of the forward, rotating by the negative angle."""
    parts, names, rest = ctx.rest
    tensors = ctx.saved_tensors
    call = {**dict(zip(names, tensors, strict=False)), **rest, "inverse": not rest.get("inverse", False)}
    return parts, call, tensors[len(names) :] or None


class _RotatePartsInPlace(torch.autograd.Function):
    """In place on x, seen as `shape`. A function of the packed tensor, not of its parts: autograd would copy its gradient
    for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Any, parts: Parts, call: dict[str, Any], tables_k: Any) -> Tensor:
        seen = x.detach()
        if _alone(x):
            _rotate_parts(seen if x.shape == shape else seen.view(shape), None, parts, call, tables_k)
            if not _source(x).is_leaf:
                ctx.mark_dirty(x)  # of a leaf autograd forbids it; there only the returned tensor has the gradient
        else:  # there, too; and if it heard of the write, it would refuse the views that were made with this one
            with _unsafe_preserve_version_counter(x):
                _rotate_parts(seen, None, parts, call, tables_k)
        _save(ctx, parts, call, tables_k)
        ctx.shape = shape
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        seen = _op.readable(dy.reshape(ctx.shape))
        if wants_formula(seen):
            dx = _joined(seen, *_transposed(ctx))
        else:
            dx = torch.empty(seen.shape, dtype=seen.dtype, device=seen.device)
            _rotate_parts(seen, dx, *_transposed(ctx))
        return dx.reshape(dy.shape), None, None, None, None


_rotate_parts_in_place: Any = _RotatePartsInPlace.apply


def _joined(x: Tensor, parts: Parts, call: dict[str, Any], tables_k: tuple[Tensor, Tensor] | None) -> Tensor:
    """x with its parts rotated, of functions that torch differentiates, maps and traces."""
    pieces: list[Tensor] = []
    for together, arguments in _groups(x, parts, call, tables_k):
        views = [_take(x, part) for part in together]
        rotated = rope(views[0], views[1] if len(views) == 2 else None, **arguments)
        pieces += rotated if isinstance(rotated, tuple) else [rotated]
    if parts[2] is not None:
        pieces.append(_take(x, parts[2]))
    return pieces[0] if len(pieces) == 1 else torch.stack(pieces, 2) if x.dim() == 5 else torch.cat(pieces, 2)


def _overwritten(x: Tensor, parts: Parts, call: dict[str, Any], tables_k: tuple[Tensor, Tensor] | None) -> Tensor:
    """`rotate_in_place` where torch.compile or a transform is to see a gradient through the write."""
    y = _joined(x, parts, call, tables_k)
    if x.requires_grad and x.is_leaf:
        x.detach().copy_(y.detach())
        return y
    return x.copy_(y)
