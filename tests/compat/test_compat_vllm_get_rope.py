"""get_rope of fusewise.compat.vllm and the scaled layers: tables against reference formulas, rotation, and error
messages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compat_statement import DEVICE, assert_rotated, randn, rotate
from torch import Tensor

from fusewise.compat import vllm
from fusewise.compat._vllm_get_rope import _LAYERS as LAYERS
from fusewise.compat.vllm import ApplyRotaryEmb, get_rope

N, HQ, HK, D, BASE, ROWS = 9, 4, 2, 32, 10000.0, 60
Frequency = Callable[[int], float]


def power(i: int, width: int = D, base: float = BASE) -> float:
    return float(base ** (-2 * i / width))


def turning(i: int, original: int, fast: float = 32, slow: float = 1, truncate: bool = True) -> float:
    """YaRN's interpolation weight of a pair: 0 for high frequencies, 1 for low ones."""
    low, high = (D * math.log(original / (2 * math.pi * n)) / (2 * math.log(BASE)) for n in (fast, slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    return min(max((i - low) / (high - low), 0.0), 1.0)


def yarn(i: int, factor: float, original: int, **options: Any) -> float:
    share = turning(i, original, **options)
    return power(i) * (1 - share + share / factor)


def llama3(i: int) -> float:
    f = power(i)
    wavelength = 2 * math.pi / f
    if wavelength < 100 / 4:
        return f
    if wavelength > 100:
        return f / 8
    smooth = (100 / wavelength - 1) / 3
    return (1 - smooth) * f / 8 + smooth * f


def grown(factor: float) -> float:
    return BASE * factor ** (D / (D - 2))


STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 25}
M4 = 1 + 0.1 * math.log(4)
SHORT, LONG = [1 + i / 40 for i in range(D // 2)], [1 + i / 4 for i in range(D // 2)]
#: name: (parameters, class, rows, frequency of pair i, factor of cos and sin).
TABLES: dict[str, tuple[dict[str, Any] | None, str, int, Frequency, float]] = {
    "none": (None, "RotaryEmbedding", ROWS, power, 1.0),
    "default": ({"rope_theta": 500.0}, "RotaryEmbedding", ROWS, lambda i: power(i, base=500.0), 1.0),
    "mrope": (
        {"rope_type": "mrope", "mrope_section": [4, 6, 6]}, "MRotaryEmbedding", 4 * ROWS, power, 1.0,
    ),
    "linear": (
        {"rope_type": "linear", "factor": 2.5}, "LinearScalingRotaryEmbedding", 150, lambda i: power(i) / 2.5, 1.0,
    ),
    "an int": ({"rope_type": "linear", "factor": 2}, "LinearScalingRotaryEmbedding", 120, lambda i: power(i) / 2, 1.0),
    "ntk": (
        {"rope_type": "ntk", "factor": 3.0}, "NTKScalingRotaryEmbedding", ROWS,
        lambda i: power(i, base=3 * BASE) / 3 ** (2 / D), 1.0,
    ),
    "ntk mixed": (
        {"rope_type": "ntk", "factor": 3.0, "mixed_b": 0.625}, "NTKScalingRotaryEmbedding", ROWS,
        lambda i: power(i) / math.exp(math.log(3) / (D / 2) ** 0.625 * (i + 1) ** 0.625), 1.0,
    ),
    "alpha": (
        {"rope_type": "dynamic", "alpha": 1000.0}, "DynamicNTKAlphaRotaryEmbedding", ROWS,
        lambda i: power(i, base=grown(1000)), 1.0,
    ),
    "dynamic": (
        {"rope_type": "dynamic", "factor": 4.0}, "DynamicNTKScalingRotaryEmbedding", ROWS, power, 1.0,
    ),
    "dynamic, beyond": (
        {"rope_type": "dynamic", "factor": 4.0, "max_trained_positions": 20}, "DynamicNTKScalingRotaryEmbedding", ROWS,
        lambda i: power(i, base=grown(4 * 60 / 20 - 3)), 1.0,
    ),
    "dynamic, less": (
        {"rope_type": "dynamic", "factor": 1.5, "max_trained_positions": 80}, "DynamicNTKScalingRotaryEmbedding", ROWS,
        lambda i: power(i, base=grown(1.5 * 60 / 80 - 0.5)), 1.0,
    ),
    "yarn": (
        {"rope_type": "yarn", **STRETCHED}, "YaRNScalingRotaryEmbedding", 100, lambda i: yarn(i, 4, 25), M4,
    ),
    "yarn, options": (
        {"rope_type": "yarn", **STRETCHED, "beta_fast": 3, "beta_slow": 0.5, "truncate": False, "attention_factor": 1.5},
        "YaRNScalingRotaryEmbedding", 100, lambda i: yarn(i, 4, 25, fast=3, slow=0.5, truncate=False), 1.5,
    ),
    "yarn, mscale": (
        {"rope_type": "yarn", **STRETCHED, "mscale": 0.7, "mscale_all_dim": 1.2}, "YaRNScalingRotaryEmbedding", 100,
        lambda i: yarn(i, 4, 25), (1 + 0.07 * math.log(4)) / (1 + 0.12 * math.log(4)),
    ),
    "yarn of axes": (  # the ramp uses the context length of the table
        {"rope_type": "yarn", **STRETCHED, "mrope_section": [4, 6, 6]}, "MRotaryEmbedding", 400,
        lambda i: yarn(i, 4, 100), M4,
    ),
    "deepseek": (
        {"rope_type": "deepseek_yarn", **STRETCHED, "mscale": 0.7, "mscale_all_dim": 1.2},
        "DeepseekScalingRotaryEmbedding", 100, lambda i: yarn(i, 4, 25),
        (1 + 0.07 * math.log(4)) / (1 + 0.12 * math.log(4)),
    ),
    "deepseek, no mscale": (
        {"rope_type": "deepseek_llama_scaling", **STRETCHED}, "DeepseekScalingRotaryEmbedding", 100,
        lambda i: yarn(i, 4, 25), M4,
    ),
    "deepseek v4": (
        {"rope_type": "deepseek_yarn", **STRETCHED, "is_deepseek_v4": True}, "DeepseekV4ScalingRotaryEmbedding", 100,
        lambda i: yarn(i, 4, 25), M4,
    ),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4,
         "original_max_position_embeddings": 100},
        "Llama3RotaryEmbedding", ROWS, llama3, 1.0,
    ),
    "proportional": (
        {"rope_type": "proportional", "partial_rotary_factor": 0.25}, "Gemma4RotaryEmbedding", ROWS,
        lambda i: power(i) if i < 4 else 0.0, 1.0,
    ),
}  # fmt: skip


def angles_of(rows: int, frequency: Frequency, width: int = D) -> Tensor:
    frequencies = torch.tensor([frequency(i) for i in range(width // 2)], dtype=torch.float64)
    return torch.arange(rows).double()[:, None] * frequencies


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_table_of_every_type(name: str, dtype: torch.dtype) -> None:
    parameters, kind, rows, frequency, scale = TABLES[name]
    layer = get_rope(D, ROWS, True, parameters, dtype)
    assert type(layer) is getattr(vllm, kind) and not layer.state_dict()
    angles = angles_of(rows, frequency)
    exact = scale * torch.cat((angles.cos(), angles.sin()), -1)
    found = layer.cos_sin_cache.cpu()
    assert found.shape == exact.shape and found.dtype == (torch.float32 if "v4" in name else dtype)
    # One rounding of the frequency to float32, times the position, plus one of the table entry.
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=0.51 * eps, atol=0.6 * 2**-23 * rows * scale + 0.01 * eps)


@pytest.mark.parametrize("name", [name for name, (_, kind, *_) in TABLES.items() if not kind.startswith("MRotary")])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_rotate_in_place_by_their_table(name: str, is_neox: bool, dtype: torch.dtype) -> None:
    layer = get_rope(D, ROWS, is_neox, TABLES[name][0], dtype).to(DEVICE)
    positions = torch.randint(ROWS, (N,), device=DEVICE)
    q, k = randn(N, HQ, D, dtype=dtype), randn(N, HK, D, dtype=dtype)
    cos, sin = layer.cos_sin_cache[positions][:, None].chunk(2, -1)
    expected = [rotate(x, cos, sin, interleaved=not is_neox) for x in (q, k)]
    before = q.clone()
    native = layer.forward_native(positions, q, k)
    assert torch.equal(q, before)
    found = layer(positions, q, k)
    assert found[0] is q and found[1] is k
    assert layer.enabled() and not layer.use_flashinfer  # what model files ask
    for x, y, exact in zip(found, native, expected, strict=True):
        assert_rotated(x, exact)
        assert_rotated(y, exact)
    alone, none = layer.forward_cuda(positions, before)
    assert none is None and torch.equal(alone, q)


def test_several_linear_factors_have_a_table_each() -> None:
    layer = get_rope(D, 20, True, {"rope_type": "linear", "factor": [1.0, 2.5, 4.0]})
    assert layer.scaling_factor_to_offset == {1.0: 0, 2.5: 20, 4.0: 70} and layer.cos_sin_cache.shape == (150, D)
    for factor, first in layer.scaling_factor_to_offset.items():
        one = get_rope(D, 20, True, {"rope_type": "linear", "factor": factor}).cos_sin_cache
        assert torch.equal(layer.cos_sin_cache[first : first + len(one)], one)


@pytest.mark.parametrize(
    ("parameters", "width"),
    [({"partial_rotary_factor": 0.5}, 16), ({"rope_dim": 8}, 8), ({"rope_dim": 8, "partial_rotary_factor": 0.5}, 8)],
)
def test_a_part_of_the_head(parameters: dict[str, Any], width: int) -> None:
    layer = get_rope(D, ROWS, True, parameters).to(DEVICE)
    assert layer.rotary_dim == width
    positions, q = torch.arange(N, device=DEVICE), randn(N, HQ, D)
    angles = angles_of(N, lambda i: power(i, width), width).to(DEVICE)[:, None]
    expected = rotate(q, angles.cos(), angles.sin())
    assert_rotated(layer(positions, q.flatten(1))[0].view(N, HQ, D), expected, angle_error=1e-6)


def test_layers_with_arguments_of_their_own_compile_to_one_graph() -> None:
    torch._dynamo.reset()
    four = get_rope(D, ROWS, True, TABLES["deepseek v4"][0]).to(DEVICE)
    three = get_rope(D, ROWS, True, TABLES["deepseek"][0]).to(DEVICE)
    factors = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 20}
    long = get_rope(D, ROWS, True, {"rope_type": "longrope", **factors}).to(DEVICE)
    LAYERS.clear()

    def function(positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        q, k = (x.clone().unflatten(-1, (-1, D)) for x in (q, k))
        four(positions, q, k, positions, inverse=True)
        three(positions, q, k, positions)
        return q, k, *long(positions, q.flatten(1), k.flatten(1)), ApplyRotaryEmb()(q, *long_tables[:N].chunk(2, -1))

    long_tables = long.long_short_cos_sin_cache
    inputs = torch.arange(N, device=DEVICE), randn(N, HQ * D), randn(N, HK * D)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for x, y in zip(compiled(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(x, y)


def test_deepseek_heads_are_slices_and_positions_may_move() -> None:
    layer = get_rope(D, ROWS, False, TABLES["deepseek"][0]).to(DEVICE)
    q, k = randn(N, HQ, 24 + D), randn(N, D)
    before, positions, offsets = q.clone(), torch.arange(N, device=DEVICE), torch.arange(N, device=DEVICE) % 3
    cos, sin = layer.cos_sin_cache[positions + offsets][:, None].chunk(2, -1)
    expected = rotate(q[..., 24:], cos, sin, interleaved=True), rotate(k[:, None], cos, sin, interleaved=True)
    static = layer.forward_static(positions, q[..., 24:], k[:, None], D, D, layer.cos_sin_cache, False, offsets)
    for x, exact in zip(static, expected, strict=True):
        assert_rotated(x, exact)
    assert torch.equal(q, before)
    for x, exact in zip(layer(positions, q[..., 24:], k[:, None], offsets), expected, strict=True):
        assert_rotated(x, exact)
    assert torch.equal(q[..., :24], before[..., :24])
    assert_rotated(q[..., 24:], expected[0])
    assert_rotated(k[:, None], expected[1])


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("head", [16, 48])
def test_deepseek_v4_rotates_the_trailing_part(inverse: bool, is_neox: bool, head: int) -> None:
    parameters = {**(TABLES["deepseek v4"][0] or {}), "rope_dim": 16}
    layer = get_rope(D, ROWS, is_neox, parameters, torch.bfloat16).to(DEVICE)
    positions, offsets = torch.arange(N, device=DEVICE), torch.full((N,), 2, device=DEVICE)
    q, k = randn(N, HQ, head, dtype=torch.bfloat16), randn(N, 1, head, dtype=torch.bfloat16)
    cos, sin = layer.cos_sin_cache[positions + 2][:, None].chunk(2, -1)
    expected = [rotate(x, cos, -sin if inverse else sin, start=head - 16, interleaved=not is_neox) for x in (q, k)]
    native = layer.forward_native(positions, q, k, offsets, inverse)
    alone, none = layer.forward_native(positions, q, None, offsets, inverse)
    assert none is None and torch.equal(alone, native[0])
    found = layer(positions, q, k, offsets, inverse)
    assert found[0] is q and found[1] is k
    for x, y, exact in zip(found, native, expected, strict=True):
        assert_rotated(x, exact)
        assert_rotated(y, exact)


@pytest.mark.parametrize("mscale", [{}, {"short_mscale": 1.1, "long_mscale": 1.2}])
@pytest.mark.parametrize("maximum", [20, 60])
def test_longrope(mscale: dict[str, float], maximum: int) -> None:
    original = 20
    parameters = {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": original,
        **mscale,
    }  # fmt: skip
    layer = get_rope(D, maximum, True, parameters).to(DEVICE)
    grown = math.sqrt(1 + math.log(maximum / original) / math.log(original))
    tables = []
    for rows, factors, name in ((original, SHORT, "short_mscale"), (maximum, LONG, "long_mscale")):
        angles = angles_of(rows, lambda i, factors=factors: power(i) / factors[i])  # type: ignore[misc]
        tables.append(torch.cat((angles.cos(), angles.sin()), -1) * mscale.get(name, grown))
    found = layer.long_short_cos_sin_cache
    torch.testing.assert_close(found.cpu().double(), torch.cat(tables), rtol=1e-7, atol=6e-6)
    assert layer.use_long_rope == (maximum > original)

    positions, q, k = torch.arange(5, 5 + N, device=DEVICE), randn(N, HQ * D), randn(N, HK * D)
    before = q.clone()
    for long in (maximum > original, False):
        layer.use_long_rope = long
        part = found[original:] if long else found[:original]
        cos, sin = part[positions + 1][:, None].chunk(2, -1)
        result = layer(positions, q, k, torch.ones_like(positions))
        for x, y in zip((q, k), result, strict=True):
            assert_rotated(y.view(N, -1, D), rotate(x.view(N, -1, D), cos, sin))
        assert torch.equal(q, before) and layer(positions, q)[1] is None
    assert layer(positions + original, q)[0].isnan().all()  # in vLLM these would be rows of the other table
    LAYERS.clear()


DEALT = {"mrope_section": [4, 6, 6], "mrope_interleaved": True}


@pytest.mark.parametrize(
    ("parameters", "dtype"),
    [
        *[(table[0], None) for table in TABLES.values()],
        *[({"rope_type": kind, **DEALT}, None) for kind in ("openpangu", "bailing_mrope")],
        ({"rope_type": "xdrope", "alpha": 2.0, "xdrope_section": [4] * 4}, None),
        ({"rope_type": "mllama4", "rope_dim": D // 2}, torch.complex64),
    ],
)
def test_every_layer_can_be_built_on_the_default_device(parameters: Any, dtype: Any) -> None:
    """As vLLM builds a model, within `torch.device("cuda")`. One built without memory has its tables after `to_empty`."""
    LAYERS.clear()
    with torch.device("meta"):
        layer = get_rope(D, ROWS, True, parameters, dtype)
        assert all(x.is_meta for x in layer.buffers())
    LAYERS.clear()
    expected = dict(get_rope(D, ROWS, True, parameters, dtype).named_buffers())
    torch.nn.Sequential(layer).to_empty(device="cpu")
    assert all(torch.equal(x, expected.pop(name)) for name, x in layer.named_buffers()) and not expected
    LAYERS.clear()


NEEDED = {
    "linear": ("factor",), "ntk": ("factor",), "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "deepseek_yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"), "mrope": ("mrope_section",),
    "openpangu": ("mrope_section", "mrope_interleaved"), "bailing_mrope": ("mrope_section",), "xdrope": ("alpha", "xdrope_section"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NEEDED.items() for name in names])
def test_what_a_type_needs_is_asked_for(kind: str, name: str) -> None:
    given = {other: 1 for other in NEEDED[kind] if other != name}
    with pytest.raises(ValueError, match=rf"^get_rope: rope_parameters must have {name} for .*{kind}, got .+; pass"):
        get_rope(D, ROWS, True, {"rope_type": kind, **given})


MADE = {"head_size": D, "max_position": ROWS}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 20}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *[
            ({"rope_parameters": {"rope_type": kind}}, f"get_rope: rope_type must be one of default, .*, got '{kind}'; ")
            for kind in ("fope", "")
        ],
        ({"rope_parameters": {"rope_type": None}}, "rope_type must be one of default, .*, got None; "),
        ({"rope_parameters": {"use_fope": True}}, "use_fope must be False, got True; "),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config must have chunk_size and loc"),
        ({"rope_parameters": {"rope_type": "mllama4"}}, "dtype must be torch.complex64, got torch.float32; "),
        ({"rope_parameters": "yarn"}, "rope_parameters must be a mapping or None, got 'yarn'; "),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters full_attention must be a number, a name or a list, got {.*}; pass one flat dictionary",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.0}}, "partial_rotary_factor must be above 0 and at most 1, got"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor must be above 0 and at most 1, got"),
        ({"rope_parameters": {"partial_rotary_factor": "1"}}, "partial_rotary_factor must be a finite number, got '1'"),
        ({"rope_parameters": {"rope_dim": D + 2}}, f"rope_dim must be from 1 to {D}, got {D + 2}; "),
        ({"rope_parameters": {"rope_dim": 7}}, "rotary_dim must be even, got 7; "),
        ({"rope_parameters": {"rope_theta": "1"}}, "base must be a number, got '1'; "),
        ({"rope_parameters": {"rope_theta": 0.5}}, "base must be finite and above 1, got 0.5; "),
        ({"head_size": 0}, "get_rope: head_size must be at least 1, got 0; "),
        ({"max_position": -1}, "get_rope: max_position must be from 0 to .*, got -1; "),
        ({"dtype": "float32"}, "get_rope: dtype must be a torch.dtype or None, got 'float32'; "),
        ({"mrope_positions_factor": 0}, "get_rope: mrope_positions_factor must be from 1 to .*, got 0; "),
        ({"rope_parameters": {"mrope_section": [1, 2, 3]}}, "mrope_section must be three numbers of pairs .* = 16, got"),
        ({"rope_parameters": {"mrope_section": [8, 8]}}, "mrope_section must be three numbers of pairs .* = 16, got"),
        ({"rope_parameters": {"mrope_section": 16}}, "mrope_section must be three numbers of pairs .* = 16, got 16"),
        ({"rope_parameters": {"rope_type": "linear", "factor": []}}, "scaling_factors must be a factor or several, got"),
        ({"rope_parameters": {"rope_type": "linear", "factor": [1.0, 0]}}, "scaling_factors must be above 0, got 0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e300}}, "positions must be at most 2147483647, got"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 0}}, "scaling_factor must be above 0, got 0; "),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2, "mixed_b": -999}}, "short_factor must be finite and above"),
        ({"rope_parameters": {"rope_type": "dynamic", "alpha": 1e305}}, "base must be finite and above 1, got inf; "),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 9.0, "max_trained_positions": 90}},
            r"scaling_factor must keep .* above 0, got -2 with 9; lower the factor",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2, "rope_dim": 2}}, "rotary_dim must be at least 4, got 2"),
        ({"rope_parameters": {"rope_type": "yarn", **STRETCHED, "factor": 1e308}}, "positions must be at most"),
        ({"rope_parameters": {"rope_type": "yarn", **STRETCHED, "truncate": "no"}}, "truncate must be a bool, got 'no'"),
        ({"rope_parameters": {"rope_type": "deepseek_yarn", **STRETCHED, "mscale": -1}}, "mscale must be at least 0, got"),
        ({"rope_parameters": {**LONGROPE, "short_factor": [1.0], "long_factor": LONG}}, "short_factor must have .* got 1;"),
        ({"rope_parameters": {**LONGROPE, "short_factor": SHORT, "long_factor": [0] * 16}}, "long_factor must be finite"),
        (
            {"rope_parameters": {**LONGROPE, "short_factor": SHORT, "long_factor": LONG}, "is_neox_style": False},
            "is_neox_style must be True, got False; ",
        ),
    ],
)  # fmt: skip
def test_bad_arguments_of_get_rope_are_named(wrong: dict[str, Any], message: str) -> None:
    LAYERS.clear()
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        get_rope(**{**MADE, **wrong})
    assert re.fullmatch(r"\w+: [\w. ]+ must .+, got .+; .+", str(raised.value))
    assert not LAYERS
