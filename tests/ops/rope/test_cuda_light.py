"""The kernel for large calls (`_cuda/light.cuh`): every instance, on a CPU against the oracle in any order of threads, and on a GPU
bitwise equal to Triton, for heads of which no, one or several accesses are copied unrotated."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import fusewise
from fusewise.ops.rope import _cuda
from fusewise.ops.rope._auto import choice

from .. import cuda_on_cpu
from .oracle import Call
from .support import Case, Place, assert_bits, copy_of, make, poisoned_like
from .test_cuda_on_cpu import CUDA, changed, check, order
from .test_matrix import ids, run

__all__ = ["order"]  # a fixture

BATCH, TOKENS = 3, 50
ACCESS = {"fp32": 4, "bf16": 8, "fp16": 8}  # elements of 16 bytes
#: A head in accesses: the rotated ones, all of q, all of k, and those before the rotated ones.
HEADS = {
    "whole": (2, 2, 2, 0),
    "one-access-behind": (4, 5, 5, 0),
    "one-access-before": (2, 3, 3, 1),
    "between": (2, 7, 7, 3),
    "narrow-k": (4, 9, 4, -4),
    "wide-k": (2, 2, 5, 0),
}
#: The same in 8-byte accesses, for pairing half; partial rotary uses the kernel only in place.
NARROW = {"narrow-whole": (6, 6, 6, 0), "narrow-part": (6, 8, 10, 1)}
PAIRINGS = ("half", "interleaved", "interleaved_to_half", "half_to_interleaved")
POSITIONS: list[dict[str, Any]] = [
    {},
    {"offset": 13},
    {"offset": 2, "inverse": True},
    {"positions": ids(TOKENS, dtype=torch.int32)},
    {"positions": ids(BATCH, TOKENS, low=-8, high=72), "inverse": True},
]


def cases() -> list[Case]:
    found = []
    tables = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp32"), ("fp16", "fp16")]
    for i, (pairing, (dtype, table), shape) in enumerate(product(PAIRINGS, tables, HEADS | NARROW)):
        if pairing != "half" and shape in NARROW:
            continue
        rotary, of_q, of_k, before = (HEADS | NARROW)[shape]
        access = ACCESS[dtype] // (2 if shape in NARROW else 1)
        found.append(
            Case(
                name=f"{pairing}-{dtype}-{table}-{shape}", batch=BATCH, tokens=TOKENS,
                pairing=pairing, dtype=dtype, table_dtype=table, heads=16, kv_heads=5, head_dim=of_q * access, k_head_dim=of_k * access, rotary_dim=rotary * access,
                layout=("bshd", "bhsd", "sbhd")[i % 3], memory="packed" if of_q == of_k and i % 4 == 0 else "contiguous",
                options={**POSITIONS[i % len(POSITIONS)], "rotary_start": before * access},
            )
        )  # fmt: skip
    return found


# Packed tokens, and one token per batch entry as in a decode step.
ROWS = [
    Case(name="thd", layout="thd", batch=1, tokens=60, heads=40, kv_heads=5, head_dim=16, dtype="bf16"),
    Case(name="thd-positions", layout="thd", batch=1, tokens=60, heads=40, kv_heads=5, head_dim=16, dtype="fp16",
         options={"positions": ids(60, low=-8, high=72)}),
    Case(name="decode", batch=150, tokens=1, heads=16, kv_heads=5, head_dim=24, rotary_dim=16, dtype="bf16",
         options={"positions": ids(150, 1, low=-8, high=72, dtype=torch.int32)}),
    Case(name="decode-bhsd", layout="bhsd", batch=150, tokens=1, heads=16, kv_heads=5, head_dim=8,
         options={"positions": ids(150, 1, low=-8, high=72)}),
    Case(name="thd-reordered", layout="thd", batch=1, tokens=61, heads=36, kv_heads=5, head_dim=64, dtype="bf16",
         pairing="interleaved_to_half", options={"offset": 3}),
    Case(name="q-alone", layout="thd", batch=1, tokens=60, heads=40, kv_heads=None, head_dim=16, dtype="bf16"),
]  # fmt: skip
CASES = [*cases(), *ROWS]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.mark.usefixtures("order")
@every_case
def test_rotates(case: Case) -> None:
    check(case)


def test_it_is_what_they_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the kernel's launch disabled, outputs stay unwritten."""
    kernels = changed(monkeypatch, tmp_path, ("return launch_light(", "return cudaSuccess; launch_light(")).plays()
    with cuda_on_cpu.serving(_cuda, choice, kernels):
        for case in CASES:
            call = make(case)
            if not case.name.endswith("narrow-part"):
                outs, _ = poisoned_like(call.xs)
                poison = [y.clone() for y in outs]
                run(fusewise.rope, call, CUDA, out=outs if len(outs) == 2 else outs[0])
                for y, was in zip(outs, poison, strict=True):
                    assert_bits(y, was)
            xs, _ = copy_of(call.xs)
            run(fusewise.rope_, Call(xs, call.kwargs), CUDA)
            for x, was in zip(xs, call.xs, strict=True):
                assert_bits(x, was)


def test_heads_of_several_warps_are_not_reordered_in_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If three threads share a head, one warp could overwrite what another has not read yet. The general kernel is used."""
    kernels = changed(monkeypatch, tmp_path, ("return launch_light(", "return cudaSuccess; launch_light(")).plays()
    with cuda_on_cpu.serving(_cuda, choice, kernels):
        for head_dim, light in ((32, True), (48, False)):
            shape = Case(name="", batch=BATCH, tokens=TOKENS, heads=16, kv_heads=5, head_dim=head_dim, dtype="bf16")
            call = make(replace(shape, pairing="interleaved_to_half"))
            xs, _ = copy_of(call.xs)
            run(fusewise.rope_, Call(xs, call.kwargs), CUDA)
            assert torch.equal(xs[0], call.xs[0]) is light


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("head_dim", "shift"), [(24, 0), (32, 1), (32, 2), (32, 3)], ids=str)
def test_what_it_cannot_read_others_do(pairing: str, head_dim: int, shift: int) -> None:
    """Other kernels are used for an odd number of accesses per head, and for a table `shift` elements off alignment."""
    call = make(
        Case(
            name="", batch=BATCH, tokens=TOKENS, heads=16, kv_heads=5, head_dim=head_dim, dtype="bf16", pairing=pairing
        )
    )
    for name in ("cos", "sin"):
        moved = torch.empty(call.kwargs[name].numel() + shift)[shift:].view_as(call.kwargs[name])
        call.kwargs[name] = moved.copy_(call.kwargs[name])
    want = run(fusewise.rope, call, Place("reference", "cpu"))
    with cuda_on_cpu.serving(_cuda, choice, cuda_on_cpu.library(_cuda, "fusewise_rope").plays()):
        for y, w in zip(run(fusewise.rope, call, CUDA), want, strict=True):
            torch.testing.assert_close(y, w, rtol=0.01, atol=0.01)


def without_rows(device: str, heads: int) -> None:
    """An empty table: all positions are out of range, and nothing is read."""
    q = torch.randn(BATCH, TOKENS, heads, 64, device=device)
    empty, positions = torch.empty(0, 32, device=device), torch.zeros(TOKENS, dtype=torch.int64, device=device)
    assert fusewise.rope(q, cos=empty, sin=empty, positions=positions, impl="cuda").isnan().all()


def test_a_table_without_rows() -> None:
    with cuda_on_cpu.serving(_cuda, choice, cuda_on_cpu.library(_cuda, "fusewise_rope").plays()):
        without_rows("cpu", 16)


@pytest.mark.gpu
def test_a_table_without_rows_on_a_gpu() -> None:
    without_rows("cuda", 1024)


def grown(case: Case) -> Case:
    """The case enlarged for a GPU: 150 times as many batch entries, or heads for packed tokens."""
    positions = case.options.get("positions")
    if case.layout == "thd":
        return replace(case, heads=150 * case.heads)
    if positions is not None and positions.ndim == 2:
        case = replace(case, options={**case.options, "positions": positions.repeat(150, 1)})
    return replace(case, batch=150 * case.batch)


@pytest.mark.gpu
@every_case
def test_it_has_the_bits_of_triton(case: Case) -> None:
    call = make(grown(case), "cuda")
    for function in (fusewise.rope, fusewise.rope_):
        results = []
        for impl in ("cuda", "triton"):
            xs, _ = copy_of(call.xs)
            found = function(*xs, **call.kwargs, impl=impl)
            results.append(found if isinstance(found, tuple) else (found,))
        for of_cuda, of_triton in zip(*results, strict=True):
            assert_bits(of_cuda, of_triton)
