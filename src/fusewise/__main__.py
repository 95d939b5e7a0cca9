"""`python -m fusewise` and the `fusewise` command, with one clear message where the extra they need is missing."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: What `fusewise[lab]` brings and the command needs.
LAB_EXTRA = frozenset({"click", "jinja2", "rich", "matplotlib", "numpy"})


@contextmanager
def _importing() -> Iterator[None]:
    """Ctrl-C ends the process at once, without a traceback: there is nothing to clean up yet, and some libraries catch
    KeyboardInterrupt while they are imported and go on."""

    def leave(*_: object) -> None:
        os.write(2, b"interrupted\n")
        os._exit(130)

    if (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):  # e.g. ignored, as in a shell's background jobs
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may be no UTF-8
    try:
        with _importing():
            from .cli import cli

        cli(prog_name="fusewise")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in LAB_EXTRA:
            raise
        print(f"fusewise: {error.name} is not installed; pip install 'fusewise[lab]'", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
