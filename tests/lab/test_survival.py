"""What a run directory survives, with real processes, real signals, a really full disk, and real ranks."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest
from builders import row, study_record

from fusewise.lab import folder, record, schema

SMALL = ["study", "rope", "--device", "cpu", "--warm", "--pass", "fwd", "--rounds", "3:3", "--no-code"]


def command(out, *arguments, cases=("cube-4",), providers="eager", limit=None, **environment):
    """A study in its own process; `limit`: maximum file size in bytes."""
    named = [word for case in cases for word in ("--case", case)]

    def prepare():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in a shell's background jobs
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.Popen(
        [sys.executable, "-m", "fusewise", *SMALL, *named, "--providers", providers, "--out", str(out), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=prepare,
        env={**os.environ, **environment},
    )  # fmt: skip


def finished(process, timeout=300):
    with process:
        said, errors = process.communicate(timeout=timeout)
    return process.returncode, said, errors


def until_rows(out, process, count=1):
    for _ in range(3000):
        time.sleep(0.1)
        assert process.poll() is None, process.stderr.read()
        with contextlib.suppress(OSError):
            if len((out / "rows.jsonl").read_text().splitlines()) >= count:
                return
    raise AssertionError("no row within five minutes")


TWO = {"cases": ("cube-4", "cube-10"), "providers": "lab_fakes:Right,lab_fakes:SlowIfAsked"}
SLOW = {**TWO, "FAKES_ARE_SLOW": "1"}


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP])
def test_a_termination_is_an_interruption(tmp_path, end):
    out = tmp_path / "run"
    with command(out, **SLOW) as process:
        until_rows(out, process, 2)
        time.sleep(0.3)
        process.send_signal(end)
        process.communicate(timeout=120)
    assert process.returncode == 130
    assert len(record.read(out).rows) == 2
    assert "cut short" in (out / "report.html").read_text()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_of_the_check_of_a_function_leaves_nothing(tmp_path, end):
    (tmp_path / "endless.py").write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path / 'begun')!r}).touch()\ntime.sleep(600)\n"
    )
    words = [
        "study",
        f"{tmp_path / 'endless.py'}:f",
        "--input",
        "fp32[8]",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
    ]
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "fusewise", *words], stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    ) as process:  # fmt: skip
        for _ in range(600):
            time.sleep(0.1)
            if (tmp_path / "begun").exists():
                break
        process.send_signal(end)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "interrupted\n")
    assert not list((tmp_path / "tmp").glob("fusewise-*"))
    assert not (tmp_path / "run").exists()


def test_an_interrupt_while_it_looks_inside_keeps_all_times(tmp_path):
    out = tmp_path / "run"
    with command(out, "--code", providers="lab_fakes:Right,lab_fakes:SlowToShow") as process:
        log = out / "code" / "logs" / "slow-to-show.log"
        for _ in range(3000):
            time.sleep(0.1)
            if log.exists():
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == 130
    kept = record.read(out)
    assert [r.status for r in kept.rows] == ["ok", "ok"]
    assert (out / "report.html").exists()


def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path):
    """Until then no other study has its folder. Its temporary files are gone soon after."""
    out, temporary = tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()
    with command(out, **SLOW, TMPDIR=str(temporary)) as process:
        until_rows(out, process, 2)
        assert [*temporary.glob("fusewise-study-*")]
        code, _, said = finished(command(out))
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 30
    while [*temporary.glob("fusewise-study-*")]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert process.returncode == -signal.SIGKILL
    assert code == 1
    assert f"must be free, got {out}, where process {process.pid} is at work" in " ".join(said.split())
    with folder.claimed(out):  # the lock ended with its process
        before = record.read(out)
    assert (before.finished, len(before.rows)) == (False, 2)
    code, _, said = finished(command(out, "--resume", **TWO))
    assert code == 0, said
    after = record.read(out)
    assert after.finished
    assert after.run == before.run
    assert after.rows[:2] == before.rows
    assert [(r.case, r.provider, r.status) for r in after.rows[2:]] == [
        ("cube-10", "right", "ok"), ("cube-10", "slow-if-asked", "ok"),
    ]  # fmt: skip
    assert len(after.resumed) == 1
    assert [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()] == [
        r.to_json() for r in after.rows
    ]
    pytest.importorskip("jsonschema").validate(after.to_json(), schema.schema())
    assert "resumed" in (out / "report.html").read_text()
    assert "It was resumed 1 time." in (out / "report.md").read_text(encoding="utf-8")


def test_a_full_disk_keeps_the_rows_and_says_so(tmp_path):
    """Files are limited to 7 KiB, which the record exceeds after a few groups."""
    out, cases = tmp_path / "run", [f"cube-{n}" for n in range(4, 10, 2)]
    code, _, said = finished(command(out, cases=cases, limit=7 * 2**10))
    assert code == 1
    assert "study: the run directory must be writable" in " ".join(said.split())
    assert "make room and add --resume" in " ".join(said.split())
    kept = record.read(out)
    assert 0 < len(kept.rows) < len(cases)
    assert not kept.finished
    lines = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert lines[: len(kept.rows)] == [r.to_json() for r in kept.rows]
    assert not list(out.glob(".record.json.*"))
    code, _, said = finished(command(out, "--resume", cases=cases))
    assert code == 0, said
    assert [r.case for r in record.read(out).rows] == cases


def test_a_function_in_a_folder_whose_name_is_no_utf8_is_studied(tmp_path):
    here = tmp_path / os.fsdecode(b"caf\xe9")
    here.mkdir()
    (here / "twice.py").write_text("def twice(x):\n    return 2 * x\n")
    words = (
        "study twice.py:twice --input fp32[8] --pass fwd --device cpu --warm --rounds 3:3 --providers eager --out run"
    )
    done = subprocess.run(
        [sys.executable, "-m", "fusewise", *words.split()],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert record.read(here / "run").request["tasks"][0]["detail"]["place"] == str(here / "twice.py:twice")
    assert "caf\\udce9/twice.py" in (here / "run" / "report.html").read_text(encoding="utf-8")
    (here / "twice.py").write_text("def twice(x):\n    return x + x\n")
    again = [sys.executable, "-m", "fusewise", *words.split(), "--resume"]
    done = subprocess.run(again, cwd=here, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "--resume must keep the function's file as it was when the run began" in " ".join(done.stderr.split())


def test_a_name_that_the_locale_cannot_write_names_a_file_all_the_same(monkeypatch):
    assert folder.file_name("mé odd.py:β").rpartition("-")[0] == "mé_odd.py_β"
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "latin-1")
    assert folder.file_name("mé odd.py:β").rpartition("-")[0] == "mé_odd.py__"
    assert folder.file_name("mé-odd.py") == "mé-odd.py"


def test_names_that_differ_name_files_that_differ(monkeypatch):
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    names = ("a_b", "a b", "a/b", "a#b", ".a_b", "_", "..", "β", "γ", "\udce9")
    assert len({folder.file_name(name) for name in names}) == len(names)


@pytest.mark.parametrize(("name", "kept"), [("x" * 100, 100), ("x" * 101, 100), ("名" * 33, 33), ("x" + "名" * 34, 34)])
def test_a_long_name_names_a_file_all_the_same(name, kept):
    """Names of files are limited in bytes."""
    found = folder.file_name(name)
    assert (found == name) == (len(name.encode()) <= 100)
    assert found.partition("-")[0] == name[:kept]
    assert folder.file_name(".").startswith("_-") and folder.file_name("..a").startswith("a-")


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    record.save(study_record([row("eager", device_us=1.0)]), tmp_path)
    before = (tmp_path / "record.json").read_bytes()
    code, _, said = finished(command(tmp_path))
    assert code == 1
    assert "which has a run; add --resume or choose another --out" in " ".join(said.split())
    rows = tmp_path / "published.jsonl"
    code, _, said = finished(command(tmp_path, "--resume", "--append-rows", str(rows)))
    assert code == 1
    told = " ".join(said.split())
    assert "--resume must keep the request's" in told and "repeat the options of the command that began the run" in told
    assert not rows.exists()
    assert (tmp_path / "record.json").read_bytes() == before


def test_nothing_to_resume_is_told(tmp_path):
    code, _, said = finished(command(tmp_path / "new", "--resume"))
    assert code == 1
    assert "--resume must find a record.json" in " ".join(said.split())
    assert not (tmp_path / "new").exists()


def test_another_request_or_machine_is_no_resumption():
    made = study_record([])
    made.environment |= {"cores": 2}
    made.request |= {"cases": ["a", "b"], "tasks": [{"case": "a"}, {"case": "b"}]}
    same = dict(made.environment)
    folder.check_same(made, made.request, same)
    fewer = {"cases": ["a"], "tasks": [{"case": "a"}]}
    for request, environment, words in (
        ({**made.request, "seed": 1}, same, "the request's seed, got 1 after 0"),
        ({**made.request, **fewer}, same, r"the request's cases, got \['a'\] after \['a', 'b'\]; repeat the options"),
        (made.request, {**same, "device_name": "other"}, "the machine's device_name, got 'other' after"),
        (made.request, {**same, "versions": {"torch": "9"}}, "must keep torch 2.13.0, got 9"),
    ):
        with pytest.raises(folder.Refused, match=words):
            folder.check_same(made, request, environment)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("request", ["op", "cache", "seed", "rounds", "providers", "cases", "dtypes", "passes", "tasks"]),
        ("machine", ["device_name", "cpu", "cores", "torch_threads", "python"]),
    ],
)
def test_what_every_row_of_a_record_shares_is_kept(kind, names):
    made = study_record([])
    made.request["tasks"] = [{"case": "one"}]
    for name in names:
        request, environment = dict(made.request), dict(made.environment)
        (request if kind == "request" else environment)[name] = [{"case": "another"}]
        with pytest.raises(folder.Refused, match=f"must keep the {kind}'s {name}, got .*'another'.* after "):
            folder.check_same(made, request, environment)


def test_a_run_is_resumed_by_the_other_command():
    """`fusewise` and `python -m fusewise` differ in the first place where modules are looked for."""
    made = study_record([])
    made.request["tasks"] = [{"case": "one", "detail": {"source": "12", "path": ["/usr/bin"]}}]
    there = [{"case": "one", "detail": {"source": "12", "path": ["/home/me", "/usr/bin"]}}]
    folder.check_same(made, {**made.request, "tasks": there}, made.environment)
    there[0]["detail"]["source"] = "13"
    with pytest.raises(folder.Refused, match="keep the function's file"):
        folder.check_same(made, {**made.request, "tasks": there}, made.environment)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_ranks_share_the_cases_and_gather_one_record(tmp_path):
    out, cases = tmp_path / "run", ("cube-4", "cube-6", "cube-8")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    both = [
        command(out if rank == 0 else tmp_path / "elsewhere", "--json", cases=cases, providers="eager,lab_fakes:Right", RANK=str(rank), **place)
        for rank in (0, 1)
    ]  # fmt: skip
    (code, said, errors), (other_code, other_said, other_errors) = map(finished, both)
    assert (code, other_code) == (0, 0), errors + other_errors
    assert other_said == ""
    rows = json.loads(said)
    whole = record.read(out)
    assert [r.to_json() for r in whole.rows] == rows
    assert [(r.case, r.provider) for r in whole.rows] == [(c, p) for c in cases for p in ("eager", "right")]
    assert {r.run for r in whole.rows} == {whole.run}
    assert whole.finished
    assert len(whole.environment["ranks"]) == 2
    parts = [record.read(out / f"rank-{rank}") for rank in (0, 1)]
    assert [{r.case for r in part.rows} for part in parts] == [{"cube-4", "cube-8"}, {"cube-6"}]
    assert (out / "report.html").exists()
    assert not (tmp_path / "elsewhere").exists()
    pytest.importorskip("jsonschema").validate(whole.to_json(), schema.schema())
