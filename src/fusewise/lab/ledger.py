"""The traffic ledger: the kernels that a provider launches and the bytes each reads and writes.

Each kernel is charged once for every tensor it reads and once for every tensor it writes, whatever its caches do. This
is its DRAM traffic if the working set exceeds the cache and it reads its operands once. A matrix product reads them again
for each block of the result: about how much, given a cache, is told beside. Broadcast elements count once; views and
metadata are free.
The modules in `code/` find each compiler's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fusewise.ops._common import span

# Rows of a pass and columns of a wave where they are unknown: as agrees with what cuBLAS's products read on 132 SMs.
ROWS, COLUMNS = 2048, 2048
# Bytes between two uses of a line, as shares of the cache: up to KEPT it is still there, from LOST on it is not. As measured
# (docs/measuring.md).
KEPT, LOST = 0.68, 1.05


class Product(NamedTuple):
    """The matrix products in a kernel, x times the weights, `times` over: bytes of both operands; each of the `passes`
    multiplies a group of rows of x by all weights, in so many `waves` of tiles that are computed at once."""

    x: int
    weights: int
    passes: int
    waves: int
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of a call; sizes in bytes. `note` adds what the name omits, such as a shape or the fused operators."""

    name: str
    read: int
    written: int
    note: str = ""
    product: Product | None = None

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def again(self, cache_bytes: int) -> int:
        """About how many bytes of its product's operands it reads again through a GPU's L2 of this size: the weights on each
        later pass, a group's rows of x on each later wave, as far as what has been moved since has driven them out. Lines of
        operands, which SMs of both partitions of L2 read, take up space in each."""
        if self.product is None:
            return 0
        x, weights, passes, waves, times = self.product
        others = (self.bytes - x - weights) / passes
        whole_pass = 2 * (weights + x / passes) + others
        wave = 2 * (weights / waves + x / passes) + others / waves
        size = cache_bytes * times
        return round((passes - 1) * weights * _lost(whole_pass / size) + (waves - 1) * x * _lost(wave / size))


def _lost(distance: float) -> float:
    return min(1.0, max(0.0, (distance - KEPT) / (LOST - KEPT)))


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The kernels of one provider in one group, in launch order, and the bytes that the operation must move."""

    op: str
    case: str
    dtype: str
    pass_: str
    provider: str
    kernels: tuple[Kernel, ...]
    bytes_min: int | None = None

    @property
    def bytes(self) -> int:
        return sum(kernel.bytes for kernel in self.kernels)

    @property
    def excess(self) -> float | None:
        """Bytes moved over the minimum; 1 is perfect."""
        return self.bytes / self.bytes_min if self.bytes_min else None

    def again(self, cache_bytes: int) -> int:
        """Bytes that its matrix products read again through a cache of this size; see `Kernel.again`."""
        return sum(kernel.again(cache_bytes) for kernel in self.kernels)

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "case": self.case,
            "dtype": self.dtype,
            "pass": self.pass_,
            "provider": self.provider,
            "bytes_min": self.bytes_min,
            "kernels": [
                {"name": k.name, "read": k.read, "written": k.written, "note": k.note}
                | ({} if k.product is None else {"product": k.product._asdict()})
                for k in self.kernels
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        kernels = tuple(
            Kernel(
                name=k["name"],
                read=k["read"],
                written=k["written"],
                note=k.get("note", ""),
                product=Product(**k["product"]) if "product" in k else None,
            )
            for k in data["kernels"]
        )
        return cls(
            op=data["op"], case=data["case"], dtype=data["dtype"], pass_=data["pass"], provider=data["provider"],
            kernels=kernels, bytes_min=data.get("bytes_min"),
        )  # fmt: skip


def extent(x: Tensor) -> int:
    """Bytes of the distinct elements of x: a stride-0 dimension counts once, and overlapping windows count at most the
    span they lie in."""
    count = math.prod(size if stride else min(size, 1) for size, stride in zip(x.shape, x.stride(), strict=True))
    return min(count, span(x.shape, x.stride())) * x.element_size() if count else 0


def product(x: Tensor, *weights: Tensor, rows: int = ROWS, columns: int = COLUMNS) -> Product:
    """The matrix product of x (..., M, K) and weights (..., K, N) or (N, K), all of them in one kernel that computes `rows`
    by `columns` of the result at a time, rows first."""
    m, k = x.shape[-2:]
    n = sum(weight.numel() for weight in weights) * m // max(1, x.numel())
    times = x.numel() // max(1, m * k)
    return Product(extent(x), sum(map(extent, weights)), max(1, -(-m // rows)), max(1, -(-n // columns)), max(1, times))


def merged(kernels: Sequence[Kernel]) -> list[tuple[Kernel, int]]:
    """Identical kernels (name and bytes) with their counts, in order of first occurrence."""
    found: dict[Kernel, int] = {}
    for kernel in kernels:
        found[kernel] = found.get(kernel, 0) + 1
    return list(found.items())
