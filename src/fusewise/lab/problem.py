"""A problem: one operation on one set of tensors, remade identically in every worker from a seed.

A target (`targets/`) subclasses `Problem` and says how its tensors are made and what the mathematics is. Everything the
lab does with it (truth, timing, memory) is written against this class alone, and so is every compiler: `program` is the
problem as plain PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Pass = Literal["fwd", "bwd", "fwd+bwd"]
PASSES: tuple[Pass, ...] = ("fwd", "bwd", "fwd+bwd")


@dataclass(frozen=True)
class Task:
    """What a worker is told: plain JSON, enough to remake the problem."""

    op: str
    case: str
    dtype: str
    pass_: Pass
    device: str
    seed: int
    detail: Mapping[str, Any] = field(default_factory=dict)  # what a target needs beyond the case's name

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.op, self.case, self.dtype, self.pass_)


def same(*arguments: Any) -> Any:
    """The arguments as they came."""
    return arguments


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """One tensor or several, as a tuple."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def differentiable(x: Tensor) -> bool:
    """Whether there can be a gradient of its values, real or complex."""
    return x.is_floating_point() or x.is_complex()


def widened(dtype: torch.dtype) -> torch.dtype:
    """What stands for the dtype where the truth is computed."""
    return torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else dtype


def copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy with the strides of `x`, holes and repeated elements included."""
    made = x.to(dtype, copy=True)
    if made.stride() == x.stride() or x.numel() == 0:
        return made
    memory = x.as_strided((span(x.shape, x.stride()),), (1,)).to(dtype, copy=True)
    return memory.as_strided(x.shape, x.stride())


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor that is not empty."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def handed_over(outputs: Sequence[Tensor], upstream: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Stand-ins for copies of `upstream`, which the backward of `outputs` meets in their place and nobody else holds. So it is in
    training, where the function that made a gradient lets go of it, and its memory can be used again."""
    return tuple(None if g is None else _handed_over(y, g) for y, g in zip(outputs, upstream, strict=True))


def _handed_over(y: Tensor, g: Tensor) -> Tensor:
    alone = [g.to(y.dtype, copy=True)]
    if y.grad_fn is None:  # no function of its own would meet it
        return alone[0]
    stand_in = alone[0].new_zeros(()).expand_as(y)

    def meet(incoming: Tensor) -> Tensor:
        """Where others depend on y, too, their part has been added to the stand-in."""
        return alone.pop() if incoming is stand_in else incoming + alone.pop()

    y.register_hook(meet)
    return stand_in


@dataclass(frozen=True)
class Program:
    """A problem as plain PyTorch, for whatever runs or compiles that: `leave(function(*enter(*problem.tensors)))`.

    function: tensors and Python numbers in, one tensor or a tuple of tensors out; closed over no tensor, so that it
        compiles as it stands, with TorchScript too.
    enter: the problem's tensors -> the arguments of function (views, tables: what is not the operation itself).
    leave: what function returned -> the outputs in the problem's own form.
    """

    function: Callable[..., Any]
    enter: Callable[..., tuple[Any, ...]] = same
    leave: Callable[[Any], tuple[Tensor, ...]] = as_tuple


class Exportable(nn.Module):
    """A program's function over its tensor arguments alone, for torch.export; other arguments are fixed, and of what it returns
    there are the tensors, several in a row."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        super().__init__()
        self.function = function  # a module's parameters are this module's, too
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
    """Tensors, the mathematics on them, and the bytes and flops it needs at least."""

    #: The operation is there to overwrite some of its tensors, whoever runs it.
    overwrites = False
    #: Tensors, by their index, whose first dimension is of rows that know nothing of each other, as is every output's: of a
    #: large problem the truth is computed some rows at a time.
    by_rows: frozenset[int] = frozenset()
    #: A call writes to what the backward of the one before reads, so that this must have run by then.
    one_by_one: bool = False

    def __init__(self, task: Task) -> None:
        self.task = task
        self.device = torch.device(task.device)
        self.dtype = DTYPES[task.dtype]
        #: Inputs, the floating and complex ones differentiable; a cold measurement rotates over copies of these.
        self.tensors: tuple[Tensor, ...] = ()
        #: Which of them want no gradient though they could have one, by their index.
        self.fixed: frozenset[int] = frozenset()
        #: One random gradient for each output, in its shape and dtype; None for an output that has none.
        self.upstream: tuple[Tensor | None, ...] = ()
        #: What `program`'s function holds by itself, a module's parameters, differentiated besides the tensors; and the
        #: same in float64, as `truth` uses them.
        self.parameters: tuple[Tensor, ...] = ()
        self.wide_parameters: tuple[Tensor, ...] = ()

    @property
    def op(self) -> str:
        """Name of the target."""
        return self.task.op

    def take(self, task: Task) -> None:
        """Go on with a task that differs in its pass at most; the tensors stay."""
        self.task = task

    def held(self) -> int:
        """Bytes of the tensors and of the outputs' gradients."""
        return sum(x.numel() * x.element_size() for x in (*self.tensors, *self.upstream) if x is not None)

    def release(self) -> None:
        """Let go of these: what is timed has its own. A provider's call may go on asking the problem for anything else."""
        self.tensors, self.upstream = (), ()

    def begin_anew(self) -> None:
        """Undo what calls have written to what the function holds by itself."""

    def left_out(self) -> list[str]:
        """What eager code's call writes to besides its outputs, and the calls since `begin_anew` have not."""
        return []

    def piece(self, rows: slice) -> Problem:
        """The problem of some of the rows alone."""
        part = copy.copy(self)
        part.tensors = tuple(x[rows] if i in self.by_rows else x for i, x in enumerate(self.tensors))
        part.upstream = tuple(None if g is None else g[rows] for g in self.upstream)
        return part

    def program(self) -> Program:
        """The usual eager code as a function of tensors: what compilers compile and the yardstick for errors."""
        raise NotImplementedError

    def parameter_names(self) -> list[str]:
        """The names of `parameters` in the function's module."""
        function = self.program().function
        return [n for n, p in function.named_parameters() if p.requires_grad] if self.parameters else []  # type: ignore[attr-defined]

    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(g.shape) for g in self.upstream if g is not None)

    def output_dtypes(self) -> tuple[torch.dtype, ...]:
        """Those of eager code, which every provider's outputs must have."""
        return tuple(g.dtype for g in self.upstream if g is not None)

    def leaves(self, gradient: bool, wide: bool = False) -> tuple[Tensor, ...]:
        """Copies of the tensors, in float64 if `wide`; the floating and complex ones want a gradient if `gradient` says so."""

        def leaf(x: Tensor) -> Tensor:
            return copied(x, widened(x.dtype) if wide else x.dtype)

        return self.wanting(tuple(map(leaf, self.tensors)), gradient)

    def wanting(self, tensors: Sequence[Tensor], gradient: bool) -> tuple[Tensor, ...]:
        """The tensors as leaves of a graph; those that are differentiated want a gradient if `gradient` says so."""
        return tuple(
            x.detach().requires_grad_(gradient and differentiable(x) and i not in self.fixed)
            for i, x in enumerate(tensors)
        )

    def gradients(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], upstream: Sequence[Tensor | None], wide: bool = False
    ) -> tuple[Tensor, ...]:
        """The gradients of all leaves and parameters that have one; zero where nothing depends on them."""
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
        """`program` called on `tensors`, in their own dtype."""
        program = self.program()
        return program.leave(program.function(*program.enter(*tensors)))

    def jax(self) -> Callable[..., Any] | None:
        """`program`'s function in jax.numpy, taking the same arguments; None where nobody wrote it. Called in a process
        that has JAX."""
        return None

    def compact(self) -> Problem:
        """The same problem for a ledger of its traffic: tables that are read through an index hold the rows in use and no
        others, since compilers' kernels do not tell how much of a table they read."""
        return self

    def untouched(self) -> tuple[int, int]:
        """Bytes of what the operation overwrites that a kernel in place need not read, and need not write."""
        return 0, 0

    def products(self, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
        """The bare matrix products that the pass needs at least, each two matrices; none for most problems."""
        return []

    def memory(self, form: str) -> dict[str, Any]:
        """What a model of the problem's memory says of a provider that computes it like `form` (see `Run.form`): plain
        JSON for the record, such as predicted_peak_bytes and predicted_held_bytes."""
        return {}

    def shape(self) -> str:
        """The shape as people write it, e.g. `b4 s4096 h32 kv8 d128`."""
        raise NotImplementedError

    def bytes_min(self) -> int:
        """Bytes that the pass must read and write at least, in one use of the problem."""
        raise NotImplementedError

    def flops_min(self) -> int:
        """Floating point operations the pass needs at least."""
        raise NotImplementedError
