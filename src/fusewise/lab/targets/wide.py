"""A function in float64 whatever it says, which is the truth of it."""

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
    """Operations that ask for a narrow dtype, and on tensors of one, get float64 or complex128 instead."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        kwargs = dict(kwargs)
        if kwargs.get("dtype") in NARROW:
            kwargs["dtype"] = widened(kwargs["dtype"])
        if (
            isinstance(func, torch._ops.OpOverload) and not func._schema.is_mutable
        ):  # tensors that the function has from elsewhere; what it writes to stays its own
            args, kwargs = pytree.tree_map_only(
                Tensor, lambda x: x.to(widened(x.dtype)) if x.dtype in NARROW else x, (args, kwargs)
            )
        return func(*args, **kwargs)


def in_float64(call: Callable[[], Result]) -> Result:
    """The call with casts and new tensors of narrower floating dtypes in float64, so that it computes in that throughout, whatever
    it says."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return under(_Widen, call)[0]
    finally:
        torch.set_default_dtype(before)
