"""The CUDA kernels of the gated linear unit in tf32: their source compiled for the CPU, and their machine code."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fusewise.ops.gated_linear import _cuda, reference
from fusewise.ops.gated_linear._problem import Halves, Spec, new_preact

from .. import cuda_codegen, cuda_on_cpu
from .test_cuda_on_cpu import TIMES, named

# (M, D, F): less than a tile and less than a K step; ragged in every dimension, several tiles and passes through the ring buffer by
# both warp groups; one row more than two tiles; nothing that TMA supports.
SHAPES = [(1, 4, 4), (150, 228, 296), (257, 32, 104), (150, 133, 270)]


def rounded(x: Tensor) -> Tensor:
    """To the nearest value with tf32's 10 bits after the point."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).double()


@pytest.mark.parametrize("how", TIMES, ids=named)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("preact", [False, True], ids=["y", "preact"])
def test_tf32(shape: tuple[int, int, int], preact: bool, how: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """On views of larger matrices, which stay as they are elsewhere: operands are rounded, not cut off, and nothing else is in tf32."""
    only = _cuda.one(torch.float32, "gelu_tanh")
    kernels = cuda_on_cpu.library(SimpleNamespace(SOURCES=_cuda.TF32_SOURCES), "fusewise_gated_tf32", *only)
    asked = torch.float32, "gelu_tanh", True
    monkeypatch.setattr(_cuda, "_kernel", lambda *of: {asked: kernels.plays(processors=2, **how)}[of])
    monkeypatch.setattr(_cuda, "tf32_allowed", lambda: True)
    rows, features, hidden = shape
    spec = Spec("gelu_tanh", "stacked")
    x = torch.randn(rows, features + 4)[:, :features]
    weight = torch.randn(2 * hidden, features) / features**0.5
    of = Halves.of(Spec("gelu_tanh", "interleaved"), weight, None, torch.randn(2 * hidden))
    around = torch.full((rows + 2, hidden), 7.0)
    y = around[1:-1].fill_(torch.nan)
    made = new_preact(x, hidden, spec).fill_(torch.nan)
    _cuda.forward(x, of, spec, y, made if preact else None)
    exact = Halves(rounded(of.value), rounded(of.gate), *(None if t is None else t.double() for t in of[2:]))
    true, preact_of = torch.empty_like(y, dtype=torch.float64), new_preact(x.double(), hidden, spec)
    reference.forward(rounded(x), exact, spec, true, preact_of)
    torch.testing.assert_close(y, true.float(), rtol=1e-5, atol=2e-5)
    if preact:
        torch.testing.assert_close(made, preact_of.float(), rtol=1e-5, atol=1e-5)
    assert bool((around[0] == 7.0).all() and (around[-1] == 7.0).all())


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_what_tf32_compiles_to(activation: str) -> None:
    """No spills; a step is eight consecutive tensor core instructions; the weights are multicast to two blocks."""
    path, said = cuda_codegen.prepared(lambda: _cuda.recipe(torch.float32, activation, tf32=True))
    assert "serialized" not in said
    kernels = [body for body in cuda_codegen.listing(path, "sm_90a") if "gated_linear_kernel" in body.splitlines()[0]]
    assert len(kernels) == 2
    for body in kernels:
        code = [line for line in body.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/ +\S", line)]
        products = [i for i, line in enumerate(code) if "HGMMA.64x192x8.F32.TF32" in line]
        assert len(products) == 8 and products[-1] - products[0] < 120
        assert not re.search(r"\b(LDL|STL)\b", body)
        assert not [line for line in code[products[0] - 20 : products[-1]] if "R2UR" in line]
        assert "UTMALDG.2D.MULTICAST" in body and "STS.64" in body and "UTMASTG.2D" in body
