"""All fusewise names that tests and benchmarks use exist. Much of that code runs only on a GPU, where a missing name
would be noticed late.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for folder in ("benchmarks", "learn", "tests") for path in (ROOT / folder).rglob("*.py"))


def modules_of(tree: ast.Module) -> dict[str, ModuleType]:
    """The fusewise modules that a script imports, by local name, excluding names that it rebinds."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fusewise":
            for alias in node.names:
                value = getattr(importlib.import_module(node.module or ""), alias.name, None)
                if value is None:
                    value = importlib.import_module(f"{node.module}.{alias.name}")
                if isinstance(value, ModuleType):
                    found[alias.asname or alias.name] = value
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {name: module for name, module in found.items() if name not in bound}


def missing(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    modules = modules_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            module = modules[node.value.id]
            if not hasattr(module, node.attr):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {module.__name__} has no {node.attr}"


@pytest.mark.parametrize("path", SCRIPTS, ids=[str(path.relative_to(ROOT)) for path in SCRIPTS])
def test_names_are_there(path: Path) -> None:
    assert list(missing(path)) == []
