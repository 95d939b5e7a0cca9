"""vLLM's M-RoPE (multimodal RoPE on three axes); exported by `compat.vllm`. Shape legend: P = rotary_dim / 2 pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops._common import check_count, fail, shown
from ..ops.rope import rope_
from ._check import WRONG, explain, flag, shape_of, whole
from ._shared import alike, cut, heads, pairing_of_neox, rotate_as_given
from ._vllm_rope import RotaryEmbedding, on_device_of
from ._vllm_yarn import Yarn, yarn_cache


class MRotaryEmbedding(RotaryEmbedding):
    """M-RoPE: each pair is rotated by the temporal, height or width position of its token, as assigned by mrope_section.

    The table is that of `RotaryEmbedding`, or of YaRN if scaling_factor is given. It has positions_factor ·
    max_position_embeddings (· scaling_factor) rows, because the positions of a video exceed its number of tokens.

    Args:
        mrope_section: numbers of pairs (t, h, w) that sum to rotary_dim / 2; None: only positions (tokens,) are accepted.
        mrope_interleaved: axes alternate t, h, w, t, h, w, …, and the remaining pairs are t; else sections are consecutive.
        positions_factor: factor on the table length.
        scaling_factor: YaRN factor; the arguments after it are those of `fusewise.ops.rope.tables.yarn`. The original context
            is positions_factor · max_position_embeddings, as in vLLM.
    """

    _axes: tuple[int, ...] = (3,)  # valid numbers of rows in positions

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        mrope_section: list[int] | None = None,
        mrope_interleaved: bool = False,
        *,
        positions_factor: int = 4,
        scaling_factor: float | None = None,
        beta_fast: int = 32,
        beta_slow: int = 1,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        attention_factor: float | None = None,
        truncate: bool = True,
    ) -> None:
        op = type(self).__name__
        trained = whole(op, "max_position_embeddings", max_position_embeddings, 0)
        self.cache_max_position_num = trained * whole(op, "positions_factor", positions_factor, 1)
        self.scaling_factor, self.truncate = scaling_factor, truncate
        self.beta_fast, self.beta_slow = beta_fast, beta_slow
        self.mscale = 1.0
        self._yarn = Yarn(beta_fast, beta_slow, mscale, mscale_all_dim, attention_factor, truncate)
        super().__init__(head_size, rotary_dim, self.cache_max_position_num, base, is_neox_style, dtype)
        self.mrope_interleaved = flag(op, "mrope_interleaved", mrope_interleaved)
        self.mrope_section = mrope_section
        if mrope_section:
            self._order(mrope_section)

    def _order(self, sections: Sequence[int]) -> None:
        """Check the sections; subclasses with another order of axes set it here."""
        pairs_of_axes(type(self).__name__, sections, self.rotary_dim // 2)

    def _compute_cos_sin_cache(self) -> Tensor:
        if self.scaling_factor is None:
            return super()._compute_cos_sin_cache()
        cache, self.mscale = yarn_cache(self, self.scaling_factor, self._yarn)
        return cache

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query and key: in place for positions (3, tokens), out of place for (tokens,), as in vLLM.

        Args:
            positions: int64 or int32, (3, tokens) for axes t, h, w, or (tokens,), the same for all three.
            query, key: (tokens, heads · head_size) or (tokens, heads, head_size); key may be None.
            offsets: ignored, as in vLLM.
        """
        if axes_of(type(self).__name__, positions, self._axes) == 1:
            return self._rotated(positions, query, key)
        q, k, call = self._call(positions, query, key)
        rope_(q, k, **call)
        return query, key

    forward_cuda = forward

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` out of place, with torch operations; differentiable."""
        axes_of(type(self).__name__, positions, self._axes)
        return self._rotated(positions, query, key, impl="reference")

    def _rotated(
        self, positions: Tensor, query: Tensor, key: Tensor | None, impl: str = "auto"
    ) -> tuple[Tensor, Tensor | None]:
        q, k, call = self._call(positions, query, key)
        return rotate_as_given(query, key, q, k, call, impl)

    def _call(
        self, positions: Tensor, query: Tensor, key: Tensor | None
    ) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
        op = type(self).__name__
        q = heads(op, "query", query, 1, self.head_size)
        k = None if key is None else heads(op, "key", key, 1, self.head_size)
        call: dict[str, Any] = {
            "cos_sin": on_device_of(query, self),
            "positions": positions,
            "layout": "thd",
            "pairing": pairing_of_neox(op, self.is_neox_style),
            "rotary_dim": self.cos_sin_cache.shape[-1],
        }
        if positions.dim() == 2:
            if not self.mrope_section:
                fail(op, "mrope_section", "be given for positions (3, tokens)", None, "pass the model's mrope_section")
            call |= {"sections": tuple(self.mrope_section), "sections_interleaved": self.mrope_interleaved}
        return q, k, call

    @staticmethod
    def get_next_input_positions(mrope_position_delta: int, context_len: int, seq_len: int) -> list[list[int]]:
        """Positions of the following text tokens context_len … seq_len − 1, one list per axis."""
        first, last = context_len + mrope_position_delta, seq_len + mrope_position_delta
        return [list(range(first, last)) for _ in range(3)]

    @staticmethod
    def get_next_input_positions_tensor(
        out: Any, out_offset: int, mrope_position_delta: int, context_len: int, num_new_tokens: int
    ) -> None:
        """Write the positions of the next num_new_tokens tokens into out, a numpy array (3, columns), from column out_offset on."""
        first = mrope_position_delta + context_len
        out[:, out_offset : out_offset + num_new_tokens] = list(range(first, first + num_new_tokens))


def triton_mrope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    mrope_section: list[int],
    head_size: int,
    rotary_dim: int,
    mrope_interleaved: bool,
    is_neox_style: bool,
) -> tuple[Tensor, Tensor]:
    """M-RoPE: rotate q and k in place by tables of the three axes; return both.

    One launch; an extra small kernel computes table row indices.

    Args:
        q, k: (tokens, heads · head_size), any stride between tokens.
        cos, sin: (3, tokens, rotary_dim / 2), float32, bfloat16 or float16.
        mrope_section, mrope_interleaved: as in `MRotaryEmbedding`.
        rotary_dim: the first rotary_dim features of every head are rotated.
        is_neox_style: pairs (i, i + rotary_dim / 2); else (2i, 2i + 1), GPT-J style.
    """
    op = "triton_mrope"
    shape = shape_of(op, "cos", cos)
    if len(shape) != 3 or shape[0] != 3:
        fail(op, "cos", "have shape (3, tokens, rotary_dim / 2)", tuple(shape), "pass the tables of the three axes")
    width = check_count(op, "rotary_dim", rotary_dim, 2)
    cos, sin = alike(op, *cut(op, cos, sin, lambda x: x.flatten(0, 1)))
    sections = pairs_of_axes(op, mrope_section, width // 2)
    rows = torch.arange(3 * shape[1], dtype=torch.int32, device=cos.device).view(3, shape[1])
    rope_(
        heads(op, "q", q, 1, head_size), heads(op, "k", k, 1, head_size), cos=cos, sin=sin, positions=rows,
        sections=(sections[0], sections[1], sections[2]), layout="thd", rotary_dim=width,
        sections_interleaved=flag(op, "mrope_interleaved", mrope_interleaved),
        pairing=pairing_of_neox(op, is_neox_style),
    )  # fmt: skip
    return q, k


def apply_interleaved_rope(x: Tensor, mrope_section: list[int]) -> Tensor:
    """Merge the tables of three axes, (3, …, P) to a new (…, P).

    With mrope_section (t, h, w), column i is from axis h for i = 1, 4, … below 3 · h, from axis w for i = 2, 5, … below
    3 · w, else from axis t.
    """
    op = "apply_interleaved_rope"
    shape = shape_of(op, "x", x, 2)
    if shape[0] != 3:
        fail(op, "x", "have shape (3, …, pairs)", tuple(shape), "stack the tables of the three axes")
    sections = pairs_of_axes(op, mrope_section, shape[-1])
    try:
        dealt = x[0].clone()
        for axis in (1, 2):
            columns = slice(axis, 3 * sections[axis], 3)
            dealt[..., columns] = x[axis, ..., columns]
    except WRONG:
        explain(op, "x", x)
        raise
    return dealt


def axes_of(op: str, positions: Tensor, rows: tuple[int, ...]) -> int:
    """Check positions, (tokens,) or (n, tokens) with n in `rows`, and return their number of dimensions."""
    shape = shape_of(op, "positions", positions)
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] not in rows):
        contract = " or ".join(["have shape (tokens,)", *(f"({count}, tokens)" for count in rows)])
        fail(op, "positions", contract, tuple(shape), "pass one row an axis")
    return len(shape)


def pairs_of_axes(op: str, sections: Sequence[int], pairs: int, order: str = "(t, h, w)", least: int = 3) -> list[int]:
    """Check mrope_section, from `least` to three numbers of pairs that sum to `pairs`; `order` is for the error message."""
    contract = f"be three numbers of pairs {order} that sum to rotary_dim / 2 = {pairs}"
    fix = "pass the model's mrope_section"
    if not isinstance(sections, (list, tuple)):
        fail(op, "mrope_section", contract, shown(sections), fix, TypeError)
    numbers = [whole(op, "mrope_section", n, 0) for n in sections]
    if not least <= len(numbers) <= 3 or sum(numbers) != pairs:
        fail(op, "mrope_section", contract, shown(sections), fix)
    return numbers
