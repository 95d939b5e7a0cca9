"""A third-party package, really installed: a provider and a target that the lab finds by their entry points."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fusewise

SOURCE = str(Path(fusewise.__file__).parents[1])
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "tiny-kernels"
version = "1.2"

[project.entry-points."fusewise.providers"]
tiny = "tiny_kernels:Tiny"

[project.entry-points."fusewise.targets"]
cube = "tiny_kernels:CubeTarget"

[tool.setuptools]
py-modules = ["tiny_kernels"]
"""


def example(heading):
    """The first Python block below a heading of the page that documents this."""
    text = (Path(__file__).parents[2] / "docs" / "study.md").read_text(encoding="utf-8")
    return text.split(f"## {heading}\n")[1].split("```python\n")[1].split("```")[0]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    try:  # check metadata: searching for the modules would let setuptools replace distutils
        for name in ("pip", "setuptools"):
            importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("installs a package with pip and setuptools")
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "tiny_kernels.py").write_text(example("Adding a provider") + "\n" + example("Adding a target"))
    command = [
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--disable-pip-version-check",
        "--target",
    ]
    subprocess.run([sys.executable, *command, str(site), str(source)], check=True, timeout=120)
    return site


def study(installed, *arguments):
    path = os.pathsep.join([str(installed), SOURCE])
    done = subprocess.run(
        [sys.executable, "-m", "fusewise", *arguments], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_examples_are_short():
    assert len(example("Adding a provider").splitlines()) < 30
    assert len(example("Adding a target").splitlines()) < 60


def test_an_installed_provider_is_measured(installed, tmp_path):
    listed = {e["provider"]: e for e in study(installed, "providers", "--device", "cpu", "--json")}
    assert listed["tiny"]["versions"]["tiny-kernels"] == "1.2"
    arguments = "study gelu --case gelu-5x5 --device cpu --rounds 3:3 --warm --no-code --json --providers eager,tiny"
    rows = study(installed, *arguments.split(), "--out", str(tmp_path / "run"))
    assert {(r["provider"], r["pass"], r["status"]) for r in rows} == {
        (name, pass_, "ok") for name in ("eager", "tiny") for pass_ in ("fwd", "bwd")
    }


def test_an_installed_target_is_studied(installed, tmp_path):
    arguments = "study cube --device cpu --rounds 3:3 --warm --no-code --json --providers eager,torchscript,tiny"
    rows = study(installed, *arguments.split(), "--out", str(tmp_path / "run"))
    found = {(r["op"], r["provider"]): r for r in rows}
    assert found["cube", "eager"]["status"] == found["cube", "torchscript"]["status"] == "ok"
    assert found["cube", "tiny"]["status"] == "missing"
    assert found["cube", "tiny"]["reason"] == "knows GELU only"
