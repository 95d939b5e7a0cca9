"""The CUDA kernel source, compiled for the CPU, against the oracle: addresses, masks, slots and arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fusewise
from fusewise.ops.rope._validate import DEFAULTS
from fusewise.ops.rope_and_cache import _cuda, _op, _validate, api

from .. import cuda_on_cpu
from ..rope.support import DTYPES, assert_bits
from .cases import CASES, Made, check, make
from .machine import simulated  # noqa: F401 (a fixture)


def called(made: Made) -> None:
    fusewise.rope_and_cache_(made.q, made.k, made.v, **made.arguments())


def operated(made: Made) -> None:
    operator, arguments = operation(made)
    operator(*arguments)


def operation(made: Made, impl: str = "auto") -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The operator of a call, and its arguments."""
    options = made.arguments()
    own = [options.pop(n, None) for n in ("key_cache", "value_cache", "slot_mapping", "block_table")]
    layout, write_k = options.pop("cache_layout"), options.pop("write_k", True)
    tensors, call, _ = api.validated(
        made.q, made.k, made.v, *own, layout, write_k, tuple({**DEFAULTS, **options, "impl": impl}.values())
    )
    return _op._writing if write_k else _op._keeping, (*tensors, *call)


every_case = pytest.mark.parametrize("name", [n for n, case in CASES.items() if DTYPES[case.dtype].itemsize < 8])


@every_case
@pytest.mark.usefixtures("simulated")
def test_matches_the_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call through Python, then through the C++ fast path, then through the operator in Python and in C++."""
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


# With many SMs a thread handles one head, and for few tokens chunks of half the width.
@every_case
@pytest.mark.parametrize(("backwards", "processors"), [(True, 1), (False, 132), (True, 132)])
def test_on_a_larger_device_and_in_either_order(
    name: str, backwards: bool, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = cuda_on_cpu.library(_cuda, "fusewise_rope_and_cache").plays(backwards=backwards, processors=processors)
    before, old = make(CASES[name]).copy()
    after, new = before.copy()
    arguments: dict[str, Any] = after.arguments()
    monkeypatch.setattr(_validate, "_PASSED", {})  # calls that are valid here are rejected without these kernels
    with cuda_on_cpu.serving(_cuda, _op.choice, kernels):
        assert fusewise.rope_and_cache_(after.q, after.k, after.v, **arguments, impl="cuda") is None
    check(before, after, (old, new), CASES[name].options.get("write_k", True))
