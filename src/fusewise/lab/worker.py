"""A provider's own process: one provider, many problems in turn, one JSON line a request and one a reply.

    coordinator → worker   {"id": 3, "do": "prepare", "task": {...}}
    worker → coordinator   {"id": 3, "ok": true, ...}       or {"id": 3, "ok": false, "status": ..., "reason": ...}

The channels are the process's original standard input and output; before any provider is imported, file descriptor 0 is
pointed at nothing and 1 at standard error, so that nobody reads a request and whatever a library prints ends in the worker's log. Started by
`process.WorkerProcess`: forked by `nursery.py`, or as `python -m fusewise.lab.worker`.
"""

from __future__ import annotations

import gc
import json
import math
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import machine, memory, plugin, spent, targets, truth
from .problem import Problem, Task, handed_over
from .reason import message, reason, text
from .timing import CpuTimer, CudaTimer, Timer, Turn, Work, calls_per_sample
from .truths import Truths

if TYPE_CHECKING:
    from .foreign import ProfiledTimer

#: Calls between the check and the first timed one.
WARM_UP_CALLS = 4
#: But no longer than this, for large problems.
WARM_UP_SECONDS = 0.3
#: A turn is at most this long for a provider, as far as the number of samples can help it.
TURN_SECONDS = 0.15
SAMPLES = (2, 10)
#: Below this share of a GPU's memory that is free, nobody keeps what only its own turns need; and nobody ever more of that
#: than this share, so that eight of them leave three quarters to the one whose turn it is.
SCARCE, MUCH = 0.25, 1 / 32
#: Tensors of more bytes than this are made again for the next pass where they are on a GPU, which takes milliseconds.
KEPT_BYTES = 2**30
#: A check takes up to so many times the bytes of the problem's tensors, and what the others have prepared is there, too.
CHECK_TAKES = 12
#: What an error says that memory ran out: torch's own, and what else passes it on.
NO_MEMORY = (
    "OutOfMemoryError",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "RESOURCE_EXHAUSTED",
)
#: What a record has of an error that is larger.
LARGEST_ERROR = 1e30
#: Calls that the profiler watches for the time of a call's kernels.
KERNEL_SAMPLES = 5
#: A sample longer than this is one of a turn's own.
LONG_SAMPLE_SECONDS = 1.0

Reply = dict[str, Any]


@dataclass
class Prepared:
    """A problem that passed the check, ready to be warmed up and timed in rounds."""

    work: Work
    calls: int
    timer: Timer


class Server:
    """Answers requests for one provider on one device."""

    def __init__(
        self,
        provider: plugin.Provider,
        device: str,
        flush_bytes: int,
        truths: Truths | None = None,
        flush_file: int | None = None,
    ) -> None:
        self.provider = provider
        self.truths = truths
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        provider.check(device)
        self.problem: Problem | None = None
        self.prepared: Prepared | None = None
        self.spent = spent.Parts()  # of the preparation at hand
        self.shared = False  # the memory that a turn needs, since the last one
        self.unseen = 0  # bytes of the problems since all of the process was last looked through for what nobody needs
        self.flush_bytes = flush_bytes
        self.timer: Timer = (
            CudaTimer(self.device, flush_bytes, machine.clock_reader(self.device))
            if self.device.type == "cuda"
            else CpuTimer(flush_bytes, flush_file)
        )

    def answer(self, request: dict[str, Any]) -> Reply:
        """Do what is asked, and keep no more than what comes next needs."""
        reply = self.attempt(request)
        # Only now are the frames gone through which an error came, and the tensors that they held.
        if reply["status"] == "failed":
            if not reply["leaving"]:
                self.unseen = KEPT_BYTES
                self.forget()
        elif request["do"] in ("load", "prepare"):
            self.spare()
        return reply

    def attempt(self, request: dict[str, Any]) -> Reply:
        """Do what is asked; whatever goes wrong in the provider becomes a status and a reason."""
        try:
            if request["do"] == "load":
                self.spent = spent.Parts()
                return {"ok": True, "status": "ok"} | self.neighbours(self.load(Task(**request["task"])))
            if request["do"] == "prepare":
                self.spent = spent.Parts()
                return self.prepare(Task(**request["task"]))
            if request["do"] == "warm":
                return self.warm()
            if request["do"] == "round":
                return self.round(request["samples"])
            if request["do"] == "profiler":
                from . import foreign

                foreign.begin()
                return {"ok": True, "status": "ok"}
            if request["do"] == "kernels":
                return self.kernels()
            raise ValueError(f"unknown request {request['do']!r}")
        except (plugin.Missing, plugin.Unsupported) as error:
            return {"ok": False, "status": "missing", "reason": str(error)}
        except Exception as error:  # providers raise anything; the row says what
            crowded = any(sign in f"{type(error).__name__}: {text(error)}" for sign in NO_MEMORY)
            if not crowded:
                traceback.print_exc()
            said = f"out of memory: {message(error)}" if crowded else reason(error)
            # After an error of the device every later call in this process fails, too.
            leaving = isinstance(error, getattr(torch, "AcceleratorError", ())) and not crowded
        return {"ok": False, "status": "failed", "reason": said, "crowded": crowded, "leaving": leaving}

    @cached_property
    def profiled(self) -> ProfiledTimer:
        """The timer of what runs on streams that torch does not know, and of kernels alone."""
        from .foreign import ProfiledTimer

        return ProfiledTimer(self.device, self.flush_bytes, machine.clock_reader(self.device))

    def forget(self) -> None:
        """Free the problem before the next one is made. To look through all of torch and a compiler takes a quarter of a second:
        only where something still holds the problem, or tensors that nobody can see may have come to much."""
        last = [weakref.ref(it) for it in (self.problem, self.prepared) if it is not None]
        self.problem = self.prepared = None
        gc.collect()
        if self.unseen >= KEPT_BYTES or any(it() is not None for it in last):
            self.unseen = 0
            gc.unfreeze()
            gc.collect()
        self.give_back()

    def spare(self) -> None:
        """Give back what no turn needs: on a GPU the workers of a study share its memory, and all are there all the time."""
        if self.device.type == "cuda" and self.problem is not None and self.problem.held() > KEPT_BYTES:
            self.problem.release()
            self.problem = None
            gc.collect()
        self.give_back()
        if self.prepared is not None:
            gc.freeze()  # the collection before each turn looks at what came since, not at all of torch

    def give_back(self) -> None:
        """What the allocator keeps goes to the other providers. It comes again in calls that are not timed."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def neighbours(self, problem: Problem) -> Reply:
        """How many workers may prepare the problem side by side, by the memory that they share."""
        if self.device.type != "cuda":
            return {}
        total = torch.cuda.mem_get_info(self.device)[1]
        return {"at_once": max(1, total // (CHECK_TAKES * max(1, problem.held())))}

    def load(self, task: Task) -> Problem:
        """The task's problem, the tensors of the last one kept if only the pass differs."""
        used = self.prepared is not None or self.problem is not None
        self.prepared = None
        with self.spent.part("inputs"):
            last, self.problem = self.problem, None  # should it have no such pass
            if last is not None and (last.task.key[:3], last.task.seed) == (task.key[:3], task.seed):
                last.take(task)
                self.problem = last
                return last
            if used:  # in a new process there is nothing to be found, and all of torch to look through
                del last
                self.forget()
            self.problem = targets.problem_for(task)
            self.synchronize()
            return self.problem

    def prepare(self, task: Task) -> Reply:
        """First call, truth, memory. A warm-up and rounds may follow when the reply's status is ok."""
        problem = self.load(task)
        start = time.perf_counter()
        problem.begin_anew()  # an exporter takes what the function holds as it finds it
        with self.spent.part("compiling"):
            run = self.provider.build(problem)
            if task.pass_ != "fwd" and run.checked and not run.backward:
                raise plugin.Unsupported("has no backward")
            calls = 1 if problem.one_by_one else calls_per_sample(problem.bytes_min(), task.device)
            work = make_work(problem, run, 1)
            work.step(work.begin(0))
            self.synchronize()
        reply: Reply = {"ok": True, "status": "ok", "first_call_s": time.perf_counter() - start}
        reply |= {"versions": plugin.versions(self.provider), "shape": problem.shape(), "calls_per_sample": calls}
        reply |= {"bytes_min": problem.bytes_min(), "flops_min": problem.flops_min(), "in_place": run.in_place}
        del work  # its copies of the tensors are made again, beside none of what the check takes
        if run.checked:
            with self.spent.part("truth"):
                verdict = truth.check(problem, run, self.truths)
            reply |= {
                "error": _finite(verdict.errors.worst),
                "error_rms": _finite(verdict.errors.rms),
                "error_eager": _finite(verdict.eager.worst),
                "error_eager_rms": _finite(verdict.eager.rms),
            }
            if verdict.reason:
                return reply | {"ok": False, "status": "wrong", "reason": verdict.reason}
        with self.spent.part("measuring"):
            self.give_back()  # what the check took, or a part of it would be the copies' and the rest stay with them
            work = make_work(problem, run, calls)
            reply |= self.measure_memory(problem, run, work) | problem.memory(run.form)
        timer = self.profiled if run.foreign and self.device.type == "cuda" else self.timer
        self.prepared = Prepared(work, calls, timer)
        self.unseen += calls * problem.held()
        return reply | {"prepare_s": time.perf_counter() - start}

    def warm(self) -> Reply:
        """Some calls that are not counted, how long one takes, and of how many samples a turn should be by that. It is
        asked for when nobody else is at work."""
        prepared = self._ready()
        seconds, begun = math.inf, time.perf_counter()
        for _ in range(WARM_UP_CALLS):
            seconds = min(seconds, prepared.timer.once(prepared.work))
            if time.perf_counter() - begun > WARM_UP_SECONDS:
                break
        flush = self.flush_bytes / 10e9 if self.device.type == "cpu" else 0.0
        fewest = 1 if seconds * prepared.calls > LONG_SAMPLE_SECONDS else SAMPLES[0]
        samples = min(SAMPLES[1], max(fewest, int(TURN_SECONDS / (seconds * prepared.calls + flush))))
        self.share_memory()
        return {"ok": True, "status": "ok", "estimate_us": seconds * 1e6, "samples": samples}

    def measure_memory(self, problem: Problem, run: plugin.Run, work: Work) -> Reply:
        if not run.checked or not run.torch_memory:
            return {"peak_bytes": None, "held_bytes": None}
        held = None
        if problem.task.pass_ != "fwd" and run.vjp is None:
            leaves = truth.own_leaves(problem, run, True)
            held = memory.held_bytes(lambda: run.leave(run.call(*run.enter(*leaves))), leaves, self.device)
        return {"peak_bytes": memory.peak_bytes(work, self.device), "held_bytes": held}

    def round(self, samples: int) -> Reply:
        prepared = self._ready()
        if self.shared:
            prepared.timer.once(prepared.work)  # to have its memory again before anything is timed
        turn: Turn = prepared.timer.turn(prepared.work, samples, prepared.calls)
        self.share_memory()
        return {"ok": True, "status": "ok"} | turn.to_json()

    def kernels(self) -> Reply:
        """What the kernels of a call take by themselves; null with a reason where the profiler cannot say."""
        prepared = self._ready()
        try:
            if self.shared:
                prepared.timer.once(prepared.work)
            found: Reply = {"kernel_us": round(self.profiled.kernel_us(prepared.work, KERNEL_SAMPLES), 3)}
        except Exception as error:  # what was timed stays timed
            traceback.print_exc()
            found = {"kernel_us": None, "kernel_us_reason": reason(error)}
        self.share_memory()
        return {"ok": True, "status": "ok"} | found

    def share_memory(self) -> None:
        """Give what the allocator keeps for the next turn back, where it is much or little is left for the others' turns."""
        self.shared = False
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            idle = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            if free < SCARCE * total or idle > MUCH * total:
                self.give_back()
                self.shared = True

    def _ready(self) -> Prepared:
        if self.prepared is None:
            raise RuntimeError("a round was asked for without a prepared problem")
        return self.prepared

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def make_work(problem: Problem, run: plugin.Run, copies: int) -> Work:
    """The pass to be timed, over `copies` sets of the problem's tensors so that each call finds its own cold."""
    backward = problem.task.pass_ != "fwd" and run.checked

    sets = [truth.own_leaves(problem, run, backward and run.vjp is None) for _ in range(copies)]
    call: Callable[..., Any] = run.call
    if not backward:
        arguments = [run.enter(*xs) for xs in sets]
        return Work(lambda i: arguments[i % copies], lambda xs: call(*xs))
    if run.vjp is not None:
        vjp = run.vjp
        own = [(run.enter(*xs), vjp.enter(tuple(g.clone() for g in problem.upstream if g is not None))) for xs in sets]
        if problem.task.pass_ == "fwd+bwd":
            return Work(lambda i: own[i % copies], lambda pair: vjp.both(*pair))
        return Work(
            lambda i: (vjp.forward(own[i % copies][0])[1], own[i % copies][1]), lambda state: vjp.backward(*state)
        )

    def forward(xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return run.leave(call(*run.enter(*xs)))

    given = problem.upstream  # the problem lets go of its own

    if problem.task.pass_ == "bwd":

        def begin(i: int) -> tuple[Any, ...]:
            xs = sets[i % copies]
            outputs = forward(xs)
            return outputs, xs, handed_over(outputs, given)

        return Work(begin, lambda state: problem.gradients(*state))
    upstream = [tuple(None if g is None else g.clone() for g in given) for _ in range(copies)]
    return Work(
        lambda i: (sets[i % copies], upstream[i % copies]),
        lambda state: problem.gradients(forward(state[0]), *state),
    )


def _finite(value: float) -> float | None:
    return min(value, LARGEST_ERROR) if math.isfinite(value) else None


def serve(requests: Iterable[str], replies: IO[str], start: dict[str, Any]) -> None:
    """Load the provider named in `start`, then answer until the requests end."""

    def send(reply: Reply) -> None:
        replies.write(json.dumps(reply, allow_nan=False) + "\n")
        replies.flush()

    try:
        if limit := start.get("device_memory_fraction"):
            torch.cuda.set_per_process_memory_fraction(limit, torch.device(start["device"]))
        provider = plugin.load(start["provider"])
        truths = Truths(Path(start["truths"]), start["keeps_truths"]) if start.get("truths") else None
        server = Server(provider, start["device"], start["flush_bytes"], truths, start.get("flush_file"))
        versions = plugin.versions(provider)
    except plugin.Missing as error:
        send({"id": 0, "ok": False, "status": "missing", "reason": str(error)})
        return
    except Exception as error:  # a provider's module may raise anything
        traceback.print_exc()
        send({"id": 0, "ok": False, "status": "failed", "reason": reason(error)})
        return
    send({"id": 0, "ok": True, "versions": versions, "pid": os.getpid()})
    for line in requests:
        request = json.loads(line)
        reply = {"id": request["id"]} | server.answer(request)
        send(reply | {"spent": server.spent.seconds} if request["do"] in ("load", "prepare") else reply)


def main(serve: Callable[[Iterable[str], IO[str], dict[str, Any]], None] = serve) -> None:
    """Talk over the process's own pipes; `serve` answers."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # A worker ends by SIGKILL: what Python keeps back until a block is full would never reach the log.
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in requests:
            lines.put(line)
        os._exit(0)  # the coordinator is gone, however busy the provider may be

    threading.Thread(target=listen, daemon=True).start()
    start = json.loads(lines.get())
    serve(iter(lines.get, ""), replies, start)


if __name__ == "__main__":
    main()
