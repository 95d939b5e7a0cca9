"""Runs one study on many processes: `torchrun --nproc-per-node 8 -m fusewise study …` distributes the cases.

Each rank measures every `size`-th task on its own device, in a directory of its own that survives and resumes like any
run; rank 0 then merges the records. Ranks communicate as JSON through torchrun's store: no collectives, no shared file
system, no pickle.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from . import record
from .options import Options, new_id, request
from .record import Record

#: Timeout for the ranks to find each other at the start.
STARTING = datetime.timedelta(minutes=5)
#: How long rank 0 waits for the slowest rank.
PATIENCE = datetime.timedelta(days=7)
#: Records are sent in parts of this size: a TCPStore drops the connection at 8 MiB.
PART_BYTES = 4 << 20


@dataclass(frozen=True)
class Rank:
    """This process among `size`, with the store they share."""

    number: int
    size: int
    store: Any

    def agreed(self, key: str, mine: str) -> str:
        """Rank 0's value, on every rank."""
        if self.number == 0:
            self.store.set(key, mine)
        return str(self.store.get(key).decode())

    def share(self, options: Options) -> Options:
        """This rank's share of a study: every `size`-th task, in a directory of its own."""
        if options.device.startswith("cuda"):
            self._check_alone_on(f"{options.device} of {socket.gethostname()}")
        out = Path(self.agreed("out", str(options.out.absolute())))
        tasks = options.tasks[self.number :: self.size]
        run = self.agreed("run", new_id(datetime.datetime.now(datetime.timezone.utc)))
        return replace(options, out=out / f"rank-{self.number}", tasks=tasks, run=run)

    def _check_alone_on(self, gpu: str) -> None:
        """Reject two ranks on one GPU: each would time the other's work, too."""
        self.store.set(f"gpu/{self.number}", gpu)
        sharing = [self.store.get(f"gpu/{number}").decode() for number in range(self.size)].count(gpu)
        if sharing > 1:
            raise ValueError(
                f"study: every rank must have a GPU of its own, got {sharing} on {gpu}; start one for each GPU"
            )

    def give(self, mine: Record | None) -> None:
        """Send rank 0 this rank's record, None if its study failed. In parts, because the store limits the size."""
        data = b"" if mine is None else zlib.compress(record.dumps(mine.to_json()).encode())
        parts = [data[i : i + PART_BYTES] for i in range(0, len(data), PART_BYTES)]
        for i, part in enumerate(parts):
            self.store.set(f"record/{self.number}/{i}", part)
        self.store.set(f"record/{self.number}", str(len(parts)))

    def gather(self, options: Options) -> Record | None:
        """On rank 0 the merged record of all that were sent; None on the others."""
        if self.number != 0:
            return None
        records = []
        for number in range(self.size):
            self.store.wait([f"record/{number}"], PATIENCE)
            count = int(self.store.get(f"record/{number}"))
            if count:
                data = b"".join(self.store.get(f"record/{number}/{i}") for i in range(count))
                records.append(Record.from_json(json.loads(zlib.decompress(data))))
        if not records:
            raise RuntimeError("study: no rank has a record; the messages above say why")
        return merged(records, options, complete=len(records) == self.size)


def from_environment() -> Rank | None:
    """This process's rank if torchrun, or whatever sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, started more
    than one; else None."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2:
        return None
    store, number, size = next(iter(rendezvous("env://", timeout=STARTING)))
    return Rank(number, size, PrefixStore("fusewise", store))


def merged(records: Sequence[Record], options: Options, complete: bool) -> Record:
    """One record: all rows in task order, and where each rank ran."""
    first = records[0]
    order = {task.key: i for i, task in enumerate(options.tasks)}

    def sorted_by_task(parts: list[Any], key: Callable[[Any], tuple[str, str, str, str]]) -> list[Any]:
        return sorted(parts, key=lambda part: order[key(part)])  # stable: order of measurement within a task

    def key_of(entry: dict[str, Any]) -> tuple[str, str, str, str]:
        return (entry["op"], entry["case"], entry["dtype"], entry["pass"])

    places = [{"device": r.environment["device"], "device_name": r.environment["device_name"]} for r in records]
    return Record(
        run=first.run,
        created=min(r.created for r in records),
        request=request(options),
        environment={**first.environment, "ranks": places, "host": socket.gethostname()},
        finished=complete and all(r.finished for r in records),
        seconds=max(r.seconds or 0.0 for r in records),
        rows=sorted_by_task([x for r in records for x in r.rows], lambda row: row.key),
        measurements=sorted_by_task([x for r in records for x in r.measurements], lambda m: m.key),
        comparisons=sorted_by_task([x for r in records for x in r.comparisons], key_of),
        spent=max(records, key=lambda r: r.seconds or 0.0).spent,  # of the rank that took longest, like `seconds`
        limits=next((r.limits for r in records if r.limits is not None), None),  # a rank measures them if it needs them
        resumed=sorted({x for r in records for x in r.resumed}),
    )
