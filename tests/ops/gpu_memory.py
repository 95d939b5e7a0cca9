"""Statistics of the CUDA caching allocator."""

from __future__ import annotations

import gc
import time

import torch


def settled() -> int:
    """Bytes in use, after pending frees. Resets the peak."""
    torch.cuda.synchronize()
    gc.collect()
    time.sleep(0.05)  # the autograd thread frees gradients shortly after it returns them
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_above(before: int) -> int:
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
