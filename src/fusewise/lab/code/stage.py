"""A stage: one text that a compiler emits between Python and machine code, with source locations."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Languages of stages and their file suffixes.
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

    stage: its name, shared by all compilers that have it (`bytecode`, `aten`, `triton`, `ptx`, …). part: which piece,
    if a stage has several (a kernel's name, `forward` or `backward`). language: a key of SUFFIXES. target: what the
    text was compiled for: `cpu`, `sm_90`, or empty if independent of it. lines: line of the text, from 1 → `file:line`
    of its source. counts: registers, load widths, tensor-core instructions, …
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
        """The stage as stored in records and indexes."""
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
    """Prefixes to strip from paths: the import path and the working directory, longest first."""
    folders = {str(Path(p).resolve()) for p in sys.path if p} | {str(p) for p in sys.path if p} | {os.getcwd()}
    return tuple(sorted((f for f in folders if len(f) > 1), key=len, reverse=True))


def short(path: str) -> str:
    """`path` relative to where Python finds it: the same on every machine."""
    # Our own operators first: Triton's cache may hold kernels compiled from another checkout, with its paths, and that
    # checkout may lie below one of the roots.
    _, ours, rest = path.rpartition(os.sep + os.path.join("fusewise", "ops") + os.sep)
    if ours:
        return ours[1:] + rest
    for root in _roots():
        if path.startswith(root + os.sep):
            return path[len(root) + 1 :]
    return path


def tidy(text: str) -> str:
    """`text` with short paths and without addresses and unique ids, so that two runs can be diffed."""
    for root in _roots():
        text = text.replace(root + os.sep, "")
    text = re.sub(r" at 0x[0-9a-f]{6,}", "", text)
    return re.sub(r"(?<=_)[0-9a-f]{8}(_[0-9a-f]{4}){3}_[0-9a-f]{12}\b", "", text)


@functools.cache
def foreign(path: str) -> bool:
    """Whether a short path belongs to a compiler or the lab itself rather than to the compiled code."""
    parts = Path(path).parts
    if parts[:2] == ("fusewise", "lab"):
        return "targets" not in parts
    return not {"triton", "torch", "thunder", "jax", "tvm"}.isdisjoint(parts) or path.startswith("<")
