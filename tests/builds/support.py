"""A small library to build, and helpers to inspect the cache."""

from __future__ import annotations

from pathlib import Path

from fusewise._shared import build

SOURCE = 'extern "C" int answer() { return %d; }\n'
FLAGS = ("-shared", "-fPIC")


def forget() -> None:
    build._LOADED.clear()


def make(source: Path, flags: tuple[str, ...] = FLAGS) -> int:
    answer: int = build.library("answer", [source], build.cxx(), flags).answer()
    return answer


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.is_dir())
