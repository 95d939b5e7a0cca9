"""What the functions of the libraries look into before an operation does, and what they say where it is wrong.

A call that is right pays next to nothing: a function tries what it needs, and only where that fails does `explain`
find out what to say. An error that no argument explains is raised as it was.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from ..ops._common import MAX_POSITION, fail, shown

# What Python and torch raise of a value that is not what an expression needs.
WRONG = (AttributeError, IndexError, OverflowError, RuntimeError, TypeError, ValueError)


def check_tensor(op: str, name: str, x: object) -> None:
    """Check that x is a tensor, in a function that looks into it before an operation would."""
    if not isinstance(x, Tensor):
        fail(op, name, "be a torch.Tensor", type(x).__name__, f"pass a tensor for {name}", TypeError)


def explain(op: str, name: str, x: Any, least: int = 0) -> None:
    """Where something that was done with x failed: the error that says why, if x is not a strided tensor of at least
    so many dimensions."""
    check_tensor(op, name, x)
    if x.is_nested or x.layout != torch.strided:
        got = "a nested tensor" if x.is_nested else x.layout
        fail(op, name, "be a strided tensor", got, "pass one with padding or call .to_dense()", TypeError)
    if x.dim() < least:
        contract = f"have at least {least} dimension{'s' if least > 1 else ''}"
        fail(op, name, contract, f"shape {tuple(x.shape)}", f"check what is passed for {name}")


def shape_of(op: str, name: str, x: Tensor, least: int = 0) -> torch.Size:
    """The shape of x, a tensor of at least so many dimensions."""
    try:
        shape = x.shape
    except WRONG:
        explain(op, name, x)
        raise
    if len(shape) < least or not isinstance(x, Tensor):
        explain(op, name, x, least)
    return shape


def check_shape(
    op: str, name: str, x: Any, form: str, sizes: tuple[int | tuple[int, int] | None, ...], fix: str
) -> torch.Size:
    """Check that x is a strided tensor of these sizes, None being any and (1, n) one or n, and return its shape; `form` is
    what the documentation calls them."""
    explain(op, name, x)
    shape: torch.Size = x.shape
    # Written out: `in` would not make torch.compile guard lengths that it does not know.
    fits = len(shape) == len(sizes) and all(
        size is None or (n == 1 or n == size[1] if isinstance(size, tuple) else n == size)
        for n, size in zip(shape, sizes, strict=True)
    )
    if not fits:
        wanted = [f"{s[0]} | {s[1]}" if isinstance(s, tuple) else "any" if s is None else f"{s}" for s in sizes]
        numbers = "" if all(s is None for s in sizes) else f" = ({', '.join(wanted)})"
        fail(op, name, f"have shape {form}{numbers}", tuple(shape), fix)
    return shape


def flag(op: str, name: str, value: object) -> bool:
    """Whether an option is on, by what Python takes for true, as in the libraries."""
    try:
        return bool(value)
    except WRONG:
        fail(op, name, "be True or False", shown(value), "pass a bool", TypeError)


def whole(op: str, name: str, value: Any, least: int | None = None, most: int = MAX_POSITION) -> int:
    """An option that is a whole number, also one of numpy or of a tensor, from `least` to `most` where that is given."""
    if type(value) is not int and not isinstance(value, torch.SymInt):
        if isinstance(value, bool):
            fail(op, name, "be an int", value, "convert it", TypeError)
        try:
            value = operator.index(value)
        except WRONG:
            fail(op, name, "be an int", shown(value), "convert it", TypeError)
    if least is not None and not least <= value <= most:
        fail(op, name, f"be from {least} to {most}", value, f"check what is passed for {name}")
    return value  # type: ignore[no-any-return]


def number(op: str, name: str, value: Any, least: float | None = None) -> float:
    """An option that is a finite number, also one of numpy or of a tensor, and at least `least` where that is given."""
    contract = "be a finite number"
    if not isinstance(value, (int, float)) and getattr(value, "ndim", None) != 0:
        fail(op, name, contract, shown(value), "convert it", TypeError)
    try:
        result = value if isinstance(value, int) else float(value)
    except WRONG:
        fail(op, name, contract, shown(value), "convert it", TypeError)
    # Torch takes no larger int; and of an int that torch.compile does not know, `isfinite` cannot be traced.
    if not (abs(result) < 2**63 if isinstance(result, int) else math.isfinite(result)):
        fail(op, name, contract, shown(value), f"check what is passed for {name}")
    if least is not None and result < least:
        fail(op, name, f"be at least {least:g}", shown(value), f"check what is passed for {name}")
    return result


def setting(op: str, config: Any, name: str) -> Any:
    """What a model's configuration says."""
    try:
        return getattr(config, name)
    except AttributeError:
        fail(op, "config", f"have {name}", type(config).__name__, "pass the model's configuration", TypeError)


def width(op: str, config: Any, name: str, given: int | None = None) -> int:
    """A number of features: the one that is given, or else what a model's configuration says."""
    if given is not None:
        return whole(op, name, given, 0)
    return whole(op, f"config.{name}", setting(op, config, name), 0)


def above_zero(op: str, name: str, value: Any) -> float:
    found = number(op, name, value)
    if found <= 0:
        fail(op, name, "be above 0", shown(value), f"check what is passed for {name}")
    return found
