"""Tests that need a GPU: launches, memory, streams, CUDA graphs, sizes beyond 32 bits. The matrix also runs on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusewise
from fusewise.ops.rope import reference
from fusewise.ops.rope._op import IMPLEMENTATIONS

from ..gpu_memory import peak_above, settled
from .oracle import Expected, expected
from .support import Case, assert_bits, assert_right, assert_rounded_once, copy_of, make, make_table

pytestmark = pytest.mark.gpu

# GPU implementations: all except the CPU ones.
impls = pytest.mark.parametrize("impl", [impl for impl in IMPLEMENTATIONS if impl not in ("cpu", "reference")])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])

CALLS: dict[str, dict[str, Any]] = {
    "half": {"head_dim": 128},
    "partial": {"head_dim": 96, "rotary_dim": 24},
    "trailing-to-half": {"head_dim": 192, "rotary_dim": 64, "pairing": "interleaved_to_half", "options": {"rotary_start": -64}},
    "interleaved": {"head_dim": 128, "pairing": "interleaved"},
    "frequencies": {"head_dim": 64, "table": "inv_freq"},
    "sections": {"head_dim": 64, "options": {"sections": (16, 8, 8), "positions": torch.arange(3 * 2 * 32).view(3, 2, 32) % 64}},
    "packed": {"head_dim": 64, "memory": "packed"},
}  # fmt: skip
every_call = pytest.mark.parametrize("name", CALLS)


def call_of(name: str, impl: str, dtype: str = "bf16") -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    made = make(Case(name=name, dtype=dtype, **{"tokens": 32, "heads": 8, "kv_heads": 2, **CALLS[name]}), "cuda")
    return made.xs, {**made.kwargs, "impl": impl}


def device_work(call: Callable[[], Any]) -> list[str]:
    """Names of all device activities (kernels, copies, fills) of one call, after a warm-up call."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    return [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@impls
@every_call
def test_one_kernel_and_no_copy(name: str, impl: str) -> None:
    """q and k together: forward, backward, in place and out= take one launch each, for any strides."""
    xs, kwargs = call_of(name, impl)
    outs = tuple(torch.empty_like(x) for x in xs)
    leaves = tuple(x.detach().requires_grad_() for x in xs)
    ys = fusewise.rope(*leaves, **kwargs)
    dys = tuple(torch.randn_like(y) for y in ys)
    work = {
        "forward": lambda: fusewise.rope(*xs, **kwargs),
        "into": lambda: fusewise.rope(*xs, **kwargs, out=outs),
        "in place": lambda: fusewise.rope_(*xs, **kwargs),
        "recorded": lambda: fusewise.rope(*leaves, **kwargs),
        "backward": lambda: torch.autograd.grad(ys, leaves, dys, retain_graph=True),
    }
    for what, call in work.items():
        ran = device_work(call)
        assert len(ran) == 1, f"{what}: {ran}"
        assert "rope" in ran[0], f"{what}: {ran}"


@impls
@every_call
def test_memory_is_the_outputs(name: str, impl: str) -> None:
    xs, kwargs = call_of(name, impl)
    granule = 512  # of the caching allocator
    outputs = sum(-(-x.numel() * x.element_size() // granule) * granule for x in xs)

    def peak(call: Callable[[], Any]) -> int:
        call()
        before = settled()
        held = call()
        peak = peak_above(before)
        del held
        return peak

    assert peak(lambda: fusewise.rope(*xs, **kwargs)) == outputs
    assert peak(lambda: fusewise.rope_(*xs, **kwargs)) == 0
    outs = tuple(torch.empty_like(x) for x in xs)
    assert peak(lambda: fusewise.rope(*xs, **kwargs, out=outs)) == 0
    leaves = tuple(x.detach().requires_grad_() for x in xs)
    ys = fusewise.rope(*leaves, **kwargs)
    dys = tuple(torch.randn_like(y) for y in ys)
    assert peak(lambda: torch.autograd.grad(ys, leaves, dys, retain_graph=True)) == outputs


@impls
@every_call
def test_bitwise_deterministic(name: str, impl: str) -> None:
    xs, kwargs = call_of(name, impl)
    first = fusewise.rope(*xs, **kwargs)
    for _ in range(20):
        for y, again in zip(first, fusewise.rope(*xs, **kwargs), strict=True):
            assert_bits(y, again)


@impls
@every_call
def test_captured_in_a_graph(name: str, impl: str) -> None:
    """Replay with other values: the device reads positions and tensors, the host reads nothing."""
    xs, kwargs = call_of(name, impl)
    fusewise.rope(*xs, **kwargs)  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = fusewise.rope(*xs, **kwargs)
    for _ in range(2):
        for x in xs:
            x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        for y, want in zip(ys, fusewise.rope(*xs, **kwargs), strict=True):
            assert_bits(y, want)


@impls
def test_captured_decode_with_new_positions(impl: str) -> None:
    table = {name: x.cuda() for name, x in make_table("half", 32, 1, torch.float32).items()}
    q, offsets = torch.randn(4, 1, 8, 64, device="cuda"), torch.zeros(4, dtype=torch.int32, device="cuda")
    fusewise.rope(q, **table, offset=offsets, impl=impl)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fusewise.rope(q, **table, offset=offsets, impl=impl)
    for step in (1, 40, 63, 64):  # the last is outside the table
        offsets.fill_(step)
        graph.replay()
        assert_bits(y, fusewise.rope(q, **table, offset=offsets, impl=impl))
        assert bool(y.isnan().all()) == (step == 64)


@impls
def test_on_a_stream_of_its_own(impl: str) -> None:
    """The kernel is ordered on the current stream, not on the default one."""
    table = {name: x.cuda() for name, x in make_table("half", 64, 1, torch.float32).items()}
    x = torch.randn(8, 64, 32, 128, device="cuda")
    want = fusewise.rope(x * 2, **table, impl=impl)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # half a second, enough for a busy host to queue both
        y = fusewise.rope(x * 2, **table, impl=impl)
    assert not stream.query(), "the sleep should still be running"
    stream.synchronize()
    assert_bits(y, want)


@impls
def test_on_another_device(impl: str) -> None:
    """Device 1 while device 0 is current: the device of q is used."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    xs, kwargs = call_of("half", impl)
    want = fusewise.rope(*xs, **kwargs)
    moved = {name: v.to("cuda:1") if isinstance(v, Tensor) else v for name, v in kwargs.items()}
    assert torch.cuda.current_device() == 0
    for _ in range(2):  # the second call uses the cached launch
        for y, w in zip(fusewise.rope(*(x.to("cuda:1") for x in xs), **moved), want, strict=True):
            assert y.device.index == 1
            assert_bits(y.to("cuda:0"), w)
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="must be on the device of q, cuda:1, got cuda:0"):
        fusewise.rope(*(x.to("cuda:1") for x in xs), **kwargs)


def modulus(x: Tensor) -> Tensor:
    """The modulus of each feature's pair, in float64, for pairing "half" over the whole head."""
    a, b = x.double().chunk(2, dim=-1)
    return torch.hypot(a, b).repeat(1, 1, 1, 2)


@impls
@pytest.mark.slow
@pytest.mark.gpu_memory(9)
@pytest.mark.parametrize("in_place", [False, True])
def test_more_than_2_31_elements(impl: str, in_place: bool) -> None:
    """64-bit offsets; checks the tokens around element 2^31, the first and the last."""
    tokens = 2**24 + 64  # · 128 features
    x = torch.randn(1, tokens, 1, 128, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > 2**31
    kwargs = {"inv_freq": make_table("inv_freq", 64, 1, torch.float32)["inv_freq"].cuda()}
    here = torch.tensor([0, 1, 2**23 - 1, 2**23, 2**24 - 1, 2**24, 2**24 + 1, tokens - 1], device="cuda")
    old = x[:, here].clone()
    y = fusewise.rope_(x, **kwargs, impl=impl) if in_place else fusewise.rope(x, **kwargs, impl=impl)
    exact = reference.rope(old.double(), inv_freq=kwargs["inv_freq"].double(), positions=here)
    assert_rounded_once(y[:, here].flatten(), exact.flatten(), modulus(old).flatten(), tokens * 2.0**-52)
    assert y[:, :: 2**14].isfinite().all()


@impls
@pytest.mark.slow
@pytest.mark.gpu_memory(5)
def test_strides_that_reach_past_2_31(impl: str) -> None:
    """Few elements with large strides: views of a large buffer."""
    buffer = torch.zeros(2**31 + 2**20, device="cuda", dtype=torch.bfloat16)
    x = buffer.as_strided((2, 4, 2, 64), (2**31, 1024, 128, 1))
    x.copy_(torch.randn(x.shape, device="cuda"))
    dense = x.contiguous()
    kwargs = {"inv_freq": make_table("inv_freq", 32, 1, torch.float32)["inv_freq"].cuda(), "impl": impl}
    want = fusewise.rope(dense, **kwargs)
    assert_bits(fusewise.rope(x, **kwargs).contiguous(), want)
    assert_bits(fusewise.rope_(x, **kwargs).contiguous(), want)


@pytest.mark.parametrize("name", CALLS)
def test_long_offsets_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 64-bit variant of the Triton kernel on tensors that do not need it."""
    from fusewise.ops.rope import _triton

    xs, kwargs = call_of(name, "triton")
    want = fusewise.rope(*xs, **kwargs)
    monkeypatch.setattr(_triton, "reach_of", lambda problem: 2**31)
    monkeypatch.setattr(_triton, "_PLANS", {})
    for y, w in zip(fusewise.rope(*xs, **kwargs), want, strict=True):
        assert_bits(y, w)


@impls
@pytest.mark.gpu_memory(3)
@pytest.mark.parametrize(
    "shape", [(70_000, 1, 1, 64), (1, 300_000, 2, 64), (1, 1, 70_000, 64), (70_000, 3, 1, 2)], ids=str
)
def test_grids_past_65535(shape: tuple[int, ...], impl: str) -> None:
    """Many sequences, tokens or heads: none of them may be a limited grid dimension."""
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    inv_freq = make_table("inv_freq", shape[-1] // 2, 1, torch.float32)["inv_freq"].cuda()
    y = fusewise.rope(x, inv_freq=inv_freq, impl=impl)
    exact = reference.rope(x.double(), inv_freq=inv_freq.double())
    assert_rounded_once(y.flatten(), exact.flatten(), modulus(x).flatten(), shape[1] * 2.0**-52)


@impls
@DTYPES
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 112, 128, 160, 192, 256, 512])
def test_shapes_that_fill_the_device(head_dim: int, dtype: torch.dtype, impl: str) -> None:
    """Full and ragged tiles, enough that tiles are not shrunk; forward, in place, backward."""
    q, k = (torch.randn(3, 1021, heads, head_dim, device="cuda", dtype=dtype) for heads in (12, 3))
    table = make_table("inv_freq", head_dim // 2, 1, torch.float32)["inv_freq"].cuda()
    angles = torch.arange(1021, device="cuda").double()[:, None] * table.double()
    kwargs = {"cos": angles.cos().float(), "sin": angles.sin().float()}
    doubles = {name: x.double() for name, x in kwargs.items()}
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    ys = fusewise.rope(*leaves, **kwargs, impl=impl)
    exact = reference.rope(q.double(), k.double(), **doubles)
    dxs = torch.autograd.grad(ys, leaves, (q, k))
    backward = reference.rope(q.double(), k.double(), **doubles, inverse=True)
    for x, y, e, dx, b in zip((q, k), ys, exact, dxs, backward, strict=True):
        assert_rounded_once(y.detach().flatten(), e.flatten(), modulus(x).flatten())
        assert_rounded_once(dx.flatten(), b.flatten(), modulus(x).flatten())
    in_place, _ = copy_of((q, k))
    fusewise.rope_(*in_place, **kwargs, impl=impl)
    for x, y in zip(in_place, ys, strict=True):
        assert_bits(x, y.detach())


@impls
@pytest.mark.parametrize(
    ("tokens", "head_dim", "rotary_dim", "start", "pairing", "dtype"),
    [
        (4096, 128, 128, 0, "half", torch.bfloat16),
        (4096, 80, 32, 0, "half", torch.bfloat16),
        (4096, 96, 24, 0, "half", torch.bfloat16),  # halves of 24 bytes
        (4096, 128, 64, 0, "interleaved", torch.bfloat16),
        (4096, 192, 64, -64, "interleaved_to_half", torch.bfloat16),
        (4096, 64, 64, 0, "half_to_interleaved", torch.bfloat16),
        (4096, 50, 50, 0, "half", torch.bfloat16),  # single-element accesses, more heads per thread
        (640, 50, 50, 0, "half", torch.bfloat16),  # and fewer for a smaller call
        (4096, 36, 36, 0, "interleaved", torch.float16),
        (2048, 58, 58, 0, "half", torch.float32),
        (2048, 60, 60, 0, "half", torch.float32),  # halves of 120 bytes
    ],
)
def test_many_heads_a_thread(
    tokens: int, head_dim: int, rotary_dim: int, start: int, pairing: str, dtype: torch.dtype, impl: str
) -> None:
    """A call large enough that a thread handles several heads equals calls on a few of its tokens, which the matrix compares
    with float64. The number of heads is not a multiple of a power of two."""
    q, k = (torch.randn(2, tokens, heads, head_dim, device="cuda", dtype=dtype) for heads in (35, 11))
    table = make_table("inv_freq", rotary_dim // 2, 1, torch.float32)["inv_freq"].cuda()
    angles = torch.arange(tokens, device="cuda").double()[:, None] * table.double()
    kwargs = {"cos": angles.cos().float(), "sin": angles.sin().float(), "pairing": pairing, "impl": impl}
    kwargs |= {"rotary_dim": rotary_dim, "rotary_start": start}
    ys = fusewise.rope(q, k, **kwargs)
    in_place, _ = copy_of((q, k))
    fusewise.rope_(*in_place, **kwargs)
    for first in range(0, tokens, 512):
        few = slice(first, first + 5)
        for y, z, want in zip(ys, in_place, fusewise.rope(q[:, few], k[:, few], offset=first, **kwargs), strict=True):
            assert_bits(y[:, few].contiguous(), want.contiguous())
            assert_bits(z[:, few].contiguous(), want.contiguous())


@impls
def test_the_widest_heads_where_nothing_is_aligned(impl: str) -> None:
    """A head of 512 features at an odd element offset is read one pair at a time: 256 pairs."""
    x = torch.randn(2 * 3 * 512 + 1, device="cuda")[1:].view(1, 2, 3, 512)
    table = make_table("half", 256, 1, torch.float32)
    kwargs = {name: value.cuda() for name, value in table.items()}
    y = fusewise.rope(x, **kwargs, impl=impl)
    torch.testing.assert_close(y, fusewise.rope(x, **kwargs, impl="reference"), rtol=1e-6, atol=1e-6)


@impls
@pytest.mark.parametrize("pairing", ["interleaved", "interleaved_to_half", "half_to_interleaved"])
def test_reordering_in_place_reads_before_it_writes(pairing: str, impl: str) -> None:
    """Pairs move within a head: many programs and threads in parallel, compared with out of place."""
    x = torch.randn(4, 2048, 16, 128, device="cuda", dtype=torch.bfloat16)
    inv_freq = make_table("inv_freq", 64, 1, torch.float32)["inv_freq"].cuda()
    want = fusewise.rope(x, inv_freq=inv_freq, pairing=pairing, impl=impl)
    for _ in range(5):
        y = x.clone()
        fusewise.rope_(y, inv_freq=inv_freq, pairing=pairing, impl=impl)
        assert_bits(y, want)


@impls
def test_many_short_sequences(impl: str) -> None:
    """Thousands of packed sequences, some empty: the search for each token's sequence."""
    lengths = torch.randint(0, 5, (5000,))
    bounds = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(torch.int32)
    tokens = int(bounds[-1]) + 3
    x = torch.randn(tokens, 2, 16, device="cuda", dtype=torch.bfloat16)
    inv_freq = make_table("inv_freq", 8, 1, torch.float32)["inv_freq"].cuda()
    y = fusewise.rope(x, inv_freq=inv_freq, layout="thd", cu_seqlens=bounds.cuda(), impl=impl)
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()]).cuda()
    assert_bits(y[:-3], fusewise.rope(x[:-3], inv_freq=inv_freq, layout="thd", positions=positions, impl=impl))
    assert_bits(y[-3:], x[-3:])


@impls
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by torch.compile, as is
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_compiled_by_inductor(impl: str) -> None:
    xs, kwargs = call_of("half", impl)
    leaves = tuple(x.detach().requires_grad_() for x in xs)
    dys = tuple(torch.randn_like(x) for x in xs)

    def f(q: Tensor, k: Tensor) -> Any:
        return fusewise.rope(q, k, **kwargs)

    want = f(*leaves)
    gradients = torch.autograd.grad(want, leaves, dys)
    torch._dynamo.reset()
    ys = torch.compile(f, fullgraph=True)(*leaves)
    for a, b in zip((*ys, *torch.autograd.grad(ys, leaves, dys)), (*want, *gradients), strict=True):
        assert_bits(a, b)
        assert a.stride() == b.stride()


@impls
def test_a_repeated_launch_takes_new_pointers(impl: str) -> None:
    """The second call of a signature bypasses Triton's dispatcher: it must use the new tensors, offset and alignment."""
    case = Case(name="repeated", tokens=7, head_dim=64, dtype="bf16", memory="contiguous")
    for offset in (0, 3, 3, 50):
        made = make(case, "cuda")
        kwargs = {**made.kwargs, "offset": offset}
        wants: tuple[Expected, ...] = expected(type(made)(made.xs, kwargs))
        for x, y, want in zip(made.xs, fusewise.rope(*made.xs, **kwargs, impl=impl), wants, strict=True):
            assert_right(y, x, want)
    q = torch.randn(2 * 7 * 4 * 64 + 1, device="cuda", dtype=torch.bfloat16)
    table = {name: x.cuda() for name, x in make_table("half", 32, 1, torch.float32).items()}
    for x in (q[:-1].view(2, 7, 4, 64), q[1:].view(2, 7, 4, 64), q[:-1].view(2, 7, 4, 64)):
        assert_bits(fusewise.rope(x, **table, impl=impl), fusewise.rope(x.clone(), **table, impl=impl))
