"""Do two strided tensors share an element? Exact for every layout in use, conservative beyond.

`q` and `k` taken from one packed qkv tensor interleave in memory without sharing an element, so a test of address
ranges would reject what is right. Two elements coincide when a sum of index differences times strides equals the
distance of the tensors; the search walks the strides from large to small and prunes by what the rest can reach.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_STEPS = 10_000


def overlaps(x: Tensor, y: Tensor) -> bool:
    """Whether x and y share memory; True as well if the search grows past its bound."""
    if x.numel() == 0 or y.numel() == 0:
        return False
    first, second = _address(x), _address(y)
    if first and second:
        distance = second - first
        if distance >= _extent(x) or -distance >= _extent(y):
            return False
    else:
        if x.untyped_storage()._cdata != y.untyped_storage()._cdata:
            return False
        distance = int(y.storage_offset()) * y.element_size() - int(x.storage_offset()) * x.element_size()
    # An element's bytes: a dimension of stride one byte, so that tensors of different dtypes can be compared, too.
    steps = [(x.element_size() * stride, n) for stride, n in zip(x.stride(), x.shape, strict=True)] + [
        (1, x.element_size())
    ]
    steps += [(-y.element_size() * stride, n) for stride, n in zip(y.stride(), y.shape, strict=True)] + [
        (-1, y.element_size())
    ]
    return _reaches(
        distance, [(abs(s), (n - 1) if s > 0 else 0, 0 if s > 0 else (n - 1)) for s, n in steps if s and n > 1]
    )


def overlaps_itself(x: Tensor) -> bool:
    """Whether two indices of x address one element."""
    if x.numel() == 0:
        return False
    dims = sorted((stride, n) for stride, n in zip(x.stride(), x.shape, strict=True) if n > 1)
    reach = 0
    for stride, n in dims:
        if stride <= reach:
            # Not nested: an exact test would be a search for each pair of indices; no layout of the contract is so.
            return True
        reach += stride * (n - 1)
    return False


def _extent(x: Tensor) -> int:
    """Bytes from the first of x's elements to the end of the last."""
    return x.element_size() * (1 + sum([stride * (n - 1) for stride, n in zip(x.stride(), x.shape, strict=True)]))


def _address(x: Tensor) -> int:
    """Where x begins; 0 for a tensor without memory of its own, fake, meta or around others as DTensor is."""
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
