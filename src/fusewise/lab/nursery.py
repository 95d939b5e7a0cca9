"""A process that has loaded torch and forks workers, which then need not load it: two seconds of a core for each.

It is a program of its own, so that no worker imports the user's script and nothing in it has ever computed. Its environment
is its workers': glibc and compilers read theirs once. Only the thread that forks lives on in a child, and CUDA does not, so
there must be no other, and no CUDA: it makes sure.

    coordinator → nursery   a module's name and four descriptors: standard input, output, error, a socket to answer on
    nursery → that socket   the worker's pid and, when it has ended, its code; nobody else gets the pid until it is closed

A worker ends with its standard input and the nursery with its coordinator's socket: nothing outlives a coordinator that was
killed. Workers whose nursery was killed go on; the next ones start without it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import fusewise

#: Set in workers, so that a file of the user's that starts a study when imported does not start another one there.
WORKER = "FUSEWISE_WORKER"
#: What is loaded before workers part: no provider and no compiler, whose loading belongs to a first call.
MODULES = ("fusewise.lab.worker", "fusewise.lab.code.worker")
#: The longest wait for a worker's pid, seconds: torch may come from a slow disk.
PATIENCE = 120.0
#: How long it may take to end of itself, seconds.
LEAVE = 1.0
#: How often it looks for workers that have ended, besides when a signal says so, seconds: waiting for one is without end.
LOOK_EVERY = 1.0


class Forked:
    """A worker from the nursery: as much of a `Popen` as `WorkerProcess` needs. OSError where none came of it."""

    def __init__(self, nursery: socket.socket, module: str, log: int) -> None:
        self.returncode: int | None = None
        self.over = False
        self.lock = threading.Lock()
        self.status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (requests, stdin), (stdout, replies) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        try:
            try:
                socket.send_fds(nursery, [module.encode()], [requests, replies, log, theirs.fileno()])
            finally:
                theirs.close()
                os.close(requests)
                os.close(replies)
            self.status.settimeout(PATIENCE)
            self.pid = int(self.status.recv(32) or b"0")
            if not self.pid:
                raise ConnectionResetError("the nursery has ended")
        except BaseException:  # Ctrl-C, too: a worker that comes all the same ends with its standard input
            self.release()
            raise

    def wait(self, timeout: float | None = None) -> int | None:
        """As of `Popen`, from any number of threads; None where the nursery ended first, so that nobody knows."""
        # How it ended is said once. After a second Ctrl-C two threads wait for it.
        if not self.lock.acquire(timeout=-1 if timeout is None else timeout):
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        try:
            if not self.over:
                self.status.settimeout(timeout)
                said = self.status.recv(32)
                self.returncode, self.over = int(said) if said else None, True
        except TimeoutError:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0) from None
        finally:
            self.lock.release()
        return self.returncode

    def release(self) -> None:
        """Close all that leads to the worker; from now on its pid may be another's."""
        for end in (self.stdin, self.stdout, self.status):
            with contextlib.suppress(OSError):
                end.close()


class Nursery:
    """Starts workers in one environment. The process comes with the first of them."""

    def __init__(
        self,
        log: Path | None,
        env: Mapping[str, str] | None = None,
        files: Sequence[int] = (),
        modules: Sequence[str] = (),
    ) -> None:
        """`log` gets what the process itself has to say; without one there is none, and each worker starts by itself.
        `files` are descriptors that workers have, too; `modules` what is loaded besides torch, where nothing is timed."""
        source = str(Path(fusewise.__file__).parents[1])
        paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self.env = {**os.environ, **(env or {}), WORKER: "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
        self.files = tuple(files)
        self.log = log
        self.modules = tuple(modules)
        self.lock = threading.Lock()
        self.socket: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, module: str, log: IO[bytes]) -> subprocess.Popen[bytes] | Forked:
        """A worker that runs the module's `main`. Several threads may ask at once."""
        # Elsewhere than on Linux the system's own libraries do not survive a fork.
        if self.log is not None and sys.platform == "linux":
            try:
                with self.lock:
                    ours = self.socket = self.socket or self._begin(self.log)
                return Forked(ours, module, log.fileno())
            except OSError:
                self.close()
        # No fork is safe here, or that process could not start or has died: a study is slower for it, and goes on.
        return self._popen([module], log, subprocess.PIPE)

    def close(self) -> None:
        """End the process; workers that somebody holds on to stay."""
        if self.socket is not None:
            self.socket.close()  # which is its sign, once it has buried those that nobody does
        if self.process is not None:
            try:
                self.process.wait(timeout=LEAVE)
            except subprocess.TimeoutExpired:  # it hangs, or has not even loaded torch
                self.process.kill()
                self.process.wait()

    def _begin(self, log: Path) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("ab") as sink:
            words = [__name__, str(theirs.fileno()), *self.modules]
            self.process = self._popen(words, sink, subprocess.DEVNULL, theirs.fileno())
        return ours

    def _popen(self, words: Sequence[str], log: IO[bytes], pipe: int, *files: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=pipe,
            stdout=pipe,
            stderr=log,
            pass_fds=(*self.files, *files),
            env=self.env,
            start_new_session=True,  # a Ctrl-C is the coordinator's; its children die with it, together
        )


def unfit() -> str:
    """Why this process must not fork workers, if so."""
    import torch

    # numpy's OpenBLAS ends its threads before a fork, so the first one is for that; they come again where they are needed.
    child = os.fork()
    if not child:
        os._exit(torch.cuda._is_in_bad_fork())
    if os.waitpid(child, 0)[1]:
        return "it has started CUDA"
    threads = len(os.listdir("/proc/self/task"))
    return f"it has {threads} threads" if threads > 1 else ""


def serve(requests: socket.socket) -> str:
    """Fork a worker for each request. Returns in workers only, each with its module."""
    import torch

    wake, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)  # that it comes is enough
    workers: dict[int, socket.socket] = {}
    ended: set[int] = set()
    while True:
        readable, _, _ = select.select([requests, wake, *workers.values()], [], [], LOOK_EVERY)
        if wake in readable:
            wake.recv(4096)
        for pid, status in list(workers.items()):
            if status in readable:  # nobody holds on to this one any more, and nothing else comes from there
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                workers.pop(pid).close()
                ended.discard(pid)
            elif pid not in ended and (end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
                ended.add(pid)
                tell(status, end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)
        if requests in readable:
            module, files, _, _ = socket.recv_fds(requests, 256, 4)
            if not module:
                os._exit(0)  # libraries have nothing to tidy up, and some say a lot when they do
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setpgid(0, 0)
                for place, file in enumerate(files[:3]):
                    os.dup2(file, place)
                for own in (*files, *(end.detach() for end in (requests, wake, waker, *workers.values()))):
                    os.close(own)
                torch.default_generator.seed()  # as Python's own does at every fork
                return module.decode()
            os.setpgid(pid, pid)  # here, too: whoever knows the pid may kill the group
            for file in files[:3]:
                os.close(file)  # else no end of a pipe would ever be seen
            workers[pid] = socket.socket(fileno=files[3])
            tell(workers[pid], pid)


def tell(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody there; the next look at the socket shows it
        status.send(str(number).encode())


def main() -> str:
    """The module that a worker is to run."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    modules, sys.argv[1:] = sys.argv[2:], []
    for module in (*MODULES, *modules):
        importlib.import_module(module)
    if why := unfit():
        sys.exit(f"{why}: workers start without it")
    gc.freeze()  # what is here does not change, so that the workers' collections need not touch it
    return serve(requests)


if __name__ == "__main__":
    importlib.import_module(main()).main()
