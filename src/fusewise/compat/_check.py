"""Argument checks shared by the compat modules.

Valid calls pay almost nothing: a function tries the expression it needs, and `explain` looks for the invalid argument
only after a failure. If no argument explains the failure, the original exception is re-raised.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from ..ops._common import MAX_POSITION, check_strided, fail, shown

# What Python and torch raise when a value has the wrong type or shape for an expression.
WRONG = (AttributeError, IndexError, OverflowError, RuntimeError, TypeError, ValueError)


def check_tensor(op: str, name: str, x: object) -> None:
    """Check that x is a tensor, where x is inspected before the operator validates it."""
    if not isinstance(x, Tensor):
        fail(op, name, "be a torch.Tensor", type(x).__name__, f"pass a tensor for {name}", TypeError)


def explain(op: str, name: str, x: Any, least: int = 0) -> None:
    """After an expression on x failed: raise if x is not a strided tensor with at least `least` dimensions."""
    check_strided(op, name, x)
    if x.dim() < least:
        contract = f"have at least {least} dimension{'s' if least > 1 else ''}"
        fail(op, name, contract, f"shape {tuple(x.shape)}", f"check what is passed for {name}")


def shape_of(op: str, name: str, x: Tensor, least: int = 0) -> torch.Size:
    """Return the shape of x; raise unless x is a tensor with at least `least` dimensions."""
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
    """Check that x is a strided tensor with the given sizes and return its shape.

    In `sizes`, None matches any size and (1, n) matches 1 or n. `form` is the shape as documented.
    """
    explain(op, name, x)
    shape: torch.Size = x.shape
    # Explicit comparisons: with `in`, torch.compile would not guard on dynamic sizes.
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
    """Return the truth value of an option, as the libraries do."""
    try:
        return bool(value)
    except WRONG:
        fail(op, name, "be True or False", shown(value), "pass a bool", TypeError)


def whole(op: str, name: str, value: Any, least: int | None = None, most: int = MAX_POSITION) -> int:
    """Return an integer option, `least` <= value <= `most` if `least` is given; also accepts numpy and tensor scalars."""
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
    """Return a finite number, >= `least` if given; also accepts numpy and tensor scalars."""
    contract = "be a finite number"
    if not isinstance(value, (int, float)) and getattr(value, "ndim", None) != 0:
        fail(op, name, contract, shown(value), "convert it", TypeError)
    try:
        result = value if isinstance(value, int) else float(value)
    except WRONG:
        fail(op, name, contract, shown(value), "convert it", TypeError)
    # Torch accepts no larger int, and torch.compile cannot trace `isfinite` of a SymInt.
    if not (abs(result) < 2**63 if isinstance(result, int) else math.isfinite(result)):
        fail(op, name, contract, shown(value), f"check what is passed for {name}")
    if least is not None and result < least:
        fail(op, name, f"be at least {least:g}", shown(value), f"check what is passed for {name}")
    return result


def setting(op: str, config: Any, name: str) -> Any:
    """Return an attribute of a model's configuration."""
    try:
        return getattr(config, name)
    except AttributeError:
        fail(op, "config", f"have {name}", type(config).__name__, "pass the model's configuration", TypeError)


def width(op: str, config: Any, name: str, given: int | None = None) -> int:
    """Return a feature count: `given`, or else the attribute of the model's configuration."""
    if given is not None:
        return whole(op, name, given, 0)
    return whole(op, f"config.{name}", setting(op, config, name), 0)


def above_zero(op: str, name: str, value: Any) -> float:
    found = number(op, name, value)
    if found <= 0:
        fail(op, name, "be above 0", shown(value), f"check what is passed for {name}")
    return found
