"""GPU properties used by launchers. Libraries of CUDA kernels are in `cuda.py`, Triton launches in `triton_launch.py`."""

from __future__ import annotations

import functools

import torch


@functools.cache
def processors_of(device: int) -> int:
    """Number of SMs of the GPU with this index; that of an H200 if there is none (-1)."""
    return 132 if device < 0 else torch.cuda.get_device_properties(device).multi_processor_count
