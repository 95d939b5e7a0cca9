"""Dispatch modes that observe or change a function's operators while it runs, whatever the function contains."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .reason import text

Result = TypeVar("Result")
Of = TypeVar("Of", bound="Mode")

#: Part of autograd's message for a backward of a graph that another backward, complete or not, has freed.
FREED = "backward through the graph a second time"


class Mode(TorchDispatchMode):
    """A dispatch mode that also receives higher-order operators such as torch.cond. Code that the function compiles
    itself runs uncompiled, unless `compiled` is set."""

    supports_higher_order_operators = True

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if "_dynamo" in vars(torch):  # else a function's own torch.compile would compile `either`
            Mode.__torch_dispatch__ = _GUARDED  # type: ignore[method-assign]
        self.compiled = compiled
        self.functions = False  # whether a higher-order operator was seen

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]  # torch asks an instance
        return self.compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions |= isinstance(func, torch._ops.HigherOrderOperator)
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result."""
        raise NotImplementedError


def _without_dynamo(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """torch's wrapper of a mode's dispatch keeps Dynamo from compiling it, but first imports Dynamo, which takes two
    seconds. Until somebody else has imported that, it compiles nothing."""
    plain = inspect.unwrap(dispatch)

    def either(*args: Any, **kwargs: Any) -> Any:
        return (dispatch if "_dynamo" in vars(torch) else plain)(*args, **kwargs)

    return either


_GUARDED = Mode.__torch_dispatch__
Mode.__torch_dispatch__ = _without_dynamo(_GUARDED)  # type: ignore[method-assign]


def under(mode: Callable[[bool], Of], call: Callable[[], Result], compiled: bool = False) -> tuple[Result, Of]:
    """The result of the call under a mode, and the mode. flex_attention only runs compiled; then, or if `compiled` is
    set, everything that asks for compilation is compiled, and the mode sees fewer operators."""
    if compiled:
        with mode(True) as entered:
            return call(), entered
    try:
        with mode(False) as entered:
            result = call()
    except torch.OutOfMemoryError:
        raise
    except Exception:
        _forget()
        try:
            return under(mode, call, compiled=True)
        except RuntimeError as again:  # a call with a fault of its own raises again, but a graph has only one backward
            if FREED not in text(again):
                raise
        raise
    if entered.functions:
        _forget()
    return result, entered


def _forget() -> None:
    """Reset Dynamo: it remembers code that ran uncompiled here as not compilable, also for later calls without a
    mode."""
    torch._dynamo.reset()
