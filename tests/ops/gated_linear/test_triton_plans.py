"""Bound launches of the elementwise Triton kernels: a repeated call passes addresses alone, any other is bound anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from fusewise.ops.gated_linear import _triton_gate
from fusewise.ops.gated_linear._gate_config import GateConfig

CONFIG = GateConfig(64, 8, 128)
BASE: dict[str, Any] = {name: torch.zeros(64, 128) for name in ("u", "g", "dy", "du", "dg", "y")}
BASE |= {"activation": "silu", "config": CONFIG, "sums": None}
CALLS: dict[str, Callable[..., None]] = {
    "gate": lambda u, g, y, activation, **_: _triton_gate.gate(u, g, y, activation),
    "gradient": lambda u, g, dy, du, dg, activation, config, sums, **_: _triton_gate.start_gradient(
        dy, (u, g), (du, dg), config, activation, sums
    ),
    "copy": lambda u, y, **_: _triton_gate.copy_into(u, y),
}
TENSORS = {"gate": ("u", "g", "y"), "gradient": ("u", "g", "dy", "du", "dg"), "copy": ("u", "y")}
Started = list[tuple[Any, ...]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What is launched: the values of a bound launch, or the tensors of one through the dispatcher; neither runs."""
    found: Started = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            return lambda *values, stream: found.append((grid[0], *values))

    def launch(kernel: Any, grid: int, arguments: dict[str, Any], device: int, num_warps: int) -> Any:
        found.append(tuple(x for x in arguments.values() if isinstance(x, Tensor)))
        return Compiled() if grid else None

    monkeypatch.setattr(_triton_gate, "launch", launch)
    monkeypatch.setattr(_triton_gate, "launches_directly", lambda: True)
    monkeypatch.setattr(_triton_gate, "_PLANS", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    return found


def shifted(x: Tensor) -> Tensor:
    """x at an address that is no multiple of 16 bytes."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape)


def apart(x: Tensor) -> Tensor:
    """x with more elements between its rows."""
    return x.new_empty(x.shape[0], x.shape[1] + 8)[:, : x.shape[1]]


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_passes_its_own_addresses(name: str, started: Started) -> None:
    CALLS[name](**BASE)
    other = {key: torch.ones_like(x) if isinstance(x, Tensor) else x for key, x in BASE.items()}
    CALLS[name](**other)
    (tensors, (grid, *values)) = started
    wanted = [other[key].data_ptr() for key in TENSORS[name]]
    if name == "gradient":
        wanted.append(other["dy"].data_ptr())  # where no sums are wanted
    assert len(tensors) == len(wanted) and values[: len(wanted)] == wanted
    assert grid > 0 and not any(isinstance(x, Tensor) for x in values)


DIFFERENT: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "activation": ({"activation": "relu"}, ("gate", "gradient")),
    "configuration": ({"config": GateConfig(128, 8, 128)}, ("gradient",)),
    "warps": ({"config": GateConfig(64, 8, 128, 8)}, ("gradient",)),
    "sums": ({"sums": torch.zeros(64, 128)}, ("gradient",)),  # of the shape of dy, which else stands in for it
    "rows": ({key: torch.zeros(63, 128) for key in ("u", "g", "dy", "du", "dg", "y")}, tuple(CALLS)),
    **{f"{what} {key}": ({key: make(BASE[key])}, tuple(op for op in CALLS if key in TENSORS[op]))
       for key in ("u", "dy", "du", "y")
       for what, make in (("dtype of", lambda x: x.half()), ("rows between", apart))},
}  # fmt: skip


@pytest.mark.parametrize(("op", "name"), [(op, name) for name, (_, ops) in DIFFERENT.items() for op in ops])
def test_a_different_call_is_bound_anew(op: str, name: str, started: Started) -> None:
    for changed in ({}, DIFFERENT[name][0]):
        before = len(_triton_gate._PLANS)
        CALLS[op](**BASE | changed)
        assert len(_triton_gate._PLANS) == before + 1
    assert all(isinstance(x, Tensor) for launched in started for x in launched)  # none was bound


@pytest.mark.parametrize(("op", "key"), [(op, key) for op, keys in TENSORS.items() for key in keys])
def test_an_unaligned_call_is_never_bound(op: str, key: str, started: Started) -> None:
    CALLS[op](**BASE)
    for _ in range(2):
        CALLS[op](**BASE | {key: shifted(BASE[key])})
    assert len(_triton_gate._PLANS) == 1
    assert all(isinstance(x, Tensor) for launched in started for x in launched)


@pytest.mark.parametrize("op", CALLS)
def test_no_rows_are_never_bound(op: str, started: Started) -> None:
    CALLS[op](**{key: x[:0] if isinstance(x, Tensor) else x for key, x in BASE.items()})
    assert not _triton_gate._PLANS


@pytest.mark.parametrize("op", CALLS)
def test_where_launches_are_watched_none_is_bound(op: str, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS[op](**BASE)
    monkeypatch.setattr(_triton_gate, "launches_directly", lambda: False)
    CALLS[op](**BASE)
    assert all(isinstance(x, Tensor) for launched in started for x in launched)
