"""Predicted and measured memory per provider, for targets with a memory model."""

from __future__ import annotations

from ..record import Measurement, Record
from . import number, size

COLUMNS = (
    "case",
    "dtype",
    "pass",
    "provider",
    "saved / parameters",
    "peak predicted",
    "measured",
    "held predicted",
    "measured",
)


def lines(record: Record) -> list[list[str]]:
    """One line of cells per provider with a prediction; empty if no target predicts anything."""
    return [_line(m) for m in record.measurements if "#" not in m.provider and _predicted(m)]


def _predicted(measurement: Measurement) -> bool:
    found = measurement.prepared
    return any(name in found for name in ("predicted_peak_bytes", "predicted_held_bytes"))


def _line(measurement: Measurement) -> list[str]:
    found = measurement.prepared
    pairs = []
    for name in ("peak", "held"):
        predicted, measured = found.get(f"predicted_{name}_bytes"), found.get(f"{name}_bytes")
        share = f" ({number(measured / predicted)} ×)" if predicted and measured is not None else ""
        pairs += [size(predicted), f"{size(measured)}{share}"]
    words = [measurement.case, measurement.dtype, measurement.pass_, measurement.provider]
    return [*words, number(found.get("saved_ratio")), *pairs]
