"""Truth before time: errors against float64, and the rule that decides.

The reference is computed in float64 from the same rounded inputs. A provider may be at most twice as far from it as
eager code of the same dtype, plus what one rounding to that dtype costs:

    error ≤ 2 · error(eager) + eps(dtype) / 2        in the max norm and in the root mean square

where eager's error counts as LOOSEST at most: eager code that is far off is no yardstick, and is wrong itself.
(Flash-attention's tests use the factor 2; the band lets an exactly rounded result pass where eager is exact by luck.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .plugin import Run
from .problem import Problem
from .truths import Truths

#: Elements compared at a time: on a CPU so few that a float64 copy stays in the cache and torch starts no threads for them,
#: which wait for each other where other processes work, too; on a GPU enough of them.
CHUNK = {"cpu": 2**15, "cuda": 2**26}
#: Below this share of the largest true value of all tensors a tensor's own are what float64 leaves of zero.
NOTHING = 2**-40
#: The largest error of eager code that others may be judged by.
LOOSEST = 0.1


@dataclass(frozen=True)
class Errors:
    """Largest and root-mean-square error, each relative to the same norm of the truth. inf: not finite where the truth is,
    or otherwise than the truth where that is not."""

    max: float
    rms: float


@dataclass(frozen=True)
class Verdict:
    """What the check found. `reason` is empty when the provider is right."""

    errors: Errors
    eager: Errors
    reason: str


def errors(results: Sequence[Tensor], truths: Sequence[Tensor]) -> Errors:
    """The worst error over pairs of tensors. One that is zero but for float64's own rounding, such as the gradient of a bias
    before a normalization, is held against the largest value of all."""
    # of error and truth the largest and the root of the squares; the root of their number, 0 for integers
    norms: list[tuple[float, float, float, float, float]] = []
    for result, truth in zip(results, truths, strict=True):
        if truth.numel() == 0:
            continue
        if result.is_complex() != truth.is_complex():
            return Errors(math.inf, math.inf)
        result, truth = parts(result), parts(truth)
        chunk = CHUNK[truth.device.type]
        largest = largest_true = squares = squares_true = 0.0
        for found, true in zip(result.flatten().split(chunk), truth.flatten().split(chunk), strict=True):
            found, true = found.double(), true.double()
            peaks = _peaks(found - true, true)
            if not all(map(math.isfinite, peaks)):  # NaN and infinity pass through every one of them
                finite = true.isfinite()
                if not equal(found.where(~finite, 0.0), true.where(~finite, 0.0)):
                    return Errors(math.inf, math.inf)
                peaks = _peaks((found - true).where(finite, 0.0), true.where(finite, 0.0))
                if not all(map(math.isfinite, peaks)):
                    return Errors(math.inf, math.inf)
            largest, largest_true = max(largest, peaks[0]), max(largest_true, peaks[1])
            squares, squares_true = squares + peaks[2] ** 2, squares_true + peaks[3] ** 2
        count = math.sqrt(truth.numel()) if truth.is_floating_point() else 0.0
        norms.append((largest, largest_true, math.sqrt(squares), math.sqrt(squares_true), count))
    worst_max = worst_rms = 0.0
    scale = max((true for _, true, *_ in norms), default=0.0)
    for largest, largest_true, root, root_true, count in norms:
        if count and 0.0 < largest_true < NOTHING * scale:
            largest_true, root_true = scale, scale * count
        worst_max = max(worst_max, largest / (largest_true or 1.0))
        worst_rms = max(worst_rms, root / (root_true or 1.0))
    return Errors(worst_max, worst_rms)


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


def band(dtype: torch.dtype) -> float:
    """The relative error of one rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2


def within(found: Errors, eager: Errors, dtype: torch.dtype) -> bool:
    largest, rms = min(eager.max, LOOSEST), min(eager.rms, LOOSEST)
    return found.max <= 2 * largest + band(dtype) and found.rms <= 2 * rms + band(dtype)


def expected(problem: Problem, kept: Truths | None = None) -> tuple[list[Tensor], Errors]:
    """The float64 results of the task's pass, and eager's errors against them; those that are kept, if there are."""
    if kept is not None and (known := kept.found(problem.task)) is not None:
        return known[0], Errors(*known[1])
    backward = problem.task.pass_ != "fwd"
    forward = problem.task.pass_ != "bwd"

    def results(of: str) -> list[Tensor]:
        wide = of == "truth"
        leaves = problem.leaves(backward, wide)
        outputs = problem.truth(leaves) if wide else problem.eager(leaves)
        found = [y.detach() for y in outputs] if forward else []
        if backward:
            found += problem.gradients(outputs, leaves, problem.upstream, wide)
        return found

    truths = results("truth")
    found = errors(results("eager"), truths)
    if kept is not None:
        kept.keep(problem.task, truths, (found.max, found.rms))
    return truths, found


def poison(problem: Problem) -> None:
    """Leave NaN in memory that an output is likely to be given, so that an element left unwritten shows."""
    for shape in problem.output_shapes():
        torch.full(shape, math.nan, device=problem.device, dtype=problem.dtype)


def own_leaves(problem: Problem, run: Run, gradient: bool) -> tuple[Tensor, ...]:
    """Copies of the problem's tensors as the provider keeps them; the floating ones want a gradient if so said."""
    return problem.wanting(run.own(*problem.leaves(False)), gradient)


def check(problem: Problem, run: Run, kept: Truths | None = None) -> Verdict:
    """Hold one provider against the truth in the task's pass."""
    truths, eager = expected(problem, kept)
    backward = problem.task.pass_ != "fwd"
    forward = problem.task.pass_ != "bwd"
    given = own_leaves(problem, run, False)
    leaves = own_leaves(problem, run, backward and run.vjp is None)
    arguments = run.enter(*leaves)
    poison(problem)
    gradients: tuple[Tensor, ...] = ()
    # A provider may overwrite the gradients it is given.
    upstream = tuple(None if g is None else g.clone() for g in problem.upstream)
    if backward and run.vjp is not None:
        result, kept = run.vjp.forward(arguments)
        outputs = run.leave(result)
        gradients = run.vjp.leave(run.vjp.backward(kept, run.vjp.enter(tuple(g for g in upstream if g is not None))))
    else:
        outputs = run.leave(run.call(*arguments))
    shapes = tuple(tuple(y.shape) for y in outputs)
    if shapes != problem.output_shapes():
        return Verdict(
            Errors(math.inf, math.inf), eager, f"outputs have shapes {shapes}, {problem.output_shapes()} is right"
        )
    found = [y.detach().clone() for y in outputs] if forward else []
    if backward:
        if run.vjp is None:
            held = len(problem.parameters)
            gradients = problem.gradients(outputs, leaves, upstream)
            gradients = (*run.restore(*gradients[: len(gradients) - held]), *gradients[len(gradients) - held :])
        found += gradients
    measured = errors(found, truths)
    changed = any(not equal(leaf, x) for leaf, x in zip(leaves, given, strict=True))
    reason = ""
    if not within(measured, eager, problem.dtype):
        reason = (
            f"error {measured.max:.3g} (rms {measured.rms:.3g}) is more than twice eager's {eager.max:.3g} "
            f"(rms {eager.rms:.3g}) plus the rounding band {band(problem.dtype):.3g}"
            + (f", eager's counting as {LOOSEST} at most" if max(eager.max, eager.rms) > LOOSEST else "")
            + (f"; {run.arithmetic}" if run.arithmetic else "")
        )
    elif changed and not (run.in_place or problem.overwrites):
        reason = "it overwrote its inputs and does not say so"
    return Verdict(measured, eager, reason)
