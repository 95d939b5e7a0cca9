"""The README's figures are those of the published rows, and its Python runs."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def generator():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figures_are_those_of_the_rows():
    assert generator().filled(README) == README, "run python benchmarks/readme.py"


def test_a_changed_figure_is_seen():
    changed = re.sub(r"\| (\d\d) % \|", "| 1 % |", README, count=1)
    assert changed != README
    assert generator().filled(changed) == README


def test_a_lost_place_is_an_error():
    with pytest.raises(ValueError, match="<!-- cpu --> must stand once"):
        generator().filled(README.replace("<!-- cpu -->", ""))


def test_its_python_runs():
    code = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(code) == 3
    exec(compile("\n".join(code), "README.md", "exec"), {})


def test_its_files_are_there():
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
