"""The user's private cache folder, and small JSON files of results in it.

    path = cache.folder("tuned") / "name.json"
    cache.change(path, lambda found: ...)    under a lock: read, change, replace
    cache.read(path)                         the content, or None

The folder and its content must belong to the user and be writable by nobody else; other files and folders are refused.
Reading parses JSON and evaluates nothing. Files are replaced atomically, so a reader sees either the old one or the new
one. `build.py` stores native code in the same folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MAX_BYTES = 16 << 20


class Refused(ValueError):
    """A file or its folder cannot be used; the message says why and how to fix it."""


def folder(name: str) -> Path:
    """The cache folder for one kind of files: in $FUSEWISE_CACHE_DIR, or in `fusewise` in the user's cache folder. It may
    not exist yet.

    Raises:
        Refused: neither variable is set, and the user has no home (e.g. a numeric user in a container).
    """
    chosen, caches = os.environ.get("FUSEWISE_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME", "")
    try:
        if chosen:
            return Path(chosen).expanduser().absolute() / name
        if sys.platform == "darwin":
            caches = "~/Library/Caches"
        elif not Path(caches).expanduser().is_absolute():  # to be ignored, says its specification
            caches = "~/.cache"
        return Path(caches).expanduser().absolute() / "fusewise" / name
    except RuntimeError as error:
        raise Refused(f"there is no cache folder: {error} Set FUSEWISE_CACHE_DIR") from None


def make_private(folder: Path) -> None:
    """Create a folder of the cache, or check that only the user can write to an existing one.

    Raises:
        Refused: somebody else can, or it cannot be created.
    """
    try:
        for part in (*reversed(folder.parents), folder):
            if not part.exists():
                part.mkdir(mode=0o700, exist_ok=True)  # also for missing parents, independent of the umask
        check_folder(folder)
    except OSError as error:
        raise Refused(f"the cache folder {folder} cannot be used: {error}; set FUSEWISE_CACHE_DIR") from error


def check_folder(folder: Path) -> None:
    """Check that a folder of the cache and its parent belong to the user, that nobody else can write to them, and that
    nobody else can replace them.

    Raises:
        FileNotFoundError: it does not exist.
        Refused: a check failed.
    """
    for part in (folder.parent, folder):
        check_private(part, part.stat())
    for part in dict.fromkeys(_on_the_way(folder)):
        status = part.stat()
        # The user's own group usually has no other members; with the sticky bit, users can only rename their own entries.
        others = stat.S_IWOTH if status.st_gid == os.getgid() else stat.S_IWOTH | stat.S_IWGRP
        if status.st_mode & others and not status.st_mode & stat.S_ISVTX:
            raise Refused(f"{part}, which holds the cache folder, is writable by others; set FUSEWISE_CACHE_DIR")
        for user in (status.st_uid, part.lstat().st_uid):
            if user not in (0, os.getuid()) and not _unmapped(user):
                raise Refused(f"{part}, which holds the cache folder, belongs to user {user}; set FUSEWISE_CACHE_DIR")


def _on_the_way(path: Path) -> Iterator[Path]:
    """The folders and symbolic links through which a path is found, itself included: who replaces one of them leads
    elsewhere."""
    for part in (path, *path.parents):
        yield part
        if part.is_symlink():
            yield from _on_the_way(part.parent / part.readlink())


def _unmapped(user: int) -> bool:
    """Whether this uid stands for users not mapped into this user namespace, such as the root of a container's host."""
    try:
        known = Path("/proc/self/uid_map").read_text().split()
        return known != ["0", "0", str(2**32 - 1)] and user == int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return False


def check_private(path: Path, status: os.stat_result) -> None:
    """Check that a file or folder with this status belongs to the user and that nobody else can write to it.

    Raises:
        Refused: a check failed, or it is a symbolic link.
    """
    if stat.S_ISLNK(status.st_mode):
        raise Refused(f"{path} in the cache folder is a symbolic link; remove it")
    if status.st_uid != os.getuid():
        raise Refused(f"{path} belongs to user {status.st_uid}, not to user {os.getuid()}; set FUSEWISE_CACHE_DIR")
    if status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        raise Refused(f"{path} is writable by others (mode {mode:o}); chmod go-w it if you trust it, or remove it")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold a file lock, which the OS releases if the process dies; yields whether locking worked. Without locks (some
    network file systems) processes may do the same work concurrently, and one of the results stays."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing does not unlock if a child was forked meanwhile


def read(path: Path) -> Any:
    """The data in a file; None if there is no file.

    Raises:
        Refused: others could have written it, it is larger than MAX_BYTES, or it is not JSON.
    """
    try:
        check_folder(path.parent)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error}; remove it") from None
    try:
        with open(descriptor, "rb") as file:
            check_private(path, os.fstat(file.fileno()))
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise Refused(f"{path} is larger than {MAX_BYTES} bytes; remove it")
        return json.loads(text)
    except Refused:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"{path} cannot be read: {error}; remove it") from None


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    """Replace the data in a file by `edit` of it, which gets None if there is no file or it is not JSON. Concurrent
    changes by several processes are serialized.

    Raises:
        Refused: the folder or the file does not belong to the user, or cannot be written.
    """
    try:
        make_private(path.parent)
        with locked(path.with_suffix(".lock")):
            try:
                before = read(path)
            except Refused:
                if path.is_symlink() or path.stat().st_uid != os.getuid():
                    raise
                before = None  # damaged
            _replace(path, json.dumps(edit(before), indent=1))
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
