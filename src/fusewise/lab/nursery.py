"""A fork server: a process that has imported torch and forks worker processes, saving each two seconds of CPU time.

It is a separate program, so that no worker imports the user's script and no computation has run before a fork. Its
environment is its workers', because glibc and compilers read theirs only once. In a forked child only the forking
thread survives, and CUDA does not work, so the server verifies that it is single-threaded and has not initialised CUDA.

    coordinator → nursery   a module's name and four descriptors: stdin, stdout, stderr, a status socket; FAREWELL at the end
    nursery → status socket the worker's pid and later its exit code; the pid is not reaped until the socket closes

A worker exits when its stdin closes, and the nursery when the coordinator's socket does, so nothing outlives a killed
coordinator, nor does its folder for temporary files. If the nursery is killed, its workers go on and later ones start
without it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import fusewise

#: Set in workers, so that a user's file that starts a study on import does not start another one there.
WORKER = "FUSEWISE_WORKER"
#: Imported before forking. No provider or compiler: importing those belongs to the first call.
MODULES = ("fusewise.lab.worker", "fusewise.lab.code.worker")
#: What the server is told when it is to exit.
FAREWELL = b"-"
#: Timeout for a worker's pid, in seconds: torch may load from a slow disk.
PATIENCE = 120.0
#: Grace period for the process to exit by itself, in seconds.
LEAVE = 1.0
#: Polling interval for ended workers, in seconds, in case SIGCHLD is missed: `wait` may have no timeout.
LOOK_EVERY = 1.0


class Forked:
    """A forked worker: the part of the `Popen` interface that `WorkerProcess` needs. OSError if it could not be
    started."""

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
        except BaseException:  # also Ctrl-C: a worker that still starts exits on its closed stdin
            self.release()
            raise

    def wait(self, timeout: float | None = None) -> int | None:
        """As `Popen.wait`, from any number of threads; None if the nursery died first, since the exit code is then
        unknown."""
        # The exit code is sent once, and after a second Ctrl-C two threads wait for it.
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
        """Close everything that leads to the worker; afterwards its pid may be reused."""
        for end in (self.stdin, self.stdout, self.status):
            with contextlib.suppress(OSError):
                end.close()


class Nursery:
    """Starts workers in one environment. The server process starts with the first of them."""

    def __init__(
        self,
        log: Path | None,
        env: Mapping[str, str] | None = None,
        files: Sequence[int] = (),
        modules: Sequence[str] = (),
        scratch: Path | None = None,
    ) -> None:
        """`log` receives the server's output; without it there is no server and each worker is a fresh process.
        `files`: descriptors that workers inherit. `modules`: extra imports besides torch, for processes that time
        nothing. `scratch`: a folder that the server deletes if this process dies."""
        self.env = {**os.environ, **(env or {}), WORKER: "1", **imports()}
        self.files = tuple(files)
        self.log = log
        self.modules = tuple(modules)
        self.scratch = scratch
        self.lock = threading.Lock()
        self.socket: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, module: str, log: IO[bytes]) -> subprocess.Popen[bytes] | Forked:
        """A worker that runs the module's `main`. Thread-safe."""
        # Only on Linux: elsewhere the system's own libraries do not survive a fork.
        if self.log is not None and sys.platform == "linux":
            try:
                with self.lock:
                    ours = self.socket = self.socket or self._begin(self.log)
                return Forked(ours, module, log.fileno())
            except OSError:
                self.close()
        # No safe fork, or the server could not start or has died. The study goes on, only slower.
        return self._popen([module], log, subprocess.PIPE)

    def close(self) -> None:
        """End the server; workers whose status sockets are still open keep running."""
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.send(FAREWELL)
            self.socket.close()  # the server exits, after it has reaped the released workers
        if self.process is not None:
            try:
                self.process.wait(timeout=LEAVE)
            except subprocess.TimeoutExpired:  # hung, or still importing torch
                self.process.kill()
                self.process.wait()

    def _begin(self, log: Path) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("ab") as sink:
            words = [__name__, str(theirs.fileno()), str(self.scratch or ""), *self.modules]
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
            start_new_session=True,  # Ctrl-C goes to the coordinator only, which ends its children together
        )


def imports() -> dict[str, str]:
    """Environment of a process that imports this very package, wherever it was imported from. `-m` would have it search
    the working directory first, where a file may have the name of a module of Python's own."""
    source = str(Path(fusewise.__file__).parents[1])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONSAFEPATH": "1"}  # from Python 3.11 on


def unfit() -> str:
    """Why this process must not fork workers; empty if it may."""
    import torch

    # numpy's OpenBLAS joins its threads before a fork and restarts them on demand: the first fork serves that, too.
    child = os.fork()
    if not child:
        os._exit(torch.cuda._is_in_bad_fork())
    if os.waitpid(child, 0)[1]:
        return "it has started CUDA"
    threads = len(os.listdir("/proc/self/task"))
    return f"it has {threads} threads" if threads > 1 else ""


def serve(requests: socket.socket, scratch: str) -> str:
    """Fork a worker per request. Returns in the workers only, with the module to run."""
    import torch

    wake, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must exist for the wakeup descriptor to be written
    workers: dict[int, socket.socket] = {}
    ended: set[int] = set()
    while True:
        readable, _, _ = select.select([requests, wake, *workers.values()], [], [], LOOK_EVERY)
        if wake in readable:
            wake.recv(4096)
        for pid, status in list(workers.items()):
            if status in readable:  # only readable once closed: the coordinator has released this worker
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                workers.pop(pid).close()
                ended.discard(pid)
            elif pid not in ended and (end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
                ended.add(pid)
                tell(status, end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)
        if requests in readable:
            module, files, _, _ = socket.recv_fds(requests, 256, 4)
            if not module and scratch:  # the coordinator has died without a farewell
                for pid in workers:
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                shutil.rmtree(scratch, ignore_errors=True)
            if module in (b"", FAREWELL):
                os._exit(0)  # skip the libraries' exit handlers, which have nothing to clean up and may be noisy
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setpgid(0, 0)
                for place, file in enumerate(files[:3]):
                    os.dup2(file, place)
                for own in (*files, *(end.detach() for end in (requests, wake, waker, *workers.values()))):
                    os.close(own)
                torch.default_generator.seed()  # as Python's random module does after a fork
                return module.decode()
            os.setpgid(pid, pid)  # in the parent as well: whoever learns the pid may kill the group at once
            for file in files[:3]:
                os.close(file)  # else the pipes never reach end of file
            workers[pid] = socket.socket(fileno=files[3])
            tell(workers[pid], pid)


def tell(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # peer closed; the next poll of the socket notices
        status.send(str(number).encode())


def main() -> str:
    """In a worker: the module to run."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    scratch, modules, sys.argv[1:] = sys.argv[2], sys.argv[3:], []
    for module in (*MODULES, *modules):
        importlib.import_module(module)
    if why := unfit():
        sys.exit(f"{why}: workers start without it")
    gc.freeze()  # keeps workers' collections from touching, and thus copying, these pages
    return serve(requests, scratch)


if __name__ == "__main__":
    importlib.import_module(main()).main()
