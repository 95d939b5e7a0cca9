"""Create the virtual environment for `make study` and `make test`. Standard library only.

If the current Python already has a GPU build of torch >= 2.10, the new environment inherits its packages and only missing
ones are installed, one by one if they cannot be installed together. Packages that fail are listed, and the features that
need them report it. Otherwise the pinned development set is installed.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
MINIMUM_TORCH = (2, 10)

# Runs in a subprocess of the current Python, as importing torch is slow and may fail. torch's dependencies may be in another
# directory than torch: `pip install --user` reuses packages that the system already has.
PROBE = """
import sys, torch
from pathlib import Path
version = tuple(int(part) for part in torch.__version__.split(".")[:2])
gpu = torch.version.cuda is not None or torch.version.hip is not None
others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
if gpu and version >= {minimum}:
    print(*dict.fromkeys([str(Path(torch.__file__).parents[1]), *others]), sep="\\n")
"""


def main() -> None:
    if sys.version_info < (3, 10):
        sys.exit(f"environment: Python must be 3.10 or newer, got {sys.version.split()[0]}; run make PYTHON=python3.11")
    target = Path(sys.argv[1])
    (target / "ready").unlink(missing_ok=True)
    python = str(target / "bin" / "python")
    try:  # reuse an existing environment if it has the same Python version
        venv.EnvBuilder(with_pip=True, clear=version(python) != version(sys.executable)).create(target)
    except subprocess.CalledProcessError:
        sys.exit(
            f"environment: {sys.executable} makes no virtual environments; on Debian and Ubuntu install python3-venv"
        )
    site_packages(python).joinpath("inherited.pth").unlink(missing_ok=True)
    inherited = gpu_site_packages()
    if inherited:
        print(f"environment: using the packages of {', '.join(inherited)}", flush=True)
        site_packages(python).joinpath("inherited.pth").write_text("\n".join([*inherited, str(ROOT / "src"), ""]))
        for part in ("dev.txt", "check.txt", "compilers.txt"):
            missing = missing_requirements(python, part)
            together = not missing or pip(python, "--retries=1", "--timeout=10", *missing)
            failed = (
                [] if together else [line for line in missing if not pip(python, "--retries=0", "--timeout=5", line)]
            )
            if failed:
                print(f"environment: could not install {', '.join(failed)}; what needs them will say so", flush=True)
    else:
        # torch first: it may pin its own triton, which must not be replaced.
        install(python, "torch.txt")
        if not has(python, "triton"):
            install(python, "triton.txt")
        for part in ("dev.txt", "check.txt", "compilers.txt"):
            install(python, part)
        if not pip(python, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)):
            sys.exit("environment: fusewise itself could not be installed; pip says why above")
    (target / "ready").touch()


def gpu_site_packages() -> list[str]:
    """The package directories of this Python, torch's first, if it has a recent GPU build of torch; else empty."""
    probe = subprocess.run(
        [sys.executable, "-c", PROBE.format(minimum=MINIMUM_TORCH)], capture_output=True, text=True, check=False
    )
    return probe.stdout.splitlines() if probe.returncode == 0 else []


def version(python: str) -> str:
    """The version of an interpreter; empty if it does not run."""
    try:
        found = subprocess.run(
            [python, "-c", "import sys; print(sys.version)"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout


def site_packages(python: str) -> Path:
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def missing_requirements(python: str, part: str) -> list[str]:
    """The pinned requirements (with markers) that have no installed version; any inherited version is accepted."""
    lines = (REQUIREMENTS / part).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#") and not has(python, line.split("==")[0])]


def has(python: str, distribution: str) -> bool:
    command = [python, "-c", f"import importlib.metadata as m; m.version({distribution!r})"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def install(python: str, part: str) -> None:
    """Install a file of pinned requirements, or exit with instructions."""
    if not pip(python, "-r", str(REQUIREMENTS / part)):
        sys.exit(
            f"environment: requirements/{part} could not be installed; pip says why above. It needs a package index"
        )


def pip(python: str, *arguments: str) -> bool:
    """Run `pip install` with these arguments; return whether it succeeded."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments]
    return subprocess.run(command, check=False).returncode == 0


if __name__ == "__main__":
    main()
