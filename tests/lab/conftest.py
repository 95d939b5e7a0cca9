"""Processes that tests start find the fake providers through PYTHONPATH, as a third party's package would be found."""

import os
import sys
from pathlib import Path

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
