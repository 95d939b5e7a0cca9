"""The CUDA kernels' own source against the oracle, without a GPU, as large as that of one multiprocessor and of many."""

from __future__ import annotations

from typing import Any

import pytest

import fusewise
from fusewise.ops.rope_and_cache import _cuda
from fusewise.ops.rope_and_cache._op import choice

from .. import cuda_on_cpu
from .cases import CASES, check, make


# A call has one head a thread on many multiprocessors, several on one, and the chunks of a few tokens are of half the width.
@pytest.mark.parametrize(("backwards", "processors"), [(False, 132), (True, 132), (False, 1), (True, 1)])
@pytest.mark.parametrize("name", CASES)
def test_matches_the_oracle(name: str, backwards: bool, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library = cuda_on_cpu.played(monkeypatch, _cuda, choice, "fusewise_rope_and_cache")
    library.play(backwards=backwards, processors=processors)
    case = CASES[name]
    if case.dtype == "fp64":
        pytest.skip("CUDA serves no float64")
    before, old = make(case).copy()
    after, new = before.copy()
    arguments: dict[str, Any] = after.arguments()
    assert fusewise.rope_and_cache_(after.q, after.k, after.v, **arguments, impl="cuda") is None
    check(before, after, (old, new), case.options.get("write_k", True))
