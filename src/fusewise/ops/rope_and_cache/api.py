"""Public API: `rope_and_cache_`, validated once for all implementations."""

from __future__ import annotations

from torch import Tensor

from .._common import traced
from ..rope import _host
from ..rope._problem import Layout, Pairing
from . import _op
from ._problem import CacheLayout
from ._validate import validated

# Arguments after v are meant to be passed by keyword; `rope/api.py` explains why there is no `*`.


def rope_and_cache_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_layout: CacheLayout = "nhd",
    write_k: bool = True,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    cos_sin: Tensor | None = None,
    angles: Tensor | None = None,
    inv_freq: Tensor | None = None,
    positions: Tensor | None = None,
    offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    sections: tuple[int, int, int] | None = None,
    sections_interleaved: bool = False,
    layout: Layout = "thd",
    pairing: Pairing = "half",
    rotary_dim: int | None = None,
    rotary_start: int = 0,
    scale: float = 1.0,
    impl: str = "auto",
) -> None:
    """Rotate q and k in place and write the rotated k and v to a KV cache, in one launch. For inference.

        q, k ← rope(q, k),   key_cache[s // S, s % S] ← k of a token,   value_cache[s // S, s % S] ← v,   s its slot

    Shape legend: B batch, T tokens, H heads of q, G heads of k and v, D head_dim (v's may differ), N blocks of the cache,
    S slots of a block.

    Args:
        q, k, v: (tokens, H, D) and twice (tokens, G, D), or flattened, (tokens, H · D), with the head width taken from
            the caches; with `layout` "bshd", "sbhd" or "bhsd", four-dimensional. float32, bfloat16 or float16 (float64
            through the reference), the same for all three. Any strides with a contiguous last dimension, so views of a
            packed qkv tensor are welcome. v is only read.
        key_cache, value_cache: (N, S, G, D) or, with `cache_layout="hnd"`, (N, G, S, D); the dtype of k, any strides
            with a contiguous last dimension. Paged caches of vLLM and FlashInfer: the two parts of a combined tensor
            are views, `kv.unbind(0)` of (2, N, S, G, D), `kv.unbind(1)` of (N, 2, S, G, D). A contiguous cache
            (B, tokens, G, D) is a paged cache with one block per sequence.
        slot_mapping: int32 or int64 (tokens,), or (B, T) in four dimensions: the slot of each token. In layout thd it may
            be shorter: tokens after its end are padding, rotated but not cached.
        block_table: alternative, int32 or int64 (sequences, blocks): a token at position p of its sequence goes to slot
            p % S of block `block_table[sequence, p // S]`. Sequences are batch entries; in layout thd those of
            `cu_seqlens`, or without these each token is a sequence (decode). With neither, sequence i has block i.
        write_k: also rotate k in place, as the engines' kernels do. False: k is unchanged, which saves writing 2 · G ·
            D bytes per token in 16 bits.
        cos, sin, cos_sin, angles, inv_freq: the table, as in `rope`.
        positions, offset, cu_seqlens, sections, sections_interleaved: the position of each token in its sequence, which
            determines its rotation and its slot in a block table, as in `rope`. `sections` require a slot_mapping.
        layout, pairing, rotary_dim, rotary_start, scale: as in `rope`. Unrotated features of k are cached unchanged.
        impl: "auto", "cuda", "triton" or "reference". A named implementation never falls back; `explain_dispatch` shows
            what auto selects.

    A slot outside [0, N · S), such as -1, a block outside [0, N) or a position outside the block table is skipped: q
    and k are rotated, nothing is cached, and memory outside the caches is never written. If several tokens have the
    same slot, each element is written by one of them; which one is undefined. A position without a table row gives NaN,
    as in `rope`.

    Returns None. Not differentiable: an argument that requires grad is an error if gradients are recorded. Bitwise
    deterministic except for slots shared by several tokens. Works in CUDA graphs and under torch.compile. Pass a
    combined cache whole to a compiled function, since two views of it as graph inputs are copied; before torch 2.13 a
    compiled call requires caches with their own memory.

    Raises:
        TypeError, ValueError, RuntimeError: `rope_and_cache_: <argument> must <contract>, got <value>; <one fix>`, before
            anything is written.

    Example:
        >>> q, k, v = torch.randn(3, 8 * 64), torch.randn(3, 2 * 64), torch.randn(3, 2 * 64)
        >>> key_cache, value_cache = torch.zeros(2, 10, 16, 2, 64)  # 10 blocks of 16 slots
        >>> inv_freq = 10000 ** -(torch.arange(0, 64, 2) / 64)
        >>> positions, slots = torch.tensor([7, 0, 1]), torch.tensor([39, 112, -1])
        >>> fusewise.rope_and_cache_(
        ...     q, k, v, key_cache=key_cache, value_cache=value_cache, slot_mapping=slots, positions=positions, inv_freq=inv_freq
        ... )
    """
    if not traced() and _host.rope_and_cache_(
        q, k, cos, sin, cos_sin, angles, inv_freq, positions, offset, cu_seqlens, sections, sections_interleaved,
        None, layout, pairing, rotary_dim, rotary_start, scale, False, impl,
        v, key_cache, value_cache, slot_mapping, block_table, cache_layout, write_k,
    ):  # fmt: skip
        return
    options = (
        cos, sin, cos_sin, angles, inv_freq, positions, offset, cu_seqlens, sections, sections_interleaved,
        None, layout, pairing, rotary_dim, rotary_start, scale, False, impl,
    )  # fmt: skip
    own = v, key_cache, value_cache, slot_mapping, block_table, cache_layout, write_k
    tensors, call, reach = validated(q, k, *own, options)
    _op.write(tensors, call, write_k)
    _op.remember((q, k, *options, *own), tensors, call, write_k, reach)
