"""What launchers ask about a GPU. Libraries of CUDA kernels are in `cuda.py`, Triton's launches in `triton_launch.py`."""

from __future__ import annotations

import functools

import torch


@functools.cache
def processors_of(device: int) -> int:
    """Multiprocessors of the GPU with this index; an H200's where there is none (-1)."""
    return 132 if device < 0 else torch.cuda.get_device_properties(device).multi_processor_count
