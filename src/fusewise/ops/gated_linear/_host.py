"""The quick way on the host: calls of `gated_linear` and `geglu_linear` that make y alone on a CPU, taken by `host.cpp`.

Where it cannot be built, or is not, and for every call that is not of that kind, Python serves: slower, no different.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import PYFUNCTYPE, c_void_p, cast, py_object
from pathlib import Path

from torch import Tensor

from ..._shared import build, cpu, host
from . import _chunks

SOURCES = (Path(__file__).with_name("host.cpp"), Path(__file__).parent / "_cpu" / "gate.h", host.HEADER)

#: Given the arguments of `api.gated_linear` in order, y or None; of the extension once it is loaded.
gated_linear: Callable[..., Tensor | None] = host.not_loaded


def recipe() -> build.Recipe:
    """What the extension is built from."""
    names = ("FEW_ROWS", "CHUNK_ROWS", "CHUNK_BYTES", "ROW_MULTIPLE")
    sizes = tuple(f"-D{name}={getattr(_chunks, name)}" for name in names)
    return "gated-host", SOURCES, build.cxx(), (*host.flags(), *sizes)


def load(kernel: cpu.Kernel) -> None:
    """Have calls go from Python's arguments to `kernel`, the gate, from now on; the extension is built if need be.

    Raises:
        BuildError: it cannot be built here.
    """
    make = PYFUNCTYPE(py_object, c_void_p, c_void_p)(("fusewise_gated_host", build.library(*recipe())))
    extension = host.loaded(make(cast(kernel.run, c_void_p), kernel.parallel))
    global gated_linear
    gated_linear = extension.gated_linear


def unavailable(kernel: cpu.Kernel) -> str | None:
    """Why calls go through Python, or None if they do not. Nobody is made to wait for a build of this who did not ask for it."""
    return None if gated_linear is not host.not_loaded else _unavailable(kernel, build.loads())


@functools.cache
def _unavailable(kernel: cpu.Kernel, loads: int) -> str | None:
    """Looked for again after every library that this process has built or loaded."""
    try:
        if not build.built(*recipe()):
            return build.why_not(recipe())
        load(kernel)
    except build.BuildError as error:
        return str(error)
    return None
