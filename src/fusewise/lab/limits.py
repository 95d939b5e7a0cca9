"""Measures this machine's limits (copy, triad, matrix products, launch latency) on random data, and stores them per
user.

A study measures its own floors within every group. Stored limits fill in for kinds of floor that a group lacks, and
draw the roofs of the roofline plot. The file is plain JSON and valid for one device, driver and torch build.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fusewise._shared import cache
from fusewise.ops.gated_linear import _onednn

from . import machine
from .nursery import imports
from .problem import DTYPES, PRECISIONS, reset_precision, set_precision
from .record import Json
from .schema import fault
from .timing import CpuTimer, CudaTimer, Timer, Wait, Work

#: Bytes of each vector of copy and triad: many times any cache.
VECTOR_BYTES = {"cuda": 2**30, "cpu": 2**28}
#: Rows and columns of the matrix product: enough to fill the device.
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
SAMPLES = 10
#: Seconds. A dtype whose product takes longer is sampled once.
SLOW = 0.5


def measure(device: str) -> Json:
    """Measure the limits of `device`: GB/s, TFLOP/s by dtype, microseconds. Takes at most a minute."""
    where = torch.device(device)
    kind = where.type
    read_clocks = machine.clock_reader(where)
    flush = 2 * machine.cache_bytes(device)
    timer: Timer = CudaTimer(where, flush, read_clocks) if kind == "cuda" else CpuTimer(flush)
    generator = torch.Generator(where).manual_seed(0)
    wait = Wait()
    copy, triad = _vectors(timer, where, generator)
    clocks = read_clocks()  # read while the device is still under load
    if kind == "cpu" and (threads := wait.threads()) is not None:
        clocks = {"waiting_threads": threads}
    return {
        "device": machine.device_name(device),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "copy_gb_s": copy,
        "triad_gb_s": triad,
        "launch_us": _launch(timer, where),
        "matmul_tflop_s": {n: _matmul(timer, where, n, generator) for n in (PRECISIONS if kind == "cuda" else DTYPES)},
        "clocks": clocks,
        "versions": machine.versions(("torch", "triton")),
    }


def _microseconds(timer: Timer, call: Callable[[], Any], calls: int = 1) -> float:
    """Median microseconds per call after a warm-up, with a cold cache."""
    work = Work(lambda i: None, lambda _: call())
    slow = min(timer.once(work) for _ in range(3)) > SLOW
    return median(timer.turn(work, 1 if slow else SAMPLES, calls).device_us)


def _vectors(timer: Timer, device: torch.device, generator: torch.Generator) -> tuple[float, float]:
    """Memory bandwidth in GB/s (reads plus writes) of `c = a` and of `c = a + s · b`."""
    words = VECTOR_BYTES[device.type] // 4
    a, b = (torch.randn(words, generator=generator, device=device) for _ in range(2))
    c = torch.zeros_like(a)
    copy = _microseconds(timer, lambda: c.copy_(a))
    triad = _microseconds(timer, lambda: torch.add(a, b, alpha=0.5, out=c))
    return 2 * 4 * words / copy / 1e3, 3 * 4 * words / triad / 1e3


def _matmul(timer: Timer, device: torch.device, dtype: str, generator: torch.Generator) -> float:
    """TFLOP/s of a square product; on a CPU of the faster of torch's two libraries. Inputs are normally distributed,
    because products of zeros draw less power and run faster."""
    n = MATMUL_SIZE[device.type]
    a, b = (torch.randn(n, n, generator=generator, device=device).to(PRECISIONS[dtype]) for _ in range(2))
    out = torch.empty_like(a)
    by_onednn = _onednn.takes(a, b)
    set_precision(dtype)
    took = _microseconds(timer, lambda: _onednn.linear(a, b) if by_onednn else torch.mm(a, b, out=out))
    reset_precision()
    return 2 * n**3 / took / 1e6


def _launch(timer: Timer, device: torch.device) -> float:
    """Launch latency in microseconds, measured as by the provider `floor-launch`."""
    x = torch.zeros(1, device=device)
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from .providers._launch import bare_launch

        return _microseconds(timer, lambda: bare_launch(x), 16)
    return _microseconds(timer, x.zero_, 16)


def path(device: str) -> Path:
    """The file with the limits of `device`, keyed by its name, the driver, the cores in use and the torch build.

    Raises:
        cache.Refused: there is no cache folder.
    """
    environment = machine.environment(device)
    identity = [environment[name] for name in ("device_name", "cpu", "cores", "torch_threads", "cuda")]
    identity += [environment.get("driver"), environment["versions"]["torch"]]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return cache.folder("limits") / f"{digest}.json"


def keep(found: Json, device: str) -> Path:
    """Write the limits where `kept` finds them, readable only by the user.

    Raises:
        cache.Refused: the file cannot be written, or not safely.
    """
    file = path(device)
    cache.change(file, lambda _: found)
    return file


def measure_apart(device: str, log: Path, timeout: float) -> Json | None:
    """Measure and keep the limits in another process, as `fusewise limits` does: the caller never holds the device.
    None if they could not be measured or kept, with the reason at the end of `log`."""
    with log.open("ab") as sink:
        command = [sys.executable, "-m", "fusewise", "limits", "--device", device]
        env = {**os.environ, **imports()}
        try:
            done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, timeout=timeout)
        except (OSError, subprocess.TimeoutExpired) as error:
            sink.write(f"{error}\n".encode())
            return None
    return None if done.returncode else kept(device)


def kept(device: str) -> Json | None:
    """The limits measured earlier on this device. None if there are none, or if the file could have been written by
    others or lacks what `measure` returns."""
    try:
        found = cache.read(path(device))
    except cache.Refused:
        return None
    return found if _complete(found) else None


def _complete(found: Any) -> bool:
    """Whether a record may hold it, and it has every rate, as what `measure` returns has."""
    if fault(found, "limits"):
        return False
    return None not in (found["copy_gb_s"], found["triad_gb_s"], found["launch_us"], *found["matmul_tflop_s"].values())
