"""The C++ fast path of GPU calls: it serves repeated calls of the CUDA implementation, bitwise equal, and leaves the rest to
Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusewise import gated_linear, gated_mlp, geglu_linear
from fusewise._shared import build, host
from fusewise.ops.gated_linear import _cuda, _host, api

from .host_calls import quick

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    if (reason := _cuda.unavailable("cuda")) is not None:
        pytest.skip(reason)
    try:
        _host.load()
    except build.BuildError as error:
        pytest.skip(str(error))


def operands(rows: tuple[int, ...], features: int, hidden: int, form: str = "", dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:  # fmt: skip
    def some(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype) / shape[-1] ** 0.5

    bias = (some(hidden), some(hidden)) if "bias" in form else (None, None)
    if "separate" in form:
        made = {"weight": some(hidden, features), "w_gate": some(hidden, features), "bias": bias[0], "b_gate": bias[1]}
    else:
        made = {"weight": some(2 * hidden, features), "bias": None if bias[0] is None else some(2 * hidden)}
    if "strided" in form:
        made["weight"] = torch.cat((made["weight"], made["weight"]), -1)[:, 8 : 8 + features]
    return {"x": some(*rows, features), **made}


@pytest.mark.parametrize("form", ["", "bias", "separate", "separate bias", "bias strided"])
@pytest.mark.parametrize("gate_first", [False, True])
def test_a_repeated_call_has_the_bits_of_python(form: str, gate_first: bool) -> None:
    """For few and many rows, in every supported rank."""
    for rows, features, hidden in [((), 72, 136), ((5,), 72, 136), ((2, 3), 72, 136), ((2, 2, 3), 72, 136), ((300,), 72, 136), ((2, 2048), 512, 1024)]:  # fmt: skip
        options = {"activation": "gelu_tanh", "gate_first": gate_first, "impl": "cuda"}
        made = operands(rows, features, hidden, form)
        expected = gated_linear(**made, **options)
        y = quick(**made, **options)
        assert y is not None and torch.equal(y, expected)
        assert y.shape == expected.shape and y.stride() == expected.stride() and not y.requires_grad
        other = operands(rows, features, hidden, form)  # other tensors, the same call
        found = quick(**other, **options)
        with host.through_python():
            assert found is not None and torch.equal(found, gated_linear(**other, **options))


def test_what_differs_is_asked_for_anew() -> None:
    made = operands((16,), 200, 264, "bias")
    gated_linear(**made, activation="silu", impl="cuda")
    assert quick(**made, impl="cuda") is not None
    assert quick(**made) is None  # "auto" may take another
    assert quick(**made, activation="gelu", impl="cuda") is None
    assert quick(**{**made, "x": made["x"][:15]}, impl="cuda") is None
    assert quick(**{name: t.half() for name, t in made.items()}, impl="cuda") is None
    wide = torch.cat((made["x"], made["x"]), -1)
    assert quick(**{**made, "x": wide[:, :200]}, impl="cuda") is None
    assert quick(**{**made, "weight": made["weight"].clone().requires_grad_()}, impl="cuda") is None


def test_what_tma_cannot_describe_is_pythons() -> None:
    """Like a cached call, but with an unaligned address."""
    made = operands((16,), 200, 264)
    gated_linear(**made, activation="silu", impl="cuda")
    shifted = torch.empty(16 * 200 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(16, 200).copy_(made["x"])
    assert quick(**{**made, "x": shifted}, impl="cuda") is None
    y = gated_linear(shifted, made["weight"], activation="silu", impl="cuda")
    assert torch.equal(y, quick(**made, impl="cuda"))


def test_float32_and_autocast_are_pythons() -> None:
    made = operands((16,), 200, 264, dtype=torch.float32)
    gated_linear(**made, activation="silu")
    assert quick(**made) is None
    half = {name: None if t is None else t.half() for name, t in made.items()}
    gated_linear(**half, activation="silu", impl="cuda")
    assert quick(**half, impl="cuda") is not None
    with torch.autocast("cuda", torch.bfloat16):
        assert quick(**half, impl="cuda") is None


def test_auto_is_kept_where_it_takes_cuda() -> None:
    few, many = operands((16,), 64, 14336), operands((512,), 64, 14336)
    for made, kept in ((few, True), (many, False)):  # for 512 rows Gluon takes fewer waves
        gated_linear(**made, activation="silu")
        assert (quick(**made) is not None) is kept


def test_streams_and_graphs() -> None:
    made = operands((64,), 512, 1024)
    expected = geglu_linear(made["x"], made["weight"], impl="cuda")
    assert torch.equal(expected, geglu_linear(made["x"], made["weight"], impl="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = quick(**made, activation="gelu_tanh", impl="cuda")
    assert y is not None
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        x = made["x"].clone()
        late = quick(x, made["weight"], activation="gelu_tanh", impl="cuda")
    stream.synchronize()
    assert late is not None and torch.equal(late, expected)


def test_a_profile_shows_the_operator() -> None:
    made = operands((16,), 200, 264)
    gated_linear(**made, activation="silu", impl="cuda")
    with torch.profiler.profile() as profile:
        assert quick(**made, impl="cuda") is not None
    assert "fusewise::gated_linear" in {event.name for event in profile.events()}


def test_an_mlp_goes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = operands((2, 8), 512, 1024, "separate")
    x, up, gate, down = made["x"], made["weight"], made["w_gate"], operands((1,), 1024, 256)["weight"]
    expected = gated_mlp(x, gate, up, down, activation="silu", impl="cuda")
    monkeypatch.setattr(api, "validated", lambda *_: pytest.fail("validated in Python"))
    assert torch.equal(gated_mlp(x, gate, up, down, activation="silu", impl="cuda"), expected)
