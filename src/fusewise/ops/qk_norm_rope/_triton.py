"""`qk_norm_rope` in Triton: the tiles, the arguments of the kernels, and their launches.

What a rotation needs of table, positions and order of tokens is what RoPE's own launch makes of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rope import _triton as rope
from ..rope._problem import Problem, Spec
from ._problem import Norm, Rotation
from ._triton_backward import backward_kernel, sum_kernel
from ._triton_kernel import forward_kernel

unavailable = rope.unavailable

# The arguments that RoPE's kernel has, too, and under the same name.
_OF_ROPE = (
    "cos_ptr", "sin_ptr", "positions_ptr", "offsets_ptr", "cu_seqlens_ptr", "offset",
    "stride_table_b", "stride_table_r", "stride_pos_a", "stride_pos_b", "stride_pos_t", "table_rows", "scale",
    "tokens", "batches", "magic", "shift", "stripe", "stripe_magic", "stripe_shift", "sequences", "search_steps",
    "Q_HEADS", "K_HEADS", "HEAD_DIM", "START", "K_HEAD_DIM", "K_START", "PAIRS", "BLOCK_P",
    "INTERLEAVED_IN", "INTERLEAVED_OUT", "TABLE", "TABLE_STEP", "SOURCE", "HAS_OFFSETS",
    "SECTION_T", "SECTION_H", "SECTION_W", "SECTIONS_INTERLEAVED", "CP_RANK", "CP_SIZE", "TABLE_UNIT",
)  # fmt: skip


@dataclass(frozen=True)
class Config:
    """How a kernel is cut: a tile for each tensor, the warps of a program, and for backward how many programs a
    multiprocessor gets and how many tiles ahead they load."""

    tiles: tuple[rope.Tile, ...]
    num_warps: int
    programs: int = 0
    stages: int = 1


def choose(problem: Problem, norm: Norm, backward: bool, processors: int) -> Config:
    """The configuration for a problem."""
    tokens = problem.batch * problem.tokens
    heads = tuple(operand.heads for operand in problem.operands)
    itemsize = problem.operands[0].x.element_size()
    head = triton.next_power_of_2(max(operand.head_dim for operand in problem.operands))
    lanes = triton.cdiv(head * itemsize, 32)  # threads of a head, each with 16 bytes of both halves
    programs = 8 * processors if backward else 4 * processors
    if norm.over == "head":
        tiles = rope.choose_tiles(tokens, heads, lanes, programs // 4)
        return Config(tuple(tiles), rope.NUM_WARPS, 8)
    # All heads of a token: 64 bytes a thread or less of the widest tensor, and as many tokens of the other.
    blocks = [triton.next_power_of_2(max(count, 1)) for count in heads]
    threads = max(blocks) * lanes
    num_warps = min(max(threads // 64, 4), 16)
    rows = max(num_warps * 32 * 2 // lanes, max(blocks))
    return Config(tuple(rope.Tile(max(rows // block, 1), block) for block in blocks), num_warps, 4)


def arguments(
    problem: Problem,
    weights: Sequence[Tensor],
    norm: Norm,
    processors: int,
    dys: tuple[Tensor, ...] = (),
    partials: tuple[Tensor, ...] = (),
    config: Config | None = None,
) -> tuple[Any, int, dict[str, Any], dict[str, int]]:
    """The kernel for a problem, the grid size, all arguments and the launch options. Backward where there are `dys`: then
    the problem leads from x to dx, and `partials` are where there are gradients of the weights."""
    backward = bool(dys)
    config = config or choose(problem, norm, backward, processors)
    _, of_rope = rope.arguments(problem, processors)
    q, k = problem.operands[0], problem.operands[-1]
    strides = {"q": q.x_strides, "k": k.x_strides}
    outs = {"q_out": q.y, "k_out": k.y}
    reach = rope._reach(problem)
    if backward:
        bare = Spec(layout=problem.spec.layout, table="inv_freq")  # their strides are all that is asked for
        gradients = Problem.build(dys, dys, problem.cos, None, None, None, None, 0, bare)
        reach = max(reach, rope._reach(gradients))
        dq, dk = gradients.operands[0], gradients.operands[-1]
        outs = {"q_out": dq.x, "k_out": dk.x}
        strides |= {"q_out": dq.x_strides, "k_out": dk.x_strides, "dq": q.y_strides, "dk": k.y_strides}
    else:
        strides |= {"q_out": q.y_strides, "k_out": k.y_strides}
    unit = math.gcd(16, *(stride for three in strides.values() for stride in three))
    tiles = config.tiles
    half = problem.spec.pairing == "half"
    vector = math.gcd(16 // q.x.element_size(), problem.pairs, q.start, k.start) if half else 1
    # A tensor that the call does not have is never read; another stands in for its pointer.
    bound = dict(
        q_ptr=q.x, k_ptr=k.x, q_out_ptr=outs["q_out"], k_out_ptr=outs["k_out"],
        q_weight_ptr=weights[0] if weights else problem.cos, k_weight_ptr=weights[-1] if weights else problem.cos,
        **{name: of_rope[name] for name in _OF_ROPE},
        **{f"stride_{name}_{dim}": n // unit for name, three in strides.items() for dim, n in zip("bth", three, strict=True)},
        eps=norm.eps, weight_offset=norm.weight_offset,
        Q_BLOCK_T=tiles[0].block_t, Q_BLOCK_H=tiles[0].block_h, K_BLOCK_T=tiles[-1].block_t, K_BLOCK_H=tiles[-1].block_h,
        FLAT=2 * problem.pairs < q.head_dim or 2 * problem.pairs < k.head_dim,
        BLOCK_D=triton.next_power_of_2(max(q.head_dim, k.head_dim)), VECTOR=vector,
        ALL=norm.over == "all", HAS_WEIGHT=bool(weights), X_UNIT=unit,
        INDEX=tl.int64 if reach > 2**31 - 1 else tl.int32,
    )  # fmt: skip
    tokens = problem.batch * problem.tokens
    options = {"num_warps": config.num_warps}
    if not backward:
        group = max(tile.block_t for tile in tiles)
        group_tiles = sum(
            group // tile.block_t * triton.cdiv(operand.heads, tile.block_h)
            for tile, operand in zip(tiles, problem.operands, strict=True)
        )
        return forward_kernel, triton.cdiv(tokens, group) * group_tiles, bound, options
    programs = split(problem, config, processors)
    bound |= {
        "dq_ptr": q.y,
        "dk_ptr": k.y,
        "q_partials_ptr": partials[0] if partials else problem.cos,
        "k_partials_ptr": partials[-1] if partials else problem.cos,
        "q_programs": programs[0],
        "k_programs": programs[-1],
        "WEIGHT_GRAD": bool(partials),
        "STAGES": config.stages,
    }
    return backward_kernel, sum(programs), bound, options


def split(problem: Problem, config: Config, processors: int) -> tuple[int, ...]:
    """The programs of backward for each tensor: all with as many tiles, but for one, and no more than the device holds
    several of at a time. Fixed by shapes and device, and so is the order in which dw is added up."""
    tokens = problem.batch * problem.tokens
    counts = [
        triton.cdiv(tokens, tile.block_t) * triton.cdiv(operand.heads, tile.block_h)
        for tile, operand in zip(config.tiles, problem.operands, strict=True)
    ]
    each = max(triton.cdiv(sum(counts), config.programs * processors), 1)
    return tuple(triton.cdiv(count, each) for count in counts)


def forward(
    xs: Sequence[Tensor], ys: Sequence[Tensor], weights: Sequence[Tensor], rotation: Rotation, norm: Norm
) -> None:
    """The implementation `impl="triton"`: write the result for every x into its y."""
    problem = _problem(xs, ys, rotation)
    _launch(xs[0], *arguments(problem, weights, norm, _processors(xs[0])))


def backward(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    dxs: Sequence[Tensor],
    weights: Sequence[Tensor],
    dweights: Sequence[Tensor],
    rotation: Rotation,
    norm: Norm,
) -> None:
    """Write the gradient of every x, and of every weight unless `dweights` is empty."""
    problem, processors = _problem(xs, dxs, rotation), _processors(xs[0])
    config = choose(problem, norm, True, processors)
    partials: tuple[Tensor, ...] = ()
    counts = split(problem, config, processors)
    if dweights:
        sizes = [count * weight.numel() for count, weight in zip(counts, weights, strict=True)]
        partials = torch.empty(sum(sizes), dtype=torch.float32, device=xs[0].device).split(sizes)
    _launch(xs[0], *arguments(problem, weights, norm, processors, tuple(dys), partials, config))
    if dweights:
        _launch(xs[0], *sum_arguments(partials, dweights, counts))


def sum_arguments(
    partials: Sequence[Tensor], dweights: Sequence[Tensor], counts: Sequence[int]
) -> tuple[Any, int, dict[str, Any], dict[str, int]]:
    """The launch that adds up the partial sums, as `arguments` gives the others."""
    widths = [weight.numel() for weight in dweights]
    block = 16  # columns: 64 bytes of a row
    bound = {
        "q_partials_ptr": partials[0],
        "k_partials_ptr": partials[-1],
        "q_dw_ptr": dweights[0],
        "k_dw_ptr": dweights[-1],
        "q_programs": counts[0],
        "k_programs": counts[-1],
        "Q_WIDTH": widths[0],
        "K_WIDTH": widths[1] if len(widths) == 2 else 0,
        "BLOCK_R": min(max(triton.next_power_of_2(max(counts)), 16), 512),
        "BLOCK_W": block,
    }
    return sum_kernel, sum(triton.cdiv(width, block) for width in widths), bound, {"num_warps": 8}


def _problem(xs: Sequence[Tensor], ys: Sequence[Tensor], rotation: Rotation) -> Problem:
    cos, sin, positions, offsets, cu_seqlens, offset, spec = rotation
    return Problem.build(tuple(xs), tuple(ys), cos, sin, positions, offsets, cu_seqlens, offset, Spec.decode(spec))


def _launch(x: Tensor, kernel: Any, grid: int, bound: dict[str, Any], options: dict[str, int]) -> None:
    if grid == 0:
        return
    device = x.get_device()
    if device < 0:
        kernel[(grid,)](**bound, **options, enable_fp_fusion=True)
    else:
        with torch.cuda.device(device):
            kernel[(grid,)](**bound, **options, enable_fp_fusion=True)


def _processors(x: Tensor) -> int:
    return rope._processors(x.get_device())
