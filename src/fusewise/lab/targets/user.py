"""A function of the user's own as a target: `path.py:function` or `package.module:function`, with inputs as text.

Processes are told the place of the function (`functions.py`) and what its arguments look like (`inputs.py`), never code or
values: each imports the file or module itself and draws the same arguments. The truth is the function itself in float64.
Modules work as functions, and their parameters get gradients, too.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import truth
from ..counting import counted, memory
from ..interruption import interruptible
from ..ledger import extent
from ..modes import Result
from ..names import shortened
from ..problem import DTYPES, Pass, Problem, Program, Task, differentiable, widened
from ..process import WorkerFailed, WorkerProcess
from ..reason import reason
from . import Case, Target, functions, inputs
from .wide import in_float64

#: An input that counts as one of float32, of which its parts are.
COMPLEX = "c64"
#: The largest error of a second call's results against the first's, which sums in another order may bring: so many times what
#: the coarsest dtype resolves, and no more than that.
REPEATED, MOST_REPEATED = 1e3, 1e-2
#: Said of a function none of whose results depends on an input in a differentiable way.
NO_BACKWARD = "must be differentiable for a backward pass"
#: Said by autograd of a tensor that its backward reads and that was written to in between.
OVERWRITTEN = "modified by an inplace operation"
#: So long a process that a function forked is waited for, should it come back.
FORKED_SECONDS = 1.0
#: Characters of a case's name; the row's shape has all of the inputs.
LONGEST_CASE = 1000


@dataclass(frozen=True)
class UserCase:
    """One set of arguments of one function."""

    name: str  # the inputs, as text, shortened where that is long
    dtypes: tuple[str, ...]
    passes: tuple[Pass, ...]
    input_bytes: int

    @property
    def shape(self) -> str:
        return self.name

    def bytes_min(self, direction: Pass, dtype: str) -> int:
        """Those of the inputs; what the function gives is known to the problem alone, once it has run."""
        return self.input_bytes


class User(Target):
    """What `place` names, called with arguments like `texts`."""

    def __init__(self, place: str, texts: Sequence[str] = ()) -> None:
        self.place, self.texts = functions.absolute(place), tuple(texts)
        path, _, attribute = self.place.rpartition(":")
        self.name = f"{Path(path).name}:{attribute}"

    def presets(self) -> Mapping[str, Sequence[Case]]:
        return {self.default_preset: [self.case()]}

    def cases(self, preset: str) -> Sequence[Case]:
        if preset != self.default_preset:
            raise ValueError(f"study: a function must be given without --preset, got {preset!r}; leave it out")
        return super().cases(preset)

    def case(self, name: str = "") -> Case:
        """The one case: dtype of the first input of those that a study is of, backward if there is one to be had."""
        specs = [inputs.parse(text) for text in self.texts]
        tensors = [spec for _, spec in specs if isinstance(spec, inputs.TensorSpec)]
        able = [spec for spec in tensors if spec.dtype in (*DTYPES, COMPLEX)]
        if not able:
            raise ValueError(
                f"study: {self.name} must have a tensor of {', '.join((*DTYPES, COMPLEX))} among its inputs, got "
                f"{list(self.texts)}; give one, such as x=fp32[1024,1024]"
            )
        passes: tuple[Pass, ...] = ("fwd", "bwd") if any(not spec.fixed for spec in able) else ("fwd",)
        text = shortened(" ".join(inputs.written(*spec) for spec in specs), LONGEST_CASE)
        if name not in ("", text):
            raise ValueError(f"study: a function must be given without --case, got {name!r}; say it with --input")
        return UserCase(text, (_changeable(specs) or "fp32",), passes, sum(spec.bytes for spec in tensors))

    def detail(self, case: Case) -> Mapping[str, Any]:
        file = Path(self.place.rpartition(":")[0])
        # What a record is of, so that a study that is resumed is of the same; a module's file is found where it is imported.
        source = hashlib.sha256(file.read_bytes()).hexdigest() if file.suffix == ".py" else None
        return {"place": self.place, "source": source, "inputs": list(self.texts), "path": [p for p in sys.path if p]}

    def problem(self, task: Task) -> Problem:
        return UserProblem(task)

    def verify(self, tasks: Sequence[Task], timeout: float, memory_limit: int | None) -> Collection[Pass]:
        """Import the function and run it in a process like a provider's. A task that can be made is enough: of the others
        each has rows with its reason. Whether there is a backward is asked once."""
        start = {"provider": "fusewise.lab.providers.pytorch:Eager", "device": tasks[0].device, "flush_bytes": 0}
        worker: WorkerProcess | None = None
        reasons = []
        with interruptible(), tempfile.TemporaryDirectory(prefix="fusewise-check-") as folder:
            try:
                worker = WorkerProcess(start, Path(folder) / "log", timeout=timeout, memory_limit=memory_limit)
                worker.ready()
                for task in tasks:
                    reply = worker.ask("load", task=task.to_json())
                    if not reply["ok"]:
                        reasons.append(reply["reason"])
                    elif task.pass_ != "fwd" or not (backward := [t for t in tasks if t.pass_ != "fwd"]):
                        return ()
                    else:
                        reply = worker.ask("load", task=backward[0].to_json())
                        return () if reply["ok"] or NO_BACKWARD not in reply["reason"] else {t.pass_ for t in backward}
            except WorkerFailed as error:
                fix = "take out what ends or overfills the process"
                if "the limit is" in str(error):
                    fix = "give it smaller inputs or a larger --memory-limit"
                if error.hung:
                    fix = "put what its file runs under `if __name__ == '__main__':`, or give it smaller inputs or more --timeout"
                raise ValueError(
                    f"study: {self.name} must be importable and run on its inputs, got no answer: {error}; {fix}"
                ) from None
            finally:
                if worker is not None:
                    worker.stop()
        own = re.fullmatch(r"\w+: (study: .*)", reasons[0])
        raise ValueError(
            own[1]
            if own
            else f"study: {self.name} must be importable and run on its inputs, got {reasons[0]}; run it by hand"
        )


def _changeable(specs: Sequence[tuple[str, inputs.Spec]]) -> str | None:
    """The dtype that `--dtype` replaces: that of the first input that has one of a study's."""
    return next((s.dtype for _, s in specs if isinstance(s, inputs.TensorSpec) and s.dtype in DTYPES), None)


class UserProblem(Problem):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        #: The buffers and parameters that a call writes to, as they were before the first one.
        self.state: dict[str, Tensor] = {}
        self.function = functions.load(task.detail["place"], task.seed, task.detail.get("path", ()))
        specs = [
            (name, self._of_task(spec)) for name, spec in functions.arguments(self.function, task.detail["inputs"])
        ]
        #: Arguments, with None where a tensor of `tensors` belongs.
        self.arguments: list[Any] = [None if isinstance(s, inputs.TensorSpec) else s for _, s in specs]
        made = {n: self._make(n, s) for n, s in specs if isinstance(s, inputs.TensorSpec)}
        self.where = [i for i, (n, _) in enumerate(specs) if n in made]
        tensors = [s for _, s in specs if isinstance(s, inputs.TensorSpec)]
        self.fixed = frozenset(i for i, spec in enumerate(tensors) if spec.fixed)
        self.tensors = tuple(made.values())
        self.text = " ".join(inputs.written(*spec) for spec in specs)
        self.wide = self.function
        if isinstance(self.function, nn.Module):
            self.function = self.function.to(self.device)
            if self.dtype != torch.float32:
                _cast(self.function, lambda dtype: self.dtype if dtype.is_floating_point else dtype)
            self.state = self._as_it_is()
            with torch.no_grad():  # parameters that a first call makes are the same in the copy
                self._once(lambda: self.function(*self._arguments(self.leaves(False))))
            self.wide = _cast(functions.copied(self.function), widened)
            self.parameters = tuple(p for p in self.function.parameters() if p.requires_grad)
            self.wide_parameters = tuple(p for p in self.wide.parameters() if p.requires_grad)
        self._look()

    def begin_anew(self) -> None:
        with torch.no_grad():
            for now in (_held(self.function), _held(self.wide)):
                for name, x in self.state.items():
                    if name in now and now[name].shape == x.shape:  # not of one that grows, or is taken away
                        now[name].copy_(x)

    def left_out(self) -> list[str]:
        now = _held(self.function)
        same = [name for name, x in self.state.items() if name in now and _same(now[name], x)]
        return [f"{'parameter' if isinstance(now[name], nn.Parameter) else 'buffer'} {name}" for name in same]

    def _as_it_is(self) -> dict[str, Tensor]:
        """Copies of buffers and parameters, after `begin_anew`: those that are there are not made once more. What a first call
        has yet to give a shape has no values."""
        now = {n: x for n, x in _held(self.function).items() if not nn.parameter.is_lazy(x)}
        before = self.state
        return {
            n: before[n] if n in before and before[n].shape == x.shape else x.detach().clone() for n, x in now.items()
        }

    def take(self, task: Task) -> None:
        before, self.task = self.task, task
        if task.pass_ != before.pass_:  # other gradients are wanted, and other bytes move
            self._look()

    def _of_task(self, spec: inputs.Spec) -> inputs.Spec:
        """The spec in the task's dtype, if it has the one that `--dtype` changes."""
        first = _changeable([inputs.parse(text) for text in self.task.detail["inputs"]])
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
        except RuntimeError as error:  # as a CPU's memory runs out
            raise ValueError(
                f"study: input {inputs.written(name, spec)!r} must be one that memory has room for, got {reason(error)}; "
                "make it smaller"
            ) from error

    def _look(self) -> None:
        """Run it twice: what comes out, how many products, what a gradient reads, and whether it is a function at all."""
        gradient = self.task.pass_ != "fwd"
        leaves = self.leaves(gradient)
        self.begin_anew()
        state = self._as_it_is()
        result, counter = self._once(lambda: counted(lambda: self.function(*self._arguments(leaves))))
        outputs = tensors_of(result)
        self.flops = counter.flops
        if not all(truth.equal(x, kept) for x, kept in zip(leaves, self.tensors, strict=True)):
            raise ValueError(
                f"study: {self.op} must leave its inputs as they are, got one overwritten; write to a new tensor"
            )
        now = _held(self.function)
        self.state = {n: x for n, x in state.items() if not _same(x, now.get(n))}
        del state
        if not outputs:
            raise ValueError(
                f"study: {self.op} must return a tensor, or tensors in a tuple, list or dict, got {type(result).__name__}; "
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
        # Errors are judged by the coarsest dtype that the function takes or gives, or has a gradient in.
        coarse = [x.dtype for x in (*self.tensors, *self.parameters, *outputs) if differentiable(x)]
        self.dtype = max(coarse, key=lambda d: torch.finfo(d).eps).to_real()
        within = min(REPEATED * torch.finfo(self.dtype).eps, MOST_REPEATED)
        if _shapes(again) != self.shapes or truth.errors(again, outputs).worst > within:
            raise ValueError(
                f"study: {self.op} must give the same result when called again; take randomness out (a module's: .eval())"
            )
        self.output_bytes = _written(outputs, leaves) + sum(map(extent, self.state.values()))
        now = _held(self.function)
        own = {memory(x) for x in (*leaves, *self.parameters, *(now[n] for n in self.state if n in now))}
        #: What the function has besides its inputs and what it learns or writes to: frozen parameters, buffers, others' tensors.
        self.besides = {of: size for of, size in counter.outside.items() if of not in own}
        generator = torch.Generator(self.device).manual_seed(self.task.seed)
        self.upstream = tuple(
            torch.randn(
                y.shape,
                generator=generator,
                device=y.device,
                dtype=y.dtype if y.element_size() > 1 else torch.float32,  # nothing is drawn in eight bits
            ).to(y.dtype)
            if differentiable(y) and (y.requires_grad or not gradient)
            else None
            for y in outputs
        )
        if gradient and not any(g is not None for g in self.upstream):
            raise ValueError(f"study: {self.op} {NO_BACKWARD}; ask for fwd alone")
        self.gradient_bytes = self.gradient_flops = self.gradient_besides = 0
        self.reads_inputs = gradient and self._gradient_depends_on_inputs(leaves, again)
        self.one_by_one = self.task.pass_ == "bwd" and bool(self.state) and self._is_overwritten(leaves)

    def _once(self, call: Callable[[], Result]) -> Result:
        """What the call gives. ValueError where a process that it forked comes back, too: with every call there would be twice
        as many."""
        process, (reading, writing) = os.getpid(), os.pipe()
        try:
            return call()
        finally:
            if os.getpid() != process:
                os.write(writing, b"!")
                os._exit(0)
            os.close(writing)
            ready = select.select([reading], [], [], FORKED_SECONDS)[0]  # at once where no other process has it open
            twice = ready and os.read(reading, 1)
            os.close(reading)
            if twice:
                raise ValueError(
                    f"study: {self.op} must return in the process that called it, got a second one that it forked; let that end "
                    "by itself"
                )

    def _is_overwritten(self, leaves: tuple[Tensor, ...]) -> bool:
        """Whether a call writes to what the backward of the one before reads, which autograd refuses then."""
        outputs = self.eager(leaves)
        self.eager(leaves)
        try:
            self.gradients(outputs, leaves, self.upstream)
        except RuntimeError as error:
            if OVERWRITTEN not in str(error):
                raise
            return True
        return False

    def _gradient_depends_on_inputs(self, leaves: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> bool:
        """Whether other inputs give another gradient; that of a linear function of all its inputs needs none of them."""
        here, counter = counted(lambda: self.gradients(outputs, leaves, self.upstream))
        # what a backward computes once more, to hold less, is not needed
        self.gradient_flops = min(counter.flops, 2 * self.flops)
        self.gradient_bytes = _written(here, [g for g in self.upstream if g is not None])
        self.gradient_besides = sum(size for of, size in counter.outside.items() if of in self.besides)
        moved = tuple(_moved(x).requires_grad_(x.requires_grad) if differentiable(x) else x for x in leaves)
        try:
            self.begin_anew()
            others = self.eager(moved)
            if _shapes(others) != self.shapes:
                return True
            there = self.gradients(others, moved, self.upstream)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a function may refuse values that nobody gave it, and then depends on them
            return True
        return any(not torch.equal(a, b) for a, b in zip(here, there, strict=True))

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
        return Program(self.function, lambda *xs: self._arguments(xs), tensors_of)

    def truth(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        try:
            found = tensors_of(self._in_float64(lambda: self.wide(*self._arguments(tensors))))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a user's function raises anything
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
        """A scripted module has nothing beside its parameters and inputs, and its autograd knows their dtypes beforehand."""
        return call() if isinstance(self.wide, torch.jit.ScriptModule) else in_float64(call)

    def shape(self) -> str:
        count = sum(p.numel() for p in self.parameters)
        return self.text + (f" parameters[{count}]" if count else "")

    def bytes_min(self) -> int:
        """Forward: inputs, parameters and what else the function has read, outputs written. Backward: gradients of the outputs
        read, those of floating inputs and parameters written, inputs and parameters read where the gradient depends on them, and
        what else the function has as far as operators take it. What is a view of what was there is not written."""
        read = sum(map(extent, (*self.tensors, *self.parameters)))
        forward = read + sum(self.besides.values()) + self.output_bytes
        upstream = sum(g.numel() * g.element_size() for g in self.upstream if g is not None)
        backward = upstream + self.gradient_bytes + self.gradient_besides + (read if self.reads_inputs else 0)
        return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[self.task.pass_]

    def flops_min(self) -> int:
        """Those of matrix products and convolutions; elementwise operations are not counted."""
        backward = self.gradient_flops
        return {"fwd": self.flops, "bwd": backward, "fwd+bwd": self.flops + backward}[self.task.pass_]


def _held(function: Any) -> dict[str, Tensor]:
    """What a module holds and may write to, by name."""
    return (
        {**dict(function.named_parameters()), **dict(function.named_buffers())}
        if isinstance(function, nn.Module)
        else {}
    )


def _same(x: Tensor, before: Tensor | None) -> bool:
    return before is not None and (x.shape, x.dtype) == (before.shape, before.dtype) and truth.equal(x, before)


def _cast(module: nn.Module, to: Callable[[torch.dtype], torch.dtype]) -> nn.Module:
    """The module with parameters and buffers in other dtypes. `nn.Module.to` would make complex ones real, and `double` leave
    them as they are."""
    return module._apply(lambda x: x.to(to(x.dtype)))  # type: ignore[no-any-return]


def _shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(y.shape) for y in tensors)


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    """The tensors in whatever a function returns, in the order of its structure."""
    return tuple(x for x in pytree.tree_leaves(result) if isinstance(x, Tensor))


def _written(tensors: Sequence[Tensor], read: Sequence[Tensor]) -> int:
    """Bytes that are there once the tensors are and `read` were: a view of these is nothing written, and what several have in
    common is written once."""
    memory = {x.untyped_storage().data_ptr() for x in read}
    found: dict[int, int] = {}
    for y in {(y.data_ptr(), y.shape, y.stride()): y for y in tensors}.values():
        storage = y.untyped_storage()
        if storage.data_ptr() not in memory:
            found[storage.data_ptr()] = min(found.get(storage.data_ptr(), 0) + extent(y), storage.nbytes())
    return sum(found.values())


def _moved(x: Tensor) -> Tensor:
    """Other values in the strides of `x`, between its own, so that a function that takes these takes them: the means of neighbours,
    and less where these are equal."""
    x = x.detach()
    means = torch.lerp(x.flatten().roll(1).view(x.shape), x, 0.5)
    return torch.empty_like(x).copy_(torch.where(means == x, 0.75 * x, means))
