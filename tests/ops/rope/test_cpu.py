"""The native CPU kernel against the float64 reference: vectors and remainders, strides, pairings, tables, positions, threads,
out-of-bounds writes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import fusewise
from fusewise.ops.rope import _cpu, _host, _native, reference

from .support import assert_bits

pytestmark = pytest.mark.skipif(_cpu.unavailable("cpu") is not None, reason=str(_cpu.unavailable("cpu")))

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIRINGS = ["half", "interleaved", "interleaved_to_half", "half_to_interleaved"]
LAYOUTS = {"bshd": (0, 1, 2), "sbhd": (1, 0, 2), "bhsd": (0, 2, 1)}
#: Half an ulp of 1.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
ROWS = 64


def table(pairs: int, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = torch.arange(rows)[:, None] * inv_freq(pairs)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def inv_freq(pairs: int) -> Tensor:
    return 10000.0 ** -(torch.arange(pairs) / pairs)


def tensors(
    dtype: torch.dtype, layout: str = "bshd", head_dim: int = 64, tokens: int = 37, heads: int = 5
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(head_dim + tokens)
    made = []
    for count in (heads, 2):
        sizes = {
            "bshd": (2, tokens, count),
            "sbhd": (tokens, 2, count),
            "bhsd": (2, count, tokens),
            "thd": (tokens, count),
        }
        made.append(torch.randn(*sizes[layout], head_dim, generator=generator).to(dtype))
    return made


def exact(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def check(xs: list[Tensor], **arguments: Any) -> None:
    """Compare out of place (into NaN-filled outputs) and in place with float64 and with each other."""
    truth = reference.rope(*(x.double() for x in xs), **{name: exact(value) for name, value in arguments.items()})
    eager = reference.rope(*xs, **arguments)
    outs = tuple(torch.full_like(x, float("nan")) for x in xs)
    kept = [x.clone() for x in xs]
    fusewise.rope(*xs, **arguments, out=outs, impl="cpu")
    for x, before in zip(xs, kept, strict=True):
        assert torch.equal(x, before), "an input was written to"
    for y, e, t in zip(outs, eager, truth, strict=True):
        assert torch.equal(y.isnan(), t.isnan())
        size = t.nan_to_num().abs().max().item() if t.numel() else 0.0
        band = ROUNDING[y.dtype] * size
        assert error(y, t) <= 2 * (error(e, t) + band), (error(y, t), error(e, t), band)
    fusewise.rope_(*xs, **arguments, impl="cpu")
    for x, y in zip(xs, outs, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


def error(y: Tensor, truth: Tensor) -> float:
    return (y.double() - truth).nan_to_num().abs().max().item() if y.numel() else 0.0


@pytest.mark.parametrize("head_dim", [2, 6, 64, 72, 80, 96, 112, 256, 512])
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widths(dtype: torch.dtype, pairing: str, head_dim: int) -> None:
    cos, sin = table(head_dim // 2)
    check(tensors(dtype, head_dim=head_dim), cos=cos, sin=sin, pairing=pairing)


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "thd"])
@pytest.mark.parametrize("part", [(32, 0), (32, -32), (20, 14), (48, 0)])
@pytest.mark.parametrize("pairing", ["half", "interleaved_to_half"])
def test_part_of_a_head_in_every_layout(layout: str, part: tuple[int, int], pairing: str) -> None:
    cos, sin = table(part[0] // 2)
    arguments = {
        "cos": cos,
        "sin": sin,
        "layout": layout,
        "pairing": pairing,
        "rotary_dim": part[0],
        "rotary_start": part[1],
    }
    check(tensors(torch.bfloat16, layout, head_dim=66), **arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["half", "duplicated", "strided", "batched", "fused", "angles", "inv_freq"])
@pytest.mark.parametrize("inverse", [False, True])
def test_tables(kind: str, dtype: torch.dtype, inverse: bool) -> None:
    pairs = 40
    cos, sin = table(pairs, dtype=dtype)
    angles = torch.arange(ROWS)[:, None] * inv_freq(pairs)
    shift = torch.stack((angles, angles + 1))
    wide = torch.zeros(2, ROWS, pairs, 3, dtype=dtype)
    wide[0, ..., 1], wide[1, ..., 1] = cos, sin
    arguments: dict[str, Any] = {
        "half": lambda: {"cos": cos, "sin": sin},
        "duplicated": lambda: {"cos": torch.cat((cos, cos), -1), "sin": torch.cat((sin, sin), -1)},
        "strided": lambda: {"cos": wide[0, ..., 1], "sin": wide[1, ..., 1]},
        "batched": lambda: {"cos": shift.cos().to(dtype), "sin": shift.sin().to(dtype)},
        "fused": lambda: {"cos_sin": torch.cat((cos, sin), -1)},
        "angles": lambda: {"angles": angles.to(dtype), "scale": 1.25},
        "inv_freq": lambda: {"inv_freq": inv_freq(pairs).to(dtype), "scale": 0.75},
    }[kind]()
    check(tensors(torch.float32, head_dim=2 * pairs), **arguments, inverse=inverse, offset=3)


def test_duplicated_interleaved_table() -> None:
    cos, sin = (x.repeat_interleave(2, -1) for x in table(32))
    check(tensors(torch.float32), cos=cos, sin=sin, pairing="interleaved")


@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    "kind", ["shared", "batched", "offsets", "sections", "sections_interleaved", "sections_shared"]
)
def test_positions(kind: str, layout: str, integer: torch.dtype) -> None:
    """A tenth of the positions is outside the table: NaN there, and only there."""
    positions = torch.randint(-4, ROWS + 4, (3, 2, 37), generator=torch.Generator().manual_seed(0)).to(integer)
    cos, sin = table(32)
    arguments: dict[str, Any] = {
        "shared": {"positions": positions[0, 0]},
        "batched": {"positions": positions[0]},
        "offsets": {"offset": torch.tensor([3, 40]).to(integer)},
        "sections": {"positions": positions, "sections": (10, 12, 10)},
        "sections_interleaved": {"positions": positions, "sections": (12, 10, 10), "sections_interleaved": True},
        "sections_shared": {"positions": positions[:, 0], "sections": (0, 20, 12)},
    }[kind]
    check(tensors(torch.float16, layout), cos=cos, sin=sin, layout=layout, **arguments)


@pytest.mark.parametrize("position", [2**20 + 1, 2**24 - 3, 2**31 - 1, -7])
def test_angles_without_a_table_are_exact(position: int) -> None:
    check(tensors(torch.float32, tokens=1), inv_freq=inv_freq(32), positions=torch.tensor([position]))


@pytest.mark.parametrize("kind", ["angles", "inv_freq"])
def test_angles_too_large_to_be_reduced_are_nan(kind: str) -> None:
    angles = torch.tensor([2.0**51, -(2.0**51) - 2.0**30, 2.0**52, -1e18, 1e30, float("inf")])
    given = {"angles": angles[None]} if kind == "angles" else {"inv_freq": angles, "offset": 1}
    y = fusewise.rope(torch.ones(1, 1, 1, 12), **given, impl="cpu")
    assert [bool(rotated.isnan().all()) for rotated in y.view(2, 6).T] == [False, False, True, True, True, True]
    assert y.view(2, 6)[:, :2].abs().max() < 3


@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("offset", [0, 5, "tensor"])
def test_packed_sequences_and_padding(offset: Any, integer: torch.dtype) -> None:
    q, k = tensors(torch.float32, "thd", tokens=100)
    cu_seqlens = torch.tensor([0, 0, 33, 34, 90]).to(integer)
    offset = torch.tensor([7, 1, 2, 0]).to(integer) if offset == "tensor" else offset
    arguments = {"cos": table(32)[0], "sin": table(32)[1], "layout": "thd", "cu_seqlens": cu_seqlens, "offset": offset}
    check([q.clone(), k.clone()], **arguments)
    for x in (q, k):  # values past the last sequence may be anything
        x[91, 0, 3], x[92:94], x[95, 0, 20], x[97] = float("inf"), -0.0, float("nan"), float("nan")
    for rotated in (
        fusewise.rope(q, k, **arguments, impl="cpu"),
        fusewise.rope_(q.clone(), k.clone(), **arguments, impl="cpu"),
    ):
        assert_bits(rotated[0][90:], q[90:])
        assert_bits(rotated[1][90:], k[90:])


@pytest.mark.parametrize("pairing", ["interleaved_to_half", "half_to_interleaved"])
def test_padding_is_paired_anew_but_not_rotated(pairing: str) -> None:
    q, k = tensors(torch.bfloat16, "thd", tokens=100)
    q[95, 0, 3], k[96, 0, 4] = float("inf"), float("nan")
    cos, sin = table(32)
    arguments = {"layout": "thd", "pairing": pairing, "cos": cos, "sin": sin, "cu_seqlens": torch.tensor([0, 60, 90])}
    wanted = fusewise.rope(q, k, **arguments, impl="reference")
    for x, y, z in zip(
        fusewise.rope(q, k, **arguments, impl="cpu"), fusewise.rope_(q.clone(), k.clone(), **arguments, impl="cpu"), wanted,
        strict=True,
    ):  # fmt: skip
        assert_bits(x[90:], z[90:])
        assert_bits(y[90:], z[90:])


def test_bounds_without_a_sequence() -> None:
    q, _ = tensors(torch.float32, "thd", tokens=7)
    cos, sin = table(32)
    for impl in ("cpu", "reference"):
        y = fusewise.rope(q, cos=cos, sin=sin, layout="thd", cu_seqlens=torch.tensor([5]), impl=impl)
        assert torch.equal(y, q)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_context_parallel_chunks(rank: int, packed: bool) -> None:
    arguments: dict[str, Any] = {"inv_freq": inv_freq(32), "context_parallel": (rank, 3)}
    if packed:
        arguments |= {"layout": "thd", "cu_seqlens": torch.tensor([0, 60, 96])}
    check(tensors(torch.float32, "thd" if packed else "bshd", tokens=36), **arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_views_of_packed_qkv_leave_their_neighbours_alone(dtype: torch.dtype, pairing: str) -> None:
    cos, sin = table(36)
    packed = torch.randn(2, 37, 5 + 2 + 2, 80, generator=torch.Generator().manual_seed(1)).to(dtype)
    out, in_place = torch.full_like(packed, 7.0), packed.clone()
    views = [(x[:, :, :5, 4:76], x[:, :, 5:7, 4:76]) for x in (packed, out, in_place)]
    fusewise.rope(*views[0], cos=cos, sin=sin, pairing=pairing, out=views[1], impl="cpu")
    fusewise.rope_(*views[2], cos=cos, sin=sin, pairing=pairing, impl="cpu")
    truth = reference.rope(*(x.double() for x in views[0]), cos=cos.double(), sin=sin.double(), pairing=pairing)
    for y, t, x in zip(views[1], truth, views[2], strict=True):
        assert error(y, t) <= 3 * ROUNDING[dtype] * t.abs().max().item()
        assert torch.equal(x, y)
    for x, before in ((out, torch.full_like(packed, 7.0)), (in_place, packed)):
        assert torch.equal(x[:, :, 7:], before[:, :, 7:]), "heads beside the operands were written to"
        assert torch.equal(x[..., :4], before[..., :4]) and torch.equal(x[..., 76:], before[..., 76:])


@pytest.mark.parametrize("shape", [(0, 5, 4, 64), (2, 0, 4, 64), (2, 5, 0, 64)])
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    """With no q heads, input and output pointers of q are equal as in place; k must still be copied whole."""
    q, k = torch.randn(shape), torch.randn(*shape[:2], 2, 64)
    cos, sin = table(16)
    rotated = fusewise.rope(q, k, cos=cos, sin=sin, rotary_dim=32, impl="cpu")
    assert rotated[0].shape == q.shape
    assert torch.allclose(rotated[1], reference.rope(k, cos=cos, sin=sin, rotary_dim=32), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounds_to_nearest_even_and_keeps_nan_and_infinity(dtype: torch.dtype) -> None:
    """Rotating every 16-bit pattern by zero, in both pairings, is the identity; scaling by a cosine rounds as torch's cast."""
    words = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    x = (words.view(dtype) if dtype != torch.float32 else words.view(torch.float16).float()).reshape(1, -1, 1, 64)
    x = torch.cat((x, x), -1)
    cos = torch.full((x.shape[1], 64), 1 / 3)
    y = fusewise.rope(x, cos=cos, sin=torch.zeros_like(cos), impl="cpu")
    z = fusewise.rope(x, cos=cos, sin=torch.zeros_like(cos), pairing="interleaved", impl="cpu")
    expected = x.float() * (1 / 3)
    both = expected[..., :64].isfinite()  # zero times an infinite or NaN partner is NaN
    assert torch.equal(y[..., :64][both], expected[..., :64][both].to(dtype))
    assert (y[..., :64].isnan() == ~both).all()
    partner = x.float().unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    fine = expected.isfinite() & partner.isfinite()
    assert torch.equal(z[fine], expected[fine].to(dtype))
    assert torch.equal(z.isnan(), expected.isnan() | ~partner.isfinite())


@pytest.mark.parametrize("arguments", [{"pairing": "half"}, {"pairing": "interleaved", "layout": "bhsd"}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bitwise_equal_for_any_threads_and_any_company(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    """Large enough for two threads; a token gives the same bits alone and among others."""
    shape = (2, 8, 300, 80) if "layout" in arguments else (2, 300, 8, 80)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 2, 3):
            torch.set_num_threads(count)
            results.append(fusewise.rope(x, inv_freq=inv_freq(40), **arguments, impl="cpu"))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert torch.equal(result, results[0])
    dim = 2 if "layout" in arguments else 1
    alone = fusewise.rope(x.narrow(dim, 123, 1), inv_freq=inv_freq(40), offset=123, **arguments, impl="cpu")
    assert torch.equal(alone, results[0].narrow(dim, 123, 1))


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.bfloat16, 72)], ids=str)
def test_outputs_written_past_the_cache(dtype: torch.dtype, head_dim: int, fresh: bool) -> None:
    """Above 32 MiB the kernel uses non-temporal stores or requests huge pages; includes unaligned heads and gaps."""
    heads = 8
    tokens = (34 << 20) // (heads * head_dim * dtype.itemsize)
    x = torch.randn(1, tokens, heads, head_dim, generator=torch.Generator().manual_seed(3)).to(dtype)
    cos, sin = table(head_dim // 2, tokens)
    room = torch.empty(1, tokens, heads + 1, head_dim + 2, dtype=dtype)
    if not fresh:
        room.fill_(float("nan"))
    out = room[:, :, :heads, 1:-1]
    fusewise.rope(x, cos=cos, sin=sin, out=out, impl="cpu")
    small = [fusewise.rope(x[:, a : a + 64], cos=cos, sin=sin, offset=a, impl="cpu") for a in range(0, tokens, 64)]
    assert torch.equal(out, torch.cat(small, 1))
    if not fresh:
        assert room[:, :, heads:].isnan().all() and room[..., 0].isnan().all() and room[..., -1].isnan().all()


def test_more_than_2_31_elements_apart() -> None:
    """Offsets are 64-bit: q starts 5 GiB before its last token, in a buffer of which only the ends are touched."""
    room = torch.empty(2**31 + 2**29, dtype=torch.bfloat16)
    x = torch.as_strided(room, (1, 2, 3, 64), (0, 2**31 + 2**28, 64, 1))
    x.copy_(torch.randn(1, 2, 3, 64, generator=torch.Generator().manual_seed(4)))
    small = x.clone()
    cos, sin = table(32)
    assert torch.equal(
        fusewise.rope_(x, cos=cos, sin=sin, impl="cpu"), fusewise.rope(small, cos=cos, sin=sin, impl="cpu")
    )


def test_backward_is_the_inverse() -> None:
    q, k = (x.requires_grad_() for x in tensors(torch.float32))
    cos, sin = table(32)
    dy = [torch.randn_like(x) for x in (q, k)]
    fusewise_grads = torch.autograd.grad(fusewise.rope(q, k, cos=cos, sin=sin, impl="cpu"), (q, k), dy)
    reference_grads = torch.autograd.grad(reference.rope(q, k, cos=cos, sin=sin), (q, k), dy)
    torch.testing.assert_close(fusewise_grads, reference_grads, rtol=0, atol=2e-6)


def test_a_plan_is_found_again_with_other_tensors_and_offset() -> None:
    cos_sin = torch.cat(table(32), -1)
    for seed, offset in ((0, 0), (1, 9), (2, 20)):
        x = torch.randn(1, 5, 2, 64, generator=torch.Generator().manual_seed(seed))
        plans = len(_native._PLANS)
        y = fusewise.rope(x, cos_sin=cos_sin, offset=offset, impl="cpu")
        assert torch.equal(y, fusewise.rope(x, cos=cos_sin[:, :32], sin=cos_sin[:, 32:], offset=offset, impl="cpu"))
        assert seed == 0 or len(_native._PLANS) == plans


@pytest.mark.parametrize("parallel", ["torch's threads", "its own"])
def test_threads(parallel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _host.forget()
    if parallel == "its own":
        monkeypatch.setattr(_cpu._kernel(), "parallel", 0)
    elif _cpu._kernel().parallel == 0:
        pytest.skip("torch has loaded no OpenMP runtime with GOMP_parallel")
    x = torch.randn(1, 1000, 8, 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = fusewise.rope(x, inv_freq=inv_freq(32), impl="cpu")
        torch.set_num_threads(4)
        assert torch.equal(fusewise.rope(x, inv_freq=inv_freq(32), impl="cpu"), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "before", ["fusewise.rope(x, inv_freq=f, impl='cpu')", "torch.mm(*torch.randn(2, 999, 999)).sin()"]
)
def test_works_in_a_forked_child(before: str) -> None:
    """After the parent has used OpenMP threads, which a forked child does not have."""
    code = (
        f"before = {before!r}"
        + """
import os, sys, torch, fusewise
torch.set_num_threads(2)
x, f = torch.randn(1, 2000, 8, 64), torch.ones(32)
y = fusewise.rope(x, inv_freq=f, impl="reference")
eval(before)
child = os.fork()
if child == 0:
    z = fusewise.rope(x, inv_freq=f, impl="cpu")
    torch.set_num_threads(1)  # torch's own operators would wait for threads that are not there
    os._exit(0 if torch.allclose(y, z, 1e-5, 1e-5) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=os.environ)


def test_other_devices_are_refused_with_a_reason() -> None:
    assert "device type cuda" in str(_cpu.unavailable("cuda"))
