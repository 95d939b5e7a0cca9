"""RotaryEmbedding.from_config: reads old and new configurations; checked against the models of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusewise.nn import RotaryEmbedding
from fusewise.ops.rope import rope, tables

from .test_rope import near, qk, rotated


def test_from_config_reads_current_and_older_attributes() -> None:
    current = SimpleNamespace(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=4096,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    older = SimpleNamespace(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=4096, rotary_emb_base=5000.0, rotary_pct=0.5,
        rope_scaling={"type": "linear", "factor": 4.0},
    )  # fmt: skip
    expected, _ = tables.linear(rotary_dim=8, base=5000.0, factor=4.0)
    for config in (current, older):
        module = RotaryEmbedding.from_config(config, table="cos_sin")
        assert (module.head_dim, module.rotary_dim, module.max_positions) == (16, 8, 4096)
        assert torch.equal(module.inv_freq, expected)
    plain = RotaryEmbedding.from_config(SimpleNamespace(head_dim=32, rope_scaling=None, rope_theta=1e6))
    assert torch.equal(plain.inv_freq, tables.default(rotary_dim=32, base=1e6)[0])
    factors = {"short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
    beside = SimpleNamespace(
        head_dim=16, max_position_embeddings=4096, original_max_position_embeddings=128,
        rope_scaling={"type": "su", **factors},
    )  # fmt: skip
    expected, scaling = tables.longrope(rotary_dim=16, original_max_position_embeddings=128, factor=32.0, **factors)
    module = RotaryEmbedding.from_config(beside)
    assert torch.equal(module.inv_freq, expected) and module.scaling == scaling > 1


def test_from_config_of_mla_rotates_the_trailing_part() -> None:
    config = SimpleNamespace(
        head_dim=64, qk_rope_head_dim=64, qk_nope_head_dim=128, rope_interleave=True, max_position_embeddings=163840,
        rope_scaling={"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
    )  # fmt: skip
    module = RotaryEmbedding.from_config(config)
    assert (module.head_dim, module.rotary_dim) == (192, 64)
    assert module.options["rotary_start"] == -64 and module.options["pairing"] == "interleaved_to_half"
    q = qk(head_dim=192)[0]
    assert torch.equal(module(q)[..., :128], q[..., :128])
    shared = qk(head_dim=64)[1]
    assert torch.equal(module(shared), rope(shared, inv_freq=module.inv_freq, scale=module.scaling, pairing="interleaved_to_half"))  # fmt: skip
    config.rope_interleave = False
    assert RotaryEmbedding.from_config(config).options["pairing"] == "half"


def test_from_config_by_layer_type() -> None:
    config = SimpleNamespace(
        head_dim=32,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    )
    local = RotaryEmbedding.from_config(config, layer_type="sliding_attention")
    assert torch.equal(local.inv_freq, tables.default(rotary_dim=32)[0])
    full = RotaryEmbedding.from_config(config, layer_type="full_attention", head_dim=64)
    assert (full.head_dim, full.rotary_dim) == (64, 64) and full.inv_freq.count_nonzero() == 8
    for other in (None, "other"):
        message = rf"^RotaryEmbedding: layer_type must be a key of rope_parameters .*got {other!r}; use one of sliding"
        with pytest.raises(ValueError, match=message):
            RotaryEmbedding.from_config(config, layer_type=other)
    flat = SimpleNamespace(head_dim=32, rope_parameters={"rope_theta": 1e4})
    with pytest.raises(ValueError, match=r"layer_type must be a key .*got 'full_attention'; use None"):
        RotaryEmbedding.from_config(flat, layer_type="full_attention")


@pytest.mark.parametrize(
    ("config", "options", "error"),
    [
        (SimpleNamespace(text_config=SimpleNamespace(head_dim=32)), {}, "got SimpleNamespace without; pass its text_config"),
        (SimpleNamespace(text_config=SimpleNamespace(rope_theta=1e6)), {"head_dim": 32}, "pass its text_config"),
        (SimpleNamespace(hidden_size=64), {}, "config must have head_dim, or hidden_size and num_attention_heads, got .*; pass head_dim="),
        ({"head_dim": 32, "rope_theta": 1e6}, {"head_dim": 32}, "config must be an object .*, got dict; pass model.config"),
        (torch.nn.Linear(2, 2), {"head_dim": 32}, "config must be an object .*, got Linear; pass model.config"),
    ],
)  # fmt: skip
def test_from_config_refuses_what_does_not_describe_the_heads(config: Any, options: dict[str, Any], error: str) -> None:
    """Otherwise the frequencies would silently be the defaults."""
    with pytest.raises((TypeError, ValueError), match=f"^RotaryEmbedding: .*{error}"):
        RotaryEmbedding.from_config(config, **options)


def test_from_config_multimodal_sections() -> None:
    config = SimpleNamespace(head_dim=16, rope_scaling={"type": "mrope", "mrope_section": [4, 2, 2]})
    module = RotaryEmbedding.from_config(config)
    q = qk()[0]
    positions = torch.arange(6).expand(3, 6)
    near(module(q, None, positions), rotated(q, torch.arange(6), module.inv_freq))


def _transformers(name: str, **fields: Any) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    config_name = {"llama": "LlamaConfig", "phi": "PhiConfig", "phi3": "Phi3Config"}[name]
    return modeling, getattr(transformers, config_name)(**fields)


_SMALL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 16, "long_factor": [4.0] * 16}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {**_SMALL, "rope_parameters": _LLAMA3}),
        ("phi", {**_SMALL, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("phi3", {**_SMALL, "original_max_position_embeddings": 128, "rope_parameters": _LONGROPE, "pad_token_id": 0}),
    ],
)
def test_from_config_rotates_as_the_transformers_model_does(name: str, fields: dict[str, Any]) -> None:
    modeling, config = _transformers(name, **fields)
    tokens = 100
    q = torch.randn(2, 4, tokens, 32, generator=torch.Generator().manual_seed(0))
    theirs = next(getattr(modeling, n) for n in dir(modeling) if n.endswith("RotaryEmbedding"))(config)
    cos, sin = theirs(q, torch.arange(tokens)[None])
    width = cos.shape[-1]
    expected, _ = modeling.apply_rotary_pos_emb(q[..., :width], q[..., :width], cos, sin)
    module = RotaryEmbedding.from_config(config, layout="bhsd")
    assert module.rotary_dim == width
    # Their angles are float32 products, off by half an ulp of the largest, 64 to 127: 2^-18.
    torch.testing.assert_close(module(q)[..., :width], expected, rtol=0, atol=2.0**-18 * 2 * q.abs().max().item())
    assert torch.equal(module(q)[..., width:], q[..., width:])


# Model, configuration class, key of its rope_parameters, head dimension, start of the rotated part.
_PARTS = [
    ("deepseek_v2", "DeepseekV2Config", None, 192, -64),
    ("deepseek_v3", "DeepseekV3Config", None, 192, -64),
    ("mistral4", "Mistral4Config", None, 128, -64),  # its partial_rotary_factor covers the whole head
    ("minicpm3", "MiniCPM3Config", None, 96, -32),
    ("glm4_moe_lite", "Glm4MoeLiteConfig", None, 256, -64),
    ("deepseek_v4", "DeepseekV4Config", "main", 512, -64),  # has no qk_nope_head_dim
    ("deepseek_v4", "DeepseekV4Config", "compress", 512, -64),
    ("dots3_note", "Dots3NoteTextConfig", "indexed_attention", 192, -64),  # layers of two widths
    ("dots3_note", "Dots3NoteTextConfig", "sliding_attention", 256, -64),
    ("gemma4", "Gemma4TextConfig", "sliding_attention", 256, 0),
    ("gemma4", "Gemma4TextConfig", "full_attention", 512, 0),
    ("neomme", "NeoMMEConfig", "sliding_attention", 64, 0),
]


@pytest.mark.parametrize(("model", "name", "layer_type", "head_dim", "start"), _PARTS)
def test_from_config_has_the_frequencies_of_the_transformers_model(
    model: str, name: str, layer_type: str | None, head_dim: int, start: int
) -> None:
    modeling = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    config = getattr(modeling, name)()
    theirs = getattr(modeling, name.replace("Config", "RotaryEmbedding"))(config)
    expected = getattr(theirs, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
    ours = RotaryEmbedding.from_config(config, layer_type=layer_type)
    assert (ours.head_dim, ours.options["rotary_start"], ours.rotary_dim) == (head_dim, start, 2 * len(expected))
    torch.testing.assert_close(ours.inv_freq, expected, rtol=1e-5, atol=0)


def test_from_config_of_ernie_rotates_text_and_refuses_its_sections() -> None:
    """Its model reorders the frequencies by axis and undoes this in its tables; what remains is the axis of a pair."""
    modeling = pytest.importorskip("transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe")
    config = modeling.Ernie4_5_VLMoeTextConfig(hidden_size=512, num_attention_heads=4, num_key_value_heads=4)
    q = torch.randn(2, 4, 10, 128, generator=torch.Generator().manual_seed(0))
    theirs = modeling.Ernie4_5_VLMoeTextRotaryEmbedding(config)
    expected, _ = modeling.apply_rotary_pos_emb(q, q, *theirs(q, torch.arange(10).expand(3, 1, 10)))
    ours = RotaryEmbedding.from_config(config, layout="bhsd", pairing="interleaved")
    torch.testing.assert_close(ours(q), expected)
    config.rope_parameters["mrope_section"] = [22, 22, 20]
    with pytest.raises(
        ValueError, match=r"^RotaryEmbedding: mrope_section must be .*, got that of ernie4_5_vl_moe_text"
    ):
        RotaryEmbedding.from_config(config)
