"""fusewise.compat.vllm and fusewise.compat.flashinfer against their documented semantics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compat_statement import DEVICE, assert_gradient, assert_rotated, launches, rotate
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fusewise.compat import flashinfer
from fusewise.compat.vllm import RotaryEmbedding, rotary_embedding

N, HQ, HK, D, ROWS = 9, 4, 2, 16, 20


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def cache(width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    angles = torch.rand(ROWS, width // 2, device=DEVICE) * 6.3
    both = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    return both, both[:, : width // 2], both[:, width // 2 :]


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("width", "start", "inverse"), [(D, 0, False), (8, 4, True)])
@pytest.mark.parametrize(
    ("dtype", "table_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_vllm_rotary_embedding(
    is_neox: bool, batched: bool, flat: bool, width: int, start: int, inverse: bool, dtype: Any, table_dtype: Any
) -> None:
    both, cos, sin = cache(width, table_dtype)
    lead = (3, 3) if batched else (N,)
    positions = torch.randint(ROWS, lead, device=DEVICE)
    qkv = randn(*lead, (HQ + 2 * HK) * D, dtype=dtype)  # slices of a packed qkv projection, as in vLLM
    before = qkv.clone()
    q, k, v = qkv.split([HQ * D, HK * D, HK * D], -1)
    expected = []
    for x, heads in ((q, HQ), (k, HK)):
        x = x.unflatten(-1, (heads, D)).clone()
        turn = -sin if inverse else sin
        expected.append(
            rotate(x, cos[positions][..., None, :], turn[positions][..., None, :], start=start, interleaved=not is_neox)
        )
    views = (q, k) if flat else (q.unflatten(-1, (HQ, D)), k.unflatten(-1, (HK, D)))
    assert rotary_embedding(positions, *views, D, both, is_neox, start, inverse) is None
    assert_rotated(q.unflatten(-1, (HQ, D)), expected[0])
    assert_rotated(k.unflatten(-1, (HK, D)), expected[1])
    assert torch.equal(v, before[..., -HK * D :])

    alone = before[..., : HQ * D].clone()
    rotary_embedding(positions, alone, None, D, both, is_neox, start, inverse)
    assert torch.equal(alone, q)


def test_vllm_one_launch_and_nothing_else() -> None:
    both, *_ = cache(D)
    positions = torch.arange(N, device=DEVICE)
    q, k = randn(N, HQ * D), randn(N, HK * D)
    assert launches(rotary_embedding, positions, q, k, D, both, True) == {"fusewise::rope_qk_": 1}
    assert launches(rotary_embedding, positions, q, None, D, both, True) == {"fusewise::rope_": 1}
    empty = randn(0, HQ * D)
    rotary_embedding(positions[:0], empty, randn(0, HK * D), D, both, True)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("form", ["heads", "flat", "padded"])
@pytest.mark.parametrize("width", [D, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vllm_layer(is_neox: bool, batched: bool, form: str, width: int, dtype: torch.dtype) -> None:
    layer = RotaryEmbedding(D, width, ROWS, 10000, is_neox, dtype).to(DEVICE)
    assert layer.cos_sin_cache.dtype == dtype and not layer.state_dict()
    angles = torch.arange(ROWS).double()[:, None] * 10000.0 ** (-torch.arange(0, width, 2).double() / width)
    for table, exact in zip(layer.get_cos_sin(ROWS), (angles.cos(), angles.sin()), strict=True):
        torch.testing.assert_close(table.cpu(), exact.to(dtype))
    lead = (3, 3) if batched else (N,)
    positions = torch.randint(ROWS, lead, device=DEVICE)
    q, k = (randn(*lead, h, D + (8 if form == "padded" else 0), dtype=dtype)[..., :D] for h in (HQ, HK))
    cos, sin = (table[positions][..., None, :] for table in layer.get_cos_sin(ROWS))
    expected = [rotate(x, cos, sin, interleaved=not is_neox) for x in (q, k)]
    if form == "flat":
        q, k = q.flatten(-2), k.flatten(-2)
    before = q.clone(), k.clone()
    native = layer.forward_native(positions, q, k)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])
    alone, none = layer.forward_native(positions, q)
    assert none is None and torch.equal(alone, native[0])
    found = layer(positions, q, k)
    assert found[0] is q and found[1] is k
    for x, y, exact in zip(found, native, expected, strict=True):
        assert x.shape == y.shape
        assert_rotated(x.unflatten(-1, (-1, D)) if form == "flat" else x, exact)
        assert_rotated(y.unflatten(-1, (-1, D)) if form == "flat" else y, exact)
    alone, none = layer.forward_cuda(positions, before[0])
    assert none is None and alone is before[0] and torch.equal(alone, q)


def test_vllm_layer_of_other_frequencies() -> None:
    class Slower(RotaryEmbedding):
        def _compute_inv_freq(self, base: float) -> Tensor:
            return super()._compute_inv_freq(base) / 2

    layer = Slower(D, D, ROWS, 10000.0, True, torch.float32)
    plain = RotaryEmbedding(D, D, ROWS, 10000.0, True, torch.float32)
    torch.testing.assert_close(layer.cos_sin_cache[::2], plain.cos_sin_cache[: ROWS // 2])
    without = RotaryEmbedding(D, D, ROWS, 10000.0, True, torch.float32, init_cache=False)
    assert not list(without.buffers())
    without.register_buffer("cos_sin_cache", plain.cos_sin_cache)
    q, positions = torch.randn(N, HQ * D), torch.arange(N)
    assert torch.equal(without(positions, q.clone())[0], plain(positions, q.clone())[0])
    assert repr(plain) == (
        "RotaryEmbedding(head_size=16, rotary_dim=16, max_position_embeddings=20, base=10000.0, is_neox_style=True)"
    )


def test_vllm_layer_with_gradients() -> None:
    layer = RotaryEmbedding(D, D, ROWS, 10000.0, True, torch.float32).to(DEVICE)
    positions, leaves = torch.arange(N, device=DEVICE), [randn(N, HQ * D).requires_grad_() for _ in range(2)]
    (a, _), (b, _) = layer(positions, leaves[0] * 1), layer.forward_native(positions, leaves[1])
    dy = torch.randn_like(a)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, dy)[0] for y, x in zip((a, b), leaves, strict=True)))


def test_vllm_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    both, *_ = cache(D)

    def function(positions: Tensor, qkv: Tensor) -> Tensor:
        qkv = qkv * 1
        q, k, _ = qkv.split([HQ * D, HK * D, HK * D], -1)
        rotary_embedding(positions, q, k, D, both, True)
        return qkv

    inputs = torch.arange(N, device=DEVICE), randn(N, (HQ + 2 * HK) * D)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), function(*inputs))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"positions": torch.zeros(())}, ValueError, "positions must have shape (tokens,) or (batch, tokens)"),
        ({"query": torch.zeros(N, HQ * D + 1)}, ValueError, "query must have the shape of positions and (heads, 16)"),
        ({"key": torch.zeros(N, HQ, 8)}, ValueError, "key must have the shape of positions and (heads, 16)"),
        ({"positions": torch.zeros(N)}, TypeError, "positions must have dtype int32 or int64"),
        ({"positions": torch.zeros(N + 1).long()}, ValueError, "positions must have shape"),
        ({"rope_dim_offset": 2}, ValueError, "rotary_start must leave room"),
    ],
)
def test_vllm_bad_input_is_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {
        "positions": torch.zeros(N, dtype=torch.long), "query": torch.zeros(N, HQ * D), "key": None, "head_size": D,
        "cos_sin_cache": torch.zeros(ROWS, D), "is_neox": True,
    }  # fmt: skip
    call = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in {**good, **arguments}.items()}
    with pytest.raises(error, match=r", got .*; ") as raised:
        rotary_embedding(**call)
    assert message in str(raised.value)


def frequencies(width: int, scale: float, theta: float, llama31: tuple[float, ...] | None) -> Tensor:
    """Reference frequencies, one pair at a time, by wavelength."""
    result = []
    for i in range(width // 2):
        f = theta ** (-2 * i / width)
        if llama31 is None:
            result.append(f / scale)
            continue
        low, high, context = llama31
        wavelength = 2 * math.pi / f
        if wavelength < context / high:
            result.append(f)
        elif wavelength > context / low:
            result.append(f / scale)
        else:
            smooth = (context / wavelength - low) / (high - low)
            result.append((1 - smooth) * f / scale + smooth * f)
    return torch.tensor(result, dtype=torch.float64, device=DEVICE)


BOUNDS, OFFSETS = [0, 4, 5, 9], [100, 0, 7]
POSITIONS = [100, 101, 102, 103, 0, 7, 8, 9, 10]


@pytest.mark.parametrize("llama31", [False, True])
@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("width", [None, 8])
@pytest.mark.parametrize(("dtype", "index"), [(torch.float16, torch.int32), (torch.float32, torch.int64)])
def test_flashinfer(llama31: bool, by_position: bool, interleave: bool, width: Any, dtype: Any, index: Any) -> None:
    name = f"apply_{'llama31_' if llama31 else ''}rope{'_pos_ids' if by_position else ''}"
    where: tuple[Tensor, ...] = tuple(
        torch.tensor(x, dtype=index, device=DEVICE) for x in ((POSITIONS,) if by_position else (BOUNDS, OFFSETS))
    )
    q, k = randn(N, HQ, D, dtype=dtype).requires_grad_(), randn(N, HK, D, dtype=dtype)
    # a context length that reaches every branch of the formula
    extra = {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 64} if llama31 else {}
    arguments: dict[str, Any] = {
        "rotary_dim": width,
        "interleave": interleave,
        "rope_scale": 3.0,
        "rope_theta": 100.0,
        **extra,
    }
    inv_freq = frequencies(width or D, 3.0, 100.0, (1, 4, 64) if llama31 else None)
    angles = (torch.tensor(POSITIONS, device=DEVICE)[:, None] * inv_freq)[:, None]

    def statement(x: Tensor) -> Tensor:
        return rotate(x, angles.cos(), angles.sin(), interleaved=interleave)

    q_out, k_out = getattr(flashinfer, name)(q, k, *where, **arguments)
    assert_rotated(q_out, statement(q), angle_error=1e-5)
    assert_rotated(k_out, statement(k), angle_error=1e-5)
    (dq,) = torch.autograd.grad(q_out.float().sum(), q)
    assert_rotated(
        dq, rotate(torch.ones_like(q), angles.cos(), -angles.sin(), interleaved=interleave), angle_error=1e-5
    )
    q, k = q.detach().clone(), k.clone()
    assert getattr(flashinfer, name + "_inplace")(q, k, *where, **arguments) is None
    assert torch.equal(q, q_out) and torch.equal(k, k_out)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("shape", ["flat", "heads", "slice"])
@pytest.mark.parametrize("width", [D, 8])
def test_flashinfer_with_a_cache(is_neox: bool, shape: str, width: int) -> None:
    both, cos, sin = cache(width)
    positions = torch.randint(ROWS, (N,), device=DEVICE)
    q, k = {
        "flat": (randn(N, HQ * D), randn(N, HK * D)),
        "heads": (randn(N, HQ, D), randn(N, HK, D)),
        "slice": randn(N, (HQ + HK) * D).split([HQ * D, HK * D], -1),
    }[shape]
    expected = [
        rotate(x.reshape(N, -1, D), cos[positions][:, None], sin[positions][:, None], interleaved=not is_neox).view(
            x.shape
        )
        for x in (q, k)
    ]
    out = flashinfer.apply_rope_with_cos_sin_cache(positions, q, k, D, both, is_neox)
    assert flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, q, k, D, both, is_neox) is None
    for y, in_place, reference in zip(out, (q, k), expected, strict=True):
        assert_rotated(y, reference)
        assert torch.equal(in_place, y)


def test_flashinfer_with_a_cache_rotates_overlapping_tokens_out_of_place() -> None:
    both, cos, sin = cache(D)
    positions = torch.arange(N, device=DEVICE)
    q, k = (randn((N + 2 * heads) * D).unfold(0, heads * D, D // 2)[:N] for heads in (HQ, HK))
    out = flashinfer.apply_rope_with_cos_sin_cache(positions, q, k, D, both)
    for y, x in zip(out, (q, k), strict=True):
        assert_rotated(y, rotate(x.reshape(N, -1, D), cos[:N, None], sin[:N, None]).view(N, -1))


def test_flashinfer_gradient_with_a_cache() -> None:
    both, cos, sin = cache(D)
    positions = torch.arange(N, device=DEVICE)
    q = randn(N, HQ * D).requires_grad_()
    y, _ = flashinfer.apply_rope_with_cos_sin_cache(positions, q, randn(N, HK * D), D, both)
    assert_gradient(y, q, lambda x: rotate(x.view(N, HQ, D), cos[:N, None], sin[:N, None]).view(N, -1))


def test_flashinfer_one_launch_and_nothing_else() -> None:
    flashinfer._FREQUENCIES.clear()
    q, k, positions = randn(N, HQ, D), randn(N, HK, D), torch.arange(N, device=DEVICE)
    first = launches(flashinfer.apply_llama31_rope_pos_ids_inplace, q, k, positions)
    assert first["fusewise::rope_qk_"] == 1 and len(first) > 1  # the frequencies are computed once
    assert launches(flashinfer.apply_llama31_rope_pos_ids_inplace, q, k, positions) == {"fusewise::rope_qk_": 1}
    assert launches(flashinfer.apply_llama31_rope_pos_ids, q, k, positions) == {"fusewise::rope_qk": 1}
    both, *_ = cache(D)
    flat = q.view(N, -1), k.view(N, -1)
    assert launches(flashinfer.apply_rope_with_cos_sin_cache_inplace, positions, *flat, D, both) == {
        "fusewise::rope_qk_": 1
    }


def test_frequencies_of_a_fake_call_are_not_kept() -> None:
    flashinfer._FREQUENCIES.clear()
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(N, HQ, D)
        flashinfer.apply_rope_pos_ids(q, q, torch.empty(N, dtype=torch.int32))
    assert not flashinfer._FREQUENCIES
    flashinfer.apply_rope_pos_ids(randn(N, HQ, D), randn(N, HK, D), torch.arange(N, device=DEVICE))
    assert len(flashinfer._FREQUENCIES) == 1
    with torch._subclasses.FakeTensorMode():  # which the kept ones cannot be mixed with
        q = torch.empty(N, HQ, D, device=DEVICE)
        rotated = flashinfer.apply_rope_pos_ids(q, q, torch.empty(N, dtype=torch.int32, device=DEVICE))
    assert all(isinstance(y, torch._subclasses.FakeTensor) for y in rotated)


def test_flashinfer_is_traced_with_symbolic_sizes() -> None:
    def rotated(q: Tensor, k: Tensor, positions: Tensor) -> Any:
        return flashinfer.apply_rope_pos_ids(q, k, positions)

    inputs = randn(N, HQ, D), randn(N, HK, D), torch.arange(N, device=DEVICE)
    expected = rotated(*inputs)  # the frequencies are kept, and real
    for a, b in zip(make_fx(rotated, tracing_mode="symbolic")(*inputs)(*inputs), expected, strict=True):
        assert torch.equal(a, b)


def test_frequencies_kept_in_inference_mode_serve_gradients() -> None:
    flashinfer._FREQUENCIES.clear()
    q, k, positions = randn(N, HQ, D), randn(N, HK, D), torch.arange(N, device=DEVICE)
    with torch.inference_mode():
        expected = flashinfer.apply_rope_pos_ids(q, k, positions)
    q.requires_grad_()
    y = flashinfer.apply_rope_pos_ids(q, k, positions)
    assert torch.equal(y[0], expected[0])
    y[0].sum().backward()
    assert q.grad is not None


def test_flashinfer_traces_of_like_numbers_have_their_own_frequencies() -> None:
    """1 and 2.5 have the same digits as 1.2 and 5."""
    q, k, positions = randn(6, 4, 64), randn(6, 2, 64), torch.arange(6)

    def rotated(scale: float, theta: float) -> Any:
        return lambda q, k: flashinfer.apply_rope_pos_ids(q, k, positions, rope_scale=scale, rope_theta=theta)

    both = [rotated(1, 2.5), rotated(1.2, 5)]
    compiled = [torch.compile(function, backend="aot_eager") for function in both]
    for _ in range(2):
        for function, made in zip(both, compiled, strict=True):
            torch.testing.assert_close(made(q, k), function(q, k))


def test_flashinfer_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    both, *_ = cache(D)
    bounds, offsets = torch.tensor(BOUNDS, device=DEVICE), torch.tensor(OFFSETS, device=DEVICE)

    def function(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        q1, k1 = flashinfer.apply_llama31_rope(q, k, bounds, offsets)
        flashinfer.apply_rope_pos_ids_inplace(q1, k1, positions)
        cached = flashinfer.apply_rope_with_cos_sin_cache(positions, q.flatten(1), k.flatten(1), D, both)
        return q1, k1, *cached

    inputs = randn(N, HQ, D), randn(N, HK, D), torch.arange(N, device=DEVICE)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for a, b in zip(compiled(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_flashinfer_is_exported_for_any_size() -> None:
    class Rotated(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> Any:
            return flashinfer.apply_rope_pos_ids(q, k, positions)

    any_size = [dict.fromkeys(range(3), torch.export.Dim.AUTO)] * 2
    inputs = randn(N, HQ, D), randn(N, HK, D), torch.arange(N, device=DEVICE)
    program = torch.export.export(Rotated(), inputs, dynamic_shapes=(*any_size, {0: torch.export.Dim.AUTO}))
    longer = randn(2 * N, HQ, D), randn(2 * N, HK, D), torch.arange(2 * N, device=DEVICE)
    for a, b in zip(program.module()(*longer), flashinfer.apply_rope_pos_ids(*longer), strict=True):
        assert torch.equal(a, b)


def test_flashinfer_bad_input_is_named() -> None:
    q, k, positions = randn(N, HQ, D), randn(N, HK, D), torch.arange(N, device=DEVICE)
    with pytest.raises(ValueError, match=r"rotary_dim must be even.*, got 7; "):
        flashinfer.apply_rope_pos_ids(q, k, positions, rotary_dim=7)
    with pytest.raises(ValueError, match=r"high_freq_factor must be above low_freq_factor = 4, got 2; "):
        flashinfer.apply_llama31_rope_pos_ids(q, k, positions, low_freq_factor=4, high_freq_factor=2)
    for size, message in (
        (0, "head_size must be at least 1, got 0; "),
        (48, r"query must have the shape of positions and \(heads, 48\) .*, got .*; "),
    ):
        with pytest.raises(ValueError, match=message):
            flashinfer.apply_rope_with_cos_sin_cache(positions, q.flatten(1), k.flatten(1), size, cache(D)[0])
    with pytest.raises(ValueError, match=r"cu_seqlens must have shape .*, got .*; "):
        flashinfer.apply_rope(q, k, positions[None], positions)


@pytest.mark.parametrize("dynamic", [None, True])
def test_flashinfer_numbers_that_change_between_compiled_calls(dynamic: bool | None) -> None:
    """One compiled function for layers with different bases and widths, which torch.compile then treats as symbolic."""
    q, wide, positions = (
        torch.randn(10, 4, 16, device=DEVICE),
        torch.randn(10, 4, 32, device=DEVICE),
        torch.arange(10, device=DEVICE),
    )
    torch.compiler.reset()
    compiled = torch.compile(flashinfer.apply_rope_pos_ids, backend="eager", fullgraph=True, dynamic=dynamic)
    for x, theta in ((q, 1e4), (q, 5e5), (wide, 1e4), (q, 10000), (q, 500)):
        want = flashinfer.apply_rope_pos_ids(x, x, positions, rope_theta=theta)
        for got, right in zip(compiled(x, x, positions, rope_theta=theta), want, strict=True):
            assert torch.equal(got, right)


def test_vllm_positions_made_in_a_dynamic_graph() -> None:
    """The length of positions is static there, that of the query is dynamic."""
    table, x = torch.randn(64, 16, device=DEVICE), torch.randn(10, 64, device=DEVICE)

    def rotated(x: Tensor) -> Tensor:
        y = x.clone()
        rotary_embedding(torch.arange(10, device=x.device), y, None, 16, table, True)
        return y

    torch.compiler.reset()
    compiled = torch.compile(rotated, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x), rotated(x))
