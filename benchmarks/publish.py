"""Publish the results of studies: `python benchmarks/publish.py RUN... benchmarks/baselines/h200.jsonl`.

RUN is a run directory (also of an interrupted study) or a file of rows. A comparison (operation, case, dtype, pass) replaces
the published one as a whole, so rows of different runs are never mixed. A comparison is rejected if fusewise takes part but
none of its rows is correct, if a provider ran out of memory, or, without `--fewer`, if a published provider would be lost.
Paths in reasons are reduced to file names.
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
    """Group rows by comparison and keep the latest run of each; run ids start with a timestamp."""
    found: Comparisons = {}
    for row in rows:
        there = found.setdefault(row.key, [])
        if there and row.run > there[0].run:
            there.clear()
        if not there or row.run == there[0].run:
            there.append(row)
    return found


#: The directories of an absolute path; does not match URLs and ratios.
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/'\"]+/)+")


def anywhere(row: Row) -> Row:
    """The row without directories of the machine it was measured on."""
    return replace(row, reason=_FOLDERS.sub("", row.reason))


def right(rows: Iterable[Row]) -> set[str]:
    return {row.provider for row in rows if row.status == "ok" and row.device_us is not None}


def objection(new: Sequence[Row], old: Sequence[Row], fewer: bool) -> str | None:
    """The reason to reject a comparison, or None."""
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
    """Update the file; return one line per rejected comparison."""
    published = comparisons(record.read_rows(to)) if to.exists() else {}
    refused = []
    for key, rows in comparisons(row for run in runs for row in record.read_rows(run)).items():
        why = objection(rows, published.get(key, []), fewer)
        if why is None:
            published[key] = rows  # keeps the position of the replaced one: pages follow the order of the file
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
