"""A first call waits for compilers no longer than necessary."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from fusewise._shared import build

from .support import FLAGS, SOURCE

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on the PATH")


@pytest.fixture
def recipes(tmp_path: Path, cache: Path) -> tuple[build.Recipe, build.Recipe]:
    """Two libraries; the compiler of the first waits until that of the second is running."""
    source, begun, waiting, telling = (tmp_path / name for name in ("one.cpp", "begun", "waiting", "telling"))
    source.write_text(SOURCE % 42)
    waits = f"for i in $(seq 300); do [ -e {begun} ] && break; sleep 0.1; done; [ -e {begun} ] || exit 1"
    for script, line in ((waiting, waits), (telling, f"touch {begun}")):
        script.write_text(f'#!/bin/sh\n{line}\nexec c++ "$@"\n')
        script.chmod(0o755)
    first, second = (build.Compiler((str(script),), "1") for script in (waiting, telling))
    return ("first", [source], first, FLAGS), ("second", [source], second, FLAGS)


def finish() -> None:
    for thread in threading.enumerate():
        if thread.name == "fusewise-build":
            thread.join(60)


def test_what_is_needed_next_is_built_meanwhile(recipes: tuple[build.Recipe, build.Recipe]) -> None:
    first, second = recipes
    build.ahead(first, lambda: second)
    assert build.library(*first).answer() == 42
    assert build.library(*second).answer() == 42
    finish()


def test_nothing_is_built_ahead_of_what_is_there_or_cannot_be_built(
    recipes: tuple[build.Recipe, build.Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = recipes
    build.prepared(*second)
    nothing = ("third", second[1], build.Compiler((), "", "no compiler found"), FLAGS)
    monkeypatch.setattr(build, "prepared", lambda *_: pytest.fail("built"))
    for first in (second, nothing):
        build.ahead(first, lambda: second)
        assert not [thread for thread in threading.enumerate() if thread.name == "fusewise-build"]


def test_what_cannot_be_built_ahead_is_told_to_who_loads_it(recipes: tuple[build.Recipe, build.Recipe]) -> None:
    _, (name, sources, compiler, flags) = recipes
    first = (name, sources, compiler, flags)
    failing = ("failing", sources, compiler, (*flags, "-no-such-flag"))

    def refused() -> build.Recipe:
        raise build.BuildError("not made for this system")

    for then in (lambda: failing, refused):
        build.ahead(("unlike", sources, compiler, (*flags, "-DX")), then)
        finish()
    assert build.library(*first).answer() == 42
    with pytest.raises(build.BuildError, match="no-such-flag"):
        build.library(*failing)


def test_sources_are_compiled_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda *_: build.Compiler(("/bin/nvcc", "-x"), "release 13.0"))
    assert build.nvcc().command == ("/bin/nvcc", "-x", "--threads=0")
    monkeypatch.setattr(build, "compiler", lambda *_: build.Compiler((), "", "there is none"))
    assert build.nvcc().command == ()
