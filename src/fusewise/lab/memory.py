"""Memory of one call: peak above what was there when it began, and what a forward keeps for its backward.

On CUDA the caching allocator's own counters; on the CPU the allocation events of torch's profiler. Both see every
tensor and no memory that a library takes behind torch's back. None where it cannot be measured, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .timing import Work


@dataclass(frozen=True)
class Growth:
    """Bytes allocated by a function: at its highest point, and still at its end while its result lives."""

    peak: int
    kept: int


def growth(function: Callable[[], Any], device: torch.device) -> tuple[Any, Growth | None]:
    """The function's result and how memory grew while it ran."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        return result, Growth(peak, torch.cuda.memory_allocated(device) - before)
    # torch.profiler.profile is this, and loads Dynamo and sympy first: a second and more of every worker's time.
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        result = function()
    kineto = getattr(profile, "kineto_results", None)
    if kineto is None:
        return result, None
    events = [e for e in kineto.events() if e.name() == "[memory]"]
    level = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += int(event.nbytes())
        highest = max(highest, level)
    return result, Growth(highest, level)


def peak_bytes(work: Work, device: torch.device) -> int | None:
    """Highest extra memory during the timed step."""
    state = work.begin(0)
    grown: Growth | None = growth(lambda: work.step(state), device)[1]
    return None if grown is None else grown.peak


def held_bytes(forward: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor], device: torch.device) -> int | None:
    """What a forward keeps for its backward besides its inputs and outputs."""
    outputs, grown = growth(forward, device)
    if grown is None:
        return None
    known = {x.untyped_storage().data_ptr() for x in inputs}
    new = {y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in outputs}
    outside = sum(int(size) for pointer, size in new.items() if pointer not in known)
    return max(0, grown.kept - outside)
