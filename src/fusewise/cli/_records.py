"""The commands on records: render one, compare two, measure this machine's limits. Only parses arguments and calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from ._options import Folder

Read = TypeVar("Read")

EXISTING = click.Path(exists=True, path_type=Path)


def _read(verb: str, path: Path, how: Callable[[Path], Read]) -> Read:
    try:
        return how(path)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.UsageError(f"{verb}: {path} must be a file that can be read, got {error}; name another") from None


@click.command(
    epilog="""\b
Examples:
  fusewise report fusewise-runs/rope-quick-20260101T120000-1a2b3c4d
  fusewise report RUN --script rope/cube-8/fp32/fwd/eager > again.py
  fusewise report RUN --json | jq '.[].rows[] | select(.status == "wrong")'

\b
Exit codes:
  0  done
  1  the report could not be written
  2  there is no record, or no such row
"""
)
@click.argument("run", type=EXISTING)
@click.option("--out", type=Folder(), help="Folder for the report. Default: the run directory.")
@click.option("--script", "row_id", metavar="ROW", help="Print the program that measures this row again, by its id.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts and rows as JSON, write nothing.")
def report(run: Path, out: Path | None, row_id: str | None, as_json: bool) -> None:
    """Regenerate the report of RUN.

    That is report.html, report.md and the plots; RUN is a run directory or its record.json.
    """
    from fusewise.lab import commands, record
    from fusewise.lab.render import printable, script

    found = _read("report", run, record.read)
    if row_id is not None:
        row = next((row for row in found.rows if row.id == row_id), None)
        if row is None:
            some = printable(", ".join(r.id for r in found.rows[:3]))
            raise click.UsageError(
                f"report: --script must be the id of a row, such as {some}, got {row_id!r}; choose one"
            )
        click.echo(script.program(found, row), nl=False)
        return
    if as_json:
        click.echo(json.dumps(commands.as_json(found)))
        return
    folder = out or (run if run.is_dir() else run.parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = commands.render(found, folder)
    except OSError as error:
        raise click.ClickException(f"report: --out must be writable, got {error}; choose another") from None
    commands.show(found)
    click.echo(f"report: {path}")


@click.command(
    epilog="""\b
Examples:
  fusewise compare runs/before runs/after
  fusewise compare benchmarks/baselines/h200.jsonl fusewise-runs/rope-models-20260101T120000-1a2b3c4d
  fusewise compare A B --json --tolerance 0.05

\b
Exit codes:
  0  nothing became slower
  1  something became slower beyond the noise, or broke (with --strict: or is ambiguous)
  2  they cannot be compared: a file is no record, or they have no row in common
"""
)
@click.argument("before", type=EXISTING)
@click.argument("after", type=EXISTING)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, max=1),
    default=None,
    help="Ignore differences up to this share of the time, even if the noise is lower. Default: 0.02.",
)
@click.option(
    "--relative",
    is_flag=True,
    help="Divide times by the floor of their group, if the machine itself became slower or faster.",
)
@click.option("--strict", is_flag=True, help="Exit 1 for ambiguous rows, too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def compare(before: Path, after: Path, tolerance: float | None, relative: bool, strict: bool, as_json: bool) -> None:
    """Report what became slower from BEFORE to AFTER.

    Each is a run directory, a record.json, or a .jsonl file of rows.
    """
    from fusewise.lab import commands
    from fusewise.lab import compare as comparing

    if tolerance is not None and tolerance != tolerance:  # NaN, which click accepts as within the range
        raise click.BadParameter("nan is not in the range 0<=x<=1", param_hint="--tolerance")
    sides = _read("compare", before, comparing.read), _read("compare", after, comparing.read)
    if relative:
        sides = comparing.relative(sides[0]), comparing.relative(sides[1])
    found = comparing.compare(*sides, comparing.TOLERANCE if tolerance is None else tolerance)
    code = found.exit_code(strict)
    if as_json:
        click.echo(json.dumps({**found.to_json(), "exit_code": code}))
    elif not found.changes:
        where = ", with floors in both (add floor-copy to the providers)" if relative else ""
        raise click.UsageError(
            f"compare: the runs must share rows{where}, got no row in common of {before} and {after}; compare others"
        )
    else:
        commands.show_comparison(found)
    sys.exit(code)


@click.command(
    epilog="""\b
Examples:
  fusewise limits
  fusewise limits --kept --json

\b
Exit codes:
  0  done
  1  with --kept: none are kept; otherwise the device cannot be measured, or the result not be kept
  2  the command line is wrong
"""
)
@click.option("--device", help="cpu or cuda[:index]. Default: the GPU if there is one.")
@click.option("--kept", is_flag=True, help="Print the stored limits, measure nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def limits(device: str | None, kept: bool, as_json: bool) -> None:
    """Measure and store the limits of this machine.

    Copy and triad bandwidth, matmuls by dtype, and launch latency; studies use them.
    """
    from fusewise.lab import commands, plan
    from fusewise.lab import limits as measuring

    try:
        where = plan.device(device, "limits")
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    found = measuring.kept(where) if kept else measuring.measure(where)
    if found is None:
        raise click.ClickException(f"limits: none are kept for {where}; run `fusewise limits --device {where}`")
    if as_json:
        click.echo(json.dumps(found))
    else:
        commands.show_limits(found)
    try:  # after they were printed: to measure them took a minute
        file = measuring.path(where) if kept else measuring.keep(found, where)
    except ValueError as error:
        raise click.ClickException(f"limits: not kept: {error}") from None
    click.echo(f"stored in {file}", err=True)


VERBS = (report, compare, limits)
