"""The coordinator: asks every provider for its code, in one process each, and writes the texts with an index.

OUT/index.json                       kind, target, the case, versions, providers with their stages in order
OUT/<provider>/NN-stage-part.suffix  the texts, independent of machine, directory and time as far as the compilers
                                     allow it, so that `diff -r` of two directories shows what changed
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import machine, plugin, record
from ..folder import file_name
from ..ledger import Ledger
from ..nursery import Nursery
from ..problem import Task
from ..process import WorkerFailed, WorkerProcess
from ..reason import reason
from ..schema import loads
from ..spent import Parts

KIND = "fusewise.code"
SCHEMA_VERSION = 1
TIMEOUT_S = 300.0
#: File name of a text, as written by `worker.write`.
TEXT = re.compile(r"\d\d+-")
#: The reason for a provider that does not implement the method.
SILENT = {"stages": "does not show its code", "traffic": "does not report its memory traffic"}


@dataclass(frozen=True)
class Answer:
    """A provider's answer: `found` is its reply, or empty with the reason."""

    provider: str
    status: str  # ok | missing | failed
    reason: str
    found: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)


def ask(
    entry: plugin.Entry,
    requests: Sequence[dict[str, Any]],
    log: Path,
    *,
    timeout: float = TIMEOUT_S,
    nursery: Nursery | None = None,
    started: Callable[[WorkerProcess], None] = lambda _: None,
    spent: Callable[[dict[str, float]], None] = lambda _: None,
) -> list[Answer]:
    """Send requests to one provider in its own process. If the process dies, the next request gets a new one. `started`
    receives each process, so that another thread can kill it; `spent`, at the end, the seconds by part."""

    versions: dict[str, str] = {}

    def failed(reason: str, status: str = "failed") -> Answer:
        return Answer(entry.name, status, reason, {}, versions)

    if entry.provider is None:
        return [failed(f"could not be loaded: {entry.problem}") for _ in requests]
    silent = {
        name for name in ("stages", "traffic") if getattr(type(entry.provider), name) is getattr(plugin.Provider, name)
    }
    if {request["do"] for request in requests} <= silent:
        return [failed(SILENT[request["do"]], "missing") for request in requests]
    log.parent.mkdir(parents=True, exist_ok=True)
    answers: list[Answer] = []
    worker: WorkerProcess | None = None
    parts = Parts()
    try:
        for request in requests:
            try:
                if worker is None:
                    with parts.part("starting"):
                        worker = WorkerProcess(
                            {"provider": entry.where}, log, timeout=timeout, memory_limit=machine.worker_memory_limit(),
                            nursery=nursery, module="fusewise.lab.code.worker",
                        )  # fmt: skip
                        started(worker)
                        greeting = worker.ready()
                    if not greeting["ok"]:
                        answers.append(failed(greeting["reason"]))
                        continue
                    versions = greeting["versions"]
                with parts.part("code"):
                    reply = worker.ask(request["do"], **{key: value for key, value in request.items() if key != "do"})
            except (WorkerFailed, OSError) as error:
                worker = None
                answers.append(failed(str(error)))
                continue
            if reply["ok"]:
                answers.append(Answer(entry.name, "ok", "", reply, versions))
            else:
                answers.append(failed(reply["reason"], reply["status"]))
    finally:
        if worker is not None:
            worker.stop()
    spent(parts.seconds)
    return answers


def default_target(device: str) -> str:
    """The local GPU, else Hopper."""
    if device.startswith("cuda"):
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    return "sm_90"


def new_index(task: Task, target: str) -> dict[str, Any]:
    """An index without providers, and without what changes from run to run."""
    environment = {name: value for name, value in machine.environment(task.device).items() if name != "load_average"}
    return {
        "kind": KIND,
        "schema": SCHEMA_VERSION,
        "op": task.op,
        "case": task.case,
        "dtype": task.dtype,
        "pass": task.pass_,
        "device": task.device,
        "target": target,
        "environment": environment,
        "providers": [],
    }


def write_index(index: dict[str, Any], out: Path) -> None:
    """Write `out/index.json`, a line per value: one long line would hide what a diff found."""
    record.write_atomically(out / "index.json", json.dumps(index, indent=1, allow_nan=False) + "\n")


def clear(out: Path) -> None:
    """Take out the index of an earlier look and the texts that it names, which would lie beside those of the new one, and nothing
    else. ValueError where `out` has an index of something else, which the new one would replace."""
    index = out / "index.json"
    if not index.is_file():
        return
    try:
        before = loads(index.read_text(encoding="utf-8"))
        if before["kind"] != KIND:
            raise ValueError(f"kind {before['kind']!r}")
        named = [out / stage["file"] for provider in before["providers"] for stage in provider["stages"]]
        # An index may name anything: only what lies in a folder of `out`, as the texts do.
        texts = [file for file in named if TEXT.match(file.name) and file.resolve().parent.parent == out.resolve()]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"code: the folder must have no index.json but that of `fusewise code`, got {index}, which is another "
            f"({reason(error)}); choose another --out"
        ) from None
    for file in texts:
        file.unlink(missing_ok=True)
    index.unlink()


def wish(entry: plugin.Entry, task: Task, target: str, out: Path) -> dict[str, Any]:
    """The request for one provider's stages, with files below `out`."""
    folder = out / file_name(entry.name)
    return {"do": "stages", "task": task.to_json(), "target": target, "folder": str(folder)}


def indexed(answer: Answer) -> dict[str, Any]:
    """A provider's entry in the index."""
    return {
        "provider": answer.provider,
        "status": answer.status,
        "reason": answer.reason,
        "versions": answer.versions,
        "stages": answer.found.get("stages", []),
    }


def stages(
    entries: Sequence[plugin.Entry],
    task: Task,
    target: str,
    out: Path,
    progress: Callable[[str], None] = lambda _: None,
    timeout: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Write every stage of every provider below `out`; returns the index, which is also written to `out/index.json`."""
    out.mkdir(parents=True, exist_ok=True)
    clear(out)
    index = new_index(task, target)
    with closing(Nursery(out / "logs" / "nursery.log")) as nursery:
        for entry in entries:
            progress(entry.name)
            log = out / "logs" / f"{file_name(entry.name)}.log"
            (answer,) = ask(entry, [wish(entry, task, target, out)], log, timeout=timeout, nursery=nursery)
            index["providers"].append(indexed(answer))
            write_index(index, out)
    return index


def for_record(index: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """The stages of an index with their texts, in the form of a record's `code`."""
    return [
        {**stage, "text": (out / stage["file"]).read_text(encoding="utf-8")}
        for provider in index["providers"]
        for stage in provider["stages"]
    ]


def ledgers(
    entries: Sequence[plugin.Entry],
    tasks: Sequence[Task],
    target: str,
    logs: Path,
    timeout: float = TIMEOUT_S,
) -> tuple[list[Ledger], list[Answer]]:
    """The ledgers of every provider for every task, and the answers without one."""
    found: list[Ledger] = []
    without: list[Answer] = []
    with closing(Nursery(logs / "nursery.log")) as nursery:
        for entry in entries:
            requests = [{"do": "traffic", "task": task.to_json(), "target": target} for task in tasks]
            log = logs / f"{file_name(entry.name)}.log"
            for answer in ask(entry, requests, log, timeout=timeout, nursery=nursery):
                if answer.status == "ok":
                    found.append(Ledger.from_json(answer.found["ledger"]))
                else:
                    without.append(answer)
    return found, without
