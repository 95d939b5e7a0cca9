"""RoPE's backward rotates an incoming gradient in place if nothing else references it; otherwise it must not write to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fusewise

from .host_calls import TABLE, by_python, empty_cache, qk  # noqa: F401 (a fixture)
from .support import assert_bits

Pair = tuple[Any, Any]


class Giver(torch.autograd.Function):
    """Its backward returns `give(q, k)`, like the backward of attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, give: Callable[[Tensor, Tensor], Pair]) -> Tensor:
        ctx.save_for_backward(q, k)
        ctx.give = give
        return q.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return *ctx.give(*ctx.saved_tensors), None


def fresh(q: Tensor, k: Tensor) -> Pair:
    return torch.sin(q), torch.sin(k)


def rotated(give: Callable[[Tensor, Tensor], Pair] = fresh, **options: Any) -> tuple[Pair, list[int]]:
    """The gradients of q and k, and the addresses of the incoming gradients."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 4, n, 16, generator=generator, requires_grad=True) for n in (3, 1))
    ys = fusewise.rope(q, k, **(TABLE | options))
    places: list[int] = []
    for y in ys:
        y.register_hook(lambda dy: places.append(dy.data_ptr()))
    return torch.autograd.grad(Giver.apply(*ys, give), (q, k)), places


PART = {name: x[:, :4] for name, x in TABLE.items()}
OPTIONS: dict[str, dict[str, Any]] = {
    "halves": {},
    "neighbours": {"pairing": "interleaved"},
    "neighbours to halves": {"pairing": "interleaved_to_half"},
    "halves to neighbours": {"pairing": "half_to_interleaved"},
    "a part": {**PART, "rotary_dim": 8},
    "the last part": {**PART, "rotary_dim": 8, "rotary_start": 8, "pairing": "interleaved_to_half"},
    "inverse": {"inverse": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_ends_there_is_rotated_where_it_lies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = by_python(monkeypatch, lambda: rotated(**OPTIONS[name]))
    rotated(**OPTIONS[name])
    grads, places = rotated(**OPTIONS[name])
    assert [dx.data_ptr() for dx in grads] == places
    for dx, want in zip(grads, expected, strict=True):
        assert_bits(dx, want)
        assert dx.stride() == want.stride()


def test_one_tensor_and_a_view_of_what_nobody_has() -> None:
    """A transposed gradient from C++ autograd functions."""
    for _ in range(2):
        x, w, places = torch.randn(2, 4, 3, 16, requires_grad=True), torch.randn(2, 4, 3, 16).transpose(1, 2), []
        y = fusewise.rope(x, **TABLE)
        y.register_hook(lambda dy, places=places: places.append(dy.data_ptr()))
        (dx,) = torch.autograd.grad((y.transpose(1, 2) * w).sum(), x)
    assert [dx.data_ptr()] == places
    assert_bits(dx, fusewise.rope(w.transpose(1, 2), **TABLE, inverse=True))


# From fresh gradients to (the returned gradients, other references that are read afterwards).
HELD: dict[str, Callable[[Tensor, Tensor], tuple[Pair, tuple[Any, ...]]]] = {
    "they": lambda dq, dk: ((dq, dk), (dq, dk)),
    "one of them": lambda dq, dk: ((dq, dk), (dk,)),
    "views": lambda dq, dk: ((dq, dk), (dq[:], dk[:])),
    "detached": lambda dq, dk: ((dq, dk), (dq.detach(), dk.detach())),
    "what they are views of": lambda dq, dk: ((dq[:], dk[:]), (dq, dk)),
    "memory": lambda dq, dk: ((dq, dk), (dq.untyped_storage(), dk.untyped_storage())),
    "arrays": lambda dq, dk: ((torch.from_numpy(dq), torch.from_numpy(dk)), (dq, dk)),
}


def values(held: Any) -> Tensor:
    """A copy of the current values."""
    if isinstance(held, np.ndarray):
        return torch.from_numpy(held.copy())
    return torch.empty(0).set_(held).clone() if isinstance(held, torch.UntypedStorage) else held.clone()


@pytest.mark.parametrize("name", HELD)
def test_what_somebody_has_is_not_written_to(name: str) -> None:
    expected, _ = rotated()
    kept: list[tuple[Any, Tensor]] = []

    def give(q: Tensor, k: Tensor) -> Pair:
        grads, held = HELD[name](*(x.numpy() if name == "arrays" else x for x in fresh(q, k)))
        kept.extend((x, values(x)) for x in held)
        return grads

    for _ in range(2):
        grads, _ = rotated(give)
        for dx, want in zip(grads, expected, strict=True):
            assert_bits(dx, want)
    assert len(kept) == (2 if name == "one of them" else 4)
    for held, before in kept:
        assert_bits(values(held), before)


def test_what_is_saved_or_given_twice_is_not_written_to() -> None:
    def saved(q: Tensor, k: Tensor) -> Pair:
        return q, k

    expected, _ = rotated(saved)
    for dx, want in zip(rotated(saved)[0], expected, strict=True):
        assert_bits(dx, want)
    q, k = (torch.randn(2, 4, 2, 16, requires_grad=True) for _ in range(2))
    for _ in range(2):
        ys = fusewise.rope(q, k, **TABLE)
        first, second = torch.autograd.grad(Giver.apply(*ys, lambda q, _: (torch.sin(q),) * 2), (q, k))
        assert_bits(first, second)
        assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_gradient_with_a_graph_or_of_inference_mode_does_not_go_on(mode: Any) -> None:
    def given(q: Tensor, k: Tensor) -> Pair:
        with mode():
            return q * 2, k * 2

    for _ in range(2):
        for dx in rotated(given)[0]:
            assert not dx.requires_grad
            assert not dx.is_inference()


def some(xs: Any) -> list[Tensor]:
    return [x for x in xs if x is not None]


# Ways to observe the incoming gradients of `ys` and append them to a list.
WATCHED: dict[str, Callable[[Pair, list[Tensor]], Any]] = {
    "hooks": lambda ys, seen: [y.register_hook(seen.append) for y in ys],
    "hook before": lambda ys, seen: ys[0].grad_fn.register_prehook(lambda grads: seen.extend(some(grads))),
    "hook after": lambda ys, seen: ys[0].grad_fn.register_hook(lambda _, grads: seen.extend(some(grads))),
}


@pytest.mark.parametrize("name", WATCHED)
def test_what_is_watched_is_not_written_to(name: str) -> None:
    for _ in range(2):
        wanted: list[Tensor] = []
        seen: list[Tensor] = []

        def give(q: Tensor, k: Tensor, wanted: list[Tensor] = wanted) -> Pair:
            wanted.extend(fresh(q, k))
            return fresh(q, k)

        xs = qk(requires_grad=True)
        ys = fusewise.rope(*xs, **TABLE)
        WATCHED[name](ys, seen)
        Giver.apply(*ys, give).backward()
        for got, want in zip(seen, wanted, strict=True):
            assert_bits(got, want)


def test_what_the_caller_gives_is_not_written_to() -> None:
    dys = qk()
    before = [dy.clone() for dy in dys]
    found = []
    for _ in range(3):
        xs = qk(requires_grad=True)
        ys = fusewise.rope(*xs, **TABLE)
        found += [torch.autograd.grad(ys, xs, dys, retain_graph=True) for _ in range(2)]
    for dxs in found:
        for dx, dy, was, want in zip(dxs, dys, before, found[0], strict=True):
            assert_bits(dy, was)
            assert_bits(dx, want)


def test_a_part_of_larger_memory_does_not_keep_all_of_it() -> None:
    for _ in range(2):
        grads, _ = rotated(lambda q, k: (torch.cat([q, q])[:2], torch.cat([k, k])[:2]))
        assert [dx.untyped_storage().nbytes() for dx in grads] == [dx.nbytes for dx in grads]
