"""Renderers: pure functions of a record. They measure nothing and have no other input."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from ..analysis import disturbed, is_floor
from ..record import Record, Row

Group = tuple[str, str, str, str]
#: Smallest number of cases that form a sweep.
FEWEST_POINTS = 3
#: Load per core from which a machine counts as busy.
BUSY = 0.5
WITHOUT_TIME = ("provider", "status", "rows", "reason")
#: For `str.translate`: bidirectional controls, which turn the text behind them around, also beyond the name that has them.
BIDIRECTIONAL = dict.fromkeys((0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd")


def groups(record: Record) -> dict[Group, list[Row]]:
    """The rows grouped by op, case, dtype and pass, in measurement order."""
    found: dict[Group, list[Row]] = {}
    for row in record.rows:
        found.setdefault(row.key, []).append(row)
    return found


def measured(rows: Iterable[Row]) -> list[str]:
    """The providers that have a time in any of the rows, floors first."""
    names = list(dict.fromkeys(row.provider for row in rows if row.device_us is not None))
    return sorted(names, key=lambda name: not is_floor(name))


def without_time(rows: Iterable[Row]) -> list[tuple[str, str, int, str]]:
    """What WITHOUT_TIME names: each reason once, with the number of rows it affects."""
    counts: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.status != "ok":
            counts[(row.provider, row.status, row.reason)] = counts.get((row.provider, row.status, row.reason), 0) + 1
    return [(provider, status, count, reason) for (provider, status, reason), count in counts.items()]


def idleness(record: Record) -> list[str]:
    """A warning if the machine was busy with other work before or during the study."""
    timed = [row for row in record.rows if row.device_us is not None]
    waiting = [threads for row in timed if (threads := disturbed(row)) is not None]
    if 2 * len(waiting) > len(timed):
        return [
            f"The machine was not idle: in {len(waiting)} of {len(timed)} rows up to {number(max(waiting))} threads of a provider "
            "waited for a core on average. Their times are too long."
        ]
    load, cores = record.environment.get("load_average"), record.environment.get("cores")
    if load is None or cores is None or load < BUSY * cores:
        return []
    return [f"The machine was not idle when the study began (load {load} on {cores} cores): times may be too long."]


def sweep(rows: Sequence[Row]) -> str | None:
    """The common prefix, if every case is named `<prefix>-<number>` and there are enough of them."""
    found = {match[1] if (match := re.fullmatch(r"(.+)-(\d{1,15})", row.case)) else None for row in rows}
    prefix = found.pop() if len(found) == 1 else None
    return prefix if prefix and len({row.case for row in rows}) >= FEWEST_POINTS else None


def gigabytes_per_second(row: Row) -> float | None:
    """Minimum bytes divided by time; None for the launch floor, which moves no bytes."""
    if row.device_us is None or row.bytes_min is None or row.provider == "floor-launch":
        return None
    return row.bytes_min / row.device_us / 1e3


def eager_of(row: Row, rows: Iterable[Row]) -> Row | None:
    """Eager code's row in the same group."""
    return next((other for other in rows if other.provider == "eager" and other.key == row.key), None)


def calls(count: float | None) -> str:
    """A number of calls, of which there may be too many or none."""
    return "never" if count == math.inf else number(count) if count is None or count >= 1e6 else f"{count:,.0f}"


def printable(text: str) -> str:
    """Text on one line without control characters, which a terminal would interpret."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


def shortened(text: str, most: int) -> str:
    """At most so many characters; the middle is left out, since long names often differ only at their ends."""
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}…{text[-(most // 2) :]}"


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, without an exponent where that is readable; a dash for None."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def size(count: int | None) -> str:
    """Bytes in binary units."""
    if count is None:
        return "–"
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{number(value)} {unit}"
        value /= 1024
    return f"{number(value)} GiB"


def fact(name: str, value: object) -> str:
    """Format a named value: bytes with a unit, everything else unchanged."""
    plain = isinstance(value, int) and abs(value) < 1e30
    return size(value) if plain and name.endswith("_bytes") else str(value)  # type: ignore[arg-type]


def percent(value: float | None) -> str:
    """Three significant digits without trailing zeros; a dash for None."""
    return "–" if value is None else f"{float(f'{100 * value:.3g}'):,g} %"
