"""Whole studies in real processes, with correct, wrong and dying providers."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fusewise
from fusewise.lab import plan, record, schema, seats, study
from fusewise.lab.process import WorkerFailed, WorkerProcess
from fusewise.lab.seats import Seats

FAKES = "Right Wrong Unwritten Shapeless Mutating Versioned Speechless Raising Crammed Crowded Picky Absent AbsentOnImport BrokenCheck BrokenVersions Segfault DiesInRounds Babbling"
EVERYONE = ["floor-copy", "eager", *(f"lab_fakes:{name}" for name in FAKES.split()), "lab_fakes:Gone"]


class Silent:
    """A listener that records who had a turn in each round, what is told of providers, and the rows."""

    def __init__(self):
        self.groups, self.turns, self.told, self.seen = [], [], [], []

    def group(self, index, total, task):
        self.groups.append((index, total, task.case))

    def provider(self, name, status, reason):
        self.told.append((name, status, reason))

    def round(self, number, times):
        self.turns.append(tuple(times))

    def rows(self, rows):
        self.seen += rows


def run(out, providers, before=None, **fields):
    request = plan.Request(
        target="rope", providers=providers, device="cpu", out=out,
        **{"warm": True, "cases": ["cube-4"], "passes": "fwd", "rounds": (3, 3), **fields},
    )  # fmt: skip
    listener = Silent()
    options = plan.options(request, out)
    out.mkdir(exist_ok=True)
    return study.Study(options, listener, before).run(), listener


@pytest.fixture(scope="module")
def misbehaving(tmp_path_factory):
    out = tmp_path_factory.mktemp("fakes")
    (out / "rows.jsonl").symlink_to(out / "elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONUNBUFFERED", raising=False)  # not set when a user types the command
        made, _ = run(out, EVERYONE)
    return made, out


@pytest.mark.parametrize(
    ("provider", "status", "words"),
    [
        ("floor-copy", "ok", ""),
        ("eager", "ok", ""),
        ("right", "ok", ""),
        ("wrong", "wrong", "more than twice eager's"),
        ("unwritten", "wrong", "NaN where float64's result is not, in 128 of 256 elements"),
        ("shapeless", "wrong", "outputs have shapes ((4, 4, 4, 1),)"),
        ("mutating", "wrong", "overwrites its inputs"),
        ("versioned", "ok", ""),
        ("speechless", "missing", "no reason was given"),
        ("raising", "failed", "RuntimeError: no kernel <for> | this"),
        ("crammed", "failed", "out of memory: no room for 2 GiB; a study's providers share the memory: name fewer"),
        ("crowded", "ok", ""),
        ("picky", "missing", "runs on Sundays only"),
        ("absent", "missing", "no_such_module_anywhere is not installed; pip install no-such-module"),
        ("absent-on-import", "missing", "its shared library does not load"),
        ("broken-check", "failed", "RuntimeError: cannot even look"),
        ("broken-versions", "failed", "RuntimeError: knows no version"),
        ("segfault", "failed", "the worker process was killed by SIGSEGV"),
        ("dies-in-rounds", "failed", "exited with code 7"),
        ("babbling", "ok", ""),
        ("lab_fakes:Gone", "failed", "could not be loaded: AttributeError"),
    ],
)
def test_each_provider_costs_its_own_row_only(misbehaving, provider, status, words):
    made, _ = misbehaving
    (found,) = [r for r in made.rows if r.provider == provider]
    assert (found.status, words in found.reason) == (status, True), found.reason
    assert (found.device_us is not None) == (status == "ok")
    if status == "wrong":
        assert found.first_call_s is None


def test_the_record_on_disk_is_complete_and_valid(misbehaving):
    made, out = misbehaving
    assert record.read(out) == made
    assert made.finished
    assert made.environment["versions"]["fusewise"] == fusewise.__version__  # what measured, whatever was measured
    assert not (out / "elsewhere").exists()  # nothing is written through a link
    lines = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert lines == [r.to_json() for r in made.rows]
    pytest.importorskip("jsonschema").validate(made.to_json(), schema.schema())


def test_rows_say_what_was_measured(misbehaving):
    made, _ = misbehaving
    by_name = {r.provider: r for r in made.rows}
    ((shape, size, *where),) = {(r.shape, r.bytes_min, r.run, r.device) for r in made.rows}
    assert (shape, *where) == ("q[4,4,4,4] bshd half", made.run, made.environment["device_name"])
    assert size >= 2 * 4**4 * 4
    assert by_name["wrong"].error > by_name["wrong"].error_eager == by_name["eager"].error > 0
    assert by_name["eager"].first_call_s > 0 and by_name["eager"].peak_bytes > 0


def test_a_finished_run_is_resumed_without_a_process(misbehaving, tmp_path, monkeypatch):
    made, out = misbehaving
    shutil.copytree(out, tmp_path / "out", symlinks=True)
    monkeypatch.setattr(seats, "WorkerProcess", None)
    again, listener = run(tmp_path / "out", EVERYONE, before=record.read(out))
    assert again.rows == made.rows and not listener.groups
    assert (again.run, again.created, again.finished, len(again.resumed)) == (made.run, made.created, True, 1)
    assert again.seconds > made.seconds
    lines = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [row.to_json() for row in made.rows]
    with pytest.raises(ValueError, match="must keep the request's seed"):
        run(tmp_path / "out", EVERYONE, before=record.read(out), seed=1)


def test_versions_are_texts_whatever_a_provider_says(misbehaving):
    (found,) = [r for r in misbehaving[0].rows if r.provider == "versioned"]
    assert found.versions["a"] == "3"


def test_raw_samples_are_kept_and_the_pair_is_there(misbehaving):
    made, _ = misbehaving
    by_name = {m.provider: m for m in made.measurements}
    assert len(by_name["eager"].rounds) == 3
    assert all(r["device_us"] for r in by_name["eager"].rounds)
    assert by_name["dies-in-rounds"].rounds == []
    assert by_name["dies-in-rounds"].prepared["status"] == "failed"
    assert "crammed" in by_name and not by_name.keys() & {"picky", "absent", "absent-on-import", "speechless"}
    assert len(by_name["eager#2"].rounds) == 3
    (pair,) = [c for c in made.comparisons if c["provider"] == "eager#2"]
    assert pair["noise"] is not None


def test_a_cold_study_flushes_with_memory_that_its_workers_share(tmp_path, monkeypatch):
    monkeypatch.setattr(study.machine, "cache_bytes", lambda _: 2**20)
    before = set(os.listdir("/proc/self/fd"))
    made, _ = run(tmp_path / "out", ["eager", "lab_fakes:Mapped"], warm=False)
    assert [row.status for row in made.rows] == ["ok", "ok"]
    said = (tmp_path / "out" / "logs" / "mapped.log").read_text()
    assert re.search(r"rw-s .*memfd:fusewise-flush", said)
    for variable, value in (("MMAP_MAX", 0), ("TRIM_THRESHOLD", 2**40), ("TOP_PAD", 2**26)):
        assert f"'MALLOC_{variable}_': '{value}'" in said
    caches = re.findall(r"'(\w+)': '[^']*/fusewise-study-\w+/\w+'", said)
    assert {*caches} == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSEWISE_CACHE_DIR", "XDG_CACHE_HOME"}
    assert set(os.listdir("/proc/self/fd")) == before


def test_what_libraries_print_is_in_the_log(misbehaving):
    _, out = misbehaving
    assert "hello from a chatty library" in (out / "logs" / "babbling.log").read_text()


def test_a_provider_that_keeps_dying_is_given_up(tmp_path):
    cases = ["cube-4", "cube-6", "cube-8", "cube-10", "cube-12"]
    made, _ = run(tmp_path / "out", ["lab_fakes:Segfault"], cases=cases)
    reasons = [r.reason for r in made.rows]
    assert ["not started again after 3 failures" in reason for reason in reasons] == [False, False, False, True, True]
    assert all("SIGSEGV" in reason for reason in reasons)


def test_a_provider_that_dies_of_some_problems_runs_the_others(tmp_path):
    cases = ["cube-4", "cube-10", "cube-12", "cube-14", "cube-16", "cube-6"]
    made, _ = run(tmp_path / "out", ["lab_fakes:SegfaultLater"], cases=cases)
    assert [row.status for row in made.rows] == ["ok", *["failed"] * 4, "ok"]
    assert not any("not started" in row.reason for row in made.rows)


def test_one_that_ran_is_given_up_only_where_each_failure_costs_the_time_limit(tmp_path):
    seats = Seats(
        plan.options(plan.Request(target="rope", providers=["lab_fakes:Right"], device="cpu", out=tmp_path), tmp_path)
    )
    (seat,) = seats.all
    seat.runs = True
    for failures in range(1, 6):
        reply = seats.failure(seat, "died", hung=failures > 4)
        assert (reply["status"], bool(seat.gone)) == ("failed", failures > 4)


def test_who_fails_in_the_rounds_is_told(tmp_path):
    made, listener = run(tmp_path, ["eager", "lab_fakes:DiesInRounds"])
    (lost,) = (row for row in made.rows if row.status == "failed")
    assert "exited with code 7" in lost.reason
    assert listener.told[-1] == ("dies-in-rounds", "failed", lost.reason)


def test_rounds_visit_everyone(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "HOPELESS", math.inf)  # reached by correct providers on a busy machine
    made, listener = run(tmp_path / "out", ["eager", "lab_fakes:Right", "floor-launch"], rounds=(8, 8))
    assert [set(turn) for turn in listener.turns] == [{"eager", "eager#2", "right", "floor-launch"}] * 8
    assert {len(m.rounds) for m in made.measurements} == {8}
    assert listener.groups == [(0, 1, "cube-4")]
    assert listener.seen == made.rows
    assert made.environment["versions"]["torch"]


@pytest.mark.parametrize("fake", ["Hang", "Hungry"])
def test_a_worker_is_bounded_in_time_and_memory(tmp_path, fake):
    start = {"provider": f"lab_fakes:{fake}", "device": "cpu", "flush_bytes": 0}
    worker = WorkerProcess(start, tmp_path / "log", timeout=120, memory_limit=2 * 2**30)
    try:
        assert worker.ready()["ok"]
        worker.timeout = 1.0 if fake == "Hang" else 120
        task = {"op": "rope", "case": "cube-4", "dtype": "fp32", "pass_": "fwd", "device": "cpu", "seed": 0}
        words = "timed out after 1 s" if fake == "Hang" else r"used \d\.\d\d GiB of memory, the limit is 2\.00"
        with pytest.raises(WorkerFailed, match=words) as failed:
            worker.ask("prepare", task=task)
        assert failed.value.hung == (fake == "Hang")
        assert worker.process.poll() is not None
    finally:
        worker.stop()


def command(out):
    """A study of a small case, then of a large one on which a provider sleeps."""
    arguments = [
        "study",
        "rope",
        "--device",
        "cpu",
        "--warm",
        "--case",
        "cube-4",
        "--case",
        "cube-64",
        "--pass",
        "fwd",
        "--rounds",
        "3:3",
    ]
    providers = ["--providers", "lab_fakes:Right,lab_fakes:SlowLater", "--out", str(out)]
    return subprocess.Popen(
        [sys.executable, "-m", "fusewise", *arguments, *providers],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background jobs
    )


def wait_for_rows(out, process):
    for _ in range(3000):
        time.sleep(0.1)
        assert process.poll() is None, process.stderr.read()
        if (out / "rows.jsonl").exists() and (out / "rows.jsonl").read_text():
            return
    raise AssertionError("no row within five minutes")


def test_an_interrupt_keeps_what_was_measured(tmp_path):
    out = tmp_path / "run"
    with command(out) as process:
        wait_for_rows(out, process)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted; the rows measured so far are in" in said
    kept = record.read(out)
    assert not kept.finished
    assert kept.rows
    assert "cut short" in (out / "report.md").read_text()


def test_a_killed_coordinator_leaves_valid_rows_and_no_workers(tmp_path):
    out = tmp_path / "run"
    with command(out) as process:
        wait_for_rows(out, process)
        workers = descendants(process.pid)
        assert len(workers) > 2  # including the nursery
        time.sleep(2)  # by now one of them is busy with something long
        process.kill()
    assert record.read(out).rows
    for _ in range(600):
        alive = [pid for pid in workers if running(pid)]
        if not alive:
            return
        time.sleep(0.1)
    raise AssertionError(f"workers {alive} outlive their coordinator")


def descendants(pid):
    children = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [p for child in children for p in descendants(child)]


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.parametrize("groups", [1, 2, 50])
def test_groups_that_take_as_long_as_the_quickest_end_at_the_deadline(groups):
    """The first takes longer, because it includes one-time compilation."""
    left, preparing = 100.0 * groups, []
    for index in range(groups):
        preparing.append(61.0 if index == 0 else 3.0)
        left -= preparing[-1]
        rounds = study.share(left, groups - index, preparing[:-1])
        assert rounds > 30
        left -= rounds
    assert left == pytest.approx(0.0, abs=1e-6)
    assert study.share(-1.0, 3, preparing) == study.share(8.0, 5, [60.0, 2.0]) == 0.0
