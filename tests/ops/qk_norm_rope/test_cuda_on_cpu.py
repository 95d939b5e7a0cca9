"""The CUDA kernel source, compiled for the CPU, against float64: addresses, masks, sums and arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewise.ops.qk_norm_rope import _cuda, _op, api
from fusewise.ops.rope._validate import DEFAULTS

from .. import cuda_on_cpu
from ..rope.support import Case, assert_bits
from .machine import kernels
from .machine import simulated as simulated
from .support import Made, NormCase, build, check, check_outputs
from .test_matrix import ALL, CASES, GEMMA, case

# Beyond the matrix: what only these kernels distinguish.
CASES = [
    *CASES,
    # rows of several warps, of more chunks than threads, and with heads that no warp spans
    case("row-of-warps", ALL, head_dim=64, heads=20, kv_heads=9, dtype="bf16"),
    case("row-in-steps", ALL, head_dim=2, heads=1300, kv_heads=600, tokens=2),
    case("wide-head", GEMMA, head_dim=512, heads=2, kv_heads=1, memory="odd", tokens=2),
    case("wide-partial-head", head_dim=400, rotary_dim=100, heads=2, kv_heads=1, memory="odd", tokens=2),
    # heads of 6 chunks, of which warps hold parts; weights of another dtype, or of two; interleaved pairs
    case("row-of-96", {**ALL, "weight_dtype": torch.bfloat16}, head_dim=96, heads=20, kv_heads=9, dtype="bf16"),
    case("row-of-256", {**ALL, **GEMMA}, head_dim=256, heads=5, kv_heads=2, dtype="bf16", table_dtype="bf16"),
    case("row-interleaved", ALL, pairing="interleaved", head_dim=64, heads=9, kv_heads=2, dtype="fp16"),
    case("interleaved-bf16", {"weight_dtype": torch.bfloat16}, pairing="interleaved", head_dim=128, dtype="bf16"),
    # the first features rotate: 16 and 48 of 64, and in a row
    case("first-quarter", {**GEMMA, "weight_dtype": torch.bfloat16}, head_dim=64, rotary_dim=16, dtype="bf16"),
    case("first-features-interleaved", pairing="interleaved", head_dim=64, rotary_dim=48, dtype="bf16"),
    case("first-features-of-a-row", ALL, head_dim=128, rotary_dim=64, heads=9, kv_heads=3, dtype="bf16"),
    case("aligned-by-eight", {"weight_dtype": torch.bfloat16}, head_dim=24, dtype="bf16"),
]  # fmt: skip


# Cases whose backward no CUDA kernel serves: dtypes and weights that are loaded otherwise, addresses not in multiples of 16 bytes,
# rotation that does not begin with the first feature, and angles of another kind than one table row per token.
OF_TRITON = [
    "weight-fp16", "misaligned", "odd", "shared-key", "leading", "trailing", "middle", "interleaved_to_half", "half_to_interleaved",
    "deepseek", "angles", "inv_freq", "half-batched", "strided", "scaled", "offsets", "sections", "packed-sequences",
    "packed-to-half", "context-parallel", "width-2", "width-6", "width-512", "row-in-steps", "wide-head", "wide-partial-head",
    "aligned-by-eight", "wider-key",
]  # fmt: skip


def called(made: Made) -> tuple[Tensor, ...]:
    return made.call(made.xs, made.weights)


def operation(made: Made) -> tuple[Callable[..., list[Tensor]], tuple[Any, ...]]:
    """The operator of a call, and its arguments."""
    options = {**DEFAULTS, **made.rotation}
    options.pop("impl")
    (q, k), (q_weight, k_weight) = ((*some, None, None)[:2] for some in (made.xs, made.weights))
    norm = tuple(made.norm[name] for name in ("eps", "weight_offset", "norm"))
    call, _ = api.validated(q, k, q_weight, k_weight, tuple(options.values()), made.layout, norm, "auto")
    return _op._op, (*_op.lists(q, k, q_weight, k_weight), *call)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("simulated")
def test_right(case: NormCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call through Python, then through the C++ fast path, then its operator in C++."""
    made = build(case)
    operator, arguments = operation(made)
    operator(*arguments)
    first = called(made)
    check_outputs(made, first)
    monkeypatch.setattr(api, "validated", lambda *_: pytest.fail("validated again"))
    monkeypatch.setattr(_cuda, "forward", lambda *_: pytest.fail("launched by Python"))
    for results in (called(made), operator(*arguments)):
        for y, again in zip(first, results, strict=True):
            assert_bits(y, again)
            assert y.stride() == again.stride()


# With many SMs a thread handles one head, and for few tokens chunks of half the width: the results are the same.
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_a_larger_device_and_backwards(case: NormCase) -> None:
    made = build(case)
    with cuda_on_cpu.serving(_cuda, _op.choice, kernels().plays()):
        first = made.call(made.xs, made.weights, impl="cuda")
    with cuda_on_cpu.serving(_cuda, _op.choice, kernels().plays(backwards=True, processors=132)):
        for y, again in zip(first, made.call(made.xs, made.weights, impl="cuda"), strict=True):
            assert_bits(y, again)


# With one SM a block has several steps, with seven there are several blocks. Asynchronous copies arrive as late as their thread waits
# for them, or at once.
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients(case: NormCase, monkeypatch: pytest.MonkeyPatch) -> None:
    made, served = build(case), []
    backward = _cuda.backward
    monkeypatch.setattr(_cuda, "OTHERWISE", "reference")
    monkeypatch.setattr(_cuda, "backward", lambda *call: served.append(backward(*call)) or served[-1])
    with cuda_on_cpu.serving(_cuda, _op.choice, kernels().plays(backwards=True, late=True)):
        check(made, "cuda")
    assert served == [case.name not in OF_TRITON]
    if served[0]:
        with cuda_on_cpu.serving(_cuda, _op.choice, kernels().plays(processors=7)):
            check(made, "cuda")


@pytest.mark.parametrize(("shared", "processors", "blocks"), [(227, 1, 1), (227, 7, 5), (105, 1, 1), (104, 1, None)])
def test_a_backward_takes_what_the_device_has(
    shared: int, processors: int, blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of 50 heads stages 104 KiB, too much for a block on consumers' GPUs: there another kernel serves it. Where SMs are
    few, a block has several rows."""
    made = build(case("row-of-50", ALL, batch=1, tokens=9, head_dim=128, heads=50, kv_heads=2, dtype="bf16"))
    served: list[bool] = []
    partials: list[int] = []
    backward, empty = _cuda.backward, torch.empty
    monkeypatch.setattr(_cuda, "OTHERWISE", "reference")
    monkeypatch.setattr(_cuda, "backward", lambda *call: served.append(backward(*call)) or served[-1])
    monkeypatch.setattr(
        torch, "empty", lambda *a, **k: partials.extend(i for i in a if isinstance(i, int)) or empty(*a, **k)
    )
    with cuda_on_cpu.serving(_cuda, _op.choice, kernels().plays(shared=shared << 10, processors=processors)):
        check(made, "cuda")
    assert served == [blocks is not None]
    assert blocks is None or partials == [128 * (50 * blocks + 2)]


@pytest.mark.parametrize("norm", ["head", "all"])
def test_a_token_does_not_depend_on_the_others(norm: str) -> None:
    one = build(NormCase(Case(name="one", batch=1, tokens=1, head_dim=128, dtype="bf16", table="inv_freq"), norm))
    xs = tuple(torch.cat((x, *(torch.randn_like(x) for _ in range(300))), 1) for x in one.xs)
    many = dataclasses.replace(one, xs=xs)
    with cuda_on_cpu.serving(_cuda, _op.choice, kernels().plays(processors=8)):
        alone, among = (made.call(made.xs, made.weights, impl="cuda") for made in (one, many))
    for y, of_all in zip(alone, among, strict=True):
        assert_bits(y, of_all[:, :1])
