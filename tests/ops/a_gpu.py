"""Make dispatch behave as on a machine with a GPU, without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fusewise._shared import build, cuda
from fusewise.ops._choice import Choice


def as_dispatch_sees_it(choice: Choice, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """For a fixture: Triton is available, and CUDA once it is built, simulated by emptying the yielded list. Nothing is
    compiled."""
    missing = ["its library is not built"]
    monkeypatch.setattr(cuda, "no_gpu", lambda _: None)
    recipe = "test", (), build.Compiler(("nvcc",), ""), ()
    monkeypatch.setattr(choice.implementation("cuda"), "recipe", lambda _: recipe)
    monkeypatch.setattr(build, "built", lambda *_: not missing)
    monkeypatch.setattr(choice, "choose", lambda *_: "triton")
    monkeypatch.setattr(choice, "unavailable", lambda impl, *_: "not on a GPU" if impl == "cpu" else None)
    monkeypatch.setattr(choice, "serving", lambda impl, *_: "triton" if impl == "auto" else impl)
    choice.unready.cache_clear()
    yield missing
    choice.unready.cache_clear()
