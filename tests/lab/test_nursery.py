"""Workers forked from a process with torch loaded behave like those started alone. Real processes and signals."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from fusewise.lab import inside, nursery
from fusewise.lab.nursery import Forked, Nursery
from fusewise.lab.process import WorkerFailed, WorkerProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
RIGHT = {"provider": "lab_fakes:Right", "device": "cpu", "flush_bytes": 0}


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """One nursery for all tests that do not damage it, with a variable and a descriptor of its own."""
    folder = tmp_path_factory.mktemp("nursery")
    with (
        open(folder / "shared", "wb") as shared,
        closing(Nursery(folder / "nursery.log", {"FLAVOUR": "salt"}, [shared.fileno()])) as made,
    ):
        yield made
    assert made.process.returncode == 0
    assert (folder / "nursery.log").read_text() == ""


@contextmanager
def obeying(parent, log):
    """A process that executes Python code, line by line."""
    with log.open("ab") as sink:
        process = parent.start("lab_obeys", sink)
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for end in (process.stdin, process.stdout, getattr(process, "status", process.stdout)):
            end.close()


def tell(process, line):
    process.stdin.write(line.encode() + b"\n")
    process.stdin.flush()


def ask(process, expression):
    tell(process, f"print({expression}, flush=True)")
    return process.stdout.readline().decode().strip()


def state(pid):
    """The state letter of ps; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def until(true):
    for _ in range(1000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("not within ten seconds")


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no more')", 1, "no more"),
        ("raise ValueError('of mine')", 1, "ValueError: of mine"),
        ("os._exit(7)", 7, ""),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("os.kill(os.getpid(), signal.SIGCHLD)", 0, ""),
        ("atexit.register(os.write, 2, b'at the end')", 0, "at the end"),
        ("print('kept back')", 0, ""),
    ],
)
def test_a_worker_ends_as_one_that_started_alone(parent, tmp_path, line, code, said):
    for name, start, kind in (("alone", Nursery(None), subprocess.Popen), ("forked", parent, Forked)):
        with obeying(start, tmp_path / name) as process:
            assert isinstance(process, kind)
            tell(process, line)
            process.stdin.close()
            process.wait(timeout=60)
            assert (name, process.returncode) == (name, code)
            assert process.stdout.read() == (b"kept back\n" if "kept back" in line else b"")
            assert [*(tmp_path / name).read_text().splitlines(), ""][-1 if not said else -2] == said


def test_a_worker_has_its_own_of_everything(parent, tmp_path):
    with obeying(parent, tmp_path / "log") as one, obeying(parent, tmp_path / "log") as other:
        tell(one, "import torch")
        tell(other, "import torch")
        nursery = parent.process.pid
        assert ask(one, "(os.getpid(), os.getpgid(0), os.getppid())") == str((one.pid, one.pid, nursery))
        assert os.getsid(one.pid) == nursery != os.getsid(0)  # a Ctrl-C in a terminal reaches neither
        assert ask(one, "os.environ['FLAVOUR'], os.environ['FUSEWISE_WORKER'], sys.argv[1:]") == "salt 1 []"
        open_files = {int(name) for name in os.listdir(f"/proc/{one.pid}/fd")}
        assert open_files == {0, 1, 2, *parent.files}
        assert ask(one, "signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL, signal.set_wakeup_fd(-1)") == "True -1"
        for drawn in ("random.random()", "torch.rand(())", "torch.initial_seed()"):
            assert ask(one, drawn) != ask(other, drawn)


def test_kernels_in_a_worker_have_torchs_threads(parent, tmp_path):
    """As in a process started alone. Otherwise every call of a CPU kernel would start threads and wait for them."""
    for name, start in (("alone", Nursery(None)), ("forked", parent)):
        with obeying(start, tmp_path / name) as process:
            tell(process, "import torch; from fusewise._shared import build, cpu")
            assert ask(process, "hasattr(__import__('ctypes').CDLL(None), 'GOMP_parallel')") == "True"
            assert ask(process, "build.FORKED, cpu._parallel() != 0") == "False True"


@pytest.mark.parametrize("modules", [(), inside.MODULES])
def test_what_forks_has_one_thread_and_leaves_cuda_to_the_workers(tmp_path, modules):
    with (
        closing(Nursery(tmp_path / "nursery.log", modules=modules)) as parent,
        obeying(parent, tmp_path / "log") as worker,
    ):
        assert "\nThreads:\t1\n" in Path(f"/proc/{parent.process.pid}/status").read_text()
        assert "libtorch" in Path(f"/proc/{parent.process.pid}/maps").read_text()
        tell(worker, "import torch")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        assert (
            ask(worker, f"torch.cuda._is_in_bad_fork(), torch.ones(2, device={device!r}).sum().item()") == "False 2.0"
        )
        assert ask(worker, f"{{*{list(modules)}}} <= set(sys.modules)") == "True"


def test_several_threads_may_ask_at_once(parent, tmp_path):
    def one(number):
        with obeying(parent, tmp_path / f"log{number}") as process:
            return ask(process, f"{number}, os.getpid()") == f"{number} {process.pid}", process.pid

    with ThreadPoolExecutor(8) as pool:
        right, pids = zip(*pool.map(one, range(24)), strict=True)
    assert all(right) and len(set(pids)) == 24


def test_nobody_gets_the_pid_of_a_worker_that_may_still_be_killed(parent, tmp_path):
    worker = WorkerProcess(RIGHT, tmp_path / "log", timeout=60, memory_limit=None, nursery=parent)
    pid = worker.ready()["pid"]
    os.kill(pid, signal.SIGKILL)
    with obeying(parent, tmp_path / "other") as other, pytest.raises(subprocess.TimeoutExpired):
        other.wait(timeout=0.1)
    assert worker.process.wait(timeout=60) == -signal.SIGKILL
    assert state(pid) == "Z"
    with pytest.raises(WorkerFailed, match="was killed by SIGKILL"):
        worker.ask("round")
    until(lambda: not state(pid))
    worker.kill()  # a no-op for a finished worker: its pid may be reused


def test_a_worker_that_nobody_holds_is_ended(parent, tmp_path):
    with (tmp_path / "log").open("ab") as log:
        process = parent.start("lab_obeys", log)
    tell(process, "signal.pause()")
    process.release()
    until(lambda: not state(process.pid))


def test_workers_outlive_the_nursery_and_the_next_start_alone(tmp_path):
    with closing(Nursery(tmp_path / "nursery.log")) as parent:
        first = WorkerProcess(RIGHT, tmp_path / "log", timeout=60, memory_limit=None, nursery=parent)
        assert isinstance(first.process, Forked) and first.ready()["ok"]
        os.kill(parent.process.pid, signal.SIGKILL)
        second = WorkerProcess(RIGHT, tmp_path / "log", timeout=60, memory_limit=None, nursery=parent)
        assert isinstance(second.process, subprocess.Popen) and second.ready()["ok"]
        assert "unknown request" in first.ask("sing")["reason"]
        os.kill(first.process.pid, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match="the worker process closed its reply channel"):
            first.ask("round")
        second.stop()


def test_a_nursery_that_is_closed_leaves_its_workers_and_the_scratch_folder(tmp_path):
    """As when the next one starts alone. A killed study's folder: see test_survival.py."""
    (tmp_path / "scratch").mkdir()
    parent = Nursery(tmp_path / "nursery.log", scratch=tmp_path / "scratch")
    with obeying(parent, tmp_path / "log") as process:
        parent.close()
        assert parent.process.returncode == 0
        assert ask(process, "1 + 1") == "2"
    assert (tmp_path / "scratch").is_dir()


def test_a_process_that_must_not_fork_does_not(tmp_path, monkeypatch):
    """For example because a module that every Python process loads has started a thread."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    with closing(Nursery(tmp_path / "nursery.log")) as parent, obeying(parent, tmp_path / "log") as process:
        assert isinstance(process, subprocess.Popen) and ask(process, "1 + 1") == "2"
    assert "it has 2 threads: workers start without it" in (tmp_path / "nursery.log").read_text()


def test_where_nothing_is_forked_workers_start_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(nursery.sys, "platform", "darwin")
    with closing(Nursery(tmp_path / "nursery.log")) as parent, obeying(parent, tmp_path / "log") as process:
        assert isinstance(process, subprocess.Popen) and parent.process is None
    assert not (tmp_path / "nursery.log").exists()


def test_a_nursery_that_hangs_is_not_waited_for_twice(tmp_path, monkeypatch):
    with closing(Nursery(tmp_path / "nursery.log")) as parent, obeying(parent, tmp_path / "log"):
        os.kill(parent.process.pid, signal.SIGSTOP)
        monkeypatch.setattr(nursery, "PATIENCE", 0.1)
        with obeying(parent, tmp_path / "log") as process:
            assert isinstance(process, subprocess.Popen)
        assert parent.process.returncode == -signal.SIGKILL


def test_every_thread_that_waits_hears_of_the_end(parent, tmp_path):
    with obeying(parent, tmp_path / "log") as process, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(process.wait) for _ in range(3)]
        time.sleep(0.1)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.05)
        os.killpg(process.pid, signal.SIGKILL)
        assert [ended.result(timeout=10) for ended in waiting] == [-signal.SIGKILL] * 3


def test_an_end_is_seen_without_a_signal(tmp_path):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # inherited
    try:
        with closing(Nursery(tmp_path / "nursery.log")) as deaf, obeying(deaf, tmp_path / "log") as process:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            assert isinstance(process, Forked)
            tell(process, "os._exit(7)")
            assert process.wait(timeout=20) == 7
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


LEFT = """nanobind: leaked 1 types!
 - leaked type "triton._C.libtriton.ir.location"
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html"""


@pytest.mark.parametrize("said", ["it broke", ""])
@pytest.mark.parametrize("beside", ["USDT:2026-11-27 1:1 Handler.cpp:59] profiler_stop\n", LEFT, LEFT * 30, ""])
def test_what_libraries_print_of_themselves_is_nobodys_last_word(tmp_path, said, beside):
    worker = object.__new__(WorkerProcess)
    worker.log, worker.log_start = tmp_path / "log", 4
    worker.log.write_text(f"old\n{said}\n\n{beside}")
    assert worker._last_words() == said
