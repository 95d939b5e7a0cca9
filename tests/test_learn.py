"""Every program in learn/ runs by itself, in its own process, and is short enough to read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LADDER = Path(__file__).parent.parent / "learn"
RUNGS = sorted(LADDER.glob("[0-9]*.py"))


def test_the_readme_lists_every_rung_in_order() -> None:
    text = (LADDER / "README.md").read_text()
    assert [text.count(f"({rung.name})") for rung in RUNGS] == [1] * 9
    assert sorted(RUNGS, key=lambda rung: text.index(f"({rung.name})")) == RUNGS


@pytest.mark.parametrize("rung", RUNGS, ids=[rung.stem for rung in RUNGS])
def test_a_rung_runs_and_says_so(rung: Path, tmp_path: Path) -> None:
    """On the GPU if there is one; the program asserts its claims."""
    source = rung.read_text()
    assert len(source.splitlines()) < 120 and "assert" in source and "import fusewise" not in source
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(rung)], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout
