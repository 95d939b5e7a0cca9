"""Puts the fake providers on PYTHONPATH, where child processes find them like a third-party package; fixtures of several files."""

import functools
import os
import sys
from contextlib import closing
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


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """The processes that check functions are forked from one that has imported torch, which takes them most of their time.
    `test_survival` starts them as a command does."""
    from fusewise.lab.nursery import Nursery
    from fusewise.lab.process import WorkerProcess
    from fusewise.lab.targets import user

    with closing(Nursery(tmp_path_factory.mktemp("nursery") / "log")) as nursery, pytest.MonkeyPatch.context() as patch:
        patch.setattr(user, "WorkerProcess", functools.partial(WorkerProcess, nursery=nursery))
        yield
