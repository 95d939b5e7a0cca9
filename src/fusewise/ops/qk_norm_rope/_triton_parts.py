"""Triton device functions shared by the forward and backward of `qk_norm_rope`: token rows of a tile, weights, cos and
sin, and the features of a head in one of two variants.

- Pairs, if the whole head rotates: a thread holds both elements of its pairs, as in RoPE's kernel, and only the sums over
  a head are exchanged between threads.
- Flat, for partial rotation: features in memory order, 16 bytes per thread; the partner element of a pair is a second load
  that hits in L1. It covers all features of a head, so that no thread idles and there is a single register layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..rope._triton_angles import cos_and_sin, table_rows_of
from ..rope._triton_kernel import batch_and_token


class Form(NamedTuple):
    """Compile-time parameters shared by q and k."""

    PAIRS: Any
    BLOCK_P: Any
    INTERLEAVED_IN: Any
    INTERLEAVED_OUT: Any
    ALL: Any  # all heads of a token are normalized together
    HAS_WEIGHT: Any
    UNIT: Any  # strides are given in units of this many elements
    INDEX: Any
    FLAT: Any
    BLOCK_D: Any
    VECTOR: Any


@triton.jit
def tokens_of(first, BLOCK_T: tl.constexpr, order):
    """Batch entry, token and mask of each row of a tile, [BLOCK_T] each."""
    offs_n = first + tl.arange(0, BLOCK_T)
    batch, token = batch_and_token(offs_n, order)
    return batch, token, offs_n < order.batches * order.tokens


@triton.jit
def turn_of(batch, token, mask_n, offs_p, positions, table, POSITIONS: tl.constexpr, TABLE: tl.constexpr):
    """cos θ and sin θ of every token and pair, [BLOCK_T, 1, BLOCK_P]; 1 and 0 for tokens past the last sequence."""
    rows, identity = table_rows_of(batch, token, mask_n, offs_p, positions, POSITIONS)
    cos, sin = cos_and_sin(rows, batch, mask_n, offs_p, table, TABLE, 1, "")
    if POSITIONS.SOURCE == "packed":
        cos = tl.where(identity[:, None, None], 1.0, cos)
        sin = tl.where(identity[:, None, None], 0.0, sin)
    return cos, sin


@triton.jit
def load_pairs(ptr, base, mask, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load both elements of the pairs of every head as float32, 0 where masked: [BLOCK_T, BLOCK_H, BLOCK_P] each."""
    pairs = tl.arange(0, BLOCK_P)[None, None, :]
    both = tl.arange(0, 2 * BLOCK_P)[None, None, :]
    if INTERLEAVED:
        x = tl.load(ptr + base + both, mask & (both < 2 * PAIRS), 0.0)
        a, b = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_P, 2)))
    else:
        a = tl.load(ptr + base + pairs, mask & (pairs < PAIRS), 0.0)
        b = tl.load(ptr + base + PAIRS + pairs, mask & (pairs < PAIRS), 0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def store_pairs(ptr, base, mask, a, b, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr):
    pairs = tl.arange(0, BLOCK_P)[None, None, :]
    both = tl.arange(0, 2 * BLOCK_P)[None, None, :]
    a = a.to(ptr.dtype.element_ty)
    b = b.to(ptr.dtype.element_ty)
    if INTERLEAVED:
        y = tl.reshape(tl.join(a, b), (a.shape[0], a.shape[1], 2 * BLOCK_P))
        tl.store(ptr + base + both, y, mask & (both < 2 * PAIRS))
    else:
        tl.store(ptr + base + pairs, a, mask & (pairs < PAIRS))
        tl.store(ptr + base + PAIRS + pairs, b, mask & (pairs < PAIRS))


@triton.jit
def features_of(
    START: tl.constexpr, PAIRS: tl.constexpr, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr,
    INTERLEAVED_OTHER: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """For every feature of a head with pairing INTERLEAVED: its index and that of its partner in a head with pairing
    INTERLEAVED_OTHER, its pair (PAIRS for none), whether it is rotated, and whether it is the second element of its
    pair. Partners and pairs of VECTOR consecutive features are consecutive as well."""
    features = tl.arange(0, BLOCK_D)
    place = features - START
    rotated = (place >= 0) & (place < 2 * PAIRS)
    if INTERLEAVED:
        second = place % 2 == 1
        pair = place // 2
    else:
        second = place >= PAIRS
        pair = tl.where(second, place - PAIRS, place)
    if INTERLEAVED_OTHER:
        own = START + 2 * pair + second.to(tl.int32)
        partner = START + 2 * pair + 1 - second.to(tl.int32)
    else:
        own = START + tl.where(second, PAIRS, 0) + pair
        partner = START + tl.where(second, 0, PAIRS) + pair
    if INTERLEAVED == INTERLEAVED_OTHER:
        own = features
    else:
        own = tl.where(rotated, own, features)
    partner = tl.where(rotated, partner, features)
    pair = tl.where(rotated, pair, PAIRS)
    if VECTOR > 1:
        partner = tl.max_contiguous(tl.multiple_of(partner, VECTOR), VECTOR)
        pair = tl.max_contiguous(tl.multiple_of(pair, VECTOR), VECTOR)
        rotated = tl.max_constancy(rotated, VECTOR)
    return own[None, None, :], partner[None, None, :], pair, rotated[None, None, :], second[None, None, :]


@triton.jit
def weights_of(offs_h, BLOCK_T: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ALL: tl.constexpr):
    """Offset and mask of the weights of each row, [BLOCK_T, BLOCK_H, 1]. Broadcast to the shape of a tile, so that each
    thread loads the weights that it needs, even if rows of a tile share them."""
    head = offs_h[None, :, None] + tl.zeros([BLOCK_T, 1, 1], tl.int32)
    return head * (HEAD_DIM if ALL else 0), head < HEADS


@triton.jit
def rounded_product(a, b):
    """a b, rounded before it is summed. Otherwise the compiler may contract a thread's product with the partial sum
    shuffled from another thread into an fma, so that the two threads get sums with different last bits."""
    return tl.fma(a, b, 0.0)


@triton.jit
def total(x, ALL: tl.constexpr):
    """Sum over the features of a head, or of a token: [BLOCK_T, BLOCK_H | 1, 1]."""
    x = tl.sum(x, axis=2)
    if ALL:
        x = tl.sum(x, axis=1)[:, None]
    return x[:, :, None]


@triton.jit
def reciprocal_rms(squares, mask, eps, SHARE: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of each row; 1 for masked rows, which are all zeros while eps may be 0."""
    return tl.rsqrt(tl.where(mask, squares * SHARE + eps, 1.0))
