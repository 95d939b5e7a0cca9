"""fusewise.compat.diffusers.apply_rotary_emb against its documented semantics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat_inputs import HQ, B, D, T, pair, repeated, table, twice
from compat_statement import DEVICE, assert_gradient, assert_rotated, randn, rotate
from torch import Tensor

from fusewise.compat import diffusers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_of_tables(dtype: torch.dtype) -> None:
    cos, sin = (t[0] for t in table(D, 1))
    for dim, form, pairs in ((-1, repeated, {"interleaved": True}), (-2, twice, {})):
        tables = form(cos, sin)
        for sequence_dim, layout in ((2, "bhsd"), (1, "bshd")):
            x = pair(layout, dtype)[0].detach().requires_grad_()
            at = (lambda t: t) if sequence_dim == 2 else (lambda t: t[:, None])

            def statement(x: Tensor, at: Any = at, pairs: Any = pairs) -> Tensor:
                return rotate(x, at(cos), at(sin), **pairs)

            y = diffusers.apply_rotary_emb(x, tables, use_real_unbind_dim=dim, sequence_dim=sequence_dim)
            assert y.dtype == dtype
            assert_rotated(y, statement(x))
            assert_gradient(y, x, statement)
            if sequence_dim == 2:
                assert torch.equal(diffusers.apply_rotary_emb_qwen(x, tables, use_real_unbind_dim=dim), y)
    x = pair("bshd", dtype)[0]
    freqs = torch.complex(*table(D))
    expected = rotate(x, freqs.real[:, :, None], freqs.imag[:, :, None], interleaved=True)
    assert_rotated(diffusers.apply_rotary_emb(x, freqs, use_real=False), expected)
    expected = rotate(x, freqs.real[0, :, None], freqs.imag[0, :, None], interleaved=True)
    assert_rotated(diffusers.apply_rotary_emb_qwen(x, freqs[0], use_real=False), expected)


def test_without_a_batch() -> None:
    """As CogView4 rotates one image of a packed batch: the result has B = 1."""
    x, tables = randn(HQ, T, D), twice(*(t[0] for t in table(D, 1)))
    y = diffusers.apply_rotary_emb(x, tables, use_real_unbind_dim=-2)
    assert torch.equal(y, diffusers.apply_rotary_emb(x[None], tables, use_real_unbind_dim=-2))
    x = x.transpose(0, 1)
    assert torch.equal(diffusers.apply_rotary_emb(x, tables, use_real_unbind_dim=-2, sequence_dim=1), y.transpose(1, 2))


def test_one_row_for_all_tokens() -> None:
    x, (cos, sin) = randn(B, HQ, T, D), repeated(*(t[0, :1] for t in table(D, 1)))
    y = diffusers.apply_rotary_emb(x, (cos, sin))
    assert torch.equal(y, diffusers.apply_rotary_emb(x, (cos.expand(T, D).clone(), sin.expand(T, D).clone())))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tables_of_64_bits(dtype: torch.dtype) -> None:
    angles = torch.rand(T, D // 2, device=DEVICE, dtype=torch.float64)
    freqs, x = torch.polar(torch.ones_like(angles), angles), randn(B, T, HQ, D).to(dtype)
    expected = rotate(x, angles.cos()[:, None], angles.sin()[:, None], interleaved=True)
    tables = repeated(angles.cos(), angles.sin())
    for y in (
        diffusers.apply_rotary_emb(x, freqs[None], use_real=False),
        diffusers.apply_rotary_emb_qwen(x, freqs, use_real=False),
        diffusers.apply_rotary_emb(x, tables, sequence_dim=1),
    ):
        assert y.dtype == dtype
        assert_rotated(y, expected)
        if dtype == torch.float64:
            torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sequence_dim": 3}, "sequence_dim must be 1 or 2, got 3; "),
        ({"sequence_dim": 1}, "cos must have shape (1 | S, D) = (1 | 4, 16), got (5, 16); "),
        ({"use_real_unbind_dim": 0}, "use_real_unbind_dim must be -1 or -2, got 0; "),
        ({"freqs_cis": torch.ones(T, D)}, "freqs_cis must be (cos, sin), got Tensor; "),
        ({"freqs_cis": (torch.ones(T, D), torch.ones(T, 8))}, "sin must have shape (1 | S, D) = (1 | 5, 16), got (5, 8); "),
        ({"freqs_cis": torch.ones(T, 8), "use_real": False}, "freqs_cis must have shape (1 | B, S, D / 2) = (1 | 2, 4, 8), got (5, 8)"),
        ({"freqs_cis": torch.ones(HQ, 8), "use_real": False}, "freqs_cis must have shape (1 | B, S, D / 2) = (1 | 2, 4, 8), got (4, 8)"),
        ({"x": torch.ones(T, D)}, "x must have at least 3 dimensions, got shape (5, 16); "),
    ],
)  # fmt: skip
def test_says_what_is_wrong(wrong: dict[str, Any], message: str) -> None:
    tables = torch.ones(T, D, device=DEVICE), torch.zeros(T, D, device=DEVICE)
    with pytest.raises((TypeError, ValueError)) as raised:
        diffusers.apply_rotary_emb(**{"x": randn(B, HQ, T, D), "freqs_cis": tables, **wrong})
    assert str(raised.value).startswith(f"apply_rotary_emb: {message}")
