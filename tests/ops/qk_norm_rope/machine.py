"""The CUDA kernels compiled for the CPU, as a replacement for what `_cuda._kernel` returns on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fusewise._shared import build
from fusewise.ops.qk_norm_rope import _cuda, _op
from fusewise.ops.rope import _host

from .. import cuda_on_cpu


def kernels() -> cuda_on_cpu.Library:
    return cuda_on_cpu.library(_cuda, "fusewise_qk_norm_rope")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[cuda_on_cpu.Library]:
    """`impl="auto"` uses the simulated kernels for CPU tensors; the host extension is loaded, with an empty cache."""
    kernel = kernels().plays()
    try:
        _host.extension()
    except build.BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(_cuda, "_kernel", lambda: kernel)
    monkeypatch.setattr(_op.choice, "serving", lambda *_: _cuda)
    _host.forget()
    yield kernel
    _host.forget()
