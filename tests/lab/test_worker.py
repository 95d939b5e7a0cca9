"""What a worker keeps between the turns that it is asked for."""

import weakref

import pytest
import torch

from fusewise.lab.providers.pytorch import Eager
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
    server.forget()
    for request in ({"do": "warm"}, {"do": "round", "samples": 1}):
        assert "without a prepared problem" in server.answer(request)["reason"]


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
    """Also what only the frames of the error still hold."""
    server, seen = Server(Eager(), "cpu", 0), []

    def build(self, problem):
        held = torch.empty(4)
        seen.append(weakref.ref(held))
        raise type(error)(str(error))  # one of its own: the given one would keep the frames

    def forget():
        seen.append(seen[0]() is None)
        Server.forget(server)

    monkeypatch.setattr(Eager, "build", build)
    monkeypatch.setattr(server, "forget", forget)
    reply = server.answer({"do": "prepare", "task": TASK | {"device": "cpu"}})
    assert (reply["status"], reply["crowded"]) == ("failed", crowded)
    assert reply["reason"].startswith("out of memory: ") == crowded
    assert seen[1:] == [True] and server.problem is None


@pytest.mark.parametrize(("free", "gives"), [(24, True), (25, False)])
def test_memory_is_given_back_where_little_is_left(free, gives, monkeypatch):
    server, given = prepared("cpu"), []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(True))
    server.share_memory()
    assert not given and not server.shared  # of a CPU nothing is asked
    server.device = torch.device("cuda")
    server.share_memory()
    assert bool(given) == server.shared == gives


@pytest.mark.gpu
def test_a_turn_on_the_gpu_leaves_nothing_where_little_is_left(monkeypatch):
    server = prepared("cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 100))
    assert server.answer({"do": "warm"})["ok"]
    for _ in range(2):
        turn = server.answer({"do": "round", "samples": 3})
        assert len(turn["device_us"]) == 3 and min(turn["device_us"]) > 0
        assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 2**22  # parts of blocks that are in use
