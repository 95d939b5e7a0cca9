"""Publish what studies measured: `python benchmarks/publish.py RUN... benchmarks/baselines/h200.jsonl`.

RUN is a run directory, also that of an interrupted study, or a file of rows. A comparison (operation, case, dtype, pass) takes
the place of the published one as a whole, so that rows of two runs never stand side by side. One in which fusewise has part and
nothing of it is right, or memory did not suffice, stays out, and so does one that would lose a provider, unless `--fewer` is
given. Of paths in reasons the names of files are published, not where they lie on the machine.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fusewise.lab import record
from fusewise.lab.record import Row

Key = tuple[str, str, str, str]
Comparisons = dict[Key, list[Row]]


def comparisons(rows: Iterable[Row]) -> Comparisons:
    """Rows by comparison; of one that was measured several times the latest run, whose id begins with its time."""
    found: Comparisons = {}
    for row in rows:
        there = found.setdefault(row.key, [])
        if there and row.run > there[0].run:
            there.clear()
        if not there or row.run == there[0].run:
            there.append(row)
    return found


#: The folders of an absolute path, which no URL and no ratio begins like.
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/'\"]+/)+")


def anywhere(row: Row) -> Row:
    """The row without folders of the machine that it was measured on."""
    return replace(row, reason=_FOLDERS.sub("", row.reason))


def right(rows: Iterable[Row]) -> set[str]:
    return {row.provider for row in rows if row.status == "ok" and row.device_us is not None}


def objection(new: Sequence[Row], old: Sequence[Row], fewer: bool) -> str | None:
    """Why a comparison is not to be published, or None."""
    ours = {row.provider for row in (*new, *old) if row.provider.startswith("fusewise")}
    if ours and not ours & right(new):
        return "nothing of fusewise's is right"
    starved = [row.provider for row in new if row.status == "failed" and "memory" in row.reason]
    if starved:
        return f"memory did not suffice for {', '.join(starved)}"
    given_up = [row.provider for row in new if row.reason.startswith("not started again")]
    if given_up:
        return f"{', '.join(given_up)} had been given up by then"
    lost = right(old) - right(new)
    return None if fewer or not lost else f"{', '.join(sorted(lost))} would be lost"


def publish(runs: Iterable[Path], to: Path, fewer: bool = False) -> list[str]:
    """Renew the file; returns a line for each comparison that stays out."""
    published = comparisons(record.read_rows(to)) if to.exists() else {}
    refused = []
    for key, rows in comparisons(row for run in runs for row in record.read_rows(run)).items():
        why = objection(rows, published.get(key, []), fewer)
        if why is None:
            published[key] = rows  # where the one before was: pages have the order of the file
        else:
            refused.append(f"{' '.join(key)}: {why}")
    rows = (anywhere(row) for group in published.values() for row in group)
    record.write_atomically(to, "".join(record.dumps(row.to_json()) + "\n" for row in rows))
    return refused


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+")
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("--fewer", action="store_true", help="publish a comparison that loses a provider, too")
    given = parser.parse_args()
    for line in publish(given.runs, given.file, given.fewer):
        print(line)
