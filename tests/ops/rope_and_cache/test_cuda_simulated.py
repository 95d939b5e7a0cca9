"""The CUDA kernel compiled for the host (`cuda_machine.cpp`), over the matrix: addresses, masks, slots and arithmetic."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

import fusewise
from fusewise._shared import build
from fusewise.ops.rope_and_cache import _cuda, _op

from ..rope.support import DTYPES
from .cases import CASES, check, make

MACHINE = Path(__file__).parent / "cuda_machine.cpp"


class Simulated:
    """What `_cuda._kernel` returns, without a GPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.run = library.fusewise_rope_and_cache
        self.run.argtypes = (*[ctypes.c_char_p] * 4, ctypes.c_void_p)

    def error(self, code: int) -> str:
        return f"error {code}"


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    try:
        nvcc = build.nvcc().command
    except build.BuildError as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("machine") / "machine.so"
    flags = ("-x", "c++", "-std=c++20", "-O1", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden,-pthread")
    source = f'-DKERNELS="{_cuda.SOURCES[0]}"'
    done = subprocess.run(
        [*nvcc, *flags, source, str(MACHINE), "-o", str(path)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return Simulated(ctypes.CDLL(str(path)))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if DTYPES[case.dtype] is not torch.float64])
def test_matches_the_oracle(name: str, simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, "_kernel", lambda: simulated)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    case = CASES[name]
    before, old = make(case).copy()
    after, new = before.copy()
    monkeypatch.setattr(_op.choice, "serving", lambda *_: _cuda)
    fusewise.rope_and_cache_(after.q, after.k, after.v, **after.arguments())
    check(before, after, (old, new), case.options.get("write_k", True))
