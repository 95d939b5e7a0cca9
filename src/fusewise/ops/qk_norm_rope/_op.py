"""The two registered operators of `qk_norm_rope`, their dispatch to an implementation, and autograd.

    qk_norm_rope       xs, weights -> ys
    qk_norm_rope_grad  dys, xs, weights -> the gradients of xs, then those of the weights if wanted

`xs` are q, or q and k; there is a weight for each of them, or none. Imports only torch. The operators take a validated
call and know nothing of autograd, which wraps them, so that a call without gradients crosses a single operator boundary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._shared import build
from .._choice import Choice
from .._common import (
    KERNEL_FLOATS,
    apply_function,
    empty_like,
    recorded_by_operators,
    records_gradients,
    restored,
    save_tensors,
    transforms_active,
    unit_strides,
    wants_formula,
)
from .._register import register
from ..rope import _host
from ..rope._auto import table_of
from ..rope._op import as_kernels_read, readable
from ..rope._problem import Rotation, Spec
from . import _native, reference
from ._problem import Norm

# Schema of the arguments after the tensors and their weights:
#   cos ... spec   the rotation, as in RoPE's operators
#   eps, weight_offset, over   see `Norm`
#   impl           the name of an implementation, or "auto"
_COMMON = (
    "Tensor cos, Tensor? sin, Tensor? positions, Tensor? offsets, Tensor? cu_seqlens, SymInt offset, str spec, "
    "float eps, float weight_offset, str over, str impl"
)

# In order of preference, except that on a GPU auto selects CUDA once its library is built. Each has the functions `forward` and
# `backward` of `reference.py`, which write to given tensors. A backward returns whether it has served the call; one that does
# not serve all calls names another implementation in OTHERWISE.
IMPLEMENTATIONS = ("triton", "cuda", "reference")
choice = Choice("qk_norm_rope", IMPLEMENTATIONS)

# Bytes read and written up to which auto selects CUDA for calls that only its general kernel serves. On an H200 this is a
# microsecond slower than Triton's there, and twice as slow for large calls, but saves 70 µs of host time.
MOST_BYTES_FOR_GENERAL = 2**20


def serving(impl: str, xs: Sequence[Tensor], weights: Sequence[Tensor], rotation: Rotation) -> Any:
    """The module that serves a call with `impl`, which may be "auto". A named one never falls back."""
    x = xs[0]
    if impl == "auto" and x.device.type == "cuda" and x.dtype in KERNEL_FLOATS:
        *_, offsets, cu_seqlens, _, spec = rotation
        given = offsets is not None or cu_seqlens is not None
        impl = "auto" if _passes_cuda_over(xs, weights, Spec.decode(spec), given) else "cuda"
    return choice.serving(impl, x.device.type, x.dtype)


def _passes_cuda_over(xs: Sequence[Tensor], weights: Sequence[Tensor], spec: Spec, sequences: bool) -> str | None:
    """Why auto does not select CUDA for a call on a GPU, or None if it does. `sequences`: the positions depend on
    offsets or bounds of sequences."""
    if (reason := _unready()) is not None:
        return reason
    if spec.table in ("angles", "inv_freq"):
        return "it is for tables of cos and sin"
    moved = 2 * sum([x.numel() * x.element_size() for x in xs])
    if _of_most_models(xs, weights, spec, sequences) or moved <= MOST_BYTES_FOR_GENERAL:
        return None
    most = f"{MOST_BYTES_FOR_GENERAL / 2**20:g} MiB"
    return (
        f"such a call beyond {most} is faster in Triton: for large calls it has kernels for heads that rotate completely or "
        "in their first features, in multiples of 32, one position per token, and weights like q or in float32"
    )


def _of_most_models(xs: Sequence[Tensor], weights: Sequence[Tensor], spec: Spec, sequences: bool) -> bool:
    """Whether a call has CUDA kernels of its own, forward and backward, if its tensors are aligned to 16 bytes."""
    simple = spec.sections is None and spec.cp_size == 1 and not sequences and spec.pairing in ("half", "interleaved")
    width, rotary = xs[0].shape[-1], spec.rotary_dim or xs[0].shape[-1]
    first = rotary == width or (spec.rotary_start == 0 and rotary % 32 == 0 and width % 32 == 0)
    alike = all(w.dtype in (xs[0].dtype, torch.float32) and w.dtype == weights[0].dtype for w in weights)
    return simple and first and alike and xs[-1].shape[-1] == width


@functools.cache
def _unready() -> str | None:
    """Why auto cannot use CUDA, or None if it can. Decided once: its sums have another order than Triton's, and results
    should not change within a process."""
    return choice.unready(build.loads())


def explained(arguments: Mapping[str, Any]) -> tuple[str, str, dict[str, str]] | None:
    """As `explained` of RoPE's `_auto`, for the arguments of `qk_norm_rope`."""
    xs = [arguments[name] for name in ("q", "k") if isinstance(arguments[name], Tensor)]
    weights = [arguments[name] for name in ("q_weight", "k_weight") if isinstance(arguments[name], Tensor)]
    if xs[0].device.type != "cuda" or xs[0].dtype not in KERNEL_FLOATS:
        return None
    spec = Spec(
        pairing=arguments["pairing"], rotary_dim=arguments["rotary_dim"] or 0, rotary_start=arguments["rotary_start"],
        table=table_of(arguments), sections=arguments["sections"], cp_size=(arguments["context_parallel"] or (0, 1))[1],
    )  # fmt: skip
    sequences = isinstance(arguments["offset"], Tensor) or arguments["cu_seqlens"] is not None
    reason = _passes_cuda_over(xs, weights, spec, sequences)
    if reason is None:
        served = " of tensors that are not aligned to 16 bytes" if _of_most_models(xs, weights, spec, sequences) else ""
        return "cuda", "which has the lowest host overhead", {"triton": f"it serves the backward{served}"}
    chosen = choice.choose("cuda", xs[0].dtype)
    return None if chosen != "triton" else ("triton", "the first that serves the tensors", {"cuda": reason})


def _split(rest: tuple[Any, ...]) -> tuple[Rotation, Norm, str]:
    *rotation, eps, weight_offset, over, impl = rest
    return tuple(rotation), Norm(eps, weight_offset, over), impl


def _qk_norm_rope(xs: list[Tensor], weights: list[Tensor], *rest: Any) -> list[Tensor]:
    rotation, norm, impl = _split(rest)
    ys = [empty_like(x) for x in xs]
    implementation = serving(impl, xs, weights, rotation)
    implementation.forward(xs, ys, weights, rotation, norm)
    _host.served(implementation, xs[0].device.type, impl)
    return ys


def _qk_norm_rope_grad(dys: list[Tensor], xs: list[Tensor], weights: list[Tensor], *rest: Any) -> list[Tensor]:
    *call, wants_weights = rest
    rotation, norm, impl = _split(tuple(call))
    dxs = [empty_like(x) for x in xs]
    dweights = [empty_like(weight) for weight in weights] if wants_weights else []
    implementation = serving(impl, xs, weights, rotation)
    if not implementation.backward(dys, xs, dxs, weights, dweights, rotation, norm):
        kind = xs[0].device.type, xs[0].dtype
        others = (name for name in choice.able(*kind) if name != "cuda")
        other = choice.serving(next(others) if impl == "auto" else implementation.OTHERWISE, *kind)
        other.backward(dys, xs, dxs, weights, dweights, rotation, norm)
    return [*dxs, *dweights]


def _fake(xs: list[Tensor], weights: list[Tensor], *rest: Any) -> list[Tensor]:
    return [empty_like(x) for x in xs]


def _fake_grad(dys: list[Tensor], xs: list[Tensor], weights: list[Tensor], *rest: Any) -> list[Tensor]:
    return [empty_like(x) for x in (*xs, *(weights if rest[-1] else []))]


def _recorded(xs: list[Tensor], weights: list[Tensor], *call: Any) -> list[Tensor]:
    given = (*xs, None) if len(xs) == 1 else xs
    of_weights = (*weights, *(None,) * (2 - len(weights)))
    ys = apply_function(_QkNormRope, *given, *of_weights, *call)
    return [ys] if len(xs) == 1 else list(ys)


_op = register(
    f"qk_norm_rope(Tensor[] xs, Tensor[] weights, {_COMMON}) -> Tensor[]", _qk_norm_rope, _fake, recorded=_recorded
)
_op_grad = register(
    f"qk_norm_rope_grad(Tensor[] dys, Tensor[] xs, Tensor[] weights, {_COMMON}, bool weight_grad) -> Tensor[]",
    _qk_norm_rope_grad,
    _fake_grad,
)


class _QkNormRope(torch.autograd.Function):
    """Saves only q, k and their weights for backward; r is recomputed."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        q, k, q_weight, k_weight, *call = inputs
        # In the order of the C++ fast path: it may record the call again where a checkpoint recomputes it.
        save_tensors(ctx, (*call[:5], q, k, q_weight, k_weight))
        ctx.rest = call[5:]
        ctx.set_materialize_grads(False)
        ys = _op(*lists(q, k, q_weight, k_weight), *call)
        if len(ys) == 1:
            return ys[0]
        ctx.mark_non_differentiable(*[y for i, y in enumerate(ys) if not _wanted(ctx, i)])
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        saved = restored("qk_norm_rope", ctx)
        call = (*saved[:5], *ctx.rest)
        return *gradients(dys, saved[5:], call, ctx.needs_input_grad[:4]), *(None,) * len(call)


def gradients(
    dys: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
    call: tuple[Any, ...],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients that are needed of the four `inputs`: q, k and their weights."""
    q, k, q_weight, k_weight = unit_strides(inputs)
    call = as_kernels_read(call)
    # Under tracing, gradients that are not wanted are passed as well.
    given = {i: readable(dy) for i, dy in enumerate(dys) if dy is not None and (needed[i] or needed[2 + i])}
    results: list[Tensor | None] = [None] * 4
    if given:
        picked = list(given.values())
        xs = [(q, k)[i] for i in given]
        weights = [(q_weight, k_weight)[i] for i in given] if q_weight is not None else []
        if wants_formula(picked[0]) or wants_formula(picked[-1]):
            rotation, norm, _ = _split(call)
            dxs, dweights = reference.gradients(picked, xs, weights, rotation, norm)
        else:
            grads = _op_grad(picked, xs, weights, *call, any(needed[2 + i] for i in given))
            dxs, dweights = grads[: len(xs)], grads[len(xs) :]
        for place, i in enumerate(given):
            results[i] = dxs[place]
            if dweights:
                results[2 + i] = dweights[place]
    return [result if wanted else None for result, wanted in zip(results, needed, strict=True)]


def _wanted(ctx: Any, i: int) -> bool:
    """Whether the gradient of q or its weight is wanted; for i = 1, of k or its weight."""
    return bool(ctx.needs_input_grad[i] or ctx.needs_input_grad[2 + i])


def lists(
    q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that are given."""
    return [x for x in (q, k) if x is not None], [w for w in (q_weight, k_weight) if w is not None]


def apply(q: Tensor, k: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, call: tuple[Any, ...]) -> Any:
    """A validated call, through autograd if needed: returns a tensor, or a pair if there is a k."""
    if transforms_active():
        rotation, norm, _ = _split(call)
        ys = reference.formula(*lists(q, k, q_weight, k_weight), rotation, norm)
    elif records_gradients(q, k, q_weight, k_weight) and not recorded_by_operators():
        return apply_function(_QkNormRope, q, k, q_weight, k_weight, *call)
    else:
        ys = _op(*lists(q, k, q_weight, k_weight), *call)
    return ys[0] if k is None else (ys[0], ys[1])


def remember(
    arguments: tuple[Any, ...],
    xs: list[Tensor],
    weights: list[Tensor],
    call: tuple[Any, ...],
    reach: float,
    out: Any,
) -> None:
    """Cache a call that has just succeeded, if native code served it: the `arguments` of `_host.qk_norm_rope`, the
    result of `validated`, and the returned value."""
    if _host.without(call[-1]):
        return
    rotation, norm, impl = _split(call)
    host = _host.keeper(_host.NORMED, arguments, serving(impl, xs, weights, rotation), impl)
    if host is not None:
        ys = out if isinstance(out, tuple) else (out,)
        plan = _native.planned(tuple(xs), ys, weights, rotation, norm)
        strides = [list(y.stride()) for y in ys]
        spec = rotation[-1]
        host.remember(_host.NORMED, arguments, *plan, reach, _host.dims_of(spec), strides, spec, impl)
