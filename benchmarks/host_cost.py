"""Host (CPU) overhead per call of `rope` and `rope_`, compared with minimal floors in the same run.

    python benchmarks/host_cost.py [--device cpu|cuda] [--rounds 15] [--json]

The floors are pybind11 functions that take q, k, cos and sin and launch one empty kernel: in place; with two allocated
outputs; with autograd around that, as a Python and as a C++ `autograd.Function`; as torch operators. For compiled functions
the floor is the RoPE formula fused by Inductor: alone, and between two other operations, where its one kernel competes
with three. On a CPU nothing is launched, and q and k are one token of one head, so the kernel time is negligible.

A time is the host time of a loop of asynchronous calls divided by the number of calls, median over rounds; rows are run in
random order in every round. The last column is the ratio to the fastest floor of the group. `both` is forward and backward.

On a GPU, `graph` is the replay of a CUDA graph with the in-place RoPE calls of a 32-layer decode step, timed by CUDA events,
compared with the sum of its kernel times in a profile.
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

import torch
from torch import Tensor

import fusewise
from fusewise._shared import build, host
from fusewise.ops.qk_norm_rope import _op as qk_norm_rope
from fusewise.ops.rope import _host, _op
from fusewise.ops.rope_and_cache import _op as rope_and_cache

HERE = Path(__file__).parent
CALLS = 300  # per loop: below the number of queued launches at which a stream blocks the host
LAYERS = 32  # of the decode step in the CUDA graph


@dataclass(frozen=True)
class Call:
    """A row to measure; rows of one group are compared."""

    group: str
    name: str
    run: Callable[[], Any]
    quick: bool = True  # False: disable the fast path of repeated calls, so that every call goes through Python


def floors(device: str) -> Any:
    """Load the extension with the floors; build it if needed."""
    path = build.prepared("host-floors", [HERE / "host_floors.cpp"], build.cxx(), host.flags())
    spec = importlib.util.spec_from_file_location("host_floors", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if device == "cuda":
        from fusewise._shared import cuda

        source = [HERE / "host_floors.cu"]
        library = build.library("host-launch", source, build.nvcc(), cuda.flags(cuda.present()))
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
    found += [backward(call) for call in found if call.group == "recorded"]
    if device == "cuda":
        found += cached(q, k, cos, sin) + normed(q, k, cos, sin)
    native = "cuda" if device == "cuda" else "cpu"
    if _op.unavailable(native, device, dtype) is None:
        found += operators(native, q, k, cos, sin) + compiled(native, q, k, cos, sin)
    return found


def cached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Call]:
    """`rope_and_cache_` of the same q and k, one paged-cache slot per token; its floor is that of `rope_`."""
    q, k, v = q[:, 0], k[:, 0], torch.randn_like(k[:, 0])
    key_cache, value_cache = k.new_zeros(2, 64, 16, *k.shape[1:])
    given: dict[str, Any] = {"slot_mapping": torch.arange(len(q), device=q.device), "cos": cos, "sin": sin}
    return [
        Call(
            "in place",
            f"fusewise-{impl}, rope_and_cache_" + ("" if quick else ", through Python"),
            lambda impl=impl: fusewise.rope_and_cache_(
                q, k, v, key_cache=key_cache, value_cache=value_cache, **given, impl=impl
            ),
            quick,
        )
        for impl, quick in (("cuda", True), ("cuda", False), ("triton", True))
        if rope_and_cache.choice.unavailable(impl, "cuda", q.dtype) is None
    ]


def normed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Call]:
    """`qk_norm_rope` of the same q and k; its floor is that of `rope`."""
    weight = torch.ones_like(q[0, 0, 0])
    rest = (cos, sin, None, None, None, 0, "", 1e-6, 0.0, "head", "cuda")
    operator = torch.ops.fusewise.qk_norm_rope.default
    return [
        Call("operator out of place", "fusewise-cuda, qk_norm_rope", lambda: operator([q, k], [weight, weight], *rest))
    ] + [
        Call(
            "out of place",
            f"fusewise-{impl}, qk_norm_rope" + ("" if quick else ", through Python"),
            lambda impl=impl: fusewise.qk_norm_rope(q, k, weight, weight, cos, sin, impl=impl),
            quick,
        )
        for impl, quick in (("cuda", True), ("cuda", False), ("triton", True))
        if qk_norm_rope.choice.unavailable(impl, "cuda", q.dtype) is None
    ]


def operators(impl: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Call]:
    """The torch operators called directly, without `fusewise.rope`."""
    ours, floor = torch.ops.fusewise, torch.ops.host_floors
    rest = (cos, sin, None, None, None, 0, "", impl)
    found = [
        Call("operator in place", "floor: an operator", lambda: floor.in_place.default(q, k, cos, sin)),
        Call("operator out of place", "floor: an operator", lambda: floor.out_of_place.default(q, k, cos, sin)),
    ]
    for quick in (True, False):
        name = f"fusewise-{impl}" + ("" if quick else ", through Python")
        found += [
            Call("operator in place", name, lambda: ours.rope_qk_.default(q, k, *rest), quick),
            Call("operator out of place", name, lambda: ours.rope_qk.default(q, k, *rest, [], []), quick),
        ]
    return found


def compiled(impl: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Call]:
    """Functions compiled by torch.compile, without gradients."""

    def formula(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        c, s = cos[: x.shape[1], None], sin[: x.shape[1], None]
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)

    def by_inductor(q: Tensor, k: Tensor) -> Any:
        return formula(q), formula(k)

    def ours(q: Tensor, k: Tensor) -> Any:
        return fusewise.rope(q, k, cos=cos, sin=sin, impl=impl)

    def between(rotate: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
        def function(q: Tensor, k: Tensor) -> Any:
            y, z = rotate(q * 2, k * 2)
            return y + 1, z + 1

        return function

    found = []
    for name, rotate in (("floor: fused by Inductor", by_inductor), (f"fusewise-{impl}", ours)):
        for group, function in (("compiled", rotate), ("compiled, between two operations", between(rotate))):
            f = torch.compile(function, fullgraph=True)
            found.append(Call(group, name, torch.no_grad()(lambda f=f: f(q, k))))
    return found


def graph(impl: str, rounds: int) -> list[dict[str, Any]]:
    """Rows for the CUDA graph replay of a decode step: 64 tokens, 32/8 heads of 128, one table."""
    shape = {"dtype": torch.bfloat16, "device": "cuda"}
    layers = [(torch.randn(64, 1, 32, 128, **shape), torch.randn(64, 1, 8, 128, **shape)) for _ in range(LAYERS)]
    cos, sin = (torch.ones(4096, 64, device="cuda") for _ in range(2))
    offset = torch.zeros(64, dtype=torch.int32, device="cuda")

    def step() -> None:
        for q, k in layers:
            fusewise.rope_(q, k, cos=cos, sin=sin, offset=offset, impl=impl)

    step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    captured.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        captured.replay()
        torch.cuda.synchronize()
    kernels = [e.time_range.elapsed_us() for e in profile.events() if "rope" in e.name]
    assert len(kernels) == LAYERS, f"{len(kernels)} kernels in a profile of {LAYERS} calls"
    samples = []
    for _ in range(10 * rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        captured.replay()
        end.record()
        end.synchronize()
        samples.append(1e3 * start.elapsed_time(end))
    low, median, high = statistics.quantiles(samples, n=4)
    whole = sum(kernels)
    return [
        {"group": "graph", "name": f"floor: kernels of fusewise-{impl}", "us": whole, "us_iqr": 0.0, "ratio": 1.0},
        {"group": "graph", "name": f"fusewise-{impl}", "us": median, "us_iqr": high - low, "ratio": median / whole},
    ]


def loop(call: Call, device: str) -> float:
    """Host seconds per call."""
    run = call.run
    with contextlib.nullcontext() if call.quick else _host.through_python():
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        return (time.perf_counter() - start) / CALLS


def measure(device: str, rounds: int) -> list[dict[str, Any]]:
    """One row per call: group, name, microseconds with interquartile range, and ratio to the floor."""
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
    if options.rounds < 2:
        parser.error("argument --rounds: must be at least 2, for quartiles")
    _host.extension()  # build it: on a CPU it is used only if already built
    torch.set_num_threads(1)
    rows = measure(options.device, options.rounds)
    if options.device == "cuda":
        served = [impl for impl in ("cuda", "triton") if _op.unavailable(impl, "cuda", torch.bfloat16) is None]
        rows += [row for impl in served for row in graph(impl, options.rounds)]
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
