"""The public functions of RoPE: what they compute, what they accept, and one validation for all implementations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._common import fail, traced, transforms_active
from . import _host, _op
from ._problem import Layout, Pairing
from ._validate import validated_as_far
from ._written import check_followed, check_out, check_written

# Arguments after k are meant to be given by name, and no `*` says so: for every keyword-only parameter that is not given
# CPython looks its default up in a dictionary, 0.3 µs for these, of a call that takes one.


def rope(
    q: Tensor,
    k: Tensor | None = None,
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
    context_parallel: tuple[int, int] | None = None,
    layout: Layout = "bshd",
    pairing: Pairing = "half",
    rotary_dim: int | None = None,
    rotary_start: int = 0,
    scale: float = 1.0,
    inverse: bool = False,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
    impl: str = "auto",
) -> Any:
    """Rotary position embedding of q, or of q and k in one launch (Su et al., arXiv 2104.09864).

        (y_a, y_b) = (x_a cos θ − x_b sin θ, x_b cos θ + x_a sin θ),   θ = position · inv_freq[i] or the table's entry

    for each pair i = (a, b) of every head. Angles and rotation are computed in float32 whatever the dtypes (float64 for
    float64 tensors), rounded once. Features outside the rotary width pass through unchanged.

    Shape legend: B batch, T tokens, H heads (may differ between q and k), D head_dim, P = rotary_dim / 2 pairs, R table
    rows.

    Args:
        q, k: (B, T, H, D), (T, B, H, D), (B, H, T, D) or (tokens, H, D), as `layout` says; float32, bfloat16 or float16
            (float64 through the reference); D even, 2 to 512, and the same for both unless rotary_dim is given (the
            shared key of DeepSeek's attention has the rotary features alone). Any strides with a contiguous last dimension; nothing is
            copied, so views of a packed qkv tensor are welcome.
        cos, sin: the table, half width (R, P) or (1 | B, R, P), or duplicated, 2P columns with every angle twice
            (`cat(f, f)`; for the interleaved pairing `repeat_interleave(f, 2)`), of which one half is read. Row r holds
            position r. float32, bfloat16 or float16, any strides, both alike.
        cos_sin: instead, one tensor [cos | sin] of 2P columns, the cache of the serving engines.
        angles: instead, the angles in radians, shaped as `cos`; as precise as from frequencies, and less so from 2^31 on (NaN from
            2^52 on with impl "cpu").
        inv_freq: instead, the frequencies (P,); no table at all. The angle is a float64: cos and sin are right to a rounding of
            float32 below position 2^29, and to 4e-7 at 2^31.
        positions: int32 or int64 (T,) or (B, T) (also for layout sbhd), the table row of each token; without them
            positions run 0, 1, 2, ... With `sections` the shape is (3, T) or (3, B, T).
        offset: added to running positions: an int, or a contiguous integer tensor (B,), one a sequence.
        cu_seqlens: int32 or int64 (sequences + 1,), contiguous, for layout thd: the bounds of packed sequences; positions restart
            at each, `offset` may have one entry a sequence. Tokens past the last bound pass through unrotated.
        sections: M-RoPE: how many pairs follow the t, h and w positions; `sections_interleaved` deals them out in turn
            (t, h, w, t, h, w, ...) as Qwen3-VL does.
        context_parallel: (rank, size): the tokens are chunks rank and 2·size − 1 − rank of 2·size equal chunks of their
            sequence (load-balanced causal attention). With cu_seqlens those are the bounds of the whole sequences.
        pairing: where a and b lie: "half" (i, i + P; NeoX, Llama), "interleaved" (2i, 2i + 1; GPT-J),
            "interleaved_to_half" (read interleaved, written half: DeepSeek), "half_to_interleaved" (its transpose).
        rotary_dim: rotated features, even; None: the whole head. `rotary_start` is the first of them and counts from
            the end if negative: `rotary_start=-rotary_dim` rotates the trailing part.
        scale: factor of the cos and sin made from angles or frequencies (YaRN's attention scaling).
        inverse: rotate by −θ.
        out: tensors to write to, like q and k in shape, dtype and device, that share memory with no argument; not with
            autograd.
        impl: "auto", "cuda", "triton", "cpu" or "reference". A named one never falls back; `explain_dispatch` tells what auto
            takes. "cuda" compiles its kernels with nvcc at the first call; auto takes them, for calls too small to keep a
            GPU busy, once they are there by such a call or by `fusewise build`.

    Returns:
        The rotated q, or (q, k) if there is a k; in the physical layout (stride order) of the input, and so are the
        gradients.

    A position without a table row makes the rotated features of its token NaN on every implementation; memory outside
    the table is never read. Where that can be known beforehand it is a ValueError.

    Gradients are the inverse rotation by the same kernel; nothing of q or k is saved, tables get none. Differentiable
    any number of times, also forward-mode, and under vmap. Bitwise deterministic. Native code rotates a gradient where it lies
    if nobody else can read it any more; one that a hook, a saved tensor or anybody else has is never written to.

    Raises:
        TypeError, ValueError: `rope: <argument> must <contract>, got <value>; <one fix>`, before anything is written.

    Example:
        >>> q, k = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64)
        >>> inv_freq = 10000 ** -(torch.arange(0, 64, 2) / 64)
        >>> q_rotated, k_rotated = fusewise.rope(q, k, inv_freq=inv_freq)
    """
    if not traced():
        done = _host.rope(
            q, k, cos, sin, cos_sin, angles, inv_freq, positions, offset, cu_seqlens, sections, sections_interleaved,
            context_parallel, layout, pairing, rotary_dim, rotary_start, scale, inverse, impl,
        ) if out is None else _host.rope_out(
            q, k, cos, sin, cos_sin, angles, inv_freq, positions, offset, cu_seqlens, sections, sections_interleaved,
            context_parallel, layout, pairing, rotary_dim, rotary_start, scale, inverse, impl, out,
        )  # fmt: skip
        if done is not None:
            return done
    options = (
        cos, sin, cos_sin, angles, inv_freq, positions, offset, cu_seqlens, sections, sections_interleaved,
        context_parallel, layout, pairing, rotary_dim, rotary_start, scale, inverse, impl,
    )  # fmt: skip
    call, reach = validated_as_far("rope", q, k, options)
    if out is None:
        rotated = _op.rotate(q, k, call)
        _host.remember(_host.NEW, (q, k, *options), call, reach, rotated)
        return rotated
    if transforms_active():
        contract = "be None under a torch.func transform or forward mode"
        fail("rope", "out", contract, "out=", "call rope without out=")
    if _op.needs_autograd(q, k):
        fail(
            "rope",
            "out",
            "be None where a gradient is wanted",
            "out=",
            "call rope without out= or under torch.no_grad()",
        )
    outs = check_out("rope", (q,) if k is None else (q, k), out, options)
    _op.rotate_into(q, k, call, outs)
    _host.remember(_host.GIVEN, (q, k, *options, out), call, reach, outs)
    return outs[0] if k is None else outs


def rope_(
    q: Tensor,
    k: Tensor | None = None,
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
    context_parallel: tuple[int, int] | None = None,
    layout: Layout = "bshd",
    pairing: Pairing = "half",
    rotary_dim: int | None = None,
    rotary_start: int = 0,
    scale: float = 1.0,
    inverse: bool = False,
    impl: str = "auto",
) -> Any:
    """`rope` in place: q and k are overwritten and returned. Arguments as in `rope`.

    The mutation stands in the operator's schema and is known to autograd, so that what has saved the old values raises
    in backward instead of using the new ones. It is refused where it could not be right: on a leaf that requires grad
    or a view of one, on a view among several made at once (unbind, split, chunk) that requires grad, under torch.func
    transforms and forward mode, on tensors that share memory with each other, with themselves or with the table, and with
    gradients under torch.compile, which does not see a mutation in an autograd function (use `rope` there: the compiler
    makes it in-place where it may).

    Before torch 2.13 a graph of torch.compile gets new tensors and copies of them into q and k: its own writes through an
    operator may go to the wrong place there.

    Raises:
        TypeError, ValueError, RuntimeError: as `rope`, before anything is written.
    """
    if not traced():
        done = _host.rope_(
            q, k, cos, sin, cos_sin, angles, inv_freq, positions, offset, cu_seqlens, sections, sections_interleaved,
            context_parallel, layout, pairing, rotary_dim, rotary_start, scale, inverse, impl,
        )  # fmt: skip
        if done is not None:
            return done
    options = (
        cos, sin, cos_sin, angles, inv_freq, positions, offset, cu_seqlens, sections, sections_interleaved,
        context_parallel, layout, pairing, rotary_dim, rotary_start, scale, inverse, impl,
    )  # fmt: skip
    call, reach = validated_as_far("rope_", q, k, options)
    if torch.compiler.is_compiling():
        if _op.needs_autograd(q, k):
            fail(
                "rope_",
                "q and k",
                "not require grad under torch.compile",
                "requires_grad=True",
                "use rope",
                RuntimeError,
            )
    else:
        tensors = (q,) if k is None else (q, k)
        check_followed(tensors)
        check_written("rope_", tensors, options)
    _op.rotate_in_place(q, k, call)
    rotated = q if k is None else (q, k)
    _host.remember(_host.IN_PLACE, (q, k, *options), call, reach, rotated)
    return rotated
