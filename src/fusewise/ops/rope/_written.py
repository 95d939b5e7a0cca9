"""Checks for tensors that a call writes to, in addition to those of `_validate.py` for every argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._shared.memo import Memo
from .._common import fail, records_gradients, transforms_active
from .._overlap import check_apart, overlaps
from ._validate import DEFAULTS, check_tensor, check_unit_stride, shape_of


def check_out(op: str, xs: tuple[Tensor, ...], out: Any, options: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Check `out=` against the input tensors and the options of the call; returns it as a tuple, one tensor per input."""
    outs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    if len(outs) != len(xs) or not all(isinstance(y, Tensor) for y in outs):
        fix = "pass a tensor, or (q_out, k_out) with a k"
        fail(op, "out", f"be {len(xs)} tensor(s)", repr(type(out).__name__), fix, TypeError)
    for name, x, y in zip(("q", "k"), xs, outs, strict=False):
        fix = f"use torch.empty_like({name})"
        check_tensor(op, f"out for {name}", y, (x.dtype,), x.device, fix)
        if y.shape != x.shape:
            fail(op, f"out for {name}", f"have the shape of {name}, {shape_of(x)}", shape_of(y), fix)
        check_unit_stride(op, f"out for {name}", y, fix)
        if y.requires_grad:
            fail(op, f"out for {name}", "not require grad", "requires_grad=True", "call rope without out=")
    if torch.compiler.is_compiling():
        return outs  # the compiler reads inputs before it writes outputs; the operator's fake checks aliasing
    check_written(op, outs, options, ("out for q", "out for k"))
    for name, y in zip(("q", "k"), outs, strict=False):
        for x in xs:
            if overlaps(x, y):
                fail(op, f"out for {name}", "not overlap an input", "shared memory", "use rope_ to rotate in place")
    return outs


def check_written(
    op: str, ys: tuple[Tensor, ...], options: tuple[Any, ...], names: tuple[str, str] = ("q", "k")
) -> None:
    """Tensors to write to must be writable and must not overlap each other, themselves, or a tensor among the options
    (in the order of DEFAULTS), which is read at the same time."""
    for name, y in zip(names, ys, strict=False):
        if y.is_inference() and not torch.is_inference_mode_enabled():
            fail(op, name, "not be an inference tensor outside inference mode", "one", f"clone {name}", RuntimeError)
    places = _places(ys, [x for x in options if isinstance(x, Tensor)])
    if places in _APART:
        return
    read = {name: x for name, x in zip(DEFAULTS, options, strict=True) if isinstance(x, Tensor)}
    check_apart(op, dict(zip(names, ys, strict=False)), read)
    if places is not None:
        _APART[places] = None


# Sets of addresses and layouts known not to overlap. A decode step has few such sets, and they repeat.
_APART: Memo[tuple[Any, ...] | None, None] = Memo(4096)


def _places(written: tuple[Tensor, ...], read: list[Tensor]) -> tuple[Any, ...] | None:
    """Everything that determines overlap with written tensors; None if a tensor has no address of its own."""
    tensors = (*written, *read)
    if not all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors):
        return None
    places = tuple([(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in tensors])
    return (len(written), *places) if all(place[0] for place in places) else None


def check_followed(xs: tuple[Tensor, ...]) -> None:
    """Autograd must be able to track the writes of `rope_` to xs. Torch would raise as well, but after the write."""
    if transforms_active():
        fail(
            "rope_",
            "q and k",
            "not be under a torch.func transform or forward mode",
            "one of them",
            "use rope",
            RuntimeError,
        )
    for name, x in zip(("q", "k"), xs, strict=False):
        if not records_gradients(x):
            continue
        if x.is_leaf:
            fail("rope_", name, "not be a leaf that requires grad", "a leaf", "use rope", RuntimeError)
        if x._is_view() and x._base is not None and x._base.is_leaf and x._base.requires_grad:
            fail("rope_", name, "not be a view of a leaf that requires grad", "such a view", "use rope", RuntimeError)
        if x._is_view() and torch._C._autograd._get_creation_meta(x) != torch._C._autograd.CreationMeta.DEFAULT:
            fail(
                "rope_", name, "not be one of several views made at once, or made without gradients, where it requires grad",
                "such a view", f"slice {name} out instead of unbind, split or chunk, or use rope", RuntimeError,
            )  # fmt: skip
