"""vLLM's rotary layers with scaling other than YaRN; exported by `compat.vllm`.

The layers differ from `RotaryEmbedding` in their cos/sin cache, [cos | sin] of float64 angles rounded once.
Legend: P = rotary_dim / 2 pairs; f = base^(−2i / rotary_dim), the unscaled frequency of pair i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops._common import check_count, fail, shown
from ..ops.rope import tables
from ._check import above_zero, check_tensor, flag, number, whole
from ._shared import heads, rotate_pair
from ._vllm_rope import LayerOfTables, RotaryEmbedding, moved, on_device_of, stretched


class LinearScalingRotaryEmbedding(RotaryEmbedding):
    """Linear scaling: frequencies f / factor, ⌈max_position_embeddings · factor⌉ rows.

    Tables of several factors are concatenated; `scaling_factor_to_offset` maps a factor to its first row.

    Args:
        scaling_factors: one factor above 0, or several.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factors: Sequence[float] | float,
        dtype: torch.dtype,
    ) -> None:
        several = scaling_factors if isinstance(scaling_factors, (list, tuple)) else [scaling_factors]
        self.scaling_factors = [above_zero(type(self).__name__, "scaling_factors", factor) for factor in several]
        if not self.scaling_factors:
            contract = "be a factor or several"
            fail(type(self).__name__, "scaling_factors", contract, shown(scaling_factors), "pass 1.0 for no scaling")
        self.scaling_factor_to_offset: dict[float, int] = {}
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_cos_sin_cache(self) -> Tensor:
        parts: list[Tensor] = []
        for factor in self.scaling_factors:
            inv_freq, _ = tables.linear(rotary_dim=self.rotary_dim, base=self.base, factor=factor)
            self.scaling_factor_to_offset[float(factor)] = sum(len(part) for part in parts)
            parts.append(tables.fused_cos_sin(inv_freq, stretched(self.max_position_embeddings, factor)))
        return torch.cat(parts)


class NTKScalingRotaryEmbedding(RotaryEmbedding):
    """Frequencies with base · factor as base, divided by factor^(1 / P); with mixed_b: f / factor^(((i + 1) / P)^mixed_b)."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype,
        mixed_b: float | None = None,
    ) -> None:
        self.scaling_factor = above_zero(type(self).__name__, "scaling_factor", scaling_factor)
        self.mixed_b = None if mixed_b is None else number(type(self).__name__, "mixed_b", mixed_b)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> Tensor:
        factor, width = self.scaling_factor, check_count(type(self).__name__, "rotary_dim", self.rotary_dim, 2)
        if self.mixed_b is None:
            trained = number(type(self).__name__, "base", base)
            return tables.linear(rotary_dim=width, base=trained * factor, factor=factor ** (2 / width))[0]
        pairs = width // 2
        divisors = [_power(factor, _power((i + 1) / pairs, self.mixed_b)) for i in range(pairs)]
        return tables.longrope(  # used for its per-frequency divisors
            rotary_dim=width, base=base, short_factor=divisors, long_factor=divisors, original_max_position_embeddings=2,
            attention_factor=1.0,
        )[0]  # fmt: skip


class DynamicNTKScalingRotaryEmbedding(RotaryEmbedding):
    """Base scaled by (factor · max_position_embeddings / max_trained_positions − factor + 1)^(P / (P − 1))."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        max_trained_positions: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype,
    ) -> None:
        op = type(self).__name__
        self.scaling_factor = number(op, "scaling_factor", scaling_factor)
        self.max_trained_positions = whole(op, "max_trained_positions", max_trained_positions, 1)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> Tensor:
        factor = self.scaling_factor
        growth = factor * self.max_position_embeddings / self.max_trained_positions - (factor - 1)
        if growth <= 0:
            contract = "keep factor · max_position_embeddings / max_trained_positions − factor + 1 above 0"
            fail(type(self).__name__, "scaling_factor", contract, f"{growth:g} with {factor:g}", "lower the factor")
        return of_grown_base(self, base, growth)


class DynamicNTKAlphaRotaryEmbedding(RotaryEmbedding):
    """Base scaled by scaling_alpha^(P / (P − 1)) (Hunyuan)."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_alpha: float,
        dtype: torch.dtype,
    ) -> None:
        self.scaling_alpha = above_zero(type(self).__name__, "scaling_alpha", scaling_alpha)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> Tensor:
        return of_grown_base(self, base, self.scaling_alpha)


class Llama3RotaryEmbedding(RotaryEmbedding):
    """Llama 3.1 scaling, see `fusewise.ops.rope.tables.llama3`; orig_max_position is the original context length."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        scaling_factor: float,
        low_freq_factor: float,
        high_freq_factor: float,
        orig_max_position: int,
    ) -> None:
        self.scaling_factor, self.orig_max_position = scaling_factor, orig_max_position
        self.low_freq_factor, self.high_freq_factor = low_freq_factor, high_freq_factor
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> Tensor:
        return tables.llama3(
            rotary_dim=self.rotary_dim, base=base, factor=self.scaling_factor, low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor, original_max_position_embeddings=self.orig_max_position,
        )[0]  # fmt: skip


class Gemma4RotaryEmbedding(RotaryEmbedding):
    """Gemma 4: rotates whole heads, pairs (i, i + head_size / 2), frequencies base^(−2i / head_size) for i < rotary_dim / 2,
    else 0. The layer's attribute rotary_dim is head_size."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
    ) -> None:
        op = type(self).__name__
        head_size = check_count(op, "head_size", head_size)
        self.rope_angles = whole(op, "rotary_dim", rotary_dim, 0, head_size) // 2
        self.nope_angles = head_size // 2 - self.rope_angles
        super().__init__(head_size, head_size, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> Tensor:
        inv_freq, _ = tables.default(rotary_dim=self.head_size, base=base)
        inv_freq[self.rope_angles :] = 0
        return inv_freq


class Phi3LongRoPEScaledRotaryEmbedding(LayerOfTables):
    """LongRoPE: frequencies f / short_factor[i] or f / long_factor[i].

    cos and sin are multiplied by short_mscale or long_mscale, by default √(1 + ln(s) / ln(original)) if
    s = max_position_embeddings / original > 1.

    `long_short_cos_sin_cache` holds both tables, the short one (original_max_position_embeddings rows) first. `use_long_rope`
    selects one: the long table if max_position_embeddings exceeds the original context. (vLLM decides by the configured
    max_model_len, which is unknown here.) Set it to False to serve only the original context.

    Args:
        short_factor, long_factor: P numbers each.
        is_neox_style: must be True; no model uses the other pairing.
    """

    long_short_cos_sin_cache: Tensor

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        original_max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        short_factor: Sequence[float],
        long_factor: Sequence[float],
        short_mscale: float | None = None,
        long_mscale: float | None = None,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        if not flag(op, "is_neox_style", is_neox_style):
            fail(op, "is_neox_style", "be True", is_neox_style, "use the pairing of the halves")
        if not isinstance(dtype, torch.dtype):
            fail(op, "dtype", "be a torch.dtype", shown(dtype), "pass that of the model", TypeError)
        self.head_size, self.rotary_dim, self.base = check_count(op, "head_size", head_size), rotary_dim, base
        longest = whole(op, "max_position_embeddings", max_position_embeddings, 1)
        original = whole(op, "original_max_position_embeddings", original_max_position_embeddings, 2)
        self.max_position_embeddings, self.original_max_position_embeddings = longest, original
        self.short_factor, self.long_factor = short_factor, long_factor
        self.use_long_rope = longest > original
        self.short_mscale, self.long_mscale = short_mscale, long_mscale
        cache = self._computed()["long_short_cos_sin_cache"].to(torch.get_default_device(), dtype)
        self.register_buffer("long_short_cos_sin_cache", cache, persistent=False)

    def _computed(self) -> dict[str, Tensor]:
        short, self.short_mscale = self._table(self.short_mscale)
        long, self.long_mscale = self._table(self.long_mscale, self.original_max_position_embeddings + 1)
        return {"long_short_cos_sin_cache": torch.cat((short, long))}

    def _table(self, mscale: float | None, seq_len: int | None = None) -> tuple[Tensor, float]:
        """The table for seq_len (None: the short one) and the factor applied to it."""
        inv_freq, scaling = tables.longrope(
            rotary_dim=self.rotary_dim, base=self.base, short_factor=self.short_factor, long_factor=self.long_factor,
            original_max_position_embeddings=self.original_max_position_embeddings,
            max_position_embeddings=self.max_position_embeddings, attention_factor=mscale, seq_len=seq_len,
        )  # fmt: skip
        rows = self.original_max_position_embeddings if seq_len is None else self.max_position_embeddings
        return tables.fused_cos_sin(inv_freq, rows, scaling=scaling), scaling

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query and key out of place, (tokens, heads · head_size); differentiable.

        Args:
            positions: int64 or int32 (tokens,).
            query, key: (tokens, heads · head_size); key may be None.
            offsets: added to positions by an extra kernel.
        """
        op = type(self).__name__
        check_tensor(op, "query", query)
        q = heads(op, "query", query, 1, self.head_size)
        k = None if key is None else heads(op, "key", key, 1, self.head_size)
        original = self.original_max_position_embeddings
        cache = on_device_of(query, self, "long_short_cos_sin_cache")
        q, k = rotate_pair(
            q, k, cos_sin=cache[original:] if self.use_long_rope else cache[:original],
            positions=moved(op, positions, offsets), layout="thd", rotary_dim=self.rotary_dim,
        )  # fmt: skip
        return q.flatten(-2), None if k is None else k.flatten(-2)

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, "
            f"max_position_embeddings={self.max_position_embeddings}, base={self.base}"
        )


def of_grown_base(layer: RotaryEmbedding, base: float, growth: float) -> Tensor:
    """Frequencies with base · growth^(P / (P − 1)) as base."""
    op = type(layer).__name__
    width = check_count(op, "rotary_dim", layer.rotary_dim, 4)
    return tables.default(rotary_dim=width, base=number(op, "base", base) * _power(growth, width / (width - 2)))[0]


def _power(base: float, exponent: float) -> float:
    """base^exponent, inf on overflow: the caller's check then names the argument."""
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return math.inf
