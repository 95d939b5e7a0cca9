"""The gated MLP against eager code and float64: forward, backward, saved tensors, and double backward."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusewise._shared import host
from fusewise.lab.memory import growth
from fusewise.lab.truth import errors
from fusewise.ops.gated_linear import _op, gated_mlp
from fusewise.ops.gated_linear._problem import ACTIVATIONS, SAVES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = ["triton"] if INTERPRETER else list(_op.IMPLEMENTATIONS)
MARKS = [pytest.mark.interpreter] if INTERPRETER else []
IMPLS = [pytest.param(name, marks=MARKS) for name in NAMES if _op.unavailable(name, DEVICE, torch.float32) is None]

ACT = {"gelu_tanh": lambda g: functional.gelu(g, approximate="tanh"), "gelu": functional.gelu, "silu": functional.silu,
       "relu": functional.relu, "sigmoid": torch.sigmoid, "identity": lambda g: g}  # fmt: skip


def make(dtype: torch.dtype, rows: int = 37, features: int = 24, hidden: int = 40, out: int = 32) -> list[Tensor]:
    """x, w_gate, w_up, w_down, their three biases."""
    generator = torch.Generator().manual_seed(5)

    def leaf(*shape: int) -> Tensor:
        scale = shape[-1] ** -0.5 if len(shape) == 2 and shape[0] != rows else 1.0
        return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype).requires_grad_()

    return [leaf(rows, features), leaf(hidden, features), leaf(hidden, features), leaf(out, hidden), leaf(hidden), leaf(hidden), leaf(out)]  # fmt: skip


def eager(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, b_gate: Any, b_up: Any, b_down: Any, activation: str
) -> Tensor:
    y = ACT[activation](functional.linear(x, w_gate, b_gate)) * functional.linear(x, w_up, b_up)
    return functional.linear(y, w_down, b_down)


def ours(x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, b_gate: Any, b_up: Any, b_down: Any, activation: str, **options: Any) -> Tensor:  # fmt: skip
    return gated_mlp(x, w_gate, w_up, w_down, b_gate=b_gate, b_up=b_up, b_down=b_down, activation=activation, **options)


def outcome(of: Any, leaves: Sequence[Tensor], dz: Tensor) -> list[Tensor]:
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    z = of(*leaves)
    return [z.detach(), *torch.autograd.grad(z, leaves, dz)]


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("impl", IMPLS)
def test_matches_float64(impl: str, activation: str, save: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        leaves = make(dtype)
        dz = torch.randn(37, 32, generator=torch.Generator().manual_seed(6)).to(DEVICE, dtype)
        found = outcome(lambda *a: ours(*a, activation, save=save, impl=impl), leaves, dz)
        usual = outcome(lambda *a: eager(*a, activation), leaves, dz)
        truth = outcome(lambda *a: eager(*a, activation), [leaf.double() for leaf in leaves], dz.double())
        cut = 2 if INTERPRETER and dtype == torch.bfloat16 else 1
        for index, (mine, other, true) in enumerate(zip(found, usual, truth, strict=True)):
            a, b = errors([mine], [true]), errors([other], [true])
            band = cut * 3 * torch.finfo(dtype).eps / 2
            assert mine.dtype == dtype and a.max <= 2 * b.max + band and a.rms <= 2 * b.rms + band, (dtype, index, a, b)


@pytest.mark.parametrize(("layout", "gate_first"), list(itertools.product(("stacked", "interleaved"), (True, False))))
@pytest.mark.parametrize("impl", IMPLS)
def test_both_matrices_in_one_tensor(impl: str, layout: str, gate_first: bool) -> None:
    x, w_gate, w_up, w_down, b_gate, b_up, _ = make(torch.float32)
    dim = 0 if layout == "stacked" else 1
    order = (0, 1) if gate_first else (1, 0)
    weight = torch.stack([(w_gate, w_up)[i] for i in order], dim).detach()
    bias = torch.stack([(b_gate, b_up)[i] for i in order], dim).detach()
    dz = torch.randn(37, 32, device=DEVICE)

    def plain(x: Tensor, weight: Tensor, bias: Tensor, w_down: Tensor) -> Tensor:
        weights, biases = weight.unbind(dim), bias.unbind(dim)
        gate, up = (0, 1) if gate_first else (1, 0)
        return eager(x, weights[gate], weights[up], w_down, biases[gate], biases[up], None, "silu")

    found = outcome(
        lambda x, w, b, d: ours(x, w, None, d, b, None, None, "silu", layout=layout, gate_first=gate_first, impl=impl),
        (x, weight, bias, w_down), dz,
    )  # fmt: skip
    torch.testing.assert_close(found, outcome(plain, (x, weight, bias, w_down), dz), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
def test_only_wanted_gradients_are_given(impl: str) -> None:
    sizes = (12, 24, 40, 32) if INTERPRETER else (128, 24, 128, 64)  # of a product by oneDNN, which records nothing
    leaves, dz = make(torch.float32, *sizes), torch.randn(sizes[0], sizes[-1], device=DEVICE)
    usual = outcome(lambda *a: eager(*a, "silu"), leaves, dz)[1:]
    for save, index in itertools.product(SAVES, range(len(leaves))):
        given = [leaf.detach().requires_grad_(i == index) for i, leaf in enumerate(leaves)]
        z = ours(*given, "silu", save=save, impl=impl)
        (found,) = torch.autograd.grad(z, given[index], dz)
        torch.testing.assert_close(found, usual[index], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("save", SAVES)
def test_a_retained_graph_and_second_gradients(save: str) -> None:
    leaves = make(torch.float32)
    z = ours(*leaves, "gelu_tanh", save=save)
    dz = torch.randn_like(z)
    differentiable = torch.autograd.grad(z, leaves, dz, create_graph=True)
    runs = [torch.autograd.grad(z, leaves, dz, retain_graph=keep) for keep in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    torch.testing.assert_close(differentiable, runs[0])
    small = [leaf.detach().double().requires_grad_() for leaf in make(torch.float64, 3, 3, 2, 2)]
    assert torch.autograd.gradcheck(lambda *a: ours(*a, "gelu", save=save), small)
    assert torch.autograd.gradgradcheck(lambda *a: ours(*a, "gelu", save=save), small)
    x, w_gate, w_up, w_down, *_ = small
    both = torch.cat((w_gate, w_up)).detach().requires_grad_()
    without_biases = partial(gated_mlp, w_up=None, activation="gelu", save=save)
    assert torch.autograd.gradgradcheck(lambda x, both, down: without_biases(x, both, w_down=down), (x, both, w_down))


def test_held_memory_is_the_contract() -> None:
    leaves = make(torch.bfloat16)
    own = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    for save, expected in (("preact", 2 * 37 * 40 * 2), ("input", 0)):
        kept: dict[int, int] = {}

        def pack(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
            if t.untyped_storage().data_ptr() not in own:
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            z = ours(*leaves, "silu", save=save)
        assert sum(kept.values()) == expected and z.grad_fn is not None


@pytest.mark.skipif(DEVICE != "cpu", reason="elsewhere products may take memory of their own")
@pytest.mark.parametrize(("save", "preact"), [("preact", 0), ("input", 2)])
@pytest.mark.parametrize("python", [False, True])
@pytest.mark.usefixtures("without_onednn")
def test_backward_needs_y_and_the_pre_activations(python: bool, save: str, preact: int) -> None:
    """In addition to the gradients: y until that of W_down is computed, and both pre-activations if they were not saved."""
    shapes = (256, 128), (4096, 128), (4096, 128), (128, 4096)
    leaves = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    dz = torch.ones(()).expand(256, 128)
    with host.through_python() if python else contextlib.nullcontext():
        for _ in range(2):  # the first call builds
            z = gated_mlp(*leaves, activation="silu", save=save)  # type: ignore[arg-type]
            _, grown = growth(lambda z=z: torch.autograd.grad(z, leaves, dz), torch.device("cpu"))
    y, dx, dw = (elements * 4 for elements in (256 * 4096, 256 * 128, 4096 * 128))
    assert grown is not None and grown.peak == pytest.approx(preact * y + dw + max(y, dx + 2 * dw), rel=0.1)


def test_leading_dimensions_no_rows_and_no_gradients() -> None:
    x, *weights = make(torch.float32, rows=12)
    for shape in ((2, 6, 24), (3, 0, 24), (24,)):
        part = x.detach().reshape(-1)[: torch.Size(shape).numel()].view(shape).requires_grad_()
        z = ours(part, *weights, "silu")
        torch.testing.assert_close(z, eager(part, *weights, "silu"))
        z.sum().backward()
        assert part.grad is not None and part.grad.shape == part.shape
    with torch.no_grad():
        assert not ours(x, *weights, "silu").requires_grad


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo
@pytest.mark.parametrize("save", SAVES)
def test_compiles_whole(save: str) -> None:
    leaves = make(torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: ours(*a, "silu", save=save).square().sum(), fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*leaves), leaves)
    usual = torch.autograd.grad(eager(*leaves, "silu").square().sum(), leaves)
    torch.testing.assert_close(found, usual, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("replaced", "error", "match"),
    [
        (
            {3: torch.randn(32, 41)},
            ValueError,
            r"gated_mlp: w_down must have as many columns as there are gated features, F = 40",
        ),
        (
            {3: torch.randn(1, 32, 40)},
            ValueError,
            r"gated_mlp: w_down must have 2 dimensions, got \(1, 32, 40\); pass it as \(O, F\)",
        ),
        (
            {6: torch.randn(31)},
            ValueError,
            r"gated_mlp: b_down must be contiguous, of shape \(32,\), got shape \(31,\)",
        ),
        ({1: torch.randn(39, 24)}, ValueError, r"gated_mlp: w_gate must have the shape of w_up, \(40, 24\)"),
        (
            {1: None, 2: torch.randn(80, 24), 4: None, 5: None},
            TypeError,
            "gated_mlp: w_gate must be a torch.Tensor, got None",
        ),
        ({5: None}, ValueError, "gated_mlp: b_up must be given where the other bias is"),
        ({3: torch.randn(32, 40, dtype=torch.float64)}, TypeError, "gated_mlp: w_down must have the dtype of x"),
    ],
)
def test_mistakes(replaced: dict[int, Any], error: type[Exception], match: str) -> None:
    call: list[Any] = [leaf.detach().cpu() for leaf in make(torch.float32)]
    for index, value in replaced.items():
        call[index] = value
    with pytest.raises(error, match=match):
        ours(*call, "silu")
