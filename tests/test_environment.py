"""The script behind `make study` and `make test`: what it installs where, and what it reports on failure."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The script as a module that downloads nothing; `script.asked` has what it asks pip for, `script.refused` what pip
    cannot install.
    """
    spec = importlib.util.spec_from_file_location("environment", ROOT / "scripts" / "environment.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.asked, module.refused = [], None

    def pip(python: str, *arguments: str) -> bool:
        module.asked.append(Path(arguments[-1]).name)
        return module.refused not in (Path(argument).name for argument in arguments)

    monkeypatch.setattr(module, "pip", pip)
    module.probed = module.gpu_site_packages
    monkeypatch.setattr(module, "gpu_site_packages", list)
    builder = venv.EnvBuilder
    monkeypatch.setattr(module.venv, "EnvBuilder", lambda with_pip, clear: builder(clear=clear, symlinks=True))
    monkeypatch.setattr(sys, "argv", ["environment.py", str(tmp_path / "venv")])
    return module


PINNED = ["torch.txt", "triton.txt", "dev.txt", "check.txt", "compilers.txt", ROOT.name]


def test_everything_pinned_then_the_package(script: Any, tmp_path: Path) -> None:
    script.main()
    assert script.asked == PINNED
    assert (tmp_path / "venv" / "ready").exists()


def test_an_environment_of_another_python_is_made_anew_and_one_of_this_is_kept(script: Any, tmp_path: Path) -> None:
    script.main()
    kept = tmp_path / "venv" / "kept"
    kept.touch()
    script.main()
    assert kept.exists()
    python = tmp_path / "venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/no/such/python3.9")
    script.main()
    assert not kept.exists()
    assert script.version(str(python)) == script.version(sys.executable) != ""


@pytest.mark.parametrize("part", ["torch.txt", "compilers.txt", ROOT.name])
def test_what_pip_cannot_do_is_said_and_leaves_the_environment_unready(script: Any, tmp_path: Path, part: str) -> None:
    script.main()
    script.refused = part
    with pytest.raises(SystemExit, match="could not be installed; pip says why above"):
        script.main()
    assert not (tmp_path / "venv" / "ready").exists()


def test_beside_torch_for_a_gpu_only_what_is_missing_is_added(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = [str(tmp_path / "theirs"), str(tmp_path / "the system's")]
    monkeypatch.setattr(script, "gpu_site_packages", lambda: theirs)
    monkeypatch.setattr(script, "has", lambda python, name: name not in ("jsonschema", "mypy", "ruff", "torchax"))
    lines = [line for part in ("dev", "check", "compilers") for line in pinned(part)]
    named = ("jsonschema=", "mypy=", "ruff=", "torchax=")
    jsonschema, mypy, ruff, torchax = (next(line for line in lines if line.startswith(name)) for name in named)
    script.refused = ruff
    script.main()
    both = sorted([mypy, ruff], key=lines.index)
    # The last line of each group; the lines of a group that cannot be installed as a whole one by one; with versions
    # and markers.
    assert script.asked == [jsonschema, both[-1], *both, torchax]
    assert torchax.endswith('; python_version >= "3.11"')
    assert f"could not install {ruff}; what needs them will say so" in capsys.readouterr().out
    (added,) = (tmp_path / "venv").rglob("inherited.pth")
    assert added.read_text().splitlines() == [*theirs, str(ROOT / "src")]
    monkeypatch.setattr(script, "gpu_site_packages", list)
    script.main()
    assert not added.exists()


def pinned(part: str) -> list[str]:
    lines = (ROOT / "requirements" / f"{part}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


@pytest.mark.parametrize(
    ("release", "cuda", "taken"), [("2.11.0+cu130", "13.0", True), ("2.9.1", "12.8", False), ("2.11.0", None, False)]
)
def test_torch_is_taken_from_where_it_lies_and_with_the_packages_beside_it(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, cuda: str | None, taken: bool
) -> None:
    theirs = tmp_path / "user"  # as with `pip install --user`: not in this Python's site-packages
    (theirs / "torch").mkdir(parents=True)
    (theirs / "torch" / "__init__.py").write_text(
        f"class version: cuda, hip = {cuda!r}, None\n__version__ = {release!r}\n", encoding="utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", str(theirs))
    found = script.probed()
    assert found[:1] == ([str(theirs)] if taken else [])
    assert not taken or str(script.site_packages(sys.executable)) in found


def test_a_python_that_makes_no_environments_is_told_what_to_install(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Without:
        def __init__(self, **_: Any) -> None: ...

        def create(self, target: Path) -> None:
            raise subprocess.CalledProcessError(1, "ensurepip")

    monkeypatch.setattr(script.venv, "EnvBuilder", Without)
    with pytest.raises(SystemExit, match="makes no virtual environments; on Debian and Ubuntu install python3-venv"):
        script.main()


def test_an_old_python_is_told_what_to_run(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.sys, "version_info", (3, 9))
    with pytest.raises(SystemExit, match=r"Python must be 3\.10 or newer, got .*; run make PYTHON=python3.11"):
        script.main()
