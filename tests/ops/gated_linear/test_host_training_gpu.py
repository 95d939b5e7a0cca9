"""What the C++ fast path computes of GPU calls that record gradients, once Python has served such a call: the bits of Python. On a
CPU, too: see `device` of conftest.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusewise import gated_linear, gated_mlp

from ..gpu_memory import peak_above, settled
from .host_calls import assert_same, by_python, forbid_operators, of_mlp, operands, requiring, trained

KINDS = [(torch.bfloat16, "gelu_tanh"), (torch.float16, "silu")]
DTYPE, ACTIVATION = KINDS[0]
OPTIONS = {"activation": ACTIVATION, "impl": "cuda"}
FORMS = ["stacked", "stacked bias", "separate", "separate bias"]
# Few rows in every rank; several partial sums, the last of fewer rows; on a GPU enough for Python to pad products of other sizes.
ROWS = {"cpu": [(), (5,), (2, 3), (2, 2, 3), (150,)]}
ROWS["cuda"] = [*ROWS["cpu"], (2, 260)]
# Of no other test: what is remembered here stays.
FEATURES, HIDDEN, OUT = 88, 168, 56

functions = pytest.mark.parametrize("function", [gated_linear, gated_mlp])
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


Case = tuple[dict[str, Any], Tensor, dict[str, Any]]  # tensors that require gradients, the upstream gradient, options


def redrawn(t: Tensor) -> Tensor:
    """Another tensor of the same sizes and strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).normal_()


def check(cases: list[Case], monkeypatch: pytest.MonkeyPatch, function: Any = gated_linear) -> None:
    """Check that a second call with other values is served by C++, with the bits of Python."""
    expected = []
    for made, upstream, options in cases:
        others = requiring({name: None if t is None else redrawn(t) for name, t in made.items()})
        trained(others, redrawn(upstream), function, **options)
        expected.append(by_python(trained, made, upstream, function, **options))
    with monkeypatch.context() as patch:
        forbid_operators(patch)
        for (made, upstream, options), theirs in zip(cases, expected, strict=True):
            assert_same(trained(made, upstream, function, **options), theirs)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1])
@pytest.mark.parametrize("form", FORMS)
def test_training_has_the_bits_of_python(
    form: str, kind: tuple[torch.dtype, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, activation = kind
    cases = []
    for rows in ROWS[device]:
        made = requiring(operands(rows, FEATURES, HIDDEN, dtype, form, device))
        dy = torch.randn(*rows, HIDDEN).to(device, dtype)
        for gate_first in (False, True):
            cases.append((made, dy, {"activation": activation, "gate_first": gate_first, "impl": "cuda"}))
    check(cases, monkeypatch)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("save", ["preact", "input"])
def test_training_an_mlp_has_the_bits_of_python(
    save: str, form: str, kind: tuple[torch.dtype, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, activation = kind
    cases = []
    for rows in ROWS[device]:
        made = requiring(of_mlp(operands(rows, FEATURES, HIDDEN, dtype, form, device), OUT))
        dz = torch.randn(*rows, OUT).to(device, dtype)
        for gate_first in (False, True)[: 1 if "separate" in form else 2]:
            options = {"activation": activation, "gate_first": gate_first, "save": save, "impl": "cuda"}
            cases.append((made, dz, options))
    check(cases, monkeypatch, gated_mlp)


def test_operands_with_strided_rows_are_trained(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """x, both weights, that of a down projection, and the upstream gradient: rows of wider matrices."""

    def wide(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns + 16).to(device, DTYPE)[:, 8 : 8 + columns]

    made = requiring({"x": wide(150, FEATURES), "weight": wide(HIDDEN, FEATURES), "w_gate": wide(HIDDEN, FEATURES)})
    check([(made, wide(150, HIDDEN), OPTIONS)], monkeypatch)
    stacked = requiring({"x": wide(150, FEATURES), "weight": wide(2 * HIDDEN, FEATURES)})
    check([(stacked, wide(150, HIDDEN), OPTIONS)], monkeypatch)
    mlp = requiring(
        {
            "x": wide(150, FEATURES),
            "w_gate": wide(HIDDEN, FEATURES),
            "w_up": wide(HIDDEN, FEATURES),
            "w_down": wide(OUT, HIDDEN),
        }
    )
    check([(mlp, wide(150, OUT), OPTIONS)], monkeypatch, gated_mlp)


@pytest.mark.parametrize("wanted", ["x", "weight", "w_gate", "bias", "b_gate", "x b_gate", "weight bias"])
def test_only_wanted_gradients_are_computed(wanted: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = operands((40,), FEATURES, HIDDEN, DTYPE, "separate bias", device)
    dy = torch.randn(40, HIDDEN).to(device, DTYPE)
    made = {name: t.requires_grad_(name in wanted.split()) for name, t in made.items()}
    trained(made, dy, **OPTIONS)
    expected = by_python(trained, made, dy, **OPTIONS)
    forbid_operators(monkeypatch)
    found = trained(made, dy, **OPTIONS)
    assert [t is not None for t in found[1:]] == [name in wanted.split() for name in made]
    assert_same(found, expected)


@pytest.mark.parametrize("wanted", ["x", "w_gate", "w_up", "b_gate", "b_up", "w_down", "b_down", "w_down b_up"])
def test_only_wanted_gradients_of_an_mlp_are_computed(
    wanted: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = of_mlp(operands((40,), FEATURES, HIDDEN, DTYPE, "separate bias", device), OUT)
    dz = torch.randn(40, OUT).to(device, DTYPE)
    made = {name: t.requires_grad_(name in wanted.split()) for name, t in made.items()}
    trained(made, dz, gated_mlp, **OPTIONS)
    expected = by_python(trained, made, dz, gated_mlp, **OPTIONS)
    forbid_operators(monkeypatch)
    found = trained(made, dz, gated_mlp, **OPTIONS)
    assert [t is not None for t in found[1:]] == [name in wanted.split() for name in made]
    assert_same(found, expected)


@functions
def test_pre_activations_are_overwritten_only_if_nobody_needs_them(
    function: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the version counter told, so that a second backward could not take them for what they were."""
    made = operands((40,), FEATURES, HIDDEN, DTYPE, "separate bias", device)
    made = requiring(made if function is gated_linear else of_mlp(made, OUT))
    out = function(**made, **OPTIONS)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    leaves = list(made.values())
    forbid_operators(monkeypatch)
    for retain in (True, False):
        y = function(**made, **OPTIONS)
        preact = y.grad_fn.saved_tensors[-1]
        before, version = preact.clone(), preact._version
        gradients = torch.autograd.grad(y, leaves, upstream, retain_graph=retain)
        assert torch.equal(preact, before) == retain and (preact._version == version) == retain
        for gradient, leaf in zip(gradients, leaves, strict=True):
            assert torch.equal(gradient, leaf.grad)
        if retain:
            again = torch.autograd.grad(y, leaves, upstream)
            assert all(map(torch.equal, gradients, again))


@functions
def test_a_profile_shows_what_training_computes(function: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = operands((40,), FEATURES, HIDDEN, DTYPE, "separate", device)
    made = requiring(made if function is gated_linear else of_mlp(made, OUT))
    upstream = torch.randn_like(function(**made, **OPTIONS))
    trained(made, upstream, function, **OPTIONS)
    forbid_operators(monkeypatch)
    with torch.profiler.profile() as profile:
        trained(made, upstream, function, **OPTIONS)
    names = {event.name for event in profile.events()}
    gradient = "grad" if function is gated_linear else "down_grad"
    assert {f"fusewise::gated_linear_{name}" for name in ("preact", gradient)} <= names


def case(
    function: Any, device: str, rows: int, features: int = 520, hidden: int = 1032, out: int = 264
) -> tuple[dict[str, Any], Tensor]:
    """Tensors of a call and its upstream gradient; Python has served one like it, and C++ another."""
    made = operands((rows,), features, hidden, DTYPE, "separate bias", device)
    made = requiring(made if function is gated_linear else of_mlp(made, out))
    upstream = torch.randn(rows, hidden if function is gated_linear else out).to(device, DTYPE)
    for _ in range(2):
        trained(made, upstream, function, **OPTIONS)
    return made, upstream


@on_gpu
@functions
@pytest.mark.parametrize("rows", [40, 600])
def test_unaligned_operands_are_trained_by_python(rows: int, function: Any, device: str) -> None:
    """Right, also after aligned ones of the same sizes were served here."""
    made, upstream = case(function, device, rows)

    def shifted(t: Tensor) -> Tensor:
        return t.detach().new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t.detach())

    aligned = by_python(trained, made, upstream, function, **OPTIONS)
    for name, t in made.items():
        odd = {**made, name: shifted(t).requires_grad_()}
        found = trained(odd, upstream, function, **OPTIONS)
        assert_same(found, by_python(trained, odd, upstream, function, **OPTIONS))
        for ours, theirs in zip(found, aligned, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))
    assert_same(
        trained(made, shifted(upstream), function, **OPTIONS),
        by_python(trained, made, shifted(upstream), function, **OPTIONS),
    )


@on_gpu
@functions
def test_large_pre_activations(function: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 MiB: two tensors, by Python; behind a down projection one."""
    made, upstream = case(function, device, 1 << 14, 64, 1 << 12, 64)
    expected = by_python(trained, made, upstream, function, **OPTIONS)
    if function is gated_mlp:
        forbid_operators(monkeypatch)
    assert_same(trained(made, upstream, function, **OPTIONS), expected)


@on_gpu
@functions
def test_streams(function: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, upstream = case(function, device, 256)
    expected = by_python(trained, made, upstream, function, **OPTIONS)
    forbid_operators(monkeypatch)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = requiring({name: t.detach().clone() for name, t in made.items()})
        found = trained(late, upstream.clone(), function, **OPTIONS)
    stream.synchronize()
    assert_same(found, expected)


@on_gpu
@functions
def test_graphs(function: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, upstream = case(function, device, 256)
    expected = by_python(trained, made, upstream, function, **OPTIONS)
    forbid_operators(monkeypatch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # cuBLAS allocates for a stream
        trained(made, upstream, function, **OPTIONS)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = trained(made, upstream, function, **OPTIONS)
    for t in found:
        assert t is not None
        t.zero_()
    graph.replay()
    assert_same(found, expected)


@on_gpu
@functions
def test_memory_is_that_of_python(function: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, upstream = case(function, device, 2056, 1024, 2048, 1024)

    def peaks() -> list[int]:
        leaves = list(made.values())
        before = settled()
        y = function(**made, **OPTIONS)
        found = [peak_above(before)]
        before = settled()
        gradients = torch.autograd.grad(y, leaves, upstream)
        found.append(peak_above(before))
        del y, gradients
        return found

    peaks()
    expected = by_python(peaks)
    forbid_operators(monkeypatch)
    assert peaks() == pytest.approx(expected, abs=1 << 12)
