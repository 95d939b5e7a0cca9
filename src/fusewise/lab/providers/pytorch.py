"""PyTorch's own ways: eager, TorchScript and torch.compile, all on the same eager source."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..plugin import Provider, Run, Unsupported
from ..problem import Problem
from ..rope import EAGER, RopeProblem

Rotate = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


def rope_problem(provider: Provider, problem: Problem) -> RopeProblem:
    """The problem as RoPE, for providers that know nothing else."""
    if not isinstance(problem, RopeProblem):
        raise Unsupported(f"{provider.name} runs rope only, not {problem.op}")
    return problem


def eager_run(problem: RopeProblem, rotate: Rotate, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Run:
    """`rotate` on every operand in one function, which `wrap` may compile. As in transformers, the table is gathered,
    duplicated and rounded to the tensors' dtype once a forward pass, outside of what is timed."""
    cos, sin = problem.duplicated(problem.dtype)
    starts = [problem.start(x) for x in problem.tensors]
    width = problem.case.rotated

    def one(q: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return (rotate(q, cos, sin, starts[0], width),)

    def two(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return rotate(q, cos, sin, starts[0], width), rotate(k, cos, sin, starts[1], width)

    return Run(
        wrap(one if len(starts) == 1 else two),
        lambda *xs: (*(problem.to_bshd(x) for x in xs), cos, sin),
        lambda ys: tuple(problem.from_bshd(y) for y in ys),
    )


class Eager(Provider):
    """The rotate_half form of transformers, or its interleaved variants, operation by operation."""

    name = "eager"
    packages = ("torch",)

    def build(self, problem: Problem) -> Run:
        rope = rope_problem(self, problem)
        return eager_run(rope, EAGER[rope.case.pairing], lambda f: f)


class TorchScript(Provider):
    """`torch.jit.script` of the eager form."""

    name = "torchscript"
    packages = ("torch",)

    def build(self, problem: Problem) -> Run:
        rope = rope_problem(self, problem)
        with warnings.catch_warnings():
            # Deprecated since torch 2.9, and still what many deployments run.
            warnings.simplefilter("ignore", DeprecationWarning)
            scripted = torch.jit.script(EAGER[rope.case.pairing])
        return eager_run(rope, scripted, lambda f: f)


class TorchCompile(Provider):
    """`torch.compile` of the eager form, compiled for each shape: its best, not its most flexible."""

    name = "torch.compile"
    packages = ("torch", "triton")

    def build(self, problem: Problem) -> Run:
        rope = rope_problem(self, problem)
        torch.compiler.reset()  # a worker serves many shapes; without this the recompile limit ends in eager code
        return eager_run(rope, EAGER[rope.case.pairing], lambda f: torch.compile(f, fullgraph=True, dynamic=False))
