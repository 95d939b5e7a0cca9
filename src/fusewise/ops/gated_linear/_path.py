"""Which way through an implementation a call takes: what `explain_dispatch` says beyond device and dtype."""

from __future__ import annotations

from typing import Any

from . import _op
from ._autograd import rows
from ._problem import Halves, Spec


def path(impl: str, arguments: dict[str, Any]) -> str:
    """In words, from the arguments of a public function by name; empty where there is but one way."""
    explain = getattr(_op.implementation(impl), "path", None)
    if explain is None:
        return ""
    if "w_down" in arguments:  # of `gated_mlp`, which knows the gate first
        both = arguments["w_up"] is None
        weight, gate = (arguments["w_gate"], None) if both else (arguments["w_up"], arguments["w_gate"])
    else:
        weight, gate = arguments["weight"], arguments.get("w_gate")
    layout = "separate" if gate is not None else arguments.get("layout", "stacked")
    halves = Halves.of(Spec("identity", layout, arguments["gate_first"]), weight, gate)
    words: str = explain(rows(arguments["x"]), halves)
    return words
