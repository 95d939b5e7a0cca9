"""Small files of results that are kept for the user: JSON in a cache folder that nobody else writes to.

    kept.change(path, lambda found: ...)     under a lock: read, change, replace
    kept.read(path)                          what is there, or None

Reading parses JSON and evaluates nothing. A file is replaced as a whole, so a reader meets the old one or the new one;
one that another user owns or could have written is refused.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .build import BuildError, _check_private, _locked, _private, cache_folder

MAX_BYTES = 16 << 20


class Refused(ValueError):
    """A file or its folder cannot be used; the message says why and what to do."""


def folder(name: str) -> Path:
    """The cache folder for results of one kind, beside that of native code. It may not be there yet.

    Raises:
        Refused: there is no place for one.
    """
    try:
        return cache_folder().parent / name
    except BuildError as error:
        raise Refused(str(error)) from None


def read(path: Path) -> Any:
    """The data in a file; None where there is no file.

    Raises:
        Refused: others could have written it, or it holds no JSON.
    """
    try:
        for part in (path.parent.parent, path.parent):
            _check_private(part, part.stat())
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except BuildError as error:
        raise Refused(str(error)) from None
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error}; remove it") from None
    try:
        with open(descriptor, "rb") as file:
            _check_private(path, os.fstat(file.fileno()))
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise Refused(f"{path} is larger than {MAX_BYTES} bytes; remove it")
        return json.loads(text)
    except BuildError as error:
        raise Refused(str(error)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"{path} cannot be read: {error}; remove it") from None


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    """Replace the data in a file by `edit` of it, which gets None where there is none or it holds no JSON. Processes that
    do this at once wait for each other.

    Raises:
        Refused: the folder or the file is not the user's own, or cannot be written.
    """
    try:
        _private(path.parent)
        with _locked(path.with_suffix(".lock")):
            try:
                before = read(path)
            except Refused:
                if path.is_symlink() or path.stat().st_uid != os.getuid():
                    raise
                before = None  # damaged
            _replace(path, json.dumps(edit(before), indent=1))
    except BuildError as error:
        raise Refused(str(error)) from None
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error}; set FUSEWISE_CACHE_DIR") from None


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".tmp", dir=path.parent)  # mode 0600
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
