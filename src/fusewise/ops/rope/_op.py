"""Registered RoPE operators, their dispatch to an implementation, and autograd. Imports only torch.

There are three operators for q alone and three for q and k: functional, `out` variant, in place (mutations are declared
in the schema). They take a call validated by `api.py` and know nothing of autograd: an `autograd.Function` wraps them,
so that the backward is an ordinary call of the same operator with the transposed spec, differentiable in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._common import (
    apply_function,
    empty_like,
    jit_traces,
    recorded_by_operators,
    records_gradients,
    restored,
    save_tensors,
    transforms_active,
    unit_stride,
    unit_strides,
)
from .._overlap import check_apart
from .._register import copies_wrongly, register, with_tail, without_tail
from . import _auto, _host
from ._problem import Spec, layout_dims, rotated_rank, same_strides, transposed_spec

# Schema of the arguments after the rotated tensors, the same in every operator: a `Rotation` and the implementation
# name or "auto".
ROTATION = (
    "Tensor cos, Tensor? sin, Tensor? positions, Tensor? offsets, Tensor? cu_seqlens, SymInt offset, str spec, str impl"
)

choice = _auto.choice
IMPLEMENTATIONS, unavailable, choose = _auto.IMPLEMENTATIONS, choice.unavailable, choice.choose


def _launch(xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], rest: tuple[Any, ...]) -> None:
    rotation, impl = rest[:-1], rest[-1]
    implementation = _auto.serving(impl, xs, ys, rotation[-1])
    implementation.launch(xs, ys, rotation)
    _host.served(implementation, xs[0].device.type, impl)


def _empty(x: Tensor, strides: list[int]) -> Tensor:
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device) if strides else empty_like(x)


def _rope(q: Tensor, *rest: Any) -> Tensor:
    *call, q_strides = rest
    y = _empty(q, q_strides)
    _launch((q,), (y,), tuple(call))
    return y


def _rope_qk(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *call, q_strides, k_strides = rest
    ys = _empty(q, q_strides), _empty(k, k_strides)
    _launch((q, k), ys, tuple(call))
    return ys


def _launch_into(ys: tuple[Tensor, ...], rest: tuple[Any, ...], xs: tuple[Tensor, ...] | None = None) -> None:
    """Launch into existing tensors, in place or from `xs`, and bump their version counters: autograd does not see writes
    through a pointer."""
    rank = rotated_rank(rest[-2])
    ys = tuple([without_tail(y, rank) for y in ys])
    _launch(ys if xs is None else xs, ys, rest)
    torch.autograd.graph.increment_version([y for y in ys if not y.is_inference()])


def _rope_out(q: Tensor, *rest: Any) -> None:
    _launch_into(rest[-1:], rest[:-1], (q,))


def _rope_qk_out(q: Tensor, k: Tensor, *rest: Any) -> None:
    _launch_into(rest[-2:], rest[:-2], (q, k))


def _rope_(q: Tensor, *rest: Any) -> None:
    _launch_into((q,), rest)


def _rope_qk_(q: Tensor, k: Tensor, *rest: Any) -> None:
    _launch_into((q, k), rest)


def _fake_rope(q: Tensor, *rest: Any) -> Tensor:
    return _empty(q, rest[-1])


def _fake_rope_qk(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _empty(q, rest[-2]), _empty(k, rest[-1])


def fake_writing(op: str, written: dict[str, int]) -> Callable[..., None]:
    """Fake implementation of an operator that mutates the arguments with these names and indices. This is the only
    point in tracing `op` where aliasing is known. Aliasing of a written and a read tensor is fine: the compiler reads
    before it writes."""

    def fake(*args: Any) -> None:
        check_apart(op, {name: args[place] for name, place in written.items()}, {})

    return fake


def _vmap_functional(name: str, count: int) -> Callable[..., Any]:
    """vmap rule for operator `name`: fold the mapped dimension of q and k into their heads, since all heads rotate
    alike. With a mapped table or position tensor this is not possible: one call per entry."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        op = getattr(torch.ops.fusewise, name).default
        strides: list[list[int]] = [[]] * count
        call = args[: len(args) - count]  # without the stride lists, whose in_dims are lists themselves
        if any(dim is not None for dim in in_dims[count : len(call)]):
            if info.batch_size == 0:
                ys = [
                    x.new_empty((0, *x.shape)) if d is None else x.movedim(d, 0)
                    for x, d in zip(args, in_dims[:count], strict=False)
                ]
                none = tuple(torch.empty_like(y) for y in ys)
                return (none[0], 0) if count == 1 else (none, (0,) * count)
            results = [
                op(*(a if d is None else a.select(d, i) for a, d in zip(call, in_dims, strict=False)), *strides)
                for i in range(info.batch_size)
            ]
            if count == 1:
                return torch.stack(results), 0
            return tuple(torch.stack(group) for group in zip(*results, strict=True)), (0,) * count
        h_dim = layout_dims(Spec.decode(args[-2 - count]).layout)[2]
        folded, sizes = [], []
        for x, dim in zip(args[:count], in_dims[:count], strict=True):
            x = x.unsqueeze(h_dim) if dim is None else x.movedim(dim, h_dim)
            sizes.append(x.shape[h_dim : h_dim + 2])
            folded.append(x.flatten(h_dim, h_dim + 1))
        out = op(*folded, *call[count:], *strides)
        outs = [y.unflatten(h_dim, size) for y, size in zip((out,) if count == 1 else out, sizes, strict=True)]
        dims = [h_dim if size[0] == info.batch_size else None for size in sizes]
        outs = [y if dim is not None else y.squeeze(h_dim) for y, dim in zip(outs, dims, strict=True)]
        return (outs[0], dims[0]) if count == 1 else (tuple(outs), tuple(dims))

    return rule


# Outputs of the functional operators keep the stride order of their input unless strides are given: a gradient gets the
# strides of the tensor it belongs to, not those of the incoming gradient.
_op_rope = register(
    f"rope(Tensor q, {ROTATION}, SymInt[] q_strides) -> Tensor", _rope, _fake_rope, _vmap_functional("rope", 1),
    lambda q, *rest: apply_function(_Rope, q, None, *rest, []),
)  # fmt: skip
_op_rope_qk = register(
    f"rope_qk(Tensor q, Tensor k, {ROTATION}, SymInt[] q_strides, SymInt[] k_strides) -> (Tensor, Tensor)",
    _rope_qk, _fake_rope_qk, _vmap_functional("rope_qk", 2), lambda *args: apply_function(_Rope, *args),
)  # fmt: skip
_op_rope_out = register(
    f"rope_out(Tensor q, {ROTATION}, Tensor(a!) q_out) -> ()", _rope_out, fake_writing("rope", {"out for q": -1})
)
_op_rope_qk_out = register(
    f"rope_qk_out(Tensor q, Tensor k, {ROTATION}, Tensor(a!) q_out, Tensor(b!) k_out) -> ()",
    _rope_qk_out,
    fake_writing("rope", {"out for q": -2, "out for k": -1}),
)
_op_rope_ = register(f"rope_(Tensor(a!) q, {ROTATION}) -> ()", _rope_, fake_writing("rope_", {"q": 0}))
_op_rope_qk_ = register(
    f"rope_qk_(Tensor(a!) q, Tensor(b!) k, {ROTATION}) -> ()", _rope_qk_, fake_writing("rope_", {"q": 0, "k": 1})
)


def _rotate(q: Tensor | None, k: Tensor | None, call: tuple[Any, ...], strides: tuple[list[int], list[int]]) -> Any:
    """Rotate q and k, either of which may be None, through autograd if needed; always returns a pair."""
    if needs_autograd(q, k) and not recorded_by_operators():
        if transforms_active():
            out = apply_function(_RopeTransformable, q, k, *call)
        else:
            out = apply_function(_Rope, q, k, *call, *strides)
    else:
        out = _forward(q, k, call, *strides)
    return out if isinstance(out, tuple) else (out, None) if k is None else (None, out)


def needs_autograd(q: Tensor | None, k: Tensor | None) -> bool:
    """Whether a call on q and k must go through autograd (reverse mode, forward mode or a functorch transform)."""
    return records_gradients(q, k) or transforms_active()


def readable(dy: Tensor) -> Tensor:
    """dy, or a copy in the only two cases that need one: features not contiguous, as in the expanded scalar of
    `y.sum()`, or a zero tensor without storage, which torch's own derivative formulas may produce."""
    if not torch.compiler.is_compiling() and _is_zeros(dy):
        return dy.clone()
    return unit_stride(dy)


def _is_zeros(x: Tensor) -> bool:
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x._is_zerotensor()


def _readable(dy: Tensor | None) -> Tensor | None:
    return None if dy is None else readable(dy)


def _strides(dy: Tensor | None, wanted: list[int]) -> list[int]:
    """The output strides to request: `wanted`, or [] if the gradient has them already."""
    return [] if dy is None or list(dy.stride()) == wanted else wanted


def _forward(
    q: Tensor | None, k: Tensor | None, call: tuple[Any, ...], q_strides: list[int], k_strides: list[int]
) -> Any:
    if q is not None and k is not None:
        return _op_rope_qk(q, k, *call, q_strides, k_strides)
    return _op_rope(k, *call, k_strides) if q is None else _op_rope(q, *call, q_strides)


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    q, k, *tensors, offset, spec, impl = inputs[:10]
    save_tensors(ctx, tuple(tensors))
    ctx.rest = offset, spec, impl
    ctx.present = q is not None, k is not None
    # Outputs are dense in the stride order of their input, which is the layout that its gradient should have.
    strides = [list(y.stride()) for y in outputs]
    ctx.strides = (strides[0], strides[-1])
    ctx.shapes = [y.shape for y in outputs]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
    dq, dk = dys if all(ctx.present) else (dys[0], None) if ctx.present[0] else (None, dys[0])
    wants_q, wants_k, *_ = ctx.needs_input_grad
    dq, dk = dq if wants_q else None, dk if wants_k else None
    return *gradients((dq, dk), (*restored("rope", ctx), *ctx.rest), ctx.strides), *(None,) * 8


def gradients(
    dys: tuple[Tensor | None, Tensor | None], call: tuple[Any, ...], strides: tuple[list[int], list[int]]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of q and k from those of the outputs, differentiable in turn; either may be None."""
    dq, dk = dys
    if dq is not None or dk is not None:
        *rest, spec, impl = as_kernels_read(call)
        call = (*rest, transposed_spec(spec), impl)
        dq, dk = _readable(dq), _readable(dk)
        dq, dk = _rotate(dq, dk, call, (_strides(dq, strides[0]), _strides(dk, strides[1])))
    return dq, dk


def as_kernels_read(call: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a backward that follow the gradients, with strides that kernels can read: a saved-tensor hook may have
    changed them, also of sin alone."""
    cos, sin, positions, offsets, cu_seqlens, *rest = call
    if sin is not None and not same_strides(cos, sin):
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, positions, *unit_strides((offsets, cu_seqlens)), *rest


def _jvp(ctx: Any, dq: Tensor | None, dk: Tensor | None, *of_tables: Any) -> Any:
    if any(tangent is not None for tangent in of_tables):
        raise ValueError("rope: the table must not have a tangent: none is computed for it, got one; detach the table")
    tangents = _rotate(_readable(dq), _readable(dk), (*ctx.saved_tensors, *ctx.rest), ctx.strides)
    given = dk if dq is None else dq
    assert given is not None
    # Forward mode does not accept None for an output's tangent: use zeros.
    present = [tangent for tangent, there in zip(tangents, ctx.present, strict=True) if there]
    filled = [given.new_zeros(n) if t is None else t for t, n in zip(present, ctx.shapes, strict=True)]
    return tuple(filled) if len(filled) == 2 else filled[0]


class _Rope(torch.autograd.Function):
    """y = R x, dx = Rᵀ dy; x is not saved. Without `setup_context` the host overhead is a third of that of
    `_RopeTransformable`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        q, k, *call, q_strides, k_strides = inputs
        out = _forward(q, k, tuple(call), q_strides, k_strides)
        if isinstance(out, tuple):
            # The output for an input without requires_grad must not require grad either.
            ctx.mark_non_differentiable(
                *[y for y, needed in zip(out, ctx.needs_input_grad, strict=False) if not needed]
            )
        _save(ctx, inputs, out if isinstance(out, tuple) else (out,))
        return out

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        return *_backward(ctx, *dys), None, None


class _RopeTransformable(torch.autograd.Function):
    """`_Rope` for forward mode and torch.func transforms, which need `setup_context` and `jvp` (not traced by
    torch.compile)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Any:
        q, k, *call = inputs
        return _forward(q, k, tuple(call), [], [])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(ctx, inputs, output if isinstance(output, tuple) else (output,))
        ctx.save_for_forward(*inputs[2:7])

    backward = staticmethod(_backward)
    jvp = staticmethod(_jvp)


def _in_place(q: Tensor, k: Tensor | None, call: Sequence[Any]) -> None:
    if k is None:
        _op_rope_(with_tail(q), *call)
    else:
        _op_rope_qk_(with_tail(q), with_tail(k), *call)


class _RopeInPlace(torch.autograd.Function):
    """In-place variant: inputs are marked dirty; the incoming gradient is never written to."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        q, k, *call = inputs
        _in_place(q, k, call)
        present = (q,) if k is None else (q, k)
        ctx.mark_dirty(*present)
        _save(ctx, inputs, tuple(torch.empty_like(x, device="meta") for x in present))
        return q if k is None else present

    backward = staticmethod(_backward)


def rotate(
    q: Tensor, k: Tensor | None, call: tuple[Any, ...], strides: tuple[list[int], list[int]] | None = None
) -> Any:
    """Out-of-place rotation: returns a tensor, or a pair if there is a k. `call` holds the common operator arguments,
    `strides` those of outputs that should not follow their inputs (not under a torch.func transform).

    A transform traced by torch.compile ignores autograd functions and treats an operator as a constant: there the
    formula in torch ops is used instead.
    """
    if torch.compiler.is_compiling() and transforms_active():
        from . import reference

        return reference.formula(q, k, call[:-1])
    q_out, k_out = _rotate(q, k, call, ([], []) if strides is None else strides)
    return q_out if k is None else (q_out, k_out)


def rotate_into(q: Tensor, k: Tensor | None, call: tuple[Any, ...], out: tuple[Tensor, ...]) -> None:
    """Rotate into `out`, without autograd."""
    if copies_wrongly():
        _copy(rotate(q, k, call), out)
    elif k is None:
        _op_rope_out(q, *call, *map(with_tail, out))
    else:
        _op_rope_qk_out(q, k, *call, *map(with_tail, out))


def _copy(rotated: Any, to: tuple[Tensor, ...]) -> None:
    for y, x in zip(rotated if isinstance(rotated, tuple) else (rotated,), to, strict=True):
        x.copy_(y)


def _rebased_apart(q: Tensor, k: Tensor) -> bool:
    """Whether autograd needs one call per tensor: it rebases the history of a view only for single-output functions,
    makes every output of a function require grad, and moves the hook of `retain_grad` only between outputs of equal number."""
    return q._is_view() or k._is_view() or q.requires_grad != k.requires_grad or (k.retains_grad and k.output_nr == 0)


def _placed_apart(q: Tensor, k: Tensor) -> bool:
    """Whether DTensor needs one call per tensor: it redistributes k to the placements of q, and would write to the copy."""
    return type(q) is not Tensor and getattr(q, "placements", None) != getattr(k, "placements", None)


def rotate_in_place(q: Tensor, k: Tensor | None, call: tuple[Any, ...]) -> None:
    """In-place rotation, through autograd if needed."""
    recorded = needs_autograd(q, k)
    if k is not None and (_placed_apart(q, k) or (recorded and _rebased_apart(q, k))):
        rotate_in_place(q, None, call)
        rotate_in_place(k, None, call)
    elif jit_traces() if recorded else copies_wrongly():  # a jit trace cannot record an in-place autograd function
        _copy(rotate(q, k, call), (q,) if k is None else (q, k))
    elif not recorded:
        _in_place(q, k, call)
    elif "torch._dynamo" in sys.modules:
        global _untraced
        if _untraced is None:
            _untraced = torch.compiler.disable(apply_function)
        _untraced(_RopeInPlace, q, k, *call)
    else:
        apply_function(_RopeInPlace, q, k, *call)


# `apply_function` behind a graph break: if torch.compile traced it, the mutation inside the autograd function would
# silently be missing from the gradients. With fullgraph, `rope_` rejects the call.
_untraced: Callable[..., Any] | None = None
