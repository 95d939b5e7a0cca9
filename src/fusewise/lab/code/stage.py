"""A stage: one text that a compiler writes on the way from Python to machine code, and where its lines come from."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: A language of a stage and the suffix of its file.
SUFFIXES = {
    "asm": ".s",
    "bytecode": ".txt",
    "cpp": ".cpp",
    "hlo": ".hlo",
    "llvm": ".ll",
    "mlir": ".mlir",
    "ptx": ".ptx",
    "python": ".py",
    "sass": ".sass",
    "torchscript": ".txt",
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One text of one compiler.

    stage: its name, the same for every compiler that has it (`bytecode`, `aten`, `triton`, `ptx`, …).
    part: which piece, where a stage has several (a kernel's name, `forward` or `backward`).
    language: a key of SUFFIXES.
    target: what the text is made for: `cpu`, `sm_90`, or empty where it is made for all.
    lines: line of the text, from 1 → `file:line` of the source that it comes from.
    counts: what was counted in it: registers, load widths, tensor-core instructions, …
    """

    stage: str
    language: str
    text: str
    part: str = ""
    target: str = ""
    lines: Mapping[int, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.language not in SUFFIXES:
            raise ValueError(
                f"code: language must be one of {', '.join(SUFFIXES)}, got {self.language!r}; add it there"
            )

    def entry(self, provider: str, order: int) -> dict[str, Any]:
        """The stage as a record and an index have it."""
        return {
            "provider": provider,
            "stage": self.stage,
            "part": self.part,
            "order": order,
            "language": self.language,
            "target": self.target,
            "lines": {str(line): source for line, source in self.lines.items()},
            "counts": dict(self.counts),
        }


@functools.cache
def _roots() -> tuple[str, ...]:
    """The folders that paths are shortened by: where modules are found, and where we are. The longest first."""
    folders = {str(Path(p).resolve()) for p in sys.path if p} | {str(p) for p in sys.path if p} | {os.getcwd()}
    return tuple(sorted((f for f in folders if len(f) > 1), key=len, reverse=True))


def short(path: str) -> str:
    """`path` from the folder where Python finds it: the same on every machine."""
    # Our own first: Triton finds what another checkout of the same source compiled, with the paths of that one, and it may
    # lie below one of the folders.
    _, ours, rest = path.rpartition(os.sep + os.path.join("fusewise", "ops") + os.sep)
    if ours:
        return ours[1:] + rest
    for root in _roots():
        if path.startswith(root + os.sep):
            return path[len(root) + 1 :]
    return path


def tidy(text: str) -> str:
    """`text` with short paths and without addresses and unique ids, so that two runs can be compared line by line."""
    for root in _roots():
        text = text.replace(root + os.sep, "")
    text = re.sub(r" at 0x[0-9a-f]{6,}", "", text)
    return re.sub(r"(?<=_)[0-9a-f]{8}(_[0-9a-f]{4}){3}_[0-9a-f]{12}\b", "", text)


def foreign(path: str) -> bool:
    """Whether a short path is a compiler's own file or the lab's, not one of the code that was compiled."""
    parts = Path(path).parts
    if parts[:2] == ("fusewise", "lab"):
        return "targets" not in parts
    return not {"triton", "torch", "thunder", "jax", "tvm"}.isdisjoint(parts) or path.startswith("<")
