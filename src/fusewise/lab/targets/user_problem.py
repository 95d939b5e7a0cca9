"""The problem of a user's function: its arguments, results, gradients and costs, found by calling it.

The reference is the function itself in float64. Modules work like functions, and their parameters get gradients, too.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fusewise._shared.gpu import tf32_allowed

from .. import earlier
from ..counting import counted
from ..errors import equal, errors
from ..modes import Result
from ..problem import DTYPES, PRECISIONS, Problem, Program, Task, differentiable, set_precision, widened
from ..reads import storage as memory
from ..reason import reason
from . import functions, inputs
from .user_costs import add_gradient_costs, changed_bytes, forward_costs, shapes
from .wide import in_float64

#: Tolerance of a second call's results against the first's, for another order of summation: REPEATED times the eps of
#: the coarsest dtype, at most MOST_REPEATED.
REPEATED, MOST_REPEATED = 1e3, 1e-2
#: Message for a function none of whose results depends differentiably on an input.
NO_BACKWARD = "must be differentiable for a backward pass"
#: Part of autograd's message for a saved tensor that was modified before its backward.
OVERWRITTEN = "modified by an inplace operation"
#: Key of a task's details: whether results of earlier inputs are looked for, once per study.
VERIFY = "verify"
#: How long to wait for a forked process that might return as well.
FORKED_SECONDS = 1.0


def replaceable_dtype(specs: Sequence[tuple[str, inputs.Spec]]) -> str | None:
    """The dtype that `--dtype` replaces: that of the first input with a study dtype."""
    return next((s.dtype for _, s in specs if isinstance(s, inputs.TensorSpec) and s.dtype in DTYPES), None)


class UserProblem(Problem):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        #: Buffers and parameters that a call writes, with their values before the first call.
        self.state: dict[str, Tensor] = {}
        self.function = functions.load(task.detail["place"], task.seed, task.detail.get("path", ()))
        set_precision(task.dtype)  # the file may have set its own
        self.tf32 = tf32_allowed()
        specs = [
            (name, self._of_task(name, spec))
            for name, spec in functions.arguments(self.function, task.detail["inputs"])
        ]
        #: Arguments, with None as placeholder for each of `tensors`.
        self.arguments: list[Any] = [None if isinstance(s, inputs.TensorSpec) else s for _, s in specs]
        made = {n: self._make(n, s) for n, s in specs if isinstance(s, inputs.TensorSpec)}
        self.where = [i for i, (n, _) in enumerate(specs) if n in made]
        tensors = [s for _, s in specs if isinstance(s, inputs.TensorSpec)]
        self.fixed = frozenset(i for i, spec in enumerate(tensors) if spec.fixed)
        self.tensors = tuple(made.values())
        self.text = " ".join(inputs.written(*spec) for spec in specs)
        self.wide = self.function
        if isinstance(self.function, nn.Module):
            module = self.function = self._placed(self.function)
            self.state = self._as_it_is()
            with torch.no_grad():  # parameters created by a first call are then the same in the copy
                self._once(lambda: self.function(*self._arguments(self.leaves(False))))
            self.wide = _cast(functions.copied(module), widened)
            self.parameters = tuple(p for p in module.parameters() if p.requires_grad)
            self.wide_parameters = tuple(p for p in self.wide.parameters() if p.requires_grad)
        self._look()
        if task.detail.get(VERIFY):
            self._refuse_earlier_results()

    def _placed(self, function: Any) -> Any:
        """A module on the task's device and in its dtype; functions unchanged."""
        if not isinstance(function, nn.Module):
            return function
        dtype = PRECISIONS[self.task.dtype]
        function = function.to(self.device)
        return function if dtype == torch.float32 else _cast(function, lambda d: dtype if d.is_floating_point else d)

    def _refuse_earlier_results(self) -> None:
        """ValueError if the function returns the result of earlier inputs after the values of its inputs have changed:
        one that stays the same in every bit, while the function, loaded anew, has another for these values."""

        def samples(function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> list[Tensor]:
            with torch.no_grad():
                return [earlier.sample(y).clone() for y in _tensors_of(function(*self._arguments(tensors)))]

        def changed() -> tuple[Tensor, ...]:
            return tuple(map(earlier.alter_floats, self.leaves(False)))

        leaves = self.leaves(False)
        try:
            self.begin_anew()
            first = samples(self.function, leaves)
            for x in leaves:
                earlier.alter_floats(x)
            self.begin_anew()
            second = samples(self.function, leaves)
            kept = earlier.unchanged(first, second)
            if not kept:
                return
            place, path = self.task.detail["place"], self.task.detail.get("path", ())
            again = samples(self._placed(functions.anew(place, self.task.seed, path)), self.leaves(False))
            right = samples(self._placed(functions.anew(place, self.task.seed, path)), changed())
        except torch.OutOfMemoryError:
            raise
        except Exception:  # it rejects other values, or cannot be loaded anew
            return
        if any(equal(first[i], again[i]) and earlier.differs(first, right, i, self._repeatable()) for i in kept):
            raise ValueError(
                f"study: {self.op} must compute its result from the values of its inputs, got the result of earlier inputs "
                "after the values had changed; take out what keeps it"
            )

    def begin_anew(self) -> None:
        with torch.no_grad():
            for now in (_held(self.function), _held(self.wide)):
                for name, x in self.state.items():
                    if name in now and now[name].shape == x.shape:  # skip state that was resized or removed
                        now[name].copy_(x)

    def written_state(self, wide: bool = False) -> dict[str, Tensor]:
        now = _held(self.wide if wide else self.function)
        return {_called(n, now[n]): now[n] for n, x in self.state.items() if n in now and now[n].shape == x.shape}

    def left_out(self) -> list[str]:
        now = _held(self.function)
        return [_called(n, now[n]) for n, x in self.state.items() if n in now and _same(now[n], x)]

    def overwritten(self) -> list[str]:
        wide = {n: x for n, x in _held(self.wide).items() if n not in self.state and not nn.parameter.is_lazy(x)}
        now = _held(self.function)
        return [_called(n, now[n]) for n, x in wide.items() if n in now and not _same(x.to(now[n].dtype), now[n])]

    def _as_it_is(self) -> dict[str, Tensor]:
        """Copies of buffers and parameters after `begin_anew`; existing copies are reused. Lazy ones have no values
        yet."""
        now = {n: x for n, x in _held(self.function).items() if not nn.parameter.is_lazy(x)}
        before = self.state
        return {
            n: before[n] if n in before and before[n].shape == x.shape else x.detach().clone() for n, x in now.items()
        }

    def take(self, task: Task) -> None:
        before, self.task = self.task, task
        if task.pass_ != before.pass_:  # other gradients and other bytes
            self._look()

    def _of_task(self, name: str, spec: inputs.Spec) -> inputs.Spec:
        """The spec in the task's dtype, if it has the dtype that `--dtype` replaces. ValueError if that lacks its values."""
        first = replaceable_dtype([inputs.parse(text) for text in self.task.detail["inputs"]])
        if first is None and self.task.dtype != "fp32":
            raise ValueError(
                f"study: dtype must be fp32 where no input is of {', '.join(DTYPES)}, got {self.task.dtype!r}; leave it out"
            )
        if isinstance(spec, inputs.TensorSpec) and spec.dtype == first:
            ours = replace(spec, dtype="fp32" if self.dtype == torch.float32 else self.task.dtype)
            return inputs.parse(inputs.written(name, ours))[1]
        return spec

    def _make(self, name: str, spec: inputs.TensorSpec) -> Tensor:
        try:
            return spec.make(self.device, f"{self.task.seed}/{self.task.op}/{name}")
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # also raised when a CPU's memory runs out
            raise ValueError(
                f"study: input {inputs.written(name, spec)!r} must be one that memory has room for, got {reason(error)}; "
                "make it smaller"
            ) from error

    def _look(self) -> None:
        """Run the function twice to find its outputs, FLOPs and what a gradient reads, and to check that it is
        deterministic and leaves its inputs unchanged."""
        gradient = self.task.pass_ != "fwd"
        leaves = self.leaves(gradient)
        self.begin_anew()
        state = self._as_it_is()
        result, counter = self._once(lambda: counted(lambda: self.function(*self._arguments(leaves)), reads=True))
        self.higher_order = counter.functions
        _register(result)
        outputs = _tensors_of(result)
        if not all(equal(x, kept) for x, kept in zip(leaves, self.tensors, strict=True)):
            raise ValueError(
                f"study: {self.op} must leave its inputs as they are, got one overwritten; write to a new tensor"
            )
        now = _held(self.function)
        self.state = {n: x for n, x in state.items() if not _same(x, now.get(n))}
        changed = {memory(now[n]): changed_bytes(x, now[n]) for n, x in self.state.items() if n in now}
        del state
        if not outputs:
            raise ValueError(
                f"study: {self.op} must return a tensor, or tensors in a tuple, list, dict or dataclass, got {type(result).__name__}; "
                "return one"
            )
        if odd := [y for y in outputs if y.layout != torch.strided or y.is_nested or y.is_meta]:
            kind = "meta" if odd[0].is_meta else "nested" if odd[0].is_nested else odd[0].layout
            raise ValueError(
                f"study: {self.op} must return tensors with values and strides, got a {kind} one; convert it"
            )
        self.shapes, self.dtypes = shapes(outputs), tuple(y.dtype for y in outputs)
        self.begin_anew()
        again = self.eager(leaves)
        # Errors are judged by the coarsest dtype among inputs, outputs and parameters.
        coarse = [x.dtype for x in (*self.tensors, *self.parameters, *outputs) if differentiable(x)]
        self.dtype = max(coarse, key=lambda d: torch.finfo(d).eps).to_real()
        if shapes(again) != self.shapes or errors(again, outputs).worst > self._repeatable():
            raise ValueError(
                f"study: {self.op} must give the same result when called again; take randomness out (a module's: .eval())"
            )
        now = _held(self.function)
        written = {memory(now[n]): 0 for n in self.state if n in now} | changed
        self.costs = forward_costs(self, leaves, outputs, again, counter, written, list(now.values()))
        generator = torch.Generator(self.device).manual_seed(self.task.seed)
        self.upstream = tuple(
            torch.randn(
                y.shape,
                generator=generator,
                device=y.device,
                dtype=y.dtype if y.element_size() > 1 else torch.float32,  # torch draws no 8-bit floats
            ).to(y.dtype)
            if differentiable(y) and (y.requires_grad or not gradient)
            else None
            for y in outputs
        )
        if gradient and not any(g is not None for g in self.upstream):
            raise ValueError(f"study: {self.op} {NO_BACKWARD}; ask for fwd alone")
        if gradient:
            add_gradient_costs(self.costs, self, leaves, again)
        self.one_by_one = self.task.pass_ == "bwd" and bool(self.state) and self._is_overwritten(leaves)

    def _repeatable(self) -> float:
        """How far results of two calls may differ."""
        return min(REPEATED * torch.finfo(self.dtype).eps, MOST_REPEATED)

    def _once(self, call: Callable[[], Result]) -> Result:
        """The result of the call. ValueError if a process forked inside also returns: with every call their number
        would double."""
        process, (reading, writing) = os.getpid(), os.pipe()
        try:
            return call()
        finally:
            if os.getpid() != process:
                os.write(writing, b"!")
                os._exit(0)
            os.close(writing)
            ready = select.select([reading], [], [], FORKED_SECONDS)[0]  # immediate if no other process holds the pipe
            twice = ready and os.read(reading, 1)
            os.close(reading)
            if twice:
                raise ValueError(
                    f"study: {self.op} must return in the process that called it, got a second one that it forked; let that end "
                    "by itself"
                )

    def _is_overwritten(self, leaves: tuple[Tensor, ...]) -> bool:
        """Whether a call overwrites what the previous call's backward reads, which autograd then rejects."""
        outputs = self.eager(leaves)
        self.eager(leaves)
        try:
            self.gradients(outputs, leaves, self.upstream)
        except RuntimeError as error:
            if OVERWRITTEN not in str(error):
                raise
            return True
        return False

    def _arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        found = list(self.arguments)
        for i, x in zip(self.where, tensors, strict=True):
            found[i] = x
        return tuple(found)

    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes

    def output_dtypes(self) -> tuple[torch.dtype, ...]:
        return self.dtypes

    def program(self) -> Program:
        return Program(self.function, lambda *xs: self._arguments(xs), _tensors_of)

    def truth(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        try:
            found = _tensors_of(self._in_float64(lambda: self.wide(*self._arguments(tensors))))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise ValueError(
                f"study: {self.op} must run on float64 tensors, too, which give the truth, got {reason(error)}; "
                "let it take them"
            ) from error
        if shapes(found) != self.shapes:
            raise ValueError(
                f"study: {self.op} must give results of the same shapes in float64, which are the truth, got {shapes(found)} for "
                f"{self.shapes}; let none depend on the dtype"
            )
        return found

    def gradients(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], upstream: Sequence[Tensor | None], wide: bool = False
    ) -> tuple[Tensor, ...]:
        def call() -> tuple[Tensor, ...]:
            return Problem.gradients(self, outputs, leaves, upstream, wide)

        return self._in_float64(call) if wide else call()

    def _in_float64(self, call: Callable[[], Result]) -> Result:
        """The call in float64. A scripted module needs no dispatch mode: it captures no other tensors, and its autograd
        fixes dtypes in advance. A torch.cond that ran uncompiled has no backward."""
        if isinstance(self.wide, torch.jit.ScriptModule):
            return call()
        return in_float64(call, compiled=self.higher_order and self.task.pass_ != "fwd")

    def shape(self) -> str:
        count = sum(p.numel() for p in self.parameters)
        return self.text + (f" parameters[{count}]" if count else "")

    def bytes_min(self) -> int:
        return self.costs.bytes_min(self.task.pass_)

    def flops_min(self) -> int | None:
        return self.costs.flops_min(self.task.pass_)

    def flops_unknown(self) -> list[str]:
        return self.costs.flops_unknown(self.task.pass_)


def _held(function: Any) -> dict[str, Tensor]:
    """Parameters and buffers of a module, by name."""
    return (
        {**dict(function.named_parameters()), **dict(function.named_buffers())}
        if isinstance(function, nn.Module)
        else {}
    )


def _called(name: str, x: Tensor) -> str:
    return f"{'parameter' if isinstance(x, nn.Parameter) else 'buffer'} {name}"


def _same(x: Tensor, before: Tensor | None) -> bool:
    return before is not None and (x.shape, x.dtype) == (before.shape, before.dtype) and equal(x, before)


def _cast(module: nn.Module, to: Callable[[torch.dtype], torch.dtype]) -> nn.Module:
    """Cast parameters and buffers. `nn.Module.to` would make complex ones real, and `double` would leave them
    unchanged."""
    return module._apply(lambda x: x.to(to(x.dtype)))  # type: ignore[no-any-return]


def _tensors_of(result: Any) -> tuple[Tensor, ...]:
    """The tensors in a function's return value, in pytree order."""
    return tuple(x for x in pytree.tree_leaves(result) if isinstance(x, Tensor))


def _register(result: Any) -> None:
    """Register the dataclasses in a result with pytree, as those of transformers are, so that their tensors are found,
    by torch.export, too."""
    unknown = [x for x in pytree.tree_leaves(result) if is_dataclass(x) and not isinstance(x, type)]
    for of in dict.fromkeys(map(type, unknown)):
        pytree.register_dataclass(of)
    if unknown:
        _register(unknown)  # those inside
