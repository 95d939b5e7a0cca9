"""Public API of the gated linear unit: `gated_linear`, `geglu_linear` and `gated_mlp`.

A call first tries the C++ fast path (`_host`). Otherwise it is validated here, once for all implementations, and runs
through the registered operators (`_op`) with autograd around them (`_autograd`, `_mlp`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from .._common import check_strided, fail, shown, traced, transforms_active
from . import _autograd, _host, _mlp, reference
from ._problem import Activation, Halves, Layout, Save, Spec
from ._validate import validated


def geglu_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: Literal["tanh", "none"] = "tanh",
    gate_first: bool = False,
    save: Save = "preact",
    impl: str = "auto",
) -> Tensor:
    """Fused linear and GEGLU; rows [0, F) of the weight compute the value, rows [F, 2F) the gate.

        y = (x W_valueᵀ + b_value) · gelu(x W_gateᵀ + b_gate)        Shazeer, arXiv 2002.05202

    which is `x1 * F.gelu(x2, approximate=approximate)` for `x1, x2 = F.linear(x, weight, bias).chunk(2, -1)`. Nearly
    all other libraries stack the gate first (`gelu(x1) * x2`): pass `gate_first=True` for their weights.

    `approximate="tanh"` and `"none"` (erf) are different functions, each exact to rounding. The other arguments, the
    tensors saved for backward and the errors are as in `gated_linear`.

    Example:
        >>> x, weight, bias = torch.randn(4, 16, 64), torch.randn(256, 64), torch.randn(256)
        >>> y = geglu_linear(x, weight, bias)  # (4, 16, 128)
    """
    if not isinstance(approximate, str) or approximate not in ("tanh", "none"):
        fail("geglu_linear", "approximate", "be tanh or none", shown(approximate), "choose one of them")
    activation: Activation = "gelu_tanh" if approximate == "tanh" else "gelu"
    return _gated("geglu_linear", x, weight, bias, activation, None, None, "stacked", gate_first, save, impl)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation,
    w_gate: Tensor | None = None,
    b_gate: Tensor | None = None,
    layout: Layout = "stacked",
    gate_first: bool = False,
    save: Save = "preact",
    impl: str = "auto",
) -> Tensor:
    """Two linear layers and the gate fused into one operation; the value comes first unless `gate_first` is set.

        y = (x W_valueᵀ + b_value) · act(x W_gateᵀ + b_gate)

    Accumulation, bias and gate are in float32 (float64 for float64 tensors); y is rounded once. On a CPU, 16-bit
    pre-activations are also rounded between the BLAS and the gate.

    Args:
        x: (..., D), float32, bfloat16 or float16 (float64 through the reference). Rows with a constant stride and
            contiguous features are read in place; anything else is copied once, as `F.linear` does.
        weight: both matrices in one tensor, (2F, D), (2, F, D) or (F, 2, D), or with `w_gate` the value's (F, D). Read in
            place, never repacked; the last dimension must be contiguous. dtype and device of x.
        bias: one entry per row of `weight`, (2F,) or the shape of the weight without D; with `w_gate` the value's (F,);
            or None. Contiguous.
        activation: of the gate: "gelu_tanh", "gelu" (erf), "silu", "relu", "sigmoid" or "identity".
        w_gate, b_gate: the gate's matrix (F, D) and bias (F,), if they are separate tensors.
        layout: order of the rows of a single weight tensor: "stacked" (one half after the other) or "interleaved"
            (alternating).
        gate_first: the first half (or the first of every two rows) is the gate. `layout` and `gate_first` are ignored
            if `w_gate` is given.
        save: what is saved for backward. "preact": both pre-activations, 2F elements per row in addition to y; the
            fastest. "input": only x and the weights; the backward recomputes the product.
        impl: "auto", "cuda", "gluon", "triton", "cpu" or "reference". A named implementation never falls back;
            `explain_dispatch` shows what auto selects.

    Returns:
        y (..., F), contiguous, in the dtype of x.

    Memory: without gradients only y (on a CPU also a chunk of the gate's pre-activations: 8 MiB, or 512 rows if that is
    more; of both pre-activations where oneDNN computes float32 products, which needs such a chunk in the backward, too,
    and a second dW if it computes that; in float32 on a GPU both pre-activations where its library multiplies). Besides the
    returned gradients, backward needs 2F elements per row with `save="input"` (F if that would be 256 MiB or more, or
    its rows must be copied), and nothing with `save="preact"` unless the graph is retained: the gradient of the
    pre-activations overwrites them. The bias gradient is accumulated in float32 in a fixed order, by partial sums (2F
    for every 32 or more rows of a large problem): bitwise reproducible, no atomics. On a GPU, 16-bit (or tf32) matrices
    whose row stride is not a multiple of 16 bytes are copied (docs/gated-linear.md). float64 is computed by plain torch
    and needs the memory that plain torch needs.

    Differentiable any number of times; a backward with `create_graph=True` or `is_grads_batched=True`, forward mode and
    torch.func transforms use the formula in plain torch (`reference.py`), so transforms need impl "auto" or
    "reference". Under autocast the tensors are cast to the dtype that `F.linear` would use, on every call: autocast's
    weight cache is not accessible, so a weight that is used several times is cast, and saved for backward, each time.

    Raises:
        TypeError, ValueError: `gated_linear: <argument> must <contract>, got <value>; <one fix>`.
        RuntimeError: in the same form, for a named `impl` under a torch.func transform.

    Example:
        >>> x, gate, up = torch.randn(4, 16, 64), torch.randn(128, 64), torch.randn(128, 64)
        >>> y = gated_linear(x, up, w_gate=gate, activation="silu")  # SwiGLU, (4, 16, 128)
    """
    return _gated("gated_linear", x, weight, bias, activation, w_gate, b_gate, layout, gate_first, save, impl)


def gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    *,
    activation: Activation,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    layout: Layout = "stacked",
    gate_first: bool = True,
    save: Save = "preact",
    impl: str = "auto",
) -> Tensor:
    """Gated MLP of a transformer block, gate first: act(x W_gateᵀ) · (x W_upᵀ), then the down projection.

        z = y W_downᵀ + b_down,    y = (x W_upᵀ + b_up) · act(x W_gateᵀ + b_gate)

    `gated_linear` followed by the down projection. Its backward needs no elementwise kernel: the GEMM that propagates
    the gradient through W_down reads the pre-activations in its epilogue, and writes their gradient and the recomputed y.

    Args:
        x, activation, save, impl: as in `gated_linear`.
        w_gate, w_up: (F, D) each, with biases b_gate and b_up (F,), both or none. Or w_up is None and w_gate holds both
            in `layout`, the gate first unless `gate_first=False` (Phi-3's gate_up_proj), with b_gate for both.
        w_down: (O, F), with bias b_down (O,) or None.

    Returns:
        z (..., O), in the dtype of x. y is rounded to that dtype before the down projection.

    Memory: forward y and z; saved for backward the pre-activations, 2F elements per row, or nothing with
    `save="input"`. Besides the returned gradients, backward needs those 2F elements and y.

    Raises:
        TypeError, ValueError: `gated_mlp: <argument> must <contract>, got <value>; <one fix>`.
        RuntimeError: in the same form, for a named `impl` under a torch.func transform.

    Example:
        >>> x, gate, up, down = torch.randn(4, 16, 64), torch.randn(128, 64), torch.randn(128, 64), torch.randn(64, 128)
        >>> z = gated_mlp(x, gate, up, down, activation="silu")  # (4, 16, 64)
    """
    first, second = ((w_gate, b_gate), (w_up, b_up)) if w_up is None else ((w_up, b_up), (w_gate, b_gate))
    unit = (x, *first, activation, *second, layout, gate_first, save, impl)  # the arguments of `gated_linear`
    done = None if traced() or w_gate is None else _mlp.try_fast_path(unit, w_down, b_down)
    if done is not None:
        return done
    x, *given = reference.as_autocast(x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    w_gate, w_up, w_down, b_gate, b_up, b_down = _with_rows(*given)
    weights: tuple[Tensor | None, ...]
    check_strided("gated_mlp", "w_gate", w_gate)
    if w_up is None:
        names, weights = ("w_gate", "w_up", "b_gate", "b_up"), (w_gate, None, b_gate, b_up)
    else:
        names, weights = ("w_up", "w_gate", "b_up", "b_gate"), (w_up, w_gate, b_up, b_gate)
    tensors = {**dict(zip(names, weights, strict=True)), "w_down": w_down, "b_down": b_down}
    spec = validated("gated_mlp", x, tensors, (activation, layout, gate_first, save, impl))
    if transforms_active():
        _check_transformable("gated_mlp", impl)
        decoded = Spec.decode(spec)
        return functional.linear(reference.formula(x, Halves.of(decoded, *weights), decoded.activation), w_down, b_down)
    return _mlp.apply(x, weights, (w_down, b_down), spec, impl, save)


def _gated(op: str, *arguments: Any) -> Tensor:
    """A call with all arguments of `gated_linear` in order, through the host fast path if it accepts them."""
    done = None if traced() else _host.gated_linear(*arguments)
    if done is not None:
        return done
    x, weight, bias, activation, w_gate, b_gate, *options, save, impl = arguments
    x, *given = reference.as_autocast(x, weight, w_gate, bias, b_gate)
    weight, w_gate, bias, b_gate = _with_rows(*given)
    tensors = {"weight": weight, "w_gate": w_gate, "bias": bias, "b_gate": b_gate}
    spec = validated(op, x, tensors, (activation, *options, save, impl))
    return _run(op, x, (weight, w_gate, bias, b_gate), spec, save, impl)


def _with_rows(*weights: Any) -> tuple[Any, ...]:
    """Weights and biases; in a torch.func transform contiguous ones: the dimension that vmap hides may lie between their
    rows, or within them."""
    if not transforms_active():
        return weights
    return tuple(t.contiguous() if isinstance(t, Tensor) and t.layout == torch.strided else t for t in weights)


def _run(op: str, x: Tensor, weights: tuple[Any, ...], spec: str, save: str, impl: str) -> Tensor:
    if transforms_active():
        _check_transformable(op, impl)
        decoded = Spec.decode(spec)
        return reference.formula(x, Halves.of(decoded, *weights), decoded.activation)
    return _autograd.apply(x, weights, spec, impl, save)


def _check_transformable(op: str, impl: str) -> None:
    if impl not in ("auto", "reference"):
        fail(
            op, "impl", "be auto or reference under forward mode and torch.func transforms", shown(impl),
            'use impl="auto"', RuntimeError,
        )  # fmt: skip
