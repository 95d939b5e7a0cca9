"""What a user's function must at least read, write and compute, found by calling it.

Forward: it reads what its operators read of inputs, parameters and other memory, each element once (`reads.py`), and writes its
outputs, except views of existing memory. Backward: it reads the gradients of outputs, unless it hands them on as they are, writes
those of inputs and parameters, and reads what the forward reads of those on whose values gradients depend or, if that is less, what
eager code's backward reads of what its forward has kept; and other memory as far as operators read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import earlier
from ..counting import Counter, counted
from ..errors import equal
from ..ledger import extent
from ..problem import Pass, Problem, differentiable
from ..reads import storage as memory

#: Inputs and parameters for which it is tested, one by one, whether results or gradients depend on them.
MOST_APART = 16
#: Stands for what reads tensors without an operator of PyTorch.
ELSEWHERE = "code that is no operator of PyTorch"


@dataclass
class Costs:
    """Minimum bytes and FLOPs (`counting.py`: without elementwise operations), forward and backward."""

    flops: int
    uncounted: list[str]  # operators whose FLOPs are unknown
    read: dict[int, int]  # of inputs and parameters, by storage
    besides: dict[int, int]  # of frozen parameters, buffers and captured tensors, by storage
    state_bytes: int  # read of state beyond what a call changes of it
    output_bytes: int
    gradient_flops: int = 0
    gradient_uncounted: list[str] = field(default_factory=list)
    gradient_read: int = 0  # bytes that the backward reads of inputs and parameters
    gradient_other: int = 0  # all else that it reads and writes

    def bytes_min(self, pass_: Pass) -> int:
        forward = sum(self.read.values()) + sum(self.besides.values()) + self.state_bytes + self.output_bytes
        backward = self.gradient_read + self.gradient_other
        return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[pass_]

    def flops_min(self, pass_: Pass) -> int | None:
        if self.flops_unknown(pass_):
            return None
        return {"fwd": self.flops, "bwd": self.gradient_flops, "fwd+bwd": self.flops + self.gradient_flops}[pass_]

    def flops_unknown(self, pass_: Pass) -> list[str]:
        backward = self.gradient_uncounted
        both = {"fwd": self.uncounted, "bwd": backward, "fwd+bwd": [*self.uncounted, *backward]}
        return list(dict.fromkeys(both[pass_]))


def forward_costs(
    problem: Problem,
    leaves: tuple[Tensor, ...],
    outputs: Sequence[Tensor],
    again: Sequence[Tensor],
    counter: Counter,
    state: Mapping[int, int],
    held: Sequence[Tensor],
) -> Costs:
    """Costs of the call that `counter` has seen and that returned `outputs`; `again`: results of a later one. `state`:
    bytes that a call changes of buffers and parameters, by storage; `held`: all of those, which may be returned as they
    are."""
    read = _reads(counter)
    given = {memory(x): x for x in (*problem.parameters, *leaves)}
    hidden = _read_unseen(problem, [x for of, x in given.items() if of not in read], leaves, again)
    return Costs(
        flops=counter.flops,
        uncounted=[*counter.uncounted, *([ELSEWHERE] if hidden else [])],
        read={of: read.get(of, 0) for of in given} | {memory(x): extent(x) for x in hidden},
        besides={of: size for of, size in read.items() if of not in given and of not in state},
        state_bytes=sum(max(0, read.get(of, 0) - size) for of, size in state.items()),
        output_bytes=_written(outputs, (*leaves, *held)) + sum(state.values()),
    )


def add_gradient_costs(costs: Costs, problem: Problem, leaves: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    """Add those of the backward from `outputs`, which is called."""
    here, counter = counted(lambda: problem.gradients(outputs, leaves, problem.upstream), reads=True)
    if odd := [g for g in here if g.layout != torch.strided]:
        raise ValueError(
            f"study: {problem.op} must have dense gradients, got a {odd[0].layout} one; make it dense (an embedding's: sparse=False)"
        )
    # FLOPs of recomputation (checkpointing) are not required.
    costs.gradient_flops = counter.flops if costs.uncounted else min(counter.flops, 2 * costs.flops)
    costs.gradient_uncounted = list(counter.uncounted)
    upstream = [g for g in problem.upstream if g is not None]
    seen = _reads(counter)
    besides = sum(size for of, size in seen.items() if of in costs.besides)
    costs.gradient_read = _read_by_gradient(costs.read, costs.besides, problem, leaves, seen)
    costs.gradient_other = _written(here, upstream) + besides
    if not counter.uncounted and _differentiated_by_pytorch(outputs):  # what operators have read is all that is read
        costs.gradient_other += sum(seen.get(memory(g), 0) for g in upstream)
        others = {*costs.besides, *map(memory, upstream)}
        costs.gradient_read = min(costs.gradient_read, sum(n for of, n in seen.items() if of not in others))
    else:
        costs.gradient_other += _read_of_upstream(upstream, here, seen)


def _differentiated_by_pytorch(outputs: Sequence[Tensor]) -> bool:
    """Whether a backward runs PyTorch's own formulas alone, and no torch.autograd.Function, in Python or C++, which may
    call kernels that are no operators."""
    nodes, known = [y.grad_fn for y in outputs], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in known:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction) or type(node).__name__ == "CppFunction":
            return False
        known.add(node)
        nodes += [before for before, _ in node.next_functions]
    return True


def _read_of_upstream(upstream: Sequence[Tensor], gradients: Sequence[Tensor], seen: Mapping[int, int]) -> int:
    """Bytes read of the gradients of outputs: what operators read or, where none does, all, unless it is handed on as the
    gradient of an input, as by an addition."""
    passed = {memory(g) for g in gradients}
    return sum(seen.get(memory(g), 0 if memory(g) in passed else extent(g)) for g in upstream)


def _reads(counter: Counter) -> dict[int, int]:
    return counter.reads.bytes() if counter.reads is not None else {}


def _read_by_gradient(
    read: Mapping[int, int],
    besides: Mapping[int, int],
    problem: Problem,
    leaves: tuple[Tensor, ...],
    seen: Mapping[int, int],
) -> int:
    """Bytes that the gradients need of inputs and parameters: what the function reads of those whose other values
    give other gradients, and of integers if there are such. The gradient of a function linear in all of them needs only
    the integers that operators of the backward read (`seen`), such as indices, or of which they read what the forward
    made, such as a mask's complement: these are not tried with other values, which might not fit."""
    floats = [x for x in (*leaves, *problem.parameters) if differentiable(x) and x.numel()]
    problem.begin_anew()
    # Called once more: under the counter autograd selects other formulas, SiLU's for one, which round differently.
    here = problem.gradients(problem.eager(leaves), leaves, problem.upstream)
    if not _gradients_change(problem, floats, leaves, here):
        integers = {of: read[of] for of in (memory(x) for x in leaves if not differentiable(x))}
        known = {*read, *besides, *(memory(g) for g in problem.upstream if g is not None)}
        made = sum(size for of, size in seen.items() if of not in known)
        direct = sum(size for of, size in integers.items() if of in seen)
        return direct + min(made, sum(integers.values()) - direct)
    idle = set()  # floats that the gradient does not read
    if len(floats) > 1:
        idle = {memory(x) for x in floats[:MOST_APART] if not _gradients_change(problem, [x], leaves, here)}
    return sum(size for of, size in read.items() if of not in idle)


def _gradients_change(
    problem: Problem, some: Sequence[Tensor], leaves: tuple[Tensor, ...], here: Sequence[Tensor]
) -> bool:
    """Whether other values of some inputs and parameters give other gradients than these."""
    other = {id(x): earlier.other(x) for x in some}
    moved = tuple(other[id(x)].requires_grad_(x.requires_grad) if id(x) in other else x for x in leaves)
    before = {p: p.detach().clone() for p in problem.parameters if id(p) in other}
    try:
        for p in before:
            p.data.copy_(other[id(p)])
        problem.begin_anew()
        others = problem.eager(moved)
        if shapes(others) != problem.output_shapes():
            return True
        there = problem.gradients(others, moved, problem.upstream)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a function that rejects other values depends on them
        return True
    finally:
        for p, values in before.items():
            p.data.copy_(values)
    return not all(map(equal, here, there))


def _read_unseen(
    problem: Problem, some: Sequence[Tensor], leaves: tuple[Tensor, ...], outputs: Sequence[Tensor]
) -> list[Tensor]:
    """Those of the inputs and parameters of which no operator has read anything, but on whose values the outputs
    depend: a kernel of the user's own reads them. After MOST_APART the rest are taken to be read."""
    return [
        x
        for i, x in enumerate(some)
        if x.numel()
        and (i >= MOST_APART or _depends_on(problem, x, leaves, [y for y in outputs if memory(y) != memory(x)]))
    ]


def _depends_on(problem: Problem, x: Tensor, leaves: tuple[Tensor, ...], outputs: Sequence[Tensor]) -> bool:
    """Whether other values of x, an input or parameter, give other outputs than these."""
    before = x.detach().clone()
    try:
        with torch.no_grad():
            x.data.copy_(earlier.other(x))
            problem.begin_anew()
            others = [y for y in problem.eager(leaves) if memory(y) != memory(x)]
        return shapes(others) != shapes(outputs) or not all(map(equal, others, outputs))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it rejects other values
        return True
    finally:
        x.data.copy_(before)


def changed_bytes(x: Tensor, now: Tensor) -> int:
    """Bytes of the elements of `now` that differ from those of x; all where the shape does."""
    if (x.shape, x.dtype) != (now.shape, now.dtype):
        return extent(now)
    same = (x == now) | ((x != x) & (now != now))
    return (x.numel() - int(same.count_nonzero())) * x.element_size()


def shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(y.shape) for y in tensors)


def _written(tensors: Sequence[Tensor], read: Sequence[Tensor]) -> int:
    """Bytes newly allocated for the tensors: views of `read` are free, and shared storage counts once."""
    memory = {x.untyped_storage().data_ptr() for x in read}
    found: dict[int, int] = {}
    for y in {(y.data_ptr(), y.shape, y.stride()): y for y in tensors}.values():
        storage = y.untyped_storage()
        if storage.data_ptr() not in memory:
            found[storage.data_ptr()] = min(found.get(storage.data_ptr(), 0) + extent(y), storage.nbytes())
    return sum(found.values())
