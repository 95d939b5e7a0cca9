"""The kernel for large calls that would otherwise make narrow accesses or write partial sectors (`_cuda/bulk.cuh`): on a CPU against
the oracle, for any order of threads and asynchronous operations, and on a GPU bitwise equal to Triton."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fusewise
from fusewise.ops.rope import _cuda
from fusewise.ops.rope._auto import choice

from .. import cuda_on_cpu
from .oracle import Call, expected
from .support import Case, Place, assert_bits, assert_neighbours, assert_right, copy_of, make, poisoned_like
from .test_cuda_on_cpu import CUDA, changed
from .test_matrix import ids, run

BATCH, TOKENS = 2, 13
BASE = Case(name="", batch=BATCH, tokens=TOKENS, heads=4, kv_heads=3, head_dim=80, rotary_dim=32, dtype="bf16")
CASES = [
    replace(BASE, name="phi-2"),
    replace(BASE, name="fp16-table", dtype="fp16", table_dtype="fp16", options={"inverse": True}),
    replace(BASE, name="neox", dtype="fp16", heads=6, kv_heads=6, head_dim=96, rotary_dim=24),
    replace(BASE, name="neox-inverse", heads=5, head_dim=96, rotary_dim=24, options={"positions": ids(BATCH, TOKENS, low=-8, high=72), "inverse": True}),
    replace(BASE, name="stablelm-3b", heads=14, rotary_dim=20, options={"positions": ids(TOKENS, dtype=torch.int32)}),
    replace(BASE, name="fp32", dtype="fp32", head_dim=20, rotary_dim=8, options={"rotary_start": 4, "offset": 3}),
    replace(BASE, name="fp32-pair", dtype="fp32", head_dim=8, rotary_dim=2, options={"inverse": True}),
    replace(BASE, name="parts", dtype="fp32", heads=60, kv_heads=33, head_dim=96, rotary_dim=16, tokens=3),
    replace(BASE, name="wide", dtype="fp32", heads=3, kv_heads=1, head_dim=512, rotary_dim=256, tokens=4),
    replace(BASE, name="thd", layout="thd", batch=1, tokens=31),
    replace(BASE, name="packed", memory="packed", k_head_dim=None),
    replace(BASE, name="decode", batch=40, tokens=1, options={"positions": ids(40, 1, low=-8, high=72, dtype=torch.int32)}),
    replace(BASE, name="q-alone", kv_heads=None),
    replace(BASE, name="sbhd", layout="sbhd"),
    replace(BASE, name="narrow", heads=6, kv_heads=2, head_dim=72, rotary_dim=72, options={"positions": ids(BATCH, TOKENS, low=-8, high=72)}),
    replace(BASE, name="narrow-fp32", dtype="fp32", heads=34, kv_heads=8, head_dim=62, rotary_dim=62, tokens=3),
    replace(BASE, name="narrower", heads=4, kv_heads=2, head_dim=36, rotary_dim=36, table_dtype="bf16", options={"inverse": True}),
    replace(BASE, name="narrowest", heads=16, kv_heads=8, head_dim=50, rotary_dim=50),
    replace(BASE, name="narrowest-part", dtype="fp16", heads=16, kv_heads=8, head_dim=58, rotary_dim=10, table_dtype="fp16", options={"inverse": True, "rotary_start": 7}),
    replace(BASE, name="neighbours", pairing="interleaved", options={"inverse": True}),
    replace(BASE, name="neighbours-8-bytes", pairing="interleaved", heads=6, kv_heads=2, head_dim=36, rotary_dim=36, options={"positions": ids(BATCH, TOKENS, low=-8, high=72)}),
    replace(BASE, name="neighbours-4-bytes", pairing="interleaved", dtype="fp16", heads=16, kv_heads=8, head_dim=26, rotary_dim=22, table_dtype="fp16"),
    replace(BASE, name="neighbours-fp32", pairing="interleaved", dtype="fp32", heads=34, kv_heads=8, head_dim=62, rotary_dim=62, tokens=3),
]  # fmt: skip
#: Use the kernel for calls of any size; a call that does not use it fails.
EVERY = (
    ("BULK_LARGE = 4 << 20", "BULK_LARGE = 0"), ("WANTED_OF_UNIT = 2560", "WANTED_OF_UNIT = 0"), ("FEWEST_OF_UNIT = 2 << 10", "FEWEST_OF_UNIT = 0"),
    ("in_parts = bytes < 16", "in_parts = true"),
    ("if (Light l{};", "return cudaErrorInvalidConfiguration; if (Light l{};"),
)  # fmt: skip
#: Tokens per unit.
UNITS = {n: ("of_unit = 1;", f"of_unit = {n}; p.log2_tokens = {n.bit_length() - 1};") for n in (1, 2, 8)}
#: Calls of many tokens, and whether they use the kernel.
LARGE = [
    (replace(BASE, name="large-phi-2", dtype="fp16", batch=9, tokens=23, heads=32, kv_heads=32), True),
    (replace(BASE, name="large-neox", dtype="fp16", tokens=176, heads=64, kv_heads=64, head_dim=96, rotary_dim=24, options={"positions": ids(2, 176)}), True),
    (replace(BASE, name="large-stablelm-3b", batch=18, tokens=46, heads=32, kv_heads=32, rotary_dim=20, options={"inverse": True}), True),
    (replace(BASE, name="a-little-less", batch=9, tokens=22, heads=32, kv_heads=32), False),
    (replace(BASE, name="short-runs", batch=28, tokens=51, heads=32, kv_heads=6), True),
    (replace(BASE, name="shortest-runs", batch=330, tokens=62, heads=2, kv_heads=1), False),
    (replace(BASE, name="large-narrow", dtype="fp32", batch=12, tokens=60, heads=46, kv_heads=4, head_dim=62, rotary_dim=62), True),
    (replace(BASE, name="large-narrow-part", batch=20, tokens=61, heads=64, kv_heads=8, head_dim=100, rotary_dim=54), True),
    (replace(BASE, name="siglip", batch=40, tokens=51, heads=16, kv_heads=16, head_dim=72, rotary_dim=72), True),
    (replace(BASE, name="unaligned-run", batch=40, tokens=50, heads=17, kv_heads=17, head_dim=50, rotary_dim=50), False),
    (replace(BASE, name="whole-sectors", batch=10, tokens=52, heads=32, kv_heads=32, head_dim=128, rotary_dim=64), False),
    (replace(BASE, name="neighbours", batch=20, tokens=41, heads=32, kv_heads=32, pairing="interleaved"), True),
    (replace(BASE, name="reordered", batch=20, tokens=41, heads=32, kv_heads=32, pairing="interleaved_to_half"), False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "backwards", "late"),
    [
        (1, False, False),
        (1, True, False),
        (1, False, True),
        (1, True, True),
        (2, False, True),
        (8, True, False),
        (8, True, True),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rotates(
    case: Case, tokens: int, backwards: bool, late: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernels = changed(monkeypatch, tmp_path, *EVERY, UNITS[tokens]).plays(backwards=backwards, late=late)
    call = make(case)
    outs, storages = poisoned_like(call.xs)
    poison = [storage.clone() for storage in storages]
    with cuda_on_cpu.serving(_cuda, choice, kernels):
        run(fusewise.rope, call, CUDA, out=outs if len(outs) == 2 else outs[0])
    for x, y, want in zip(call.xs, outs, expected(call), strict=True):
        assert_right(y, x, want)
    assert_neighbours(poison, storages, outs)


@pytest.mark.parametrize("tokens", UNITS)
@pytest.mark.parametrize("memory", ["contiguous", "packed"])
def test_rotates_in_place(memory: str, tokens: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only where no feature is copied: those that do not rotate must not be written."""
    kernels = changed(monkeypatch, tmp_path, *EVERY, UNITS[tokens]).plays()
    with cuda_on_cpu.serving(_cuda, choice, kernels):
        call = make(replace(BASE, head_dim=40, rotary_dim=40, heads=8, kv_heads=2, memory=memory, k_head_dim=None))
        xs, storages = copy_of(call.xs)
        _, poison = copy_of(call.xs)
        run(fusewise.rope_, Call(xs, call.kwargs), CUDA)
        for x, was, want in zip(xs, call.xs, expected(call), strict=True):
            assert_right(x, was, want)
        assert_neighbours(poison, storages, xs)
        part = make(replace(BASE, head_dim=40, rotary_dim=20, heads=8, kv_heads=2))
        with pytest.raises(AssertionError, match="invalid configuration"):
            run(fusewise.rope_, part, CUDA)


@pytest.mark.parametrize(("case", "has"), LARGE, ids=lambda value: getattr(value, "name", None))
def test_who_has_it(case: Case, has: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the kernel's launch disabled, outputs of calls that use it stay unwritten."""
    kernels = changed(
        monkeypatch, tmp_path, ("return launch_bulk(", "return true ? cudaSuccess : launch_bulk(")
    ).plays()
    call = make(case)
    outs, _ = poisoned_like(call.xs)
    poison = [y.clone() for y in outs]
    with cuda_on_cpu.serving(_cuda, choice, kernels):
        run(fusewise.rope, call, CUDA, out=tuple(outs))
    for y, was in zip(outs, poison, strict=True):
        assert torch.equal(y.view(torch.int16), was.view(torch.int16)) is has


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case, _ in LARGE], ids=lambda case: case.name)
def test_bits_are_tritons(case: Case) -> None:
    call = make(case, "cuda")
    for function in (fusewise.rope, fusewise.rope_):
        ys = [run(function, Call(copy_of(call.xs)[0], call.kwargs), Place(impl, "cuda")) for impl in ("cuda", "triton")]
        for one, other in zip(*ys, strict=True):
            assert_bits(one, other)
