"""Libraries of CUDA kernels: compilation targets, loading, launching, and availability."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import build

OLDEST, HOPPER = (8, 0), (9, 0)  # compute capabilities
MBARRIER = Path(__file__).with_name("mbarrier.cuh")


def flags(capabilities: tuple[tuple[int, int], ...], features: str = "") -> tuple[str, ...]:
    """nvcc flags for the given compute capabilities; `features`: "a" for architecture-specific instructions."""
    codes = [f"{major}{minor}{features}" for major, minor in capabilities]
    targets = [f"-gencode=arch=compute_{code},code=sm_{code}" for code in codes]
    return "-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden", "-cudart=static", *targets


#: Flag for libraries that are compiled from several sources in parallel; without it, the first is the whole library.
PARTS = "-DFUSEWISE_PARTS"


def present() -> tuple[tuple[int, int], ...]:
    """The compute capabilities of the GPUs of this machine."""
    return tuple(sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}))


def no_gpu(device_type: str) -> str | None:
    """Why no CUDA kernel can serve tensors of this device type, or None if a built one can."""
    if device_type != "cuda":
        return f"cuda runs on NVIDIA GPUs, not on device type {device_type}"
    if torch.version.hip is not None:
        return "cuda runs on NVIDIA GPUs, and this build of torch is for AMD's"
    if torch.cuda.device_count() == 0:
        return "there is no GPU"
    oldest = min(present())
    if oldest < OLDEST:
        return f"cuda needs compute capability {OLDEST[0]}.{OLDEST[1]}, and a GPU here has {oldest[0]}.{oldest[1]}"
    return None


def not_hopper(impl: str) -> str | None:
    """Why Hopper-only kernels cannot serve the GPUs of this machine, or None if they can. The answer holds for all
    GPUs: with different ones, select by CUDA_VISIBLE_DEVICES."""
    if torch.cuda.device_count() == 0:
        return "there is no GPU"
    other = next((capability for capability in present() if capability != HOPPER), None)
    if other is None:
        return None
    return f"{impl} has kernels for compute capability 9.0 (Hopper), and a GPU here has {other[0]}.{other[1]}"


class Library:
    """A loaded library of kernels: its function `name`, which takes addresses and returns an error code."""

    def __init__(self, recipe: build.Recipe, name: str) -> None:
        self.library, self.name = build.library(*recipe), name
        self.run = getattr(self.library, name)
        self.run.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
        self.explain = self.library.fusewise_error
        self.explain.restype = ctypes.c_char_p
        if code := getattr(self.library, f"{name}_probe")():
            raise build.BuildError(f"the CUDA kernels do not run here: {self.error(code)}; update the driver")

    def error(self, code: int) -> str:
        text: bytes = self.explain(code)
        return text.decode()

    def function(self, suffix: str, returns: Any, *arguments: Any) -> Any:
        """Another function of the library, `{name}_{suffix}`."""
        found = getattr(self.library, f"{self.name}_{suffix}")
        found.restype, found.argtypes = returns, arguments
        return found

    def launch(self, plan: bytes, call: bytes, device: int, op: str, run: Any = None) -> None:
        """Launch a packed call on the current stream of a device, by `run` or the function `name`."""
        run = run or self.run
        stream = torch._C._cuda_getCurrentRawStream(device)
        if device == torch._C._cuda_getDevice():
            code = run(plan, call, stream)
        else:
            with torch.cuda.device(device):
                code = run(plan, call, stream)
        if code:
            raise RuntimeError(f'{op}: the CUDA launch must succeed, got {self.error(code)}; use impl="triton"')

    def addresses(self, *suffixes: str) -> tuple[int | None, ...]:
        """For the host fast paths: the addresses of other functions, or of the launcher and of the function that explains its
        error codes."""
        functions = [getattr(self.library, f"{self.name}_{suffix}") for suffix in suffixes] or [self.run, self.explain]
        return tuple(ctypes.cast(function, ctypes.c_void_p).value for function in functions)


def unavailable(device_type: str, kernel: Callable[[], Any]) -> str | None:
    """Why the kernels that `kernel` loads cannot serve tensors of this device type, or None if they can; builds them if
    necessary."""
    if (reason := no_gpu(device_type)) is not None:
        return reason
    try:
        kernel()
    except build.BuildError as error:
        return str(error)
    return None
