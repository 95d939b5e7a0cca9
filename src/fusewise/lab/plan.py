"""From what the user asked for to what the coordinator does: cases, dtypes, passes, providers and limits of time."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import machine, plugin, targets
from .folder import file_name
from .names import shortened
from .options import Options
from .problem import DTYPES, PASSES, Pass, Task

#: `--pass` and the passes that it measures.
PASS_CHOICES: dict[str, tuple[Pass, ...]] = {
    "fwd": ("fwd",),
    "bwd": ("bwd",),
    "fwd+bwd": ("fwd+bwd",),
    "both": ("fwd", "bwd"),
}
#: Characters of a study's title, which may be the names of many cases.
LONGEST_TITLE = 1000


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line, or a caller, as it stands. None: the preset's or the machine's own."""

    target: str
    inputs: Sequence[str] = ()  # of a user's function
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
    """Check the request and resolve it. ValueError with a fix for anything that cannot be measured."""
    target, preset = targets.resolve(request.target, request.inputs)
    if (request.preset or preset) is not None and request.cases:
        raise ValueError("study: give --preset or --case, got both; leave one out")
    preset = request.preset or preset or (None if request.cases else target.default_preset)
    where = device(request.device)
    chosen = [target.case(name) for name in dict.fromkeys(request.cases)] or target.cases(preset or "")
    for dtype in request.dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"study: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}; choose one")
    if request.passes is not None and request.passes not in [*PASS_CHOICES]:
        raise ValueError(f"study: pass must be one of {', '.join(PASS_CHOICES)}, got {request.passes!r}; choose one")
    tasks = [
        Task(target.name, case.name, dtype, pass_, where, request.seed, target.detail(case))
        for case in chosen
        for dtype in (dict.fromkeys(request.dtypes) or case.dtypes)
        for pass_ in _passes(request.passes, case.passes)
    ]
    _check_numbers(request)
    if not tasks:
        raise ValueError(f"study: pass must be one that the cases have, got {request.passes!r}; try --pass fwd")
    extra = dict(target.hurried.get(preset or "", {}))
    if request.rounds is not None:
        low, high = request.rounds
        if not 3 <= low <= high:
            raise ValueError(f"study: rounds must be MIN:MAX with 3 <= MIN <= MAX, got {low}:{high}; try 5:30")
        extra |= {"min_rounds": low, "max_rounds": high}
    if request.time_limit is not None:
        extra["time_limit"] = request.time_limit
    providers = plugin.select(request.providers, target.name, where)
    memory_limit = _memory_limit(request.memory_limit)
    lacking = target.verify(tasks, request.timeout, memory_limit)  # the last, since it takes seconds
    if request.passes is None:
        tasks = [task for task in tasks if task.pass_ not in lacking]
    return Options(
        op=target.name,
        tasks=tasks,
        providers=providers,
        named=request.providers is not None,
        device=where,
        out=out,
        title=shortened(preset or ", ".join(request.cases) or target.name, LONGEST_TITLE),
        warm=request.warm,
        seed=request.seed,
        timeout=request.timeout,
        memory_limit=memory_limit,
        profiled=target.profiled.get(preset or "", ()),
        **extra,
    )


def _check_numbers(request: Request) -> None:
    """ValueError for what no clock, no record and no generator of random numbers takes: NaN and infinity, too."""
    for name, value, unit in (
        ("time_limit", request.time_limit, "seconds"),
        ("timeout", request.timeout, "seconds"),
        ("memory_limit", request.memory_limit, "GiB"),
    ):
        # in bytes, too, a float has room for it
        if value is not None and not (isinstance(value, int | float) and 0 <= value * 2**30 < math.inf):
            raise ValueError(
                f"study: {name} must be a finite number of {unit}, at least 0, got {value!r}; leave it out for the default"
            )
    if not isinstance(request.seed, int):
        raise ValueError(f"study: seed must be an integer, got {request.seed!r}; leave it out for 0")
    if not -(2**63) <= request.seed < 2**64:
        raise ValueError(f"study: seed must fit into 64 bits, got {request.seed}; choose a smaller one")


def _passes(wanted: str | None, of_case: Sequence[Pass]) -> Sequence[Pass]:
    """The passes to measure: those the case is made for, as far as they were asked for."""
    if wanted is None:
        return of_case
    if wanted == "fwd+bwd":  # the sum of two passes that the case has
        return ("fwd+bwd",) if {"fwd", "bwd"} <= set(of_case) or "fwd+bwd" in of_case else ()
    return [p for p in PASSES if p in PASS_CHOICES[wanted] and p in of_case]


def device(name: str | None, verb: str = "study") -> str:
    """The device of a name, or this machine's own. Under torchrun `cuda` is the GPU of this process's local rank. `verb`: whose
    the message is."""
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
        raise ValueError(f"{verb}: device must be one of {count} CUDA devices, got {name!r}; try --device cpu")
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"{verb}: device must be one for each rank of this machine, got {name!r} for all, which would disturb each "
            "other; say --device cuda"
        )
    return f"cuda:{index}"


def _memory_limit(gibibytes: float | None) -> int | None:
    """Bytes of resident memory for one worker; by default four fifths of the machine's."""
    if gibibytes is not None:
        return int(gibibytes * 2**30)
    total = machine.memory_bytes()
    return None if total is None else total * 4 // 5


def run_directory(request: Request, stamp: str) -> Path:
    """Where a run goes when no directory is named."""
    if request.out is not None:
        return request.out
    target, preset = targets.resolve(request.target, request.inputs)
    name = request.preset or preset or ("cases" if request.cases else target.default_preset or target.name)
    return Path("fusewise-runs") / f"{file_name(name)}-{stamp}"
