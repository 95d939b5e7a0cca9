"""RotaryEmbedding of fusewise.compat.flash_attn: its results, and the frequencies and tables that models read from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat_statement import DEVICE, assert_rotated, rotate
from torch import Tensor

from fusewise.compat.flash_attn import RotaryEmbedding, apply_rotary_emb_qkv_

from .test_compat_flash_attn import ROWS, B, D, H, T, randn


@pytest.mark.parametrize("scale_base", [None, 512.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_module(scale_base: float | None, interleaved: bool) -> None:
    module = RotaryEmbedding(8, base=100.0, interleaved=interleaved, scale_base=scale_base, device=DEVICE)
    assert module.state_dict() == {} and (module.scale is None) == (scale_base is None)
    i, p = torch.arange(4, device=DEVICE).double(), torch.arange(T, device=DEVICE).double()
    angles = p[:, None] * 100.0 ** (-2 * i / 8)
    growth = torch.ones_like(angles)
    if scale_base is not None:
        growth = ((2 * i + 0.4 * 8) / (1.4 * 8)) ** ((p[:, None] - T // 2) / scale_base)
    q_table = [(growth * f)[None, :, None] for f in (angles.cos(), angles.sin())]
    k_table = [(f / growth)[None, :, None] for f in (angles.cos(), angles.sin())]

    qkv = randn(B, T, 3, H, D)
    assert module._seq_len_cached == 0
    q, k, v = qkv.clone().unbind(2)
    expected = rotate(q, *q_table, interleaved=interleaved), rotate(k, *k_table, interleaved=interleaved)
    y = module(qkv)
    assert y is qkv
    assert module._seq_len_cached == T
    assert_rotated(y, torch.stack((*expected, v.double()), 2), angle_error=1e-6)

    q_in, kv_in = q.clone(), torch.stack((k, v), 2)
    q_out, kv_out = module(q_in, kv_in)
    assert_rotated(q_out, expected[0], angle_error=1e-6)
    assert_rotated(kv_out, torch.stack((expected[1], v.double()), 2), angle_error=1e-6)

    if scale_base is None:  # not for XPos, which scales by the distance from the middle of the table
        start, at = torch.tensor([1, 3], device=DEVICE), torch.tensor([[1, 2], [3, 4]], device=DEVICE)
        for longest in (T, None):  # None: the table of earlier calls
            shifted = module(torch.stack((q, k, v), 2)[:, :2].clone(), seqlen_offset=start, max_seqlen=longest)
            assert_rotated(
                shifted[:, :, 0],
                rotate(q[:, :2], q_table[0][0, at.flatten(), 0].view(2, 2, 1, 4), q_table[1][0, at.flatten(), 0].view(2, 2, 1, 4), interleaved=interleaved),
                angle_error=1e-6,
            )  # fmt: skip


def test_rotary_embedding_forgets_the_tables_of_a_trace() -> None:
    module = RotaryEmbedding(D, device=DEVICE)
    qkv = randn(B, T, 3, H, D)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module(mode.from_tensor(qkv))
    assert torch.equal(module(qkv.clone()), RotaryEmbedding(D, device=DEVICE)(qkv.clone()))


def test_rotary_embedding_trains_after_inference_mode() -> None:
    module = RotaryEmbedding(D, device=DEVICE)
    qkv = randn(B, T, 3, H, D)
    with torch.inference_mode():
        expected = module(qkv.clone())
    x = qkv.clone().requires_grad_()
    y = module(x * 1)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("scale_base", [None, 512.0])
def test_rotary_embedding_tables_as_flash_attn_reads_them(scale_base: float | None) -> None:
    module = RotaryEmbedding(D, scale_base=scale_base, device=DEVICE)
    names = ("_cos_cached", "_sin_cached", "_cos_k_cached", "_sin_k_cached")
    assert [getattr(module, name) for name in names] == [None] * 4
    module(randn(B, T, 3, H, D, dtype=torch.bfloat16))
    rounded, made = [getattr(module, name) for name in names], module._tables
    module._update_cos_sin_cache(T)
    assert module._tables is made
    exact = [getattr(module, name) for name in names]
    for table, wide in zip(rounded[: 2 if scale_base is None else 4], exact, strict=False):
        assert table.dtype == torch.bfloat16 and wide.dtype == torch.float32 and wide.shape == (T, D // 2)
        assert torch.equal(table, wide.bfloat16())
    cos_k, sin_k = exact[:2] if scale_base is None else exact[2:]
    torch.testing.assert_close(exact[0] * cos_k + exact[1] * sin_k, torch.ones(T, D // 2, device=DEVICE))
    assert scale_base is not None or exact[2:] == rounded[2:] == [None, None]
    module._update_cos_sin_cache(ROWS, device=exact[0].device, dtype=torch.float16)
    assert module._cos_cached.dtype == torch.float16 and len(module._cos_cached) == ROWS


class Halved(RotaryEmbedding):
    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        return super()._compute_inv_freq(device) / 2


def test_rotary_embedding_frequencies_are_the_buffer() -> None:
    qkv = randn(B, T, 3, H, D)
    halves = RotaryEmbedding(D, device=DEVICE)._compute_inv_freq(DEVICE) / 2
    angles = torch.arange(T, device=DEVICE)[:, None] * halves
    expected = apply_rotary_emb_qkv_(qkv.clone(), angles.cos(), angles.sin())
    given = RotaryEmbedding(D, device=DEVICE)
    given.inv_freq.copy_(halves)
    with torch.device("meta"):
        empty, grown = Halved(D), RotaryEmbedding(D, scale_base=512.0)
    assert torch.equal(grown.to_empty(device=DEVICE).scale, RotaryEmbedding(D, scale_base=512.0, device=DEVICE).scale)
    cast = Halved(D, device=DEVICE).bfloat16()
    assert cast.inv_freq.dtype == torch.bfloat16
    for module in (given, Halved(D, device=DEVICE), cast, empty.to_empty(device=DEVICE)):
        assert torch.equal(module(qkv.clone()), expected)


def test_rotary_embedding_positions_in_the_dtype_of_a_cast_module() -> None:
    """Models trained in pure bfloat16 with that flash-attn need them: position 257 is rounded to 256."""
    for pos_idx_in_fp32 in (True, False):
        module = RotaryEmbedding(D, device=DEVICE, pos_idx_in_fp32=pos_idx_in_fp32)
        module._update_cos_sin_cache(300)
        exact = module._cos_cached
        module.bfloat16()._tables = ()
        module._update_cos_sin_cache(300)
        rounded = (torch.arange(300, device=DEVICE).bfloat16()[:, None] * module.inv_freq).cos().float()
        assert torch.equal(module._cos_cached, exact if pos_idx_in_fp32 else rounded)
        assert torch.equal(module._cos_cached[257], module._cos_cached[256]) != pos_idx_in_fp32


def test_a_refused_kv_leaves_q_as_it_was() -> None:
    rotary = RotaryEmbedding(16, device=DEVICE)
    q = torch.randn(2, 10, 4, 16, device=DEVICE)
    before = q.clone()
    with torch.inference_mode():
        inference = torch.randn(2, 10, 2, 4, 16, device=DEVICE)
    transposed = torch.randn(2, 10, 2, 16, 4, device=DEVICE).transpose(3, 4)
    expanded = torch.randn(1, 10, 2, 4, 16, device=DEVICE).expand(2, -1, -1, -1, -1)
    for kv, words in ((transposed, "contiguous last"), (expanded, "share memory"), (inference, "inference tensor")):
        with pytest.raises((ValueError, RuntimeError), match=words):
            rotary(q, kv)
        assert torch.equal(q, before)
