"""Results of the CUDA kernels on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import fusewise
from fusewise.lab.truth import errors
from fusewise.ops.gated_linear import _cuda, _op, geglu_linear, reference
from fusewise.ops.gated_linear._cuda import tiles
from fusewise.ops.gated_linear._problem import ACTIVATIONS, Halves, Spec, new_preact, split_preact

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == _cuda.CAPABILITY
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="no Hopper GPU")]
EPILOGUES = ("y", "preact", "gradient", "down", "gate")


def outcome(module: Any, epilogue: str, x: Tensor, of: Halves, dy: Tensor, spec: Spec) -> list[Tensor]:
    """All outputs of an implementation."""
    hidden = of.value.shape[0]
    y, preact = torch.full_like(dy, torch.nan), new_preact(x, hidden, spec).fill_(torch.nan)
    dbias = (
        None
        if of.value_bias is None
        else torch.full((2, hidden), torch.nan, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    )
    if epilogue == "y":
        module.forward(x, of, spec, y, None)
        return [y]
    if epilogue == "preact":
        module.forward(x, of, spec, y, preact)
        return [y, *split_preact(preact, spec)]
    if epilogue in ("down", "gate"):  # from given pre-activations, in place
        for half, kept in zip(split_preact(preact, spec), (dy.roll(1, 1), dy.flip(0)), strict=True):
            half.copy_(kept)
    if epilogue == "down":
        module.down_gradient(x, of.value.mT.contiguous(), preact, y, preact, spec, dbias)
    elif epilogue == "gate":
        _op.having("gradient", module, dy.shape[1], dy, *split_preact(preact, spec)).gradient(
            dy, preact, preact, spec, dbias
        )
    else:
        module.recompute_gradient(dy, x, of, preact, spec, dbias)
    made = [y] if epilogue == "down" else []
    return [*made, *split_preact(preact, spec), *([] if dbias is None else [dbias])]


def assert_right(epilogue: str, shape: tuple[int, int, int], dtype: torch.dtype, spec: Spec, bias: bool = True) -> None:
    """Allow twice the error of the float32 formula with a rounded result, plus one rounding; results must be deterministic."""
    rows, features, hidden = shape
    torch.manual_seed(0)
    x, dy = (torch.randn(rows, n, device="cuda", dtype=dtype) for n in (features, hidden))
    shaped = (2 * hidden, features) if spec.fused else (hidden, 2, features)
    weight = torch.randn(shaped, device="cuda", dtype=dtype) / features**0.5
    b = torch.randn(shaped[:-1], device="cuda", dtype=dtype) if bias else None

    def of(to: torch.dtype) -> tuple[Any, ...]:
        return x.to(to), Halves.of(spec, weight.to(to), None, None if b is None else b.to(to)), dy.to(to), spec

    assert _cuda.refuses(hidden, (x, *Halves.of(spec, weight)[:2]), spec.activation, epilogue, by_choice=False) is None
    found = outcome(_cuda, epilogue, *of(dtype))
    usual, true = outcome(reference, epilogue, *of(dtype)), outcome(reference, epilogue, *of(torch.float64))
    for mine, other, truth in zip(found, usual, true, strict=True):
        error, allowed = errors([mine], [truth]), errors([other.to(dtype)], [truth])
        for kind in ("max", "rms"):
            band = torch.finfo(dtype).eps / 2
            assert getattr(error, kind) <= 2 * getattr(allowed, kind) + band, (epilogue, shape, error, allowed)
    for _ in range(3):
        for one, two in zip(found, outcome(_cuda, epilogue, *of(dtype)), strict=True):
            assert torch.equal(one, two)


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("epilogue", EPILOGUES)
    @pytest.mark.parametrize(
        "shape",
        [
            (1, 8, 8),
            (129, 72, 104),
            (300, 520, 96),
            (4096, 1024, 4096),
            (777, 8, 5000),
            (20000, 64, 640),
            (200, 77, 131),
            (150, 136, 14336),
            (192, 64, 14341),
            (311, 72, 24576),
            (400, 200, 14336),
        ],
        ids=str,
    )
    def test_shapes(self, epilogue: str, shape: tuple[int, int, int]) -> None:
        """Ragged sizes, one tile, several waves of tiles per SM, rows that are not multiples of 16 bytes, and y with sideways tiles
        and in the few-rows kernel."""
        assert_right(epilogue, shape, torch.bfloat16, Spec("silu", "stacked"))

    @pytest.mark.parametrize("hidden", [136, 11008, 14336])
    @pytest.mark.parametrize("rows", [1, 104, 176, 200, 264, 288, 416])
    def test_every_tile_makes_the_same_y(self, rows: int, hidden: int) -> None:
        """Bit by bit, and nothing beside it: whole tiles, tiles filled in part, and the last wave's in halves."""
        x, weight = (torch.randn(n, 328, device="cuda").bfloat16() for n in (rows, 2 * hidden))
        halves = Halves.of(Spec("silu", "stacked"), weight)
        around = torch.full((rows + 2, hidden), 7.0, device="cuda").bfloat16()
        made = []
        for epilogue in (tiles.Y, *(of.epilogue for of in tiles.SIDEWAYS)):
            y = around[1:-1].fill_(torch.nan)
            _cuda._run(epilogue, "silu", x, halves.value, halves.gate, halves[2:], y)
            made.append(y.clone())
            assert torch.equal(made[0], made[-1])
            assert bool((around[0] == 7.0).all() and (around[-1] == 7.0).all())
        assert made[0].isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations(self, activation: str, dtype: torch.dtype) -> None:
        for epilogue in EPILOGUES:
            assert_right(epilogue, (700, 264, 520), dtype, Spec(activation, "stacked", gate_first=True))

    @pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
    def test_interleaved_weights_are_read_in_place(self, bias: bool) -> None:
        for epilogue in EPILOGUES:
            assert_right(
                epilogue, (500, 128, 200), torch.bfloat16, Spec("gelu_tanh", "interleaved", gate_first=True), bias
            )

    def test_a_bias_of_infinity_stays_where_it_is(self) -> None:
        """Padding rows beyond the last must not turn a sum into NaN."""
        x, weight = torch.randn(200, 64, device="cuda").half(), torch.randn(256, 64, device="cuda").half()
        bias = torch.zeros(256, device="cuda").half()
        bias[:128] = torch.inf
        dy, dbias = torch.zeros(200, 128, device="cuda").half(), torch.empty(2, 128, device="cuda")
        dy[:, ::2] = 1.0
        spec = Spec("sigmoid", "stacked")
        _cuda.recompute_gradient(dy, x, Halves.of(spec, weight, None, bias), new_preact(x, 128, spec), spec, dbias)
        assert dbias[0].isfinite().all() and dbias[0, ::2].gt(0).all() and not dbias[0, 1::2].any()

    @pytest.mark.parametrize("save", ["preact", "input"])
    def test_the_whole_operation(self, save: Any) -> None:
        """Gradients together with the implementation that dispatch names for the rest."""
        x, weight, bias = (
            (torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 8).requires_grad_()
            for shape in ((1000, 64), (1024, 64), (1024,))
        )
        told = fusewise.explain_dispatch(geglu_linear, x, weight, bias, save=save)
        assert told.impl == "cuda" and "gluon" in told.path
        dy = torch.randn(1000, 512, device="cuda", dtype=torch.bfloat16)
        results = {}
        for impl in ("auto", "cuda", "gluon"):
            y = geglu_linear(x, weight, bias, save=save, impl=impl)
            results[impl] = [y, *torch.autograd.grad(y, (x, weight, bias), dy)]
        for one, two, three in zip(*results.values(), strict=True):
            assert torch.equal(one, two)
            torch.testing.assert_close(one, three, rtol=2e-2, atol=2e-2)
        assert torch.equal(results["cuda"][0], results["gluon"][0])  # the same summation order

    @pytest.mark.parametrize("rows", [16, 300])
    def test_a_thread_of_its_own(self, rows: int) -> None:
        """The kernel launch may be the thread's first CUDA call."""
        x, weight = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for n in (rows, 256))
        expected = geglu_linear(x, weight, impl="cuda")
        with ThreadPoolExecutor(1) as thread:
            assert torch.equal(thread.submit(geglu_linear, x, weight, impl="cuda").result(), expected)

    def test_a_graph_replays_on_new_values_and_other_streams_do_not_mix(self) -> None:
        x, weight = (torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16) for rows in (600, 2048))
        geglu_linear(x, weight, impl="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = geglu_linear(x, weight, impl="cuda")
        x.copy_(torch.randn_like(x))
        graph.replay()
        expected = geglu_linear(x, weight, impl="cuda")
        assert torch.equal(y, expected)
        streams = [torch.cuda.Stream() for _ in range(4)]
        torch.cuda.synchronize()
        made = []
        for stream in streams:
            with torch.cuda.stream(stream):
                made.append(geglu_linear(x, weight, impl="cuda"))
        torch.cuda.synchronize()
        assert all(torch.equal(one, expected) for one in made)
