"""Host fast path of RoPE: the extension in `host.cpp` replays repeated calls of `rope`, `rope_`, `rope_and_cache_` and
`qk_norm_rope`.

    done = _host.rope(q, k, cos, …, impl)                   # None: not cached, continue in Python
    _host.remember(_host.NEW, arguments, call, reach, out)  # after the first call

A repeated call runs no Python between its arguments and its launch. Once loaded, the extension also implements the
registered operators, which torch.compile graphs call. If it cannot be built (no compiler, no Python headers), and for
implementations that are not native code, every call goes through Python: slower, with the same result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import PYFUNCTYPE, py_object
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._shared import build, host
from ..._shared.host import through_python as through_python
from .._register import without_tail
from ._auto import serving
from ._native import planned
from ._problem import Spec, layout_dims, rotated_rank

_PLANS = ("plan.h", "../rope_and_cache/plan.h", "../qk_norm_rope/plan.h")
_NAMES = ("host.cpp", "host_call.h", "host_backward.h", "host_operators.h", *_PLANS)
SOURCES = (*(Path(__file__).parent / name for name in _NAMES), *host.HEADERS)


NEW, GIVEN, IN_PLACE, CACHED, NORMED, NORM_GRAD = range(6)  # where the output goes, `Form` of host_call.h

# The functions of the extension once it is loaded. They take the arguments of `api.rope` (without and with `out`) or
# `api.rope_` in order and return the result of these, or None without side effects for a call that is not cached or not
# supported. The last two take the arguments of `api.rope` followed by the others of `rope_and_cache_` or `qk_norm_rope`;
# `rope_and_cache_` returns True.
rope: Callable[..., Any] = host.not_loaded
rope_out: Callable[..., Any] = host.not_loaded
rope_: Callable[..., Any] = host.not_loaded
rope_and_cache_: Callable[..., Any] = host.not_loaded
qk_norm_rope: Callable[..., Any] = host.not_loaded


def recipe() -> build.Recipe:
    """Build recipe of the extension."""
    return "rope-host", SOURCES, build.cxx(), host.flags()


@functools.cache
def extension() -> Any:
    """The loaded extension, built if necessary.

    Raises:
        BuildError: it cannot be built here.
    """
    from ._op import gradients  # which imports this module

    library = build.library(*recipe())
    make = PYFUNCTYPE(py_object, py_object, py_object, py_object)(("fusewise_rope_host", library))
    module = host.loaded(make(gradients, _norm_gradients, _planned))
    global rope, rope_out, rope_, rope_and_cache_, qk_norm_rope
    rope, rope_out, rope_, rope_and_cache_ = module.rope, module.rope_out, module.rope_, module.rope_and_cache_
    qk_norm_rope = module.qk_norm_rope
    return module


def unavailable(device_type: str, impl: str) -> str | None:
    """Why repeated calls with `impl` still go through Python, or None if they do not.

    The build takes half a minute, so no call triggers it implicitly: the extension is used once `fusewise build` has
    built it, or a first call with impl="cuda", which compiles more than this.
    """
    if rope is not host.not_loaded:
        return None
    return _unavailable(device_type == "cuda" and impl == "cuda", build.loads())


@functools.cache
def _unavailable(build_it: bool, loads: int) -> str | None:
    """Cached until this process builds or loads another library (`loads` is `build.loads()`)."""
    try:
        if not build_it and not build.built(*recipe()):
            return build.why_not(recipe())
        extension()
    except build.BuildError as error:
        return str(error)
    return None


def served(implementation: Any, device_type: str, impl: str) -> None:
    """Load the extension after native code served a Python operator, so that it takes the next call."""
    if hasattr(implementation, "register"):
        unavailable(device_type, impl)


def _norm_gradients(*arguments: Any) -> tuple[Tensor | None, ...]:
    from ..qk_norm_rope._op import gradients

    return tuple(gradients(*arguments))


def _planned(form: int, arguments: tuple[Any, ...], ys: tuple[Tensor, ...]) -> tuple[bytes, int] | None:
    """The packed plan of an operator call that Python has just served, for the extension's cache; None if no native
    code served it. `arguments` are the operator's, without lists and what describes outputs, `ys` its outputs for q and k."""
    packed: Callable[..., tuple[bytes, int]]
    call: tuple[Any, ...]
    *given, impl = arguments
    if form == CACHED:
        from ..rope_and_cache import _native, _op

        given = _op.without_tails(given)
        implementation = _op.serving(impl, ys[0], given[-1])
        packed, call = _native.planned, (*given, len(ys) == 2)
    elif form in (NORMED, NORM_GRAD):
        from ..qk_norm_rope import _native as norms
        from ..qk_norm_rope import _op as norm_op
        from ..qk_norm_rope._problem import Norm

        lists = 3 if form == NORM_GRAD else 2
        pairs = [tuple(x for x in given[2 * i : 2 * i + 2] if x is not None) for i in range(lists)]
        *dys, xs, weights = pairs
        rotation = tuple(given[2 * lists : -3])
        implementation = norm_op.serving(impl, xs, weights, rotation)
        packed = norms.planned_backward if dys else norms.planned
        call = (*dys, xs, ys, weights, rotation, Norm(*given[-3:]))
    else:
        rest, rank = given[len(ys) :], rotated_rank(given[-1])
        ys = tuple([without_tail(y, rank) for y in ys])
        xs = ys if form == IN_PLACE else tuple(given[: len(ys)])
        implementation = serving(impl, xs, ys, rest[-1])
        packed, call = planned, (xs, ys, rest)
    if not hasattr(implementation, "register"):
        return None
    implementation.register(extension())
    return packed(*call)


def forget() -> None:
    """Clear the cache, so that the next calls go through Python, where the selection may have changed."""
    if rope is not host.not_loaded:
        extension().forget()


def remember(form: int, arguments: tuple[Any, ...], call: tuple[Any, ...], reach: float, out: Any) -> None:
    """Cache a RoPE call that has just succeeded, if a native implementation served it.

    `arguments` are those of the extension's function, `call` the result of `validated`, `reach` the largest int offset
    for which it holds, and `out` the returned value.
    """
    if without(call[-1]):
        return
    q, *rest = arguments[:2]
    rotation, spec, impl = call[:-1], *call[-2:]
    xs = (q,) if rest == [None] else (q, *rest)
    ys: tuple[Tensor, ...] = out if isinstance(out, tuple) else (out,)
    host = keeper(form, arguments, serving(impl, xs, ys, spec), impl)
    if host is None:
        return
    # Strides of new tensors like xs, which include the gradients.
    dense = [
        list(y.stride() if form == NEW else torch.empty_like(x, device="meta").stride())
        for x, y in zip(xs, ys, strict=True)
    ]
    host.remember(form, arguments, *planned(xs, ys, rotation), reach, dims_of(spec), dense, spec, impl)


def dims_of(spec: str) -> tuple[int, int, int]:
    """The dimensions of q that are batch (-1: none), token and head."""
    b_dim, t_dim, h_dim = layout_dims(Spec.decode(spec).layout)
    return -1 if b_dim is None else b_dim, t_dim, h_dim


def without(impl: str) -> bool:
    """Whether a call cannot use the fast path: because of its implementation, or because it is traced (also if
    torch.compile broke the graph in the caller and traces this function)."""
    return impl in ("triton", "reference") or torch.compiler.is_compiling()


def keeper(form: int, arguments: tuple[Any, ...], implementation: Any, impl: str) -> Any:
    """The extension, if it should cache a call that `implementation` has just served as native code (whose entry point
    it gets); None for other implementations and for calls that are already cached."""
    register = getattr(implementation, "register", None)
    if register is None or unavailable(arguments[0].device.type, impl) is not None:
        return None
    host = extension()
    if not host.new(form, arguments):
        return None
    register(host)
    return host
