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


#: Forks for every program, having imported torch, which takes seconds. Writes its output, its errors and its exit code.
EACH = """
import os, runpy, sys
from pathlib import Path
import torch

for path in map(Path, sys.argv[1:]):
    if not os.fork():
        for descriptor, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{path.stem}.{kind}", os.O_CREAT | os.O_WRONLY), descriptor)
        runpy.run_path(str(path), run_name="__main__")
        sys.exit()
    Path(f"{path.stem}.code").write_text(str(os.waitstatus_to_exitcode(os.wait()[1])))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what the programs said."""
    folder = tmp_path_factory.mktemp("learn")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", EACH, *map(str, RUNGS)]
    subprocess.run(words, timeout=120 * len(RUNGS), check=True, cwd=folder, env=environment)
    return folder


@pytest.mark.parametrize("rung", RUNGS, ids=[rung.stem for rung in RUNGS])
def test_a_rung_runs_and_says_so(rung: Path, outcomes: Path) -> None:
    """On the GPU if there is one; the program asserts its claims."""
    source = rung.read_text()
    assert len(source.splitlines()) < 120 and "assert" in source and "import fusewise" not in source
    out, errors, code = ((outcomes / f"{rung.stem}.{kind}").read_text() for kind in ("out", "err", "code"))
    assert code == "0", errors
    assert out
