"""The calls in docs/rope-and-cache.md run, and write where their comments say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[3] / "docs" / "rope-and-cache.md"


@pytest.mark.skipif(not DOCS.is_file(), reason="the package is installed without its docs")
def test_the_calls_run() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    imports, setup, *calls = code.split("\n\n")
    scope: dict[str, Any] = {}
    exec(imports + "\n\n" + setup, scope)
    found = []
    for part in calls:
        exec(part, scope)
        heads = -3 if "hnd" in part else -2
        found.append((scope["key_cache"].abs().sum((-1, heads)) > 0).nonzero().tolist())
    vllm, flashinfer, decode, packed, contiguous = found
    assert vllm == flashinfer == [[2, 7], [7, 0], [7, 1], [7, 2], [7, 3]]
    assert decode == [[0, 7], [3, 0], [6, 1], [9, 2], [12, 3], [17, 8]]
    assert packed == sorted([*decode, [3, 1], [3, 2], [3, 3], [3, 4]])
    assert contiguous == [[b, 3 + t] for b in range(2) for t in range(5)]
