"""A non-tensor where a compat function takes a tensor raises an error in the common form."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from fusewise.compat import flash_attn, flashinfer, liger, transformer_engine, transformers, vllm

B, T, H, D = 1, 4, 2, 8
X, QKV, TOKENS = torch.randn(B, T, H, D), torch.randn(B, T, 3, H, D), torch.randn(T, H, D)
COS, SIN = torch.rand(T, D // 2), torch.rand(T, D // 2)
TWICE = torch.rand(1, T, D)
POSITIONS = torch.arange(T)
FREQS = torch.rand(T, 1, 1, D)

CALLS: list[tuple[Any, dict[str, Any]]] = [
    *[
        (f, {"x": X, "cos": COS, "sin": SIN})
        for f in (flash_attn.apply_rotary_emb, flash_attn.apply_rotary_emb_torch, flash_attn.apply_rotary)
    ],
    (flash_attn.apply_rotary_emb_qkv_, {"qkv": QKV, "cos": COS, "sin": SIN}),
    (flash_attn.apply_rotary_emb_kv_, {"kv": QKV[:, :, :2], "cos": COS, "sin": SIN}),
    (transformer_engine.apply_rotary_pos_emb, {"t": X, "freqs": FREQS}),
    (
        transformer_engine.apply_fused_qkv_rotary_pos_emb,
        {"qkv": torch.randn(T, B, H, 24), "q_freqs": FREQS, "k_freqs": FREQS, "qkv_split_arg_list": [8, 8, 8]},
    ),
    (
        vllm.rotary_embedding,
        {"positions": POSITIONS, "query": TOKENS, "key": TOKENS.clone(), "head_size": D, "cos_sin_cache": TWICE[0],
         "is_neox": True},
    ),
    *[
        (f, {"positions": POSITIONS, "query": TOKENS.flatten(1), "key": TOKENS.flatten(1).clone(), "head_size": D,
             "cos_sin_cache": TWICE[0]})
        for f in (flashinfer.apply_rope_with_cos_sin_cache, flashinfer.apply_rope_with_cos_sin_cache_inplace)
    ],
    (flashinfer.apply_rope, {"q": TOKENS, "k": TOKENS, "indptr": torch.tensor([0, T]), "offsets": torch.tensor([0])}),
    (flashinfer.apply_rope_pos_ids, {"q": TOKENS, "k": TOKENS, "pos_ids": POSITIONS}),
    (liger.liger_rotary_pos_emb, {"q": X.mT, "k": X, "cos": TWICE, "sin": TWICE}),
    (liger.liger_rotary_pos_emb_vision, {"q": TOKENS, "k": TOKENS, "cos": TWICE[0], "sin": TWICE[0]}),
    (liger.liger_llama4_vision_rotary_pos_emb, {"query": X, "key": X, "freqs_ci": torch.complex(COS, SIN)}),
    *[
        (f, {"q": X.transpose(1, 2), "k": X.transpose(1, 2), "cos": TWICE, "sin": TWICE})
        for f in (transformers.apply_rotary_pos_emb, transformers.apply_rotary_pos_emb_glm)
    ],
    (transformers.apply_rotary_pos_emb_vision, {"q": TOKENS, "k": TOKENS, "cos": TWICE[0], "sin": TWICE[0]}),
    (transformers.apply_rotary_emb_llama4, {"xq": X, "xk": X, "freqs_cis": torch.complex(COS, SIN)[None]}),
    (
        transformers.apply_multimodal_rotary_pos_emb,
        {"q": X.transpose(1, 2), "k": X.transpose(1, 2), "cos": torch.rand(3, B, T, D), "sin": torch.rand(3, B, T, D),
         "mrope_section": (2, 1, 1)},
    ),
]  # fmt: skip
# (k may be None if the library allows it; then only q is rotated.)
PLACES = [
    pytest.param(function, arguments, name, id=f"{function.__module__.rpartition('.')[2]}.{function.__name__}-{name}")
    for function, arguments in CALLS
    for name in arguments
    if inspect.signature(function).parameters[name].annotation == "Tensor" and name not in ("k", "xk", "key")
]


@pytest.mark.parametrize(("function", "arguments", "name"), PLACES)
def test_none_for_a_tensor(function: Any, arguments: dict[str, Any], name: str) -> None:
    # A missing sin is reported as cos without sin.
    message = r"\w+ must be a torch\.Tensor, got NoneType" if name != "sin" else r".+ must be .+, got \w+"
    with pytest.raises((TypeError, ValueError), match=rf"^\w+: {message}; "):
        function(**{**arguments, name: None})


@pytest.mark.parametrize("function", [vllm.rotary_embedding, flashinfer.apply_rope_with_cos_sin_cache])
def test_a_size_that_is_none(function: Any) -> None:
    arguments = dict(next(arguments for f, arguments in CALLS if f is function))
    with pytest.raises(TypeError, match=r"head_size must be an int, got '8'; "):
        function(**{**arguments, "head_size": "8"})


def test_start_positions_that_are_a_list() -> None:
    function, arguments = next(call for call in CALLS if "qkv_split_arg_list" in call[1])
    with pytest.raises(TypeError, match=r"start_positions must be a torch\.Tensor, got list; "):
        function(**arguments, start_positions=[0])
