"""benchmarks/host_cost.py: every call it times runs, and its floors are built. Times are not checked."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fusewise._shared import build
from fusewise.ops.rope import _host

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "host_cost.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("host_cost", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "host_cost", module)  # its dataclass looks there
    spec.loader.exec_module(module)
    try:
        _host.extension()
    except build.BuildError as error:
        pytest.skip(str(error))
    return module


def test_every_call_beside_its_floor(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except torch.compile, which other tests cover and which takes longer than all the rest."""
    monkeypatch.setattr(script, "CALLS", 3)
    monkeypatch.setattr(script, "compiled", lambda *_: [])
    rows = script.measure("cpu", rounds=2)
    groups = {row["group"] for row in rows}
    assert {"in place", "out of place", "recorded", "both"} <= groups
    for group in groups:
        names = [row["name"] for row in rows if row["group"] == group]
        assert any(name.startswith("floor") for name in names) and "fusewise-cpu" in names, names
    assert all(row["us"] > 0 and row["ratio"] >= 1 for row in rows if row["name"].startswith("floor"))
