"""The bytes that operators read of each memory: the union over all operators, every element once.

Most operators read their arguments whole. Those in PARTS and WINDOWS read elements of one argument that are known from
the others: a lookup reads the rows at its indices, once however often an index repeats, and a strided convolution skips
elements. A view reads nothing itself; reading it reads its elements. What is read in parts is marked in a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .ledger import extent

#: Most elements in a mask. Of a larger memory that is read in parts, the largest read of one operator counts.
MOST_ELEMENTS = 2**32


@dataclass(frozen=True)
class Call:
    """One call of an operator: its arguments and the resulting tensors."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: Sequence[Tensor]

    def get(self, place: int, name: str, default: Any = None) -> Any:
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


def storage(x: Tensor) -> int:
    """Identity of the storage that all views of a tensor share."""
    return int(x.untyped_storage()._cdata)


class Reads:
    """What has been read so far, by storage."""

    def __init__(self) -> None:
        self.largest: dict[int, int] = {}  # most bytes in one read
        self.masks: dict[tuple[int, int], Tensor] = {}  # elements read, by storage and bytes per element
        self.seen: set[tuple[Any, ...]] = set()

    def add(self, x: Tensor, name: str = "", call: Call | None = None) -> None:
        """The operator reads x whole or, if it is given with its call, as much as it reads of its argument for parts."""
        if call is not None and call.outputs and name in WINDOWS:
            places = _places(x, call.outputs[0], *WINDOWS[name](call))
            if any(len(some) < size for some, size in zip(places, x.shape[x.ndim - len(places) :], strict=True)):
                return self._part(x, lambda mask: _put(mask, _grid(x.ndim, places)))
        if call is not None and name in PARTS:
            return self._part(x, lambda mask: PARTS[name][1](mask, call))
        key = (storage(x), x.dtype, x.storage_offset(), x.shape, x.stride())
        if key not in self.seen:
            self.seen.add(key)
            self._whole(x)
        return None

    def _whole(self, x: Tensor) -> None:
        of, size = storage(x), extent(x)
        self.largest[of] = max(self.largest.get(of, 0), size)
        if (mask := self._mask(x)) is not None:
            sizes = [n if stride else min(n, 1) for n, stride in zip(x.shape, x.stride(), strict=True)]
            mask.as_strided(sizes, x.stride(), x.storage_offset()).fill_(True)

    def _part(self, x: Tensor, mark: Callable[[Tensor], Any]) -> None:
        """Those elements of x that `mark` sets in a mask of its shape; none where it cannot, as in repeated elements."""
        self.largest.setdefault(storage(x), 0)
        if 0 in x.stride() or (mask := self._mask(x)) is None:
            return
        try:
            mark(mask.as_strided(x.shape, x.stride(), x.storage_offset()))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # arguments that `mark` does not know: less is counted
            return

    def _mask(self, x: Tensor) -> Tensor | None:
        of, size = storage(x), x.untyped_storage().nbytes()
        if self.largest.get(of) == size or size // x.element_size() > MOST_ELEMENTS:
            return None
        key = (of, x.element_size())
        if key not in self.masks:
            with torch.inference_mode(False):
                self.masks[key] = torch.zeros(size // x.element_size(), dtype=torch.bool, device=x.device)
        return self.masks[key]

    def bytes(self) -> dict[int, int]:
        """Bytes read, by storage; of a storage read in elements of several sizes, those of the size that has most."""
        found = dict(self.largest)
        for (of, size), mask in self.masks.items():
            found[of] = max(found[of], size * int(mask.count_nonzero()))
        return found


def _put(mask: Tensor, indices: Sequence[Tensor | None]) -> None:
    torch.ops.aten.index_put_(mask, indices, torch.ones((), dtype=torch.bool, device=mask.device))


def _labelled(mask: Tensor, call: Call) -> None:
    """The score at each label that is not to be ignored."""
    labels, ignored = call.args[1], call.args[4]
    where = (labels != ignored).nonzero(as_tuple=True)
    if mask.ndim == 1:
        _put(mask, [labels[labels != ignored]])
    else:
        _put(mask.movedim(1, -1), [*where, labels[where]])


def _triangle(mask: Tensor, upper: bool, diagonal: int = 0) -> None:
    square = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device)
    mask.logical_or_(square.triu(diagonal) if upper else square.tril(diagonal))


def _sampled(mask: Tensor, call: Call) -> None:
    """As many elements as the result has: every result reads one of its own, or all are read."""
    mask.view(-1)[: call.outputs[0].numel()].fill_(True)


#: Operators that read elements of one argument known from the others: the position of that argument, and what marks the
#: elements. Searches and samples at given points may read as little as nothing.
PARTS: dict[str, tuple[int, Callable[[Tensor, Call], Any]]] = {
    "embedding": (0, lambda mask, call: mask.index_fill_(0, call.args[1].flatten().long(), True)),
    "index_select": (0, lambda mask, call: mask.index_fill_(call.args[1], call.args[2].long(), True)),
    "gather": (0, lambda mask, call: mask.scatter_(call.args[1], call.args[2], True)),
    "take": (0, lambda mask, call: mask.put_(call.args[1], torch.ones_like(call.args[1], dtype=torch.bool))),
    "index": (0, lambda mask, call: _put(mask, call.args[1])),
    "masked_select": (0, lambda mask, call: mask.masked_fill_(call.args[1], True)),
    "nll_loss_forward": (0, _labelled),
    "nll_loss2d_forward": (0, _labelled),
    "trace": (0, lambda mask, call: mask.diagonal().fill_(True)),
    "tril": (0, lambda mask, call: _triangle(mask, False, *call.args[1:])),
    "triu": (0, lambda mask, call: _triangle(mask, True, *call.args[1:])),
    "linalg_cholesky_ex": (0, lambda mask, call: _triangle(mask, call.get(1, "upper", False))),
    "_linalg_eigh": (0, lambda mask, call: _triangle(mask, call.get(1, "UPLO", "L").upper() == "U")),
    "linalg_solve_triangular": (0, lambda mask, call: _triangle(mask, call.kwargs["upper"])),
    "cholesky_solve": (1, lambda mask, call: _triangle(mask, call.get(2, "upper", False))),
    "cholesky_inverse": (0, lambda mask, call: _triangle(mask, call.get(1, "upper", False))),
}
PARTS |= dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only", "embedding_renorm_"), PARTS["embedding"])
PARTS |= {
    f"upsample_{kind}": (0, _sampled) for kind in ("nearest1d", "nearest2d", "nearest3d", "bilinear2d", "linear1d")
}
PARTS |= dict.fromkeys(
    ("grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler", "searchsorted"), (0, lambda mask, call: None)
)
PARTS["bucketize"] = (1, lambda mask, call: None)


def _convolution(call: Call) -> tuple[Sequence[int], Any, Any, Any]:
    _, weight, _, strides, paddings, dilations, transposed = call.args[:7]
    return weight.shape[2:] if not transposed else (), strides, paddings, dilations


def _pool(dims: int, dilated: bool) -> Callable[[Call], tuple[Sequence[int], Any, Any, Any]]:
    def pool(call: Call) -> tuple[Sequence[int], Any, Any, Any]:
        windows = [_at(call.args[1], i) for i in range(dims)]
        dilations = call.get(4, "dilation", 1) if dilated else 1
        return windows, call.get(2, "stride") or windows, call.get(3, "padding", 0), dilations

    return pool


#: Operators that read what is under a window that moves over the last dimensions of their first argument: its sizes,
#: strides, paddings and dilations.
WINDOWS: dict[str, Callable[[Call], tuple[Sequence[int], Any, Any, Any]]] = {
    "convolution": _convolution,
    "avg_pool2d": _pool(2, False),
    "avg_pool3d": _pool(3, False),
    "max_pool1d": _pool(1, True),
    "max_pool2d_with_indices": _pool(2, True),
    "max_pool3d_with_indices": _pool(3, True),
}


def _at(some: Any, i: int) -> int:
    return int(some) if isinstance(some, int) else int(some[i] if len(some) > 1 else some[0])


def _places(
    x: Tensor, output: Tensor, windows: Sequence[int], strides: Any, paddings: Any, dilations: Any
) -> list[Tensor]:
    """The indices under the window in each of the dimensions over which it moves."""
    found = []
    for i, window in enumerate(windows):
        size, count = x.shape[i - len(windows)], output.shape[i - len(windows)]
        begins = torch.arange(count, device=x.device) * _at(strides, i) - _at(paddings, i)
        places = (begins[:, None] + torch.arange(window, device=x.device) * _at(dilations, i)).unique()
        found.append(places[(places >= 0) & (places < size)])
    return found


def _grid(dims: int, places: Sequence[Tensor]) -> list[Tensor | None]:
    """The indices in the last dimensions, all with all, as indices of a tensor."""
    last = [some.view(-1, *[1] * (len(places) - 1 - i)) for i, some in enumerate(places)]
    return [*[None] * (dims - len(places)), *last]


def position(name: str) -> int | None:
    """The position of the argument that the operator may read in part; None if it reads all whole."""
    return 0 if name in WINDOWS else PARTS[name][0] if name in PARTS else None
