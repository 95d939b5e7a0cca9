"""Traffic ledgers as tables, for the terminal and for reports. The chart is in `charts.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ledger import Ledger, merged
from . import printable, size

HEADER = ("kernel", "times", "read", "written", "bytes", "of minimum")


def table(found: Ledger) -> list[tuple[str, ...]]:
    """The cells of a ledger below HEADER: one kernel per line with the bytes of all its launches; the total last."""
    lines = []
    for kernel, times in merged(found.kernels):
        lines.append((kernel.name, str(times), *_sizes(times * kernel.read, times * kernel.written), ""))
    read = sum(kernel.read for kernel in found.kernels)
    written = sum(kernel.written for kernel in found.kernels)
    excess = "–" if found.excess is None else f"{found.excess:.2f} ×"
    return [*lines, ("sum", str(len(found.kernels)), *_sizes(read, written), excess)]


def _sizes(read: int, written: int) -> tuple[str, str, str]:
    return size(read), size(written), size(read + written)


def cache_of(environment: Mapping[str, Any]) -> int | None:
    """L2 of the GPU of a record. What products read again through a CPU's caches was not checked, and is not told."""
    return environment["cache_bytes"] if environment["device"].startswith("cuda") else None


def again(found: Ledger, cache_bytes: int | None) -> str:
    """What its matrix products read again, in words; empty if that is nothing or the cache is unknown."""
    more = found.again(cache_bytes) if cache_bytes else 0
    return f"matrix products read about {size(more)} again through a cache of {size(cache_bytes)}" if more else ""


def text(found: Ledger, cache_bytes: int | None = None) -> str:
    """A ledger for a terminal, with what is read again through a cache."""
    lines = [HEADER, *table(found)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    shown = [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    return "\n".join(printable(line.rstrip()) for line in [*shown, again(found, cache_bytes)] if line)
