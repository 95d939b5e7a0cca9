"""`vllm._custom_ops.rotary_embedding` (`torch.ops._C.rotary_embedding`).

from vllm._custom_ops import rotary_embedding        # before
from fusewise.compat.vllm import rotary_embedding    # after
"""

from __future__ import annotations

from torch import Tensor

from ..ops.rope import rope_
from ..ops.rope._validate import fail


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
    dims = positions.dim()
    if dims not in (1, 2):
        fail(
            "rotary_embedding",
            "positions",
            "have shape (tokens,) or (batch, tokens)",
            tuple(positions.shape),
            "flatten them",
        )
    rope_(
        _heads("query", query, dims, head_size),
        None if key is None else _heads("key", key, dims, head_size),
        cos_sin=cos_sin_cache,
        positions=positions,
        layout="thd" if dims == 1 else "bshd",
        pairing="half" if is_neox else "interleaved",
        rotary_dim=cos_sin_cache.shape[-1],
        rotary_start=rope_dim_offset,
        inverse=inverse,
    )


def _heads(name: str, x: Tensor, dims: int, head_size: int) -> Tensor:
    """x as (…, heads, head_size), a view."""
    if x.dim() == dims + 2 and x.shape[-1] == head_size:
        return x
    if x.dim() != dims + 1 or x.shape[-1] % head_size:
        fail(
            "rotary_embedding", name, f"have the shape of positions and (heads, {head_size}) or (heads · {head_size},)",
            tuple(x.shape), "check head_size and the shape of positions",
        )  # fmt: skip
    return x.view(*x.shape[:-1], x.shape[-1] // head_size, head_size)
