"""Two-layer models of transformers with random weights, and what calls of them use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 2,
}  # fmt: skip
NO_GATE = "it has no modules gate_proj and up_proj, or gate_up_proj, before down_proj"
# model: configuration, replacement of its rotation function, outcome for its MLP
FAMILIES: dict[str, tuple[dict[str, Any], str, str]] = {
    "Llama": ({**GROUPED, "mlp_bias": True}, "apply_rotary_pos_emb", "silu"),
    "Mistral": (GROUPED, "apply_rotary_pos_emb", "silu"),
    "Qwen2": (GROUPED, "apply_rotary_pos_emb", "silu"),
    "Qwen3": (HEADS, "apply_rotary_pos_emb", "silu"),
    "Gemma": (HEADS, "apply_rotary_pos_emb", "gelu_tanh"),
    "Gemma2": (HEADS, "apply_rotary_pos_emb", "gelu_tanh"),
    "Phi3": ({**GROUPED, "partial_rotary_factor": 0.5}, "apply_rotary_pos_emb", "silu"),
    "Glm": (HEADS, "apply_rotary_pos_emb_glm", "silu"),
    "Cohere": (GROUPED, "apply_rotary_pos_emb_interleaved", "silu"),
    "GPTNeoX": (SMALL, "apply_rotary_pos_emb", NO_GATE),
    "GPTJ": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 50},
        "apply_rotary_pos_emb_gptj",
        NO_GATE,
    ),
    "DeepseekV2": ({**GROUPED, **LATENT}, "apply_rotary_emb_deepseek_v2", "silu"),
    "GPT2": ({"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50}, "", NO_GATE),
}
# Qwen2.5 shares its class with Qwen2, Llama 2 with Llama 3.
TOKENS = torch.arange(20).view(2, 10) + 3


def build(family: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[family][0], **options})
    causal = {"GPTNeoX": "GPTNeoXForCausalLM", "GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    model: nn.Module = getattr(transformers, causal)(config).eval()  # no dropout
    return model


def forwards(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the fusewise operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusewise":
            self.calls.append(func.name())
        return func(*args, **(kwargs or {}))
