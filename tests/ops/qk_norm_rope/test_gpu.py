"""Tests of the CUDA kernels that need a GPU: one launch, CUDA graphs, and every way to divide the work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusewise
from fusewise.ops.qk_norm_rope._op import choice

from ..rope.support import assert_bits

pytestmark = pytest.mark.gpu

QWEN3, GEMMA3, OLMO2 = (32, 8, 128, {}), (16, 8, 256, {"weight_offset": 1.0}), (40, 8, 128, {"norm": "all"})
MINIMAX = (48, 8, 128, {"norm": "all", "rotary_dim": 64})


def called(
    model: tuple[int, int, int, dict[str, Any]], tokens: int, weights: torch.dtype, **options: Any
) -> dict[str, Any]:
    heads, kv_heads, width, norm = model
    qkv = torch.randn(1, tokens, heads + 2 * kv_heads, width, device="cuda", dtype=torch.bfloat16)
    q, k, _ = qkv.split([heads, kv_heads, kv_heads], dim=2)
    rotary_dim = norm.get("rotary_dim", width)
    angles = torch.outer(torch.arange(9000.0), 10000 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)).cuda()
    of_rows = [(count if "norm" in norm else 1) * width for count in (heads, kv_heads)]
    q_weight, k_weight = (torch.rand(count, device="cuda").to(weights) for count in of_rows)
    return {
        "q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight, "cos": angles.cos(), "sin": angles.sin(), **norm, **options
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _built() -> None:
    if (reason := choice.unavailable("cuda", "cuda", torch.bfloat16)) is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("model", [QWEN3, GEMMA3, OLMO2])
@pytest.mark.parametrize("tokens", [1, 7, 64, 300, 1000, 8192])
@pytest.mark.parametrize(
    ("weights", "options"),
    [(torch.bfloat16, {}), (torch.float32, {"pairing": "interleaved"}), (torch.float16, {"offset": torch.tensor([3])})],
)
def test_many_tokens(
    model: tuple[int, int, int, dict[str, Any]], tokens: int, weights: torch.dtype, options: dict[str, Any]
) -> None:
    """Compare with the reference, and the first token with a call of its own."""
    options = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in options.items()}
    call = called(model, tokens, weights, **options)
    ys = fusewise.qk_norm_rope(**call, impl="cuda")
    alone = fusewise.qk_norm_rope(**{**call, "q": call["q"][:, :1], "k": call["k"][:, :1]}, impl="cuda")
    for y, one, want in zip(ys, alone, fusewise.qk_norm_rope(**call, impl="reference"), strict=True):
        torch.testing.assert_close(y, want, rtol=2**-7, atol=2**-10)
        assert_bits(y[:, :1], one)


def test_one_kernel_and_no_copy() -> None:
    call = called(QWEN3, 64, torch.bfloat16)
    fusewise.qk_norm_rope(**call, impl="cuda")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        fusewise.qk_norm_rope(**call, impl="cuda")
        torch.cuda.synchronize()
    ran = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(ran) == 1 and "direct_heads_kernel" in ran[0], ran


@pytest.mark.parametrize("model", [QWEN3, OLMO2])
def test_a_graph_replays_on_new_values(model: tuple[int, int, int, dict[str, Any]]) -> None:
    positions = torch.zeros(64, dtype=torch.int64, device="cuda")
    call = called(model, 64, torch.bfloat16, positions=positions)
    fusewise.qk_norm_rope(**call, impl="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = fusewise.qk_norm_rope(**call, impl="cuda")
    for _ in range(3):
        call["q"].normal_()
        positions.random_(0, 9000)
        graph.replay()
        for y, want in zip(ys, fusewise.qk_norm_rope(**call, impl="cuda"), strict=True):
            assert_bits(y, want)


def gradients(call: dict[str, Any], impl: str) -> tuple[Tensor, ...]:
    leaves = {name: call[name].detach().requires_grad_() for name in ("q", "k", "q_weight", "k_weight")}
    ys = fusewise.qk_norm_rope(**(call | leaves), impl=impl)
    generator = torch.Generator("cuda").manual_seed(5)
    dys = [torch.randn(y.shape, device="cuda", generator=generator).to(y.dtype) for y in ys]
    return torch.autograd.grad(ys, tuple(leaves.values()), dys)


@pytest.mark.parametrize("model", [QWEN3, GEMMA3, OLMO2, MINIMAX], ids=["qwen3", "gemma3", "olmo2", "minimax"])
@pytest.mark.parametrize("tokens", [1, 64, 1000, 8192])
@pytest.mark.parametrize(
    ("weights", "options"),
    [(torch.bfloat16, {}), (torch.float32, {"pairing": "interleaved"})],
    ids=["half", "interleaved"],
)
def test_gradients_of_many_tokens(
    model: tuple[int, int, int, dict[str, Any]], tokens: int, weights: torch.dtype, options: dict[str, Any]
) -> None:
    """Compare with the reference; a second call gives the same bits."""
    call = called(model, tokens, weights, **options)
    first = gradients(call, "cuda")
    for x, again, want in zip(first, gradients(call, "cuda"), gradients(call, "reference"), strict=True):
        assert_bits(x, again)
        error = (x.float() - want.float()).norm() / want.float().norm()
        assert error < (2**-8 if x.dtype == torch.bfloat16 else 1e-5), (x.shape, error)


def test_a_backward_is_two_kernels_and_no_copy() -> None:
    call = called(QWEN3, 64, torch.bfloat16)
    gradients(call, "cuda")
    torch.cuda.synchronize()
    leaves = {name: call[name].detach().requires_grad_() for name in ("q", "k", "q_weight", "k_weight")}
    ys = fusewise.qk_norm_rope(**(call | leaves), impl="cuda")
    dys = [torch.ones_like(y) for y in ys]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        torch.autograd.grad(ys, tuple(leaves.values()), dys)
        torch.cuda.synchronize()
    ran = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(ran) == 2 and "backward_kernel" in ran[0] and "sum_kernel" in ran[1], ran


def test_gradients_that_no_kernel_serves_are_those_of_triton() -> None:
    call = called(QWEN3, 100, torch.float16)
    for one, other in zip(gradients(call, "cuda"), gradients(call, "triton"), strict=True):
        assert_bits(one, other)


@pytest.mark.parametrize("norm", ["head", "all"])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16])  # of two kernels
def test_more_than_two_to_the_31_elements(norm: str, weights: torch.dtype) -> None:
    """The last tokens, in memory past 4 GiB, are those of a small call."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("less than 24 GiB of free GPU memory")
    tokens, heads, width = 2**20, 17, 128
    q = torch.empty(1, tokens, heads, width, device="cuda", dtype=torch.bfloat16)
    q[:, -3:].normal_()
    weight = torch.rand(width * (heads if norm == "all" else 1), device="cuda").to(weights)
    table = {"cos": torch.rand(tokens, width // 2, device="cuda"), "sin": torch.rand(tokens, width // 2, device="cuda")}
    y = fusewise.qk_norm_rope(q, None, weight, **table, norm=norm, impl="cuda")
    last = {name: x[-3:] for name, x in table.items()}
    want = fusewise.qk_norm_rope(q[:, -3:], None, weight, **last, norm=norm, impl="cuda")
    assert_bits(y[:, -3:], want)
    del y
    results = []
    for x, of_rows in ((q, table), (q[:, -3:], last)):
        leaf = x.detach().requires_grad_()
        y = fusewise.qk_norm_rope(leaf, None, weight, **of_rows, norm=norm, impl="cuda")
        results.append(torch.autograd.grad(y, leaf, x)[0][:, -3:].clone())
        del y
    assert_bits(*results)
