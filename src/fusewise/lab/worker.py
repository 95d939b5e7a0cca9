"""A worker process: serves one provider for many problems, with one JSON line per request and per reply.

    coordinator → worker   {"id": 3, "do": "prepare", "task": {...}}
    worker → coordinator   {"id": 3, "ok": true, ...}       or {"id": 3, "ok": false, "status": ..., "reason": ...}

The protocol uses the original stdin and stdout. Before any provider is imported, file descriptor 0 is redirected to
/dev/null and 1 to stderr, so that no library consumes a request and everything printed ends in the worker's log.
`process.WorkerProcess` starts workers, either forked by `nursery.py` or as `python -m fusewise.lab.worker`.
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
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import machine, memory, plugin, spent, targets, truth
from .problem import Problem, Task, handed_over
from .reason import log_error, message, reason, text
from .timing import CpuTimer, CudaTimer, Timer, Turn, Uncaptured, Work, calls_per_sample
from .truths import Truths

if TYPE_CHECKING:
    from .foreign import ProfiledTimer

#: Calls between the correctness check and the first timed call.
WARM_UP_CALLS = 4
#: Time limit of the warm-up, for large problems.
WARM_UP_SECONDS = 0.3
#: Target length of a turn; sets the number of samples within SAMPLES.
TURN_SECONDS = 0.15
SAMPLES = (2, 10)
#: Below this share of free GPU memory every worker gives back the memory that only its own turns need. A worker never
#: keeps more than MUCH of the total, so that eight of them leave three quarters to the one being timed.
SCARCE, MUCH = 0.25, 1 / 32
#: On a GPU, larger inputs are regenerated for the next pass, which takes milliseconds, instead of kept.
KEPT_BYTES = 2**30
#: Peak memory of a check over the bytes of the problem's tensors, including what other workers have prepared.
CHECK_TAKES = 12
#: Signs of an out-of-memory error: torch's own, and those of libraries.
NO_MEMORY = (
    "OutOfMemoryError",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "RESOURCE_EXHAUSTED",
)
#: Larger errors are recorded as this.
LARGEST_ERROR = 1e30
#: Profiled calls for the kernel time, and replays of a CUDA graph.
KERNEL_SAMPLES, REPLAYS = 5, 15
#: A longer sample makes up a turn of its own.
LONG_SAMPLE_SECONDS = 1.0

Reply = dict[str, Any]


@dataclass
class Prepared:
    """A problem that passed the check, ready for warm-up and timed rounds."""

    work: Work
    calls: int
    timer: Timer


class Server:
    """Serves requests for one provider on one device."""

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
        self.spent = spent.Parts()  # of the current preparation
        self.shared = False  # whether the memory of a turn was given back after the last one
        self.unseen = 0  # bytes of problems since the last full garbage collection
        self.flush_bytes = flush_bytes
        self.timer: Timer = (
            CudaTimer(self.device, flush_bytes, machine.clock_reader(self.device))
            if self.device.type == "cuda"
            else CpuTimer(flush_bytes, flush_file)
        )

    def answer(self, request: dict[str, Any]) -> Reply:
        """Execute the request, then keep only what the next one needs."""
        reply = self.attempt(request)
        # Only here are the error's frames, and the tensors they reference, gone.
        if reply["status"] == "failed":
            if not reply["leaving"]:
                self.unseen = KEPT_BYTES
                self.forget()
        elif request["do"] in ("load", "prepare"):
            self.spare()
        return reply

    def attempt(self, request: dict[str, Any]) -> Reply:
        """Execute the request; any error of the provider becomes a status and a reason."""
        try:
            if request["do"] == "load":
                self.spent = spent.Parts()
                return {"ok": True, "status": "ok"} | self.neighbours(self.load(Task(**request["task"])))
            if request["do"] == "prepare":
                self.spent = spent.Parts()
                return self.prepare(Task(**request["task"]))
            if request["do"] == "first call":
                self.spent = spent.Parts()
                return self.first_call(self.load(Task(**request["task"])))[1]
            if request["do"] == "warm":
                return self.warm()
            if request["do"] == "round":
                return self.round(request["samples"], request.get("calls"))
            if request["do"] == "profiler":
                _ = self.profiled  # starts it
                return {"ok": True, "status": "ok"}
            if request["do"] == "kernels":
                return self.kernels()
            if request["do"] == "graph":
                return self.graph()
            raise ValueError(f"unknown request {request['do']!r}")
        except (plugin.Missing, plugin.Unsupported) as error:
            return {"ok": False, "status": "missing", "reason": str(error)}
        except Exception as error:  # providers raise anything; the row reports it
            crowded = any(sign in f"{type(error).__name__}: {text(error)}" for sign in NO_MEMORY)
            if not crowded:
                log_error()
            said = f"out of memory: {message(error)}" if crowded else reason(error)
            # After a device error every later call in this process fails too; so does it inside a transform of
            # torch.func that was not ended, as Thunder leaves one if it fails within.
            broken = isinstance(error, getattr(torch, "AcceleratorError", ())) and not crowded
            leaving = broken or torch._C._functorch.peek_interpreter_stack() is not None
        return {"ok": False, "status": "failed", "reason": said, "crowded": crowded, "leaving": leaving}

    @cached_property
    def profiled(self) -> ProfiledTimer:
        """Timer for work on streams unknown to torch, and for kernel times. It takes seconds to start."""
        from . import foreign

        foreign.begin()
        return foreign.ProfiledTimer(self.device, self.flush_bytes, machine.clock_reader(self.device))

    def forget(self) -> None:
        """Free the problem before the next one is made. A full collection over torch and a compiler takes a quarter of
        a second, so it runs only if the problem is still referenced or garbage may have accumulated."""
        last = [weakref.ref(it) for it in (self.problem, self.prepared) if it is not None]
        self.problem = self.prepared = None
        gc.collect()
        if self.unseen >= KEPT_BYTES or any(it() is not None for it in last):
            self.unseen = 0
            gc.unfreeze()
            gc.collect()
        self.give_back()

    def spare(self) -> None:
        """Release what no turn needs: the workers of a study share the GPU's memory and all stay alive."""
        if self.device.type == "cuda" and self.problem is not None and self.problem.held() > KEPT_BYTES:
            self.problem.release()
            self.problem = None
            gc.collect()
        self.give_back()
        if self.prepared is not None:
            gc.freeze()  # the collection before each turn then skips everything that exists now

    def give_back(self) -> None:
        """Return the allocator's cached memory to the other providers. Untimed calls allocate it again."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def neighbours(self, problem: Problem) -> Reply:
        """How many workers may prepare the problem concurrently without exhausting the device memory they share."""
        if self.device.type != "cuda":
            return {}
        total = torch.cuda.mem_get_info(self.device)[1]
        return {"at_once": max(1, total // (CHECK_TAKES * max(1, problem.held())))}

    def load(self, task: Task) -> Problem:
        """The task's problem; keeps the last one's tensors if only the pass differs."""
        used = self.prepared is not None or self.problem is not None
        self.prepared = None
        with self.spent.part("inputs"):
            last, self.problem = self.problem, None  # None in case the problem has no such pass
            if last is not None and (last.task.key[:3], last.task.seed) == (task.key[:3], task.seed):
                last.take(task)
                self.problem = last
                return last
            if used:  # pointless in a new process, and a full collection is slow
                del last
                self.forget()
            self.problem = targets.problem_for(task)
            self.synchronize()
            return self.problem

    def prepare(self, task: Task) -> Reply:
        """First call, correctness check, memory. Warm-up and rounds may follow if the reply's status is ok."""
        problem = self.load(task)
        start = time.perf_counter()
        run, reply = self.first_call(problem)
        calls = 1 if problem.one_by_one else calls_per_sample(problem.bytes_min(), task.device)
        reply |= {"versions": plugin.versions(self.provider), "shape": problem.shape(), "calls_per_sample": calls}
        reply |= {"bytes_min": problem.bytes_min(), "flops_min": problem.flops_min(), "in_place": run.in_place}
        if unknown := problem.flops_unknown():
            reply["flops_unknown"] = unknown
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
            self.give_back()  # else the copies would land in blocks of the check and keep their rest reserved
            work = make_work(problem, run, calls)
            reply |= self.measure_memory(problem, run, work) | problem.memory(run.form)
        timer = self.profiled if run.foreign and self.device.type == "cuda" else self.timer
        self.prepared = Prepared(work, calls, timer)
        self.unseen += calls * problem.held()
        return reply | {"prepare_s": time.perf_counter() - start}

    def first_call(self, problem: Problem) -> tuple[plugin.Run, Reply]:
        """Build the provider and call it once. The call's copies of the tensors are gone afterwards, which limits the
        check's peak."""
        start = time.perf_counter()
        problem.begin_anew()  # an exporter captures the function's state as it is now
        with self.spent.part("compiling"):
            run = self.provider.build(problem)
            if problem.task.pass_ != "fwd" and run.checked and not run.backward:
                raise plugin.Unsupported("has no backward")
            work = make_work(problem, run, 1)
            work.step(work.begin(0))
            self.synchronize()
        return run, {"ok": True, "status": "ok", "first_call_s": time.perf_counter() - start}

    def warm(self) -> Reply:
        """Warm up and estimate: untimed calls, the time of one, and from it the number of samples per turn. Called
        while no other worker runs."""
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

    def round(self, samples: int, calls: int | None = None) -> Reply:
        """A turn of samples of `calls` each, at most and by default as many as were prepared."""
        prepared = self._ready()
        if self.shared:
            prepared.timer.once(prepared.work)  # allocate again before anything is timed
        gc.collect()
        gc.freeze()  # for the collection in each later turn: a profiler and JAX leave enough for a tenth of a second
        turn: Turn = prepared.timer.turn(prepared.work, samples, calls or prepared.calls)
        self.share_memory()
        return {"ok": True, "status": "ok"} | turn.to_json()

    def kernels(self) -> Reply:
        """Kernel time of a call; null with a reason if the profiler cannot tell."""
        prepared = self._ready()
        try:
            if self.shared:
                prepared.timer.once(prepared.work)
            found: Reply = {"kernel_us": round(self.profiled.kernel_us(prepared.work, KERNEL_SAMPLES), 3)}
        except Exception as error:  # the timings stay valid
            log_error()
            found = {"kernel_us": None, "kernel_us_reason": reason(error)}
        self.share_memory()
        return {"ok": True, "status": "ok"} | found

    def graph(self) -> Reply:
        """Device time of a call replayed in a CUDA graph; null with a reason if it cannot be captured, after which this
        process should not be used any more."""
        prepared = self._ready()
        if not isinstance(prepared.timer, CudaTimer):
            return {"ok": True, "status": "ok", "graph_us": None, "graph_us_reason": "it has streams of its own"}
        found: Reply = {"leaving": False}
        try:
            found["graph_us"] = round(prepared.timer.graph_us(prepared.work, REPLAYS, prepared.calls), 3)
        except Uncaptured as error:
            found |= {"graph_us": None, "graph_us_reason": str(error)}
        except Exception as error:  # the timings stay valid
            log_error()
            found = {"graph_us": None, "graph_us_reason": reason(error), "leaving": True}
        self.share_memory()
        return {"ok": True, "status": "ok"} | found

    def share_memory(self) -> None:
        """Return the allocator's cached memory for the others' turns if it is large or free memory is scarce."""
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
    """The pass to time, rotating over `copies` sets of the problem's tensors so that each call finds its inputs
    cold."""
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

    given = problem.upstream  # the problem drops its own reference

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


def serve(requests: Iterable[str], send: Callable[[Reply], None], start: dict[str, Any]) -> None:
    """Load the provider named in `start`, then answer requests until they end."""
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
        log_error()
        send({"id": 0, "ok": False, "status": "failed", "reason": reason(error)})
        return
    send({"id": 0, "ok": True, "versions": versions, "pid": os.getpid()})
    for line in requests:
        request = json.loads(line)
        reply = {"id": request["id"]} | server.answer(request)
        prepares = request["do"] in ("load", "prepare", "first call")
        send(reply | {"spent": server.spent.seconds} if prepares else reply)


def main(serve: Callable[[Iterable[str], Callable[[Reply], None], dict[str, Any]], None] = serve) -> None:
    """Talk over the process's original stdin and stdout; `serve` answers."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # Workers end by SIGKILL, which loses whatever a block buffer holds; line buffering gets it into the log.
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in requests:
            lines.put(line)
        os._exit(0)  # the coordinator is gone: exit even if the provider is busy

    def send(reply: Reply) -> None:
        replies.write(json.dumps(reply, allow_nan=False) + "\n")
        replies.flush()

    threading.Thread(target=listen, daemon=True).start()
    start = json.loads(lines.get())
    serve(iter(lines.get, ""), send, start)


if __name__ == "__main__":
    main()
