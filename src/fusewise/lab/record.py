"""The record of a study: rows, raw samples, environment. Everything that is shown is a pure function of it.

`record.json` follows `record.schema.json` beside this file; `rows.jsonl` has the rows alone, one a line, in the form in
which numbers are published. Both are on disk, valid, after every finished group of rows.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
KIND = "fusewise.record"

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One provider on one case, dtype and pass. Times in microseconds a call, medians; None: not measured."""

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

    def to_json(self) -> Json:
        return {("pass" if f.name == "pass_" else f.name): getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        return cls(**{("pass_" if key == "pass" else key): value for key, value in data.items()})

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What the row is compared within: the group."""
        return (self.op, self.case, self.dtype, self.pass_)


@dataclass(kw_only=True)
class Measurement:
    """What a row was made from: the raw samples of every round, and what the preparation found."""

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
    comparisons: list[Json] = field(default_factory=list)  # ratios with their intervals, and the A/A noise

    def to_json(self) -> Json:
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["rows"] = [row.to_json() for row in self.rows]
        plain["measurements"] = [m.to_json() for m in self.measurements]
        return {"kind": KIND, "schema": SCHEMA_VERSION, **plain}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        if data.get("kind") != KIND:
            raise ValueError(f"record: kind must be {KIND!r}, got {data.get('kind')!r}; pass a record.json of a study")
        if data.get("schema") != SCHEMA_VERSION:
            raise ValueError(
                f"record: schema must be {SCHEMA_VERSION}, got {data.get('schema')!r}; use the fusewise that wrote it"
            )
        plain = {key: value for key, value in data.items() if key not in ("kind", "schema")}
        plain["rows"] = [Row.from_json(row) for row in data["rows"]]
        plain["measurements"] = [Measurement.from_json(m) for m in data["measurements"]]
        return cls(**plain)


def schema() -> Json:
    """The JSON Schema of `record.json`."""
    text = resources.files(__package__).joinpath("record.schema.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def dumps(data: Any) -> str:
    return json.dumps(data, allow_nan=False)


def write_atomically(path: Path, text: str) -> None:
    """Write beside the target and rename, so that a reader or a crash never meets half a file."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a JSON-lines file, one a line."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(dumps(row.to_json()) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def save(record: Record, directory: Path) -> None:
    write_atomically(directory / "record.json", dumps(record.to_json()) + "\n")


def read(path: Path) -> Record:
    """The record at `path`, a record.json or the directory of one."""
    file = path / "record.json" if path.is_dir() else path
    return Record.from_json(json.loads(file.read_text(encoding="utf-8")))
