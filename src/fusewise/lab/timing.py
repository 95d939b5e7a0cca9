"""Times one provider: cold cache by default, device time separate from host time, no harness overhead inside.

A *turn* is one provider's share of a round: a few *samples*. A sample is one or more calls, each on its own copy of the
inputs, after a cache flush. On CUDA a spinning kernel holds the stream until every call of a sample, or of several, is
queued, so that CUDA events measure the device and not a late host. The time between two back-to-back events is
subtracted.
"""

from __future__ import annotations

import gc
import itertools
import math
import mmap
import re
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any, Protocol

import torch

from . import machine

#: Calls queued behind one spin kernel. The launch queue holds about a thousand kernels; eager code launches a dozen per
#: call.
CALLS_PER_HOLD = 32
#: Empty event pairs; their median is the event overhead that is subtracted.
PAIRS = 16
#: Lower bound of a sample, reached for instance by calls that launch no kernel: the resolution that CUDA documents for
#: events.
RESOLUTION_US = 0.5
#: Calls in the unsynchronised loop that measures host overhead. It stops early, after at least FEWEST_HOST_CALLS, once
#: HOST_SECONDS have passed.
HOST_CALLS, FEWEST_HOST_CALLS, HOST_SECONDS = 20, 5, 0.02
#: Upper bound of the spin kernel's clock: no current GPU runs faster.
CYCLES_PER_SECOND = 2_000_000_000
#: A hold lasts this many times as long as queueing took at best. If the host is later than that, the hold is repeated.
HOLD_MARGIN = 1.4
#: The longest hold. After about a thousand queued launches the host blocks, so a sample that launches more cannot be
#: held, however long the spin.
MAX_HOLD_S = 0.05
#: Torch's warning of a captured graph without kernels.
EMPTY = "The CUDA Graph is empty"


@dataclass(frozen=True)
class Work:
    """What is timed: `step(begin(i))`. `begin` (inputs; the forward before a backward) is outside the timed region."""

    begin: Callable[[int], Any]
    step: Callable[[Any], Any]


@dataclass
class Turn:
    """Raw measurements of one turn, microseconds per call."""

    device_us: list[float]
    host_us: float | None = None
    held: bool | None = None  # CUDA: every sample was queued before it started
    clocks: dict[str, Any] | None = None  # on a CPU: average number of threads that waited for a core

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"device_us": [round(t, 3) for t in self.device_us]}  # nanosecond resolution


class Uncaptured(Exception):
    """A capture into a CUDA graph succeeded, but is empty: the calls launch nothing, or on a stream of their own."""


class Timer(Protocol):
    def turn(self, work: Work, samples: int, calls: int) -> Turn: ...

    def once(self, work: Work) -> float:
        """Seconds of one synchronised call, for first calls and estimates."""
        ...


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's garbage collector from running inside some provider's sample."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class CpuTimer:
    """Wall time of the call. `flush_bytes` = 0 measures with a warm cache.

    `shared` is the descriptor of an in-memory file of `flush_bytes`, for worker processes that take turns: with private
    flush buffers each process would allocate and touch its own.
    """

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
                results = []  # kept until the clock stops: deallocation is not the provider's work
                if self.flush is not None:
                    self.flush.add_(1.0)
                start = time.perf_counter_ns()
                for state in states:
                    results.append(work.step(state))
                stop = time.perf_counter_ns()
                times.append((stop - start) / 1e3 / calls)
                del states, results
                waiting.append(wait.threads())
        # The median, as for times: in the first sample the threads may all wake on one core and wait until they are
        # spread.
        known = [threads for threads in waiting if threads is not None]
        return Turn(times, clocks={"waiting_threads": median(known)} if known else None)


class Wait:
    """Average number of threads of this process that are runnable but have no core, since construction."""

    def __init__(self) -> None:
        self.waited, self.begun = machine.waited_s(), time.perf_counter_ns()

    def threads(self) -> float | None:
        passed, waited = (time.perf_counter_ns() - self.begun) / 1e9, machine.waited_s()
        if self.waited is None or waited is None or passed <= 0:
            return None
        return round(max(0.0, waited - self.waited) / passed, 3)  # a thread that exits takes its waiting time with it


def fill_cache(buffer: torch.Tensor) -> None:
    """Flush the GPU's cache by reading a buffer larger than it. Reading, because a write leaves dirty lines whose
    write-back lands in the timed call: 8 µs of one that reads 100 MB on an H200."""
    torch.amax(buffer, dim=0)


class CudaTimer:
    """CUDA events around queued calls, and host time per call from an unsynchronised loop."""

    def __init__(self, device: torch.device, flush_bytes: int, clocks: Callable[[], dict[str, Any] | None]) -> None:
        self.device = device
        self.flush = torch.zeros(flush_bytes // 4, device=device) if flush_bytes else None
        self.clocks = clocks
        self.queued: Callable[[], Work | None] = lambda: None  # the work last timed, not kept alive with its tensors
        self.queue_s = math.inf  # host seconds to queue one sample of it
        self.fit = 0  # samples of it that can be queued behind one hold, as far as known
        self.was_held = False  # any of it

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
            elapsed = self._elapsed(work, samples, calls, result)
            result.device_us = [max(us - pair_us, RESOLUTION_US) / calls for us in elapsed]
            result.host_us = self._host(work)
        return result

    def graph_us(self, work: Work, samples: int, calls: int) -> float:
        """Median device time of a call in a CUDA graph of `calls` calls, replayed after a flush.

        Raises:
            Uncaptured: it launches no kernel, or on another stream.
            Exception: it cannot be captured. Whatever the library kept from the attempt may break later calls.
        """
        side, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream(self.device))
        with no_collection(), warnings.catch_warnings(record=True) as warned, torch.cuda.stream(side):
            warnings.filterwarnings("always", message=EMPTY)
            work.step(work.begin(0))  # whatever a library allocates for a new stream
            states = [work.begin(i) for i in range(calls)]  # a backward runs on the stream of its forward
            with torch.cuda.graph(graph, stream=side):
                results = [work.step(state) for state in states]
        torch.cuda.synchronize(self.device)
        for warning in warned:
            if re.match(EMPTY, str(warning.message)):
                raise Uncaptured("a CUDA graph captures no kernel of it: it launches none, or on another stream")
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        with no_collection():
            replay = Work(lambda i: None, lambda _: graph.replay())
            replay.step(None)  # the first replay uploads the graph
            elapsed = self._elapsed(replay, samples, 1, Turn([]))
        del states, results
        return max(median(elapsed) - self.pair_us, RESOLUTION_US) / calls

    @cached_property
    def pair_us(self) -> float:
        """Time between two events with nothing in between, measured in the same sequence of operations as a sample."""
        turn = Turn([], held=True)
        apart = self._elapsed(Work(lambda i: None, lambda _: None), PAIRS, 1, turn)
        return median(apart) if turn.held else 0.0  # without a hold it would be the host's time between the two records

    def _elapsed(self, work: Work, samples: int, calls: int, result: Turn) -> list[float]:
        """Microseconds of each of `samples`, many at a time behind a hold or, if those do not fit into the launch
        queue, one. If not even one does, they follow the host without a hold, and the result says so."""
        if self.queued() is not work:
            self.queued, self.queue_s, self.fit = weakref.ref(work), math.inf, max(1, CALLS_PER_HOLD // calls)
            self.was_held = False
        elif self.was_held:
            self.fit = max(1, self.fit)  # the host may have been late only then
        found: list[float] = []
        while len(found) < samples:
            count = min(max(1, self.fit), samples - len(found))
            held, elapsed = self._hold(work, count, calls, result)
            self.was_held |= held
            if held or not self.fit:
                result.held = result.held and held
                found += elapsed
            else:
                self.fit = min(count - 1, 1, int(MAX_HOLD_S / self.queue_s))
        return found

    def _hold(self, work: Work, count: int, calls: int, result: Turn) -> tuple[bool, list[float]]:
        """Whether `count` samples were all queued behind a spin kernel, which is lengthened until the host is ahead,
        and the microseconds of each."""
        known = self.queue_s if math.isfinite(self.queue_s) else 0.0
        seconds = min(known * count * HOLD_MARGIN + 3e-4, MAX_HOLD_S)
        for attempt in itertools.count():
            torch.cuda.synchronize(self.device)
            if self.fit:
                torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))
            begun = time.perf_counter()
            events: list[tuple[Any, Any]] = []
            for _ in range(count):
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
            held = self.fit > 0 and not events[0][0].query()
            took = time.perf_counter() - begun
            self.queue_s = min(self.queue_s, took / count)  # the least, since a full queue blocks the host
            result.clocks = self.clocks() or result.clocks
            torch.cuda.synchronize(self.device)
            if held or not self.fit or (attempt > 0 and seconds >= MAX_HOLD_S):
                break
            seconds = min(2 * max(seconds, took), MAX_HOLD_S)
        return held, [start.elapsed_time(stop) * 1e3 for start, stop in events]

    def _host(self, work: Work) -> float:
        """Median host time of one call in microseconds, without waiting for the device."""
        times = []
        torch.cuda.synchronize(self.device)
        for i in range(HOST_CALLS):
            state = work.begin(i)
            start = time.perf_counter_ns()
            work.step(state)
            times.append((time.perf_counter_ns() - start) / 1e3)
            del state  # else it would still be allocated during the next call, unlike in a sample
            if len(times) >= FEWEST_HOST_CALLS and sum(times) > HOST_SECONDS * 1e6:
                break
        torch.cuda.synchronize(self.device)
        return median(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def calls_per_sample(bytes_min: int, device: str) -> int:
    """Calls averaged by one sample: enough for the clock's resolution, and the same for every provider of a problem. A
    study asks slow ones for fewer."""
    mebibytes = bytes_min / 2**20
    if device.startswith("cuda"):
        return 16 if mebibytes <= 8 else 4 if mebibytes <= 64 else 1
    return 16 if mebibytes <= 1 / 16 else 4 if mebibytes <= 1 else 1
