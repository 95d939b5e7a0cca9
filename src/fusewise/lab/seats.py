"""The providers' seats in a study: a process for each, started when needed and again after a failure, and its replies.

Whatever a provider does, a reply comes: what it said, or the reason why it said nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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

#: The provider whose process runs no code but torch's and the problem's own.
EAGER = "fusewise.lab.providers.pytorch:Eager"
#: After this many failures in a row a provider is not started again, if it has run nothing yet, or each cost the whole time limit.
#: One that crashes with some problems loses those alone.
FAILURES_TO_GIVE_UP = 3
#: glibc keeps what is freed instead of giving it back to the system. Otherwise every call on a CPU would touch the fresh
#: pages of its outputs first, which costs as much again as copying the same bytes, or more, and is not the kernel's doing.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}
#: Folders of their own for the compilers' caches, by the variable that says where.
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FUSEWISE_CACHE_DIR": "fusewise",
    "XDG_CACHE_HOME": "others",
}
#: Of a GPU's memory, what one worker may take; the workers share the card.
DEVICE_SHARE = 0.5
#: The provider measured twice is the first of these that runs the problem, else the first that does.
TWINS = ("fusewise-cuda", "fusewise-triton", "fusewise-cpu", "torch.compile", "eager")


@dataclass
class Seat:
    """A provider's place in the study: its worker, started when needed and again after a failure."""

    entry: plugin.Entry
    name: str
    missing: str = ""
    worker: WorkerProcess | None = None
    greeted: bool = False
    profiling: bool = False  # its worker has started the profiler
    failures: int = 0  # in a row
    runs: bool = False  # it has run a problem
    gone: str = ""  # why it is not started any more
    versions: dict[str, str] = field(default_factory=dict)


class Seats:
    """The seats of one study, and what their workers share: caches, truths, what empties the machine's own cache."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.all = [self._seat(entry) for entry in options.providers]
        self.twin: Seat | None = None
        self.flush_bytes = 0 if options.warm else 2 * machine.cache_bytes(options.device)
        self.flush_file: int | None = None  # what flushes a CPU's cache, for all workers, since they take turns
        self.nursery = Nursery(None)
        self.busy: list[Mapping[str, float]] = []  # what the workers were busy with since this was last cleared

    @contextmanager
    def open(self) -> Iterator[None]:
        """Workers may be started within, and are stopped behind it."""
        # Compilers start with empty caches, so that a first call means what it says whoever measured before.
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
            )
            yield
        finally:
            seats = [*self.all, *([self.twin] if self.twin else [])]
            for seat in seats:  # all before the first is waited for: on a GPU each takes a moment to end
                if seat.worker is not None:
                    seat.worker.kill()
            for seat in seats:
                self.stop(seat)
            self.nursery.close()
            if self.flush_file is not None:
                os.close(self.flush_file)
            shutil.rmtree(self.caches, ignore_errors=True)

    @property
    def truths(self) -> Path:
        """What is right of the group at hand; see truths.py."""
        return self.caches / "truths"

    def forget_truths(self) -> None:
        """Those of the group before."""
        for folder_of_task in self.truths.iterdir():
            shutil.rmtree(folder_of_task, ignore_errors=True)

    def _seat(self, entry: plugin.Entry) -> Seat:
        seat = Seat(entry, entry.name)
        if entry.provider is not None:
            try:
                entry.provider.check(self.options.device)
            except plugin.Missing as error:
                seat.missing = str(error)
            except Exception as error:  # someone else's package may raise anything; it becomes its rows' reason
                seat.gone = reason(error)
        return seat

    def seat_twin(self, replies: Mapping[str, Mapping[str, Any]]) -> Seat | None:
        """The second of the A/A pair, of a provider that runs this problem; kept as long as that one does."""
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

    def start(self, seat: Seat) -> None:
        """Begin a seat's worker, if it may have one; it loads while others do."""
        if seat.entry.provider is None or seat.missing or seat.gone or seat.worker is not None:
            return
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

    def stop(self, seat: Seat) -> None:
        if seat.worker is not None:
            seat.worker.stop()
            seat.worker = None

    def failure(self, seat: Seat, reason: str, hung: bool = False) -> dict[str, Any]:
        """A worker is gone: count it, and say so."""
        seat.worker = None
        seat.failures += 1
        if seat.failures >= FAILURES_TO_GIVE_UP and (hung or not seat.runs):
            seat.gone = f"not started again after {seat.failures} failures in a row, the last: {reason}"
        return {"ok": False, "status": "failed", "reason": reason}

    def prepare(self, seat: Seat, task: Task, do: str = "prepare") -> dict[str, Any]:
        """The worker's reply to the task, or a reply in its place. `do`: "load" has it make the inputs and no more."""
        if seat.entry.provider is None:
            return {"ok": False, "status": "failed", "reason": f"could not be loaded: {seat.entry.problem}"}
        if seat.missing:
            return {"ok": False, "status": "missing", "reason": seat.missing}
        if seat.gone:
            return {"ok": False, "status": "failed", "reason": seat.gone}
        waited = spent.Parts()
        self.busy.append(waited.seconds)
        with waited.part("starting"):
            self.start(seat)
        if seat.worker is None:
            return {"ok": False, "status": "failed", "reason": seat.gone or "the worker could not be started"}
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
                seat.failures, seat.runs = 0, seat.runs or reply["ok"]
            return reply
        except WorkerFailed as error:
            return self.failure(seat, str(error), error.hung)

    def side_by_side(self, count: int, seats: Sequence[Seat], task: Task, do: str) -> dict[str, dict[str, Any]]:
        """The replies of seats to a task, `count` of them at a time, four at most."""
        return self.together(count, seats, lambda seat: self.prepare(seat, task, do))

    def together(
        self, count: int, seats: Sequence[Seat], asked: Callable[[Seat], dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """What the seats answer, `count` of them at a time, four at most."""
        with ThreadPoolExecutor(max(1, min(4, count))) as pool:
            try:
                return dict(pool.map(lambda seat: (seat.name, asked(seat)), seats))
            except BaseException:  # Ctrl-C: the threads wait for answers that nobody wants any more
                for seat in self.all:
                    if seat.worker is not None:
                        seat.worker.kill()
                raise
