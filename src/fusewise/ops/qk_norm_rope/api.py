"""Public API: `qk_norm_rope`, validated once for all implementations."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._common import traced, transforms_active, unit_strides
from ..rope import _host
from ..rope._problem import Layout, Pairing
from . import _op
from ._problem import Over
from ._validate import validated


def qk_norm_rope(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    norm: Over = "head",
    cos_sin: Tensor | None = None,
    angles: Tensor | None = None,
    inv_freq: Tensor | None = None,
    positions: Tensor | None = None,
    offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    sections: tuple[int, int, int] | None = None,
    sections_interleaved: bool = False,
    context_parallel: tuple[int, int] | None = None,
    layout: Layout = "bshd",
    pairing: Pairing = "half",
    rotary_dim: int | None = None,
    rotary_start: int = 0,
    scale: float = 1.0,
    impl: str = "auto",
) -> Any:
    """RMSNorm of q and k followed by rotary position embedding, in one launch (Zhang & Sennrich, arXiv 1910.07467; norms of
    q and k: Henry et al., arXiv 2010.04245).

        z = x / sqrt(mean(x²) + eps) · (weight + weight_offset),   y = rope(z)

    for q and for k, each with its own weight. The mean is over all features of a head, rotated or not (`norm="head"`:
    Qwen3, Gemma 3), or over all heads of a token (`norm="all"`: OLMo 2). Everything is computed in float32 for all
    dtypes (float64 for float64 tensors) and rounded once, to the dtype of q.

    Shape legend: B batch, T tokens, H heads (may differ between q and k), D head_dim, W = D or H · D weights.

    Args:
        q, k: as in `rope`: (B, T, H, D), (T, B, H, D), (B, H, T, D) or (tokens, H, D), according to `layout`; float32,
            bfloat16 or float16 (float64 through the reference), any strides with a contiguous last dimension. k may be
            None.
        q_weight, k_weight: (D,), or (H · D,) for `norm="all"`; float32, bfloat16 or float16 whatever the dtype of q,
            contiguous. Both None: z = x / sqrt(mean(x²) + eps) · 1, without weight_offset.
        eps: at least 0.
        weight_offset: added to the weights: 1.0 for Gemma's (1 + w).
        norm: "head" or "all": what is normalized together.
        cos, sin, cos_sin, angles, inv_freq: the table or frequencies, exactly one form; positions, offset, cu_seqlens,
            sections, sections_interleaved, context_parallel: the position of each token; pairing, rotary_dim,
            rotary_start, scale: the rotation: all as in `rope`. Tokens past the last of `cu_seqlens` are normalized but
            not rotated.
        impl: "auto", "cuda", "triton" or "reference". A named implementation never falls back; `explain_dispatch` shows
            what auto selects. CUDA's backward serves the calls of most models; that of other calls is
            Triton's.

    Returns:
        y for q, or the pair for q and k if k is given, in the physical layout (stride order) of the input; gradients
        likewise.

    Gradients of q, k and the weights take one launch that reads dy and x and writes dx, and one that reduces the
    partial sums of the weight gradients in a fixed order: no atomics, bitwise reproducible. Only q, k and the weights
    are saved for backward; the mean is recomputed. Higher-order gradients, forward mode and torch.func transforms use
    the formula in plain torch. Tables get no gradient.

    A position without a table row makes the rotated features of its token NaN, and in backward the gradients of its heads
    and of the weights; memory outside the table is never read.

    Raises:
        TypeError, ValueError: `qk_norm_rope: <argument> must <contract>, got <value>; <one fix>`, before anything is
            computed.

    Example:
        >>> q, k = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64)
        >>> inv_freq = 10000 ** -(torch.arange(0, 64, 2) / 64)
        >>> q_out, k_out = fusewise.qk_norm_rope(q, k, torch.ones(64), torch.ones(64), inv_freq=inv_freq)
    """
    rotation = (
        cos, sin, cos_sin, angles, inv_freq, positions, offset, cu_seqlens, sections, sections_interleaved,
        context_parallel, layout, pairing, rotary_dim, rotary_start, scale, False,
    )  # fmt: skip
    own = q_weight, k_weight, eps, weight_offset, norm
    if not traced() and (quick := _host.qk_norm_rope(q, k, *rotation, impl, *own)) is not None:
        return quick
    if transforms_active():  # the dimension that vmap hides may lie within a head or a weight
        q, k, q_weight, k_weight = unit_strides((q, k, q_weight, k_weight))
    call, reach = validated(q, k, q_weight, k_weight, rotation, layout, (eps, weight_offset, norm), impl)
    out = _op.apply(q, k, q_weight, k_weight, call)
    _op.remember((q, k, *rotation, impl, *own), *_op.lists(q, k, q_weight, k_weight), call, reach, out)
    return out
