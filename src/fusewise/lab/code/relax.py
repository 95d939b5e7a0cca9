"""Apache TVM: Relax as torch.export gives it, TIR after its pipeline, and the code for a CPU or, without one, for a GPU."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

from ..ledger import Kernel
from ..plugin import Unsupported, require
from ..problem import Problem
from . import disassembly, triton_kernels
from .stage import Stage, tidy

_ITEMSIZE = {"bool": 1, "bfloat16": 2}


def stages(problem: Problem, target: str) -> list[Stage]:
    """`relax` and `tir`, then `llvm` and `assembly` for the CPU, or `cuda` for a GPU."""
    tvm, relax, module = _imported(problem)
    found = [Stage(stage="relax", language="python", text=_script(module))]
    if problem.device.type == "cpu":
        found += _compiled(module, "cpu", tvm, relax)
    if target != "cpu":
        found += _compiled(module, target, tvm, relax)
    return found


def _imported(problem: Problem) -> tuple[Any, Any, Any]:
    """TVM, Relax, and the problem's program as a Relax module."""
    from ..providers import relax as provider

    if problem.task.pass_ != "fwd":
        raise Unsupported("its default pipeline has no backward")
    tvm, relax = require("tvm", provider.INSTALL), require("tvm.relax", provider.INSTALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch.export's, which TVM's importer calls
        return tvm, relax, provider.lowered(problem, relax)


def _compiled(module: Any, target: str, tvm: Any, relax: Any) -> list[Stage]:
    wanted = tvm_target(tvm, target)
    scheduled = schedule(module, wanted, relax)
    found = [Stage(stage="tir", language="python", text=_script(scheduled), target=target)]
    executable = tvm.compile(scheduled, wanted)
    for part in _imports(executable.mod):
        if part.kind == "cuda":
            found.append(Stage(stage="cuda", language="cpp", text=tidy(part.inspect_source("cuda")), target=target))
        elif part.kind == "llvm" and target == "cpu":
            found.append(Stage(stage="llvm", language="llvm", text=tidy(part.inspect_source("ll")), target=target))
            text = part.inspect_source("asm")
            counts = disassembly.count_assembler(text)
            found.append(Stage(stage="assembly", language="asm", text=tidy(text), target=target, counts=counts))
    return found


def traffic(problem: Problem, target: str) -> list[Kernel]:
    """The primitive functions that the scheduled program calls on the device at hand, with the tensors of each."""
    tvm, relax, module = _imported(problem)
    where = "cpu" if problem.device.type == "cpu" else target
    return calls(schedule(module, tvm_target(tvm, where), relax).script())


def tvm_target(tvm: Any, target: str) -> Any:
    """`target` as TVM writes it: this CPU, or a GPU of that capability with an H200's limits."""
    if target == "cpu":
        return tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
    return tvm.target.Target(
        {
            "kind": "cuda", "arch": f"sm_{triton_kernels.capability(target)}", "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 49152, "thread_warp_size": 32, "registers_per_block": 65536,
        }
    )  # fmt: skip


def schedule(module: Any, target: Any, relax: Any) -> Any:
    """Relax's standard pipeline, and on a GPU the default schedules, as the provider has them."""
    from ..providers import relax as provider

    with target:
        module = relax.get_pipeline("zero")(module)
        if target.kind.name != "cuda":
            return module
        dlight = require("tvm.s_tir.dlight", provider.INSTALL)
        gpu = dlight.gpu
        rules = (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Transpose(), gpu.Fallback())
        return dlight.ApplyDefaultSchedule(*rules)(module)


def _script(module: Any) -> str:
    return tidy(module.script().strip() + "\n")


def _imports(module: Any) -> list[Any]:
    """A compiled module's parts, and theirs."""
    return [part for child in module.imports for part in (child, *_imports(child))]


_TENSOR = r'R\.Tensor\(\(([\d, ]*)\), dtype="(\w+)"'


def calls(script: str) -> list[Kernel]:
    """The calls of primitive functions in a module's script, by the types that it writes beside its variables."""
    sizes = {
        name: _size(shape, dtype) for name, shape, dtype in re.findall(rf"(\w+): {_TENSOR}", script)
    }  # arguments of the function and variables
    kernels = []
    for line in script.splitlines():
        match = re.search(r"R\.call_tir(?:_inplace)?\(cls\.(\w+), \(([^)]*)\),? ?(.*)$", line)
        if match is None:
            continue
        name, arguments, results = match.groups()
        operands = dict.fromkeys(a.strip() for a in arguments.split(",") if a.strip())
        outputs = re.findall(_TENSOR, results)
        kernels.append(
            Kernel(
                name=name,
                read=sum(sizes.get(a, 0) for a in operands),
                written=sum(_size(shape, dtype) for shape, dtype in outputs),
            )
        )
    return kernels


def _size(shape: str, dtype: str) -> int:
    digits = re.search(r"\d+$", dtype)
    itemsize = _ITEMSIZE.get(dtype, int(digits[0]) // 8 if digits else 4)
    return math.prod(int(d) for d in shape.split(",") if d.strip()) * itemsize
