"""PyTorch's own ways: eager, TorchScript and torch.compile, all on the same eager source."""

from __future__ import annotations

import warnings

import torch

from ..plugin import Provider, Run
from ..problem import Problem


class Eager(Provider):
    """The problem's program as it stands, operation by operation."""

    name = "eager"
    packages = ("torch",)

    def build(self, problem: Problem) -> Run:
        program = problem.program()
        return Run(program.function, program.enter, program.leave)


class TorchScript(Provider):
    """`torch.jit.script` of the eager form."""

    name = "torchscript"
    packages = ("torch",)

    def build(self, problem: Problem) -> Run:
        program = problem.program()
        with warnings.catch_warnings():
            # Deprecated since torch 2.9, and still what many deployments run.
            warnings.simplefilter("ignore", DeprecationWarning)
            scripted = torch.jit.script(program.function)
        return Run(scripted, program.enter, program.leave)


class TorchCompile(Provider):
    """`torch.compile` of the eager form, compiled for each shape: its best, not its most flexible."""

    name = "torch.compile"
    packages = ("torch", "triton")

    def build(self, problem: Problem) -> Run:
        program = problem.program()
        torch.compiler.reset()  # a worker serves many shapes; without this the recompile limit ends in eager code
        return Run(torch.compile(program.function, fullgraph=True, dynamic=False), program.enter, program.leave)
