"""What a study is asked to do: what to measure and how long."""

from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import plugin
from .problem import Task


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure and how long."""

    op: str
    tasks: Sequence[Task]
    providers: Sequence[plugin.Entry]
    named: bool = False  # whether the user named them
    device: str
    out: Path
    title: str = ""  # the preset or the cases, for the report
    warm: bool = False
    seed: int = 0
    min_rounds: int = 5
    max_rounds: int = 30
    precision: float = 0.005  # rounds stop when every provider's relative standard error is below
    group_seconds: float = 8.0  # and no later than this after the first round of a group
    time_limit: float | None = None  # for all groups together; the smallest number of rounds is measured regardless
    timeout: float = 300.0  # of one request to a worker
    memory_limit: int | None = None  # resident bytes of one worker
    twin: bool = True  # measure one provider twice
    run: str | None = None  # its id; by default made from the time
    profiled: Sequence[str] = ()  # cases of which the record gets every provider's profile


def new_id(created: datetime.datetime) -> str:
    """A run's id: when it began, and something that no other run has."""
    return f"{created:%Y%m%dT%H%M%S}-{random.SystemRandom().getrandbits(32):08x}"


def request(options: Options) -> dict[str, Any]:
    """What was asked for, as the record has it."""
    o = options
    return {
        "op": o.op,
        "title": o.title,
        "cases": list(dict.fromkeys(t.case for t in o.tasks)),
        "dtypes": list(dict.fromkeys(t.dtype for t in o.tasks)),
        "passes": list(dict.fromkeys(t.pass_ for t in o.tasks)),
        "tasks": [t.to_json() for t in o.tasks],
        "providers": [e.name for e in o.providers],
        "places": {e.name: e.where for e in o.providers},
        "cache": "warm" if o.warm else "cold",
        "seed": o.seed,
        "rounds": [o.min_rounds, o.max_rounds],
        "precision": o.precision,
        "group_seconds": o.group_seconds,
        "time_limit": o.time_limit,
        "timeout": o.timeout,
        "memory_limit": o.memory_limit,
    }
