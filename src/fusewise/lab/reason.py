"""An exception as the reason of a row: one line that tells the cause, whatever its message begins with."""

from __future__ import annotations

import re
import traceback

#: Characters of a message.
LONGEST = 600
#: A line below the first that says what another layer raised, as TorchScript and torch.compile's backends write it, or
#: explains the first, as Dynamo does.
_WITHIN = re.compile(r"([\w.]*(Error|Exception)|Explanation): \S")
#: A line that says where it was or how to see more, instead of what went wrong.
_BESIDE = re.compile(r'Traceback|File "|Set TORCH|For more|See http|[\^~]+( <--- HERE)?$')


def reason(error: BaseException) -> str:
    """The exception's type and `message`."""
    return f"{type(error).__name__}: {message(error)}"


def message(error: BaseException) -> str:
    """The first line of what it says and, where there is more to the cause, the line that tells it and what it was raised
    from."""
    parts = _said(error)
    root = error
    for _ in range(20):  # an exception may be its own cause
        root = root.__cause__ or root
    cause = _said(root)
    if root is not error and cause[0] not in " ".join(parts):
        parts += [f"{type(root).__name__}: {cause[0]}", *cause[1:]]
    share = LONGEST // len(parts)
    return " … ".join(part if len(part) <= share else f"{part[: share - 1]}…" for part in parts)


def text(error: BaseException) -> str:
    """The whole message; none of an exception that cannot say what it is."""
    try:
        return str(error)
    except Exception:
        return ""


def _said(error: BaseException) -> list[str]:
    """The first line and, where another within the message says why, that one. Of an exception without a message the line
    that raised it."""
    lines = [line.strip() for line in text(error).splitlines() if line.strip()]
    if not lines:
        frames = traceback.extract_tb(error.__traceback__)
        return [f"no message, raised by `{frames[-1].line}`" if frames and frames[-1].line else "no message"]
    first, rest = lines[0], [line for line in lines[1:] if not _BESIDE.match(line)]
    within = [line for line in rest if _WITHIN.match(line)] or (rest if first.endswith(":") else [])
    return [first, *within[-1:]]
