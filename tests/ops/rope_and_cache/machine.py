"""`cuda_machine.cpp`: the CUDA kernel on a CPU, as what `_cuda._kernel` returns on a GPU."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusewise._shared import build
from fusewise.ops.rope import _cuda as rope_cuda
from fusewise.ops.rope import _host
from fusewise.ops.rope_and_cache import _cuda, _op

MACHINE = Path(__file__).parent / "cuda_machine.cpp"


class Simulated(rope_cuda.Library):
    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.run, self.explain = library.fusewise_rope_and_cache, library.fusewise_error
        self.run.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
        self.explain.restype = ctypes.c_char_p


@functools.cache
def machine() -> Simulated:
    flags = ("-x", "c++", "-std=c++20", "-O1", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden,-pthread")
    source = f'-DKERNELS="{_cuda.SOURCES[0]}"'
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.so"
        done = subprocess.run(
            [*build.nvcc().command, *flags, source, str(MACHINE), "-o", str(path)],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return Simulated(path)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulated]:
    """`impl="auto"` takes the machine for tensors of a CPU, the extension of the host is there, and nothing is in it."""
    try:
        kernel = machine()
        _host.extension()
    except build.BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(_cuda, "_kernel", lambda: kernel)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(_op.choice, "serving", lambda *_: _cuda)
    _host.forget()
    yield kernel
    _host.forget()
