"""`explain_dispatch`: which implementation serves a call, and why others do not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._choice import Choice
from ._common import FLOATS, check_one_of, check_strided, dtype_name, fail, shown
from .gated_linear import _op as _gated_linear_op
from .gated_linear import _path as _gated_linear_path
from .gated_linear import gated_linear, gated_mlp, geglu_linear
from .qk_norm_rope import _op as _qk_norm_rope_op
from .qk_norm_rope import qk_norm_rope
from .rope import _auto as _rope_auto
from .rope import _op as _rope_op
from .rope import rope, rope_
from .rope_and_cache import _op as _rope_and_cache_op
from .rope_and_cache import rope_and_cache_

_OPERATIONS: dict[Callable[..., Any], Choice] = {
    rope: _rope_op.choice,
    rope_: _rope_op.choice,
    rope_and_cache_: _rope_and_cache_op.choice,
    qk_norm_rope: _qk_norm_rope_op.choice,
    geglu_linear: _gated_linear_op.choice,
    gated_linear: _gated_linear_op.choice,
    gated_mlp: _gated_linear_op.choice,
}
# For operations where dispatch also depends on the tensors: a module with `cast` (the arguments after autocast),
# `refusal` (why an implementation leaves tensors to the next), and `path` (the code path in the selected implementation).
_PATHS: dict[str, Any] = {_gated_linear_op.choice.op: _gated_linear_path}
# For operations where auto does not always select the first implementation that can serve a GPU: the one it selects for
# a call, why, and why not others; None if it is the first.
_AUTO: dict[str, Callable[..., tuple[str, str, dict[str, str]] | None]] = {
    _rope_op.choice.op: _rope_auto.explained,
    _rope_and_cache_op.choice.op: _rope_and_cache_op.explained,
    _qk_norm_rope_op.choice.op: _qk_norm_rope_op.explained,
}


@dataclass(frozen=True)
class Dispatch:
    """The result of `explain_dispatch`: the implementation, why it is selected, and why each of the others is not.

    `path` is the code path in an implementation that has several, and the reason for it: the gated linear unit's
    kernels move matrices by TMA or through pointers, and on a CPU calls may lack the host fast path. Otherwise it is empty.
    """

    op: str
    impl: str
    reason: str
    passed_over: dict[str, str]
    path: str = ""

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.impl}, {self.reason}"]
        lines += [f"  {self.path}"] if self.path else []
        lines += [f"  not {impl}: {reason}" for impl, reason in self.passed_over.items()]
        return "\n".join(lines)


def explain_dispatch(op: Callable[..., Any], *args: Any, impl: str = "auto", **kwargs: Any) -> Dispatch:
    """Explain which implementation `op(*args, impl=impl, **kwargs)` would use, without running it.

    Dispatch depends on the device and dtype of q or x (after autocast); for the operations with RoPE on a GPU also on
    whether CUDA is built, the kind of table and, except for `rope_and_cache_`, the bytes that the call moves and the
    kind of rotation; for the gated linear unit on whether TMA supports the matrices and the number of rows. Other
    arguments are not validated. Checking why an implementation is unavailable may build its native library if it is
    missing (but not CUDA for a call of an operation with RoPE with impl="auto").

    Raises:
        TypeError: `op` is not a fusewise function that takes `impl=`, the arguments do not match its signature, an
            argument that must be a strided tensor is not, or no implementation supports the dtype of q or x.
        ValueError: `impl` does not exist or cannot serve the tensors, one of them has no dimension, or q or x has no
            features.

    Example:
        >>> q, angles = torch.randn(1, 4, 2, 64), torch.randn(4, 32)
        >>> print(fusewise.explain_dispatch(fusewise.rope, q, angles=angles))
        rope: cpu, the first that serves float32 on cpu
          not triton: ...
    """
    choice = _OPERATIONS.get(op) if callable(op) else None  # other objects may not be hashable
    if choice is None:
        names = ", ".join(f"fusewise.{known.__name__}" for known in _OPERATIONS)
        raise TypeError(f"explain_dispatch: op must be one of {names}, got {shown(op)}; pass the function itself")
    check_one_of(op.__name__, "impl", impl, ("auto", *choice.names))
    paths, arguments = _PATHS.get(choice.op), _arguments(op, args, kwargs)
    if paths is not None:
        arguments = paths.cast(arguments)
    x = arguments["q"] if "q" in arguments else arguments["x"]
    device_type, dtype = x.device.type, x.dtype
    serves = f"{dtype_name(dtype)} on {device_type}"
    by_size = _AUTO[choice.op](arguments) if impl == "auto" and choice.op in _AUTO else None
    if by_size is not None:
        chosen, reason, left = by_size
    elif impl == "auto":
        chosen, reason, left = choice.choose(device_type, dtype), f"the first that serves {serves}", {}
    else:
        chosen, reason, left = impl, "as requested", {}
    refusals = {name: left.get(name) or choice.unavailable(name, device_type, dtype) for name in choice.names}
    if paths is not None:
        for name in choice.able(device_type, dtype) if impl == "auto" else (impl,):
            if refusals[name] is None:
                chosen, refusals[name] = name, paths.refusal(name, arguments, impl == "auto")
                if refusals[name] is None:
                    break
    if (why := refusals[chosen]) is not None:
        raise ValueError(f'{op.__name__}: impl must be able to serve {serves}, got {impl!r}: {why}; use impl="auto"')
    path = "" if paths is None else paths.path(chosen, arguments)
    return Dispatch(op.__name__, chosen, reason, _passed_over(choice.names, chosen, refusals), path)


def _passed_over(names: tuple[str, ...], chosen: str, refusals: dict[str, str | None]) -> dict[str, str]:
    """Why each of the others is not selected: it cannot serve the call, comes later, or was not requested."""
    place = names.index(chosen)
    return {
        name: refusals[name] or (f"{chosen} takes precedence" if i > place else f"{chosen} was requested")
        for i, name in enumerate(names)
        if i != place
    }


def _arguments(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    signature = inspect.signature(op)
    try:
        call = signature.bind(*args, **kwargs)
    except TypeError as error:
        got = str(error).removeprefix("got ")  # "got an unexpected keyword argument"
        raise TypeError(
            f"explain_dispatch: args must be those of a call of {op.__name__}, got {got}; pass the arguments of the call"
        ) from None
    call.apply_defaults()
    fix = "pass the arguments of the call"
    for name, parameter in signature.parameters.items():
        value = call.arguments[name]
        if parameter.annotation != "Tensor":
            continue
        check_strided("explain_dispatch", name, value, fix)
        if value.dim() == 0:
            fail("explain_dispatch", name, "have at least one dimension", "none", fix)
    name = "q" if "q" in call.arguments else "x"
    if call.arguments[name].shape[-1] == 0:
        fail("explain_dispatch", name, "have at least one feature", tuple(call.arguments[name].shape), fix)
    dtype = call.arguments[name].dtype
    if dtype not in FLOATS:
        contract = "have dtype float32, bfloat16, float16 or float64"
        fail("explain_dispatch", name, contract, dtype_name(dtype), fix, TypeError)
    return call.arguments
