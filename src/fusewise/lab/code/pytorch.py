"""The stages and traffic of PyTorch's own execution modes: eager, TorchScript, torch.compile."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..ledger import Kernel
from ..modes import under
from ..plugin import Run, Unsupported
from ..problem import Problem
from . import aten, graphs, inductor, passes, python
from .stage import Stage, short, tidy


def operators(problem: Problem, run: Run, **options: Any) -> aten.Operators:
    """The operators that the timed part of a pass dispatches."""
    before, step = passes.steps(problem, run)
    state = before()
    return under(lambda compiled: aten.Operators(compiled=compiled, **options), lambda: step(state))[1]


def eager_stages(problem: Problem, run: Run) -> list[Stage]:
    """`source`, `bytecode` and the dispatched operators (`aten`)."""
    return [*python.stages(problem.program().function), operators(problem, run).stage()]


def script_stages(problem: Problem, run: Run) -> list[Stage]:
    """`source`; the graph of the scripted function; and the graph executed after profiling types and shapes."""
    jit: Any = torch.jit
    scripted: Any = run.call
    parts = python.functions(problem.program().function)
    found = [python.source(parts)]
    if hasattr(scripted, "inlined_graph"):  # absent if a traced graph is called with fewer arguments than the function
        found.append(_script_graph(str(scripted.inlined_graph), "torchscript"))
    passes.once(problem, run)
    passes.once(problem, run)  # the profiling executor optimises on the second call
    return [*found, _script_graph(str(jit.last_executed_optimized_graph()), "torchscript-optimised")]


def script_traffic(problem: Problem, run: Run) -> list[Kernel]:
    """The operators that the optimised graph dispatches, and the fuser's kernels with the tensor types it annotates."""
    passes.once(problem, run)
    passes.once(problem, run)
    kernels = operators(problem, run).kernels
    jit: Any = torch.jit
    for group in jit.last_executed_optimized_graph().findAllNodes("prim::TensorExprGroup", recurse=True):
        kernels.append(Kernel(name="TensorExprGroup", read=_typed(group.inputs()), written=_typed(group.outputs())))
    return kernels


def _typed(values: Any) -> int:
    """Bytes of the tensors among a graph's values."""
    total = 0
    for value in values:
        if value.type().kind() != "TensorType":
            continue
        sizes, dtype = value.type().sizes(), value.type().dtype()
        if sizes is None or dtype is None:
            raise Unsupported("a fused kernel does not report the sizes of its tensors")
        total += math.prod(sizes) * dtype.itemsize
    return total


def _script_graph(text: str, stage: str) -> Stage:
    """A TorchScript graph; each node carries its source line as a comment."""
    lines = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if place := re.search(r"# (\S+\.py):(\d+):\d+", line):
            lines[number] = f"{short(place[1])}:{place[2]}"
    counts = {"nodes": len(re.findall(r" = (?:aten|prim)::", text)), "fused": text.count("prim::TensorExprGroup")}
    return Stage(stage=stage, language="torchscript", text=tidy(text), lines=lines, counts=counts)


def compile_stages(problem: Problem, run: Run, target: str, options: Mapping[str, Any]) -> list[Stage]:
    """`source`, `bytecode`, Dynamo's and AOTAutograd's graphs, and Inductor's kernels for the local device and, if
    different, for `target`. `options`: of torch.compile."""
    function = problem.program().function
    call = passes.runner(problem, run)
    found = [*python.stages(function), *graphs.stages(call, function)]
    on_gpu = problem.device.type == "cuda"
    with inductor.watched() as generated:
        _compiled(call, function, options)
    found += inductor.stages(generated, target if on_gpu else "cpu", target if on_gpu else "")
    if not on_gpu and target != "cpu":
        found += inductor.stages(inductor.cross_compiled(inductor.lowered(call, function), target), target, target)
    return found


def compile_traffic(problem: Problem, run: Run, options: Mapping[str, Any]) -> list[Kernel]:
    """The kernels that Inductor schedules for the local device."""
    with inductor.watched() as generated:
        _compiled(passes.runner(problem, run), problem.program().function, options)
    return kernels_of_pass(problem, generated)


def _compiled(
    call: Callable[[Callable[..., Any]], Callable[[], Any]], function: Callable[..., Any], options: Mapping[str, Any]
) -> None:
    torch.compiler.reset()
    call(torch.compile(function, fullgraph=True, dynamic=False, **options))()
    torch.compiler.reset()


def kernels_of_pass(problem: Problem, generated: Sequence[inductor.Generated]) -> list[Kernel]:
    """The kernels of the graphs that belong to the problem's pass."""
    wanted = {"fwd": (False,), "bwd": (True,), "fwd+bwd": (False, True)}[problem.task.pass_]
    return [kernel for graph in generated if graph.backward in wanted for kernel in graph.kernels]
