"""Executor for `thunder.jit` that keeps each fusewise operation a single symbol of the trace.

    import thunder
    from fusewise.integrations.thunder import executor

    step = thunder.jit(function, executors=[executor(), *thunder.get_default_executors()])

`fusewise.rope`, `geglu_linear`, `gated_linear` and `gated_mlp` become symbols of the trace where the executor is passed,
the gated units under autocast in the dtype of `F.linear`; elsewhere nothing changes. The backward of RoPE is `rope`
itself with the inverse rotation; q and k are not saved. The backward of a gated unit saves only its inputs and
recomputes the forward, whatever `save` is, since Thunder decides what a trace saves; it computes the gradients of all
tensors, wanted or not.

`rope_` and `out=`, which mutate tensors, cannot be traced, nor can `qk_norm_rope` and `rope_and_cache_`, nor `nn.GatedMLP`
and the gated MLPs of `fusewise.compat`, which inspect the strides of their weights: call `gated_mlp` with the weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..ops._common import unit_stride
from ..ops.gated_linear import gated_linear, gated_mlp, geglu_linear
from ..ops.rope import rope
from ..ops.rope._problem import TRANSPOSED


@cache
def executor() -> Any:
    """The executor, one per process. Imports thunder.

    Raises:
        ImportError: thunder cannot be imported.
    """
    from thunder.extend import OperatorExecutor

    made = OperatorExecutor("fusewise")
    _add_rope(made)
    for function, width in ((geglu_linear, _unit_width), (gated_linear, _unit_width), (gated_mlp, _mlp_width)):
        _add_gated(made, function, width)
    return made


def _add_rope(made: Any) -> None:
    from thunder.core.prims import get_grad, put_grad
    from thunder.core.proxies import TensorProxy

    names = list(inspect.signature(rope).parameters)[2:]

    def meta(q: Any, k: Any = None, *args: Any, **options: Any) -> Any:
        if {**dict(zip(names, args, strict=False)), **options}.get("out") is not None:
            raise ValueError("rope: out must be None inside thunder.jit, got tensors; use the result")
        return TensorProxy(like=q) if k is None else (TensorProxy(like=q), TensorProxy(like=k))

    def run(q: Tensor, k: Tensor | None = None, *args: Any, **options: Any) -> Any:
        return rope(unit_stride(q), None if k is None else unit_stride(k), *args, **options)

    symbol = made.register_operator("fusewise_rope", meta=meta, fn=run, replaces=rope)

    def gradient(q: Any, k: Any = None, *args: Any, **options: Any) -> Any:
        options = {**dict(zip(names, args, strict=False)), **options}
        rotated = symbol(q, k, **options)
        back = {**options, "inverse": not options.get("inverse", False)}
        if (pairing := options.get("pairing")) in TRANSPOSED:
            back["pairing"] = TRANSPOSED[pairing]
        if k is None:
            put_grad(q, symbol(get_grad(rotated), **back))
        else:
            dq, dk = symbol(*map(get_grad, rotated), **back)
            put_grad(q, dq)
            put_grad(k, dk)
        return rotated

    made.register_implementation(symbol, symbol, grad_transform=gradient)


def _add_gated(made: Any, function: Callable[..., Tensor], width: Callable[..., int]) -> None:
    from thunder.core.prims import get_grad, put_grad
    from thunder.core.proxies import TensorProxy

    autocast: Any = import_module("thunder.transforms.autocast")
    name = f"fusewise_{function.__name__}"

    def meta(x: Any, *args: Any, **options: Any) -> Any:
        return TensorProxy(like=x, shape=(*x.shape[:-1], width(x, *args, **options)))

    def backward_meta(dy: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return tuple(TensorProxy(like=t) for t in (*args, *options.values()) if isinstance(t, TensorProxy))

    def backward(dy: Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor, ...]:
        """Gradients of all tensor arguments, in order."""
        with torch.enable_grad():
            positional = [_leaf(value) for value in args]
            named = {key: _leaf(value) for key, value in options.items()}
            y = function(*positional, **named)
        leaves = [value for value in (*positional, *named.values()) if isinstance(value, Tensor)]
        return torch.autograd.grad(y, leaves, dy)

    symbol = made.register_operator(name, meta=meta, fn=function, replaces=function)
    backward_symbol = made.register_operator(f"{name}_backward", meta=backward_meta, fn=backward)

    # A trace runs with autocast off: the casts are part of it, as those of `F.linear` are.
    def under_autocast(*args: Any, dtype: Any, **options: Any) -> Any:
        return symbol(*autocast.maybe_downcast_to(dtype, args), **autocast.maybe_downcast_to(dtype, options))

    autocast.register_autocast_rule(symbol.id)(under_autocast)

    def gradient(*args: Any, **options: Any) -> Any:
        y = symbol(*args, **options)
        tensors = [value for value in (*args, *options.values()) if isinstance(value, TensorProxy)]
        for tensor, grad in zip(tensors, backward_symbol(get_grad(y), args, options), strict=True):
            put_grad(tensor, grad)
        return y

    made.register_implementation(symbol, symbol, grad_transform=gradient)


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_() if isinstance(value, Tensor) else value


def _unit_width(x: Any, weight: Any, bias: Any = None, *, w_gate: Any = None, **_: Any) -> int:
    """F, from a combined weight in any layout, or from the value's weight if there is a w_gate."""
    rows: int = weight.numel // x.shape[-1]
    return rows if w_gate is not None else rows // 2


def _mlp_width(x: Any, w_gate: Any, w_up: Any, w_down: Any, **_: Any) -> int:
    width: int = w_down.shape[0]
    return width
