"""Lightning Thunder on the problem's program: with default executors, with torch.compile, and with nvFuser.

Without nvFuser the default executors fuse nothing, so they show the cost and benefit of Thunder's own transformations.
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
#: Methods that torch 2.12 removed with its named tensors. Thunder 0.2.6 refers to them on import but never calls them.
NAMED_TENSORS = ("align_as", "align_to", "has_names", "refine_names", "rename", "rename_")


@contextmanager
def named_tensor_methods() -> Iterator[None]:
    """Provide placeholders on torch.Tensor while Thunder is imported."""

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
    """Import Thunder in its worker process."""
    with named_tensor_methods():
        return require("thunder", INSTALL)


class Thunder(Provider):
    """`thunder.jit` with its default executors."""

    name, module = "thunder", "thunder"
    remembers = False
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
    remembers = True

    def chosen(self, op: str, device: str) -> bool:
        """Not for RoPE, where it repeats torch.compile's compilation at the same cost."""
        return op != "rope"


class ThunderNvFuser(Thunder):
    """Regions of Thunder's trace compiled by nvFuser."""

    name, module, executors, devices = "thunder-nvfuser", "nvfuser", ("nvfuser",), ("cuda",)
    install = "pip install nvfuser-cu128-torch29 on torch 2.9 with CUDA 12.8; there is no wheel for a later torch"
