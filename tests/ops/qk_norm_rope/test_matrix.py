"""Outputs and all gradients of every implementation against float64, with one case per feature that can break."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fusewise

from ..rope.support import Case, Place
from .support import NormCase, build, check, places
from .support import small_device as small_device

pytestmark = pytest.mark.usefixtures("small_device")

I32, I64 = torch.int32, torch.int64


def case(name: str, norm: dict[str, Any] | None = None, **rotation: Any) -> NormCase:
    return NormCase(Case(name=name, **rotation), **(norm or {}))


ALL, GEMMA = {"norm": "all"}, {"weight_offset": 1.0}

CASES = [
    # models, small
    case("qwen3", {"weight_dtype": torch.bfloat16}, head_dim=128, tokens=3, dtype="bf16"),
    case("gemma3", {**GEMMA, "weight_dtype": torch.bfloat16}, head_dim=256, tokens=3, heads=2, kv_heads=1, layout="bhsd", memory="swapped", dtype="bf16"),
    case("olmo2", {**ALL, "weight_dtype": torch.bfloat16}, head_dim=128, tokens=3, heads=5, dtype="bf16", layout="bhsd", memory="swapped"),
    case("qwen3-next", GEMMA, head_dim=64, rotary_dim=16, tokens=3),
    case("minimax-m2", ALL, head_dim=32, rotary_dim=16, heads=6, tokens=3),
    case("no-weights", {"weight_dtype": None}),
    case("no-weights-all", {"weight_dtype": None, **ALL}),
    # dtypes
    case("fp16", dtype="fp16"), case("bf16-all", ALL, dtype="bf16"),
    case("weight-fp16", {"weight_dtype": torch.float16}), case("weight-fp32", {**GEMMA}, dtype="bf16"),
    case("table-bf16", table_dtype="bf16", dtype="bf16"),
    # layouts and memory
    *[case(layout, norm, layout=layout) for layout in ("sbhd", "bhsd") for norm in (None,)],
    *[case(f"{layout}-all", ALL, layout=layout) for layout in ("sbhd", "bhsd", "thd")],
    *[case(memory, ALL if memory == "gaps" else None, memory=memory) for memory in ("packed", "misaligned", "sliced", "odd", "swapped", "outer-swapped", "gaps", "expanded")],
    case("packed-thd", layout="thd", memory="packed", dtype="bf16"),
    # sizes
    case("q-alone", kv_heads=None), case("q-alone-all", ALL, kv_heads=None), case("one-token", tokens=1, batch=1),
    case("one-head", heads=1, kv_heads=1), case("seven-heads-all", ALL, heads=7, kv_heads=3),
    case("more-k-than-q", heads=1, kv_heads=6), case("more-k-than-q-all", ALL, heads=1, kv_heads=6),
    *[case(f"width-{d}", head_dim=d, tokens=2) for d in (2, 6, 56, 72, 80, 96, 112, 160, 192, 512)],
    case("shared-key", head_dim=24, k_head_dim=16, rotary_dim=16, kv_heads=1, options={"rotary_start": -16}),
    case("wider-key", head_dim=16, k_head_dim=24, rotary_dim=16, kv_heads=1),
    # widths and pairings
    case("leading", head_dim=24, rotary_dim=10), case("trailing", GEMMA, head_dim=24, rotary_dim=10, options={"rotary_start": -10}),
    case("middle", ALL, head_dim=24, rotary_dim=10, options={"rotary_start": 5}),
    *[case(pairing, GEMMA, pairing=pairing) for pairing in ("interleaved", "interleaved_to_half", "half_to_interleaved")],
    case("interleaved-24", pairing="interleaved", head_dim=24), case("interleaved-leading", ALL, pairing="interleaved", head_dim=24, rotary_dim=8),
    case("deepseek", pairing="interleaved_to_half", head_dim=24, rotary_dim=8, options={"rotary_start": -8}),
    # tables and positions
    *[case(table, table=table) for table in ("fused", "duplicated", "angles", "inv_freq", "half-batched", "strided")],
    case("scaled", table="inv_freq", options={"scale": 1.25}),
    case("offset", options={"offset": 7}), case("offsets", options={"offset": torch.tensor([3, 70], dtype=I32)}),
    case("ids", ALL, options={"positions": torch.tensor([[5, 0, 63, 64, -1], [1, 2, 3, 4, 9]])}),
    case("ids-out-of-table", options={"positions": torch.tensor([0, 64, 1, -1, 2], dtype=I32)}),
    case("last-row", head_dim=24, options={"positions": torch.tensor([63, 0, 62, 1, 63])}),
    case("sections", options={"positions": torch.arange(30).view(3, 2, 5), "sections": (4, 2, 2), "sections_interleaved": True}),
    case("packed-sequences", layout="thd", tokens=9, options={"cu_seqlens": torch.tensor([0, 4, 6], dtype=I32)}),
    case("packed-to-half", ALL, layout="thd", tokens=9, pairing="interleaved_to_half", options={"cu_seqlens": torch.tensor([0, 4, 6], dtype=I64)}),
    case("context-parallel", tokens=6, options={"context_parallel": (1, 2)}),
    # the norm
    case("eps", {"eps": 0.5}), case("eps-zero", {"eps": 0.0}), case("eps-zero-all", {"eps": 0.0, **ALL}, heads=3),
]  # fmt: skip


@pytest.mark.parametrize("place", places())
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right(case: NormCase, place: Place) -> None:
    check(build(case, place.device), place.impl)


@pytest.mark.parametrize("norm", ["head", "all"])
def test_float64(norm: str) -> None:
    check(build(NormCase(Case(name="fp64", dtype="fp64"), norm, 1.0, weight_dtype=torch.float64)), "reference")


@pytest.mark.parametrize("place", places())
@pytest.mark.parametrize("norm", ["head", "all"])
def test_long_offsets_are_the_same_kernel(place: Place, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 64-bit variant for more than 2^31 elements, on few."""
    if place.impl != "triton":
        pytest.skip("only Triton's kernels have two kinds of offsets")
    made = build(NormCase(Case(name="long"), norm), place.device)
    short = made.run("triton")
    from fusewise.ops.rope import _triton

    monkeypatch.setattr(_triton, "reach_of", lambda problem: 2**31)
    long = made.run("triton")
    for a, b in zip((*short[0], *short[1]), (*long[0], *long[1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("place", places())
@pytest.mark.parametrize("norm", ["head", "all"])
@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_programs_with_several_tiles(
    place: Place, norm: str, rotary_dim: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device of one SM: programs process several tiles, the last one with fewer rows."""
    if place.impl != "triton":
        pytest.skip("only Triton's kernels have programs")
    from fusewise.ops.qk_norm_rope import _triton

    monkeypatch.setattr(_triton, "_processors", lambda x: 1)
    case = Case(name="tiles", batch=1, tokens=37, heads=3, kv_heads=1, rotary_dim=rotary_dim)
    made = build(NormCase(case, norm, 1.0, eps=0.0), place.device)
    check(made, "triton")
    for blocks in ((2, 8), (8, 2)):
        tiles = _triton.rope.Tile(blocks[0], 4), _triton.rope.Tile(blocks[1], 1)
        monkeypatch.setattr(_triton, "choose", lambda *_, tiles=tiles: _triton.Config(tiles, 4, 2))
        check(made, "triton")


@pytest.mark.parametrize("place", places())
@pytest.mark.parametrize("empty", [{"tokens": 0}, {"batch": 0}, {"heads": 0, "kv_heads": 0}, {"heads": 0}], ids=str)
@pytest.mark.parametrize("norm", ["head", "all"])
def test_nothing_to_do(place: Place, empty: dict[str, int], norm: str) -> None:
    """No rows: empty outputs, and zero weight gradients."""
    made = build(NormCase(Case(name="empty", **empty), norm), place.device)
    ys, gradients = made.run(place.impl)
    assert [y.shape for y in ys] == [x.shape for x in made.xs]
    for x, weight, of_weight in zip(made.xs, made.weights, gradients[2:], strict=True):
        assert of_weight.shape == weight.shape
        assert (of_weight == 0).all() or x.numel()


@pytest.mark.parametrize("place", places())
@pytest.mark.parametrize("index", range(4), ids=["q", "k", "dq", "dk"])
def test_one_of_the_tensors_may_have_odd_strides(index: int, place: Place) -> None:
    """The others are multiples of 16, and a kernel may read the strides of all in one unit."""
    made = build(NormCase(Case(name="odd")), place.device)
    tensors = [*made.xs, *made.dys]
    x = tensors[index]
    tensors[index] = x.new_empty(*x.shape[:-1], x.shape[-1] + 1)[..., :-1].copy_(x)
    check(replace(made, xs=tuple(tensors[:2]), dys=tuple(tensors[2:])), place.impl)


@pytest.mark.parametrize("place", places())
@pytest.mark.parametrize("weighted", [True, False])
def test_elements_that_share_memory_in_any_way(place: Place, weighted: bool) -> None:
    """`empty_like` of such inputs has non-contiguous features."""
    q = torch.randn(64, device=place.device).as_strided((1, 3, 5, 8), (1, 8, 0, 1))
    inv_freq = torch.tensor([1.0, 0.1, 0.01, 0.001], device=place.device)
    weights = [torch.randn(8, device=place.device)] if weighted else []

    def results(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, *weights)]
        y = fusewise.qk_norm_rope(leaves[0], None, *(leaves[1:] or [None]), inv_freq=inv_freq, impl=place.impl)
        return y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))

    for result, expected in zip(results(q), results(q.contiguous()), strict=True):
        torch.testing.assert_close(result, expected)
