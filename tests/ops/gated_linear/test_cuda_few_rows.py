"""The CUDA kernel that streams the weights for few rows: its tiles, and on a GPU its results and dispatch."""

from __future__ import annotations

import pytest
import torch

import fusewise
from fusewise.ops.gated_linear import geglu_linear
from fusewise.ops.gated_linear._cuda import tiles
from fusewise.ops.gated_linear._problem import Spec

from .test_cuda_hopper import assert_right, on_hopper


@pytest.mark.parametrize(
    ("rows", "hidden", "width"),
    [
        (1, 14336, 112),
        (16, 28672, 112),
        (1, 11008, 88),  # 126 tiles on 132 SMs; with tiles of 48 it would be 230
        (64, 28672, 56),
        (64, 11008, 88),
        (80, 14336, 56),
        (64, 8192, 64),
        (96, 14336, 56),
        (128, 14336, 112),  # wider tiles read x half as often: 1 to 2 % faster, 4 % with 28672
        (128, 11008, 88),
        (128, 17408, 48),  # two warpgroups would have 72 features, and as many products as for 128
        (128, 8, 8),
        (144, 14336, 112),
        (160, 28672, 112),
        (160, 11008, None),  # halved sideways tiles take as long
        (200, 14336, 112),
        (200, 8192, 64),
        (200, 28672, None),
        (209, 8192, None),
    ],
)  # fmt: skip
def test_tiles_of_few_rows_share_the_features_evenly(rows: int, hidden: int, width: int | None) -> None:
    """The fastest measured on an H200, or within 4 % of it; None: sideways tiles are."""
    assert tiles.width_of_stream(rows, hidden, 132) == width


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 65, 97, 128, 129, 160, 208])
def test_tiles_of_few_rows_fit(rows: int) -> None:
    for hidden in (*range(8, 20000, 1304), 28672):
        for processors in (1, 78, 132):
            width = tiles.width_of_stream(rows, hidden, processors)
            assert (width is None and rows > tiles.STREAM_ROWS) or (8 <= width <= 128 and width % 8 == 0)


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("rows", [1, 7, 16, 17, 32, 33, 64, 65, 81, 128, 129, 160, 161, 208])
    def test_few_rows(self, rows: int) -> None:
        """Every number of columns; tiles of 8 to 128 features, and two tiles on some SMs."""
        for features, hidden in ((72, 264), (2048, 8192), (4096, 14336), (520, 24576)):
            assert_right("y", (rows, features, hidden), torch.bfloat16, Spec("gelu_tanh", "stacked"))

    @pytest.mark.parametrize("rows", [1, 16, 17, 33, 65, 128])
    @pytest.mark.parametrize("layout", ["stacked", "interleaved"])
    def test_few_rows_with_pre_activations(self, rows: int, layout: str) -> None:
        for features, hidden in ((72, 264), (2048, 8192), (4096, 14336), (520, 24576)):
            assert tiles.choose("preact", rows, features, hidden, 132, gluon=True).tiles == "stream"
            assert_right("preact", (rows, features, hidden), torch.bfloat16, Spec("gelu_tanh", layout))

    def test_it_is_chosen_for_few_rows(self) -> None:
        """If TMA can describe the operands."""
        x, weight = torch.randn(128, 64, device="cuda").bfloat16(), torch.randn(256, 64, device="cuda").bfloat16()
        training = weight.detach().clone().requires_grad_()
        for rows in (1, 16, 128):
            assert fusewise.explain_dispatch(geglu_linear, x[:rows], weight).impl == "cuda"
            assert fusewise.explain_dispatch(geglu_linear, x[:rows], training, save="input").impl == "cuda"
            told = fusewise.explain_dispatch(geglu_linear, x[:rows], training)
            assert told.impl == "cuda" and "its tiles are for more rows" in told.path
            told = fusewise.explain_dispatch(geglu_linear, x[:rows], weight[:252])
            assert told.impl == "triton" and "16 bytes" in told.passed_over["cuda"]

    def test_few_rows_wait_for_what_the_kernel_before_writes(self) -> None:
        """The previous kernel may write the weights or x, which may be the y of another such call."""
        x, weight = torch.randn(64, 4096, device="cuda").half(), torch.randn(8192, 4096, device="cuda").half() / 64
        weights = [torch.randn_like(weight) / 64 for _ in range(4)]
        expected, found = [], []
        for other in weights:
            y = geglu_linear(x, other, impl="cuda")
            torch.cuda.synchronize()
            expected.append(geglu_linear(y, other, impl="cuda"))
            torch.cuda.synchronize()
        for _ in range(20):
            for other in weights:
                weight.copy_(other)
                found.append(geglu_linear(geglu_linear(x, weight, impl="cuda"), weight, impl="cuda"))
        torch.cuda.synchronize()
        for i, made in enumerate(found):
            assert torch.equal(made, expected[i % len(weights)])
