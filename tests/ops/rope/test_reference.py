"""The reference against independent mathematics: the oracle of the matrix, and the models' own formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusewise
from fusewise.ops.rope import reference

from .oracle import Call, exact_turn, expected, section_axes
from .support import assert_bits, make, make_table, pairs_of
from .test_matrix import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float64_is_the_oracle(case: Any) -> None:
    """The basis of all other comparisons: equal up to float64 rounding in every case of the matrix."""
    call = make(case).double()
    for (_, y), want in zip(pairs_of(call.xs, reference.rope(*call.xs, **call.kwargs)), expected(call), strict=True):
        assert y.dtype == torch.float64
        assert_bits(y[~want.rotated], want.passed[~want.rotated])
        assert torch.equal(y.isnan(), want.exact.isnan())
        error = (y - want.exact)[want.rotated].abs().nan_to_num(0.0)
        assert (error <= (2.0**-51 + want.angle_error) * want.size[want.rotated]).all()


@pytest.mark.parametrize("case", CASES[::7], ids=lambda case: case.name)
def test_is_the_implementation_reference(case: Any) -> None:
    call = make(case)
    named = fusewise.rope(*call.xs, **call.kwargs, impl="reference")
    for (_, y), (_, z) in zip(
        pairs_of(call.xs, reference.rope(*call.xs, **call.kwargs)), pairs_of(call.xs, named), strict=True
    ):
        assert_bits(y, z)


Q, K = torch.randn(2, 6, 4, 16, dtype=torch.float64), torch.randn(2, 6, 2, 16, dtype=torch.float64)
COS, SIN = make_table("half", 8, 2, torch.float64).values()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def test_llama() -> None:
    """q cos + rotate_half(q) sin with tables cat(f, f), on (B, H, T, D)."""
    cos, sin = (torch.cat((x, x), -1)[:6] for x in (COS, SIN))
    q, k = Q.transpose(1, 2), K.transpose(1, 2)
    y, z = reference.rope(q, k, cos=COS, sin=SIN, layout="bhsd")
    close(y, q * cos + rotate_half(q) * sin)
    close(z, k * cos + rotate_half(k) * sin)


def test_gpt_j() -> None:
    """Interleaved pairs: rotate_every_two with tables repeat_interleave(f, 2)."""
    cos, sin = (x.repeat_interleave(2, -1)[:6, None] for x in (COS, SIN))
    every_two = torch.stack((-Q[..., 1::2], Q[..., ::2]), -1).flatten(-2)
    close(reference.rope(Q, cos=COS, sin=SIN, pairing="interleaved"), Q * cos + every_two * sin)


def test_llama_as_published_by_meta() -> None:
    """view_as_complex(x) · freqs_cis."""
    freqs_cis = torch.polar(torch.ones_like(COS), torch.atan2(SIN, COS))[:6, None]
    want = torch.view_as_real(torch.view_as_complex(Q.unflatten(-1, (-1, 2))) * freqs_cis).flatten(-2)
    close(reference.rope(Q, cos=COS, sin=SIN, pairing="interleaved"), want)


def test_deepseek() -> None:
    """The rotary features are last in q and alone in k; reordered from interleaved to halves, then rotate_half."""
    rows = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    cos, sin = (torch.cat((x, x), -1)[rows][:, :, None] for x in make_table("half", 4, 2, torch.float64).values())

    def turned(x: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return x * cos + rotate_half(x) * sin

    q, k = Q, torch.randn(2, 6, 1, 8, dtype=torch.float64)
    table = dict(zip(("cos", "sin"), make_table("half", 4, 2, torch.float64).values(), strict=True))
    y, z = reference.rope(q, k, **table, positions=rows, pairing="interleaved_to_half", rotary_dim=8, rotary_start=-8)
    close(y, torch.cat((q[..., :8], turned(q[..., 8:])), -1))
    close(z, turned(k))


def test_gpt_neox_rotates_the_leading_part() -> None:
    table = make_table("half", 2, 2, torch.float64)
    cos, sin = (torch.cat((x, x), -1)[:6, None] for x in table.values())
    y = reference.rope(Q, **table, rotary_dim=4)
    close(y, torch.cat((Q[..., :4] * cos + rotate_half(Q[..., :4]) * sin, Q[..., 4:]), -1))


@pytest.mark.parametrize("interleaved", [False, True])
def test_qwen_vl_sections(interleaved: bool) -> None:
    """One table per axis; each pair uses that of its section: split and concatenated (Qwen2-VL), or overwritten at every
    third pair (Qwen3-VL)."""
    positions = torch.randint(0, 64, (3, 2, 6))
    sections = (4, 2, 2)
    cos, sin = COS[positions], SIN[positions]  # (3, B, T, P)
    if interleaved:
        chosen = []
        for x in (cos, sin):
            y = x[0].clone()
            for axis, length in ((1, 2), (2, 2)):
                y[..., axis : 3 * length : 3] = x[axis, ..., axis : 3 * length : 3]
            chosen.append(y)
    else:
        chosen = [torch.cat([x[i] for i, x in enumerate(t.split(sections, -1))], -1) for t in (cos, sin)]
    cos, sin = (torch.cat((x, x), -1)[:, :, None] for x in chosen)
    y = reference.rope(Q, cos=COS, sin=SIN, positions=positions, sections=sections, sections_interleaved=interleaved)
    close(y, Q * cos + rotate_half(Q) * sin)


def test_sections_by_hand() -> None:
    assert section_axes((2, 1, 3), False, 6).tolist() == [0, 0, 1, 2, 2, 2]
    assert section_axes((3, 2, 1), True, 6).tolist() == [0, 1, 2, 0, 1, 0]
    assert section_axes((24, 20, 20), True, 64).tolist() == [0, 1, 2] * 20 + [0] * 4


@pytest.mark.parametrize("size", [1, 2, 3])
def test_context_parallel_ranks_are_the_whole(size: int) -> None:
    """Splitting a sequence over ranks, rotating each part and reassembling equals rotating the whole."""
    x = torch.randn(2, 4 * 2 * size, 3, 16, dtype=torch.float64)
    whole = reference.rope(x, cos=COS, sin=SIN)
    chunks = x.chunk(2 * size, dim=1)
    parts: list[Any] = [None] * (2 * size)
    for rank in range(size):
        mirror = 2 * size - 1 - rank
        local = reference.rope(
            torch.cat((chunks[rank], chunks[mirror]), 1), cos=COS, sin=SIN, context_parallel=(rank, size)
        )
        parts[rank], parts[mirror] = local.chunk(2, dim=1)
    assert_bits(torch.cat(parts, 1), whole)


def test_context_parallel_of_packed_sequences() -> None:
    """The same for packed sequences, each rank holding two chunks of each."""
    lengths, size = (8, 0, 16, 4), 2
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    x = torch.randn(bounds[-1], 3, 16, dtype=torch.float64)
    cu_seqlens = torch.tensor(bounds)
    whole = reference.rope(x, cos=COS, sin=SIN, layout="thd", cu_seqlens=cu_seqlens)
    for rank in range(size):
        mine = torch.cat(
            [part.chunk(2 * size)[c] for part in x.split(lengths) if len(part) for c in (rank, 2 * size - 1 - rank)]
        )
        want = torch.cat(
            [part.chunk(2 * size)[c] for part in whole.split(lengths) if len(part) for c in (rank, 2 * size - 1 - rank)]
        )
        local = reference.rope(
            mine, cos=COS, sin=SIN, layout="thd", cu_seqlens=cu_seqlens, context_parallel=(rank, size)
        )
        assert_bits(local, want)


def test_packed_sequences_are_the_sequences() -> None:
    parts = [torch.randn(n, 3, 16, dtype=torch.float64) for n in (4, 0, 7, 1)]
    y = reference.rope(torch.cat(parts), cos=COS, sin=SIN, layout="thd", cu_seqlens=torch.tensor([0, 4, 4, 11, 12]))
    alone = [reference.rope(x[None], cos=COS, sin=SIN)[0] for x in parts]
    assert_bits(y, torch.cat(alone))


POSITIONS = [0, 1, 4095, 2**17 + 1, 2**20 - 1, 2**23 + 1, 2**24 - 1, 2**24]
FAR = [2**24 + 1, 2**28 + 3, 2**31 - 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_frequencies_are_exact_at_every_position(dtype: torch.dtype) -> None:
    """cos θ and sin θ are the rotation of (1, 0). Up to 2^24 the angle error is negligible beside the rounding of cos and sin;
    beyond, a product of 53 bits has an error of 2^-22 radians at 2^31."""
    inv_freq = make_table("inv_freq", 8, 1, torch.float32)["inv_freq"]
    x = torch.zeros(1, 1, 1, 16, dtype=dtype)
    x[..., :8] = 1
    for position in POSITIONS + FAR:
        y = reference.rope(x, inv_freq=inv_freq.to(dtype), positions=torch.tensor([position]))[0, 0, 0].double()
        for i, f in enumerate(inv_freq.tolist()):
            turn = exact_turn(position, f)
            error = max(abs(y[i] - turn.real), abs(y[8 + i] - turn.imag))
            unit = torch.finfo(dtype).eps / 2 if dtype == torch.float32 else 2.0**-52
            assert error <= 1.01 * unit + position * f * 2.0**-53, (position, i)


def test_exact_turn_against_mpmath() -> None:
    """Check the oracle's angles with 50 digits (mpmath is installed with torch's sympy)."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(50):
        for position in POSITIONS + FAR:
            for f in make_table("inv_freq", 8, 1, torch.float32)["inv_freq"].tolist():
                exact = mpmath.expj(mpmath.mpf(position) * mpmath.mpf(f))
                turn = exact_turn(position, f)
                # the reduced angle is up to π, rounded to 53 bits, and so are cos and sin
                assert abs(turn - complex(exact)) <= 3 * 2.0**-53


def test_a_table_of_bfloat16_loses_what_frequencies_keep() -> None:
    """Why angles are exact: at position 2^23 a float32 product of position and frequency is off by 0.5 rad."""
    inv_freq = torch.tensor([1.0 / 3.0])
    x = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    y = reference.rope(x, inv_freq=inv_freq, positions=torch.tensor([2**23 + 1]))
    naive = (torch.tensor(2.0**23 + 1) * inv_freq).cos()
    turn = exact_turn(2**23 + 1, inv_freq.item())
    assert abs(y[0, 0, 0, 0].item() - turn.real) < 1e-7
    assert abs(naive.item() - turn.real) > 1e-3


@pytest.mark.parametrize("pairing", ["half", "interleaved", "interleaved_to_half", "half_to_interleaved"])
def test_gradcheck(pairing: str) -> None:
    q, k = (x[:1, :3, :2].clone().requires_grad_() for x in (Q, K))

    def f(q: Tensor, k: Tensor) -> Any:
        return reference.rope(q, k, cos=COS[:, :3], sin=SIN[:, :3], pairing=pairing, rotary_dim=6, rotary_start=5)

    assert torch.autograd.gradcheck(f, (q, k))
    assert torch.autograd.gradgradcheck(f, (q, k))


def test_gradcheck_of_positions() -> None:
    x = Q[0, :, :1].clone().requires_grad_()
    cu_seqlens = torch.tensor([0, 2, 2, 5])
    assert torch.autograd.gradcheck(
        lambda x: reference.rope(x, inv_freq=COS[1], layout="thd", cu_seqlens=cu_seqlens, scale=1.5), (x,)
    )


def test_of_a_call_made_from_its_parts() -> None:
    """An offset shifts the running positions, and equal position ids give the same result."""
    running = reference.rope(Q, cos=COS, sin=SIN, offset=9)
    by_ids = reference.rope(Q, cos=COS, sin=SIN, positions=torch.arange(9, 15))
    from_tensor = reference.rope(Q, cos=COS, sin=SIN, offset=torch.tensor([9, 9]))
    assert_bits(running, by_ids)
    assert_bits(running, from_tensor)
    assert not torch.equal(running, reference.rope(Q, cos=COS, sin=SIN))
    (want,) = expected(Call((Q,), {"cos": COS, "sin": SIN, "offset": 9}))
    close(running, want.exact)


@pytest.mark.parametrize(
    "positions", [{"positions": torch.zeros(0, 6, dtype=torch.int64)}, {"offset": torch.zeros(0, dtype=torch.int64)}]
)
def test_no_batch_entries_with_a_table(positions: dict[str, Tensor]) -> None:
    """As part of a larger differentiable formula."""
    q = Q[:0].detach().requires_grad_()
    y, z = fusewise.qk_norm_rope(q, K[:0], None, cos=COS, sin=SIN, **positions, impl="reference")
    assert (y.shape, z.shape) == (q.shape, K[:0].shape)
    assert torch.autograd.grad(y.sum(), q)[0].shape == q.shape


@pytest.mark.parametrize("interleaved", [False, True])
def test_sections_whatever_the_default_device(interleaved: bool) -> None:
    positions = torch.randint(0, 64, (3, 2, 6))
    call = {"cos": COS, "sin": SIN, "positions": positions, "sections": (3, 3, 2), "sections_interleaved": interleaved}
    expected = reference.rope(Q, **call)
    with torch.device("meta"):
        assert_bits(reference.rope(Q, **call), expected)
