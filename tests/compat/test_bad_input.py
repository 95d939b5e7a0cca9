"""Every invalid argument of a compat function or module raises an error in the common form."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compat_statement import check_named
from torch import Tensor, nn

from fusewise.compat import diffusers, flash_attn, flashinfer, liger, transformer_engine, transformers, vllm

B, T, H, D = 2, 4, 2, 8


def rand(*shape: int) -> Tensor:
    return torch.rand(shape)


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


X, XH, TOKENS, QKV = rand(B, T, H, D), rand(B, H, T, D), rand(T, H, D), rand(B, T, 3, H, D)
HALF = {"cos": rand(T, D // 2), "sin": rand(T, D // 2)}
TWICE = {"cos": rand(1, T, D), "sin": rand(1, T, D)}
AXES = {"cos": rand(3, B, T, D), "sin": rand(3, B, T, D), "mrope_section": [2, 1, 1]}
COMPLEX = torch.complex(HALF["cos"], HALF["sin"])
PAIR = {"q": XH, "k": XH.clone()}
CACHED = {"positions": torch.arange(T), "head_size": D, "cos_sin_cache": rand(T, D), "is_neox": True}
LAYER = {
    "head_size": D, "rotary_dim": D, "max_position_embeddings": T, "base": 1e4, "is_neox_style": True, "dtype": torch.float32,
}  # fmt: skip
FLAT = {"query": TOKENS.flatten(1), "key": TOKENS.flatten(1).clone()}
PACKED = {"q": TOKENS, "k": TOKENS.clone(), "indptr": ints(0, T), "offsets": ints(0)}
PLACED = {"q": TOKENS, "k": TOKENS.clone(), "pos_ids": torch.arange(T)}
FREQUENCIES = {"rotary_dim": D, "interleave": False, "rope_scale": 1.0, "rope_theta": 1e4}
LLAMA31 = {**FREQUENCIES, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192}
FREQS, FUSED = rand(2 * T, 1, 1, D), rand(B, T, H, 3 * D)
SPLIT = {"q_freqs": FREQS, "k_freqs": FREQS.clone(), "qkv_split_arg_list": [D, D, D], "tensor_format": "bshd"}
GATES, WEIGHT = {"a": rand(3, D), "b": rand(3, D)}, rand(D, D)
WEIGHTS = {"input": rand(3, D), "gate_weight": WEIGHT, "up_weight": WEIGHT.clone(), "down_weight": WEIGHT.clone()}

# Valid calls. Arguments without effect in a call are omitted, as they are not checked.
CALLS: list[tuple[Any, dict[str, Any]]] = [
    (flash_attn.apply_rotary_emb, {"x": X, **HALF, "interleaved": False, "inplace": False, "seqlen_offsets": 0}),
    (flash_attn.apply_rotary_emb, {"x": X, **HALF, "inplace": True}),
    (
        flash_attn.apply_rotary_emb,
        {"x": TOKENS, **HALF, "seqlen_offsets": 0, "cu_seqlens": ints(0, T), "max_seqlen": T},
    ),
    (flash_attn.apply_rotary_emb_torch, {"x": X, **HALF, "interleaved": False}),
    (flash_attn.apply_rotary_emb_qkv_, {"qkv": QKV, **HALF, "cos_k": HALF["sin"], "sin_k": HALF["cos"]}),
    (flash_attn.apply_rotary_emb_qkv_, {"qkv": rand(B, T, 4, D), **HALF, "num_heads_q": 2}),
    (flash_attn.apply_rotary_emb_kv_, {"kv": QKV[:, :, :2], **HALF, "seqlen_offsets": 0}),
    (flash_attn.apply_rotary, {"x": X, **HALF, "inplace": True, "conjugate": False}),
    (
        transformer_engine.apply_rotary_pos_emb,
        {"t": X, "freqs": FREQS, "tensor_format": "bshd", "interleaved": False, "cp_size": 2, "cp_rank": 1},
    ),
    (
        transformer_engine.apply_fused_qkv_rotary_pos_emb,
        {"qkv": FUSED, **SPLIT, "start_positions": ints(0, 0), "interleaved": False},
    ),
    (transformer_engine.apply_fused_qkv_rotary_pos_emb, {"qkv": FUSED, **SPLIT, "cp_size": 2, "cp_rank": 1}),
    (transformer_engine.geglu, {"input": rand(3, D), "quantizer": None}),
    (transformer_engine.dgeglu, {"grad": rand(3, D), "fwd_input": rand(3, 2 * D), "quantizer": None}),
    (vllm.rotary_embedding, {"query": TOKENS, "key": TOKENS.clone(), **CACHED, "rope_dim_offset": 0, "inverse": False}),
    *[(f, {"out": rand(3, D), "x": rand(3, 2 * D)}) for f in (vllm.silu_and_mul, vllm.mul_and_silu)],
    (vllm.GeluAndMul("tanh"), {"x": rand(3, D)}),
    (vllm.SiluAndMul, {"compile_native": True}),
    (
        vllm.RotaryEmbedding,
        {"head_size": D, "rotary_dim": D, "max_position_embeddings": T, "base": 1e4, "is_neox_style": True,
         "dtype": torch.float32, "init_cache": True},
    ),
    (
        vllm.RotaryEmbedding(D, D, T, 1e4, True, torch.float32),
        {"positions": torch.arange(T), "query": TOKENS, "key": TOKENS.clone()},
    ),
    *[
        (kind, {**LAYER, **more})
        for kind, more in (
            (vllm.MRotaryEmbedding, {"mrope_interleaved": False, "positions_factor": 2, "scaling_factor": 2.0}),
            (vllm.NTKScalingRotaryEmbedding, {"scaling_factor": 2.0, "mixed_b": 0.5}),
            (vllm.DynamicNTKScalingRotaryEmbedding, {"max_trained_positions": T, "scaling_factor": 2.0}),
            (vllm.DynamicNTKAlphaRotaryEmbedding, {"scaling_alpha": 2.0}),
            (vllm.YaRNScalingRotaryEmbedding, {"scaling_factor": 2.0, "beta_fast": 32, "beta_slow": 1, "truncate": True}),
            (vllm.LinearScalingRotaryEmbedding, {"scaling_factors": [2.0]}),
            (
                vllm.DeepseekScalingRotaryEmbedding,
                {"scaling_factor": 2.0, "beta_fast": 32, "mscale": 1.0, "mscale_all_dim": 0.5, "init_cache": True},
            ),
            (
                vllm.Llama3RotaryEmbedding,
                {"scaling_factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "orig_max_position": T},
            ),
            (vllm.Gemma4RotaryEmbedding, {}),
            (vllm.BailingMRotaryEmbedding, {"mrope_section": [2, 1, 1]}),
            (vllm.MRotaryEmbeddingInterleaved, {"mrope_section": [2, 1, 1], "mrope_interleaved": True}),
            (vllm.XDRotaryEmbedding, {"scaling_alpha": 2.0, "xdrope_section": [1, 1, 1, 1]}),
            (vllm.Llama4VisionRotaryEmbedding, {"dtype": torch.complex64}),
            (vllm.DualChunkRotaryEmbedding, {"chunk_size": 8, "local_size": 2}),
            (
                vllm.Phi3LongRoPEScaledRotaryEmbedding,
                {"original_max_position_embeddings": 2, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
                 "short_mscale": 1.0, "long_mscale": 1.0},
            ),
        )
    ],
    (vllm.get_rope, {"head_size": D, "max_position": T, "is_neox_style": True, "mrope_positions_factor": 4}),
    *[
        (vllm.get_rope(D, T, True, {"mrope_section": [2, 1, 1]}), {"positions": at, **FLAT})
        for at in (torch.arange(T), torch.arange(3 * T).view(3, T))
    ],
    *[
        (layer, {"positions": at, **FLAT})
        for layer in (
            vllm.Ernie4_5_VLRotaryEmbedding(D, D, T, 1e4, False, torch.float32, [1, 1, 2]),
            vllm.get_rope(D, T, False, {"rope_type": "bailing_mrope", "mrope_section": [2, 1, 1]}),
            vllm.get_rope(D, T, True, {"rope_type": "openpangu", "mrope_section": [2, 1, 1], "mrope_interleaved": True}),
        )
        for at in (torch.arange(T), torch.arange(3 * T).view(3, T))
    ],
    (vllm.Llama4VisionRotaryEmbedding(D, D // 2, T - 1, 1e4, False, torch.complex64), {"query": X, "key": X}),
    (
        vllm.DualChunkRotaryEmbedding(D, D, T, 1e4, True, torch.float32, 8, 2),
        {"positions": torch.arange(T), **FLAT, "offsets": ints(*[0] * T)},
    ),
    (
        vllm.get_rope(D, T, True, {"rope_type": "deepseek_yarn", "factor": 2.0, "original_max_position_embeddings": T}),
        {"positions": torch.arange(T), "query": TOKENS, "key": TOKENS.clone(), "offsets": ints(*[0] * T)},
    ),
    (
        vllm.DeepseekV4ScalingRotaryEmbedding(D, D, T, 1e4, True, 2.0, torch.float32),
        {"positions": torch.arange(T), "query": TOKENS, "key": TOKENS.clone(), "inverse": False},
    ),
    (
        vllm.Phi3LongRoPEScaledRotaryEmbedding(D, D, T, 2, 1e4, True, torch.float32, [1.0] * 4, [2.0] * 4),
        {"positions": torch.arange(T), **FLAT, "offsets": ints(*[0] * T)},
    ),
    (vllm.ApplyRotaryEmb, {"enforce_enable": False, "is_neox_style": True, "enable_fp32_compute": False}),
    *[(vllm.ApplyRotaryEmb(), {"x": x, **HALF}) for x in (X, TOKENS)],
    (
        vllm.triton_mrope,
        {"q": TOKENS.flatten(1), "k": TOKENS.flatten(1).clone(), "cos": rand(3, T, D // 2), "sin": rand(3, T, D // 2),
         "mrope_section": [2, 1, 1], "head_size": D, "rotary_dim": D, "mrope_interleaved": False, "is_neox_style": True},
    ),
    (vllm.packed_qk_rope_, {"xqkv": rand(T, 3, H, D), "freqs_cis": COMPLEX}),
    (vllm.apply_interleaved_rope, {"x": rand(3, T, 4), "mrope_section": [2, 1, 1]}),
    (
        transformer_engine.FusedRoPEFunc.apply,
        {"t": X, "freqs": FREQS, "start_positions": ints(0, 0), "tensor_format": "bshd", "interleaved": False,
         "cp_size": 2, "cp_rank": 1},
    ),
    (
        transformer_engine.FusedQKVRoPEFunc.apply,
        {"qkv": FUSED, **SPLIT, "start_positions": ints(0, 0), "interleaved": False},
    ),
    (flashinfer.silu_and_mul, {"input": rand(3, 2 * D), "out": rand(3, D)}),
    (flashinfer.gelu_and_mul, {"input": rand(3, D)}),
    *[
        (f, {"query": TOKENS.flatten(1), "key": TOKENS.flatten(1).clone(), **CACHED})
        for f in (flashinfer.apply_rope_with_cos_sin_cache, flashinfer.apply_rope_with_cos_sin_cache_inplace)
    ],
    *[(f, {**PACKED, **FREQUENCIES}) for f in (flashinfer.apply_rope, flashinfer.apply_rope_inplace)],
    *[(f, {**PLACED, **FREQUENCIES}) for f in (flashinfer.apply_rope_pos_ids, flashinfer.apply_rope_pos_ids_inplace)],
    (flashinfer.apply_llama31_rope, {**PACKED, **LLAMA31}),
    (flashinfer.apply_llama31_rope_pos_ids, {**PLACED, **LLAMA31}),
    (liger.liger_rotary_pos_emb, {**PAIR, **TWICE, "rotary_dim": D}),
    (
        liger.liger_rotary_pos_emb,
        {**PAIR, "cos": TWICE["cos"][:, None], "sin": TWICE["sin"][:, None], "unsqueeze_dim": 1},
    ),
    (liger.liger_rotary_pos_emb_gpt_oss, {**PAIR, "cos": HALF["cos"][None], "sin": HALF["sin"][None]}),
    (liger.liger_rotary_pos_emb_vision, {"q": TOKENS, "k": TOKENS, "cos": TWICE["cos"][0], "sin": TWICE["sin"][0]}),
    (liger.liger_multimodal_rotary_pos_emb, {**PAIR, **AXES}),
    (liger.liger_llama4_text_rotary_pos_emb, {"xq": X, "xk": X, "freqs_cis": COMPLEX}),
    (liger.liger_llama4_vision_rotary_pos_emb, {"query": X, "key": X, "freqs_ci": COMPLEX}),
    (transformers.vision_apply_rotary_emb, {"query": X, "key": X, "freqs_ci": COMPLEX}),
    (transformers.apply_rotary_pos_emb_qwen4_exp, {"q": XH, **TWICE, "unsqueeze_dim": 1}),
    (liger.liger_geglu, GATES),
    (liger.LigerSiLUMulFunction.apply, {**GATES, "gate_multiplier": 1.5, "down_multiplier": 2.0}),
    (liger.LigerFusedGateUpSiLUMulFunction.apply, {"y": rand(3, D)}),
    (liger.LigerMLPFunction.apply, {**WEIGHTS, "gate_multiplier": 1.0, "down_multiplier": 2.0}),
    (liger.LigerMLPFunction.apply, {**WEIGHTS, "gate_multiplier": 1.5}),
    *[
        (f, {**PAIR, **TWICE, "unsqueeze_dim": 1})
        for f in (transformers.apply_rotary_pos_emb, transformers.apply_rotary_pos_emb_glm)
    ],
    (transformers.apply_rotary_pos_emb_dinov3, {**PAIR, "cos": TWICE["cos"][0, 1:], "sin": TWICE["sin"][0, 1:]}),
    (transformers.apply_multidimensional_rope, {"x": X, **TWICE, "position_ids": rand(B, T, 2), "unsqueeze_dim": 2}),
    (transformers.apply_rotary_pos_emb_deepseek_v4, {"x": XH, "cos": HALF["cos"][None], "sin": HALF["sin"][None]}),
    (transformers.apply_rotary_pos_emb_vision, {"q": TOKENS, "k": TOKENS, **{n: x[0] for n, x in TWICE.items()}}),
    (transformers.apply_multimodal_rotary_pos_emb, {**PAIR, **AXES, "unsqueeze_dim": 1}),
    (transformers.apply_rotary_emb_llama4, {"xq": X, "xk": X, "freqs_cis": COMPLEX[None]}),
    (transformers.apply_rotary_emb_deepseek_v2, {"xq": XH, "xk": XH, "freqs_cis": COMPLEX[None]}),
    (flash_attn.swiglu, {"x": rand(3, D), "y": rand(3, D)}),
    (
        flash_attn.GatedMlp,
        {"in_features": D, "hidden_features": D, "out_features": D, "bias1": True, "bias2": False, "multiple_of": 8,
         "return_residual": False},
    ),
    (flash_attn.GatedMlp(D), {"x": rand(3, D)}),
    (flash_attn.RotaryEmbedding, {"dim": D, "base": 1e4, "scale_base": 512.0, "device": "cpu", "pos_idx_in_fp32": True}),
    (flash_attn.RotaryEmbedding(D), {"qkv": QKV, "seqlen_offset": 0}),
    (flash_attn.RotaryEmbedding(D), {"qkv": X, "kv": QKV[:, :, :2], "max_seqlen": T}),
    (
        transformer_engine.RotaryPositionEmbedding,
        {"dim": D, "rotary_percent": 1.0, "seq_len_interpolation_factor": 2, "pretrained_max_position_embeddings": 8,
         "rotary_base": 1e4},
    ),
    (transformer_engine.RotaryPositionEmbedding(D), {"max_seq_len": T, "offset": 0}),
    (transformer_engine.GEGLU, {"cache_quantized_input": False}),
    (transformer_engine.GEGLU(), {"input": rand(3, D)}),
    (transformer_engine.SwiGLU(glu_interleave_size=2), {"input": rand(3, D)}),
    (diffusers.GEGLU, {"dim_in": D, "dim_out": D, "bias": True}),
    (diffusers.SwiGLU(D, D), {"hidden_states": rand(3, D)}),
    (
        diffusers.FeedForward,
        {"dim": D, "dim_out": D, "mult": 4, "dropout": 0.0, "activation_fn": "geglu", "final_dropout": False},
    ),
    (diffusers.Flux2FeedForward, {"dim": D, "dim_out": D, "inner_dim": D, "bias": False}),
]  # fmt: skip


def name_of(function: Any) -> str:
    kind = type(function) if isinstance(function, nn.Module) else function
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"


def places(kind: type) -> list[Any]:
    """Arguments of the calls above that are annotated with this type and have a value of it."""
    found = []
    for i, (function, arguments) in enumerate(CALLS):
        parameters = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters
        found += [
            pytest.param(function, arguments, name, id=f"{i}-{name_of(function)}-{name}")
            for name, value in arguments.items()
            if isinstance(value, kind) and kind.__name__ in parameters[name].annotation.split(" | ")
        ]
    return found


@pytest.mark.parametrize(("function", "arguments"), CALLS, ids=[f"{i}-{name_of(f)}" for i, (f, _) in enumerate(CALLS)])
def test_the_calls_are_right(function: Any, arguments: dict[str, Any]) -> None:
    function(**arguments)


@pytest.mark.parametrize(("function", "arguments", "name"), places(Tensor))
def test_what_is_no_tensor(function: Any, arguments: dict[str, Any], name: str) -> None:
    for wrong in ("0", 1.5, [1.0], object()):
        check_named(function, arguments, **{name: wrong})


@pytest.mark.parametrize(("function", "arguments", "name"), places(Tensor))
def test_a_tensor_of_too_few_dimensions(function: Any, arguments: dict[str, Any], name: str) -> None:
    x = arguments[name]
    check_named(function, arguments, **{name: x.flatten()[0].clone()})
    # Elementwise inputs, and those whose shape other arguments determine, may also be 1-D.
    if x.dim() > 1 and name not in ("input", "y") and not isinstance(function, vllm.GeluAndMul):
        check_named(function, arguments, **{name: x.flatten()})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("function", "arguments", "name"), places(Tensor))
def test_a_tensor_without_strides(function: Any, arguments: dict[str, Any], name: str) -> None:
    x = arguments[name]
    if arguments.get("gate_multiplier", 1.0) == 1.0 or "input" not in arguments:  # otherwise `F.linear` accepts it
        check_named(function, arguments, **{name: x.to_sparse()})
    check_named(function, arguments, **{name: torch.nested.nested_tensor([x, x])})


@pytest.mark.parametrize(("function", "arguments", "name"), places(int))
def test_what_is_no_int(function: Any, arguments: dict[str, Any], name: str) -> None:
    for wrong in ("8", [8], {}, rand(3)):
        check_named(function, arguments, **{name: wrong})


@pytest.mark.parametrize(("function", "arguments", "name"), places(float))
def test_what_is_no_number(function: Any, arguments: dict[str, Any], name: str) -> None:
    for wrong in ("8", [8.0], {}, rand(3)):
        check_named(function, arguments, **{name: wrong})


@pytest.mark.parametrize(("function", "arguments", "name"), places(bool))
def test_what_is_neither_true_nor_false(function: Any, arguments: dict[str, Any], name: str) -> None:
    check_named(function, arguments, **{name: ints(0, 1)})


FEW = "must have at least 2 dimensions, got shape"
FUSED_QKV = transformer_engine.apply_fused_qkv_rotary_pos_emb
ODD = {"qkv": FUSED[:, :3].contiguous(), "start_positions": None, "cp_size": 2}
HF = "apply_rotary_pos_emb"


@pytest.mark.parametrize(
    ("function", "wrong", "message"),
    [
        (flash_attn.apply_rotary_emb_torch, {"cos": rand()}, f"apply_rotary_emb_torch: cos {FEW} (); "),
        (vllm.rotary_embedding, {"cos_sin_cache": rand(D)}, f"rotary_embedding: cos_sin_cache {FEW} (8,); "),
        (vllm.rotary_embedding, {"positions": ints(0)[0]}, "positions must have shape (tokens,) or (batch, tokens), "),
        (flashinfer.apply_rope, {"offsets": "0"}, "rope: offsets must be a torch.Tensor, got str; "),
        (flashinfer.apply_rope, {"rotary_dim": "64"}, "rope_tables: rotary_dim must be an int, got '64'; "),
        (flashinfer.apply_rope, {"rope_theta": []}, "rope_tables: base must be a number, got []; "),
        (liger.liger_rotary_pos_emb, {"rotary_dim": 8.0}, "liger_rotary_pos_emb: rotary_dim must be an int, got 8.0; "),
        (transformers.apply_rotary_pos_emb, {"unsqueeze_dim": "1"}, f"{HF}: unsqueeze_dim must be an int, got '1'; "),
        (transformers.apply_rotary_pos_emb, {"cos": rand(T, D), "position_ids": [0]}, "position_ids must be a torch.T"),
        (transformers.apply_rotary_pos_emb_vision, {"cos": rand(D)}, f"{HF}: cos {FEW} (8,); "),
        (FUSED_QKV, {"start_positions": ints(0)}, "start_positions must have shape (2,), one a sequence, got (1,); "),
        (FUSED_QKV, {"qkv_split_arg_list": None}, "qkv_split_arg_list must be three ints, got None; "),
        (FUSED_QKV, ODD, "cp_size must cut every rank's tokens into two equal chunks, got 3 tokens; "),
    ],
)  # fmt: skip
def test_messages(function: Any, wrong: dict[str, Any], message: str) -> None:
    arguments = next(arguments for f, arguments in CALLS if f is function)
    assert message in check_named(function, arguments, **wrong)


@pytest.mark.parametrize("size", ["8", None, 8.0, -1, [8]])
@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size"])
@pytest.mark.parametrize(
    "build",
    [
        liger.LigerGEGLUMLP, liger.LigerPhi3SwiGLUMLP, liger.LigerBlockSparseTop2MLP, transformers.LlamaMLP,
        transformers.Phi3MLP,
    ],
)  # fmt: skip
def test_sizes_of_a_configuration(build: Any, name: str, size: Any) -> None:
    config = {"hidden_size": D, "intermediate_size": D, "hidden_act": "silu", "mlp_bias": False}
    build(SimpleNamespace(**config))
    assert f"config.{name} must be " in check_named(build, {"config": SimpleNamespace(**{**config, name: size})})
    del config[name]
    assert f"config must have {name}, got SimpleNamespace; " in check_named(
        build, {"config": SimpleNamespace(**config)}
    )


@pytest.mark.parametrize("config", [None, "llama", {"hidden_size": D}])
@pytest.mark.parametrize(
    "build", [liger.LigerGEGLUMLP, liger.LigerFalconH1MLP, transformers.GemmaMLP, transformers.Phi3MLP]
)
def test_what_is_no_configuration(build: Any, config: Any) -> None:
    check_named(build, {"config": config})


def test_whole_numbers_of_other_kinds_are_taken() -> None:
    numpy = pytest.importorskip("numpy")
    for two in (numpy.int64(2), torch.tensor(2)):
        flash_attn.apply_rotary_emb_qkv_(rand(B, T, 4, D), **HALF, num_heads_q=two)
        liger.liger_rotary_pos_emb(**PAIR, **TWICE, rotary_dim=4 * two)
        assert diffusers.GEGLU(two, two).proj.out_features == 4
    two, width = numpy.int64(2), numpy.int64(D)
    flash_attn.apply_rotary_emb(X[:, :2], **HALF, seqlen_offsets=two)
    flash_attn.RotaryEmbedding(width)(QKV.clone(), seqlen_offset=two)
    flashinfer.apply_rope_pos_ids(**PLACED, rotary_dim=width)
    vllm.rotary_embedding(**{**CACHED, "head_size": width}, **FLAT)
    for layer in (vllm.RotaryEmbedding, vllm.Gemma4RotaryEmbedding):
        made = layer(**{**LAYER, "head_size": width, "rotary_dim": width})
        assert type(made.head_size) is int
    assert type(vllm.get_rope(width, T).head_size) is int
    transformer_engine.SwiGLU(glu_interleave_size=two)(rand(3, 8))
    flash_attn.apply_rotary_emb(X, **HALF, interleaved=numpy.True_, inplace=0)


TABLES = {"cos_k": HALF["cos"], "sin_k": HALF["sin"]}


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (transformer_engine.geglu, ("input",)), (transformer_engine.GEGLU(), ("input",)),
        (transformer_engine.SwiGLU(glu_interleave_size=2), ("input",)), (transformer_engine.dgeglu, ("grad", "fwd_input")),
        (flashinfer.silu_and_mul, ("input",)), (vllm.SiluAndMul(), ("x",)), (flash_attn.swiglu, ("y", "x")),
        (liger.liger_geglu, ("b", "a")), (liger.swiglu, ("b", "a")), (liger.LigerMegatronSwiGLU(), ("input",)),
        (liger.LigerFusedGateUpSiLUMulFunction.apply, ("y",)),
    ],
)  # fmt: skip
def test_gates_name_the_arguments_of_their_library(function: Any, names: tuple[str, ...]) -> None:
    of = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters
    rest = {"quantizer": None} if "quantizer" in of else {}
    arguments = {name: rand(3, D) if name == "grad" else rand(3, 2 * D) for name in names}
    function(**arguments, **rest)
    for name in names:
        for wrong in (None, arguments[name].int()):
            assert f": {name} must " in check_named(function, {**arguments, **rest}, **{name: wrong})
    if len(names) == 2:
        first, second = names
        other = {first: rand(2, D), second: rand(3, 2 * D)}
        text = check_named(function, {**other, **rest})
        assert f" of {first}" in text or f" of {second}" in text
        assert "torch." not in text
    elif "glu_interleave_size" not in vars(function):
        assert f": {names[0]} must have an even last dimension" in check_named(function, rest, **{names[0]: rand(3, 3)})


def test_offsets_on_another_device_are_named() -> None:
    layer = vllm.get_rope(
        D, 16, rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 8,
                                "short_factor": [1.0] * (D // 2), "long_factor": [2.0] * (D // 2)},
    )  # fmt: skip
    arguments = {"positions": torch.arange(T), "query": rand(T, H, D), "key": rand(T, H, D)}
    text = check_named(layer, arguments, offsets=torch.zeros(T, dtype=torch.int64, device="meta"))
    assert "offsets must be on the device of positions, cpu, got meta; move it with .to('cpu')" in text


@pytest.mark.parametrize("name", ["positions", "offsets"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
def test_offsets_do_not_hide_the_dtype_of_positions(name: str, dtype: torch.dtype) -> None:
    """Their sum may be of a valid dtype, or of a wrong one for which positions would be blamed."""
    layer = vllm.DeepseekScalingRotaryEmbedding(D, D, 8, 10000, True, 2, torch.float32)
    arguments = {name: torch.arange(T) for name in ("positions", "offsets")}
    heads = {"query": rand(T, H, D), "key": rand(T, H, D)}
    text = check_named(layer, {**arguments, **heads}, **{name: arguments[name].to(dtype)})
    assert f"{name} must have dtype int32 or int64, got {str(dtype).removeprefix('torch.')}; " in text


@pytest.mark.parametrize("tokens", [1, T - 1, T + 1])
def test_tables_of_more_or_fewer_rows_than_tokens_are_refused(tokens: int) -> None:
    """Of a longer table the first rows would be taken, wrong for all but the first tokens of a sequence."""
    x, angles = rand(2, tokens, H, D), rand(T, D // 2)
    freqs = torch.polar(torch.ones_like(angles), angles)
    across = x.transpose(1, 2)
    for function, given in (
        (transformers.apply_rotary_emb_llama4, {"xq": x, "xk": x, "freqs_cis": freqs[None]}),
        (transformers.apply_rotary_emb_deepseek_v2, {"xq": across, "xk": across, "freqs_cis": freqs[None]}),
        (transformers.vision_apply_rotary_emb, {"query": x, "key": x, "freqs_ci": freqs[:, None]}),
        (flash_attn.apply_rotary_emb_torch, {"x": x, "cos": freqs.real, "sin": freqs.imag}),
        (flash_attn.apply_rotary_emb_torch, {"x": x[0], "cos": freqs.real, "sin": freqs.imag}),
        (flash_attn.apply_rotary_emb_torch, {"x": x, "cos": freqs.real[None], "sin": freqs.imag[None]}),
    ):
        assert f"must have a row for each of the {tokens} tokens, got (" in check_named(function, given)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(
    "tables_k",
    [
        {"cos_k": rand(T - 1, D // 2), "sin_k": rand(T - 1, D // 2)},
        {**TABLES, "sin_k": rand(T, 1)},
        {**TABLES, "cos_k": rand(T, D)},
    ],
)
def test_q_is_not_written_to_where_k_is_refused(tables_k: dict[str, Tensor], needs_grad: bool) -> None:
    qkv = rand(B, T, 3, H, D).requires_grad_(needs_grad)
    before = qkv.detach().clone()
    check_named(flash_attn.apply_rotary_emb_qkv_, {"qkv": qkv, **HALF, **tables_k})
    assert torch.equal(qkv.detach(), before)


@pytest.mark.parametrize("kv", [rand(D), rand(B, T, 3, H, D), rand(B, T + 1, 2, H, D), rand(B, T, 2, H, D).int()])
def test_q_is_not_written_to_where_kv_is_refused(kv: Any) -> None:
    q = rand(B, T, H, D)
    before = q.clone()
    check_named(flash_attn.RotaryEmbedding(D), {"qkv": q, "kv": kv})
    assert torch.equal(q, before)


@pytest.mark.parametrize(
    "function", [
        transformers.apply_rotary_emb_llama4, transformers.apply_rotary_emb_deepseek_v2, transformers.vision_apply_rotary_emb,
        liger.liger_llama4_text_rotary_pos_emb, liger.liger_llama4_vision_rotary_pos_emb, vllm.packed_qk_rope_,
    ],
)  # fmt: skip
def test_complex_tables_have_a_column_for_each_pair(function: Any) -> None:
    """Twice as many are no duplicates: the libraries refuse them."""
    arguments = dict(next(arguments for f, arguments in CALLS if f is function))
    name = "freqs_ci" if "freqs_ci" in arguments else "freqs_cis"
    text = check_named(function, arguments, **{name: torch.cat((arguments[name],) * 2, -1)})
    assert f"{name} must have D / 2 = {D // 2} columns" in text


@pytest.mark.parametrize("more", [1, D])
@pytest.mark.parametrize("function", [transformers.apply_rotary_pos_emb_glm, liger.liger_rotary_pos_emb])
def test_tables_of_which_a_part_is_read_have_the_same_width(function: Any, more: int) -> None:
    wider = torch.cat((TWICE["sin"], rand(1, T, more)), -1)
    options = {} if function is transformers.apply_rotary_pos_emb_glm else {"rotary_dim": D // 2 - 2}
    text = check_named(function, {**PAIR, **TWICE, **options}, sin=wider)
    assert "sin must have the shape of cos" in text


class Own(Tensor):
    """A tensor subclass with a bug of its user."""

    @property
    def shape(self) -> Any:
        raise RuntimeError("a mistake of the user")


@pytest.mark.parametrize(
    "function", [vllm.rotary_embedding, transformers.apply_rotary_pos_emb, liger.liger_rotary_pos_emb]
)
def test_errors_of_others_are_raised_as_they_are(function: Any) -> None:
    arguments = next(arguments for f, arguments in CALLS if f is function)
    name = "query" if "query" in arguments else "q"
    with pytest.raises(RuntimeError, match=r"^a mistake of the user$"):
        function(**{**arguments, name: arguments[name].as_subclass(Own)})


def test_a_flag_that_cannot_say_what_it_is_keeps_its_error() -> None:
    class Flag:
        def __bool__(self) -> bool:
            raise RuntimeError("a mistake of the user")

    with pytest.raises(TypeError, match="interleaved must be True or False, got Flag; ") as raised:
        flash_attn.apply_rotary_emb(X, **HALF, interleaved=Flag())
    assert "a mistake of the user" in str(raised.value.__context__)
