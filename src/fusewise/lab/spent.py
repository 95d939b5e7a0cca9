"""Where a study's time goes: measuring, compiling, and the overhead of the harness.

Wall-clock seconds by part. Workers report the parts of each preparation; where several prepare concurrently, their
parts are scaled to the elapsed time, so that the parts always add up to the study's duration.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

#: The parts and what each includes. `rest` is the remainder.
PARTS = {
    "starting": "starting processes: loading Python, torch and the providers' libraries",
    "inputs": "creating the problems' tensors",
    "truth": "the float64 reference, and every provider's errors against it",
    "compiling": "building providers and their first calls, compilation included",
    "measuring": "memory, warm-up and timed rounds",
    "code": "code, traffic and profiles, generated after the last round by the compilers themselves",
    "rest": "rows, files, messages between processes",
}
#: Harness overhead: neither measuring nor compiling nor capturing code.
OWN = ("starting", "inputs", "truth", "rest")


class Parts:
    """Seconds by part, of one process or one phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the duration of the block, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add({name: time.perf_counter() - start})

    def add(self, more: Mapping[str, float]) -> None:
        for name, seconds in more.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def scaled(parts: Sequence[Mapping[str, float]], wall: float) -> dict[str, float]:
    """The parts of several workers scaled to the elapsed time: proportionally where they overlapped, unchanged if their
    sum fits, since then they ran one after another."""
    total = Parts()
    for mine in parts:
        total.add(mine)
    whole = sum(total.seconds.values())
    factor = min(1.0, wall / whole) if whole else 1.0
    return {name: seconds * factor for name, seconds in total.seconds.items()}


def completed(parts: Mapping[str, float], wall: float) -> dict[str, float]:
    """All parts in order, adding up to `wall`: the difference is the rest."""
    known = {name: parts.get(name, 0.0) for name in PARTS if name != "rest"}
    return {**known, "rest": max(0.0, wall - sum(known.values()))}


def own_share(spent: Mapping[str, float]) -> float | None:
    """Harness overhead as a share of all seconds; None for a study that took none."""
    whole = sum(spent.values())
    return sum(spent.get(name, 0.0) for name in OWN) / whole if whole else None
