"""Describes this machine: hardware, package versions, cache sizes and clocks. Read-only: it changes no setting."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import __version__

#: Fallback if the size of the last-level cache cannot be read.
UNKNOWN_CACHE_BYTES = 64 * 2**20
DISTRIBUTIONS = (
    "torch", "triton", "numpy", "transformers", "jax", "torchax", "lightning-thunder", "apache-tvm", "nvidia-ml-py",
    "matplotlib",
)  # fmt: skip

Clocks = dict[str, Any]


def environment(device: str) -> dict[str, Any]:
    """The environment section of a record."""
    found: dict[str, Any] = {
        "device": device,
        "device_name": device_name(device),
        "cpu": cpu_name(),
        "cores": cores(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": memory_bytes(),
        "cache_bytes": cache_bytes(device),
        "os": platform.platform(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "load_average": _load(),
        "versions": {"fusewise": __version__, **versions(DISTRIBUTIONS)},
    }
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "device_memory_bytes": properties.total_memory,
            "driver": _driver(),
        }
    return found


def versions(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["torch"] = torch.__version__  # includes the build, e.g. +cu130
    return found


def default_device() -> str:
    """The GPU if there is one; under torchrun that of the local rank."""
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name()


def cores() -> int:
    """Cores in this process's affinity mask."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def worker_memory_limit() -> int | None:
    """The default limit of a worker process's resident memory, in bytes: four fifths of the machine's."""
    total = memory_bytes()
    return None if total is None else total * 4 // 5


def cache_bytes(device: str) -> int:
    """Size of the cache that a cold-cache measurement must flush: L2 of a GPU, the largest cache of a CPU."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    units = {"K": 2**10, "M": 2**20}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes, default=UNKNOWN_CACHE_BYTES)


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process; None without /proc."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def waited_s() -> float | None:
    """Total seconds that the current threads of this process were runnable without a core; None if /proc does not
    tell."""
    try:
        files = [task / "schedstat" for task in Path("/proc/self/task").iterdir()]
    except OSError:
        return None
    waited = []
    for file in files:
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread may exit meanwhile
            waited.append(int(file.read_text().split()[1]))
    return sum(waited) / 1e9 if waited else None


def _load() -> float | None:
    """One-minute load average, read before the study begins."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _driver() -> str | None:
    nvml = _nvml()
    return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())


def _nvml() -> Any | None:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, or no driver: no clocks to report
        return None
    return nvml


def clock_reader(device: torch.device) -> Callable[[], Clocks | None]:
    """A function that reads clocks, power, temperature and throttle reasons of `device`; it returns None without
    NVML."""
    nvml = _nvml() if device.type == "cuda" else None
    if nvml is None:
        return lambda: None
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception as error:  # NVML's exceptions have no base class that exists without it
        print(f"no clocks: {error}", file=sys.stderr)
        return lambda: None

    def read() -> Clocks | None:
        try:
            return {
                "sm_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                "memory_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
                "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                "throttle": nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
            }
        except nvml.NVMLError:
            return None

    return read
