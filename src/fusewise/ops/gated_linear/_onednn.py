"""float32 products by oneDNN on non-Intel CPUs, instead of MKL, which `torch.mm` uses on x86-64.

    if takes(x, weight):
        y = linear(x, weight, bias)         # x weightᵀ + bias

On two cores of an AMD EPYC it takes 0.4 to 0.6 of the time of `torch.mm`, on an older one 0.9 (docs/notes/gated-linear-cpu.md).
torch ships both; the oneDNN operator is the one into which Inductor lowers linear layers with constant weights.

Shape legend: M rows, K features in, N features out.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from ..._shared import build
from .._common import jit_traces

#: Multiplications from which it pays off; below, the operator's overhead of 10 µs dominates.
WORTH = 1 << 20
#: Rows from which a transposed weight is read as fast as a contiguous one.
TRANSPOSED_ROWS = 8
#: AMD's family of processors from which AVX-512 is computed at full width: MKL does not use it there, so that oneDNN is
#: fast enough to copy a transposed x first.
FULL_WIDTH_FAMILY = 26


@functools.cache
def there() -> bool:
    """Whether the CPU is a non-Intel x86-64 with AVX2 or AVX-512, and torch has both MKL and oneDNN."""
    return (
        sys.platform == "linux"
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        and _vendor() not in ("", "GenuineIntel")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


@functools.cache
def takes_transposed() -> bool:
    """Whether to use it for a transposed x, too."""
    return _vendor() == "AuthenticAMD" and int(_cpuinfo("cpu family") or 0) >= FULL_WIDTH_FAMILY


def _vendor() -> str:
    return _cpuinfo("vendor_id")


def _cpuinfo(key: str) -> str:
    """The first processor's value of a key, empty if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next(
        (value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == key), ""
    )


def takes(x_MK: Tensor, weight_NK: Tensor) -> bool:
    """Whether to use oneDNN for x weightᵀ. It has no fast kernel for strided rows. Not under tracing or dispatch modes,
    which should see the product. Nor in a forked child, which lacks the parent's OpenMP threads that oneDNN would wait for."""
    if torch.compiler.is_compiling() or not there() or build.FORKED or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if jit_traces():  # which cannot even record the operator
        return False
    if any(
        type(t) not in (Tensor, Parameter) or t.dtype != torch.float32 or t.device.type != "cpu"
        for t in (x_MK, weight_NK)
    ):
        return False
    rows, depth = x_MK.shape
    if rows * depth * weight_NK.shape[0] < WORTH or not torch._C._get_mkldnn_enabled():
        return False
    if not weight_NK.is_contiguous() and (rows < TRANSPOSED_ROWS or not weight_NK.mT.is_contiguous()):
        return False
    return x_MK.is_contiguous() or (x_MK.mT.is_contiguous() and takes_transposed())


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x weightᵀ + bias, (M, N), contiguous. Not differentiable."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, bias_N, "none", [], "")
    return y
