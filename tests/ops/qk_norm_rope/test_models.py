"""The conventions of published models: their norm modules and rotary functions against one qk_norm_rope call."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import fusewise

pytest.importorskip("transformers")

B, T, H, KV, D = 2, 5, 4, 2, 16

# The norm module, whether it normalizes all heads together, and the equivalent arguments.
MODELS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "qwen3": ("Qwen3RMSNorm", False, {}),
    "qwen3_moe": ("Qwen3MoeRMSNorm", False, {}),
    "gemma3": ("Gemma3RMSNorm", False, {"weight_offset": 1.0}),
    "qwen3_next": ("Qwen3NextRMSNorm", False, {"weight_offset": 1.0, "rotary_dim": D // 4}),
    "olmo2": ("Olmo2RMSNorm", True, {"norm": "all"}),
    "olmoe": ("OlmoeRMSNorm", True, {"norm": "all"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_served(name: str) -> None:
    norm_name, whole, options = MODELS[name]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    hidden = torch.randn(B, T, (H + KV) * D)
    q, k = hidden.split([H * D, KV * D], dim=-1)
    norms = [getattr(module, norm_name)(width, eps=1e-5) for width in ((H * D, KV * D) if whole else (D, D))]
    for norm in norms:
        torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    width = options.get("rotary_dim", D)
    angles = torch.outer(torch.arange(T, dtype=torch.float64), 10000.0 ** -(torch.arange(0, width, 2) / width)).float()
    cos, sin = (torch.cat((x, x), -1).expand(B, T, width) for x in (angles.cos(), angles.sin()))

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, D)).transpose(1, 2)  # the layout of attention: (B, H, T, D)

    if whole:
        normed = [heads(norm(x)) for norm, x in zip(norms, (q, k), strict=True)]
    else:
        normed = [norm(heads(x)) for norm, x in zip(norms, (q, k), strict=True)]
    want = module.apply_rotary_pos_emb(*normed, cos, sin)
    weights = [norm.weight for norm in norms]
    got = fusewise.qk_norm_rope(heads(q), heads(k), *weights, cos, sin, layout="bhsd", eps=1e-5, **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    dys = [torch.randn_like(y) for y in want]
    of_ours = torch.autograd.grad(got, weights, dys)
    of_theirs = torch.autograd.grad(want, weights, dys)
    for a, b in zip(of_ours, of_theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
