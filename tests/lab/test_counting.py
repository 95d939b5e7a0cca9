"""Counting by operator: the number of summands, and the operations of products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fusewise
from fusewise.lab import targets, truth
from fusewise.lab.counting import MOST_TERMS, counted
from fusewise.lab.problem import Task

LABELS = torch.tensor([1, 2, 0])


def terms(function: Callable[..., Any], *shapes: tuple[int, ...]) -> int:
    tensors = [torch.randn(shape) for shape in shapes]
    return counted(lambda: function(*tensors))[1].terms


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (torch.mm, [(3, 7), (7, 5)], 7),
        (torch.matmul, [(2, 3, 7), (2, 7, 5)], 7),
        (torch.mv, [(3, 7), (7,)], 7),
        (torch.dot, [(7,), (7,)], 7),
        (functional.linear, [(2, 3, 7), (5, 7), (5,)], 7),
        (torch.inference_mode()(functional.linear), [(3, 7), (5, 7)], 7),  # where nothing decomposes it first
        (lambda a, b: torch.einsum("ij,jk->ik", a, b), [(3, 7), (7, 5)], 7),
        (functional.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3)], 27),
        (functional.scaled_dot_product_attention, [(1, 2, 64, 16)] * 3, 128),  # of D, and of S values
        (lambda x, w: fusewise.gated_linear(x, w, activation="silu"), [(3, 16), (8, 16)], 32),  # of both halves
        (lambda x: x.sum(0), [(9, 4)], 9),
        (lambda x: x.mean(), [(9, 4)], 36),
        (lambda x: x.norm(dim=1), [(9, 4)], 4),
        (lambda x: x.softmax(-1), [(9, 4)], 4),
        (lambda x: x.cumsum(0), [(9, 4)], 9),
        (lambda x: functional.layer_norm(x, (4,)), [(9, 4)], 4),
        (lambda x: functional.rms_norm(x, (4,)), [(9, 4)], 4),
        (lambda x: functional.group_norm(x, 2), [(3, 4, 6)], 12),
        (lambda x: functional.cross_entropy(x, LABELS), [(3, 7)], 21),
        (lambda x: functional.cross_entropy(x, LABELS[:, None].expand(3, 4)), [(3, 7, 4)], 84),
        (functional.smooth_l1_loss, [(9, 4)] * 2, 36),
        (functional.huber_loss, [(9, 4)] * 2, 36),
        (lambda x, y: functional.mse_loss(x, y, reduction="none"), [(9, 4)] * 2, 1),
        (lambda x, y: functional.smooth_l1_loss(x, y, reduction="none"), [(9, 4)] * 2, 1),
        (lambda x, y: functional.binary_cross_entropy(x.sigmoid(), y.sigmoid()), [(9, 4)] * 2, 36),
        (functional.binary_cross_entropy_with_logits, [(9, 4)] * 2, 36),
        (lambda x, y: functional.soft_margin_loss(x, y.sign()), [(9, 4)] * 2, 36),
        (lambda x: functional.multi_margin_loss(x, LABELS), [(3, 7)], 21),
        (lambda x: functional.multilabel_margin_loss(x, torch.zeros(3, 7, dtype=torch.int64)), [(3, 7)], 21),
        (lambda x: (x @ x.mT).sum(1), [(3, 7)], 7),  # the longest of several
        (torch.tanh, [(1000,)], 1),
        (lambda x: x[3] * x[4, 1], [(100, 3)], 1),
        (lambda w: functional.embedding(LABELS, w), [(1000, 4)], 1),  # gathers, adds nothing
        (lambda x: x.amax(0), [(9, 4)], 1),
        (lambda x: x[:0].sum(0), [(9, 4)], 1),
        (lambda x: x.sum(), [(2 * MOST_TERMS,)], MOST_TERMS),
    ],
)
def test_terms(function: Callable[..., Any], shapes: list[tuple[int, ...]], expected: int) -> None:
    assert terms(function, *shapes) == expected


def mirrored(a: Tensor) -> Tensor:
    """Make a positive definite matrix."""
    return a @ a.mT + 12 * torch.eye(a.shape[-1])


N = 12
OPERATIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], int]] = {
    # two operations per term of the sum
    "dot": (torch.dot, [(7,), (7,)], 2 * 7),
    "vdot": (torch.vdot, [(7,), (7,)], 2 * 7),
    "inner": (torch.inner, [(3, 7), (5, 7)], 2 * 3 * 5 * 7),
    "mv": (torch.mv, [(3, 7), (7,)], 2 * 3 * 7),
    "baddbmm": (torch.baddbmm, [(2, 3, 5), (2, 3, 7), (2, 7, 5)], 2 * 2 * 3 * 7 * 5),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [(2, 3, 7), (2, 7, 5)], 2 * 2 * 3 * 7 * 5),
    "bilinear": (functional.bilinear, [(5, 3), (5, 4), (6, 3, 4), (6,)], 2 * 5 * 6 * 3 * 4),
    "cdist": (torch.cdist, [(2, 5, 3), (2, 7, 3)], 2 * 2 * 5 * 7 * 3),
    "cdist-by-product": (torch.cdist, [(50, 3), (70, 3)], 2 * 50 * 70 * 3),
    "cdist-1": (lambda x, y: torch.cdist(x, y, p=1.0), [(50, 3), (70, 3)], 2 * 50 * 70 * 3),
    "pdist": (functional.pdist, [(5, 3)], 2 * 10 * 3),
    "conv1d": (functional.conv1d, [(2, 3, 9), (4, 3, 3)], 2 * (2 * 4 * 7) * (3 * 3)),
    "conv2d": (functional.conv2d, [(2, 3, 9, 9), (4, 3, 3, 3)], 2 * (2 * 4 * 7 * 7) * (3 * 9)),
    "conv2d-groups": (
        lambda x, w: functional.conv2d(x, w, groups=2),
        [(2, 4, 9, 9), (4, 2, 3, 3)],
        2 * (2 * 4 * 7 * 7) * (2 * 9),
    ),
    "conv3d": (functional.conv3d, [(2, 3, 5, 5, 5), (4, 3, 3, 3, 3)], 2 * (2 * 4 * 27) * (3 * 27)),
    "conv_transpose2d": (functional.conv_transpose2d, [(2, 3, 9, 9), (3, 4, 3, 3)], 2 * (2 * 3 * 81) * (4 * 9)),
    "conv_tbc": (torch.conv_tbc, [(9, 2, 3), (3, 3, 4), (4,)], 2 * (7 * 2 * 4) * (3 * 3)),
    "attention": (functional.scaled_dot_product_attention, [(1, 2, 8, 4)] * 3, 2 * (2 * 2 * 8 * 8 * 4)),
    "heads": (
        lambda x, w, b, o, ob: functional.multi_head_attention_forward(
            x, x, x, 8, 2, w, b, None, None, False, 0.0, o, ob
        )[0],
        [(5, 2, 8), (24, 8), (24,), (8, 8), (8,)],
        2 * 10 * 4 * 8 * 8 + 4 * 10 * 5 * 8,
    ),
    "outer": (torch.outer, [(7,), (5,)], 0),  # no sums
    # LAPACK's count
    "solve": (torch.linalg.solve, [(N, N), (N, 3)], 2 * N**3 // 3 + 2 * N**2 * 3),
    "solve-one": (torch.linalg.solve, [(2, N, N), (2, N)], 2 * (2 * N**3 // 3 + 2 * N**2)),
    "solve-right": (
        lambda a, b: torch.linalg.solve(a, b, left=False),
        [(N, N), (3, N)],
        2 * N**3 // 3 + 2 * N**2 * 3,
    ),
    "lu": (torch.linalg.lu_factor, [(4, N, N)], 4 * 2 * N**3 // 3),
    "lu-high": (torch.linalg.lu, [(20, N)], 20 * N**2 - N**3 // 3),
    "det": (torch.linalg.det, [(N, N)], 2 * N**3 // 3),
    "slogdet": (torch.linalg.slogdet, [(N, N)], 2 * N**3 // 3),
    "inv": (torch.linalg.inv, [(N, N)], 2 * N**3),
    "cholesky": (lambda a: torch.linalg.cholesky(mirrored(a)), [(N, N)], 2 * N**3 + N**3 // 3),
    "cholesky-5": (lambda a: torch.linalg.cholesky(mirrored(a)), [(5, 5)], 2 * 5**3 + 5**3 // 3),
    "cholesky-of-old": (lambda a: torch.cholesky(mirrored(a)), [(5, 5)], 2 * 5**3 + 5**3 // 3),
    "_int_mm": (lambda a, b: torch._int_mm(a.to(torch.int8), b.to(torch.int8)), [(3, 7), (7, 5)], 2 * 3 * 7 * 5),
    "cholesky_solve": (lambda b, a: torch.cholesky_solve(b, a.tril()), [(N, 3), (N, N)], 2 * N**2 * 3),
    "cholesky_inverse": (lambda a: torch.cholesky_inverse(a.tril()), [(N, N)], 2 * N**3 // 3),
    "triangular": (
        lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False),
        [(N, N), (N, 3)],
        N**2 * 3,
    ),
    "qr": (torch.linalg.qr, [(20, N)], 4 * 20 * N**2 - 4 * N**3 // 3),
    "qr-without-q": (lambda a: torch.linalg.qr(a, mode="r"), [(20, N)], 2 * 20 * N**2 - 2 * N**3 // 3),
    # FFTW's count
    "fft": (lambda x: torch.fft.fft(torch.complex(x, x)), [(3, 8)], 3 * 5 * 8 * 3),
    "rfft": (torch.fft.rfft, [(3, 8)], 3 * 5 * 8 * 3 // 2),
    "irfft": (lambda x: torch.fft.irfft(torch.complex(x, x)), [(3, 5)], 3 * 5 * 8 * 3 // 2),
    "fft2": (lambda x: torch.fft.fft2(torch.complex(x, x)), [(3, 8, 8)], 3 * 5 * 64 * 6),
}


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_operations(name: str) -> None:
    function, shapes, expected = OPERATIONS[name]
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in shapes]
    result, counter = counted(lambda: function(*tensors))
    assert counter.flops == expected
    torch.testing.assert_close(result, function(*tensors), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dot", 0),  # scalars times vectors
        ("bilinear", 3 * 2 * 5 * 6 * 3 * 4),
        ("cdist", 2 * 2 * 2 * 5 * 7 * 3),
        ("pdist", 2 * 10 * 3),
        (
            "solve",
            2 * N**2 * 3 + 2 * N**2 * 3,
        ),  # two triangular solves, one product
        ("det", 2 * N**3),  # the inverse from the factors
        ("inv", 2 * 2 * N**3),
        ("irfft", 3 * 5 * 8 * 3 // 2),
    ],
)
def test_operations_of_backwards(name: str, expected: int) -> None:
    function, shapes, _ = OPERATIONS[name]
    torch.manual_seed(0)
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    result = function(*tensors)
    ones = torch.ones_like(result)
    assert counted(lambda: torch.autograd.grad(result, tensors, ones))[1].flops == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("solve-one", N), ("lu-high", 20), ("cholesky_solve", N), ("bilinear", 12), ("cdist", 3), ("rfft", 1)]
)  # fmt: skip
def test_terms_of_what_makes_more_than_sums(name: str, expected: int) -> None:
    function, shapes, _ = OPERATIONS[name]
    assert terms(function, *shapes) == expected


def test_operations_of_complex_numbers_are_those_of_their_parts() -> None:
    a, b = torch.randn(3, 7, dtype=torch.complex64), torch.randn(7, 5, dtype=torch.complex64)
    _, counter = counted(lambda: a @ b)
    assert (counter.flops, counter.terms) == (8 * 3 * 7 * 5, 7)


@pytest.mark.parametrize("frozen", [False, True])
def test_attention_that_is_one_operator_without_gradients(frozen: bool) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(not frozen)
    x, heads, behind = torch.randn(2, 5, 8), 2 * 10 * 4 * 8 * 8 + 4 * 10 * 5 * 8, 2 * 10 * 2 * 8 * 16
    assert counted(lambda: layer(x))[1].flops == heads + behind
    assert counted(lambda: layer.self_attn(x, x, x))[1].flops == heads


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")  # torch emits it once per process
def test_of_sequences_that_differ_in_length_nothing_is_counted() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1).eval().requires_grad_(False)
    mask = torch.tensor([[False] * 5, [False, False, False, True, True]])
    x = torch.randn(2, 5, 8)
    result, counter = counted(lambda: encoder(x, src_key_padding_mask=mask))
    assert (result.shape, counter.flops) == ((2, 5, 8), 0)


def test_operations_of_products() -> None:
    x, w = torch.randn(3, 7), torch.randn(7, 5)
    result, counter = counted(lambda: (x @ w).relu() @ w.mT)
    assert counter.flops == 2 * (2 * 3 * 7 * 5) and torch.equal(result, (x @ w).relu() @ w.mT)


def test_a_call_at_fault_fails_as_it_does_alone() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        counted(lambda: torch.randn(3, 7) @ torch.randn(5, 7))


def test_what_a_function_compiles_by_itself_compiles_no_mode() -> None:
    from torch._dynamo.utils import counters

    function = torch.compile(lambda x: x + 1, backend="eager")
    counters.clear()
    counted(lambda: function(torch.randn(3)))
    assert not counters["frames"]


def test_gradients_add_along_other_dimensions() -> None:
    def gradients(x: Tensor, w: Tensor) -> None:
        y = functional.linear(x.requires_grad_(), w.requires_grad_())
        torch.autograd.grad(y, (x, w), torch.ones_like(y))

    assert terms(gradients, (300, 7), (5, 7)) == 300


@pytest.mark.parametrize(("pass_", "expected"), [("fwd", 512), ("fwd+bwd", 4096)])
def test_of_a_problem(pass_: Any, expected: int) -> None:
    """x (1024, 512), weight (4096, 512): the forward sums over features, the backward over the product's columns."""
    p = targets.problem_for(Task("geglu", "quick-square", "fp32", pass_, "cpu", 0))
    _, yardstick = truth.expected(p)
    assert yardstick.terms == expected
