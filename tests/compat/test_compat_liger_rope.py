"""fusewise.compat.liger.liger_rotary_pos_emb against its documented semantics. What Liger shares with transformers is in
`test_compat_transformers.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat_inputs import B, D, once, pair, table, twice
from compat_statement import assert_gradient, assert_rotated, rotate
from torch import Tensor

from fusewise.compat import liger


@pytest.mark.parametrize(
    "form", ["(B, T, W)", "(1, T, W)", "(T, W)", "(B, 1, T, W)", "(B, T, 1, W)", "partial", "once"]
)
def test_liger(form: str) -> None:
    q, k = pair()
    q.requires_grad_()
    before = q.detach().clone(), k.clone()
    cos, sin = table(8 if form == "partial" else D, 1 if form in ("(1, T, W)", "(T, W)") else B)
    tables = once(cos, sin) if form == "once" else twice(cos, sin)
    extra: dict[str, Any] = {"rotary_dim": D} if form == "once" else {}
    if form == "(T, W)":
        tables = tables[0][0], tables[1][0]
    elif form in ("(B, 1, T, W)", "(B, T, 1, W)"):
        extra["unsqueeze_dim"] = 1 if form == "(B, 1, T, W)" else 2
        tables = tuple(t.unsqueeze(extra["unsqueeze_dim"]) for t in tables)

    def statement(x: Tensor) -> Tensor:
        return rotate(x, cos[:, None], sin[:, None])

    q_out, k_out = liger.liger_rotary_pos_emb(q, k, *tables, **extra)
    assert_rotated(q_out, statement(q))
    assert_rotated(k_out, statement(k))
    assert_gradient(q_out, q, statement)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    assert torch.equal(liger.LigerRopeFunction.apply(q, k, *tables, None, *extra.values())[0], q_out) or form == "once"
    if form == "once":
        assert torch.equal(liger.liger_rotary_pos_emb_gpt_oss(q, k, *tables)[0], q_out)
    else:
        found = liger.rope(q, k, *tables, **extra, impl="nvidia-triton")
        assert torch.equal(found[0], q_out) and torch.equal(found[1], k_out)


@pytest.mark.parametrize("batch", [1, B])
def test_liger_finds_the_dimension_of_heads_in_four(batch: int) -> None:
    q, k = pair()
    cos, sin = table(D, batch)
    found = liger.liger_rotary_pos_emb(q, k, *(t[:, :, None] for t in twice(cos, sin)))
    for y, x in zip(found, (q, k), strict=True):
        assert_rotated(y, rotate(x, cos[:, None], sin[:, None]))


def test_liger_takes_the_width_of_its_tables_for_that_of_the_rotation() -> None:
    q, k = pair()
    cos, sin = table(D)
    y, _ = liger.liger_rotary_pos_emb(q, k, cos, sin)
    assert_rotated(y, rotate(q, cos[:, None, :, : D // 4], sin[:, None, :, : D // 4]))


def test_liger_reads_what_it_needs_of_a_wider_table() -> None:
    q, k = pair()
    cos, sin = table(D)
    y, _ = liger.liger_rotary_pos_emb(q, k, *twice(cos, sin), rotary_dim=8)
    assert_rotated(y, rotate(q, cos[:, None, :, :4], sin[:, None, :, :4]))
