"""Shared by all operations: the form of errors, checks of plain arguments, and autograd and tensor helpers."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

MAX_POSITION = 2**31 - 1
KERNEL_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # input dtypes of kernels, which compute in float32
FLOATS = (*KERNEL_FLOATS, torch.float64)  # input dtypes of the operations; float64 is served by the reference
MAX_NUMBER = 3.4028234663852886e38  # the largest finite float32

traced = torch.compiler.is_dynamo_compiling  # the cheapest check for torch.compile


def fail(op: str, argument: str, contract: str, got: object, fix: str, error: type[Exception] = ValueError) -> NoReturn:
    """Raise an error in the common form: what an argument must satisfy, what it is, and one fix."""
    raise error(f"{op}: {argument} must {contract}, got {got}; {fix}")


def shown(value: object) -> str:
    """A value for an error message, in one short line; tensors and values that are too long are shown by their type."""
    try:
        text = "" if isinstance(value, Tensor) else repr(value)
    except Exception:  # of a class of the caller's: it must not hide the error that is being reported
        text = ""
    short = len(text) <= 100
    if not text or "\n" in text or (text.startswith("<") and (not short or " at 0x" in text)):
        return type(value).__name__
    return text if short else text[:97] + "..."


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype, for messages and files: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def check_one_of(op: str, name: str, value: object, allowed: Iterable[str]) -> None:
    """Check that an option is one of the allowed names. The type is checked first: comparing an array with a name would
    be elementwise."""
    if not isinstance(value, str) or value not in allowed:
        fail(op, name, f"be one of {', '.join(allowed)}", shown(value), "choose one of them")


def as_int(value: Any) -> Any:
    """The int that an object with `__index__` stands for, such as an integer of NumPy. Anything else is returned unchanged,
    also a bool, and a tensor: to read that of a GPU is to wait for it."""
    if isinstance(value, (int, torch.SymInt, Tensor)) or not hasattr(value, "__index__"):
        return value
    try:
        return operator.index(value)
    except TypeError:  # of an array
        return value


def check_strided(op: str, name: str, x: Any, fix: str | None = None) -> None:
    """Check that x is a strided tensor. `fix` replaces the advice of the errors."""
    if not isinstance(x, Tensor):
        fail(op, name, "be a torch.Tensor", type(x).__name__, fix or f"pass a tensor for {name}", TypeError)
    if x.is_nested:
        fail(op, name, "be a strided tensor", "nested", fix or f"pass {name}.values()", TypeError)
    if x.layout != torch.strided:
        fail(op, name, "be a strided tensor", x.layout, fix or f"call {name}.to_dense()", TypeError)


def check_count(op: str, name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Check that an option is an integer from `least` to `most`, and return it as an int."""
    value = as_int(value)
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
    """Check that an option is a number that is finite in float32."""
    contract = "be a float or an int, finite in float32"
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        fail(op, name, contract, shown(value), fix, TypeError)
    if not abs(value) <= MAX_NUMBER:
        fail(op, name, contract, shown(value), fix)


def recording() -> bool:
    """Whether autograd records operations: never in inference mode, even if gradients are enabled in it."""
    # torch.compile cannot trace the second question.
    return torch.is_grad_enabled() and (torch.compiler.is_compiling() or not torch.is_inference_mode_enabled())


def records_gradients(*tensors: Tensor | None) -> bool:
    """Whether autograd records an operation on these tensors."""
    return any(x is not None and x.requires_grad for x in tensors) and recording()


def transforms_active() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is active. Under tracing only transforms are
    checked; `requires_grad` is not reliable under these."""
    if torch._C._are_functorch_transforms_active():
        return True
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def known(condition: Any) -> bool:
    """Whether a condition on sizes holds; False if it cannot be known, in a trace where a size depends on data."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # imports sympy

    return guard_or_false(condition)


def wants_formula(dy: Tensor) -> bool:
    """Whether a backward must use the formula in torch functions instead of an operator: if it will be differentiated
    again, gets batched gradients, or a zero tensor without storage."""
    if transforms_active():
        return True
    if torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(dy) or dy._is_zerotensor()


def jit_traces() -> bool:
    """Whether `torch.jit.trace` is running, under which sizes are tensors. Inspecting one may raise, which ends the
    trace; continuing after that crashes the process."""
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None


@contextlib.contextmanager
def constant_in_traces() -> Iterator[None]:
    """`torch.jit.trace` does not record what is computed here: the results are constants of the trace."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def exporting() -> bool:
    """Whether a graph is being exported. Its operator nodes record gradients themselves (`_register.register`): of an
    autograd function, export would keep only the forward, without gradients."""
    # Not torch.compiler.is_exporting(), which is true in every trace in torch 2.11.
    return bool(torch.compiler._is_exporting_flag)


def recorded_by_operators() -> bool:
    """Whether a graph is being made whose operator nodes record gradients themselves: an export, or `torch.jit.trace`,
    which could neither save a Python function nor find it again when it checks the trace without gradients."""
    return exporting() or jit_traces()


def apply_function(function: Any, *args: Any) -> Any:
    """`function.apply`, untyped in torch's stubs."""
    if torch.compiler.is_compiling():
        # Dynamo cannot trace a function that gets the same tensor twice (tied weights): pass a view.
        args = tuple(
            a.view_as(a) if isinstance(a, Tensor) and any(a is b for b in args[:i]) else a for i, a in enumerate(args)
        )
    return function.apply(*args)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The compute dtype: float32, or float64 for float64 tensors."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def empty_like(x: Tensor) -> Tensor:
    """Memory for a result in the stride order of x. For an x with overlapping elements, such as an expanded head, torch
    may choose an order whose last dimension is not innermost; then the result is contiguous."""
    y = torch.empty_like(x)
    return y if y.stride(-1) == 1 or y.shape[-1] == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last in memory of a non-empty tensor."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def unit_stride(x: Tensor) -> Tensor:
    """x with a contiguous last dimension: x itself, or in rare layouts a copy. Anything that is not a tensor, is sparse or
    has no dimension is returned unchanged, and reported by the operation's own checks."""
    try:
        if not traced() and x.layout != torch.strided:  # a traced backward may not ask for the layout
            return x
        return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    except (AttributeError, IndexError):
        return x


def unit_strides(xs: Iterable[Any]) -> list[Any]:
    """`unit_stride` of each tensor, None for each None."""
    return [None if x is None else unit_stride(x) for x in xs]


def save_tensors(ctx: Any, tensors: tuple[Tensor | None, ...]) -> None:
    """Save tensors for the backward of an autograd function, which gets them from `restored`."""
    ctx.save_for_backward(*tensors)
    ctx.kinds = [None if x is None else (x.shape, x.device, x.dtype, x.stride()) for x in tensors]


def restored(op: str, ctx: Any) -> list[Any]:
    """What `save_tensors` has saved, in the dtypes that it had, and contiguous if a stride is another: a saved-tensor hook may
    change both, as one that compresses and leaves it to torch to promote what it brings back. Hooks must keep values, shapes
    and devices."""
    traced = torch.compiler.is_compiling()
    found = []
    for x, kind in zip(ctx.saved_tensors, ctx.kinds, strict=True):
        if x is not None:
            shape, device, dtype, stride = kind
            if not traced and (x.shape != shape or x.device != device):
                contract = f"have the shape and device of what it got, {tuple(shape)} and {device}"
                fix = "undo in its unpack what its pack did"
                fail(op, "what a saved-tensor hook returns", contract, f"{tuple(x.shape)} and {x.device}", fix)
            x = x if x.dtype == dtype else x.to(dtype)
            first = -1 if traced else 0  # others may be symbols; comparing one with a number adds a guard
            x = x if x.stride()[first:] == stride[first:] else x.contiguous()
        found.append(x)
    return found


def kinds(values: Iterable[Any]) -> list[Any]:
    """The types of values in a key, including those of tuple elements: 0.0 and False equal 0 but are invalid."""
    return [tuple(map(type, value)) if type(value) is tuple else type(value) for value in values]
