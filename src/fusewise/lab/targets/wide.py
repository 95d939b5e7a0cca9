"""Runs a function in float64 whatever dtypes it names: the reference for its correctness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..modes import Mode, Result, under
from ..problem import widened

NARROW = (torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex32)


class _Widen(Mode):
    """Replaces narrow dtypes in operator arguments by float64 or complex128, and widens tensor arguments likewise."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        kwargs = dict(kwargs)
        if kwargs.get("dtype") in NARROW:
            kwargs["dtype"] = widened(kwargs["dtype"])
        if isinstance(func, torch._ops.OpOverload) and not func._schema.is_mutable:
            # Tensors captured from outside; mutated ones keep their dtype.
            args, kwargs = pytree.tree_map_only(
                Tensor, lambda x: x.to(widened(x.dtype)) if x.dtype in NARROW else x, (args, kwargs)
            )
        return func(*args, **kwargs)


def in_float64(call: Callable[[], Result], compiled: bool = False) -> Result:
    """Call with float64 in place of narrower floating dtypes in casts and new tensors, so that the whole computation is
    in float64. `compiled`: as for `under`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return under(_Widen, call, compiled)[0]
    finally:
        torch.set_default_dtype(before)
