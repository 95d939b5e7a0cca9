"""vLLM's multi-axis rotary layers with a model-specific assignment of axes to pairs; exported by `compat.vllm`.

Shape legend: T tokens, P = rotary_dim / 2 pairs, f_i = base^(−2i / rotary_dim).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops._common import FLOATS, dtype_name, fail, shown
from ..ops.rope._validate import INTS, check_tensor
from ._check import above_zero, flag, shape_of, whole
from ._shared import rotate_images
from ._vllm_mrope import MRotaryEmbedding, axes_of, pairs_of_axes
from ._vllm_rope import RotaryEmbedding, on_device_of
from ._vllm_scaling import of_grown_base


class _AxisOfEveryPair(MRotaryEmbedding):
    """M-RoPE with an arbitrary axis per pair, out of place.

    `fusewise.rope` supports consecutive sections and the t, h, w interleaving. For any other order this class gathers the
    cos/sin rows of the tokens, (T, 2P), and rotates by them in one launch.
    """

    _pair_axes: Tensor

    def _follow(self, axes: list[int]) -> None:
        whole(type(self).__name__, "max_position_embeddings", self.max_position_embeddings, 1)
        self._followed = axes
        self.register_buffer("_pair_axes", torch.tensor(axes), persistent=False)

    def _computed(self) -> dict[str, Tensor]:
        return {**super()._computed(), "_pair_axes": torch.tensor(self._followed, device="cpu")}

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query and key out of place; differentiable. Up to six small kernels gather the cos/sin rows.

        Args:
            positions: int64 or int32, (axes, tokens), or (tokens,), the same for all axes.
            query, key: (tokens, heads · head_size) or (tokens, heads, head_size); key may be None.
            offsets: ignored.
        """
        axes_of(type(self).__name__, positions, self._axes)
        return self._rotated(positions, query, key)

    forward_cuda = forward

    def _call(
        self, positions: Tensor, query: Tensor, key: Tensor | None
    ) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
        if positions.dim() == 1 or not self.mrope_section:
            return super()._call(positions, query, key)
        op = type(self).__name__
        q, k, call = super()._call(positions[0], query, key)
        check_tensor(op, "positions", positions, INTS, q.device)
        if positions.shape[1] != q.shape[0]:
            contract = f"have {q.shape[0]} columns, one a token of query"
            fail(op, "positions", contract, tuple(positions.shape), "pass one position a token and axis")
        return q, k, call | {"cos_sin": self._rows(positions, call["cos_sin"]), "positions": None}

    def _rows(self, positions: Tensor, cache: Tensor) -> Tensor:
        """[cos | sin] per token (T, 2P), each pair at the position on its axis; NaN for positions outside the table."""
        wanted = positions.index_select(0, on_device_of(positions, self, "_pair_axes")).T[:, None].long()
        there = wanted.clamp(0, cache.shape[0] - 1)
        rows = cache.view(len(cache), 2, -1).gather(0, there.expand(-1, 2, -1))
        return rows.masked_fill_(there != wanted, math.nan).flatten(-2)

    def _spatial_then_time(self, height: int, width: int, time: int) -> None:
        if height != width:
            contract = "give height and width as many pairs"
            fix = "pass the model's mrope_section"
            fail(type(self).__name__, "mrope_section", contract, f"{height} and {width}", fix)
        self._follow([1, 2] * height + [0] * time)


class Ernie4_5_VLRotaryEmbedding(_AxisOfEveryPair):  # noqa: N801 - vLLM's name
    """M-RoPE of ERNIE 4.5 VL: spatial pairs alternate between height and width, temporal pairs come last.

        θ_i = f_i · height for even i < 2h,   f_i · width for odd i < 2h,   f_i · time for i ≥ 2h

    As `MRotaryEmbedding`, except: mrope_section is (h, w, t) with h = w, mrope_interleaved is ignored, and rotation is always
    out of place.

    Raises:
        TypeError, ValueError: `Ernie4_5_VLRotaryEmbedding: <argument> must …`, or `rope: …`.
    """

    def _order(self, sections: Sequence[int]) -> None:
        self._spatial_then_time(*pairs_of_axes(type(self).__name__, sections, self.rotary_dim // 2, "(h, w, t)"))


class BailingMRotaryEmbedding(_AxisOfEveryPair):
    """M-RoPE of Bailing (Ling V3 VL): `Ernie4_5_VLRotaryEmbedding` with mrope_section (t, h, w), h = w.

    Raises:
        TypeError, ValueError: `BailingMRotaryEmbedding: <argument> must …`, or `rope: …`.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        mrope_section: list[int],
    ) -> None:
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)
        self.mrope_section = mrope_section
        self._order(mrope_section)

    def _order(self, sections: Sequence[int]) -> None:
        time, height, width = pairs_of_axes(type(self).__name__, sections, self.rotary_dim // 2)
        self.spatial_size = height + width
        self._spatial_then_time(height, width, time)

    def select_cos_sin(self, positions: Tensor, cos_sin_cache: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gather cos and sin of the tokens, each (T, P), from cos_sin_cache (rows, 2P); None: the layer's."""
        op = type(self).__name__
        cache = self.cos_sin_cache if cos_sin_cache is None else cos_sin_cache
        shape = shape_of(op, "cos_sin_cache", cache, 2)
        if len(shape) != 2 or shape[-1] != self.rotary_dim or not shape[0]:
            contract = f"have shape (rows, {self.rotary_dim})"
            fail(op, "cos_sin_cache", contract, tuple(shape), "pass a table [cos | sin] of this layer's width")
        check_tensor(op, "cos_sin_cache", cache, FLOATS, None)
        check_tensor(op, "positions", positions, INTS, cache.device)
        if axes_of(op, positions, self._axes) == 1:
            positions = positions.expand(3, -1)
        cos, sin = self._rows(positions, cache).chunk(2, -1)
        return cos, sin

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query and key: in place for positions (3, tokens) with interleaved pairs, else out of place, as in vLLM.

        Up to six small kernels gather the cos/sin rows.
        """
        if self.is_neox_style:
            return super().forward(positions, query, key)
        return MRotaryEmbedding.forward(self, positions, query, key)

    forward_cuda = forward


class MRotaryEmbeddingInterleaved(_AxisOfEveryPair):
    """M-RoPE of openPangu: each axis is spread evenly over the pairs; `mrope_dim` holds the axis of each pair.

        θ_i = f_i · position on axis mrope_dim[i]

    Table and methods are those of `MRotaryEmbedding`, but rotation is always out of place.

    Args:
        mrope_section: numbers of pairs that sum to rotary_dim / 2: (t, h, w) with t >= 1, or (h, w) for axes 0 and 1; then
            positions may have 2 rows, and a third is ignored.
        mrope_interleaved: must be True.

    Raises:
        TypeError, ValueError: `MRotaryEmbeddingInterleaved: <argument> must …`, or `rope: …`.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        mrope_section: list[int],
        mrope_interleaved: bool = True,
    ) -> None:
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)
        op = type(self).__name__
        self.mrope_section, self.mrope_interleaved = mrope_section, flag(op, "mrope_interleaved", mrope_interleaved)
        if not self.mrope_interleaved:
            fail(op, "mrope_interleaved", "be True", mrope_interleaved, "use MRotaryEmbedding")
        self._order(mrope_section)

    def _order(self, sections: Sequence[int]) -> None:
        op = type(self).__name__
        counts = pairs_of_axes(op, sections, self.rotary_dim // 2, "(t, h, w), or two (h, w),", least=2)
        if len(counts) == 2:
            self._axes, order = (2, 3), self.get_mrope_interleaved_id_list(counts[0], counts[1], 0)
        else:
            time = whole(op, "mrope_section", counts[0], 1)  # the last pair is temporal
            order = self.get_mrope_interleaved_id_list(time, counts[1], counts[2], force_last=True)
        self.mrope_dim = order * 2
        self._follow(order)

    @staticmethod
    def get_mrope_interleaved_id_list(a: int, b: int, c: int, force_last: bool = False) -> list[int]:
        """The axis of every pair, given a pairs of axis 0, b of axis 1 and c of axis 2.

        Greedy: the next pair goes to the axis with the smallest assigned fraction (ties: the lowest axis), never to the same
        axis twice in a row while another has pairs left. force_last reserves one pair of axis 0 for the end.
        """
        counts, order = (a - bool(force_last), b, c), list[int]()
        for _ in range(sum(counts)):
            left = [axis for axis in range(3) if order.count(axis) < counts[axis]]
            others = [axis for axis in left if order[-1:] != [axis]]
            order.append(min(others or left, key=lambda axis: order.count(axis) / counts[axis]))
        return order + [0] * bool(force_last)


class XDRotaryEmbedding(_AxisOfEveryPair):
    """RoPE over any number of axes (HunYuan-VL has four: p, w, h, t), with consecutive sections of pairs.

        θ_i = f_i · position on the axis whose section contains pair i,   f_i with base · scaling_alpha^(P / (P − 1)) as base

    The table has max_position_embeddings rows. Rotation is out of place, as in vLLM; positions may also be (tokens,).

    Args:
        xdrope_section: number of pairs per axis; they sum to rotary_dim / 2.

    Raises:
        TypeError, ValueError: `XDRotaryEmbedding: <argument> must …`, or `rope: …`.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_alpha: float,
        dtype: torch.dtype,
        xdrope_section: list[int],
    ) -> None:
        op = type(self).__name__
        self.scaling_alpha = above_zero(op, "scaling_alpha", scaling_alpha)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, positions_factor=1)
        contract = f"be a list with a number of pairs for each axis that sum to rotary_dim / 2 = {self.rotary_dim // 2}"
        fix = "pass the model's xdrope_section"
        if not isinstance(xdrope_section, (list, tuple)):
            fail(op, "xdrope_section", contract, shown(xdrope_section), fix, TypeError)
        counts = [whole(op, "xdrope_section", count, 0) for count in xdrope_section]
        if sum(counts) != self.rotary_dim // 2:
            fail(op, "xdrope_section", contract, shown(xdrope_section), fix)
        self.mrope_section = self.xdrope_section = xdrope_section
        self._axes = (len(counts),)
        self._follow([axis for axis, count in enumerate(counts) for _ in range(count)])

    def _compute_inv_freq(self, base: float) -> Tensor:
        return of_grown_base(self, base, self.scaling_alpha)

    @staticmethod
    def get_next_input_positions(  # type: ignore[override]
        context_len: int, seq_len: int, xd_sections: int = 4
    ) -> list[list[int]]:
        """Positions of text tokens context_len … seq_len − 1, one list per axis."""
        return [list(range(context_len, seq_len)) for _ in range(xd_sections)]

    @staticmethod
    def get_next_input_positions_tensor(  # type: ignore[override]
        out: Any, out_offset: int, context_len: int, num_new_tokens: int
    ) -> None:
        """Write the positions of num_new_tokens text tokens from context_len on into out, a numpy array (axes, columns), from
        column out_offset on."""
        out[:, out_offset : out_offset + num_new_tokens] = list(range(context_len, context_len + num_new_tokens))


class Llama4VisionRotaryEmbedding(RotaryEmbedding):
    """2-D RoPE of Llama 4's vision tower: n · n patch tokens in row-major order, then the class token.

        θ_i = f_i · (column + 1) for i < P,   f_(i − P) · (row + 1) for P ≤ i < 2P,   0 for the last token

    Pairs are interleaved (2i, 2i + 1) in heads of 2 · rotary_dim features. `cos_sin_cache` is (n² + 1, 1, 2P) of
    cos θ + i sin θ; do not cast it to a real dtype, as `module.to(torch.bfloat16)` does.

    Args:
        rotary_dim: half of head_size, 2P.
        max_position_embeddings: n².
        is_neox_style: ignored, as in vLLM.
        dtype: torch.complex64.

    Raises:
        TypeError, ValueError: `Llama4VisionRotaryEmbedding: <argument> must …`, or `rope: …`.
    """

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
        whole(op, "max_position_embeddings", max_position_embeddings, 1)
        if dtype != torch.complex64:
            fail(op, "dtype", "be torch.complex64", shown(dtype), "pass it as the model does", TypeError)
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_cos_sin_cache(self) -> Tensor:
        inv_freq = self._compute_inv_freq(self.base)
        patches = torch.arange(self.max_position_embeddings, device=inv_freq.device)  # not the default device
        edge = math.isqrt(self.max_position_embeddings)
        angles = torch.cat([(at + 1).double()[:, None] * inv_freq for at in (patches % edge, patches // edge)], -1)
        angles = torch.cat((angles, torch.zeros_like(angles[:1])))
        return torch.polar(torch.ones_like(angles), angles)[:, None]

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query and key (batch, n² + 1, heads, 2 · rotary_dim) out of place; differentiable. key may be None."""
        return self._images(query, key)

    forward_cuda = forward  # type: ignore[assignment]

    def forward_native(  # type: ignore[override]
        self, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` with torch operations."""
        return self._images(query, key, impl="reference")

    def _images(self, query: Tensor, key: Tensor | None, impl: str = "auto") -> tuple[Tensor, Tensor | None]:
        op, table = type(self).__name__, self.cos_sin_cache
        if not table.is_complex():
            fix = "keep the layer out of casts to a real dtype"
            fail(op, "cos_sin_cache", "be complex, cos θ + i sin θ", dtype_name(table.dtype), fix, TypeError)
        shape = shape_of(op, "query", query)
        tokens, _, pairs = table.shape
        if len(shape) != 4 or (shape[1], shape[3]) != (tokens, 2 * pairs):
            contract = f"have shape (batch, {tokens}, heads, {2 * pairs})"
            fail(op, "query", contract, tuple(shape), "pass all patches and the image's token, heads of 2 · rotary_dim")
        return rotate_images(query, key, on_device_of(query, self), impl)
