"""The CUDA kernel compiled for the host, over the matrix: addresses, masks, slots and arithmetic. Each call through Python, then
by the quick way of a call that has been before, then by the operator, first in Python and then in C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fusewise
from fusewise.ops.rope._validate import DEFAULTS
from fusewise.ops.rope_and_cache import _cuda, _op, api

from ..rope.support import DTYPES, assert_bits
from .cases import CASES, Made, check, make
from .machine import Simulated, simulated  # noqa: F401 (a fixture)


def called(made: Made) -> None:
    fusewise.rope_and_cache_(made.q, made.k, made.v, **made.arguments())


def operated(made: Made) -> None:
    operator, arguments = operation(made)
    operator(*arguments)


def operation(made: Made, impl: str = "auto") -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The operator behind a call, and its arguments."""
    options = made.arguments()
    own = [options.pop(n, None) for n in ("key_cache", "value_cache", "slot_mapping", "block_table")]
    layout, write_k = options.pop("cache_layout"), options.pop("write_k", True)
    tensors, call, _ = api.validated(
        made.q, made.k, made.v, *own, layout, write_k, tuple({**DEFAULTS, **options, "impl": impl}.values())
    )
    return _op._writing if write_k else _op._keeping, (*tensors, *call)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if DTYPES[case.dtype].itemsize < 8])
def test_matches_the_oracle(name: str, simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    before, old = make(CASES[name]).copy()
    copies = [before.copy() for _ in range(4)]
    (first, _), (second, _), (third, _), (fourth, _) = copies
    called(first)
    operated(third)
    operator, arguments = operation(fourth)
    monkeypatch.setattr(api, "validated", lambda *_: pytest.fail("validated again"))
    monkeypatch.setattr(_cuda, "launch", lambda *_: pytest.fail("launched by Python"))
    called(second)
    operator(*arguments)
    check(before, first, (old, copies[0][1]), CASES[name].options.get("write_k", True))
    for made, storages in copies[1:]:
        for storage, want in zip(storages, copies[0][1], strict=True):
            assert_bits(storage, want)
        assert [x._version for x in made.written()] == [x._version for x in first.written()]
