"""RoPE configurations of nine published models, as cases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ._case import RopeCase


@dataclass(frozen=True, kw_only=True)
class _Model:
    """The fields of a published configuration (config.json of the named checkpoint) that determine its RoPE."""

    checkpoint: str
    heads: int
    kv_heads: int
    head_dim: int
    context: int  # max_position_embeddings
    rope: Mapping[str, Any]
    dtype: str = "bf16"  # torch_dtype
    rotary_dim: int = 0
    rotary_start: int = 0
    k_head_dim: int = 0
    pairing: Literal["half", "interleaved", "interleaved_to_half"] = "half"
    train: tuple[int, int] = (4, 4096)  # batch and sequence length: 16384 tokens per device and step


# Values: the checkpoint's config.json. Mistral and Qwen2.5 publish no scaling of the frequencies for their native context.
MODELS = {
    "llama-3-8b": _Model(
        checkpoint="meta-llama/Meta-Llama-3-8B",
        heads=32,
        kv_heads=8,
        head_dim=128,  # hidden_size 4096 / 32
        context=8192,
        rope={"rope_type": "default", "rope_theta": 500000.0},
    ),
    "gemma-7b": _Model(
        checkpoint="google/gemma-7b",
        heads=16,
        kv_heads=16,
        head_dim=256,
        context=8192,
        rope={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "gemma-2-9b": _Model(
        checkpoint="google/gemma-2-9b",
        heads=16,
        kv_heads=8,
        head_dim=256,
        context=8192,
        rope={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "qwen2.5-7b": _Model(
        checkpoint="Qwen/Qwen2.5-7B",
        heads=28,
        kv_heads=4,
        head_dim=128,  # hidden_size 3584 / 28
        context=131072,
        rope={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "mistral-7b": _Model(
        checkpoint="mistralai/Mistral-7B-v0.3",
        heads=32,
        kv_heads=8,
        head_dim=128,  # hidden_size 4096 / 32
        context=32768,
        rope={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "phi-2": _Model(
        checkpoint="microsoft/phi-2",
        heads=32,
        kv_heads=32,
        head_dim=80,  # hidden_size 2560 / 32
        rotary_dim=32,  # partial_rotary_factor 0.4
        context=2048,
        rope={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4},
        dtype="fp16",
        train=(8, 2048),
    ),
    "gpt-neox-20b": _Model(
        checkpoint="EleutherAI/gpt-neox-20b",
        heads=64,
        kv_heads=64,
        head_dim=96,  # hidden_size 6144 / 64
        rotary_dim=24,  # rotary_pct 0.25
        context=2048,
        rope={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        dtype="fp16",
        train=(8, 2048),
    ),
    "glm-4-9b": _Model(
        checkpoint="THUDM/glm-4-9b-chat",
        heads=32,
        kv_heads=2,  # multi_query_group_num
        head_dim=128,  # kv_channels
        rotary_dim=64,  # half of kv_channels, adjacent pairs
        context=131072,
        rope={"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},  # 10000 * rope_ratio 500
        pairing="interleaved",
    ),
    "deepseek-v3": _Model(
        checkpoint="deepseek-ai/DeepSeek-V3",
        heads=128,
        kv_heads=1,  # one key of qk_rope_head_dim features, shared by all heads
        head_dim=192,  # qk_nope_head_dim 128, then qk_rope_head_dim 64
        k_head_dim=64,
        rotary_dim=64,
        rotary_start=-64,
        context=163840,
        rope={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        pairing="interleaved_to_half",  # adjacent pairs in the weights, halves in the published code's output
        train=(2, 4096),
    ),
}


def model_case(
    name: str,
    suffix: str,
    batch: int,
    seqlen: int,
    regime: Literal["train", "prefill", "decode"],
) -> RopeCase:
    model = MODELS[name]
    return RopeCase(
        name=f"{name}-{suffix}",
        model=model.checkpoint,
        regime=regime,
        batch=batch,
        seqlen=seqlen,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        k_head_dim=model.k_head_dim,
        rotary_dim=model.rotary_dim,
        rotary_start=model.rotary_start,
        pairing=model.pairing,
        # a decode step rotates one token of each sequence, anywhere in the model's context up to 8192
        positions="ids" if regime == "decode" else "arange",
        table_rows=min(model.context, 8192) if regime == "decode" else 0,
        rope_parameters=model.rope,
        dtypes=(model.dtype,),
        passes=("fwd", "bwd") if regime == "train" else ("fwd",),
    )


def serving_case(name: str, batch: int, seqlen: int = 1) -> RopeCase:
    """A decode step of `batch` sequences, or a prefill chunk of one sequence, as a serving engine calls RoPE."""
    regime: Literal["prefill", "decode"] = "decode" if seqlen == 1 else "prefill"
    suffix = f"serve-decode-b{batch}" if regime == "decode" else f"serve-prefill-{seqlen}"
    found = model_case(name, suffix, batch, seqlen, regime)
    rows = max(seqlen, min(MODELS[name].context, 8192))  # the cache has the model's length, whatever the call is
    return replace(found, serving=True, layout="thd", table_rows=rows)
