"""What a worker keeps between requests."""

import errno
import gc
import io
import os
import weakref
from dataclasses import replace

import pytest
import torch

from fusewise.lab import truth, worker
from fusewise.lab.code import worker as code_worker
from fusewise.lab.plugin import Run, Unsupported
from fusewise.lab.providers.pytorch import Eager
from fusewise.lab.timing import CudaTimer, Uncaptured
from fusewise.lab.worker import Server

TASK = {"op": "gelu", "case": "gelu-256", "dtype": "fp32", "pass_": "fwd", "seed": 0}


def prepared(device):
    server = Server(Eager(), device, 0)
    assert server.answer({"do": "prepare", "task": TASK | {"device": device}})["ok"]
    return server


def test_a_turn_has_the_samples_that_are_asked_for():
    server = prepared("cpu")
    found = server.answer({"do": "warm"})
    assert found["estimate_us"] > 0 and 2 <= found["samples"] <= 10
    for samples in (1, 4):
        assert len(server.answer({"do": "round", "samples": samples})["device_us"]) == samples
    work, begun = server.prepared.work, []
    server.prepared.work = replace(work, begin=lambda i: (begun.append(i), work.begin(i))[1])
    server.answer({"do": "round", "samples": 2, "calls": 3})
    assert begun == [0, 1, 2] * 2
    server.forget()
    for request in ({"do": "warm"}, {"do": "round", "samples": 1}):
        assert "without a prepared problem" in server.answer(request)["reason"]


def test_the_kernels_of_a_call_are_told_or_why_they_are_not(monkeypatch):
    server = prepared("cpu")

    class Timer:
        def kernel_us(self, work, samples):
            assert work is server.prepared.work
            return 10.23456

    server.profiled = Timer()
    assert server.answer({"do": "kernels"}) == {"ok": True, "status": "ok", "kernel_us": 10.235}
    monkeypatch.setattr(Timer, "kernel_us", lambda *_: 1 / 0)
    told = server.answer({"do": "kernels"})
    assert (told["ok"], told["kernel_us"]) == (True, None) and "division" in told["kernel_us_reason"]
    assert server.answer({"do": "round", "samples": 1})["ok"]


def test_a_call_in_a_graph_is_timed_or_the_worker_goes():
    """Whatever a failed capture leaves behind may break later calls."""
    server = prepared("cpu")
    assert server.answer({"do": "graph"})["graph_us_reason"] == "it has streams of its own"

    class Timer(CudaTimer):
        def __init__(self):
            pass

        def graph_us(self, work, samples, calls):
            assert work is server.prepared.work and calls == server.prepared.calls
            if (time := times.pop()) is None:
                raise Uncaptured("it launches none")
            return time

    server.prepared.timer, times = Timer(), [10.23456, None]
    empty = {"ok": True, "status": "ok", "graph_us": None, "graph_us_reason": "it launches none", "leaving": False}
    assert server.answer({"do": "graph"}) == empty  # which leaves nothing behind
    assert server.answer({"do": "graph"}) == {"ok": True, "status": "ok", "graph_us": 10.235, "leaving": False}
    told = server.answer({"do": "graph"})
    assert (told["ok"], told["graph_us"], told["leaving"]) == (True, None, True) and "pop" in told["graph_us_reason"]


def test_a_first_call_alone_checks_nothing(monkeypatch):
    monkeypatch.delattr(truth, "check")
    reply = Server(Eager(), "cpu", 0).answer({"do": "first call", "task": TASK | {"device": "cpu"}})
    assert reply["ok"] and 0 < reply["first_call_s"] < 60


def test_a_worker_whose_provider_failed_within_a_transform_is_not_used_again(monkeypatch):
    """Everything after it would run inside that transform."""

    def build(self, problem):
        torch._C._functorch._grad_increment_nesting()
        raise NotImplementedError("no second derivatives")

    server = prepared("cpu")
    monkeypatch.setattr(Eager, "build", build)
    try:
        reply = server.answer({"do": "prepare", "task": TASK | {"device": "cpu"}})
    finally:
        torch._C._functorch._grad_decrement_nesting()
    assert (reply["reason"], reply["leaving"]) == ("NotImplementedError: no second derivatives", True)
    assert not server.answer({"do": "prepare", "task": TASK | {"device": "cpu", "case": "none"}})["leaving"]


def test_all_of_the_process_is_looked_through_only_where_something_may_be_left(monkeypatch):
    """If the last problem is still referenced when it is released, or if many tensors have accumulated since the last
    time.
    """
    looked = []
    monkeypatch.setattr(gc, "unfreeze", lambda unfreeze=gc.unfreeze: (unfreeze(), looked.append(1)))
    server = prepared("cpu")
    last, cycle = weakref.ref(server.problem), [server.problem]
    server.forget()
    assert last() is not None and len(looked) == 1
    del cycle
    for holds in (False, True):
        looked.clear()
        server = prepared("cpu")
        assert server.unseen > 0
        last = weakref.ref(server.problem)
        if holds:
            cycle = [server.problem]
            cycle.append(cycle)
            del cycle
            gc.freeze()
        server.forget()
        assert last() is None and len(looked) == holds
    server.unseen = worker.KEPT_BYTES
    server.forget()
    assert len(looked) == 2 and server.unseen == 0


def test_an_error_beyond_what_a_record_holds_is_the_largest_that_it_does(monkeypatch):
    server = Server(Eager(), "cpu", 0)
    monkeypatch.setattr(Eager, "build", lambda *_: Run(lambda x: torch.full_like(x, 3e38)))
    reply = server.answer({"do": "prepare", "task": TASK | {"device": "cpu"}})
    assert (reply["status"], reply["error"]) == ("wrong", 1e30)


@pytest.mark.parametrize(
    ("error", "crowded"),
    [
        (torch.OutOfMemoryError("no room for 2 GiB"), True),
        (RuntimeError("failed in the TorchScript interpreter.\n…\nRuntimeError: CUDA out of memory. Tried …"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (ValueError("no such thing"), False),
    ],
    ids=["torch's", "TorchScript's", "cuBLAS's", "another"],
)
def test_what_a_failed_provider_held_is_given_back(error, crowded, monkeypatch):
    """Including what only the frames of the exception still hold."""
    server, seen = Server(Eager(), "cpu", 0), []

    def build(self, problem):
        held = torch.empty(4)
        seen.append(weakref.ref(held))
        raise type(error)(str(error))  # a new one: the given one would keep the frames

    def forget():
        seen.append(seen[0]() is None)
        Server.forget(server)

    monkeypatch.setattr(Eager, "build", build)
    monkeypatch.setattr(server, "forget", forget)
    reply = server.answer({"do": "prepare", "task": TASK | {"device": "cpu"}})
    assert (reply["status"], reply["crowded"]) == ("failed", crowded)
    assert reply["reason"].startswith("out of memory: ") == crowded
    assert seen[1:] == [True] and server.problem is None


@pytest.mark.parametrize(("free", "idle", "gives"), [(24, 3, True), (25, 3, False), (90, 4, True)])
def test_memory_is_given_back_where_it_is_much_or_little_is_left(free, idle, gives, monkeypatch):
    server, given = prepared("cpu"), []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10 + idle)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(True))
    server.share_memory()
    assert not given and not server.shared  # the CPU has nothing to release
    server.device = torch.device("cuda")
    server.share_memory()
    assert bool(given) == server.shared == gives


@pytest.fixture
def shared(monkeypatch):
    """A server set up as on a GPU of 100 bytes, where one byte is a large problem, and a log of its actions."""
    server, did = Server(Eager(), "cpu", 0), []
    server.device = torch.device("cuda")
    monkeypatch.setattr(worker, "KEPT_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: did.append("given back"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 100))
    monkeypatch.setattr(server, "measure_memory", lambda *_: did.append("measured") or {})
    yield server, did
    gc.unfreeze()


def asked(server, do, **fields):
    return server.answer({"do": do, "task": TASK | {"device": "cpu"} | fields, "samples": 1})


def watch(monkeypatch, did):
    """Log when a problem is copied and checked, and if copies still exist; returns weak references to tensors."""
    tensors, copies = [], []
    make, copy, check = worker.targets.problem_for, worker.make_work, truth.check

    def made(task):
        problem = make(task)
        tensors.extend(map(weakref.ref, (*problem.tensors, *problem.upstream)))
        return problem

    def copied(*arguments):
        work = copy(*arguments)
        copies.append(weakref.ref(work))
        did.append("copied")
        return work

    def checked(*arguments):
        did.append("checked" if all(work() is None for work in copies) else "checked beside copies")
        return check(*arguments)

    monkeypatch.setattr(worker.targets, "problem_for", made)
    monkeypatch.setattr(worker, "make_work", copied)
    monkeypatch.setattr(truth, "check", checked)
    return tensors


def test_a_worker_holds_no_more_of_a_large_problem_than_its_turns_need(shared, monkeypatch):
    server, did = shared
    tensors = watch(monkeypatch, did)
    assert asked(server, "load")["at_once"] == 1
    assert did == ["given back"] and len(tensors) == 2 and not any(x() is not None for x in tensors)
    for pass_ in ("fwd", "bwd"):
        did.clear()
        tensors.clear()
        assert asked(server, "prepare", pass_=pass_)["ok"]
        mine = ["copied", "checked", "given back", "copied", "measured", "given back"]
        assert did == (mine if pass_ == "fwd" else ["given back", *mine])  # first that of the pass before
        of_input, of_gradient = (x() is not None for x in tensors)
        assert (of_input, of_gradient) == (False, pass_ == "bwd")  # every backward gets a copy of it
        for do in ("warm", "round", "round"):
            assert asked(server, do)["ok"]
    assert did[len(mine) + 1 :] == []  # with enough room, nothing is released between turns


def test_small_problems_stay_for_the_other_pass(shared, monkeypatch):
    server, did = shared
    monkeypatch.setattr(worker, "KEPT_BYTES", 2**30)
    tensors = watch(monkeypatch, did)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 2**30))
    assert asked(server, "load")["at_once"] >= 100
    assert asked(server, "prepare")["ok"] and asked(server, "prepare", pass_="bwd")["ok"]
    assert len(tensors) == 2 and all(x() is not None for x in tensors)


@pytest.mark.parametrize("status", ["wrong", "missing"])
def test_who_has_no_turn_holds_nothing_of_a_large_problem(status, shared, monkeypatch):
    server, did = shared

    def build(self, problem):
        if status == "missing":
            raise Unsupported("does not do this")
        return Run(lambda x: x)

    monkeypatch.setattr(Eager, "build", build)
    tensors = watch(monkeypatch, did)
    assert asked(server, "prepare")["status"] == status
    assert did[-1] == "given back" and server.problem is None and not any(x() is not None for x in tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_a_large_problem_on_the_gpu_leaves_its_copies_alone(pass_, monkeypatch):
    monkeypatch.setattr(worker, "KEPT_BYTES", 0)
    monkeypatch.setattr(truth, "MOST_BYTES", 0)
    server = Server(Eager(), "cuda:0", 0)
    before = torch.cuda.memory_reserved()
    task = TASK | {"case": "gelu-4096", "pass_": pass_, "device": "cuda:0"}
    assert server.answer({"do": "prepare", "task": task})["ok"]
    size = 4096**2 * 4
    copies = {"fwd": 1, "bwd": 2}[pass_]
    assert torch.cuda.memory_reserved() - before <= copies * size + 2**22
    assert server.answer({"do": "warm"})["ok"] and server.answer({"do": "round", "samples": 2})["ok"]


@pytest.mark.gpu
def test_a_turn_on_the_gpu_leaves_nothing_where_little_is_left(monkeypatch):
    gc.collect()
    torch.cuda.empty_cache()
    # Partly used blocks of other tests.
    parts = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    server = prepared("cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 100))
    assert server.answer({"do": "warm"})["ok"]
    for _ in range(2):
        turn = server.answer({"do": "round", "samples": 3})
        assert len(turn["device_us"]) == 3 and min(turn["device_us"]) > 0
        assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < parts + 2**22


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("server", [lambda: Server(Eager(), "cpu", 0), lambda: code_worker.Server(Eager())])
def test_a_log_on_a_full_disk_costs_no_reason(server, monkeypatch):
    monkeypatch.setattr("sys.stderr", FullDisk())
    reply = server().answer({"do": "nothing", "task": TASK | {"device": "cpu"}})
    assert (reply["status"], reply["reason"]) == ("failed", "ValueError: unknown request 'nothing'")
