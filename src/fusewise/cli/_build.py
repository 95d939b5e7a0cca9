"""The command that compiles native code ahead of time. Only parses arguments and calls."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import click

from ._options import names

EXIT_CODES = """\b
Exit codes:
  0  everything is built
  1  something is not (the compiler's last lines say why)
  2  the command line is wrong
"""


@click.command(
    epilog="""\b
Examples:
  fusewise build
  fusewise build --arch sm_80,sm_90
  fusewise build --json | jq -r '.[].path'

"""
    + EXIT_CODES
)
@click.option(
    "--arch",
    "architectures",
    callback=names,
    help="Comma-separated names of GPUs to build for, as sm_90. Default: the GPUs of this machine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, when all is done.")
def build(architectures: list[str] | None, as_json: bool) -> None:
    """Compile the native code now, so that no call waits for it.

    Prints where each library is and how long it took.

    The compilers are $CXX and $NVCC, or those on the PATH; the cache is $FUSEWISE_CACHE_DIR, or the user's.
    """
    from fusewise import native

    if architectures == []:
        raise click.UsageError(
            "build: arch must be names like sm_80,sm_90, got none; leave it out for this machine's GPUs"
        )
    try:
        chosen = native.capabilities(tuple(architectures or ()))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    every = []
    for built in native.build_all(chosen):
        every.append(built)
        if built.path is None:
            click.echo(f"{built.name}: {built.error}", err=True)
        elif not as_json:
            took = f"{built.seconds:.1f} s" if built.seconds else "already built"
            click.echo(f"{built.name}: {built.path}, {took}")
    if as_json:
        click.echo(json.dumps([{**asdict(it), "path": it.path and str(it.path)} for it in every]))
    sys.exit(1 if any(it.path is None for it in every) else 0)


VERBS = (build,)
