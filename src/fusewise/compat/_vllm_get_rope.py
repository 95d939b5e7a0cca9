"""vLLM's `get_rope`, which builds and caches rotary layers; exported by `compat.vllm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..ops._common import check_count, fail, shown
from ._check import flag, number, whole
from ._vllm_axes import (
    BailingMRotaryEmbedding,
    Llama4VisionRotaryEmbedding,
    MRotaryEmbeddingInterleaved,
    XDRotaryEmbedding,
)
from ._vllm_chunks import DualChunkRotaryEmbedding
from ._vllm_mrope import MRotaryEmbedding
from ._vllm_rope import RotaryEmbedding
from ._vllm_scaling import (
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    Gemma4RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    NTKScalingRotaryEmbedding,
    Phi3LongRoPEScaledRotaryEmbedding,
)
from ._vllm_yarn import (
    DeepseekScalingRotaryEmbedding,
    DeepseekV4ScalingRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)

# Layers by the arguments of `get_rope` and the default device. Never evicted, as in vLLM: callers may rely on identity.
_LAYERS: dict[tuple[Any, ...], nn.Module] = {}

_TYPES = (
    "default", "mrope", "linear", "ntk", "dynamic", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "longrope", "su", "llama3",
    "proportional", "mllama4", "openpangu", "bailing_mrope", "xdrope",
)  # fmt: skip
# Names in published configs that vLLM normalizes before it calls `get_rope`.
_ALIASES = {"mrope": "default", "su": "longrope"}


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    dual_chunk_attention_config: dict[str, Any] | None = None,
    mrope_positions_factor: int = 4,
) -> nn.Module:
    """Return the rotary layer for a model's rope_parameters; equal arguments return the same object.

        rope_type                               layer, further keys
        default (and mrope)                     RotaryEmbedding; MRotaryEmbedding with mrope_section, mrope_interleaved
        linear                                  LinearScalingRotaryEmbedding: factor
        ntk                                     NTKScalingRotaryEmbedding: factor, mixed_b
        dynamic                                 DynamicNTKAlphaRotaryEmbedding: alpha; or
                                                DynamicNTKScalingRotaryEmbedding: factor, max_trained_positions
        yarn                                    YaRNScalingRotaryEmbedding, MRotaryEmbedding with mrope_section: factor,
                                                original_max_position_embeddings, beta_fast, beta_slow, mscale,
                                                mscale_all_dim, attention_factor, truncate
        deepseek_yarn, deepseek_llama_scaling   DeepseekScalingRotaryEmbedding, or DeepseekV4… with is_deepseek_v4: factor,
                                                original_max_position_embeddings, beta_fast, beta_slow, mscale, mscale_all_dim
        longrope (and su)                       Phi3LongRoPEScaledRotaryEmbedding: short_factor, long_factor,
                                                original_max_position_embeddings, short_mscale, long_mscale
        llama3                                  Llama3RotaryEmbedding: factor, low_freq_factor, high_freq_factor,
                                                original_max_position_embeddings
        proportional                            Gemma4RotaryEmbedding
        mllama4                                 Llama4VisionRotaryEmbedding, with dtype torch.complex64
        openpangu                               MRotaryEmbeddingInterleaved: mrope_section, mrope_interleaved true
        bailing_mrope                           BailingMRotaryEmbedding: mrope_section
        xdrope                                  XDRotaryEmbedding: alpha, xdrope_section

    Args:
        head_size: features per head, even.
        max_position: table rows before scaling.
        rope_parameters: flat dictionary; rope_theta (default 10000), rope_type or the older key type (default "default"), and
            the rotary dimension: rope_dim, or int(head_size · partial_rotary_factor) with partial_rotary_factor in (0, 1].
            Keys that the type does not use are ignored.
        dtype: of the table; None: torch's default.
        dual_chunk_attention_config: if given, the layer is DualChunkRotaryEmbedding for any rope_type, as in vLLM. Only
            chunk_size and local_size are used; the other keys are for attention.
        mrope_positions_factor: `positions_factor` of `MRotaryEmbedding`, not of its subclasses.

    Raises:
        TypeError, ValueError: `get_rope: <argument> must …`, also for an unsupported rope_type and for use_fope; errors of the
            layer start with its name or with `rope_tables`.
    """
    op = "get_rope"
    head_size = check_count(op, "head_size", head_size)
    max_position = whole(op, "max_position", max_position, 0)
    mrope_positions_factor = whole(op, "mrope_positions_factor", mrope_positions_factor, 1)
    is_neox_style = flag(op, "is_neox_style", is_neox_style)
    if dtype is None:
        dtype = torch.get_default_dtype()
    elif not isinstance(dtype, torch.dtype):
        fail(op, "dtype", "be a torch.dtype or None", shown(dtype), "pass that of the model", TypeError)
    chunks = None if dual_chunk_attention_config is None else _chunks(dual_chunk_attention_config)
    if rope_parameters is None:
        rope_parameters = {}
    elif not isinstance(rope_parameters, Mapping):
        fail(op, "rope_parameters", "be a mapping or None", shown(rope_parameters), "pass the dictionary", TypeError)
    given = _hashable(rope_parameters)
    width = _rotary_width(head_size, rope_parameters)
    key = (
        head_size, width, max_position, is_neox_style, given, chunks, dtype, mrope_positions_factor,
        torch.get_default_device(),
    )  # fmt: skip
    # Under a fake mode, which a layer of real memory cannot serve, each call makes its own.
    fake = not torch.compiler.is_compiling() and torch._guards.detect_fake_mode() is not None
    layer = None if fake else _LAYERS.get(key)
    if layer is None:
        with torch.inference_mode(False):  # cached: a later call may need gradients
            if chunks:
                base = rope_parameters.get("rope_theta", 10000)
                layer = DualChunkRotaryEmbedding(head_size, width, max_position, base, is_neox_style, dtype, *chunks)
            else:
                layer = _build(
                    rope_parameters, (head_size, width), max_position, is_neox_style, dtype, mrope_positions_factor
                )
        if all(type(x) is Tensor for x in layer.buffers()):  # a FakeTensor must not outlive its mode
            _LAYERS[key] = layer
    return layer


def _hashable(parameters: Mapping[str, Any]) -> tuple[Any, ...]:
    """The parameters as a dictionary key; lists become tuples."""
    items = tuple((name, tuple(x) if isinstance(x, list) else x) for name, x in parameters.items())
    for name, value in items:
        try:
            hash(value)
        except TypeError:
            fix = "pass one flat dictionary, that of one type of layer"
            fail("get_rope", f"rope_parameters {name}", "be a number, a name or a list", shown(value), fix, TypeError)
    return items


def _chunks(config: Any) -> tuple[int, int]:
    """Read chunk_size and local_size from dual_chunk_attention_config."""
    op, name, sizes = "get_rope", "dual_chunk_attention_config", ("chunk_size", "local_size")
    if not isinstance(config, Mapping):
        fail(op, name, "be a mapping or None", shown(config), "pass the dictionary", TypeError)
    if any(size not in config for size in sizes):
        fail(op, name, "have chunk_size and local_size", ", ".join(map(str, config)) or "nothing", "pass the model's")
    chunk, local = (whole(op, size, config[size]) for size in sizes)
    return chunk, local


def _rotary_width(head_size: int, parameters: Mapping[str, Any]) -> int:
    op, width = "get_rope", parameters.get("rope_dim")
    if width:
        return whole(op, "rope_dim", width, 1, head_size)
    share = number(op, "partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0))
    if not 0 < share <= 1:
        fail(op, "partial_rotary_factor", "be above 0 and at most 1", share, "give the share of a head that rotates")
    return int(head_size * share)


def _build(
    parameters: Mapping[str, Any],
    widths: tuple[int, int],
    max_position: int,
    is_neox_style: bool,
    dtype: torch.dtype,
    positions_factor: int,
) -> nn.Module:
    op, base = "get_rope", parameters.get("rope_theta", 10000)
    named = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(named, str) or named not in _TYPES:
        fix = "use vLLM's own layer for another"
        fail(op, "rope_type", f"be one of {', '.join(_TYPES)}", shown(named), fix)
    kind = _ALIASES.get(named, named)

    def needed(name: str) -> Any:
        if name not in parameters:
            got = ", ".join(map(str, parameters)) or "nothing"
            fail(op, "rope_parameters", f"have {name} for rope_type {named}", got, "pass all of the model's")
        return parameters[name]

    def chosen(*names: str) -> dict[str, Any]:
        return {name: parameters[name] for name in names if name in parameters}

    plain = (*widths, max_position, base, is_neox_style)
    sections: dict[str, Any] = {
        "mrope_section": parameters.get("mrope_section"),
        "mrope_interleaved": parameters.get("mrope_interleaved", False),
        "positions_factor": positions_factor,
    }
    if kind == "default":
        if parameters.get("use_fope"):
            fail(op, "use_fope", "be False", shown(parameters["use_fope"]), "use vLLM's layer for Fourier embeddings")
        if named == "mrope" or "mrope_section" in parameters:
            needed("mrope_section")
            return MRotaryEmbedding(*plain, dtype, **sections)
        return RotaryEmbedding(*plain, dtype)
    if kind == "mllama4":
        return Llama4VisionRotaryEmbedding(*plain, dtype)
    if kind == "openpangu":
        return MRotaryEmbeddingInterleaved(*plain, dtype, needed("mrope_section"), needed("mrope_interleaved"))
    if kind == "bailing_mrope":
        return BailingMRotaryEmbedding(*plain, dtype, needed("mrope_section"))
    if kind == "xdrope":
        return XDRotaryEmbedding(*plain, needed("alpha"), dtype, needed("xdrope_section"))
    if kind == "proportional":
        return Gemma4RotaryEmbedding(*plain, dtype)
    if kind == "linear":
        return LinearScalingRotaryEmbedding(*plain, needed("factor"), dtype)
    if kind == "ntk":
        return NTKScalingRotaryEmbedding(*plain, needed("factor"), dtype, parameters.get("mixed_b"))
    if kind == "dynamic":
        if "alpha" in parameters:
            return DynamicNTKAlphaRotaryEmbedding(*plain, parameters["alpha"], dtype)
        trained = parameters.get("max_trained_positions", max_position)
        return DynamicNTKScalingRotaryEmbedding(*plain[:3], trained, base, is_neox_style, needed("factor"), dtype)
    if kind == "llama3":
        names = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        return Llama3RotaryEmbedding(*plain, dtype, *map(needed, names))
    if kind == "longrope":
        short, long, original = map(needed, ("short_factor", "long_factor", "original_max_position_embeddings"))
        return Phi3LongRoPEScaledRotaryEmbedding(
            *plain[:3], original, base, is_neox_style, dtype, short, long, **chosen("short_mscale", "long_mscale")
        )
    factor, original = needed("factor"), needed("original_max_position_embeddings")
    stretched = (*widths, original, base, is_neox_style)
    options = chosen("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    if kind == "yarn":
        options |= chosen("attention_factor", "truncate")
        if "mrope_section" in parameters:
            return MRotaryEmbedding(*stretched, dtype, **{**sections, **options, "scaling_factor": factor})
        return YaRNScalingRotaryEmbedding(*stretched, factor, dtype, **options)
    four = parameters.get("is_deepseek_v4", False)
    layer = DeepseekV4ScalingRotaryEmbedding if four else DeepseekScalingRotaryEmbedding
    return layer(*stretched, factor, dtype, **options)
