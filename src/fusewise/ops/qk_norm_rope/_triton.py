"""`impl="triton"` of `qk_norm_rope`: tiles, kernel arguments and launches.

Arguments for the table, the positions and the token order are those of RoPE's own launch (`rope._triton.arguments`).
Bound launches are cached, so that a repeated call only passes pointers, the offset and the stream.
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

from ..._shared.gpu import processors_of
from ..._shared.memo import Memo
from ..._shared.triton_launch import launch_bound, launches_directly
from ..._shared.triton_launch import unavailable as unavailable
from ..rope import _triton as rope
from ..rope._problem import Problem, Rotation, Spec
from ._problem import Norm, check_readable
from ._triton_backward import backward_kernel, sum_kernel
from ._triton_kernel import forward_kernel

# Arguments shared with RoPE's kernel, under the same names.
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
    """Launch configuration: a tile per tensor, warps per program, and for backward the programs per SM."""

    tiles: tuple[rope.Tile, ...]
    num_warps: int
    programs: int


def choose(problem: Problem, norm: Norm, backward: bool, processors: int) -> Config:
    """The configuration for a problem."""
    tokens = problem.batch * problem.tokens
    heads = tuple(operand.heads for operand in problem.operands)
    itemsize = problem.operands[0].x.element_size()
    head = triton.next_power_of_2(max(operand.head_dim for operand in problem.operands))
    lanes = triton.cdiv(head * itemsize, 32)  # threads per head, each with 16 bytes of either half
    # Backward launches as many programs as fit in the register files at once, measured on an H200: fewer leave SMs
    # idle, more need a second wave. Prefetching a tile is no faster then: the programs of an SM hide each other's latency.
    if norm.over == "head":
        programs = 5 if itemsize == 2 else 8
        tiles = rope.choose_tiles(tokens, heads, lanes, 2 * processors if backward else processors)
        return Config(tuple(tiles), rope.NUM_WARPS, programs)
    # All heads of a token: 64 bytes of the widest tensor per thread, 32 in backward since it also keeps sums for the
    # weights; the other tensor has as many tokens per tile.
    blocks = [triton.next_power_of_2(max(count, 1)) for count in heads]
    num_warps = min(max(max(blocks) * lanes // (32 if backward else 64), 4), 16)
    rows = max(num_warps * (32 if backward else 64) // lanes, max(blocks))
    tiles = [rope.Tile(max(rows // block, 1), block) for block in blocks]
    return Config(tuple(tiles), num_warps, max(24 // num_warps, 1))


def arguments(
    problem: Problem,
    weights: Sequence[Tensor],
    norm: Norm,
    processors: int,
    dys: tuple[Tensor, ...] = (),
    partials: tuple[Tensor, ...] = (),
    config: Config | None = None,
) -> tuple[Any, int, dict[str, Any], dict[str, int]]:
    """The kernel for a problem, the grid size, all arguments and the launch options. With `dys` it is the backward:
    then the problem maps x to dx, and `partials` are given if the weights need gradients."""
    check_readable(weights)
    backward = bool(dys)
    config = config or choose(problem, norm, backward, processors)
    _, of_rope = rope.arguments(problem, processors)
    q, k = problem.operands[0], problem.operands[-1]
    strides = {"q": q.x_strides, "k": k.x_strides}
    outs = {"q_out": q.y, "k_out": k.y}
    reach = rope.reach_of(problem)
    if backward:
        bare = Spec(layout=problem.spec.layout, table="inv_freq")  # only the strides are needed
        gradients = Problem.build(dys, dys, (problem.cos, None, None, None, None, 0, bare.encode()))
        reach = max(reach, rope.reach_of(gradients))
        dq, dk = gradients.operands[0], gradients.operands[-1]
        outs = {"q_out": dq.x, "k_out": dk.x}
        strides |= {"q_out": dq.x_strides, "k_out": dk.x_strides, "dq": q.y_strides, "dk": k.y_strides}
    else:
        strides |= {"q_out": q.y_strides, "k_out": k.y_strides}
    unit = math.gcd(16, *(stride for three in strides.values() for stride in three))
    tiles = config.tiles
    half = problem.spec.pairing == "half"
    vector = math.gcd(16 // q.x.element_size(), problem.pairs, q.start, k.start) if half else 1
    # Another tensor stands in for the pointer of an absent one, which is never dereferenced.
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
    if backward and torch.version.hip is None:  # ROCm has no such option
        options["maxnreg"] = registers(config)
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
    }
    return backward_kernel, sum(programs), bound, options


def registers(config: Config) -> int:
    """Register limit per thread that keeps all programs of an SM resident: it has 65,536 registers, allocated in
    multiples of 8 per thread. Without a limit the compiler uses 96 or 128 for almost no gain, and at 128 the fifth
    program needs a second wave."""
    return min(65536 // (32 * config.num_warps * config.programs) // 8 * 8, 255)


def split(problem: Problem, config: Config, processors: int) -> tuple[int, ...]:
    """Programs of the backward per tensor: all with the same number of tiles except the last of each, and together no
    more than one wave. The split depends only on shapes and device, and so does the summation order of dw."""
    tokens = problem.batch * problem.tokens
    counts = [
        triton.cdiv(tokens, tile.block_t) * triton.cdiv(operand.heads, tile.block_h)
        for tile, operand in zip(config.tiles, problem.operands, strict=True)
    ]
    most = max(config.programs * processors, len(counts))
    each = max(triton.cdiv(sum(counts), most), 1)
    while sum(triton.cdiv(count, each) for count in counts) > most:
        each += 1
    return tuple(triton.cdiv(count, each) for count in counts)


def forward(
    xs: Sequence[Tensor], ys: Sequence[Tensor], weights: Sequence[Tensor], rotation: Rotation, norm: Norm
) -> None:
    """`impl="triton"`: write the result for every x into its y."""
    tensors = _leading_tensors(xs, ys, weights, rotation)
    key = _key(tensors, rotation, (norm, len(xs), len(weights)))
    if (plan := _PLANS.get(key)) is not None:
        plan.run(tensors, rotation)
        return
    problem = _problem(xs, ys, rotation)
    launched = _launch(xs[0], *arguments(problem, weights, norm, _processors(xs[0])))
    _remember(key, launched, len(tensors), problem)


def backward(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    dxs: Sequence[Tensor],
    weights: Sequence[Tensor],
    dweights: Sequence[Tensor],
    rotation: Rotation,
    norm: Norm,
) -> bool:
    """As `backward` of `reference.py`."""
    tensors = (*_leading_tensors(xs, dys, weights, rotation), dxs[0], dxs[-1])
    key = _key(tensors, rotation, (norm, len(xs), len(weights), len(dweights)))
    if (plan := _PLANS.get(key)) is not None:
        partials = _new_partials(plan.counts, dweights, xs[0])
        plan.run((*tensors, *_q_and_k(partials, rotation)), rotation)
        if plan.then is not None:
            plan.then.run((*_q_and_k(partials, rotation), *_q_and_k(dweights, rotation)), None)
        return True
    problem, processors = _problem(xs, dxs, rotation), _processors(xs[0])
    config = choose(problem, norm, True, processors)
    counts = split(problem, config, processors)
    partials = _new_partials(counts, dweights, xs[0])
    launched = _launch(xs[0], *arguments(problem, weights, norm, processors, tuple(dys), partials, config))
    then = _launch(xs[0], *sum_arguments(partials, dweights, counts)) if dweights else None
    if not dweights or then is not None:
        _remember(key, launched, len(tensors) + 2, problem, counts, None if then is None else Plan(*then, 4))
    return True


def _new_partials(counts: Sequence[int], dweights: Sequence[Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """Memory for the partial sums of each weight whose gradient is wanted, a row per program."""
    if not dweights:
        return ()
    sizes = [count * weight.numel() for count, weight in zip(counts, dweights, strict=True)]
    return tuple(torch.empty(sum(sizes), dtype=torch.float32, device=x.device).split_with_sizes(sizes))


def _q_and_k(tensors: Sequence[Tensor], rotation: Rotation | None) -> tuple[Tensor, Tensor]:
    """The tensors of q and k; another tensor stands in for an absent one, which is never dereferenced."""
    if tensors:
        return tensors[0], tensors[-1]
    assert rotation is not None
    return rotation[0], rotation[0]


def _leading_tensors(
    xs: Sequence[Tensor], ys: Sequence[Tensor], weights: Sequence[Tensor], rotation: Rotation
) -> tuple[Tensor, ...]:
    """The leading tensor arguments of the kernels, in order."""
    return (*_q_and_k(xs, None), *_q_and_k(ys, None), *_q_and_k(weights, rotation))


def sum_arguments(
    partials: Sequence[Tensor], dweights: Sequence[Tensor], counts: Sequence[int]
) -> tuple[Any, int, dict[str, Any], dict[str, int]]:
    """The launch that reduces the partial sums, in the form of `arguments`."""
    widths = [weight.numel() for weight in dweights]
    rows = min(
        max(triton.next_power_of_2(max(counts)), 16), 1024
    )  # loaded at once, to pay the memory latency only once
    block = 8 if rows > 512 else 16  # columns
    bound = {
        "q_partials_ptr": partials[0],
        "k_partials_ptr": partials[-1],
        "q_dw_ptr": dweights[0],
        "k_dw_ptr": dweights[-1],
        "q_programs": counts[0],
        "k_programs": counts[-1],
        "Q_WIDTH": widths[0],
        "K_WIDTH": widths[1] if len(widths) == 2 else 0,
        "BLOCK_R": rows,
        "BLOCK_W": block,
    }
    return sum_kernel, sum(triton.cdiv(width, block) for width in widths), bound, {"num_warps": 8}


def _problem(xs: Sequence[Tensor], ys: Sequence[Tensor], rotation: Rotation) -> Problem:
    return Problem.build(tuple(xs), tuple(ys), rotation)


class Plan:
    """A bound launch: the compiled kernel with its grid, and the arguments after the pointers.

    Triton's launcher specializes and packs some eighty arguments on every call; between calls with the same key only
    pointers, the offset and the stream vary.
    """

    def __init__(self, compiled: Any, grid: int, values: tuple[Any, ...], pointers: int) -> None:
        self.bound, self.values = compiled[(grid, 1, 1)], values[pointers:]
        self.sin_distance = 0  # bytes from cos to sin if both are in one tensor
        self.counts: tuple[int, ...] = ()
        self.then: Plan | None = None

    def run(self, tensors: Sequence[Tensor], rotation: Rotation | None) -> None:
        """Launch with these tensors, and the table and positions of `rotation` if the kernel takes them."""
        pointers = [x.data_ptr() for x in tensors]
        if rotation is not None:
            cos, sin, positions, offsets, cu_seqlens, offset, _ = rotation
            start = cos.data_ptr()
            pointers += [start, start + self.sin_distance if sin is None else sin.data_ptr()]
            pointers += [start if x is None else x.data_ptr() for x in (positions, offsets, cu_seqlens)]
            pointers.append(offset)
        launch_bound(self.bound, tensors[0].get_device(), *pointers, *self.values)


_PLANS: Memo[tuple[Any, ...] | None, Plan] = Memo(4096)
_OF_ROTATION = 6  # arguments after the tensors: cos, sin, positions, offsets, cu_seqlens, offset


def _key(tensors: Sequence[Tensor], rotation: Rotation, rest: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Everything that a plan depends on; None if a pointer is not aligned to 16 bytes, which bound launches assume, or
    if kernels cannot be launched directly."""
    cos, sin, positions, offsets, cu_seqlens, _, spec = rotation
    alignment = cos.data_ptr()
    for x in tensors:
        alignment |= x.data_ptr()
    if alignment & 15 or not launches_directly():
        return None
    return (
        spec, rest, tensors[0].get_device(), cos.dtype, cos.shape, cos.stride(),
        *[(x.dtype, x.shape, x.stride()) for x in tensors],
        None if sin is None else (sin.stride(), sin.data_ptr() & 15),
        None if positions is None else (positions.dtype, positions.shape, positions.stride(), positions.data_ptr() & 15),
        None if offsets is None else (offsets.dtype, offsets.stride(), offsets.data_ptr() & 15),
        None if cu_seqlens is None else (cu_seqlens.dtype, cu_seqlens.shape, cu_seqlens.stride(), cu_seqlens.data_ptr() & 15),
    )  # fmt: skip


def _remember(
    key: tuple[Any, ...] | None,
    launched: tuple[Any, int, tuple[Any, ...]] | None,
    tensors: int,
    problem: Problem,
    counts: tuple[int, ...] = (),
    then: Plan | None = None,
) -> None:
    if key is None or launched is None:
        return
    plan = Plan(*launched, tensors + _OF_ROTATION)
    plan.sin_distance = problem.sin.data_ptr() - problem.cos.data_ptr()
    plan.counts, plan.then = counts, then
    _PLANS[key] = plan


def _launch(
    x: Tensor, kernel: Any, grid: int, bound: dict[str, Any], options: dict[str, int]
) -> tuple[Any, int, tuple[Any, ...]] | None:
    """Launch through Triton's dispatcher; returns the arguments of a `Plan`, or None if there is none to cache."""
    if grid == 0:
        return None
    device = x.get_device()
    if device < 0:  # interpreted
        kernel[(grid,)](**bound, **options, enable_fp_fusion=True)
        return None
    values = tuple(bound[parameter.name] for parameter in kernel.params)
    with torch.cuda.device(device):
        return kernel[(grid,)](*values, **options, enable_fp_fusion=True), grid, values


def _processors(x: Tensor) -> int:
    return processors_of(x.get_device())
