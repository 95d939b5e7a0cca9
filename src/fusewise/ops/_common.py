"""What all operations share: the form of their errors, checks of plain arguments, and questions to autograd and of tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

MAX_POSITION = 2**31 - 1
KERNEL_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what kernels compute from, in float32
FLOATS = (*KERNEL_FLOATS, torch.float64)  # what the operations take: float64 is the reference's
MAX_NUMBER = 3.4028234663852886e38  # the largest of float32

traced = torch.compiler.is_dynamo_compiling  # of the ways to ask for torch.compile this costs the least


def fail(op: str, argument: str, contract: str, got: object, fix: str, error: type[Exception] = ValueError) -> NoReturn:
    """Raise an error in the one form that all have: what an argument must do, what it is, and one way to mend the call."""
    raise error(f"{op}: {argument} must {contract}, got {got}; {fix}")


def shown(value: object) -> str:
    """A value as messages have it, in one short line; what is more than that is told by its type, and of tensors no element."""
    text = "" if isinstance(value, Tensor) else repr(value)
    short = len(text) <= 100
    if not text or "\n" in text or (not short and text.startswith("<")):
        return type(value).__name__
    return text if short else text[:97] + "..."


def dtype_name(dtype: torch.dtype) -> str:
    """As messages and files have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def check_one_of(op: str, name: str, value: object, allowed: Iterable[str]) -> None:
    """Check that an option is one of the allowed names. Its type is looked at first: an array would be compared with a name
    element by element."""
    if not isinstance(value, str) or value not in allowed:
        fail(op, name, f"be one of {', '.join(allowed)}", shown(value), "choose one of them")


def check_count(op: str, name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Check that an option is an int from `least` to `most`, and return it."""
    if not isinstance(value, int) or isinstance(value, bool):
        fail(op, name, "be an int", shown(value), "convert it", TypeError)
    if value < least:
        fail(op, name, f"be at least {least}", value, "raise it")
    if most is not None and value > most:
        fail(op, name, f"be at most {most}", value, "lower it")
    return value


def check_bool(op: str, name: str, value: object, fix: str) -> None:
    """Check that an option is True or False."""
    if not isinstance(value, bool):
        fail(op, name, "be a bool", shown(value), fix, TypeError)


def check_number(op: str, name: str, value: object, fix: str) -> None:
    """Check that an option is a number, and a finite one in float32."""
    contract = "be a finite number of float32"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        fail(op, name, contract, shown(value), fix, TypeError)
    if not abs(value) <= MAX_NUMBER:
        fail(op, name, contract, shown(value), fix)


def transforms_active() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is at work. A trace is asked for transforms alone, under
    which its `requires_grad` is not to be trusted."""
    if torch._C._are_functorch_transforms_active():
        return True
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def wants_formula(dy: Tensor) -> bool:
    """Whether a backward goes through a formula, made of functions that torch differentiates and maps, and not through an
    operator: where it is itself to be differentiated, is given a batch of gradients at once, or zeros without memory."""
    if transforms_active():
        return True
    if torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(dy) or dy._is_zerotensor()


def jit_traces() -> bool:
    """Whether `torch.jit.trace` runs the code, where a size is a tensor. A look at one may raise and ends the trace then; who goes
    on after that brings the process down."""
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None


def exporting() -> bool:
    """Whether a graph is exported, whose nodes record gradients themselves (`_register.register`): of an autograd function there
    would be left what its forward does, without gradients."""
    # Not torch.compiler.is_exporting(), which torch 2.11 takes to be true in every trace.
    return bool(torch.compiler._is_exporting_flag)


def apply_function(function: Any, *args: Any) -> Any:
    """`function.apply`, untyped in torch's stubs."""
    if torch.compiler.is_compiling():  # which traces no function that gets a tensor twice: of tied weights, a view
        args = tuple(
            a.view_as(a) if isinstance(a, Tensor) and any(a is b for b in args[:i]) else a for i, a in enumerate(args)
        )
    return function.apply(*args)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of all arithmetic: float32, or float64 for float64 tensors."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def empty_like(x: Tensor) -> Tensor:
    """Memory for a result in the stride order of x. Of elements that share memory, as of a head that was expanded, torch may take
    the features for an outer dimension; then it is contiguous."""
    y = torch.empty_like(x)
    return y if y.stride(-1) == 1 or y.shape[-1] == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def unit_stride(x: Tensor) -> Tensor:
    """x with a contiguous last dimension: x itself, or a copy in the rare layout that has none. What is no tensor, is sparse, or has
    no dimension, comes back as it is, for the operation's own check to name."""
    try:
        if not traced() and x.layout != torch.strided:  # a traced backward may not ask for the layout
            return x
        return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    except (AttributeError, IndexError):
        return x


def unpacked(saved: Iterable[Any]) -> list[Any]:
    """What an autograd function saved, with contiguous last dimensions: a hook may bring it back in another order of memory."""
    return [None if x is None else unit_stride(x) for x in saved]


def kinds(values: Iterable[Any]) -> list[Any]:
    """The types of values that are a key, of the elements of a tuple as well: 0.0 and False equal 0, and are refused."""
    return [tuple(map(type, value)) if type(value) is tuple else type(value) for value in values]
