"""A normalized call of `rope_and_cache_`: the rotation of `..rope._problem`, and the cache slots of k and v.

Shape legend: B batch, T tokens of a sequence, H heads of k and v, D features of a head, N blocks of the cache, S slots of
a block. Slot s of the cache is entry s % S of block s // S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from ..rope._problem import Problem, Spec, layout_dims

CacheLayout = Literal["nhd", "hnd"]
CACHE_LAYOUTS: tuple[str, ...] = get_args(CacheLayout)


@dataclass(frozen=True)
class CacheProblem:
    """Rotation of q and k in place, and the write of the rotated k and of v to the caches.

    The position of a token in its sequence is its table row. The slot of token t of batch entry b is

    - `slots[b, t]` if slots are given; none for t >= mapped,
    - S · `block_table[sequence, position // S]` + position % S if a block table is given,
    - S · sequence + position with neither, for 0 <= position < S: every sequence has one block.

    The sequence is b, or that of the `cu_seqlens` in which t lies, or t if every token is its own sequence. Nothing is
    written for a slot outside [0, N · S), nor for tokens past `cu_seqlens[-1]`.
    """

    rotation: Problem
    write_k: bool
    v: Tensor
    v_strides: tuple[int, int, int]  # batch, token, head; in elements
    key_cache: Tensor  # (N, S, H, D), any strides with contiguous features
    value_cache: Tensor
    slots: Tensor | None
    slot_strides: tuple[int, int]  # batch, token
    mapped: int  # tokens with an entry in slots
    block_table: Tensor | None  # (sequences, blocks per sequence)
    sequence_is_token: bool

    @property
    def blocks(self) -> int:
        return self.key_cache.shape[0]

    @property
    def block_size(self) -> int:
        return self.key_cache.shape[1]

    @staticmethod
    def build(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor | None,
        block_table: Tensor | None,
        cos: Tensor,
        sin: Tensor | None,
        positions: Tensor | None,
        offsets: Tensor | None,
        cu_seqlens: Tensor | None,
        offset: int,
        spec: str,
        write_k: bool,
    ) -> CacheProblem:
        """Resolve validated tensors. Strides are checked again: an exported program may get other tensors."""
        for name, x in (("v", v), ("key_cache", key_cache), ("value_cache", value_cache)):
            if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel() > 0:
                fix = "call .contiguous()" if x is v else "allocate it with the features of a head last"
                raise ValueError(
                    f"rope_and_cache_: {name} must have a contiguous last dimension (stride 1), got strides {x.stride()}; {fix}"
                )
        decoded = Spec.decode(spec)
        rotation = Problem.build((q, k), (q, k), (cos, sin, positions, offsets, cu_seqlens, offset, spec))
        b_dim, t_dim, h_dim = layout_dims(decoded.layout)
        return CacheProblem(
            rotation=rotation,
            write_k=write_k,
            v=v,
            v_strides=(0 if b_dim is None else v.stride(b_dim), v.stride(t_dim), v.stride(h_dim)),
            key_cache=key_cache,
            value_cache=value_cache,
            slots=slots,
            slot_strides=(0, 0) if slots is None else (slots.stride(0) if slots.dim() == 2 else 0, slots.stride(-1)),
            mapped=0 if slots is None else slots.shape[-1],
            block_table=block_table,
            sequence_is_token=b_dim is None and cu_seqlens is None,
        )
