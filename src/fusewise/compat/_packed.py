"""In-place rotation of parts of a packed tensor (q and k of qkv), with autograd; for `compat.flash_attn`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..ops._common import records_gradients, restored, save_tensors, transforms_active, wants_formula
from ..ops.rope import _op, rope, rope_
from ..ops.rope._validate import DEFAULTS, validated
from ..ops.rope._written import check_written
from ._check import explain

# A part of a packed tensor along dimension 2: an index (of 3 for qkv, of 2 for kv), or (first head, number of heads).
Part = int | tuple[int, int]
# The parts rotated with the tables of q and of k, and the part that is not rotated. None: all of the tensor, or absent.
Parts = tuple[Part | None, Part | None, Part | None]
Q: Parts = (None, None, None)
KV: Parts = (0, None, 1)


def rotate_in_place(x: Tensor, parts: Parts, call: dict[str, Any], tables_k: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rotate the parts of x in place; return x, or the tensor that carries its gradient."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        explain("apply_rotary_emb", "x", x)
    recorded = records_gradients(x)
    if transforms_active() or (recorded and torch.compiler.is_compiling()):
        return _overwritten(x, parts, call, tables_k)
    if not recorded:
        _rotate_parts(x, None, parts, call, tables_k)
        return x
    covered = x
    if x._is_view() and _alone(x):
        # If x is a view of all of its base, as the output of a projection is, record the write on the base: recorded on
        # a view, autograd would copy the gradient of the base. The result is then a view too, like x. If the base does
        # not require grad, a view of it was set to later; then record on the view. So too if x is the result of such a
        # call on a leaf: its graph leads through that call, the base's does not.
        base = x._base
        if base is not None and base.requires_grad and base.dtype == x.dtype and base.numel() == x.numel():
            covered = base if base.is_contiguous() and x.is_contiguous() else x
    rotated: Tensor = _rotate_parts_in_place(covered, x.shape, parts, call, tables_k)
    return rotated if covered is x else rotated.view(x.shape)


def _source(x: Tensor) -> Tensor:
    """The base of x, or x if it is not a view."""
    return x if x._base is None else x._base


def _alone(x: Tensor) -> bool:
    """Whether autograd can record an in-place write to x: not for views from multi-view ops (split) or made under no_grad."""
    return not x._is_view() or torch._C._autograd._get_creation_meta(x) == torch._C._autograd.CreationMeta.DEFAULT


def _take(x: Tensor, part: Part | None) -> Tensor:
    """A view of one part of x; x if part is None."""
    if part is None:
        return x
    return x.select(2, part) if isinstance(part, int) else x.narrow(2, *part)


def _groups(
    parts: Parts, call: dict[str, Any], tables_k: tuple[Tensor, Tensor] | None
) -> list[tuple[tuple[Part | None, ...], dict[str, Any]]]:
    """The parts and arguments of each launch."""
    q, k, _ = parts
    if k is None:
        return [((q,), call)]
    if tables_k is not None:
        cos_k, sin_k = tables_k
        return [((q,), call), ((k,), {**call, "cos": cos_k, "sin": sin_k, "rotary_dim": 2 * cos_k.shape[1]})]
    if isinstance(q, tuple) and isinstance(k, tuple):  # q and k heads are adjacent: one tensor
        return [(((0, k[0] + k[1]),), call)]
    return [((q, k), call)]


def alike_in_kind(table: Tensor, other: Tensor) -> bool:
    """Whether one table is valid wherever the other is."""
    return (
        table.shape == other.shape
        and table.dtype == other.dtype
        and table.device == other.device
        and table.layout == other.layout
        and table.requires_grad == other.requires_grad
    )


def check_all(x: Tensor, parts: Parts, call: dict[str, Any], tables_k: tuple[Tensor, Tensor] | None) -> None:
    """Check all launches before the first writes, so that an error leaves x unchanged."""
    for together, arguments in _groups(parts, call, tables_k):
        for part in together:
            options = tuple({**DEFAULTS, **arguments}.values())
            validated("rope_", _take(x, part), None, options)
            if not torch.compiler.is_compiling():
                check_written("rope_", (_take(x, part),), options)


def _rotate_parts(
    x: Tensor, y: Tensor | None, parts: Parts, call: dict[str, Any], tables_k: tuple[Tensor, Tensor] | None
) -> None:
    """Rotate the parts of x into y and copy the rest; in place if y is None."""
    if x.dim() == 5 and parts[1] is not None and x.stride(2) == x.shape[3] * x.stride(3):
        heads = x.shape[3]
        if y is None or y.stride(2) == heads * y.stride(3):  # (3, H) flattens to one head dimension
            x, y = x.flatten(2, 3), None if y is None else y.flatten(2, 3)
            parts = ((0, heads), (heads, heads), (2 * heads, heads))
    for together, arguments in _groups(parts, call, tables_k):
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
    save_tensors(ctx, (*(call[name] for name in names), *(tables_k or ())))
    ctx.rest = parts, names, {name: value for name, value in call.items() if name not in names}


def _transposed(ctx: Any) -> tuple[Parts, dict[str, Any], Any]:
    """The arguments of backward: those of forward, with the inverse rotation."""
    parts, names, rest = ctx.rest
    tensors = restored("rope", ctx)
    call = {**dict(zip(names, tensors, strict=False)), **rest, "inverse": not rest.get("inverse", False)}
    return parts, call, tensors[len(names) :] or None


class _RotatePartsInPlace(torch.autograd.Function):
    """Rotate x in place, viewed as `shape`. Takes the packed tensor, not its parts: autograd would copy the gradient per part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Any, parts: Parts, call: dict[str, Any], tables_k: Any) -> Tensor:
        seen = x.detach()
        if _alone(x):
            _rotate_parts(seen if x.shape == shape else seen.view(shape), None, parts, call, tables_k)
            if not _source(x).is_leaf:
                ctx.mark_dirty(x)  # not allowed for a leaf; then only the returned tensor carries the gradient
        else:  # as for a leaf; a version bump would also make autograd reject the sibling views
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
    """Rotate the parts of x out of place, with operations that autograd, vmap and torch.compile support."""
    pieces: list[Tensor] = []
    for together, arguments in _groups(parts, call, tables_k):
        views = [_take(x, part) for part in together]
        rotated = rope(views[0], views[1] if len(views) == 2 else None, **arguments)
        pieces += rotated if isinstance(rotated, tuple) else [rotated]
    if parts[2] is not None:
        pieces.append(_take(x, parts[2]))
    return pieces[0] if len(pieces) == 1 else torch.stack(pieces, 2) if x.dim() == 5 else torch.cat(pieces, 2)


def _overwritten(x: Tensor, parts: Parts, call: dict[str, Any], tables_k: tuple[Tensor, Tensor] | None) -> Tensor:
    """`rotate_in_place` under torch.compile with gradients, or under a torch.func transform."""
    y = _joined(x, parts, call, tables_k)
    if x.requires_grad and x.is_leaf:
        x.detach().copy_(y.detach())
        return y
    return x.copy_(y)
