"""The build of the CUDA kernels on a machine without a GPU: concurrent, killed, corrupted, failing, and by CMake."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import fusewise
from fusewise._shared import build
from fusewise.ops.rope import _cuda

from .. import cuda_codegen

NVCC = shutil.which("nvcc")
SOURCE = Path(fusewise.__file__).parent / "ops" / "rope"
ROOT = SOURCE.parents[3]

LOAD = """
    import ctypes
    from fusewise._shared import build
    from fusewise.ops.rope import _cuda
    library = build.library(*_cuda.recipe(((9, 0),)))
    library.fusewise_error.restype = ctypes.c_char_p
    print(library.fusewise_error(0).decode())
"""


def run(code: str, folder: Path, *nvcc: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "FUSEWISE_CACHE_DIR": str(folder / "cache"), "NVCC": str(nvcc[0])}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, nvcc)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, env=environment,
    )  # fmt: skip


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}")
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_killed_then_two_at_once_then_damaged(tmp_path: Path) -> None:
    """A killed build is repeated, once for two processes; a modified library is not loaded."""
    library, _ = cuda_codegen.compiled(_cuda)  # built by the real compiler, which takes a minute
    nvcc = script(
        tmp_path / "nvcc",
        f'[ "$1" = --version ] && exec echo patient 1.0\necho build >> {tmp_path}/builds\nfor last; do :; done\n'
        f'if [ ! -f {tmp_path}/killed ]; then echo half > "$last"; exec sleep 60; fi\n'
        f'exec cp {shlex.quote(str(library))} "$last"\n',
    )
    cache = tmp_path / "cache" / "native"
    child = run(LOAD, tmp_path, nvcc)
    deadline = time.monotonic() + 60
    while not [path for path in cache.glob("rope-cuda-*.tmp/library.so") if path.stat().st_size]:
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    (tmp_path / "killed").touch()

    children = [run(LOAD, tmp_path, nvcc) for _ in range(2)]
    outputs = [child.communicate(timeout=300) for child in children]
    assert [out for out, _ in outputs] == ["no error\n"] * 2, outputs
    assert (tmp_path / "builds").read_text() == "build\n" * 2

    (kept,) = cache.glob("rope-cuda-*/library.so")
    content = kept.read_bytes()
    kept.write_bytes(content[: len(content) // 2])
    out, error = run(LOAD, tmp_path, nvcc).communicate(timeout=300)
    assert out == "no error\n", error
    assert kept.read_bytes() == content
    assert (tmp_path / "builds").read_text() == "build\n" * 3


FAILING = """
    import json
    import os
    import sys
    import torch
    from torch._subclasses import FakeTensorMode
    import fusewise
    from fusewise.ops.rope import _op

    with FakeTensorMode():
        q = torch.empty(1, 4, 2, 16, device="cuda")
    # A machine that has a GPU, as far as the choice of an implementation looks.
    torch.cuda.device_count = lambda: 1
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    for nvcc in sys.argv[1:]:
        if not os.fork():  # a process that knows no compiler
            os.environ["NVCC"] = nvcc
            told = fusewise.explain_dispatch(fusewise.rope, q)
            for _ in range(2):
                try:
                    fusewise.explain_dispatch(fusewise.rope, q, impl="cuda")
                except ValueError as error:
                    failed = str(error)
            print(json.dumps([told.impl, told.passed_over["cuda"], failed]), flush=True)
            os._exit(0)
        os.wait()
"""


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], str]:
    """What is told of a compiler that fails and of one that is not there, in one process since FakeTensorMode takes seconds to import;
    and how often the first was run."""
    folder = tmp_path_factory.mktemp("failing")
    nvcc = script(
        folder / "nvcc",
        f'[ "$1" = --version ] && exec echo broken 1.0\necho build >> {folder}/builds\n'
        "for i in $(seq 30); do echo noise $i >&2; done\necho 'rope.cu(1): error: no such luck' >&2\nexit 2\n",
    )
    out, error = run(FAILING, folder, nvcc, folder / "no-such-nvcc").communicate(timeout=120)
    assert out.count("\n") == 2, error
    return [json.loads(line) for line in out.splitlines()], (folder / "builds").read_text()


def test_a_failing_compiler_is_one_error_and_names_what_serves_instead(failing: tuple[list[list[str]], str]) -> None:
    ((impl, passed_over, reason), _), builds = failing
    assert (impl, passed_over) == (
        "triton",
        'its library is not built; run `fusewise build` or call with impl="cuda"',
    )
    assert "building rope-cuda failed" in reason and "exited with 2" in reason
    assert reason.endswith('rope.cu(1): error: no such luck; use impl="auto"')
    assert "noise 25" in reason and "noise 15" not in reason  # only the last lines
    assert builds == "build\n", "a failed build is not tried again"


def test_without_a_compiler_it_says_so(failing: tuple[list[list[str]], str]) -> None:
    (_, (_, passed_over, _)), _ = failing
    assert "no compiler found on the PATH (NVCC=" in passed_over


def test_the_build_command_says_what_failed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Exit code 1 with the compiler's last lines; the other libraries are still built."""
    pytest.importorskip("click")
    from click.testing import CliRunner, Result

    from fusewise.cli import cli

    nvcc = script(tmp_path / "nvcc", '[ "$1" = --version ] && exec echo broken 1.0\necho no such luck >&2\nexit 2\n')
    cxx = script(tmp_path / "cxx", '[ "$1" = --version ] && exec echo quick 1.0\nfor last; do :; done\ntouch "$last"\n')
    environment = {"FUSEWISE_CACHE_DIR": str(tmp_path / "cache"), "NVCC": str(nvcc), "CXX": str(cxx)}
    words = [sys.executable, "-m", "fusewise", "build", "--arch", "sm_80,sm_100"]
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120, check=False
    )
    assert done.returncode == 1
    assert [line.split(":")[0] for line in done.stdout.splitlines()][:2] == ["rope", "gate"]
    assert all(Path(line.split(": ")[1].split(", ")[0]).is_file() for line in done.stdout.splitlines())
    for name in ("rope-cuda sm_80", "rope-cuda sm_100"):
        assert f"{name}: building rope-cuda failed" in done.stderr
    assert "no such luck" in done.stderr

    # The rest in this process, which takes no time to start.
    def built(*arguments: str) -> Result:
        build.compiler.cache_clear()
        return CliRunner(env=environment).invoke(cli, ["build", *arguments])

    nvcc.write_text(cxx.read_text())
    request.addfinalizer(build.compiler.cache_clear)
    done = built("--arch", "sm_80")
    assert done.exit_code == 0
    assert "rope: " in done.stdout and "already built" in done.stdout
    listed = json.loads(built("--arch", "sm_80", "--json").stdout)
    assert [f"{it['name']}: {it['path']}" for it in listed] == [
        line.split(", ")[0] for line in done.stdout.splitlines()
    ]
    assert all(it["seconds"] == 0 and it["error"] == "" for it in listed)
    done = built("--arch", "sm_70")
    assert done.exit_code == 2
    assert "build: arch must be names like sm_80,sm_90, none older than sm_80, got 'sm_70'" in done.stderr


#: Only one dtype, pairing and activation, a seventh of the build time, and nothing optimized, half of what is left; no kernel runs
#: here, and `test_cuda_codegen.py` covers the others and their machine code.
FEW = (
    "-DFUSEWISE_DTYPE=float -DFUSEWISE_IN=0 -DFUSEWISE_OUT=0 -DFUSEWISE_BFLOAT16=1 -DFUSEWISE_ACTIVATION=SILU"
    " -Xcicc=-O0 -Xptxas=-O0"
)


@pytest.mark.slow
@pytest.mark.skipif(
    not (ROOT / "CMakeLists.txt").is_file(), reason="the package is installed without its CMakeLists.txt"
)
@pytest.mark.skipif(NVCC is None, reason="no nvcc on the PATH")
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake on the PATH")
def test_cmake_builds_the_same_source(tmp_path: Path) -> None:
    """The result is a plain shared library with the same exports and no others, independent of torch and Python."""
    for arguments in (
        ["-S", str(ROOT), "-B", str(tmp_path), "-DCMAKE_CUDA_ARCHITECTURES=90", f"-DCMAKE_CUDA_FLAGS={FEW}"],
        ["--build", str(tmp_path)],
    ):
        done = subprocess.run(["cmake", *arguments], capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    path = tmp_path / "libfusewise_rope.so"
    library = ctypes.CDLL(str(path))
    library.fusewise_error.restype = ctypes.c_char_p
    assert library.fusewise_error(0) == b"no error"
    nm = shutil.which("nm")
    if nm is not None:
        symbols = subprocess.run([nm, "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True)
        names = {line.split()[-1] for line in symbols.stdout.splitlines()}
        assert {"fusewise_rope", "fusewise_rope_probe", "fusewise_error"} <= names
        assert not [name for name in names if "rope_kernel" in name]
    gated = ctypes.CDLL(str(tmp_path / "libfusewise_gated_linear.so"))
    assert gated.fusewise_gated_linear and gated.fusewise_gated_linear_probe
