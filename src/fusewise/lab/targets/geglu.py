"""The gated linear unit as a target, GEGLU and its family: y = (x W_valueᵀ + b_value) · act(x W_gateᵀ + b_gate).

Shape legend: M rows of x, D features in, F features out; weight (2F, D) and bias (2F,) hold both halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fusewise.ops.gated_linear.api import gated_linear
from fusewise.ops.gated_linear.cases import PRESETS, GatedCase, case

from ..problem import Problem, Program, Task
from . import Case, CaseProblem, Target

#: Memory a forward holds for its backward besides inputs and y, in units of y, by form: the product with both halves is
#: two, the activated gate one.
HELD = {
    "eager": 3,
    "two-kernels": 2,
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


class Geglu(Target):
    """Linear and gate in one operation."""

    name = "geglu"
    default_preset = "geglu-quick"
    multiplies = True
    hurried: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "geglu-quick": {"time_limit": 120.0, "max_rounds": 10},
        "geglu-memory": {"time_limit": 600.0},
        "geglu-models": {"time_limit": 600.0},
        "geglu-batches": {"time_limit": 300.0},
        "geglu-shapes": {"time_limit": 300.0},
    }

    def presets(self) -> Mapping[str, Sequence[Case]]:
        return PRESETS

    def problem(self, task: Task) -> Problem:
        return GatedProblem(task)


class GatedProblem(CaseProblem[GatedCase]):
    by_rows = frozenset({0})  # x

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.case = case(task.case)
        inputs = self.case.make_inputs(self.device, task.dtype, task.seed)
        self.kwargs = inputs.kwargs  # for fusewise's own function
        self.tensors = inputs.operands  # x, weight, and bias if any
        self.upstream = inputs.gradients

    def operation(self, *tensors: Tensor, **options: Any) -> Tensor:
        """fusewise's own function on the problem's tensors."""
        return gated_linear(*tensors, **(self.kwargs | options))

    def truth(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.operation(*tensors, impl="reference"),)

    def program(self) -> Program:
        """One product with the stacked weight, split, as in diffusers and Phi-3."""
        return Program(unit(ACTIVATE[self.case.activation], self.case.gate_first, self.case.bias))

    def jax(self) -> Callable[..., Any]:
        return jax_unit(self.case.activation, self.case.gate_first)

    def products(self, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
        """x Wᵀ in forward; dz W and dzᵀ x with a random dz (M, 2F) in backward."""
        x, weight = tensors[:2]
        forward = [(x, weight.mT)]
        if self.task.pass_ == "fwd":
            return forward
        dz = torch.randn(x.shape[0], weight.shape[0], device=x.device, dtype=x.dtype)
        backward = [(dz, weight), (dz.mT, x)]
        return backward if self.task.pass_ == "bwd" else forward + backward

    def memory(self, form: str) -> dict[str, Any]:
        """The case's memory model for a provider of this `form`, to compare with measured bytes; and the ratio of the
        activations saved by fusion to the parameters, N / (2 (d + 1)) for a hidden width of 4 d."""
        found: dict[str, Any] = {"saved_ratio": self.case.saved_ratio}
        if form and self.task.pass_ != "bwd":
            known: Any = form
            found["predicted_peak_bytes"] = self.case.predicted_bytes(self.task.pass_, self.task.dtype, known)
        if form and self.task.pass_ != "fwd":
            found["predicted_held_bytes"] = HELD[form] * self.case.output_bytes(self.task.dtype)
        return found

    def halves(self, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Views: the value's and the gate's weight (F, D), then their biases (F,) or None."""
        first, second = weight.chunk(2)
        biases = (None, None) if bias is None else bias.chunk(2)
        if self.case.gate_first:
            return second, first, biases[1], biases[0]
        return first, second, biases[0], biases[1]

    def swapped(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors with the halves of weight and bias swapped."""
        x, *rest = tensors
        return (x, *(torch.cat(t.chunk(2)[::-1]) for t in rest))

    def interleaved(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors with gate and value rows interleaved, gate first."""
        x, *rest = tensors
        gate_first = rest if self.case.gate_first else [torch.cat(t.chunk(2)[::-1]) for t in rest]
        return (x, *(torch.stack(t.chunk(2), dim=1).flatten(0, 1) for t in gate_first))


# The eager forms. They must also script: TorchScript accepts functions from a closure but no numbers.


def gelu_tanh(g: Tensor) -> Tensor:
    return functional.gelu(g, approximate="tanh")


def gelu(g: Tensor) -> Tensor:
    return functional.gelu(g)


def silu(g: Tensor) -> Tensor:
    return functional.silu(g)


def relu(g: Tensor) -> Tensor:
    return functional.relu(g)


def sigmoid(g: Tensor) -> Tensor:
    return torch.sigmoid(g)


def identity(g: Tensor) -> Tensor:
    return g


ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (gelu_tanh, gelu, silu, relu, sigmoid, identity)
}


def unit(activate: Callable[[Tensor], Tensor], gate_first: bool, bias: bool) -> Callable[..., Tensor]:
    """The unit as a function of x, weight and, if any, bias."""

    def value_first_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        value, gate = functional.linear(x, weight, bias).chunk(2, dim=-1)
        return value * activate(gate)

    def value_first(x: Tensor, weight: Tensor) -> Tensor:
        value, gate = functional.linear(x, weight).chunk(2, dim=-1)
        return value * activate(gate)

    def gate_first_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        gate, value = functional.linear(x, weight, bias).chunk(2, dim=-1)
        return activate(gate) * value

    def gate_first_(x: Tensor, weight: Tensor) -> Tensor:
        gate, value = functional.linear(x, weight).chunk(2, dim=-1)
        return activate(gate) * value

    if gate_first:
        return gate_first_bias if bias else gate_first_
    return value_first_bias if bias else value_first


def jax_unit(activation: str, gate_first: bool) -> Callable[..., Any]:
    """The unit in jax.numpy; only called in a process that has JAX."""
    import jax
    import jax.numpy as jnp

    activate: dict[str, Callable[[Any], Any]] = {
        "gelu_tanh": lambda g: jax.nn.gelu(g, approximate=True),
        "gelu": lambda g: jax.nn.gelu(g, approximate=False),
        "silu": jax.nn.silu,
        "relu": jax.nn.relu,
        "sigmoid": jax.nn.sigmoid,
        "identity": lambda g: g,
    }

    def geglu(x: Any, weight: Any, bias: Any = None) -> Any:
        z = x @ weight.T
        first, second = jnp.split(z if bias is None else z + bias, 2, axis=-1)
        value, gate = (second, first) if gate_first else (first, second)
        return value * activate[activation](gate)

    return geglu
