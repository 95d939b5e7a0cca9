"""`vllm._custom_ops.rotary_embedding`, the gates of `torch.ops._C`, and the layers of both in `vllm.model_executor.layers`.

from vllm._custom_ops import rotary_embedding                        # before
from vllm.model_executor.layers.activation import SiluAndMul
from fusewise.compat.vllm import SiluAndMul, rotary_embedding        # after

Of `torch.ops._C.silu_and_mul(out, x)` and its like there is a function of that name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops._common import check_count, fail, shown
from ..ops.gated_linear._gate import stacked_gate
from ..ops.gated_linear._problem import Activation
from ..ops.rope import rope_, tables
from ._check import check_tensor, flag, shape_of, whole
from ._shared import gate_of_halves, heads, pairing_of_neox, rotate_pair


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
        op = "RotaryEmbedding"
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


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    """Write silu of the first half of x (..., 2F), times the second, to out (..., F). No gradient is recorded."""
    _write("silu_and_mul", out, x, "silu")


def mul_and_silu(out: Tensor, x: Tensor) -> None:
    """`silu_and_mul` with the halves the other way about: the first times silu of the second."""
    _write("mul_and_silu", out, x, "silu", gate_first=False)


def gelu_and_mul(out: Tensor, x: Tensor) -> None:
    """`silu_and_mul` with GELU, the erf form."""
    _write("gelu_and_mul", out, x, "gelu")


def gelu_tanh_and_mul(out: Tensor, x: Tensor) -> None:
    """`silu_and_mul` with GELU, the tanh form."""
    _write("gelu_tanh_and_mul", out, x, "gelu_tanh")


def _write(op: str, out: Tensor, x: Tensor, activation: Activation, gate_first: bool = True) -> None:
    check_tensor(op, "out", out)
    gate_of_halves(op, x, activation, out, gate_first, "x")


def _gate(op: str, x: Tensor, activation: Activation, gate_first: bool = True, impl: str = "auto") -> Tensor:
    return stacked_gate(x, activation, gate_first=gate_first, op=op, impl=impl)


# `forward_native` is the same as `forward` in torch's own operations, rounded once like it: theirs rounds the activation, too.


class SiluAndMul(nn.Module):
    """silu of the first half of x (..., 2F), times the second; differentiable. compile_native is without effect."""

    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__()
        flag("SiluAndMul", "compile_native", compile_native)

    def forward(self, x: Tensor) -> Tensor:
        return _gate("SiluAndMul", x, "silu")

    forward_cuda = forward

    @staticmethod
    def forward_native(x: Tensor) -> Tensor:
        return _gate("SiluAndMul", x, "silu", impl="reference")


class MulAndSilu(nn.Module):
    """The first half of x (..., 2F) times silu of the second; differentiable."""

    def forward(self, x: Tensor) -> Tensor:
        return _gate("MulAndSilu", x, "silu", gate_first=False)

    forward_cuda = forward

    def forward_native(self, x: Tensor) -> Tensor:
        return _gate("MulAndSilu", x, "silu", gate_first=False, impl="reference")


class GeluAndMul(nn.Module):
    """GELU of the first half of x (..., 2F), times the second; differentiable.

    Args:
        approximate: "none", the erf form, or "tanh".
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        if not isinstance(approximate, str) or approximate not in ("none", "tanh"):
            fail("GeluAndMul", "approximate", "be none or tanh", shown(approximate), "pass one of them")
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return _gate("GeluAndMul", x, "gelu" if self.approximate == "none" else "gelu_tanh")

    forward_cuda = forward

    def forward_native(self, x: Tensor) -> Tensor:
        return _gate("GeluAndMul", x, "gelu" if self.approximate == "none" else "gelu_tanh", impl="reference")

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"
