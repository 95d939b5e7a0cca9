"""Correctness before timing: errors against float64, and the tolerance rule.

The reference runs in float64 on the same rounded inputs. A provider's error may be twice that of eager code in the same
dtype, plus one rounding to that dtype and the effect of another order of summation:

    error ≤ 2 · error(eager) + u(dtype) + √(n - 1) · u(sums)        in both the max norm and the RMS norm

u is half of eps; sums are float32 (float64 in float64); n is the number of terms of eager's longest sum
(`counting.py`). The factor 2 is that of flash-attention's tests; the other terms let an exactly rounded result pass
where eager happens to be exact. Eager's error counts as LOOSEST at most: beyond that eager itself is wrong and no
baseline for others. Integers and bools either equal those of float64 or not: a provider may have twice as many
mismatches as eager, plus a margin for chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fusewise._shared.gpu import tf32_allowed
from fusewise.ops._common import dtype_name

from .counting import counted
from .earlier import sample, stale_result
from .errors import Deviation, Errors, equal, errors
from .plugin import Run
from .problem import Problem, differentiable, handed_over, precision
from .reads import storage
from .truths import MOST_BYTES, Truths

#: Bytes of float64 results computed at a time, where the total exceeds MOST_BYTES and rows are independent. Temporaries
#: take a few times as much.
PIECE_BYTES = 2**28
#: Cap on eager's error in the tolerance rule.
LOOSEST = 0.1
#: A result that stays the same when inputs change is wrong where the right one changes by this many times the error that
#: is allowed: by more than two it cannot be right before and after; the rest is margin.
CHANGED = 10
#: Explains a large error of eager code.
ANOTHER = "eager code gives another result in float64: a value overflows, depends on the dtype, or is random"


@dataclass(frozen=True)
class Yardstick:
    """The baseline for all providers: eager's errors and the number of terms of its longest sum."""

    errors: Errors
    terms: int = 1


@dataclass(frozen=True)
class Verdict:
    """The result of the check. `reason` is empty when the provider is correct."""

    errors: Errors
    eager: Errors
    reason: str


def band(dtype: torch.dtype, terms: int = 1) -> float:
    """Relative error of one rounding to `dtype` plus that of a sum of `terms` terms."""
    sums = dtype if dtype == torch.float64 else torch.float32
    return (torch.finfo(dtype).eps + math.sqrt(terms - 1) * torch.finfo(sums).eps) / 2


def allowed(eager: float, dtype: torch.dtype, terms: int = 1) -> float:
    """The largest tolerated error, given eager's error and the number of terms of its longest sum."""
    return 2 * min(eager, LOOSEST) + band(dtype, terms)


def within(found: Errors, yardstick: Yardstick, dtype: torch.dtype) -> bool:
    eager, terms = yardstick.errors, yardstick.terms
    near = found.max <= allowed(eager.max, dtype, terms) and found.rms <= allowed(eager.rms, dtype, terms)
    return near and found.others <= most_others(eager)


def most_others(eager: Errors) -> float:
    """How many integers may differ, given eager's count: twice as many, plus three standard deviations of such a
    count."""
    count = min(eager.others, LOOSEST * eager.whole)
    return 2 * count + 3 * math.sqrt(count)


def results(problem: Problem, wide: bool) -> list[Tensor]:
    """Results of the task's pass, outputs before gradients before state: the truth in float64 if `wide`, else
    eager's."""
    backward = problem.task.pass_ != "fwd"
    problem.begin_anew()  # reset state, so that results do not depend on the number of calls
    leaves = problem.leaves(backward, wide)
    outputs = problem.truth(leaves) if wide else problem.eager(leaves)
    state = {storage(x) for x in problem.written_state(wide).values()}  # which the next call overwrites
    found = (
        [y.detach().clone() if storage(y) in state else y.detach() for y in outputs]
        if problem.task.pass_ != "bwd"
        else []
    )
    if backward:
        found += problem.gradients(outputs, leaves, problem.upstream, wide)
    return [*found, *written(problem, wide).values()]


def written(problem: Problem, wide: bool = False) -> dict[str, Tensor]:
    """The values that the last call has written to state; without integers, such as a number of calls."""
    return {name: x.detach().clone() for name, x in problem.written_state(wide).items() if differentiable(x)}


def eagers(problem: Problem) -> tuple[list[Tensor], int]:
    """Eager's results, and the number of terms of its longest sum."""
    with _as_made(problem):
        # Counted in a separate run: under a dispatch mode autograd selects other formulas for some operators.
        terms = counted(lambda: results(problem, False))[1].terms
        return results(problem, False), terms


@contextmanager
def _as_made(problem: Problem) -> Iterator[None]:
    """The precision of float32 matmuls that the problem was made with: a provider's library may allow tf32 for the whole
    process, and is not to be judged by eager code in tf32, too."""
    before, changed = precision(), tf32_allowed() != problem.tf32
    if changed:
        torch.set_float32_matmul_precision("high" if problem.tf32 else "highest")
    try:
        yield
    finally:
        if changed:
            torch.set_float32_matmul_precision(before)


def expected(problem: Problem, kept: Truths | None = None) -> tuple[list[Tensor], Yardstick]:
    """The float64 results of the task's pass and the baseline for providers, from the cache (`kept`) if it has them."""
    if kept is not None and (known := kept.found(problem.task)) is not None:
        largest, root, others, whole, terms = known[1]
        return known[0], Yardstick(Errors(largest, root, int(others), int(whole)), int(terms))
    truths = results(problem, True)
    found, terms = eagers(problem)
    of_eager = errors(found, truths)
    if kept is not None:
        kept.keep(problem.task, truths, (of_eager.max, of_eager.rms, of_eager.others, of_eager.whole, terms))
    return truths, Yardstick(of_eager, terms)


def pieces(problem: Problem) -> list[slice]:
    """Row slices for which the truth is computed piecewise; none where it is computed whole, as everything cached
    is."""
    outputs = [math.prod(shape) for shape in problem.output_shapes()] if problem.task.pass_ != "bwd" else []
    gradients = {i: x.numel() for i, x in enumerate(problem.tensors)} if problem.task.pass_ != "fwd" else {}
    if not problem.by_rows or 8 * (sum(outputs) + sum(gradients.values())) <= MOST_BYTES:
        return []
    rows = len(problem.tensors[min(problem.by_rows)])
    row = 8 * (sum(outputs) + sum(n for i, n in gradients.items() if i in problem.by_rows)) // rows
    step = max(1, PIECE_BYTES // row)
    return [slice(start, start + step) for start in range(0, rows, step)]


def hold(problem: Problem, rows: Sequence[slice], *found: Sequence[Tensor]) -> list[Errors]:
    """Errors of several lists of results against the truth, computed for some rows at a time. Gradients of what all
    rows share are summed over the pieces."""
    deviations = [Deviation() for _ in found]
    outputs = len(problem.output_shapes()) if problem.task.pass_ != "bwd" else 0
    wanted = (i for i, x in enumerate(problem.wanting(problem.tensors, True)) if x.requires_grad)
    shared = {outputs + place for place, i in enumerate(wanted) if i not in problem.by_rows}
    sums: dict[int, Tensor] = {}
    for some in rows:
        for number, (true, *tensors) in enumerate(zip(results(problem.piece(some), True), *found, strict=True)):
            if number in shared:
                sums[number] = sums[number].add_(true) if number in sums else true
                continue
            for deviation, tensor in zip(deviations, tensors, strict=True):
                deviation.add(number, tensor[some], true)
        del true  # else a gradient would stay allocated beside the next piece
    for number, true in sums.items():
        for deviation, result in zip(deviations, found, strict=True):
            deviation.add(number, result[number], true)
    return [deviation.errors() for deviation in deviations]


def poison(problem: Problem) -> None:
    """Fill memory that the allocator is likely to reuse for results with NaN, so that unwritten elements show. All at
    once, or results of one size would share it, and others land where eager code's, which are right, have been."""
    made = [*zip(problem.output_shapes(), problem.output_dtypes(), strict=True)]
    if problem.task.pass_ != "fwd":
        inputs = [x for x in problem.wanting(problem.tensors, True) if x.requires_grad]
        made += [(tuple(x.shape), x.dtype) for x in (*inputs, *problem.parameters)]
    floats = [(shape, dtype) for shape, dtype in made if dtype.is_floating_point or dtype.is_complex]
    _ = [torch.full(shape, math.nan, device=problem.device, dtype=dtype) for shape, dtype in floats]


def own_leaves(problem: Problem, run: Run, gradient: bool) -> tuple[Tensor, ...]:
    """The provider's own copies of the problem's tensors; floating ones require grad if `gradient`."""
    return problem.wanting(run.own(*problem.leaves(False)), gradient)


def found_by(problem: Problem, run: Run, leaves: tuple[Tensor, ...]) -> tuple[list[Tensor], str]:
    """The provider's results for the task's pass, or why they cannot be correct."""
    backward = problem.task.pass_ != "fwd"
    arguments = run.enter(*leaves)
    poison(problem)
    kept = None
    if backward and run.vjp is not None:
        result, kept = run.vjp.forward(arguments)
    else:
        result = run.call(*arguments)
    outputs = run.leave(result)
    if odd := odd_outputs(problem, outputs):
        return [], odd
    found = [y.detach().clone() for y in outputs] if problem.task.pass_ != "bwd" else []
    if not backward:
        return [*found, *written(problem).values()], ""
    if run.vjp is not None:
        # Cloned, because the backward may overwrite them.
        upstream = run.vjp.enter(tuple(g.clone() for g in problem.upstream if g is not None))
        gradients = run.vjp.leave(run.vjp.backward(kept, upstream))
    else:
        held = len(problem.parameters)
        gradients = problem.gradients(outputs, leaves, handed_over(outputs, problem.upstream))
        gradients = (*run.restore(*gradients[: len(gradients) - held]), *gradients[len(gradients) - held :])
    if odd := odd_gradients(problem, gradients):
        return [], odd
    return [*found, *gradients, *written(problem).values()], ""


def odd_outputs(problem: Problem, outputs: Sequence[Tensor]) -> str:
    """Why outputs differ from eager's in shape or dtype; empty if they do not."""
    shapes = tuple(tuple(y.shape) for y in outputs)
    if shapes != problem.output_shapes():
        return f"outputs have shapes {shapes}, {problem.output_shapes()} is right"
    dtypes = problem.output_dtypes()
    for number, (y, dtype) in enumerate(zip(outputs, dtypes, strict=True)):
        if y.dtype != dtype:
            return (
                f"{_which('output', number, len(dtypes))} is {dtype_name(y.dtype)}, eager code's is {dtype_name(dtype)}"
            )
    return ""


def odd_gradients(problem: Problem, gradients: Sequence[Tensor]) -> str:
    """Why gradients differ in shape or dtype from their inputs or parameters; empty if they do not."""
    inputs = [x for x in problem.wanting(problem.tensors, True) if x.requires_grad]
    wanted = (*inputs, *problem.parameters)
    for number, (g, x) in enumerate(zip(gradients, wanted, strict=True)):
        of = "input" if number < len(inputs) else "parameter"
        which = _which("gradient", number, len(wanted))
        if g.shape != x.shape:
            return f"{which} has shape {tuple(g.shape)}, its {of}'s is {tuple(x.shape)}"
        if g.dtype != x.dtype:
            return f"{which} is {dtype_name(g.dtype)}, its {of}'s dtype is {dtype_name(x.dtype)}"
    return ""


def _which(what: str, number: int, count: int) -> str:
    return f"{what} {number + 1} of {count}" if count > 1 else f"the {what}"


def check(problem: Problem, run: Run, kept: Truths | None = None) -> Verdict:
    """Check one provider against the truth in the task's pass."""
    rows = pieces(problem)
    if rows:  # eager's results wait for the truth, which comes last and piece by piece
        by_eager, terms = eagers(problem)
    else:
        truths, yardstick = expected(problem, kept)
    leaves = own_leaves(problem, run, problem.task.pass_ != "fwd" and run.vjp is None)
    problem.begin_anew()
    found, odd = found_by(problem, run, leaves)
    given = own_leaves(problem, run, False)  # only now, so that they take no memory during the call
    changed = any(not equal(leaf, x) for leaf, x in zip(leaves, given, strict=True))
    del given
    absent, overwritten = problem.left_out(), problem.overwritten()
    if rows:
        of_eager, *others = hold(problem, rows, by_eager, *([] if odd else [found]))
        yardstick = Yardstick(of_eager, terms)
    else:
        others = [] if odd else [errors(found, truths)]
        del truths
    eager = yardstick.errors
    if odd:
        return Verdict(Errors(math.inf, math.inf), eager, odd)
    (measured,) = others
    reason = ""
    if absent:
        reason = f"it does not write to the {absent[0]}"
    elif measured.others > most_others(eager):
        reason = (
            f"{measured.others} of {measured.whole} integers differ from float64's, {eager.others} of eager's do"
            + (f", which count as {LOOSEST} at most: {ANOTHER}" if eager.others > LOOSEST * eager.whole else "")
            + "; among equal values, as in a sort, an index may differ"
        )
    elif measured.unlike:
        reason = (
            measured.unlike
            + (f"; {ANOTHER}" if math.isinf(eager.max) else "")
            + (f"; {run.arithmetic}" if run.arithmetic else "")
        )
    elif not within(measured, yardstick, problem.dtype):
        reason = (
            f"error {measured.max:.3g} (rms {measured.rms:.3g}) is more than twice eager's {eager.max:.3g} "
            f"(rms {eager.rms:.3g}) plus the rounding band {band(problem.dtype, yardstick.terms):.3g}"
            + (f" of sums of {yardstick.terms} terms" if yardstick.terms > 1 else "")
            + (f", eager's counting as {LOOSEST} at most: {ANOTHER}" if max(eager.max, eager.rms) > LOOSEST else "")
            + (f"; {run.arithmetic}" if run.arithmetic else "")
        )
    elif changed and not (run.in_place or problem.overwrites):
        reason = "it overwrites its inputs without declaring it"
    elif overwritten:
        reason = f"it overwrites the {overwritten[0]}, which eager code leaves as it is"
    if not reason:
        samples = [sample(y).clone() for y in found]
        by_eager = found = []  # else they would be there beside the second call's
        stale = stale_result(
            problem,
            run,
            leaves,
            samples,
            lambda p: found_by(p, run, leaves)[0],
            lambda p: results(p, not rows),  # of large ones eager's, which take less memory
            CHANGED * allowed(eager.max, problem.dtype, yardstick.terms),
        )
        if stale is not None:
            outputs = len(problem.output_shapes()) if problem.task.pass_ != "bwd" else 0
            state = list(written(problem))
            gradients, change = len(samples) - outputs - len(state), "the inputs change"
            if stale < outputs:
                which = _which("output", stale, outputs)
            elif stale < outputs + gradients:
                which = _which("gradient", stale - outputs, gradients)
                change = "the inputs and the outputs' gradients change"
            else:
                which = f"the {state[stale - outputs - gradients]}"
            reason = f"{which} is that of earlier inputs: it stays the same when {change}"
    return Verdict(measured, eager, reason)
