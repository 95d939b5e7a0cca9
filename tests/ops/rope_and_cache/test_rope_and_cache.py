"""Every implementation against the oracle: rotated tensors, cached rows and their slots, and no other writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusewise
from fusewise.ops.rope_and_cache._op import choice

from ..rope.support import DTYPES, Place, assert_bits
from .cases import CASES, PLACES, Made, check, make


def marks(place: Place) -> list[Any]:
    if place.device == "cuda":
        return [pytest.mark.gpu]
    return [pytest.mark.interpreter] if place.impl == "triton" else []


every_place = pytest.mark.parametrize("place", [pytest.param(p, marks=marks(p), id=str(p)) for p in PLACES])


def require(place: Place, dtype: torch.dtype) -> None:
    """Skip if the implementation is unavailable, as for float64 or a native kernel without a compiler."""
    reason = choice.unavailable(place.impl, place.device, dtype)
    if reason is not None:
        assert "cannot be imported" not in reason, reason
        pytest.skip(reason)


def run(name: str, place: Place) -> tuple[Made, Made, Any]:
    """The call before and after, and the storages of both."""
    case = CASES[name]
    require(place, DTYPES[case.dtype])
    before, old = make(case, place.device).copy()
    after, new = before.copy()
    assert fusewise.rope_and_cache_(after.q, after.k, after.v, **after.arguments(), impl=place.impl) is None
    return before, after, (old, new)


@pytest.fixture
def _one_processor(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The interpreter simulates a GPU with one SM, as for RoPE alone: few programs, with tiles of maximum size."""
    if request.node.get_closest_marker("interpreter"):
        from fusewise.ops.rope_and_cache import _triton

        monkeypatch.setattr(_triton, "processors_of", lambda device: 1)


# These cases target CUDA kernel paths. For Triton they are just "many tokens" and take 20 s each in the interpreter.
NOT_INTERPRETED = ("several heads a thread", "serving, many tokens")


@every_place
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("_one_processor")
def test_matches_the_oracle(name: str, place: Place) -> None:
    if name.startswith(NOT_INTERPRETED) and str(place) == "triton-interpreter":
        pytest.skip("a path of the CUDA kernels")
    before, after, storages = run(name, place)
    check(before, after, storages, CASES[name].options.get("write_k", True))


@pytest.mark.parametrize("name", CASES)
def test_a_repeated_call_is_like_the_first(name: str) -> None:
    made, _ = make(CASES[name]).copy()
    again, _ = made.copy()
    for one in (made, again):
        fusewise.rope_and_cache_(one.q, one.k, one.v, **one.arguments(), impl="reference")
    for x, y in zip(made.written(), again.written(), strict=True):
        assert_bits(x, y)


def test_a_key_that_is_only_read_may_share_its_heads() -> None:
    made = make(CASES["vllm"])
    k, expected = made.k[:, :1].expand(made.k.shape), made.key_cache.clone()
    for key, cache in ((k.contiguous(), expected), (k, made.key_cache)):
        fusewise.rope_and_cache_(made.q, key, made.v, **{**made.arguments(), "key_cache": cache}, write_k=False)
    assert_bits(made.key_cache, expected)


@every_place
@pytest.mark.parametrize("index", range(5), ids=["q", "k", "v", "key_cache", "value_cache"])
def test_one_of_the_tensors_may_have_odd_strides(index: int, place: Place) -> None:
    """The others are multiples of 16, and a kernel may read the strides of all in one unit."""
    require(place, torch.float32)
    made = make(CASES["vllm"], place.device)
    even, odd = (list(made.copy()[0].written()) for _ in range(2))
    x = odd[index]
    odd[index] = x.new_empty(*x.shape[:-1], x.shape[-1] + 1)[..., :-1].copy_(x)
    for tensors in (even, odd):
        one = Made(*tensors, made.kwargs)
        fusewise.rope_and_cache_(one.q, one.k, one.v, **one.arguments(), impl=place.impl)
    for x, other in zip(even, odd, strict=True):
        assert_bits(x, other)


@every_place
def test_one_of_the_tokens_of_a_slot_is_cached(place: Place) -> None:
    """If several tokens have the same slot, each element comes from one of them, and no other slot is written."""
    require(place, torch.float32)
    case = CASES["vllm"]
    made = make(case, place.device)
    made.kwargs["slot_mapping"].copy_(torch.tensor([6, 6, 1, 6, 6]))
    old = made.key_cache.clone(), made.value_cache.clone()
    fusewise.rope_and_cache_(made.q, made.k, made.v, **made.arguments(), impl=place.impl)
    for cache, before, x in ((made.key_cache, old[0], made.k), (made.value_cache, old[1], made.v)):
        assert (cache[1, 2] == x[[0, 1, 3, 4]]).any(0).all()
        assert_bits(cache[0, 1], x[2])
        cache[1, 2], cache[0, 1] = before[1, 2], before[0, 1]
        assert_bits(cache, before)
