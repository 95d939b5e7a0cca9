"""The rotary functions and layers of vLLM without scaling, for `fusewise.compat.vllm`. Shape legend: T tokens, B batch, H heads,
D head_size, P = rotary_dim / 2 pairs, R table rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops._common import MAX_POSITION, check_count, fail, shown
from ..ops.rope import rope, rope_, tables
from ._check import WRONG, check_tensor, explain, flag, shape_of, whole
from ._shared import alike, complex_tables, cut, heads, pairing_of_neox, rotate_pair, unit_stride


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate query and key in place, in one launch; any strides with contiguous heads, so slices of a packed qkv too.

    Args:
        positions: int64 (or int32), (tokens,) or (batch, tokens).
        query, key: the shape of positions, then (heads, head_size) or (heads · head_size,); key may be None.
        cos_sin_cache: (rows, rotary_dim), [cos | sin], float32, bfloat16 or float16.
        is_neox: pairs (i, i + rotary_dim / 2), else (2i, 2i + 1).
        rope_dim_offset: first rotated feature of a head.
        inverse: rotate by −θ.
    """
    q, k, call = _arguments(positions, query, key, head_size, cos_sin_cache, is_neox)
    rope_(q, k, **call, rotary_start=rope_dim_offset, inverse=inverse)


def _arguments(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """What `rope` needs: views of query and key with their heads in a dimension, and its arguments."""
    op = "rotary_embedding"
    shape = shape_of(op, "positions", positions)
    dims = len(shape)
    if dims not in (1, 2):
        fail(op, "positions", "have shape (tokens,) or (batch, tokens)", tuple(shape), "flatten them")
    q = heads(op, "query", query, dims, head_size)
    k = None if key is None else heads(op, "key", key, dims, head_size)
    call = {
        "cos_sin": cos_sin_cache,
        "positions": positions,
        "layout": "thd" if dims == 1 else "bshd",
        "pairing": pairing_of_neox(op, is_neox),
        "rotary_dim": shape_of(op, "cos_sin_cache", cos_sin_cache, 2)[-1],
    }
    return q, k, call


class RotaryEmbedding(nn.Module):
    """The layer without scaling: the table [cos | sin] of p · base^(−2i / rotary_dim) for positions below max_position_embeddings,
    in `dtype` as there, and its application. A subclass may define `_compute_inv_freq` and `_compute_cos_sin_cache`, or with
    init_cache=False make the buffer cos_sin_cache itself."""

    cos_sin_cache: Tensor

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        init_cache: bool = True,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        check_count(op, "head_size", head_size)
        if not isinstance(dtype, torch.dtype):
            fail(op, "dtype", "be a torch.dtype", shown(dtype), "pass that of the model", TypeError)
        self.head_size, self.rotary_dim, self.base, self.dtype = head_size, rotary_dim, base, dtype
        self.max_position_embeddings = whole(op, "max_position_embeddings", max_position_embeddings, 0)
        self.is_neox_style = flag(op, "is_neox_style", is_neox_style)
        if flag(op, "init_cache", init_cache):
            cache = self._compute_cos_sin_cache().to(torch.get_default_device(), dtype)
            self.register_buffer("cos_sin_cache", cache, persistent=False)

    def _compute_inv_freq(self, base: float) -> Tensor:
        return tables.default(rotary_dim=self.rotary_dim, base=base)[0]

    def _compute_cos_sin_cache(self) -> Tensor:
        return tables.fused_cos_sin(self._compute_inv_freq(self.base), self.max_position_embeddings)

    def get_cos_sin(self, seqlen: int) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_sin_cache[:seqlen].chunk(2, -1)
        return cos, sin

    def forward(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """`rotary_embedding` of query and key, in place; returns both."""
        check_tensor("rotary_embedding", "query", query)
        cache = self.cos_sin_cache.to(query.device)
        rotary_embedding(positions, query, key, self.head_size, cache, self.is_neox_style)
        return query, key

    forward_cuda = forward

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The same as new tensors, in torch's own operations; differentiable."""
        check_tensor("rotary_embedding", "query", query)
        cache = self.cos_sin_cache.to(query.device)
        return self.forward_static(positions, query, key, self.head_size, self.rotary_dim, cache, self.is_neox_style)

    @staticmethod
    def forward_static(
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        head_size: int,
        rotary_dim: int,
        cos_sin_cache: Tensor,
        is_neox_style: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """`forward_native` without a layer; rotary_dim is the width of the table."""
        q, k, call = _arguments(positions, query, key, head_size, cos_sin_cache, is_neox_style)
        q, k = rotate_pair(q, k, **call, impl="reference")
        return q.reshape(query.shape), None if key is None or k is None else k.reshape(key.shape)

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, "
            f"max_position_embeddings={self.max_position_embeddings}, base={self.base}, is_neox_style={self.is_neox_style}"
        )


class ApplyRotaryEmb(nn.Module):
    """Rotate one tensor by tables of its tokens, as new memory; differentiable.

    Args:
        enforce_enable: without effect: there is one way to compute it.
        is_neox_style: pairs (i, i + P), else (2i, 2i + 1).
        enable_fp32_compute: without effect: the arithmetic is always in float32, rounded once.
    """

    def __init__(
        self, enforce_enable: bool = False, is_neox_style: bool = True, enable_fp32_compute: bool = False
    ) -> None:
        super().__init__()
        op = "ApplyRotaryEmb"
        flag(op, "enforce_enable", enforce_enable)
        self.is_neox_style = flag(op, "is_neox_style", is_neox_style)
        self.enable_fp32_compute = flag(op, "enable_fp32_compute", enable_fp32_compute)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first 2P features of x.

        Args:
            x: (T, H, D) or (B, T, H, D), float32, bfloat16 or float16.
            cos, sin: (R, P) of at least T rows, row t for token t; of x of four dimensions also (B, R, P).
        """
        return _apply(x, cos, sin, self.is_neox_style)

    forward_cuda = forward

    def forward_native(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The same in torch's own operations."""
        return self.forward_static(x, cos, sin, self.is_neox_style, self.enable_fp32_compute)

    @staticmethod
    def forward_static(
        x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool = True, enable_fp32_compute: bool = False
    ) -> Tensor:
        """`forward_native` without a layer."""
        flag("ApplyRotaryEmb", "enable_fp32_compute", enable_fp32_compute)
        return _apply(x, cos, sin, is_neox_style, impl="reference")

    def extra_repr(self) -> str:
        return f"is_neox_style={self.is_neox_style}, enable_fp32_compute={self.enable_fp32_compute}"


def _apply(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool, impl: str = "auto") -> Tensor:
    op = "ApplyRotaryEmb"
    shape, table = shape_of(op, "x", x), shape_of(op, "cos", cos, 2)
    if len(shape) not in (3, 4):
        fail(op, "x", "have shape (tokens, heads, head_size) or (batch, …)", tuple(shape), "add the missing dimensions")
    cos, sin = alike(op, cos, sin)
    rotated: Tensor = rope(
        unit_stride(x, "x", op), cos=cos, sin=sin, layout="thd" if len(shape) == 3 else "bshd",
        pairing=pairing_of_neox(op, is_neox_style), rotary_dim=2 * table[-1], impl=impl,
    )  # fmt: skip
    return rotated


class MRotaryEmbedding(RotaryEmbedding):
    """M-RoPE: pair i of a token turns by its temporal, its height or its width position, whichever the sections give it.

    The table is that of `RotaryEmbedding`, or with scaling_factor that of YaRN, for positions below positions_factor ·
    max_position_embeddings (· scaling_factor), as the positions of a video exceed its number of tokens.

    Args:
        mrope_section: numbers of pairs (t, h, w) that sum to rotary_dim / 2; None: for positions (tokens,) alone.
        mrope_interleaved: the axes take turns, t, h, w, t, h, w, …, what is left is t's; else one after the other.
        positions_factor: how much longer the table is.
        scaling_factor: of YaRN, with the arguments after it as in `fusewise.ops.rope.tables.yarn`. Its original context is
            taken to be positions_factor · max_position_embeddings, as there.
    """

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
        self.scaling_factor, self.beta_fast, self.beta_slow, self.truncate = (
            scaling_factor,
            beta_fast,
            beta_slow,
            truncate,
        )
        self.mscale = 1.0
        self._yarn = {
            "beta_fast": beta_fast, "beta_slow": beta_slow, "mscale": mscale, "mscale_all_dim": mscale_all_dim,
            "attention_factor": attention_factor, "truncate": truncate,
        }  # fmt: skip
        super().__init__(head_size, rotary_dim, self.cache_max_position_num, base, is_neox_style, dtype)
        self.mrope_interleaved = flag(op, "mrope_interleaved", mrope_interleaved)
        self.mrope_section = mrope_section
        if mrope_section:
            _sections(op, mrope_section, rotary_dim // 2)

    def _compute_cos_sin_cache(self) -> Tensor:
        if self.scaling_factor is None:
            return super()._compute_cos_sin_cache()
        cache, self.mscale = yarn_cache(self, self.scaling_factor, self._yarn)
        return cache

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query and key, with positions (3, tokens) in place and with (tokens,) as new tensors, as there.

        Args:
            positions: int64 or int32, (3, tokens) of the axes t, h, w, or (tokens,), the same for the three.
            query, key: (tokens, heads · head_size) or (tokens, heads, head_size); key may be None.
            offsets: without effect, as there.
        """
        if _axes_of("MRotaryEmbedding", positions) == 1:
            return self._rotated(positions, query, key)
        q, k, call = self._call(positions, query, key)
        rope_(q, k, **call)
        return query, key

    forward_cuda = forward

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, offsets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The same as new tensors, in torch's own operations; differentiable."""
        _axes_of("MRotaryEmbedding", positions)
        return self._rotated(positions, query, key, impl="reference")

    def _rotated(
        self, positions: Tensor, query: Tensor, key: Tensor | None, impl: str = "auto"
    ) -> tuple[Tensor, Tensor | None]:
        q, k, call = self._call(positions, query, key)
        q, k = rotate_pair(q, k, **call, impl=impl)
        return q.reshape(query.shape), None if key is None or k is None else k.reshape(key.shape)

    def _call(
        self, positions: Tensor, query: Tensor, key: Tensor | None
    ) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
        op = "MRotaryEmbedding"
        q = heads(op, "query", query, 1, self.head_size)
        k = None if key is None else heads(op, "key", key, 1, self.head_size)
        call: dict[str, Any] = {
            "cos_sin": self.cos_sin_cache.to(query.device),
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
        """The positions of tokens context_len … seq_len − 1 of a text that follows, one list an axis."""
        first, last = context_len + mrope_position_delta, seq_len + mrope_position_delta
        return [list(range(first, last)) for _ in range(3)]

    @staticmethod
    def get_next_input_positions_tensor(
        out: Any, out_offset: int, mrope_position_delta: int, context_len: int, num_new_tokens: int
    ) -> None:
        """Write the positions of num_new_tokens tokens that follow to columns out_offset … of out, a numpy array (3, columns)."""
        first = mrope_position_delta + context_len
        out[:, out_offset : out_offset + num_new_tokens] = list(range(first, first + num_new_tokens))


def yarn_cache(layer: RotaryEmbedding, factor: float, options: dict[str, Any]) -> tuple[Tensor, float]:
    """The table of YaRN for all of the stretched context of a layer, and the factor that is in it."""
    original = layer.max_position_embeddings
    inv_freq, scaling = tables.yarn(
        rotary_dim=layer.rotary_dim,
        base=layer.base,
        factor=factor,
        original_max_position_embeddings=original,
        **options,
    )
    return tables.fused_cos_sin(inv_freq, stretched(original, factor), scaling=scaling), scaling


def stretched(positions: int, factor: float) -> int:
    """The rows of a context that is longer by a factor; of one that is too long, more than a table may have."""
    return math.ceil(min(positions * factor, MAX_POSITION + 1))


def _axes_of(op: str, positions: Tensor) -> int:
    """The number of dimensions of M-RoPE's positions."""
    shape = shape_of(op, "positions", positions)
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != 3):
        fail(op, "positions", "have shape (tokens,) or (3, tokens)", tuple(shape), "pass one row an axis")
    return len(shape)


def _sections(op: str, sections: Sequence[int], pairs: int) -> tuple[int, int, int]:
    contract = f"be three numbers of pairs (t, h, w) that sum to rotary_dim / 2 = {pairs}"
    fix = "pass the model's mrope_section"
    if not isinstance(sections, (list, tuple)):
        fail(op, "mrope_section", contract, shown(sections), fix, TypeError)
    numbers = [whole(op, "mrope_section", n, 0) for n in sections]
    if len(numbers) != 3 or sum(numbers) != pairs:
        fail(op, "mrope_section", contract, shown(sections), fix)
    return numbers[0], numbers[1], numbers[2]


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
    """M-RoPE of q and k in place from tables of the three axes; returns both. One launch, and a small kernel that numbers the rows.

    Args:
        q, k: (tokens, heads · head_size), any stride between tokens.
        cos, sin: (3, tokens, rotary_dim / 2), float32, bfloat16 or float16.
        mrope_section, mrope_interleaved: as in `MRotaryEmbedding`.
        rotary_dim: rotated features, the first of every head.
        is_neox_style: pairs (i, i + rotary_dim / 2), else (2i, 2i + 1).
    """
    op = "triton_mrope"
    shape = shape_of(op, "cos", cos)
    if len(shape) != 3 or shape[0] != 3:
        fail(op, "cos", "have shape (3, tokens, rotary_dim / 2)", tuple(shape), "pass the tables of the three axes")
    width = check_count(op, "rotary_dim", rotary_dim, 2)
    cos, sin = alike(op, *cut(op, cos, sin, lambda x: x.flatten(0, 1)))
    rows = torch.arange(3 * shape[1], dtype=torch.int32, device=cos.device).view(3, shape[1])
    rope_(
        heads(op, "q", q, 1, head_size), heads(op, "k", k, 1, head_size), cos=cos, sin=sin, positions=rows,
        sections=_sections(op, mrope_section, width // 2), layout="thd", rotary_dim=width,
        sections_interleaved=flag(op, "mrope_interleaved", mrope_interleaved),
        pairing=pairing_of_neox(op, is_neox_style),
    )  # fmt: skip
    return q, k


def apply_interleaved_rope(x: Tensor, mrope_section: list[int]) -> Tensor:
    """One table of the three of the axes, (3, …, P) to (…, P): column i is of axis h for i = 1, 4, … below 3 · h, of axis w for
    i = 2, 5, … below 3 · w, else of t; new memory."""
    op = "apply_interleaved_rope"
    shape = shape_of(op, "x", x, 2)
    if shape[0] != 3:
        fail(op, "x", "have shape (3, …, pairs)", tuple(shape), "stack the tables of the three axes")
    sections = _sections(op, mrope_section, shape[-1])
    try:
        dealt = x[0].clone()
        for axis in (1, 2):
            columns = slice(axis, 3 * sections[axis], 3)
            dealt[..., columns] = x[axis, ..., columns]
    except WRONG:
        explain(op, "x", x)
        raise
    return dealt


def packed_qk_rope_(xqkv: Tensor, freqs_cis: Tensor) -> None:
    """Rotate pairs (2i, 2i + 1) of q and k of xqkv (tokens, 3, heads, head_size), contiguous, in place, in one launch.

    Args:
        freqs_cis: (tokens, head_size / 2) of cos θ + i sin θ, complex64.
    """
    op = "packed_qk_rope_"
    shape = shape_of(op, "xqkv", xqkv)
    if len(shape) != 4 or shape[1] != 3:
        fail(op, "xqkv", "have shape (tokens, 3, heads, head_size)", tuple(shape), "stack q, k and v in dim 1")
    try:
        contiguous = xqkv.is_contiguous()
    except WRONG:
        explain(op, "xqkv", xqkv)
        raise
    if not contiguous or xqkv.layout != torch.strided:
        explain(op, "xqkv", xqkv)
        fail(op, "xqkv", "be contiguous", f"strides {xqkv.stride()}", "rotate q and k by fusewise.rope_ where they lie")
    heads_of_both = xqkv[:, :2].flatten(1, 2)
    tables_of = complex_tables(freqs_cis)
    rope_(heads_of_both, cos=tables_of["cos"], sin=tables_of["sin"], layout="thd", pairing="interleaved")
