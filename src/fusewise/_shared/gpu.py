"""GPU properties used by launchers. Libraries of CUDA kernels are in `cuda.py`, Triton launches in `triton_launch.py`."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def processors_of(device: int) -> int:
    """Number of SMs of the GPU with this index; that of an H200 if there is none (-1)."""
    return 132 if device < 0 else torch.cuda.get_device_properties(device).multi_processor_count


def tf32_allowed() -> bool:
    """Whether float32 matmuls on a GPU may round their operands to tf32, by torch's older or newer settings."""
    backends: Any = torch.backends  # the stubs do not know these settings
    setting = backends.cuda.matmul.fp32_precision
    return bool((backends.fp32_precision if setting == "none" else setting) == "tf32")
