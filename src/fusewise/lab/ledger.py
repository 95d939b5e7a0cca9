"""The traffic ledger: the kernels that a provider launches and the bytes each reads and writes.

Each kernel is charged once for every tensor it reads and once for every tensor it writes, whatever its caches do. This
is its DRAM traffic if the working set exceeds the cache and it reads its operands once. A matrix product reads them again
for each block of the result: at least how much, given a cache, is told beside. Broadcast elements count once; views and
metadata are free.
The modules in `code/` find each compiler's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from .problem import span


class Product(NamedTuple):
    """A matrix product of a kernel: its FLOPs, the bytes of its operands, and those of one of their elements."""

    flops: int
    read: int
    itemsize: int

    def again(self, cache_bytes: int) -> int:
        """Bytes of operands that it reads again: all that it reads are at least FLOPs / √S elements through a cache of S
        (Smith and others, 2019, arXiv:1702.02017), which is taken to be half of the cache's: lines read from both partitions
        of a GPU's L2 are in each."""
        elements = max(1.0, cache_bytes / 2 / self.itemsize)
        return max(0, round(self.flops / math.sqrt(elements) * self.itemsize) - self.read)


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
        """Bytes that its matrix products read again through a cache of this size; see `Product.again`."""
        return sum(kernel.product.again(cache_bytes) for kernel in self.kernels if kernel.product is not None)

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


def product(x: Tensor, *weights: Tensor) -> Product:
    """The matrix product of x (..., M, K) and weights (..., K, N) or (N, K), all of them in one kernel."""
    read = sum(map(extent, (x, *weights)))
    columns = sum(weight.numel() for weight in weights) // max(1, x[..., :1, :].numel())
    return Product(2 * x.numel() * columns, read, x.element_size())


def merged(kernels: Sequence[Kernel]) -> list[tuple[Kernel, int]]:
    """Identical kernels (name and bytes) with their counts, in order of first occurrence."""
    found: dict[Kernel, int] = {}
    for kernel in kernels:
        found[kernel] = found.get(kernel, 0) + 1
    return list(found.items())
