"""Widely used libraries for RoPE, each called as its documentation says.

Layouts and tables are converted to each library's form while building and in `enter`, untimed, because a user of the
library would store them so. Imports happen in the provider's own worker process: some of these packages monkey-patch
others on import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..plugin import Provider, Run, Unsupported, check_dtype, installed, require, supported
from ..problem import Problem
from ..targets.rope import RopeProblem
from ..targets.rope_serving import ServingProblem


def vllm_operators(install: str) -> Any:
    """vLLM's operators, torch.ops._C: since 0.33 the first of these modules registers them, before that the second."""
    newer = "vllm._C_stable_libtorch"
    require(newer if installed(newer) else "vllm._C", install)
    return torch.ops._C


class _Peer(Provider):
    """A library's RoPE for q and k, with the rotated part at the front of the head."""

    ops: ClassVar[tuple[str, ...]] = ("rope",)
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    pairings: tuple[str, ...] = ("half",)
    partial = True
    backward = True
    takes = ""  # what it takes instead of the serving engines' arguments
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)

    def build(self, problem: Problem) -> Run:
        rope = supported(self, problem, RopeProblem)
        case = rope.case
        if case.pairing not in self.pairings:
            raise Unsupported(f"pairs features {' or '.join(self.pairings)}, not {case.pairing}")
        if any(rope.start(x) for x in rope.inputs.operands):
            raise Unsupported("rotates the leading features of a head only")
        if not self.partial and case.rotated != case.head_dim:
            raise Unsupported("rotates whole heads only")
        check_dtype(rope.dtype, self.dtypes)
        if problem.task.pass_ != "fwd" and not self.backward:
            raise Unsupported("has no backward")
        if isinstance(rope, ServingProblem):
            return self.serve(rope)
        return self.rope(rope)

    def rope(self, problem: RopeProblem) -> Run:
        raise NotImplementedError

    def serve(self, problem: ServingProblem) -> Run:
        """The serving engines' form, for libraries that support it."""
        raise Unsupported(f"takes {self.takes}, not positions, one cos and sin cache and flat tokens")


def _per_tensor(problem: RopeProblem, rotate: Any, **facts: Any) -> Run:
    """A library that rotates one (B, T, H, D) tensor per call."""
    return Run(
        lambda *xs: [rotate(x) for x in xs],
        lambda *xs: tuple(problem.to_bshd(x) for x in xs),
        lambda ys: tuple(problem.from_bshd(y) for y in ys),
        **facts,
    )


class _TransformerEngine(_Peer):
    module = "transformer_engine"
    packages = ("transformer_engine", "transformer_engine_torch")
    install = "pip install --no-build-isolation 'transformer-engine[pytorch]'"
    pairings = ("half", "interleaved")
    takes = "angles and the first position of each sequence"
    fused = False

    def rope(self, problem: RopeProblem) -> Run:
        apply = require("transformer_engine.pytorch.attention.rope", self.install).apply_rotary_pos_emb
        case = problem.case
        inverse, scaling = case.frequencies()
        if scaling != 1.0:
            raise Unsupported("takes angles, which cannot carry the table's scaling")
        angles = torch.arange(case.rows, device=problem.device)[:, None] * inverse.to(problem.device)
        interleaved = case.pairing == "interleaved"
        # (rows, 1, 1, 2P) in float32; interleaved pairing needs each angle repeated next to itself
        freqs = (angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1))[:, None, None]
        starts = _starts(problem)
        arguments = {
            "tensor_format": "bshd",
            "interleaved": interleaved,
            "fused": self.fused,
            "start_positions": starts,
        }
        return _per_tensor(problem, lambda x: apply(x, freqs, **arguments))


class TransformerEngineUnfused(_TransformerEngine):
    """TransformerEngine's PyTorch formula."""

    name, devices = "transformer_engine-unfused", ("cpu", "cuda")


class TransformerEngineFused(_TransformerEngine):
    """TransformerEngine's CUDA kernel."""

    name, fused = "transformer_engine-fused", True


class Liger(_Peer):
    """liger-kernel: q and k in one launch, in place, gradients as well."""

    name, module, packages = "liger", "liger_kernel", ("liger-kernel",)
    install = "pip install liger-kernel"
    takes = "the rows of cos and sin in the order of the tokens"

    def rope(self, problem: RopeProblem) -> Run:
        function = require("liger_kernel.ops.rope", self.install).LigerRopeFunction
        if len(problem.tensors) != 2:
            raise Unsupported("rotates q and k together, not one alone")
        cos, sin = (t[:, :, 0].contiguous() for t in problem.duplicated(problem.dtype))  # (B | 1, T, 2P)
        return Run(
            lambda q, k: function.apply(q, k, cos, sin),
            lambda *xs: tuple(problem.to_bshd(x).transpose(1, 2) for x in xs),
            lambda ys: tuple(
                problem.from_bshd(y.transpose(1, 2)) for y in ys[:2]
            ),  # some versions also return the table
            in_place=True,
        )


class FlashAttn(_Peer):
    """flash-attn's Triton kernel, out of place; with gradients through the autograd function of the full package."""

    name, module, packages = "flash_attn", "flash_attn", ("flash-attn",)
    install = "pip install flash-attn, or put flash_attn/ops/triton/rotary.py on PYTHONPATH"
    pairings = ("half", "interleaved")
    takes = "cos and sin apart and an offset for each sequence"

    def rope(self, problem: RopeProblem) -> Run:
        cos, sin, offsets = _half_table(problem)
        interleaved = problem.case.pairing == "interleaved"
        if problem.task.pass_ == "fwd":
            kernel = require("flash_attn.ops.triton.rotary", self.install).apply_rotary
            arguments = {"seqlen_offsets": offsets, "interleaved": interleaved}
            return _per_tensor(problem, lambda x: kernel(x, cos, sin, **arguments), backward=False)
        apply = require("flash_attn.layers.rotary", self.install).apply_rotary_emb
        return _per_tensor(problem, lambda x: apply(x, cos, sin, interleaved=interleaved, seqlen_offsets=offsets))


class Quack(_Peer):
    """QuACK's CuTe DSL kernel, out of place."""

    name, module, packages = "quack", "quack", ("quack-kernels", "nvidia-cutlass-dsl")
    install = "pip install quack-kernels"
    pairings = ("half", "interleaved")
    takes = "cos and sin apart and an offset for each sequence"

    def rope(self, problem: RopeProblem) -> Run:
        apply = require("quack.rotary", self.install).apply_rotary_emb
        cos, sin, offsets = _half_table(problem)
        interleaved = problem.case.pairing == "interleaved"
        starts = offsets if isinstance(offsets, Tensor) else None
        return _per_tensor(problem, lambda x: apply(x, cos, sin, interleaved=interleaved, seqlen_offsets=starts))


class Vllm(_Peer):
    """vLLM's CUDA kernel, in place on flat tokens; its cache has the tensors' dtype."""

    name, module, packages = "vllm", "vllm", ("vllm",)
    install = "pip install vllm"
    pairings = ("half", "interleaved")
    backward = False

    def rope(self, problem: RopeProblem) -> Run:
        cache = torch.cat((problem.inputs.cos, problem.inputs.sin), -1).to(problem.dtype)
        return _flat(problem, self.kernel(problem, cache))

    def serve(self, problem: ServingProblem) -> Run:
        return Run(self.kernel(problem, problem.cache(problem.dtype)), in_place=True, backward=False)

    def kernel(self, problem: RopeProblem, cache: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        rotate = vllm_operators(self.install).rotary_embedding
        positions = problem.position_ids().flatten()
        width, neox = problem.case.head_dim, problem.case.pairing == "half"

        def call(q: Tensor, k: Tensor | None = None) -> tuple[Tensor, ...]:
            rotate(positions, q, k, width, cache, neox)
            return (q,) if k is None else (q, k)

        return call


class FlashInfer(_Peer):
    """FlashInfer's CUDA kernel, in place on flat tokens, float32 cache. It reads VECTOR features at a time, also from where
    the second half of the rotated ones begins (`vec_apply_llama_rope_cos_sin`); elsewhere the access faults, and the
    process is lost."""

    name, module, packages = "flashinfer", "flashinfer", ("flashinfer-python",)
    install = "pip install flashinfer-python"
    pairings = ("half", "interleaved")
    backward = False
    dtypes = (torch.bfloat16, torch.float16)
    VECTOR = 8

    def rope(self, problem: RopeProblem) -> Run:
        if len(problem.tensors) != 2:
            raise Unsupported("rotates q and k together, not one alone")
        return _flat(problem, self.kernel(problem, torch.cat((problem.inputs.cos, problem.inputs.sin), -1)))

    def serve(self, problem: ServingProblem) -> Run:
        return Run(self.kernel(problem, problem.cache(torch.float32)), in_place=True, backward=False)

    def kernel(self, problem: RopeProblem, cache: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        half = problem.case.rotated // 2
        if problem.case.pairing == "half" and half % self.VECTOR:
            raise Unsupported(f"takes halves of a multiple of {self.VECTOR} features, not {half}")
        rotate = require("flashinfer.rope", self.install).apply_rope_with_cos_sin_cache_inplace
        positions = problem.position_ids().flatten()
        width, neox = problem.case.head_dim, problem.case.pairing == "half"

        def call(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
            rotate(positions, q, k, width, cache, is_neox=neox)
            return q, k

        return call


class Unsloth(_Peer):
    """unsloth's Triton kernel on (B, H, T, D), in place."""

    name, module, packages = "unsloth", "unsloth", ("unsloth",)
    install = "pip install unsloth"
    partial = False
    takes = "cos and sin apart, each angle twice, and int32 positions"

    def rope(self, problem: RopeProblem) -> Run:
        apply = require("unsloth.kernels.rope_embedding", self.install).fast_rope_embedding
        if len(problem.tensors) != 2:
            raise Unsupported("rotates q and k together, not one alone")
        dtype = problem.dtype
        cos, sin = (torch.cat((t, t), -1).to(dtype) for t in (problem.inputs.cos, problem.inputs.sin))
        running = problem.inputs.positions is None and problem.case.offset == 0
        rows = None if running else problem.position_ids().int()
        return Run(
            lambda q, k: apply(q, k, cos, sin, rows),
            lambda *xs: tuple(problem.to_bshd(x).transpose(1, 2) for x in xs),
            lambda ys: tuple(problem.from_bshd(y.transpose(1, 2)) for y in ys),
            in_place=True,
        )


def _starts(problem: RopeProblem) -> Tensor | None:
    """The first position of every sequence, int32 (B,), unless all start at 0."""
    if problem.inputs.positions is None and problem.case.offset == 0:
        return None
    if problem.inputs.positions is not None and problem.case.seqlen > 1:
        raise Unsupported("takes consecutive positions only, not one per token")
    return problem.position_ids()[:, 0].int().contiguous()


def _half_table(problem: RopeProblem) -> tuple[Tensor, Tensor, Tensor | int]:
    """cos and sin (R, P) in the tensors' dtype, and each sequence's offset into them."""
    starts = _starts(problem)
    cos, sin = problem.inputs.cos.to(problem.dtype), problem.inputs.sin.to(problem.dtype)
    return cos, sin, 0 if starts is None else starts


def _flat(problem: RopeProblem, call: Any) -> Run:
    """A library that takes (tokens, H · D) and writes in place."""

    def enter(*xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(problem.to_bshd(x).flatten(0, 1).flatten(1) for x in xs)

    def leave(ys: Any) -> tuple[Tensor, ...]:
        shapes = (problem.to_bshd(x).shape for x in problem.tensors)
        return tuple(problem.from_bshd(y.view(shape)) for y, shape in zip(ys, shapes, strict=True))

    return Run(call, enter, leave, in_place=True, backward=False)
