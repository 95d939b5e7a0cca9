"""PyTorch's own execution modes: eager, TorchScript and torch.compile, all from the same eager source."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from ..code.stage import Stage
from ..ledger import Kernel
from ..plugin import Provider, Run, Unsupported
from ..problem import Exportable, Problem, Program, differentiable
from ..reason import message


class Eager(Provider):
    """The problem's program unchanged, operator by operator."""

    name = "eager"
    packages = ("torch",)

    def build(self, problem: Problem) -> Run:
        program = problem.program()
        return Run(program.function, program.enter, program.leave, form="eager")

    def stages(self, problem: Problem, target: str) -> Sequence[Stage]:
        from ..code import pytorch

        return pytorch.eager_stages(problem, self.build(problem))

    def traffic(self, problem: Problem, target: str) -> Sequence[Kernel]:
        from ..code import pytorch

        return pytorch.operators(problem, self.build(problem)).kernels


class FusedGelu(Provider):
    """PyTorch's own hand-written kernel for tanh GELU, `F.gelu(x, approximate="tanh")`: one read and one write. The
    baseline for compiling the written-out formula."""

    name = "aten-gelu"
    packages = ("torch",)
    ops = ("gelu",)

    def build(self, problem: Problem) -> Run:
        if problem.op not in self.ops:
            raise Unsupported(f"computes gelu only, not {problem.op}")
        return Run(_gelu)

    def stages(self, problem: Problem, target: str) -> Sequence[Stage]:
        from ..code import python, pytorch

        return [python.source(python.functions(_gelu)), pytorch.operators(problem, self.build(problem)).stage()]

    def traffic(self, problem: Problem, target: str) -> Sequence[Kernel]:
        from ..code import pytorch

        return pytorch.operators(problem, self.build(problem)).kernels


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


class TorchScript(Provider):
    """`torch.jit.script` of the eager form, or `torch.jit.trace` of what cannot be scripted."""

    name = "torchscript"
    remembers = False
    packages = ("torch",)

    def build(self, problem: Problem) -> Run:
        program = problem.program()
        with warnings.catch_warnings():
            # Deprecated since torch 2.9, but still widely deployed.
            warnings.simplefilter("ignore")
            try:
                scripted = torch.jit.script(program.function)
                _check_taken(scripted, problem, program)
            except Exception as error:  # its front end raises anything for unsupported Python
                scripted = traced(problem, program, error)
        return Run(scripted, program.enter, program.leave, form="eager")

    def stages(self, problem: Problem, target: str) -> Sequence[Stage]:
        from ..code import pytorch

        return pytorch.script_stages(problem, self.build(problem))

    def traffic(self, problem: Problem, target: str) -> Sequence[Kernel]:
        from ..code import pytorch

        return pytorch.script_traffic(problem, self.build(problem))


def _check_taken(scripted: Any, problem: Problem, program: Program) -> None:
    """TypeError for functions that script as something else, without their decorators, or that script but cannot be called
    with these arguments: methods without their object, modules with parametrizations, objects of Python classes, such as
    partial functions, and parameters without annotation (a tensor, to TorchScript) that receive a number or None."""
    if inspect.ismethod(program.function):
        raise TypeError("the object whose method it is is left out")
    if isinstance(program.function, nn.Module) and any(map(parametrize.is_parametrized, program.function.modules())):
        raise TypeError("its parametrizations raise an error when scripted code calls them")
    if hasattr(getattr(program.function, "forward", program.function), "__wrapped__"):
        raise TypeError("its decorator is left out")
    method = getattr(scripted, "forward", scripted)
    if not hasattr(method, "schema"):
        if isinstance(scripted, torch.jit._script.RecursiveScriptClass):
            raise TypeError(f"a {type(program.function).__name__} is scripted as an object that cannot be called")
        return
    formal = [a for a in method.schema.arguments if a.name != "self"]
    actual = program.enter(*problem.tensors)
    left_out = [a.default_value for a in formal[len(actual) :]]
    for parameter, given in zip(formal, (*actual, *left_out), strict=False):
        if isinstance(parameter.type, torch.TensorType) and not isinstance(given, Tensor):
            raise TypeError(f"{parameter.name} is a tensor without an annotation, and {given!r} is given")


def traced(problem: Problem, program: Program, cause: Exception) -> Any:
    """`torch.jit.trace` of a function that cannot be scripted; non-tensor arguments become constants."""
    arguments = program.enter(*problem.leaves(False))
    tensors = [i for i, a in enumerate(arguments) if isinstance(a, Tensor)]
    example = tuple(arguments[i] for i in tensors)
    plain = len(example) == len(arguments) and (
        inspect.isroutine(program.function) or isinstance(program.function, nn.Module)
    )
    over_tensors = program.function if plain else Exportable(program.function, arguments)
    try:
        compiled = torch.jit.trace(over_tensors, example, strict=False)
    except Exception as error:  # as above
        raise Unsupported(f"can be neither scripted ({message(cause)}) nor traced ({message(error)})") from error
    if not _follows(compiled, over_tensors, example):
        raise Unsupported(f"cannot be scripted ({message(cause)}), and a trace keeps values of the inputs as constants")
    if len(example) == len(arguments):
        return compiled
    return lambda *given: compiled(*(given[i] for i in tensors))


def _follows(compiled: Any, function: Any, example: Sequence[Tensor]) -> bool:
    """Whether a trace also matches its function on other values: in reverse order, and much smaller so that baked-in
    values show; then with the other sign, which turns comparisons round, so that baked-in branches show, and zero for
    integers, which is an index and a length, too."""
    reverse = [x.detach().flatten().flip(0).view(x.shape) for x in example]
    smaller = [x / 64 if differentiable(x) else x for x in reverse]
    turned = [-x.detach() if differentiable(x) else torch.zeros_like(x) for x in example]
    return all(_agree(compiled, function, other) for other in (smaller, turned))


def _agree(compiled: Any, function: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether a trace matches its function on these values. True if the function itself rejects them."""
    try:
        wanted = function(*map(torch.clone, tensors))
    except Exception:
        return True
    try:
        results = (compiled(*tensors), wanted)
    except Exception:  # sizes that it keeps do not fit those of these values
        return False
    found, right = ([x.detach() for x in pytree.tree_leaves(r) if isinstance(x, Tensor)] for r in results)
    return len(found) == len(right) and all(map(_near, found, right))


def _near(x: Tensor, y: Tensor) -> bool:
    """Equality to about one digit; rounding may change the others."""
    if x.shape != y.shape or y.numel() == 0:
        return x.shape == y.shape
    x, y = (torch.view_as_real(z.resolve_conj()) if z.is_complex() else z.double() for z in (x, y))
    return torch.allclose(x, y, 0.1, 0.1 * float(y.abs().nan_to_num().max()), equal_nan=True)


class TorchCompile(Provider):
    """`torch.compile` of the eager form, specialised for each shape: its best case, not its most flexible one."""

    name = "torch.compile"
    packages = ("torch", "triton")
    options: ClassVar[dict[str, Any]] = {}

    def build(self, problem: Problem) -> Run:
        program = problem.program()
        torch.compiler.reset()  # a worker serves many shapes; beyond the recompile limit Dynamo would fall back to eager
        compiled = torch.compile(program.function, fullgraph=True, dynamic=False, **self.options)
        return Run(compiled, program.enter, program.leave, form="two-kernels")

    def stages(self, problem: Problem, target: str) -> Sequence[Stage]:
        from ..code import pytorch

        return pytorch.compile_stages(problem, self.build(problem), target, self.options)

    def traffic(self, problem: Problem, target: str) -> Sequence[Kernel]:
        from ..code import pytorch

        return pytorch.compile_traffic(problem, self.build(problem), self.options)


class TorchCompileTuned(TorchCompile):
    """`torch.compile` with mode="max-autotune-no-cudagraphs": products from templates, autotuned."""

    name = "torch.compile-max-autotune"
    options: ClassVar[dict[str, Any]] = {"mode": "max-autotune-no-cudagraphs"}

    def chosen(self, op: str, device: str) -> bool:
        """Only where there is a product to tune and tuning takes seconds, not minutes."""
        return op == "geglu" and device.startswith("cuda")


class TorchCompileGraphs(TorchCompile):
    """`torch.compile` with mode="reduce-overhead": CUDA graphs, which copy their inputs and own their outputs."""

    name = "torch.compile-reduce-overhead"
    options: ClassVar[dict[str, Any]] = {"mode": "reduce-overhead"}
    devices = ("cuda",)
    default = False
