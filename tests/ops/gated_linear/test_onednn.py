"""float32 matmuls by oneDNN: which are used, and that results equal the formula with any library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fusewise import gated_linear, gated_mlp
from fusewise._shared import build, host
from fusewise.lab.memory import growth
from fusewise.ops.gated_linear import _autograd, _chunks, _host, _onednn, _op

from ..rope.support import assert_bits

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this build of torch has no oneDNN",
)
X, W = torch.randn(64, 256), torch.randn(128, 256)  # 2 Mi multiplications


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Use oneDNN on any CPU; records the sizes of its matmuls. Through Python: C++ was told what is there when it was loaded."""
    seen = []
    linear = _onednn.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append((*x.shape, weight.shape[0]))
        return linear(x, weight, bias)

    monkeypatch.setattr(_onednn, "there", lambda: True)
    monkeypatch.setattr(_onednn, "takes_transposed", lambda: True)
    monkeypatch.setattr(_onednn, "linear", counted)
    with host.through_python():
        yield seen


@pytest.mark.parametrize(
    ("vendor", "expected"), [("AuthenticAMD", True), ("HygonGenuine", True), ("GenuineIntel", False), ("", False)]
)
def test_it_is_for_processors_that_are_not_intels(vendor: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_onednn, "_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(_onednn.sys, "platform", "linux")
    assert _onednn.there.__wrapped__() is expected
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not _onednn.there.__wrapped__()


@pytest.mark.parametrize(
    ("vendor", "family", "expected"),
    [("AuthenticAMD", "26", True), ("AuthenticAMD", "25", False), ("HygonGenuine", "26", False), ("", "", False)],
)
def test_where_avx512_is_at_full_width_it_is_worth_a_copy_of_a_transposed_matrix(
    vendor: str, family: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = {"vendor_id": vendor, "cpu family": family}
    monkeypatch.setattr(_onednn, "_cpuinfo", read.__getitem__)
    assert _onednn.takes_transposed.__wrapped__() is expected
    monkeypatch.setattr(_onednn, "there", lambda: True)
    monkeypatch.setattr(_onednn, "takes_transposed", lambda: expected)
    assert _onednn.takes(X.mT.contiguous().mT, W) is expected
    assert _onednn.takes(X, torch.randn(256, 128).mT)


def test_the_first_processor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processors = [
        f"processor\t: {i}\nvendor_id\t: AuthenticAMD\ncpu family\t: {26 - i}\nmodel name\t: A: B\n\n" for i in (0, 1)
    ]
    (tmp_path / "cpuinfo").write_text("".join(processors))
    monkeypatch.setattr(_onednn, "Path", lambda path: tmp_path / Path(path).name)
    read = [_onednn._cpuinfo(key) for key in ("processor", "cpu family", "model name", "model", "no such key")]
    assert read == ["0", "26", "A: B", "", ""] and _onednn._vendor() == "AuthenticAMD"
    (tmp_path / "cpuinfo").unlink()
    assert _onednn._vendor() == ""


@pytest.mark.parametrize(
    ("x", "weight", "expected"),
    [
        (X, W, True),
        (X, torch.nn.Parameter(W), True),
        (X, torch.randn(256, 128).mT, True),
        (X.mT.contiguous().mT, W, True),
        (X[:4], torch.randn(1 << 10, 256), True),
        (X[:4], torch.randn(256, 1 << 10).mT, False),  # few rows of a transposed weight
        (X[:4], W, False),  # little work
        (X, torch.randn(256, 256)[::2], False),  # strided rows
        (torch.randn(64, 512)[:, ::2], W, False),
        (X.half(), W.half(), False),
        (X.double(), W.double(), False),
        (X.to("meta"), W.to("meta"), False),
    ],
)
def test_what_it_takes(x: Tensor, weight: Tensor, expected: bool, taken: list[tuple[int, ...]]) -> None:
    assert _onednn.takes(x, weight) is expected
    if expected:
        with torch.no_grad():
            torch.testing.assert_close(_onednn.linear(x, weight), x @ weight.mT, rtol=1e-4, atol=1e-4)


def test_who_watches_or_has_switched_it_off_sees_the_product(
    taken: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FlopCounterMode(display=False):
        assert not _onednn.takes(X, W)
    assert _onednn.takes(X, W)
    enabled = torch._C._get_mkldnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns about TF32 on Intel GPUs
        assert not _onednn.takes(X, W)
    finally:
        torch._C._set_mkldnn_enabled(enabled)
    monkeypatch.setattr(build, "FORKED", True)
    assert not _onednn.takes(X, W)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated", "ignore::torch.jit.TracerWarning")
def test_a_jit_trace_of_an_mlp_has_the_product(taken: list[tuple[int, ...]]) -> None:
    x, *weights = (torch.randn(128, 128) / 8 for _ in range(4))
    for weight in weights:
        weight.requires_grad_()

    def mlp(*tensors: Tensor) -> Tensor:
        return gated_mlp(*tensors, activation="silu")

    traced = torch.jit.trace(mlp, (x, *weights))
    found, wanted = (torch.autograd.grad(f(x, *weights).square().sum(), weights) for f in (traced, mlp))
    assert taken
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


LAYOUTS = ("stacked", "interleaved", "separate")


def truth(x: Tensor, value: Tensor, gate: Tensor, bias: tuple[Tensor, Tensor] | None, down: Tensor | None) -> Tensor:
    u, g = x @ value.mT, x @ gate.mT
    if bias is not None:
        u, g = u + bias[0], g + bias[1]
    y = u * torch.nn.functional.silu(g)
    return y if down is None else y @ down.mT


@pytest.mark.parametrize("rows", [16, 700])
@pytest.mark.parametrize("save", ["preact", "input"])
@pytest.mark.parametrize("mlp", [False, True], ids=["unit", "mlp"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_the_formulas(
    layout: Any, mlp: bool, save: Any, rows: int, monkeypatch: pytest.MonkeyPatch, taken: list[tuple[int, ...]]
) -> None:
    """The unit with a bias and the MLP without; also with separate pre-activations, as for large problems, and with several
    chunks of rows."""
    features, hidden = 160, 520
    x, value, gate, down = torch.randn(rows, features), *torch.randn(2, hidden, features), torch.randn(features, hidden)
    biases = None if mlp else tuple(torch.randn(2, hidden))
    weight = {"stacked": torch.cat((value, gate)), "interleaved": torch.stack((value, gate), 1), "separate": value}[
        layout
    ]
    if biases is None:
        bias = None
    else:
        bias = {"stacked": torch.cat(biases), "interleaved": torch.stack(biases, 1), "separate": biases[0]}[layout]
    apart = layout == "separate"
    leaves = [t.clone().requires_grad_() for t in (x, weight, *((gate,) if apart else ()), *((down,) if mlp else ()))]
    options: dict[str, Any] = {"activation": "silu", "save": save, "impl": "cpu"} | (
        {} if apart else {"layout": layout}
    )

    def call() -> Tensor:
        if mlp and apart:
            return gated_mlp(leaves[0], leaves[2], leaves[1], leaves[3], **options)
        if mlp:
            return gated_mlp(leaves[0], leaves[1], None, leaves[2], gate_first=False, **options)
        more = {"w_gate": leaves[2], "b_gate": None if biases is None else biases[1]} if apart else {}
        return gated_linear(leaves[0], leaves[1], bias, **more, **options)

    exact = [t.detach().double().requires_grad_() for t in leaves]
    halves = exact[1:3] if apart else (exact[1].chunk(2) if layout == "stacked" else exact[1].unbind(1))
    wide = None if biases is None else tuple(b.double() for b in biases)
    expected = truth(exact[0], *halves, wide, exact[-1] if mlp else None)
    dy = torch.randn(expected.shape)
    gradients = torch.autograd.grad(expected, exact, dy.double())
    for large in (False, True):
        if large:
            monkeypatch.setattr(_autograd, "LARGE_BYTES", 0)
            monkeypatch.setattr(_chunks, "CHUNK_BYTES", 0)
            monkeypatch.setattr(_chunks, "CHUNK_ROWS", 64)
        y = call()
        found = [y, *torch.autograd.grad(y, leaves, dy)]
        for mine, true in zip(found, (expected, *gradients), strict=True):
            torch.testing.assert_close(mine, true.float(), rtol=1e-3, atol=1e-3 * true.abs().max().item())
    with torch.no_grad():
        torch.testing.assert_close(call(), expected.float(), rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    assert taken


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Call it to reload the fast path with or without oneDNN."""
    if (reason := _op.unavailable("cpu", "cpu", torch.float32)) is not None:
        pytest.skip(reason)
    kernel = _op.implementation("cpu")._kernel()

    def load(there: bool) -> None:
        monkeypatch.setattr(_onednn, "there", lambda: there)
        try:
            _host.load(kernel)
        except build.BuildError as error:
            pytest.skip(str(error))

    yield load
    monkeypatch.undo()
    _host.load(kernel)


@pytest.mark.parametrize("there", [False, True])
def test_the_quick_way_multiplies_as_python_does(there: bool, quick: Callable[[bool], None]) -> None:
    quick(there)
    for rows, features, hidden in ((16, 160, 520), (700, 160, 520), (600, 64, 4104), (3, 16, 24)):
        x, weight, bias = torch.randn(rows, features), torch.randn(2 * hidden, features), torch.randn(2 * hidden)
        for more in ({}, {"bias": bias}, {"w_gate": weight[hidden:]}):
            given = {"weight": weight[:hidden] if "w_gate" in more else weight, "activation": "silu", **more}
            found = gated_linear(x, **given)
            with host.through_python():
                assert_bits(found, gated_linear(x, **given))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_needs_no_more_than_a_chunk_beside(layout: Any, taken: list[tuple[int, ...]]) -> None:
    """Plus a second dW, in a training step whose peak is otherwise y, both pre-activations, dx and dW."""
    rows, features, hidden = 8192, 256, 1024
    x = torch.randn(rows, features, requires_grad=True)
    shapes = {
        "stacked": [(2 * hidden, features)],
        "interleaved": [(hidden, 2, features)],
        "separate": [(hidden, features)] * 2,
    }
    weights = [torch.randn(shape, requires_grad=True) for shape in shapes[layout]]
    dy = torch.randn(rows, hidden)

    def step() -> Any:
        options: Any = {"w_gate": weights[1]} if layout == "separate" else {"layout": layout}
        y = gated_linear(x, weights[0], activation="silu", **options)
        return y, torch.autograd.grad(y, (x, *weights), dy)

    step()  # builds kernels
    _, grown = growth(step, torch.device("cpu"))
    without = (3 * rows * hidden + rows * features + 2 * hidden * features) * 4
    scratch = 4 << 20  # oneDNN's own, which depends on the processor: 0 to 2.6 MB seen
    beside = _chunks.CHUNK_BYTES + 2 * hidden * features * 4 + scratch
    assert grown is not None and taken and grown.peak <= without + beside
