from __future__ import annotations

from pathlib import Path

import pytest

from fusewise._shared import build

from .support import SOURCE


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a process without memory of earlier builds."""
    monkeypatch.setenv("FUSEWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_LOADED", {})
    return tmp_path / "cache" / "native"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE % 42)
    return path
