"""The functions of fusewise.compat.flash_attn against their documented semantics. In-place autograd and transforms, and the
module, are tested in separate files that import helpers from this one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat_statement import DEVICE, assert_gradient, assert_rotated, launches, rotate
from torch import Tensor

from fusewise.compat.flash_attn import (
    RotaryEmbedding,
    apply_rotary,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)

B, T, H, D, ROWS = 2, 5, 4, 16, 12


def table(rotary_dim: int = D, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = torch.rand(ROWS, rotary_dim // 2, generator=torch.Generator().manual_seed(seed)) * 6.3
    return angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def rows(t: Tensor, offset: int | Tensor) -> Tensor:
    """The table rows of the tokens, (B or 1, T, 1, P)."""
    start = torch.as_tensor(offset, device=DEVICE).view(-1, 1)
    return t[start + torch.arange(T, device=DEVICE)][:, :, None]


def tensor_offset() -> Tensor:
    return torch.tensor([3, 0], device=DEVICE, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [D, 8])
@pytest.mark.parametrize("offset", [0, 2, "tensor"])
def test_apply_rotary_emb(dtype: torch.dtype, interleaved: bool, rotary_dim: int, offset: Any) -> None:
    offset = tensor_offset() if offset == "tensor" else offset
    cos, sin = table(rotary_dim, dtype=dtype)
    x = randn(B, T, H, D, dtype=dtype).requires_grad_()

    def statement(x: Tensor) -> Tensor:
        return rotate(x, rows(cos, offset), rows(sin, offset), interleaved=interleaved)

    y = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offset)
    assert y.dtype == dtype
    assert_rotated(y, statement(x))
    assert_gradient(y, x, statement)
    in_place = x.detach().clone()
    assert apply_rotary_emb(in_place, cos, sin, interleaved, True, offset) is in_place
    assert torch.equal(in_place, y)


def test_apply_rotary_emb_of_packed_sequences() -> None:
    cos, sin = table()
    bounds = torch.tensor([0, 4, 5, 9], device=DEVICE, dtype=torch.int32)
    offsets = torch.tensor([1, 7, 0], device=DEVICE)
    position = torch.tensor([1, 2, 3, 4, 7, 0, 1, 2, 3], device=DEVICE)
    x = randn(9, H, D)
    y = apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets, cu_seqlens=bounds, max_seqlen=4)
    assert_rotated(y, rotate(x, cos[position, None], sin[position, None]))
    with pytest.raises(
        ValueError, match=r"cos must have a row for each of 0 \+ max_seqlen = 13 positions, got 12 rows"
    ):
        apply_rotary_emb(x, cos, sin, cu_seqlens=bounds, max_seqlen=13)


def test_the_raw_function_and_the_torch_form() -> None:
    cos, sin = table()
    x = randn(B, T, H, D)
    assert_rotated(apply_rotary(x, cos, sin, 2, conjugate=True), rotate(x, rows(cos, 2), -rows(sin, 2)))
    assert torch.equal(apply_rotary(x, cos, sin, conjugate=1), apply_rotary(x, cos, sin, conjugate=True))
    y = x.clone()
    assert apply_rotary(y, cos, sin, inplace=True, interleaved=True) is y
    assert_rotated(y, rotate(x, rows(cos, 0), rows(sin, 0), interleaved=True))
    each = torch.stack((cos[:T], cos[2 : T + 2])), torch.stack((sin[:T], sin[2 : T + 2]))
    assert_rotated(apply_rotary_emb_torch(x, *each), rotate(x, each[0][:, :, None], each[1][:, :, None]))


@pytest.mark.parametrize("shape", [(T, H, D), (2, B, T, H, D), (2, 3, B, T, H, D)])
def test_the_torch_form_of_other_dimensions(shape: tuple[int, ...]) -> None:
    cos, sin = (x[:T] for x in table())
    x = randn(*shape)
    y = apply_rotary_emb_torch(x, cos, sin)
    assert y.shape == x.shape
    assert_rotated(y, rotate(x.view(-1, T, H, D), rows(cos, 0), rows(sin, 0)).view(shape))
    if len(shape) > 4:
        with pytest.raises(ValueError, match=r"^apply_rotary_emb_torch: cos must have shape \(T, P\) for x of"):
            apply_rotary_emb_torch(x, cos[None], sin[None])


def test_tables_and_offsets_of_any_strides() -> None:
    cos, sin = table()
    x = randn(B, T, H, D)
    offsets = torch.tensor([2], device=DEVICE).expand(B)
    for y in (
        apply_rotary_emb(x, cos, sin.mT.contiguous().mT, seqlen_offsets=offsets),
        apply_rotary_emb(x.clone(), cos.mT.contiguous().mT, sin, inplace=True, seqlen_offsets=offsets),
    ):
        assert_rotated(y, rotate(x, rows(cos, 2), rows(sin, 2)))
    y = apply_rotary_emb_torch(x, cos[:T], sin[:T].mT.contiguous().mT)
    assert_rotated(y, rotate(x, rows(cos, 0), rows(sin, 0)))


def test_a_last_dimension_that_is_not_contiguous() -> None:
    cos, sin = table()
    x = randn(B, T, D, H).transpose(2, 3)
    assert_rotated(apply_rotary_emb(x, cos, sin), rotate(x, rows(cos, 0), rows(sin, 0)))
    assert_rotated(apply_rotary_emb_torch(x, cos[:T], sin[:T]), rotate(x, rows(cos, 0), rows(sin, 0)))
    with pytest.raises(ValueError, match=r"rope_: q must have a contiguous last dimension"):
        apply_rotary_emb(x, cos, sin, inplace=True)


# A packed tensor: its constructor, and which heads are q, k and the rest after flattening (3, H).
PACKED = {
    "stacked": lambda: randn(B, T, 3, H, D),
    "gqa": lambda: randn(B, T, H + 2 * 2, D),
    "three first": lambda: randn(3, B, T, H, D).permute(1, 2, 0, 3, 4),
    "slice": lambda: randn(B, T, 4, H, D)[:, :, :3],
}


def qkv_statement(cos: Tensor, sin: Tensor, cos_k: Tensor, sin_k: Tensor, offset: Any, interleaved: bool) -> Any:
    def statement(qkv: Tensor) -> Tensor:
        heads = qkv.flatten(2, 3) if qkv.dim() == 5 else qkv
        q, k, v = heads.split([H, (heads.shape[2] - H) // 2, (heads.shape[2] - H) // 2], dim=2)
        q = rotate(q, rows(cos, offset), rows(sin, offset), interleaved=interleaved)
        k = rotate(k, rows(cos_k, offset), rows(sin_k, offset), interleaved=interleaved)
        return torch.cat((q, k, v.double()), 2).view(qkv.shape)

    return statement


@pytest.mark.parametrize("which", ["q", "k"])
def test_tables_that_were_not_made_together(which: str) -> None:
    """cos and sin with different strides are accepted for q and for k."""
    tables = {"q": table(8), "k": table(8, seed=1)}
    cos, sin = tables[which]
    tables[which] = cos, sin.t().contiguous().t()
    (cos, sin), (cos_k, sin_k) = tables.values()
    qkv = randn(B, T, 3, H, D)
    expected = qkv_statement(cos, sin, cos_k, sin_k, 0, False)(qkv)
    assert_rotated(apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k), expected)


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("offset", [1, "tensor"])
def test_apply_rotary_emb_qkv_(form: str, interleaved: bool, separate: bool, offset: Any) -> None:
    offset = tensor_offset() if offset == "tensor" else offset
    heads_q = H if form == "gqa" else None
    cos, sin = table(8)
    cos_k, sin_k = table(8, seed=1) if separate else (cos, sin)
    statement = qkv_statement(cos, sin, cos_k, sin_k, offset, interleaved)
    tables = (cos, sin, cos_k, sin_k) if separate else (cos, sin, None, None)

    def call(qkv: Tensor) -> Tensor:
        return apply_rotary_emb_qkv_(qkv, *tables, interleaved, offset, heads_q)

    qkv = PACKED[form]()
    expected = statement(qkv)
    assert call(qkv) is qkv
    assert_rotated(qkv, expected)

    leaf = PACKED[form]().requires_grad_()
    before = leaf.detach().clone()
    y = call(leaf)
    assert y.data_ptr() == leaf.data_ptr()
    assert_rotated(y, statement(before))
    assert_gradient(y, leaf, lambda x: statement(x.detach() * 0 + x))

    source = PACKED[form]().requires_grad_()
    hidden = source * 2
    y = call(hidden)
    assert torch.equal(y, hidden)
    assert_gradient(hidden, source, lambda x: statement(2 * x))  # the argument also carries the gradient


def test_apply_rotary_emb_kv_() -> None:
    cos, sin = table()

    def statement(kv: Tensor) -> Tensor:
        return torch.stack((rotate(kv[:, :, 0], rows(cos, 2), rows(sin, 2)), kv[:, :, 1].double()), 2)

    kv = randn(B, T, 2, H, D)
    expected = statement(kv)
    assert apply_rotary_emb_kv_(kv, cos, sin, seqlen_offsets=2) is kv
    assert_rotated(kv, expected)
    leaf = randn(B, T, 2, H, D).requires_grad_()
    assert_gradient(apply_rotary_emb_kv_(leaf, cos, sin, seqlen_offsets=2), leaf, statement)


def test_one_launch_and_nothing_else() -> None:
    cos, sin = table()
    x, qkv = randn(B, T, H, D), randn(B, T, 3, H, D)
    assert launches(apply_rotary_emb, x, cos, sin) == {"fusewise::rope": 1}
    assert launches(apply_rotary_emb, x, cos, sin, inplace=True) == {"fusewise::rope_": 1}
    assert launches(apply_rotary_emb_qkv_, qkv, cos, sin) == {"fusewise::rope_": 1}
    assert launches(apply_rotary_emb_qkv_, qkv[:, :, 0], cos, sin, num_heads_q=2) == {"fusewise::rope_": 1}
    assert launches(apply_rotary_emb_kv_, qkv[:, :, :2], cos, sin) == {"fusewise::rope_": 1}
    y, g = apply_rotary_emb_qkv_(qkv.requires_grad_(), cos, sin), torch.randn_like(qkv)
    assert launches(torch.autograd.grad, y, qkv, g) == {"fusewise::rope_out": 1, "aten::copy_": 1}  # the copy: v


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, s: apply_rotary_emb_qkv_(randn(1, 2, 2, H, D), c, s), ValueError, "qkv must have shape (B, T, 3, H, D)"),
        (lambda c, s: apply_rotary_emb_qkv_(randn(1, 2, H), c, s), ValueError, "qkv must have 4 or 5 dimensions"),
        (lambda c, s: apply_rotary_emb_qkv_(randn(1, 2, H, D), c, s), ValueError, "num_heads_q must leave an even number"),
        (
            lambda c, s: apply_rotary_emb_qkv_(randn(1, 2, 8, D), c, s, num_heads_q=3),
            ValueError, "num_heads_q must leave an even number of the 8 heads to k and v, got 3",
        ),
        (lambda c, s: apply_rotary_emb_kv_(randn(1, 2, 3, H, D), c, s), ValueError, "kv must have shape (B, T, 2, H, D)"),
        (lambda c, s: apply_rotary_emb(randn(1, 2, H, D), c[None], s[None]), ValueError, "cos must have shape (R, rotary_dim"),
        (
            lambda c, s: apply_rotary_emb_qkv_(randn(1, 2, 3, H, D), c, s, c[0], s[0]),
            ValueError, "cos_k must have shape (R, rotary_dim / 2), got (8,)",
        ),
        (lambda c, s: apply_rotary_emb(randn(1, 2, H, 8), c, s), ValueError, "rotary_dim must be even and from 2 to head_dim"),
        (lambda c, s: apply_rotary_emb(randn(1, 99, H, D), c, s), ValueError, "the table must have a row for each"),
        (lambda c, s: apply_rotary_emb(randn(1, 2, H, D).int(), c, s), TypeError, "q must have dtype"),
        (lambda c, s: RotaryEmbedding(D)(randn(1, 2, 3, H, D), seqlen_offset=torch.zeros(1)), ValueError, "max_seqlen must be given"),
        (lambda c, s: RotaryEmbedding(D, 1e4, False, None, True), ValueError, "device must be a device or None"),  # type: ignore[misc]
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=r", got .*; ") as raised:
        call(*table())
    assert message in str(raised.value)
