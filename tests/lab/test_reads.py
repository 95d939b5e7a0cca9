"""The bytes that operators read of a memory, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusewise.lab import reads
from fusewise.lab.counting import counted

INDEX = torch.tensor([1, 5, 5, 7])  # three rows
ROWS = (1000, 8)


def read(function: Callable[[Tensor], Any], x: Tensor) -> int | None:
    counter = counted(lambda: function(x), reads=True)[1]
    assert counter.reads is not None
    return counter.reads.bytes().get(reads.storage(x))


@pytest.mark.parametrize(
    ("function", "shape", "elements"),
    [
        (lambda x: functional.embedding(INDEX, x), ROWS, 24),
        (lambda x: torch.inference_mode()(functional.embedding)(INDEX, x), ROWS, 24),
        (lambda x: functional.embedding_bag(INDEX[None], x), ROWS, 24),
        (lambda x: functional.embedding(INDEX, x, max_norm=1.0), ROWS, 24),
        (lambda x: x[INDEX], ROWS, 24),
        (lambda x: x[:, INDEX], ROWS, 3000),
        (lambda x: x.index_select(0, INDEX), ROWS, 24),
        (lambda x: x.gather(0, INDEX[:, None].expand(4, 8)), ROWS, 24),
        (lambda x: torch.take_along_dim(x, INDEX[:, None], 0), ROWS, 24),
        (lambda x: torch.take(x, INDEX), ROWS, 3),
        (lambda x: x.masked_select(torch.arange(8) < 3), ROWS, 3000),
        (lambda x: x.view(-1)[16:].view(-1, 8)[INDEX], ROWS, 24),
        (lambda x: x[INDEX] + x[INDEX + 2], ROWS, 5 * 8),  # rows 1, 5, 7 and 3, 7, 9
        (lambda x: x[:10] * 2, ROWS, 80),
        (lambda x: x.narrow(0, 5, 10) + x[10:20], ROWS, 120),
        (lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1], ROWS, 8000),
        (lambda x: x.t()[3] + 1, ROWS, 1000),
        (lambda x: x[:1].expand(4, 8) + 1, ROWS, 8),
        (lambda x: x[:10].view(torch.int32) + 1, ROWS, 80),
        (lambda x: (x[INDEX], x.sum()), ROWS, 8000),
        (lambda x: x[2000:] + 1, ROWS, None),
        (lambda x: torch.zeros_like(x), ROWS, None),
        (lambda x: x.t(), ROWS, None),
        (lambda x: functional.nll_loss(x, torch.tensor([1, 1, -100])), (3, 9), 2),
        (lambda x: functional.nll_loss(x, torch.ones(2, 4, dtype=torch.int64)), (2, 3, 4), 8),
        (lambda x: x.trace(), (4, 4), 4),
        (lambda x: x.tril(-1) + x.triu(2), (4, 4), 6 + 3),
        (lambda x: torch.linalg.cholesky_ex(x), (2, 4, 4), 20),
        (lambda x: (x.tril(), torch.linalg.cholesky_ex(x)), (4, 4), 10),  # of one triangle
        (lambda x: (x.triu(), torch.linalg.cholesky_ex(x, upper=True)), (4, 4), 10),
        (lambda x: (x.tril(), torch.cholesky_solve(torch.ones(4, 1), x)), (4, 4), 10),
        (lambda x: (x.triu(), torch.cholesky_solve(torch.ones(4, 1), x, upper=True)), (4, 4), 10),
        (lambda x: (x.triu(), torch.cholesky_inverse(x, upper=True)), (4, 4), 10),
        (lambda x: (x.tril(), torch.cholesky_inverse(x)), (4, 4), 10),
        (lambda x: (x.triu(), torch.linalg.solve_triangular(x, torch.ones(4, 1), upper=True)), (4, 4), 10),
        (lambda x: (x.tril(), torch.linalg.eigvalsh(x)), (4, 4), 10),
        (lambda x: (x.triu(), torch.linalg.eigvalsh(x, UPLO="u")), (4, 4), 10),
        (lambda x: torch.bucketize(torch.ones(3), x), (1000,), 0),
        (lambda x: functional.conv2d(x, torch.ones(4, 3, 1, 1), stride=2), (2, 3, 8, 8), 6 * 16),
        (lambda x: functional.conv2d(x, torch.ones(4, 3, 3, 3), padding=1), (2, 3, 8, 8), 6 * 64),
        (lambda x: functional.conv1d(x, torch.ones(4, 3, 2), stride=4, padding=1), (2, 3, 8), 6 * 4),
        (lambda x: functional.conv_transpose2d(x, torch.ones(3, 4, 1, 1), stride=2), (2, 3, 8, 8), 6 * 64),
        (lambda x: functional.conv2d(x[:0], torch.ones(4, 3, 1, 1), stride=2), (2, 3, 8, 8), None),
        (lambda x: functional.max_pool2d(x, 2), (2, 3, 9, 9), 6 * 64),
        (lambda x: functional.avg_pool2d(x, (2, 1), (2, 3)), (3, 9, 9), 3 * 8 * 3),
        (lambda x: functional.max_pool1d(x, 2), (2, 9), 16),
        (lambda x: functional.avg_pool3d(x, 2), (1, 3, 3, 3), 8),
        (lambda x: functional.interpolate(x, scale_factor=2), (1, 2, 4, 4), 32),
        (lambda x: functional.interpolate(x, size=2), (1, 2, 4, 4), 8),
        (lambda x: torch.zeros(4, 8).index_add_(0, torch.arange(4), x[:4]), ROWS, 32),
        # arguments beside the one that is read in parts
        (lambda x: torch.bucketize(x, torch.ones(3)), (1000,), 1000),
        (lambda x: functional.conv2d(torch.ones(2, 3, 9, 9), x, stride=2, dilation=2), (4, 3, 3, 3), 108),
        # what is written alone
        (lambda x: x.copy_(torch.ones(ROWS)), ROWS, None),
        (lambda x: torch.empty(ROWS).copy_(x), ROWS, 8000),
        (lambda x: x.index_copy_(0, INDEX[:2], torch.ones(2, 8)), ROWS, None),
    ],
)  # fmt: skip
def test_read(function: Callable[[Tensor], Any], shape: tuple[int, ...], elements: int | None) -> None:
    assert read(function, torch.randn(shape)) == (None if elements is None else 4 * elements)


def test_of_repeated_elements_a_lookup_counts_none() -> None:
    assert read(lambda x: x[INDEX], torch.randn(8).expand(1000, 8)) == 0
    assert read(lambda x: x + 1, torch.randn(8).expand(1000, 8)) == 32


def test_of_a_memory_too_large_for_a_mask_the_largest_read_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "MOST_ELEMENTS", 100)
    assert read(lambda x: x[:10] * x[10:20], torch.randn(ROWS)) == 320
    assert read(lambda x: x[INDEX], torch.randn(ROWS)) == 0


def test_memory_that_is_freed_meanwhile_leaves_its_identity_to_none() -> None:
    kept = [torch.randn(64)]
    known = {reads.storage(kept[0])}

    def function() -> list[Tensor]:
        result = kept.pop()[:8] + 1
        return [result, *(result.clone() for _ in range(100))]

    results, counter = counted(function, reads=True)
    assert known.isdisjoint(map(reads.storage, results))
    assert counter.reads is not None and set(counter.reads.bytes()) == known
