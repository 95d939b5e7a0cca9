"""JAX and its compiler XLA on the problem's own tensors, shared through DLPack without copies.

Our targets have jax.numpy versions (`Problem.jax`); a user's function goes through torch.export and torchax. Gradients
use `jax.vjp`: in bwd the residuals are computed outside the timed region; fwd+bwd is one compiled function. torch's
complex gradients are the conjugates of JAX's.

XLA uses its own stream, so every call waits for its results.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fusewise._shared.gpu import tf32_allowed

from ..code.stage import Stage
from ..ledger import Kernel
from ..plugin import Missing, Provider, Run, Unsupported, Vjp, require
from ..problem import Exportable, Problem
from ..reason import reason

INSTALL = "pip install 'fusewise[lab]'"
#: Matters where GELU's backward subtracts tanh from 1.
TANH = "XLA's tanh on a CPU is off by up to four units in the last place"
#: JAX differentiates the exported program, which computes the same results.
EXPORTED = "if it has detach, torch.no_grad or a torch.autograd.Function: torch.export drops them from the program that JAX differentiates"


class Jax(Provider):
    """`jax.jit`, compiled for each shape."""

    name, module = "jax", "jax"
    remembers = False  # unless told to
    packages = ("jax", "jaxlib", "torchax")
    install = INSTALL

    def build(self, problem: Problem) -> Run:
        if problem.overwrites:
            raise Unsupported("its arrays never change, and the operation overwrites its tensors")
        jax = _jax(problem)
        program = problem.program()
        with torch.enable_grad():
            leaves = problem.leaves(True)
            example = program.enter(*leaves)
        tensors = [i for i, a in enumerate(example) if isinstance(a, Tensor)]
        if any(bool((example[i] != example[i].int()).any()) for i in tensors if example[i].dtype == torch.int64):
            raise Unsupported("its integers have 32 bits unless it is told otherwise, and some of an input need more")
        moving = [i for i, a in enumerate(example) if isinstance(a, Tensor) and a.requires_grad]
        own = problem.jax()
        arithmetic = TANH if problem.op == "gelu" and problem.device.type == "cpu" else ""
        held: tuple[Any, ...] = ()  # parameters, passed as arguments
        names: list[str] = []
        if own is None:
            function, held, names = _bridged(problem, example)
            arithmetic = "" if problem.task.pass_ == "fwd" else EXPORTED
        else:
            constants = {i: a for i, a in enumerate(example) if i not in tensors}
            function = _over_arrays(own, constants, tensors)
        forward = jax.jit(function)

        def gradients(arrays: tuple[Any, ...], held: tuple[Any, ...]) -> Any:
            """The results, and the function from upstream gradients to those of differentiated arguments and
            parameters."""
            rest, frozen = [a for i, a in zip(tensors, arrays, strict=True) if i not in moving], held[len(names) :]

            def of_moving(wanted: Sequence[Any], held: Sequence[Any]) -> Any:
                mine, others = iter(wanted), iter(rest)
                return function(tuple(next(mine if i in moving else others) for i in tensors), (*held, *frozen))

            wanted = [a for i, a in zip(tensors, arrays, strict=True) if i in moving]
            return jax.vjp(of_moving, wanted, list(held[: len(names)]))

        def both(arrays: tuple[Any, ...], held: tuple[Any, ...], upstream: Any) -> Any:
            results, backward = gradients(arrays, held)
            return results, backward(_like(results, upstream))

        kept, joint = jax.jit(gradients), jax.jit(both)
        backward = jax.jit(lambda function, results, upstream: function(_like(results, upstream)))

        def leave_gradients(found: Any) -> tuple[Tensor, ...]:
            """Back through the views of `enter`, by torch's autograd."""
            arguments, of_held = found
            with torch.enable_grad():
                leaves = problem.leaves(True)
                entered = program.enter(*leaves)
            wanted = [x for x in leaves if x.requires_grad]
            back = torch.autograd.grad(
                [entered[i] for i in moving], wanted, [torch.utils.dlpack.from_dlpack(g).conj() for g in arguments]
            )
            if not held:
                return back
            mine = dict(zip(names, of_held, strict=True))
            return (*back, *(torch.utils.dlpack.from_dlpack(mine[name]).conj() for name in problem.parameter_names()))

        def forward_kept(arguments: tuple[Any, ...]) -> tuple[Any, Any]:
            results, function = jax.block_until_ready(kept(arguments, held))
            return results, (function, results)

        vjp = Vjp(
            forward=forward_kept,
            backward=lambda state, upstream: jax.block_until_ready(backward(*state, upstream)),
            both=lambda arguments, upstream: jax.block_until_ready(joint(arguments, held, upstream)),
            enter=lambda upstream: tuple(_array(jax, g.conj()) for g in upstream),
            leave=leave_gradients,
        )
        return Run(
            lambda *arrays: jax.block_until_ready(forward(arrays, held)),
            lambda *xs: tuple(_array(jax, a) for a in program.enter(*xs) if isinstance(a, Tensor)),
            lambda results: program.leave(_torch(jax, results)),
            vjp=None if problem.task.pass_ == "fwd" else vjp,
            torch_memory=False,
            foreign=True,
            arithmetic=arithmetic,
        )

    def stages(self, problem: Problem, target: str) -> Sequence[Stage]:
        from ..code import xla

        _jax(problem)
        return xla.stages(problem, self.build)

    def traffic(self, problem: Problem, target: str) -> Sequence[Kernel]:
        from ..code import xla

        _jax(problem)
        return xla.traffic(problem, self.build)


def _jax(problem: Problem) -> Any:
    """JAX, configured for the problem's device, without preallocating its memory, and with torch's precision for
    float32 products."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if problem.device.type == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax = require("jax", INSTALL)
    jax.config.update("jax_default_matmul_precision", "high" if tf32_allowed() else "highest")
    if problem.device.type == "cuda" and jax.default_backend() != "gpu":
        raise Missing("this jax has no CUDA; pip install 'jax[cuda13]'")
    return jax


def _array(jax: Any, x: Tensor) -> Any:
    """The tensor's memory as a JAX array. JAX has no 64-bit integers by default, so those become 32-bit."""
    x = x.detach().to(torch.int32) if x.dtype == torch.int64 else x.detach()
    return jax.dlpack.from_dlpack(x.resolve_conj().contiguous())


def _torch(jax: Any, results: Any) -> Any:
    """The same structure with tensors in place of arrays."""
    return jax.tree_util.tree_map(torch.utils.dlpack.from_dlpack, results)


def _like(results: Any, upstream: Sequence[Any]) -> Any:
    """Upstream gradients in the structure of the results."""
    import jax

    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(results), list(upstream))


def _over_arrays(function: Callable[..., Any], constants: dict[int, Any], tensors: Sequence[int]) -> Callable[..., Any]:
    def over(arrays: tuple[Any, ...], held: tuple[Any, ...]) -> Any:
        given = constants | dict(zip(tensors, arrays, strict=True))
        return function(*(given[i] for i in range(len(given))))

    return over


def _bridged(problem: Problem, example: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...], list[str]]:
    """The program through torch.export and torchax: a function of arrays and parameters, the parameters, and the names
    of the leading ones, which are differentiated."""
    with _named_tensor_overloads():
        bridge = require("torchax.export", INSTALL if sys.version_info >= (3, 11) else "torchax needs Python 3.11")
    if any(g is None for g in problem.upstream):
        raise Unsupported("the bridge through torchax takes only outputs with a gradient")
    module = Exportable(problem.program().function, example)
    given = tuple(a.detach() for a in example if isinstance(a, Tensor))
    try:
        exported = torch.export.export(module, given)
        weights, function = bridge.exported_program_to_jax(exported)
    except Exception as error:  # exporters raise anything
        raise Unsupported(f"torch.export or torchax cannot take it: {reason(error)}") from error
    # One array per parameter, however many names the export has for it; differentiated ones first.
    known = dict(module.named_parameters(remove_duplicate=False))
    own = sorted(module.named_parameters(), key=lambda named: not named[1].requires_grad)
    slots = {id(p): slot for slot, (_, p) in enumerate(own)}
    filled = [slots[id(known[name])] for name in exported.graph_signature.parameters]
    held, rest = tuple(weights[filled.index(slot)] for slot in range(len(own))), list(weights[len(filled) :])
    names = [n.removeprefix("function.") for n, p in own if p.requires_grad]
    count = len(exported.graph_signature.user_outputs)  # parameter mutations come before them

    def over(arrays: tuple[Any, ...], held: tuple[Any, ...]) -> Any:
        return function([*(held[slot] for slot in filled), *rest], arrays)[-count:]

    return over, held, names


@contextmanager
def _named_tensor_overloads() -> Iterator[None]:
    """torchax 0.0.13 builds a table of overloads that torch 2.12 removed with its named tensors; give it dummies."""
    packet: Any = torch._ops.OpOverloadPacket
    original = packet.__getattr__

    def found(self: Any, key: str) -> Any:
        try:
            return original(self, key)
        except AttributeError:
            if "names" not in key and "dimname" not in key.lower():
                raise
            return object()

    packet.__getattr__ = found
    try:
        yield
    finally:
        packet.__getattr__ = original
