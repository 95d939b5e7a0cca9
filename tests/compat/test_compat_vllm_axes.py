"""The multi-axis layers of fusewise.compat.vllm against float64 references: ERNIE 4.5 VL, Bailing, openPangu, HunYuan-VL and
Llama 4's vision tower."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compat_statement import DEVICE, assert_gradient, assert_rotated, launches, randn, rotate
from torch import Tensor

from fusewise.compat._vllm_get_rope import _LAYERS as LAYERS
from fusewise.compat.vllm import (
    BailingMRotaryEmbedding,
    Ernie4_5_VLRotaryEmbedding,
    Llama4VisionRotaryEmbedding,
    MRotaryEmbedding,
    MRotaryEmbeddingInterleaved,
    XDRotaryEmbedding,
    get_rope,
)

N, HQ, HK, D, BASE, ROWS = 9, 4, 2, 32, 10000.0, 60
T, H, W = range(3)  # the rows of positions
#: name: (class, mrope_section, the axis of every pair).
ORDERS: dict[str, tuple[type[MRotaryEmbedding], list[int], list[int]]] = {
    "ernie": (Ernie4_5_VLRotaryEmbedding, [5, 5, 6], [H, W, H, W, H, W, H, W, H, W, T, T, T, T, T, T]),
    "ernie, part": (Ernie4_5_VLRotaryEmbedding, [3, 3, 2], [H, W, H, W, H, W, T, T]),
    "ernie, image alone": (Ernie4_5_VLRotaryEmbedding, [4, 4, 0], [H, W, H, W, H, W, H, W]),
    "ernie, time alone": (Ernie4_5_VLRotaryEmbedding, [0, 0, 8], [T] * 8),
    "bailing": (BailingMRotaryEmbedding, [6, 5, 5], [H, W, H, W, H, W, H, W, H, W, T, T, T, T, T, T]),
    "bailing, part": (BailingMRotaryEmbedding, [2, 3, 3], [H, W, H, W, H, W, T, T]),
    "pangu": (MRotaryEmbeddingInterleaved, [4, 6, 6], [T, H, W, H, W, T, H, W, H, W, T, H, W, H, W, T]),
    "pangu, part": (MRotaryEmbeddingInterleaved, [2, 4, 2], [T, H, W, H, W, H, H, T]),
    "pangu, two": (MRotaryEmbeddingInterleaved, [5, 3], [0, 1, 0, 1, 0, 1, 0, 0]),
}
FEW = ("ernie", "bailing", "pangu")


def made(name: str, is_neox: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    kind, sections, order = ORDERS[name]
    return kind(D, 2 * len(order), ROWS, BASE, is_neox, dtype, mrope_section=sections).to(DEVICE)


def frequencies(width: int) -> Tensor:
    """Frequencies (P,), rounded to float32 as in the tables."""
    return torch.tensor([BASE ** (-2 * i / width) for i in range(width // 2)]).double()


def tables_of(name: str, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin (N, 1, P), each pair at the position on its axis, rounded to the table's dtype."""
    order = ORDERS[name][2]
    columns = [positions[axis].cpu().double() * f for axis, f in zip(order, frequencies(2 * len(order)), strict=True)]
    angles = torch.stack(columns, -1)[:, None]
    return angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)


def turned(
    name: str, x: Tensor, positions: Tensor, is_neox: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    cos, sin = tables_of(name, positions, dtype)
    return rotate(x.reshape(N, -1, D), cos, sin, interleaved=not is_neox).reshape(x.shape)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dtype", "ints"), [(torch.float32, torch.int64), (torch.bfloat16, torch.int32)])
def test_every_pair_turns_by_its_axis(name: str, is_neox: bool, table: Any, dtype: Any, ints: Any) -> None:
    layer = made(name, is_neox, table)
    assert not layer.state_dict() and layer.cos_sin_cache.shape[0] == 4 * ROWS
    positions = torch.randint(4 * ROWS, (3, N), device=DEVICE, dtype=ints)
    packed = randn(N, (HQ + HK) * D + 5, dtype=dtype)
    before = packed.clone()
    q, k, _ = packed.split([HQ * D, HK * D, 5], -1)
    expected = [turned(name, x, positions, is_neox, table) for x in (q, k)]
    native = layer.forward_native(positions, q, k)
    assert torch.equal(packed, before)
    found = layer(positions, q, k)
    in_place = name.startswith("bailing") and not is_neox  # vLLM has an in-place kernel for this
    assert (found[0] is q and found[1] is k) if in_place else torch.equal(packed, before)
    assert torch.equal(packed[:, -5:], before[:, -5:])
    for x, y, exact in zip(found, native, expected, strict=True):
        assert x.shape == y.shape == exact.shape and x.dtype == y.dtype == dtype
        assert_rotated(x, exact)
        assert_rotated(y, exact)
    alone, none = layer.forward_cuda(positions, before[:, : HQ * D].clone())
    assert none is None and torch.equal(alone, found[0])


@pytest.mark.parametrize("name", FEW)
def test_text_has_one_position_a_token(name: str) -> None:
    layer = made(name)
    positions, q, k = torch.arange(3, 3 + N, device=DEVICE), randn(N, HQ, D), randn(N, HK * D)
    before = q.clone(), k.clone()
    for x, y in zip(before, layer(positions, q, k), strict=True):
        assert_rotated(y, turned(name, x, positions.expand(3, N)))
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


def test_two_axes_need_two_rows() -> None:
    layer, q = made("pangu, two"), randn(N, HQ * D)
    positions = torch.randint(ROWS, (3, N), device=DEVICE)
    assert torch.equal(layer(positions[:2], q)[0], layer(positions, q)[0])


@pytest.mark.parametrize("name", FEW)
def test_one_launch_rotates(name: str) -> None:
    layer, positions = made(name), torch.randint(ROWS, (3, N), device=DEVICE, dtype=torch.int32)
    q, k = randn(N, HQ * D), randn(N, HK * D)
    place = "_" if name == "bailing" else ""
    for keys, operator in (((q, k), "rope_qk"), ((q,), "rope")):
        count = launches(layer, positions, *keys)
        assert count.pop(f"fusewise::{operator}{place}") == 1
        assert sum(count.values()) <= 6 and all(kernel.startswith("aten::") for kernel in count)
    assert launches(layer, positions[0], q, k) == {"fusewise::rope_qk": 1}


@pytest.mark.parametrize("name", FEW)
def test_gradients(name: str) -> None:
    layer, positions = made(name), torch.randint(ROWS, (3, N), device=DEVICE)
    leaf = randn(N, HQ * D).requires_grad_()
    for function in (layer, layer.forward_native):
        assert_gradient(function(positions, leaf * 1)[0], leaf, lambda x: turned(name, x, positions))


@pytest.mark.parametrize("name", FEW)
def test_one_graph(name: str) -> None:
    torch._dynamo.reset()
    layer = made(name)

    def function(positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return *layer(positions, q.clone(), k.clone()), *layer(positions[0], q, k)

    inputs = torch.randint(ROWS, (3, N), device=DEVICE), randn(N, HQ * D), randn(N, HK * D)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*inputs)
    for i, axes in ((0, inputs[0]), (2, inputs[0][:1].expand(3, N))):
        for x, y in zip(inputs[1:], compiled[i : i + 2], strict=True):
            assert_rotated(y, turned(name, x, axes))


@pytest.mark.parametrize("name", FEW)
def test_a_position_without_a_row_is_nan_for_the_pairs_of_its_axis(name: str) -> None:
    layer, positions = made(name, is_neox=True), torch.zeros(3, N, dtype=torch.long, device=DEVICE)
    positions[H, 2], positions[W, 3], positions[T, 4] = 4 * ROWS, -1, 2**40
    nan = layer(positions, randn(N, D))[0].isnan().view(N, 2, D // 2)
    order = torch.tensor(ORDERS[name][2], device=DEVICE)
    for token, axis in ((2, H), (3, W), (4, T)):
        assert torch.equal(nan[token], (order == axis).expand(2, -1))
    assert int(nan.sum()) == 2 * len(order)


def test_bailing_takes_slices_of_wider_heads_in_place() -> None:
    layer, positions = made("bailing"), torch.randint(ROWS, (3, 2 * N), device=DEVICE, dtype=torch.int32)[:, ::2]
    wide, latent = randn(N, HQ, 24 + D), randn(N, 40 + D)
    before = wide.clone(), latent.clone()
    layer(positions, wide[..., 24:], latent[:, None, 40:])
    assert torch.equal(wide[..., :24], before[0][..., :24]) and torch.equal(latent[:, :40], before[1][:, :40])
    assert_rotated(wide[..., 24:], turned("bailing", before[0][..., 24:], positions))
    assert_rotated(latent[:, 40:], turned("bailing", before[1][:, 40:], positions))


def test_bailing_tables_of_the_tokens() -> None:
    layer, positions = made("bailing"), torch.randint(ROWS, (3, N), device=DEVICE)
    for at in (positions, positions[W]):
        for x, y in zip(layer.select_cos_sin(at), tables_of("bailing", at.expand(3, N)), strict=True):
            torch.testing.assert_close(x[:, None], y)
    other = torch.randn(ROWS, D, device=DEVICE, dtype=torch.float16)
    cos, sin = layer.select_cos_sin(positions, other)
    pairs = list(enumerate(ORDERS["bailing"][2]))
    assert torch.equal(cos, torch.stack([other[positions[axis], i] for i, axis in pairs], -1))
    assert torch.equal(sin, torch.stack([other[positions[axis], D // 2 + i] for i, axis in pairs], -1))


@pytest.mark.parametrize(
    ("counts", "order"),
    [
        ((2, 2, 0), [0, 1, 0, 1]),
        ((4, 1, 0), [0, 1, 0, 0, 0]),
        ((0, 0, 2), [2, 2]),
        ((0, 0, 0), []),
        ((3, 2, 2, True), [0, 1, 2, 0, 1, 2, 0]),
        ((2, 4, 2, True), [0, 1, 2, 1, 2, 1, 1, 0]),
        ((1, 1, 3, True), [1, 2, 2, 2, 0]),
    ],
)
def test_axes_are_dealt_out_evenly(counts: Any, order: list[int]) -> None:
    assert MRotaryEmbeddingInterleaved.get_mrope_interleaved_id_list(*counts) == order
    assert made("pangu").mrope_dim == 2 * ORDERS["pangu"][2]


def test_get_rope_makes_them() -> None:
    LAYERS.clear()
    parameters = {"mrope_section": [6, 5, 5], "rope_theta": 500.0}
    bailing = get_rope(D, ROWS, False, {"rope_type": "bailing_mrope", **parameters})
    assert type(bailing) is BailingMRotaryEmbedding and bailing.base == 500.0 and bailing.spatial_size == 10
    assert get_rope(D, ROWS, False, {"rope_type": "bailing_mrope", **parameters}) is bailing
    part = {"mrope_section": [2, 3, 3], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
    pangu = get_rope(D, ROWS, True, {"rope_type": "openpangu", **part}, torch.bfloat16)
    assert type(pangu) is MRotaryEmbeddingInterleaved and pangu.cos_sin_cache.shape == (4 * ROWS, 16)
    vision = {"rope_type": "mllama4", "partial_rotary_factor": 0.5}
    tower = get_rope(D, 16, False, vision, torch.complex64)
    assert type(tower) is Llama4VisionRotaryEmbedding and tower.cos_sin_cache.shape == (17, 1, 16)
    LAYERS.clear()


SECTIONS, ALPHA = [3, 6, 0, 7], 50.0


def four_axes(is_neox: bool = True, dtype: torch.dtype = torch.float32, width: int = D) -> XDRotaryEmbedding:
    sections = SECTIONS if width == D else [2, 1, 1, 4]
    return XDRotaryEmbedding(D, width, ROWS, BASE, is_neox, ALPHA, dtype, xdrope_section=sections).to(DEVICE)


def turned_on_four(x: Tensor, positions: Tensor, is_neox: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    axes = [0] * 3 + [1] * 6 + [3] * 7
    base = BASE * ALPHA ** (D / (D - 2))
    f = torch.tensor([base ** (-2 * i / D) for i in range(D // 2)]).double()
    angles = torch.stack([positions[axis].cpu().double() * f[i] for i, axis in enumerate(axes)], -1)[:, None]
    cos, sin = angles.cos().to(DEVICE, dtype), angles.sin().to(DEVICE, dtype)
    return rotate(x.reshape(N, -1, D), cos, sin, interleaved=not is_neox).reshape(x.shape)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("dtype", "table"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_four_axes(is_neox: bool, dtype: torch.dtype, table: torch.dtype) -> None:
    layer, positions = four_axes(is_neox, table), torch.randint(ROWS, (4, N), device=DEVICE)
    assert not layer.state_dict() and layer.cos_sin_cache.shape == (ROWS, D)
    q, k = randn(N, HQ * D, dtype=dtype), randn(N, HK, D, dtype=dtype)
    before = q.clone(), k.clone()
    for function in (layer, layer.forward_cuda, layer.forward_native):
        for x, y in zip((q, k), function(positions, q, k), strict=True):
            assert x.shape == y.shape and y.dtype == dtype
            assert_rotated(y, turned_on_four(x, positions, is_neox, table))
        assert torch.equal(q, before[0]) and torch.equal(k, before[1]) and function(positions, q)[1] is None
    assert torch.equal(layer(positions[0], q)[0], layer(positions[:1].expand(4, N), q)[0])
    assert launches(layer, positions, q, k)["fusewise::rope_qk"] == 1


def test_four_axes_in_a_part_of_the_head_leave_the_rest() -> None:
    layer, positions, q = four_axes(width=16), torch.randint(ROWS, (4, N), device=DEVICE), randn(N, HQ, D)
    y, _ = layer(positions, q)
    assert torch.equal(y[..., 16:], q[..., 16:]) and not torch.equal(y[..., :16], q[..., :16])


def test_four_axes_gradient_and_graph() -> None:
    torch._dynamo.reset()
    layer, positions = four_axes(), torch.randint(ROWS, (4, N), device=DEVICE)
    leaf = randn(N, HQ * D).requires_grad_()
    assert_gradient(layer(positions, leaf)[0], leaf, lambda x: turned_on_four(x, positions, True))
    q, _ = torch.compile(layer, backend="aot_eager", fullgraph=True)(positions, leaf.detach())
    assert_rotated(q, turned_on_four(leaf.detach(), positions, True))


def test_four_axes_by_get_rope() -> None:
    LAYERS.clear()
    parameters = {"rope_type": "xdrope", "alpha": ALPHA, "xdrope_section": SECTIONS, "rope_theta": BASE}
    layer = get_rope(D, ROWS, True, parameters)
    assert type(layer) is XDRotaryEmbedding and get_rope(D, ROWS, True, parameters) is layer
    assert torch.equal(layer.cos_sin_cache, four_axes().cos_sin_cache.cpu())
    assert layer.get_next_input_positions(3, 5) == [[3, 4]] * 4
    out = np.zeros((4, 6), dtype=np.int64)
    layer.get_next_input_positions_tensor(out, 1, 7, 3)
    assert (out == [[0, 7, 8, 9, 0, 0]] * 4).all()
    LAYERS.clear()


EDGE = 5
PATCHES = EDGE * EDGE


def vision() -> Llama4VisionRotaryEmbedding:
    return Llama4VisionRotaryEmbedding(D, D // 2, PATCHES, BASE, False, torch.complex64).to(DEVICE)


def on_grid(x: Tensor) -> Tensor:
    """Reference: x (B, patches + 1, H, D) in float64, rotated by column and row of each patch."""
    f = frequencies(D // 2)
    angles = torch.zeros(PATCHES + 1, D // 2, dtype=torch.float64)
    for row in range(EDGE):
        for column in range(EDGE):
            angles[row * EDGE + column] = torch.cat(((column + 1) * f, (row + 1) * f))
    angles = angles[:, None].to(x.device)
    return rotate(x, angles.cos(), angles.sin(), interleaved=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llama4_vision(dtype: torch.dtype) -> None:
    layer, q, k = vision(), randn(2, PATCHES + 1, HQ, D, dtype=dtype), randn(2, PATCHES + 1, HK, D, dtype=dtype)
    assert not layer.state_dict() and layer.cos_sin_cache.dtype == torch.complex64
    before = q.clone()
    for function in (layer, layer.forward_native, layer.forward_cuda):
        for x, y in zip((q, k), function(q, k), strict=True):
            assert y.dtype == dtype
            assert_rotated(y, on_grid(x), angle_error=1e-6)
        assert torch.equal(q[:, -1], function(q)[0][:, -1]) and function(q)[1] is None
    assert torch.equal(q, before)
    assert launches(layer, q, k) == {"fusewise::rope_qk": 1}


def test_llama4_vision_gradient_and_graph() -> None:
    torch._dynamo.reset()
    layer, leaf = vision(), randn(2, PATCHES + 1, HQ, D).requires_grad_()
    assert_gradient(layer(leaf)[0], leaf, on_grid)
    q, k = torch.compile(layer, backend="aot_eager", fullgraph=True)(leaf.detach(), leaf.detach()[:, :, :1])
    assert_rotated(q, on_grid(leaf.detach()), angle_error=1e-6)
    assert_rotated(k, on_grid(leaf.detach()[:, :, :1]), angle_error=1e-6)


FLAT = torch.zeros(N, D)
IMAGE = torch.zeros(1, PATCHES + 1, 1, D)
AT = torch.zeros(3, N).long()
PLAIN = (D, D, ROWS, BASE, False, torch.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Ernie4_5_VLRotaryEmbedding(*PLAIN, [6, 5, 5]), "mrope_section must give height and width as many pairs, got 6"),
        (lambda: Ernie4_5_VLRotaryEmbedding(*PLAIN, [5, 5, 5]), r"mrope_section must be three .*\(h, w, t\) .* = 16, got"),
        (lambda: Ernie4_5_VLRotaryEmbedding(*PLAIN)(AT, FLAT), r"mrope_section must be given for positions \(3, tokens\), got"),
        (
            lambda: Ernie4_5_VLRotaryEmbedding(D, D, 0, BASE, False, torch.float32, [5, 5, 6]),
            "max_position_embeddings must be from 1 to .*, got 0; ",
        ),
        (lambda: BailingMRotaryEmbedding(*PLAIN, [5, 5, 6]), "mrope_section must give height and width as many pairs, got 5 an"),
        (lambda: BailingMRotaryEmbedding(*PLAIN, []), r"mrope_section must be three .*\(t, h, w\) .* = 16, got \[\]; "),
        (lambda: BailingMRotaryEmbedding(*PLAIN, [18, -1, -1]), "mrope_section must be from 0 to .*, got -1; "),
        (lambda: MRotaryEmbeddingInterleaved(*PLAIN, None), "mrope_section must be three .* or two .* = 16, got None; "),  # type: ignore[arg-type]
        (lambda: MRotaryEmbeddingInterleaved(*PLAIN, [16]), r"mrope_section must be three .* or two .* = 16, got \[16\]; "),
        (lambda: MRotaryEmbeddingInterleaved(*PLAIN, [0, 8, 8]), "mrope_section must be from 1 to .*, got 0; "),
        (lambda: MRotaryEmbeddingInterleaved(*PLAIN, [8, 8], False), "mrope_interleaved must be True, got False; "),
        (lambda: made("pangu, two")(AT[:1], FLAT), r"positions must have shape \(tokens,\) or \(2, tokens\) or \(3, tokens\), "),
        (lambda: made("ernie")(AT[:2], FLAT), r"positions must have shape \(tokens,\) or \(3, tokens\), got \(2, 9\); "),
        (lambda: made("ernie")(AT[:, 1:], FLAT), r"positions must have 9 columns, .*, got \(3, 8\); "),
        (lambda: made("ernie")(AT.double(), FLAT), "positions must have dtype int32 or int64, got float64; "),
        (lambda: made("ernie")(AT.to("meta"), FLAT), "positions must be on the device of q, .*, got meta; "),
        (lambda: made("ernie")(AT, FLAT[:, 1:]), r"query must have the shape of positions and .*, got \(9, 31\); "),
        (lambda: made("bailing")(AT, FLAT, FLAT[1:]), "k must have as many tokens as q"),
        (lambda: made("bailing").select_cos_sin(AT, FLAT[:, 1:]), r"cos_sin_cache must have shape \(rows, 32\), got \(9, 31\)"),
        (lambda: made("bailing").select_cos_sin(AT, FLAT.long()), "cos_sin_cache must have dtype float32, .*, got int64; "),
        (lambda: made("bailing").select_cos_sin(AT[0, 0]), r"positions must have shape \(tokens,\) or \(3, tokens\), got \(\)"),
        (
            lambda: Llama4VisionRotaryEmbedding(D, D // 2, PATCHES, BASE, False, torch.bfloat16),
            "dtype must be torch.complex64, got torch.bfloat16; ",
        ),
        (
            lambda: Llama4VisionRotaryEmbedding(D, D // 2, 0, BASE, False, torch.complex64),
            "max_position_embeddings must be from 1 to .*, got 0; ",
        ),
        (lambda: vision()(IMAGE[:, 1:]), r"query must have shape \(batch, 26, heads, 32\), got \(1, 25, 1, 32\); "),
        (lambda: vision()(IMAGE[..., :16]), r"query must have shape \(batch, 26, heads, 32\), got \(1, 26, 1, 16\); "),
        (lambda: vision()(IMAGE[0]), r"query must have shape \(batch, 26, heads, 32\), got \(26, 1, 32\); "),
        (lambda: vision()(IMAGE, IMAGE[:, 1:]), "k must have as many tokens as q"),
        (lambda: XDRotaryEmbedding(*PLAIN[:5], 1.0, PLAIN[5], [5, 5, 5]), "xdrope_section must be a list .* = 16, got .5, 5, 5.; "),
        (lambda: XDRotaryEmbedding(*PLAIN[:5], 1.0, PLAIN[5], 16), "xdrope_section must be a list .* = 16, got 16; "),  # type: ignore[arg-type]
        (lambda: XDRotaryEmbedding(*PLAIN[:5], 1.0, PLAIN[5], [17, -1]), "xdrope_section must be from 0 to .*, got -1; "),
        (lambda: XDRotaryEmbedding(*PLAIN[:5], 0, PLAIN[5], [16]), "scaling_alpha must be above 0, got 0; "),
        (lambda: four_axes()(AT, FLAT), r"positions must have shape \(tokens,\) or \(4, tokens\), got \(3, 9\); "),
        (
            lambda: get_rope(D, ROWS, True, {"rope_type": "openpangu", "mrope_section": [4, 6, 6]}),
            "rope_parameters must have mrope_interleaved for rope_type openpangu, got rope_type, mrope_section; ",
        ),
    ],
)  # fmt: skip
@pytest.mark.skipif(DEVICE != "cpu", reason="the tensors are a CPU's")
def test_bad_arguments_are_named(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^\w+: {message}") as raised:
        call()
    assert "; " in str(raised.value) and not FLAT.any() and not IMAGE.any()


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_llama4_vision_refuses_a_table_without_its_sines() -> None:
    with pytest.raises(
        TypeError, match=r"^Llama4VisionRotaryEmbedding: cos_sin_cache must be complex, .*, got bfloat16; "
    ):
        vision().to(torch.bfloat16)(IMAGE.to(DEVICE))
