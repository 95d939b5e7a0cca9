"""RoPE fused with its neighbours in a model: our implementations, and libraries that launch separate kernels."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

import fusewise

from ..plugin import Provider, Run, Unsupported, supported
from ..problem import Problem
from ..targets.qk_norm_rope import QkNormProblem
from ..targets.rope import position_ids
from ..targets.rope_and_cache import CacheWriteProblem
from .ours import Ours
from .rope_peers import vllm_operators


class _Norm(Ours):
    """RMSNorm of q and k, and RoPE."""

    ops: ClassVar[tuple[str, ...]] = ("qk_norm_rope",)
    packages: ClassVar[tuple[str, ...]] = ("torch", "fusewise")

    def build(self, problem: Problem) -> Run:
        options = {**supported(self, problem, QkNormProblem).options(), "impl": self.impl}
        return Run(lambda *xs: fusewise.qk_norm_rope(*xs, **options))


class NormReference(_Norm):
    """The specification in plain torch."""

    name, impl = "fusewise-reference", "reference"


class NormTriton(_Norm):
    """Normalisation and rotation in one Triton kernel."""

    name, impl, devices, module = "fusewise-triton", "triton", ("cuda",), "triton"
    install = "pip install triton"
    packages = ("torch", "triton", "fusewise")


class NormCuda(_Norm):
    """Normalisation and rotation in one CUDA kernel."""

    name, impl, devices = "fusewise-cuda", "cuda", ("cuda",)


class NormVllm(Provider):
    """vLLM: one kernel, in place on a packed projection, here without v."""

    name, module, packages = "vllm", "vllm", ("vllm",)
    install = "pip install vllm"
    ops: ClassVar[tuple[str, ...]] = ("qk_norm_rope",)
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def build(self, problem: Problem) -> Run:
        normed = supported(self, problem, QkNormProblem)
        case, rope = normed.case, normed.case.rope
        if case.norm != "head":
            raise Unsupported("normalises each head, not all heads of a token together")
        if case.weight_offset:
            raise Unsupported(f"multiplies by the weight, not by the weight + {case.weight_offset:g}")
        if normed.dtype not in (torch.bfloat16, torch.float16):
            raise Unsupported("takes bfloat16 and float16 only")
        if problem.task.pass_ != "fwd":
            raise Unsupported("has no backward")
        turn = vllm_operators(self.install).fused_qk_norm_rope
        table = torch.cat((normed.inputs.cos, normed.inputs.sin), -1).to(normed.dtype)
        positions = position_ids(normed.inputs, rope).flatten()
        heads, kv_heads, width = rope.heads, rope.kv_heads, rope.head_dim

        def call(qk: Tensor, q_weight: Tensor, k_weight: Tensor) -> Tensor:
            turn(qk, heads, kv_heads, 0, width, case.eps, q_weight, k_weight, table, rope.pairing == "half", positions)
            return qk

        def enter(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
            return torch.cat((q, k), 2).flatten(2).flatten(0, 1), q_weight, k_weight

        def leave(qk: Tensor) -> tuple[Tensor, ...]:
            return tuple(qk.view(rope.batch, rope.seqlen, -1, width).split((heads, kv_heads), 2))

        return Run(call, enter, leave, in_place=True, backward=False)


class _Cache(Ours):
    """RoPE and the write of k and v into a paged cache."""

    ops: ClassVar[tuple[str, ...]] = ("rope_and_cache",)
    packages: ClassVar[tuple[str, ...]] = ("torch", "fusewise")

    def build(self, problem: Problem) -> Run:
        cached = supported(self, problem, CacheWriteProblem)
        options = {**cached.options(), "impl": self.impl}

        def call(q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, ...]:
            fusewise.rope_and_cache_(q, k, v, key_cache=key_cache, value_cache=value_cache, **options)
            return q, k, key_cache, value_cache

        return Run(call, in_place=True, backward=False)


class CacheReference(_Cache):
    """The specification in plain torch."""

    name, impl = "fusewise-reference", "reference"


class CacheTriton(_Cache):
    """Rotation and cache write in one Triton kernel."""

    name, impl, devices, module = "fusewise-triton", "triton", ("cuda",), "triton"
    install = "pip install triton"
    packages = ("torch", "triton", "fusewise")


class CacheCuda(_Cache):
    """Rotation and cache write in one CUDA kernel."""

    name, impl, devices = "fusewise-cuda", "cuda", ("cuda",)


class CacheVllm(Provider):
    """vLLM: in-place rotation, then the write into the paged cache; two launches."""

    name, module, packages = "vllm", "vllm", ("vllm",)
    install = "pip install vllm"
    ops: ClassVar[tuple[str, ...]] = ("rope_and_cache",)
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def build(self, problem: Problem) -> Run:
        cached = supported(self, problem, CacheWriteProblem)
        rope, inputs = cached.case.rope, cached.inputs
        if rope.pairing not in ("half", "interleaved"):
            raise Unsupported(f"pairs features half or interleaved, not {rope.pairing}")
        rotate = vllm_operators(self.install).rotary_embedding
        store = torch.ops._C_cache_ops.reshape_and_cache_flash
        assert inputs.cache is not None
        positions, table, slots = inputs.kwargs["positions"], inputs.cache.to(cached.dtype), cached.slots
        width, neox = rope.head_dim, rope.pairing == "half"
        one = torch.ones(1, device=cached.device)

        def call(q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor) -> Any:
            rotate(positions, q, k, width, table, neox)
            store(k.view(len(k), -1, width), v.view(len(v), -1, width), key_cache, value_cache, slots, "auto", one, one)
            return q, k, key_cache, value_cache

        return Run(call, in_place=True, backward=False)
