"""Finds providers and functions that return results of earlier inputs: the values of the inputs, and of the outputs'
gradients, are changed, those of the inputs in place, and the pass is repeated. An output or gradient that stays the same
in every bit, where eager code's changes, is stale.

This does not find a cache that compares all values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .errors import equal, errors
from .plugin import Run
from .problem import Problem, copied, differentiable, same, span

#: Elements of an output that are compared with those for other inputs.
MANY = 2**20
#: Of so few integers all may stay the same by chance when the inputs change.
FEW = 8
#: Results that differ by less may be the same up to rounding, or, of integers, this share by chance.
CLOSE = 0.1


def memory(x: Tensor) -> Tensor:
    """The memory of x from its first to its last element, as one dimension."""
    flat = x.detach()
    return flat.as_strided((span(x.shape, x.stride()) if x.numel() else 0,), (1,), x.storage_offset())


def alter(x: Tensor) -> Tensor:
    """Overwrite x with values that differ from its own as much as these from each other, within their range and in
    their order: every second element in memory becomes its neighbour. Where neighbours are equal, floats become three
    quarters, of themselves or, if all are zero, of one, and others are reversed."""
    flat = memory(x)
    even, odd = flat[: flat.numel() // 2 * 2 : 2], flat[1::2]
    if not equal(even, odd):
        odd.copy_(even)
    elif differentiable(x):
        flat.mul_(0.75) if flat.any() else flat.fill_(0.75)
    else:
        flat.copy_(flat.flip(0))
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
    """At most about MANY elements of y, from all of it: an odd distance apart, since `alter` changes every second one."""
    return y.detach().flatten()[:: y.numel() // MANY | 1]


def differs(a: Tensor, b: Tensor) -> bool:
    """Whether results differ by more than rounding, or integers by more than chance."""
    error = errors([a], [b])
    return max(error.max, error.others / error.whole if error.whole > FEW else 0.0) > CLOSE


def unchanged(before: Sequence[Tensor], after: Sequence[Tensor]) -> list[int]:
    """Which results stay the same in every bit, given samples of them before and after the inputs changed."""
    return [i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x.numel() and equal(x, y)]


def stale_result(
    problem: Problem,
    run: Run,
    leaves: tuple[Tensor, ...],
    samples: Sequence[Tensor],
    again: Callable[[Problem], Sequence[Tensor]],
    eager: Callable[[Problem], Sequence[Tensor]],
) -> int | None:
    """Which result of the provider is that of earlier inputs, given samples of its results before. `again` are the
    provider's results for a problem, from `leaves`, whose values are changed in place before; `eager` are eager code's,
    called only where a result stays the same. None if there is none, or if nothing can be told because the function
    rejects other values."""
    changed = copy.copy(problem)
    try:
        _change(problem, run, leaves)
        if problem.task.pass_ != "fwd":
            changed.upstream = tuple(None if g is None else other(g) for g in problem.upstream)
        problem.begin_anew()
        kept = unchanged(samples, [sample(y) for y in again(changed)])
        if not kept:
            return None
        then = [sample(y).clone() for y in eager(problem)]
        changed.tensors = tuple(map(alter_floats, problem.leaves(False)))
        now = [sample(y) for y in eager(changed)]
    except torch.OutOfMemoryError:
        raise
    except Exception:  # the function or a library may reject the values in any way
        return None
    return next((i for i in kept if differs(then[i], now[i])), None)
