"""ATen: the operators that a call dispatches, and the bytes that each reads and writes.

This is what eager PyTorch executes, and TorchScript where it fuses nothing. fusewise's own operators are expanded into
the operators they dispatch in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import ledger
from ..modes import Mode
from ..reads import storage
from .stage import Stage, foreign, short

#: Operators that overwrite their first argument without reading it.
OVERWRITE = {"copy_", "fill_", "zero_", "normal_", "uniform_", "set_", "bernoulli_", "random_", "exponential_"}
#: Operators that read no more of their first argument than they return.
LOOK_UP = {"index", "index_select", "gather", "embedding", "take"}
#: Operators that read no more of their first argument than a row for each index in their second.
BAGS = {"_embedding_bag", "_embedding_bag_forward_only"}
#: Matrix products: the position of the first of two matrices among their arguments.
PRODUCTS = {"mm": 0, "bmm": 0, "_int_mm": 0, "addmm": 1, "baddbmm": 1}
#: Operators that use only the shape and dtype of their first argument.
ALIKE = {
    "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones", "new_full",
}  # fmt: skip
#: Operators that write in place at given indices; ADDING: those that also read what is there.
INDEXED = {
    "index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "scatter_reduce_", "index_copy_", "index_add_", "index_fill_",
}  # fmt: skip
ADDING = {"scatter_add_", "scatter_reduce_", "index_add_"}
#: Operators that autograd calls, under a dispatch mode only, on zeros that it has just made; elsewhere it calls their
#: in-place forms, which make no copy.
ON_ZEROS = {"index_put", "scatter", "scatter_add", "index_add"}
ZEROS = {"zeros", "new_zeros"}
#: Operators that touch no element: they allocate, or change or compare only metadata.
RESERVE = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided",
    "detach_", "squeeze_", "unsqueeze_", "transpose_", "t_", "resize_", "set_", "is_same_size", "_has_same_storage_numel",
}  # fmt: skip
SHORT_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
}  # fmt: skip


def brief(x: Any) -> str:
    """An argument as shown in a list of operators: `bf16[4, 8]`, a number, a list of them."""
    if isinstance(x, Tensor):
        return f"{SHORT_DTYPES.get(x.dtype, str(x.dtype))}{list(x.shape)}"
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join(map(brief, x)) + "]"
    return repr(x)


class Operators(Mode):
    """Records the operators that run while it is active, and charges each with its bytes."""

    def __init__(self, within: str = "", used: Mapping[int, int] | None = None, compiled: bool = False) -> None:
        super().__init__(compiled)
        self.within = within  # namespace of operators to expand
        self.used = used or {}  # tensor address -> most bytes of it that a call can need
        self.zeros = 0  # storage of the zeros made last
        self.kernels: list[ledger.Kernel] = []
        self.text: list[str] = []
        self.lines: dict[int, str] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.within and func.namespace == self.within:
            with self:  # call its kernel directly: the dispatcher would lead back here
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        result = func(*args, **kwargs)
        self.text.append(f"{brief_result(result)} = {func}({', '.join(map(brief, (*args, *kwargs.values())))})")
        if (place := _place()) is not None:
            self.lines[len(self.text)] = place
        if (kernel := self.charge(func, args, kwargs, result)) is not None:
            self.kernels.append(kernel)
        return result

    def charge(self, func: Any, args: Any, kwargs: Any, result: Any) -> ledger.Kernel | None:
        """Bytes of one operator; None for a view or a pure allocation."""
        if not isinstance(func, torch._ops.OpOverload):  # a higher-order operator has no schema
            arguments, results = (
                [x for x in pytree.tree_leaves(some) if isinstance(x, Tensor)] for some in ((args, kwargs), result)
            )
            return ledger.Kernel(name=str(func), read=self._bytes(arguments), written=self._bytes(results))
        name = func._schema.name.partition("::")[2]
        if name in RESERVE:
            return None
        formal = func._schema.arguments
        actual = [*args, *(kwargs.get(a.name) for a in formal[len(args) :])]
        mutated: list[Tensor] = []
        inputs: list[Tensor] = []
        for argument, value in zip(formal, actual, strict=False):
            tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
            written = argument.alias_info is not None and argument.alias_info.is_write
            mutated += tensors if written else []
            inputs += [] if written and (name in OVERWRITE or argument.is_out) else tensors
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        sources = {storage(x) for x in [*inputs, *mutated]}
        fresh = [x for x in outputs if storage(x) not in sources]
        if not mutated and not fresh and outputs:
            return None
        if name in ZEROS:
            self.zeros = storage(result)
        elif name in ON_ZEROS and storage(inputs[0]) == self.zeros and _in_autograd():
            name, mutated, fresh = f"{name}_", inputs[:1], []
        written_bytes = self._bytes([*fresh, *mutated])
        read_bytes = self._bytes(inputs)
        if name in LOOK_UP and inputs:
            read_bytes -= max(0, self._bytes(inputs[:1]) - written_bytes)
        if name in BAGS:
            table, index = actual[:2]
            rows = index.numel() * table.shape[1] * table.element_size()
            read_bytes -= max(0, self._bytes([table]) - rows)
        if name in ALIKE:
            read_bytes = 0
        if name in INDEXED:  # only the indexed elements are touched
            read_bytes -= self._bytes(mutated)
            written_bytes = min(written_bytes, _named(name, actual) * mutated[0].element_size())
            adds = name in ADDING or (name in ("index_put_", "_index_put_impl_") and len(actual) > 3 and actual[3])
            read_bytes += written_bytes if adds else 0
        note = ", ".join(map(brief, inputs)) + " → " + ", ".join(map(brief, outputs))
        product = multiplied(name, actual)
        return ledger.Kernel(name=str(func), read=read_bytes, written=written_bytes, note=note, product=product)

    def _bytes(self, tensors: Sequence[Tensor]) -> int:
        """Bytes of the distinct tensors among these."""
        distinct = {(storage(x), x.storage_offset(), x.shape, x.stride()): x for x in tensors}
        return sum(min(ledger.extent(x), self.used.get(_address(x), 2**63)) for x in distinct.values())

    def stage(self) -> Stage:
        """The operators as text, one per line."""
        text = "".join(f"{line}\n" for line in self.text)
        counts = {"operators": len(self.text), "kernels": len(self.kernels)}
        return Stage(stage="aten", language="python", text=text, lines=self.lines, counts=counts)


def multiplied(name: str, arguments: Sequence[Any]) -> ledger.Product | None:
    """The product that an operator computes, if that is what it does and both matrices are known."""
    at = PRODUCTS.get(name)
    factors = [] if at is None else [x for x in arguments[at : at + 2] if isinstance(x, Tensor)]
    return ledger.product(*factors) if len(factors) == 2 else None


def _named(name: str, arguments: Sequence[Any]) -> int:
    """Elements that an operator of INDEXED writes."""
    if "index_put" in name:
        return int(torch.ops.aten.index.Tensor(*arguments[:2]).numel())
    whole, dim, index = arguments[:3]
    if name.startswith("scatter"):
        return int(index.numel())
    return int(whole.numel() // max(1, whole.shape[dim] if whole.ndim else 1) * index.numel())


def _in_autograd() -> bool:
    """Whether autograd is at a formula of its own, not at a backward written in Python."""
    node = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)


def brief_result(result: Any) -> str:
    leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    return ", ".join(map(brief, leaves)) or "()"


def _address(x: Tensor) -> int:
    return 0 if isinstance(x, torch._subclasses.FakeTensor) else x.data_ptr()


def _place() -> str | None:
    """The innermost stack frame that belongs neither to a library nor to the lab's own code."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = short(frame.f_code.co_filename)
        if not foreign(path) and not path.endswith("runpy.py"):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return None
