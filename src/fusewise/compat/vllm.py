"""`vllm._custom_ops.rotary_embedding` (`torch.ops._C.rotary_embedding`).

from vllm._custom_ops import rotary_embedding        # before
from fusewise.compat.vllm import rotary_embedding    # after
"""

from __future__ import annotations

from torch import Tensor

from ..ops._common import fail
from ..ops.rope import rope_
from ._check import shape_of
from ._shared import heads, pairing_of_neox


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
    op = "rotary_embedding"
    shape = shape_of(op, "positions", positions)
    dims = len(shape)
    if dims not in (1, 2):
        fail(op, "positions", "have shape (tokens,) or (batch, tokens)", tuple(shape), "flatten them")
    rope_(
        heads(op, "query", query, dims, head_size),
        None if key is None else heads(op, "key", key, dims, head_size),
        cos_sin=cos_sin_cache,
        positions=positions,
        layout="thd" if dims == 1 else "bshd",
        pairing=pairing_of_neox(op, is_neox),
        rotary_dim=shape_of(op, "cos_sin_cache", cos_sin_cache, 2)[-1],
        rotary_start=rope_dim_offset,
        inverse=inverse,
    )
