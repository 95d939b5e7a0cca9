"""Host against device time: what a call costs the device, what it costs the calling thread, and which dominates.

Back-to-back calls from Python take the longer of the two, since the host prepares the next call while the device
executes this one. Pure functions of rows, so they work for published rows as well as for a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from ..analysis import is_floor
from ..record import Json, Record, Row
from ..verdict import is_compiler
from . import number, percent

COLUMNS = (
    "provider",
    "device µs",
    "host µs",
    "call µs",
    "limited by",
    "× fastest call",
    "× best device time",
)
#: The provider that stands for PyTorch in the comparison.
COMPILED = "torch.compile"


@dataclass(frozen=True)
class Line:
    """One provider in one group, microseconds."""

    provider: str
    row: str  # row id
    device_us: float
    host_us: float

    @property
    def call_us(self) -> float:
        return max(self.device_us, self.host_us)

    @property
    def decided_by(self) -> str:
        return "host" if self.host_us > self.device_us else "device"


@dataclass(frozen=True)
class Group:
    """The providers of one group with a known host time, quickest call first."""

    key: tuple[str, str, str, str]
    lines: tuple[Line, ...]

    @property
    def name(self) -> str:
        return " ".join(self.key[1:])

    @property
    def compiled(self) -> Line | None:
        return next((line for line in self.lines if line.provider == COMPILED), None)

    @property
    def written(self) -> Line | None:
        """The hand-written kernel with the quickest call."""
        return next((line for line in self.lines if not is_compiler(line.provider)), None)

    def cells(self, line: Line) -> list[tuple[str, float | None]]:
        """The cells for COLUMNS: texts, and sort keys where they are numbers."""
        best = min(other.device_us for other in self.lines)
        times = (line.device_us, line.host_us, line.call_us)
        ratios = (line.call_us / self.lines[0].call_us, line.device_us / best)
        return [
            (line.provider, None),
            *((number(x), x) for x in times),
            (line.decided_by, None),
            *((number(x), x) for x in ratios),
        ]


def groups(rows: Iterable[Row]) -> list[Group]:
    """Every group with a host time, in row order. Floors are excluded: they are not competitors."""
    found: dict[tuple[str, str, str, str], list[Line]] = {}
    for row in rows:
        if row.device_us is not None and row.host_us is not None and not is_floor(row.provider):
            found.setdefault(row.key, []).append(Line(row.provider, row.id, row.device_us, row.host_us))
    return [Group(key, tuple(sorted(lines, key=lambda line: line.call_us))) for key, lines in found.items()]


def answer(found: Sequence[Group]) -> list[str]:
    """Whether a hand-written kernel pays off where a compiled one is as fast: sentences with the numbers of the groups
    that have both.
    """
    pairs = [(g, c, w) for g in found if (c := g.compiled) is not None and (w := g.written) is not None]
    if not pairs:
        return []
    waiting = [pair for pair in pairs if pair[1].decided_by == "host"]
    working = [pair for pair in pairs if pair[1].decided_by == "device"]
    said = []
    if waiting:
        said.append(
            f"In {len(waiting)} of {len(pairs)} comparisons {COMPILED} is limited by host overhead: the device needs "
            f"{_range([c.device_us for _, c, _ in waiting])} µs, the call {_range([c.call_us for _, c, _ in waiting])} µs. "
            f"Compared with the hand-written kernel with the fastest call, it takes "
            f"{_range([c.device_us / w.device_us for _, c, w in waiting])} times the device time "
            f"(median {_middle([c.device_us / w.device_us for _, c, w in waiting])}), and as a call "
            f"{_range([c.call_us / w.call_us for _, c, w in waiting])} times as long "
            f"(median {_middle([c.call_us / w.call_us for _, c, w in waiting])}). A kernel behind a C++ "
            f"operator reduces host overhead; in a CUDA graph, only device times remain."
        )
    if working:
        begun, kernel = f"In {len(working)} it", "that kernel"
        if not waiting:
            begun = f"In {len(working)} of {len(pairs)} comparisons {COMPILED}"
            kernel = "the hand-written kernel with the fastest call"
        said.append(
            f"{begun} is limited by the device: {COMPILED} takes "
            f"{_range([c.device_us / w.device_us for _, c, w in working])} times the device time of {kernel} "
            f"(median {_middle([c.device_us / w.device_us for _, c, w in working])})."
        )
    largest = max(waiting, key=lambda pair: pair[1].call_us / pair[2].call_us, default=None)
    if largest is not None:
        group, compiled, written = largest
        said.append(
            f"The widest gap is {group.name}: {COMPILED} {number(compiled.device_us)} µs of device time and "
            f"{number(compiled.host_us)} of host time, {written.provider} {number(written.device_us)} and "
            f"{number(written.host_us)}."
        )
    return said


def waits(group: Group) -> str:
    """Describe the group in one sentence."""
    waiting = [line for line in group.lines if line.decided_by == "host"]
    first = group.lines[0]
    return (
        f"{len(waiting)} of {len(group.lines)} are limited by host overhead; the fastest call is that of {first.provider}, "
        f"{number(first.call_us)} µs."
    )


def _range(values: Sequence[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"


def _middle(values: Sequence[float]) -> str:
    return number(median(values))


def shown(record: Record) -> bool:
    """Whether there is anything to show: host times, or profiles."""
    return bool(record.profiles) or bool(groups(record.rows))


def lack(record: Record) -> str:
    """Why there are no numbers."""
    if groups(record.rows):
        return ""
    return (
        "There are no host times: on a CPU, a call is its own host time. To see host overhead, run the same study on a GPU: "
        f"fusewise study {record.request['title'] or record.request['op']}"
    )


PROFILE_COLUMNS = ("name", "self CPU", "CPU total", "self device", "calls")


def profile_lines(profile: Json) -> list[list[tuple[str, float | None]]]:
    """torch.profiler's table: for host and device the share of total self time and the microseconds per call; texts,
    and sort keys where they are numbers."""
    calls = profile["calls"]
    lines = []
    for row in profile["rows"]:
        self_cpu, total = row["self_cpu_us"] / calls, row["cpu_total_us"] / calls
        device, share = row.get("self_device_us"), row.get("self_device_percent")
        on_device = None if device is None else device / calls
        cells = [
            (row["name"], None),
            (f"{number(self_cpu)} µs ({percent(row['self_cpu_percent'] / 100)})", self_cpu),
            (f"{number(total)} µs", total),
            ("–" if on_device is None else f"{number(on_device)} µs ({percent(share and share / 100)})", on_device),
            (number(row["calls"] / calls), row["calls"] / calls),
        ]
        lines.append(cells)
    return lines


def profiles(record: Record) -> list[tuple[str, list[Json]]]:
    """The profiles of each group side by side, with the group's name."""
    found: dict[str, list[Json]] = {}
    for profile in record.profiles:
        found.setdefault(" ".join((profile["case"], profile["dtype"], profile["pass"])), []).append(profile)
    return list(found.items())
