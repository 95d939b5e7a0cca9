"""What the operations have in common: the form of their errors, what they ask autograd, and two small facts of tensors."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor


def fail(op: str, argument: str, contract: str, got: object, fix: str, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{op}: {argument} must {contract}, got {got}; {fix}")


def transforms_active() -> bool:
    """Whether a torch.func transform or a forward-mode level is at work; in a trace, where `requires_grad` is not to be
    trusted under a transform, the former."""
    if torch._C._are_functorch_transforms_active():
        return True
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def wants_formula(dy: Tensor) -> bool:
    """Whether a backward is itself to be differentiated, or given a batch of gradients at a time: then it goes through
    a formula in functions that torch differentiates and maps. So does a gradient of zeros without memory."""
    if transforms_active():
        return True
    if torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(dy) or dy._is_zerotensor()


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of all arithmetic: float32, or float64 for float64 tensors."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def unit_stride(x: Tensor) -> Tensor:
    """x with a contiguous last dimension: x itself, or a copy in the rare layout that has none."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
