"""A simulator in Python that runs the source of the Gluon device functions on a CPU.

Each warp group is a thread. Asynchronous operations complete as late as their barrier or wait allows ("late"), immediately
("early"), or at random ("mixed"). A block overwritten while a wgmma still reads it, a missing wait for a store or a wait
for the wrong barrier phase gives wrong numbers; a wrong arrival or byte count deadlocks, which is reported as an error
after a timeout. Layouts are not modeled, as they only determine where values are stored.
"""

from __future__ import annotations

import operator
import random
import threading
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language

from fusewise.ops.gated_linear import _gluon_gate, _gluon_kernel, _gluon_stream

PATIENCE = 20.0  # seconds


def raw(x: Any) -> Any:
    return x.value if isinstance(x, Value) else x


class Value:
    """A tensor or scalar of the program."""

    def __init__(self, value: Any) -> None:
        self.value: Tensor = torch.as_tensor(raw(value))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    type = SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype) -> Value:
        return Value(self.value.to(dtype))

    def reshape(self, shape: tuple[int, ...]) -> Value:
        return Value(self.value.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Value:
        return Value(self.value.permute(order))

    def split(self) -> tuple[Value, Value]:
        return Value(self.value[..., 0]), Value(self.value[..., 1])

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return int(self.value)


def _binary(name: str) -> Callable[[Any, Any], Value]:
    function = getattr(operator, name)
    return lambda self, other: Value(function(self.value, raw(other)))


def _reflected(name: str) -> Callable[[Any, Any], Value]:
    function = getattr(operator, name)
    return lambda self, other: Value(function(raw(other), self.value))


for _name in ("add", "sub", "mul", "floordiv", "mod", "and_", "or_", "xor", "lt", "le", "gt", "ge", "eq"):
    _method = _name.rstrip("_")
    setattr(Value, f"__{_method}__", _binary(_name))
    if _name in ("add", "sub", "mul", "and_", "xor"):
        setattr(Value, f"__r{_method}__", _reflected(_name))


class Pointer:
    """One or more addresses in a flat tensor."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, torch.as_tensor(offset)
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + raw(other))

    def load(self, mask: Any = True, other: float = 0, volatile: bool = False) -> Value:
        inside = torch.as_tensor(raw(mask)).expand(self.offset.shape)
        found = self.memory[torch.where(inside, self.offset, 0)]  # raises for an out-of-bounds address
        return Value(torch.where(inside, found, torch.tensor(other, dtype=found.dtype)))

    def store(self, value: Any, mask: Any) -> None:
        inside = raw(mask).expand(self.offset.shape)
        self.memory[self.offset[inside]] = raw(value).to(self.memory.dtype).expand(self.offset.shape)[inside]

    def atomic_add(self, value: int, sem: str) -> None:
        self.memory[self.offset] += value


def pointer(x: Tensor | None) -> Pointer | None:
    """A pointer to the first element of x, bounded by its whole storage."""
    if x is None:
        return None
    memory = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return Pointer(memory, x.storage_offset())


class Map:
    """A TMA descriptor: out-of-bounds reads give zeros, out-of-bounds writes are dropped."""

    def __init__(self, x: Tensor, block: tuple[int, int]) -> None:
        self.x, self.block, self.dtype, self.layout = x, block, x.dtype, None

    def _box(self, coordinates: list[Any]) -> tuple[slice, slice, int, int]:
        row, column = (int(c) for c in map(raw, coordinates))
        rows, columns = (
            max(0, min(n, size - at)) for n, size, at in zip(self.block, self.x.shape, (row, column), strict=True)
        )
        return slice(row, row + rows), slice(column, column + columns), rows, columns

    def read(self, coordinates: list[Any], to: Tensor) -> None:
        rows, columns, m, n = self._box(coordinates)
        assert tuple(to.shape) == tuple(self.block)
        to.zero_()
        to[:m, :n] = self.x[rows, columns]

    def write(self, coordinates: list[Any], of: Tensor) -> None:
        rows, columns, m, n = self._box(coordinates)
        assert tuple(of.shape) == tuple(self.block)
        self.x[rows, columns] = of[:m, :n]


class Shared:
    """Shared memory or a slice of it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.shape, self.dtype = memory, tuple(memory.shape), memory.dtype

    def index(self, i: Any) -> Shared:
        return Shared(self.memory[int(raw(i))])

    def slice(self, start: Any, length: int, dim: int) -> Shared:
        return Shared(self.memory.narrow(dim, int(raw(start)), length))

    def permute(self, order: tuple[int, int]) -> Shared:
        return Shared(self.memory.permute(order))

    def load(self, layout: Any) -> Value:
        return Value(self.memory.clone())

    def store(self, value: Value) -> None:
        assert value.value.dtype == self.dtype and value.shape == self.shape
        self.memory.copy_(value.value)


class Barrier:
    """An mbarrier: a phase completes after `count` arrivals and all expected bytes."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0
        self.loads: list[Callable[[], None]] = []  # in flight

    def settle(self) -> None:
        assert self.missing >= 0, "more arrived than the barrier counts"
        if self.count and self.missing == 0 and self.bytes == 0:
            self.phase += 1
            self.missing = self.count


class Barriers:
    def __init__(self, n: int) -> None:
        self.barriers = [Barrier() for _ in range(n)]

    def index(self, i: Any) -> Barrier:
        return self.barriers[int(raw(i))]


class Accumulator(Value):
    """The accumulator of products that may still be pending."""


class Machine:
    """One program of a launch."""

    def __init__(self, program: int, programs: int, timing: str, seed: int = 0) -> None:
        self.program, self.programs, self.timing = program, programs, timing
        self.chance = random.Random(seed)
        self.changed = threading.Condition()
        self.mine = threading.local()  # this thread's pending operations
        self.errors: list[BaseException] = []
        self.namespace = self._namespace()

    def late(self) -> bool:
        return self.timing == "late" or (self.timing == "mixed" and self.chance.random() < 0.5)

    # mbarrier
    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count

    def arrive(self, barrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
        if raw(pred):
            with self.changed:
                barrier.missing -= count
                barrier.settle()
                self.changed.notify_all()

    def expect(self, barrier: Barrier, size: int, pred: Any = True) -> None:
        if raw(pred):
            with self.changed:
                barrier.bytes += size
                barrier.missing -= 1
                barrier.settle()
                self.changed.notify_all()

    def wait(self, barrier: Barrier, parity: Any) -> None:
        with self.changed:
            while barrier.phase & 1 == int(raw(parity)):
                if barrier.loads:
                    barrier.loads.pop(self.chance.randrange(len(barrier.loads)))()
                elif not self.changed.wait(PATIENCE) or self.errors:
                    raise RuntimeError("deadlock")

    # tma
    def load(self, of: Map, coordinates: list[Any], barrier: Barrier, to: Shared, pred: Any = True) -> None:
        if not raw(pred):
            return
        coordinates = [int(raw(c)) for c in coordinates]

        def arrive() -> None:
            of.read(coordinates, to.memory)
            barrier.bytes -= to.memory.numel() * to.memory.element_size()
            barrier.settle()
            self.changed.notify_all()

        with self.changed:
            if self.late():
                barrier.loads.append(arrive)
                self.changed.notify_all()
            else:
                arrive()

    def store(self, to: Map, coordinates: list[Any], of: Shared) -> None:
        coordinates = [int(raw(c)) for c in coordinates]
        pending = self._pending()
        pending.append(lambda: to.write(coordinates, of.memory))
        if not self.late():
            self.store_wait(0)

    def store_wait(self, pendings: int) -> None:
        pending = self._pending()
        while len(pending) > pendings:
            with self.changed:
                pending.pop(0)()

    def _pending(self) -> list[Callable[[], None]]:
        if not hasattr(self.mine, "pending"):
            self.mine.pending = []
        pending: list[Callable[[], None]] = self.mine.pending
        return pending

    # wgmma
    def multiply(self, a: Shared, b: Shared, acc: Accumulator, *, is_async: bool, use_acc: Any) -> Accumulator:
        def product() -> None:
            made = a.memory.float() @ b.memory.float()
            acc.value = acc.value + made if raw(use_acc) else made

        self._products().append(product)
        if not self.late():
            self.multiply_wait(0, (acc,))
        return acc

    def multiply_wait(self, outstanding: int, deps: tuple[Accumulator, ...]) -> Any:
        products = self._products()
        while len(products) > outstanding:
            with self.changed:
                products.pop(0)()
        return deps if len(deps) > 1 else deps[0]

    def _products(self) -> list[Callable[[], None]]:
        if not hasattr(self.mine, "products"):
            self.mine.products = []
        products: list[Callable[[], None]] = self.mine.products
        return products

    # the program
    def specialize(self, functions: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
        def run(function: Any, arguments: tuple[Any, ...]) -> None:
            try:
                function(*arguments)
                assert not self._pending(), "a store was not waited for"
            except BaseException as error:
                with self.changed:
                    self.errors.append(error)
                    self.changed.notify_all()

        threads = [threading.Thread(target=run, args=pair) for pair in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _namespace(self) -> dict[str, Any]:
        def range_(*bounds: Any) -> Iterator[Value]:
            return (Value(i) for i in range(*(int(raw(b)) for b in bounds)))

        def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
            return Barriers(shape[0]) if dtype == torch.int64 else Shared(torch.full(shape, torch.nan, dtype=dtype))

        gl = SimpleNamespace(
            float32=torch.float32, int32=torch.int32, int64=torch.int64, static_range=range, to_tensor=Value,
            program_id=lambda _: Value(self.program), num_programs=lambda _: self.programs, num_warps=lambda: 4,
            cdiv=lambda a, b: -(-raw(a) // raw(b)), minimum=lambda a, b: Value(min(int(raw(a)), int(raw(b)))),
            maximum=lambda a, b: Value(max(int(raw(a)), int(raw(b)))), atomic_add=Pointer.atomic_add,
            where=lambda c, a, b: Value(torch.where(raw(c), torch.as_tensor(raw(a)), torch.as_tensor(raw(b)))),
            zeros=lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=dtype)),
            arange=lambda a, b, layout: Value(torch.arange(a, b)), expand_dims=lambda x, dim: Value(x.value.unsqueeze(dim)),
            sum=lambda x, dim: Value(x.value.sum(dim)), abs=lambda x: Value(x.value.abs()),
            convert_layout=lambda x, layout, assert_trivial=False: x,
            load=Pointer.load, store=lambda p, value, mask: p.store(value, mask),
            allocate_shared_memory=allocate, warp_specialize=self.specialize,
        )  # fmt: skip
        for name in vars(language):
            if name.endswith("Layout"):
                setattr(gl, name, lambda *_: None)
        namespace: dict[str, Any] = {
            "gl": gl, "range": range_, "SUMS": None, "PIECE": None,
            "EARLY": _gluon_kernel.EARLY.value, "POLLS": _gluon_kernel.POLLS.value, "tma_load": self.load, "_tma_store": self.store, "fence_async_shared": lambda: None,
            "_barrier": lambda: None,
            "tma": SimpleNamespace(store_wait=self.store_wait),
            "mbarrier": SimpleNamespace(
                init=self.init, arrive=self.arrive, expect=self.expect, wait=self.wait, MBarrierLayout=lambda: None
            ),
            "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.multiply_wait,
            "warpgroup_mma_init": lambda x: x if isinstance(x, Accumulator) else Accumulator(x),
            "_exp2": lambda x: Value(torch.exp2(x.value)), "_reciprocal": lambda x: Value(1 / x.value),
        }  # fmt: skip
        device_code = (_gluon_gate, _gluon_kernel, _gluon_stream)
        for name, value in (item for module in device_code for item in vars(module).items()):
            function = getattr(value, "fn", None)
            if isinstance(function, types.FunctionType) and name not in namespace:
                namespace[name] = types.FunctionType(function.__code__, namespace, name, function.__defaults__)
        return namespace


def launch(kernel: str, grid: int, arguments: dict[str, Any], timing: str = "early") -> None:
    """Run all programs of a launch with the kernel's arguments."""

    def operand(name: str, x: Any) -> Any:
        if isinstance(x, Tensor):
            return pointer(x)
        if hasattr(x, "base"):
            return Map(x.base, tuple(x.block_shape))
        return Value(x) if name in ("M", "F", "D", "R", "rows") else x

    given = {name: operand(name, x) for name, x in arguments.items()}
    for program in range(grid):
        Machine(program, grid, timing, program).namespace[kernel](**given)
