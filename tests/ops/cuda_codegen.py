"""What CUDA kernels compile to, without a GPU: one compilation for three generations of GPUs, and what to ask of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fusewise._shared import build
from fusewise.ops.rope import _cuda

THREADS_RESIDENT = 768  # of a multiprocessor with 65536 registers, at least


def compiled(source: Path, folder: Path) -> tuple[Path, str]:
    """The library of a source, and what the assembler said of each kernel. Skips without nvcc."""
    try:
        command = build.nvcc().command
    except build.BuildError as error:
        pytest.skip(str(error))
    path = folder / "library.so"
    flags = (*_cuda.flags(((8, 0), (9, 0), (10, 0))), "-Xptxas=-v", "--threads=2")
    result = subprocess.run(
        [*command, *flags, str(source), "-o", str(path)], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return path, result.stderr


def check_no_kernel_spills_and_all_fit(said: str, kernel: str) -> None:
    """No instance of a kernel spills, and its registers let THREADS_RESIDENT threads be resident."""
    entries = re.compile(rf"Compiling entry function '(\S*{kernel}\S*)' for '(sm_\d+)'")
    seen = set()
    for entry in said.split("ptxas info    : Compiling entry function")[1:]:
        found = entries.match("Compiling entry function" + entry)
        if found is None:
            continue
        seen.add(found[2])
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        registers = re.search(r"Used (\d+) registers", entry)
        assert frame is not None and registers is not None, entry
        assert frame.groups() == ("0", "0", "0"), f"{found[1]} on {found[2]} spills: {frame[0]}"
        assert int(registers[1]) <= 65536 // THREADS_RESIDENT, f"{found[1]} on {found[2]}: {registers[0]}"
    assert seen == {"sm_80", "sm_90", "sm_100"}


def machine_code(library: Path, kernel: str) -> list[str]:
    """The listing for sm_90 of every function whose name has `kernel` in it; none touches local memory."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        triton = pytest.importorskip("triton")
        tool = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    listing = subprocess.run([tool, "-sass", "-arch", "sm_90", str(library)], capture_output=True, text=True)
    assert listing.returncode == 0, listing.stderr
    bodies = [body for body in listing.stdout.split("Function : ")[1:] if kernel in body.splitlines()[0]]
    assert bodies
    for body in bodies:
        assert not re.findall(r"LDL|STL", body), body.splitlines()[0]
    return bodies
