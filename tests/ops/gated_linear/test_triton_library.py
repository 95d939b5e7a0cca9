"""`impl="triton"` in float32, whose matmuls are the platform's library's: alignment in tf32, memory, and the gate after them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fusewise.lab import memory
from fusewise.ops.gated_linear import _triton, _triton_gate, reference
from fusewise.ops.gated_linear._problem import Halves, Spec, describable, new_preact, split_preact

from .test_triton import SPEC


@pytest.mark.interpreter
@pytest.mark.parametrize("layout", ["stacked", "interleaved", "separate"])
@pytest.mark.parametrize("bias", [True, False])
def test_float32_of_many_rows_is_multiplied_by_the_library(layout: Any, bias: bool, monkeypatch: Any) -> None:
    """As a single chunk; y's gradient behind a down projection in chunks of 64 rows and a ragged one. Outputs, gradients and
    the tensors saved besides y."""
    monkeypatch.setattr(_triton.chunks, "gpu_rows_of", lambda _: 64)
    for module in (_triton, _triton_gate):
        monkeypatch.setattr(module, "launch", _only_gates(_triton_gate.launch))
    spec, (rows, features, hidden) = Spec("gelu_tanh", layout), (150, 40, 72)
    weight, b = torch.randn(2 * hidden, features) / features**0.5, torch.randn(2 * hidden)
    if layout == "separate":
        halves = Halves(weight[:hidden].clone(), weight[hidden:].clone(), b[:hidden], b[hidden:])
    else:
        halves = Halves.of(spec, weight, None, b)
    if not bias:
        halves = halves._replace(value_bias=None, gate_bias=None)
    x, dy, dz = torch.randn(rows, features), torch.randn(rows, hidden), torch.randn(rows, features)
    w_down = torch.randn(features, hidden) / features**0.5
    results = []
    for module in (_triton, reference):
        y, kept_y, down_y = (torch.full((rows, hidden), torch.nan) for _ in range(3))
        kept, remade, down = (new_preact(x, hidden, spec).fill_(torch.nan) for _ in range(3))
        dbias, down_dbias = torch.full((2, hidden), torch.nan), torch.full((2, hidden), torch.nan)
        module.forward(x, halves, spec, y, None)
        module.forward(x, halves, spec, kept_y, kept)
        module.recompute_gradient(dy, x, halves, remade, spec, dbias)
        down.copy_(kept)
        module.down_gradient(dz, w_down, down, down_y, down, spec, down_dbias)
        module.down_gradient(dz, w_down, kept, down_y, torch.empty_like(kept), spec, None)
        results.append((y, kept_y, kept, remade, dbias, down_y, down, down_dbias))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["stacked", "interleaved", "separate"])
@pytest.mark.parametrize(("features", "hidden"), [(40, 72), (41, 72), (40, 71), (43, 70)])
def test_in_tf32_the_library_gets_aligned_matrices(
    features: int, hidden: int, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also into pre-activations that are not aligned."""
    seen = _watch_matmuls(monkeypatch)
    monkeypatch.setattr(_triton, "pads", lambda _: True)
    x, dy = torch.randn(24, features), torch.randn(24, hidden)
    spec, weight, bias = Spec("gelu_tanh", layout), torch.randn(2 * hidden, features), torch.randn(2 * hidden)
    if layout == "separate":
        halves = Halves(weight[:hidden].clone(), weight[hidden:].clone(), bias[:hidden], bias[hidden:])
    else:
        halves = Halves.of(spec, weight, None, bias)
    for preact in (None, new_preact(x, hidden, spec).fill_(torch.nan), tuple(torch.empty(2, 24, hidden))):
        for halves_of in (halves, halves._replace(value_bias=None, gate_bias=None)):
            found = _triton._by_library(x, halves_of, spec, preact)
            expected = split_preact(new_preact(x, hidden, spec), spec)
            reference.forward(x, halves_of, spec, torch.empty_like(dy), expected)
            for mine, true in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-4)
            if preact is not None:
                assert found[0].data_ptr() == split_preact(preact, spec)[0].data_ptr()
    assert seen and all(map(describable, seen))


@pytest.mark.parametrize("unaligned", ["x", "value", "gate", "preact"])
def test_in_tf32_views_of_unaligned_matrices_are_copied(unaligned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def matrix(name: str, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns + (name == unaligned))[:, :columns]

    seen = _watch_matmuls(monkeypatch)
    monkeypatch.setattr(_triton, "pads", lambda _: True)
    x, halves = matrix("x", 24, 40), Halves(matrix("value", 72, 40), matrix("gate", 72, 40), None, None)
    preact = matrix("preact", 24, 72), torch.empty(24, 72)
    for mine, weight in zip(_triton._by_library(x, halves, SPEC, preact), halves[:2], strict=True):
        torch.testing.assert_close(mine, x @ weight.mT, rtol=1e-4, atol=1e-4)
    assert len(seen) == 6 and all(map(describable, seen))


def test_without_tf32_the_library_gets_the_matrices_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for copies in ("padded", "copy_to"):
        monkeypatch.setattr(_triton, copies, None)
    x, halves = torch.randn(600, 41), Halves.of(SPEC, torch.randn(142, 41), None, torch.randn(142))
    for mine, weight, bias in zip(_triton._by_library(x, halves, SPEC, None), halves[:2], halves[2:], strict=True):
        torch.testing.assert_close(mine, x @ weight.mT + bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("given", "most"), [(True, 1), (False, 2)])
def test_of_products_that_are_copied_one_is_there_at_a_time(
    given: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "pads", lambda _: True)
    rows, features, hidden = 256, 8, 511
    x, halves = torch.randn(rows, features), Halves.of(SPEC, torch.randn(2 * hidden, features))
    preact = new_preact(x, hidden, SPEC) if given else None
    _, grown = memory.growth(lambda: _triton._by_library(x, halves, SPEC, preact), torch.device("cpu"))
    part, weight = rows * (hidden + 1) * 4, (hidden + 1) * 64 * 4
    assert grown is not None and grown.peak == most * part + weight


def _watch_matmuls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Operands and results of the Triton implementation's matmuls by the library, as far as their rows are contiguous."""
    seen: list[Tensor] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def mm(self, x: Tensor, weight: Tensor, **options: Any) -> Tensor:
            return self.of(torch.mm, x, weight, **options)

        def addmm(self, bias: Tensor, x: Tensor, weight: Tensor, **options: Any) -> Tensor:
            return self.of(torch.addmm, bias, x, weight, **options)

        def of(self, function: Any, *given: Tensor, **options: Any) -> Tensor:
            to: Tensor = function(*given, **options)
            seen.extend((given[-2], given[-1].mT, to))
            return to

    for module in (_triton, _triton.chunks):
        monkeypatch.setattr(module, "torch", Watched())
    return seen


def test_float32_is_left_to_the_library() -> None:
    assert all(_triton.by_library(torch.empty(rows, 8)) for rows in (1, 64, 1000))
    assert not any(_triton.by_library(torch.empty(1000, 8, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16))


def test_the_backward_of_an_mlp_has_one_chunk_of_ys_gradient_at_a_time(monkeypatch: Any) -> None:
    monkeypatch.setattr(_triton.chunks, "gpu_rows_of", lambda _: 64)
    for kernel in ("gate", "gradient"):
        monkeypatch.setattr(_triton, kernel, lambda *_: None)
    rows, features, hidden = 200, 8, 128
    dz, w_down, y = torch.randn(rows, features), torch.randn(features, hidden), torch.empty(rows, hidden)
    preact = new_preact(y, hidden, SPEC)
    _, grown = memory.growth(
        lambda: _triton.down_gradient(dz, w_down, preact, y, preact, SPEC, None), torch.device("cpu")
    )
    assert grown is not None and grown.peak == 64 * hidden * 4


def _only_gates(launch: Any) -> Any:
    def checked(kernel: Any, *rest: Any, **options: Any) -> None:
        assert kernel in (_triton_gate.gate_kernel, _triton_gate.gate_gradient_kernel)
        launch(kernel, *rest, **options)

    return checked
