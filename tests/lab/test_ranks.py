"""Communication between ranks, over a dictionary as the store; real processes are in test_survival.py."""

import dataclasses
import datetime
import json
import random
import socket
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from builders import full_record, gpu_record
from torch.distributed import TCPStore

from fusewise.lab import commands, plan, ranks, record
from fusewise.lab.options import Options
from fusewise.lab.problem import Task


class Store(dict):
    def set(self, key, value):
        self[key] = value.encode() if isinstance(value, str) else value

    def get(self, key):
        return self[key]

    def wait(self, keys, _):
        assert set(keys) <= set(self), "would wait for ever"


def options(tmp_path, cases):
    tasks = [Task("rope", case, "fp32", p, "cpu", 0) for case in cases for p in ("fwd", "bwd")]
    return Options(op="rope", tasks=tasks, providers=[], device="cpu", out=tmp_path / "run")


def of_tasks(made, tasks):
    """The part of a record that belongs to these tasks."""
    keys = {task.key for task in tasks}
    part = full_record(3)
    for name in ("rows", "measurements"):
        setattr(part, name, [x for x in getattr(made, name) if x.key in keys])
    part.comparisons = [x for x in made.comparisons if (x["op"], x["case"], x["dtype"], x["pass"]) in keys]
    return part


@pytest.fixture
def whole(tmp_path):
    return full_record(3), options(tmp_path, ["cube-1", "cube-2", "cube-4"])


def test_parts_are_disjoint_together_all_and_of_one_run(whole, monkeypatch, tmp_path):
    _, asked = whole
    store = Store()
    monkeypatch.chdir(tmp_path)
    asked = dataclasses.replace(asked, out=Path("run"))
    parts = [ranks.Rank(number, 4, store).share(asked) for number in range(4)]
    assert sorted(t.key for p in parts for t in p.tasks) == sorted(t.key for t in asked.tasks)
    assert [len(p.tasks) for p in parts] == [2, 2, 1, 1]
    assert len({p.run for p in parts}) == 1 and parts[0].run
    assert [p.out for p in parts] == [tmp_path / "run" / f"rank-{n}" for n in range(4)]


def test_ranks_that_share_a_gpu_are_refused(whole):
    _, asked = whole
    for devices, shared in ((("cuda:0", "cuda:1"), False), (("cuda:1", "cuda:1"), True)):
        said = {f"gpu/{n}": f"{device} of {socket.gethostname()}".encode() for n, device in enumerate(devices)}
        for number, device in enumerate(devices):
            others = {key: text for key, text in said.items() if key != f"gpu/{number}"}
            store = Store({"out": b"run", "run": b"r1", **others})
            rank, wanted = ranks.Rank(number, 2, store), dataclasses.replace(asked, device=device)
            if shared:
                with pytest.raises(ValueError, match="every rank must have a GPU of its own, got 2 on cuda:1"):
                    rank.share(wanted)
            else:
                assert len(rank.share(wanted).tasks) == 3


@pytest.mark.parametrize(
    ("name", "ranks_here", "found"),
    [("cuda", "2", "cuda:1"), ("cuda:0", "1", "cuda:0"), ("cuda:0", "2", ValueError), ("cuda:2", "1", ValueError)],
)
def test_cuda_is_the_gpu_of_the_rank_and_an_index_is_not_for_many(name, ranks_here, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
    if isinstance(found, str):
        assert plan.device(name) == found
    else:
        with pytest.raises(found, match="study: device must be one"):
            plan.device(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_without_a_gpu_none_is_taken_for_it(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"one of the 0 CUDA devices that torch sees, got '{name}'"):
        plan.device(name)


def test_one_record_is_gathered_in_the_order_of_the_tasks(whole):
    made, asked = whole
    store = Store()
    members = [ranks.Rank(number, 2, store) for number in (0, 1)]
    parts = [of_tasks(made, rank.share(asked).tasks) for rank in members]
    begun = [f"2026-01-01T00:00:0{n}+00:00" for n in range(4)]
    for n, (rank, part) in enumerate(zip(members, parts, strict=True)):
        part.created, part.seconds, part.spent = begun[1 - n], 2.0 + n, {"rest": 2.0 + n}
        part.resumed = [begun[3 - n], begun[3]]
        part.limits = made.limits if n else None
        rank.give(part)
    assert members[1].gather(asked) is None
    found = members[0].gather(asked)
    assert (found.rows, found.measurements, found.comparisons) == (made.rows, made.measurements, made.comparisons)
    assert (found.limits, found.finished) == (made.limits, True)
    assert (found.created, found.seconds, found.spent) == (begun[0], 3.0, {"rest": 3.0})
    assert found.resumed == begun[2:]
    assert len(found.environment["ranks"]) == 2
    assert json.loads(zlib.decompress(store["record/1/0"]))["kind"] == "fusewise.record"


def test_a_rank_without_a_record_makes_an_unfinished_one_and_none_an_error(whole):
    made, asked = whole
    store = Store()
    members = [ranks.Rank(number, 2, store) for number in (0, 1)]
    members[1].give(None)
    members[0].give(dataclasses.replace(of_tasks(made, asked.tasks[::2]), seconds=0.5))
    found = members[0].gather(asked)
    assert not found.finished
    assert {row.pass_ for row in found.rows} == {"fwd"}
    members[1].give(dataclasses.replace(of_tasks(made, asked.tasks[1::2]), finished=False, seconds=None))
    found = members[0].gather(asked)
    assert (found.rows, found.finished, found.seconds) == (made.rows, False, 0.5)
    for member in members:
        member.give(None)
    with pytest.raises(RuntimeError, match="no rank has a record"):
        members[0].gather(asked)


def test_the_whole_is_looked_into_once_every_rank_has_measured(whole, monkeypatch):
    made, asked = whole
    store = Store()
    members = [ranks.Rank(number, 2, store) for number in (0, 1)]
    profile, looked = {**gpu_record().profiles[0], "case": "cube-2"}, []

    def run(options, resume, code, alone):
        assert not code and not looked
        return of_tasks(made, options.tasks), None

    def look(options, found, *_):
        looked.append((options, [row.key for row in found.rows]))
        found.profiles = [profile]
        return 2.0, {"code": 2.0}

    monkeypatch.setattr(commands, "run", run)
    monkeypatch.setattr(commands.inside, "look", look)
    store.set("out", str(asked.out))
    store.set("run", made.run)
    for rank in reversed(members):
        found = commands.run_shared(rank, asked, None, resume=False, code=True)
        assert (found is None) == bool(rank.number)
    assert looked == [(asked, [row.key for row in made.rows])]
    kept = record.read(asked.out)
    assert (kept.profiles, kept.seconds, kept.spent["code"]) == ([profile], made.seconds + 2.0, 2.0)
    assert profile["provider"] in (asked.out / "report.md").read_text().partition("Profile of cube-2 ")[2]


def test_a_large_record_passes_a_real_store_and_is_waited_for(whole):
    made, asked = whole
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(milliseconds=50))
    sender = ranks.Rank(0, 1, TCPStore("127.0.0.1", store.port, is_master=False))
    # Still 10 MiB when compressed, which takes longer than the timeout.
    noise = random.Random(0).randbytes(10 << 20).hex()
    sent = dataclasses.replace(made, environment={**made.environment, "noise": noise})
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(sender.give, sent)
        assert ranks.Rank(0, 1, store).gather(asked).environment["noise"] == noise
        sending.result()
    assert int(store.get("record/0")) == 3


def test_a_single_process_is_no_rank(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ranks.from_environment() is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ranks.from_environment() is None
