"""The quick way on the host: calls of `gated_linear` and `geglu_linear` that make y alone, and the unit of such a
`gated_mlp`, taken by `host.cpp`.

    done = _host.gated_linear(*arguments)       # None: not such a call, or new on a GPU; go on in Python
    _host.remember(*arguments)                  # then

Where it cannot be built, or is not, and for every call that is not of that kind, Python serves: slower, no different.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import PYFUNCTYPE, c_void_p, cast, py_object
from pathlib import Path
from typing import Any

from torch import Tensor

from ..._shared import build, cpu, host
from . import _chunks, _onednn
from ._problem import Halves, Spec, rows

_NAMES = ("host.cpp", "host_call.h", "host_gpu.h", "_cpu/gate.h", "_cuda/plan.h")
SOURCES = (*(Path(__file__).parent / name for name in _NAMES), host.HEADER)

#: Given the arguments of `api.gated_linear` in order, y or None; of the extension once it is loaded.
gated_linear: Callable[..., Tensor | None] = host.not_loaded
#: Given the same, whether this is a call on a GPU that could be kept and is not.
_new: Callable[..., Any] = host.not_loaded
_with_gate = False  # whether the extension has the gate of a CPU


def recipe() -> build.Recipe:
    """What the extension is built from."""
    names = ("FEW_ROWS", "CHUNK_ROWS", "CHUNK_BYTES", "ROW_MULTIPLE")
    sizes = tuple(f"-D{name}={getattr(_chunks, name)}" for name in names)
    return "gated-host", SOURCES, build.cxx(), (*host.flags(), *sizes, f"-DONEDNN_WORTH={_onednn.WORTH}")


@functools.cache
def extension() -> Any:
    """The loaded extension, built if need be.

    Raises:
        BuildError: it cannot be built here.
    """
    made = host.loaded(PYFUNCTYPE(py_object)(("fusewise_gated_host", build.library(*recipe())))())
    global gated_linear, _new
    gated_linear, _new = made.gated_linear, made.new
    return made


def load(kernel: cpu.Kernel | None = None) -> None:
    """Have calls go from Python's arguments to the kernels from now on, on a CPU to `kernel`, the gate; the extension is
    built if need be.

    Raises:
        BuildError: it cannot be built here.
    """
    global _with_gate
    made = extension()
    if kernel is not None:
        made.on_cpu(cast(kernel.run, c_void_p).value, kernel.parallel or 0, _onednn.there())
        _with_gate = True


def unavailable(kernel: cpu.Kernel | None = None) -> str | None:
    """Why calls go through Python, or None if they do not: on a CPU those with `kernel`, the gate; without it on a GPU.
    Nobody is made to wait for a build of this who did not ask for it."""
    if gated_linear is not host.not_loaded and (kernel is None or _with_gate):
        return None
    return _unavailable(kernel, build.loads())


def told(kernel: cpu.Kernel | None = None) -> str:
    """Why calls take longer on the host than they need to, in words; empty if they do not."""
    reason = unavailable(kernel)
    return f"without the quick way on the host of gated_linear, geglu_linear and gated_mlp: {reason}" if reason else ""


@functools.cache
def _unavailable(kernel: cpu.Kernel | None, loads: int) -> str | None:
    """Looked for again after every library that this process has built or loaded."""
    try:
        if not build.built(*recipe()):
            return build.why_not(recipe())
        load(kernel)
    except build.BuildError as error:
        return str(error)
    return None


def remember(*arguments: Any) -> None:
    """Keep what has been chosen for a call that Python has just served: the next goes to the launcher of the implementation
    that made y, or to Python at once if that has none. `arguments` as above."""
    if not _new(*arguments):
        return
    from . import _op

    x, weight, _, activation, w_gate, _, layout, gate_first, _, impl = arguments
    spec = Spec(activation, "separate" if w_gate is not None else layout, gate_first)
    value, gate, *_ = Halves.of(spec, weight, w_gate)
    matrix = rows(x)
    serving = _op.serving(impl, spec, value.shape[0], matrix, value, gate, alone=True)
    launcher = getattr(serving, "launcher", None)
    extension().remember(arguments, *(launcher(matrix, value.shape[0], activation) if launcher else (0, 0, 0, 0)))
