"""`python -m fusewise` and the `fusewise` command; prints one clear message if the `lab` extra is missing."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: What `fusewise[lab]` installs and the command needs.
LAB_EXTRA = frozenset({"click", "jinja2", "rich", "matplotlib", "numpy"})


@contextmanager
def _importing() -> Iterator[None]:
    """Make Ctrl-C end the process at once, without a traceback: there is nothing to clean up yet, and some libraries
    swallow KeyboardInterrupt while they are imported.
    """

    def leave(*_: object) -> None:
        os.write(2, b"interrupted\n")
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        # For example ignored, as in background jobs of a shell.
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_standard_files() -> None:
    """Open those of the descriptors 0, 1 and 2 that the caller closed. Otherwise the next files opened would get their
    numbers: output of libraries would go into them, and workers would lose those that they inherit.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def main() -> None:
    _open_standard_files()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may not be valid UTF-8
    try:
        with _importing():
            from .cli import cli

        gc.freeze()  # what has been imported stays; to search it for garbage, also at exit, takes half a second
        cli(prog_name="fusewise")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in LAB_EXTRA:
            raise
        print(f"fusewise: {error.name} is not installed; pip install 'fusewise[lab]'", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
