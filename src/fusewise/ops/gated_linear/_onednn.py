"""Products of float32 on a CPU that is not Intel's, by oneDNN instead of MKL, which is what `torch.mm` takes on x86-64.

    if takes(x, weight):
        y = linear(x, weight, bias)         # x weightᵀ + bias

On two cores of an AMD EPYC it takes 0.4 to 0.6 of the time of `torch.mm` (docs/notes/gated-linear-cpu.md). torch has both;
its operator for this one is what Inductor turns linear layers with constant weights into.

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

#: Multiplications from which on it pays; below, the operator's own 10 µs are what is seen.
WORTH = 1 << 20
#: Rows from which on a transposed weight is read as fast as another.
TRANSPOSED_ROWS = 8


@functools.cache
def there() -> bool:
    """Whether this machine's processor is one for which MKL is not made, and torch has oneDNN for it."""
    return (
        sys.platform == "linux"
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        and _vendor() not in ("", "GenuineIntel")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


def takes(x_MK: Tensor, weight_NK: Tensor) -> bool:
    """Whether oneDNN is the quicker for x weightᵀ. Rows of either that are apart have no fast kernel there. Not where somebody
    watches what operators are called, or traces them: these are to see the product. Nor in a forked child, which has none of
    the threads of the parent's OpenMP that oneDNN would wait for."""
    if torch.compiler.is_compiling() or not there() or build.FORKED or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if any(
        type(t) not in (Tensor, Parameter) or t.dtype != torch.float32 or t.device.type != "cpu"
        for t in (x_MK, weight_NK)
    ):
        return False
    rows, depth = x_MK.shape
    if rows * depth * weight_NK.shape[0] < WORTH or not torch._C._get_mkldnn_enabled():
        return False
    if not weight_NK.is_contiguous():
        return rows >= TRANSPOSED_ROWS and weight_NK.mT.is_contiguous() and _packed(x_MK)
    return _packed(x_MK)


def _packed(x: Tensor) -> bool:
    return x.is_contiguous() or x.mT.is_contiguous()


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x weightᵀ + bias, (M, N), contiguous. Not differentiable."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, bias_N, "none", [], "")
    return made
