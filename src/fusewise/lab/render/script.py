"""A row as a standalone program that measures this row again wherever fusewise and the provider are installed."""

from __future__ import annotations

from pprint import pformat
from typing import Any

from ..record import Record, Row

#: HEAD differs by row; MAIN is the same in all programs of a record.
HEAD = '''\
"""One row of a fusewise study, measured again by itself: `pip install 'fusewise[lab]'`, then run this file."""

import os
import sys
from statistics import median

from fusewise.lab import machine, plugin
from fusewise.lab.worker import Server

PROVIDER = {provider}  # by name, or module:attribute
TASK = {task}
FOUND = {found}
ROUNDS = {rounds}
WARM = {warm}
'''
MAIN = """

def main() -> None:
    flush_bytes = 0 if WARM else 2 * machine.cache_bytes(TASK["device"])
    entry = plugin.select([PROVIDER], TASK["op"], TASK["device"])[0]
    server = Server(plugin.load(entry.where), TASK["device"], flush_bytes)
    prepared = server.answer({"do": "prepare", "task": TASK})
    print({name: value for name, value in prepared.items() if value is not None})
    if prepared["ok"]:
        request = {"do": "round", "samples": server.answer({"do": "warm"})["samples"]}
        times = [median(server.answer(request)["device_us"]) for _ in range(ROUNDS)]
        print(f"{median(times):.3f} us per call here; the record has {FOUND['device_us']} on {FOUND['device']}")
    else:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # some libraries say a lot as they end
"""


def program(record: Record, row: Row) -> str:
    """The complete program of a row."""
    return head(record, row) + MAIN


def head(record: Record, row: Row) -> str:
    """The program without MAIN. Values from the record appear only as Python literals."""
    request = record.request
    tasks = request.get("tasks", [])
    task: dict[str, Any] = next(
        (t for t in tasks if (t["op"], t["case"], t["dtype"], t["pass_"]) == row.key),
        {
            "op": row.op,
            "case": row.case,
            "dtype": row.dtype,
            "pass_": row.pass_,
            "device": record.environment["device"],
            "seed": request["seed"],
        },
    )
    found = {
        "run": row.run,
        "device": row.device,
        "device_us": row.device_us,
        "error": row.error,
        "versions": dict(row.versions),
    }
    return HEAD.format(
        provider=repr(str(request.get("places", {}).get(row.provider, row.provider))),
        task=pformat(task, width=100, sort_dicts=False),
        found=pformat(found, width=100, sort_dicts=False),
        rounds=int(request.get("rounds", [5])[0]),
        warm=request["cache"] == "warm",
    )
