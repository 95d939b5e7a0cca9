"""What is counted of operators: the length of sums, and the operations of products."""

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
        (torch.inference_mode()(functional.linear), [(3, 7), (5, 7)], 7),  # where nothing takes it apart before
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
        (lambda x: (x @ x.mT).sum(1), [(3, 7)], 7),  # the longest of several
        (torch.tanh, [(1000,)], 1),
        (lambda x: x[3] * x[4, 1], [(100, 3)], 1),
        (lambda w: functional.embedding(LABELS, w), [(1000, 4)], 1),  # reads a part, adds nothing
        (lambda x: x.amax(0), [(9, 4)], 1),
        (lambda x: x[:0].sum(0), [(9, 4)], 1),
        (lambda x: x.sum(), [(2 * MOST_TERMS,)], MOST_TERMS),
    ],
)
def test_terms(function: Callable[..., Any], shapes: list[tuple[int, ...]], expected: int) -> None:
    assert terms(function, *shapes) == expected


def test_operations_of_products() -> None:
    x, w = torch.randn(3, 7), torch.randn(7, 5)
    result, counter = counted(lambda: (x @ w).relu() @ w.mT)
    assert counter.flops == 2 * (2 * 3 * 7 * 5) and torch.equal(result, (x @ w).relu() @ w.mT)


def test_a_call_at_fault_fails_as_it_does_alone() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        counted(lambda: torch.randn(3, 7) @ torch.randn(5, 7))


def test_gradients_add_along_other_dimensions() -> None:
    def gradients(x: Tensor, w: Tensor) -> None:
        y = functional.linear(x.requires_grad_(), w.requires_grad_())
        torch.autograd.grad(y, (x, w), torch.ones_like(y))

    assert terms(gradients, (300, 7), (5, 7)) == 300


@pytest.mark.parametrize(("pass_", "expected"), [("fwd", 512), ("fwd+bwd", 4096)])
def test_of_a_problem(pass_: Any, expected: int) -> None:
    """x (1024, 512) and a weight (4096, 512): of the features forward, of the columns of the product backward."""
    p = targets.problem_for(Task("geglu", "quick-square", "fp32", pass_, "cpu", 0))
    _, yardstick = truth.expected(p)
    assert yardstick.terms == expected
