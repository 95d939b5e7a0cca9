"""The MLP of a transformer block as a target: the gated linear unit followed by the down projection.

    z = y W_downᵀ,    y = (x W_valueᵀ + b_value) · act(x W_gateᵀ + b_gate)

x, weight and bias are those of a case of the gated linear unit; W_down maps F features back to D.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fusewise.ops.gated_linear._chunks import chunk_bytes, gpu_rows_of
from fusewise.ops.gated_linear.api import gated_mlp
from fusewise.ops.gated_linear.cases import GatedCase, case

from ..problem import PRECISIONS, Pass, Problem, Program, Task
from . import Case, Target
from .geglu import ACTIVATE, GatedProblem, jax_unit, unit

#: Memory a forward holds for its backward besides inputs and z, in units of y, by form: what the unit holds, plus y for
#: the gradient of W_down.
HELD = {
    "eager": 4,
    "two-kernels": 3,
    "fused": 2,
    "fused-recompute": 0,
    "chunked": 2,
    "chunked-recompute": 0,
    "chunked-apart": 2,
    "chunked-apart-recompute": 0,
    "chunked-apart-dw": 2,
    "chunked-apart-dw-recompute": 0,
    "unfused": 2,
    "unfused-recompute": 0,
}


@dataclass(frozen=True)
class MlpCase:
    """A gated linear unit and a projection of its F features down to `unit.out`, D. All counts follow from the
    mathematics."""

    unit: GatedCase

    @property
    def name(self) -> str:
        return self.unit.name

    @property
    def shape(self) -> str:
        return f"{self.unit.shape} down[{self.unit.features},{self.unit.hidden}]"

    @property
    def dtypes(self) -> tuple[str, ...]:
        return self.unit.dtypes

    @property
    def passes(self) -> Sequence[Pass]:
        return self.unit.passes

    @property
    def down_elements(self) -> int:
        return self.unit.features * self.unit.hidden

    def output_bytes(self, dtype: str) -> int:
        """Bytes of z."""
        return self.unit.rows * self.unit.features * PRECISIONS[dtype].itemsize

    def bytes_min(self, direction: Pass, dtype: str) -> int:
        """Forward: reads x, weights and bias, writes z. Backward: reads those and dz, writes their gradients. y need
        not go through DRAM."""
        size = PRECISIONS[dtype].itemsize
        read = (self.unit.weight_elements + self.down_elements) * size + self.output_bytes(dtype)  # x is as large as z
        forward, backward = read + self.output_bytes(dtype), 2 * read + self.output_bytes(dtype)
        return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[direction]

    def flops_min(self, direction: Pass) -> int:
        """FLOPs of the products: two forward, four backward."""
        down = {"fwd": 2, "bwd": 4, "fwd+bwd": 6}[direction] * self.unit.rows * self.down_elements
        return self.unit.flops_min(direction) + down

    def predicted_bytes(self, direction: Pass, dtype: str, form: Any) -> int:
        """Predicted peak bytes beside the inputs and dz, by form; h is the bytes of y.

        Forward: the unit's own peak, or y and z. Backward: "eager" holds 4 h and creates the gradients of y, value and
        gate on the way, "two-kernels" (torch.compile) 3 h and two of these; both while dW_down is alive. "fused" keeps
        the pre-activations, overwrites them with their gradient, and recomputes y; with oneDNN ("apart") a chunk of its
        gradient comes on top ("dw": `apart_bytes` beside dW), in float32 on a GPU one of y's gradient. dx, dW and db are created after y is freed.
        """
        size = PRECISIONS[dtype].itemsize
        h, z, down = self.unit.output_bytes(dtype), self.output_bytes(dtype), self.down_elements * size
        forward = max(self.unit.predicted_bytes("fwd", dtype, form), h + z)
        if direction == "fwd":
            return forward
        most = z + down + {"eager": 6 * h, "two-kernels": 5 * h}.get(form, 3 * h)
        last = z + down + 2 * h + self.unit.gradient_bytes(dtype)
        if "apart" in form:
            most += chunk_bytes(self.unit.rows, self.unit.hidden * size)
        if "dw" in form:
            last += self.unit.apart_bytes(dtype)
        if form.partition("-")[0] in ("fused", "unfused") and size == 4:
            most += min(self.unit.rows, gpu_rows_of(self.unit.rows)) * self.unit.hidden * size
        return max(forward, most, last)


def _named(name: str, found: GatedCase, **changes: Any) -> MlpCase:
    return MlpCase(replace(found, name=name, out=found.features, **changes))


PRESETS: dict[str, list[MlpCase]] = {
    "mlp-quick": [
        _named("mlp-square", case("quick-square"), dtypes=("fp32",)),
        _named("mlp-swiglu", case("quick-swiglu")),
        _named("mlp-decode", case("quick-decode")),
    ],
    "mlp-widths": [
        _named(f"mlp-n16384-d{d}", case(f"memory-n16384-d{d}"), bias=False, passes=("fwd+bwd",))
        for d in (1024, 2048, 4096)
    ],
    "mlp-models": [
        _named(f"{model}-mlp-{suffix}", case(f"{model}-{suffix}"))
        for model in ("gemma-2b", "gemma-7b", "llama-3-8b", "phi-3-mini")
        for suffix in ("train", "decode-b1", "decode-b64")
    ],
}


class GatedMlp(Target):
    """Linear, gate and the linear layer after them in one operation."""

    name = "gated_mlp"
    default_preset = "mlp-quick"
    multiplies = True
    hurried: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "mlp-quick": {"time_limit": 120.0, "max_rounds": 10},
        "mlp-widths": {"time_limit": 300.0},
        "mlp-models": {"time_limit": 600.0},
    }

    def presets(self) -> Mapping[str, Sequence[Case]]:
        return PRESETS

    def problem(self, task: Task) -> Problem:
        return GatedMlpProblem(task)


class GatedMlpProblem(GatedProblem):
    """Tensors: x, weight, bias if any, and W_down."""

    def __init__(self, task: Task) -> None:
        Problem.__init__(self, task)
        self.whole = next(c for cases in PRESETS.values() for c in cases if c.name == task.case)
        self.case = self.whole.unit
        inputs = self.case.make_inputs(self.device, task.dtype, task.seed)
        assert inputs.w_down is not None
        self.kwargs = inputs.kwargs
        self.tensors = (*inputs.operands, inputs.w_down)
        self.upstream = (inputs.gradients[0][:, : self.case.out].contiguous(),)

    def operation(self, *tensors: Tensor, **options: Any) -> Tensor:
        x, weight, *bias, down = tensors
        return gated_mlp(x, weight, None, down, b_gate=bias[0] if bias else None, **(self.kwargs | options))

    def program(self) -> Program:
        """As in Phi-3: one product with the stacked weight, split, and one with W_down."""
        gated = unit(ACTIVATE[self.case.activation], self.case.gate_first, self.case.bias)
        return Program(with_bias(gated) if self.case.bias else without_bias(gated))

    def jax(self) -> Callable[..., Any]:
        gated = jax_unit(self.case.activation, self.case.gate_first)
        return lambda *xs: gated(*xs[:-1]) @ xs[-1].T

    def shape(self) -> str:
        return self.whole.shape

    def bytes_min(self) -> int:
        return self.whole.bytes_min(self.task.pass_, self.task.dtype)

    def flops_min(self) -> int:
        return self.whole.flops_min(self.task.pass_)

    def products(self, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
        """Those of the unit, and with random y (M, F) and dz (M, D): y W_downᵀ, dz W_down and dzᵀ y."""
        x, down = tensors[0], tensors[-1]
        y = torch.randn(x.shape[0], down.shape[1], device=x.device, dtype=x.dtype)
        forward = [(y, down.mT)]
        if self.task.pass_ != "fwd":
            dz = torch.randn_like(x)
            backward = [(dz, down), (dz.mT, y)]
            forward = backward if self.task.pass_ == "bwd" else forward + backward
        return super().products(tensors[:-1]) + forward

    def memory(self, form: str) -> dict[str, Any]:
        """The case's memory model for a provider of this `form`, to compare with measured bytes."""
        found: dict[str, Any] = {}
        if form and self.task.pass_ != "bwd":
            found["predicted_peak_bytes"] = self.whole.predicted_bytes(self.task.pass_, self.task.dtype, form)
        if form and self.task.pass_ != "fwd":
            found["predicted_held_bytes"] = HELD[form] * self.case.output_bytes(self.task.dtype)
        return found


# The eager forms. They must also script: TorchScript accepts functions from a closure but no optional arguments.


def with_bias(gated: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def mlp(x: Tensor, weight: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        return functional.linear(gated(x, weight, bias), down)

    return mlp


def without_bias(gated: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def mlp(x: Tensor, weight: Tensor, down: Tensor) -> Tensor:
        return functional.linear(gated(x, weight), down)

    return mlp
