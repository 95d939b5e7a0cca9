"""The memory of repeated calls is bounded."""

from __future__ import annotations

from fusewise._shared.memo import Memo


def test_it_is_emptied_when_it_is_full() -> None:
    memo: Memo[int, str] = Memo(3)
    for key in range(3):
        memo[key] = str(key)
    assert memo == {0: "0", 1: "1", 2: "2"}
    memo[3] = "3"
    assert memo == {3: "3"}
    assert memo.get(0) is None
