"""Public RoPE API: `rope` (out of place or into `out`) and `rope_` (in place).

A call first tries the C++ fast path (`_host`), which replays a call it has seen before. Otherwise it is validated here,
once for all implementations, dispatched through the registered operators (`_op`), and remembered for the fast path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._common import fail, traced, transforms_active, unit_stride
from . import _host, _op
from ._problem import Layout, Pairing
from ._validate import validated_as_far
from ._written import check_followed, check_out, check_written

# Arguments after k are meant to be passed by keyword, but there is no `*`: CPython looks up the default of every
# omitted keyword-only parameter in a dict, which costs 0.3 µs here, in a call that takes 1 µs.


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

    for each pair i = (a, b) of every head. Angles and rotation are computed in float32 for all dtypes (float64 for
    float64 tensors), rounded once. Features outside the rotary width pass through unchanged.

    Shape legend: B batch, T tokens, H heads (may differ between q and k), D head_dim, P = rotary_dim / 2 pairs, R table
    rows.

    Args:
        q, k: shaped as `layout` says; float32, bfloat16 or float16 (float64 through the reference); D even, 2 to 512,
            and the same for both unless rotary_dim is given (the shared key of DeepSeek's attention has only the rotary
            features). The last dimension must be contiguous, other strides are arbitrary; nothing is copied, so views
            of a packed qkv tensor are welcome.
        cos, sin: the table, half width (R, P) or (1 | B, R, P), or duplicated: 2P columns with every angle twice
            (`cat(f, f)`; for the interleaved pairing `repeat_interleave(f, 2)`), of which only one copy is read. Row r
            holds position r. float32, bfloat16 or float16; any strides, the same for both.
        cos_sin: alternative to cos and sin: one tensor [cos | sin] of 2P columns, the cache format of serving engines.
        angles: alternative: the angles in radians, shaped like `cos`; as accurate as from frequencies, less accurate
            from 2^31 on (NaN from 2^52 on with impl "cpu").
        inv_freq: alternative: the frequencies (P,), no table at all. Angles are computed in float64: cos and sin are
            within one float32 rounding below position 2^29, and within 4e-7 at 2^31.
        positions: int32 or int64 (T,) or (B, T) (also for layout sbhd), the table row of each token; by default
            positions are 0, 1, 2, ... With `sections` the shape is (3, T) or (3, B, T).
        offset: added to the default positions: an int, or a contiguous integer tensor (B,), one entry per sequence.
        cu_seqlens: int32 or int64 (sequences + 1,), contiguous, for layout thd: boundaries of packed sequences, which
            must not decrease (not checked: the host would wait for a GPU). Positions restart at each; `offset`
            may have one entry per sequence. Tokens past the last boundary pass through unrotated.
        sections: M-RoPE: how many pairs follow the t, h and w positions; with `sections_interleaved` they alternate
            (t, h, w, t, h, w, ...) as in Qwen3-VL.
        context_parallel: (rank, size): the tokens are chunks rank and 2·size − 1 − rank of 2·size equal chunks of their
            sequence (load-balanced causal attention). cu_seqlens then holds the boundaries of the whole sequences.
        layout: "bshd" (B, T, H, D), "sbhd" (T, B, H, D), "bhsd" (B, H, T, D) or "thd" (tokens, H, D). If q and k have
            as many heads, a mistake between "bshd" and "bhsd" cannot be detected.
        pairing: positions of a and b in a head: "half" (i, i + P; NeoX, Llama), "interleaved" (2i, 2i + 1; GPT-J),
            "interleaved_to_half" (read interleaved, written half: DeepSeek), "half_to_interleaved" (its transpose).
        rotary_dim: number of rotated features, even; None: the whole head. `rotary_start` is the first of them;
            negative values count from the end: `rotary_start=-rotary_dim` rotates the trailing part.
        scale: factor applied to cos and sin computed from angles or frequencies (YaRN's attention scaling).
        inverse: rotate by −θ.
        out: output tensors with the shape, dtype and device of q and k that share no memory with any argument; not
            supported with autograd.
        impl: "auto", "cuda", "triton", "cpu" or "reference". A named implementation never falls back;
            `explain_dispatch` shows what auto selects. "cuda" compiles its kernels with nvcc on the first call. Once
            they have been built, by such a call or by `fusewise build`, auto selects them for calls with a table of cos
            and sin that move up to 256 MiB, or rotate part of each head out of place.

    Returns:
        The rotated q, or (q, k) if k is given, in the physical layout (stride order) of the input; gradients likewise.

    A position without a table row makes the rotated features of its token NaN in every implementation; memory outside
    the table is never read. If this can be detected before the launch, it is a ValueError.

    The backward is the inverse rotation by the same kernel; q and k are not saved, tables get no gradient.
    Differentiable any number of times, also in forward mode and under vmap. Bitwise deterministic. Native code rotates
    a gradient in place if nothing else can read it any more; one that a hook, a saved tensor or other code holds is
    never written to.

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
    if transforms_active():  # the dimension that vmap hides may lie within a head
        q, k = unit_stride(q), None if k is None else unit_stride(k)
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

    The operator's schema declares the mutation and autograd tracks it: a graph that saved the old values raises in
    backward instead of using the new ones. It is rejected where it cannot be correct: on a leaf that requires grad or a
    view of one; on a view from a multi-output op (unbind, split, chunk) that requires grad; under torch.func transforms
    and forward mode; on tensors that overlap each other, themselves or the table; and with gradients under
    torch.compile, which does not see a mutation inside an autograd function (use `rope` there: the
    compiler makes it in-place where possible).

    Before torch 2.13 a torch.compile graph computes new tensors and copies them into q and k: in those versions its own
    writes through a mutating operator may go to the wrong place.
    Pass a packed tensor whole to a compiled function and take q and k out of it there: for two parts of one tensor as
    inputs, whose length varies, Inductor may raise (seen with torch 2.13, for torch's own operators, too).

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
