"""Timing one provider: cold cache, device time apart from host time, nothing of the harness inside.

A *turn* is a few *samples*; a sample is one or more calls, each on its own copy of the inputs, after the cache was
filled with something else. On CUDA the stream is held by a spinning kernel until every call of the turn is queued, so
that events measure the device and never a host that was late; what two events are apart by themselves is taken off.
"""

from __future__ import annotations

import gc
import math
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any, Protocol

import torch

from . import machine

#: Calls queued behind one hold. The driver's queue takes about a thousand launches; eager code launches a dozen a call.
CALLS_PER_HOLD = 32
#: Pairs of events with nothing between them, whose median is taken off.
PAIRS = 16
#: The least that is left of a sample, such as one of calls that start no kernel: CUDA's own figure for what events resolve.
RESOLUTION_US = 0.5
#: Calls in the unsynchronised loop that measures the host: fewer, but no fewer than the other, once they took as long as that.
HOST_CALLS, FEWEST_HOST_CALLS, HOST_SECONDS = 20, 5, 0.02
#: Spin cycles a second, at least: no current card runs faster than this.
CYCLES_PER_SECOND = 2_000_000_000
#: The longest hold. A device takes about a thousand launches before the host must wait; what needs more of them than that
#: cannot be held by any sleep, however long.
MAX_HOLD_S = 0.05


@dataclass(frozen=True)
class Work:
    """What is timed: `step(begin(i))`, of which `begin` (inputs; the forward before a backward) is not timed."""

    begin: Callable[[int], Any]
    step: Callable[[Any], Any]


@dataclass
class Turn:
    """Raw measurements of one turn, microseconds a call."""

    device_us: list[float]
    host_us: float | None = None
    held: bool | None = None  # CUDA: every sample was queued before the first began
    clocks: dict[str, Any] | None = None  # on a CPU: how many threads waited for a core, on average

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"device_us": [round(t, 3) for t in self.device_us]}  # whole nanoseconds


class Timer(Protocol):
    def turn(self, work: Work, samples: int, calls: int) -> Turn: ...

    def once(self, work: Work) -> float:
        """Seconds of one synchronised call, for first calls and estimates."""
        ...


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector would land in some provider's time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class CpuTimer:
    """Wall time of the call. `flush_bytes` = 0 measures a warm cache. `shared`: a file of so many bytes in memory, for
    processes that take turns: memory of each one's own would be touched, and held, as often as there are processes."""

    def __init__(self, flush_bytes: int, shared: int | None = None) -> None:
        if not flush_bytes:
            self.flush = None
        elif shared is None:
            self.flush = torch.zeros(flush_bytes // 4)
        else:
            pages = mmap.mmap(shared, flush_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self.flush = torch.frombuffer(pages, dtype=torch.float32, count=flush_bytes // 4)

    def once(self, work: Work) -> float:
        state = work.begin(0)
        start = time.perf_counter()
        work.step(state)
        return time.perf_counter() - start

    def turn(self, work: Work, samples: int, calls: int) -> Turn:
        times, waiting = [], []
        with no_collection():
            for _ in range(samples):
                wait = Wait()
                states = [work.begin(i) for i in range(calls)]
                results = []  # kept until the clock stops: freeing memory is not the provider's work
                if self.flush is not None:
                    self.flush.add_(1.0)
                start = time.perf_counter_ns()
                for state in states:
                    results.append(work.step(state))
                stop = time.perf_counter_ns()
                times.append((stop - start) / 1e3 / calls)
                del states, results
                waiting.append(wait.threads())
        # The median, as of times: the first sample's threads may be woken on one core, and wait until they are spread.
        known = [threads for threads in waiting if threads is not None]
        return Turn(times, clocks={"waiting_threads": median(known)} if known else None)


class Wait:
    """How many threads of this process wait for a core, on average from here on, because something else has it."""

    def __init__(self) -> None:
        self.waited, self.begun = machine.waited_s(), time.perf_counter_ns()

    def threads(self) -> float | None:
        passed, waited = (time.perf_counter_ns() - self.begun) / 1e9, machine.waited_s()
        if self.waited is None or waited is None or passed <= 0:
            return None
        return round(max(0.0, waited - self.waited) / passed, 3)  # a thread that ended takes its time along


def fill_cache(buffer: torch.Tensor) -> None:
    """Drive out of a GPU's cache what is in it, by a read of the buffer, which is larger. Lines that a write leaves there are
    written back in the time of the call that drives them out: 8 µs of one that reads 100 MB on an H200."""
    torch.amax(buffer, dim=0)


class CudaTimer:
    """Events around queued calls, and the host's time a call in a loop that does not wait."""

    def __init__(self, device: torch.device, flush_bytes: int, clocks: Callable[[], dict[str, Any] | None]) -> None:
        self.device = device
        self.flush = torch.zeros(flush_bytes // 4, device=device) if flush_bytes else None
        self.clocks = clocks
        self.queued: Work | None = None  # the work last timed, and the host's seconds to queue one sample of it
        self.queue_s = math.inf
        self.holdable = True

    def once(self, work: Work) -> float:
        state = work.begin(0)
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        work.step(state)
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def turn(self, work: Work, samples: int, calls: int) -> Turn:
        result = Turn([], held=True)
        with no_collection():
            pair_us = self.pair_us
            per_hold = max(1, CALLS_PER_HOLD // calls)
            while len(result.device_us) < samples:
                count = min(per_hold, samples - len(result.device_us))
                elapsed = self._hold(work, count, calls, result)
                result.device_us += [max(us - pair_us, RESOLUTION_US) / calls for us in elapsed]
            result.host_us = self._host(work)
        return result

    @cached_property
    def pair_us(self) -> float:
        """What two events are apart with nothing between them, in the same order of things."""
        turn = Turn([], held=True)
        apart = self._hold(Work(lambda i: None, lambda _: None), PAIRS, 1, turn)
        return median(apart) if turn.held else 0.0  # or it would be the host's time between them

    def _hold(self, work: Work, samples: int, calls: int, result: Turn) -> list[float]:
        """The microseconds of `samples`, queued behind a spinning kernel, longer each time until the host is ahead."""
        if self.queued is not work:
            self.queued, self.queue_s, self.holdable = work, math.inf, True
        known = self.queue_s if math.isfinite(self.queue_s) else 0.0
        seconds = min(known * samples * 2 + 3e-4, MAX_HOLD_S)
        held = False
        events: list[tuple[Any, Any]] = []
        for attempt in range(4 if self.holdable else 1):
            torch.cuda.synchronize(self.device)
            torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))
            begun = time.perf_counter()
            events = []
            for _ in range(samples):
                states = [work.begin(i) for i in range(calls)]
                results = []
                start, stop = _event(), _event()
                if self.flush is not None:
                    fill_cache(self.flush)
                start.record()
                for state in states:
                    results.append(work.step(state))
                stop.record()
                events.append((start, stop))
                del states, results
            held = not events[0][0].query()
            took = time.perf_counter() - begun
            self.queue_s = min(self.queue_s, took / samples)  # a full queue makes the host wait: not its own time
            result.clocks = self.clocks() or result.clocks
            torch.cuda.synchronize(self.device)
            if held or (attempt > 0 and self.queue_s * samples > MAX_HOLD_S):  # as long as which no hold lasts
                break
            seconds = min(2 * max(seconds, took), MAX_HOLD_S)
        if not held:
            result.held = self.holdable = False
        return [start.elapsed_time(stop) * 1e3 for start, stop in events]

    def _host(self, work: Work) -> float:
        """Median microseconds that one call keeps the host, with nothing to wait for."""
        times = []
        torch.cuda.synchronize(self.device)
        for i in range(HOST_CALLS):
            state = work.begin(i)
            start = time.perf_counter_ns()
            work.step(state)
            times.append((time.perf_counter_ns() - start) / 1e3)
            del state  # or it would be there beside the next, which no sample has
            if len(times) >= FEWEST_HOST_CALLS and sum(times) > HOST_SECONDS * 1e6:
                break
        torch.cuda.synchronize(self.device)
        return median(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def calls_per_sample(bytes_min: int, device: str) -> int:
    """Calls that one sample averages: enough for the clock's resolution, the same for every provider of a problem."""
    mebibytes = bytes_min / 2**20
    if device.startswith("cuda"):
        return 16 if mebibytes <= 8 else 4 if mebibytes <= 64 else 1
    return 16 if mebibytes <= 1 / 16 else 4 if mebibytes <= 1 else 1
