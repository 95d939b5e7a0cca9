"""An independent RoPE implementation that shares no code with the package: positions by loops over Python integers, angles as
fractions reduced with sixty digits of π, rotation by complex multiplication. Shape legend: B batch, T tokens, H heads, D
head_dim, P rotated pairs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # the elements (a, b) of all pairs to the rotated ones
TWO_PI = 2 * Fraction("3.14159265358979323846264338327950288419716939937510582097494459")


@dataclass(frozen=True)
class Call:
    """The tensors to rotate and the keyword arguments of a call."""

    xs: tuple[Tensor, ...]
    kwargs: dict[str, Any]

    def double(self) -> Call:
        """The call in float64, with the values of the rounded inputs."""
        kwargs = {
            name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in self.kwargs.items()
        }
        return Call(tuple(x.detach().double() for x in self.xs), kwargs)


@dataclass(frozen=True)
class Expected:
    """The expected result for one tensor, in its shape."""

    exact: Tensor  # float64; NaN for positions outside the table
    eager: Tensor  # eager torch code in the same dtype, as a user would write it
    size: Tensor  # float64: the modulus of the feature's pair; float32 errors are relative to it
    rotated: Tensor  # bool
    passed: Tensor  # elsewhere: the bits of x; for padding tokens reordered if the output pairing differs
    angle_error: float  # error of the largest angle in float64 arithmetic, in radians


def expected(call: Call) -> tuple[Expected, ...]:
    """The expected result for each tensor of a call."""
    pairs = (call.kwargs.get("rotary_dim") or call.xs[0].shape[-1]) // 2
    return tuple(_expected(x.detach(), call.kwargs, pairs) for x in call.xs)


def _expected(x: Tensor, kwargs: dict[str, Any], pairs: int) -> Expected:
    layout = kwargs.get("layout", "bshd")
    x_BTHD = to_bthd(x.cpu(), layout)
    turn_BTP, padding_T, largest = _turns(kwargs, x_BTHD.shape[0], x_BTHD.shape[1], pairs)
    turn = turn_BTP[:, :, None]
    cos, sin = turn.real.to(x.dtype), turn.imag.to(x.dtype)

    def product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.complex(a.double(), b.double()) * turn
        return z.real, z.imag

    def eager(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * cos - b * sin, b * cos + a * sin

    def modulus(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.complex(a.double(), b.double()).abs() * turn.abs().nan_to_num(1.0)
        return z, z

    def identity(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a, b

    rotated = torch.zeros(x_BTHD.shape, dtype=torch.bool)
    first = kwargs.get("rotary_start", 0) % x.shape[-1]
    rotated[:, [not padding for padding in padding_T], :, first : first + 2 * pairs] = True

    def apply(rotate: Rotate, otherwise: Tensor) -> Tensor:
        return from_bthd(_apply(x_BTHD, otherwise, rotate, kwargs, pairs, padding_T), layout).to(x.device)

    return Expected(
        exact=apply(product, x_BTHD.double()),
        eager=apply(eager, x_BTHD),
        size=apply(modulus, x_BTHD.double().abs()),
        rotated=from_bthd(rotated, layout).to(x.device),
        passed=apply(identity, x_BTHD),
        angle_error=largest * 2.0**-52,
    )


def _apply(
    x: Tensor,
    otherwise: Tensor,
    rotate: Rotate,
    kwargs: dict[str, Any],
    pairs: int,
    padding: list[bool],
) -> Tensor:
    """`otherwise` with the rotated features of x replaced by `rotate` of their pairs."""
    first = kwargs.get("rotary_start", 0) % x.shape[-1]
    pairing = kwargs.get("pairing", "half")
    part = x[..., first : first + 2 * pairs]
    interleaved = pairing in ("interleaved", "interleaved_to_half")
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :pairs], part[..., pairs:])
    interleaved = pairing in ("interleaved", "half_to_interleaved")

    def join(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)

    y = join(*rotate(a, b))
    y[:, padding] = join(a, b)[:, padding].to(y.dtype)
    result = otherwise.clone().to(y.dtype)
    result[..., first : first + 2 * pairs] = y
    return result


def _turns(kwargs: dict[str, Any], batch: int, tokens: int, pairs: int) -> tuple[Tensor, list[bool], float]:
    """e^{iθ} of every token and pair, complex128 (B, T, P); which tokens are padding; the largest angle."""
    kwargs = {name: v.cpu() if isinstance(v, Tensor) else v for name, v in kwargs.items()}
    axes = section_axes(kwargs.get("sections"), kwargs.get("sections_interleaved", False), pairs)
    turns = torch.ones(batch, tokens, pairs, dtype=torch.complex128)
    padding = [False] * tokens
    largest = 0.0
    for b in range(batch):
        for t in range(tokens):
            place = position(kwargs, b, t, tokens)
            if place is None:
                padding[t] = True
                continue
            rows = torch.stack([_row(kwargs, b, p, pairs) for p in place])
            turns[b, t] = rows.gather(0, axes[None])[0]
            if "inv_freq" in kwargs and pairs:
                largest = max(largest, max(map(abs, place)) * float(kwargs["inv_freq"].max()))
    return (turns.conj() if kwargs.get("inverse") else turns).resolve_conj(), padding, largest


def section_axes(sections: tuple[int, int, int] | None, interleaved: bool, pairs: int) -> Tensor:
    """The position axis of each pair: blocks (Qwen2-VL), or interleaved with the remaining pairs on t (Qwen3-VL)."""
    if sections is None:
        return torch.zeros(pairs, dtype=torch.int64)
    t, h, w = sections
    if not interleaved:
        return torch.tensor([0] * t + [1] * h + [2] * w)
    axes = [0] * pairs
    for axis, count in ((1, h), (2, w)):
        for pair in range(axis, min(3 * count, pairs), 3):
            axes[pair] = axis
    return torch.tensor(axes)


def position(kwargs: dict[str, Any], b: int, t: int, tokens: int) -> tuple[int, int, int] | None:
    """The (t, h, w) position of token t of batch entry b; None past the last sequence."""
    positions = kwargs.get("positions")
    if positions is not None:
        axes = list(positions) if kwargs.get("sections") else [positions] * 3
        p_t, p_h, p_w = (int(p[t] if p.dim() == 1 else p[b % len(p), t]) for p in axes)
        return p_t, p_h, p_w
    rank, size = kwargs.get("context_parallel") or (0, 1)
    sequence, local, length = b, t, tokens
    if kwargs.get("cu_seqlens") is not None:
        bounds = [bound // size for bound in kwargs["cu_seqlens"].tolist()]
        if t >= bounds[-1]:
            return None
        sequence = next(s for s in range(len(bounds) - 1) if bounds[s] <= t < bounds[s + 1])
        local, length = t - bounds[sequence], bounds[sequence + 1] - bounds[sequence]
    whole = list(range(length * size))
    if size > 1:
        chunks = [whole[c * length // 2 : (c + 1) * length // 2] for c in range(2 * size)]
        whole = chunks[rank] + chunks[2 * size - 1 - rank]
    offset = kwargs.get("offset", 0)
    place = whole[local] + (int(offset[sequence]) if isinstance(offset, Tensor) else offset)
    return place, place, place


def _row(kwargs: dict[str, Any], b: int, place: int, pairs: int) -> Tensor:
    """e^{iθ} of every pair at a position, complex128 (P,)."""
    scale = kwargs.get("scale", 1.0)
    if "inv_freq" in kwargs:
        return torch.tensor([exact_turn(place, f) for f in kwargs["inv_freq"].tolist()], dtype=torch.complex128) * scale
    table = next(kwargs[name] for name in ("cos", "cos_sin", "angles") if name in kwargs)
    if not 0 <= place < table.shape[-2]:
        return torch.full((pairs,), complex("nan+nanj"), dtype=torch.complex128)

    def entries(table: Tensor) -> Tensor:
        row = (table if table.dim() == 2 else table[b % len(table)])[place].double()
        if len(row) == pairs:
            return row
        return row[::2] if kwargs.get("pairing") == "interleaved" else row[:pairs]

    if "angles" in kwargs:
        return torch.polar(torch.ones(pairs, dtype=torch.float64), entries(table)) * scale
    if "cos_sin" in kwargs:
        row = (table if table.dim() == 2 else table[b % len(table)])[place].double()
        return torch.complex(row[:pairs], row[pairs:])
    return torch.complex(entries(table), entries(kwargs["sin"]))


@functools.cache
def exact_turn(place: int, frequency: float) -> complex:
    """e^{i · place · frequency}, with exact product and exact argument reduction."""
    angle = place * Fraction(frequency)
    reduced = float(angle - round(angle / TWO_PI) * TWO_PI)
    return complex(math.cos(reduced), math.sin(reduced))


def to_bthd(x: Tensor, layout: str) -> Tensor:
    return x[None] if layout == "thd" else x.movedim({"bshd": 1, "sbhd": 0, "bhsd": 2}[layout], 1)


def from_bthd(x: Tensor, layout: str) -> Tensor:
    return x[0] if layout == "thd" else x.movedim(1, {"bshd": 1, "sbhd": 0, "bhsd": 2}[layout])
