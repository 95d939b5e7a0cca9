"""Building native code ahead of time, without the lab's dependencies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fusewise
from fusewise import native
from fusewise._shared import build

NO_LAB = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"click", "rich", "jinja2", "numpy", "matplotlib"}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Nothing())
import warnings
warnings.simplefilter("ignore")  # torch tells that there is no numpy
import fusewise.native
print(*(type(one).__name__ for one in fusewise.native.build()))
"""


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FUSEWISE_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_it_needs_no_lab(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The compilers are fakes that write an empty file; real ones are tested elsewhere."""
    compiler = cache / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exec echo quick 1.0\nfor last; do :; done\n: > "$last"\n')
    compiler.chmod(0o755)
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(Path(fusewise.__file__).parents[1]),
    }
    done = subprocess.run([sys.executable, "-c", NO_LAB], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Built"] * (4 if sys.platform == "linux" else 2)


HOST = {name: recipe for name, recipe in native.recipes(()) if "cuda" not in name}


@pytest.mark.skipif(bool(build.cxx().missing), reason="needs a C++ compiler")
@pytest.mark.parametrize("name", HOST)
def test_a_compiler_builds_what_a_cpu_runs(name: str) -> None:
    """The tests of native code skip where it cannot be built, and would skip one and all for a mistake in it."""
    try:
        recipe = HOST[name]()
    except build.BuildError as error:  # no headers of Python
        pytest.skip(str(error))
    assert build.prepared(*recipe).is_file()


def test_what_cannot_be_built_is_told_and_the_rest_is_built(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    source = cache / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }')
    wrong = cache / "wrong.cpp"
    wrong.write_text("int wrong() { return one; }")
    recipes = {path.stem: ("test", (path,), build.cxx(), ("-shared", "-fPIC")) for path in (wrong, source)}
    monkeypatch.setattr(native, "recipes", lambda _: iter((name, lambda r=r: r) for name, r in recipes.items()))
    with pytest.raises(RuntimeError, match=r"^wrong: building test failed: [\s\S]*one"):
        native.build()
    (made,) = [one for one in native.build_all() if one.path is not None]
    assert (made.name, made.seconds) == ("one", 0.0)  # it was there already


@pytest.mark.parametrize("name", ["sm_75", "sm90", "90", "sm_9", ""])
def test_an_architecture_is_named_as_nvcc_does(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^build: arch must be names like sm_80,sm_90, none older than sm_80, got '{name}'; "
    ):
        native.build("sm_90", name)
