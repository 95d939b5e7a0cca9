"""Treats SIGTERM and a closed terminal as Ctrl-C, so that workers are stopped, temporary files removed and the report
written.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: SIGHUP, of which Windows knows nothing, comes when the terminal is closed or the connection lost.
ENDINGS = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the block, these signals raise KeyboardInterrupt, as Ctrl-C does, unless they are ignored (`nohup`)."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDINGS}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
