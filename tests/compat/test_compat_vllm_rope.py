"""M-RoPE, ApplyRotaryEmb and the underlying rotary functions of fusewise.compat.vllm against references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat_statement import DEVICE, assert_gradient, assert_rotated, launches, randn, rotate
from torch import Tensor

from fusewise.compat.vllm import (
    ApplyRotaryEmb,
    MRotaryEmbedding,
    apply_interleaved_rope,
    get_rope,
    packed_qk_rope_,
    triton_mrope,
)

N, HQ, HK, D, BASE, ROWS = 9, 4, 2, 32, 10000.0, 60
DEEPSEEK = {"rope_type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 25}


def axes(sections: tuple[int, int, int], interleaved: bool) -> list[int]:
    """Reference: the axis of every pair."""
    if not interleaved:
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    pairs, left = [0] * sum(sections), list(sections)
    for i in range(len(pairs)):
        axis = i % 3
        if axis and left[axis]:
            pairs[i] = axis
            left[axis] -= 1
    return pairs


def of_axes(layer: MRotaryEmbedding, positions: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """cos, sin (tokens, 1, P)."""
    cos, sin = layer.cos_sin_cache.chunk(2, -1)
    assert layer.mrope_section is not None
    axis = axes(tuple(layer.mrope_section), interleaved)
    return tuple(torch.stack([table[positions[a], i] for i, a in enumerate(axis)], -1)[:, None] for table in (cos, sin))  # type: ignore[return-value]


@pytest.mark.parametrize("sections", [(4, 2, 2), (2, 3, 3), (8, 0, 0)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("width", "dtype"), [(16, torch.float32), (D, torch.bfloat16)])
def test_mrope(sections: tuple[int, int, int], interleaved: bool, is_neox: bool, width: int, dtype: Any) -> None:
    sections = tuple(n * width // 16 for n in sections)
    parameters = {
        "mrope_section": list(sections),
        "mrope_interleaved": interleaved,
        "partial_rotary_factor": width / D,
    }
    layer = get_rope(D, ROWS, is_neox, parameters, dtype).to(DEVICE)
    positions = torch.randint(4 * ROWS, (3, N), device=DEVICE)
    packed = randn(N, (HQ + HK) * D + 5, dtype=dtype)
    before = packed.clone()
    q, k, rest = packed.split([HQ * D, HK * D, 5], -1)
    cos, sin = of_axes(layer, positions, interleaved)
    expected = [rotate(x.reshape(N, -1, D), cos, sin, interleaved=not is_neox).flatten(1) for x in (q, k)]
    native = layer.forward_native(positions, q, k)
    assert torch.equal(packed, before)
    found = layer(positions, q, k)
    assert found[0] is q and found[1] is k and torch.equal(rest, before[:, -5:])
    for x, y, exact in zip(found, native, expected, strict=True):
        assert_rotated(x, exact)
        assert_rotated(y, exact)
    alone, none = layer.forward_cuda(positions, before[:, : HQ * D].clone())
    assert none is None and torch.equal(alone, q)


def test_mrope_of_text_is_out_of_place() -> None:
    layer = get_rope(D, ROWS, True, {"mrope_section": [4, 6, 6]}).to(DEVICE)
    positions, q, k = torch.arange(N, device=DEVICE), randn(N, HQ * D), randn(N, HK * D)
    before = q.clone(), k.clone()
    of_text = layer(positions, q, k)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])
    of_three = layer(positions.expand(3, N), q, k)
    for x, y in zip(of_text, of_three, strict=True):
        assert torch.equal(x, y)
    no_axes = MRotaryEmbedding(D, D, ROWS, BASE, True, torch.float32).to(DEVICE)
    assert torch.equal(no_axes(positions, before[0], before[1])[0], of_text[0])


def test_mrope_launches_and_gradients() -> None:
    layer = get_rope(D, ROWS, True, {"mrope_section": [4, 6, 6]}).to(DEVICE)
    positions, q, k = torch.randint(ROWS, (3, N), device=DEVICE), randn(N, HQ * D), randn(N, HK * D)
    assert launches(layer, positions, q, k) == {"fusewise::rope_qk_": 1}
    assert launches(layer, positions, q) == {"fusewise::rope_": 1}
    assert launches(layer, positions[0], q, k) == {"fusewise::rope_qk": 1}
    cos, sin = of_axes(layer, positions, False)
    leaf = randn(N, HQ * D).requires_grad_()
    y, _ = layer(positions, leaf * 1)
    assert_gradient(y, leaf, lambda x: rotate(x.view(N, HQ, D), cos, sin).view(N, -1))


def test_mrope_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    layer = get_rope(D, ROWS, True, {"mrope_section": [4, 6, 6], "mrope_interleaved": True}).to(DEVICE)

    def function(positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        q, k = q.clone(), k.clone()
        layer(positions, q, k)
        return q, k, *layer(positions[0], q, k)

    inputs = torch.randint(ROWS, (3, N), device=DEVICE), randn(N, HQ * D), randn(N, HK * D)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for x, y in zip(compiled(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(x, y)


def test_next_positions() -> None:
    assert MRotaryEmbedding.get_next_input_positions(-3, 10, 12) == [[7, 8]] * 3
    numpy = pytest.importorskip("numpy")
    out = numpy.zeros((3, 7), dtype=numpy.int64)
    MRotaryEmbedding.get_next_input_positions_tensor(out, 2, -3, 10, 3)
    assert out.tolist() == [[0, 0, 7, 8, 9, 0, 0]] * 3


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("is_neox", [True, False])
def test_triton_mrope(interleaved: bool, is_neox: bool) -> None:
    width, sections = 22, (5, 4, 2)
    q, k, _ = randn(N, (HQ + HK + 1) * D).split([HQ * D, HK * D, D], -1)
    both = randn(3, N, width)
    for cos, sin in (both.chunk(2, -1), [x.contiguous() for x in both.chunk(2, -1)]):
        axis = torch.tensor(axes(sections, interleaved), device=DEVICE)
        pairs = torch.arange(width // 2, device=DEVICE)
        of_token = [table[axis, :, pairs].T[:, None] for table in (cos, sin)]
        expected = [rotate(x.reshape(N, -1, D), *of_token, interleaved=not is_neox).flatten(1) for x in (q, k)]
        found = triton_mrope(q, k, cos, sin, list(sections), D, width, interleaved, is_neox)
        assert found[0] is q and found[1] is k
        for x, exact in zip(found, expected, strict=True):
            assert_rotated(x, exact)


def test_apply_interleaved_rope() -> None:
    sections = (6, 4, 3)
    x = torch.arange(3 * 2 * 13).view(3, 2, 13)
    before = x.clone()
    expected = torch.stack([x[axis, :, i] for i, axis in enumerate(axes(sections, True))], -1)
    assert torch.equal(apply_interleaved_rope(x, list(sections)), expected) and torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_packed_qk_rope(dtype: torch.dtype) -> None:
    xqkv, angles = randn(N, 3, HQ, D, dtype=dtype), torch.rand(N, D // 2, device=DEVICE) * 6
    before, freqs = xqkv.clone(), torch.polar(torch.ones_like(angles), angles)
    expected = rotate(xqkv[:, :2], freqs.real[:, None, None], freqs.imag[:, None, None], interleaved=True)
    assert launches(packed_qk_rope_, xqkv, freqs) == {"fusewise::rope_": 1}
    assert_rotated(xqkv[:, :2], expected)
    assert torch.equal(xqkv[:, 2], before[:, 2])
    for x, message in (
        (randn(N, 2, HQ, D), r"xqkv must have shape \(tokens, 3, heads, head_size\), got \(9, 2, 4, 32\); "),
        (randn(N, HQ, 3, D).transpose(1, 2), r"xqkv must be contiguous, got strides \("),
        (randn(N + 1, 3, HQ, D), r"freqs_cis must have a row for each of the 10 tokens, got \(9, 16\); "),
        (randn(N - 1, 3, HQ, D), r"freqs_cis must have a row for each of the 8 tokens, got \(9, 16\); "),
    ):
        with pytest.raises(ValueError, match=message):
            packed_qk_rope_(x, freqs)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("dtype", "table"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("width", [D, 16])
def test_apply_rotary_emb(is_neox: bool, batched: bool, dtype: Any, table: Any, width: int) -> None:
    layer = ApplyRotaryEmb(is_neox_style=is_neox)
    x = randn(*((2, N) if batched else (N,)), HQ, D, dtype=dtype).requires_grad_()
    cos, sin = randn(N, width, dtype=table).chunk(2, -1)

    def statement(x: Tensor) -> Tensor:
        return rotate(x, cos[:, None], sin[:, None], interleaved=not is_neox)

    for y in (layer(x, cos, sin), layer.forward_native(x, cos, sin), layer.forward_static(x, cos, sin, is_neox, True)):
        assert y.dtype == dtype
        assert_rotated(y, statement(x))
    assert_gradient(layer(x, cos, sin), x, statement)
    assert launches(layer, x.detach(), cos, sin) == {"fusewise::rope": 1}
    if batched:  # one table per sequence
        both = randn(2, N, width, dtype=table)
        cos, sin = both[:, :, None].chunk(2, -1)
        assert_rotated(layer(x, *both.chunk(2, -1)), rotate(x, cos, sin, interleaved=not is_neox))
    assert repr(layer) == f"ApplyRotaryEmb(is_neox_style={is_neox}, enable_fp32_compute=False)"


FLAT = torch.zeros(N, D)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(torch.zeros(2, N).long(), FLAT), r"positions must have shape \(tokens,\) or \(3, tokens\), got \(2, 9"),
        (lambda m: m(torch.zeros(3, 1, N).long(), FLAT), r"positions must have shape \(tokens,\) or \(3, tokens\), got"),
        (lambda m: m(torch.zeros(3, N + 1).long(), FLAT), r"positions must have shape \(3, 9\) or .*, got \(3, 10\); "),
        (lambda m: m(torch.zeros(3, N), FLAT), "positions must have dtype int32 or int64, got float32; "),
        (lambda m: m(torch.zeros(3, N).long(), FLAT[:, 1:]), r"query must have the shape of positions and .*, got \(9, 31"),
        (lambda m: m(torch.zeros(3, N).long(), FLAT, FLAT[1:]), "k must have as many tokens as q"),
        (
            lambda m: MRotaryEmbedding(D, D, ROWS, BASE, True, torch.float32)(torch.zeros(3, N).long(), FLAT),
            r"mrope_section must be given for positions \(3, tokens\), got None; ",
        ),
        (lambda m: ApplyRotaryEmb()(FLAT, FLAT, FLAT), r"x must have shape \(tokens, heads, head_size\) or .*, got \(9, 32"),
        (lambda m: ApplyRotaryEmb()(FLAT.view(1, N, D), FLAT, FLAT), "rotary_dim must be even and from 2 to head_dim = 32"),
        (lambda m: ApplyRotaryEmb()(torch.zeros(70, 1, 2 * D), FLAT, FLAT), "the table must have a row for each of the pos"),
        (
            lambda m: triton_mrope(FLAT, FLAT.clone(), FLAT, FLAT, [4, 6, 6], D, D, False, True),
            r"cos must have shape \(3, tokens, rotary_dim / 2\), got \(9, 32\); ",
        ),
        (
            lambda m: triton_mrope(FLAT, FLAT.clone(), *[torch.zeros(2, N, 16)] * 2, [4, 6, 6], D, D, False, True),
            r"cos must have shape \(3, tokens, rotary_dim / 2\), got \(2, 9, 16\); ",
        ),
        (lambda m: apply_interleaved_rope(FLAT, [4, 6, 6]), r"x must have shape \(3, …, pairs\), got \(9, 32\); "),
        (
            lambda m: get_rope(D, ROWS, False, DEEPSEEK)(
                torch.arange(N), FLAT, None, torch.arange(3)
            ),
            r"offsets must have the shape of positions, \(9,\), got \(3,\); ",
        ),
        (
            lambda m: get_rope(D, ROWS, False, {**DEEPSEEK, "is_deepseek_v4": True})(
                torch.arange(N), FLAT[:, :8]
            ),
            r"query must have heads of at least rotary_dim = 32 features, got \(9, 8\); ",
        ),
    ],
)  # fmt: skip
def test_bad_tensors_are_named_and_nothing_is_written(call: Any, message: str) -> None:
    layer = get_rope(D, ROWS, True, {"mrope_section": [4, 6, 6]})
    with pytest.raises((TypeError, ValueError), match=rf"^\w+: .*{message}"):
        call(layer)
    assert not FLAT.any()


def test_a_position_without_a_row_is_nan() -> None:
    layer = get_rope(D, ROWS, True, {"mrope_section": [4, 6, 6]}).to(DEVICE)
    positions = torch.zeros(3, N, dtype=torch.long, device=DEVICE)
    positions[1, 2], positions[2, 3] = 4 * ROWS, -1
    q, _ = layer(positions, randn(N, D))
    nan = q.isnan().unflatten(-1, (2, D // 2))
    assert nan[2, :, 4:10].all() and nan[3, :, 10:].all() and int(nan.sum()) == 2 * (6 + 6)
