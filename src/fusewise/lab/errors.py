"""Errors of results against the truth, in the max and the RMS norm; of integers and bools, how many differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .problem import differentiable

#: Elements compared per chunk. On a CPU few enough that the float64 copy stays in cache and torch starts no threads,
#: which would wait for each other beside other processes; on a GPU enough to fill it.
CHUNK = {"cpu": 2**15, "cuda": 2**26}
#: A tensor whose largest value is below this share of the largest over all tensors is zero up to float64 rounding.
NOTHING = 2**-40


@dataclass(frozen=True)
class Errors:
    """Max and RMS error, each relative to the same norm of the truth; inf where finiteness differs from the truth's or
    non-finite values differ, and `unlike` says how. For integers and bools, how many differ (`others`) out of how many
    (`whole`)."""

    max: float
    rms: float
    others: int = 0
    whole: int = 0
    unlike: str = field(default="", compare=False)

    @property
    def worst(self) -> float:
        """The largest error, or the share of differing integers if that is larger."""
        return max(self.max, self.others / self.whole if self.whole else 0.0)


class Deviation:
    """Accumulates the error of tensors against the truth, which may arrive whole or some rows at a time."""

    def __init__(self) -> None:
        # per tensor: max |error|, max |truth|, sum of squared errors, sum of squared truths, element count
        self.norms: dict[int, list[float]] = {}
        self.others = self.whole = 0  # integers and bools
        self.unlike = ""  # how finiteness, or a non-finite value, differs from the truth's

    def add(self, number: int, result: Tensor, truth: Tensor) -> None:
        """Compare a tensor, or some of its rows, with the truth."""
        if truth.numel() == 0 or self.unlike:
            return
        if result.is_complex() != truth.is_complex():
            self.unlike = f"a result is {'real' if truth.is_complex() else 'complex'}"
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
            if not all(map(math.isfinite, peaks)):  # NaN and infinity propagate through all four
                finite = true.isfinite()
                alike = equal(found.where(~finite, 0.0), true.where(~finite, 0.0))
                peaks = _peaks((found - true).where(finite, 0.0), true.where(finite, 0.0))
                if not alike or not all(map(math.isfinite, peaks)):
                    self.unlike = _unlike(found, true)
                    return
            norms[:2] = max(norms[0], peaks[0]), max(norms[1], peaks[1])
            norms[2:4] = norms[2] + peaks[2] ** 2, norms[3] + peaks[3] ** 2
        norms[4] += truth.numel()

    def errors(self) -> Errors:
        """The worst over all tensors. A tensor that is zero up to float64 rounding, such as the gradient of a bias
        before a normalization, is scaled by the largest value over all tensors instead of its own."""
        if self.unlike:
            return Errors(math.inf, math.inf, unlike=self.unlike)
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


def _unlike(found: Tensor, true: Tensor) -> str:
    """Why the error of the elements looked at is not finite."""
    kinds = (("NaN", Tensor.isnan), ("infinite", Tensor.isinf), ("finite", Tensor.isfinite))
    for name, has in kinds:
        if more := int((has(found) & ~has(true)).sum()):
            return f"{name} where float64's result is not, in {more} of {found.numel()} elements looked at"
    if bool((found.isinf() & (found != true)).any()):
        return "infinities have another sign than in float64"
    return "the error overflows float64"


def _peaks(difference: Tensor, true: Tensor) -> list[float]:
    """Max |difference|, max |true|, and the 2-norm of each."""
    ends = (*difference.aminmax(), *true.aminmax())  # one pass each, without a copy of absolute values
    low, high, low_true, high_true, *norms = torch.stack((*ends, difference.norm(), true.norm())).tolist()
    return [max(-low, high), max(-low_true, high_true), *norms]


def parts(x: Tensor) -> Tensor:
    """Complex tensors as real ones with a trailing dimension of two; others unchanged."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether shapes and elements are equal, with NaN equal to NaN."""
    if torch.equal(a, b):
        return True
    if a.shape != b.shape:
        return False
    a, b = torch.atleast_1d(a), torch.atleast_1d(b)
    rows = max(1, CHUNK[a.device.type] // max(1, a[0].numel()))  # mostly the first few differ
    return all(
        bool(((x == y) | ((x != x) & (y != y))).all()) for x, y in zip(a.split(rows), b.split(rows), strict=True)
    )
