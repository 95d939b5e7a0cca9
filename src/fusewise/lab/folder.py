"""The run directory: locked by one study at a time; an interrupted run can be resumed."""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import record
from .names import checksum
from .record import Record

#: Fields that must match to resume a run: all rows of a record are made in the same way.
SAME_REQUEST = ("op", "cache", "seed", "rounds", "providers", "cases", "dtypes", "passes", "tasks")
SAME_MACHINE = ("device_name", "cpu", "cores", "torch_threads", "python")
#: Longest file name, in bytes, before a checksum and a suffix; some file systems allow only 143.
LONGEST_NAME = 100


class Refused(ValueError):
    """The run directory cannot be used for this study; the message says why and what to do."""


@contextmanager
def claimed(out: Path, resume: bool = False) -> Iterator[None]:
    """Create `out` if needed and lock it for this process until the block ends or the process is killed, even by
    SIGKILL. Raises OSError if nothing can be written or the lock is a symlink, e.g. in someone else's folder, Refused if
    another process holds it or (nothing created) if there is no run to resume.
    """
    if resume and not (out / "record.json").exists():
        raise Refused(f"study: --resume must find a record.json in {out}, got none; leave --resume out")
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise Refused(
                f"study: the run directory must be free, got {out}, where {owner} is at work; choose another --out"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def interrupted(out: Path, resume: bool) -> Record | None:
    """The record in `out` to resume, or None for a new run. Raises Refused if there is one and `resume` is False."""
    if (out / "record.json").exists():
        if resume:
            return record.read(out)
        raise Refused(
            f"study: the run directory must be new, got {out}, which has a run; add --resume or choose another --out"
        )
    return None


def file_name(text: str) -> str:
    """Turn a text, such as a provider's name, into a valid name for a single file or folder of limited length, in the
    locale's encoding. Where it is not the text itself, a checksum keeps it distinct."""
    encoding = sys.getfilesystemencoding()
    name = re.sub(r"[^\w.+-]", "_", text.encode(encoding, "replace").decode(encoding)).lstrip(".") or "_"
    data = name.encode(encoding)
    if name == text and len(data) <= LONGEST_NAME:
        return name
    return f"{data[:LONGEST_NAME].decode(encoding, 'ignore')}-{checksum(text):08x}"


def check_same(before: Record, request: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
    """Refuse to resume a record of another request or another machine."""
    request = json.loads(record.dumps(request))  # in the form in which it is read back from a file
    for kind, names, then, now, fix in (
        ("request", SAME_REQUEST, before.request, request, "repeat the options of the command that began the run"),
        ("machine", SAME_MACHINE, before.environment, environment, "choose another --out"),
    ):
        for name in names:
            if _compared(then, name) != _compared(now, name):
                if name == "tasks" and _sources(then) != _sources(now):
                    contract = "keep the function's file as it was when the run began"
                    raise Refused(f"study: --resume must {contract}, got another content; choose another --out")
                raise Refused(
                    f"study: --resume must keep the {kind}'s {name}, got {_short(now.get(name))} after"
                    f" {_short(then.get(name))}; {fix}"
                )
    torches = before.environment.get("versions", {}).get("torch"), environment["versions"]["torch"]
    if torches[0] != torches[1]:
        raise Refused(f"study: --resume must keep torch {torches[0]}, got {torches[1]}; choose another --out")


def _compared(request: Mapping[str, Any], name: str) -> Any:
    """Without the paths on which modules were found: `fusewise` and `python -m fusewise` have others, and a function that is found
    elsewhere has another source."""
    value = request.get(name)
    if name != "tasks" or value is None:
        return value
    return [task | {"detail": {k: v for k, v in task.get("detail", {}).items() if k != "path"}} for task in value]


def _sources(request: Mapping[str, Any]) -> list[Any]:
    """The hash of each task's function source, to detect edits; None for built-in targets."""
    return [task.get("detail", {}).get("source") for task in request.get("tasks", [])]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
