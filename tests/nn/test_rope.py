"""RotaryEmbedding: what it hands to the op, how it keeps frequencies and tables, and what it reads from configurations."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusewise.nn import RotaryEmbedding
from fusewise.ops.rope import rope, tables

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 64}


def qk(tokens: int = 6, head_dim: int = 16, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shape = (2, tokens, 4, head_dim)
    q = torch.randn(shape, generator=generator).to(dtype)
    return q, torch.randn(shape, generator=generator).to(dtype)[:, :, :2]


def rotated(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, scaling: float = 1.0) -> torch.Tensor:
    """Half pairing over the leading features, written out in float64."""
    angles = positions.double()[..., None, None] * frequencies.double()
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    pairs = len(frequencies)
    a, b, rest = x.double().split([pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # two products of cos or sin below 1 rounded to float32 and a sum: four half ulps of the largest value
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=4 * 2.0**-24 * expected.abs().max().item())


def test_tables_made_in_inference_mode_serve_training() -> None:
    """A check of a model before its training, as trainers do it."""
    module = RotaryEmbedding(16, table="cos_sin", max_positions=8)
    q, k = qk()
    with torch.inference_mode():
        expected = module(q, k)
    q.requires_grad_()
    y = module(q, k)
    assert torch.equal(y[0], expected[0])
    y[0].sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("table", ["inv_freq", "cos_sin"])
def test_frequencies_made_in_inference_mode_serve_training(table: str) -> None:
    """Of a module made there, or told a length, as generation tells it."""
    with torch.inference_mode():
        module = RotaryEmbedding(16, seq_len=200, table=table, **DYNAMIC)
    told = RotaryEmbedding(16, table=table, **DYNAMIC)
    with torch.inference_mode():
        told.use_length(200)
    q, k = qk()
    q.requires_grad_()
    y = module(q, k)[0]
    assert torch.equal(y, told(q, k)[0]) and y.requires_grad


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_uses_the_reserved_table(strict: bool) -> None:
    module = RotaryEmbedding(16, table="cos_sin", max_positions=4)
    module.reserve(64)
    table = module.cos
    tokens = {1: torch.export.Dim("tokens", max=60)}
    program = torch.export.export(module, (torch.randn(2, 6, 4, 16),), dynamic_shapes=(tokens,), strict=strict)
    assert [str(n.target) for n in program.graph.nodes if n.op == "call_function"] == ["fusewise.rope.default"]
    assert module.cos is table
    q = torch.randn(2, 50, 4, 16)
    assert torch.equal(program.module()(q), module(q))


def test_tables_of_a_trace_are_not_kept() -> None:
    module = RotaryEmbedding(16, table="cos_sin", max_positions=8)
    q, _ = qk()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert isinstance(module(mode.from_tensor(q)), torch._subclasses.FakeTensor)
    assert torch.equal(module(q), RotaryEmbedding(16, table="cos_sin")(q))


# --- rotation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["inv_freq", "cos_sin"])
@pytest.mark.parametrize("rotary_dim", [None, 8])
@pytest.mark.parametrize("offset", [0, 5])
def test_rotates_q_and_k(table: Any, rotary_dim: int | None, offset: int) -> None:
    module = RotaryEmbedding(16, rotary_dim=rotary_dim, base=500.0, table=table, max_positions=8)
    frequencies, _ = tables.default(rotary_dim=rotary_dim or 16, base=500.0)
    q, k = qk()
    positions = torch.arange(offset, offset + 6)
    for y, x in zip(module(q, k, offset=offset), (q, k), strict=True):
        near(y, rotated(x, positions, frequencies))
    near(module(q, offset=offset), rotated(q, positions, frequencies))


@pytest.mark.parametrize("table", ["inv_freq", "cos_sin"])
def test_position_ids_and_scaling(table: Any) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    module = RotaryEmbedding(16, table=table, max_positions=200, **yarn)
    frequencies, scaling = tables.yarn(rotary_dim=16, factor=4.0, original_max_position_embeddings=64)
    assert module.scaling == scaling > 1
    q, k = qk()
    positions = torch.tensor([[0, 199, 3, 3, 80, 7], [11, 5, 5, 5, 100, 0]])
    for y, x in zip(module(q, k, positions), (q, k), strict=True):
        near(y, rotated(x, positions, frequencies, scaling))


def test_options_reach_the_op() -> None:
    module = RotaryEmbedding(16, rotary_dim=8, rotary_start=-8, pairing="interleaved_to_half", layout="bhsd")
    q, k = (x.transpose(1, 2) for x in qk())
    expected = rope(
        q, k, inv_freq=module.inv_freq, rotary_dim=8, rotary_start=-8, pairing="interleaved_to_half", layout="bhsd"
    )
    assert all(torch.equal(a, b) for a, b in zip(module(q, k), expected, strict=True))
    back = RotaryEmbedding(16, rotary_dim=8, layout="bhsd")
    torch.testing.assert_close(back(back(q), inverse=True), q)
    packed = RotaryEmbedding(16, layout="thd")
    tokens = qk()[0].flatten(0, 1)
    bounds = torch.tensor([0, 6, 12], dtype=torch.int32)
    near(packed(tokens, cu_seqlens=bounds), rotated(tokens, torch.arange(12) % 6, packed.inv_freq))


def test_gradients_flow() -> None:
    module = RotaryEmbedding(16)
    q = qk()[0].requires_grad_()
    upstream = torch.randn_like(q)
    module(q).backward(upstream)
    assert q.grad is not None
    torch.testing.assert_close(q.grad, module(upstream, inverse=True))


# --- what it keeps ----------------------------------------------------------------------------------------------------


def test_table_grows_by_doubling_and_only_when_it_must() -> None:
    module = RotaryEmbedding(16, table="cos_sin", max_positions=8)
    assert module.cos is None
    module(qk(6)[0])
    first = module.cos
    assert first is not None and first.shape == (8, 8)
    module(qk(6)[0], offset=2)
    assert module.cos is first
    module(qk(6)[0], offset=3)
    grown = module.cos
    assert grown is not None and grown.shape == (16, 8) and torch.equal(grown[:8], first)
    module.reserve(100)
    assert module.cos is not None and module.cos.shape == (100, 8)
    module.reserve(50)
    assert module.cos.shape == (100, 8)
    module.reserve(50, "cpu:0")  # one device by another name, as "cuda" is "cuda:0"
    assert module.cos.shape == (100, 8)


def test_positions_beyond_the_table_are_nan_until_reserved() -> None:
    module = RotaryEmbedding(16, table="cos_sin", max_positions=8)
    q = qk()[0]
    positions = torch.tensor([0, 1, 2, 3, 4, 20])
    assert module(q, None, positions)[:, -1].isnan().all() and not module(q, None, positions)[:, :-1].isnan().any()
    module.reserve(21)
    near(module(q, None, positions), rotated(q, positions, module.inv_freq))


def test_what_was_reserved_is_there_after_a_move() -> None:
    module = RotaryEmbedding(16, table="cos_sin", max_positions=8)
    module.reserve(21)
    q, positions = qk()[0], torch.tensor([0, 1, 2, 3, 4, 20])
    for change in (lambda: module.to("cpu"), module.half, lambda: module.use_length(64)):
        change()
        assert not module(q, None, positions).isnan().any()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"impl": "nosuch"}, ValueError, "impl must be one of auto, triton"),
        ({"rotary_start": 8}, ValueError, "rotary_start must leave room for rotary_dim = 16"),
        ({"rotary_start": 1.5}, TypeError, "rotary_start must be an int"),
        ({"sections": (1, 2)}, ValueError, "sections must be three numbers of pairs"),
        ({"sections_interleaved": "x"}, TypeError, "sections_interleaved must be True or False"),
        ({"head_dim": 514}, ValueError, "an even head_dim from 2 to 512"),
    ],
    ids=str,
)
def test_options_are_refused_at_construction(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^RotaryEmbedding: .*{words}"):
        RotaryEmbedding(**{"head_dim": 16, **options})


@pytest.mark.parametrize("q", [[1], torch.ones(16)], ids=["list", "one dimension"])
def test_what_is_wrong_with_q_is_told_as_by_the_function(q: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^rope: q must"):
        RotaryEmbedding(16, table="cos_sin")(q)


def test_context_parallel_ranks_agree_with_the_whole_sequence() -> None:
    q = qk(8)[0]
    for table in ("inv_freq", "cos_sin"):
        whole = RotaryEmbedding(16, table=table)(q)
        module = RotaryEmbedding(16, table=table, max_positions=1)
        for rank, chunks in enumerate(([0, 3], [1, 2])):
            local = torch.cat([q[:, 2 * c : 2 * c + 2] for c in chunks], dim=1)
            expected = torch.cat([whole[:, 2 * c : 2 * c + 2] for c in chunks], dim=1)
            torch.testing.assert_close(module(local, context_parallel=(rank, 2)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double()])
@pytest.mark.parametrize("table", ["inv_freq", "cos_sin"])
def test_casting_the_module_does_not_round_what_it_keeps(cast: Any, table: Any) -> None:
    module = RotaryEmbedding(16, table=table)
    q = qk()[0]
    before, frequencies = module(q), module.inv_freq.clone()
    parent = cast(torch.nn.Sequential(module))
    assert parent[0].inv_freq.dtype == torch.float32 and torch.equal(parent[0].inv_freq, frequencies)
    assert torch.equal(module(q), before)


def test_state_dict_is_empty_and_copies_work() -> None:
    module = RotaryEmbedding(16, table="cos_sin")
    module(qk()[0])
    assert not module.state_dict() and not list(module.parameters())
    module.load_state_dict({}, strict=True)
    q = qk()[0]
    assert torch.equal(copy.deepcopy(module)(q), module(q))


def test_meta_construction_gets_right_values_off_the_meta_device() -> None:
    with torch.device("meta"):
        module = RotaryEmbedding(16, base=500.0)
    assert module.inv_freq.is_meta
    module.to_empty(device="cpu")
    assert torch.equal(module.inv_freq, tables.default(rotary_dim=16, base=500.0)[0])


def test_frequencies_of_length_dependent_types_change_only_on_request() -> None:
    module = RotaryEmbedding(16, table="cos_sin", **DYNAMIC)
    short = tables.dynamic(rotary_dim=16, factor=2.0, max_position_embeddings=64)[0]
    module(qk(100)[0])
    assert torch.equal(module.inv_freq, short)
    module.use_length(100)
    long = tables.dynamic(rotary_dim=16, factor=2.0, max_position_embeddings=64, seq_len=100)[0]
    assert torch.equal(module.inv_freq, long) and not torch.equal(long, short)
    q = qk(100)[0]
    near(module(q), rotated(q, torch.arange(100), long))
    plain = RotaryEmbedding(16)
    kept = plain.inv_freq
    plain.use_length(100)
    assert plain.inv_freq is kept


@pytest.mark.parametrize("table", ["inv_freq", "cos_sin"])
def test_compiles_whole_and_once_while_the_length_varies(table: Any) -> None:
    compiles = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal compiles
        compiles += 1
        return graph.forward

    torch._dynamo.reset()
    module = RotaryEmbedding(16, table=table, max_positions=64)
    module.reserve(64)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=count)
    for tokens in (6, 9, 17, 31):
        q, k = qk(tokens)
        for y, x in zip(compiled(q, k), module(q, k), strict=True):
            assert torch.equal(y, x)
    assert compiles == 1


def test_repr_says_what_it_is() -> None:
    assert repr(RotaryEmbedding(128, base=500000.0)) == (
        "RotaryEmbedding(128, base=500000, rope_type='default', pairing='half', layout='bshd', table='inv_freq')"
    )
    assert "rotary_dim=64, rotary_start=-64" in repr(RotaryEmbedding(192, rotary_dim=64, rotary_start=-64))


# --- configurations ---------------------------------------------------------------------------------------------------


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
    # their angles are float32 products, off by half an ulp of the largest, 64 to 127: 2^-18
    torch.testing.assert_close(module(q)[..., :width], expected, rtol=0, atol=2.0**-18 * 2 * q.abs().max().item())
    assert torch.equal(module(q)[..., width:], q[..., width:])


# A configuration class, a key of its rope_parameters, and the dimensions: of the head, and where its rotated part starts.
_PARTS = [
    ("deepseek_v2", "DeepseekV2Config", None, 192, -64),
    ("deepseek_v3", "DeepseekV3Config", None, 192, -64),
    ("mistral4", "Mistral4Config", None, 128, -64),  # with a partial_rotary_factor of the whole head
    ("minicpm3", "MiniCPM3Config", None, 96, -32),
    ("glm4_moe_lite", "Glm4MoeLiteConfig", None, 256, -64),
    ("deepseek_v4", "DeepseekV4Config", "main", 512, -64),  # without a qk_nope_head_dim
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
    """Its model orders the frequencies by axis and its tables back: what is left is the axis of each pair."""
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


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"table": "angles"}, r"RotaryEmbedding: table must be one of inv_freq, cos_sin, got 'angles'; "),
        ({"max_positions": 0}, r"RotaryEmbedding: max_positions must be at least 1, got 0; "),
        ({"rotary_dim": 32}, r"RotaryEmbedding: rotary_dim must be at most head_dim = 16, got 32; "),
        ({"rotary_dim": 7}, r"rope_tables: rotary_dim must be even, got 7; "),
        ({"layout": "x"}, r"RotaryEmbedding: layout must be one of bshd, .*, got 'x'; "),
        ({"pairing": "x"}, r"RotaryEmbedding: pairing must be one of half, .*, got 'x'; "),
        ({"rope_type": "ntk"}, r"rope_tables: rope_type must be one of .*, got 'ntk'; "),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        RotaryEmbedding(16, **arguments)


@pytest.mark.parametrize("name", ["head_dim", "rotary_dim", "max_positions"])
def test_arguments_of_another_type_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^RotaryEmbedding: {name} must be an int, got '8'; convert it$"):
        RotaryEmbedding(**{"head_dim": 16, name: "8"})
    with pytest.raises(TypeError, match=r"^RotaryEmbedding: length must be an int, got '8'; convert it$"):
        RotaryEmbedding(16, table="cos_sin").reserve("8")


def test_a_parameter_of_another_type_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"^rope_tables: parameters of rope_type 'default' must be among .*, got 'factor'; "
    ):
        RotaryEmbedding(16, factor=2.0)
