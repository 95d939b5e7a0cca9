"""Every invalid argument raises an error in the common form before anything is computed."""

from __future__ import annotations

import enum
import re
from typing import Any

import numpy
import pytest
import torch

from fusewise.ops.gated_linear import gated_linear, geglu_linear

X, W, B = torch.randn(3, 8), torch.randn(12, 8), torch.randn(12)
HALF, HALF_BIAS = torch.randn(6, 8), torch.randn(6)

FORM = re.compile(r"^(geglu_linear|gated_linear): [\w ]+ must .+, got .+; .+", re.S)


def expect(error: type[Exception], match: str, of: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=match) as caught:
        of(*args, **kwargs)
    assert FORM.match(str(caught.value)), str(caught.value)


STACKED: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
    (ValueError, r"weight must have the last dimension of x, D = 8, got \(12, 7\)", (X, torch.randn(12, 7), B), {}),
    (ValueError, r"weight must have an even number of rows, 2F, got \(11, 8\)", (X, torch.randn(11, 8)), {}),
    (ValueError, r"bias must be contiguous, of shape \(12,\), got shape \(11,\) and .*; pass an entry for every row of the weight$", (X, W, torch.randn(11)), {}),
    (ValueError, r"bias must be contiguous, of shape \(12,\), got .*strides \(2,\); call bias.contiguous\(\)$", (X, W, torch.randn(24)[::2]), {}),
    (TypeError, "weight must have the dtype of x, float32, got bfloat16", (X, W.bfloat16(), B), {}),
    (TypeError, "bias must have the dtype of x, float32, got float16", (X, W, B.half()), {}),
    (ValueError, "weight must be on the device of x, cpu, got meta", (X, W.to("meta"), B), {}),
    (ValueError, "bias must be on the device of x, cpu, got meta", (X, W, B.to("meta")), {}),
    (TypeError, "x must have dtype float32, .* got int64", (X.long(), W.long()), {}),
    (TypeError, "x must have dtype float32, .* got complex64", (X.to(torch.complex64), W.to(torch.complex64)), {}),
    (TypeError, "x must be a torch.Tensor, got list", ([1.0], W), {}),
    (TypeError, "weight must be a torch.Tensor, got NoneType", (X, None), {}),
    (TypeError, "x must be a strided tensor, got torch.sparse_coo", (X.to_sparse(), W), {}),
    (ValueError, r"x must have at least one feature, \(..., D\), got \(3, 0\)", (X[:, :0], W[:, :0]), {}),
    (ValueError, r"x must have at least one feature, \(..., D\), got \(\)", (X[0, 0], W), {}),
    (ValueError, r"weight must have at least one row, got \(0, 8\)", (X, W[:0]), {}),
    (ValueError, r"weight must have 2 or 3 dimensions, got \(8,\)", (X, W[0]), {}),
    (ValueError, r"weight must have a contiguous last dimension \(stride 1\), got strides \(1, 12\)", (X, torch.randn(8, 12).T), {}),
    (ValueError, "save must be one of preact, input, got 'all'", (X, W, B), {"save": "all"}),
    (ValueError, "impl must be one of auto, .* got 'cublas'", (X, W, B), {"impl": "cublas"}),
    (ValueError, r"impl must be one of auto, .* got array\(", (X, W, B), {"impl": numpy.array(["auto", "cpu"])}),
    (TypeError, "gate_first must be a bool, got 1", (X, W, B), {"gate_first": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "match", "args", "kwargs"), STACKED, ids=[row[1][:40] for row in STACKED])
def test_mistakes_in_a_stacked_call(
    error: type[Exception], match: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    expect(error, match, geglu_linear, *args, **kwargs)
    expect(error, match, gated_linear, *args, activation="silu", **kwargs)


LAYOUTS: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
    (ValueError, r"weight must have shape \(2F, D\) or \(2, F, D\) in layout stacked, got \(6, 2, 8\)", (X, W.view(6, 2, 8)), {}),
    (ValueError, r"weight must have shape \(2F, D\) or \(F, 2, D\) in layout interleaved, got \(2, 6, 8\)", (X, W.view(2, 6, 8)), {"layout": "interleaved"}),
    (ValueError, "layout must be one of stacked, interleaved, got 'blocked'", (X, W), {"layout": "blocked"}),
    (ValueError, "weight must have rows at one distance", (X, torch.randn(2, 9, 8)[:, :6]), {}),
    (ValueError, r"w_gate must have the shape of weight, \(6, 8\), got \(5, 8\)", (X, HALF), {"w_gate": HALF[:5]}),
    (ValueError, r"weight must have 2 dimensions, got \(2, 6, 8\)", (X, W.view(2, 6, 8)), {"w_gate": HALF}),
    (ValueError, "b_gate must be given where the other bias is, got None", (X, HALF, HALF_BIAS), {"w_gate": HALF}),
    (ValueError, "bias must be given where the other bias is, got None", (X, HALF), {"w_gate": HALF, "b_gate": HALF_BIAS}),
    (TypeError, "b_gate must have the dtype of x, float32, got float64", (X, HALF, HALF_BIAS), {"w_gate": HALF, "b_gate": HALF_BIAS.double()}),
    (ValueError, "bias must be on the device of x, cpu, got meta", (X, HALF, HALF_BIAS.to("meta")), {"w_gate": HALF, "b_gate": HALF_BIAS}),
    (ValueError, "b_gate must be None where weight holds both halves", (X, W, B), {"b_gate": HALF_BIAS}),
    (ValueError, r"bias must be contiguous, of shape \(6,\)", (X, HALF, B), {"w_gate": HALF, "b_gate": HALF_BIAS}),
    (ValueError, r"w_gate must have a contiguous last dimension", (X, HALF), {"w_gate": torch.randn(8, 6).T}),
    (ValueError, "activation must be one of gelu_tanh, .* got 'tanh'", (X, W), {"activation": "tanh"}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "match", "args", "kwargs"), LAYOUTS, ids=[row[1][:40] for row in LAYOUTS])
def test_mistakes_in_the_layout(
    error: type[Exception], match: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    expect(error, match, gated_linear, *args, **{"activation": "silu", **kwargs})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_named(layout: torch.layout) -> None:
    x, weight = (torch.nested.nested_tensor([t, t], layout=layout) for t in (X, W))
    expect(TypeError, "x must be a strided tensor, got nested; pass x.values()", geglu_linear, x, W)
    expect(TypeError, "weight must be a strided tensor, got nested; pass weight.values()", geglu_linear, X, weight)


def test_an_unknown_gelu_is_named() -> None:
    expect(ValueError, "approximate must be tanh or none, got 'erf'", geglu_linear, X, W, approximate="erf")


def test_an_implementation_that_cannot_serve_says_why() -> None:
    expect(ValueError, "impl must be able to serve the tensors, got 'cpu': cpu computes in float32", geglu_linear, X.double(), W.double(), impl="cpu")  # fmt: skip
    assert geglu_linear(X.double(), W.double()).dtype == torch.float64


def test_a_mistake_is_found_again_after_a_right_call() -> None:
    """Validation is cached by everything it depends on, so a call that differs in one respect is checked again."""
    for _ in range(2):
        geglu_linear(X, W, B, gate_first=True)
        expect(TypeError, "gate_first must be a bool, got 1", geglu_linear, X, W, B, gate_first=1)
        expect(ValueError, "bias must be contiguous", geglu_linear, X, W, B[:-1])
        expect(TypeError, "bias must have the dtype", geglu_linear, X, W, B.double())
        # Such a tensor has strides.
        expect(TypeError, "bias must be a strided tensor", geglu_linear, X, W, B.to_mkldnn(), gate_first=True)


def test_names_may_be_of_a_str_enumeration() -> None:
    """And plain strings, which compare equal, work before and after."""

    class Name(str, enum.Enum):
        SILU, INTERLEAVED, INPUT, REFERENCE = "silu", "interleaved", "input", "reference"

    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(14, 8)

    def call(activation: Any, layout: Any, save: Any, impl: Any) -> torch.Tensor:
        return gated_linear(x, weight, activation=activation, layout=layout, save=save, impl=impl)

    value, gate = (x @ weight.T).view(5, 7, 2).unbind(-1)
    for names in (tuple(Name), tuple(name.value for name in Name), tuple(Name)):
        torch.testing.assert_close(call(*names), value * torch.nn.functional.silu(gate))
