"""Floors: lower bounds for any implementation, measured beside the providers in the same rounds."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from fusewise.ops.gated_linear import _onednn, _products

from ..plugin import Provider, Run, Unsupported, supported
from ..problem import Problem
from ..targets.rope import RopeProblem


class Copy(Provider):
    """Memory floor: `dst.copy_(src)` with the problem's minimum bytes, reads plus writes, on random data."""

    name = "floor-copy"

    def build(self, problem: Problem) -> Run:
        if not problem.bytes_min():  # a copy of nothing takes longer than a launch, and would be the limit
            raise Unsupported("has nothing to copy: no byte has to move")
        words = max(1, problem.bytes_min() // 2 // 4)

        def enter(*_: Tensor) -> tuple[Any, ...]:
            source = torch.randn(words, device=problem.device)
            return torch.zeros_like(source), source

        return Run(torch.Tensor.copy_, enter, backward=False, checked=False)


class MatMul(Provider):
    """Compute floor: the bare matrix products of the problem's own tensors, the baseline for a fused epilogue. On a CPU
    by the faster of torch's two libraries."""

    name = "floor-matmul"
    ops = ("geglu", "gated_mlp")
    packages = ("torch",)

    def build(self, problem: Problem) -> Run:
        if type(problem).products is Problem.products:  # an empty call would be taken for the time of the matmuls
            raise Unsupported("knows no matmuls of this target; `fusewise limits` measures their rate")

        def enter(*xs: Tensor) -> tuple[Any, ...]:
            return tuple(problem.products(xs))

        def call(*pairs: tuple[Tensor, Tensor]) -> list[Tensor]:
            return [_multiplied(a, b) for a, b in pairs]

        return Run(call, enter, backward=False, checked=False)


def _multiplied(a: Tensor, b: Tensor) -> Tensor:
    if not _onednn.takes(a, b.mT):
        return torch.mm(a, b)
    return _onednn.linear(a, b.mT) if a.is_contiguous() else _products.transposed(a.mT, b)


class Launch(Provider):
    """Launch floor. On a GPU with Triton: an empty kernel launched by a bare `kernel[grid](…)` with 21 run-time
    arguments (RoPE's has 38: `TritonLaunch`), without operator, autograd or allocation. Elsewhere `zero_` of one
    element."""

    name = "floor-launch"

    def build(self, problem: Problem) -> Run:
        def enter(*_: Tensor) -> tuple[Any, ...]:
            return (torch.zeros(1, device=problem.device),)

        call: Any = torch.Tensor.zero_
        if problem.device.type == "cuda" and importlib.util.find_spec("triton") is not None:
            from ._launch import bare_launch

            call = bare_launch
        return Run(call, enter, backward=False, checked=False)


class TritonLaunch(Provider):
    """fusewise's own Triton kernel on the problem's tensors, launched by a bare `kernel[grid](…)` into existing
    outputs. Host time beyond this is the operator's overhead."""

    name = "floor-triton-launch"
    ops = ("rope",)
    devices = ("cuda",)
    module = "triton"
    install = "pip install triton"
    packages = ("torch", "triton")
    default = False

    def build(self, problem: Problem) -> Run:
        from ._launch import bare_rope

        rope = supported(self, problem, RopeProblem)
        kwargs = rope.inputs.kwargs
        return Run(
            lambda *xs: xs[-1](), lambda *xs: (bare_rope(rope.heads(xs), kwargs),), backward=False, checked=False
        )
