"""fusewise operators inside thunder.jit: one symbol each, with the same results and gradients as without Thunder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusewise
from fusewise.integrations.thunder import executor
from fusewise.lab.plugin import Missing
from fusewise.lab.providers.thunder import imported
from fusewise.nn import GatedLinear, RotaryEmbedding

pytestmark = pytest.mark.filterwarnings("ignore")  # from Thunder's imports


@pytest.fixture(scope="module")
def thunder() -> Any:
    try:
        return imported()
    except Missing as reason:
        pytest.skip(str(reason))


ANGLES = torch.outer(torch.arange(8.0), 10000 ** (-torch.arange(0, 16, 2) / 16))
TABLE = {"cos": ANGLES.cos(), "sin": ANGLES.sin()}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


ROTARY, ROTARY_BY_TABLE = RotaryEmbedding(16), RotaryEmbedding(16, table="cos_sin")
UNIT = GatedLinear(8, 6, activation="silu")


CASES: dict[str, tuple[Callable[..., Any], Callable[[], list[Tensor]]]] = {
    "rope": (
        lambda q, k: fusewise.rope(q * 2, k, **TABLE),
        lambda: [normal(2, 8, 4, 16), normal(2, 8, 2, 16)],
    ),
    "rope-by-position": (
        lambda q, k: fusewise.rope(q, k, TABLE["cos"], TABLE["sin"]), lambda: [normal(2, 8, 4, 16), normal(2, 8, 2, 16)],
    ),
    "rope-one": (lambda q: fusewise.rope(q, **TABLE, layout="bhsd") * 3, lambda: [normal(2, 4, 8, 16)]),
    "rope-deepseek": (
        lambda q: fusewise.rope(q, **TABLE, pairing="interleaved_to_half"), lambda: [normal(2, 8, 4, 16)],
    ),
    "rope-module": (ROTARY, lambda: [normal(2, 8, 4, 16), normal(2, 8, 2, 16)]),
    "rope-module-table": (ROTARY_BY_TABLE, lambda: [normal(2, 8, 4, 16), normal(2, 8, 2, 16)]),
    "gated_linear-module": (UNIT, lambda: [normal(2, 5, 8)]),
    "geglu_linear": (
        lambda x, w, b: fusewise.geglu_linear(x + 1, w, b), lambda: [normal(2, 5, 8), normal(12, 8), normal(12)],
    ),
    "gated_linear": (
        lambda x, up, gate: fusewise.gated_linear(x, up, w_gate=gate, activation="silu") * 2,
        lambda: [normal(5, 8), normal(6, 8), normal(6, 8)],
    ),
    "gated_mlp": (
        lambda x, gate, up, down: fusewise.gated_mlp(x, gate, up, down, activation="silu"),
        lambda: [normal(5, 8), normal(6, 8), normal(6, 8), normal(8, 6)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(thunder: Any, name: str) -> None:
    function, inputs = CASES[name]
    tensors = inputs()
    jitted = thunder.jit(function, executors=[executor(), *thunder.get_default_executors()])
    given, wanted = ((y,) if isinstance(y, Tensor) else y for y in (jitted(*tensors), function(*tensors)))
    dys = [torch.randn_like(y) for y in wanted]
    for ours, theirs in zip(given, wanted, strict=True):
        assert torch.equal(ours, theirs)
    gradients = (torch.autograd.grad(ys, tensors, dys) for ys in (given, wanted))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    symbols = [bound.sym.name for bound in thunder.last_traces(jitted)[-1].bound_symbols]
    assert symbols.count(f"fusewise_{name.partition('-')[0]}") == 1


@pytest.mark.parametrize("name", ["geglu_linear", "gated_linear", "gated_mlp"])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_autocast(thunder: Any, name: str, x_dtype: torch.dtype) -> None:
    """In the dtype of `F.linear`, with the caller's weights in theirs, and float32 gradients of those."""
    function, inputs = CASES[name]
    x, *weights = inputs()
    tensors = [x.detach().to(x_dtype).requires_grad_(), *weights]
    jitted = thunder.jit(function, executors=[executor(), *thunder.get_default_executors()])
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = jitted(*tensors), function(*tensors)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)
    dy = torch.randn_like(theirs)
    for got, wanted in zip(*(torch.autograd.grad(y, tensors, dy) for y in (ours, theirs)), strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted)


def test_a_gradient_whose_features_are_not_contiguous(thunder: Any) -> None:
    q = normal(2, 8, 4, 16)
    jitted = thunder.jit(lambda q: fusewise.rope(q, **TABLE).sum(), executors=[executor()])
    (ours,) = torch.autograd.grad(jitted(q), q)
    (theirs,) = torch.autograd.grad(fusewise.rope(q, **TABLE).sum(), q)
    torch.testing.assert_close(ours, theirs)


def test_writing_into_a_tensor_is_refused(thunder: Any) -> None:
    q = torch.randn(2, 8, 4, 16)
    jitted = thunder.jit(lambda q, out: fusewise.rope(q, **TABLE, out=out), executors=[executor()])
    with pytest.raises(ValueError, match=r"^rope: out must be None inside thunder\.jit, got tensors; use the result$"):
        jitted(q, torch.empty_like(q))


def test_only_where_it_is_given(thunder: Any) -> None:
    before = thunder.get_default_executors(), thunder.get_all_executors()
    assert executor() is executor()
    assert (thunder.get_default_executors(), thunder.get_all_executors()) == before
