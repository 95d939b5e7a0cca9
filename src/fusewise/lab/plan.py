"""Resolves and validates a request: cases, dtypes, passes, providers, timeouts and memory limits for the
coordinator."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import machine, plugin, targets
from .folder import file_name
from .names import shortened
from .options import Options, new_id
from .problem import DTYPES, PASSES, PRECISIONS, Pass, Task

#: Values of `--pass` and the passes they measure.
PASS_CHOICES: dict[str, tuple[Pass, ...]] = {
    "fwd": ("fwd",),
    "bwd": ("bwd",),
    "fwd+bwd": ("fwd+bwd",),
    "both": ("fwd", "bwd"),
}
#: Limit on a study's title in characters; a title may list many case names.
LONGEST_TITLE = 1000


@dataclass(frozen=True, kw_only=True)
class Request:
    """The request as given on the command line or through the API. None means the default of the preset or the
    machine."""

    target: str
    inputs: Sequence[str] = ()  # for a user's function
    preset: str | None = None
    cases: Sequence[str] = ()
    providers: Sequence[str] | None = None
    passes: str | None = None
    dtypes: Sequence[str] = ()
    device: str | None = None
    out: Path | None = None
    rounds: tuple[int, int] | None = None
    time_limit: float | None = None
    timeout: float = 300.0
    memory_limit: float | None = None  # GiB
    warm: bool = False
    seed: int = 0


def options(request: Request, out: Path) -> Options:
    """Validate and resolve the request. ValueError, with a fix, for anything that cannot be measured."""
    target, preset = targets.resolve(request.target, request.inputs, request.preset)
    if preset is not None and request.cases:
        raise ValueError("study: give --preset or --case, got both; leave one out")
    preset = preset or (None if request.cases else target.default_preset)
    where = device(request.device)
    chosen = [target.case(name) for name in dict.fromkeys(request.cases)] or target.cases(preset or "")
    for case in chosen:
        if (other := target.case(case.name).shape) != case.shape:  # by name a provider's process finds its case
            raise ValueError(
                f"study: cases must have names of their own, got {case.name!r} for {other} and for {case.shape}; rename one"
            )
    for dtype in request.dtypes:
        known = PRECISIONS if target.multiplies and where.startswith("cuda") else DTYPES
        if dtype not in known:
            only = " (tf32 is for matmuls on a GPU)" if dtype in PRECISIONS else ""
            raise ValueError(f"study: dtype must be one of {', '.join(known)}, got {dtype!r}{only}; choose one")
    if request.passes is not None and request.passes not in [*PASS_CHOICES]:
        raise ValueError(f"study: pass must be one of {', '.join(PASS_CHOICES)}, got {request.passes!r}; choose one")
    tasks = [
        Task(target.name, case.name, dtype, pass_, where, request.seed, target.detail(case))
        for case in chosen
        for dtype in (dict.fromkeys(request.dtypes) or case.dtypes)
        for pass_ in _passes(request.passes, case.passes)
    ]
    tasks = [*{task.key: task for task in tasks}.values()]  # a preset may list a case twice
    _check_numbers(request)
    if not tasks:
        have = ", ".join(dict.fromkeys(pass_ for case in chosen for pass_ in case.passes))
        raise ValueError(f"study: pass must be one that the cases have, {have}, got {request.passes!r}; choose one")
    extra = dict(target.hurried.get(preset or "", {}))
    if request.rounds is not None:
        low, high = request.rounds
        if not 3 <= low <= high:
            raise ValueError(f"study: rounds must be MIN:MAX with 3 <= MIN <= MAX, got {low}:{high}; try 5:30")
        extra |= {"min_rounds": low, "max_rounds": high}
    if request.time_limit is not None:
        extra["time_limit"] = request.time_limit
    providers = plugin.select(request.providers, target.name, where)
    gibibytes = request.memory_limit
    memory_limit = machine.worker_memory_limit() if gibibytes is None else int(gibibytes * 2**30)
    lacking = target.verify(tasks, request.timeout, memory_limit)  # last, because it takes seconds
    if request.passes is None:
        tasks = [task for task in tasks if task.pass_ not in lacking]
    return Options(
        op=target.name,
        tasks=tasks,
        providers=providers,
        named=request.providers is not None,
        device=where,
        out=out,
        title=shortened(preset or ", ".join(dict.fromkeys(request.cases)) or target.name, LONGEST_TITLE),
        warm=request.warm,
        seed=request.seed,
        timeout=request.timeout,
        memory_limit=memory_limit,
        profiled=target.profiled.get(preset or "", ()),
        **extra,
    )


def _check_numbers(request: Request) -> None:
    """ValueError for numbers that clocks, records or random generators reject, NaN and infinity among them."""
    for name, value, unit in (
        ("time_limit", 0 if request.time_limit is None else request.time_limit, "seconds"),
        ("timeout", request.timeout, "seconds"),
        ("memory_limit", 0 if request.memory_limit is None else request.memory_limit, "GiB"),
    ):
        # in bytes, too, a float has room for it, also of an integer
        if not (isinstance(value, int | float) and 0 <= value * 2**30 <= sys.float_info.max):
            raise ValueError(
                f"study: {name} must be a finite number of {unit}, at least 0, got {value!r}; leave it out for the default"
            )
    if not isinstance(request.seed, int) or isinstance(request.seed, bool):  # torch refuses a bool, too
        raise ValueError(f"study: seed must be an integer, got {request.seed!r}; leave it out for 0")
    if not -(2**63) <= request.seed < 2**64:
        raise ValueError(f"study: seed must fit into 64 bits, got {request.seed}; choose a smaller one")


def _passes(wanted: str | None, of_case: Sequence[Pass]) -> Sequence[Pass]:
    """The passes to measure: those of the case, restricted to those requested."""
    if wanted is None:
        return of_case
    if wanted == "fwd+bwd":  # needs both passes, which a case may list separately
        return ("fwd+bwd",) if {"fwd", "bwd"} <= set(of_case) or "fwd+bwd" in of_case else ()
    return [p for p in PASSES if p in PASS_CHOICES[wanted] and p in of_case]


def device(name: str | None, verb: str = "study") -> str:
    """Resolve a device name; None means this machine's default, and `cuda` under torchrun the GPU of the local rank.
    `verb` prefixes the error messages."""
    if name is None:
        return machine.default_device()
    try:
        found = torch.device(name)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(
            f"{verb}: device must be cpu or cuda[:index], got {name!r}; leave it out for this machine's own"
        )
    if found.type == "cpu":
        return "cpu"
    index, count = found.index, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index is None and count:
        return machine.default_device()
    if index is None or index >= count:
        raise ValueError(
            f"{verb}: device must be one of the {count} CUDA devices that torch sees, got {name!r}; try --device cpu"
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"{verb}: device must be one for each rank of this machine, got {name!r} for all, which would disturb each "
            "other; say --device cuda"
        )
    return f"cuda:{index}"


def run_directory(request: Request) -> Path:
    """The run directory: the one requested, or a new one named after the preset."""
    if request.out is not None:
        return request.out
    target, preset = targets.resolve(request.target, request.inputs, request.preset)
    return new_directory(preset or ("cases" if request.cases else target.default_preset or target.name))


def new_directory(name: str) -> Path:
    """A run directory that no other study has, even one that starts in the same second, as one for each GPU does."""
    return Path("fusewise-runs") / f"{file_name(name)}-{new_id(datetime.datetime.now())}"
