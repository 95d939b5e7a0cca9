"""The rotary functions of diffusers whose angles differ between heads or parts of a head, against float64 references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat_statement import DEVICE, assert_gradient, assert_rotated, assert_transforms, launches, randn, rotate
from torch import Tensor

from fusewise.compat import diffusers

B, S, H, D = 2, 5, 4, 12
LTX = [diffusers.apply_rotary_emb_ltx, diffusers.apply_interleaved_rotary_emb]
DTYPES = [torch.float32, torch.bfloat16]
ONE = {"fusewise::rope": 1}
INSTANTIATED = "ignore:.*should not be instantiated:DeprecationWarning"  # raised by Dynamo


def angles(*shape: int) -> Tensor:
    return torch.rand(shape, device=DEVICE) * 6.3


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1)


def twice(x: Tensor) -> Tensor:
    return torch.cat((x, x), -1)


def memory(order: str, batch: int, tokens: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """x (B, S, C) with a given memory layout."""
    if order == "packed":  # a slice of a packed qkv projection
        return randn(batch, tokens, 3 * width, dtype=dtype)[..., width : 2 * width]
    if order == "tokens first":
        return randn(tokens, batch, width, dtype=dtype).transpose(0, 1)
    if order == "longer":
        return randn(batch, tokens + 2, width, dtype=dtype)[:, 1:-1]
    if order == "cut":  # a slice of longer, packed sequences: neither (B, S) nor (S, parts) can be flattened
        return randn(batch, tokens + 2, 3 * width, dtype=dtype)[:, 1:-1, :width]
    return randn(batch, tokens, width, dtype=dtype)


ORDERS = ["contiguous", "packed", "tokens first", "longer", "cut"]


def check(y: Tensor, x: Tensor, statement: Any) -> None:
    assert y.dtype == x.dtype
    assert_rotated(y, statement(x))
    assert_gradient(y, x, statement)


@pytest.mark.parametrize("function", LTX)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("width", [2, 48, 512, 1536, 1034])
def test_over_the_width(function: Any, order: str, batch: int, width: int) -> None:
    for dtype in DTYPES:
        a = angles(batch, S, width // 2)
        x = memory(order, B, S, width, dtype).requires_grad_()
        y = function(x, (repeated(a.cos()), repeated(a.sin())))
        check(y, x, lambda x, a=a: rotate(x, a.cos(), a.sin(), interleaved=True))


@pytest.mark.parametrize("function", LTX)
@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("order", ORDERS)
def test_the_width_is_one_launch_of_views(function: Any, order: str, batch: int) -> None:
    a, x = angles(batch, S, 512), memory(order, B, S, 1024)
    freqs = repeated(a.cos()), repeated(a.sin())
    # As documented: x is copied if it cannot be flattened and the tables differ between sequences.
    copied = batch == B and order in ("tokens first", "cut")
    assert launches(function, x, freqs) == {**ONE, **({"aten::clone": 1} if copied else {})}
    lone = memory(order, 1, S, 1024)
    assert launches(function, lone, tuple(t[:1] for t in freqs)) == ONE


def heads_of(a: Tensor, made: str) -> Tensor:
    """Angles (b, S, H, P) as tables (b, H, S, P), transposed as in LTX-2, or contiguous."""
    table = a.transpose(1, 2)
    return table if made == "as there" else table.contiguous()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("made", ["as there", "contiguous"])
def test_split_by_heads(order: str, batch: int, made: str) -> None:
    for dtype in DTYPES:
        a = angles(batch, S, H, D // 2)
        x = memory(order, B, S, H * D, dtype).requires_grad_()

        def statement(x: Tensor, a: Tensor = a) -> Tensor:
            return rotate(x.unflatten(2, (H, D)), a.cos(), a.sin()).flatten(2)

        freqs = heads_of(a.cos(), made), heads_of(a.sin(), made)
        y = diffusers.apply_split_rotary_emb(x, freqs)
        assert y.shape == x.shape
        check(y, x, statement)
        four = x.detach().unflatten(2, (H, D)).transpose(1, 2).requires_grad_()
        z = diffusers.apply_split_rotary_emb(four, freqs)
        assert torch.equal(z.transpose(1, 2).flatten(2), y)
        check(z, four, lambda x, a=a: rotate(x, a.cos().transpose(1, 2), a.sin().transpose(1, 2)))


@pytest.mark.parametrize("batch", [1, B])
def test_split_by_heads_is_one_launch_of_views(batch: int) -> None:
    a = angles(batch, S, H, D // 2)
    for made in ("as there", "contiguous"):
        freqs = heads_of(a.cos(), made), heads_of(a.sin(), made)
        copied = made == "contiguous" and batch == B
        for order in ("contiguous", "packed"):
            counted = launches(diffusers.apply_split_rotary_emb, memory(order, B, S, H * D), freqs)
            assert counted == {**ONE, **({"aten::clone": 2} if copied else {})}


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("dtype", DTYPES)
def test_split_over_the_width(batch: int, dtype: torch.dtype) -> None:
    a = angles(batch, S, H * D // 2)
    x = memory("packed", B, S, H * D, dtype).requires_grad_()
    y = diffusers.apply_split_rotary_emb(x, (a.cos(), a.sin()))
    check(y, x, lambda x: rotate(x, a.cos(), a.sin()))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mochi(order: str, dtype: torch.dtype) -> None:
    a = angles(S, H, D // 2)
    x = memory(order, B, S, H * D, dtype).unflatten(2, (H, D)).requires_grad_()
    y = diffusers.apply_rotary_emb_mochi(x, a.cos(), a.sin())
    check(y, x, lambda x: rotate(x, a.cos(), a.sin(), interleaved=True))
    assert launches(diffusers.apply_rotary_emb_mochi, x.detach(), a.cos(), a.sin()) == ONE


def test_mochi_learns_its_frequencies() -> None:
    """Tables that require grad are rejected, except under no_grad, where no gradient would be lost."""
    a, x = angles(S, H, D // 2).requires_grad_(), randn(B, S, H, D)
    with pytest.raises(ValueError, match=r"^rope: sin must not require grad: .*; call sin\.detach\(\)$"):
        diffusers.apply_rotary_emb_mochi(x, a.cos(), a.sin())
    with torch.no_grad():
        y = diffusers.apply_rotary_emb_mochi(x, a.cos(), a.sin())
    assert_rotated(y, rotate(x, a.detach().cos(), a.detach().sin(), interleaved=True))


ROWS = (3, 6, 4)


def of_allegro(batch: int, kind: torch.dtype = torch.int64) -> tuple[Any, Any, Any]:
    """The angles of three tables, the tables as the function takes them, and the positions."""
    theta = [angles(n, D // 6) for n in ROWS]
    positions = tuple(torch.randint(n, (batch, S), device=DEVICE, dtype=kind) for n in ROWS)
    return theta, tuple((twice(t.cos()), twice(t.sin())) for t in theta), positions


def thirds(x: Tensor, theta: Any, positions: Any) -> Tensor:
    parts = [
        rotate(part, t.cos()[at][:, None], t.sin()[at][:, None])
        for part, t, at in zip(x.chunk(3, -1), theta, positions, strict=True)
    ]
    return torch.cat(parts, -1)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch", [1, B])
def test_allegro(order: str, batch: int, heads_first: bool) -> None:
    for dtype, kind in zip(DTYPES, (torch.int64, torch.int32), strict=True):
        theta, freqs, positions = of_allegro(batch, kind)
        x = memory(order, B, S, H * D, dtype).unflatten(2, (H, D)).transpose(1, 2)
        x = x.contiguous() if heads_first else x
        x.requires_grad_()
        y = diffusers.apply_rotary_emb_allegro(x, freqs, positions)
        check(y, x, lambda x, theta=theta, at=positions: thirds(x, theta, at))
        counted = launches(diffusers.apply_rotary_emb_allegro, x.detach(), freqs, positions)
        assert counted["fusewise::rope"] == 1
        # Positions of one sequence are copied for the others, and x as documented.
        apart = order in ("tokens first", "longer", "cut")
        assert counted.get("aten::clone", 0) == (0 if heads_first else (batch < B) + apart)


@pytest.mark.parametrize("shared", range(len(ROWS)))
def test_allegro_with_positions_shared_on_some_axes(shared: int) -> None:
    """Each of the three may be (1, S) or (B, S)."""
    theta, freqs, both = of_allegro(B)
    for one in (True, False):
        positions = [at[:1] if (axis == shared) is one else at for axis, at in enumerate(both)]
        x = randn(B, H, S, D).requires_grad_()
        y = diffusers.apply_rotary_emb_allegro(x, freqs, positions)
        check(y, x, lambda x, at=positions: thirds(x, theta, at))


def test_allegro_without_a_row_is_nan() -> None:
    """Also if the tables of the other axes have that row."""
    theta, freqs, positions = of_allegro(B)
    x = randn(B, H, S, D)
    want = thirds(x, theta, positions)
    for axis, n in enumerate(ROWS):
        for beyond in (n, -1):
            wrong = [at.clone() for at in positions]
            wrong[axis][1, 2] = beyond
            y = diffusers.apply_rotary_emb_allegro(x, freqs, wrong)
            lost = y.isnan()
            part = slice(axis * D // 3, (axis + 1) * D // 3)
            assert lost[1, :, 2, part].all()
            assert lost.sum() == H * D // 3
            assert_rotated(torch.where(lost, 0, y), torch.where(lost, 0, want))


def calls() -> list[Any]:
    a, b, c = angles(B, S, H * D // 2), angles(B, S, H, D // 2), angles(S, H, D // 2)
    freqs, split = (
        (repeated(a.cos()), repeated(a.sin())),
        (heads_of(b.cos(), "as there"), heads_of(b.sin(), "as there")),
    )
    _, tables, positions = of_allegro(1)
    wide, heads = randn(B, S, H * D), randn(B, H, S, D)
    return [
        (lambda x: diffusers.apply_rotary_emb_ltx(x, freqs), wide),
        (lambda x: diffusers.apply_interleaved_rotary_emb(x, tuple(t[:1] for t in freqs)), wide),
        (lambda x: diffusers.apply_split_rotary_emb(x, split), wide),
        (lambda x: diffusers.apply_rotary_emb_mochi(x, c.cos(), c.sin()), randn(B, S, H, D)),
        (lambda x: diffusers.apply_rotary_emb_allegro(x, tables, positions), heads),
        (lambda x: diffusers.apply_rotary_emb_allegro(x, tables, positions), heads.transpose(1, 2).contiguous().transpose(1, 2)),
    ]  # fmt: skip


@pytest.mark.filterwarnings(INSTANTIATED)
@pytest.mark.parametrize("which", range(6))
def test_compiled_in_one_graph(which: int) -> None:
    function, x = calls()[which]
    x.requires_grad_()
    found, want = torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x)
    torch.testing.assert_close(found, want)
    dy = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(found, x, dy), torch.autograd.grad(want, x, dy))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # raised by torch
def test_transforms() -> None:
    for function, x in calls():
        assert_transforms(function, x)


def test_float64() -> None:
    a = angles(1, S, H, D // 2).double()
    for dtype in (torch.float64, torch.float32):
        x = memory("packed", B, S, H * D).to(dtype)
        freqs = heads_of(a.cos(), "as there"), heads_of(a.sin(), "as there")
        y = diffusers.apply_split_rotary_emb(x, freqs)
        exact = rotate(x.unflatten(2, (H, D)), a.cos(), a.sin()).flatten(2)
        assert y.dtype == dtype
        assert_rotated(y, exact)
        if dtype == torch.float64:
            torch.testing.assert_close(y, exact, rtol=1e-14, atol=1e-14)


def test_nothing_to_rotate() -> None:
    a = angles(1, 0, 24)
    for batch in (0, B):
        x = randn(batch, 0, 48)
        assert diffusers.apply_rotary_emb_ltx(x, (repeated(a.cos()), repeated(a.sin()))).shape == x.shape
