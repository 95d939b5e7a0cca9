"""Calls of the C++ fast path, and of Python without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewise._shared import build
from fusewise.ops.rope import _host
from fusewise.ops.rope._validate import DEFAULTS

from .support import Place, make_table, require

TABLE = make_table("half", 8, 2, torch.float32)


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Load the extension, built if needed, with an empty cache."""
    require(Place("cpu", "cpu"))
    try:
        _host.extension()
    except build.BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(_host, "unavailable", lambda *_: None)  # on a CPU, too
    _host.forget()
    yield
    _host.forget()


def qk(**more: Any) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 4, 3, 16, **more), torch.randn(2, 4, 1, 16, **more)


def recalled(function: Callable[..., Any], *xs: Tensor, **kwargs: Any) -> Any:
    """Call the fast path directly; None if it falls back to Python."""
    q, k = (*xs, None)[:2]
    return getattr(_host, function.__name__)(q, k, *{**DEFAULTS, **kwargs}.values())


def into(out: Any, *xs: Tensor, **kwargs: Any) -> Any:
    """Call the fast path directly with `out=`."""
    q, k = (*xs, None)[:2]
    return _host.rope_out(q, k, *{**DEFAULTS, **kwargs}.values(), out)


def by_python(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> Any:
    with _host.through_python(), monkeypatch.context() as patch:
        patch.setattr(_host, "remember", lambda *_: None)
        return call()


def tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
