"""Tests that need a GPU: one launch, CUDA graphs, calls of many tokens, caches beyond 32 bits, other streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusewise
from fusewise.ops.rope import _host
from fusewise.ops.rope_and_cache import api
from fusewise.ops.rope_and_cache._op import IMPLEMENTATIONS, choice

from ..rope.support import DTYPES, assert_bits
from .cases import CASES, Made, make

pytestmark = pytest.mark.gpu
impls = pytest.mark.parametrize("impl", [impl for impl in IMPLEMENTATIONS if impl != "reference"])


def require(impl: str) -> None:
    if (reason := choice.unavailable(impl, "cuda", torch.bfloat16)) is not None:
        pytest.skip(reason)


def call(made: Made, impl: str) -> None:
    fusewise.rope_and_cache_(made.q, made.k, made.v, **made.arguments(), impl=impl)


def llama(tokens: int, slots: int, **kwargs: Any) -> Made:
    """Llama-3-8B's heads, a packed projection, a paged cache of `slots`, and a permutation of its slots."""
    heads, kv_heads, width = 32, 8, 128
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * width, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
    caches = torch.zeros(2, slots // 16, 16, kv_heads, width, device="cuda", dtype=torch.bfloat16)
    kwargs = {
        "cos_sin": torch.randn(4096, width, device="cuda"),
        "positions": torch.randint(0, 4096, (tokens,), device="cuda"),
        "slot_mapping": torch.randperm(slots, device="cuda")[:tokens], **kwargs,
    }  # fmt: skip
    return Made(q, k, v, caches[0], caches[1], kwargs)


def assert_same(made: Made, expected: Made) -> None:
    for x, y in zip(made.written(), expected.written(), strict=True):
        torch.testing.assert_close(x, y, rtol=2**-7, atol=2**-7)
    slots = made.kwargs["slot_mapping"]
    block, entry = slots // 16, slots % 16
    assert_bits(made.key_cache[block, entry].flatten(1), made.k)
    assert_bits(made.value_cache[block, entry].flatten(1), made.v)


@impls
@pytest.mark.parametrize("pairing", ["half", "interleaved", "interleaved_to_half"])
@pytest.mark.parametrize("tokens", [1, 7, 64, 1000, 8192])
def test_many_tokens(tokens: int, pairing: str, impl: str) -> None:
    """Compare with the reference, for every way to divide the work."""
    require(impl)
    made = llama(tokens, 16384, pairing=pairing)
    expected, _ = made.copy()
    call(made, impl)
    call(expected, "reference")
    assert_same(made, expected)


@impls
@pytest.mark.parametrize("name", ["vllm", "keeps k", "partial", "block table", "frequencies"])
def test_one_kernel_and_no_copy(name: str, impl: str) -> None:
    require(impl)
    made = make(CASES[name], "cuda")
    call(made, impl)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call(made, impl)
        torch.cuda.synchronize()
    ran = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(ran) == 1 and "rope_and_cache" in ran[0], ran


@impls
def test_a_graph_replays_on_new_values(impl: str) -> None:
    require(impl)
    made = llama(64, 4096)
    call(made, impl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(made, impl)
    for _ in range(3):
        for x in (made.q, made.k, made.v):
            x.normal_()
        made.kwargs["slot_mapping"].copy_(torch.randperm(4096, device="cuda")[:64])
        made.kwargs["positions"].random_(0, 4096)
        expected, _ = made.copy()
        graph.replay()
        call(expected, "reference")
        assert_same(made, expected)


@impls
def test_another_stream_and_compiled(impl: str) -> None:
    """The packed projection is one graph input, the caches have separate memory: see docs/rope-and-cache.md."""
    require(impl)
    made = llama(64, 4096)
    made.key_cache, made.value_cache = made.key_cache.clone(), made.value_cache.clone()
    expected, _ = made.copy()
    widths = [x.shape[-1] for x in (made.q, made.k, made.v)]

    def layer(qkv: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        q, k, v = qkv.split(widths, dim=-1)
        fusewise.rope_and_cache_(q, k, v, key_cache=key_cache, value_cache=value_cache, **made.kwargs, impl=impl)

    qkv = made.q.as_strided((64, sum(widths)), made.q.stride())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.compile(layer, fullgraph=True)(qkv, made.key_cache, made.value_cache)
    torch.cuda.current_stream().wait_stream(stream)
    call(expected, "reference")
    assert_same(made, expected)


@impls
@pytest.mark.gpu_memory(9)
def test_a_cache_past_32_bits(impl: str) -> None:
    """The last slots of caches with more than 2³¹ elements each."""
    require(impl)
    slots = (2**31 // (8 * 128) // 16 + 1) * 16
    made = llama(16, slots)
    made.kwargs["slot_mapping"].copy_(torch.arange(slots - 16, slots, device="cuda"))
    call(made, impl)
    assert_bits(made.key_cache[-1].flatten(1), made.k)
    assert_bits(made.value_cache[-1].flatten(1), made.v)
    assert not made.key_cache[:-1].any() and not made.value_cache[:-1].any()


@impls
def test_bitwise_deterministic(impl: str) -> None:
    require(impl)
    first = llama(100, 4096)
    start, _ = first.copy()
    call(first, impl)
    for _ in range(10):
        again, _ = start.copy()
        call(again, impl)
        for x, y in zip(first.written(), again.written(), strict=True):
            assert_bits(x, y)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if DTYPES[case.dtype].itemsize < 8])
def test_a_call_that_has_been_before_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repeated call is matched and launched in C++."""
    require("cuda")
    before, _ = make(CASES[name], "cuda").copy()
    (first, want), (second, got) = before.copy(), before.copy()
    call(first, "cuda")
    if (reason := _host.unavailable("cuda", "cuda")) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(api, "validated", lambda *_: pytest.fail("validated again"))
    call(second, "cuda")
    for x, y in zip(got, want, strict=True):
        assert_bits(x, y)


def test_cuda_gives_the_bits_of_triton() -> None:
    require("cuda")
    require("triton")
    one = llama(300, 4096)
    other, _ = one.copy()
    call(one, "cuda")
    call(other, "triton")
    tensors: tuple[tuple[Tensor, Tensor], ...] = tuple(zip(one.written(), other.written(), strict=True))
    for x, y in tensors:
        assert_bits(x, y)
