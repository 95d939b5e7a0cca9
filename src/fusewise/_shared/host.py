"""Python extensions that take a call from its arguments to the launch without running Python, and what they share.

They are compiled against the torch and the Python that run, which takes longer than a first call may: they serve where
`fusewise build` has built them. `host.h` says which calls they take; every other goes through Python: slower, no different.
"""

from __future__ import annotations

import contextlib
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import build

HEADER = Path(__file__).with_name("host.h")

_loaded: list[Any] = []
_quick = True  # whether they take calls, see `through_python`


def flags() -> tuple[str, ...]:
    """How the C++ compiler is to compile against the torch and the Python that run. What it links to is loaded already.

    Raises:
        BuildError: the extensions are not made for this system.
    """
    if sys.platform != "linux":
        raise build.BuildError("the quick way on the host is made for Linux")
    root = Path(torch.__file__).parent
    include = root / "include"
    return (
        "-std=c++20", "-O2", "-fvisibility=hidden", "-fPIC", "-shared", "-pthread", "-Wl,-z,nodelete",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f'-DTORCH="{torch.__version__} {torch.version.git_version}"', f'-DPYTHON="{sysconfig.get_config_var("SOABI")}"',
        # not this project's code: its warnings are nobody's here
        f"-isystem{include}", f"-isystem{include / 'torch/csrc/api/include'}", f"-isystem{sysconfig.get_path('include')}",
        f"-L{root / 'lib'}", "-Wl,--no-as-needed", "-lc10", "-ltorch_cpu", "-ltorch_python", *_standard_library(),
    )  # fmt: skip


def _standard_library() -> list[str]:
    """The C++ library that torch has loaded, where the system tells. A compiler set up to link its own statically would
    put a second one into the process, whose streams do not work beside the first (c10's messages are made by streams)."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    # address, permissions, offset, device, inode, then the path, which may have spaces
    paths = re.findall(r"^(?:\S+ +){5}(/.*/libstdc\+\+\.so[^/\n]*)$", maps, re.MULTILINE)
    return [path for path in paths if Path(path).exists()][:1]


def not_loaded(*_: Any) -> None:
    """Stands for a function of an extension until that is loaded: None says that the call goes on in Python."""
    return None


def loaded(extension: Any) -> Any:
    """Let `through_python` switch the extension off from now on, and return it."""
    extension.quick(_quick)
    _loaded.append(extension)
    return extension


@contextlib.contextmanager
def through_python() -> Iterator[None]:
    """Inside, every call goes through Python: for those who watch the launches of an implementation."""
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
