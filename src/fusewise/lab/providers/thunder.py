"""Lightning Thunder on the problem's program: its default executors, those that end in torch.compile, and nvFuser.

Without nvFuser the default executors fuse nothing, so they show what Thunder's own transformations cost and save.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from ..code.stage import Stage
from ..ledger import Kernel
from ..plugin import Provider, Run, require
from ..problem import Problem

INSTALL = "pip install 'fusewise[lab]'"
#: Methods that torch 2.12 removed with its named tensors. Thunder 0.2.6 names them while it is imported, and never calls
#: them.
NAMED_TENSORS = ("align_as", "align_to", "has_names", "refine_names", "rename", "rename_")


@contextmanager
def named_tensor_methods() -> Iterator[None]:
    """Stand-ins on torch.Tensor for what Thunder looks for there."""

    def stand_in(name: str) -> Any:
        def removed(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"torch.Tensor.{name} is no more")

        removed.__name__ = removed.__qualname__ = name
        return removed

    absent = [name for name in NAMED_TENSORS if not hasattr(torch.Tensor, name)]
    for name in absent:
        setattr(torch.Tensor, name, stand_in(name))
    try:
        yield
    finally:
        for name in absent:
            delattr(torch.Tensor, name)


def imported() -> Any:
    """Thunder, for a process that is to have it."""
    with named_tensor_methods():
        return require("thunder", INSTALL)


class Thunder(Provider):
    """`thunder.jit` with the executors it takes by itself."""

    name, module = "thunder", "thunder"
    packages = ("torch", "lightning-thunder")
    install = INSTALL
    executors: ClassVar[tuple[str, ...]] = ()

    def build(self, problem: Problem) -> Run:
        program = problem.program()
        jit = imported().jit
        compiled = jit(program.function, executors=list(self.executors)) if self.executors else jit(program.function)
        return Run(compiled, program.enter, program.leave, form="two-kernels" if self.executors else "eager")

    def stages(self, problem: Problem, target: str) -> Sequence[Stage]:
        from ..code import thunder

        return thunder.stages(problem, self.build(problem))

    def traffic(self, problem: Problem, target: str) -> Sequence[Kernel]:
        from ..code import thunder

        return thunder.traffic(problem, self.build(problem))


class ThunderTorchCompile(Thunder):
    """Regions of Thunder's trace compiled by torch.compile."""

    name, executors = "thunder-torchcompile", ("torchcompile",)

    def chosen(self, op: str, device: str) -> bool:
        """Not for RoPE on a CPU, where it would compile again what torch.compile did, for as long."""
        return not (op == "rope" and device == "cpu")


class ThunderNvFuser(Thunder):
    """Regions of Thunder's trace compiled by nvFuser."""

    name, module, executors, devices = "thunder-nvfuser", "nvfuser", ("nvfuser",), ("cuda",)
    install = "pip install nvfuser-cu128-torch29 on torch 2.9 with CUDA 12.8; there is no wheel for a later torch"
