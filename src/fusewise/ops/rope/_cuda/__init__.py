"""RoPE in CUDA C++: the kernels in `rope.cu`, compiled on first use with the user's nvcc, and their launcher.

The headers serve every operation that rotates; `Library` and `no_gpu` load and explain for all of them.

The library knows nothing of torch: it is handed addresses and a stream, so one build serves every version of torch. It
has machine code for the GPUs of this machine only.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...._shared import build
from .._host import NEW
from .._native import packed
from .._problem import Rotation

FOLDER = Path(__file__).parent
HEADERS = tuple(FOLDER / name for name in ("angles.cuh", "chunk.cuh", "launch.cuh", "memory.cuh", "../plan.h"))
SOURCES = (FOLDER / "rope.cu", *HEADERS)
OLDEST = (8, 0)  # compute capability


def flags(capabilities: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
    """How nvcc is to compile for the given compute capabilities."""
    codes = [f"{major}{minor}" for major, minor in capabilities]
    targets = [f"-gencode=arch=compute_{code},code=sm_{code}" for code in codes]
    return "-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden", "-cudart=static", *targets


def present() -> tuple[tuple[int, int], ...]:
    """The compute capabilities of the GPUs of this machine."""
    return tuple(sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}))


def recipe(capabilities: tuple[tuple[int, int], ...]) -> build.Recipe:
    """What the library for the given compute capabilities is built from."""
    return "rope-cuda", SOURCES, build.nvcc(), flags(capabilities)


class Library:
    """A loaded library of kernels: its function `name`, which takes addresses and returns an error code."""

    def __init__(self, recipe: build.Recipe, name: str) -> None:
        library = build.library(*recipe)
        self.run = getattr(library, name)
        self.run.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
        self.explain = library.fusewise_error
        self.explain.restype = ctypes.c_char_p
        if code := getattr(library, f"{name}_probe")():
            raise build.BuildError(f"the CUDA kernels do not run here: {self.error(code)}; update the driver")

    def error(self, code: int) -> str:
        text: bytes = self.explain(code)
        return text.decode()

    def launch(self, plan: bytes, call: bytes, device: int, op: str) -> None:
        """Start the kernels of a packed call on the current stream of a device."""
        stream = torch._C._cuda_getCurrentRawStream(device)
        if device == torch._C._cuda_getDevice():
            code = self.run(plan, call, stream)
        else:
            with torch.cuda.device(device):
                code = self.run(plan, call, stream)
        if code:
            raise RuntimeError(f'{op}: the CUDA launch must succeed, got {self.error(code)}; use impl="triton"')

    def addresses(self) -> tuple[int | None, ...]:
        """Of the launcher and of the function that explains its codes, for the quick way on the host (`_host.py`)."""
        return tuple(ctypes.cast(function, ctypes.c_void_p).value for function in (self.run, self.explain))


@functools.cache
def _kernel() -> Library:
    return Library(recipe(present()), "fusewise_rope")


def no_gpu(device_type: str) -> str | None:
    """Why no CUDA kernel can serve tensors of this device type, or None if one can that is built."""
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


def unavailable(device_type: str) -> str | None:
    """Why the CUDA kernels cannot serve tensors of this device type, or None if they can; builds them if need be."""
    if (reason := no_gpu(device_type)) is not None:
        return reason
    try:
        _kernel()
    except build.BuildError as error:
        return str(error)
    return None


def launch(xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], rotation: Rotation) -> None:
    """The implementation `impl="cuda"`: rotate every x into its y on the current stream of their device."""
    plan, call = packed(xs, ys, rotation)
    _kernel().launch(plan, call, xs[0].get_device(), "rope")


def tell(host: Any) -> None:
    """Tell the quick way on the host (`_host.py`) where the launcher is."""
    host.on_cuda(NEW, *_kernel().addresses())
