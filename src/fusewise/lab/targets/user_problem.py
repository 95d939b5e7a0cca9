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

from .. import truth
from ..counting import counted
from ..ledger import extent
from ..modes import Result
from ..problem import DTYPES, Problem, Program, Task, differentiable, widened
from ..reads import storage as memory
from ..reason import reason
from . import functions, inputs
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
#: Inputs and parameters for which it is tested, one by one, whether results or gradients depend on them.
MOST_APART = 16
#: Stands for what reads tensors without an operator of PyTorch.
ELSEWHERE = "code that is no operator of PyTorch"
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
        specs = [
            (name, self._of_task(spec)) for name, spec in functions.arguments(self.function, task.detail["inputs"])
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
        dtype = DTYPES[self.task.dtype]
        function = function.to(self.device)
        return function if dtype == torch.float32 else _cast(function, lambda d: dtype if d.is_floating_point else d)

    def _refuse_earlier_results(self) -> None:
        """ValueError if the function returns the result of earlier inputs after the values of its inputs have changed:
        one that stays the same in every bit, while the function, loaded anew, has another for these values."""

        def samples(function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> list[Tensor]:
            with torch.no_grad():
                return [truth.sample(y).clone() for y in _tensors_of(function(*self._arguments(tensors)))]

        def changed() -> tuple[Tensor, ...]:
            return tuple(map(truth.alter_floats, self.leaves(False)))

        leaves = self.leaves(False)
        try:
            self.begin_anew()
            first = samples(self.function, leaves)
            for x in leaves:
                truth.alter_floats(x)
            self.begin_anew()
            second = samples(self.function, leaves)
            kept = [i for i, (x, y) in enumerate(zip(first, second, strict=True)) if x.numel() and truth.equal(x, y)]
            if not kept:
                return
            place, path = self.task.detail["place"], self.task.detail.get("path", ())
            again = samples(self._placed(functions.anew(place, self.task.seed, path)), self.leaves(False))
            right = samples(self._placed(functions.anew(place, self.task.seed, path)), changed())
        except torch.OutOfMemoryError:
            raise
        except Exception:  # it rejects other values, or cannot be loaded anew
            return
        if any(truth.equal(first[i], again[i]) and truth.differs(first[i], right[i]) for i in kept):
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

    def written_state(self) -> list[Tensor]:
        held = (_held(self.function), _held(self.wide))
        return [now[name] for now in held for name in self.state if name in now]

    def left_out(self) -> list[str]:
        now = _held(self.function)
        same = [name for name, x in self.state.items() if name in now and _same(now[name], x)]
        return [f"{'parameter' if isinstance(now[name], nn.Parameter) else 'buffer'} {name}" for name in same]

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

    def _of_task(self, spec: inputs.Spec) -> inputs.Spec:
        """The spec in the task's dtype, if it has the dtype that `--dtype` replaces."""
        first = replaceable_dtype([inputs.parse(text) for text in self.task.detail["inputs"]])
        if first is None and self.task.dtype != "fp32":
            raise ValueError(
                f"study: dtype must be fp32 where no input is of {', '.join(DTYPES)}, got {self.task.dtype!r}; leave it out"
            )
        if isinstance(spec, inputs.TensorSpec) and spec.dtype == first:
            return replace(spec, dtype=self.task.dtype)
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
        _register(result)
        outputs = _tensors_of(result)
        self.flops, self.uncounted = counter.flops, list(counter.uncounted)
        if not all(truth.equal(x, kept) for x, kept in zip(leaves, self.tensors, strict=True)):
            raise ValueError(
                f"study: {self.op} must leave its inputs as they are, got one overwritten; write to a new tensor"
            )
        now = _held(self.function)
        self.state = {n: x for n, x in state.items() if not _same(x, now.get(n))}
        read = counter.reads.bytes() if counter.reads is not None else {}
        changed = {memory(now[n]): _changed(x, now[n]) for n, x in self.state.items() if n in now}
        of_state = sum(max(0, read.get(of, 0) - size) for of, size in changed.items())
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
        self.shapes, self.dtypes = _shapes(outputs), tuple(y.dtype for y in outputs)
        self.begin_anew()
        again = self.eager(leaves)
        # Errors are judged by the coarsest dtype among inputs, outputs and parameters.
        coarse = [x.dtype for x in (*self.tensors, *self.parameters, *outputs) if differentiable(x)]
        self.dtype = max(coarse, key=lambda d: torch.finfo(d).eps).to_real()
        within = min(REPEATED * torch.finfo(self.dtype).eps, MOST_REPEATED)
        if _shapes(again) != self.shapes or truth.errors(again, outputs).worst > within:
            raise ValueError(
                f"study: {self.op} must give the same result when called again; take randomness out (a module's: .eval())"
            )
        self.output_bytes = _written(outputs, leaves) + sum(changed.values())
        now = _held(self.function)
        given = {memory(x): x for x in (*self.parameters, *leaves)}
        own = {*given, *changed, *(memory(now[n]) for n in self.state if n in now)}
        if hidden := self._read_unseen([x for of, x in given.items() if of not in read], leaves, again):
            self.uncounted.append(ELSEWHERE)
        #: Bytes that the function reads of inputs and parameters, by storage.
        self.read = {of: read.get(of, 0) for of in given} | {memory(x): extent(x) for x in hidden}
        #: Memory the function reads besides inputs and learned or written state: frozen parameters, buffers, captured
        #: tensors.
        self.besides = {of: size for of, size in read.items() if of not in own}
        self.besides_bytes = sum(self.besides.values()) + of_state
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
        self.gradient_bytes = self.gradient_flops = self.gradient_besides = 0
        self.gradient_uncounted: list[str] = []
        self.gradient_read = self._read_by_gradient(leaves, again) if gradient else 0
        self.one_by_one = self.task.pass_ == "bwd" and bool(self.state) and self._is_overwritten(leaves)

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

    def _read_by_gradient(self, leaves: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> int:
        """Bytes that the gradient reads of inputs and parameters: what the function reads of those whose other values
        give other gradients, and of integers if there are such. The gradient of a function linear in all of them needs
        none."""
        here, counter = counted(lambda: self.gradients(outputs, leaves, self.upstream), reads=True)
        # FLOPs of recomputation (checkpointing) are not required
        self.gradient_flops = counter.flops if self.uncounted else min(counter.flops, 2 * self.flops)
        self.gradient_uncounted = list(counter.uncounted)
        if odd := [g for g in here if g.layout != torch.strided]:
            raise ValueError(
                f"study: {self.op} must have dense gradients, got a {odd[0].layout} one; make it dense (an embedding's: sparse=False)"
            )
        self.gradient_bytes = _written(here, [g for g in self.upstream if g is not None])
        read = counter.reads.bytes() if counter.reads is not None else {}
        self.gradient_besides = sum(size for of, size in read.items() if of in self.besides)
        floats = [x for x in (*leaves, *self.parameters) if differentiable(x) and x.numel()]
        if not self._gradients_change(floats, leaves, here):
            return 0
        idle = set()  # floats that the gradient does not read
        if len(floats) > 1:
            idle = {memory(x) for x in floats[:MOST_APART] if not self._gradients_change([x], leaves, here)}
        return sum(size for of, size in self.read.items() if of not in idle)

    def _gradients_change(self, some: Sequence[Tensor], leaves: tuple[Tensor, ...], here: Sequence[Tensor]) -> bool:
        """Whether other values of some inputs and parameters give other gradients than these."""
        other = {id(x): truth.other(x) for x in some}
        moved = tuple(other[id(x)].requires_grad_(x.requires_grad) if id(x) in other else x for x in leaves)
        before = {p: p.detach().clone() for p in self.parameters if id(p) in other}
        try:
            for p in before:
                p.data.copy_(other[id(p)])
            self.begin_anew()
            others = self.eager(moved)
            if _shapes(others) != self.shapes:
                return True
            there = self.gradients(others, moved, self.upstream)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a function that rejects other values depends on them
            return True
        finally:
            for p, values in before.items():
                p.data.copy_(values)
        return any(not torch.equal(a, b) for a, b in zip(here, there, strict=True))

    def _read_unseen(
        self, some: Sequence[Tensor], leaves: tuple[Tensor, ...], outputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Those of the inputs and parameters of which no operator has read anything, but on whose values the outputs
        depend: a kernel of the user's own reads them. After MOST_APART the rest are taken to be read."""
        return [
            x
            for i, x in enumerate(some)
            if x.numel()
            and (i >= MOST_APART or self._depends_on(x, leaves, [y for y in outputs if memory(y) != memory(x)]))
        ]

    def _depends_on(self, x: Tensor, leaves: tuple[Tensor, ...], outputs: Sequence[Tensor]) -> bool:
        """Whether other values of x, an input or parameter, give other outputs than these."""
        before = x.detach().clone()
        try:
            with torch.no_grad():
                x.data.copy_(truth.other(x))
                self.begin_anew()
                others = [y for y in self.eager(leaves) if memory(y) != memory(x)]
            return _shapes(others) != _shapes(outputs) or not all(map(truth.equal, others, outputs))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # it rejects other values
            return True
        finally:
            x.data.copy_(before)

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
        if _shapes(found) != self.shapes:
            raise ValueError(
                f"study: {self.op} must give results of the same shapes in float64, which are the truth, got {_shapes(found)} for "
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
        fixes dtypes in advance."""
        return call() if isinstance(self.wide, torch.jit.ScriptModule) else in_float64(call)

    def shape(self) -> str:
        count = sum(p.numel() for p in self.parameters)
        return self.text + (f" parameters[{count}]" if count else "")

    def bytes_min(self) -> int:
        """Forward: reads what its operators read of inputs, parameters and other memory, each element once, and writes
        outputs. Backward: reads output gradients, writes gradients of floating inputs and parameters, reads as much as
        the forward of those on which gradients depend, and other memory as far as operators read it. Views of existing memory are not written."""
        forward = sum(self.read.values()) + self.besides_bytes + self.output_bytes
        upstream = sum(g.numel() * g.element_size() for g in self.upstream if g is not None)
        backward = upstream + self.gradient_bytes + self.gradient_besides + self.gradient_read
        return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[self.task.pass_]

    def flops_min(self) -> int | None:
        """FLOPs as counted by `counting.py`, which excludes elementwise operations."""
        if self.flops_unknown():
            return None
        backward = self.gradient_flops
        return {"fwd": self.flops, "bwd": backward, "fwd+bwd": self.flops + backward}[self.task.pass_]

    def flops_unknown(self) -> list[str]:
        backward = self.gradient_uncounted
        both = {"fwd": self.uncounted, "bwd": backward, "fwd+bwd": [*self.uncounted, *backward]}
        return list(dict.fromkeys(both[self.task.pass_]))


def _held(function: Any) -> dict[str, Tensor]:
    """Parameters and buffers of a module, by name."""
    return (
        {**dict(function.named_parameters()), **dict(function.named_buffers())}
        if isinstance(function, nn.Module)
        else {}
    )


def _same(x: Tensor, before: Tensor | None) -> bool:
    return before is not None and (x.shape, x.dtype) == (before.shape, before.dtype) and truth.equal(x, before)


def _changed(x: Tensor, now: Tensor) -> int:
    """Bytes of the elements of `now` that differ from those of x; all where the shape does."""
    if (x.shape, x.dtype) != (now.shape, now.dtype):
        return extent(now)
    same = (x == now) | ((x != x) & (now != now))
    return (x.numel() - int(same.count_nonzero())) * x.element_size()


def _cast(module: nn.Module, to: Callable[[torch.dtype], torch.dtype]) -> nn.Module:
    """Cast parameters and buffers. `nn.Module.to` would make complex ones real, and `double` would leave them
    unchanged."""
    return module._apply(lambda x: x.to(to(x.dtype)))  # type: ignore[no-any-return]


def _shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(y.shape) for y in tensors)


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


def _written(tensors: Sequence[Tensor], read: Sequence[Tensor]) -> int:
    """Bytes newly allocated for the tensors: views of `read` are free, and shared storage counts once."""
    memory = {x.untyped_storage().data_ptr() for x in read}
    found: dict[int, int] = {}
    for y in {(y.data_ptr(), y.shape, y.stride()): y for y in tensors}.values():
        storage = y.untyped_storage()
        if storage.data_ptr() not in memory:
            found[storage.data_ptr()] = min(found.get(storage.data_ptr(), 0) + extent(y), storage.nbytes())
    return sum(found.values())
