"""The rotary layer of vLLM's dual chunk attention; exported by `compat.vllm`.

Shape legend: T tokens, H heads, D head_size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops._common import fail
from ..ops.rope import rope, tables
from ..ops.rope._validate import INTS, check_tensor
from ._check import shape_of, whole
from ._shared import heads, pairing_of_neox, unit_stride
from ._vllm_rope import RotaryEmbedding, moved, on_device_of


class DualChunkRotaryEmbedding(RotaryEmbedding):
    """RoPE of dual chunk attention (Qwen2.5-1M; An et al., arXiv 2402.17463).

    Keys are rotated by their position within the chunk. Queries are rotated five times, for keys of the same chunk, of the
    previous chunk and of earlier chunks. Rotary positions of a token at position p, with c = chunk_size − local_size and
    r = p mod c:

        key, query              r
        query_succ              min(r + c, chunk_size)
        query_inter             min(2c − 1, chunk_size)
        query_succ_critical     r + c
        query_inter_critical    r + chunk_size

    `cos_sin_cache` has rows 0 … chunk_size + c − 1, [cos | sin] of row · base^(−2i / rotary_dim). vLLM's five tables are
    rows of it.

    Args:
        chunk_size: at least 1.
        local_size: from 0 to chunk_size − 1.

    Raises:
        TypeError, ValueError: `DualChunkRotaryEmbedding: <argument> must …`, or `rope: …`.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        chunk_size: int,
        local_size: int,
    ) -> None:
        op = type(self).__name__
        self.chunk_size = whole(op, "chunk_size", chunk_size, 1)
        self.local_size = whole(op, "local_size", local_size, 0, self.chunk_size - 1)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_cos_sin_cache(self) -> Tensor:
        return tables.fused_cos_sin(self._compute_inv_freq(self.base), 2 * self.chunk_size - self.local_size)

    def forward(  # type: ignore[override]
        self, positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate query (five times) and key out of place; differentiable. Two launches, plus small kernels for row indices.

        Args:
            positions: int64 or int32 (T,). A key at a position outside 0 … max_position_embeddings − 1 becomes NaN.
            query, key: (T, H · D) or (T, H, D).
            offsets: added to positions.

        Returns:
            The five queries concatenated in the order above, (T, 5 · H · D), and the key (T, H · D).
        """
        return self._five(positions, query, key, offsets)

    forward_cuda = forward  # type: ignore[assignment]

    def forward_native(  # type: ignore[override]
        self, positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`forward` with torch operations."""
        return self._five(positions, query, key, offsets, impl="reference")

    def _five(
        self, positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None, impl: str = "auto"
    ) -> tuple[Tensor, Tensor]:
        op = type(self).__name__
        q, k = heads(op, "query", query, 1, self.head_size), heads(op, "key", key, 1, self.head_size)
        shape = shape_of(op, "positions", positions)
        if len(shape) != 1:
            fail(op, "positions", "have shape (tokens,)", tuple(shape), "flatten them, and query and key with them")
        check_tensor(op, "positions", positions, INTS, q.device)
        at, chunk = moved(op, positions, offsets), self.chunk_size
        step = chunk - self.local_size
        place = at % step
        inside = (at >= 0) & (at < self.max_position_embeddings)
        rows = (
            place,
            (place + step).clamp(max=chunk),
            torch.full_like(place, min(2 * step - 1, chunk)),
            place + step,
            place + chunk,
        )
        call: dict[str, Any] = {
            "cos_sin": on_device_of(q, self),
            "pairing": pairing_of_neox(op, self.is_neox_style),
            "rotary_dim": self.rotary_dim,
            "impl": impl,
        }
        rotated_k: Tensor = rope(unit_stride(k, "key"), positions=place.where(inside, -1), layout="thd", **call)
        five = unit_stride(q, "query")[:, None].expand(-1, len(rows), -1, -1)
        rotated_q: Tensor = rope(five, positions=torch.stack(rows), layout="sbhd", **call)
        return rotated_q.flatten(1), rotated_k.flatten(1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, chunk_size={self.chunk_size}, local_size={self.local_size}"
