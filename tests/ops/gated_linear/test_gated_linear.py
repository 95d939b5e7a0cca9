"""The gated linear unit against float64: every implementation, activation, layout, dtype and shape, both ways.

The error may be at most twice that of eager code in the same dtype, plus one rounding for every tensor stored on the way:
y, the pre-activations, their gradient, and the gradient itself. Triton is tested on a GPU, or with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusewise.lab.memory import growth
from fusewise.lab.truth import errors
from fusewise.ops.gated_linear import _autograd, _onednn, _op, gated_linear, geglu_linear
from fusewise.ops.gated_linear._problem import ACTIVATIONS, SAVES, Layout

# numpy warnings in the interpreter: infinities and NaN are intended.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = ["triton"] if INTERPRETER else list(_op.IMPLEMENTATIONS)
MARKS = [pytest.mark.interpreter] if INTERPRETER else []
IMPLS = [pytest.param(name, marks=MARKS) for name in NAMES if _op.unavailable(name, DEVICE, torch.float32) is None]
FAST = [impl for impl in IMPLS if impl.values[0] != "reference"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# (M, D, F): one row, off every tile multiple, on them, the weight-streaming sizes, several tiles each way.
SHAPES = [(1, 1, 1), (1, 64, 48), (5, 33, 17), (16, 128, 96), (130, 72, 70), (128, 64, 128), (300, 40, 136)]

ACT: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh"),
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "identity": lambda g: g,
}


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)


def make(
    rows: int, features: int, hidden: int, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, a stacked weight, its bias, and a gradient of y; pre-activations have a magnitude of about `scale`."""
    return (
        tensor(rows, features, dtype=dtype, seed=1),
        tensor(2 * hidden, features, dtype=dtype, seed=2, scale=scale / math.sqrt(features)),
        tensor(2 * hidden, dtype=dtype, seed=3, scale=0.5 * scale),
        tensor(rows, hidden, dtype=dtype, seed=4),
    )


def eager(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, gate_first: bool = False) -> Tensor:
    """The definition in eager code."""
    first, second = functional.linear(x, weight, bias).chunk(2, -1)
    value, gate = (second, first) if gate_first else (first, second)
    return value * ACT[activation](gate)


def outcome(of: Callable[..., Tensor], leaves: Sequence[Tensor | None], dy: Tensor) -> list[Tensor]:
    """Return the result of `of` and the gradients of the leaves."""
    # Not clone, which may change strides.
    leaves = [None if leaf is None else leaf.detach().requires_grad_() for leaf in leaves]
    y = of(*leaves)
    return [y.detach(), *torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy)]


def assert_right(
    found: Sequence[Tensor], usual: Sequence[Sequence[Tensor]], truth: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Check `found` against `truth`, relative to the worst of several eager results: a single small one may be exact by luck."""
    # Triton's interpreter truncates float32 to bfloat16 where a GPU rounds.
    cut = 2 if INTERPRETER and dtype == torch.bfloat16 else 1
    for index, (result, true) in enumerate(zip(found, truth, strict=True)):
        assert result.shape == true.shape and result.dtype == dtype, index
        mine, eagers = errors([result], [true]), [errors([other[index]], [true]) for other in usual]
        band = cut * (1 if index == 0 else 3) * torch.finfo(dtype).eps / 2
        for of in ("max", "rms"):
            worst = max(getattr(other, of) for other in eagers)
            assert getattr(mine, of) <= 2 * worst + band, f"output {index}: {mine} against eager's {eagers}"


def summed_in_another_order(
    leaves: Sequence[Tensor | None], dy: Tensor, activation: str, order: Tensor
) -> list[Tensor]:
    """Eager results with permuted features: the same mathematics with other rounding errors."""
    x, weight, bias = leaves
    assert x is not None and weight is not None
    y, dx, dweight, *rest = outcome(lambda *a: eager(*a, activation), (x[:, order], weight[:, order], bias), dy)
    back = order.argsort()
    return [y, dx[:, back], dweight[:, back], *rest]


def check(impl: str, rows: int, features: int, hidden: int, dtype: torch.dtype, activation: str, bias: bool = True, save: str = "preact", scale: float = 1.0) -> None:  # fmt: skip
    x, weight, b, dy = make(rows, features, hidden, dtype, scale)
    leaves = (x, weight, b if bias else None)
    found = outcome(lambda *a: gated_linear(*a, activation=activation, save=save, impl=impl), leaves, dy)
    # More permutations for few results, whose worst error would otherwise depend on luck.
    generator, others = torch.Generator().manual_seed(5), min(max(3, 1024 // (rows * hidden)), 15)
    orders = [torch.arange(features), *(torch.randperm(features, generator=generator) for _ in range(others))]
    usual = [summed_in_another_order(leaves, dy, activation, order.to(DEVICE)) for order in orders]
    wide = [None if leaf is None else leaf.double() for leaf in leaves]
    assert_right(found, usual, outcome(lambda *a: eager(*a, activation), wide, dy.double()), dtype)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_shapes_and_dtypes_match_float64(impl: str, dtype: torch.dtype, shape: tuple[int, int, int], save: str) -> None:
    check(impl, *shape, dtype, "gelu_tanh", save=save)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("impl", IMPLS)
def test_activations_match_float64(impl: str, activation: str, bias: bool, save: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(impl, 37, 48, 40, dtype, activation, bias, save)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("impl", IMPLS)
def test_large_pre_activations_match_float64(impl: str, activation: str) -> None:
    """In the range where tanh, erf and sigmoid saturate."""
    for dtype, scale in itertools.product(DTYPES, (10.0, 100.0)):
        check(impl, 200, 32, 96, dtype, activation, scale=scale)


SPECIALS = [0.0, -0.0, 1.0, -1.0, 30.0, -30.0, 1e5, -1e5, 1e10, -1e10, 1e20, -1e20, 3e38, -3e38, math.inf, -math.inf, math.nan]  # fmt: skip


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # whichever flag is set
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("impl", IMPLS)
def test_infinities_and_nan_are_those_of_eager(impl: str, activation: str, save: str) -> None:
    """Special values of gate and value, one pair per column, from a zero weight and a bias; also gradients of 0 and ∞."""
    pairs = list(itertools.product((1.0, 0.0, -2.0, 1e20, math.inf, -math.inf, math.nan), SPECIALS))
    values, gates = (torch.tensor(column, device=DEVICE).requires_grad_() for column in zip(*pairs, strict=True))
    x, weight = torch.zeros(2, 16, device=DEVICE), torch.zeros(2 * len(pairs), 16, device=DEVICE)
    bias = torch.cat((values, gates)).detach().requires_grad_()
    y = gated_linear(x, weight, bias, activation=activation, impl=impl, save=save)
    # oneDNN's GELU gives NaN for +∞, and ∞ for 3e38; torch's own does not.
    with torch.backends.mkldnn.flags(enabled=False):
        usual = values * ACT[activation](gates)
        torch.testing.assert_close(y, usual.expand_as(y), equal_nan=True)
        for size in (1.0, 0.0, math.inf):
            (dbias,) = torch.autograd.grad(y, bias, torch.full_like(y, size), retain_graph=True)
            du, dg = torch.autograd.grad(usual, (values, gates), torch.full_like(usual, size), retain_graph=True)
            torch.testing.assert_close(dbias, torch.cat((du + du, dg + dg)), equal_nan=True)


LAYOUTS = [
    ("stacked", "(2F, D)", False), ("stacked", "(2F, D)", True), ("stacked", "(2, F, D)", False),
    ("stacked", "(2, F, D)", True), ("interleaved", "(2F, D)", False), ("interleaved", "(F, 2, D)", True),
    ("stacked", "strided", False), ("separate", "strided", False),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize(("layout", "form", "gate_first"), LAYOUTS)
@pytest.mark.parametrize("impl", IMPLS)
def test_weight_layouts(impl: str, layout: str, form: str, gate_first: bool, save: str, dtype: torch.dtype) -> None:
    rows, features, hidden = 26, 24, 20
    x, stacked, bias, dy = make(rows, features, hidden, dtype)
    value, gate = stacked.chunk(2)
    b_value, b_gate = bias.chunk(2)
    halves = (gate, value) if gate_first else (value, gate)
    biases = (b_gate, b_value) if gate_first else (b_value, b_gate)
    if layout == "separate":
        # Weights with different row strides and contiguous features.
        three = torch.stack((value, value, value), 1).view(hidden, 3 * features)
        two = torch.stack((value, gate), 1).view(hidden, 2 * features)
        leaves = (x, three[:, :features], two[:, features:], b_value, b_gate)

        def ours(x: Tensor, value: Tensor, gate: Tensor, b_value: Tensor, b_gate: Tensor) -> Tensor:
            return gated_linear(
                x, value, b_value, w_gate=gate, b_gate=b_gate, activation="silu", save=save, impl=impl
            )  # fmt: skip

        def plain(x: Tensor, value: Tensor, gate: Tensor, b_value: Tensor, b_gate: Tensor) -> Tensor:
            return functional.linear(x, value, b_value) * functional.silu(functional.linear(x, gate, b_gate))
    else:
        dim = 0 if layout == "stacked" else 1
        weight, b = torch.stack(halves, dim), torch.stack(biases, dim)
        if form in ("(2F, D)", "strided"):
            weight, b = weight.view(2 * hidden, features), b.view(-1)
        if form == "strided":
            weight = functional.pad(weight, (0, 8))[:, :features]
        leaves = (x, weight, b)

        def ours(x: Tensor, weight: Tensor, b: Tensor) -> Tensor:
            return gated_linear(
                x, weight, b, activation="silu", layout=layout, gate_first=gate_first, save=save, impl=impl
            )  # fmt: skip

        def plain(x: Tensor, weight: Tensor, b: Tensor) -> Tensor:
            shape = (2, hidden) if layout == "stacked" else (hidden, 2)
            first, second = weight.view(*shape, features).unbind(dim)
            b_first, b_second = b.view(shape).unbind(dim)
            u, g = functional.linear(x, first, b_first), functional.linear(x, second, b_second)
            return g * functional.silu(u) if gate_first else u * functional.silu(g)

    truth = outcome(plain, [leaf.double() for leaf in leaves], dy.double())
    assert_right(outcome(ours, leaves, dy), [outcome(plain, leaves, dy)], truth, dtype)


@pytest.mark.parametrize("impl", IMPLS)
def test_one_feature_of_wider_halves(impl: str) -> None:
    """The stride of a dimension of size 1 is arbitrary."""
    x, weight, bias = tensor(9, 24), tensor(2, 4, 24)[:, 1:2], tensor(2, 1)
    found = gated_linear(x, weight, bias, activation="silu", impl=impl)
    torch.testing.assert_close(found, eager(x, weight.reshape(2, 24), bias.view(-1), "silu"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("layout", "form", "gate_first"), LAYOUTS)
@pytest.mark.parametrize("impl", IMPLS)
def test_large_problems(impl: str, layout: str, form: str, gate_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code path of large problems on a small one: separate pre-activations, or a slice and a ragged rest. One dtype
    suffices, since the path differs only on the host."""
    monkeypatch.setattr(_autograd, "LARGE_BYTES", 0)
    for save in SAVES:
        test_weight_layouts(impl, layout, form, gate_first, save, torch.bfloat16)
    check(impl, 37, 24, 150, torch.float32, "gelu_tanh", save="input")


@pytest.mark.parametrize("impl", IMPLS)
def test_of_large_problems_wanted_gradients_alone_and_again(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_autograd, "LARGE_BYTES", 0)
    test_only_wanted_gradients_are_given(impl)
    x, weight, bias, dy = (t.requires_grad_() for t in make(33, 24, 16, torch.float32))
    y = geglu_linear(x, weight, bias, impl=impl)
    kept, last = (torch.autograd.grad(y, (x, weight, bias), dy, retain_graph=retain) for retain in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(kept, last, strict=True))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(y, x, dy)


@pytest.mark.skipif(DEVICE != "cpu", reason="elsewhere products may take memory of their own")
@pytest.mark.parametrize("layout", ["stacked", "interleaved", "separate"])
def test_the_peak_of_large_problems(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """y, both pre-activations, dx and half of dW; before the other half one pre-activation is freed."""
    monkeypatch.setattr(_autograd, "LARGE_BYTES", 0)
    monkeypatch.setattr(_onednn, "there", lambda: False)
    rows, features, hidden = 4096, 1024, 512
    x, weight, _, dy = make(rows, features, hidden, torch.float32)
    weights = weight.chunk(2) if layout == "separate" else (weight,)
    leaves = tuple(t.clone().requires_grad_() for t in (x, *weights))

    def step() -> Any:
        options: Any = {"w_gate": leaves[2]} if layout == "separate" else {"layout": layout}
        y = gated_linear(*leaves[:2], activation="silu", **options)
        return y, torch.autograd.grad(y, leaves, dy)

    step()  # builds kernels
    _, grown = growth(step, torch.device(DEVICE))
    y, of_x, half = rows * hidden * 4, rows * features * 4, hidden * features * 4
    assert grown is not None and grown.peak == pytest.approx(3 * y + of_x + half, rel=0.02)


@pytest.mark.skipif(DEVICE != "cpu", reason="elsewhere products may take memory of their own")
def test_the_peak_of_large_problems_with_two_large_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside dx: y, both pre-activations and one dW; or without the first pre-activation, both."""
    monkeypatch.setattr(_autograd, "LARGE_BYTES", 0)
    monkeypatch.setattr(_onednn, "there", lambda: False)
    rows, features, hidden = 512, 1024, 2048
    x, weight, _, dy = make(rows, features, hidden, torch.float32)
    leaves = tuple(t.clone().requires_grad_() for t in (x, *weight.chunk(2)))

    def step() -> Any:
        y = gated_linear(leaves[0], leaves[1], w_gate=leaves[2], activation="silu")
        return y, torch.autograd.grad(y, leaves, dy)

    step()  # builds kernels
    _, grown = growth(step, torch.device(DEVICE))
    y, of_x, of_weight = rows * hidden * 4, rows * features * 4, hidden * features * 4
    expected = of_x + max(3 * y + of_weight, 2 * y + 2 * of_weight)
    assert grown is not None and grown.peak == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("impl", IMPLS)
def test_geglu_linear_is_gated_linear_with_a_gelu(impl: str) -> None:
    x, weight, bias, _ = make(9, 24, 16, torch.float32)
    for gate_first, approximate in itertools.product((False, True), ("tanh", "none")):
        y = geglu_linear(x, weight, bias, approximate=approximate, gate_first=gate_first, impl=impl)
        activation = "gelu_tanh" if approximate == "tanh" else "gelu"
        torch.testing.assert_close(y, eager(x, weight, bias, activation, gate_first))


@pytest.mark.parametrize("impl", IMPLS)
def test_leading_dimensions_and_any_strides_of_x(impl: str) -> None:
    _, weight, bias, _ = make(1, 24, 16, torch.float32)
    x = tensor(3, 2, 5, 24)
    for view in (x, x[:, :1], x.transpose(0, 2), x[..., 0, :], x[0, 0, 0], tensor(24, 6).T, x[:, 0].flip(0), x[..., :1, :].expand(3, 2, 4, 24)):  # fmt: skip
        leaf = view.detach().requires_grad_()
        y = geglu_linear(leaf, weight, bias, impl=impl)
        usual = eager(leaf, weight, bias, "gelu_tanh")
        assert y.shape == usual.shape and y.is_contiguous()
        torch.testing.assert_close(y, usual)
        dy = torch.randn_like(usual)
        torch.testing.assert_close(torch.autograd.grad(y, leaf, dy), torch.autograd.grad(usual, leaf, dy))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows(impl: str, save: str) -> None:
    _, weight, bias, _ = make(1, 24, 16, torch.float32)
    for shape in ((0, 24), (3, 0, 24)):
        leaves = torch.empty(shape, device=DEVICE), weight, bias
        y, *grads = outcome(
            lambda *a: geglu_linear(*a, save=save, impl=impl), leaves, torch.empty(*shape[:-1], 16, device=DEVICE)
        )
        assert y.shape == (*shape[:-1], 16) and grads[0].shape == shape
        assert not grads[1].any() and not grads[2].any()


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_that_arrive_strided_or_expanded(impl: str, save: str) -> None:
    x, weight, bias, dy = make(33, 24, 16, torch.float32)
    for gradient in (tensor(16, 33).T, torch.ones((), device=DEVICE).expand(33, 16), dy[:1].expand(33, 16)):
        found = outcome(lambda *a: geglu_linear(*a, save=save, impl=impl), (x, weight, bias), gradient)
        usual = outcome(lambda *a: eager(*a, "gelu_tanh"), (x, weight, bias), gradient)
        torch.testing.assert_close(found, usual)
    zeros = torch._efficientzerotensor((33, 16), device=DEVICE)  # a ZeroTensor, as torch's own formulas may return
    assert not any(
        t.any() for t in outcome(lambda *a: geglu_linear(*a, save=save, impl=impl), (x, weight, bias), zeros)[1:]
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_only_wanted_gradients_are_given(impl: str) -> None:
    x, weight, bias, dy = make(33, 24, 16, torch.float32)  # large problems differ where rows are at least the columns
    usual = outcome(lambda *a: eager(*a, "gelu_tanh"), (x, weight, bias), dy)
    for save, wanted in itertools.product(SAVES, [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]):
        leaves = [t.clone().requires_grad_(bool(w)) for t, w in zip((x, weight, bias), wanted, strict=True)]
        geglu_linear(*leaves, save=save, impl=impl).backward(dy)
        for leaf, want, gradient in zip(leaves, wanted, usual[1:], strict=True):
            assert (leaf.grad is not None) == bool(want)
            if want:
                torch.testing.assert_close(leaf.grad, gradient)
    # Each of separate weights and biases alone.
    apart = (x, *weight.chunk(2), *bias.chunk(2))
    gradients = (usual[1], *usual[2].chunk(2), *usual[3].chunk(2))
    for save, index in itertools.product(SAVES, range(5)):
        leaves = [t.clone().requires_grad_(i == index) for i, t in enumerate(apart)]
        options: dict[str, Any] = {"w_gate": leaves[2], "b_gate": leaves[4], "save": save, "impl": impl}
        y = gated_linear(leaves[0], leaves[1], leaves[3], activation="gelu_tanh", **options)
        torch.testing.assert_close(torch.autograd.grad(y, leaves[index], dy)[0], gradients[index])


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("impl", IMPLS)
def test_bias_gradient_is_bitwise_reproducible(impl: str, save: str) -> None:
    leaves = make(300, 24, 40, torch.bfloat16)
    runs = [outcome(lambda *a: geglu_linear(*a, save=save, impl=impl), leaves[:3], leaves[3]) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("impl", FAST)
def test_every_element_is_written_and_none_beside(impl: str) -> None:
    """NaN-filled outputs inside memory that must stay unchanged."""
    x, weight, bias, dy = make(37, 40, 24, torch.float32)
    module = _op.implementation(impl)
    spec = _op.Spec("gelu_tanh", "stacked")
    halves = _op.Halves.of(spec, weight, None, bias)

    def guarded(*shape: int) -> tuple[Tensor, Tensor]:
        whole = torch.full((math.prod(shape) + 64,), math.nan, device=DEVICE)
        whole[:32] = whole[-32:] = 7.0
        return whole[32:-32].view(shape), whole

    (y, y_whole), (preact, preact_whole), (dbias, dbias_whole) = guarded(37, 24), guarded(37, 48), guarded(2, 24)
    module.forward(x, halves, spec, y, preact)
    module.gradient(dy, preact, preact, spec, dbias)
    (other, other_whole), (again, again_whole) = guarded(37, 48), guarded(2, 24)
    module.recompute_gradient(dy, x, halves, other, spec, again)
    torch.testing.assert_close(other, preact)
    torch.testing.assert_close(again, dbias)
    for whole in (y_whole, preact_whole, dbias_whole, other_whole, again_whole):
        assert not whole.isnan().any() and bool((whole[:32] == 7).all() and (whole[-32:] == 7).all())


@pytest.mark.parametrize("layout", ["stacked", "interleaved"])
@pytest.mark.parametrize("impl", IMPLS)
def test_an_exported_call_takes_other_strides_than_it_was_traced_with(impl: str, layout: Layout) -> None:
    class Unit(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return gated_linear(x, weight, activation="silu", layout=layout, impl=impl)

    exported = torch.export.export(Unit(), (tensor(16, 16), tensor(32, 16))).module()
    x, weight = tensor(16, 16, seed=1), tensor(32, 16, seed=2)
    y = Unit()(x, weight)
    for given in ((x.T.contiguous().T, weight), (x, weight.T.contiguous().T)):
        torch.testing.assert_close(exported(*given), y)
