"""The signatures of the libraries, from their sources, and what importing a compat module imports."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

VARLEN = "seqlen_offsets=0, cu_seqlens=None, max_seqlen=None"
FREQUENCIES = "rotary_dim=None, interleave=False, rope_scale=1, rope_theta=10000.0"
LLAMA31 = (
    "rotary_dim=None, interleave=False, rope_scale=8, rope_theta=500000.0, "
    "low_freq_factor=1, high_freq_factor=4, old_context_len=8192"
)
CACHED = "positions, query, key, head_size, cos_sin_cache, is_neox=True"
TE = "start_positions=None, interleaved=False"
CP = "cu_seqlens=None, cp_size=1, cp_rank=0"
HF = "q, k, cos, sin, position_ids=None, unsqueeze_dim=1"
LAYER = "head_size, rotary_dim, max_position_embeddings, base, is_neox_style"
YARN = "beta_fast=32, beta_slow=1, mscale=None, mscale_all_dim=None, attention_factor=None, truncate=True"
ROTATED = "self, positions, query, key=None, offsets=None"
NAMED = "impl=None, mode=None, backend=None"

SIGNATURES = {
    "flash_attn": {
        "apply_rotary_emb": f"x, cos, sin, interleaved=False, inplace=False, {VARLEN}",
        "apply_rotary_emb_func": f"x, cos, sin, interleaved=False, inplace=False, {VARLEN}",
        "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
        "apply_rotary_emb_qkv_": (
            "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None"
        ),
        "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
        "ApplyRotaryEmb.apply": f"x, cos, sin, interleaved=False, inplace=False, {VARLEN}",
        "ApplyRotaryEmbQKV_.apply": (
            "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None"
        ),
        "ApplyRotaryEmbKV_.apply": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
        "apply_rotary": f"x, cos, sin, {VARLEN}, interleaved=False, inplace=False, conjugate=False",
        "RotaryEmbedding": (
            "dim, base=10000.0, interleaved=False, scale_base=None, device=None, *, pos_idx_in_fp32=True"
        ),
        "RotaryEmbedding._update_cos_sin_cache": "self, seqlen, device=None, dtype=None",
        "RotaryEmbedding.forward": "self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None",
    },
    "_flash_attn_mlp": {
        "swiglu": "x, y",
        "SwiGLUFunction.apply": "x, y",
        "GatedMlp": (
            f"in_features, hidden_features=None, out_features=None, activation={torch.nn.functional.sigmoid!r}, bias1=True, "
            "bias2=True, multiple_of=128, return_residual=False, device=None, dtype=None"
        ),
        "GatedMlp.forward": "self, x",
    },
    "transformer_engine": {
        **dict.fromkeys(("glu", "geglu", "reglu", "swiglu"), "input, quantizer"),
        **dict.fromkeys(("dglu", "dgeglu", "dreglu", "dswiglu"), "grad, fwd_input, quantizer"),
        **dict.fromkeys(("GLU", "GEGLU", "ReGLU"), "*, cache_quantized_input=False"),
        "SwiGLU": "*, cache_quantized_input=False, glu_interleave_size=None",
    },
    "_transformer_engine_rope": {
        "apply_rotary_pos_emb": (
            "t, freqs, tensor_format='sbhd', start_positions=None, interleaved=False, fused=False, " + CP
        ),
        "FusedRoPEFunc.apply": ("t, freqs, start_positions=None, tensor_format='sbhd', interleaved=False, " + CP),
        "RotaryPositionEmbedding": (
            "dim, rotary_percent=1.0, seq_len_interpolation_factor=None, pretrained_max_position_embeddings=None, "
            "rotary_base=10000.0, interleaved=False"
        ),
        "RotaryPositionEmbedding.forward": "self, max_seq_len, offset=0",
        "angle_table": "op, name, freqs",  # internal
        "context_parallel_of": "op, cp_size, cp_rank",  # internal
    },
    "_transformer_engine_qkv": {
        "apply_fused_qkv_rotary_pos_emb": (
            f"qkv, q_freqs, k_freqs, qkv_split_arg_list, tensor_format='sbhd', {TE}, {CP}"
        ),
        "FusedQKVRoPEFunc.apply": (
            "qkv, q_freqs, k_freqs, qkv_split_arg_list, start_positions=None, tensor_format='sbhd', interleaved=False, "
            "cp_size=1, cp_rank=0"
        ),
    },
    "_vllm_rope": {
        "rotary_embedding": (
            "positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset=0, inverse=False"
        ),
        "RotaryEmbedding": "head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, init_cache=True",
        "RotaryEmbedding.forward_static": (
            "positions, query, key, head_size, rotary_dim, cos_sin_cache, is_neox_style"
        ),
        **dict.fromkeys(
            (f"RotaryEmbedding.forward{end}" for end in ("", "_native", "_cuda")), "self, positions, query, key=None"
        ),
        "RotaryEmbedding.get_cos_sin": "self, seqlen",
        "RotaryEmbedding.enabled": "",
        "ApplyRotaryEmb": "enforce_enable=False, is_neox_style=True, enable_fp32_compute=False",
        **dict.fromkeys((f"ApplyRotaryEmb.forward{end}" for end in ("", "_native", "_cuda")), "self, x, cos, sin"),
        "ApplyRotaryEmb.forward_static": "x, cos, sin, is_neox_style=True, enable_fp32_compute=False",
        "packed_qk_rope_": "xqkv, freqs_cis",
        # Internal: shared between the module's files.
        "stretched": "positions, factor",
        "moved": "op, positions, offsets",
        "on_device_of": "x, layer, name='cos_sin_cache'",
        "LayerOfTables": "*args, **kwargs",
    },
    "_vllm_mrope": {
        "MRotaryEmbedding": (
            f"{LAYER}, dtype, mrope_section=None, mrope_interleaved=False, *, positions_factor=4, scaling_factor=None, {YARN}"
        ),
        **dict.fromkeys((f"MRotaryEmbedding.forward{end}" for end in ("", "_native", "_cuda")), ROTATED),
        "MRotaryEmbedding.get_next_input_positions": "mrope_position_delta, context_len, seq_len",
        "MRotaryEmbedding.get_next_input_positions_tensor": (
            "out, out_offset, mrope_position_delta, context_len, num_new_tokens"
        ),
        "triton_mrope": "q, k, cos, sin, mrope_section, head_size, rotary_dim, mrope_interleaved, is_neox_style",
        "apply_interleaved_rope": "x, mrope_section",
        "axes_of": "op, positions, rows",  # internal
        "pairs_of_axes": "op, sections, pairs, order='(t, h, w)', least=3",  # internal
    },
    "_vllm_axes": {
        "Ernie4_5_VLRotaryEmbedding": (
            f"{LAYER}, dtype, mrope_section=None, mrope_interleaved=False, *, positions_factor=4, scaling_factor=None, {YARN}"
        ),
        "BailingMRotaryEmbedding": f"{LAYER}, dtype, mrope_section",
        "BailingMRotaryEmbedding.select_cos_sin": "self, positions, cos_sin_cache=None",
        "MRotaryEmbeddingInterleaved": f"{LAYER}, dtype, mrope_section, mrope_interleaved=True",
        "MRotaryEmbeddingInterleaved.get_mrope_interleaved_id_list": "a, b, c, force_last=False",
        # (All of them have the `offsets` of MRotaryEmbedding here.)
        **{
            f"{kind}.forward{end}": ROTATED
            for kind in (
                "Ernie4_5_VLRotaryEmbedding",
                "BailingMRotaryEmbedding",
                "MRotaryEmbeddingInterleaved",
                "XDRotaryEmbedding",
            )
            for end in ("", "_native", "_cuda")
        },
        "XDRotaryEmbedding": f"{LAYER}, scaling_alpha, dtype, xdrope_section",
        "XDRotaryEmbedding.get_next_input_positions": "context_len, seq_len, xd_sections=4",
        "XDRotaryEmbedding.get_next_input_positions_tensor": "out, out_offset, context_len, num_new_tokens",
        "Llama4VisionRotaryEmbedding": f"{LAYER}, dtype",
        **{f"Llama4VisionRotaryEmbedding.forward{end}": "self, query, key=None" for end in ("", "_native", "_cuda")},
    },
    "_vllm_chunks": {
        "DualChunkRotaryEmbedding": f"{LAYER}, dtype, chunk_size, local_size",
        **{
            f"DualChunkRotaryEmbedding.forward{end}": "self, positions, query, key, offsets=None"
            for end in ("", "_native", "_cuda")
        },
    },
    "_vllm_scaling": {
        "of_grown_base": "layer, base, growth",  # internal
        "LinearScalingRotaryEmbedding": f"{LAYER}, scaling_factors, dtype",
        "NTKScalingRotaryEmbedding": f"{LAYER}, scaling_factor, dtype, mixed_b=None",
        "DynamicNTKScalingRotaryEmbedding": (
            "head_size, rotary_dim, max_position_embeddings, max_trained_positions, base, is_neox_style, scaling_factor, dtype"
        ),
        "DynamicNTKAlphaRotaryEmbedding": f"{LAYER}, scaling_alpha, dtype",
        "Llama3RotaryEmbedding": (
            f"{LAYER}, dtype, scaling_factor, low_freq_factor, high_freq_factor, orig_max_position"
        ),
        "Gemma4RotaryEmbedding": f"{LAYER}, dtype",
        "Phi3LongRoPEScaledRotaryEmbedding": (
            "head_size, rotary_dim, max_position_embeddings, original_max_position_embeddings, base, is_neox_style, dtype, "
            "short_factor, long_factor, short_mscale=None, long_mscale=None"
        ),
        "Phi3LongRoPEScaledRotaryEmbedding.forward": ROTATED,
    },
    "_vllm_yarn": {
        "YaRNScalingRotaryEmbedding": f"{LAYER}, scaling_factor, dtype, *, {YARN}",
        "DeepseekScalingRotaryEmbedding": (
            f"{LAYER}, scaling_factor, dtype, *, beta_fast=32, beta_slow=1, mscale=1, mscale_all_dim=0, init_cache=True"
        ),
        **dict.fromkeys((f"DeepseekScalingRotaryEmbedding.forward{end}" for end in ("", "_native", "_cuda")), ROTATED),
        "DeepseekScalingRotaryEmbedding.forward_static": (
            "positions, query, key, head_size, rotary_dim, cos_sin_cache, is_neox_style, offsets=None"
        ),
        "DeepseekV4ScalingRotaryEmbedding": "*args, **options",
        **dict.fromkeys(
            (f"DeepseekV4ScalingRotaryEmbedding.forward{end}" for end in ("", "_native", "_cuda")),
            f"{ROTATED}, inverse=False",
        ),
        # Internal.
        "Yarn": "beta_fast, beta_slow, mscale=None, mscale_all_dim=None, attention_factor=None, truncate=True",
        "yarn_cache": "layer, factor, yarn",
    },
    "_vllm_get_rope": {
        "get_rope": (
            "head_size, max_position, is_neox_style=True, rope_parameters=None, dtype=None, "
            "dual_chunk_attention_config=None, mrope_positions_factor=4"
        ),
    },
    "vllm": {
        **dict.fromkeys(("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul"), "out, x"),
        **dict.fromkeys(("SiluAndMul.forward", "MulAndSilu.forward", "GeluAndMul.forward"), "self, x"),
        **dict.fromkeys(("MulAndSilu.forward_native", "GeluAndMul.forward_native"), "self, x"),
        "SiluAndMul": "*, compile_native=True",
        "SiluAndMul.forward_native": "x",
        "GeluAndMul": "approximate='none'",
    },
    "flashinfer": {
        **{f"apply_rope{end}": f"q, k, indptr, offsets, {FREQUENCIES}" for end in ("", "_inplace")},
        **{f"apply_rope_pos_ids{end}": f"q, k, pos_ids, {FREQUENCIES}" for end in ("", "_inplace")},
        **{f"apply_llama31_rope{end}": f"q, k, indptr, offsets, {LLAMA31}" for end in ("", "_inplace")},
        **{f"apply_llama31_rope_pos_ids{end}": f"q, k, pos_ids, {LLAMA31}" for end in ("", "_inplace")},
        **{f"apply_rope_with_cos_sin_cache{end}": CACHED for end in ("", "_inplace")},
        **dict.fromkeys(("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"), "input, out=None, enable_pdl=None"),
    },
    "liger": {
        "liger_rotary_pos_emb": f"{HF}, rotary_dim=None",
        "liger_rope": f"{HF}, rotary_dim=None",
        "LigerRopeFunction.apply": f"{HF}, rotary_dim=None",
        "liger_rotary_pos_emb_gpt_oss": "q, k, cos, sin",
        "liger_rotary_pos_emb_vision": "q, k, cos, sin",
        "liger_multimodal_rotary_pos_emb": "q, k, cos, sin, mrope_section, unsqueeze_dim=1",
        "LigerQwen2VLMRopeFunction.apply": "q, k, cos, sin, mrope_section, unsqueeze_dim=1",
        "liger_qwen2vl_mrope": "q, k, cos, sin, mrope_section, unsqueeze_dim=1",
        "liger_llama4_text_rotary_pos_emb": "xq, xk, freqs_cis",
        "liger_llama4_vision_rotary_pos_emb": "query, key, freqs_ci",
        "LigerLlama4RopeFunction.apply": "q, k, freqs_cis, BLOCK_SIZE=None",
        "rope": f"{HF}, *, {NAMED}",
    },
    "_liger_gate": {
        "geglu": f"a, b, *, {NAMED}",
        "swiglu": f"a, b, gate_multiplier=1.0, down_multiplier=1.0, *, {NAMED}",
        "liger_geglu": "a, b",
        "liger_swiglu": "a, b",
        "LigerGELUMulFunction.apply": "a, b",
        "LigerSiLUMulFunction.apply": "a, b, gate_multiplier=1.0, down_multiplier=1.0",
        "LigerFusedGateUpSiLUMulFunction.apply": "y, in_place=False",
        "LigerMLPFunction.apply": (
            "input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0"
        ),
        # Internal: shared between the module's files.
        "silu_mul": "a, b, gate_multiplier=1.0, down_multiplier=1.0",
        "stacked_silu_mul": "y, in_place=False",
        "multiplied": "name, x, factor",
        "explain_mlp": "x, gate_weight, up_weight, down_weight",
    },
    "_liger_mlp": {
        **dict.fromkeys(
            (
                "LigerGEGLUMLP",
                "LigerMLP",
                "LigerPhi3SwiGLUMLP",
                "LigerBlockSparseTop2MLP",
                "LigerFalconH1SwiGLUMLP",
                "LigerFalconH1MLP",
                "LigerSwiGLUMLPForMuseGlimmer",
            ),
            "config",
        ),
        "LigerGEGLUMLPForGemma4": "config, layer_idx=None",
        **dict.fromkeys(("LigerSwiGLUMLP", "LigerQwen3MoeSwiGLUMLP"), "config, intermediate_size=None"),
        "LigerHunyuanV1SwiGLUMLP": "config, layer_idx=None, is_shared_mlp=False",
        "LigerSwiGLUMLP.forward": "self, x",
        **dict.fromkeys(("LigerTiledGEGLUMLP", "LigerTiledSwiGLUMLP"), "config, num_shards=None"),
        **dict.fromkeys(("LigerTiledGEGLUMLP.forward", "LigerTiledSwiGLUMLP.forward"), "self, x"),
        "LigerMegatronSwiGLU": "fallback_impl=None, in_place=False",
        "LigerMegatronSwiGLU.forward": "self, input, bias=None, fp8_input_store=False, cpu_offload_input=False",
    },
    "transformers": {
        "apply_rotary_pos_emb": HF,
        "apply_rotary_pos_emb_single": "x, cos, sin, unsqueeze_dim=1",
        "apply_rotary_pos_emb_qwen4_exp": "q, k=None, cos=None, sin=None, unsqueeze_dim=1",
        "apply_rotary_pos_emb_interleaved": HF,
        "apply_rotary_pos_emb_glm": HF,
        "apply_rotary_pos_emb_interleave": HF,
        "apply_rotary_pos_emb_deepseek_v4": "x, cos, sin, unsqueeze_dim=1",
        "apply_rotary_pos_emb_gpt_oss": HF,
        "apply_rotary_pos_emb_openai_privacy_filter": HF,
        "apply_rotary_pos_emb_gptj": "tensor, sin, cos",
        "apply_rotary_pos_emb_nanochat": HF,
        "apply_rotary_pos_emb_vision": "q, k, cos, sin",
        "apply_rotary_pos_emb_dinov3": "q, k, cos, sin, **kwargs",
        "apply_multimodal_rotary_pos_emb": "q, k, cos, sin, mrope_section, unsqueeze_dim=1",
        "apply_rotary_emb_llama4": "xq, xk, freqs_cis",
        "apply_rotary_emb_deepseek_v2": "xq, xk, freqs_cis",
        "vision_apply_rotary_emb": "query, key, freqs_ci",
        "apply_multidimensional_rope": "x, cos, sin, position_ids, unsqueeze_dim=2",
        **dict.fromkeys(("GemmaMLP", "Gemma2MLP", "LlamaMLP", "Phi3MLP"), "config"),
        "DeepseekV3MLP": "config, intermediate_size=None",
        "LlamaMLP.forward": "self, x",
        "Phi3MLP.forward": "self, hidden_states",
    },
    "_diffusers_rope": {
        "apply_rotary_emb": "x, freqs_cis, use_real=True, use_real_unbind_dim=-1, sequence_dim=2",
        "apply_rotary_emb_qwen": "x, freqs_cis, use_real=True, use_real_unbind_dim=-1",
        "apply_rotary_emb_qwen_neuron": "x, freqs",
        "apply_rotary_emb_wan": "hidden_states, freqs_cos, freqs_sin",
        "apply_rotary_emb_transposed": "hidden_states, freqs_cis",
        **dict.fromkeys(("apply_rotary_emb_anyflow", "apply_rotary_emb_sana_wm"), "hidden_states, freqs"),
        **dict.fromkeys(("apply_rotary_emb_joyimage", "apply_rotary_emb_batched"), "xq, xk, freqs_cis"),
        "apply_rotary_emb_minimax_h3": "hidden_states, cos, sin",
        "apply_partial_rotary_emb_minimax_music3": "hidden_states, rotary_emb",
        "apply_partial_rotary_emb": "x, freqs_cis",
        "apply_rotary_partial": "t, freqs",
        "apply_rope_hidream": "xq, xk, freqs_cis",
        "apply_rope_prx": "xq, freqs_cis",
        "apply_rotary_kandinsky5": "x, rope",
        "apply_rotary_pos_emb_kolors": "x, rope_cache",
        "rope_apply": "x, grid_sizes, freqs, time_stride=1",
        # Internal: shared between the module's files.
        "rotated": "op, x, cos, sin, layout, pairing, **options",
        "by_complex": "x, freqs, layout, **options",
        "both_tables": "op, name, tables",
        "table_dtype": "x, table",
    },
    "_diffusers_rows": {
        **dict.fromkeys(("apply_rotary_emb_ltx", "apply_interleaved_rotary_emb", "apply_split_rotary_emb"), "x, freqs"),
        "apply_rotary_emb_mochi": "x, freqs_cos, freqs_sin",
        "apply_rotary_emb_allegro": "x, freqs_cis, positions",
    },
    "diffusers": {
        "GEGLU": "dim_in, dim_out, bias=True",
        "GEGLU.forward": "self, hidden_states, *args, **kwargs",
        "SwiGLU": "dim_in, dim_out, bias=True",
        "SwiGLU.forward": "self, hidden_states",
        "FeedForward": (
            "dim, dim_out=None, mult=4, dropout=0.0, activation_fn='geglu', final_dropout=False, inner_dim=None, bias=True"
        ),
        "FeedForward.forward": "self, hidden_states, *args, **kwargs",
        **dict.fromkeys(("Flux2SwiGLU.forward", "Flux3SwiGLU.forward"), "self, x"),
        **dict.fromkeys(
            ("Flux2FeedForward", "Flux3FeedForward"), "dim, dim_out=None, mult=3.0, inner_dim=None, bias=False"
        ),
        **dict.fromkeys(("Flux2FeedForward.forward", "Flux3FeedForward.forward"), "self, x"),
    },
}


def resolve(module: str, path: str) -> Any:
    found: Any = importlib.import_module(f"fusewise.compat.{module}")
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(("module", "path"), [(m, p) for m, paths in SIGNATURES.items() for p in paths])
def test_signature(module: str, path: str) -> None:
    signature = inspect.signature(resolve(module, path))
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    ours = str(inspect.Signature(plain))
    assert ours == f"({SIGNATURES[module][path]})"


@pytest.mark.parametrize("module", SIGNATURES)
def test_every_public_function_has_its_signature_here(module: str) -> None:
    found = importlib.import_module(f"fusewise.compat.{module}")
    own = {
        n for n, x in vars(found).items() if getattr(x, "__module__", "") == found.__name__ and not n.startswith("_")
    }
    assert own == {path.split(".")[0] for path in SIGNATURES[module]}


def test_importing_a_module_imports_nothing_of_its_library() -> None:
    libraries = [
        "flash_attn", "transformer_engine", "vllm", "flashinfer", "liger_kernel", "transformers", "diffusers", "triton",
    ]  # fmt: skip
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        + "".join(f"import fusewise.compat.{module}\n" for module in SIGNATURES)
        + f"print([n for n in {libraries} if n in set(sys.modules) - before], torch.cuda.is_initialized())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[] False"
