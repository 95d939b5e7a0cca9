"""Rows that are not aligned to 16 bytes: the copy to aligned rows, and matmuls that only get aligned ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fusewise._shared import host
from fusewise.lab.memory import growth
from fusewise.lab.truth import errors
from fusewise.ops.gated_linear import _autograd, _chunks, _op, _products, gated_linear, gated_mlp
from fusewise.ops.gated_linear._problem import SAVES, stride_unit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.interpreter] if INTERPRETER else []
NAMES = ["triton"] if INTERPRETER else list(_op.IMPLEMENTATIONS)
IMPLS = [name for name in NAMES if _op.unavailable(name, DEVICE, torch.bfloat16) is None]


@pytest.fixture(autouse=INTERPRETER)
def _copies_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call on a CPU asks for it."""
    monkeypatch.setattr(_products, "DEVICES", (*_products.DEVICES, DEVICE))


def within(rows: int, columns: int, stride: int, start: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random memory, and a matrix view of it."""
    memory = torch.randn(start + rows * stride + columns).to(DEVICE, dtype)
    return memory, memory.as_strided((rows, columns), (stride, 1), start)


# (rows, columns) of source and target, both row strides, both storage offsets.
COPIES = [
    ((9, 1030), (9, 1030), (1030, 1040), (0, 0)),
    ((20, 81), (20, 88), (81, 128), (1, 0)),
    ((3, 88), (3, 81), (128, 81), (0, 5)),
    ((5, 24), (8, 24), (31, 24), (3, 8)),
    ((8, 8), (5, 3), (9, 3), (0, 1)),
    ((300, 1), (300, 1), (3, 1), (0, 0)),
    ((1, 1), (17, 520), (1, 521), (7, 1)),
    ((4, 72), (6, 80), (0, 80), (2, 0)),  # one expanded row
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("size", "to_size", "strides", "starts"), COPIES, ids=str)
def test_copies_as_far_as_both_go_and_fills_with_zeros(
    size: tuple[int, int],
    to_size: tuple[int, int],
    strides: tuple[int, int],
    starts: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    _, x = within(*size, strides[0], starts[0], dtype)
    memory, to = within(*to_size, strides[1], starts[1], dtype)
    expected = memory.clone()
    part = expected.as_strided(to.shape, to.stride(), starts[1])
    part.zero_()
    rows, columns = map(min, size, to_size)
    part[:rows, :columns] = x[:rows, :columns]
    _products.op_copy_(x, to)
    assert torch.equal(memory, expected)  # nothing else is written


def test_offsets_beyond_int32() -> None:
    """A row 2³¹ elements after the first; the memory between them is never touched."""
    if DEVICE != "cpu":
        pytest.skip("memory that is not touched takes none only on a CPU")
    x = torch.empty(2**31 + 9, dtype=torch.bfloat16).as_strided((3, 9), (2**30, 1))
    x.copy_(torch.randn(3, 9))
    to = torch.full((3, 16), torch.nan, dtype=torch.bfloat16)
    _products.op_copy_(x, to)
    assert torch.equal(to[:, :9], x) and not to[:, 9:].any()
    x.zero_()
    _products.op_copy_(to, x)
    assert torch.equal(to[:, :9], x)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_copies_nothing_to_nothing(size: tuple[int, int]) -> None:
    _products.op_copy_(torch.ones(3, 5, device=DEVICE), torch.empty(size, device=DEVICE))


def test_the_operator_says_what_it_writes() -> None:
    x, to = torch.randn(3, 5, device=DEVICE), torch.randn(3, 8, device=DEVICE)
    torch.library.opcheck(
        _products.op_copy_, (x, to), test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    )


def test_units() -> None:
    x = torch.empty(4, 4096, dtype=torch.bfloat16)
    assert (
        stride_unit(x) == 8
        and stride_unit(x[:, :100]) == 4
        and stride_unit(x, x[:, :6]) == 2
        and stride_unit(x[:, :8], x[:, :7]) == 1
    )
    assert stride_unit(x[:, 8:16]) == 8 and stride_unit(x[:, 4:12]) == 1 and stride_unit(x.float()) == 4
    far = torch.empty(2, 4096, dtype=torch.bfloat16, device="meta")
    assert [stride_unit(x, far.as_strided((2, 4096), (stride, 1))) for stride in (2**31 - 8, 2**31)] == [8, 1]


class Products(TorchDispatchMode):
    """Record the operands of torch's matmuls, and what is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.copied: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.seen += [t for t in (*args, out) if isinstance(t, Tensor) and t.dim() == 2]
        if func is _products.op_copy_:
            self.copied.append(args[0])
        return out


def aligned(x: Tensor) -> bool:
    """Whether the contiguous dimension of x, its other stride and its address are multiples of 16 bytes."""
    side = 1 if x.stride(1) == 1 else 0
    return x.shape[side] % 8 == 0 and x.stride(1 - side) % 8 == 0 and x.data_ptr() % 16 == 0


@pytest.fixture
def _padded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_products, "DEVICES", (DEVICE,))
    monkeypatch.setattr(_products, "ROWS", 1)
    with host.through_python():  # on a CPU the fast path pads nothing
        yield


def eager(x: Tensor, value: Tensor, gate: Tensor, b_value: Tensor, b_gate: Tensor) -> Tensor:
    return functional.linear(x, value, b_value) * functional.silu(functional.linear(x, gate, b_gate))


def outcome(of: Any, tensors: Sequence[Tensor], dy: Tensor, retain: bool = False) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = of(*leaves)
    if retain:
        torch.autograd.grad(y, leaves, dy, retain_graph=True)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def compare(ours: Any, usual: Any, tensors: Sequence[Tensor], dy: Tensor, retain: bool = False) -> list[Tensor]:
    """Allow twice the error of eager code plus one rounding; all matmuls must have aligned rows. Returns what was copied."""
    with Products() as products:
        found = outcome(ours, tensors, dy, retain)
    assert len(products.seen) >= 6 and all(map(aligned, products.seen)), [(t.shape, t.stride()) for t in products.seen]
    other = outcome(usual, tensors, dy)
    true = outcome(usual, [t.double() for t in tensors], dy.double())
    for i, (mine, eagers, truth) in enumerate(zip(found, other, true, strict=True)):
        assert mine.shape == truth.shape and (i != 1 or mine.is_contiguous())
        a, b, band = errors([mine], [truth]), errors([eagers], [truth]), 3 * torch.finfo(mine.dtype).eps
        assert a.max <= 2 * b.max + band and a.rms <= 2 * b.rms + band, (i, a, b)
    return products.copied


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, torch.bfloat16)


SIZES = [(41, 29, 24), (41, 24, 29), (9, 24, 28), (300, 27, 131)]  # (M, D, F); of 28 features, 2F is a multiple of 8


@pytest.mark.usefixtures("_padded")
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("layout", ["stacked", "interleaved", "separate"])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("impl", [i for i in IMPLS if i != "reference"])
def test_gradients_by_products_of_aligned_rows(
    impl: str, large: bool, layout: Any, save: Any, monkeypatch: Any
) -> None:
    if large:
        monkeypatch.setattr(_autograd, "LARGE_BYTES", 0)
    for rows, features, hidden in SIZES[: 1 if INTERPRETER else 4] if large else SIZES[:3]:
        x, dy = randn(rows, features), randn(rows, hidden)
        value, gate = (randn(hidden, features, scale=features**-0.5) for _ in range(2))
        b_value, b_gate = randn(hidden), randn(hidden)

        def ours(x: Tensor, w: Tensor, g: Tensor, b: Tensor, bg: Tensor) -> Tensor:
            if layout == "separate":
                return gated_linear(x, w, b, w_gate=g, b_gate=bg, activation="silu", save=save, impl=impl)
            dim = 0 if layout == "stacked" else 1
            weight, bias = torch.stack((w, g), dim).flatten(0, 1), torch.stack((b, bg), dim).flatten()
            return gated_linear(x, weight, bias, layout=layout, activation="silu", save=save, impl=impl)

        retain = hidden == 29 and not INTERPRETER
        copies = [(t.data_ptr(), t.shape) for t in compare(ours, eager, (x, value, gate, b_value, b_gate), dy, retain)]
        if not (retain or DEVICE == "cuda"):  # where the unit's kernels copy what they cannot read, too
            assert len(set(copies)) == len(copies)  # no product copies again what another did


@pytest.mark.parametrize("layout", ["stacked", "interleaved"])
@pytest.mark.parametrize("before", [True, False])
def test_padding_may_end_or_begin_before_the_backward(
    before: bool, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 it depends on whether tf32 is allowed."""
    leaves = tuple(t.float().requires_grad_() for t in (randn(40, 29), randn(2 * 29, 29)))
    dy = randn(40, 29).float()

    def step(*padded: bool) -> tuple[Tensor, ...]:
        monkeypatch.setattr(_products, "pads", lambda x: padded[0])
        y = gated_linear(*leaves, activation="silu", layout=layout)
        monkeypatch.setattr(_products, "pads", lambda x: padded[1])
        return torch.autograd.grad(y, leaves, dy)

    with host.through_python():
        torch.testing.assert_close(step(before, not before), step(False, False), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_padded")
@pytest.mark.parametrize(("hidden", "parts"), [(1, [1]), (127, [127]), (128, [128]), (129, [128, 1])])
def test_recomputing_takes_no_empty_part(hidden: int, parts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no kernel describes."""
    taken, recompute = [], _op.op_recompute_grad_into

    def seen(dy: Tensor, *rest: Any) -> Any:
        taken.append(dy.shape[1])
        return recompute(dy, *rest)

    monkeypatch.setattr(_op, "op_recompute_grad_into", seen)
    monkeypatch.setattr(_autograd, "LARGE_BYTES", 0)
    leaves = tuple(t.requires_grad_() for t in (randn(40, 24), randn(2 * hidden, 24)))
    y = gated_linear(*leaves, activation="silu", save="input")
    torch.autograd.grad(y, leaves, randn(40, hidden))
    assert taken == parts


@pytest.mark.usefixtures("_padded")
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_unaligned_features_spare_the_products_of_what_is_frozen(frozen: int, save: Any) -> None:
    tensors = randn(40, 24), randn(29, 24), randn(29, 24)
    found = []
    for wanted in ([0, 1, 2], [i for i in range(3) if i != frozen]):
        leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        y = gated_linear(leaves[0], leaves[1], w_gate=leaves[2], activation="silu", save=save, impl="reference")
        with Products() as products:
            gradients = torch.autograd.grad(y, [leaves[i] for i in wanted], torch.ones_like(y))
        found.append((dict(zip(wanted, gradients, strict=True)), len(products.seen)))
    (every, most), (some, seen) = found
    assert seen < most
    for i, gradient in some.items():
        assert torch.equal(gradient, every[i])


@pytest.mark.usefixtures("_padded")
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("impl", [i for i in IMPLS if i != "reference"])
def test_the_mlp_by_products_of_aligned_rows(impl: str, save: Any) -> None:
    for rows, features, hidden, out in ((40, 29, 24, 16), (41, 24, 29, 19)):
        x, dz = randn(rows, features), randn(rows, out)
        gate, up = (randn(hidden, features, scale=features**-0.5) for _ in range(2))
        down, b_gate, b_up, b_down = randn(out, hidden, scale=hidden**-0.5), randn(hidden), randn(hidden), randn(out)

        def ours(x: Tensor, g: Tensor, u: Tensor, d: Tensor, bg: Tensor, bu: Tensor, bd: Tensor) -> Tensor:
            return gated_mlp(
                x, g, u, d, b_gate=bg, b_up=bu, b_down=bd, activation="silu", save=save, impl=impl
            )  # fmt: skip

        def usual(x: Tensor, g: Tensor, u: Tensor, d: Tensor, bg: Tensor, bu: Tensor, bd: Tensor) -> Tensor:
            return functional.linear(eager(x, u, g, bu, bg), d, bd)

        compare(ours, usual, (x, gate, up, down, b_gate, b_up, b_down), dz)
        torch.testing.assert_close(_products.linear(x, up, None), functional.linear(x, up))


@pytest.mark.skipif(DEVICE != "cpu" or INTERPRETER, reason="elsewhere products may take memory of their own")
@pytest.mark.usefixtures("_padded", "without_onednn")
def test_the_peak_of_recomputing_with_unaligned_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """y, and du and dg of half of the features, with rows padded from the start. In float32, as if it were tf32: 16-bit products
    may take memory of their own."""
    monkeypatch.setattr(_chunks, "CHUNK_BYTES", 2**16)
    monkeypatch.setattr(_chunks, "CHUNK_ROWS", 32)
    monkeypatch.setattr(_products, "tf32_allowed", lambda: True)
    rows, features, hidden = 1024, 24, 2047
    leaves = tuple(t.float().requires_grad_() for t in (randn(rows, features), randn(2 * hidden, features)))
    dy = randn(rows, hidden).float()

    def step() -> Any:
        y = gated_linear(*leaves, activation="silu", save="input")
        return y, torch.autograd.grad(y, leaves, dy)

    step()  # builds kernels
    _, grown = growth(step, torch.device(DEVICE))
    assert grown is not None and grown.peak < 2.25 * rows * hidden * 4


def test_a_cpu_few_rows_and_a_trace_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(4096, 29, dtype=torch.bfloat16)
    monkeypatch.setattr(_products, "DEVICES", ("cuda",))
    assert not _products.pads(x) and _products.operand(x) is x
    monkeypatch.setattr(_products, "DEVICES", ("cpu",))
    assert _products.pads(x) and _products.operand(x).stride(0) == 64
    assert not _products.pads(x[:128]) and not _products.pads(x.float())
    with monkeypatch.context() as patch:
        patch.setattr(_products, "tf32_allowed", lambda: True)
        assert _products.pads(x.float()) and not _products.pads(x[:128].float()) and not _products.pads(x.double())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not _products.pads(x)
