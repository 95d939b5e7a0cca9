"""vLLM's rotary layers with YaRN; exported by `compat.vllm`. Caches are [cos | sin] of float64 angles rounded once."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops._common import fail
from ..ops.rope import tables
from ._check import above_zero, flag, number, shape_of
from ._shared import heads, rotate_as_given
from ._vllm_rope import RotaryEmbedding, moved, on_device_of, rotary_embedding, stretched


class Yarn(NamedTuple):
    """Options of YaRN, as in `fusewise.ops.rope.tables.yarn`."""

    beta_fast: float
    beta_slow: float
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    """YaRN, arguments as in `fusewise.ops.rope.tables.yarn`; ⌈max_position_embeddings · scaling_factor⌉ rows.

    Args:
        max_position_embeddings: the original context length, before scaling.
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
        self.scaling_factor, self.truncate = scaling_factor, truncate
        self.beta_fast, self.beta_slow = beta_fast, beta_slow
        self._yarn = Yarn(beta_fast, beta_slow, mscale, mscale_all_dim, attention_factor, truncate)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_cos_sin_cache(self) -> Tensor:
        cache, self.mscale = yarn_cache(self, self.scaling_factor, self._yarn)
        return cache


class DeepseekScalingRotaryEmbedding(RotaryEmbedding):
    """YaRN with DeepSeek's factor on cos and sin: m(mscale) / m(mscale_all_dim).

    m(s) = 1 + 0.1 s ln(scaling_factor), or 1 if scaling_factor <= 1. query and key have a head dimension, so heads may be
    slices of wider ones.
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
        mscale: float = 1,
        mscale_all_dim: float = 0,
        init_cache: bool = True,
    ) -> None:
        op = type(self).__name__
        self.beta_fast, self.beta_slow = beta_fast, beta_slow
        self.scaling_factor = above_zero(op, "scaling_factor", scaling_factor)
        grown = 0.1 * math.log(self.scaling_factor) if self.scaling_factor > 1 else 0.0
        some, every = number(op, "mscale", mscale, 0), number(op, "mscale_all_dim", mscale_all_dim, 0)
        self.mscale = (1 + some * grown) / (1 + every * grown)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, init_cache)

    def _compute_cos_sin_cache(self) -> Tensor:
        yarn = Yarn(self.beta_fast, self.beta_slow, attention_factor=self.mscale)
        return yarn_cache(self, self.scaling_factor, yarn)[0]

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query and key (tokens, heads, head_size) in place, like vLLM's FlashInfer path; return both.

        Args:
            offsets: added to positions by an extra kernel.
        """
        return super().forward(moved(type(self).__name__, positions, offsets), query, key)

    forward_cuda = forward

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` out of place, with torch operations; differentiable."""
        return super().forward_native(moved(type(self).__name__, positions, offsets), query, key)

    @staticmethod
    def forward_static(
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        head_size: int,
        rotary_dim: int,
        cos_sin_cache: Tensor,
        is_neox_style: bool,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`forward_native` without a layer. The width of cos_sin_cache is used, rotary_dim is ignored."""
        positions = moved("DeepseekScalingRotaryEmbedding", positions, offsets)
        return RotaryEmbedding.forward_static(
            positions, query, key, head_size, rotary_dim, cos_sin_cache, is_neox_style
        )


class DeepseekV4ScalingRotaryEmbedding(DeepseekScalingRotaryEmbedding):
    """`DeepseekScalingRotaryEmbedding` for the last rotary_dim features of each head; the table is float32 for any dtype.

    The head size is that of query's last dimension.
    """

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
        """Rotate in place; return both.

        Args:
            offsets: added to positions by an extra kernel.
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
        """`forward` out of place, with torch operations; differentiable."""
        positions, width, cache = self._trailing(positions, query, offsets)
        dims = len(shape_of(type(self).__name__, "positions", positions))
        q = heads("rotary_embedding", "query", query, dims, width)
        k = None if key is None else heads("rotary_embedding", "key", key, dims, width)
        call = {
            "cos_sin": cache, "positions": positions, "layout": "thd" if dims == 1 else "bshd",
            "rotary_dim": self.rotary_dim, "rotary_start": -self.rotary_dim,
            "pairing": "half" if self.is_neox_style else "interleaved",
            "inverse": flag(type(self).__name__, "inverse", inverse),
        }  # fmt: skip
        return rotate_as_given(query, key, q, k, call, impl="reference")

    def _trailing(self, positions: Tensor, query: Tensor, offsets: Tensor | None) -> tuple[Tensor, int, Tensor]:
        op = type(self).__name__
        width = shape_of(op, "query", query, 1)[-1]
        if width < self.rotary_dim:
            contract = f"have heads of at least rotary_dim = {self.rotary_dim} features"
            fail(op, "query", contract, tuple(query.shape), "pass heads in a dimension")
        return moved(op, positions, offsets), width, on_device_of(query, self)


def yarn_cache(layer: RotaryEmbedding, factor: float, yarn: Yarn) -> tuple[Tensor, float]:
    """The YaRN table for a layer's extended context, and the factor applied to cos and sin."""
    original = layer.max_position_embeddings
    inv_freq, scaling = tables.yarn(
        rotary_dim=layer.rotary_dim,
        base=layer.base,
        factor=factor,
        original_max_position_embeddings=original,
        **yarn._asdict(),
    )
    return tables.fused_cos_sin(inv_freq, stretched(original, factor), scaling=scaling), scaling
