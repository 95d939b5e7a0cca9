"""Apache TVM: Relax as imported from torch.export, TIR after its pipeline, and the generated CPU or GPU code."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from ..ledger import Kernel
from ..plugin import Unsupported, require
from ..problem import Problem
from . import disassembly, triton_kernels
from .stage import Stage, tidy


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
        warnings.simplefilter("ignore", FutureWarning)  # raised in torch.export, which TVM's importer calls
        return tvm, relax, provider.lowered(problem)


def _compiled(module: Any, target: str, tvm: Any, relax: Any) -> list[Stage]:
    from ..providers import relax as provider

    wanted = tvm_target(tvm, target)
    scheduled = provider.scheduled(module, wanted, relax)
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
    """The primitive functions that the scheduled program calls on the local device, with the bytes of each."""
    from ..providers import relax as provider

    tvm, relax, module = _imported(problem)
    where = "cpu" if problem.device.type == "cpu" else target
    return calls(provider.scheduled(module, tvm_target(tvm, where), relax), relax)


def tvm_target(tvm: Any, target: str) -> Any:
    """`target` as a TVM target: this CPU, or a GPU of that compute capability with an H200's limits."""
    if target == "cpu":
        return tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
    return tvm.target.Target(
        {
            "kind": "cuda", "arch": f"sm_{triton_kernels.capability(target)}", "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 49152, "thread_warp_size": 32, "registers_per_block": 65536,
        }
    )  # fmt: skip


def _script(module: Any) -> str:
    return tidy(module.script().strip() + "\n")


def _imports(module: Any) -> list[Any]:
    """A compiled module's imports, recursively."""
    return [part for child in module.imports for part in (child, *_imports(child))]


def calls(module: Any, relax: Any) -> list[Kernel]:
    """The calls in a module's main function, of primitive and library functions, with the bytes of their tensors."""
    # Compilation starts with this pass too; it turns calls that only reshape into views.
    module = relax.transform.RewriteDataflowReshape()(module)
    bindings = [binding for block in module["main"].body.blocks for binding in block.bindings]
    return [_kernel(b.value, _bytes(b.var.ty, relax), relax) for b in bindings if _moves(b.value, relax)]


def _moves(value: Any, relax: Any) -> bool:
    return isinstance(value, relax.Call) and getattr(value.op, "name", "") != "relax.reshape"


def _kernel(call: Any, written: int, relax: Any) -> Kernel:
    callee, arguments = call.op, list(call.args)
    if getattr(callee, "name", "").startswith("relax.call_"):  # the callee is its first argument
        callee = arguments.pop(0)
    operands = [
        a for argument in arguments for a in (argument.fields if isinstance(argument, relax.Tuple) else [argument])
    ]
    distinct = [a for i, a in enumerate(operands) if not any(a.same_as(b) for b in operands[:i])]
    return Kernel(name=_named(callee), read=sum(_bytes(a.ty, relax) for a in distinct), written=written)


def _named(callee: Any) -> str:
    """The name of a function of the module, an external function, or an operator."""
    found = next(filter(None, (getattr(callee, key, "") for key in ("name_hint", "global_symbol", "name"))))
    return str(found).removeprefix("relax.")


def _bytes(kind: Any, relax: Any) -> int:
    """Bytes of a tensor type, or of all in a tuple type; 0 for anything else."""
    if isinstance(kind, relax.TensorType):
        return math.prod(int(size) for size in kind.shape.values) * _itemsize(str(kind.dtype))
    return sum(_bytes(field, relax) for field in getattr(kind, "fields", ()))


def _itemsize(dtype: str) -> int:
    return torch.empty((), dtype=getattr(torch, dtype)).element_size()
