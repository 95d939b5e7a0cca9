"""Compare the times that a study, CUPTI and Nsight Compute report for a kernel that times itself:

    python benchmarks/kernel_time.py

The kernel's blocks, four per SM, spin until the GPU's global timer has advanced by a given number of microseconds, and store
their start and end times. Its duration is the last end minus the first start. Needs an NVIDIA GPU, Triton and ncu. No clock
control. Medians, in microseconds.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

import torch
import triton
import triton.language as tl
from counters import parsed, printed, typical, watch
from triton.language.extra.cuda import globaltimer

from fusewise.lab import machine
from fusewise.lab.render import markdown, number
from fusewise.lab.timing import CudaTimer, Work, fill_cache

MICROSECONDS = (0, 2, 5, 10, 20, 50, 100)
SAMPLES = 15


@triton.jit
def turning(begun, ended, nanoseconds):
    block = tl.program_id(0)
    start = globaltimer()
    now = start
    while now - start < nanoseconds:
        now = globaltimer()
    tl.store(begun + block, start)
    tl.store(ended + block, now)


class Turning:
    """The spinning kernel and the duration of its last call."""

    def __init__(self, us: int, device: str) -> None:
        blocks = 4 * torch.cuda.get_device_properties(device).multi_processor_count
        self.nanoseconds = 1000 * us
        self.begun, self.ended = torch.zeros(2, blocks, dtype=torch.int64, device=device)

    def __call__(self, state: object = None) -> None:
        turning[(len(self.begun),)](self.begun, self.ended, self.nanoseconds, num_warps=1)

    @property
    def took(self) -> float:
        torch.cuda.synchronize()
        return float(self.ended.max() - self.begun.min()) / 1e3

    @property
    def work(self) -> Work:
        return Work(lambda i: None, self)


def by_cupti(kernel: Turning, flush: torch.Tensor) -> float:
    """Median duration in the profiler, each call after a flush."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(SAMPLES):
            fill_cache(flush)
            kernel()
            torch.cuda.synchronize()
    return median(event.device_time for event in seen.events() if event.name.startswith("turning"))


def by_ncu(us: int, device: str) -> float:
    text = printed([sys.executable, __file__, "--call", str(us), device])
    return typical(parsed(text))[0].us


def main(device: str) -> None:
    flush_bytes = 2 * machine.cache_bytes(device)
    flush = torch.zeros(flush_bytes // 4, device=device)
    timer = CudaTimer(torch.device(device), flush_bytes, lambda: None)
    rows = []
    for us in MICROSECONDS:
        kernel = Turning(us, device)
        kernel()  # compile
        known = []
        for _ in range(SAMPLES):
            fill_cache(flush)
            kernel()
            known.append(kernel.took)
        by_events = [median(timer.turn(kernel.work, SAMPLES, calls).device_us) for calls in (1, 4, 16)]
        cells = [median(known), *by_events, by_cupti(kernel, flush), by_ncu(us, device)]
        rows.append([number(cell) for cell in cells])
    print(markdown.table(["by itself", "in a study", "4 calls a sample", "16", "CUPTI", "ncu"], rows))
    print(f"Two events with nothing between them: {number(timer.pair_us)}, which the study's times are without.")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--call"]:
        watch(Turning(int(sys.argv[2]), sys.argv[3]).work, 2 * machine.cache_bytes(sys.argv[3]), sys.argv[3])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--device", default="cuda:0")
        main(parser.parse_args().device)
