"""The rotary functions of diffusers with angles shared by all heads of a token, against float64 references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compat_statement import DEVICE, assert_gradient, assert_rotated, assert_transforms, launches, randn, rotate
from torch import Tensor

from fusewise.compat import diffusers

B, S, H, HK, D = 2, 5, 4, 2, 16
P = D // 2
Case = tuple[Callable[..., Any], Tensor, Callable[[Tensor], Any]]


def angles(*shape: int) -> Tensor:
    return torch.rand(shape, device=DEVICE) * 6.3


def twice(x: Tensor) -> Tensor:
    return torch.cat((x, x), -1)


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1)


def packed(layout: str = "bshd", dtype: torch.dtype = torch.float32) -> Tensor:
    """q as a slice of a packed qkv projection (B, S, 3, H, D)."""
    q = randn(B, S, 3, H, D, dtype=dtype)[:, :, 1]
    return q.transpose(1, 2) if layout == "bhsd" else q


def wan(dtype: torch.dtype, batch: int) -> Case:
    a = angles(batch, S, P)
    cos, sin = repeated(a.cos())[:, :, None], repeated(a.sin())[:, :, None]
    # Not read: sin in even columns and cos in odd ones.
    cos[..., 1::2], sin[..., 0::2] = torch.nan, torch.nan
    statement = lambda x: rotate(x, a.cos()[:, :, None], a.sin()[:, :, None], interleaved=True)  # noqa: E731
    return lambda x: diffusers.apply_rotary_emb_wan(x, cos, sin), packed(dtype=dtype), statement


def helios(dtype: torch.dtype, batch: int) -> Case:
    a = angles(batch, S, P)
    freqs = torch.cat((repeated(a.cos()), repeated(a.sin())), -1)
    freqs[..., 1:D:2], freqs[..., D::2] = torch.nan, torch.nan  # not read
    statement = lambda x: rotate(x, a.cos()[:, :, None], a.sin()[:, :, None], interleaved=True)  # noqa: E731
    return lambda x: diffusers.apply_rotary_emb_transposed(x, freqs), packed(dtype=dtype), statement


def qwen_neuron(dtype: torch.dtype, batch: int) -> Case:
    a = angles(S, P)
    statement = lambda x: rotate(x, a.double().cos()[:, None], a.double().sin()[:, None], interleaved=True)  # noqa: E731
    return lambda x: diffusers.apply_rotary_emb_qwen_neuron(x, a), packed(dtype=dtype), statement


def anyflow(dtype: torch.dtype, batch: int) -> Case:
    a = angles(batch, 1, S, P).double()
    freqs = torch.polar(torch.ones_like(a), a)
    statement = lambda x: rotate(x, a.cos(), a.sin(), interleaved=True)  # noqa: E731
    return lambda x: diffusers.apply_rotary_emb_anyflow(x, freqs), packed("bhsd", dtype), statement


def sana_wm(dtype: torch.dtype, batch: int) -> Case:
    a = angles(batch, 1, S, P)
    freqs = torch.polar(torch.ones_like(a), a)
    statement = lambda x: rotate(x.mT, a.cos(), a.sin(), interleaved=True).mT  # noqa: E731
    return lambda x: diffusers.apply_rotary_emb_sana_wm(x, freqs), packed("bhsd", dtype).mT, statement


def joyimage(dtype: torch.dtype, batch: int) -> Case:
    a, k = angles(S, P), randn(B, S, HK, D, dtype=dtype)
    at = a.cos()[:, None], a.sin()[:, None]
    statement = lambda x: (rotate(x, *at, interleaved=True), rotate(k, *at, interleaved=True))  # noqa: E731
    tables = [repeated(a.cos()), repeated(a.sin())]
    return lambda x: diffusers.apply_rotary_emb_joyimage(x, k, tables), packed(dtype=dtype), statement


def joyimage_batched(dtype: torch.dtype, batch: int) -> Case:
    a, k = angles(batch, S, P), randn(B, S, HK, D, dtype=dtype)
    at = a.cos()[:, :, None], a.sin()[:, :, None]
    statement = lambda x: (rotate(x, *at, interleaved=True), rotate(k, *at, interleaved=True))  # noqa: E731
    tables = repeated(a.cos()), repeated(a.sin())
    return lambda x: diffusers.apply_rotary_emb_batched(x, k, tables), packed(dtype=dtype), statement


def minimax_h3(dtype: torch.dtype, batch: int) -> Case:
    a = angles(S, 3)
    cos, sin = twice(a.cos()).to(dtype), twice(a.sin()).to(dtype)
    statement = lambda x: rotate(x, cos[:, None, :3], sin[:, None, :3])  # noqa: E731
    return lambda x: diffusers.apply_rotary_emb_minimax_h3(x, cos, sin), packed(dtype=dtype), statement


def minimax_music3(dtype: torch.dtype, batch: int) -> Case:
    a = angles(S, P)
    tables = twice(a.cos()), twice(a.sin())
    statement = lambda x: rotate(x, a.cos()[:, None], a.sin()[:, None])  # noqa: E731
    return (
        lambda x: diffusers.apply_partial_rotary_emb_minimax_music3(x, tables),
        packed(dtype=dtype),
        statement,
    )


def stable_audio(dtype: torch.dtype, batch: int) -> Case:
    a = angles(S, 4)
    tables = twice(a.cos()), twice(a.sin())
    statement = lambda x: rotate(x, a.cos(), a.sin())  # noqa: E731
    return lambda x: diffusers.apply_partial_rotary_emb(x, tables), packed("bhsd", dtype), statement


def stable_audio3(dtype: torch.dtype, batch: int) -> Case:
    earlier = 3 * (batch - 1)
    a = angles(earlier + S, 4)
    freqs, last = twice(a), a[earlier:].double()[:, None]
    statement = lambda x: rotate(x, last.cos(), last.sin())  # noqa: E731
    return lambda x: diffusers.apply_rotary_partial(x, freqs), packed(dtype=dtype), statement


def matrices(a: Tensor) -> Tensor:
    """[[cos, −sin], [sin, cos]] with NaN in the second column, which must not be read."""
    nan = torch.full_like(a, torch.nan)
    return torch.stack((a.cos(), nan, a.sin(), nan), -1).unflatten(-1, (2, 2))


def hidream(dtype: torch.dtype, batch: int) -> Case:
    a, k = angles(batch, S, 1, P), randn(B, S, HK, D, dtype=dtype)
    table = matrices(a)
    statement = lambda x: tuple(rotate(t, a.cos(), a.sin(), interleaved=True) for t in (x, k))  # noqa: E731
    return lambda x: diffusers.apply_rope_hidream(x, k, table), packed(dtype=dtype), statement


def prx(dtype: torch.dtype, batch: int) -> Case:
    a = angles(batch, 1, S, P)
    table = matrices(a)
    statement = lambda x: rotate(x, a.cos(), a.sin(), interleaved=True)  # noqa: E731
    return lambda x: diffusers.apply_rope_prx(x, table), packed("bhsd", dtype), statement


def kandinsky5(dtype: torch.dtype, batch: int) -> Case:
    a = angles(*((S, 1, P) if batch == 1 else (B, S, 1, P)))
    table = matrices(a)
    statement = lambda x: rotate(x, a.cos(), a.sin(), interleaved=True)  # noqa: E731
    return lambda x: diffusers.apply_rotary_kandinsky5(x, table), packed(dtype=dtype), statement


def kolors(dtype: torch.dtype, batch: int) -> Case:
    a = angles(S + 2 * (batch - 1), batch, 3)
    cache = torch.stack((a.cos(), a.sin()), -1).to(dtype)
    at = cache[:S, :, None, :, 0], cache[:S, :, None, :, 1]
    statement = lambda x: rotate(x, *at, interleaved=True)  # noqa: E731
    x = packed(dtype=dtype).transpose(0, 1)
    return lambda x: diffusers.apply_rotary_pos_emb_kolors(x, cache), x, statement


CASES = [
    wan, helios, qwen_neuron, anyflow, sana_wm, joyimage, joyimage_batched, minimax_h3, minimax_music3, stable_audio, stable_audio3,
    hidream, prx, kandinsky5, kolors,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward(case: Any, dtype: torch.dtype, batch: int) -> None:
    function, x, statement = case(dtype, batch)
    before = x.clone()
    x.requires_grad_()
    y, true = function(x), statement(x)
    for result, exact in zip(*((t if isinstance(t, tuple) else (t,)) for t in (y, true)), strict=True):
        assert result.dtype == dtype
        assert_rotated(result, exact, angle_error=1e-6 if case in (qwen_neuron, stable_audio3) else 0.0)
    assert torch.equal(x.detach(), before)
    assert_gradient(
        y[0] if isinstance(y, tuple) else y, x, lambda x: t[0] if isinstance(t := statement(x), tuple) else t
    )


@pytest.mark.parametrize("case", CASES)
def test_one_launch_and_nothing_is_copied(case: Any) -> None:
    function, x, _ = case(torch.float32, 1)
    converted = {"aten::_to_copy": 1} if case is anyflow else {}  # complex128 to complex64
    name = "rope_qk" if case in (joyimage, joyimage_batched, hidream) else "rope"
    assert launches(function, x) == {f"fusewise::{name}": 1, **converted}


INSTANTIATED = "ignore:.*should not be instantiated:DeprecationWarning"  # raised by Dynamo


@pytest.mark.filterwarnings(INSTANTIATED)
@pytest.mark.parametrize("case", CASES)
def test_compiled_in_one_graph(case: Any) -> None:
    function, x, _ = case(torch.float32, B)
    x.requires_grad_()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, want = (y[0] if isinstance(y := call(x), tuple) else y for call in (compiled, function))
    torch.testing.assert_close(found, want)
    dy = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(found, x, dy), torch.autograd.grad(want, x, dy))


def test_compiled_for_all_lengths() -> None:
    compiled = torch.compile(diffusers.apply_rotary_emb_wan, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 7, 9):
        x, a = randn(B, tokens, H, D), repeated(angles(1, tokens, P))[:, :, None]
        torch.testing.assert_close(compiled(x, a.cos(), a.sin()), diffusers.apply_rotary_emb_wan(x, a.cos(), a.sin()))
    with pytest.raises(Exception, match=r"freqs_cos must have shape \(1 \| B, S, 1, D\)"):
        compiled(x, a.cos()[:, :8], a.sin()[:, :8])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # raised by torch
def test_transforms() -> None:
    for case in (wan, kolors, stable_audio3):
        function, x, _ = case(torch.float32, 1)
        assert_transforms(function, x.contiguous())


@pytest.mark.parametrize("case", [wan, anyflow])
def test_float64(case: Any) -> None:
    """float64 and complex128 tables are not converted if x is float64."""
    a = angles(1, S, P).double()
    cos, sin = repeated(a.cos())[:, :, None], repeated(a.sin())[:, :, None]
    x, freqs = randn(B, S, H, D).double(), torch.polar(torch.ones_like(a), a)[:, None]
    if case is wan:
        y = diffusers.apply_rotary_emb_wan(x, cos, sin)
    else:
        y = diffusers.apply_rotary_emb_anyflow(x.transpose(1, 2), freqs).transpose(1, 2)
    torch.testing.assert_close(y, rotate(x, a.cos()[:, :, None], a.sin()[:, :, None], interleaved=True))
    z = diffusers.apply_rotary_emb_wan(x.bfloat16(), cos, sin)
    assert z.dtype == torch.bfloat16
    exact = rotate(x.bfloat16(), a.cos()[:, :, None], a.sin()[:, :, None], interleaved=True)
    assert_rotated(z, exact)


def grid_statement(x: Tensor, grids: Tensor, theta: Tensor, stride: int) -> Tensor:
    """Reference for each token in a loop, with angles theta (R, P)."""
    thirds = [P - 2 * (P // 3), P // 3, P // 3]
    rows = []
    for i, (frames, height, width) in enumerate(grids.tolist()):
        for n in range(x.shape[1]):
            inside = n < frames * height * width
            at = (n // (height * width) * stride, n // width % height, n % width)
            parts = [t[r] for t, r in zip(theta.split(thirds, 1), at, strict=True)] if inside else [0 * theta[0]]
            a = torch.cat(parts).double()
            rows.append(rotate(x[i, n], a.cos(), a.sin(), interleaved=True))
    return torch.stack(rows).view(x.shape)


@pytest.mark.filterwarnings(INSTANTIATED)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grid_of_tokens(dtype: torch.dtype, stride: int) -> None:
    tokens, grids, theta = 14, torch.tensor([[2, 2, 3], [3, 1, 4]]), angles(7, P).double()
    freqs = torch.polar(torch.ones_like(theta), theta)
    x = randn(B, tokens, 3, H, D, dtype=dtype)[:, :, 0].requires_grad_()
    y = diffusers.rope_apply(x, grids, freqs, stride)
    assert y.dtype == dtype
    assert_rotated(y, grid_statement(x, grids, theta, stride))
    assert torch.equal(y[:, 12:], x[:, 12:])  # beyond the 12 tokens of both grids
    assert_gradient(y, x, lambda x: grid_statement(x, grids, theta, stride))
    compiled = torch.compile(diffusers.rope_apply, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, grids, freqs, stride), y)
    counted = launches(diffusers.rope_apply, x.detach(), grids, freqs, stride)
    assert sum(n for name, n in counted.items() if name.startswith("fusewise::")) == 1


def test_a_grid_larger_than_the_table_is_nan() -> None:
    theta, x = angles(2, P), randn(1, 6, H, D)
    freqs = torch.polar(torch.ones_like(theta), theta)
    y = diffusers.rope_apply(x, torch.tensor([[1, 2, 3]]), freqs)  # the last of three columns is outside the table
    lost = torch.zeros(6, D, dtype=torch.bool)
    lost[2::3, 2 * (P - P // 3) :] = True
    assert torch.equal(y.isnan()[0].cpu(), lost[:, None].expand(6, H, D))
