"""The CUDA kernel source, compiled for the CPU, against the oracle: the cases of the matrix, and calls large enough that a thread
handles several heads."""

from __future__ import annotations

from collections.abc import Iterator
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
from .test_matrix import CASES, ids, run

CUDA = Place("cuda", "cpu")
NAMES = {case.name: case for case in CASES}
#: Execution order of threads and blocks: ascending and descending. The result must not depend on it.
ORDERS = [False, True]
# Enough work to fill a device of one SM: several heads per thread, in every access width.
BY_BATCH = {"offset-int32": {"offset": torch.arange(-2, 16, dtype=torch.int32)}}
MANY = [
    replace(NAMES[name], name=f"{name}-of-many", batch=batch, tokens=50, options=BY_BATCH.get(name, NAMES[name].options), heads=heads, kv_heads=kv_heads)
    for name, batch, heads, kv_heads in [
        ("half-fp32", 3, 17, 9), ("half-inverse-bf16", 6, 24, 9), ("interleaved-bf16", 6, 12, 8), ("interleaved-inverse-fp32", 3, 16, 3),
        ("interleaved_to_half-fp16", 6, 10, 8), ("half_to_interleaved-bf16", 6, 9, 8), ("width-128", 4, 33, 8), ("width-80", 6, 32, 8),
        ("width-6", 14, 20, 8), ("partial-trailing", 3, 24, 8), ("partial-middle-to-half", 8, 12, 8), ("bshd-misaligned", 3, 12, 5),
        ("bhsd", 14, 17, 5), ("table-inv_freq", 10, 31, 7), ("table-angles", 18, 20, 3), ("q-alone", 10, 20, None),
        ("table-half-bf16-bf16", 10, 20, 4), ("offset-int32", 18, 8, 4),
    ]
]  # fmt: skip


@pytest.fixture(params=ORDERS, ids=["forwards", "backwards"])
def order(request: pytest.FixtureRequest) -> Iterator[None]:
    kernels = cuda_on_cpu.library(_cuda, "fusewise_rope").plays(backwards=request.param)
    with cuda_on_cpu.serving(_cuda, choice, kernels):
        yield


def check(case: Case) -> None:
    call = make(case)
    want = expected(call)
    outs, storages = poisoned_like(call.xs)
    poison = [storage.clone() for storage in storages]
    run(fusewise.rope, call, CUDA, out=outs if len(outs) == 2 else outs[0])
    for x, y, w in zip(call.xs, outs, want, strict=True):
        assert_right(y, x, w)
    assert_neighbours(poison, storages, outs)
    xs, storages = copy_of(call.xs)
    old = [storage.clone() for storage in storages]
    run(fusewise.rope_, Call(xs, call.kwargs), CUDA)
    for x, y in zip(xs, outs, strict=True):
        assert_bits(x, y)
    assert_neighbours(old, storages, xs)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("case", [c for c in (*CASES, *MANY) if c.memory != "expanded"], ids=lambda case: case.name)
def test_rotates(case: Case) -> None:
    check(case)


def changed(monkeypatch: pytest.MonkeyPatch, folder: Path, *changes: tuple[str, str]) -> cuda_on_cpu.Library:
    """The kernels with (old, new) replacements in their source; every `old` must occur."""
    found = set()
    sources = []
    for source in _cuda.SOURCES:
        copy = folder / "_cuda" / source.name if source.parent == _cuda.FOLDER else folder / source.name
        copy.parent.mkdir(exist_ok=True)
        text = source.read_text()
        for old, new in changes:
            if old in text:
                found.add(old)
                text = text.replace(old, new)
        copy.write_text(text)
        sources.append(copy)
    assert found == {old for old, _ in changes}
    monkeypatch.setattr(_cuda, "SOURCES", tuple(sources))
    return cuda_on_cpu.library(_cuda, "fusewise_rope")


def test_stripes_of_a_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stripes of a few tokens, hence many: none is skipped, in the general kernel and in the one for most calls."""
    kernels = changed(
        monkeypatch, tmp_path, (" << 20;", " << 8;")
    ).plays()  # bytes moved per stripe, and table bytes read
    shape = Case(name="", batch=3, tokens=48, heads=6, kv_heads=3, head_dim=32, rotary_dim=16, dtype="bf16")
    with cuda_on_cpu.serving(_cuda, choice, kernels):
        for tokens in (48, 47):  # 47 does not divide evenly
            for rotary_dim in (8, 16):
                check(replace(shape, tokens=tokens, rotary_dim=rotary_dim, options={"positions": ids(3, tokens)}))


def test_the_orders_find_what_a_missing_barrier_breaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """When reordering in place between pairings, a head must be read completely before another thread writes to it."""
    kernels = changed(monkeypatch, tmp_path, ("__syncthreads();", ";"))
    wrong = []
    for backwards in ORDERS:
        kernels.plays(backwards=backwards)
        call = make(NAMES["interleaved_to_half-fp16"])
        xs, _ = copy_of(call.xs)
        with cuda_on_cpu.serving(_cuda, choice, kernels):
            run(fusewise.rope_, Call(xs, call.kwargs), CUDA)
        wrong.append(not torch.equal(xs[0], run(fusewise.rope, call, Place("reference", "cpu"))[0]))
    assert any(wrong)
