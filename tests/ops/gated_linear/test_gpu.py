"""Tests that need a GPU: documented memory use, CUDA graphs, sizes beyond 2^31, other streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusewise import explain_dispatch
from fusewise.lab.truth import errors
from fusewise.ops.gated_linear import _autograd, geglu_linear

from ..gpu_memory import peak_above, settled

pytestmark = pytest.mark.gpu


def make(rows: int, features: int, hidden: int, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((rows, features), (2 * hidden, features), (2 * hidden,))
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).div_(features**0.5) for shape in shapes]
    return tuple(t.requires_grad_(grad) for t in tensors)  # type: ignore[return-value]


def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    value, gate = functional.linear(x.float(), weight.float(), bias.float()).chunk(2, -1)
    return value * functional.gelu(gate, approximate="tanh")


def test_inference_allocates_y_and_nothing_else() -> None:
    inputs = make(4096, 1024, 4096)
    geglu_linear(*inputs)
    before = settled()
    y = geglu_linear(*inputs)
    assert peak_above(before) == y.numel() * y.element_size()


@pytest.mark.parametrize(("save", "held", "peak"), [("preact", 3, 3), ("input", 1, 2)])
def test_training_holds_and_peaks_as_the_contract_says(save: str, held: int, peak: int) -> None:
    """In units of y, in addition to the gradients and the column sums."""
    rows, features, hidden = 16384, 1024, 4096  # 2 h are 256 MiB: processed in two halves, in both modes
    inputs = make(rows, features, hidden, True)
    dy = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    torch.autograd.grad(geglu_linear(*inputs, save=save), inputs, dy)
    before = settled()
    y = geglu_linear(*inputs, save=save)
    size = y.numel() * y.element_size()
    assert torch.cuda.memory_allocated() - before == held * size
    gradients = torch.autograd.grad(y, inputs, dy)
    dx, dweight, dbias = (g.numel() * g.element_size() for g in gradients)
    returned = dx + dbias + (dweight // 2 if save == "preact" else dweight)
    sums = 2 * hidden * 4 * (rows // 64 + 2)
    assert peak_above(before) <= peak * size + returned + sums + 2**21


def outcome(of: Any, inputs: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    y = of(*inputs)
    return (y.detach(), *torch.autograd.grad(y, inputs, dy))


def usual(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    value, gate = functional.linear(x, weight, bias).chunk(2, -1)
    return value * functional.gelu(gate, approximate="tanh")


def check_as_accurate_as_eager(inputs: tuple[Tensor, ...], dy: Tensor, **how: Any) -> None:
    """y and all gradients, against float64."""
    found, other = outcome(lambda *a: geglu_linear(*a, **how), inputs, dy), outcome(usual, inputs, dy)
    double = tuple(t.detach().double().requires_grad_() for t in inputs)
    for mine, eagers, true in zip(found, other, outcome(usual, double, dy.double()), strict=True):
        a, b, band = errors([mine], [true]), errors([eagers], [true]), 3 * torch.finfo(dy.dtype).eps / 2
        assert mine.is_contiguous() and a.max <= 2 * b.max + band and a.rms <= 2 * b.rms + band, (a, b)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("save", ["preact", "input"])
@pytest.mark.parametrize(("features", "hidden"), [(257, 512), (260, 520), (256, 515), (257, 515)])
def test_rows_that_are_not_aligned(
    features: int, hidden: int, save: str, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unaligned x, weights, y, pre-activations, their gradient and dW, each in turn, at the size from which they are copied."""
    monkeypatch.setattr(_autograd, "LARGE_BYTES", 0 if large else _autograd.LARGE_BYTES)
    dy = torch.randn(600, hidden, device="cuda", dtype=torch.bfloat16)
    check_as_accurate_as_eager(make(600, features, hidden, True), dy, save=save)


@pytest.mark.filterwarnings(
    "ignore:Attempting to run cuBLAS"
)  # torch's, if it is what a thread of the backward begins with
@pytest.mark.parametrize("impl", ["auto", "cuda"])
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("save", ["preact", "input"])
@pytest.mark.parametrize(("rows", "features", "hidden"), [(600, 256, 520), (600, 257, 515), (1000, 1030, 768), (70, 256, 512)])  # fmt: skip
def test_float32_of_many_rows(rows: int, features: int, hidden: int, save: str, precision: str, impl: str) -> None:
    """With and without tf32, aligned or not; large problems, too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        inputs = tuple(t.detach().float().requires_grad_() for t in make(rows, features, hidden))
        check_as_accurate_as_eager(inputs, torch.randn(rows, hidden, device="cuda"), save=save, impl=impl)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_inference_in_float32_allocates_what_its_documentation_says(precision: str, impl: str) -> None:
    """y, or both pre-activations too if the library multiplies."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        inputs = tuple(t.float() for t in make(4096, 1024, 4096))
        scratch = 0 if explain_dispatch(geglu_linear, *inputs, impl=impl).impl == "cuda" else 2
        geglu_linear(*inputs, impl=impl)  # the library allocates its workspace
        start = settled()
        y = geglu_linear(*inputs, impl=impl)
        assert peak_above(start) == (1 + scratch) * y.numel() * y.element_size()
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_cuda_graph_replays_on_new_values() -> None:
    x, weight, bias = make(64, 1024, 2048)
    geglu_linear(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = geglu_linear(x, weight, bias)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, geglu_linear(x, weight, bias))


def test_on_another_stream() -> None:
    inputs = make(512, 512, 1024)
    expected = geglu_linear(*inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = geglu_linear(*inputs)
    stream.synchronize()
    assert torch.equal(y, expected)


def test_long_deep_products_at_once() -> None:
    """CUDA clusters synchronize, which is impossible when two launches share the device; results must not depend on it."""
    inputs = make(4096, 3072, 8192)
    alone = geglu_linear(*inputs)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    made = []
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                made.append(geglu_linear(*inputs))
    torch.cuda.synchronize()
    assert all(torch.equal(y, alone) for y in made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = geglu_linear(*inputs)
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, alone)


@pytest.mark.slow
@pytest.mark.gpu_memory(20)
def test_more_than_2_to_the_31_elements() -> None:
    rows, hidden = 300_000, 8192
    inputs = make(rows, 64, hidden, True)
    y = geglu_linear(*inputs)
    assert y.numel() > 2**31
    dy = torch.zeros_like(y)
    dy[-5:] = 1
    dx, *_ = torch.autograd.grad(y, inputs, dy)
    tail = inputs[0].detach()[-5:].requires_grad_()
    expected = eager(tail, *inputs[1:])
    torch.testing.assert_close(y[-5:].float(), expected, rtol=2e-2, atol=2e-2)
    (expected_dx,) = torch.autograd.grad(expected.sum(), tail)
    torch.testing.assert_close(dx[-5:].float(), expected_dx.float(), rtol=5e-2, atol=5e-2)
    assert not dx[:-5].any()
