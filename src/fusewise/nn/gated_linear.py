"""GatedLinear and GatedMLP: modules that hold the weights of `fusewise.gated_linear` and `fusewise.gated_mlp`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops._common import check_bool, check_count, check_one_of, unit_stride
from ..ops.gated_linear import gated_linear
from ..ops.gated_linear._op import IMPLEMENTATIONS
from ..ops.gated_linear._problem import ACTIVATIONS, SAVES, Activation, Save
from ..ops.gated_linear._validate import GATE_FIRST
from ..ops.gated_linear.projections import mlp


class GatedLinear(nn.Module):
    """Gated linear layer: y = (x W_valueᵀ + b_value) · act(x W_gateᵀ + b_gate).

    Args:
        in_features, out_features: D and F; x is (..., D), y (..., F).
        bias: whether both halves have a bias.
        activation: of the gate, as in `gated_linear`; GEGLU is "gelu_tanh" or "gelu" (erf), SwiGLU "silu".
        gate_first: rows [0, F) of `weight` are the gate's; otherwise they are the value's, and [F, 2F) the gate's.
        save, impl: as in `gated_linear`.
        device, dtype: of the parameters.

    The parameters are those of `nn.Linear(in_features, 2 * out_features)`, `weight` (2F, D) and `bias` (2F,), with the
    same initialization, so that its state_dict can be loaded.

    Raises:
        TypeError, ValueError: at construction `GatedLinear: …` for its options; at a call as `fusewise.gated_linear`.

    Example:
        >>> y = GatedLinear(64, 128, activation="gelu_tanh")(torch.randn(4, 16, 64))  # (4, 16, 128)
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: Activation,
        gate_first: bool = False,
        save: Save = "preact",
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check("GatedLinear", activation, save, impl)
        check_bool("GatedLinear", "gate_first", gate_first, GATE_FIRST)
        check_bool("GatedLinear", "bias", bias, "pass True for a bias of value and gate")
        self.in_features = check_count("GatedLinear", "in_features", in_features)
        self.out_features = check_count("GatedLinear", "out_features", out_features)
        self.activation, self.gate_first, self.save, self.impl = activation, gate_first, save, impl
        linear = nn.Linear(self.in_features, 2 * self.out_features, bias, device, dtype)
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    def reset_parameters(self) -> None:
        """Reinitialize the parameters as `nn.Linear` does: uniform within ± 1 / √in_features."""
        nn.Linear.reset_parameters(self)  # type: ignore[arg-type]  # it only needs weight and bias

    def forward(self, x: Tensor) -> Tensor:
        # A parametrization or load_state_dict(assign=True) may change their strides.
        return gated_linear(
            x, unit_stride(self.weight), None if self.bias is None else unit_stride(self.bias), activation=self.activation,
            gate_first=self.gate_first, save=self.save, impl=self.impl,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"activation={self.activation}, gate_first={self.gate_first}"
        )


class GatedMLP(nn.Module):
    """Gated MLP of a transformer block: z = y W_downᵀ, y = (x W_upᵀ) · act(x W_gateᵀ), with optional biases.

    Args:
        features: D, of x and z.
        hidden: F, of y.
        bias: whether all three projections have a bias.
        activation: of the gate, as in `gated_linear`.
        save, impl: as in `gated_mlp`.
        device, dtype: of the parameters.

    The parameters are those of three `nn.Linear` with the names that transformers uses, gate_proj and up_proj (F, D)
    and down_proj (D, F), so that the state_dict of a Llama, Gemma or Mistral MLP can be loaded. A projection that is
    replaced by another kind of module (LoRA, quantized) or gets hooks is called as a module, and only the gate is fused.

    Raises:
        TypeError, ValueError: at construction `GatedMLP: …` for its options; at a call as `fusewise.gated_mlp`.

    Example:
        >>> z = GatedMLP(64, 128, activation="silu")(torch.randn(4, 16, 64))  # (4, 16, 64)
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        bias: bool = False,
        *,
        activation: Activation,
        save: Save = "preact",
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check("GatedMLP", activation, save, impl)
        check_bool("GatedMLP", "bias", bias, "pass True for a bias of all three maps")
        features, hidden = check_count("GatedMLP", "features", features), check_count("GatedMLP", "hidden", hidden)
        self.activation, self.save, self.impl = activation, save, impl
        self.gate_proj = nn.Linear(features, hidden, bias, device, dtype)
        self.up_proj = nn.Linear(features, hidden, bias, device, dtype)
        self.down_proj = nn.Linear(hidden, features, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return mlp(
            x, self.gate_proj, self.up_proj, self.down_proj, activation=self.activation, save=self.save, impl=self.impl
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation}, save={self.save}"


def _check(module: str, activation: Activation, save: Save, impl: str) -> None:
    """Check the options that both modules have."""
    check_one_of(module, "activation", activation, ACTIVATIONS)
    check_one_of(module, "save", save, SAVES)
    check_one_of(module, "impl", impl, ("auto", *IMPLEMENTATIONS))
