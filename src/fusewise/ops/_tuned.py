"""Configurations found by `fusewise tune` on this machine, and the interface of an operation to the tuner.

    TUNED = Tuned("gated_linear", "triton", SOURCES, space)        in the module of an implementation
    config = TUNED.find(device, key) or choose(...)                per call: one lookup

The first call on a device reads one file. Its name and content identify everything that results depend on: the device,
the versions of fusewise and of the libraries that compile the kernels, and the kernels' sources; results of another
machine or version are never used. An entry is only valid if its configuration is in the current search space of its key. FUSEWISE_TUNED=0 in the
environment disables tuned configurations in favor of the heuristics.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._shared import cache
from ._common import KERNEL_FLOATS, dtype_name

VERSION = 1
_DTYPES = {dtype_name(dtype): dtype for dtype in KERNEL_FLOATS}
Config = TypeVar("Config")


class Key(NamedTuple):
    """Key of a configuration: a kernel, and the sizes of its product (rows, inner) x (inner, hidden)."""

    kernel: str
    dtype: torch.dtype
    way: str  # the kernel's variant, if the configuration does not determine it: "half, tma"
    rows: int
    inner: int  # 0 for a kernel without a product
    hidden: int

    def __str__(self) -> str:
        words = f"{self.kernel} {dtype_name(self.dtype)} {self.rows},{self.inner},{self.hidden}"
        return f"{words} ({self.way})" if self.way else words


@dataclass(frozen=True)
class Found:
    """A result of the search: the times of the best configuration and of the heuristic's, in microseconds."""

    us: float
    heuristic_us: float
    rounds: int
    created: str


@dataclass(frozen=True)
class Job:
    """A kernel to tune at one key.

    `run()` launches the kernel once, through the code that serves calls, and writes `outputs`; `truths()` returns them
    computed in float64, and `plain()` computed by plain torch in the kernel's dtype, whose error sets the tolerance.
    """

    tuned: Tuned[Any]
    device: torch.device
    outputs: tuple[Tensor, ...]
    run: Callable[[], Any]
    truths: Callable[[], tuple[Tensor, ...]]
    plain: Callable[[], tuple[Tensor, ...]]


def enabled() -> bool:
    """Whether tuned configurations are used."""
    return os.environ.get("FUSEWISE_TUNED") != "0"


class Watch:
    """Records the keys that are looked up, while the heuristic chooses."""

    def __init__(self) -> None:
        self.keys: list[Key] = []


class Tuned(Generic[Config]):
    """The tuned configurations of one implementation of an operation, by device.

    `space(key, device)` is the search space of a key, the heuristic's choice first; `sources` are the kernels' files,
    `libraries` the packages whose versions results depend on.
    """

    def __init__(
        self, op: str, impl: str, sources: Iterable[Path], space: Callable[[Key, int], Sequence[Config]],
        libraries: Sequence[str] = ("torch", "triton"),
    ) -> None:  # fmt: skip
        self.op, self.impl, self.sources, self.space = op, impl, tuple(sources), space
        self.libraries = libraries
        self.problems: dict[int, str] = {}  # why the file of a device is not used
        self.override: Config | Watch | None = None  # while searching
        self._entries: dict[int, dict[Key, Config]] = {}
        self._forgotten = 0

    @property
    def state(self) -> tuple[Config | Watch | None, int]:
        """Everything that `find` depends on besides its arguments: caches of its results must include this in their key."""
        return self.override, self._forgotten

    def find(self, device: int, key: Key) -> Config | None:
        """The tuned configuration for this key; None if the heuristic should choose. `device` as returned by
        `Tensor.get_device`: -1 is the interpreter."""
        if self.override is not None:
            if isinstance(self.override, Watch):
                self.override.keys.append(key)
                return None
            return self.override
        entries = self._entries.get(device)
        if entries is None:
            entries = self._entries[device] = self._load(device)
        return entries.get(key) if entries else None

    def known(self, device: int) -> dict[Key, Config]:
        """All tuned configurations of a device."""
        if device not in self._entries:
            self._entries[device] = self._load(device)
        return dict(self._entries[device])

    def explain(self, device: int, keys: Sequence[Key]) -> str:
        """In words: which of these keys have a result, or why results are not used; empty if there are none."""
        names = [key.kernel for key in keys if key in self.known(device)]
        if device in self.problems:
            return f"tuned configurations are ignored: {self.problems[device]}"
        return f"configuration tuned on this machine for {', '.join(names)}" if names else ""

    @contextlib.contextmanager
    def using(self, override: Config | Watch) -> Iterator[None]:
        """For the search: launch with this configuration whatever the key, or let the heuristic choose and record keys."""
        self.override = override
        try:
            yield
        finally:
            self.override = None

    def forget(self) -> None:
        """Drop everything loaded; the files are read again on the next call."""
        self._entries.clear()
        self.problems.clear()
        self._forgotten += 1

    def keep(self, device: int, key: Key, config: Config, found: Found) -> Path:
        """Write a result to the file of this device; it replaces an earlier one with the same key.

        Raises:
            cache.Refused: the file cannot be written, or not safely.
        """
        identity, path = self.identity(device), self.path(device)
        entry = {**_to_json(key), "config": asdict(config), **asdict(found)}  # type: ignore[call-overload]

        def edit(before: Any) -> Any:
            valid = _valid(before, identity)
            same = [e for e in before["entries"] if isinstance(e, dict) and _key(e) not in (None, key)] if valid else []
            return {"version": VERSION, "identity": identity, "entries": [*same, entry]}

        cache.change(path, edit)
        self.forget()
        return path

    def path(self, device: int) -> Path:
        """The file of the results on this device."""
        digest = hashlib.sha256(json.dumps(self.identity(device), sort_keys=True).encode()).hexdigest()[:16]
        return cache.folder("tuned") / f"{self.op}-{self.impl}-{digest}.json"

    def identity(self, device: int) -> dict[str, str]:
        """Everything that results on this device depend on."""
        if device < 0:
            name, capability = "interpreter", ""
        else:
            name = torch.cuda.get_device_name(device)
            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        sources = hashlib.sha256()
        for path in self.sources:
            sources.update(hashlib.sha256(path.read_bytes()).digest())
        return {
            "device": name,
            "capability": capability,
            **{name: importlib.import_module(name).__version__ for name in self.libraries},
            "fusewise": importlib.import_module(__name__.partition(".")[0]).__version__,
            "sources": sources.hexdigest()[:16],
        }

    def _load(self, device: int) -> dict[Key, Config]:
        if not enabled():
            return {}
        try:
            identity = self.identity(device)
            data = cache.read(self.path(device))
        except (cache.Refused, OSError) as error:
            self.problems[device] = str(error)
            return {}
        if data is None:
            return {}
        if not _valid(data, identity):
            self.problems[device] = f"{self.path(device)} does not hold what `fusewise tune` writes; remove it"
            return {}
        found = {}
        for entry in data["entries"]:
            key = _key(entry) if isinstance(entry, dict) else None
            if key is not None and (config := self._of_space(key, device, entry.get("config"))) is not None:
                found[key] = config
        return found

    def _of_space(self, key: Key, device: int, config: Any) -> Config | None:
        """The member of the current search space with these fields."""
        for member in self.space(key, device):
            if _same(config, asdict(member)):  # type: ignore[call-overload]
                return member
        return None


def _same(data: Any, known: dict[str, Any]) -> bool:
    """Whether data equal a dict including value types: in JSON, 1, 1.0 and true differ."""
    return bool(data == known) and all(type(data[name]) is type(value) for name, value in known.items())


def _to_json(key: Key) -> dict[str, Any]:
    return {**key._asdict(), "dtype": dtype_name(key.dtype)}


def _key(entry: dict[str, Any]) -> Key | None:
    """The key of an entry in a file; None if the entry is invalid."""
    texts, sizes = (
        [entry.get(n) for n in ("kernel", "dtype", "way")],
        [entry.get(n) for n in ("rows", "inner", "hidden")],
    )
    if not all(isinstance(x, str) for x in texts) or not all(type(x) is int and 0 <= x < 2**40 for x in sizes):
        return None
    if not entry["rows"] or not entry["hidden"]:
        return None
    numbers = [entry.get(f.name) for f in fields(Found) if f.name.endswith("us")]
    if texts[1] not in _DTYPES or not all(isinstance(x, float) and x > 0 for x in numbers):
        return None
    return Key(entry["kernel"], _DTYPES[entry["dtype"]], entry["way"], entry["rows"], entry["inner"], entry["hidden"])


def _valid(data: Any, identity: dict[str, str]) -> bool:
    return (
        isinstance(data, dict)
        and data.get("version") == VERSION
        and data.get("identity") == identity
        and isinstance(data.get("entries"), list)
    )
