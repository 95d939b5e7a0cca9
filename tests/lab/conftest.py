"""Puts the fake providers on PYTHONPATH, where child processes find them like a third-party package."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import fusewise

HERE = str(Path(__file__).parent)
SOURCE = str(Path(fusewise.__file__).parents[1])
sys.path.insert(0, HERE)


@pytest.fixture(scope="session", autouse=True)
def _fakes_on_the_path():
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, SOURCE, before]))
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def jax() -> Any:
    """JAX on the CPU only; by default it would use a GPU and reserve three quarters of its memory. Skips the test if
    JAX is missing.
    """
    found = pytest.importorskip("jax")
    found.config.update("jax_platforms", "cpu")
    return found
