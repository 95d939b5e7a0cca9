"""Ctrl-C while the `fusewise` command is imported, torch above all: it ends, as it does later, without a traceback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def is_command() -> bool:
    """Whether this process is the command, as far as can be told while `fusewise` itself is imported: by its script, or by
    `python -m fusewise`, which has this first argument until it runs."""
    return os.path.basename(sys.argv[0] if sys.argv else "") in ("fusewise", "-m")


@contextmanager
def importing() -> Iterator[None]:
    """A Ctrl-C ends the process here and now. There is nothing yet to clean up, and what torch's own start calls would catch an
    exception, and go on."""

    def leave(*_: object) -> None:
        os.write(2, b"interrupted\n")
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # a shell's jobs in the background ignore it
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
