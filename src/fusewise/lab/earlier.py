"""Finds providers and functions that return results of earlier inputs: the values of the inputs, and of the outputs'
gradients, are changed, those of the inputs in place, and the pass is repeated. An output or gradient that stays the same
in every bit, where the truth changes, is stale.

This does not find a cache that compares values that change, such as all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusewise.ops._common import span

from .errors import equal, errors
from .plugin import Run
from .problem import Problem, copied, differentiable, same

#: Elements of an output that are compared with those for other inputs.
MANY = 2**20
#: Of so few integers all may stay the same by chance when the inputs change.
FEW = 8
#: Results that differ by more than this are never the same up to rounding; of integers, up to this share may differ by
#: chance.
CLOSE = 0.1


def memory(x: Tensor) -> Tensor:
    """The memory of x from its first to its last element, as one dimension."""
    flat = x.detach()
    return flat.as_strided((span(x.shape, x.stride()) if x.numel() else 0,), (1,), x.storage_offset())


def alter(x: Tensor) -> Tensor:
    """Overwrite x with values that differ from its own as much as these from each other, within their range and in
    their order: in memory, a b c d e f becomes a a b b d d. The first stays, for caches that compare it; no other, for
    functions of every second or of one column. If all are equal, floats become three quarters, of themselves or, if all
    are zero, of one."""
    flat = memory(x)
    even, odd = flat[::2], flat[1::2]
    if not equal(flat[1:], flat[:-1]):
        even[1:].copy_(odd[: len(even) - 1])
        odd.copy_(even[: len(odd)])
    elif differentiable(x):
        flat.mul_(0.75) if flat.any() else flat.fill_(0.75)
    return x


def other(x: Tensor) -> Tensor:
    """A copy with the strides of x and other values."""
    return alter(copied(x.detach(), x.dtype))


def alter_floats(x: Tensor) -> Tensor:
    """Integers stay as they are: they may be indices, which fit together."""
    return alter(x) if differentiable(x) else x


def _change(problem: Problem, run: Run, leaves: tuple[Tensor, ...]) -> None:
    """Overwrite the provider's tensors with what it would have made of other values."""
    if run.own is same:  # without copies of large tensors
        for leaf, x in zip(leaves, problem.tensors, strict=True):
            memory(leaf).copy_(memory(x))
            alter_floats(leaf)
    else:
        for leaf, x in zip(leaves, run.own(*map(alter_floats, problem.leaves(False))), strict=True):
            memory(leaf).copy_(memory(x))


def sample(y: Tensor) -> Tensor:
    """At most about MANY elements of y, from all of it: an odd distance apart, so that all columns take part."""
    return y.detach().flatten()[:: y.numel() // MANY | 1]


def differs(before: Sequence[Tensor], after: Sequence[Tensor], i: int, most: float) -> bool:
    """Whether result i differs by more than `most`, which rounding explains, or integers by more than chance."""
    if not differentiable(after[i]):
        error = errors(before[i : i + 1], after[i : i + 1])
        return error.whole > FEW and error.others > CLOSE * error.whole
    # The others are there for their size: beside them, what rounding leaves of zero is no difference.
    alone = [before[j] if j == i else y for j, y in enumerate(after)]
    return errors(alone, after).max > min(most, CLOSE)


def unchanged(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[int]:
    """Which results stay the same in every bit, given samples of them before and after the inputs changed."""
    return [i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x.numel() and equal(x, y)]


def stale_result(
    problem: Problem,
    run: Run,
    leaves: tuple[Tensor, ...],
    samples: Sequence[Tensor],
    again: Callable[[Problem], Sequence[Tensor]],
    right: Callable[[Problem], Sequence[Tensor]],
    most: float,
) -> int | None:
    """Which result of the provider is that of earlier inputs, given samples of its results before. `again` are the
    provider's results for a problem, from `leaves`, whose values are changed in place before; `right` are the right
    ones, called only where a result stays the same, which is right where they differ by no more than `most`. None if
    there is none, or if nothing can be told because the function rejects other values."""
    changed = copy.copy(problem)
    try:
        _change(problem, run, leaves)
        if problem.task.pass_ != "fwd":
            changed.upstream = tuple(None if g is None else other(g) for g in problem.upstream)
        problem.begin_anew()
        kept = unchanged(samples, [sample(y) for y in again(changed)])
        if not kept:
            return None
        then = [sample(y).clone() for y in right(problem)]
        changed.tensors = tuple(map(alter_floats, problem.leaves(False)))
        now = [sample(y) for y in right(changed)]
    except torch.OutOfMemoryError:
        raise
    except Exception:  # the function or a library may reject the values in any way
        return None
    return next((i for i in kept if differs(then, now, i, most)), None)
