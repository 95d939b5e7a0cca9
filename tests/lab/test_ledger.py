"""Bytes charged to an operator: each operand once, broadcast operands by their storage, views nothing."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from builders import row, study_record
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fusewise.lab.code.aten import Operators, multiplied
from fusewise.lab.ledger import Kernel, Ledger, Product, extent, merged
from fusewise.lab.record import Record
from fusewise.lab.render import html, markdown
from fusewise.lab.render import ledgers as render
from fusewise.lab.schema import schema

X = torch.arange(64, dtype=torch.float32).reshape(8, 8)  # 256 bytes
Y = torch.zeros(8, 8)  # an output buffer
ROW = torch.ones(8)  # 32 bytes
ONE = torch.tensor(1.0)  # 4 bytes
INDEX = torch.tensor([1, 3])  # 16 bytes
FIRST = torch.tensor([0])  # 8 bytes


def charged(function: Callable[[], object]) -> list[tuple[str, int, int]]:
    with Operators() as seen:
        function()
    return [(kernel.name.split(".")[1], kernel.read, kernel.written) for kernel in seen.kernels]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: X + 1, [("add", 256, 256)]),
        (lambda: X * X, [("mul", 256, 256)]),  # one tensor, read once
        (lambda: X * X.T, [("mul", 512, 256)]),  # two views, two orders
        (lambda: X + ROW, [("add", 288, 256)]),
        (lambda: X + ROW.expand(8, 8), [("add", 288, 256)]),  # an expanded row counts as one row
        (lambda: X.flatten().unfold(0, 8, 1) + 1, [("add", 256, 57 * 32)]),  # the windows share 64 elements
        (lambda: X[:4].view(32).unsqueeze(0), []),
        (lambda: X.t().contiguous(), [("clone", 256, 256)]),
        (lambda: torch.empty(8, 8), []),
        (lambda: torch.zeros(8, 8), [("zeros", 0, 256)]),
        (lambda: X.clone().add_(1), [("clone", 256, 256), ("add_", 256, 256)]),
        (lambda: torch.empty(8, 8).copy_(X), [("copy_", 256, 256)]),
        (lambda: torch.empty(8, 8).fill_(1), [("fill_", 0, 256)]),
        (lambda: torch.mul(X, 2, out=torch.empty(8, 8)), [("mul", 256, 256)]),
        (lambda: X.to(torch.bfloat16), [("_to_copy", 256, 128)]),
        (lambda: X.to(torch.float32), []),
        (lambda: torch.cat((X, X[:4])), [("cat", 384, 384)]),
        (lambda: X[INDEX], [("index", 64 + 16, 64)]),  # two rows of eight
        (lambda: functional.embedding(INDEX, X), [("embedding", 64 + 16, 64)]),
        # reads two rows, indices and an offset; writes a sum, a bag for each index, a size, and what only a maximum needs
        (
            lambda: functional.embedding_bag(INDEX, X, FIRST),
            [("_embedding_bag_forward_only", 64 + 16 + 8, 32 + 16 + 8 + 8)],
        ),
        (lambda: torch.is_same_size(X, Y), []),  # as torch.func.jvp asks
        (lambda: torch.zeros_like(X), [("zeros_like", 0, 256)]),  # only uses its shape
        (lambda: X.new_full((2,), 1.0), [("new_full", 0, 8)]),
        (lambda: Y.index_put_((INDEX,), X[:2]), [("index_put_", 64 + 16, 64)]),
        (lambda: Y.index_put_((INDEX,), ONE), [("index_put_", 4 + 16, 64)]),  # one value for two rows
        (lambda: Y.index_put_((INDEX,), X[:2], True), [("index_put_", 64 + 64 + 16, 64)]),
        (lambda: Y.index_copy_(0, INDEX, X[:2]), [("index_copy_", 64 + 16, 64)]),
        (lambda: Y.index_add_(1, INDEX, X[:, :2]), [("index_add_", 64 + 64 + 16, 64)]),
        (lambda: Y[0].scatter_(0, INDEX, 1.0), [("scatter_", 16, 8)]),
        (lambda: Y[0].scatter_add_(0, INDEX, ROW), [("scatter_add_", 32 + 16 + 8, 8)]),
        (lambda: X[0].scatter(0, INDEX, 1.0), [("scatter", 32 + 16, 32)]),  # a whole new tensor
        (lambda: X @ X, [("mm", 256, 256)]),
        (lambda: X.sum(), [("sum", 256, 4)]),
        (lambda: torch.chunk(X, 2, -1)[0] + 1, [("add", 128, 128)]),
        (lambda: X.detach().requires_grad_(False), []),
        (lambda: X.max(0), [("max", 256, 32 + 64)]),
    ],
)
def test_bytes_of_operators(function: Callable[[], object], expected: list[tuple[str, int, int]]) -> None:
    assert charged(function) == expected


@pytest.mark.parametrize(
    ("function", "product"),
    [
        (lambda: X @ X[:, :4], (256, 128, 1, 1, 1)),
        (lambda: torch.mm(X[:4].bfloat16(), X.bfloat16()), (64, 128, 1, 1, 1)),
        (lambda: torch.addmm(ROW, X, X.t()), (256, 256, 1, 1, 1)),
        (lambda: functional.linear(X, X[:2], ROW[:2]), (256, 64, 1, 1, 1)),
        (lambda: torch.bmm(X.view(2, 4, 8), X[:4].view(2, 8, 2)), (256, 128, 1, 1, 2)),
        (lambda: torch.baddbmm(ONE, X.view(2, 4, 8), X[:4].view(2, 8, 2)), (256, 128, 1, 1, 2)),
        (lambda: X.expand(300, 8, 8).reshape(-1, 8) @ X, (300 * 256, 256, 2, 1, 1)),  # 2400 rows
        (lambda: X @ X.repeat(1, 520), (256, 520 * 256, 1, 3, 1)),  # 4160 columns
        (lambda: X[:0] @ X, (0, 256, 1, 1, 1)),
        (lambda: X * X, None),
    ],
)
def test_a_product_is_told_beside_its_bytes(function: Callable[[], object], product: tuple[int, ...] | None) -> None:
    with Operators() as seen:
        function()
    assert seen.kernels[-1].product == product


def test_of_a_matrix_that_is_unknown_no_product_is_told() -> None:
    assert multiplied("addmm", [ROW, X, None]) is None
    assert multiplied("addmm", [None, X, X]) == (256, 256, 1, 1, 1)


@pytest.mark.parametrize(
    ("cache", "times", "again"),
    [
        (54, 1, 3 * 20 + 7 * 40),  # nothing is kept from use to use
        (75, 1, 3 * 20 + 7 * 40 * (27 / 75 - 0.25) / 0.25),
        (108, 1, 3 * 20),  # 27 from wave to wave
        (152, 1, 3 * 20),
        (160, 1, 3 * 20 * (76 / 160 - 0.25) / 0.25),  # 76 from pass to pass
        (304, 1, 0),
        (100, 2, 3 * 20 * (38 / 100 - 0.25) / 0.25),  # of two products, each with half of the bytes
    ],
)
def test_what_is_read_again_depends_on_what_is_moved_in_between(
    monkeypatch: pytest.MonkeyPatch, cache: int, times: int, again: float
) -> None:
    """In a pass 20 of weights and 10 of x, in both partitions of the cache, and 16 of others; in each of its 8 waves 2.5, 10
    and 2."""
    monkeypatch.setattr("fusewise.lab.ledger.KEPT", 0.25)
    monkeypatch.setattr("fusewise.lab.ledger.LOST", 0.5)
    kernel = Kernel(name="mm", read=66, written=58, product=Product(40, 20, passes=4, waves=8, times=times))
    assert kernel.again(cache) == round(again)


def test_a_ledger_reads_again_what_its_products_do() -> None:
    mm = Kernel(name="mm", read=2**20, written=2**20, product=Product(2**19, 2**19, 4, 1))
    assert mm.again(2**10) == 3 * 2**19
    assert ledger(mm, Kernel(name="add", read=1, written=1), mm).again(2**10) == 6 * 2**19


def test_a_table_is_charged_what_a_call_can_use_of_it() -> None:
    with Operators(used={ROW.data_ptr(): 12}) as seen:
        X + ROW
    assert [(k.read, k.written) for k in seen.kernels] == [(256 + 12, 256)]


def test_backward_is_seen_too() -> None:
    x = X.clone().requires_grad_()
    y = x * 3
    with Operators() as seen:
        torch.autograd.grad(y, x, X)
    assert [(k.name, k.read, k.written) for k in seen.kernels] == [("aten.mul.Tensor", 256, 256)]


class Scattering(torch.autograd.Function):
    """A backward that adds to zeros out of place."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x[INDEX]

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return torch.zeros(8, 8).index_add(0, INDEX, g)


@pytest.mark.parametrize(
    ("function", "read", "written"),
    [
        (lambda x: x.gather(1, INDEX[None]), 8 + 16 + 8, 8),
        (lambda x: x[INDEX], 64 + 16 + 64, 64),
        (lambda x: x.index_select(1, INDEX), 64 + 16 + 64, 64),
        (lambda x: x.max(0).values, 32 + 64, 32),
        (Scattering.apply, 256 + 64 + 16, 256),
    ],
)
def test_autograd_adds_to_its_zeros_in_place(function: Callable[[Tensor], Tensor], read: int, written: int) -> None:
    """Only under a dispatch mode does it add to a copy of them."""
    x = X.clone().requires_grad_()
    y = function(x)
    g = torch.ones_like(y)
    (_, zeros, _), (_, *moved) = charged(lambda: torch.autograd.grad(y, x, g))
    assert (zeros, moved) == (0, [read, written])


def test_operators_know_the_line_that_called_them() -> None:
    with Operators() as seen:
        X + 1
    stage = seen.stage()
    assert stage.text == "f32[8, 8] = aten.add.Tensor(f32[8, 8], 1)\n"
    assert stage.lines[1].partition(":")[0].endswith("test_ledger.py")


@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
def test_extent_counts_distinct_elements(
    sizes: list[int], broadcast: list[bool], step: int, dtype: torch.dtype
) -> None:
    own = [1 if wide else size for size, wide in zip(sizes, broadcast, strict=False)]
    x: Tensor = torch.zeros([*own, step], dtype=dtype)[..., 0].expand(sizes)  # with gaps between the elements
    distinct = 0 if x.numel() == 0 else len(set(torch.arange(max(1, torch.zeros(own).numel())).reshape(own).expand(sizes).flatten().tolist()))  # fmt: skip
    assert extent(x) == distinct * x.element_size()


kernels = st.builds(
    Kernel, name=st.sampled_from(["a", "b"]), read=st.integers(0, 9), written=st.integers(0, 9), note=st.just("")
)


@given(st.lists(kernels))
def test_merging_loses_nothing(found: list[Kernel]) -> None:
    together = merged(found)
    assert sum(kernel.bytes * times for kernel, times in together) == sum(kernel.bytes for kernel in found)
    assert len({kernel for kernel, _ in together}) == len(together)
    assert [k for k, _ in together] == sorted(set(found), key=found.index)


def ledger(*found: Kernel, minimum: int | None = 2048) -> Ledger:
    return Ledger(
        op="gelu", case="c|<b>", dtype="fp32", pass_="fwd", provider="eager", kernels=found, bytes_min=minimum
    )


def test_ledgers_survive_json_and_follow_the_schema() -> None:
    product = Product(x=2, weights=1, passes=4, waves=1)
    made = ledger(Kernel(name="k", read=1, written=2, note="n"), Kernel(name="mm", read=1, written=2, product=product))
    assert Ledger.from_json(made.to_json()) == made
    record = study_record([], ledgers=[made.to_json()])
    assert Ledger.from_json(Record.from_json(record.to_json()).ledgers[0]) == made
    pytest.importorskip("jsonschema").validate(record.to_json(), schema())


def test_the_table_adds_up() -> None:
    kernel = Kernel(name="mul", read=1024, written=1024)
    lines = render.table(ledger(kernel, Kernel(name="add", read=2048, written=0), kernel))
    assert lines == [
        ("mul", "2", "2.00 KiB", "2.00 KiB", "4.00 KiB", ""),
        ("add", "1", "2.00 KiB", "0 B", "2.00 KiB", ""),
        ("sum", "3", "4.00 KiB", "2.00 KiB", "6.00 KiB", "3.00 ×"),
    ]
    assert render.table(ledger(kernel, minimum=None))[-1][-1] == "–"
    assert render.text(ledger(kernel)).splitlines()[0].split() == [
        "kernel",
        "times",
        "read",
        "written",
        "bytes",
        "of",
        "minimum",
    ]


def test_what_is_read_again_is_told_in_words() -> None:
    product = Product(x=2**23, weights=2**23, passes=8, waves=1)
    found = ledger(Kernel(name="mm", read=2**24, written=2**10, product=product))
    said = "matrix products read about 56.0 MiB again through a cache of 8.00 MiB"
    assert render.text(found, 2**23).splitlines()[-1] == said
    assert [render.again(found, unknown) for unknown in (0, None, 2**40)] == ["", "", ""]
    made = study_record([row("eager", op="gelu", case="c|<b>")], ledgers=[found.to_json()])
    made.environment |= {"device": "cuda:0", "cache_bytes": 2**23}
    assert f"eager: {said}." in markdown.report(made)
    assert f"eager: {said}." in html.report(made)
    made.environment["device"] = "cpu"  # of whose caches nothing was checked
    assert "again through" not in markdown.report(made) + html.report(made)


def test_the_reports_have_every_kernel_and_the_sums() -> None:
    kernel = Kernel(name="<img>|x", read=1024, written=3072)
    key = {"op": "gelu", "case": "c|<b>"}
    made = study_record([row("eager", **key)], ledgers=[ledger(kernel, kernel).to_json()])
    said = markdown.report(made)
    assert "### Traffic of c\\|&lt;b&gt; fp32 fwd" in said and "<img>" not in said
    assert "| eager | &lt;img&gt;\\|x | 2 | 2.00 KiB | 6.00 KiB | 8.00 KiB |  |" in said
    assert "| eager | sum | 2 | 2.00 KiB | 6.00 KiB | 8.00 KiB | 4.00 × |" in said
    page = re.sub("<[^>]*>", " ", html.report(made))
    assert "eager 2 2.00 KiB 6.00 KiB 8.00 KiB 4.00 ×" in " ".join(page.split())
    assert "Where the memory traffic goes" not in markdown.report(study_record([row("eager")]))
