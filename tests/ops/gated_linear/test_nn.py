"""The modules: parameters as in nn.Linear, and the same results as the functions."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fusewise.nn import GatedLinear, GatedMLP


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gate_first", [True, False])
def test_gated_linear_is_a_linear_and_its_gate(bias: bool, gate_first: bool) -> None:
    linear = nn.Linear(16, 24, bias)
    module = GatedLinear(16, 12, bias, activation="gelu", gate_first=gate_first)
    module.load_state_dict(linear.state_dict())
    x = torch.randn(2, 5, 16)
    first, second = linear(x).chunk(2, -1)
    value, gate = (second, first) if gate_first else (first, second)
    torch.testing.assert_close(module(x), value * functional.gelu(gate))
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in linear.named_parameters()]


def test_gated_mlp_loads_what_transformers_saves_and_trains() -> None:
    module = GatedMLP(16, 24, activation="silu", save="input")
    assert sorted(module.state_dict()) == ["down_proj.weight", "gate_proj.weight", "up_proj.weight"]
    x, target = torch.randn(40, 16), torch.randn(40, 16)
    usual = copy.deepcopy(module)

    def eager(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = usual.down_proj(functional.silu(usual.gate_proj(x)) * usual.up_proj(x))
        return out

    losses: list[list[float]] = []
    for call, parameters in ((module, module.parameters()), (eager, usual.parameters())):
        optimizer = torch.optim.SGD(parameters, lr=2.0)
        losses.append([])
        for _ in range(20):
            optimizer.zero_grad()
            loss = (call(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][-1] < 0.95 * losses[0][0]


class Adapted(nn.Linear):
    """Like LoRA: computes more than its weight suggests."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x) + self.up(self.down(x))
        return y


def test_a_bias_of_one_projection_alone() -> None:
    module = GatedMLP(16, 12, activation="silu")
    module.up_proj = nn.Linear(16, 12)
    x = torch.randn(3, 16)
    torch.testing.assert_close(module(x), module.down_proj(functional.silu(module.gate_proj(x)) * module.up_proj(x)))


class InFloat32(nn.Linear):
    """A projection that autocast does not reach."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_projections_of_two_dtypes_are_promoted(name: str) -> None:
    module = GatedMLP(16, 12, activation="silu")
    setattr(module, name, InFloat32(16, 12))
    x = torch.randn(3, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = module.down_proj(functional.silu(module.gate_proj(x)) * module.up_proj(x))
        found = module(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    found.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_a_projection_that_is_more_than_its_weight_is_called_and_trains(name: str) -> None:
    module = GatedMLP(16, 12, activation="silu")
    x = torch.randn(3, 16)
    for change in (Adapted, nn.utils.parametrizations.weight_norm):
        changed = copy.deepcopy(module)
        setattr(changed, name, change(getattr(changed, name)))
        y = changed(x)
        usual = changed.down_proj(functional.silu(changed.gate_proj(x)) * changed.up_proj(x))
        torch.testing.assert_close(y, usual)
        y.sum().backward()
        assert all(p.grad is not None for p in changed.parameters())


def test_a_replaced_forward_of_the_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, usual = GatedMLP(16, 12, activation="silu"), torch.randn(3, 16), nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * usual(self, x))
    torch.testing.assert_close(module(x), module.down_proj(functional.silu(module.gate_proj(x)) * module.up_proj(x)))


def test_projections_that_draw_random_numbers_are_called_in_the_usual_order() -> None:
    """Adapters with dropout: the same seed gives the results of the usual code."""
    module = GatedMLP(16, 12, activation="silu")
    for name in ("gate_proj", "up_proj", "down_proj"):
        projection = getattr(module, name)
        setattr(module, name, nn.Sequential(nn.Dropout(0.5), projection))
    x = torch.randn(3, 16)
    torch.manual_seed(0)
    y = module(x)
    torch.manual_seed(0)
    torch.testing.assert_close(y, module.down_proj(functional.silu(module.gate_proj(x)) * module.up_proj(x)))


class Quantised(torch.Tensor):
    """Like a torchao weight in a plain `nn.Linear`: a tensor subclass that implements `F.linear` itself."""

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype)
        made.integers, made.scale = integers, scale
        return made

    integers: torch.Tensor
    scale: torch.Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear:
            x, weight, *bias = args
            return functional.linear(x, weight.integers * weight.scale, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is torch.ops.aten.detach.default
        return cls(args[0].integers, args[0].scale)


@pytest.mark.parametrize("names", [["gate_proj"], ["down_proj"], ["gate_proj", "up_proj", "down_proj"]], ids=str)
def test_a_quantised_weight_in_a_plain_linear_is_left_to_itself(names: list[str]) -> None:
    module = GatedMLP(16, 12, activation="silu")
    plain = copy.deepcopy(module)
    for name in names:
        weight = getattr(module, name).weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        integers = (weight / scale).round().to(torch.int8)
        getattr(module, name).weight = nn.Parameter(Quantised(integers, scale), requires_grad=False)
        getattr(plain, name).weight = nn.Parameter(integers * scale)
    x = torch.randn(3, 16)
    torch.testing.assert_close(module(x), plain(x))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("name", ["gate_proj", "down_proj"])
def test_a_sparse_weight_in_a_plain_linear_is_left_to_itself(name: str) -> None:
    module = GatedMLP(16, 12, activation="silu").requires_grad_(False)
    x = torch.randn(3, 16)
    expected = module(x)
    linear = getattr(module, name)
    linear.weight = nn.Parameter(linear.weight.to_sparse_csr(), requires_grad=False)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_a_sparse_weight_of_a_gated_linear_is_named() -> None:
    module = GatedLinear(16, 12, activation="silu")
    module.weight = nn.Parameter(module.weight.detach().to_sparse_csr(), requires_grad=False)
    with pytest.raises(
        TypeError, match=r"^gated_linear: weight must be a strided tensor, got torch\.sparse_csr; call weight\.to_dense"
    ):
        module(torch.randn(3, 16))


@pytest.mark.parametrize(
    ("error", "message", "x"),
    [
        (ValueError, r"of {}, \(..., D\) = \(\d+, 8\), got \(3, 5\); pass ", torch.randn(3, 5)),
        (
            TypeError,
            r"the dtype of {}, float32, got bfloat16; call x.to\(torch.float32\)",
            torch.randn(3, 8).bfloat16(),
        ),
        (ValueError, "be on the device of {}, cpu, got meta; call x.to", torch.randn(3, 8, device="meta")),
    ],
)
@pytest.mark.parametrize(("kind", "weight"), [(GatedLinear, "weight"), (GatedMLP, "w_up")])
def test_an_input_that_does_not_fit_a_module_is_named(kind: Any, weight: str, error: Any, message: str, x: Any) -> None:
    """Not the weight, which the caller of a module did not pass."""
    module = kind(8, 6, activation="silu")
    with pytest.raises(error, match=r"^gated_\w+: x must .*" + message.format(weight)):
        module(x)


def test_biases_dtypes_and_devices() -> None:
    module = GatedMLP(8, 12, bias=True, activation="gelu_tanh", dtype=torch.bfloat16)
    assert module(torch.randn(3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert all(p.device.type == "meta" for p in GatedLinear(8, 12, activation="relu", device="meta").parameters())
    assert "activation=silu" in repr(GatedMLP(8, 8, activation="silu"))


def test_an_unknown_option_is_refused_at_construction() -> None:
    for build in (lambda: GatedLinear(8, 8, activation="swish"), lambda: GatedMLP(8, 8, activation="swish")):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"activation must be one of gelu_tanh, .*, got 'swish'"):
            build()
    for build in (
        lambda: GatedLinear(4, 4, activation="silu", save="all"),  # type: ignore[arg-type]
        lambda: GatedMLP(4, 4, activation="silu", save="all"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=r"save must be one of preact, input, got 'all'"):
            build()


@pytest.mark.parametrize(
    ("build", "names"), [(GatedLinear, ("in_features", "out_features")), (GatedMLP, ("features", "hidden"))]
)
def test_sizes_are_checked_at_construction(build: Any, names: tuple[str, str]) -> None:
    for name in names:
        for value, words in ((0, "be at least 1, got 0"), (8.0, "be an int, got 8.0"), (None, "be an int, got None")):
            with pytest.raises((TypeError, ValueError), match=f"^{build.__name__}: {name} must {words}; "):
                build(**{**dict.fromkeys(names, 8), name: value}, activation="silu")


def test_sizes_may_be_integers_of_numpy() -> None:
    linear, mlp = (kind(np.int64(8), np.int64(4), activation="silu") for kind in (GatedLinear, GatedMLP))
    assert linear(torch.randn(3, 8)).shape == (3, 4) and mlp(torch.randn(3, 8)).shape == (3, 8)
    assert repr((linear, mlp)).count("np.") == 0


def test_a_transposed_weight_is_that_of_a_linear() -> None:
    """An orthogonal parametrization gives a transposed weight if it has more columns than rows."""
    module = torch.nn.utils.parametrizations.orthogonal(GatedLinear(32, 8, activation="silu"))
    assert module.weight.stride(-1) != 1
    x = torch.randn(3, 32)
    value, gate = functional.linear(x, module.weight, module.bias).chunk(2, -1)
    found, usual = (
        torch.autograd.grad(y.square().sum(), list(module.parameters()))
        for y in (module(x), value * functional.silu(gate))
    )
    for a, b in zip(found, usual, strict=True):
        torch.testing.assert_close(a, b)
    module = GatedLinear(32, 8, bias=False, activation="silu")
    module.load_state_dict({"weight": torch.randn(32, 16).T}, assign=True)
    assert module(x).shape == (3, 8)


def test_a_bias_without_contiguous_memory_is_that_of_a_linear() -> None:
    module, mlp = GatedLinear(16, 8, activation="silu"), GatedMLP(16, 8, bias=True, activation="silu")
    module.bias = nn.Parameter(torch.randn(16, 2)[:, 0])
    mlp.gate_proj.bias, mlp.down_proj.bias = (
        nn.Parameter(torch.randn(8, 2)[:, 0]),
        nn.Parameter(torch.ones(1).expand(16)),
    )
    x = torch.randn(3, 16)
    value, gate = functional.linear(x, module.weight, module.bias).chunk(2, -1)
    torch.testing.assert_close(module(x), value * functional.silu(gate))
    y = functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    torch.testing.assert_close(mlp(x), mlp.down_proj(y))
    plain = nn.Linear(8, 8)
    y = functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    mlp.down_proj = nn.Sequential(plain)  # not a plain projection: only the unit is fused
    torch.testing.assert_close(mlp(x), plain(y))


def test_parameters_made_without_memory_are_drawn_as_those_of_a_linear() -> None:
    module = GatedLinear(16, 8, activation="silu", device="meta").to_empty(device="cpu")
    linear = nn.Linear(16, 16)
    for made in (module, linear):
        torch.manual_seed(5)
        made.reset_parameters()
    assert torch.equal(module.weight, linear.weight) and torch.equal(module.bias, linear.bias)
