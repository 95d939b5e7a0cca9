"""What the CUDA kernel compiles to, without a GPU: no spills, every block resident as planned, 16 bytes an access."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fusewise._shared import build
from fusewise.ops.rope import _cuda as rope_cuda
from fusewise.ops.rope_and_cache import _cuda

pytestmark = pytest.mark.slow
KERNEL = re.compile(r"Compiling entry function '(\S*rope_and_cache_kernel\S*)' for '(sm_\d+)'")
THREADS_RESIDENT = 768  # of a multiprocessor with 65536 registers, at least


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library for three generations of GPUs, and what the assembler said of each kernel."""
    try:
        command = build.nvcc().command
    except build.BuildError as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("cuda") / "library.so"
    flags = (*rope_cuda.flags(((8, 0), (9, 0), (10, 0))), "-Xptxas=-v", "--threads=2")
    result = subprocess.run(
        [*command, *flags, str(_cuda.SOURCES[0]), "-o", str(path)], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return path, result.stderr


def test_no_kernel_spills_and_all_fit(compiled: tuple[Path, str]) -> None:
    seen = set()
    for entry in compiled[1].split("ptxas info    : Compiling entry function")[1:]:
        found = KERNEL.match("Compiling entry function" + entry)
        if found is None:
            continue
        seen.add(found[2])
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        registers = re.search(r"Used (\d+) registers", entry)
        assert frame is not None and registers is not None, entry
        assert frame.groups() == ("0", "0", "0"), f"{found[1]} on {found[2]} spills: {frame[0]}"
        assert int(registers[1]) <= 65536 // THREADS_RESIDENT, f"{found[1]} on {found[2]}: {registers[0]}"
    assert seen == {"sm_80", "sm_90", "sm_100"}


@pytest.mark.parametrize(
    ("kernel", "loads", "stores"),
    [
        # q, k and v: two accesses of 16 bytes each where halves rotate, one where neighbours do; k is written twice.
        ("IfLb0ELb0ELi4ELi1E", 6, 8),
        ("__nv_bfloat16Lb0ELb0ELi8ELi1E", 6, 8),
        ("__halfLb1ELb1ELi4ELi1E", 3, 4),
    ],
)
def test_widest_accesses(compiled: tuple[Path, str], kernel: str, loads: int, stores: int) -> None:
    tool = shutil.which("cuobjdump")
    if tool is None:
        triton = pytest.importorskip("triton")
        tool = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    listing = subprocess.run([tool, "-sass", "-arch", "sm_90", str(compiled[0])], capture_output=True, text=True)
    assert listing.returncode == 0, listing.stderr
    bodies = [body for body in listing.stdout.split("Function : ")[1:] if kernel in body.splitlines()[0]]
    assert bodies
    for body in bodies:
        assert len(re.findall(r"LDG\.E\.128", body)) >= loads, body.splitlines()[0]
        assert len(re.findall(r"STG\.E\.128", body)) >= stores, body.splitlines()[0]
        assert not re.findall(r"LDL|STL", body)
