"""Machine code of CUDA kernels without a GPU: one compilation for three GPU generations, and checks on it."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fusewise._shared import build

GENERATIONS = ((8, 0), (9, 0), (10, 0))
THREADS_RESIDENT = 768  # required resident threads of an SM with 65536 registers
#: Shell wrapper around the compiler: keeps its messages next to the library, and prints them if it fails.
KEEPING_WHAT_IT_SAYS = ("sh", "-c", '"$0" "$@" 2> said || { cat said >&2; exit 1; }')


def compiled(module: ModuleType) -> tuple[Path, str]:
    """The library of a CUDA implementation for GENERATIONS, and ptxas' report on each kernel."""
    return prepared(lambda: module.recipe(GENERATIONS))


def prepared(recipe: Callable[[], build.Recipe]) -> tuple[Path, str]:
    """A library, and ptxas' report on each kernel. Compiled once for all test processes, which wait for it, and kept in the
    cache of native code until the sources change; takes up to minutes on two cores. Skips without nvcc."""
    try:
        name, sources, nvcc, flags = recipe()
    except build.BuildError as error:
        pytest.skip(str(error))
    keeping = build.Compiler((*KEEPING_WHAT_IT_SAYS, *nvcc.command), nvcc.version)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "TIMEOUT_S", 3600)  # three builds, in parallel with other tests
        path = build.prepared(f"{name}-of-tests", sources, keeping, (*flags, "-Xptxas=-v"))
    return path, (path.parent / "said").read_text()


def check_no_kernel_spills_and_all_fit(said: str, kernel: str, resident: int = THREADS_RESIDENT) -> None:
    """Check that no instance of a kernel spills, and that registers allow so many resident threads."""
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
        assert int(registers[1]) <= 65536 // resident, f"{found[1]} on {found[2]}: {registers[0]}"
    assert seen == {"sm_80", "sm_90", "sm_100"}


@functools.cache
def listing(library: Path, target: str = "sm_90") -> list[str]:
    """The disassembly of the library for a target, by function."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        triton = pytest.importorskip("triton")
        tool = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    done = subprocess.run([tool, "-sass", "-arch", target, str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("Function : ")[1:]


def machine_code(library: Path, kernel: str) -> list[str]:
    """The sm_90 disassembly of all functions with `kernel` in their name; checks that none uses local memory."""
    bodies = [body for body in listing(library) if kernel in body.splitlines()[0]]
    assert bodies
    for body in bodies:
        assert not re.findall(r"LDL|STL", body), body.splitlines()[0]
    return bodies
