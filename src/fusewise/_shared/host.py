"""Host fast paths: Python extensions that take a call from its arguments to the launch without running Python.

They are compiled against the running torch and Python. This takes too long for a first call, so they are used once
`fusewise build` has built them. `host.h` defines which calls they accept; all others go through Python: slower, with
the same result.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import build

HEADERS = tuple(Path(__file__).with_name(name) for name in ("host.h", "operators.h"))

_loaded: list[Any] = []
_quick = True  # whether the fast paths are enabled, see `through_python`


def flags() -> tuple[str, ...]:
    """C++ compiler flags for the running torch and Python. The libraries it links against are already loaded.

    Raises:
        BuildError: the extensions are not made for this system.
    """
    if sys.platform != "linux":
        raise build.BuildError("the host fast path supports Linux only")
    root = Path(torch.__file__).parent
    include = root / "include"
    return (
        "-std=c++20", "-O2", "-fvisibility=hidden", "-fPIC", "-shared", "-pthread", "-Wl,-z,nodelete",
        "-DAT_PER_OPERATOR_HEADERS",  # only the operators that torch's headers use: a fifth of the time
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f'-DTORCH="{torch.__version__} {torch.version.git_version}"', f'-DPYTHON="{sysconfig.get_config_var("SOABI")}"',
        # system includes: suppress warnings from third-party headers
        f"-isystem{include}", f"-isystem{include / 'torch/csrc/api/include'}", f"-isystem{sysconfig.get_path('include')}",
        f"-L{root / 'lib'}", "-Wl,--no-as-needed", "-lc10", "-ltorch_cpu", "-ltorch_python", *_standard_library(),
    )  # fmt: skip


def _standard_library() -> list[str]:
    """The libstdc++ that torch has loaded, if it can be determined. A compiler configured to link libstdc++ statically
    would put a second one into the process, whose iostreams, which c10 uses for messages, do not work beside the first."""
    try:
        maps = os.fsdecode(Path("/proc/self/maps").read_bytes())  # a file that the process has mapped may have any name
    except OSError:
        return []
    # fields: address, permissions, offset, device, inode, then the path, which may contain spaces
    paths = re.findall(r"^(?:\S+ +){5}(/.*/libstdc\+\+\.so[^/\n]*)$", maps, re.MULTILINE)
    return [path for path in paths if Path(path).exists()][:1]


def not_loaded(*_: Any) -> None:
    """Placeholder for a function of an extension that is not loaded: None means that the call continues in Python."""
    return None


def loaded(extension: Any) -> Any:
    """Register an extension with `through_python`, and return it."""
    extension.quick(_quick)
    _loaded.append(extension)
    return extension


@contextlib.contextmanager
def through_python() -> Iterator[None]:
    """Context in which every call goes through Python, for code that observes the launches of an implementation."""
    before = _quick
    _switch(False)
    try:
        yield
    finally:
        _switch(before)


def _switch(quick: bool) -> None:
    global _quick
    _quick = quick
    for extension in _loaded:
        extension.quick(quick)
