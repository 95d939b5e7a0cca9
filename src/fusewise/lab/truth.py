"""Truth before time: errors against float64, and the rule that decides.

The reference is computed in float64 from the same rounded inputs. A provider may be at most twice as far from it as
eager code of the same dtype, plus what one rounding to that dtype and another order of summation cost:

    error ≤ 2 · error(eager) + u(dtype) + √(n - 1) · u(sums)        in the max norm and in the root mean square

where u is half of eps, sums are float32 (float64 in float64), and n is the length of the longest of eager code (`counting.py`).
Eager's error counts as LOOSEST at most: eager code that is far off is no yardstick, and is wrong itself. Integers and bools have no
rounding: they are those of float64 or not, and of a provider no more than twice as many are not as of eager code, and what chance
adds to that. (Flash-attention's
tests use the factor 2; the band lets an exactly rounded result pass where eager is exact by luck.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .counting import counted
from .plugin import Run
from .problem import Problem, differentiable, handed_over
from .truths import MOST_BYTES, Truths

#: Elements compared at a time: on a CPU so few that a float64 copy stays in the cache and torch starts no threads for them,
#: which wait for each other where other processes work, too; on a GPU enough of them.
CHUNK = {"cpu": 2**15, "cuda": 2**26}
#: Bytes of the float64 results that are computed at a time where all of them are more than MOST_BYTES and their rows are
#: independent. Temporaries are a few times as many.
PIECE_BYTES = 2**28
#: Below this share of the largest true value of all tensors a tensor's own are what float64 leaves of zero.
NOTHING = 2**-40
#: The largest error of eager code that others may be judged by.
LOOSEST = 0.1
#: Why eager code may be off by more.
ANOTHER = (
    "the same code gives something else in float64, as where a value overflows, follows from the dtype or is random"
)


@dataclass(frozen=True)
class Errors:
    """Largest and root-mean-square error, each relative to the same norm of the truth. inf: not finite where the truth is,
    or otherwise than the truth where that is not. Of integers and bools how many are others, of how many."""

    max: float
    rms: float
    others: int = 0
    whole: int = 0

    @property
    def worst(self) -> float:
        """The largest error, or the share of integers that are others."""
        return max(self.max, self.others / self.whole if self.whole else 0.0)


@dataclass(frozen=True)
class Yardstick:
    """What others are held against: eager code's errors, and the terms of its longest sum."""

    errors: Errors
    terms: int = 1


@dataclass(frozen=True)
class Verdict:
    """What the check found. `reason` is empty when the provider is right."""

    errors: Errors
    eager: Errors
    reason: str


class Deviation:
    """What tensors are off by, held against the truth as that comes: whole, or some rows at a time."""

    def __init__(self) -> None:
        # by the tensor's number: of error and truth the largest and the sum of the squares; how many elements
        self.norms: dict[int, list[float]] = {}
        self.others = self.whole = 0  # of integers and bools
        self.wrong = False  # not finite where the truth is, or otherwise than the truth where that is not

    def add(self, number: int, result: Tensor, truth: Tensor) -> None:
        """Hold a tensor, or some rows of it, against the truth."""
        if truth.numel() == 0 or self.wrong:
            return
        if result.is_complex() != truth.is_complex():
            self.wrong = True
            return
        if not differentiable(truth):
            self.others += int((result != truth).sum())
            self.whole += truth.numel()
            return
        result, truth = parts(result), parts(truth)
        chunk, norms = CHUNK[truth.device.type], self.norms.setdefault(number, [0.0] * 5)
        for found, true in zip(result.flatten().split(chunk), truth.flatten().split(chunk), strict=True):
            found, true = found.double(), true.double()
            peaks = _peaks(found - true, true)
            if not all(map(math.isfinite, peaks)):  # NaN and infinity pass through every one of them
                finite = true.isfinite()
                alike = equal(found.where(~finite, 0.0), true.where(~finite, 0.0))
                peaks = _peaks((found - true).where(finite, 0.0), true.where(finite, 0.0))
                if not alike or not all(map(math.isfinite, peaks)):
                    self.wrong = True
                    return
            norms[:2] = max(norms[0], peaks[0]), max(norms[1], peaks[1])
            norms[2:4] = norms[2] + peaks[2] ** 2, norms[3] + peaks[3] ** 2
        norms[4] += truth.numel()

    def errors(self) -> Errors:
        """The worst over all tensors. One that is zero but for float64's own rounding, such as the gradient of a bias before a
        normalization, is held against the largest value of all."""
        if self.wrong:
            return Errors(math.inf, math.inf)
        worst_max = worst_rms = 0.0
        scale = max((true for _, true, *_ in self.norms.values()), default=0.0)
        for largest, largest_true, squares, squares_true, count in self.norms.values():
            root_true = math.sqrt(squares_true)
            if 0.0 < largest_true < NOTHING * scale:
                largest_true, root_true = scale, scale * math.sqrt(count)
            worst_max = max(worst_max, largest / (largest_true or 1.0))
            worst_rms = max(worst_rms, math.sqrt(squares) / (root_true or 1.0))
        return Errors(worst_max, worst_rms, self.others, self.whole)


def errors(results: Sequence[Tensor], truths: Sequence[Tensor]) -> Errors:
    """The worst error over pairs of tensors."""
    deviation = Deviation()
    for number, pair in enumerate(zip(results, truths, strict=True)):
        deviation.add(number, *pair)
    return deviation.errors()


def _peaks(difference: Tensor, true: Tensor) -> list[float]:
    """Largest value of each, and root of the squares of each."""
    ends = (*difference.aminmax(), *true.aminmax())  # one pass each and no copy of absolute values
    low, high, low_true, high_true, *norms = torch.stack((*ends, difference.norm(), true.norm())).tolist()
    return [max(-low, high), max(-low_true, high_true), *norms]


def parts(x: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, everything else as it is."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def equal(a: Tensor, b: Tensor) -> bool:
    """The same values, NaN being equal to NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def band(dtype: torch.dtype, terms: int = 1) -> float:
    """The relative error of one rounding to `dtype`, and of a sum of so many terms."""
    sums = dtype if dtype == torch.float64 else torch.float32
    return (torch.finfo(dtype).eps + math.sqrt(terms - 1) * torch.finfo(sums).eps) / 2


def allowed(eager: float, dtype: torch.dtype, terms: int = 1) -> float:
    """The largest error that is right where eager code's is `eager` and its longest sum has so many terms."""
    return 2 * min(eager, LOOSEST) + band(dtype, terms)


def within(found: Errors, yardstick: Yardstick, dtype: torch.dtype) -> bool:
    eager, terms = yardstick.errors, yardstick.terms
    near = found.max <= allowed(eager.max, dtype, terms) and found.rms <= allowed(eager.rms, dtype, terms)
    return near and found.others <= most_others(eager)


def most_others(eager: Errors) -> float:
    """So many integers may be others where so many are of eager code: twice, and three standard deviations of such a count."""
    count = min(eager.others, LOOSEST * eager.whole)
    return 2 * count + 3 * math.sqrt(count)


def results(problem: Problem, wide: bool) -> list[Tensor]:
    """What the task's pass gives, outputs before gradients: the truth in float64 if `wide`, else eager code's."""
    backward = problem.task.pass_ != "fwd"
    problem.begin_anew()  # what a result depends on is the same for all, however often they are called
    leaves = problem.leaves(backward, wide)
    outputs = problem.truth(leaves) if wide else problem.eager(leaves)
    found = [y.detach() for y in outputs] if problem.task.pass_ != "bwd" else []
    return [*found, *problem.gradients(outputs, leaves, problem.upstream, wide)] if backward else found


def eagers(problem: Problem) -> tuple[list[Tensor], int]:
    """Eager code's results, and the terms of its longest sum."""
    # Counted in a run of its own: while operators are watched, autograd takes other formulas for some.
    terms = counted(lambda: results(problem, False))[1].terms
    return results(problem, False), terms


def expected(problem: Problem, kept: Truths | None = None) -> tuple[list[Tensor], Yardstick]:
    """The float64 results of the task's pass, and what others are held against; those that are kept, if there are."""
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
    """The rows of which the truth is computed at a time; none where it is computed as a whole, as all that is kept is."""
    outputs = [math.prod(shape) for shape in problem.output_shapes()] if problem.task.pass_ != "bwd" else []
    gradients = {i: x.numel() for i, x in enumerate(problem.tensors)} if problem.task.pass_ != "fwd" else {}
    if not problem.by_rows or 8 * (sum(outputs) + sum(gradients.values())) <= MOST_BYTES:
        return []
    rows = len(problem.tensors[min(problem.by_rows)])
    row = 8 * (sum(outputs) + sum(n for i, n in gradients.items() if i in problem.by_rows)) // rows
    step = max(1, PIECE_BYTES // row)
    return [slice(start, start + step) for start in range(0, rows, step)]


def hold(problem: Problem, rows: Sequence[slice], *found: Sequence[Tensor]) -> list[Errors]:
    """The errors of several lists of results against the truth, of which there are never more than some rows, and the sums
    over them that are the gradients of what all rows share."""
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
        del true  # or a gradient would be there beside the next piece
    for number, true in sums.items():
        for deviation, result in zip(deviations, found, strict=True):
            deviation.add(number, result[number], true)
    return [deviation.errors() for deviation in deviations]


def poison(problem: Problem) -> None:
    """Leave NaN in memory that an output is likely to be given, so that an element left unwritten shows."""
    for shape in problem.output_shapes():
        torch.full(shape, math.nan, device=problem.device, dtype=problem.dtype)


def own_leaves(problem: Problem, run: Run, gradient: bool) -> tuple[Tensor, ...]:
    """Copies of the problem's tensors as the provider keeps them; the floating ones want a gradient if so said."""
    return problem.wanting(run.own(*problem.leaves(False)), gradient)


def found_by(problem: Problem, run: Run, leaves: tuple[Tensor, ...]) -> tuple[list[Tensor], str]:
    """What the provider makes of the leaves in the task's pass, or why its results cannot be the right ones."""
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
        return found, ""
    if run.vjp is not None:
        upstream = run.vjp.enter(tuple(g.clone() for g in problem.upstream if g is not None))  # it may overwrite them
        gradients = run.vjp.leave(run.vjp.backward(kept, upstream))
    else:
        held = len(problem.parameters)
        gradients = problem.gradients(outputs, leaves, handed_over(outputs, problem.upstream))
        gradients = (*run.restore(*gradients[: len(gradients) - held]), *gradients[len(gradients) - held :])
    if odd := odd_gradients(problem, gradients):
        return [], odd
    return [*found, *gradients], ""


def odd_outputs(problem: Problem, outputs: Sequence[Tensor]) -> str:
    """Why outputs are not those of eager code whatever their values; empty where they may be."""
    shapes = tuple(tuple(y.shape) for y in outputs)
    if shapes != problem.output_shapes():
        return f"outputs have shapes {shapes}, {problem.output_shapes()} is right"
    dtypes = problem.output_dtypes()
    for number, (y, dtype) in enumerate(zip(outputs, dtypes, strict=True)):
        if y.dtype != dtype:
            return f"{_which('output', number, len(dtypes))} is {_plain(y.dtype)}, eager code's is {_plain(dtype)}"
    return ""


def odd_gradients(problem: Problem, gradients: Sequence[Tensor]) -> str:
    """Why gradients are not of the inputs and parameters whatever their values; empty where they may be."""
    inputs = [x for x in problem.wanting(problem.tensors, True) if x.requires_grad]
    wanted = (*inputs, *problem.parameters)
    for number, (g, x) in enumerate(zip(gradients, wanted, strict=True)):
        if g.dtype != x.dtype:
            of = "input" if number < len(inputs) else "parameter"
            which = _which("gradient", number, len(wanted))
            return f"{which} is {_plain(g.dtype)}, its {of}'s dtype is {_plain(x.dtype)}"
    return ""


def _which(what: str, number: int, count: int) -> str:
    return f"{what} {number + 1} of {count}" if count > 1 else f"the {what}"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check(problem: Problem, run: Run, kept: Truths | None = None) -> Verdict:
    """Hold one provider against the truth in the task's pass."""
    rows = pieces(problem)
    if rows:  # eager code's results wait for the truth, which comes last and never as a whole
        by_eager, terms = eagers(problem)
    else:
        truths, yardstick = expected(problem, kept)
    leaves = own_leaves(problem, run, problem.task.pass_ != "fwd" and run.vjp is None)
    problem.begin_anew()
    found, odd = found_by(problem, run, leaves)
    given = own_leaves(problem, run, False)  # only now, so that they are not there beside what the call needs
    changed = any(not equal(leaf, x) for leaf, x in zip(leaves, given, strict=True))
    del leaves, given
    if rows:
        of_eager, *others = hold(problem, rows, by_eager, *([] if odd else [found]))
        yardstick = Yardstick(of_eager, terms)
    else:
        others = [] if odd else [errors(found, truths)]
    eager = yardstick.errors
    if odd:
        return Verdict(Errors(math.inf, math.inf), eager, odd)
    (measured,) = others
    reason = ""
    if measured.others > most_others(eager):
        reason = (
            f"{measured.others} of {measured.whole} integers are others than in float64, {eager.others} of eager's"
            + (f", which count as {LOOSEST} at most: {ANOTHER}" if eager.others > LOOSEST * eager.whole else "")
            + "; where values are equal, as in a sort, an index may name another of them"
        )
    elif not within(measured, yardstick, problem.dtype):
        reason = (
            f"error {measured.max:.3g} (rms {measured.rms:.3g}) is more than twice eager's {eager.max:.3g} "
            f"(rms {eager.rms:.3g}) plus the rounding band {band(problem.dtype, yardstick.terms):.3g}"
            + (f" of sums of {yardstick.terms} terms" if yardstick.terms > 1 else "")
            + (f", eager's counting as {LOOSEST} at most: {ANOTHER}" if max(eager.max, eager.rms) > LOOSEST else "")
            + (f"; {run.arithmetic}" if run.arithmetic else "")
        )
    elif absent := problem.left_out():
        reason = f"it leaves out the write to the {absent[0]}"
    elif changed and not (run.in_place or problem.overwrites):
        reason = "it overwrote its inputs and does not say so"
    return Verdict(measured, eager, reason)
