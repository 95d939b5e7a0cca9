"""Check a study's byte ledgers and kernel times against the GPU's hardware counters, with NVIDIA Nsight Compute:

    fusewise study gelu --case gelu-16384 --pass fwd --code --out runs/gelu
    python benchmarks/counters.py runs/gelu

Run it on the machine of the study. For each correct row with a ledger (not floor-copy: a driver copy is not a kernel, so ncu
does not see it) nine more calls run under `ncu`, without clock control, each after the study's own flush. Medians are summed
over kernels. What a call has written may still be in the cache when its last kernel ends: reading a buffer of twice the
cache's size drives it out, and the bytes written to DRAM meanwhile are the call's.
The table shows ledger bytes, also with what matrix products read again through the device's cache, counted bytes, kernel time in
the study and counted kernel time, and the study's time per call; `--append FILE` adds the same to a file, a JSON object per line.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fusewise.lab import record
from fusewise.lab.analysis import is_floor
from fusewise.lab.ledger import Ledger
from fusewise.lab.record import Row
from fusewise.lab.render import markdown, number
from fusewise.lab.timing import Work

NCU = os.environ.get("NCU", "ncu")
TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
CALLS = 9  # profiled calls
UNITS = {
    "ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
}  # fmt: skip


class Counted(NamedTuple):
    """One kernel: microseconds, and bytes read from and written to device memory."""

    name: str
    us: float
    read: float
    written: float


@dataclass(frozen=True)
class Check:
    """A row, its ledger, the bytes that its matrix products read again, its counted kernels, and the one that read another
    buffer afterwards."""

    row: Row
    ledger: Ledger
    again: int
    kernels: Sequence[Counted]
    after: Counted

    @property
    def us(self) -> float:
        return sum(kernel.us for kernel in self.kernels)

    @property
    def bytes(self) -> float:
        return sum(kernel.read + kernel.written for kernel in self.kernels) + self.after.written


def parsed(text: str) -> list[Counted]:
    """Parse the output of `ncu --csv --page raw`: a line of names, one of units, one per kernel; other lines are skipped."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise ValueError(f"counters: ncu must print a table, got {text[-500:]!r}; see what it says about permissions")
    header, units, *rows = csv.reader(io.StringIO("\n".join(lines[first:])))

    def value(row: Sequence[str], metric: str) -> float:
        at = header.index(metric)
        return float(row[at].replace(",", "")) * UNITS[units[at]]

    name = header.index("Kernel Name")
    return [Counted(row[name], value(row, TIME), value(row, READ), value(row, WRITTEN)) for row in rows]


def count(row: Row, device: str) -> list[Counted]:
    """The kernels of one call, run in a subprocess, and the one that empties the cache afterwards."""
    program = [sys.executable, __file__, "--call", row.op, row.case, row.dtype, row.pass_, device, row.provider]
    return typical(parsed(printed(program)))


def printed(program: Sequence[str]) -> str:
    """Run a program under ncu and return the output."""
    command = [
        NCU, "--csv", "--page", "raw", "--metrics", f"{TIME},{READ},{WRITTEN}", "--profile-from-start", "off",
        "--clock-control", "none", "--cache-control", "none", "--target-processes", "application-only", *program,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(
            f"counters: {' '.join(command)} ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}"
        )
    return done.stdout


def typical(kernels: Sequence[Counted]) -> list[Counted]:
    """Medians over CALLS calls that launch the same kernels."""
    count, rest = divmod(len(kernels), CALLS)
    calls = [kernels[i * count : (i + 1) * count] for i in range(CALLS)]
    if rest or any([k.name for k in call] != [k.name for k in calls[0]] for call in calls):
        raise ValueError(f"counters: {CALLS} calls must start the same kernels, got {[k.name for k in kernels]}")
    return [
        Counted(same[0].name, *(median(k[i] for k in same) for i in (1, 2, 3))) for same in zip(*calls, strict=True)
    ]


def call(op: str, case: str, dtype: str, pass_: str, device: str, provider: str) -> None:
    """The profiled process: CALLS calls after two warm-up calls."""
    from fusewise.lab import machine, plugin, targets
    from fusewise.lab.problem import Task
    from fusewise.lab.worker import make_work

    problem = targets.problem_for(Task(op, case, dtype, pass_, device, 0))
    found = plugin.select([provider], op, device)[0].provider
    assert found is not None
    watch(make_work(problem, found.build(problem), 1), 2 * machine.cache_bytes(device), device)


def watch(work: Work, flush_bytes: int, device: str) -> None:
    """Run two warm-up calls, then CALLS calls, each between two flushes; the call and the second flush are profiled."""
    import torch

    from fusewise.lab.timing import fill_cache

    for _ in range(2):
        work.step(work.begin(0))
    flush = torch.zeros(flush_bytes // 4, device=device)
    for _ in range(CALLS):
        state = work.begin(0)
        fill_cache(flush)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        work.step(state)
        fill_cache(flush)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def entry(check: Check) -> dict[str, Any]:
    """A check as a line of a file; bytes and microseconds are of one call."""
    row = check.row
    return {
        "op": row.op, "case": row.case, "dtype": row.dtype, "pass": row.pass_, "provider": row.provider, "run": row.run,
        "device": row.device, "versions": row.versions, "kernels": len(check.kernels), "ledger_bytes": check.ledger.bytes,
        "again_bytes": check.again, "counted_bytes": check.bytes, "kernel_us": row.kernel_us, "counted_us": check.us, "device_us": row.device_us,
    }  # fmt: skip


def table(entries: Iterable[dict[str, Any]]) -> str:
    rows = [
        [
            f"{e['op']} {e['case']} {e['dtype']} {e['pass']}", e["provider"], str(e["kernels"]),
            number(e["ledger_bytes"] / 2**20), number((e["ledger_bytes"] + e["again_bytes"]) / 2**20),
            number(e["counted_bytes"] / 2**20), number((e["ledger_bytes"] + e["again_bytes"]) / e["counted_bytes"]),
            number(e["kernel_us"]), number(e["counted_us"]),
            number(e["kernel_us"] / e["counted_us"]), number(e["device_us"]),
        ]
        for e in entries
    ]  # fmt: skip
    header = ["case", "provider", "kernels", "ledger MiB", "with repeats", "counted MiB", "ratio"]
    header += ["kernels in the study µs", "counted µs", "ratio", "the call in the study µs"]
    return markdown.table(header, rows)


def main(runs: Sequence[str], append: Path | None = None) -> None:
    entries = []
    for run in runs:
        made = record.read(Path(run))
        ledgers = {(f.op, f.case, f.dtype, f.pass_, f.provider): f for f in map(Ledger.from_json, made.ledgers)}
        for row in made.rows:
            ledger = ledgers.get((*row.key, row.provider))
            if row.status != "ok" or not row.kernel_us or is_floor(row.provider):
                continue
            if ledger is None:
                print(f"{row.provider} of {row.case} is not counted: the run has no ledger of it", file=sys.stderr)
            else:
                *kernels, after = count(row, made.environment["device"])
                again = ledger.again(made.environment["cache_bytes"])
                entries.append(entry(Check(row, ledger, again, kernels, after)))
    print(table(entries))
    if append is not None:
        with append.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(e, allow_nan=False) + "\n" for e in entries)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--call"]:
        call(*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("runs", metavar="RUN", nargs="+", help="a run directory, or its record.json")
        parser.add_argument("--append", metavar="FILE", type=Path, help="a file of JSON lines to add the results to")
        options = parser.parse_args()
        main(options.runs, options.append)
