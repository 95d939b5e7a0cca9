"""The rotary layers of vLLM with scaling, for `fusewise.compat.vllm`.

Every layer is its table, [cos | sin] of float64 angles rounded once; what rotates is that of `RotaryEmbedding`. Shape legend:
P = rotary_dim / 2 pairs; f is base^(−2i / rotary_dim), the frequency of pair i without scaling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops._common import check_count, fail, shown
from ..ops.rope import tables
from ._check import check_tensor, explain, flag, number, shape_of, whole
from ._shared import heads, rotate_pair
from ._vllm_rope import RotaryEmbedding, rotary_embedding, stretched, yarn_cache


class LinearScalingRotaryEmbedding(RotaryEmbedding):
    """Frequencies f / factor, ⌈max_position_embeddings · factor⌉ rows. Of several factors the tables follow one another, and
    `scaling_factor_to_offset` has the first row of each.

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
        self.scaling_factors = [_above_zero(type(self).__name__, "scaling_factors", factor) for factor in several]
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
    """Frequencies of the base base · factor, divided by factor^(1 / P); or with mixed_b, f / factor^(((i + 1) / P)^mixed_b)."""

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
        self.scaling_factor = _above_zero(type(self).__name__, "scaling_factor", scaling_factor)
        self.mixed_b = None if mixed_b is None else number(type(self).__name__, "mixed_b", mixed_b)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> Tensor:
        factor, width = self.scaling_factor, check_count(type(self).__name__, "rotary_dim", self.rotary_dim, 2)
        if self.mixed_b is None:
            trained = number(type(self).__name__, "base", base)
            return tables.linear(rotary_dim=width, base=trained * factor, factor=factor ** (2 / width))[0]
        pairs = width // 2
        divisors = [_power(factor, _power((i + 1) / pairs, self.mixed_b)) for i in range(pairs)]
        return tables.longrope(  # its form: every frequency has a divisor
            rotary_dim=width, base=base, short_factor=divisors, long_factor=divisors, original_max_position_embeddings=2,
            attention_factor=1.0,
        )[0]  # fmt: skip


class DynamicNTKScalingRotaryEmbedding(RotaryEmbedding):
    """Frequencies of the base base · (factor · max_position_embeddings / max_trained_positions − factor + 1)^(P / (P − 1))."""

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
        return _of_grown_base(self, base, growth)


class DynamicNTKAlphaRotaryEmbedding(RotaryEmbedding):
    """Frequencies of the base base · scaling_alpha^(P / (P − 1)) (Hunyuan)."""

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
        self.scaling_alpha = _above_zero(type(self).__name__, "scaling_alpha", scaling_alpha)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> Tensor:
        return _of_grown_base(self, base, self.scaling_alpha)


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    """YaRN, as `fusewise.ops.rope.tables.yarn` has it, with the arguments of that; ⌈max_position_embeddings · scaling_factor⌉ rows.

    Args:
        max_position_embeddings: the original context, before scaling.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype,
        *,
        beta_fast: int = 32,
        beta_slow: int = 1,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        attention_factor: float | None = None,
        truncate: bool = True,
    ) -> None:
        self.scaling_factor, self.beta_fast, self.beta_slow, self.truncate = (
            scaling_factor,
            beta_fast,
            beta_slow,
            truncate,
        )
        self._yarn = {
            "beta_fast": beta_fast, "beta_slow": beta_slow, "mscale": mscale, "mscale_all_dim": mscale_all_dim,
            "attention_factor": attention_factor, "truncate": truncate,
        }  # fmt: skip
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_cos_sin_cache(self) -> Tensor:
        cache, self.mscale = yarn_cache(self, self.scaling_factor, self._yarn)
        return cache


class DeepseekScalingRotaryEmbedding(RotaryEmbedding):
    """YaRN with DeepSeek's scaling of cos and sin: m(mscale) / m(mscale_all_dim), m(s) = 1 + 0.1 s ln(scaling_factor), and 1 for
    a factor up to 1. Heads of query and key lie in a dimension, and so may be slices of wider ones."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype,
        *,
        beta_fast: int = 32,
        beta_slow: int = 1,
        mscale: float = 1,
        mscale_all_dim: float = 0,
        init_cache: bool = True,
    ) -> None:
        op = type(self).__name__
        self.beta_fast, self.beta_slow = beta_fast, beta_slow
        self.scaling_factor = _above_zero(op, "scaling_factor", scaling_factor)
        grown = 0.1 * math.log(self.scaling_factor) if self.scaling_factor > 1 else 0.0
        some, every = number(op, "mscale", mscale, 0), number(op, "mscale_all_dim", mscale_all_dim, 0)
        self.mscale = (1 + some * grown) / (1 + every * grown)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, init_cache)

    def _compute_cos_sin_cache(self) -> Tensor:
        options = {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "attention_factor": self.mscale}
        return yarn_cache(self, self.scaling_factor, options)[0]

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query and key (tokens, heads, head_size) in place, as FlashInfer does for theirs; returns both.

        Args:
            offsets: added to positions, in a kernel of its own.
        """
        return super().forward(_moved(type(self).__name__, positions, offsets), query, key)

    forward_cuda = forward

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The same as new tensors, in torch's own operations; differentiable."""
        return super().forward_native(_moved(type(self).__name__, positions, offsets), query, key)


class DeepseekV4ScalingRotaryEmbedding(DeepseekScalingRotaryEmbedding):
    """The same for the last rotary_dim features of heads of any width, that of query's last dimension; the table is float32
    whatever dtype is."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("init_cache", None)
        super().__init__(*args, **options, init_cache=False)
        cache = self._compute_cos_sin_cache().to(torch.get_default_device())
        self.register_buffer("cos_sin_cache", cache, persistent=False)

    def forward(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None = None,
        offsets: Tensor | None = None,
        inverse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate in place; returns both.

        Args:
            offsets: added to positions, in a kernel of its own.
            inverse: rotate by −θ.
        """
        positions, width, cache = self._trailing(positions, query, offsets)
        start = width - self.rotary_dim
        inverse = flag(type(self).__name__, "inverse", inverse)
        rotary_embedding(positions, query, key, width, cache, self.is_neox_style, start, inverse)
        return query, key

    forward_cuda = forward

    def forward_native(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None = None,
        offsets: Tensor | None = None,
        inverse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The same as new tensors, in torch's own operations; differentiable."""
        positions, width, cache = self._trailing(positions, query, offsets)
        dims = len(shape_of(type(self).__name__, "positions", positions))
        q = heads("rotary_embedding", "query", query, dims, width)
        k = None if key is None else heads("rotary_embedding", "key", key, dims, width)
        q, k = rotate_pair(
            q, k, cos_sin=cache, positions=positions, layout="thd" if dims == 1 else "bshd", rotary_dim=self.rotary_dim,
            rotary_start=-self.rotary_dim, pairing="half" if self.is_neox_style else "interleaved",
            inverse=flag(type(self).__name__, "inverse", inverse), impl="reference",
        )  # fmt: skip
        return q.reshape(query.shape), None if key is None or k is None else k.reshape(key.shape)

    def _trailing(self, positions: Tensor, query: Tensor, offsets: Tensor | None) -> tuple[Tensor, int, Tensor]:
        op = type(self).__name__
        width = shape_of(op, "query", query, 1)[-1]
        if width < self.rotary_dim:
            contract = f"have heads of at least rotary_dim = {self.rotary_dim} features"
            fail(op, "query", contract, tuple(query.shape), "pass heads in a dimension")
        return _moved(op, positions, offsets), width, self.cos_sin_cache.to(query.device)


class Llama3RotaryEmbedding(RotaryEmbedding):
    """The frequencies of Llama 3.1, as `fusewise.ops.rope.tables.llama3` has them; orig_max_position is its original context."""

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
    """The whole head rotates, pairs (i, i + head_size / 2), with frequencies base^(−2i / head_size) for i < rotary_dim / 2 and 0
    for the others; the layer's rotary_dim is head_size."""

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
        check_count(op, "head_size", head_size)
        self.rope_angles = whole(op, "rotary_dim", rotary_dim, 0, head_size) // 2
        self.nope_angles = head_size // 2 - self.rope_angles
        super().__init__(head_size, head_size, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> Tensor:
        inv_freq, _ = tables.default(rotary_dim=self.head_size, base=base)
        inv_freq[self.rope_angles :] = 0
        return inv_freq


class Phi3LongRoPEScaledRotaryEmbedding(nn.Module):
    """LongRoPE: frequencies f / short_factor[i] or f / long_factor[i]; cos and sin times short_mscale or long_mscale, else
    √(1 + ln(s) / ln(original)) for s = max_position_embeddings / original above 1.

    `long_short_cos_sin_cache` has both tables, the short one (original_max_position_embeddings rows) first. `use_long_rope` says
    which is read: the long one if max_position_embeddings is above the original (there the configured max_model_len decides,
    which is not known here); set it to False to serve no more than the original context.

    Args:
        short_factor, long_factor: P numbers each.
        is_neox_style: True; the other pairing has no such model.
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
        short, self.short_mscale = self._table(short_mscale)
        long, self.long_mscale = self._table(long_mscale, original + 1)
        cache = torch.cat((short, long)).to(torch.get_default_device(), dtype)
        self.register_buffer("long_short_cos_sin_cache", cache, persistent=False)

    def _table(self, mscale: float | None, seq_len: int | None = None) -> tuple[Tensor, float]:
        """The table for sequences of that length, and the factor that is in it."""
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
        """Rotate query and key as new tensors (tokens, heads · head_size); differentiable.

        Args:
            positions: int64 or int32 (tokens,).
            query, key: (tokens, heads · head_size); key may be None.
            offsets: added to positions, in a kernel of its own.
        """
        op = type(self).__name__
        check_tensor(op, "query", query)
        q = heads(op, "query", query, 1, self.head_size)
        k = None if key is None else heads(op, "key", key, 1, self.head_size)
        cache, original = self.long_short_cos_sin_cache.to(query.device), self.original_max_position_embeddings
        q, k = rotate_pair(
            q, k, cos_sin=cache[original:] if self.use_long_rope else cache[:original],
            positions=_moved(op, positions, offsets), layout="thd", rotary_dim=self.rotary_dim,
        )  # fmt: skip
        return q.flatten(-2), None if k is None else k.flatten(-2)

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, "
            f"max_position_embeddings={self.max_position_embeddings}, base={self.base}"
        )


def _above_zero(op: str, name: str, value: Any) -> float:
    found = number(op, name, value)
    if found <= 0:
        fail(op, name, "be above 0", shown(value), f"check what is passed for {name}")
    return found


def _of_grown_base(layer: RotaryEmbedding, base: float, growth: float) -> Tensor:
    """The frequencies of base · growth^(P / (P − 1))."""
    op = type(layer).__name__
    width = check_count(op, "rotary_dim", layer.rotary_dim, 4)
    return tables.default(rotary_dim=width, base=number(op, "base", base) * _power(growth, width / (width - 2)))[0]


def _power(base: float, exponent: float) -> float:
    """base^exponent, infinite where that is beyond the floats: what takes it says so of its own argument."""
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return math.inf


def _moved(op: str, positions: Tensor, offsets: Tensor | None) -> Tensor:
    """Positions with their offsets added."""
    if offsets is None:
        return positions
    shape = shape_of(op, "positions", positions)
    if shape_of(op, "offsets", offsets) != shape:
        fail(op, "offsets", f"have the shape of positions, {tuple(shape)}", tuple(offsets.shape), "pass one a token")
    for name, x in (("positions", positions), ("offsets", offsets)):
        if x.is_nested or x.layout != torch.strided:
            explain(op, name, x)
    return positions + offsets
