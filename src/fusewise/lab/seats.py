"""One seat per provider in a study: its worker process, started on demand and restarted after a failure.

Whatever a provider does, every request gets a reply: the worker's, or one with the reason why there is none.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import analysis, folder, machine, plugin, spent
from .nursery import Nursery
from .options import Options
from .problem import Task
from .process import WorkerFailed, WorkerProcess
from .reason import reason

#: The provider whose process runs no code but torch's and the problem's.
EAGER = "fusewise.lab.providers.pytorch:Eager"
#: After this many consecutive failures a provider is not restarted, if it has never run a problem or the last one timed
#: out. One that crashes on some problems loses only those.
FAILURES_TO_GIVE_UP = 3
#: Make glibc keep freed memory. Otherwise every CPU call would page-fault on its fresh outputs, which costs at least as
#: much again as copying the same bytes and is not the kernel's doing.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}
#: Workers that prepare a problem concurrently, at most.
AT_ONCE = 8
#: Private compiler cache directories, by environment variable.
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FUSEWISE_CACHE_DIR": "fusewise",
    "XDG_CACHE_HOME": "others",
}
#: Share of the GPU's memory that one worker may allocate; all workers share the GPU.
DEVICE_SHARE = 0.5
#: Preference for the A/A test: the first of these that runs the problem, else any provider that does.
TWINS = ("fusewise-cuda", "fusewise-triton", "fusewise-cpu", "torch.compile", "eager")


@dataclass
class Seat:
    """A provider's seat in the study: its worker, started on demand and restarted after a failure."""

    entry: plugin.Entry
    name: str
    missing: str = ""
    worker: WorkerProcess | None = None
    greeted: bool = False
    profiling: bool = False  # the worker has started the profiler
    capturable: bool = True  # its calls can be captured in CUDA graphs, as far as known
    failures: int = 0  # consecutive
    runs: bool = False  # has run a problem at least once
    gone: str = ""  # why it is not restarted
    versions: dict[str, str] = field(default_factory=dict)


class Seats:
    """The seats of one study and what their workers share: compiler caches, truths, the cache-flush buffer."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.all = [self._seat(entry) for entry in options.providers]
        self.twin: Seat | None = None
        self.others: list[Seat] = []
        self.flush_bytes = 0 if options.warm else 2 * machine.cache_bytes(options.device)
        self.flush_file: int | None = None  # the flush buffer of all CPU workers, which take turns
        self.nursery = Nursery(None)
        self.busy: list[Mapping[str, float]] = []  # parts of the workers' time since last cleared

    @contextmanager
    def open(self) -> Iterator[None]:
        """Workers can be started inside the context and are stopped on exit."""
        # Empty compiler caches, so that the first-call time does not depend on earlier runs.
        self.caches = Path(tempfile.mkdtemp(prefix="fusewise-study-"))
        self.truths.mkdir()
        try:
            if self.options.device == "cpu" and self.flush_bytes and hasattr(os, "memfd_create"):
                self.flush_file = os.memfd_create("fusewise-flush")
                os.truncate(self.flush_file, self.flush_bytes)
            self.nursery = Nursery(
                self.options.out / "logs" / "nursery.log",
                {**KEEP_MEMORY, **{variable: str(self.caches / name) for variable, name in CACHES.items()}},
                [] if self.flush_file is None else [self.flush_file],
                scratch=self.caches,
            )
            yield
        finally:
            for seat in self.occupied:  # kill all before waiting for any: on a GPU each takes a moment to exit
                if seat.worker is not None:
                    seat.worker.kill()
            for seat in self.occupied:
                self.stop(seat)
            self.nursery.close()
            if self.flush_file is not None:
                os.close(self.flush_file)
            shutil.rmtree(self.caches, ignore_errors=True)

    @property
    def truths(self) -> Path:
        """Cached float64 results of the current group; see truths.py."""
        return self.caches / "truths"

    def forget_truths(self) -> None:
        """Delete those of the previous group."""
        for folder_of_task in self.truths.iterdir():
            shutil.rmtree(folder_of_task, ignore_errors=True)

    def _seat(self, entry: plugin.Entry) -> Seat:
        seat = Seat(entry, entry.name)
        if entry.provider is not None:
            try:
                entry.provider.check(self.options.device)
            except plugin.Missing as error:
                seat.missing = str(error)
            except Exception as error:  # third-party code may raise anything; it becomes the reason of its rows
                seat.gone = reason(error)
        return seat

    def seat_twin(self, replies: Mapping[str, Mapping[str, Any]]) -> Seat | None:
        """The second seat of the A/A test, for a provider that runs this problem; reused while that one does."""
        able = [s for s in self.all if replies[s.name]["ok"] and not analysis.is_floor(s.name)]
        if not self.options.twin or not able:
            return None
        by_name = {s.name + analysis.TWIN: s for s in able}
        if self.twin is None or self.twin.name not in by_name:
            if self.twin is not None:
                self.stop(self.twin)
            first = next((by_name[n + analysis.TWIN] for n in TWINS if n + analysis.TWIN in by_name), able[0])
            self.twin = Seat(first.entry, first.name + analysis.TWIN)
        return self.twin

    def anew(self, seats: Iterable[Seat]) -> list[Seat]:
        """The same providers in processes of their own, beside the running ones; to be stopped after use."""
        self.others = [Seat(seat.entry, seat.name) for seat in seats]
        return self.others

    @property
    def occupied(self) -> list[Seat]:
        """Every seat that may have a process."""
        return [*self.all, *self.others, *([self.twin] if self.twin else [])]

    def start(self, seat: Seat) -> str:
        """Start the seat's worker if it may have one, without waiting for it to load. Returns why that failed, if so."""
        if seat.entry.provider is None or seat.missing or seat.gone or seat.worker is not None:
            return ""
        options = self.options
        start: dict[str, Any] = {
            "provider": seat.entry.where,
            "device": options.device,
            "flush_bytes": self.flush_bytes,
            "flush_file": self.flush_file,
            "device_memory_fraction": DEVICE_SHARE if options.device.startswith("cuda") else None,
            "truths": str(self.truths) if options.device == "cpu" else None,
            "keeps_truths": seat.entry.where == EAGER,
        }
        log = options.out / "logs" / f"{folder.file_name(seat.name)}.log"
        try:
            seat.greeted = seat.profiling = False
            seat.worker = WorkerProcess(
                start,
                log,
                timeout=options.timeout,
                memory_limit=options.memory_limit,
                nursery=self.nursery,
            )
        except (WorkerFailed, OSError) as error:
            self.failure(seat, str(error))
            return str(error)
        return ""

    def stop(self, seat: Seat) -> None:
        if seat.worker is not None:
            seat.worker.stop()
            seat.worker = None

    def failure(self, seat: Seat, reason: str, hung: bool = False) -> dict[str, Any]:
        """Record that the worker is gone, and build the reply."""
        seat.worker = None
        seat.failures += 1
        if seat.failures >= FAILURES_TO_GIVE_UP and (hung or not seat.runs):
            seat.gone = f"not started again after {seat.failures} failures in a row, the last: {reason}"
        return {"ok": False, "status": "failed", "reason": reason}

    def prepare(self, seat: Seat, task: Task, do: str = "prepare") -> dict[str, Any]:
        """The worker's reply to the task, or a substitute. `do`: "load" only creates the inputs."""
        if seat.entry.provider is None:
            return {"ok": False, "status": "failed", "reason": f"could not be loaded: {seat.entry.problem}"}
        if seat.missing:
            return {"ok": False, "status": "missing", "reason": seat.missing}
        waited = spent.Parts()
        self.busy.append(waited.seconds)
        with waited.part("starting"):
            why = self.start(seat)
        if seat.worker is None:
            unable = f"the worker process could not be started: {why}"
            return {"ok": False, "status": "failed", "reason": seat.gone or unable}
        try:
            if not seat.greeted:
                with waited.part("starting"):
                    greeting = seat.worker.ready()
                if not greeting["ok"]:
                    self.stop(seat)
                    if greeting["status"] == "missing":
                        seat.missing = greeting["reason"]
                        return greeting
                    return self.failure(seat, greeting["reason"])
                seat.greeted = True
                seat.versions = greeting["versions"]
            reply = seat.worker.ask(do, task=task.to_json())
            self.busy.append(reply.get("spent", {}))
            if reply.get("leaving"):
                self.stop(seat)
                return self.failure(seat, reply["reason"])
            if do == "prepare":
                seat.runs = seat.runs or reply["ok"]
                if not reply["ok"]:  # else it is still to be timed
                    seat.failures = 0
            return reply
        except WorkerFailed as error:
            return self.failure(seat, str(error), error.hung)

    def side_by_side(self, count: int, seats: Sequence[Seat], task: Task, do: str) -> dict[str, dict[str, Any]]:
        """Replies of the seats to a task, from up to `count` workers concurrently, AT_ONCE at most."""
        return self.together(min(AT_ONCE, count), seats, lambda seat: self.prepare(seat, task, do))

    def together(
        self, count: int, seats: Sequence[Seat], asked: Callable[[Seat], dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """Results of `asked` for the seats, up to `count` concurrently."""
        with ThreadPoolExecutor(max(1, count)) as pool:
            try:
                return dict(pool.map(lambda seat: (seat.name, asked(seat)), seats))
            except BaseException:  # Ctrl-C: unblock the threads that wait for answers
                for seat in self.occupied:
                    if seat.worker is not None:
                        seat.worker.kill()
                raise
