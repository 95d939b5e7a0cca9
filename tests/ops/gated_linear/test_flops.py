"""FlopCounterMode counts the matmuls of the gated linear unit as in eager code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")  # the counter imports it
from torch.utils.flop_counter import FlopCounterMode

from fusewise import gated_linear, gated_mlp
from fusewise.ops.gated_linear.flops import register_flop_formulas

M, D, F, OUT = 6, 16, 24, 8
X, W, W_DOWN = torch.randn(2, 3, D), torch.randn(2 * F, D), torch.randn(OUT, F)


def counted(call: Callable[..., Tensor], *tensors: Tensor, backward: bool = True) -> int:
    register_flop_formulas()
    leaves = [t.clone().requires_grad_(backward) for t in tensors]
    with FlopCounterMode(display=False) as counter:
        y = call(*leaves)
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


def eager(x: Tensor, w: Tensor) -> Tensor:
    u, g = functional.linear(x, w).chunk(2, -1)
    return u * functional.gelu(g)


def test_forward_and_backward_count_what_eager_does() -> None:
    for backward in (False, True):
        usual = counted(eager, X, W, backward=backward)
        assert usual == (3 if backward else 1) * 4 * M * D * F
        assert counted(lambda x, w: gated_linear(x, w, activation="gelu"), X, W, backward=backward) == usual
        halves = counted(
            lambda x, a, b: gated_linear(x, a, w_gate=b, activation="silu"), X, W[:F], W[F:], backward=backward
        )
        assert halves == usual


def test_a_recomputing_backward_counts_its_product() -> None:
    usual = counted(eager, X, W)
    assert counted(lambda x, w: gated_linear(x, w, activation="gelu", save="input"), X, W) == usual + 4 * M * D * F


@pytest.mark.parametrize(("save", "again"), [("preact", 0), ("input", 1)])
def test_the_mlp_counts_its_projection_down(save: str, again: int) -> None:
    found = counted(
        lambda x, a, b, down: gated_mlp(x, a, b, down, activation="silu", save=save), X, W[:F], W[F:], W_DOWN
    )
    assert found == (3 + again) * 4 * M * D * F + 3 * 2 * M * F * OUT


def test_importing_the_module_neither_imports_the_counter_nor_registers() -> None:
    script = (
        "import sys, torch, fusewise.ops.gated_linear.flops as f; assert 'torch.utils.flop_counter' not in sys.modules; "
        "f.register_flop_formulas(); f.register_flop_formulas(); from torch.utils.flop_counter import flop_registry; "
        "print(torch.ops.fusewise.gated_linear in flop_registry)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "True\n"
