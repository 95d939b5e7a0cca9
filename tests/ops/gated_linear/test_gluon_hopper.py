"""Results of the Gluon kernels on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import fusewise
from fusewise.lab.truth import errors
from fusewise.ops.gated_linear import _autograd, _cuda, _gluon, _gluon_few, geglu_linear, reference
from fusewise.ops.gated_linear._problem import ACTIVATIONS, Halves, Spec, new_preact

EPILOGUES = ("y", "preact", "gradient", "down")
STACKED = Spec("gelu_tanh", "stacked")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="no Hopper GPU")]
EVERY = [(epilogue, config) for epilogue in EPILOGUES for config in _gluon.configurations(epilogue)]


def make(rows: int, features: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device="cuda").mul_(scale).to(dtype)

    return (
        normal(rows, features),
        normal(2 * hidden, features, scale=features**-0.5),
        normal(2 * hidden),
        normal(rows, hidden),
    )


def outcome(
    module: Any, epilogue: str, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, spec: Spec
) -> tuple[Tensor, ...]:
    """The outputs of an epilogue, written to NaN-filled memory."""
    hidden = dy.shape[1]
    halves = Halves.of(spec, weight, None, bias)
    y = torch.full_like(dy, torch.nan)
    preact = new_preact(x, hidden, spec).fill_(torch.nan)
    dbias = torch.full((2, hidden), torch.nan, device="cuda", dtype=torch.promote_types(x.dtype, torch.float32))
    if epilogue == "gradient":
        module.recompute_gradient(dy, x, halves, preact, spec, dbias)
        return preact, dbias
    if epilogue == "down":
        preact.copy_(torch.cat((dy, dy.flip(0)), 1))
        module.down_gradient(x, halves.value.mT.contiguous(), preact, y, preact, spec, dbias)
        return y, preact, dbias
    if epilogue == "elementwise":
        before = torch.cat((dy, dy.flip(0)), 1)
        module.gradient(dy, before, preact, spec, dbias)
        return preact, dbias
    module.forward(x, halves, spec, y, preact if epilogue == "preact" else None)
    return (y, preact) if epilogue == "preact" else (y,)


def assert_right(epilogue: str, shape: tuple[int, int, int], dtype: torch.dtype, spec: Spec) -> None:
    """Allow twice the error of the float32 formula with a rounded result, plus one rounding for sums of rounded terms."""
    tensors = make(*shape, dtype)
    found = outcome(_gluon, epilogue, *tensors, spec)
    usual = outcome(reference, epilogue, *tensors, spec)
    true = outcome(reference, epilogue, *(t.double() for t in tensors), spec)
    for mine, other, truth in zip(found, usual, true, strict=True):
        error, allowed = errors([mine], [truth]), errors([other.to(dtype)], [truth])
        for of in ("max", "rms"):
            band = torch.finfo(dtype).eps / 2
            assert getattr(error, of) <= 2 * getattr(allowed, of) + band, (epilogue, shape, error, allowed)
    for one, two in zip(found, outcome(_gluon, epilogue, *tensors, spec), strict=True):
        assert torch.equal(one, two)  # deterministic


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("shape", [(1, 8, 8), (128, 64, 128), (300, 72, 264), (1111, 520, 1000)], ids=str)
    @pytest.mark.parametrize(("epilogue", "config"), EVERY, ids=str)
    def test_every_configuration(
        self, epilogue: str, config: _gluon.Config, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_gluon, "choose", lambda *_, **__: config)
        monkeypatch.setattr(_gluon, "_PLANS", {})
        monkeypatch.setattr(_gluon, "processors_of", lambda _: 7)  # programs take several tiles each
        assert_right(epilogue, shape, torch.bfloat16, STACKED)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("epilogue", [*EPILOGUES, "elementwise"])
    def test_every_activation(self, epilogue: str, activation: str, dtype: torch.dtype) -> None:
        assert_right(epilogue, (700, 264, 520), dtype, Spec(activation, "stacked", gate_first=True))

    @pytest.mark.parametrize(
        "shape",
        [
            (1, 8, 8),
            (3, 520, 1000),
            (16, 2048, 8192),
            (33, 1032, 3000),
            (64, 4096, 14336),
            (65, 1032, 3000),
            (100, 520, 11008),
            (128, 4096, 14336),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_few_rows(self, shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        for activation in ACTIVATIONS:
            assert_right("y", shape, dtype, Spec(activation, "stacked", gate_first=True))
        every = _gluon_few.configurations(shape[0], shape[2], _gluon.processors_of(0))
        for config in every:
            monkeypatch.setattr(_gluon, "_PLANS", {})
            monkeypatch.setattr(_gluon_few, "choose", lambda *_, config=config: config)
            assert_right("y", shape, dtype, STACKED)

    def test_a_large_problem(self) -> None:
        """Several tiles per SM, and several passes through the ring buffer."""
        for epilogue in (*EPILOGUES, "elementwise"):
            assert_right(epilogue, (8192, 1024, 4096), torch.bfloat16, STACKED)

    def test_it_is_chosen_where_it_can_serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And if the CUDA implementation is unavailable."""
        monkeypatch.setattr(_cuda, "refuses", lambda *_, **__: "not here")
        x, weight, *_ = make(128, 64, 128, torch.bfloat16)
        assert fusewise.explain_dispatch(geglu_linear, x, weight).impl == "gluon"
        assert fusewise.explain_dispatch(geglu_linear, x[:16], weight).impl == "gluon"
        training = weight.detach().clone().requires_grad_()
        assert fusewise.explain_dispatch(geglu_linear, x[:16], training).impl == "triton"
        assert fusewise.explain_dispatch(geglu_linear, x[:16], training, save="input").impl == "gluon"
        assert fusewise.explain_dispatch(geglu_linear, x.float(), weight.float()).impl == "triton"
        told = fusewise.explain_dispatch(geglu_linear, x[:, :60], weight[:, :60])
        assert told.impl == "triton" if x[:, :60].stride(0) * 2 % 16 else told.impl == "gluon"
        told = fusewise.explain_dispatch(geglu_linear, x.repeat(2, 1), weight[:252], impl="gluon")
        assert told.impl == "gluon" and "copied" in told.path
        told = fusewise.explain_dispatch(geglu_linear, x[:100], weight[:252])
        assert told.impl == "triton" and "16 bytes" in told.passed_over["gluon"]

    @pytest.mark.parametrize("shape", [(300, 81, 135), (5, 81, 135)], ids=str)
    @pytest.mark.parametrize("epilogue", [*EPILOGUES, "elementwise"])
    def test_what_tma_cannot_describe_is_copied(self, epilogue: str, shape: tuple[int, int, int]) -> None:
        assert_right(epilogue, shape, torch.bfloat16, STACKED)

    @pytest.mark.parametrize("save", ["preact", "input"])
    @pytest.mark.parametrize("layout", ["stacked", "interleaved", "separate"])
    @pytest.mark.parametrize("large", [False, True])
    def test_through_autograd(self, large: bool, layout: str, save: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        if large:
            monkeypatch.setattr(_autograd, "LARGE_BYTES", 0)
        x, weight, bias, dy = make(200, 136, 264, torch.bfloat16)
        if layout == "separate":
            weights: dict[str, Any] = {
                "weight": weight[:264].clone(), "w_gate": weight[264:].clone(), "bias": bias[:264].clone(), "b_gate": bias[264:].clone(),
            }  # fmt: skip
        else:
            weights = {"weight": weight, "bias": bias, "layout": layout}
        results = []
        for impl in ("gluon", "reference"):
            leaves = {"x": x, **weights}
            leaves = {k: v.detach().clone().requires_grad_() if isinstance(v, Tensor) else v for k, v in leaves.items()}
            y = fusewise.gated_linear(**leaves, activation="silu", impl=impl, save=save)
            grads = torch.autograd.grad(y, [v for v in leaves.values() if isinstance(v, Tensor)], dy)
            results.append((y.detach(), *grads))
        for mine, other in zip(*results, strict=True):
            difference = errors([mine], [other.double()])
            assert difference.rms <= 2e-2 and difference.max <= 5e-2

    def test_launches_in_step_may_overlap_and_be_replayed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On streams whose programs wait for SMs, and in a CUDA graph."""
        config = _gluon.choose("y", in_step=True)
        monkeypatch.setattr(_gluon, "choose", lambda *_, **__: config)
        x, weight, bias, _ = make(4096, 136, 1024, torch.bfloat16)
        expected = geglu_linear(x, weight, bias, impl="gluon")
        streams = [torch.cuda.Stream() for _ in range(3)]
        found = []
        for _ in range(64):
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    found.append(geglu_linear(x, weight, bias, impl="gluon"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = geglu_linear(x, weight, bias, impl="gluon")
        for _ in range(3):
            captured.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured, expected)
        assert all(torch.equal(y, expected) for y in found)

    def test_a_repeated_call_finds_other_addresses(self) -> None:
        """A cached launch plan holds no tensor."""
        for _ in range(3):
            assert_right("preact", (256, 64, 128), torch.bfloat16, STACKED)
        assert all(t is None or t.base is None for plan in _gluon._PLANS.values() for t in plan[1])
