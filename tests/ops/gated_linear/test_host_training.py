"""What the C++ fast path computes of CPU calls that record gradients: the bits of Python, and of other calls nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewise import gated_linear, gated_mlp
from fusewise.ops.gated_linear import _host, _onednn
from fusewise.ops.gated_linear._problem import Spec

from ..rope.support import assert_bits
from .host_calls import (
    Named,
    W,
    X,
    assert_same,
    by_python,
    forbid_operators,
    load,
    of_mlp,
    operands,
    requiring,
    trained,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    load()


def test_an_mlp_is_trained_whichever_tensor_requires_grad() -> None:
    given = [X, W[:6], W[6:], torch.randn(7, 6)]
    for i in range(4):
        mine = [t.clone().requires_grad_() if i == j else t for j, t in enumerate(given)]
        z = gated_mlp(*mine, activation="silu")
        assert z.requires_grad
        with torch.no_grad():
            assert_bits(gated_mlp(*mine, activation="silu"), z.detach())


@pytest.fixture
def no_operators(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return functools.partial(forbid_operators, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["stacked", "stacked bias", "separate", "separate bias", "stacked bias strided"])
def test_training_has_the_bits_of_python(form: str, dtype: torch.dtype, no_operators: Callable[[], None]) -> None:
    """y and all gradients, for few and many rows (in 16 bits also in chunks), for matrices and other ranks; in float32 below the
    size that oneDNN takes."""
    cases = []
    large = [] if dtype == torch.float32 else [((600,), 8, 4100)]
    for rows, features, hidden in [((2, 3), 16, 24), ((70,), 9, 20), ((3,), 16, 24), *large]:
        if "strided" in form and len(rows) > 1:
            continue
        made = requiring(operands(rows, features, hidden, dtype, form))
        for gate_first in (False, True):
            dy = torch.randn(*rows, hidden).to(dtype)
            options = {"activation": "gelu_tanh", "gate_first": gate_first}
            cases.append((made, dy, options, by_python(trained, made, dy, **options)))
    no_operators()
    for made, dy, options, expected in cases:
        assert_same(trained(made, dy, **options), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["stacked", "stacked bias", "separate", "separate bias"])
@pytest.mark.parametrize("save", ["preact", "input"])
def test_training_an_mlp_has_the_bits_of_python(
    save: str, form: str, dtype: torch.dtype, no_operators: Callable[[], None]
) -> None:
    cases = []
    large = [] if dtype == torch.float32 else [((600,), 8, 16400)]  # whose y is computed in chunks, too
    for rows, features, hidden in [((2, 3), 16, 24), ((70,), 9, 20), *large]:
        made = requiring(of_mlp(operands(rows, features, hidden, dtype, form), 7))
        dz = torch.randn(*rows, 7).to(dtype)
        for gate_first in (False, True)[: 1 if "separate" in form else 2]:
            options = {"activation": "silu", "gate_first": gate_first, "save": save}
            cases.append((made, dz, options, by_python(trained, made, dz, gated_mlp, **options)))
    no_operators()
    for made, dz, options, expected in cases:
        assert_same(trained(made, dz, gated_mlp, **options), expected)


@pytest.mark.parametrize(
    "wanted", ["x", "w_gate", "w_up", "b_gate", "b_up", "w_down", "b_down", "w_down b_up", "x b_down"]
)
def test_only_wanted_gradients_of_an_mlp_are_computed(wanted: str, no_operators: Callable[[], None]) -> None:
    shapes = {
        "x": (5, 8),
        "w_gate": (6, 8),
        "w_up": (6, 8),
        "b_gate": (6,),
        "b_up": (6,),
        "w_down": (7, 6),
        "b_down": (7,),
    }
    made = {name: torch.randn(shape).requires_grad_(name in wanted.split()) for name, shape in shapes.items()}
    dz = torch.randn(5, 7)
    expected = by_python(trained, made, dz, gated_mlp, activation="silu")
    no_operators()
    found = trained(made, dz, gated_mlp, activation="silu")
    assert [t is not None for t in found[1:]] == [name in wanted.split() for name in made]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is None if theirs is None else torch.equal(ours, theirs)


def test_a_down_projection_with_strided_rows_is_trained(no_operators: Callable[[], None]) -> None:
    made = {"x": X.clone(), "w_gate": W[:6].clone(), "w_up": W[6:].clone(), "w_down": torch.randn(14, 12)[::2, :6]}
    made = requiring(made)
    dz = torch.randn(3, 7)
    expected = by_python(trained, made, dz, gated_mlp, activation="gelu")
    no_operators()
    for ours, theirs in zip(trained(made, dz, gated_mlp, activation="gelu"), expected, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


@pytest.mark.parametrize("wanted", ["x", "weight", "w_gate", "bias", "b_gate", "x b_gate", "weight bias"])
def test_only_wanted_gradients_are_computed(wanted: str, no_operators: Callable[[], None]) -> None:
    made = operands((5,), 8, 6, torch.float32, "separate bias")
    for name in wanted.split():
        made[name].requires_grad_()
    dy = torch.randn(5, 6)
    expected = by_python(trained, made, dy, activation="silu")
    no_operators()
    found = trained(made, dy, activation="silu")
    assert [t is not None for t in found[1:]] == [name in wanted.split() for name in made]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is None if theirs is None else torch.equal(ours, theirs)


@pytest.mark.parametrize("dy", ["a row for all", "columns of a wider one", "of one dimension less"])
def test_upstream_gradients_of_any_strides(dy: str) -> None:
    made = requiring(operands((4, 5), 8, 6, torch.float32, "bias"))
    upstream = {
        "a row for all": torch.randn(6).expand(4, 5, 6),
        "columns of a wider one": torch.randn(4, 5, 9)[..., 2:8],
        "of one dimension less": torch.randn(5, 6).expand(4, 5, 6),
    }[dy]  # fmt: skip
    expected = by_python(trained, made, upstream, activation="gelu")
    for ours, theirs in zip(trained(made, upstream, activation="gelu"), expected, strict=True):
        assert ours is None if theirs is None else torch.equal(ours, theirs)


def test_pre_activations_are_overwritten_only_if_nobody_needs_them(no_operators: Callable[[], None]) -> None:
    """With the version counter told, so that a second backward could not take them for what they were."""
    x, weight = X.clone().requires_grad_(), W.clone().requires_grad_()
    no_operators()
    for retain in (True, False):
        y = gated_linear(x, weight, activation="silu")
        preact = y.grad_fn.saved_tensors[-1]
        before, version = preact.clone(), preact._version
        gradients = torch.autograd.grad(y.sum(), (x, weight), retain_graph=retain)
        assert torch.equal(preact, before) == retain and (preact._version == version) == retain
        if retain:
            again = torch.autograd.grad(y.sum(), (x, weight))
            assert all(map(torch.equal, gradients, again))


def test_second_order_and_batched_gradients_are_pythons() -> None:
    x, weight = X.double()[:1].float().requires_grad_(), W.clone().requires_grad_()
    y = gated_linear(x, weight, activation="silu")
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert dx.grad_fn is not None
    torch.autograd.grad(dx.square().sum(), (x, weight))
    batched = torch.autograd.grad(y, x, torch.eye(6)[:, None], is_grads_batched=True, retain_graph=True)[0]
    one = [torch.autograd.grad(y, x, row[None], retain_graph=True)[0] for row in torch.eye(6)]
    torch.testing.assert_close(batched, torch.stack(one))


CALL = _host.arguments_of(X, (W, None, None, None), Spec("silu", "stacked"), "auto")
WANTS = False, True, True, False, False  # to overwrite; the gradients of x, weight, w_gate and the biases
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "not a tensor": lambda t: 1.0,
    "a subclass": lambda t: t.as_subclass(Named),
    "another dtype": lambda t: t.double(),
    "fewer rows": lambda t: t[1:],
    "more rows": lambda t: torch.cat((t, t)),
    "fewer columns": lambda t: t[:, 1:].contiguous(),
    "strided columns": lambda t: torch.stack((t, t), -1)[..., 0],
    "another rank": lambda t: t[None],
    "meta": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_gradients_of_other_tensors_are_not_computed(other: str) -> None:
    """Called directly: what Python ensures is checked once more."""
    made = _host.kept(*CALL)
    assert made is not None
    (dy, preact), change = made, OTHERS[other]
    w_down = torch.randn(7, 6)
    dz, down = torch.randn(3, 7), (True, True, w_down)
    with torch.no_grad():
        assert _host.gradients(dy, preact, *WANTS, *CALL) is not None
        assert _host.gradients(change(dy), preact, *WANTS, *CALL) is None
        assert _host.gradients(dy, change(preact), *WANTS, *CALL) is None
        assert _host.mlp_gradients(dz, preact, *WANTS, *down, *CALL) is not None
        assert _host.mlp_gradients(change(dz), preact, *WANTS, *down, *CALL) is None
        assert _host.mlp_gradients(dz, preact, *WANTS, True, True, change(w_down), *CALL) is None
        apart = _host.arguments_of(X, (W[:6], W[6:], None, None), Spec("silu", "separate"), "auto")
        assert _host.gradients(dy, preact, *WANTS, *apart) is None  # whose pre-activations are two matrices
    assert _host.gradients(dy, preact, *WANTS, *CALL) is None  # while gradients are recorded


def test_calls_on_a_cpu_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _host.kept(*CALL)
    assert made is not None
    monkeypatch.setattr(_host, "extension", lambda: pytest.fail("asked to remember"))
    with torch.no_grad():
        _host.remember(_host.ONLY_Y, *CALL)
        _host.remember(_host.KEEPING, *CALL)
        _host.remember(_host.BACKWARD, *made, *WANTS, *CALL)
        _host.remember(_host.MLP_BACKWARD, torch.randn(3, 7), made[1], *WANTS, True, True, torch.randn(7, 6), *CALL)
    with pytest.raises(TypeError, match="must have 10 arguments, got 3"):
        _host.remember(_host.BACKWARD, *CALL)


def test_gradients_want_all_arguments() -> None:
    with pytest.raises(TypeError, match="must have 10 arguments, got 9"):
        _host.gradients(X, X, *WANTS, *CALL[1:])
    with pytest.raises(TypeError, match="must have 10 arguments, got 7"):
        _host.mlp_gradients(X, X, *WANTS, *CALL)


def test_products_of_the_backward_that_onednn_computes_are_pythons() -> None:
    for rows, hidden, features in (
        (16, 64, 512),
        (16, 64, 511),
    ):  # 2^20 multiplications in the unit's products, and fewer
        x, weight = torch.randn(rows, features), torch.randn(2 * hidden, features)
        call = _host.arguments_of(x, (weight, None, None, None), Spec("silu", "stacked"), "auto")
        made = _host.kept(*call)
        assert made is not None
        with torch.no_grad():
            done = _host.gradients(*made, *WANTS, *call)
            assert (done is None) == (_onednn.there() and features == 512)
            w_down = torch.randn(2 * features, hidden)
            dz = torch.randn(rows, 2 * features)
            done = _host.mlp_gradients(dz, made[1], *WANTS, True, False, w_down, *call)
            assert (done is None) == (_onednn.there() and features == 512)


def test_a_profile_shows_what_training_computes() -> None:
    x = X.clone().requires_grad_()
    with torch.profiler.profile() as profile:
        gated_linear(x, W, activation="silu").sum().backward()
        gated_mlp(x, W, None, W[:7, :6], activation="silu").sum().backward()
    names = {event.name for event in profile.events()}
    assert {f"fusewise::gated_linear_{name}" for name in ("preact", "grad", "down_grad")} <= names
