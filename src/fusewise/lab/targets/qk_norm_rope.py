"""RMSNorm of q and k, then RoPE, as in Qwen3, Gemma 3 and OLMo 2 between the projections and attention.

    z = x / sqrt(mean(x²) + eps) · (weight + offset),   y = rope(z)

Shapes, tables and q and k are those of a RoPE case; the weights are drawn around typical trained values.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

import fusewise
from fusewise.ops.rope.cases import RopeCase

from ..problem import DTYPES, Pass, Problem, Program, Task
from . import Case, CaseProblem, Target
from .rope import half, repeated


@dataclass(frozen=True, kw_only=True)
class NormCase:
    """A RoPE case with a normalisation before it."""

    rope: RopeCase
    norm: Literal["head", "all"] = "head"  # normalise each head, or all heads of a token together
    weight_offset: float = 0.0
    eps: float = 1e-6

    @property
    def name(self) -> str:
        return self.rope.name

    @property
    def shape(self) -> str:
        return f"{self.rope.shape} norm over {'heads' if self.norm == 'head' else 'tokens'}"

    @property
    def dtypes(self) -> tuple[str, ...]:
        return self.rope.dtypes

    @property
    def passes(self) -> Sequence[Pass]:
        return self.rope.passes

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of the weights of q and of k."""
        heads = (1, 1) if self.norm == "head" else (self.rope.heads, self.rope.kv_heads)
        return heads[0] * self.rope.head_dim, heads[1] * self.rope.head_dim

    def bytes_min(self, direction: Pass, dtype: str) -> int:
        """Forward: reads q, k, weights, table and position ids, writes q and k. Backward: reads upstream gradients, q,
        k, weights and the table, writes the gradients of q, k and the weights."""
        size = DTYPES[dtype].itemsize
        weights = sum(self.widths) * size
        forward = self.rope.bytes_min("fwd", dtype) + weights
        backward = forward + self.rope.output_bytes(dtype) + weights
        return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[direction]

    def flops_min(self, direction: Pass) -> int:
        """Forward: 2 per element for the mean, 2 to scale, 3 to rotate. Backward: 3 to rotate back, 1 each for x̂ and
        the product with the weight, 2 each for the two sums, 3 for dx."""
        each = {"fwd": 7, "bwd": 12, "fwd+bwd": 19}[direction]
        return each * self.rope.elements


def _model(name: str, heads: int, kv_heads: int, head_dim: int, theta: float, **norm: Any) -> Callable[..., NormCase]:
    """The cases of a published configuration."""

    def case(suffix: str, batch: int, seqlen: int, train: bool = False) -> NormCase:
        decode = seqlen == 1
        rope = RopeCase(
            name=f"{name}-{suffix}", batch=batch, seqlen=seqlen, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            positions="ids" if decode else "arange", table_rows=8192 if decode else 0, dtypes=("bf16",),
            passes=("fwd", "bwd") if train else ("fwd",), rope_parameters={"rope_type": "default", "rope_theta": theta},
        )  # fmt: skip
        return NormCase(rope=rope, **norm)

    return case


# Values: config.json of Qwen/Qwen3-8B, google/gemma-3-12b-pt (its global layers), allenai/OLMo-2-1124-7B.
_MODELS = (
    _model("qwen3-8b", 32, 8, 128, 1000000.0),
    _model("gemma-3-12b", 16, 8, 256, 1000000.0, weight_offset=1.0),
    _model("olmo-2-7b", 32, 32, 128, 500000.0, norm="all"),
)
PRESETS: dict[str, list[NormCase]] = {
    "qk-norm-quick": [
        _MODELS[0]("step-512", 1, 512, train=True),
        _MODELS[1]("step-256", 1, 256, train=True),
        _MODELS[2]("step-256", 1, 256, train=True),
        _MODELS[0]("decode-b16", 16, 1),
    ],
    "qk-norm-models": [
        found
        for model in _MODELS
        for found in (
            model("train", 4, 4096, train=True),
            model("prefill-8k", 1, 8192),
            *(model(f"decode-b{batch}", batch, 1) for batch in (1, 64, 256)),
        )
    ],
}


class QkNormRope(Target):
    """RMSNorm of q and k and their rotation in one operation."""

    name = "qk_norm_rope"
    default_preset = "qk-norm-quick"
    hurried: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "qk-norm-quick": {"time_limit": 60.0, "max_rounds": 10},
        "qk-norm-models": {"time_limit": 300.0},
    }

    def presets(self) -> Mapping[str, Sequence[Case]]:
        return PRESETS

    def problem(self, task: Task) -> Problem:
        return QkNormProblem(task)


class QkNormProblem(CaseProblem[NormCase]):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.case = next(c for cases in PRESETS.values() for c in cases if c.name == task.case)
        self.inputs = self.case.rope.make_inputs(self.device, task.dtype, task.seed)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{task.seed}/{task.case}/weights".encode()))

        def weight(width: int) -> Tensor:
            drawn = torch.randn(width, generator=generator, device=self.device, dtype=self.dtype)
            return drawn * 0.1 + (1.0 - self.case.weight_offset)

        self.tensors = (*self.inputs.operands, *map(weight, self.case.widths))
        self.upstream = self.inputs.gradients

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `fusewise.qk_norm_rope`."""
        case = self.case
        return {**self.inputs.kwargs, "eps": case.eps, "weight_offset": case.weight_offset, "norm": case.norm}

    def truth(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(fusewise.qk_norm_rope(*tensors, **self.options(), impl="reference"))

    def program(self) -> Program:
        """As in transformers, the table is gathered, duplicated and rounded to the tensors' dtype once for all
        layers."""
        cos, sin = repeated(self.inputs, self.case.rope, self.dtype)
        return Program(
            by_head if self.case.norm == "head" else over_token,
            lambda *xs: (*xs, cos, sin, self.case.eps, self.case.weight_offset),
        )


# The eager forms; they must also script.


def normalised(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """RMSNorm over the last dimension in float32 with a single rounding, as in Gemma 3 and OLMo 2."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (weight.float() + offset)).to(x.dtype)


def by_head(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(B, T, H, D): each head normalised, then rotated."""
    width = q.shape[-1]
    q, k = normalised(q, q_weight, eps, offset), normalised(k, k_weight, eps, offset)
    return half(q, cos, sin, 0, width), half(k, cos, sin, 0, width)


def over_token(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """(B, T, H, D): all heads of a token normalised together, then rotated."""
    width = q.shape[-1]
    flat_q = normalised(q.flatten(2), q_weight, eps, offset)
    flat_k = normalised(k.flatten(2), k_weight, eps, offset)
    return half(flat_q.view(q.shape), cos, sin, 0, width), half(flat_k.view(k.shape), cos, sin, 0, width)
