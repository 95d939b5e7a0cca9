"""The native CPU gate: conversion of every 16-bit number, chunks, threads, and accuracy over the whole range of gates."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusewise._shared import host
from fusewise.ops.gated_linear import _chunks, _onednn, _op, gated_linear, geglu_linear, reference
from fusewise.ops.gated_linear._problem import Halves, Spec

pytestmark = pytest.mark.skipif(
    _op.unavailable("cpu", "cpu", torch.float32) is not None, reason="no compiler for the native kernel"
)


def gate(u: torch.Tensor, g: torch.Tensor, activation: str) -> torch.Tensor:
    cpu = _op.implementation("cpu")
    y = torch.full_like(u, math.nan)
    cpu._gate(torch.cat((u, g), 1), Spec(activation, "stacked"), y=y)
    return y


@pytest.mark.parametrize("columns", [256, 2])  # in whole vectors, and one by one
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_survives_and_products_are_rounded_as_torch_does(dtype: torch.dtype, columns: int) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, columns)
    torch.testing.assert_close(gate(every, torch.ones_like(every), "identity"), every, rtol=0, atol=0, equal_nan=True)
    for factor in (0.3, 1 / 3, 1e-3, 700.0, -1.0):
        factors = torch.full_like(every, factor)
        expected = (every.float() * factors.float()).to(dtype)
        torch.testing.assert_close(gate(every, factors, "identity"), expected, rtol=0, atol=0, equal_nan=True)


def test_subnormal_halves_are_numbers_where_subnormal_floats_are_flushed() -> None:
    """Small float16 gradients are subnormal. The conversion avoids subnormal floats, which are slow or flushed to zero."""
    small = torch.arange(1, 1024, dtype=torch.int16).view(torch.float16)[None]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        found = gate(small, torch.ones_like(small), "identity")
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, small)


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "silu", "sigmoid"])
def test_activations_are_exact_to_a_few_units_in_the_last_place(activation: str) -> None:
    g = torch.cat((torch.linspace(-30, 30, 60001), torch.logspace(-30, 30, 2047), -torch.logspace(-30, 30, 2048)))[None]
    y = gate(torch.ones_like(g), g, activation).double()
    truth = reference.ACTIVATE[activation](g.double())
    if activation == "gelu":
        truth = g.double() * 0.5 * torch.erfc(-g.double() / math.sqrt(2))
    error = (y - truth).abs()
    assert float((error / truth.abs().clamp(min=1e-3)).max()) < 1e-6
    assert float(error.max()) <= 2e-7 * float(truth.abs().max())


@pytest.mark.parametrize(("size", "least"), [(0, 64), (100 * 2 * 48 * 4, 32)])  # (bytes, rows), the bytes of 100 rows
def test_chunks_of_rows_change_nothing(size: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_onednn, "there", lambda: False)  # oneDNN accumulates a gradient chunk by chunk
    inputs = [torch.randn(700, 16), torch.randn(96, 16), torch.randn(96)]
    dy = torch.randn(700, 48)

    def run(save: str) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        with host.through_python():  # the fast path has compile-time chunk sizes
            with torch.no_grad():
                alone = geglu_linear(*leaves, impl="cpu")
            y = geglu_linear(*leaves, save=save, impl="cpu")
            return [alone, y.detach(), *torch.autograd.grad(y, leaves, dy)]

    sizes = _chunks.CHUNK_BYTES, _chunks.CHUNK_ROWS
    for save in ("preact", "input"):
        whole = run(save)
        monkeypatch.setattr(_chunks, "CHUNK_BYTES", size)
        monkeypatch.setattr(_chunks, "CHUNK_ROWS", least)
        torch.testing.assert_close(run(save), whole, rtol=1e-5, atol=1e-5)
        monkeypatch.setattr(_chunks, "CHUNK_BYTES", sizes[0])
        monkeypatch.setattr(_chunks, "CHUNK_ROWS", sizes[1])


class Allocations(TorchDispatchMode):
    """Record the bytes of every new storage."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in (*args, *(kwargs or {}).values()) if torch.is_tensor(t)}
        self.known |= given
        if torch.is_tensor(made) and made.untyped_storage().data_ptr() not in self.known:
            self.sizes[made.untyped_storage().data_ptr()] = made.untyped_storage().nbytes()
        return made


@pytest.mark.parametrize("rows", [1, 64, 65, 700, 1500])
@pytest.mark.parametrize("layout", ["stacked", "separate"])
def test_an_inference_allocates_y_and_what_is_stated(rows: int, layout: str) -> None:
    cpu = _op.implementation("cpu")
    x, w = torch.randn(rows, 8), torch.randn(2 * 4096, 8)
    spec = Spec("silu", layout)
    halves = Halves.of(spec, w) if layout == "stacked" else Halves.of(spec, w[:4096].clone(), w[4096:].clone())
    y = torch.full((rows, 4096), math.nan)
    with Allocations() as made:
        cpu.forward(x, halves, spec, y, None)
    stated = _chunks.scratch_bytes(rows, 4096, 4, spec.fused)
    assert sum(made.sizes.values()) == stated <= max(8 << 20, 512 * 4096 * 4)
    expected = torch.empty_like(y)
    reference.forward(x, halves, spec, expected, None)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_bias_gradients_do_not_depend_on_the_threads() -> None:
    cpu = _op.implementation("cpu")
    preact, dy = torch.randn(500, 2 * 1100), torch.randn(500, 1100)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            dpreact, dbias = torch.empty_like(preact), torch.empty(2, 1100)
            cpu.gradient(dy, preact, dpreact, Spec("silu", "stacked"), dbias)
            results.append((dpreact, dbias))
    finally:
        torch.set_num_threads(before)
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))


def test_the_kernel_works_without_an_openmp_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = _op.implementation("cpu")
    u, g = torch.randn(300, 400), torch.randn(300, 400)
    usual = gate(u, g, "silu")
    monkeypatch.setattr(cpu._kernel(), "parallel", 0)
    assert torch.equal(gate(u, g, "silu"), usual)


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "silu"])
def test_slopes_keep_their_digits_where_the_sigmoid_is_near_one(activation: str) -> None:
    """For a sigmoid s near 1, 1 − s cancels; multiplied by the gate that doubled eager's error."""
    g = torch.linspace(-9, 9, 100_001)
    x, weight, bias = g[:, None].clone().requires_grad_(), torch.tensor([[0.0], [1.0]]), torch.tensor([1.0, 0.0])
    gated_linear(x, weight, bias, activation=activation, impl="cpu").backward(torch.ones(len(g), 1))
    assert x.grad is not None
    error = (x.grad[:, 0].double() - reference.derivative(g.double(), activation)).abs()
    assert error.max() < 2.5 * torch.finfo(torch.float32).eps
