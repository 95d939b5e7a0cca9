"""RoPE as serving engines call it: flat q and k, (tokens, heads · head width), with each token's row looked up in a
cache.

The program follows vLLM's `forward_native`, whose compiled form is the usual alternative to a hand-written kernel: rows
of the [cos ‖ sin] cache by int64 position, rotation of a view by heads, flattened again. It returns new tensors, as
compiled functions do; serving kernels overwrite q and k, so the minimum bytes are those in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import fusewise

from ..problem import Program, Task
from .rope import RopeProblem


class ServingProblem(RopeProblem):
    """A case with `serving`: tensors are flat."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.tensors = tuple(x.flatten(1) for x in self.inputs.operands)
        self.upstream = tuple(g.flatten(1) for g in self.inputs.gradients)

    def heads(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(x.view(x.shape[0], -1, self.width(i)) for i, x in enumerate(xs))

    def width(self, i: int) -> int:
        """Head width of the i-th tensor."""
        return self.inputs.operands[i].shape[-1]

    def starts(self) -> tuple[int, ...]:
        return tuple(map(self.start, self.inputs.operands))

    def cache(self, dtype: torch.dtype) -> Tensor:
        """[cos ‖ sin], (R, 2P), rounded to `dtype`."""
        assert self.inputs.cache is not None
        return self.inputs.cache.to(dtype)

    def compact(self) -> ServingProblem:
        assert self.inputs.cache is not None
        positions = self.position_ids()
        cache, running = self.inputs.cache[positions], torch.arange(len(positions), device=self.device)
        cos, sin = cache.chunk(2, dim=-1)
        kwargs = {**self.inputs.kwargs, "cos_sin": cache, "positions": running}
        small = copy.copy(self)
        small.inputs = replace(self.inputs, cos=cos, sin=sin, cache=cache, positions=running, kwargs=kwargs)
        return small

    def truth(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k = self.heads(tensors)
        found = fusewise.rope(q, k, **self.inputs.kwargs, impl="reference")
        return tuple(y.flatten(1) for y in found)

    def program(self) -> Program:
        """As in vLLM, the cache has the tensors' dtype."""
        cache, positions = self.cache(self.dtype), self.position_ids()
        numbers = (self.width(0), self.width(1), *self.starts(), self.case.rotated)
        return Program(EAGER[self.case.pairing], lambda q, k: (q, k, positions, cache, *numbers))

    def jax(self) -> Callable[..., Any]:
        return jax_serving(self.case.pairing)


# TorchScript must accept these unchanged, hence the plain types and one function per pairing.


def half_heads(x: Tensor, cos: Tensor, sin: Tensor, head: int, start: int, width: int) -> Tensor:
    """x (tokens, heads · head) with the features [start, start + width) of each head rotated as (a ‖ b)."""
    heads = x.view(x.shape[0], -1, head)
    a, b = heads[..., start : start + width].chunk(2, dim=-1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((heads[..., :start], rotated, heads[..., start + width :]), dim=-1).view(x.shape)


def interleaved_heads(x: Tensor, cos: Tensor, sin: Tensor, head: int, start: int, width: int) -> Tensor:
    """The same on adjacent features."""
    heads = x.view(x.shape[0], -1, head)
    part = heads[..., start : start + width]
    a, b = part[..., ::2], part[..., 1::2]
    rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((heads[..., :start], rotated, heads[..., start + width :]), dim=-1).view(x.shape)


def sorted_heads(x: Tensor, cos: Tensor, sin: Tensor, head: int, start: int, width: int) -> Tensor:
    """Adjacent features in, halves out."""
    heads = x.view(x.shape[0], -1, head)
    part = heads[..., start : start + width]
    a, b = part[..., ::2], part[..., 1::2]
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((heads[..., :start], rotated, heads[..., start + width :]), dim=-1).view(x.shape)


def served(rotate: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`rotate` of q and k with the rows of the cache at their positions."""

    def rope(
        q: Tensor, k: Tensor, positions: Tensor, cache: Tensor, q_head: int, k_head: int, q_start: int, k_start: int,
        width: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        cos, sin = cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return rotate(q, cos, sin, q_head, q_start, width), rotate(k, cos, sin, k_head, k_start, width)

    return rope


EAGER = {
    "half": served(half_heads),
    "interleaved": served(interleaved_heads),
    "interleaved_to_half": served(sorted_heads),
}


def jax_serving(pairing: str) -> Callable[..., Any]:
    """The same in jax.numpy; only called in a process that has JAX."""
    import jax.numpy as jnp

    def rotate(x: Any, cos: Any, sin: Any, head: int, start: int, width: int) -> Any:
        heads = x.reshape(x.shape[0], -1, head)
        part = heads[..., start : start + width]
        middle = width // 2
        a, b = (part[..., :middle], part[..., middle:]) if pairing == "half" else (part[..., ::2], part[..., 1::2])
        turned = (a * cos - b * sin, b * cos + a * sin)
        if pairing == "interleaved":
            rotated = jnp.stack(turned, axis=-1).reshape(part.shape)
        else:
            rotated = jnp.concatenate(turned, axis=-1)
        return jnp.concatenate((heads[..., :start], rotated, heads[..., start + width :]), axis=-1).reshape(x.shape)

    def rope(
        q: Any, k: Any, positions: Any, cache: Any, q_head: int, k_head: int, q_start: int, k_start: int, width: int
    ) -> Any:
        cos, sin = jnp.split(cache[positions][:, None], 2, axis=-1)
        return rotate(q, cos, sin, q_head, q_start, width), rotate(k, cos, sin, k_head, k_start, width)

    return rope
