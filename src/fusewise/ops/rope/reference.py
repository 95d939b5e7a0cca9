"""Reference implementation of RoPE in plain torch: differentiable, on any device, in float64 for float64 tensors.

    (y_a, y_b) = (x_a cos θ − x_b sin θ, x_b cos θ + x_a sin θ),   θ = position · inv_freq[i] or the table's entry

Written for readability; every kernel is tested against it. Shape legend as in `_problem.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._common import compute_dtype
from ._problem import Problem, Rotation, Spec
from ._validate import DEFAULTS, validated


def rope(q: Tensor, k: Tensor | None = None, **arguments: Any) -> Any:
    """`fusewise.rope` as a differentiable composition of torch functions. Same arguments, except out and impl."""
    *call, _ = validated("rope", q, k, tuple({**DEFAULTS, **arguments, "impl": "reference"}.values()))
    return formula(q, k, tuple(call))


def formula(q: Tensor, k: Tensor | None, rotation: Rotation) -> Any:
    """The rotation of q, or of q and k."""
    xs = (q,) if k is None else (q, k)
    rotated = rotate(Problem.build(xs, xs, rotation))
    return rotated[0] if k is None else tuple(rotated)


def launch(xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], rotation: Rotation) -> None:
    """`impl="reference"`: write the rotation of every x into its y."""
    problem = Problem.build(xs, ys, rotation)
    if all(x.numel() == 0 for x in xs):
        return
    for y, rotated in zip(ys, rotate(problem), strict=True):
        y.copy_(rotated)


def rotate(problem: Problem) -> list[Tensor]:
    """The rotation of every operand, as new tensors with the operand's shape and dtype."""
    compute = compute_dtype(problem.operands[0].x)
    cos_BTP, sin_BTP, padding_T = cos_and_sin(problem, compute)
    if problem.spec.inverse:
        sin_BTP = -sin_BTP
    cos, sin = cos_BTP[:, :, None], sin_BTP[:, :, None]
    results = []
    for operand in problem.operands:
        x_BTHD = to_bthd(operand.x, problem.spec)
        width = 2 * problem.pairs
        before, rotated, after = x_BTHD.split([operand.start, width, operand.head_dim - operand.start - width], dim=-1)
        halves = _unpair(rotated, problem.spec.pairs_in)
        x_a, x_b = (x.to(compute) for x in halves)
        y_a, y_b = (y.to(operand.x.dtype) for y in (x_a * cos - x_b * sin, x_b * cos + x_a * sin))
        if padding_T is not None:
            padding = padding_T[None, :, None, None]
            y_a, y_b = torch.where(padding, halves[0], y_a), torch.where(padding, halves[1], y_b)
        y = _pair(y_a, y_b, problem.spec.pairs_out)
        y = y if width == operand.head_dim else torch.cat((before, y, after), dim=-1)
        results.append(_from_bthd(y, problem.spec))
    return results


def cos_and_sin(problem: Problem, compute: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """cos θ and sin θ of every token and pair, (B | 1, T, P) in `compute`, NaN for a row outside the table; and, with
    packed sequences, a mask (T,) of the tokens past the last one."""
    rows, padding = token_rows(problem)  # (B | 1, T, P | 1), (T,) or None
    if problem.spec.table == "inv_freq":
        # Float64 angles have a relative error of 2⁻⁵³; a float32 product is off by 0.5 rad at position 2²³.
        angles = rows.double() * problem.cos.double()
        cos, sin = angles.cos() * problem.spec.scale, angles.sin() * problem.spec.scale
    else:
        inside = (rows >= 0) & (rows < problem.rows)
        safe = torch.where(inside, rows, 0).expand(*rows.shape[:2], problem.pairs)
        cos, sin = (_gather(table, safe) for table in (problem.cos, problem.sin))
        if problem.spec.table == "angles":
            scale = problem.spec.scale
            cos, sin = cos.double().cos() * scale, sin.double().sin() * scale
        nan = torch.tensor(float("nan"), device=cos.device, dtype=cos.dtype)
        cos, sin = torch.where(inside, cos, nan), torch.where(inside, sin, nan)
    return cos.to(compute), sin.to(compute), padding


def _gather(table: Tensor, rows_BTP: Tensor) -> Tensor:
    if table.shape[-2] == 0:
        return table.new_zeros(rows_BTP.shape)
    table_BRP = table if table.dim() == 3 else table[None]
    batch = rows_BTP.shape[0] if table_BRP.shape[0] == 1 else table_BRP.shape[0]  # which may be 0
    return table_BRP.expand(batch, -1, -1).gather(1, rows_BTP.expand(batch, -1, -1))


def token_rows(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """The table row (position) of every token and pair, int64 (B | 1, T, P | 1), and which tokens are padding."""
    spec, tokens = problem.spec, problem.tokens
    device = problem.operands[0].x.device
    if problem.positions is not None:
        positions = problem.positions.long()
        if spec.sections is None:
            return torch.atleast_2d(positions)[:, :, None], None
        positions_ABT = positions if positions.dim() == 3 else positions[:, None]
        return positions_ABT[section_axes(spec).to(device)].permute(1, 2, 0), None

    token = torch.arange(tokens, device=device)
    if problem.cu_seqlens is None:
        rows = _chunk_map(token, tokens, spec)[None]
        if problem.offsets is not None:
            rows = rows + problem.offsets.long()[:, None]
        return rows[:, :, None] + problem.offset, None

    bounds = problem.cu_seqlens.long() // spec.cp_size
    sequence = torch.searchsorted(bounds, token, right=True) - 1
    padding = token >= bounds[-1]
    sequence = sequence.clamp(0, max(len(bounds) - 2, 0))
    starts, lengths = bounds[:-1], bounds.diff()
    if len(starts) == 0:
        return token[None, :, None], torch.ones_like(padding)
    rows = _chunk_map(token - starts[sequence], lengths[sequence], spec)
    if problem.offsets is not None:
        rows = rows + problem.offsets.long()[sequence]
    return rows[None, :, None] + problem.offset, padding


def _chunk_map(token: Tensor, length: Any, spec: Spec) -> Tensor:
    """Position of a local token if a sequence is split into 2·cp_size chunks and rank r holds chunks r and
    2·cp_size − 1 − r, which balances causal attention over the ranks."""
    half = length // 2
    second = token >= half
    return token + torch.where(second, (2 * spec.cp_size - 2 - spec.cp_rank) * half, spec.cp_rank * half) * (
        spec.cp_size > 1
    )


def section_axes(spec: Spec) -> Tensor:
    """The position axis (0 t, 1 h, 2 w) of each pair, int64 (P,), on the CPU, whatever the default device."""
    assert spec.sections is not None
    t, h, w = spec.sections
    if not spec.sections_interleaved:
        return torch.arange(3, device="cpu").repeat_interleave(torch.tensor([t, h, w], device="cpu"))
    pair = torch.arange(t + h + w, device="cpu")
    axis = pair % 3
    return torch.where(pair < 3 * torch.tensor([t, h, w], device="cpu")[axis], axis, 0)


def to_bthd(x: Tensor, spec: Spec) -> Tensor:
    """View x as (B, T, H, D), without a copy."""
    return {
        "bshd": lambda: x,
        "sbhd": lambda: x.transpose(0, 1),
        "bhsd": lambda: x.transpose(1, 2),
        "thd": lambda: x[None],
    }[spec.layout]()


def _from_bthd(x: Tensor, spec: Spec) -> Tensor:
    return {
        "bshd": lambda: x,
        "sbhd": lambda: x.transpose(0, 1),
        "bhsd": lambda: x.transpose(1, 2),
        "thd": lambda: x[0],
    }[spec.layout]()


def _unpair(x: Tensor, pairs: str) -> tuple[Tensor, Tensor]:
    if pairs == "half":
        a, b = x.chunk(2, dim=-1)
        return a, b
    return x[..., ::2], x[..., 1::2]


def _pair(a: Tensor, b: Tensor, pairs: str) -> Tensor:
    # Not flatten: torch cannot batch it over gradients. Not cat: under vmap in a trace it specializes sizes.
    return torch.stack((a, b), dim=-2 if pairs == "half" else -1).reshape(*a.shape[:-1], 2 * a.shape[-1])
