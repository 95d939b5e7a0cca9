"""Where Triton kernels can run, and how they may be launched. Imports Triton, so only implementations in Triton or
Gluon import this."""

from __future__ import annotations

from typing import Any

import torch
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


def launch(kernel: Any, grid: int, arguments: dict[str, Any], device: int, **options: Any) -> Any:
    """Launch `grid` programs of a kernel by Triton's dispatcher; `options` are num_warps and num_stages. Returns the compiled
    kernel, or None if the grid is empty."""
    if grid == 0:
        return None
    if device < 0 or device == torch.cuda.current_device():
        return kernel[(grid,)](**arguments, **options, enable_fp_fusion=True)
    with torch.cuda.device(device):
        return kernel[(grid,)](**arguments, **options, enable_fp_fusion=True)


def launch_bound(run: Any, device: int, *arguments: Any) -> None:
    """Launch a compiled kernel with its grid, `run`, on the current stream of a device, without the dispatcher."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    if device == torch._C._cuda_getDevice():
        run(*arguments, stream=stream)
    else:
        with torch.cuda.device(device):
            run(*arguments, stream=stream)
