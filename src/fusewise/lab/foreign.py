"""GPU timing by the profiler (CUPTI), for work on streams unknown to torch, such as XLA's, and for kernel times.

Events and a held stream tell nothing about another stream, but the profiler sees every kernel of the process. Device
time is the time in which at least one kernel ran. Events also count kernel launch latency, so for comparability that is
measured on the smallest kernel (event time minus profiler time) and added: for the first kernel of a call as in samples
of as many calls, for its other kernels as in a row of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch

from .timing import CudaTimer, Turn, Work, fill_cache, no_collection

Interval = tuple[int, int]

#: Part of the name of the kernel behind `torch.cuda._sleep`.
MARK = "spin_kernel"
#: Samples for the launch latency, and kernels in a row.
STARTS, ROW = 20, 16


def busy(intervals: Iterable[Interval]) -> int:
    """Length of the union of [start, stop) intervals."""
    total, end = 0, None
    for start, stop in sorted(intervals):
        if end is None or start > end:
            total, end = total + stop - start, stop
        elif stop > end:
            total, end = total + stop - end, stop
    return total


class ProfiledTimer:
    """Device time from profiled kernels plus launch latency. Calls must wait for their results. `flush_bytes` = 0
    measures with a warm cache."""

    def __init__(self, device: torch.device, flush_bytes: int, clocks: Callable[[], dict[str, Any] | None]) -> None:
        self.device = device
        self.clocks = clocks
        self.events = CudaTimer(device, flush_bytes, clocks)
        self.starts: dict[int, float] = {}

    def once(self, work: Work) -> float:
        return self.events.once(work)

    def turn(self, work: Work, samples: int, calls: int) -> Turn:
        result = Turn([])
        first, other = self._start_us(calls), self._start_us(ROW)
        with no_collection():
            for seen in self._seen(work, samples, calls):
                others = max(len(seen) - calls, 0)
                result.device_us.append((busy(seen) / 1e3 + others * other) / calls + first)
        result.clocks = self.clocks()
        return result

    def kernel_us(self, work: Work, samples: int) -> float:
        """Kernel time of a call in microseconds, one call per sample: excludes launch latency and gaps between
        kernels."""
        with no_collection():
            return median(busy(seen) / 1e3 for seen in self._seen(work, samples, 1))

    def _seen(self, work: Work, samples: int, calls: int) -> list[list[Interval]]:
        """The kernels of each sample. One profile covers all samples, because starting and stopping it takes longer
        than most calls.

        Raises:
            RuntimeError: a sample has no kernels, so there is no time to report.
        """
        with _profile() as profile:
            for _ in range(samples):
                states = [work.begin(i) for i in range(calls)]
                if self.events.flush is not None:
                    fill_cache(self.events.flush)
                self._mark()
                results = [work.step(state) for state in states]
                self._mark()
                del states, results
        seen = between_marks(profile)
        if len(seen) != samples or not all(map(busy, seen)):
            raise RuntimeError("torch.profiler recorded no kernel of it, so its device time is unknown")
        return seen

    def _mark(self) -> None:
        """Run a marker kernel, isolated by synchronisation from every other stream."""
        torch.cuda.synchronize(self.device)
        torch.cuda._sleep(1)
        torch.cuda.synchronize(self.device)

    def _start_us(self, calls: int) -> float:
        """Launch latency per kernel in microseconds, in samples of `calls`: event time minus kernel time."""
        if calls not in self.starts:
            x = torch.zeros(1, device=self.device)
            smallest = Work(lambda _: x, lambda x: x.add_(1.0))
            by_events = median(self.events.turn(smallest, STARTS, calls).device_us)
            by_profiler = median(busy(seen) / 1e3 / calls for seen in self._seen(smallest, STARTS, calls))
            self.starts[calls] = max(0.0, by_events - by_profiler)
        return self.starts[calls]


def begin() -> None:
    """Start the profiler once: its first start in a process takes a second."""
    with _profile():
        pass


def _profile() -> Any:
    # acc_events: without it torch 2.11 warns that a second cycle would clear the events of the first.
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)


def kernels(profile: Any) -> list[tuple[Interval, str]]:
    """(start, stop) in nanoseconds and name of everything that ran on a device, ordered by start."""
    events = profile.profiler.kineto_results.events()
    cuda = torch._C._autograd.DeviceType.CUDA
    found = [((e.start_ns(), e.start_ns() + e.duration_ns()), e.name()) for e in events if e.device_type() == cuda]
    return sorted(found)


def between_marks(profile: Any) -> list[list[Interval]]:
    """What ran between the first and second mark, the third and fourth, and so on."""
    found: list[list[Interval]] = []
    inside = False
    for interval, name in kernels(profile):
        if MARK in name:
            inside = not inside
            if inside:
                found.append([])
        elif inside:
            found[-1].append(interval)
    return found
