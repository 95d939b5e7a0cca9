"""What a call of `rope` and `rope_` costs the host, beside bare floors measured in the same run.

    python benchmarks/host_cost.py [--device cpu|cuda] [--rounds 15] [--json]

The floors are functions behind pybind11 that take q, k, cos and sin and start one kernel that does nothing: in place; with
two outputs allocated; with autograd around that, as a Python `autograd.Function` and as a C++ one. On a CPU nothing is
started, and q and k are a token of one head, so that the kernel's own time is next to nothing.

A time is the median over rounds of the host's seconds for a loop of calls that nobody waits for, by the number of calls;
the rows take turns in every round. The last column is the ratio to the fastest floor of the
same group. `both` is forward and backward.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fusewise
from fusewise._shared import build
from fusewise.ops.rope import _host, _op

HERE = Path(__file__).parent
CALLS = 300  # of a loop: fewer than a stream takes before it makes the host wait


@dataclass(frozen=True)
class Call:
    """A row to measure: in the group, what is compared with what."""

    group: str
    name: str
    run: Callable[[], Any]
    quick: bool = True  # False: with the quick way of a repeated call taken out, every call through Python


def floors(device: str) -> Any:
    """The extension with the floors, built if need be."""
    path = build.prepared("host-floors", [HERE / "host_floors.cpp"], build.cxx(), _host.flags())
    spec = importlib.util.spec_from_file_location("host_floors", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if device == "cuda":
        from fusewise.ops.rope import _cuda

        source = [HERE / "host_floors.cu"]
        library = build.library("host-launch", source, build.nvcc(), _cuda.flags(_cuda.present()))
        module.set_launch(ctypes.cast(library.launch, ctypes.c_void_p).value)
    return module


def calls(device: str) -> list[Call]:
    module = floors(device)
    tokens, heads, kv_heads, width = (64, 32, 8, 128) if device == "cuda" else (1, 1, 1, 16)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q = torch.randn(tokens, 1, heads, width, dtype=dtype, device=device)
    k = torch.randn(tokens, 1, kv_heads, width, dtype=dtype, device=device)
    cos, sin = (torch.ones(4096, width // 2, device=device) for _ in range(2))
    q_grad, k_grad = q.clone().requires_grad_(), k.clone().requires_grad_()
    dys = torch.randn_like(q), torch.randn_like(k)

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            ctx.save_for_backward(cos, sin)
            return module.out_of_place(q, k, cos, sin)

        @staticmethod
        def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
            return *module.out_of_place(dq, dk, *ctx.saved_tensors), None, None

    def backward(call: Call) -> Call:
        run = call.run
        return replace(call, group="both", run=lambda: torch.autograd.grad(run(), (q_grad, k_grad), dys))

    found = [
        Call("in place", "floor: pybind, one launch", lambda: module.in_place(q, k, cos, sin)),
        Call("out of place", "floor: pybind, two outputs, one launch", lambda: module.out_of_place(q, k, cos, sin)),
        Call("recorded", "floor: C++ autograd function", lambda: module.recorded(q_grad, k_grad, cos, sin)),
        Call("recorded", "floor: Python autograd function", lambda: Bare.apply(q_grad, k_grad, cos, sin)),
    ]
    for impl in ("cuda", "triton") if device == "cuda" else ("cpu",):
        if (reason := _op.unavailable(impl, device, dtype)) is not None:
            print(f"no row of {impl}: {reason}")
            continue
        given: dict[str, Any] = {"cos": cos, "sin": sin, "impl": impl}
        for quick in (True,) if impl == "triton" else (True, False):
            name = f"fusewise-{impl}" + ("" if quick else ", through Python")
            found += [
                Call("in place", name, lambda given=given: fusewise.rope_(q, k, **given), quick),
                Call("out of place", name, lambda given=given: fusewise.rope(q, k, **given), quick),
                Call("recorded", name, lambda given=given: fusewise.rope(q_grad, k_grad, **given), quick),
            ]
    return found + [backward(call) for call in found if call.group == "recorded"]


def loop(call: Call, device: str) -> float:
    """Seconds of the host for a call."""
    run = call.run
    with contextlib.ExitStack() as patches:
        if not call.quick:
            for name in ("rope", "rope_", "remember"):
                patches.enter_context(mock.patch.object(_host, name, _host._not_loaded))
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        return (time.perf_counter() - start) / CALLS


def measure(device: str, rounds: int) -> list[dict[str, Any]]:
    """A row for every call: its group and name, microseconds with their interquartile range, and the ratio to the floor."""
    found = calls(device)
    times: list[list[float]] = [[] for _ in found]
    order = list(range(len(found)))
    for _ in range(rounds):
        random.shuffle(order)
        for i in order:
            times[i].append(1e6 * loop(found[i], device))
    medians = [statistics.median(samples) for samples in times]
    rows = []
    for call, samples, median in zip(found, times, medians, strict=True):
        floor = min(
            other
            for candidate, other in zip(found, medians, strict=True)
            if candidate.group == call.group and candidate.name.startswith("floor")
        )
        low, _, high = statistics.quantiles(samples, n=4)
        rows.append(
            {"group": call.group, "name": call.name, "us": median, "us_iqr": high - low, "ratio": median / floor}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    _host.extension()  # on a CPU it is taken only where it is built
    torch.set_num_threads(1)
    rows = measure(options.device, options.rounds)
    if options.json:
        print(json.dumps(rows))
        return
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{device}, torch {torch.__version__}, medians of {options.rounds} rounds of {CALLS} calls\n")
    print("| group | call | µs | IQR | of the floor |\n|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: row["group"]):
        print(f"| {row['group']} | {row['name']} | {row['us']:.2f} | {row['us_iqr']:.2f} | {row['ratio']:.2f} |")


if __name__ == "__main__":
    main()
