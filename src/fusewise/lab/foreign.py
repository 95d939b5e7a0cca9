"""Timing on a GPU what works on streams that torch does not know, such as XLA's.

Events and a held stream say nothing of another stream. The profiler sees every kernel of the process, whoever launched it:
a call's device time is the time in which at least one kernel ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .timing import Turn, Work, no_collection


def busy(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of [start, stop) intervals."""
    total, end = 0, None
    for start, stop in sorted(intervals):
        if end is None or start > end:
            total, end = total + stop - start, stop
        elif stop > end:
            total, end = total + stop - end, stop
    return total


class ProfiledTimer:
    """Device time from the kernels that the profiler saw. Calls must wait for their results. `flush_bytes` = 0 measures a
    warm cache."""

    def __init__(self, device: torch.device, flush_bytes: int, clocks: Callable[[], dict[str, Any] | None]) -> None:
        self.device = device
        self.flush = torch.zeros(flush_bytes // 4, device=device) if flush_bytes else None
        self.clocks = clocks

    def once(self, work: Work) -> float:
        state = work.begin(0)
        torch.cuda.synchronize(self.device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work.step(state)
            torch.cuda.synchronize(self.device)
        return _seconds(profile)

    def turn(self, work: Work, samples: int, calls: int) -> Turn:
        result = Turn([])
        with no_collection():
            for _ in range(samples):
                states = [work.begin(i) for i in range(calls)]
                if self.flush is not None:
                    self.flush.zero_()
                torch.cuda.synchronize(self.device)
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    results = [work.step(state) for state in states]
                    torch.cuda.synchronize(self.device)
                result.device_us.append(_seconds(profile) * 1e6 / calls)
                result.clocks = self.clocks() or result.clocks
                del states, results
        return result


def _seconds(profile: Any) -> float:
    """Seconds in which at least one kernel ran. RuntimeError where none was seen: nothing is faster than that."""
    seconds = busy(kernels(profile)) / 1e9
    if not seconds:
        raise RuntimeError("torch.profiler saw no kernel of it, so that its device time is not known")
    return seconds


def kernels(profile: Any) -> list[tuple[int, int]]:
    """Start and stop in nanoseconds of everything that ran on a device."""
    events = profile.profiler.kineto_results.events()
    cuda = torch._C._autograd.DeviceType.CUDA
    return [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.device_type() == cuda]
