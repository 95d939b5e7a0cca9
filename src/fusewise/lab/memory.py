"""Memory of one call: its peak above the level at its start, and what a forward keeps for its backward.

Uses the counters of the caching allocator on CUDA and the allocation events of torch's profiler on a CPU. Both see
every tensor but no memory that a library allocates outside torch. The answer is None where it cannot be measured.
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
    """Bytes allocated by a function: at the peak, and at its end while its result is alive."""

    peak: int
    kept: int


def growth(function: Callable[[], Any], device: torch.device) -> tuple[Any, Growth | None]:
    """The function's result, and how memory grew while it ran."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        return result, Growth(peak, torch.cuda.memory_allocated(device) - before)
    # torch.profiler.profile wraps this, but imports Dynamo and SymPy first: more than a second in every worker process.
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
    """Peak memory of the timed step, above the level at its start."""
    state = work.begin(0)
    grown: Growth | None = growth(lambda: work.step(state), device)[1]
    return None if grown is None else grown.peak


def held_bytes(forward: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor], device: torch.device) -> int | None:
    """Bytes that a forward keeps for its backward, besides its inputs and outputs."""
    outputs, grown = growth(forward, device)
    if grown is None:
        return None
    known = {x.untyped_storage().data_ptr() for x in inputs}
    new = {y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in outputs}
    outside = sum(int(size) for pointer, size in new.items() if pointer not in known)
    return max(0, grown.kept - outside)
