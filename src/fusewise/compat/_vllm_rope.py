"""vLLM's unscaled, one-axis rotary functions and layers; exported by `compat.vllm`.

Shape legend: T tokens, B batch, H heads, D head_size, P = rotary_dim / 2 pairs, R table rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..ops._common import MAX_POSITION, check_count, fail, jit_traces, shown
from ..ops.rope import rope, rope_, tables
from ..ops.rope._validate import INTS
from ..ops.rope._validate import check_tensor as check_kind
from ._check import WRONG, check_tensor, explain, flag, shape_of, whole
from ._shared import alike, complex_tables, heads, pairing_of_neox, rotate_as_given, unit_stride


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
    """Rotate query and key in place, in one launch; `vllm._custom_ops.rotary_embedding`.

    Args:
        positions: int64 (or int32), (tokens,) or (batch, tokens).
        query, key: the shape of positions, then (heads, head_size) or (heads · head_size,); key may be None. Any strides
            with contiguous heads, also slices of a packed qkv.
        cos_sin_cache: (rows, rotary_dim), [cos | sin], float32, bfloat16 or float16.
        is_neox: pairs (i, i + rotary_dim / 2); else (2i, 2i + 1), GPT-J style.
        rope_dim_offset: first rotated feature of a head.
        inverse: rotate by −θ.
    """
    q, k, call = _arguments(positions, query, key, head_size, cos_sin_cache, is_neox)
    rope_(q, k, **call, rotary_start=rope_dim_offset, inverse=inverse)


def _arguments(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """The inputs of `rope`: views of query and key with a head dimension, and its other arguments."""
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
        "pairing": pairing_of_neox(op, is_neox, "is_neox"),
        "rotary_dim": shape_of(op, "cos_sin_cache", cos_sin_cache, 2)[-1],
    }
    return q, k, call


class LayerOfTables(nn.Module):
    """A layer whose buffers are computed, none of which is in its state_dict. Made on the meta device, it has them after
    `to_empty`, too."""

    def _computed(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def _apply(self, fn: Any, recurse: bool = True) -> LayerOfTables:
        bare = [name for name, x in self._buffers.items() if x is not None and x.is_meta]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, now in [(name, getattr(self, name)) for name in bare]:
            if not now.is_meta and (computed := self._computed().get(name)) is not None:
                setattr(self, name, computed.to(now.device, now.dtype))
        return self


class RotaryEmbedding(LayerOfTables):
    """Rotary layer without scaling: frequencies base^(−2i / rotary_dim), cos/sin cache [cos | sin] in `dtype`, as in vLLM.

    The cache has max_position_embeddings rows. A subclass may override `_compute_inv_freq` and `_compute_cos_sin_cache`, or
    pass init_cache=False and register the buffer cos_sin_cache itself.
    """

    cos_sin_cache: Tensor
    use_flashinfer = False  # vLLM's DeepSeek and Step model files ask for it and for `enabled`

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
        self.head_size = check_count(op, "head_size", head_size)
        if not isinstance(dtype, torch.dtype):
            fail(op, "dtype", "be a torch.dtype", shown(dtype), "pass that of the model", TypeError)
        self.rotary_dim, self.base, self.dtype = rotary_dim, base, dtype
        self.max_position_embeddings = whole(op, "max_position_embeddings", max_position_embeddings, 0)
        self.is_neox_style = flag(op, "is_neox_style", is_neox_style)
        if flag(op, "init_cache", init_cache):
            cache = self._compute_cos_sin_cache().to(torch.get_default_device(), dtype)
            self.register_buffer("cos_sin_cache", cache, persistent=False)

    @staticmethod
    def enabled() -> bool:
        """True: `forward` is a kernel, not `forward_native`."""
        return True

    def _compute_inv_freq(self, base: float) -> Tensor:
        return tables.default(rotary_dim=self.rotary_dim, base=base)[0]

    def _compute_cos_sin_cache(self) -> Tensor:
        return tables.fused_cos_sin(self._compute_inv_freq(self.base), self.max_position_embeddings)

    def _computed(self) -> dict[str, Tensor]:
        return {"cos_sin_cache": self._compute_cos_sin_cache()}

    def get_cos_sin(self, seqlen: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0 … seqlen − 1, each (seqlen, P)."""
        cos, sin = self.cos_sin_cache[:seqlen].chunk(2, -1)
        return cos, sin

    def forward(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Apply `rotary_embedding` to query and key in place; return both."""
        check_tensor("rotary_embedding", "query", query)
        cache = on_device_of(query, self)
        rotary_embedding(positions, query, key, self.head_size, cache, self.is_neox_style)
        return query, key

    forward_cuda = forward

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` out of place, with torch operations; differentiable."""
        check_tensor("rotary_embedding", "query", query)
        cache = on_device_of(query, self)
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
        """`forward_native` without a layer. The width of cos_sin_cache is used, rotary_dim is ignored."""
        q, k, call = _arguments(positions, query, key, head_size, cos_sin_cache, is_neox_style)
        return rotate_as_given(query, key, q, k, call, impl="reference")

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, "
            f"max_position_embeddings={self.max_position_embeddings}, base={self.base}, is_neox_style={self.is_neox_style}"
        )


class ApplyRotaryEmb(nn.Module):
    """Rotate one tensor by the cos and sin of its tokens, out of place; differentiable.

    Args:
        enforce_enable: ignored; there is one implementation.
        is_neox_style: pairs (i, i + P); else (2i, 2i + 1), GPT-J style.
        enable_fp32_compute: ignored; arithmetic is always float32, rounded once.
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
            cos, sin: (R, P), R >= T, row t for token t; for a 4-D x also (B, R, P).
        """
        return _apply(x, cos, sin, self.is_neox_style)

    forward_cuda = forward

    def forward_native(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`forward` with torch operations."""
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


def packed_qk_rope_(xqkv: Tensor, freqs_cis: Tensor) -> None:
    """Rotate interleaved pairs (2i, 2i + 1) of q and k in xqkv in place, in one launch.

    Args:
        xqkv: (tokens, 3, heads, head_size), contiguous.
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
    tables_of = complex_tables(freqs_cis, xqkv, 0)
    rope_(heads_of_both, cos=tables_of["cos"], sin=tables_of["sin"], layout="thd", pairing="interleaved")


def on_device_of(x: Tensor, layer: nn.Module, name: str = "cos_sin_cache") -> Tensor:
    """A buffer of the layer on the device of x. It moves there once, as in vLLM; traces, and calls on fake or meta tensors,
    leave it where it is."""
    table: Tensor = getattr(layer, name)
    if table.device == x.device:
        return table
    with torch.inference_mode(False):  # later calls may need gradients
        moved = table.to(x.device)
    traced = torch.compiler.is_compiling() or jit_traces()
    if not traced and type(moved) is Tensor and not moved.is_meta:
        setattr(layer, name, moved)
    return moved


def stretched(positions: int, factor: float) -> int:
    """Table rows for `factor` times the positions; capped at one more than a table may have."""
    return math.ceil(min(positions * factor, MAX_POSITION + 1))


def moved(op: str, positions: Tensor, offsets: Tensor | None) -> Tensor:
    """Add offsets to positions."""
    if offsets is None:
        return positions
    shape = shape_of(op, "positions", positions)
    if shape_of(op, "offsets", offsets) != shape:
        fail(op, "offsets", f"have the shape of positions, {tuple(shape)}", tuple(offsets.shape), "pass one a token")
    for name, x in (("positions", positions), ("offsets", offsets)):
        check_kind(op, name, x, INTS, None)  # their sum may be of a valid dtype
    if offsets.device != positions.device:
        device = positions.device
        fix = f"move it with .to({str(device)!r})"
        fail(op, "offsets", f"be on the device of positions, {device}", offsets.device, fix)
    return positions + offsets
