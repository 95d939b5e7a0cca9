"""Test cases of `rope_and_cache_` and their expected results: rotation by the RoPE oracle, slots by Python integers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusewise.ops.rope_and_cache._op import IMPLEMENTATIONS

from ..rope.oracle import Call, expected, position
from ..rope.support import DTYPES, Place, allocate, assert_bits, assert_right, copy_of, make_table

DEVICES = ("cpu", "cuda")
PLACES = [Place(impl, device) for impl in IMPLEMENTATIONS for device in DEVICES if (impl, device) != ("cuda", "cpu")]


@dataclass(frozen=True, kw_only=True)
class Case:
    """The description of a call; `make` creates its tensors."""

    name: str
    tokens: int = 5
    batch: int = 2  # for layouts with a batch dimension
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    k_dim: int | None = None
    v_dim: int | None = None
    layout: str = "thd"
    memory: str = "contiguous"
    dtype: str = "fp32"
    table: str = "fused"
    table_dtype: str = "fp32"
    pairing: str = "half"
    rotary_dim: int | None = None
    cache: str = "nhd"
    blocks: int = 6
    block_size: int = 4
    slots: tuple[int, ...] | None = None  # in order of batch and token
    slot_dtype: torch.dtype = torch.int64
    block_table: tuple[tuple[int, ...], ...] | None = None
    positions: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)  # further keyword arguments; CPU tensors


@dataclass
class Made:
    """The tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_cache: Tensor
    value_cache: Tensor
    kwargs: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        return {**self.kwargs, "key_cache": self.key_cache, "value_cache": self.value_cache}

    def written(self) -> tuple[Tensor, ...]:
        return (self.q, self.k, self.v, self.key_cache, self.value_cache)

    def copy(self) -> tuple[Made, list[Tensor]]:
        """Clone the tensors with their storages; also return the new storages."""
        copies, storages = copy_of(self.written())
        return Made(*copies, self.kwargs), storages


def make(case: Case, device: str = "cpu") -> Made:
    """Tensors for a case; the same values on every device."""
    dtype = DTYPES[case.dtype]
    shape = functools.partial(_shape, case.layout, case.batch, case.tokens)
    k_dim, v_dim = case.k_dim or case.head_dim, case.v_dim or case.head_dim
    heads = ((case.heads, case.head_dim), (case.kv_heads, k_dim), (case.kv_heads, v_dim))
    if case.memory in ("packed", "flat"):
        h_dim = 1 if case.layout in ("bhsd", "thd") else 2
        qkv = torch.randn(shape(case.heads + 2 * case.kv_heads, case.head_dim)).to(dtype).to(device)
        q, k, v = qkv.split([case.heads, case.kv_heads, case.kv_heads], dim=h_dim)
        if case.memory == "flat":
            packed = qkv.flatten(1)
            widths = [n * case.head_dim for n in (case.heads, case.kv_heads, case.kv_heads)]
            q, k, v = packed.split(widths, dim=1)
    else:
        q, k, v = (allocate(shape(*h), case.memory, dtype, device) for h in heads)
    key_cache, value_cache = _caches(case, (k_dim, v_dim), dtype, device)
    pairs = (case.rotary_dim or case.head_dim) // 2
    kwargs = {
        **make_table(case.table, pairs, case.batch, DTYPES[case.table_dtype], case.pairing),
        "layout": case.layout, "pairing": case.pairing, "rotary_dim": case.rotary_dim, **case.options,
        "cache_layout": "hnd" if "hnd" in case.cache else "nhd",
    }  # fmt: skip
    of_tokens = (-1,) if case.layout == "thd" else (case.batch, case.tokens)
    if case.slots is not None:
        # Values past the end would be valid slots.
        longer = torch.tensor((*case.slots, *range(case.tokens)), dtype=case.slot_dtype)
        kwargs["slot_mapping"] = longer.to(device)[: len(case.slots)].view(of_tokens)
    if case.block_table is not None:
        kwargs["block_table"] = torch.tensor(case.block_table, dtype=case.slot_dtype)
    if case.positions is not None:
        kwargs["positions"] = torch.tensor(case.positions).view(of_tokens)
    kwargs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    return Made(q, k, v, key_cache, value_cache, kwargs)


def _shape(layout: str, batch: int, tokens: int, heads: int, width: int) -> tuple[int, ...]:
    return {
        "bshd": (batch, tokens, heads, width),
        "sbhd": (tokens, batch, heads, width),
        "bhsd": (batch, heads, tokens, width),
        "thd": (tokens, heads, width),
    }[layout]


def _caches(case: Case, widths: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """The caches, with guard elements before and after them."""
    n, s, g = case.blocks, case.block_size, case.kv_heads
    inner = (g, s) if "hnd" in case.cache else (s, g)

    def guarded(*shape: int) -> Tensor:
        size, guard = int(torch.tensor(shape).prod()), 16 * g * max(widths)
        flat = torch.randn(size + 2 * guard).to(dtype).to(device)
        return flat[guard : guard + size].view(shape)

    if "vllm" in case.cache:
        key_cache, value_cache = guarded(2, n, *inner, widths[0]).unbind(0)
    elif "flashinfer" in case.cache:
        key_cache, value_cache = guarded(n, 2, *inner, widths[0]).unbind(1)
    elif "gaps" in case.cache:  # every second slot of larger blocks, slices of wider heads, off by one element
        key_cache, value_cache = (guarded(n, 2 * s, g, w + 5)[:, ::2, :, 1 : 1 + w] for w in widths)
    else:
        key_cache, value_cache = (guarded(n, *inner, w) for w in widths)
    return key_cache, value_cache


def nhd(made: Made) -> tuple[Tensor, Tensor]:
    """The caches as (N, S, G, D)."""
    caches = made.key_cache, made.value_cache
    return caches if made.kwargs["cache_layout"] == "nhd" else tuple(cache.transpose(1, 2) for cache in caches)  # type: ignore[return-value]


def by_head(x: Tensor, width: int) -> Tensor:
    return x.unflatten(-1, (-1, width)) if x.dim() == 2 else x


def slot_of(made: Made, batch: int, b: int, t: int, tokens: int) -> int | None:
    """The slot of token t of batch entry b, by the documented rule; None if it has none."""
    kwargs = made.kwargs
    blocks, size = nhd(made)[0].shape[:2]
    place = position(kwargs, b, t, tokens)
    if place is None:
        return None
    slots, table, bounds = kwargs.get("slot_mapping"), kwargs.get("block_table"), kwargs.get("cu_seqlens")
    if slots is not None:
        of_batch = slots if slots.dim() == 1 else slots[b]
        slot = int(of_batch[t]) if t < len(of_batch) else -1
    else:
        sequence = b
        if kwargs["layout"] == "thd":
            sequence = t if bounds is None else next(s for s in range(len(bounds) - 1) if t < int(bounds[s + 1]))
        block, entry = divmod(place[0], size)
        if table is None:
            slot = sequence * size + entry if block == 0 else -1
        else:
            known = 0 <= block < table.shape[1]
            block = int(table[sequence, block]) if known else -1
            slot = block * size + entry if 0 <= block < blocks else -1
    return slot if 0 <= slot < blocks * size else None


def check(before: Made, after: Made, storages: tuple[list[Tensor], list[Tensor]], write_k: bool = True) -> None:
    """Check that q and k are rotated, k and v are in their cache slots, and all other memory is unchanged.

    `storages` are the storages of the tensors before and after."""
    k_width, v_width = before.key_cache.shape[-1], before.value_cache.shape[-1]
    flat = before.q.dim() == 2
    q, k, v = (by_head(x, w) for x, w in ((before.q, k_width), (before.k, k_width), (before.v, v_width)))
    rotation = Call((q, k), {n: x for n, x in before.kwargs.items() if n not in NOT_OF_ROPE})
    want_q, want_k = expected(rotation)
    assert_right(by_head(after.q, k_width), q, want_q)
    if write_k:
        assert_right(by_head(after.k, k_width), k, want_k)
    layout = before.kwargs["layout"]
    assert not flat or layout == "thd"
    assert_bits(after.v, before.v)

    # Compare cached rows of k with the oracle, in the shape of k; then all other memory with its previous values.
    key_cache, value_cache = nhd(after)
    untouched = [torch.ones_like(storage, dtype=torch.bool) for storage in storages[1]]
    cached_k, cached_v = by_head(after.k, k_width).clone(), v.clone()
    k_rows, v_rows = _rows(cached_k, layout), _rows(cached_v, layout)
    rotated_k = _rows(_nearest(k, want_k, by_head(after.k, k_width) if write_k else None), layout)
    batch, tokens = k_rows.shape[:2]
    for b in range(batch):
        for t in range(tokens):
            slot = slot_of(before, batch, b, t, tokens)
            if slot is None:
                k_rows[b, t] = rotated_k[b, t]
            else:
                block, entry = divmod(slot, key_cache.shape[1])
                k_rows[b, t], v_rows[b, t] = key_cache[block, entry], value_cache[block, entry]
                for cache in (key_cache, value_cache):
                    _mark(untouched, storages[1], cache[block, entry])
    if write_k:
        assert_bits(cached_k, by_head(after.k, k_width))
    else:
        assert_right(cached_k, k, want_k)
    assert_bits(cached_v, v)
    for x in (after.q, after.k) if write_k else (after.q,):
        _mark(untouched, storages[1], x)
    for old, new, same in zip(*storages, untouched, strict=True):
        assert_bits(old[same], new[same])


# Arguments that `rope` does not have; the others are passed to the oracle.
NOT_OF_ROPE = {"slot_mapping", "block_table", "cache_layout", "write_k", "impl"}


def _rows(x: Tensor, layout: str) -> Tensor:
    """x as (B, T, G, D), a view."""
    return x[None] if layout == "thd" else x.movedim({"bshd": 1, "sbhd": 0, "bhsd": 2}[layout], 1)


def _nearest(x: Tensor, want: Any, rotated: Tensor | None) -> Tensor:
    """Stand-in for the cached rows of tokens without a slot: the rotation itself."""
    return torch.where(want.rotated, want.exact.to(x.dtype), want.passed) if rotated is None else rotated


def _mark(untouched: list[Tensor], storages: list[Tensor], x: Tensor) -> None:
    for mask, storage in zip(untouched, storages, strict=True):
        if x.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr():
            mask.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)


DECODE = ((3, 1), (0, 5), (4, 2))
BOUNDS = torch.tensor([0, 3, 3, 7])  # of three sequences of 9 tokens, the last two padding
FAR = (2**31 - 1, -(2**31))
WIDE = (2**40, -(2**40))
# Large enough for the path of large calls on a GPU with one SM, as the CPU simulation has.
LARGE: dict[str, Any] = {
    "tokens": 230, "heads": 32, "kv_heads": 8, "dtype": "bf16", "blocks": 40, "block_size": 6,
    "slots": tuple((37 * i) % 241 - 1 for i in range(230)), "positions": tuple((5 * i) % 64 for i in range(230)),
}  # fmt: skip

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(name="vllm", cache="vllm", slots=(3, -1, 17, 23, 0), positions=(7, 0, 63, 2, 2)),
        Case(name="vllm-bf16", cache="vllm", dtype="bf16", table_dtype="bf16", slots=(3, -1, 17, 23, 0), positions=(7, 0, 63, 2, 2)),
        Case(name="flashinfer", cache="flashinfer", dtype="fp16", slots=(3, 9, 17, 23, 0), slot_dtype=torch.int32, positions=(7, 0, 63, 2, 2)),
        Case(name="flashinfer-hnd", cache="flashinfer hnd", dtype="bf16", slots=(3, 9, -1, 23, 0), positions=(7, 0, 63, 2, 2)),
        Case(name="hnd", cache="hnd", slots=(3, 9, -1, 23, 0), pairing="interleaved"),
        Case(name="flat", memory="flat", dtype="bf16", slots=(3, 9, -1, 23, 0)),
        Case(name="packed", memory="packed", cache="flashinfer", slots=(20, 9, 2, 23, 0)),
        Case(name="slots beyond", slots=(24, -1, 25, 23, -25), positions=(1, 2, 3, 4, 5)),
        Case(name="slots far beyond", slots=(*FAR, 24, -24, 1), slot_dtype=torch.int32),
        Case(name="slots past 32 bits", slots=(*WIDE, 2**32 + 1, 2**33, 1)),
        Case(name="slots of a part", slots=(5, 6), positions=(7, 0, 63, 2, 2)),
        Case(name="all skipped", slots=(-1,) * 5),
        Case(name="slots of no token", slots=()),  # no elements and no address, as where there are no slots
        Case(name="no cache", blocks=0, slots=(-1, 0, 1, 2, 3)),
        Case(name="blocks without slots", block_size=0, slots=(-1, 0, 1, 2, 3)),
        Case(name="one token", tokens=1, slots=(13,)),
        Case(name="no token", tokens=0, slots=()),
        Case(name="no token, contiguous", tokens=0, layout="bshd"),
        Case(name="multi-query", heads=3, kv_heads=1, slots=(3, 9, -1, 23, 0)),
        Case(name="positions beyond", slots=(3, 9, -1, 23, 0), positions=(7, 64, 63, -1, 2), dtype="bf16"),
        Case(name="keeps k", cache="vllm", slots=(3, -1, 17, 23, 0), positions=(7, 0, 63, 2, 2), options={"write_k": False}),
        Case(name="keeps k, packed bf16", memory="packed", dtype="bf16", slots=(3, -1, 17, 23, 0), options={"write_k": False}),
        Case(name="keeps k, partial", head_dim=24, rotary_dim=8, slots=(3, -1, 17, 23, 0), options={"write_k": False}),
        Case(name="contiguous", layout="bshd", blocks=2, block_size=12, options={"offset": torch.tensor([7, 0])}),
        Case(name="contiguous full", layout="bshd", blocks=2, block_size=7, options={"offset": torch.tensor([4, 30])}),
        Case(name="contiguous hnd", layout="bhsd", cache="hnd", blocks=3, block_size=12, dtype="bf16", options={"offset": 3}),
        Case(name="contiguous decode", blocks=5, block_size=16, positions=(7, 0, 15, 16, 2)),
        Case(name="contiguous, positions outside", tokens=4, blocks=4, positions=(0, -1, 4, 2**40)),
        Case(name="contiguous sbhd", layout="sbhd", blocks=2, block_size=9, positions=(3, 4, 5, 6, 7, 0, 1, 2, 9, 4)),
        Case(name="block table", layout="bshd", block_table=((3, 1), (0, 5)), options={"offset": torch.tensor([2, 3], dtype=torch.int32)}),
        Case(name="block table decode", tokens=3, block_table=DECODE, slot_dtype=torch.int32, positions=(7, 0, 4)),
        Case(name="block table, strided", tokens=3, positions=(7, 0, 4), options={"block_table": torch.tensor(DECODE).mT.contiguous().mT}),
        Case(name="slots, strided", positions=(7, 0, 63, 2, 2), options={"slot_mapping": torch.tensor((3, 9, -1, 23, 0)).repeat_interleave(2)[::2]}),
        Case(name="batched slots, strided", layout="bshd", options={"slot_mapping": torch.tensor((3, 9, -1, 23, 0, 1, 2, 4, 5, 99)).view(5, 2).mT}),
        Case(name="block table of no blocks", tokens=3, block_table=((), (), ()), positions=(1, 0, 2)),
        Case(name="block table holes", tokens=6, block_table=((3, -1), (6, 5), (0, 2), (2**31 - 1, 1), (2**62, 4), (-(2**62), 4)), positions=(5, 1, 9, 2, 3, 0)),
        Case(name="block table, positions outside", tokens=3, block_table=DECODE, positions=(-1, 8, -(2**40))),
        Case(name="block table packed", tokens=9, block_table=DECODE, options={"cu_seqlens": BOUNDS, "offset": torch.tensor([3, 0, 5])}),
        Case(name="slots packed", tokens=9, slots=(3, 9, -1, 23, 0, 1, 2, 4, 5), options={"cu_seqlens": BOUNDS.int()}),
        Case(name="contiguous packed", tokens=9, blocks=3, block_size=7, options={"cu_seqlens": BOUNDS}),
        Case(name="four sequences packed", tokens=9, blocks=5, block_size=9, options={"cu_seqlens": torch.tensor([0, 1, 2, 4, 7])}),
        Case(name="a table each, strided", layout="bshd", tokens=2, slots=(3, 9, -1, 23), options={"cos_sin": torch.rand(2 * 65 * 16).as_strided((2, 64, 16), (64 * 16 + 1, 16, 1))}),
        Case(name="batched slots", layout="bshd", slots=(3, 9, -1, 23, 0, 1, 2, 4, 5, 99), options={"offset": 2}),
        Case(name="batched slots bhsd", layout="bhsd", memory="packed", dtype="fp16", slots=(3, 9, -1, 23, 0, 1, 2, 4, 5, 99)),
        Case(name="partial", head_dim=24, rotary_dim=8, dtype="bf16", slots=(3, 9, -1, 23, 0)),
        Case(name="partial interleaved", head_dim=24, rotary_dim=8, pairing="interleaved", table="half", slots=(3, 9, -1, 23, 0)),
        Case(name="trailing", head_dim=24, rotary_dim=16, options={"rotary_start": -16}, slots=(3, 9, -1, 23, 0)),
        Case(name="middle", head_dim=24, rotary_dim=8, options={"rotary_start": 1}, slots=(3, 9, -1, 23, 0)),
        Case(name="to half", pairing="interleaved_to_half", slots=(3, 9, -1, 23, 0)),
        Case(name="to half, keeps k", pairing="interleaved_to_half", dtype="bf16", slots=(3, 9, -1, 23, 0), options={"write_k": False}),
        Case(name="to interleaved", pairing="half_to_interleaved", head_dim=24, rotary_dim=16, slots=(3, 9, -1, 23, 0)),
        Case(name="widths", head_dim=24, k_dim=8, v_dim=12, rotary_dim=8, options={"rotary_start": -8}, slots=(3, 9, -1, 23, 0)),
        Case(name="odd values", v_dim=7, slots=(3, 9, -1, 23, 0)),
        Case(name="wide values", v_dim=40, dtype="bf16", slots=(3, 9, -1, 23, 0)),
        Case(name="misaligned", memory="misaligned", cache="gaps", dtype="bf16", slots=(3, 9, -1, 23, 0)),
        Case(name="strided", memory="gaps", cache="gaps", slots=(3, 9, -1, 23, 0)),
        Case(name="frequencies", table="inv_freq", slots=(3, 9, -1, 23, 0), positions=(100000, 0, 63, 2, 2)),
        Case(name="angles", table="angles", slots=(3, 9, -1, 23, 0), options={"scale": 1.25}),
        Case(name="two tables", table="duplicated", table_dtype="fp16", dtype="fp16", slots=(3, 9, -1, 23, 0)),
        Case(name="two tables, interleaved", table="duplicated", pairing="interleaved", slots=(3, 9, -1, 23, 0)),
        Case(name="sections", slots=(3, 9, -1, 23, 0), options={"sections": (4, 2, 2), "positions": torch.arange(15).view(3, 5) * 4}),
        Case(name="blocks of one", block_size=1, blocks=24, slots=(3, 9, -1, 23, 0)),
        Case(name="blocks of seven", block_size=7, blocks=5, slots=(3, 9, -1, 34, 35), dtype="bf16"),
        Case(name="many tokens", tokens=150, heads=7, kv_heads=3, blocks=25, block_size=6, dtype="bf16", head_dim=32, slots=tuple((37 * i) % 151 - 1 for i in range(150)), positions=tuple((5 * i) % 64 for i in range(150))),
        Case(name="more heads of k than of q", tokens=60, heads=1, kv_heads=4, blocks=15, slots=tuple((37 * i) % 61 - 1 for i in range(60))),
        Case(name="several heads a thread", **LARGE),
        Case(name="several heads a thread, keeps k", **LARGE, pairing="interleaved", memory="packed", options={"write_k": False}),
        Case(name="several heads a thread, frequencies", **LARGE, table="inv_freq", cache="flashinfer hnd"),
        Case(name="several heads a thread, partial", **{**LARGE, "head_dim": 24}, rotary_dim=16, pairing="interleaved_to_half"),
        Case(name="head of 80", head_dim=80, tokens=3, heads=6, dtype="bf16", slots=(3, 9, -1)),
        Case(name="widest heads", head_dim=512, tokens=3, heads=2, memory="misaligned", slots=(3, 9, -1)),
        Case(name="head of 2", head_dim=2, tokens=3, slots=(3, 9, -1)),
        Case(name="llama", heads=32, kv_heads=8, head_dim=128, dtype="bf16", cache="vllm", slots=(3, 9, -1, 23, 0)),
        # As serving engines call it: the kernel of `direct.cuh`, in every width it supports.
        Case(name="serving", head_dim=32, cache="vllm", dtype="bf16", table_dtype="bf16", slots=(3, -1, 17, 24, 0), positions=(7, 64, 63, -1, 2), options={"write_k": False}),
        Case(name="serving, one token", tokens=1, head_dim=32, cache="hnd", dtype="fp16", table_dtype="fp16", slots=(13,), slot_dtype=torch.int32, positions=(9,)),
        Case(name="serving, interleaved", head_dim=32, memory="flat", dtype="fp16", pairing="interleaved", slots=(3, *FAR, 23, 0), slot_dtype=torch.int32, positions=(7, 0, 63, 2, 2)),
        Case(name="serving, a batch", layout="bshd", tokens=3, heads=8, head_dim=64, dtype="bf16", cache="flashinfer hnd", slots=(3, 9, -1, 23, 0, 1), positions=(7, 0, 63, 2, 2, 1)),
        Case(name="serving, a batch of one token each", layout="bhsd", batch=5, tokens=1, head_dim=32, cache="vllm", slots=(3, *WIDE, 23, 1), positions=(7, 0, 63, 2, 2), pairing="interleaved"),
        Case(name="serving, a batch out of order", layout="sbhd", tokens=3, head_dim=32, slots=(3, 9, -1, 23, 0, 1), positions=(7, 0, 63, 2, 2, 1)),
        Case(name="serving, a table each", layout="bshd", tokens=3, head_dim=32, table="fused-batched", slots=(3, 9, -1, 23, 0, 1), positions=(7, 0, 63, 2, 2, 1)),
        Case(name="serving, slots alone", head_dim=32, block_size=1, blocks=24, cache="hnd", dtype="bf16", slots=(3, 9, -1, 23, 24), positions=(7, 0, 63, 2, 2)),
        Case(name="serving, half a head", head_dim=64, rotary_dim=32, cache="vllm", dtype="bf16", table_dtype="bf16", pairing="interleaved", slots=(3, -1, 17, 24, 0), positions=(7, 64, 63, -1, 2)),
        Case(name="serving, the latter half, one head", head_dim=64, rotary_dim=32, options={"rotary_start": -32}, kv_heads=1, cache="hnd", slots=(3, *FAR, 23, 0), positions=(7, 0, 63, 2, 2)),
        Case(name="serving, half a head, heads apart", head_dim=64, rotary_dim=32, cache="hnd", dtype="bf16", slots=(3, 9, -1, 23, 0), positions=(7, 0, 63, 2, 2)),
        Case(name="serving, wide values", head_dim=32, v_dim=96, cache="vllm", dtype="fp16", memory="packed", slots=(3, 9, -1, 23, 0), positions=(7, 0, 63, 2, 2)),
        Case(name="serving, many tokens, half a head", **{**LARGE, "dtype": "bf16", "kv_heads": 8, "heads": 24}, head_dim=64, rotary_dim=32, pairing="interleaved"),
        Case(name="serving, many tokens", **{**LARGE, "table_dtype": "fp16", "dtype": "fp16", "cache": "flashinfer hnd"}, head_dim=32),
        Case(name="serving, many tokens of five heads", **{**LARGE, "heads": 26, "kv_heads": 5}, head_dim=32, options={"write_k": False}),
        Case(name="serving, a narrow table of another dtype", **{**LARGE, "table_dtype": "bf16", "dtype": "fp16"}, head_dim=32),
        Case(name="serving, many tokens, float32", **{**LARGE, "dtype": "fp32"}, pairing="interleaved", memory="packed"),
        Case(name="fp64", dtype="fp64", slots=(3, 9, -1, 23, 0)),
    )
}  # fmt: skip
