"""The CUDA kernels compiled for the CPU, as a replacement for what `_cuda._kernel` returns on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fusewise.ops.qk_norm_rope import _cuda, _op

from .. import cuda_on_cpu


def kernels() -> cuda_on_cpu.Library:
    return cuda_on_cpu.library(_cuda, "fusewise_qk_norm_rope")


@pytest.fixture
def simulated() -> Iterator[cuda_on_cpu.Library]:
    """`impl="auto"` uses the simulated kernels for CPU tensors; the host extension is loaded, with an empty cache."""
    kernel = kernels().plays()
    with cuda_on_cpu.through_host(_cuda, _op.choice, kernel):
        yield kernel
