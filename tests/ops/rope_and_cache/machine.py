"""The CUDA kernels compiled for the CPU, as a replacement for what `_cuda._kernel` returns on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fusewise.ops.rope_and_cache import _cuda, _op

from .. import cuda_on_cpu


@pytest.fixture
def simulated() -> Iterator[cuda_on_cpu.Library]:
    """`impl="auto"` uses the simulated kernels for CPU tensors; the host extension is loaded, with an empty cache."""
    kernel = cuda_on_cpu.library(_cuda, "fusewise_rope_and_cache").plays()
    with cuda_on_cpu.through_host(_cuda, _op.choice, kernel):
        yield kernel
