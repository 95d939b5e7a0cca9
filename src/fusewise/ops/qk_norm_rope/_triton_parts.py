"""Device functions of `qk_norm_rope` in Triton that forward and backward share: the rows of a tile, their weights, cos and sin,
and the features of a head in one of two forms.

- In pairs, where a whole head rotates: a thread holds both elements of its pairs, as in RoPE's kernel, and nothing but the
  sums over a head is exchanged between threads.
- Flat, where a part of it does: the features in their order, a thread with 16 bytes of them; the other element of a pair is
  read once more, from the first-level cache. Of all features, so that no thread idles and rows have one layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..rope._triton_angles import cos_and_sin, table_rows_of
from ..rope._triton_kernel import batch_and_token


class Form(NamedTuple):
    """What is the same for q and k, and known when the kernel is compiled."""

    PAIRS: Any
    BLOCK_P: Any
    INTERLEAVED_IN: Any
    INTERLEAVED_OUT: Any
    ALL: Any  # heads of a token are normalised together
    HAS_WEIGHT: Any
    UNIT: Any  # of the strides
    INDEX: Any
    FLAT: Any
    BLOCK_D: Any
    VECTOR: Any


@triton.jit
def tokens_of(first, BLOCK_T: tl.constexpr, order):
    """Batch entry and token of each row of a tile, and which rows there are, [BLOCK_T] each."""
    offs_n = first + tl.arange(0, BLOCK_T)
    batch, token = batch_and_token(offs_n, order)
    return batch, token, offs_n < order.batches * order.tokens


@triton.jit
def turn_of(batch, token, mask_n, offs_p, positions, table, POSITIONS: tl.constexpr, TABLE: tl.constexpr):
    """cos θ and sin θ of every token and pair, [BLOCK_T, 1, BLOCK_P]; 1 and 0 past the last sequence."""
    rows, identity = table_rows_of(batch, token, mask_n, offs_p, positions, POSITIONS)
    cos, sin = cos_and_sin(rows, batch, mask_n, offs_p, table, TABLE, 1, "")
    if POSITIONS.SOURCE == "packed":
        cos = tl.where(identity[:, None, None], 1.0, cos)
        sin = tl.where(identity[:, None, None], 0.0, sin)
    return cos, sin


@triton.jit
def load_pairs(ptr, base, mask, PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both elements of the pairs of every head in float32, 0 where there is none: [BLOCK_T, BLOCK_H, BLOCK_P] each."""
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
    """Of every feature of a head, paired in one way: where it lies in a head that is paired in another way, where the other
    element of its pair does, its pair (PAIRS for none), whether it has one, and whether it is the second of it. VECTOR
    features that are neighbours have neighbours for partners and pairs."""
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
    """The offset of the weights of each row, and which there are, [BLOCK_T, BLOCK_H, 1]: of the shape of a tile, so that a
    thread reads those that it needs, though the rows of a tile may have the same."""
    head = offs_h[None, :, None] + tl.zeros([BLOCK_T, 1, 1], tl.int32)
    return head * (HEAD_DIM if ALL else 0), head < HEADS


@triton.jit
def rounded_product(a, b):
    """a b, rounded before it is added to another. Left to itself the compiler fuses the product of a thread that has one
    feature of a head with the sum that another thread hands it, so that the two have sums with different last bits."""
    return tl.fma(a, b, 0.0)


@triton.jit
def total(x, ALL: tl.constexpr):
    """The sum over the features of a head, or of a token: [BLOCK_T, BLOCK_H | 1, 1]."""
    x = tl.sum(x, axis=2)
    if ALL:
        x = tl.sum(x, axis=1)[:, None]
    return x[:, :, None]


@triton.jit
def reciprocal_rms(squares, mask, eps, SHARE: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of each row, 1 for one that is not there: it is all zeros, and eps may be 0."""
    return tl.rsqrt(tl.where(mask, squares * SHARE + eps, 1.0))
