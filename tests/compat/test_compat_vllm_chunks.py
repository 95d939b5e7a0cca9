"""The dual chunk attention layer of fusewise.compat.vllm against its definition in float64, and against its purpose: scores equal
plain RoPE at distances that the model was trained on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat_statement import DEVICE, assert_gradient, assert_rotated, launches, randn, rotate
from torch import Tensor

from fusewise.compat._vllm_get_rope import _LAYERS as LAYERS
from fusewise.compat.vllm import DualChunkRotaryEmbedding, RotaryEmbedding, get_rope

N, HQ, HK, D, BASE, ROWS = 9, 4, 2, 32, 10000.0, 60
CHUNK, LOCAL = 16, 6
STEP = CHUNK - LOCAL


def made(is_neox: bool = True, width: int = D, dtype: torch.dtype = torch.float32) -> DualChunkRotaryEmbedding:
    return DualChunkRotaryEmbedding(D, width, ROWS, BASE, is_neox, dtype, CHUNK, LOCAL).to(DEVICE)


def turned(x: Tensor, places: list[int], is_neox: bool = True, width: int = D, dtype: Any = torch.float32) -> Tensor:
    """Reference: x (N, heads · D) in float64, rotated by plain RoPE at the given positions."""
    f = torch.tensor([BASE ** (-2 * i / width) for i in range(width // 2)]).double()
    angles = (torch.tensor(places).double()[:, None] * f)[:, None]
    cos, sin = angles.cos().to(x.device, dtype), angles.sin().to(x.device, dtype)
    return rotate(x.reshape(len(places), -1, D), cos, sin, interleaved=not is_neox).flatten(1)


def places_of_queries(positions: list[int]) -> list[list[int]]:
    in_chunk = [p - p // STEP * STEP for p in positions]
    return [
        in_chunk,
        [CHUNK if r + STEP > CHUNK else r + STEP for r in in_chunk],
        [CHUNK if 2 * STEP - 1 > CHUNK else 2 * STEP - 1 for _ in in_chunk],
        [r + STEP for r in in_chunk],
        [r + CHUNK for r in in_chunk],
    ]


def five(x: Tensor, positions: list[int], *rest: Any) -> Tensor:
    return torch.cat([turned(x, places, *rest) for places in places_of_queries(positions)], -1)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("width", [D, 12])
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dtype", "ints"), [(torch.float32, torch.int64), (torch.bfloat16, torch.int32)])
def test_five_queries_and_a_key(is_neox: bool, width: int, table: Any, dtype: Any, ints: Any) -> None:
    layer = made(is_neox, width, table)
    assert not layer.state_dict() and layer.cos_sin_cache.shape == (CHUNK + STEP, width)
    positions = torch.randint(ROWS - 3, (N,), device=DEVICE, dtype=ints)
    q, k, _ = randn(N, (HQ + HK) * D + 5, dtype=dtype).split([HQ * D, HK * D, 5], -1)
    before = q.clone(), k.clone()
    for offsets in (None, torch.arange(N, device=DEVICE, dtype=ints) % 3):
        at = (positions if offsets is None else positions + offsets).tolist()
        for function in (layer, layer.forward_native, layer.forward_cuda):
            found = function(positions, q, k, offsets)
            assert found[0].shape == (N, 5 * HQ * D) and found[1].shape == (N, HK * D)
            assert found[0].dtype == found[1].dtype == dtype
            assert_rotated(found[0], five(q, at, is_neox, width, table))
            assert_rotated(found[1], turned(k, [p % STEP for p in at], is_neox, width, table))
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])
    shaped = layer(positions, q.unflatten(-1, (HQ, D)), k.unflatten(-1, (HK, D)))
    assert torch.equal(shaped[0], layer(positions, q, k)[0]) and torch.equal(shaped[1], layer(positions, q, k)[1])


@pytest.mark.parametrize("local", [0, 1, CHUNK - 1])
def test_the_longest_rows_are_there(local: int) -> None:
    layer = DualChunkRotaryEmbedding(D, D, ROWS, BASE, True, torch.float32, CHUNK, local).to(DEVICE)
    positions = torch.arange(ROWS, device=DEVICE)
    q = randn(ROWS, D)
    query, key = layer(positions, q, randn(ROWS, D))
    assert not query.isnan().any() and not key.isnan().any()
    of_earlier_chunks = [min(2 * (CHUNK - local) - 1, CHUNK)] * ROWS
    assert_rotated(query[:, 2 * D : 3 * D], turned(q, of_earlier_chunks))


def test_scores_are_those_of_plain_rope() -> None:
    """Within a chunk, and to the previous chunk where query_succ is not clamped; query_succ_critical never is."""
    layer, plain = made(), RotaryEmbedding(D, D, ROWS, BASE, True, torch.float32).to(DEVICE)
    positions, q, k = torch.arange(2 * STEP, device=DEVICE), randn(2 * STEP, D), randn(2 * STEP, D)
    query, key = layer(positions, q, k)
    own, before, _, critical, _ = (x @ key.T for x in query.chunk(5, -1))
    scores = torch.mm(*(x if i == 0 else x.T for i, x in enumerate(plain.forward_native(positions, q, k))))  # type: ignore[union-attr]
    first, second = slice(0, STEP), slice(STEP, 2 * STEP)
    near = slice(STEP, STEP + LOCAL + 1)
    for found, rows, columns in (
        (own, first, first),
        (own, second, second),
        (critical, second, first),
        (before, near, first),
    ):
        torch.testing.assert_close(found[rows, columns], scores[rows, columns], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before[second, first], scores[second, first], rtol=1e-2, atol=1e-2)


def test_launches() -> None:
    layer, positions = made(), torch.arange(N, device=DEVICE)
    count = launches(layer, positions, randn(N, HQ * D), randn(N, HK * D))
    assert count.pop("fusewise::rope") == 2
    assert (
        all(kernel.startswith("aten::") for kernel in count)
        and "aten::clone" not in count
        and "aten::copy_" not in count
    )


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo
def test_gradients_and_graph() -> None:
    torch._dynamo.reset()
    layer, positions = made(), torch.arange(7, 7 + N, device=DEVICE)
    leaf, k = randn(N, HQ * D).requires_grad_(), randn(N, HK * D)
    for function in (layer, layer.forward_native, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        query, key = function(positions, leaf, k)
        assert_rotated(query, five(leaf, positions.tolist()))
        assert_rotated(key, turned(k, [p % STEP for p in positions.tolist()]))
        assert_gradient(query, leaf, lambda x: five(x, positions.tolist()))


def test_the_key_of_a_position_without_a_row_is_nan() -> None:
    positions = torch.tensor([0, ROWS - 1, ROWS, -1, 2**40], device=DEVICE)
    query, key = made()(positions, randn(5, D), randn(5, D))
    assert not query.isnan().any() and key.isnan().all(-1).tolist() == [False, False, True, True, True]
    assert not key[:2].isnan().any()


def test_get_rope_makes_it_of_its_two_sizes() -> None:
    LAYERS.clear()
    config = {"chunk_size": CHUNK, "local_size": LOCAL, "sparse_attention_config": {"0": [1]}, "original": 3}
    parameters = {"rope_type": "yarn", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    layer = get_rope(D, ROWS, False, parameters, torch.bfloat16, config)
    assert type(layer) is DualChunkRotaryEmbedding and layer.base == 500.0 and layer.rotary_dim == 16
    assert repr(layer).endswith(f"is_neox_style=False, chunk_size={CHUNK}, local_size={LOCAL})")
    assert get_rope(D, ROWS, False, parameters, torch.bfloat16, {**config, "original": 4}) is layer
    others = get_rope(D, ROWS, False, parameters, torch.bfloat16, {**config, "local_size": 5}), get_rope(D, ROWS, False)
    assert layer not in others and type(others[1]) is RotaryEmbedding
    LAYERS.clear()


FLAT, AT = torch.zeros(N, D), torch.arange(N)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: made()(AT[None], FLAT, FLAT), r"positions must have shape \(tokens,\), got \(1, 9\); "),
        (lambda: made()(AT.double(), FLAT, FLAT), "positions must have dtype int32 or int64, got float64; "),
        (lambda: made()(AT, FLAT, FLAT, AT.double()), "offsets must have dtype int32 or int64, got float64; "),
        (lambda: made()(AT, FLAT, FLAT, AT[1:]), r"offsets must have the shape of positions, \(9,\), got \(8,\); "),
        (lambda: made()(AT, FLAT[:, 1:], FLAT), r"query must have the shape of positions and .*, got \(9, 31\); "),
        (lambda: made()(AT, FLAT, FLAT[:, 1:]), r"key must have the shape of positions and .*, got \(9, 31\); "),
        (lambda: made()(AT, FLAT, None), r"key must be a torch\.Tensor, got NoneType; "),  # type: ignore[arg-type]
        (lambda: made()(AT[1:], FLAT, FLAT[1:]), r"positions must have shape .*, got \(5, 8\); "),
        (lambda: made()(AT[1:], FLAT[1:], FLAT), r"positions must have shape .*, got \(8,\); "),
        (lambda: DualChunkRotaryEmbedding(D, D, ROWS, BASE, True, torch.float32, 0, 0), "chunk_size must be from 1 to .*, got 0"),
        (lambda: DualChunkRotaryEmbedding(D, D, ROWS, BASE, True, torch.float32, 8, 8), "local_size must be from 0 to 7, got 8; "),
        (
            lambda: get_rope(D, ROWS, dual_chunk_attention_config={"chunk_size": 8}),
            "dual_chunk_attention_config must have chunk_size and local_size, got chunk_size; ",
        ),
        (
            lambda: get_rope(D, ROWS, dual_chunk_attention_config=[8, 2]),  # type: ignore[arg-type]
            r"dual_chunk_attention_config must be a mapping or None, got \[8, 2\]; ",
        ),
        (
            lambda: get_rope(D, ROWS, dual_chunk_attention_config={"chunk_size": 8.0, "local_size": 2}),
            "chunk_size must be an int, got 8.0; ",
        ),
    ],
)  # fmt: skip
@pytest.mark.skipif(DEVICE != "cpu", reason="the tensors are a CPU's")
def test_bad_arguments_are_named(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^\w+: {message}") as raised:
        call()
    assert "; " in str(raised.value) and not FLAT.any()
