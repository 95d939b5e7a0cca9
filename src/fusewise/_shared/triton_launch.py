"""Where Triton kernels can run, and how they may be launched. Imports Triton, so only implementations in Triton or
Gluon import this."""

from __future__ import annotations

import triton

#: Whether kernels run in Triton's interpreter: TRITON_INTERPRET=1 must be set at import, when kernels are decorated.
INTERPRETED = triton.knobs.runtime.interpret


def unavailable(device_type: str) -> str | None:
    """Why Triton cannot serve tensors of this device type, or None if it can."""
    if INTERPRETED:
        return None
    if device_type == "cpu":
        return "triton compiles for GPUs; on a CPU it runs only interpreted, with TRITON_INTERPRET=1 set before import"
    if device_type != "cuda":  # launches select the device and its stream by torch.cuda, which AMD's GPUs have as well
        return f"triton is launched on NVIDIA and AMD GPUs, not on device type {device_type}"
    return None


def launches_directly() -> bool:
    """Whether a compiled kernel may be launched without Triton's dispatcher: it is not interpreted, and no profiler
    hook needs its arguments by name."""
    runtime = triton.knobs.runtime
    return not (INTERPRETED or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
