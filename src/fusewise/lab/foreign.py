"""Timing on a GPU by the profiler: what works on streams that torch does not know, such as XLA's, and kernels without their starts.

Events and a held stream say nothing of another stream. The profiler sees every kernel of the process, whoever launched it:
the time in which at least one kernel ran. Events count the starts of kernels, too, so these are measured, on the smallest
kernel there is, by events less by the profiler, and added: for a call's first kernel that of a call in such a sample, for the
others that of a kernel in a row of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch

from .timing import CudaTimer, Turn, Work, fill_cache, no_collection

Interval = tuple[int, int]

#: In the name of the kernel behind `torch.cuda._sleep`.
MARK = "spin_kernel"
#: Samples by which the start of a kernel is measured, and the kernels of a row.
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
    """Device time from the kernels that the profiler saw, and their starts. Calls must wait for their results. `flush_bytes` = 0
    measures a warm cache."""

    def __init__(self, device: torch.device, flush_bytes: int, clocks: Callable[[], dict[str, Any] | None]) -> None:
        self.device = device
        self.clocks = clocks
        self.events = CudaTimer(device, flush_bytes, clocks)
        self.starts: dict[int, float] = {}

    def once(self, work: Work) -> float:
        return busy(self._seen(work, 1, 1)[0]) / 1e9

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
        """Microseconds in which kernels of a call ran, one call a sample: without what starts them and what is between them."""
        with no_collection():
            return median(busy(seen) / 1e3 for seen in self._seen(work, samples, 1))

    def _seen(self, work: Work, samples: int, calls: int) -> list[list[Interval]]:
        """The kernels of each sample, of which all are in one profile: to begin and to end one takes longer than most calls do.

        Raises:
            RuntimeError: none was seen of a sample. Nothing is faster than that.
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
            raise RuntimeError("torch.profiler saw no kernel of it, so that its device time is not known")
        return seen

    def _mark(self) -> None:
        """Run a kernel that nothing else runs, alone, whatever the streams of the others."""
        torch.cuda.synchronize(self.device)
        torch.cuda._sleep(1)
        torch.cuda.synchronize(self.device)

    def _start_us(self, calls: int) -> float:
        """Microseconds a call that events count beyond the run of its kernel, in samples of so many."""
        if calls not in self.starts:
            x = torch.zeros(1, device=self.device)
            smallest = Work(lambda _: x, lambda x: x.add_(1.0))
            by_events = median(self.events.turn(smallest, STARTS, calls).device_us)
            by_profiler = median(busy(seen) / 1e3 / calls for seen in self._seen(smallest, STARTS, calls))
            self.starts[calls] = max(0.0, by_events - by_profiler)
        return self.starts[calls]


def begin() -> None:
    """Start the profiler, which takes a second the first time in a process."""
    with _profile():
        pass


def _profile() -> Any:
    # acc_events: without it torch 2.11 warns that a second cycle would clear what the first one saw.
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)


def kernels(profile: Any) -> list[tuple[Interval, str]]:
    """When everything that ran on a device started and stopped, nanoseconds, and its name; in the order of the starts."""
    events = profile.profiler.kineto_results.events()
    cuda = torch._C._autograd.DeviceType.CUDA
    found = [((e.start_ns(), e.start_ns() + e.duration_ns()), e.name()) for e in events if e.device_type() == cuda]
    return sorted(found)


def between_marks(profile: Any) -> list[list[Interval]]:
    """What ran between the first mark and the second, the third and the fourth, and so on."""
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
