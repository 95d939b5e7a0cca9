"""Where a study's time goes: what measuring and compiling take, and what the harness takes for itself.

Seconds on the wall, by part. Workers tell how long each part of a preparation took; where several prepare side by side
their parts are scaled to the time that passed, so that the parts always add up to the study's own seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

#: The parts, with what belongs to each. `rest` is what no other part claims: rows, files, messages between processes.
PARTS = {
    "starting": "starting processes: Python, torch and the providers' libraries are loaded",
    "inputs": "making the problems' tensors",
    "truth": "the float64 reference, and every provider's errors against it",
    "compiling": "building providers and their first calls, compilation included",
    "measuring": "memory, warm-up and timed rounds",
    "code": "code, traffic and profiles, made after the last round by the compilers themselves",
    "rest": "rows, files, messages between processes",
}
#: What is not measuring and not compiling.
OWN = ("starting", "inputs", "truth", "rest")


class Parts:
    """Seconds by part, of one process or one phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block, however it ends."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add({name: time.perf_counter() - start})

    def add(self, more: Mapping[str, float]) -> None:
        for name, seconds in more.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def scaled(parts: Sequence[Mapping[str, float]], wall: float) -> dict[str, float]:
    """The parts of several workers as shares of the time that passed while they worked: as they are where they fit into
    it, since then they came one after another, and in proportion where they overlapped."""
    total = Parts()
    for mine in parts:
        total.add(mine)
    whole = sum(total.seconds.values())
    factor = min(1.0, wall / whole) if whole else 1.0
    return {name: seconds * factor for name, seconds in total.seconds.items()}


def completed(parts: Mapping[str, float], wall: float) -> dict[str, float]:
    """Every part, in their order, adding up to `wall`: what is missing is the rest."""
    known = {name: parts.get(name, 0.0) for name in PARTS if name != "rest"}
    return {**known, "rest": max(0.0, wall - sum(known.values()))}


def own_share(spent: Mapping[str, float]) -> float | None:
    """The harness's own share of all seconds; None for a study that took none."""
    whole = sum(spent.values())
    return sum(spent.get(name, 0.0) for name in OWN) / whole if whole else None
