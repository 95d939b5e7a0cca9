"""Implements `fusewise code` and `fusewise profile`, for the command line and the Python API."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from .. import analysis, machine, plan, plugin
from ..names import nearest
from ..nursery import Nursery
from ..problem import Task
from ..render import ledgers as render_ledgers
from ..render import printable
from . import capture


def the_task(request: plan.Request) -> tuple[Task, list[plugin.Entry]]:
    """The one problem of a request (the first if it names several) and the providers. Floors have no code, so they are
    left out unless named."""
    options = plan.options(request, Path())
    wanted = [e for e in options.providers if request.providers is not None or not analysis.is_floor(e.name)]
    return options.tasks[0], wanted


def code(
    task: Task,
    entries: Sequence[plugin.Entry],
    *,
    target: str | None = None,
    stage: str | None = None,
    out: Path | None = None,
    timeout: float = capture.TIMEOUT_S,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The index of every stage, each with its text. `stage` selects those of that name; ValueError if no provider has
    it. The files are kept if `out` is given."""
    with tempfile.TemporaryDirectory(prefix="fusewise-code-") as folder:
        where = out or Path(folder)
        index = capture.stages(entries, task, target or capture.default_target(task.device), where, progress, timeout)
        having = [provider for provider in index["providers"] if provider["stages"]]
        every = list(dict.fromkeys(s["stage"] for provider in having for s in provider["stages"]))
        for provider in index["providers"]:
            kept = [s for s in provider["stages"] if stage is None or stage in (s["stage"], s["part"])]
            if provider["stages"] and not kept:
                mine = dict.fromkeys(s["stage"] for s in provider["stages"])
                provider |= {"status": "missing", "reason": f"has no stage {stage!r}, but {', '.join(mine)}"}
            provider["stages"] = [{**s, "text": (where / s["file"]).read_text(encoding="utf-8")} for s in kept]
    if stage is not None and having and not any(provider["stages"] for provider in having):
        names = ", ".join(provider["provider"] for provider in having)
        raise ValueError(
            f"code: stage must be one that there is, {', '.join(every)} (of {names}), got {stage!r}; "
            f"{nearest(stage, every, 'choose one')}"
        )
    return index


def listing(index: dict[str, Any]) -> str:
    """One line per stage: provider, file or stage, length and counts."""
    lines = []
    for provider in index["providers"]:
        state = provider["status"] + (f": {provider['reason']}" if provider["reason"] else "")
        lines.append(f"{provider['provider']} ({state})")
        for s in provider["stages"]:
            counts = ", ".join(f"{name} {value}" for name, value in s["counts"].items())
            words = " ".join(filter(None, (s["stage"], s["part"], s["target"] and f"[{s['target']}]")))
            lines.append(
                f"  {s['order']:>3}  {words}  ({len(s['text'].splitlines())} lines{'; ' + counts if counts else ''})"
            )
    return "\n".join(map(printable, lines))


def texts(index: dict[str, Any]) -> str:
    """Every stage's text under a header line."""
    parts = []
    for provider in index["providers"]:
        if not provider["stages"]:
            parts.append(f"===== {provider['provider']}: {provider['status']}: {printable(provider['reason'])}\n")
        for s in provider["stages"]:
            words = " ".join(filter(None, (provider["provider"], s["stage"], s["part"], s["target"])))
            parts.append(f"===== {printable(words)}\n{s['text']}")
    return "\n".join(parts)


def profile(task: Task, entry: plugin.Entry, out: Path, timeout: float = capture.TIMEOUT_S) -> dict[str, Any]:
    """Profile one provider into `out`; {"status", "reason", "rows", "table", "files", "ledger", "cache_bytes"}."""
    out.mkdir(parents=True, exist_ok=True)
    target = capture.default_target(task.device)
    log = out / "log.txt"
    # Separate processes: capturing traffic may fake devices, which must not affect the profile.
    look = {"do": "profile", "task": task.to_json(), "folder": str(out.resolve())}
    count = {"do": "traffic", "task": task.to_json(), "target": target}
    with closing(Nursery(log)) as nursery:
        (seen,), (traffic,) = (
            capture.ask(entry, [request], log, timeout=timeout, nursery=nursery) for request in (look, count)
        )
    found = {"provider": entry.name, "status": seen.status, "reason": seen.reason, **seen.found}
    found.pop("ok", None)
    found.pop("id", None)
    found |= {"ledger": traffic.found.get("ledger"), "ledger_reason": traffic.reason}
    cache = {"device": task.device, "cache_bytes": machine.cache_bytes(task.device)}
    return {**found, "cache_bytes": render_ledgers.cache_of(cache)}


#: Shown for code that runs outside torch.
NO_ROWS = "torch.profiler recorded no operator and no kernel: it does not see code that runs outside torch; flame.svg shows its Python code"


def profile_text(found: dict[str, Any]) -> str:
    """The tables of a profile for a terminal."""
    from ..ledger import Ledger

    if found["status"] != "ok":
        return f"{found['provider']} {found['status']}: {printable(found['reason'])}"
    table = "\n".join(map(printable, found["table"].split("\n")))
    parts = [table if found["rows"] else NO_ROWS, ""]
    if found["ledger"] is None:
        parts.append(f"no traffic ledger: {printable(found['ledger_reason'])}")
    else:
        parts += [
            "bytes that one call reads and writes:",
            render_ledgers.text(Ledger.from_json(found["ledger"]), found["cache_bytes"]),
        ]
    return "\n".join(parts)
