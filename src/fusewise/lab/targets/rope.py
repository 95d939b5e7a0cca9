"""The RoPE target: turns a named case into a problem, with the views of it that providers need.

Shape legend: B batch, T tokens of a sequence, H heads, D head width, P rotated pairs, R table rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import fusewise
from fusewise.ops.rope.cases import PRESETS, RopeCase, RopeInputs, case

from ..problem import Problem, Program, Task, as_tuple
from . import Case, CaseProblem, Target


class Rope(Target):
    """Rotary embedding of q, or q and k."""

    name = "rope"
    default_preset = "rope-quick"
    hurried: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "rope-quick": {"time_limit": 60.0, "max_rounds": 10},
        "rope-models": {"time_limit": 400.0},
        "rope-serving": {"time_limit": 400.0},
        "rope-serving-quick": {"time_limit": 60.0, "max_rounds": 10},
    }
    profiled: ClassVar[Mapping[str, Sequence[str]]] = {
        "rope-seqlen": ("seqlen-512",),
        "rope-serving": ("llama-3-8b-serve-decode-b64", "llama-3-8b-serve-prefill-8192"),
        "rope-serving-quick": ("llama-3-8b-serve-decode-b64",),
    }

    def presets(self) -> Mapping[str, Sequence[Case]]:
        return PRESETS

    def problem(self, task: Task) -> Problem:
        if case(task.case).serving:
            from .rope_serving import ServingProblem

            return ServingProblem(task)
        return RopeProblem(task)


class RopeProblem(CaseProblem[RopeCase]):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.case = case(task.case)
        self.inputs = self.case.make_inputs(self.device, task.dtype, task.seed)
        self.tensors = self.inputs.operands
        self.upstream = self.inputs.gradients

    def heads(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors like the problem's in the form of `fusewise.rope`: by heads, without a copy."""
        return tuple(xs)

    def untouched(self) -> tuple[int, int]:
        """The features that pass through."""
        passing = sum(passing_bytes(x, self.case.rotated) for x in self.inputs.operands)
        return passing, passing

    def truth(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k = (*tensors, None)[:2]
        assert q is not None
        result = fusewise.rope(q, k, **self.inputs.kwargs, impl="reference")
        return (result,) if isinstance(result, Tensor) else tuple(result)

    def program(self) -> Program:
        """As in transformers, the table is gathered, duplicated and rounded to the tensors' dtype once per forward pass
        of the whole model, outside the timed region."""
        cos, sin = self.duplicated(self.dtype)
        numbers = (*(self.start(x) for x in self.tensors), self.case.rotated)
        wrap = one if len(self.tensors) == 1 else two
        return Program(
            wrap(EAGER[self.case.pairing]),
            lambda *xs: (*(self.to_bshd(x) for x in xs), cos, sin, *numbers),
            lambda ys: tuple(self.from_bshd(y) for y in as_tuple(ys)),
        )

    def jax(self) -> Callable[..., Any]:
        return jax_rope(self.case.pairing, len(self.tensors))

    def start(self, x: Tensor) -> int:
        """First rotated feature of `x`, counted from the front."""
        start = self.case.rotary_start
        return start if start >= 0 else x.shape[-1] + start

    def to_bshd(self, x: Tensor) -> Tensor:
        """`x` viewed as (B, T, H, D)."""
        return x.permute([self.case.layout.index(letter) for letter in "bshd"])

    def from_bshd(self, x: Tensor) -> Tensor:
        """(B, T, H, D) viewed in the case's own layout."""
        return x.permute(["bshd".index(letter) for letter in self.case.layout])

    def position_ids(self) -> Tensor:
        """int64 (B, T), generated if the case has none."""
        return position_ids(self.inputs, self.case)

    def rows(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of every token, (B | 1, T, P), rounded to `dtype`."""
        return rows(self.inputs, self.case, dtype)

    def duplicated(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of every token with each angle twice, (B | 1, T, 1, 2P), in the order of the pairing's output."""
        return repeated(self.inputs, self.case, dtype)


def passing_bytes(x: Tensor, rotated: int) -> int:
    """Bytes of the features of `x` that do not rotate."""
    return x.numel() * x.element_size() // x.shape[-1] * (x.shape[-1] - rotated)


def position_ids(inputs: RopeInputs, case: RopeCase) -> Tensor:
    """int64 (B, T), generated if the case has none."""
    if inputs.positions is not None:
        return inputs.positions
    running = torch.arange(case.offset, case.offset + case.seqlen, device=inputs.cos.device)
    return running.expand(case.batch, -1).contiguous()


def rows(inputs: RopeInputs, case: RopeCase, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every token, (B | 1, T, P), rounded to `dtype`."""
    if inputs.positions is None:
        window = slice(case.offset, case.offset + case.seqlen)
        return inputs.cos[window][None].to(dtype), inputs.sin[window][None].to(dtype)
    return inputs.cos[inputs.positions].to(dtype), inputs.sin[inputs.positions].to(dtype)


def repeated(inputs: RopeInputs, case: RopeCase, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same with each angle twice, (B | 1, T, 1, 2P), in the order of the pairing's output."""

    def twice(x: Tensor) -> Tensor:
        if case.pairing == "interleaved":
            return x.repeat_interleave(2, dim=-1)[:, :, None]
        return torch.cat((x, x), dim=-1)[:, :, None]

    cos, sin = rows(inputs, case, dtype)
    return twice(cos), twice(sin)


# The eager forms, for one tensor (B, T, H, D), rotating the features [start, start + width). TorchScript must accept
# them unchanged, hence the plain types and no higher-order helpers.


def rotate_half(x: Tensor) -> Tensor:
    """(−b, a) for x = (a ‖ b)."""
    middle = x.shape[-1] // 2
    return torch.cat((-x[..., middle:], x[..., :middle]), dim=-1)


def rotate_every_two(x: Tensor) -> Tensor:
    """(−x₁, x₀, −x₃, x₂, …)."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def half(x: Tensor, cos: Tensor, sin: Tensor, start: int, width: int) -> Tensor:
    """x · cos + rotate_half(x) · sin, as in transformers' Llama."""
    part = x[..., start : start + width]
    rotated = part * cos + rotate_half(part) * sin
    if width == x.shape[-1]:
        return rotated
    return torch.cat((x[..., :start], rotated, x[..., start + width :]), dim=-1)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor, start: int, width: int) -> Tensor:
    """The same on adjacent features, as in GPT-J and GLM."""
    part = x[..., start : start + width]
    rotated = part * cos + rotate_every_two(part) * sin
    if width == x.shape[-1]:
        return rotated
    return torch.cat((x[..., :start], rotated, x[..., start + width :]), dim=-1)


def interleaved_to_half(x: Tensor, cos: Tensor, sin: Tensor, start: int, width: int) -> Tensor:
    """Adjacent features sorted into halves first, then `half`, as in DeepSeek-V3."""
    part = x[..., start : start + width]
    part = torch.cat((part[..., ::2], part[..., 1::2]), dim=-1)
    rotated = part * cos + rotate_half(part) * sin
    if width == x.shape[-1]:
        return rotated
    return torch.cat((x[..., :start], rotated, x[..., start + width :]), dim=-1)


def one(rotate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`rotate` of q alone."""

    def rope(q: Tensor, cos: Tensor, sin: Tensor, start: int, width: int) -> Tensor:
        return rotate(q, cos, sin, start, width)

    return rope


def two(rotate: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`rotate` of q and k in one function."""

    def rope(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_start: int, k_start: int, width: int
    ) -> tuple[Tensor, Tensor]:
        return rotate(q, cos, sin, q_start, width), rotate(k, cos, sin, k_start, width)

    return rope


EAGER = {"half": half, "interleaved": interleaved, "interleaved_to_half": interleaved_to_half}


def jax_rope(pairing: str, count: int) -> Callable[..., Any]:
    """The same in jax.numpy, for q or q and k; only called in a process that has JAX."""
    import jax.numpy as jnp

    def turned(x: Any) -> Any:
        if pairing == "interleaved":
            return jnp.stack((-x[..., 1::2], x[..., ::2]), axis=-1).reshape(x.shape)
        middle = x.shape[-1] // 2
        return jnp.concatenate((-x[..., middle:], x[..., :middle]), axis=-1)

    def rotate(x: Any, cos: Any, sin: Any, start: int, width: int) -> Any:
        part = x[..., start : start + width]
        if pairing == "interleaved_to_half":
            part = jnp.concatenate((part[..., ::2], part[..., 1::2]), axis=-1)
        rotated = part * cos + turned(part) * sin
        if width == x.shape[-1]:
            return rotated
        return jnp.concatenate((x[..., :start], rotated, x[..., start + width :]), axis=-1)

    def rope(*arguments: Any) -> Any:
        xs, (cos, sin), starts, width = (
            arguments[:count],
            arguments[count : count + 2],
            arguments[count + 2 : -1],
            arguments[-1],
        )
        return tuple(rotate(x, cos, sin, start, width) for x, start in zip(xs, starts, strict=True))

    return rope
