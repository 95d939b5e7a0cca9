"""A kernel that measures its own time, against a study's timer."""

import importlib
from pathlib import Path
from statistics import median

import pytest
import torch

from fusewise.lab.timing import CudaTimer


@pytest.mark.gpu
@pytest.mark.parametrize("calls", [1, 4])
def test_a_study_adds_a_constant_to_what_a_kernel_takes(calls, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    kernel_time = importlib.import_module("kernel_time")
    timer = CudaTimer(torch.device("cuda:0"), 2**20, lambda: None)
    added = []
    for us in (20, 100):
        kernel = kernel_time.Turning(us, "cuda:0")
        kernel()  # compile it
        turn = timer.turn(kernel.work, samples=9, calls=calls)
        assert turn.held
        assert us <= kernel.took < us + 1
        added.append(median(turn.device_us) - us)
    assert all(0 < it < 5 for it in added)
    assert abs(added[0] - added[1]) < 1
