"""A problem: one operation on one set of tensors, recreated identically in every worker process from a seed.

A target (`targets/`) subclasses `Problem` to define the tensors and the mathematics. Correctness checks, timing and
memory measurement use this interface only, and so do the compilers: `program` is the problem as plain PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusewise._shared.gpu import tf32_allowed
from fusewise.ops._cases import DTYPES as DTYPES
from fusewise.ops._cases import PRECISIONS as PRECISIONS
from fusewise.ops._common import span

Pass = Literal["fwd", "bwd", "fwd+bwd"]
PASSES: tuple[Pass, ...] = ("fwd", "bwd", "fwd+bwd")


@dataclass(frozen=True)
class Task:
    """What a worker receives: plain JSON from which it recreates the problem."""

    op: str
    case: str
    dtype: str
    pass_: Pass
    device: str
    seed: int
    detail: Mapping[str, Any] = field(default_factory=dict)  # whatever the target needs besides the case's name

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.op, self.case, self.dtype, self.pass_)


_own: list[str] = []  # this process's precision of float32 matmuls, before any provider's library could change it


def set_precision(dtype: str) -> None:
    """Let float32 matmuls round their operands to tf32 if the task's dtype says so, else as this process had it when this
    was first called."""
    if not _own:
        _own.append(precision())
    wanted = "high" if dtype == "tf32" else _own[0]
    if precision() != wanted:
        torch.set_float32_matmul_precision(wanted)


def reset_precision() -> None:
    """Undo `set_precision` and whatever else has changed it since."""
    if _own:
        set_precision("")


def precision() -> str:
    """This process's precision of float32 matmuls."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by torch's newer settings
        return "high" if tf32_allowed() else "highest"


def same(*arguments: Any) -> Any:
    """The arguments unchanged."""
    return arguments


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """One tensor or several, as a tuple."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def differentiable(x: Tensor) -> bool:
    """Whether a tensor like x, real or complex, can have a gradient."""
    return x.is_floating_point() or x.is_complex()


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype that replaces this one when the truth is computed."""
    return torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else dtype


def copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy with the strides of `x`, gaps and repeated elements included."""
    copied = x.to(dtype, copy=True)
    if copied.stride() == x.stride() or x.numel() == 0:
        return copied
    memory = x.as_strided((span(x.shape, x.stride()),), (1,)).to(dtype, copy=True)
    return memory.as_strided(x.shape, x.stride())


def handed_over(outputs: Sequence[Tensor], upstream: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Stand-ins for copies of `upstream` that nothing else references: hooks swap in the copies during the backward of
    `outputs`. As in training, where the function that produced a gradient releases it and its memory can be reused."""
    return tuple(None if g is None else _handed_over(y, g) for y, g in zip(outputs, upstream, strict=True))


def _handed_over(y: Tensor, g: Tensor) -> Tensor:
    alone = [g.to(y.dtype, copy=True)]
    if y.grad_fn is None or y._backward_hooks:  # no node to make the swap, or only after the function's own hooks
        return alone[0]
    stand_in = alone[0].new_zeros(()).expand_as(y)

    def meet(incoming: Tensor) -> Tensor:
        """If other outputs depend on y, autograd has already added their part to the stand-in."""
        return alone.pop() if incoming is stand_in else incoming + alone.pop()

    y.register_hook(meet)
    return stand_in


@dataclass(frozen=True)
class Program:
    """A problem as plain PyTorch, for anything that runs or compiles it: `leave(function(*enter(*problem.tensors)))`.

    function: tensors and Python numbers in, one tensor or a tuple of tensors out; closes over no tensor, so that every
        compiler, TorchScript included, accepts it unchanged.
    enter: the problem's tensors -> the arguments of function. Views and tables, which are not part of the operation.
    leave: the result of function -> the outputs in the problem's own form.
    """

    function: Callable[..., Any]
    enter: Callable[..., tuple[Any, ...]] = same
    leave: Callable[[Any], tuple[Tensor, ...]] = as_tuple


class Exportable(nn.Module):
    """The function of a program for torch.export: only its tensor arguments are inputs, others are constants; only the
    tensors among its results are outputs, flattened."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        super().__init__()
        self.function = function  # registers a module as a submodule, with its parameters
        self.arguments = [None if isinstance(a, Tensor) else a for a in arguments]
        self.where = [i for i, a in enumerate(arguments) if isinstance(a, Tensor)]

    def forward(self, *tensors: Tensor) -> Any:
        given = list(self.arguments)
        for i, x in zip(self.where, tensors, strict=True):
            given[i] = x
        result = self.function(*given)
        if isinstance(result, Tensor):
            return result
        return tuple(x for x in pytree.tree_leaves(result) if isinstance(x, Tensor))


class Problem:
    """The tensors, the mathematics on them, and the minimum bytes and FLOPs."""

    #: The operation is in-place by definition, for every provider.
    overwrites = False
    #: Indices of tensors whose first dimension holds independent rows, as every output's then does. For large problems
    #: the truth is computed some rows at a time.
    by_rows: frozenset[int] = frozenset()
    #: A call overwrites what the previous call's backward reads, so that backward must run first.
    one_by_one: bool = False

    def __init__(self, task: Task) -> None:
        self.task = task
        self.device = torch.device(task.device)
        self.dtype = PRECISIONS[task.dtype]
        self.tf32 = tf32_allowed()
        #: Inputs; floating and complex ones are differentiable. A cold-cache measurement rotates over copies of them.
        self.tensors: tuple[Tensor, ...] = ()
        #: Indices of differentiable tensors that need no gradient.
        self.fixed: frozenset[int] = frozenset()
        #: One random gradient per output, of its shape and dtype; None for an output without one.
        self.upstream: tuple[Tensor | None, ...] = ()
        #: Tensors that `program`'s function holds itself (a module's parameters), differentiated along with the inputs;
        #: and their float64 counterparts for `truth`.
        self.parameters: tuple[Tensor, ...] = ()
        self.wide_parameters: tuple[Tensor, ...] = ()

    @property
    def op(self) -> str:
        """Name of the target."""
        return self.task.op

    def take(self, task: Task) -> None:
        """Switch to a task that differs at most in its pass, keeping the tensors."""
        self.task = task

    def held(self) -> int:
        """Bytes of the tensors and the output gradients."""
        return sum(x.numel() * x.element_size() for x in (*self.tensors, *self.upstream) if x is not None)

    def release(self) -> None:
        """Drop the tensors: the timed work has its own copies. A provider's call may still use the rest of the
        problem."""
        self.tensors, self.upstream = (), ()

    def begin_anew(self) -> None:
        """Undo what calls have written to state that the function holds."""

    def written_state(self, wide: bool = False) -> dict[str, Tensor]:
        """State that calls write, those of `truth` if `wide`, by name."""
        return {}

    def left_out(self) -> list[str]:
        """State that eager's call writes besides its outputs and the calls since `begin_anew` have not written."""
        return []

    def overwritten(self) -> list[str]:
        """State that eager's calls leave as it is and others have written."""
        return []

    def piece(self, rows: slice) -> Problem:
        """The problem restricted to some rows."""
        part = copy.copy(self)
        part.tensors = tuple(x[rows] if i in self.by_rows else x for i, x in enumerate(self.tensors))
        part.upstream = tuple(None if g is None else g[rows] for g in self.upstream)
        return part

    def program(self) -> Program:
        """The usual eager code as a function of tensors: what compilers compile, and the baseline for errors."""
        raise NotImplementedError

    def parameter_names(self) -> list[str]:
        """Names of `parameters` in the function's module."""
        function = self.program().function
        return [n for n, p in function.named_parameters() if p.requires_grad] if self.parameters else []  # type: ignore[attr-defined]

    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(g.shape) for g in self.upstream if g is not None)

    def output_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of eager's outputs, which every provider's outputs must have."""
        return tuple(g.dtype for g in self.upstream if g is not None)

    def leaves(self, gradient: bool, wide: bool = False) -> tuple[Tensor, ...]:
        """Copies of the tensors, in float64 if `wide`; differentiable ones require grad if `gradient`."""

        def leaf(x: Tensor) -> Tensor:
            return copied(x, widened(x.dtype) if wide else x.dtype)

        return self.wanting(tuple(map(leaf, self.tensors)), gradient)

    def wanting(self, tensors: Sequence[Tensor], gradient: bool) -> tuple[Tensor, ...]:
        """The tensors as leaves of an autograd graph; those to differentiate require grad if `gradient`."""
        return tuple(
            x.detach().requires_grad_(gradient and differentiable(x) and i not in self.fixed)
            for i, x in enumerate(tensors)
        )

    def gradients(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], upstream: Sequence[Tensor | None], wide: bool = False
    ) -> tuple[Tensor, ...]:
        """Gradients of all leaves and parameters that require grad; zero where no output depends on them."""
        pairs = [(y, g.to(y.dtype)) for y, g in zip(outputs, upstream, strict=True) if g is not None]
        wanted = [x for x in leaves if x.requires_grad]
        wanted += self.wide_parameters if wide else self.parameters
        return torch.autograd.grad(
            [y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True, materialize_grads=True
        )

    def truth(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The mathematics on float64 tensors, differentiable."""
        raise NotImplementedError

    def eager(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """`program` applied to `tensors` in their own dtype."""
        program = self.program()
        return program.leave(program.function(*program.enter(*tensors)))

    def jax(self) -> Callable[..., Any] | None:
        """The function of `program` in jax.numpy, with the same arguments; None if there is no port. Only called in a
        process that has JAX."""
        return None

    def compact(self) -> Problem:
        """The same problem for the traffic ledger, with indexed tables cut down to the rows in use: a compiler's
        kernels do not show how much of a table they read."""
        return self

    def untouched(self) -> tuple[int, int]:
        """Of the bytes that the operation overwrites, how many an in-place kernel need not read, and need not write."""
        return 0, 0

    def products(self, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
        """The matrix products that the pass needs, as pairs of matrices; empty for most problems."""
        return []

    def memory(self, form: str) -> dict[str, Any]:
        """Predicted memory of a provider that computes like `form` (see `Run.form`), as plain JSON for the record, e.g.
        predicted_peak_bytes and predicted_held_bytes."""
        return {}

    def shape(self) -> str:
        """The shape for display, e.g. `b4 s4096 h32 kv8 d128`."""
        raise NotImplementedError

    def bytes_min(self) -> int:
        """Minimum bytes that the pass reads and writes, per call."""
        raise NotImplementedError

    def flops_min(self) -> int | None:
        """Minimum FLOPs of the pass; None if unknown."""
        raise NotImplementedError

    def flops_unknown(self) -> list[str]:
        """Names of the operators because of which `flops_min` is None."""
        return []
