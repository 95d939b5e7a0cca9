"""Floors: what no implementation can go below, measured beside the providers in the same run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..plugin import Provider, Run
from ..problem import Problem


class Copy(Provider):
    """`dst.copy_(src)` that reads and writes as many bytes together as the problem must move, random data."""

    name = "floor-copy"

    def build(self, problem: Problem) -> Run:
        words = max(1, problem.bytes_min() // 2 // 4)

        def enter(*_: Tensor) -> tuple[Any, ...]:
            source = torch.randn(words, device=problem.device)
            return torch.zeros_like(source), source

        return Run(torch.Tensor.copy_, enter, backward=False, checked=False)


class Launch(Provider):
    """One operation on one element: what it costs to start anything through PyTorch's dispatcher."""

    name = "floor-launch"

    def build(self, problem: Problem) -> Run:
        def enter(*_: Tensor) -> tuple[Any, ...]:
            return (torch.zeros(1, device=problem.device),)

        return Run(torch.Tensor.zero_, enter, backward=False, checked=False)
