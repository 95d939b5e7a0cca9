"""Drop-in replacements for `flashinfer.rope` and the gates of `flashinfer.activation`.

    from flashinfer import apply_rope_pos_ids_inplace                    # before
    from fusewise.compat.flashinfer import apply_rope_pos_ids_inplace    # after

Functions without a cos/sin cache compute the angles in the kernel, exactly (FlashInfer multiplies in float32 and uses the
fast hardware sine); the P frequencies are cached per set of parameters and device. Out-of-place functions are
differentiable (FlashInfer's are not). q and k may also be float32, tables any dtype.
Shape legend: N tokens of all sequences, B sequences, H heads (q and k may differ), D head_dim, P = rotary_dim / 2.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from ..ops._common import constant_in_traces, jit_traces
from ..ops.rope import rope, rope_, tables
from ._check import check_tensor, number, shape_of, whole
from ._shared import gate_of_halves, heads, pairing, pairing_of_neox, rotate_pair, unit_stride


def apply_rope(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor | None]:
    """Rotate the first rotary_dim features (None: all) of q and k (N, H, D), packed sequences.

    Frequency of pair i: rope_theta^(−2i / rotary_dim) / rope_scale.

    Args:
        indptr: (B + 1,), sequence boundaries.
        offsets: (B,), position of each sequence's first token.
        interleave: pairs (2i, 2i + 1), GPT-J style; else (i, i + rotary_dim / 2), NeoX style.
    """
    inv_freq = _frequencies(q, rotary_dim, rope_scale, rope_theta)
    return rotate_pair(q, k, **_call(inv_freq, interleave, cu_seqlens=indptr, offset=offsets))


def apply_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """`apply_rope`, overwriting q and k."""
    inv_freq = _frequencies(q, rotary_dim, rope_scale, rope_theta)
    rope_(q, k, **_call(inv_freq, interleave, cu_seqlens=indptr, offset=offsets))


def apply_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> tuple[Tensor, Tensor | None]:
    """`apply_rope` with position ids pos_ids (N,), int32 or int64."""
    inv_freq = _frequencies(q, rotary_dim, rope_scale, rope_theta)
    return rotate_pair(q, k, **_call(inv_freq, interleave, positions=pos_ids))


def apply_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
) -> None:
    """`apply_rope_pos_ids`, overwriting q and k."""
    inv_freq = _frequencies(q, rotary_dim, rope_scale, rope_theta)
    rope_(q, k, **_call(inv_freq, interleave, positions=pos_ids))


def apply_llama31_rope(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[Tensor, Tensor | None]:
    """`apply_rope` with the frequencies of Llama 3.1 (`fusewise.ops.rope.tables.llama3`)."""
    inv_freq = _frequencies(q, rotary_dim, rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    return rotate_pair(q, k, **_call(inv_freq, interleave, cu_seqlens=indptr, offset=offsets))


def apply_llama31_rope_inplace(
    q: Tensor,
    k: Tensor,
    indptr: Tensor,
    offsets: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """`apply_llama31_rope`, overwriting q and k."""
    inv_freq = _frequencies(q, rotary_dim, rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    rope_(q, k, **_call(inv_freq, interleave, cu_seqlens=indptr, offset=offsets))


def apply_llama31_rope_pos_ids(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> tuple[Tensor, Tensor | None]:
    """`apply_rope_pos_ids` with the frequencies of Llama 3.1."""
    inv_freq = _frequencies(q, rotary_dim, rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    return rotate_pair(q, k, **_call(inv_freq, interleave, positions=pos_ids))


def apply_llama31_rope_pos_ids_inplace(
    q: Tensor,
    k: Tensor,
    pos_ids: Tensor,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:
    """`apply_llama31_rope_pos_ids`, overwriting q and k."""
    inv_freq = _frequencies(q, rotary_dim, rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    rope_(q, k, **_call(inv_freq, interleave, positions=pos_ids))


def apply_rope_with_cos_sin_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor]:
    """Rotate query and key (N, H · head_size) by rows positions (N,) of cos_sin_cache (R, rotary_dim), [cos | sin]."""
    op = "apply_rope_with_cos_sin_cache"
    q, k = (heads(op, n, unit_stride(x, n), 1, head_size) for n, x in (("query", query), ("key", key)))
    q, k = rope(q, k, **_cached(positions, cos_sin_cache, is_neox))
    return q.reshape(query.shape), k.reshape(key.shape)


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> None:
    """`apply_rope_with_cos_sin_cache`, overwriting query and key."""
    op = "apply_rope_with_cos_sin_cache_inplace"
    q, k = (heads(op, n, x, 1, head_size) for n, x in (("query", query), ("key", key)))
    rope_(q, k, **_cached(positions, cos_sin_cache, is_neox))


def silu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """silu(g) · u with (g, u) the halves of input (..., 2F); returns (..., F).

    Args:
        out: written and returned if given; no gradient is recorded then.
        enable_pdl: ignored.
    """
    return gate_of_halves("silu_and_mul", input, "silu", out)


def gelu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """`silu_and_mul` with exact (erf) GELU."""
    return gate_of_halves("gelu_and_mul", input, "gelu", out)


def gelu_tanh_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    """`silu_and_mul` with tanh GELU."""
    return gate_of_halves("gelu_tanh_and_mul", input, "gelu_tanh", out)


def _cached(positions: Tensor, cos_sin_cache: Tensor, is_neox: bool) -> dict[str, Any]:
    check_tensor("rope", "positions", positions)
    return {
        "cos_sin": cos_sin_cache,
        "positions": positions,
        "layout": "thd",
        "pairing": pairing_of_neox("rope", is_neox, "is_neox"),
        "rotary_dim": shape_of("rope", "cos_sin_cache", cos_sin_cache, 2)[-1],
    }


# FlashInfer's names for the arguments of `rope`.
_THEIRS = {"cu_seqlens": "indptr", "offset": "offsets", "positions": "pos_ids"}


def _call(inv_freq: Tensor, interleave: bool, **positions: Tensor) -> dict[str, Any]:
    for name, x in positions.items():
        if not isinstance(x, Tensor):
            check_tensor("rope", _THEIRS[name], x)
    return {
        "inv_freq": inv_freq, "layout": "thd", "pairing": pairing("rope", "interleave", interleave),
        "rotary_dim": 2 * inv_freq.shape[0], **positions,
    }  # fmt: skip


def _frequencies(q: Tensor, rotary_dim: int | None, scale: float, theta: float, *llama31: float) -> Tensor:
    """Inverse frequencies (P,) on the device of q; `llama31`: low_freq_factor, high_freq_factor, old_context_len."""
    head_dim = shape_of("rope", "q", q, 1)[-1]
    width = head_dim if rotary_dim is None else rotary_dim
    if isinstance(width, torch.SymInt) or (jit_traces() and isinstance(width, Tensor)):  # a size
        width = int(width)
    numbers = (width, scale, theta, *llama31)
    if torch.compiler.is_compiling():
        traced: Tensor = getattr(_TRACED, _keep_for_tracing(q.device, *map(_fixed, numbers)))
        return traced
    fake = isinstance(q, torch._subclasses.FakeTensor)  # which cannot be mixed with kept frequencies
    return (_made if fake else _kept)(q.device, *numbers)


def _fixed(value: Any) -> Any:
    """Specialize a number that torch.compile may keep symbolic: a float by its hex string, an int through `range`."""
    if isinstance(value, float):
        return ("float", value.hex())
    return range(value)[-1] + 1 if isinstance(value, int) and not isinstance(value, bool) and value > 0 else value


# A model has one or two sets of frequencies; the bound only prevents a leak.
_FREQUENCIES: dict[tuple[Any, ...], Tensor] = {}
_FREQUENCIES_MAX = 256


def _kept(*key: Any) -> Tensor:
    try:
        inv_freq = _FREQUENCIES.get(key)
    except TypeError:  # unhashable, so not a number: `tables` raises for it below
        inv_freq = None
    if inv_freq is None:
        with constant_in_traces():
            inv_freq = _made(*key)
        if type(inv_freq) is Tensor:  # a FakeTensor must not outlive its mode
            if len(_FREQUENCIES) >= _FREQUENCIES_MAX:
                _FREQUENCIES.clear()
            _FREQUENCIES[key] = inv_freq
    return inv_freq


def _made(device: torch.device, rotary_dim: Any, scale: float, theta: float, *llama31: float) -> Tensor:
    if llama31:
        low, high, context = llama31
        length = int(number("rope_tables", "old_context_len", context))
        inv_freq, _ = tables.llama3(
            rotary_dim=rotary_dim, base=theta, factor=scale, low_freq_factor=low, high_freq_factor=high,
            original_max_position_embeddings=whole("rope_tables", "old_context_len", length, 1),
        )  # fmt: skip
    else:
        inv_freq, _ = tables.linear(rotary_dim=rotary_dim, base=theta, factor=scale)
    with torch.inference_mode(False):  # cached: a later call may need gradients
        return inv_freq.to(device, copy=True)


class _Traced:
    """Holds the frequencies of compiled graphs as attributes. Unlike dict entries, attributes set during tracing are
    visible to torch.compile, which makes them graph inputs."""


_TRACED = _Traced()


def _keep_for_tracing(*key: Any) -> str:
    key = tuple(float.fromhex(part[1]) if isinstance(part, tuple) else part for part in key)
    # A hash, as Dynamo rejects a dot in the name, and digits alone are ambiguous (1.5 and 15).
    name = f"inv_freq_{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}"
    setattr(_TRACED, name, _kept(*key))
    return name


# Equivalent to torch.compiler.assume_constant_result, which would import the whole compiler.
_keep_for_tracing.__dict__["_dynamo_marked_constant"] = True
