"""benchmarks/sanitize.py: its calls run. The sanitizer itself needs a GPU."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "sanitize.py"


@pytest.mark.parametrize("op", ["rope", "rope_and_cache", "qk_norm_rope", "gated_linear"])
def test_every_call_is_one(op: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), op, "reference", "cpu"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    *calls, said = capsys.readouterr().out.splitlines()
    assert said == f"{len(calls)} calls"
    assert len(calls) > 50
