"""What watches or changes the operators of a function while it runs, around whatever the function brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")
Of = TypeVar("Of", bound="Mode")


class Mode(TorchDispatchMode):
    """A mode that operators which take functions, such as torch.cond, come to as they are. What the function compiles by itself
    runs as it is written, unless it is to be `compiled`."""

    supports_higher_order_operators = True

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.compiled = compiled
        self.functions = False  # whether an operator took one

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]  # torch asks an instance
        return self.compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions |= isinstance(func, torch._ops.HigherOrderOperator)
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives."""
        raise NotImplementedError


def under(mode: Callable[[bool], Of], call: Callable[[], Result]) -> tuple[Result, Of]:
    """What the call gives under a mode, and the mode. flex_attention cannot run but compiled: then everything is that asks for it,
    and the mode sees less."""
    try:
        with mode(False) as entered:
            result = call()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a call that is at fault itself fails again
        _forget()
        with mode(True) as entered:
            return call(), entered
    if entered.functions:
        _forget()
    return result, entered


def _forget() -> None:
    """What was not compiled is remembered as what cannot be, by functions that run no other way without a mode."""
    torch._dynamo.reset()
