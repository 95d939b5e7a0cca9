"""Native code built ahead of time, so that no call waits for a compiler: what `fusewise build` does, which needs the lab; this
does not.

    fusewise.native.build()          for this machine
    fusewise.native.build("sm_90")   in an image that has nvcc and no GPU
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ._shared import cuda
from ._shared.build import BuildError, Recipe, built, prepared
from .ops.gated_linear import _cpu as gate
from .ops.gated_linear import _cuda as gated_cuda
from .ops.gated_linear import _host as gated_host
from .ops.gated_linear._problem import ACTIVATIONS
from .ops.rope import _cpu as rope
from .ops.rope import _cuda as rope_cuda
from .ops.rope import _host as rope_host
from .ops.rope_and_cache import _cuda as rope_and_cache_cuda

Capability = tuple[int, int]


@dataclass(frozen=True)
class Built:
    """One library: where it is, or why it is not; `seconds` is what building it took, 0 if it was there."""

    name: str
    path: Path | None
    seconds: float
    error: str = ""


def capabilities(architectures: tuple[str, ...]) -> tuple[Capability, ...]:
    """The compute capabilities that nvcc's names, as sm_90, stand for.

    Raises:
        ValueError: a name is not of that form, or older than the kernels.
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
    """What there is to build, by name: the code for the host, and the kernels for the GPUs of this machine, in one
    library as a call looks for it, or for each of the chosen capabilities in one of its own, as a machine with GPUs of
    that kind looks for it."""
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
        if gated_cuda.CAPABILITY in group:
            for dtype, activation in itertools.product(gated_cuda.DTYPES, ACTIVATIONS):
                name = f"gated-linear-cuda {str(dtype).removeprefix('torch.')} {activation}"
                yield name, functools.partial(gated_cuda.recipe, dtype, activation)


def build(*architectures: str) -> list[Built]:
    """Build all native code that is not there yet: for the CPU and the GPUs of this machine, or for GPUs by name, as "sm_90",
    which needs nvcc and no GPU. The compilers are $CXX and $NVCC, or those on the PATH.

    Raises:
        ValueError: a name is none of a GPU that the kernels run on.
        BuildError (a RuntimeError): something could not be built; the message has the compilers' last lines. The rest is.
    """
    made = list(build_all(capabilities(architectures)))
    if missed := [f"{one.name}: {one.error}" for one in made if one.path is None]:
        raise BuildError("\n".join(missed))
    return made


def build_all(chosen: tuple[Capability, ...] = ()) -> Iterator[Built]:
    """As `build`, one library after the other, whatever becomes of it."""
    for name, recipe in recipes(chosen):
        start = time.perf_counter()
        try:
            parts = recipe()
            there = built(*parts)
            path = prepared(*parts)
        except BuildError as error:
            yield Built(name, None, time.perf_counter() - start, str(error))
        else:
            yield Built(name, path, 0.0 if there else time.perf_counter() - start)
