"""Layers of fusewise.compat.vllm: which calls of get_rope share one, and on which device their tables are."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from compat_statement import DEVICE, randn
from torch import Tensor

from fusewise.compat import vllm
from fusewise.compat._vllm_get_rope import _LAYERS as LAYERS
from fusewise.compat.vllm import get_rope

N, HQ, HK, D, BASE, ROWS = 9, 4, 2, 32, 10000.0, 60

SETTINGS: list[dict[str, Any]] = [
    {"head_size": D, "max_position": 20},
    {"head_size": 16, "max_position": 20},
    {"head_size": D, "max_position": 21},
    {"head_size": D, "max_position": 20, "is_neox_style": False},
    {"head_size": D, "max_position": 20, "dtype": torch.bfloat16},
    {"head_size": D, "max_position": 20, "rope_parameters": {"rope_theta": 500.0}},
    {"head_size": D, "max_position": 20, "rope_parameters": {"partial_rotary_factor": 0.5}},
    {"head_size": D, "max_position": 20, "rope_parameters": {"rope_type": "linear", "factor": [2.0]}},
    {"head_size": D, "max_position": 20, "rope_parameters": {"mrope_section": [4, 6, 6]}},
    {"head_size": D, "max_position": 20, "rope_parameters": {"mrope_section": [6, 5, 5]}},
    {
        "head_size": D, "max_position": 20, "rope_parameters": {"mrope_section": [4, 6, 6]},
        "mrope_positions_factor": 1,
    },
]  # fmt: skip


def test_the_same_arguments_have_the_same_layer() -> None:
    LAYERS.clear()
    layers = [get_rope(**setting) for setting in SETTINGS]
    assert len(set(map(id, layers))) == len(layers)
    again = [get_rope(**{**s, "rope_parameters": dict(s.get("rope_parameters", {})) or None}) for s in SETTINGS]
    assert all(x is y for x, y in zip(layers, again, strict=True))
    assert get_rope(D, 20, dtype=torch.float32) is layers[0]
    older = get_rope(D, 20, True, {"type": "linear", "factor": 2.0})
    assert torch.equal(older.cos_sin_cache, layers[7].cos_sin_cache)
    assert layers[-1].cos_sin_cache.shape[0] == 20


def test_a_layer_is_of_the_default_device_and_of_real_memory() -> None:
    LAYERS.clear()
    with torch.device("meta"):
        assert get_rope(D, 20).cos_sin_cache.is_meta
    with torch._subclasses.FakeTensorMode():
        assert type(get_rope(D, 21).cos_sin_cache) is not Tensor
    for rows in (20, 21):
        layer = get_rope(D, rows)
        assert type(layer.cos_sin_cache) is Tensor and not layer.cos_sin_cache.is_meta
    with torch._subclasses.FakeTensorMode():  # not that layer, which fake tensors cannot be mixed with
        assert type(get_rope(D, 21).cos_sin_cache) is not Tensor
    assert get_rope(D, 21) is layer


def test_a_layer_made_in_inference_mode_serves_gradients() -> None:
    LAYERS.clear()
    with torch.inference_mode():
        layer = get_rope(D, ROWS, True, {"mrope_section": [4, 6, 6]}).to(DEVICE)
    leaf, positions = randn(N, HQ * D).requires_grad_(), torch.arange(N, device=DEVICE)
    layer(positions, leaf)[0].sum().backward()
    layer(positions.expand(3, N), leaf * 1)[0].sum().backward()
    assert leaf.grad is not None


class Elsewhere(Tensor):
    """A tensor that says to be on another device; `moves` counts its copies to that of a query."""

    device = torch.device("meta")
    moves = 0

    def to(self, *_: Any) -> Tensor:  # type: ignore[override]
        Elsewhere.moves += 1
        return self.as_subclass(Tensor).clone()


LONGROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 25, "short_factor": [1.5] * (D // 2), "long_factor": [2.0] * (D // 2),
}  # fmt: skip
OF_AXES = {"mrope_section": [4, 6, 6]}
DEEPSEEK = {"rope_type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 25}


@pytest.mark.parametrize(
    ("parameters", "axes", "options"),
    [
        ({}, (), {}), (LONGROPE, (), {}), (OF_AXES, (3,), {}),
        ({"rope_type": "openpangu", **OF_AXES, "mrope_interleaved": True}, (3,), {}),
        (DEEPSEEK, (), {}),
        ({}, (), {"dual_chunk_attention_config": {"chunk_size": 20, "local_size": 4}}),
    ],
)  # fmt: skip
def test_a_table_moves_once_to_the_device_of_the_queries(parameters: Any, axes: Any, options: Any) -> None:
    """As in vLLM. It remains a buffer, and one moved in inference mode serves gradients."""
    LAYERS.clear()
    layer = get_rope(D, ROWS, True, parameters, **options).to(DEVICE)
    positions, q, k = torch.arange(N, device=DEVICE).expand(*axes, N), randn(N, HQ, D), randn(N, HK, D)
    flat = (lambda x: x.flatten(1)) if "short_factor" in parameters else torch.clone
    expected = layer(positions, flat(q), flat(k))
    buffers = dict(layer.named_buffers())
    for name, table in buffers.items():
        setattr(layer, name, table.as_subclass(Elsewhere))
    Elsewhere.moves = 0
    with torch.inference_mode():
        moved = layer(positions, flat(q), flat(k))
    assert all(map(torch.equal, moved, expected))
    assert Elsewhere.moves == len(buffers) == len(dict(layer.named_buffers())) and not layer.state_dict()
    leaf = q.clone().requires_grad_()
    layer(positions, flat(leaf * 1), flat(k))[0].sum().backward()
    assert leaf.grad is not None and Elsewhere.moves == len(buffers)
    LAYERS.clear()


@pytest.mark.parametrize("fake", [False, True])
def test_a_call_without_data_leaves_the_table(fake: bool) -> None:
    elsewhere = "xpu" if fake else "meta"
    layer = vllm.RotaryEmbedding(D, D, ROWS, BASE, True, torch.float32)
    table = layer.cos_sin_cache
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    with mode:
        layer(torch.arange(N, device=elsewhere), torch.empty(N, HQ * D, device=elsewhere))
    assert layer.cos_sin_cache is table
