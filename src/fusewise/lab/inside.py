"""After the last round: capture the code of every correct provider, its memory traffic, and profiles.

Code is captured for the study's first case; traffic ledgers for a few cases, since the traffic ratio is the same for
all sizes of a sweep; profiles for the cases that a preset names. Everything runs in separate processes after the last
round, so that it cannot affect any timing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from . import analysis, machine, plugin, spent
from .code import capture
from .folder import file_name
from .nursery import Nursery
from .options import Options
from .problem import Task
from .process import WorkerProcess
from .record import Record

#: What each request to a provider asks for.
WANTED = {"stages": "code", "traffic": "traffic ledger", "profile": "profile"}
#: Groups that get ledgers: the first of each dtype and pass, then others in order.
LEDGER_TASKS = 6
#: Preloaded in the nursery, because most compilers import it first: two seconds of a core. It does not initialise CUDA.
MODULES = ("torch._dynamo",)
#: Longer listings (in characters) are truncated in the record; the file in `code/` is complete.
LONGEST_TEXT = 300_000
#: Lines of a profile's table that the record keeps, and characters of a name.
PROFILE_ROWS, PROFILE_NAME = 15, 200


def look(
    options: Options, found: Record, progress: Callable[[str], None], note: Callable[[str], None]
) -> tuple[float, dict[str, float]]:
    """Add `code`, `ledgers` and `profiles` to a record; returns the seconds taken, in total and by part. The texts with
    their index are also written to `code/`, traces and flame graphs to `profiles/`. `note` receives why one of them failed."""
    begun = time.monotonic()
    right = {row.provider for row in found.rows if row.status == "ok" and not analysis.is_floor(row.provider)}
    entries = [entry for entry in options.providers if entry.name in right]
    if not entries:
        return 0.0, {}
    target, folder = capture.default_target(options.device), options.out.resolve() / "code"
    capture.clear(folder)  # of a run that is resumed
    first, tasks = options.tasks[0], chosen(options.tasks)
    traffic = [{"do": "traffic", "task": task.to_json(), "target": target} for task in tasks]
    seen = [task for task in options.tasks if task.case in options.profiled]
    busy: list[dict[str, float]] = []

    workers: list[WorkerProcess] = []
    ended = threading.Event()

    def started(worker: WorkerProcess) -> None:
        workers.append(worker)
        if ended.is_set():
            worker.kill()

    def profile(entry: plugin.Entry, task: Task) -> dict[str, Any]:
        name = "-".join((task.case, task.dtype, task.pass_, entry.name))
        where = options.out.resolve() / "profiles" / file_name(name)
        return {"do": "profile", "task": task.to_json(), "folder": str(where)}

    def answered(entry: plugin.Entry, requests: list[dict[str, Any]]) -> list[capture.Answer]:
        progress(entry.name)
        log = folder / "logs" / f"{file_name(entry.name)}.log"
        answers = capture.ask(
            entry, requests, log, timeout=options.timeout, nursery=nursery, started=started, spent=busy.append
        )
        failed = {
            (request["do"], a.reason) for request, a in zip(requests, answers, strict=True) if a.status == "failed"
        }
        for do, reason in sorted(failed):
            note(f"{entry.name}: no {WANTED[do]}: {reason}")
        return answers

    def ask(entry: plugin.Entry) -> list[capture.Answer]:
        return answered(entry, [capture.wish(entry, first, target, folder), *traffic])

    with closing(Nursery(folder / "logs" / "nursery.log", modules=MODULES)) as nursery:
        if seen:  # sequential and undisturbed, in fresh processes that have not faked any hardware for capturing code
            found.profiles = []  # of a run that is resumed
            for entry in entries:
                profiles = answered(entry, [profile(entry, task) for task in seen])
                found.profiles += [
                    profiled(task, answer) for task, answer in zip(seen, profiles, strict=True) if answer.status == "ok"
                ]
        # Concurrent, since nothing is timed any more.
        with ThreadPoolExecutor(machine.cores()) as pool:
            try:
                answers = list(pool.map(ask, entries))
            except BaseException:  # Ctrl-C: unblock the threads that wait for answers
                ended.set()
                for worker in workers:
                    worker.kill()
                raise
    index = capture.new_index(first, target)
    index["providers"] = [capture.indexed(mine[0]) for mine in answers]
    capture.write_index(index, folder)
    place = {"op": first.op, "case": first.case, "dtype": first.dtype, "pass": first.pass_}
    found.code = [{**stage, **place, "text": cut(stage["text"])} for stage in capture.for_record(index, folder)]
    found.ledgers = [answer.found["ledger"] for mine in answers for answer in mine[1:] if answer.status == "ok"]
    wall = time.monotonic() - begun
    return wall, spent.scaled(busy, wall)


def profiled(task: Task, answer: capture.Answer) -> dict[str, Any]:
    """A profile as stored in the record: the top rows only."""
    op, case, dtype, pass_ = task.key
    place = {"op": op, "case": case, "dtype": dtype, "pass": pass_, "provider": answer.provider}
    rows = [{**row, "name": row["name"][:PROFILE_NAME]} for row in answer.found["rows"][:PROFILE_ROWS]]
    return {**place, "calls": answer.found["calls"], "rows": rows}


def chosen(tasks: Sequence[Task]) -> list[Task]:
    """At most LEDGER_TASKS tasks, in order: one of each dtype and pass before a second of any."""
    firsts = {(task.dtype, task.pass_): task for task in reversed(tasks)}
    rest = [task for task in tasks if firsts[task.dtype, task.pass_] is not task]
    kept = [*firsts.values(), *rest][:LEDGER_TASKS]
    return [task for task in tasks if task in kept]


def cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]}\n… {len(text) - LONGEST_TEXT} more characters in the file\n"
