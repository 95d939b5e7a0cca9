"""The public functions of the gated linear unit: what they compute, what they accept, one validation for all."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from torch.nn import functional

from .._common import fail, shown, traced, transforms_active
from . import _autograd, _host, _mlp, reference
from ._problem import Activation, Halves, Layout, Save, Spec
from ._validate import check_tensor, validated


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
    """Linear and GEGLU as one operation; of the weight's 2F rows, [0, F) make the value and [F, 2F) the gate.

        y = (x W_valueᵀ + b_value) · gelu(x W_gateᵀ + b_gate)        Shazeer, arXiv 2002.05202

    which is `x1 * F.gelu(x2, approximate=approximate)` for `x1, x2 = F.linear(x, weight, bias).chunk(2, -1)`. Nearly all other
    libraries stack the gate first (`gelu(x1) * x2`): for their weights say `gate_first=True`.

    `approximate="tanh"` and `"none"` (erf) are different functions, each exact to rounding. Everything else, the other
    arguments, what is held for backward and the errors, is as in `gated_linear`.

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
    """Two linear maps and the gate between them as one operation; value first unless `gate_first` says otherwise.

        y = (x W_valueᵀ + b_value) · act(x W_gateᵀ + b_gate)

    Products are accumulated, and bias and gate applied, in float32 (float64 for float64 tensors); y is rounded once. On a
    CPU 16-bit pre-activations are rounded, too, where the BLAS hands them to the gate.

    Args:
        x: (..., D), float32, bfloat16 or float16 (float64 through the reference). Rows at one distance from each other,
            with contiguous features, are read in place; anything else is copied once, as `F.linear` does.
        weight: both matrices in one tensor, (2F, D), (2, F, D) or (F, 2, D), or with `w_gate` the value's (F, D). Read in
            place, never repacked; the last dimension must be contiguous. dtype and device of x.
        bias: for every row of `weight`, (2F,) or shaped as the weight without D; with `w_gate` the value's (F,); or None.
            Contiguous.
        activation: of the gate: "gelu_tanh", "gelu" (erf), "silu", "relu", "sigmoid" or "identity".
        w_gate, b_gate: the gate's matrix (F, D) and bias (F,), where they are tensors of their own.
        layout: how the rows of one weight tensor are ordered: "stacked", all of one half and then the other, or
            "interleaved", in turn.
        gate_first: the first half (or the first of each two rows) is the gate. Both say nothing where `w_gate` is given.
        save: what is held for backward. "preact": both pre-activations, 2F elements a row beside y; the fastest.
            "input": nothing but x and the weights; the product is computed again in the backward.
        impl: "auto", "cuda", "gluon", "triton", "cpu" or "reference". A named one never falls back; `explain_dispatch` tells
            what auto takes.

    Returns:
        y (..., F), contiguous, in the dtype of x.

    Memory: without gradients y and nothing else (on a CPU a chunk of the gate's pre-activations besides: 8 MiB, or 512
    rows if those are more; of both where oneDNN multiplies float32, which needs such a chunk in the backward, too, and
    dW once more). Backward needs, beside the gradients that it returns, 2F elements a row
    with `save="input"` (F where that would be 256 MiB or more), and none with `save="preact"` unless the graph is
    retained: the gradient of the pre-activations takes their place. The bias gradient is summed in float32 in a fixed
    order, by partial sums (2F for every 32 rows or more of a large problem): bitwise reproducible, no atomics.
    On a GPU, in 16 bits, what has rows that are no multiples of 16 bytes is copied besides (docs/gated-linear.md).
    float64, which plain torch computes, takes what plain torch takes.

    Differentiable any number of times; a backward with `create_graph=True` or `is_grads_batched=True`, forward mode and
    torch.func transforms go through the formula in plain torch (`reference.py`), so the transforms need impl "auto" or
    "reference". Under autocast the tensors are cast to the dtype that `F.linear` has, at every call: autocast's cache of cast
    weights is not open to others, so a weight that is used several times is cast, and held for backward, as often.

    Raises:
        TypeError, ValueError: `gated_linear: <argument> must <contract>, got <value>; <one fix>`.
        RuntimeError: the same of a named `impl` within a transform of torch.func.

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
    """The MLP of a transformer block, gate first: act(x W_gateᵀ) · (x W_upᵀ), and the projection down.

        z = y W_downᵀ + b_down,    y = (x W_upᵀ + b_up) · act(x W_gateᵀ + b_gate)

    `gated_linear` with the down projection included, whose backward then needs no elementwise kernel: the product that
    brings the gradient through W_down reads the pre-activations in its epilogue and writes their gradient and y again.

    Args:
        x, activation, save, impl: as in `gated_linear`.
        w_gate, w_up: (F, D) each, with biases b_gate and b_up (F,), both or none. Or w_up None and both in w_gate, in
            `layout`, the gate first unless `gate_first=False` (Phi-3's gate_up_proj), with b_gate for both.
        w_down: (O, F), with bias b_down (O,) or None.

    Returns:
        z (..., O), in the dtype of x. y is rounded to that dtype between the two.

    Memory: forward y and z; held for backward the pre-activations, 2F elements a row, or nothing with `save="input"`.
    Backward needs, beside the gradients that it returns, those 2F and y.

    Raises:
        TypeError, ValueError: `gated_mlp: <argument> must <contract>, got <value>; <one fix>`.
        RuntimeError: the same of a named `impl` within a transform of torch.func.

    Example:
        >>> x, gate, up, down = torch.randn(4, 16, 64), torch.randn(128, 64), torch.randn(128, 64), torch.randn(64, 128)
        >>> z = gated_mlp(x, gate, up, down, activation="silu")  # (4, 16, 64)
    """
    first, second = ((w_gate, b_gate), (w_up, b_up)) if w_up is None else ((w_up, b_up), (w_gate, b_gate))
    unit = (x, *first, activation, *second, layout, gate_first, save, impl)  # the arguments of `gated_linear`
    done = None if traced() or w_gate is None else _mlp.quickly(unit, w_down, b_down)
    if done is not None:
        return done
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = reference.as_autocast(x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    weights: tuple[Tensor | None, ...]
    check_tensor("gated_mlp", "w_gate", w_gate)
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
    z = _mlp.apply(x, weights, (w_down, b_down), spec, impl, save)
    if not traced() and not z.requires_grad:
        _host.remember(*unit)
    return z


def _gated(op: str, *arguments: Any) -> Tensor:
    """A call with all arguments of `gated_linear` in order, through the quick way where it takes them."""
    done = None if traced() else _host.gated_linear(*arguments)
    if done is not None:
        return done
    x, weight, bias, activation, w_gate, b_gate, *options, save, impl = arguments
    x, weight, w_gate, bias, b_gate = reference.as_autocast(x, weight, w_gate, bias, b_gate)
    tensors = {"weight": weight, "w_gate": w_gate, "bias": bias, "b_gate": b_gate}
    spec = validated(op, x, tensors, (activation, *options, save, impl))
    y = _run(op, x, (weight, w_gate, bias, b_gate), spec, save, impl)
    if not traced():
        _host.remember(*arguments)
    return y


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
