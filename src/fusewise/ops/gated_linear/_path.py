"""`explain_dispatch` for the gated linear unit beyond device and dtype: the code path that the tensors of a call take
in an implementation, or why an implementation leaves them to the next.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import _op, reference
from ._autograd import needs_autograd
from ._problem import Halves, Spec, rows


def cast(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a public function as the call sees them under autocast."""
    return dict(zip(arguments, reference.as_autocast(*arguments.values()), strict=True))  # x is the first


def path(impl: str, arguments: dict[str, Any]) -> str:
    """The code path in words, from the arguments of a public function by name; empty if there is only one."""
    explain = getattr(_op.implementation(impl), "path", None)
    words: str = "" if explain is None else explain(*_matrices(arguments))
    return words


def refusal(impl: str, arguments: dict[str, Any], by_choice: bool) -> str | None:
    """Why an implementation that serves the device and dtype leaves these tensors to the next, or None if it does not."""
    refuses = getattr(_op.implementation(impl), "refuses", None)
    if refuses is None:
        return None
    x, halves = _matrices(arguments)
    tensors = [t for t in arguments.values() if isinstance(t, Tensor)]
    kernel = "y" if arguments["save"] == "input" or not needs_autograd(*tensors) else "preact"
    matrices = (x, halves.value, halves.gate)
    activation = arguments.get("activation") or {"tanh": "gelu_tanh", "none": "gelu"}[arguments["approximate"]]
    reason: str | None = refuses(halves.value.shape[0], matrices, activation, kernel, by_choice=by_choice)
    return reason


def _matrices(arguments: dict[str, Any]) -> tuple[Tensor, Halves]:
    if "w_down" in arguments:  # `gated_mlp`, which takes the gate first
        both = arguments["w_up"] is None
        weight, gate = (arguments["w_gate"], None) if both else (arguments["w_up"], arguments["w_gate"])
    else:
        weight, gate = arguments["weight"], arguments.get("w_gate")
    spec = Spec("identity", arguments.get("layout", "stacked"), arguments["gate_first"])  # of a single weight
    halves = Halves.of(spec, weight, gate)
    return rows(arguments["x"]), halves
