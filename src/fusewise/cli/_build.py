"""The verb that builds native code ahead of time. Parses and calls, nothing else."""

from __future__ import annotations

import sys

import click

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

"""
    + EXIT_CODES
)
@click.option("--arch", help="Comma-separated names of GPUs to build for, as sm_90. Default: the GPUs of this machine.")
def build(arch: str | None) -> None:
    """Compile the native code now, so that no call waits for it.

    Prints where each library is and how long it took.

    The compilers are $CXX and $NVCC, or those on the PATH; the cache is $FUSEWISE_CACHE_DIR, or the user's.
    """
    from fusewise import native

    try:
        chosen = native.capabilities(tuple(name.strip() for name in (arch or "").split(",") if name.strip()))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    failed = False
    for built in native.build_all(chosen):
        if built.path is None:
            failed = True
            click.echo(f"{built.name}: {built.error}", err=True)
        else:
            took = f"{built.seconds:.1f} s" if built.seconds else "was there"
            click.echo(f"{built.name}: {built.path}, {took}")
    sys.exit(1 if failed else 0)


VERBS = (build,)
