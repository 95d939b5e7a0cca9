"""What the allocator of a GPU counts."""

from __future__ import annotations

import gc
import time

import torch


def settled() -> int:
    """Bytes that are in use, of which nothing is about to be let go. The peak is counted anew."""
    torch.cuda.synchronize()
    gc.collect()
    time.sleep(0.05)  # the engine's thread lets go of gradients a moment after it has handed them over
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_above(before: int) -> int:
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
