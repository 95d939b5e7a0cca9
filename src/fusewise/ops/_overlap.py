"""Overlap test of strided tensors: whether they share an element. Exact for every layout in use, conservative otherwise.

`q` and `k` from one packed qkv tensor interleave in memory without sharing an element, so comparing address ranges
would reject valid calls. Two elements coincide if a sum of index differences times strides equals the distance of the
tensors; the search goes through the strides from large to small and prunes by the reach of the remaining ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ._common import fail

_MAX_STEPS = 10_000


def check_apart(op: str, written: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> None:
    """Check that written tensors do not overlap themselves, each other, or tensors that are read."""
    for name, y in written.items():
        if overlaps_itself(y):
            contract, got = "not have elements that share memory, being written to", f"strides {tuple(y.stride())}"
            fix = "give it memory of its own" if name.startswith("out") else f"call {name}.contiguous()"
            fail(op, name, contract, got, fix)
        for other, x in read.items():
            if overlaps(x, y):
                fail(op, name, f"not overlap {other}, which is read", "shared memory", f"clone {other}")
    for (name, y), (other, x) in combinations(written.items(), 2):
        if overlaps(y, x):
            fail(op, other, f"not overlap {name}, both being written to", "shared memory", f"clone {other}")


def overlaps(x: Tensor, y: Tensor) -> bool:
    """Whether x and y share memory; also True if the search exceeds its bound."""
    placed, other = _placed(x), _placed(y)
    if placed is None or other is None:
        return False
    (x_dims, x_offset), (y_dims, y_offset) = placed, other
    first, second = _address(x), _address(y)
    if first and second:
        distance = second - first
        if distance >= _extent(x, x_dims) or -distance >= _extent(y, y_dims):
            return False
    else:
        if x.untyped_storage()._cdata != y.untyped_storage()._cdata:
            return False
        distance = y_offset * y.element_size() - x_offset * x.element_size()
    # The bytes of an element are a dimension with a stride of one byte, so that tensors of different dtypes can be compared.
    steps = [(x.element_size() * stride, n) for stride, n in x_dims] + [(1, x.element_size())]
    steps += [(-y.element_size() * stride, n) for stride, n in y_dims] + [(-1, y.element_size())]
    return _reaches(distance, [(abs(s), n - 1 if s > 0 else 0, 0 if s > 0 else n - 1) for s, n in steps if s])


def overlaps_itself(x: Tensor) -> bool:
    """Whether two indices of x address one element."""
    placed = _placed(x)
    if placed is None:
        return False
    reach = 0
    for stride, n in sorted(placed[0]):
        if stride <= reach:
            # Dimensions are not nested, as in no supported layout. An exact test would need a search per pair of indices.
            return True
        reach += stride * (n - 1)
    return False


def _placed(x: Tensor) -> tuple[list[tuple[int, int]], int] | None:
    """Stride and size of every dimension of x with more than one entry, and the storage offset; None if x is empty or
    they are unknown. Symbolic sizes are replaced by their hints: comparing symbols would add guards to the graph."""
    numbers = _numbers((*x.stride(), *x.shape, x.storage_offset()))
    if numbers is None:
        return None
    *dims, offset = numbers
    strides, shape = dims[: x.dim()], dims[x.dim() :]
    return None if 0 in shape else ([(s, n) for s, n in zip(strides, shape, strict=True) if n > 1], offset)


def _numbers(values: Sequence[Any]) -> list[int] | None:
    symbols = [value for value in values if isinstance(value, torch.SymInt)]
    if not all(value.node.has_hint() for value in symbols):
        return None
    return [value.node.hint if isinstance(value, torch.SymInt) else value for value in values]


def _extent(x: Tensor, dims: list[tuple[int, int]]) -> int:
    """Bytes from the first element of x to the end of the last."""
    return x.element_size() * (1 + sum([stride * (n - 1) for stride, n in dims]))


def _address(x: Tensor) -> int:
    """The address of x; 0 for a tensor without its own memory: fake, meta, or a wrapper like DTensor."""
    return 0 if isinstance(x, torch._subclasses.FakeTensor) or x.device.type == "meta" else x.data_ptr()


def _reaches(target: int, steps: list[tuple[int, int, int]]) -> bool:
    """Is target = Σ stride·i for some −low <= i <= high? `steps` are (stride > 0, high, low)."""
    merged: dict[int, tuple[int, int]] = {}
    for stride, high, low in steps:
        h, l = merged.get(stride, (0, 0))  # noqa: E741
        merged[stride] = (h + high, l + low)
    order = sorted(merged.items(), reverse=True)
    up, down = [0], [0]
    for stride, (high, low) in reversed(order):
        up.append(up[-1] + stride * high)
        down.append(down[-1] + stride * low)
    budget = _MAX_STEPS

    def search(target: int, depth: int) -> bool:
        nonlocal budget
        budget -= 1
        if budget < 0:
            return True
        if depth == len(order):
            return target == 0
        stride, (high, low) = order[depth]
        rest_up, rest_down = up[len(order) - depth - 1], down[len(order) - depth - 1]
        first = max(-low, -((rest_up - target) // stride))
        last = min(high, (target + rest_down) // stride)
        return any(search(target - stride * i, depth + 1) for i in range(first, last + 1))

    return search(target, 0)
