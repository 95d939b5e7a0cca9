"""The adapters, against stand-ins that follow each library's documented contract in plain torch.

The libraries need a GPU. This covers what an adapter passes and how it reads the result: layout, table form, positions,
pairing, gradients.
"""

import dataclasses
import sys
import types

import pytest
import torch
from adapters import is_right_or_refuses

from fusewise.lab.problem import Task
from fusewise.lab.providers import rope_peers as peers
from fusewise.lab.targets import rope as target
from fusewise.ops.rope.cases import case

CASES = {
    "train": dataclasses.replace(case("llama-3-8b-train"), name="train", batch=2, seqlen=6),
    "decode": dataclasses.replace(case("llama-3-8b-decode-b64"), name="decode", batch=4, table_rows=64),
    "partial": dataclasses.replace(case("phi-2-train"), name="partial", batch=2, seqlen=6),
    "interleaved": dataclasses.replace(case("glm-4-9b-train"), name="interleaved", batch=2, seqlen=6),
    "narrow": dataclasses.replace(case("gpt-neox-20b-train"), name="narrow", batch=2, seqlen=6),  # 24 of 96 features
    "offset": dataclasses.replace(case("cube-16"), name="offset", positions="offset", offset=5, kv_heads=2),
    "trailing": dataclasses.replace(case("cube-8"), name="trailing", rotary_dim=4, rotary_start=-4),
    "alone": case("cube-8"),
}


def turned(x, cos, sin, half):
    """RoPE of the leading features; cos and sin (…, P) broadcast against x (…, D)."""
    width = 2 * cos.shape[-1]
    where = (slice(0, width // 2), slice(width // 2, width)) if half else (slice(0, width, 2), slice(1, width, 2))
    a, b = (x[..., s].float() for s in where)
    y = x.clone()
    y[..., where[0]] = (a * cos - b * sin).to(x.dtype)
    y[..., where[1]] = (b * cos + a * sin).to(x.dtype)
    return y


class Turn(torch.autograd.Function):
    """Out of place, differentiable: (B, T, H, D) with half tables (R, P) and offsets (B,) or None."""

    @staticmethod
    def forward(ctx, x, cos, sin, half, offsets):
        assert x.stride(-1) == 1
        rows = torch.arange(x.shape[1])[None] + (0 if offsets is None else offsets[:, None])
        ctx.table = (cos[rows].float()[:, :, None], sin[rows].float()[:, :, None], half)
        return turned(x, *ctx.table)

    @staticmethod
    def backward(ctx, g):
        cos, sin, half = ctx.table
        return turned(g, cos, -sin, half), None, None, None, None


class InPlace(torch.autograd.Function):
    """Liger's conventions: (B, H, T, D), q, k and the gradients overwritten, tables (1 | B, T, 2P) of which half is
    read.
    """

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        half = cos.shape[-1] // 2
        ctx.table = (cos[:, None, :, :half].float(), sin[:, None, :, :half].float())
        for x in (q, k):
            assert x.transpose(1, 2).is_contiguous()
            x.copy_(turned(x, *ctx.table, True))
        return q, k

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.table
        dq, dk = (g.copy_(turned(g, cos, -sin, True)) for g in (dq, dk))
        return dq, dk, None, None


def flat(positions, q, k, head_size, cache, half):
    """vLLM's and FlashInfer's conventions: (tokens, H · D) overwritten, cache [cos | sin] indexed by position."""
    pairs = cache.shape[-1] // 2
    cos, sin = cache[positions].float()[:, None].split(pairs, dim=-1)
    for x in (q, k) if k is not None else (q,):
        assert x.is_contiguous()
        heads = x.view(x.shape[0], -1, head_size)
        heads.copy_(turned(heads, cos, sin, half))


def transformer_engine(t, freqs, tensor_format, start_positions, interleaved, fused):
    assert (tensor_format, freqs.dtype, freqs.shape[1:3]) == ("bshd", torch.float32, (1, 1))
    angles = freqs[:, 0, 0, ::2] if interleaved else freqs[:, 0, 0, : freqs.shape[-1] // 2]
    return Turn.apply(t, angles.cos(), angles.sin(), not interleaved, start_positions)


def tensor_offsets(x, cos, sin, interleaved=False, seqlen_offsets=None):
    offsets = torch.full((x.shape[0],), seqlen_offsets) if isinstance(seqlen_offsets, int) else seqlen_offsets
    assert cos.dtype == x.dtype
    return Turn.apply(x, cos, sin, not interleaved, offsets)


def unsloth(q, k, cos, sin, indices):
    if indices is None:
        indices = torch.arange(q.shape[2]).repeat(q.shape[0], 1)
    return InPlace.apply(q, k, cos[indices], sin[indices])


STAND_INS = {
    "transformer_engine.pytorch.attention.rope": {"apply_rotary_pos_emb": transformer_engine},
    "liger_kernel.ops.rope": {"LigerRopeFunction": InPlace},
    "flash_attn.ops.triton.rotary": {"apply_rotary": tensor_offsets},
    "flash_attn.layers.rotary": {"apply_rotary_emb": tensor_offsets},
    "quack.rotary": {"apply_rotary_emb": tensor_offsets},
    "unsloth.kernels.rope_embedding": {"fast_rope_embedding": unsloth},
    "flashinfer.rope": {
        "apply_rope_with_cos_sin_cache_inplace": lambda positions, q, k, size, cache, is_neox: flat(
            positions, q, k, size, cache, is_neox
        )
    },
    "vllm._C": {},
}


@pytest.fixture(scope="module")
def _vllm_operator():
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(
        "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox) -> ()"
    )
    library.impl("rotary_embedding", flat, "CPU")
    yield
    library._destroy()


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch, _vllm_operator):
    for path, functions in STAND_INS.items():
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        for name, function in functions.items():
            setattr(sys.modules[path], name, function)
    monkeypatch.setattr(target, "case", CASES.__getitem__)


PROVIDERS = [
    peers.TransformerEngineUnfused, peers.TransformerEngineFused, peers.Liger, peers.FlashAttn, peers.Vllm,
    peers.FlashInfer, peers.Quack, peers.Unsloth,
]  # fmt: skip
UNSUPPORTED = {
    ("liger", "interleaved"), ("unsloth", "interleaved"), ("unsloth", "partial"), ("liger", "alone"),
    ("unsloth", "alone"), ("flashinfer", "alone"), ("unsloth", "narrow"), ("flashinfer", "narrow"),
}  # fmt: skip


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("peer", PROVIDERS, ids=lambda p: p.name)
def test_an_adapter_is_right_or_says_that_it_cannot(peer, name, pass_):
    problem = target.RopeProblem(Task("rope", name, "bf16", pass_, "cpu", 0))
    cannot = (peer.name, name) in UNSUPPORTED or name == "trailing" or (pass_ == "bwd" and not peer.backward)
    is_right_or_refuses(peer, problem, cannot)


def test_what_a_library_lacks_is_its_reason(monkeypatch):
    monkeypatch.delitem(sys.modules, "quack.rotary")
    monkeypatch.delitem(sys.modules, "quack")
    problem = target.RopeProblem(Task("rope", "alone", "bf16", "fwd", "cpu", 0))
    with pytest.raises(Exception, match=r"import quack.rotary failed: .*; pip install quack-kernels"):
        peers.Quack().build(problem)
