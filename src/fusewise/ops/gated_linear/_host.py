"""Host fast path of the gated linear unit: `host.cpp` serves inference calls of `gated_linear` and `geglu_linear`, the unit in
those of `gated_mlp`, and what their autograd functions compute.

    done = _host.gated_linear(*arguments)                # None: unsupported, or new on a GPU; continue in Python
    _host.remember(_host.ONLY_Y, *arguments)             # after Python has served it
    made = _host.kept(*arguments)                        # y and both pre-activations, or None
    done = _host.gradients(dy, made[1], …, *arguments)   # the gradients, or None; behind a down projection `mlp_gradients`

Once it is loaded it also implements the registered operators, which torch.compile's graphs call. If it is not built, and for every
other call, Python serves: slower, with the same result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from ctypes import PYFUNCTYPE, c_void_p, cast, py_object
from pathlib import Path
from typing import Any

from torch import Tensor

from ..._shared import build, cpu, host
from . import _chunks, _onednn
from ._problem import Halves, Spec, rows

#: What the extension's functions and operators compute: y, y and both pre-activations, the gradients, those behind a down projection,
#: only that of the pre-activations. As in `host_call.h`.
ONLY_Y, KEEPING, BACKWARD, MLP_BACKWARD, GRADIENT = range(5)

_NAMES = ("host.cpp", "host_call.h", "host_gpu.h", "_cpu/gate.h", "_cuda/plan.h")
SOURCES = (*(Path(__file__).parent / name for name in _NAMES), *host.HEADERS)

#: The extension's function once it is loaded: takes the arguments of `api.gated_linear` in order, returns y or None.
gated_linear: Callable[..., Tensor | None] = host.not_loaded
#: Takes the same arguments; y and both pre-activations in one tensor, or None.
kept: Callable[..., tuple[Tensor, Tensor] | None] = host.not_loaded
#: The gradients from dy and these, see `host.cpp`; None: continue in Python.
gradients: Callable[..., tuple[Tensor | None, ...] | None] = host.not_loaded
#: The same behind a down projection, from dz.
mlp_gradients: Callable[..., tuple[Tensor | None, ...] | None] = host.not_loaded
#: Takes one of the five and the arguments of its function; whether this is a GPU call that can be cached and is not cached yet.
_new: Callable[..., Any] = host.not_loaded
_with_gate = False  # whether the extension has the CPU gate


def recipe() -> build.Recipe:
    """Build recipe of the extension."""
    names = ("FEW_ROWS", "CHUNK_ROWS", "CHUNK_BYTES", "ROW_MULTIPLE")
    sizes = tuple(f"-D{name}={getattr(_chunks, name)}" for name in names)
    return "gated-host", SOURCES, build.cxx(), (*host.flags(), *sizes, f"-DONEDNN_WORTH={_onednn.WORTH}")


@functools.cache
def extension() -> Any:
    """The loaded extension, built if necessary.

    Raises:
        BuildError: it cannot be built here.
    """
    module = host.loaded(PYFUNCTYPE(py_object)(("fusewise_gated_host", build.library(*recipe())))())
    module.operators()
    global gated_linear, kept, gradients, mlp_gradients, _new
    gated_linear, kept = module.gated_linear, module.kept
    gradients, mlp_gradients, _new = module.gradients, module.mlp_gradients, module.new
    return module


def load(kernel: cpu.Kernel | None = None) -> None:
    """Enable the fast path, building the extension if necessary; for CPU calls with `kernel`, the gate.

    Raises:
        BuildError: it cannot be built here.
    """
    global _with_gate
    module = extension()
    if kernel is not None:
        module.on_cpu(cast(kernel.run, c_void_p).value, kernel.parallel or 0, _onednn.there() and not build.FORKED)
        _with_gate = True


def unavailable(kernel: cpu.Kernel | None = None) -> str | None:
    """Why calls go through Python, or None if they do not: CPU calls with `kernel`, the gate; GPU calls without it.
    Does not build the extension: no call waits for a build that it did not ask for."""
    if gated_linear is not host.not_loaded and (kernel is None or _with_gate):
        return None
    return _unavailable(kernel, build.loads())


def explain(kernel: cpu.Kernel | None = None) -> str:
    """Explains why the host overhead of calls is higher than necessary; empty if it is not."""
    reason = unavailable(kernel)
    return f"without the host fast path of gated_linear, geglu_linear and gated_mlp: {reason}" if reason else ""


@functools.cache
def _unavailable(kernel: cpu.Kernel | None, loads: int) -> str | None:
    """Cached until this process builds or loads another library (`loads` is `build.loads()`)."""
    try:
        if not build.built(*recipe()):
            return build.why_not(recipe())
        load(kernel)
    except build.BuildError as error:
        return str(error)
    return None


def arguments_of(x: Tensor, weights: Sequence[Tensor | None], spec: Spec, impl: str) -> tuple[Any, ...]:
    """The arguments of `api.gated_linear` for an operator's call on these weights."""
    weight, w_gate, bias, b_gate = weights
    layout = "stacked" if spec.layout == "separate" else spec.layout
    return x, weight, bias, spec.activation, w_gate, b_gate, layout, spec.gate_first, "preact", impl


def remember(job: int, *asked: Any) -> None:
    """Cache the implementation chosen for what Python has just served: when the function of `job` is next asked for the like, it
    goes directly to the launcher, or to Python at once if there is none. `asked` are its arguments."""
    if not _new(job, *asked):
        return
    from . import _op

    if job == GRADIENT:
        dy, preact, text, impl, _ = asked
        spec = Spec.decode(text)
        serving = _op.taking_gradient(impl, spec, dy, preact, preact)
        return _keep(job, asked, serving, "gate", dy, dy.shape[1], spec.activation)
    *given, x, weight, _, activation, w_gate, _, layout, gate_first, _, impl = asked
    spec = Spec(activation, "separate" if w_gate is not None else layout, gate_first)
    halves, matrix = Halves.of(spec, weight, w_gate), rows(x)
    hidden = halves.value.shape[0]
    if job == ONLY_Y:
        kernel, serving = "y", _op.serving(impl, "y", spec, hidden, matrix, halves.value, halves.gate)
    elif job == KEEPING:
        kernel, serving = "preact", _op.keeping(impl, spec, matrix, halves)
    elif job == BACKWARD:
        kernel, serving = "gate", _op.taking_gradient(impl, spec, given[0], given[1], given[1])
    else:
        kernel, serving = "down", _op.taking_down_gradient(impl, spec, given[0], given[-1])
    _keep(job, asked, serving, kernel, matrix, hidden, activation)


def _keep(job: int, asked: tuple[Any, ...], serving: Any, *kernel: Any) -> None:
    """Tell the extension how the module that serves a call launches its kernel; zeros if not from C++."""
    launcher = getattr(serving, "launcher", None)
    extension().remember(job, asked, *(launcher(*kernel) if launcher else (0, 0, 0, 0)))
