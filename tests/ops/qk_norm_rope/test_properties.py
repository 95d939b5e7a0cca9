"""Property-based tests (hypothesis) on generated calls."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import fusewise

from ..rope.oracle import Call
from ..rope.test_properties import DTYPES, calls
from .support import check, finish
from .support import small_device as small_device

# Derandomized: the same examples every time, so failures are reproducible.
settings = hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)


@st.composite
def norm_calls(draw: Any) -> Any:
    call = draw(calls())
    kwargs = {name: value for name, value in call.kwargs.items() if name != "inverse"}
    norm = {
        "norm": draw(st.sampled_from(["head", "all"])),
        "weight_offset": draw(st.sampled_from([0.0, 1.0, -0.5])),
        "eps": draw(st.sampled_from([1e-6, 1e-2, 1.0])),
    }
    hypothesis.assume(all(x.shape[d] for x in call.xs for d in range(x.dim())))  # empty ones are in test_nothing_to_do
    torch.manual_seed(0)
    return finish(Call(call.xs, kwargs), norm, draw(st.none() | DTYPES))


@settings
@hypothesis.given(norm_calls())
def test_any_call_is_right(made: Any) -> None:
    check(made, "reference")


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.usefixtures("small_device")
@hypothesis.settings(settings, max_examples=15, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@hypothesis.given(norm_calls())
def test_any_call_is_right_in_triton(made: Any) -> None:
    check(made, "triton")


@settings
@hypothesis.given(norm_calls(), st.sampled_from([0.25, 8.0, 1024.0]))
def test_scale_is_removed(made: Any, factor: float) -> None:
    """The purpose of a norm: without eps the scale of x does not matter; for powers of two the result is bitwise equal."""
    made.norm["eps"] = 0.0
    xs = tuple(x.detach().float() for x in made.xs)
    one = made.call(xs, made.weights)
    other = made.call(tuple(factor * x for x in xs), made.weights)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@settings
@hypothesis.given(norm_calls())
def test_gradients_are_orthogonal_to_x(made: Any) -> None:
    """As scale does not matter, dx · x = 0 over the normalized features, without eps."""
    made.norm["eps"] = 0.0
    xs = tuple(x.detach().double().requires_grad_() for x in made.xs)
    rotation = {
        n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in made.rotation.items()
    }
    weights = [w.double() for w in made.weights] or [None, None]
    k = xs[1] if len(xs) == 2 else None
    out = fusewise.qk_norm_rope(xs[0], k, weights[0], weights[1] if k is not None else None, **rotation, **made.norm)
    ys = out if isinstance(out, tuple) else (out,)
    for x, dx in zip(
        xs, torch.autograd.grad([y.nan_to_num() for y in ys], xs, [torch.randn_like(y) for y in ys]), strict=True
    ):
        dims = (-1,)
        if made.norm["norm"] == "all":
            dims = (-1, 1 if made.layout in ("bhsd", "thd") else 2)
        product = (dx * x).sum(dims)
        size = (dx * x).abs().sum(dims)
        assert bool(((product.abs() <= 1e-12 * size + 1e-300) | product.isnan()).all())
