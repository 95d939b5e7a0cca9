"""Calls for the tests of the C++ fast path: operands, the same call by C++, by Python and in training, and their comparison."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewise import gated_linear
from fusewise._shared import build, host
from fusewise.ops.gated_linear import _host, _op

from ..rope.support import assert_bits

SIGNATURE = inspect.signature(gated_linear)
X, W, B = torch.randn(3, 8), torch.randn(12, 8), torch.randn(12)


class Named(Tensor):
    pass


def load() -> None:
    """Load the extension, built if needed, and tell it again whether oneDNN is there: a test may have told it otherwise."""
    if (reason := _op.unavailable("cpu", "cpu", torch.float32)) is not None:
        pytest.skip(reason)
    try:
        _host.load(_op.implementation("cpu")._kernel())
    except build.BuildError as error:
        pytest.skip(str(error))


def quick(*args: Any, **kwargs: Any) -> Tensor | None:
    """Call the fast path of `gated_linear` directly; None if it falls back to Python."""
    call = SIGNATURE.bind(*args, **{"activation": "silu", **kwargs})
    call.apply_defaults()
    return _host.gated_linear(*call.arguments.values())


def by_python(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with host.through_python():
        return function(*args, **kwargs)


def operands(
    rows: tuple[int, ...], features: int, hidden: int, dtype: torch.dtype, form: str, device: str = "cpu"
) -> dict[str, Any]:
    """x, weights and biases by name; `form` contains any of the words separate, bias and strided."""
    x, weight, gate = torch.randn(*rows, features), torch.randn(hidden, features), torch.randn(hidden, features)
    bias, b_gate = (torch.randn(hidden), torch.randn(hidden)) if "bias" in form else (None, None)
    if "separate" in form:
        found = {"x": x, "weight": weight, "w_gate": gate, "bias": bias, "b_gate": b_gate}
    else:
        found = {
            "x": x,
            "weight": torch.cat((weight, gate)),
            "bias": None if bias is None else torch.cat((bias, b_gate)),
        }
    made = {name: None if t is None else t.to(device, dtype) for name, t in found.items()}
    if "strided" in form:  # row stride larger than the row
        made["x"] = torch.cat((made["x"], made["x"]), -1)[..., 1 : 1 + features]
        made["weight"] = torch.cat((made["weight"], made["weight"]), -1)[:, 3 : 3 + features]
    return made


def trained(made: dict[str, Any], dy: Tensor, function: Any = gated_linear, **options: Any) -> list[Tensor | None]:
    """y and the gradients of the tensors in `made` that require them."""
    given = {name: None if t is None else t.detach().requires_grad_(t.requires_grad) for name, t in made.items()}
    y = function(**given, **options)
    y.backward(dy)
    return [y.detach(), *(None if t is None else t.grad for t in given.values())]


def of_mlp(unit: dict[str, Any], out: int) -> dict[str, Any]:
    """The tensors of `gated_mlp` with a unit's `operands` and a down projection to `out` features."""
    weight, hidden = unit["weight"], (unit["weight"].shape[0] // (1 if "w_gate" in unit else 2))
    return {
        "x": unit["x"],
        "w_gate": weight,
        "b_gate": unit["bias"],
        "w_up": unit.get("w_gate"),
        "b_up": unit.get("b_gate"),
        "w_down": torch.randn(out, hidden).to(weight),
        "b_down": None if unit["bias"] is None else torch.randn(out).to(weight),
    }


def requiring(made: dict[str, Any]) -> dict[str, Any]:
    """The same tensors, all of which require gradients."""
    return {name: None if t is None else t.requires_grad_() for name, t in made.items()}


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    """Check that results of `trained` have the same bits and strides."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert_bits(ours, theirs)
            assert ours.stride() == theirs.stride()


def forbid_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid calls of the operators that save pre-activations or take their gradient."""
    for name in ("op_gated_linear_preact", "op_grad", "op_grad_", "op_down_grad", "op_down_grad_"):
        monkeypatch.setattr(_op, name, lambda *_: pytest.fail("by an operator"))
