"""Compares two runs, or files of published rows: what regressed beyond the noise of both.

Rows are matched by op, case, dtype, pass and provider. The runs were made at different times, so rounds cannot be
paired: the confidence interval of a ratio comes from resampling the rounds of each side independently or, for rows
without samples, from their interquartile ranges. The noise is the largest of the two runs' A/A tests and the tolerance.
A difference explained by clocks or a busy machine is "ambiguous". In relative mode each time is divided by that of its
group's binding floor, measured in the same rounds, so that a machine that got slower overall is no regression.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import analysis, record
from .analysis import BOOTSTRAP_DRAWS, CONFIDENCE, Ratio, is_floor
from .record import Measurement, Record, Row
from .render import number

#: Runs of the same program differ by this much for reasons that no A/A test detects: memory placement, temperature.
TOLERANCE = 0.02
#: SM clocks that differ by more than this between the runs are taken into account.
CLOCKS_DIFFER = 0.02
REGRESSIONS = ("slower", "broken")
#: The parts of a record's environment that the user sets or that identify the machine; rows have device and versions.
ENVIRONMENT = ("cpu", "cores", "torch_threads")

Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Side:
    """One run: its rows and, if read from a record, the round medians and the noise of each group."""

    name: str
    rows: Mapping[Key, Row]
    rounds: Mapping[Key, Mapping[int, float]]
    noise: Mapping[tuple[str, str, str, str], float]
    unit: str = "µs"
    conditions: Mapping[str, str] = field(default_factory=dict)  # from a record: the measurement conditions
    replaced: int = 0  # rows of a file that a later one with the same key replaces


@dataclass(frozen=True)
class Change:
    """One row in both runs. verdict: faster | slower | same | ambiguous | broken (was ok) | mended (was not ok) | still
    broken."""

    op: str
    case: str
    dtype: str
    pass_: str
    provider: str
    before_us: float | None
    after_us: float | None
    ratio: float | None
    low: float | None
    high: float | None
    noise: float | None
    verdict: str
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {("pass" if name == "pass_" else name): value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Comparison:
    """The rows that both runs have, and how many only one has."""

    before: str
    after: str
    changes: tuple[Change, ...]
    only_before: int
    only_after: int
    notes: tuple[str, ...]
    unit: str = "µs"  # of before_us and after_us; relative times are multiples of a floor

    def exit_code(self, strict: bool = False) -> int:
        """0: nothing regressed. 1: something became slower or broke, or, if strict, is ambiguous. 2: nothing to
        compare."""
        if not self.changes:
            return 2
        bad = {*REGRESSIONS, "ambiguous"} if strict else set(REGRESSIONS)
        return int(any(change.verdict in bad for change in self.changes))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "changes": [change.to_json() for change in self.changes], "notes": list(self.notes)}


def read(path: Path) -> Side:
    """A run directory, its record.json, or a .jsonl file of rows. The last of several rows with the same key wins."""
    if path.suffix == ".jsonl":
        rows = record.read_rows(path)
        last = {_key(row): row for row in rows}
        return Side(str(path), last, {}, {}, replaced=len(rows) - len(last))
    return side(record.read(path), str(path))


def side(found: Record, name: str) -> Side:
    noise = {
        (c["op"], c["case"], c["dtype"], c["pass"]): c["noise"]
        for c in found.comparisons
        if c["noise"] is not None  # the same for all of a group
    }
    rounds = {_measured(m): analysis.round_medians(m) for m in found.measurements if m.rounds}
    conditions = {"cache": found.request.get("cache"), **{name: found.environment.get(name) for name in ENVIRONMENT}}
    known = {name.replace("_", " "): str(value) for name, value in conditions.items() if value is not None}
    return Side(name, {_key(row): row for row in found.rows}, rounds, noise, conditions=known)


def _key(row: Row) -> Key:
    return (*row.key, row.provider)


def _measured(m: Measurement) -> Key:
    return (*m.key, m.provider)


def relative(side: Side) -> Side:
    """The run with every time divided by that of its group's binding floor; groups without one are dropped. The floors
    themselves tell of the machine and keep their times."""
    rows, rounds = {}, {}
    for key, row in side.rows.items():
        floor = (*key[:4], f"floor-{row.limit}")
        if row.device_us is None or is_floor(row.provider):
            rows[key] = row
        elif row.share_of_limit and floor in side.rows and side.rows[floor].device_us is not None:
            factor = 1 / (row.share_of_limit * row.device_us)
            iqr = None if row.device_us_iqr is None else row.device_us_iqr * factor
            rows[key] = replace(row, device_us=row.device_us * factor, device_us_iqr=iqr, clocks=None)
            mine, least = side.rounds.get(key, {}), side.rounds.get(floor, {})
            rounds[key] = {i: time / least[i] for i, time in mine.items() if i in least}
    return replace(side, rows=rows, rounds=rounds, unit="× floor")


def compare(before: Side, after: Side, tolerance: float = TOLERANCE) -> Comparison:
    """Compare every row that both sides have. Floors are excluded: they describe the machine and go into the notes."""
    shared = [key for key in before.rows if key in after.rows]
    changes = [_change(key, before, after, tolerance) for key in shared if not is_floor(key[-1])]
    return Comparison(
        before.name,
        after.name,
        tuple(c for c in changes if c is not None),
        len(before.rows.keys() - after.rows.keys()),
        len(after.rows.keys() - before.rows.keys()),
        tuple(_notes(shared, before, after)),
        after.unit,
    )


def _change(key: Key, before: Side, after: Side, tolerance: float) -> Change | None:
    """Compare one row; None if it is missing on either side."""
    old, new = before.rows[key], after.rows[key]
    if "missing" in (old.status, new.status):
        return None
    if old.device_us is None or new.device_us is None:
        words = {(True, False): "broken", (False, True): "mended", (False, False): "still broken"}
        word = words[old.device_us is not None, new.device_us is not None]
        return Change(*key, old.device_us, new.device_us, None, None, None, None, word, new.reason)
    ratio = _ratio(key, before, after, old, new)
    noise = max(tolerance, before.noise.get(key[:4], 0.0), after.noise.get(key[:4], 0.0))
    word, note = analysis.verdict(ratio, noise), ""
    clocks = [mhz for row in (old, new) if row.clocks and (mhz := row.clocks.get("sm_mhz", 0)) > 0]
    if word in ("faster", "slower") and len(clocks) == 2 and abs(clocks[1] / clocks[0] - 1) > CLOCKS_DIFFER:
        factor = clocks[1] / clocks[0]
        cycles = Ratio(ratio.value * factor, ratio.low * factor, ratio.high * factor)
        if analysis.verdict(cycles, noise) != word:
            word, note = (
                "ambiguous",
                f"the clock was {clocks[0]:.0f} MHz before, {clocks[1]:.0f} after; in clock cycles it is not {word}",
            )
    disturbed = {"slower": analysis.disturbed(new), "faster": analysis.disturbed(old)}.get(word)
    if disturbed is not None:
        word, note = (
            "ambiguous",
            f"the machine was busy: {number(disturbed)} of its threads waited for a core, on average",
        )
    return Change(*key, old.device_us, new.device_us, ratio.value, ratio.low, ratio.high, noise, word, note)


def _ratio(key: Key, before: Side, after: Side, old: Row, new: Row) -> Ratio:
    """after / before with its confidence interval."""
    assert old.device_us is not None and new.device_us is not None
    value = new.device_us / old.device_us
    if len(before.rounds.get(key, ())) >= 3 and len(after.rounds.get(key, ())) >= 3:
        draws = _medians(after.rounds[key], 1) / _medians(before.rounds[key], 0)
        low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return Ratio(value, float(low), float(high))
    spread = sum(((row.device_us_iqr or 0.0) / row.device_us) ** 2 for row in (old, new) if row.device_us) ** 0.5 / 2
    return Ratio(value, value / (1 + spread), value * (1 + spread))


def _medians(rounds: Mapping[int, float], seed: int) -> Any:
    """Medians of bootstrap samples of the rounds, deterministic for the same values."""
    generator = np.random.default_rng([seed, len(rounds)])
    samples = np.array(list(rounds.values()))
    return np.median(samples[generator.integers(0, len(samples), (BOOTSTRAP_DRAWS, len(samples)))], axis=1)


def _notes(shared: Sequence[Key], before: Side, after: Side) -> list[str]:
    """Other differences: device, versions, conditions, the machine's own speed."""
    found = []
    rows = [[one.rows[key] for key in shared] for one in (before, after)]
    devices, versions = [_devices(r) for r in rows], [_versions(r) for r in rows]
    for name in sorted({"device", *versions[0], *versions[1]}):
        old, new = devices if name == "device" else [v.get(name, set()) for v in versions]
        if old != new:
            found.append(f"{name}: {', '.join(sorted(old)) or 'none'} before, {', '.join(sorted(new)) or 'none'} after")
    for name, old_word in before.conditions.items():
        if (new_word := after.conditions.get(name, old_word)) != old_word:
            found.append(f"{name}: {old_word} before, {new_word} after")
    floors = [
        after.rows[key].device_us / before.rows[key].device_us  # type: ignore[operator]
        for key in shared
        if key[-1] == "floor-copy" and before.rows[key].device_us and after.rows[key].device_us
    ]
    if floors and abs(float(np.median(floors)) - 1) > TOLERANCE:
        found.append(f"the machine itself changed: copying takes {np.median(floors):.3f} times as long (median)")
    for word, one in (("before", before), ("after", after)):
        if one.replaced:
            found.append(f"{one.replaced} of the rows {word} do not count: later ones have the same key")
    without = [word for word, one in (("before", before), ("after", after)) if not one.noise]
    if without:
        known = "the other side's or the tolerance" if len(without) == 1 else "the tolerance"
        found.append(f"no A/A pair {' and '.join(without)}: the noise is taken to be {known}")
    return found


def _devices(rows: Iterable[Row]) -> set[str]:
    return {row.device for row in rows}


def _versions(rows: Iterable[Row]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in rows:
        for name, version in row.versions.items():
            found.setdefault(name, set()).add(version)
    return found
