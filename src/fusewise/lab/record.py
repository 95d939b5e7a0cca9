"""The record of a study: rows, raw samples, environment. All output is a pure function of it.

`record.json` follows `record.schema.json` in this folder; `rows.jsonl` has only the rows, one per line, in the form in
which numbers are published. Both files are valid on disk after every finished group of rows.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .schema import check, fault, loads, short
from .spent import completed

#: 2 added `code`, `ledgers`, `limits` and `resumed`, 3 `profiles` and `spent`, 4 `kernel_us`, 5 `graph_us` and
#: `first_call_again_s`; see MIGRATIONS.
SCHEMA_VERSION = 5
KIND = "fusewise.record"
#: The suggested fix for a record that could not be read back.
MEND = "mend the provider or target that gave it"

Json = dict[str, Any]

#: Fields that most rows do not have.
RARE = ("kernel_us", "graph_us", "first_call_again_s")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One provider on one case, dtype and pass. Times are medians in microseconds per call; None: not measured."""

    op: str
    case: str
    shape: str
    dtype: str
    pass_: str
    provider: str
    status: str  # ok | wrong | missing | failed
    reason: str = ""
    device_us: float | None = None
    device_us_iqr: float | None = None
    host_us: float | None = None
    first_call_s: float | None = None
    bytes_min: int | None = None
    flops_min: int | None = None
    peak_bytes: int | None = None
    held_bytes: int | None = None
    limit: str | None = None  # copy | matmul | launch
    share_of_limit: float | None = None
    error: float | None = None
    error_eager: float | None = None
    verdict_vs_best_other: str | None = None  # faster | slower | same | ambiguous
    versions: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    clocks: Mapping[str, Any] | None = None
    run: str = ""
    kernel_us: float | None = None  # profiled kernel time; on a GPU, for cases with ledgers
    graph_us: float | None = None  # device time of a call in a replayed CUDA graph; likewise
    first_call_again_s: float | None = None  # first call in a second process, with the caches that the first one left

    def to_json(self) -> Json:
        found = {("pass" if f.name == "pass_" else f.name): getattr(self, f.name) for f in fields(self)}
        for name in RARE:
            if found[name] is None:
                del found[name]
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        return cls(**{("pass_" if key == "pass" else key): value for key, value in data.items()})

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The group in which this row is compared."""
        return (self.op, self.case, self.dtype, self.pass_)

    @property
    def id(self) -> str:
        """The row's name within its record: `op/case/dtype/pass/provider`."""
        return "/".join((*self.key, self.provider))


@dataclass(kw_only=True)
class Measurement:
    """The data behind a row: the raw samples of every round, and the results of the preparation."""

    op: str
    case: str
    dtype: str
    pass_: str
    provider: str
    prepared: Json = field(default_factory=dict)
    rounds: list[Json] = field(default_factory=list)  # {"round", "device_us": [...], "host_us", "held", "clocks", ...}

    def to_json(self) -> Json:
        return {("pass" if f.name == "pass_" else f.name): getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        return cls(**{("pass_" if key == "pass" else key): value for key, value in data.items()})

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.op, self.case, self.dtype, self.pass_)


@dataclass(kw_only=True)
class Record:
    """One run of a study."""

    run: str
    created: str
    request: Json
    environment: Json
    finished: bool = False
    seconds: float | None = None
    rows: list[Row] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    comparisons: list[Json] = field(default_factory=list)  # ratios with confidence intervals, and the A/A noise
    code: list[Json] = field(default_factory=list)  # compiler output: provider, stage, order, language, text, …
    ledgers: list[Json] = field(default_factory=list)  # a provider's kernels with the bytes each reads and writes
    profiles: list[Json] = field(default_factory=list)  # torch.profiler's tables: provider, calls, rows
    spent: dict[str, float] = field(default_factory=dict)  # `seconds` by activity; see spent.py
    limits: Json | None = None  # of this machine, measured earlier by `fusewise limits`
    resumed: list[str] = field(default_factory=list)  # when an interrupted run was resumed, UTC, ISO 8601

    def add(self, rows: Sequence[Row], measurements: Sequence[Measurement], comparisons: Sequence[Json]) -> None:
        """Add a finished group. Raises ValueError naming a field that could not be read back; then nothing is added."""
        for part, found in (
            ("row", [row.to_json() for row in rows]),
            ("measurement", [m.to_json() for m in measurements]),
            ("comparison", comparisons),
        ):
            for one in found:
                check(one, part, MEND)
        self.rows += rows
        self.measurements += measurements
        self.comparisons += comparisons

    def account(self, seconds: float, parts: Mapping[str, float]) -> None:
        """Add `seconds` to the total, broken down by activity."""
        self.seconds = (self.seconds or 0.0) + seconds
        mine = completed(parts, seconds)
        self.spent = {name: self.spent.get(name, 0.0) + mine[name] for name in mine}

    def to_json(self) -> Json:
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["rows"] = [row.to_json() for row in self.rows]
        plain["measurements"] = [m.to_json() for m in self.measurements]
        return {"kind": KIND, "schema": SCHEMA_VERSION, **plain}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], what: str = "it") -> Record:
        """Raises ValueError if `data` has an unknown version, violates the schema, or has two rows of one id; `what` names
        it in the message."""
        if data.get("kind") != KIND:
            raise ValueError(
                f"record: kind must be {KIND!r}, got {short(data.get('kind'))}; pass a record.json of a study"
            )
        data = migrate(data)
        check(data, what=what)
        plain = {key: value for key, value in data.items() if key not in ("kind", "schema")}
        plain["rows"] = [Row.from_json(row) for row in data["rows"]]
        if several := [name for name, times in Counter(row.id for row in plain["rows"]).items() if times > 1]:
            raise ValueError(
                f"record: {what} must have one row of each id, got several of {several[0]!r}; name another file"
            )
        plain["measurements"] = [Measurement.from_json(m) for m in data["measurements"]]
        return cls(**plain)


def _with_code_and_limits(data: Json) -> Json:
    """1 → 2: fields that version 1 did not have are empty."""
    return {**data, "code": [], "ledgers": [], "limits": None, "resumed": []}


def _with_profiles(data: Json) -> Json:
    """2 → 3: likewise."""
    return {**data, "profiles": [], "spent": {}}


def _with_kernel_times(data: Json) -> Json:
    """3 → 4: rows gained one optional number."""
    return data


def _with_graph_times(data: Json) -> Json:
    """4 → 5: rows gained two."""
    return data


#: Each migrates a record from its key's version to the next. Every change of the schema adds one; none is ever removed.
MIGRATIONS: dict[int, Callable[[Json], Json]] = {
    1: _with_code_and_limits,
    2: _with_profiles,
    3: _with_kernel_times,
    4: _with_graph_times,
}


def migrate(data: Mapping[str, Any]) -> Json:
    """Convert a record of any version to the current one. Raises ValueError if it is newer than this fusewise."""
    found, version = dict(data), data.get("schema")
    while version != SCHEMA_VERSION:
        if isinstance(version, bool) or not isinstance(version, int) or version not in MIGRATIONS:
            raise ValueError(
                f"record: schema must be 1 to {SCHEMA_VERSION}, got {short(version)}; use the fusewise that wrote it"
            )
        found, version = MIGRATIONS[version](found), version + 1
    return {**found, "schema": SCHEMA_VERSION}


def dumps(data: Any) -> str:
    return json.dumps(data, allow_nan=False)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write next to the target and rename, so that readers and crashes never see half a file, and a symlink, e.g. in
    someone else's folder, is replaced instead of followed. Text that is not valid UTF-8, e.g. in a folder name, is
    written escaped.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", errors="backslashreplace")
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a JSON-lines file: all of them or, on a full disk, none."""
    data = "".join(dumps(row.to_json()) + "\n" for row in rows).encode()
    with path.open("a+b", buffering=0) as file:
        lasting = path.is_file()  # not a pipe or a device
        before = file.seek(0, os.SEEK_END) if lasting else 0
        if before and file.seek(-1, os.SEEK_END) is not None and file.read(1) != b"\n":
            data = b"\n" + data  # an editor may have removed the last newline
        try:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            if lasting:
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):  # not a regular file, e.g. a pipe; the error above is the one to report
                file.truncate(before)
            raise


def save(record: Record, directory: Path) -> None:
    """Write `record.json`. Raises ValueError naming the field if it could not be read back; measurements, the bulk of a
    record, are checked earlier, by `Record.add`.
    """
    data = record.to_json()
    check({**data, "measurements": []}, fix=MEND)
    write_atomically(directory / "record.json", dumps(data) + "\n")


def read(path: Path) -> Record:
    """Read a record from a record.json or its directory."""
    file = path / "record.json" if path.is_dir() else path
    if path.is_dir() and not file.is_file():  # nor a pipe or device, which may never end
        raise ValueError(f"record: {path} must be a run directory, got one without record.json; name another")
    try:
        data = loads(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("no JSON object")
    except ValueError as error:
        raise ValueError(f"record: {file} must be the record.json of a study, got {error}; name another file") from None
    return Record.from_json(data, str(file))


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a run directory, its record.json, or a file of rows, one JSON object per line."""
    return rows_in(path) if path.suffix == ".jsonl" else read(path).rows


def rows_in(path: Path) -> list[Row]:
    """Read a file of rows."""
    rows = []
    try:
        text = path.read_text(encoding="utf-8").rstrip()
    except UnicodeDecodeError as error:
        raise ValueError(f"record: {path} must be a file of rows, got {error}; name another file") from None
    for number, line in enumerate(text.split("\n") if text else (), start=1):  # a row may contain U+2028
        try:
            data = loads(line)
            found = fault(data, "row")
        except ValueError as error:
            found = str(error)
        if found:
            raise ValueError(f"record: line {number} of {path} must be a row, got this fault: {found}; mend the file")
        rows.append(Row.from_json(data))
    return rows
