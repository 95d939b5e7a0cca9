"""Apache TVM on the problem's program: torch.export to Relax, default pipeline and schedules, no tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..code.stage import Stage
from ..ledger import Kernel
from ..plugin import Missing, Provider, Run, Unsupported, require
from ..problem import Exportable, Problem
from ..reason import reason

INSTALL = "pip install 'fusewise[lab]'"
FAST_MATH = (
    "TVM compiles CUDA with --use_fast_math, where powf of a negative number is NaN and tanh is an approximation"
)


class Tvm(Provider):
    """Relax's virtual machine, forward only."""

    name, module = "tvm", "tvm"
    remembers = False
    packages = ("apache-tvm",)
    install = INSTALL

    def build(self, problem: Problem) -> Run:
        if problem.task.pass_ != "fwd":
            raise Unsupported("its default pipeline has no backward")
        tvm = require("tvm", INSTALL)
        relax = require("tvm.relax", INSTALL)
        device = tvm.cpu() if problem.device.type == "cpu" else tvm.cuda(problem.device.index or 0)
        if not device.exist:
            raise Missing("this TVM has no CUDA; build one with USE_CUDA")
        program = problem.program()
        module = lowered(problem)
        try:
            target = target_of(tvm, device)
            compiled = tvm.compile(scheduled(module, target, relax), target)
        except Exception as error:  # its passes raise anything
            raise Unsupported(f"TVM cannot compile it: {reason(error)}") from error
        main = relax.VirtualMachine(compiled, device)["main"]

        def enter(*xs: Tensor) -> tuple[Any, ...]:
            return tuple(
                tvm.runtime.from_dlpack(a.detach().contiguous()) for a in program.enter(*xs) if isinstance(a, Tensor)
            )

        def leave(results: Any) -> tuple[Tensor, ...]:
            several = results if not hasattr(results, "__dlpack__") else [results]
            return program.leave(tuple(torch.utils.dlpack.from_dlpack(y) for y in several))

        arithmetic = FAST_MATH if problem.device.type == "cuda" else ""
        return Run(main, enter, leave, backward=False, torch_memory=False, arithmetic=arithmetic)

    def stages(self, problem: Problem, target: str) -> Sequence[Stage]:
        from ..code import relax

        return relax.stages(problem, target)

    def traffic(self, problem: Problem, target: str) -> Sequence[Kernel]:
        from ..code import relax

        return relax.traffic(problem, target)


def lowered(problem: Problem) -> Any:
    """The program as a Relax module."""
    importer = require("tvm.relax.frontend.torch", INSTALL).from_exported_program
    example = problem.program().enter(*problem.leaves(False))
    given = tuple(a for a in example if isinstance(a, Tensor))
    try:
        exported = torch.export.export(Exportable(problem.program().function, example), given)
        return importer(exported, keep_params_as_input=False, unwrap_unit_return_tuple=True)
    except Exception as error:  # exporters raise anything
        raise Unsupported(f"torch.export or TVM's importer cannot take it: {reason(error)}") from error


def target_of(tvm: Any, device: Any) -> Any:
    """This CPU with all its instruction sets, or this GPU."""
    if device.dlpack_device_type() == tvm.cpu().dlpack_device_type():
        cpu = tvm.target.codegen.llvm_get_system_cpu()
        return tvm.target.Target({"kind": "llvm", "mcpu": cpu})
    return tvm.target.Target.from_device(device)


def scheduled(module: Any, target: Any, relax: Any) -> Any:
    """Relax's standard passes for a TVM target, and on a GPU dlight's schedules, without which nothing would run in parallel."""
    with target:
        module = relax.get_pipeline("zero")(module)
        if target.kind.name != "cuda":
            return module
        dlight = require("tvm.s_tir.dlight", INSTALL)
        gpu = dlight.gpu
        rules = (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Transpose(), gpu.Fallback())
        return dlight.ApplyDefaultSchedule(*rules)(module)
