"""Formats an exception as the reason of a row: one line with the actual cause, however the message begins."""

from __future__ import annotations

import re
import traceback
from contextlib import suppress

#: Length limit of a message in characters.
LONGEST = 600
#: A later line that reports an inner exception, as TorchScript and torch.compile's backends write it, or explains the
#: first line, as Dynamo does.
_WITHIN = re.compile(r"([\w.]*(Error|Exception)|Explanation): \S")
#: A line about location or how to get more output, not about the cause.
_BESIDE = re.compile(r'Traceback|File "|Set TORCH|For more|See http|[\^~]+( <--- HERE)?$')
#: Where an object is in memory, as its repr says: another place in every process.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")


def reason(error: BaseException) -> str:
    """The exception's type and `message`."""
    return f"{type(error).__name__}: {message(error)}"


def message(error: BaseException) -> str:
    """The first line of the message plus, where they add to it, the line with the cause and the root exception."""
    parts = _said(error)
    root = error
    for _ in range(20):  # bounded: the chain of causes may be cyclic
        root = root.__cause__ or root
    cause = _said(root)
    if cause[0] not in " ".join(parts):
        parts += [f"{type(root).__name__}: {cause[0]}", *cause[1:]]
    share = LONGEST // len(parts)
    return " … ".join(part if len(part) <= share else f"{part[: share - 1]}…" for part in parts)


def text(error: BaseException) -> str:
    """The whole message; empty if the exception's __str__ fails."""
    try:
        return str(error)
    except Exception:
        return ""


def _said(error: BaseException) -> list[str]:
    """The first line and, if a later line states the cause, that line. Without a message, the source line that raised
    it."""
    lines = [line.strip() for line in _ADDRESS.sub("", text(error)).splitlines() if line.strip()]
    if not lines:
        frames = traceback.extract_tb(error.__traceback__)
        return [f"no message, raised by `{frames[-1].line}`" if frames and frames[-1].line else "no message"]
    first, rest = lines[0], [line for line in lines[1:] if not _BESIDE.match(line)]
    within = [line for line in rest if _WITHIN.match(line)] or (rest if first.endswith(":") else [])
    return [first, *within[-1:]]


def log_error() -> None:
    """Print the exception that is being handled to the log, which may be on a full disk; its reason is told anyway."""
    with suppress(OSError):
        traceback.print_exc()
