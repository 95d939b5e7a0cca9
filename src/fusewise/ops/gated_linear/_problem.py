"""A normalized gated linear call, as every implementation receives it.

    y = (x W_valueᵀ + b_value) · act(x W_gateᵀ + b_gate)

Shape legend: M rows of x (all leading dimensions), D features in, F features out; `preact` holds both pre-activations,
u = x W_valueᵀ + b_value and g = x W_gateᵀ + b_gate.

`Spec` holds everything that is not a tensor and passes through the registered operators as a short string. `Halves` are
the weights as two strided (F, D) views with unit stride in D, whatever the layout: nothing is repacked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

Activation = Literal["gelu_tanh", "gelu", "silu", "relu", "sigmoid", "identity"]
Layout = Literal["stacked", "interleaved"]
Save = Literal["preact", "input"]

#: Both pre-activations, or their gradient: one tensor as made by `new_preact`, or u and g as separate (M, F) matrices.
Preact: TypeAlias = "Tensor | tuple[Tensor, Tensor]"

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
LAYOUTS: tuple[str, ...] = get_args(Layout)
SAVES: tuple[str, ...] = get_args(Save)


@dataclass(frozen=True)
class Spec:
    """Everything about a call that is not a tensor."""

    activation: str
    layout: str  # "stacked", "interleaved", or "separate" for two weight tensors
    gate_first: bool = False  # of a stacked or interleaved weight

    def encode(self) -> str:
        # Not an f-string: it would format a str enum as its member name.
        return "/".join((self.activation, self.layout, "gate_first" if self.gate_first else "value_first"))

    @staticmethod
    def decode(text: str) -> Spec:
        return _SPECS[text]

    @property
    def fused(self) -> bool:
        """Whether the weight is one (2F, D) matrix whose rows correspond to the columns of `preact`."""
        return self.layout == "stacked"


# All specs. torch.compile can trace a dict lookup, but would trace through an lru_cache.
_SPECS = {
    spec.encode(): spec
    for activation in ACTIVATIONS
    for layout in (*LAYOUTS, "separate")
    for spec in (Spec(activation, layout), Spec(activation, layout, True))
}


class Halves(NamedTuple):
    """The weights of a call: (F, D) views with unit last stride, and (F,) views of the bias."""

    value: Tensor
    gate: Tensor
    value_bias: Tensor | None
    gate_bias: Tensor | None

    @staticmethod
    def of(
        spec: Spec,
        weight: Tensor,
        weight_gate: Tensor | None = None,
        bias: Tensor | None = None,
        bias_gate: Tensor | None = None,
    ) -> Halves:
        if weight_gate is not None:
            return Halves(weight, weight_gate, bias, bias_gate)
        first, second = pair(weight, spec)
        biases: tuple[Tensor | None, Tensor | None] = (None, None) if bias is None else bias_pair(bias, spec)
        if spec.gate_first:
            return Halves(second, first, biases[1], biases[0])
        return Halves(first, second, *biases)


def rows(x: Tensor) -> Tensor:
    """x (..., D) as (M, D) with unit last stride: a view, or a copy if that is impossible (e.g. for the expanded
    gradient of `y.sum()`)."""
    matrix = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def features_out(weight: Tensor, weight_gate: Tensor | None) -> int:
    """F of a call's weights."""
    return math.prod(weight.shape[:-1]) // (2 if weight_gate is None else 1)


def pair(weight: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Views of the first and the second (F, D) matrix of a single weight tensor, or of its gradient."""
    features = weight.shape[-1]
    if spec.fused:
        matrix = weight.view(-1, features)
        half = matrix.shape[0] // 2
        return matrix[:half], matrix[half:]
    return _every_other(weight, features)


def bias_pair(bias: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """The same for a single bias tensor."""
    if spec.fused:
        flat = bias.view(-1)
        half = flat.shape[0] // 2
        return flat[:half], flat[half:]
    return _every_other(bias)


def _every_other(x: Tensor, *features: int) -> tuple[Tensor, Tensor]:
    """Views of the even and of the odd rows of x (2F, *features); x may also be (F, 2, *features)."""
    mesh = getattr(x, "device_mesh", None)  # of a DTensor
    if mesh is not None and x.dim() == 1 + len(features) and x.shape[0] // 2 % mesh.size():
        return x[::2], x[1::2]  # a shard may end within a pair, so it is gathered, as in forward
    pairs = x.view(-1, 2, *features)
    return pairs[:, 0], pairs[:, 1]


def new_preact(x: Tensor, hidden: int, spec: Spec) -> Tensor:
    """Memory for both pre-activations of x (M, D): (M, 2F) in the row order of a stacked weight, so that a single
    product can write it and consume its gradient; else (2, M, F), value first, one matrix per product."""
    rows = x.shape[0]
    return x.new_empty((rows, 2 * hidden) if spec.fused else (2, rows, hidden))


def split_preact(preact: Preact, spec: Spec) -> tuple[Tensor, Tensor]:
    """u and g, (M, F) each: views of `preact` or a tensor of its shape, or the two tensors themselves if separate."""
    if isinstance(preact, tuple):
        return preact
    if not spec.fused:
        return preact[0], preact[1]
    half = preact.shape[-1] // 2
    first, second = preact[:, :half], preact[:, half:]
    return (second, first) if spec.gate_first else (first, second)


def new_sums(dbias: Tensor | None, parts: int) -> Tensor | None:
    """Memory for partial sums of the bias gradient, (2, F) for each part of the rows; None if it is not wanted."""
    return None if dbias is None else dbias.new_empty((parts, *dbias.shape))


def add_up(sums: Tensor | None, dbias: Tensor | None) -> None:
    """Reduce the partial sums to the bias gradient, if it is wanted."""
    if sums is not None and dbias is not None:
        torch.sum(sums, 0, out=dbias)


def no_rows(dbias: Tensor | None) -> None:
    """All that is left to do without rows: TMA has no descriptor for an empty matrix, so no kernel is launched."""
    if dbias is not None:
        dbias.zero_()


def stride_unit(*matrices: Tensor) -> int:
    """The number of elements, up to 16 bytes, that divides the row strides and widths of all these matrices; 1 if a
    start is not 16-byte aligned. Kernels receive sizes and strides in this unit: Triton only specializes on
    divisibility by 16, and would not vectorize for multiples of 8. They multiply in the type in which a stride arrives,
    so one that needs 64 bits arrives whole."""
    size = matrices[0].element_size()
    if any(x.data_ptr() % 16 or x.stride(0) >= 2**31 for x in matrices):
        return 1
    return math.gcd(16 // size, *(n for x in matrices for n in (x.shape[1], x.stride(0))))


ALIGNED = "TMA needs matrices whose starts and rows are aligned to 16 bytes"


def describable(x: Tensor) -> bool:
    """Whether TMA supports x (rows, columns): 16-byte aligned start and row stride, contiguous columns."""
    rows, columns = x.stride()
    return columns == 1 and rows > 0 and rows * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def odd(hidden: int, matrices: tuple[Tensor, ...]) -> bool:
    """Whether TMA cannot describe one of the matrices, or y of `hidden` columns in their dtype."""
    return bool(hidden * matrices[0].element_size() % 16) or not all(map(describable, matrices))
