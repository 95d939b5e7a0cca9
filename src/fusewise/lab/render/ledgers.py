"""Traffic ledgers as tables, for the terminal and for reports. The chart is in `charts.py`."""

from __future__ import annotations

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


def text(found: Ledger) -> str:
    """A ledger for a terminal."""
    lines = [HEADER, *table(found)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    shown = [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    return "\n".join(printable(line.rstrip()) for line in shown)
