"""The coordinator's side of a worker process: starts it, sends requests, and survives any failure of it.

Requests have a time limit, the process a memory limit. If a worker dies, hangs, grows too large or sends garbage, it is
ended and `WorkerFailed` is raised with a sentence for the row. Only JSON values reach the coordinator.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import machine
from .nursery import Forked, Nursery

#: Interval between checks of the worker's memory while waiting, seconds.
LOOK_EVERY = 0.1
#: Replies are a few kilobytes; a line of this length is not a reply.
LONGEST_LINE = 16 * 2**20
#: Beginnings of lines about a library itself: torch's profiler reports start and stop, and the bindings of Triton and
#: JAX what is left at exit, after the traceback of what ended the process.
BESIDE = ("USDT:", "nanobind: ", " - leaked ", " - ... skipped remainder", "See https://nanobind.")
#: The end of the log in which the last words are looked for, in bytes; such a report has about 2,000.
END = 2**14


class WorkerFailed(Exception):
    """The worker is gone; the message says what happened. `hung`: it made no progress within the time limit."""

    hung = False


class WorkerProcess:
    """One running worker. Everything that it or its libraries print goes to `log`. Without a `nursery` it starts a
    fresh interpreter.
    """

    def __init__(
        self,
        start: Mapping[str, Any],
        log: Path,
        *,
        timeout: float,
        memory_limit: int | None,
        nursery: Nursery | None = None,
        module: str = "fusewise.lab.worker",
    ) -> None:
        self.log = log
        self.timeout = timeout
        self.memory_limit = memory_limit
        self.requests = 0
        self.buffer = b""
        self.garbage = 0
        self.over = False
        with log.open("ab") as sink:
            self.log_start = sink.tell()
            self.process = (nursery or Nursery(None)).start(module, sink)
        self._send(start)

    def ready(self) -> dict[str, Any]:
        """The worker's first message, sent once the provider is imported."""
        return self._receive(0)

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Send a request and wait for its reply."""
        self.requests += 1
        self._send({"id": self.requests, "do": do, **fields})
        return self._receive(self.requests)

    def kill(self) -> None:
        """Kill the worker and everything it started; a pending request fails with its death."""
        if not self.over:  # otherwise the pid may have been reused
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """`kill`, then wait for the end and close the pipes."""
        self.kill()
        self.process.wait()
        self.over = True
        if isinstance(self.process, Forked):
            self.process.release()
            return
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise self._failed(self._death()) from None

    def _receive(self, wanted: int) -> dict[str, Any]:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        deadline = time.monotonic() + self.timeout
        while True:
            for reply in self._lines():
                if reply.get("id") == wanted:
                    return reply
                self.garbage += 1
            if time.monotonic() > deadline:
                failed = self._failed(f"timed out after {self.timeout:g} s")
                failed.hung = True
                raise failed
            readable, _, _ = select.select([descriptor], [], [], LOOK_EVERY)
            if readable:
                chunk = os.read(descriptor, 2**16)
                if not chunk:
                    raise self._failed(self._death())
                self.buffer += chunk
                if len(self.buffer) > LONGEST_LINE:
                    raise self._failed(f"wrote {len(self.buffer)} bytes without a valid reply")
            elif self.memory_limit is not None:
                used = machine.resident_bytes(self.process.pid)
                if used is not None and used > self.memory_limit:
                    raise self._failed(
                        f"used {used / 2**30:.2f} GiB of memory, the limit is {self.memory_limit / 2**30:.2f}"
                    )

    def _lines(self) -> list[dict[str, Any]]:
        """The complete replies received so far; invalid lines are counted and dropped."""
        *lines, self.buffer = self.buffer.split(b"\n")
        replies = []
        for line in lines:
            try:
                reply = json.loads(line)
            except ValueError:
                reply = None
            if isinstance(reply, dict):
                replies.append(reply)
            else:
                self.garbage += 1
        return replies

    def _death(self) -> str:
        """How the process ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        code = self.process.returncode
        if code is None:
            return "closed its reply channel"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def _failed(self, what: str) -> WorkerFailed:
        self.stop()
        if self.garbage:
            what += f", after {self.garbage} lines that are not replies"
        last = self._last_words()
        return WorkerFailed(f"the worker process {what}" + (f"; last line of its log: {last}" if last else ""))

    def _last_words(self) -> str:
        """The last line this worker wrote to its log, empty ones and those about a library itself left out."""
        try:
            with self.log.open("rb") as log:
                log.seek(self.log_start)
                lines = log.read()[-END:].decode("utf-8", errors="replace").rstrip().splitlines()
        except OSError:
            return ""
        lines = [line for line in lines if line.strip() and not line.startswith(BESIDE)]
        return lines[-1].strip()[:300] if lines else ""
