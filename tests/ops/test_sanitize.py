"""benchmarks/sanitize.py: its calls run. The sanitizer itself needs a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "sanitize.py"


@pytest.mark.parametrize("op", ["rope", "rope_and_cache", "qk_norm_rope", "gated_linear"])
def test_every_call_is_one(op: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, op, "reference", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *calls, said = done.stdout.splitlines()
    assert said == f"{len(calls)} calls"
    assert len(calls) > 50
