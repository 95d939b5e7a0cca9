"""Dispatch of GPU calls, as far as it can be tested without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fusewise
from fusewise.ops.rope_and_cache import _op

from ..a_gpu import as_dispatch_sees_it

TABLES = {"cos_sin": (9000, 64), "angles": (9000, 32), "inv_freq": (32,)}


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    yield from as_dispatch_sees_it(_op.choice, monkeypatch)


@pytest.mark.parametrize(
    ("built", "table", "taken", "not_cuda"),
    [
        (True, "cos_sin", "cuda", ""),
        (False, "cos_sin", "triton", 'not built; run `fusewise build` or call with impl="cuda"'),
        (True, "inv_freq", "triton", "with angles computed in the kernel"),
        (True, "angles", "triton", "with angles computed in the kernel"),
    ],
)
@pytest.mark.parametrize("tokens", [1, 8192])
def test_auto_takes_cuda_once_it_is_built(
    built: bool, table: str, taken: str, not_cuda: str, tokens: int, a_gpu: list[str]
) -> None:
    a_gpu[:] = [] if built else a_gpu
    with FakeTensorMode():
        q, k, v = (torch.empty(tokens, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))
        key_cache, value_cache = (torch.empty(600, 16, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        kwargs: dict[str, Any] = {
            "key_cache": key_cache, "value_cache": value_cache, "slot_mapping": torch.empty(tokens, dtype=torch.int64, device="cuda"),
            table: torch.empty(TABLES[table], device="cuda"),
        }  # fmt: skip
        told = fusewise.explain_dispatch(fusewise.rope_and_cache_, q, k, v, **kwargs)
        assert told.impl == taken
        assert not_cuda in told.passed_over.get("cuda", "")
        assert ("triton" in told.passed_over) == (taken == "cuda")
        spec = "" if table == "cos_sin" else f"table={table}"
        assert _op.serving("auto", q, spec) == taken
        for impl in ("triton", "cuda"):
            assert _op.serving(impl, q, spec) == impl
        assert _op.serving("auto", q.double(), spec) == "triton"  # by preference order


@pytest.mark.gpu
def test_auto_is_what_explain_dispatch_says_on_a_gpu() -> None:
    q, k, v = (
        torch.randn(3, 8, 64, device="cuda"),
        torch.randn(3, 2, 64, device="cuda"),
        torch.randn(3, 2, 64, device="cuda"),
    )
    caches = {name: torch.zeros(2, 16, 2, 64, device="cuda") for name in ("key_cache", "value_cache")}
    slots, positions = torch.arange(3, device="cuda"), torch.arange(3, device="cuda")
    call: dict[str, Any] = {
        **caches, "slot_mapping": slots, "positions": positions, "cos_sin": torch.randn(8, 64, device="cuda")
    }  # fmt: skip
    fusewise.rope_and_cache_(q.clone(), k.clone(), v, **call, impl="cuda")  # builds it
    told = fusewise.explain_dispatch(fusewise.rope_and_cache_, q, k, v, **call)
    assert told.impl == "cuda"
    assert _op.serving("auto", q, "") is _op.choice.implementation("cuda")
