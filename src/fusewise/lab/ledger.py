"""The traffic ledger: which kernels a provider starts, and the bytes that each reads and writes.

A kernel is charged each tensor that it reads once and each that it writes once, whatever caches do within it: the bytes
that must cross the memory when the working set exceeds the cache. An element that a broadcast repeats counts once; views
and metadata cost nothing. How a compiler's kernels become known is its own file's business (`code/`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .problem import span


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of a call. Bytes; `note` says what the name does not: a shape, what was fused."""

    name: str
    read: int
    written: int
    note: str = ""

    @property
    def bytes(self) -> int:
        return self.read + self.written


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The kernels of one provider in one group, in the order in which they run, against what the mathematics needs."""

    op: str
    case: str
    dtype: str
    pass_: str
    provider: str
    kernels: tuple[Kernel, ...]
    bytes_min: int | None = None
    method: str = ""  # where the bytes were read from

    @property
    def bytes(self) -> int:
        return sum(kernel.bytes for kernel in self.kernels)

    @property
    def excess(self) -> float | None:
        """Bytes moved for each byte that must be; 1 is perfect."""
        return self.bytes / self.bytes_min if self.bytes_min else None

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "case": self.case,
            "dtype": self.dtype,
            "pass": self.pass_,
            "provider": self.provider,
            "method": self.method,
            "bytes_min": self.bytes_min,
            "kernels": [{"name": k.name, "read": k.read, "written": k.written, "note": k.note} for k in self.kernels],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        kernels = tuple(
            Kernel(name=k["name"], read=k["read"], written=k["written"], note=k.get("note", ""))
            for k in data["kernels"]
        )
        return cls(
            op=data["op"], case=data["case"], dtype=data["dtype"], pass_=data["pass"], provider=data["provider"],
            kernels=kernels, bytes_min=data.get("bytes_min"), method=data.get("method", ""),
        )  # fmt: skip


def extent(x: Tensor) -> int:
    """Bytes of the distinct elements of x: a dimension of stride 0 counts once, and windows that overlap no more than what
    they lie in."""
    count = math.prod(size if stride else min(size, 1) for size, stride in zip(x.shape, x.stride(), strict=True))
    return min(count, span(x.shape, x.stride())) * x.element_size() if count else 0


def merged(kernels: Sequence[Kernel]) -> list[tuple[Kernel, int]]:
    """Kernels of the same name and bytes, and how often they occur, the first occurrence's place kept."""
    found: dict[Kernel, int] = {}
    for kernel in kernels:
        found[kernel] = found.get(kernel, 0) + 1
    return list(found.items())
