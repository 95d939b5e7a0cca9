"""What every launcher of a Triton kernel asks: where such kernels can run, and how one may be started. Imports Triton, so
only implementations in Triton or Gluon import this."""

from __future__ import annotations

import triton

#: Whether kernels run in Triton's interpreter, which is decided when they are decorated: TRITON_INTERPRET=1 at import.
INTERPRETED = triton.knobs.runtime.interpret


def unavailable(device_type: str) -> str | None:
    """Why Triton cannot serve tensors of this device type, or None if it can."""
    if INTERPRETED:
        return None
    if device_type == "cpu":
        return "triton compiles for GPUs; on a CPU it runs only interpreted, with TRITON_INTERPRET=1 set before import"
    return None if device_type in ("cuda", "xpu") else f"triton has no backend for device type {device_type}"


def launches_directly() -> bool:
    """Whether a compiled kernel may be launched past Triton's dispatcher: it is not interpreted, and no profiler's hook
    waits for its arguments by name."""
    runtime = triton.knobs.runtime
    return not (INTERPRETED or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
