"""A resolved study request: what to measure, and for how long."""

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
    """What to measure, and for how long."""

    op: str
    tasks: Sequence[Task]
    providers: Sequence[plugin.Entry]
    named: bool = False  # whether the user named the providers
    device: str
    out: Path
    title: str = ""  # preset or cases, for the report
    warm: bool = False
    seed: int = 0
    min_rounds: int = 5
    max_rounds: int = 30
    precision: float = 0.005  # stop once every provider's relative standard error is below this
    group_seconds: float = 8.0  # or once its rounds have taken this long, the first included
    time_limit: float | None = None  # seconds for all groups; min_rounds are measured regardless, in shorter turns
    timeout: float = 300.0  # seconds per request to a worker
    memory_limit: int | None = None  # resident bytes per worker
    twin: bool = True  # run an A/A test
    run: str | None = None  # run id; by default derived from the time
    profiled: Sequence[str] = ()  # cases to profile with every provider


def new_id(created: datetime.datetime) -> str:
    """A unique run id: the start time plus random bits."""
    return f"{created:%Y%m%dT%H%M%S}-{random.SystemRandom().getrandbits(32):08x}"


def request(options: Options) -> dict[str, Any]:
    """The request as stored in the record."""
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
