"""Builds native code ahead of time, so that no call waits for a compiler. `fusewise build` calls this module, which
itself does not need the lab.

    fusewise.native.build()          for this machine
    fusewise.native.build("sm_90")   in an image that has nvcc and no GPU
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from ._shared import cuda
from ._shared.build import BuildError, Recipe, built, prepared
from .ops._common import dtype_name
from .ops.gated_linear import _cpu as gate
from .ops.gated_linear import _cuda as gated_cuda
from .ops.gated_linear import _host as gated_host
from .ops.gated_linear._problem import ACTIVATIONS
from .ops.qk_norm_rope import _cuda as qk_norm_rope_cuda
from .ops.rope import _cpu as rope
from .ops.rope import _cuda as rope_cuda
from .ops.rope import _host as rope_host
from .ops.rope_and_cache import _cuda as rope_and_cache_cuda

Capability = tuple[int, int]


@dataclass(frozen=True)
class Built:
    """One library: its path, or why it could not be built. `seconds`: build time, 0 if it was already there."""

    name: str
    path: Path | None
    seconds: float
    error: str = ""


def capabilities(architectures: tuple[str, ...]) -> tuple[Capability, ...]:
    """The compute capabilities for nvcc's architecture names, such as sm_90.

    Raises:
        ValueError: a name does not have that form, or is older than the kernels support.
    """
    found = []
    for name in architectures:
        match = re.fullmatch(r"sm_(\d+)(\d)", name)
        if match is None or (int(match[1]), int(match[2])) < cuda.OLDEST:
            oldest = "sm_{}{}".format(*cuda.OLDEST)
            raise ValueError(
                f"build: arch must be names like {oldest},sm_90, none older than {oldest}, got {name!r}; fix it"
            )
        found.append((int(match[1]), int(match[2])))
    return tuple(found)


def recipes(chosen: tuple[Capability, ...]) -> Iterator[tuple[str, Callable[[], Recipe]]]:
    """All libraries to build, by name: the host code, and the CUDA kernels. Without `chosen`, one library covers this
    machine's GPUs; otherwise each capability gets its own. Both are the libraries that a call on such a machine looks
    for.
    """
    yield "rope", rope.recipe
    yield "gate", gate.recipe
    if sys.platform == "linux":
        yield "rope-host", rope_host.recipe
        yield "gated-host", gated_host.recipe
    here = torch.version.hip is None and torch.cuda.is_available()
    for group in [(one,) for one in chosen] if chosen else [cuda.present()] if here else []:
        words = " ".join(f"sm_{major}{minor}" for major, minor in group)
        yield f"rope-cuda {words}", functools.partial(rope_cuda.recipe, group)
        yield f"rope-and-cache-cuda {words}", functools.partial(rope_and_cache_cuda.recipe, group)
        yield f"qk-norm-rope-cuda {words}", functools.partial(qk_norm_rope_cuda.recipe, group)
        if gated_cuda.CAPABILITY in group:
            for (dtype, tf32), activation in itertools.product(gated_cuda.KINDS, ACTIVATIONS):
                name = f"gated-linear-cuda {'tf32' if tf32 else dtype_name(dtype)} {activation}"
                yield name, functools.partial(gated_cuda.recipe, dtype, activation, tf32)


def build(*architectures: str) -> list[Built]:
    """Build all missing native code: for this machine's CPU and GPUs, or for GPU architectures by name, such as
    "sm_90", which needs nvcc but no GPU. The compilers are $CXX and $NVCC, or those on the PATH.

    Raises:
        ValueError: not the name of an architecture that the kernels support.
        BuildError (a RuntimeError): something could not be built; the message has the compilers' last lines. The rest
            is built.
    """
    made = list(build_all(capabilities(architectures)))
    if missed := [f"{one.name}: {one.error}" for one in made if one.path is None]:
        raise BuildError("\n".join(missed))
    return made


def build_all(chosen: tuple[Capability, ...] = ()) -> Iterator[Built]:
    """Like `build`, but yields each library, in order, once it is there; failures are yielded, not raised."""
    # A CUDA library itself is compiled by two to three processes.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        waiting = [pool.submit(_build_one, name, recipe) for name, recipe in recipes(chosen)]
        try:
            for future in waiting:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _build_one(name: str, recipe: Callable[[], Recipe]) -> Built:
    start = time.perf_counter()
    try:
        parts = recipe()
        there = built(*parts)
        path = prepared(*parts)
    except BuildError as error:
        return Built(name, None, time.perf_counter() - start, str(error))
    return Built(name, path, 0.0 if there else time.perf_counter() - start)
