"""Shared helpers of the qk_norm_rope tests: implementations, test cases, and exact results with their error budget.

Exact means float64 on the rounded inputs: the norm by its formula, the rotation by the oracle of the RoPE tests, gradients by
autograd of the norm after the oracle's transposed rotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import fusewise
from fusewise.ops.qk_norm_rope._op import IMPLEMENTATIONS

from ..rope.oracle import Call, expected, from_bthd, to_bthd
from ..rope.support import INTERPRETER, Case, Place, assert_within_budget, make

TRANSPOSED = {"interleaved_to_half": "half_to_interleaved", "half_to_interleaved": "interleaved_to_half"}


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret as on a device of two SMs: a fourth of the programs, each with more rows and more than one tile."""
    if INTERPRETER:
        from fusewise.ops.qk_norm_rope import _triton

        monkeypatch.setattr(_triton, "_processors", lambda x: 2)


def places() -> list[Any]:
    """All implementations on all devices they support; Triton on a CPU is the interpreter."""
    found = []
    for impl in IMPLEMENTATIONS:
        for device in ("cuda",) if impl == "cuda" else ("cpu", "cuda"):
            interpreter = (impl, device) == ("triton", "cpu")
            marks = [pytest.mark.gpu] if device == "cuda" else [pytest.mark.interpreter] if interpreter else []
            place = Place(impl, device)
            found.append(pytest.param(place, marks=marks, id=str(place)))
    return found


@dataclass(frozen=True)
class NormCase:
    """A case of the RoPE tests plus the norm before it."""

    case: Case
    norm: str = "head"
    weight_offset: float = 0.0
    eps: float = 1e-6
    weight_dtype: torch.dtype | None = torch.float32  # None: no weights

    @property
    def name(self) -> str:
        return self.case.name


@dataclass(frozen=True)
class Made:
    """The tensors and keyword arguments of a call, and the incoming gradients."""

    xs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    rotation: dict[str, Any]
    norm: dict[str, Any]
    dys: tuple[Tensor, ...]

    @property
    def layout(self) -> str:
        return str(self.rotation.get("layout", "bshd"))

    def run(self, impl: str, **changes: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the outputs and the gradients of xs and weights."""
        leaves = [x.detach().requires_grad_() for x in (*self.xs, *self.weights)]
        count = len(self.xs)
        ys = self.call(tuple(leaves[:count]), tuple(leaves[count:]), impl=impl, **changes)
        return ys, torch.autograd.grad(ys, leaves, self.dys)

    def call(self, xs: tuple[Tensor, ...], weights: tuple[Tensor, ...], **changes: Any) -> tuple[Tensor, ...]:
        q, k = xs if len(xs) == 2 else (xs[0], None)
        q_weight, k_weight = weights if len(weights) == 2 else (weights[0] if weights else None, None)
        out = fusewise.qk_norm_rope(q, k, q_weight, k_weight, **self.rotation, **self.norm, **changes)
        return out if isinstance(out, tuple) else (out,)


def build(case: NormCase, device: str = "cpu") -> Made:
    call = make(case.case, device)
    norm = {"norm": case.norm, "weight_offset": case.weight_offset, "eps": case.eps}
    return finish(call, norm, case.weight_dtype)


def finish(call: Call, norm: dict[str, Any], weight_dtype: torch.dtype | None) -> Made:
    """Add weights and incoming gradients to a call of RoPE."""
    layout = call.kwargs.get("layout", "bshd")
    widths = [x.shape[-1] * (to_bthd(x, layout).shape[2] if norm["norm"] == "all" else 1) for x in call.xs]
    weights: tuple[Tensor, ...] = ()
    if weight_dtype is not None:
        weights = tuple((1 + torch.randn(width) / 4).to(weight_dtype).to(call.xs[0].device) for width in widths)
    dys = tuple(torch.randn(x.shape).to(x.dtype).to(x.device) for x in call.xs)
    return Made(call.xs, weights, call.kwargs, norm, dys)


def rows_of(x: Tensor, made: Made) -> Tensor:
    """Reshape x so that the last dimension is normalized: (B, T, H, D) or (B, T, H · D)."""
    x_BTHD = to_bthd(x, made.layout)
    return x_BTHD.flatten(-2) if made.norm["norm"] == "all" else x_BTHD


def from_rows(rows: Tensor, x: Tensor, made: Made) -> Tensor:
    return from_bthd(rows.reshape(to_bthd(x, made.layout).shape), made.layout)


def normalised(x: Tensor, weight: Tensor | None, made: Made) -> Tensor:
    """The normalized x, in the dtype of x."""
    rows = rows_of(x, made)
    rows = rows * (rows.square().mean(-1, keepdim=True) + made.norm["eps"]).rsqrt()
    if weight is not None:
        rows = rows * (weight.to(x.dtype) + made.norm["weight_offset"])
    return from_rows(rows, x, made)


def unit_of(dtype: torch.dtype) -> float:
    """Half an ulp, relative. Triton's interpreter truncates to bfloat16 where a GPU rounds."""
    eps = torch.finfo(dtype).eps
    return eps if INTERPRETER and dtype == torch.bfloat16 else eps / 2


def assert_near(name: str, actual: Tensor, exact: Tensor, size: Tensor, units: float) -> None:
    """Check NaN positions; elsewhere allow one rounding to the dtype after float32 (float64 for float64) arithmetic with an
    error of at most `units` half ulps of `size`."""
    assert actual.shape == exact.shape
    assert torch.equal(actual.isnan(), exact.isnan()), f"{name}: NaN in the wrong places"
    there = ~exact.isnan()
    info = torch.finfo(actual.dtype)
    arithmetic = torch.finfo(torch.float64 if actual.dtype == torch.float64 else torch.float32).eps / 2
    allowed = unit_of(actual.dtype) * exact.abs() + units * arithmetic * size + info.tiny * info.eps
    error, allowed = (actual.double() - exact).abs()[there], allowed[there]
    if error.numel():
        worst = int((error - allowed).argmax())
        message = f"{name}: got {actual[there][worst]}, exactly {exact[there][worst]}, allowed {allowed[worst]:.3e}"
        assert error[worst] <= allowed[worst], message


# Arithmetic error bounds in half ulps. A tree sum of W squares has an error of at most log2(W) + 1, W up to 2^14; half of
# that, 2 for the reciprocal root, 1 each for x r, w + offset and the product with w are 13; cos, sin and the rotation add 4.
# A gradient has dz (4), r and x̂ (10), g (2), the mean of g x̂ (15 plus those of its terms) and the last three operations.
FORWARD_UNITS = 17
BACKWARD_UNITS = 50


def check_outputs(made: Made, ys: tuple[Tensor, ...]) -> list[float]:
    """Compare outputs with float64 elementwise, and with eager code of the same dtype. Returns the error that computed angles
    allow for q and k, in half ulps."""
    weights = made.weights or (None,) * len(made.xs)
    zs = [normalised(x.detach().double(), w, made) for x, w in zip(made.xs, weights, strict=True)]
    wants = expected(Call(tuple(zs), made.rotation))
    # Eager code rounds the normalized tensor, cos and sin, and every operation of the rotation.
    eagers = expected(Call(tuple(z.to(x.dtype) for z, x in zip(zs, made.xs, strict=True)), made.rotation))
    of_angles = []
    for name, x, y, want, eager in zip("qk", made.xs, ys, wants, eagers, strict=False):
        assert (y.dtype, y.shape, y.device) == (x.dtype, x.shape, x.device)
        assert y.stride() == torch.empty_like(x).stride()
        angles = 2 * want.angle_error / torch.finfo(torch.float32).eps
        assert_near(name, y, want.exact, want.size.abs(), FORWARD_UNITS + angles)
        there = ~want.exact.isnan()
        assert_within_budget(y[there], want.exact[there], eager.eager[there], want.angle_error)
        of_angles.append(angles)
    return of_angles


def check(made: Made, impl: str) -> None:
    """Compare outputs and gradients with float64 elementwise, and outputs also with eager code of the same dtype."""
    ys, gradients = made.run(impl)
    pairing = made.rotation.get("pairing", "half")
    transposed = {**made.rotation, "inverse": True, "pairing": TRANSPOSED.get(pairing, pairing)}
    dzs = expected(Call(tuple(dy.double() for dy in made.dys), transposed))
    for i, (name, x, angles) in enumerate(zip("qk", made.xs, check_outputs(made, ys), strict=False)):
        assert gradients[i].dtype == x.dtype
        exact, sizes = _exact_gradients(made, i, dzs[i].exact, dzs[i].size.abs())
        assert_near(f"d{name}", gradients[i], exact[0], sizes[0], BACKWARD_UNITS + angles)
        if made.weights:
            of_weight = gradients[len(made.xs) + i]
            assert of_weight.dtype == made.weights[i].dtype
            rows = x.numel() // max(of_weight.numel(), 1)
            assert_near(f"d{name}_weight", of_weight, exact[1], sizes[1], BACKWARD_UNITS + angles + rows)


def _exact_gradients(made: Made, i: int, dz: Tensor, dz_size: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of x and its weight from that of z, and the magnitudes their errors are relative to: the same sums over
    absolute values."""
    x = made.xs[i].detach().double().requires_grad_()
    leaves, weight = [x], None
    if made.weights:
        weight = made.weights[i].double().requires_grad_()
        leaves.append(weight)
    exact = torch.autograd.grad(normalised(x, weight, made), leaves, dz)

    rows, dz_rows = rows_of(x.detach().abs(), made), rows_of(dz_size, made)
    r = (rows.square().mean(-1, keepdim=True) + made.norm["eps"]).rsqrt()
    x_hat = rows * r
    g = dz_rows if weight is None else dz_rows * (weight.detach().abs() + abs(made.norm["weight_offset"]))
    of_x = r * (g + x_hat * (g * x_hat).mean(-1, keepdim=True))
    return list(exact), [from_rows(of_x, x, made), (dz_rows * x_hat).flatten(0, -2).sum(0)]
