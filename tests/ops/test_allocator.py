"""C++ fast paths take new tensors from the allocator that the process has chosen, as torch does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusewise._shared import build
from fusewise.ops.gated_linear import _cuda, _host

pytestmark = pytest.mark.gpu

ALLOCATOR = """
#include <cuda_runtime.h>
static long taken = 0;
extern "C" long how_many() { return taken; }
extern "C" void* take(size_t bytes, int, cudaStream_t) { void* p = nullptr; ++taken; return cudaMalloc(&p, bytes) ? nullptr : p; }
extern "C" void give(void* p, size_t, int, cudaStream_t) { cudaFree(p); }
"""

CALLS = """
import ctypes, inspect, sys, torch
path = sys.argv[1]
torch.cuda.memory.change_current_allocator(torch.cuda.memory.CUDAPluggableAllocator(path, "take", "give"))
how_many = ctypes.CDLL(path).how_many
how_many.restype = ctypes.c_long

from fusewise import gated_linear, qk_norm_rope, rope
from fusewise.ops.gated_linear import _host

_host.load()

def some(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

q, k, cos, sin, norm = some(1, 8, 4, 64), some(1, 8, 2, 64), some(8, 32), some(8, 32), some(64)
unit = inspect.signature(gated_linear).bind(some(5, 72), some(272, 72), activation="silu", impl="cuda")
unit.apply_defaults()
for name, call, again in (
    ("rope", lambda: rope(q, k, cos=cos, sin=sin), None),
    ("qk_norm_rope", lambda: qk_norm_rope(q, k, norm, norm, cos=cos, sin=sin), None),
    ("gated_linear", lambda: [gated_linear(*unit.args, **unit.kwargs)], lambda: [_host.gated_linear(*unit.arguments.values())]),
):
    expected = call()
    for repeated in (call, again or call):  # the last one by the fast path, or not at all
        before = how_many()
        found = repeated()
        assert how_many() - before >= len(found), name
        assert all(map(torch.equal, found, expected)), name
print("served")
"""


def test_new_tensors_come_from_the_chosen_allocator(tmp_path: Path) -> None:
    """In a process of its own, which may change the allocator only once, before the first tensor. A library of RAPIDS' memory
    manager does the same."""
    if (missing := build.nvcc().missing or _cuda.unavailable("cuda")) is not None:
        pytest.skip(missing)
    try:
        _host.load()
    except build.BuildError as error:
        pytest.skip(str(error))
    source, library = tmp_path / "allocator.cu", tmp_path / "allocator.so"
    source.write_text(ALLOCATOR)
    subprocess.run([*build.nvcc().needed(), "-shared", "-Xcompiler", "-fPIC", source, "-o", library], check=True)
    done = subprocess.run([sys.executable, "-c", CALLS, library], capture_output=True, text=True, timeout=240, env=os.environ)  # fmt: skip
    assert done.stdout == "served\n", done.stderr[-3000:]
