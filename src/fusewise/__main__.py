"""`python -m fusewise` and the `fusewise` command, with one clear message where the extra they need is missing."""

from __future__ import annotations

import io
import sys

from ._shared.starting import importing

#: What `fusewise[lab]` brings and the command needs.
LAB_EXTRA = frozenset({"click", "jinja2", "rich", "matplotlib", "numpy"})


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may be no UTF-8
    try:
        with importing():
            from .cli import cli

        cli(prog_name="fusewise")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in LAB_EXTRA:
            raise
        print(f"fusewise: {error.name} is not installed; pip install 'fusewise[lab]'", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
