"""Every implementation on the same calls, compared with the oracle: out of place, out=, in place, backward.

The cases are not a full product; each covers something that can break independently. Left out:
- pairings × widths: the pairing determines where the elements of a pair are, the width how many pairs there are; they
  interact only in the vector load of interleaved pairs (cases interleaved-d6, -d80, -d256);
- tables × positions: the row is found before a table is read, except with sections, where each pair has its own row;
  those are crossed with the kinds of tables;
- layouts × memory: a layout is an order of strides, so each memory appears in some layout and each layout in several.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fusewise

from .oracle import Call, expected
from .support import (
    Case,
    Place,
    assert_bits,
    assert_neighbours,
    assert_right,
    copy_of,
    make,
    make_table,
    pairs_of,
    places,
    poisoned_like,
    require,
)


def ids(*shape: int, low: int = 0, high: int = 64, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(low, high, shape, generator=generator, dtype=dtype)


def long(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


PAIRINGS = [
    Case(name=f"{pairing}{'-inverse' if inverse else ''}-{dtype}", pairing=pairing, head_dim=24, dtype=dtype,
         options={"inverse": inverse})
    for pairing, inverse, dtype in [
        ("half", False, "fp32"), ("half", True, "bf16"),
        ("interleaved", False, "bf16"), ("interleaved", True, "fp32"),
        ("interleaved_to_half", False, "fp16"), ("interleaved_to_half", True, "bf16"),
        ("half_to_interleaved", False, "bf16"), ("half_to_interleaved", True, "fp16"),
    ]
]  # fmt: skip

TABLES = [
    Case(name="table-half-bf16", table_dtype="bf16"),
    Case(name="table-half-fp16-bf16", table_dtype="fp16", dtype="bf16"),
    Case(name="table-half-bf16-fp16", table_dtype="bf16", dtype="fp16"),
    Case(name="table-half-bf16-bf16", table_dtype="bf16", dtype="bf16"),
    Case(name="table-duplicated", table="duplicated"),
    Case(name="table-duplicated-interleaved", table="duplicated", pairing="interleaved", dtype="bf16"),
    Case(name="table-duplicated-to-half", table="duplicated", pairing="interleaved_to_half"),
    Case(name="table-duplicated-batched", table="duplicated-batched", table_dtype="bf16", dtype="bf16"),
    Case(name="table-fused", table="fused"),
    Case(name="table-fused-interleaved-bf16", table="fused", pairing="interleaved", dtype="bf16", table_dtype="bf16"),
    Case(name="table-fused-batched", table="fused-batched"),
    Case(name="table-angles", table="angles", dtype="bf16"),
    Case(name="table-angles-scale", table="angles", options={"scale": 1.25}),
    Case(name="table-angles-duplicated-interleaved", table="angles-duplicated", pairing="interleaved"),
    Case(name="table-angles-batched", table="angles-batched", dtype="fp16"),
    Case(name="table-inv_freq", table="inv_freq"),
    Case(name="table-inv_freq-scale-inverse", table="inv_freq", dtype="bf16", options={"scale": 0.75, "inverse": True}),
    Case(name="table-inv_freq-strided", table="inv_freq-strided", pairing="interleaved"),
    Case(name="table-inv_freq-bf16", table="inv_freq", table_dtype="bf16"),
    Case(name="table-inv_freq-before-0", table="inv_freq", options={"offset": -3}),
    Case(name="table-inv_freq-2^24", table="inv_freq", options={"offset": 2**24 - 5}),
    Case(name="table-inv_freq-2^31", table="inv_freq", options={"offset": 2**31 - 6}),
    Case(name="table-batched", table="half-batched"),
    Case(name="table-lead", table="half-lead", dtype="bf16"),
    Case(name="table-complex", table="complex", pairing="interleaved"),
    Case(name="table-strided", table="strided", dtype="bf16"),
    Case(name="table-strided-batched", table="strided-batched"),
]

WIDTHS = [
    *[
        Case(name=f"width-{width}", batch=1, tokens=3, heads=2, kv_heads=1, head_dim=width, dtype="bf16")
        for width in (2, 6, 56, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512)
    ],
    Case(name="interleaved-d6", head_dim=6, pairing="interleaved", dtype="bf16"),
    Case(name="interleaved-d80", head_dim=80, pairing="interleaved", heads=2, kv_heads=1, batch=1),
    Case(name="interleaved-d256", head_dim=256, pairing="interleaved", heads=2, kv_heads=1, batch=1, dtype="bf16"),
    Case(name="halves-of-8-bytes", head_dim=20),
    Case(name="halves-of-8-bytes-packed", head_dim=20, memory="packed", options={"inverse": True}),
    Case(name="halves-of-8-bytes-with-gaps", head_dim=20, layout="bhsd"),
    Case(name="partial-leading", head_dim=80, rotary_dim=32, dtype="bf16"),
    Case(name="partial-leading-angles", head_dim=24, rotary_dim=10, table="angles"),
    Case(name="partial-leading-interleaved", head_dim=128, rotary_dim=64, pairing="interleaved", batch=1, dtype="bf16"),
    Case(name="partial-trailing", head_dim=96, rotary_dim=24, options={"rotary_start": -24}, dtype="bf16"),
    Case(name="partial-trailing-interleaved", head_dim=24, rotary_dim=10, pairing="interleaved",
         options={"rotary_start": 14}),
    Case(name="partial-middle", head_dim=24, rotary_dim=10, options={"rotary_start": 7}),
    Case(name="partial-middle-to-half", head_dim=26, rotary_dim=6, pairing="interleaved_to_half",
         options={"rotary_start": 11}, dtype="fp16"),
    Case(name="partial-one-pair", head_dim=64, rotary_dim=2, options={"rotary_start": 31}, dtype="bf16"),
    Case(name="shared-key", head_dim=48, k_head_dim=16, rotary_dim=16, heads=3, kv_heads=1,
         pairing="interleaved_to_half", options={"rotary_start": -16}, dtype="bf16"),
    Case(name="shared-key-half", head_dim=48, k_head_dim=16, rotary_dim=16, heads=3, kv_heads=1,
         options={"rotary_start": -16}),
    Case(name="wider-key", head_dim=16, k_head_dim=40, rotary_dim=8, options={"rotary_start": 5}),
]  # fmt: skip

HEADS = [
    Case(name="heads-71-1", batch=1, tokens=2, heads=71, kv_heads=1, head_dim=64, dtype="bf16"),
    Case(name="heads-71-1-interleaved", batch=1, tokens=2, heads=71, kv_heads=1, pairing="interleaved"),
    Case(name="heads-1-1", heads=1, kv_heads=1, dtype="bf16"),
    Case(name="heads-28-4", batch=1, heads=28, kv_heads=4, pairing="interleaved"),
    Case(name="heads-2-6", heads=2, kv_heads=6, dtype="fp16"),
    Case(name="q-alone", kv_heads=None, dtype="bf16"),
    Case(name="q-alone-interleaved", kv_heads=None, pairing="interleaved", heads=5),
]

LAYOUTS = [
    Case(name="bshd-packed", memory="packed", dtype="bf16"),
    Case(name="bshd-packed-interleaved", memory="packed", pairing="interleaved"),
    Case(name="bshd-sliced", memory="sliced", dtype="bf16"),
    Case(name="bshd-odd", memory="odd", dtype="bf16", head_dim=24),
    Case(name="bshd-misaligned", memory="misaligned", dtype="bf16", head_dim=64),
    Case(name="bshd-misaligned-interleaved", memory="misaligned", pairing="interleaved"),
    Case(name="bshd-swapped", memory="swapped"),
    Case(name="bshd-expanded", memory="expanded", dtype="bf16"),
    Case(name="sbhd", layout="sbhd", tokens=6, dtype="bf16"),
    Case(name="sbhd-packed", layout="sbhd", memory="packed", options={"offset": 3}),
    Case(name="sbhd-outer-swapped", layout="sbhd", memory="outer-swapped", pairing="interleaved"),
    Case(name="sbhd-batched-table", layout="sbhd", table="half-batched", batch=3),
    Case(name="bhsd", layout="bhsd", dtype="bf16"),
    Case(name="bhsd-packed", layout="bhsd", memory="packed", pairing="interleaved_to_half"),
    Case(name="bhsd-swapped", layout="bhsd", memory="swapped", heads=3, dtype="bf16"),
    Case(name="bhsd-gaps", layout="bhsd", memory="gaps"),
    Case(name="thd", layout="thd", batch=1, tokens=7),
    Case(name="thd-packed", layout="thd", batch=1, tokens=7, memory="packed", dtype="bf16"),
    Case(name="thd-odd", layout="thd", batch=1, tokens=7, memory="odd", pairing="interleaved"),
]

SECTIONS = {"sections": (3, 3, 2), "positions": ids(3, 2, 5)}
POSITIONS = [
    Case(name="offset", options={"offset": 59}, dtype="bf16"),
    Case(name="offset-int32", options={"offset": int32(7, 50)}),
    Case(name="offset-int64-interleaved", options={"offset": long(50, 0)}, pairing="interleaved", dtype="bf16"),
    Case(name="offset-out-of-range", options={"offset": long(61, -2)}, dtype="bf16"),
    Case(name="offset-overflows-int32", options={"offset": int32(2**31 - 3, 0)}),
    Case(name="offset-overflows-int32-inv_freq", options={"offset": int32(2**31 - 3, 0)}, table="inv_freq"),
    Case(name="ids-T-int32", options={"positions": ids(5, dtype=torch.int32)}),
    Case(name="ids-BT-int64", options={"positions": ids(2, 5)}, dtype="bf16"),
    Case(name="ids-1T", options={"positions": ids(1, 5)}, pairing="interleaved"),
    Case(name="ids-strided", options={"positions": ids(5, 4).T[::2]}),
    Case(name="ids-sbhd", layout="sbhd", options={"positions": ids(2, 5)}),
    Case(name="ids-thd", layout="thd", batch=1, options={"positions": ids(5, dtype=torch.int32)}),
    Case(name="ids-out-of-range", options={"positions": ids(2, 5, low=-64, high=128)}),
    Case(name="ids-out-of-range-partial", head_dim=24, rotary_dim=10, options={"positions": ids(2, 5, low=-64, high=128),
         "rotary_start": 5}, dtype="bf16"),
    Case(name="ids-out-of-range-interleaved", options={"positions": ids(2, 5, low=-64, high=128)},
         pairing="interleaved", dtype="bf16"),
    Case(name="ids-out-of-range-angles", table="angles", options={"positions": ids(2, 5, low=-64, high=128)}),
    Case(name="ids-beyond-int32", options={"positions": ids(2, 5) + long(0, 2**32, 2**31, -(2**32), 2**62)}),
    Case(name="ids-inv_freq", table="inv_freq", options={"positions": ids(2, 5, high=2**24, dtype=torch.int32)}),
    Case(name="sections", options=SECTIONS, dtype="bf16"),
    Case(name="sections-out-of-range", options={**SECTIONS, "positions": ids(3, 2, 5, low=-8, high=72)}),
    Case(name="sections-3T", options={"sections": (2, 0, 6), "positions": ids(3, 5, dtype=torch.int32)}),
    Case(name="sections-31T-interleaved-pairing", pairing="interleaved",
         options={"sections": (2, 3, 3), "positions": ids(3, 1, 5)}),
    Case(name="sections-dealt", table="inv_freq", options={**SECTIONS, "sections_interleaved": True}),
    Case(name="sections-dealt-uneven", head_dim=48, table="angles", dtype="bf16",
         options={"sections": (14, 4, 6), "positions": ids(3, 2, 5), "sections_interleaved": True}),
    Case(name="sections-fused", table="fused", head_dim=24, rotary_dim=10,
         options={"sections": (1, 2, 2), "positions": ids(3, 2, 5)}),
    Case(name="sections-batched-table", table="half-batched", options=SECTIONS),
    Case(name="sections-duplicated", table="duplicated", options=SECTIONS),
    Case(name="packed-sequences", layout="thd", batch=1, tokens=11, options={"cu_seqlens": int32(0, 4, 4, 9, 11)}),
    Case(name="packed-sequences-padding", layout="thd", batch=1, tokens=11, dtype="bf16",
         options={"cu_seqlens": long(0, 0, 3, 3, 8, 8)}),
    Case(name="packed-sequences-padding-to-half", layout="thd", batch=1, tokens=7, pairing="interleaved_to_half",
         head_dim=24, rotary_dim=10, options={"cu_seqlens": int32(0, 4), "rotary_start": 3}),
    Case(name="packed-sequences-offsets", layout="thd", batch=1, tokens=11, pairing="interleaved", dtype="bf16",
         options={"cu_seqlens": int32(0, 4, 4, 8), "offset": int32(2, 9, 62)}),
    Case(name="packed-sequences-int-offset", layout="thd", batch=1, tokens=6, memory="packed",
         options={"cu_seqlens": int32(0, 2, 5), "offset": 61}),
    Case(name="packed-sequences-one", layout="thd", batch=1, options={"cu_seqlens": int32(0, 5)}, table="inv_freq"),
    Case(name="packed-sequences-none", layout="thd", batch=1, options={"cu_seqlens": int32(0)}),
    Case(name="packed-sequences-all-empty", layout="thd", batch=1, options={"cu_seqlens": int32(0, 0, 0)}, dtype="bf16"),
    Case(name="packed-sequences-partial", layout="thd", batch=1, head_dim=24, rotary_dim=10,
         options={"cu_seqlens": int32(0, 2, 3), "rotary_start": 5}),
    *[
        Case(name=f"context-parallel-{rank}-{size}", tokens=6, options={"context_parallel": (rank, size), **more},
             dtype=dtype)
        for rank, size, more, dtype in [
            (0, 1, {}, "fp32"), (0, 2, {}, "bf16"), (1, 2, {"offset": 3}, "fp32"), (3, 4, {"offset": long(1, 8)}, "fp32"),
        ]
    ],
    Case(name="context-parallel-interleaved", tokens=4, options={"context_parallel": (2, 3)}, pairing="interleaved"),
    Case(name="context-parallel-packed", layout="thd", batch=1, tokens=10,
         options={"context_parallel": (1, 2), "cu_seqlens": int32(0, 8, 8, 12, 16)}),
    Case(name="context-parallel-packed-inv_freq", layout="thd", batch=1, tokens=9, table="inv_freq", dtype="bf16",
         options={"context_parallel": (0, 2), "cu_seqlens": long(0, 4, 16), "offset": int32(5, 0)}),
]  # fmt: skip

SIZES = [
    Case(name="no-tokens", tokens=0),
    Case(name="no-tokens-thd", layout="thd", batch=1, tokens=0, options={"cu_seqlens": int32(0, 0)}),
    Case(name="no-batch", batch=0, pairing="interleaved"),
    Case(name="no-heads", heads=0, kv_heads=2),
    Case(name="no-heads-partial", heads=0, kv_heads=2, head_dim=24, rotary_dim=10, options={"rotary_start": 5}),
    Case(name="no-key-heads", kv_heads=0, dtype="bf16"),
    Case(name="no-heads-at-all", heads=0, kv_heads=0),
    Case(name="one-token", batch=1, tokens=1, heads=1, kv_heads=None),
    Case(name="one-token-decode", batch=5, tokens=1, options={"positions": ids(5, 1)}, dtype="bf16"),
    Case(name="ragged", batch=3, tokens=11, heads=5, kv_heads=3, head_dim=20),
    Case(name="ragged-interleaved", batch=3, tokens=11, heads=5, kv_heads=3, head_dim=20, pairing="interleaved"),
    Case(name="stripes", batch=3, tokens=16, heads=1, kv_heads=None, head_dim=4, dtype="bf16"),
]

CASES = [*PAIRINGS, *TABLES, *WIDTHS, *HEADS, *LAYOUTS, *POSITIONS, *SIZES]
assert len({case.name for case in CASES}) == len(CASES)

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_place = pytest.mark.parametrize("place", places())


@pytest.fixture(autouse=True)
def _one_processor(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The interpreter simulates a GPU with one SM: tiles have maximum size, so few tokens reach their edges, and there are few
    programs to interpret."""
    if request.node.get_closest_marker("interpreter"):
        from fusewise.ops.rope import _triton

        monkeypatch.setattr(_triton, "processors_of", lambda device: 1)


def run(function: Any, call: Call, place: Place, **more: Any) -> tuple[torch.Tensor, ...]:
    result = function(*call.xs, **call.kwargs, impl=place.impl, **more)
    assert isinstance(result, tuple) == (len(call.xs) == 2)
    return tuple(y for _, y in pairs_of(call.xs, result))


@every_place
@every_case
def test_rotates(case: Case, place: Place) -> None:
    require(place)
    call = make(case, place.device)
    before = [x.clone() for x in call.xs]
    want = expected(call)
    ys = run(fusewise.rope, call, place)
    for x, y, w, old in zip(call.xs, ys, want, before, strict=True):
        assert_right(y, x, w)
        assert_bits(x, old)
        assert y.stride() == torch.empty_like(x).stride()

    # In place: the same bits, and memory between the elements of a view is unchanged.
    if case.memory == "expanded":
        return
    xs, storages = copy_of(call.xs)
    old_storages = [storage.clone() for storage in storages]
    returned = run(fusewise.rope_, Call(xs, call.kwargs), place)
    for x, back, y in zip(xs, returned, ys, strict=True):
        assert back is x
        assert_bits(x, y)
    assert_neighbours(old_storages, storages, xs)


# Backward is the same kernel with the transposed spec: use the cases that change under transposition or whose gradient has
# other strides.
BACKWARD = [
    case for case in CASES
    if case in PAIRINGS or case in SIZES or case in LAYOUTS or case.name.startswith(("partial", "shared", "wider"))
    or case.name in ("sections-dealt", "packed-sequences-padding", "context-parallel-1-2", "table-duplicated-to-half",
                     "table-duplicated-interleaved", "table-inv_freq-scale-inverse", "ids-out-of-range")
]  # fmt: skip


def transposed(call: Call, dys: tuple[torch.Tensor, ...]) -> Call:
    """The transposed call: by −θ, from the output pairing to the input pairing."""
    kwargs = dict(call.kwargs)
    kwargs["inverse"] = not kwargs.get("inverse", False)
    first, _, last = kwargs["pairing"].partition("_to_")
    if last:
        kwargs["pairing"] = f"{last}_to_{first}"
    return Call(dys, kwargs)


@every_place
@pytest.mark.parametrize("case", BACKWARD, ids=lambda case: case.name)
def test_gradient(case: Case, place: Place) -> None:
    require(place)
    call = make(case, place.device)
    leaves = tuple(x.detach().requires_grad_() for x in call.xs)
    ys = run(fusewise.rope, Call(leaves, call.kwargs), place)
    dys = tuple(torch.randn(y.shape, device="cpu").to(y) for y in ys)
    given = [dy.clone() for dy in dys]
    dxs = torch.autograd.grad(ys, leaves, dys)
    for x, dx, dy, old, w in zip(leaves, dxs, dys, given, expected(transposed(call, dys)), strict=True):
        assert_right(dx, dy, w)
        assert_bits(dy, old)
        assert dx.stride() == torch.empty_like(x).stride()


INTO = [
    *LAYOUTS[:8],
    *[case for case in CASES if case.name in (
        "sbhd-packed", "bhsd-gaps", "thd-odd", "partial-middle", "partial-trailing", "interleaved_to_half-fp16",
        "packed-sequences-padding", "ids-out-of-range", "ragged", "no-tokens", "heads-71-1", "shared-key", "q-alone",
    )],
]  # fmt: skip


@every_place
@pytest.mark.parametrize("memory", ["contiguous", "odd"])
@pytest.mark.parametrize("case", INTO, ids=lambda case: case.name)
def test_into_outputs(case: Case, memory: str, place: Place) -> None:
    """NaN-filled outputs with other strides: every element is written, and nothing outside them."""
    require(place)
    if place.impl == "triton" and place.device == "cpu" and memory == "contiguous" and case not in LAYOUTS:
        pytest.skip("strided outputs say it all and an interpreted launch takes a second")
    call = make(case, place.device)
    like = Case(**{**{name: getattr(case, name) for name in case.__dataclass_fields__}, "memory": memory})
    outs, storages = poisoned_like(make(like, place.device).xs)
    poison = [storage.clone() for storage in storages]
    returned = run(fusewise.rope, call, place, out=outs if len(outs) == 2 else outs[0])
    for x, y, back, w in zip(call.xs, outs, returned, expected(call), strict=True):
        assert back is y
        assert_right(y, x, w)
    assert_neighbours(poison, storages, outs)


@every_place
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.name in (
        "half-fp32", "interleaved-bf16", "interleaved_to_half-fp16", "partial-middle", "sections", "bshd-misaligned",
        "packed-sequences-offsets", "context-parallel-packed", "table-angles-scale", "heads-71-1", "ragged",
    )],
    ids=lambda case: case.name,
)  # fmt: skip
def test_q_and_k_together_are_q_and_k_alone_and_again(case: Case, place: Place) -> None:
    """Bitwise equal: one launch for both, one for each, and a repeated call."""
    require(place)
    call = make(case, place.device)
    together = run(fusewise.rope, call, place)
    for x, y in zip(call.xs, together, strict=True):
        (alone,) = run(fusewise.rope, Call((x,), call.kwargs), place)
        assert_bits(alone, y)
    for y, again in zip(together, run(fusewise.rope, call, place), strict=True):
        assert_bits(y, again)


@every_place
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("half-inverse-bf16", "partial-trailing")], ids=lambda case: case.name
)
def test_signs_of_zeros_and_payloads_of_nans_pass_through(case: Case, place: Place) -> None:
    """Unrotated features are bitwise unchanged; a NaN in one pair does not affect others."""
    require(place)
    call = make(case, place.device)
    q, k = call.xs
    q[0, 1, 2] = -0.0
    q[1, 0, 0].view(torch.int16).fill_(0x7FC1)
    first = call.kwargs.get("rotary_start", 0) % q.shape[-1]
    k[0, 0, 0, first] = float("nan")
    k[1, 1, 1, first + 1] = float("inf")
    ys = run(fusewise.rope, call, place)
    for x, y, w in zip(call.xs, ys, expected(call), strict=True):
        assert_bits(y[~w.rotated], x[~w.rotated])
        finite = w.rotated & w.exact.isfinite()
        assert y[finite].isfinite().all()
        assert not y[w.rotated & ~w.exact.isfinite()].isfinite().any()


@pytest.mark.parametrize("strides", [(1, 8, 0, 1), (1, 1, 1, 1), (24, 0, 1, 1)], ids=str)
@every_place
def test_elements_that_share_memory_in_any_way(strides: tuple[int, ...], place: Place) -> None:
    """`empty_like` of such inputs has non-contiguous features: stride-0 heads, and windows that overlap by all but one element."""
    require(place)
    sizes = (1, 3, 5, 8) if strides[0] == 1 else (2, 3, 5, 8)
    q = torch.randn(64, device=place.device).as_strided(sizes, strides)
    inv_freq = torch.tensor([1.0, 0.1, 0.01, 0.001], device=place.device)
    call = {"inv_freq": inv_freq, "impl": place.impl}
    expected = fusewise.rope(q.contiguous(), **call)
    assert_bits(fusewise.rope(q, **call), expected)
    leaf = q.detach().requires_grad_()
    assert_bits(
        torch.autograd.grad(fusewise.rope(leaf, **call), leaf, expected)[0],
        fusewise.rope(expected, **call, inverse=True),
    )


@every_place
def test_a_batch_entry_beyond_int32(place: Place) -> None:
    """An entry 2³¹ elements after the first; the memory between them is never touched. On GPUs: `test_gpu.py`."""
    require(place)
    if place.device != "cpu":
        pytest.skip("memory that is not touched takes none only on a CPU")
    x = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((3, 2, 2, 8), (2**30, 17, 8, 1))
    for kind, pairs in (("inv_freq", 4), ("cos_sin", 2)):  # without and with unrotated features
        x.copy_(torch.randn(x.shape))
        call = {**make_table(kind, pairs, 3, torch.float32), "rotary_dim": 2 * pairs, "impl": place.impl}
        expected = fusewise.rope(x.contiguous(), **call)
        assert_bits(fusewise.rope(x, **call), expected)
        assert_bits(fusewise.rope_(x, **call), expected)


# The argument of a call of (3, 3) tokens, its strides and the other arguments.
BEYOND_INT32: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "tokens": ("positions", (2**30,), {}),
    "batch": ("positions", (2**30, 1), {}),
    "axes": ("positions", (2**30, 3, 1), {"sections": (2, 1, 1)}),
    "columns": ("cos_sin", (1, 2**30), {}),
    "columns-partial": ("cos_sin", (1, 2**30), {"rotary_dim": 6}),
    "columns-interleaved": ("cos_sin", (1, 2**30), {"rotary_dim": 6, "pairing": "interleaved"}),
    "frequencies": ("inv_freq", (2**30,), {}),
}


@every_place
@pytest.mark.parametrize("name", BEYOND_INT32)
def test_positions_and_tables_beyond_int32(name: str, place: Place, tmp_path: Path) -> None:
    """Elements 2³¹ after the first, in a file of which no more than these exist."""
    require(place)
    if place.device != "cpu":
        pytest.skip("memory that is not touched takes none only on a CPU")
    argument, strides, options = BEYOND_INT32[name]
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=3 * 2**30 + 1024, dtype=torch.int32)
    call = make_table(
        "inv_freq" if argument == "inv_freq" else "cos_sin", options.get("rotary_dim", 8) // 2, 1, torch.float32
    )
    near: dict[str, torch.Tensor] = dict(call)
    if argument == "positions":
        near = {argument: torch.arange(3 ** len(strides), dtype=torch.int32).view([3] * len(strides))}
    far = {
        key: memory.view(x.dtype).as_strided(x.shape, strides, 512 * i).copy_(x)
        for i, (key, x) in enumerate(near.items())
    }
    call |= {**options, "impl": place.impl}
    q = torch.randn(3, 3, 2, 8)
    assert_bits(fusewise.rope(q, **{**call, **far}), fusewise.rope(q, **{**call, **near}))
