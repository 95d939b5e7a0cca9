"""`torch.jit.trace`, under which sizes are tensors, records the functions of every library for any number of tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compat_statement import DEVICE, randn

from fusewise.compat import diffusers, flash_attn, flashinfer, liger, transformer_engine, transformers, vllm

D = 16
CONFIG = SimpleNamespace(hidden_size=24, intermediate_size=40, hidden_act="silu", mlp_bias=True)


def tensors(tokens: int, batch: int) -> dict[str, torch.Tensor]:
    angles = randn(1, tokens, D // 2)
    twice = torch.cat((angles, angles), -1)
    return {
        "q": randn(batch, 4, tokens, D), "k": randn(batch, 2, tokens, D), "x": randn(batch, tokens, 3, D),
        "cos": twice.cos(), "sin": twice.sin(), "half_cos": angles.cos(), "half_sin": angles.sin(),
        "qkv": randn(batch, tokens, 3, 2, D), "flat": randn(tokens, 4 * D), "thd": randn(tokens, 4, D),
        "positions": torch.arange(tokens, device=DEVICE), "freqs": randn(tokens, 1, 1, D), "sbhd": randn(tokens, batch, 3, D),
        "packed": randn(tokens, batch, 3, 4 * D), "hidden": randn(batch, tokens, 24), "cache": torch.ones(16, D, device=DEVICE),
    }  # fmt: skip


def rotate_flat(t: dict[str, torch.Tensor]) -> torch.Tensor:
    vllm.rotary_embedding(t["positions"], t["flat"], None, D, t["cache"], True)
    return t["flat"]


CALLS: dict[str, Any] = {
    "llama": lambda t: transformers.apply_rotary_pos_emb(t["q"], t["k"], t["cos"], t["sin"]),
    "glm": lambda t: transformers.apply_rotary_pos_emb_glm(t["q"], t["k"], t["cos"], t["sin"]),
    "deepseek_v3": lambda t: transformers.apply_rotary_pos_emb_interleave(t["q"], t["k"], t["cos"], t["sin"]),
    "deepseek_v4": lambda t: transformers.apply_rotary_pos_emb_deepseek_v4(
        t["q"], t["half_cos"][..., :4], t["half_sin"][..., :4]
    ),
    "gemma4_vision": lambda t: transformers.apply_multidimensional_rope(
        t["x"], t["cos"], t["sin"], t["half_cos"][..., :2]
    ),
    "dinov3": lambda t: transformers.apply_rotary_pos_emb_dinov3(t["q"], t["k"], t["cos"][0, 2:], t["sin"][0, 2:]),
    "rows": lambda t: transformers.apply_rotary_pos_emb(t["q"], t["k"], t["cos"][0], t["sin"][0], t["positions"][None]),
    "llama4_vision": lambda t: transformers.vision_apply_rotary_emb(
        t["x"], t["x"], torch.complex(t["half_cos"], t["half_sin"])[0, :, None]
    ),
    "liger": lambda t: liger.liger_rotary_pos_emb(t["q"], t["k"], t["cos"], t["sin"]),
    "flash_attn": lambda t: flash_attn.apply_rotary_emb(t["x"], t["half_cos"][0], t["half_sin"][0]),
    "flash_attn_qkv": lambda t: flash_attn.apply_rotary_emb_qkv_(t["qkv"], t["half_cos"][0], t["half_sin"][0]),
    "flashinfer": lambda t: flashinfer.apply_rope_pos_ids(t["thd"], t["thd"], t["positions"]),
    "flashinfer_cache": lambda t: flashinfer.apply_rope_with_cos_sin_cache(
        t["positions"], t["flat"], t["flat"].clone(), D, t["cache"]
    ),
    "te": lambda t: transformer_engine.apply_rotary_pos_emb(t["sbhd"], t["freqs"]),
    "te_strided": lambda t: transformer_engine.apply_rotary_pos_emb(t["sbhd"].transpose(0, 1), t["freqs"], "bshd"),
    "te_qkv": lambda t: transformer_engine.apply_fused_qkv_rotary_pos_emb(
        t["packed"], t["freqs"], t["freqs"], [2 * D, D, D]
    ),
    "te_angles": lambda t: transformer_engine.RotaryPositionEmbedding(D).to(DEVICE)(t["sbhd"].shape[0]),
    "vllm": rotate_flat,
    "diffusers": lambda t: diffusers.apply_rotary_emb(t["q"], (t["cos"][0], t["sin"][0])),
    "diffusers_grid": lambda t: diffusers.rope_apply(
        t["x"],
        torch.ones(t["x"].shape[0], 3, dtype=torch.int64, device=DEVICE),
        torch.complex(t["half_cos"], t["half_sin"])[0],
    ),
    "gate": lambda t: transformer_engine.GEGLU()(t["hidden"]),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_trace_serves_other_sizes(name: str) -> None:
    def function(*values: torch.Tensor) -> Any:
        return CALLS[name](dict(zip(first, values, strict=True)))

    first, second = tensors(5, 2), tensors(9, 3)
    traced = torch.jit.trace(function, tuple(x.clone() for x in first.values()))
    found = traced(*(x.clone() for x in second.values()))
    torch.testing.assert_close(found, function(*(x.clone() for x in second.values())))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.(save|load)` is deprecated")
@pytest.mark.parametrize("kind", [transformers.LlamaMLP, transformers.Phi3MLP, liger.LigerTiledSwiGLUMLP])
def test_a_traced_mlp_can_be_saved_and_trained(kind: Any, tmp_path: Path) -> None:
    mlp = kind(CONFIG).to(DEVICE)
    torch.jit.save(torch.jit.trace(mlp, randn(2, 5, 24)), tmp_path / "mlp.pt")
    loaded = torch.jit.load(tmp_path / "mlp.pt")
    x = randn(3, 9, 24)
    ys = loaded(x), mlp(x)
    torch.testing.assert_close(*ys)
    for y in ys:
        y.square().sum().backward()
    expected = {name: p.grad for name, p in mlp.named_parameters()}
    torch.testing.assert_close({name: p.grad for name, p in loaded.named_parameters()}, expected)
