"""Frequencies against closed forms derived by hand and against transformers; tables against float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusewise.ops.rope import tables

LLAMA_31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEEPSEEK_V3 = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
YARN_PLAIN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(48)],
    "long_factor": [1.0 + 1.25 * i for i in range(48)],
    "original_max_position_embeddings": 4096,
}
GEMMA_4 = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}


def close(actual: torch.Tensor, expected: list[float]) -> None:
    """Check equality with exact values after one rounding to float32 (plus half an ulp, 2^-24, for the test's own rounding)."""
    assert actual.dtype == torch.float32 and actual.shape == (len(expected),)
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=2.0**-23, atol=0)


# --- closed forms -----------------------------------------------------------------------------------------------------


def test_default_is_powers_of_the_base() -> None:
    frequencies, scaling = tables.default(rotary_dim=8, base=10000.0)
    close(frequencies, [1.0, 1e-1, 1e-2, 1e-3])
    assert scaling == 1.0


def test_linear_divides_by_the_factor() -> None:
    close(tables.linear(rotary_dim=8, factor=4.0)[0], [0.25, 0.025, 0.0025, 0.00025])


@pytest.mark.parametrize(("seq_len", "last"), [(None, 1e-2), (512, 1e-2), (2048, 1 / 300)])
def test_dynamic_grows_the_base_beyond_the_trained_length(seq_len: int | None, last: float) -> None:
    # rotary_dim 4, exponent 4 / 2: at twice the length and factor 2 the base is 10000 * 3^2, its root 300
    close(tables.dynamic(rotary_dim=4, factor=2.0, max_position_embeddings=1024, seq_len=seq_len)[0], [1.0, last])


def test_llama3_keeps_fast_pairs_and_slows_slow_ones() -> None:
    # base 16: frequencies 1, 1/4; rotations over a context of 8 pi: 4 and 1, the two ends of the ramp
    kwargs = {"rotary_dim": 4, "base": 16.0, "factor": 8.0, "original_max_position_embeddings": 25}
    turns = [25 / (2 * math.pi), 25 / (8 * math.pi)]
    frequencies, scaling = tables.llama3(**kwargs, low_freq_factor=turns[1], high_freq_factor=turns[0])
    close(frequencies, [1.0, 0.25 / 8])
    assert scaling == 1.0
    # the second pair now halfway up the ramp: the mean of 1/4 and 1/32
    middle = tables.llama3(**kwargs, low_freq_factor=turns[1] / 2, high_freq_factor=turns[1] * 1.5)[0]
    close(middle, [1.0, (0.25 + 0.03125) / 2])


def test_yarn_of_deepseek_v3() -> None:
    # 64 ln(4096 / 64 pi) / (2 ln 10000) = 10.47 and 64 ln(4096 / 2 pi) / (2 ln 10000) = 22.51: the ramp is 10 to 23
    frequencies, scaling = tables.from_config(DEEPSEEK_V3, 64)
    trained = [10000 ** (-i / 32) for i in range(32)]
    ramp = [min(max((i - 10) / 13, 0.0), 1.0) for i in range(32)]
    close(frequencies, [f * (1 - r) + f / 40 * r for f, r in zip(trained, ramp, strict=True)])
    assert scaling == 1.0  # mscale = mscale_all_dim cancel


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"mscale": None, "mscale_all_dim": None}, 1 + 0.1 * math.log(40)),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, (1 + 0.0707 * math.log(40)) / (1 + 0.1 * math.log(40))),
        ({"attention_factor": 0.5}, 0.5),
        ({"factor": 1.0, "mscale": None}, 1.0),
    ],
)
def test_yarn_scaling(changes: dict[str, Any], scaling: float) -> None:
    assert tables.from_config(DEEPSEEK_V3 | changes, 64)[1] == pytest.approx(scaling, rel=1e-15)


def test_yarn_without_truncation_ramps_between_the_exact_pairs() -> None:
    low, high = (64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(10000)) for turns in (32, 1))
    frequencies, _ = tables.from_config(DEEPSEEK_V3 | {"truncate": False}, 64)
    trained = [10000 ** (-i / 32) for i in range(32)]
    ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(32)]
    expected = [f * (1 - r) + f / 40 * r for f, r in zip(trained, ramp, strict=True)]
    assert torch.equal(frequencies, torch.tensor(expected, dtype=torch.float64).float())


@pytest.mark.parametrize("parameters", [DEEPSEEK_V3, LONGROPE | {"factor": 4.0}, LLAMA_31, GEMMA_4])
def test_frequencies_are_on_the_cpu_whatever_the_default_device(parameters: dict[str, Any]) -> None:
    expected, scaling = tables.from_config(parameters, 96)
    with torch.device("meta"):
        frequencies, same = tables.from_config(parameters, 96)
    assert torch.equal(frequencies, expected) and same == scaling


@pytest.mark.parametrize(
    ("original", "beta_fast", "ramp"),
    [
        (64, 32, [0, 1 / 2, 1, 1]),  # from pair -0.50, cut to 0, to pair 1.01
        (6, 32, [0, 1, 1, 1]),  # both ends cut to 0: a step
        (10**10, 10**8, [0, 0, 1 / 6, 2 / 6]),  # from pair 1.20 to pair 9.20, cut to rotary_dim - 1
    ],
)
def test_yarn_ramp_stays_within_the_pairs(original: int, beta_fast: float, ramp: list[float]) -> None:
    frequencies, _ = tables.yarn(
        rotary_dim=8, factor=4.0, original_max_position_embeddings=original, beta_fast=beta_fast
    )
    close(frequencies, [f * (1 - r) + f / 4 * r for f, r in zip([1.0, 1e-1, 1e-2, 1e-3], ramp, strict=True)])


@pytest.mark.parametrize(("factor", "scaling"), [(0.5, 1.0), (1.0, 1.0), (16.0, math.sqrt(1 + 4 / 12))])
def test_longrope_scales_only_longer_contexts(factor: float, scaling: float) -> None:
    assert tables.from_config(LONGROPE | {"factor": factor}, 96)[1] == pytest.approx(scaling, rel=1e-15)


@pytest.mark.parametrize(("seq_len", "key"), [(None, "short_factor"), (4096, "short_factor"), (4097, "long_factor")])
def test_longrope_chooses_its_factors_by_length(seq_len: int | None, key: str) -> None:
    frequencies, scaling = tables.from_config(LONGROPE, 96, seq_len, max_position_embeddings=131072)
    close(frequencies, [10000 ** (-i / 48) / LONGROPE[key][i] for i in range(48)])  # type: ignore[index]
    assert scaling == pytest.approx(math.sqrt(1 + 5 / 12), rel=1e-15)  # 131072 = 2^5 * 4096, 4096 = 2^12


def test_proportional_covers_the_whole_head_and_is_not_partial_rotary() -> None:
    whole, _ = tables.from_config(GEMMA_4 | {"rope_theta": 10000.0}, 16)
    close(whole, [1.0, 10000 ** (-1 / 8), *[0.0] * 6])
    part, _ = tables.from_config({"rope_theta": 10000.0, "partial_rotary_factor": 0.25}, 16)
    close(part, [1.0, 0.01])


# --- transformers as the oracle ---------------------------------------------------------------------------------------


def transformers_frequencies(parameters: dict[str, Any], head_dim: int, seq_len: int | None, trained: int) -> Any:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = SimpleNamespace(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=trained,
        rope_parameters=dict(parameters),
        standardize_rope_params=lambda: None,
    )
    if parameters["rope_type"] == "default":
        pytest.importorskip("transformers.models.phi.modeling_phi")
        from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

        return PhiRotaryEmbedding.compute_default_rope_parameters(config)
    if parameters["rope_type"] not in utils.ROPE_INIT_FUNCTIONS:
        pytest.skip(f"this transformers has no rope_type {parameters['rope_type']!r}")
    return utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=seq_len)


@pytest.mark.parametrize(
    ("parameters", "head_dim", "seq_len"),
    [
        ({"rope_type": "default", "rope_theta": 500000.0}, 128, None),
        ({"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4}, 80, None),
        ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, 96, None),
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, 128, None),
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, 128, 9000),
        (DEEPSEEK_V3, 64, None),
        (YARN_PLAIN, 128, None),
        (YARN_PLAIN | {"truncate": False, "attention_factor": 1.25, "beta_fast": 16.0}, 80, None),
        (LONGROPE, 96, 4096),
        (LONGROPE, 96, 8192),
        (LONGROPE | {"factor": 32.0, "attention_factor": 1.19}, 96, 8192),
        (LLAMA_31, 128, None),
        (LLAMA_31 | {"factor": 32.0, "partial_rotary_factor": 0.5}, 64, None),
        (GEMMA_4, 512, None),
        (GEMMA_4 | {"factor": 8.0}, 512, None),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else str(value),
)
def test_equals_transformers_to_float32_rounding(
    parameters: dict[str, Any], head_dim: int, seq_len: int | None
) -> None:
    theirs, their_scaling = transformers_frequencies(parameters, head_dim, seq_len, trained=4096)
    ours, scaling = tables.from_config(parameters, head_dim, seq_len, max_position_embeddings=4096)
    # transformers computes in float32: the exponent is off by at most half an ulp, amplified by ln(base), and up to six more
    # operations round once each. Ours is rounded once.
    tolerance = (math.log(parameters["rope_theta"]) + 7) * 2.0**-24
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0)
    assert scaling == pytest.approx(their_scaling, rel=1e-12)


# --- configurations ---------------------------------------------------------------------------------------------------


def test_from_config_reads_older_spellings() -> None:
    old = {"type": "linear", "factor": 4.0, "finetuned": True}
    torch.testing.assert_close(
        tables.from_config(old, 64)[0], tables.linear(rotary_dim=64, factor=4.0)[0], rtol=0, atol=0
    )
    su = {**LONGROPE, "rope_type": None, "type": "su"}
    expected = tables.from_config(LONGROPE, 96, max_position_embeddings=8192)[0]
    torch.testing.assert_close(tables.from_config(su, 96, max_position_embeddings=8192)[0], expected, rtol=0, atol=0)
    mrope = {"type": "mrope", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
    torch.testing.assert_close(
        tables.from_config(mrope, 128)[0], tables.default(rotary_dim=128, base=1e6)[0], rtol=0, atol=0
    )


def test_from_config_falls_back_to_the_trained_length() -> None:
    parameters = {key: value for key, value in LLAMA_31.items() if key != "original_max_position_embeddings"}
    fallback, _ = tables.from_config(parameters, 128, max_position_embeddings=8192)
    torch.testing.assert_close(fallback, tables.from_config(LLAMA_31, 128)[0], rtol=0, atol=0)
    _, scaling = tables.from_config(DEEPSEEK_V3 | {"factor": None, "mscale": None}, 64, max_position_embeddings=8192)
    assert scaling == pytest.approx(1 + 0.1 * math.log(2), rel=1e-15)


# --- tables -----------------------------------------------------------------------------------------------------------


def test_tables_are_correctly_rounded_far_out() -> None:
    frequencies, _ = tables.default(rotary_dim=64)
    positions = torch.tensor([[0, 1, 4095], [131071, 2**24 - 1, 2**28 + 1]])
    cos, sin = tables.cos_sin(frequencies, positions, scaling=1.25)
    assert cos.shape == sin.shape == (2, 3, 32) and cos.dtype == torch.float32
    for row, position in enumerate(positions.flatten().tolist()):
        for pair in range(32):
            angle = position * frequencies[pair].item()  # exact in float64: 28 and 24 bits
            exact = torch.tensor([1.25 * math.cos(angle), 1.25 * math.sin(angle)], dtype=torch.float64)
            actual = torch.stack([cos.view(-1, 32)[row, pair], sin.view(-1, 32)[row, pair]])
            torch.testing.assert_close(actual.double(), exact, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_fused_is_cos_beside_sin(dtype: torch.dtype) -> None:
    frequencies, _ = tables.default(rotary_dim=16)
    cos, sin = tables.cos_sin(frequencies, 7, scaling=1.5, dtype=dtype)
    fused = tables.fused_cos_sin(frequencies, 7, scaling=1.5, dtype=dtype)
    assert fused.shape == (7, 16) and fused.dtype == dtype
    assert torch.equal(fused, torch.cat((cos, sin), dim=-1))
    assert torch.equal(cos[0], torch.full((8,), 1.5, dtype=dtype)) and not sin[0].any()


def test_length_is_the_positions_from_zero() -> None:
    frequencies, _ = tables.default(rotary_dim=16)
    by_length = tables.cos_sin(frequencies, 5)
    by_position = tables.cos_sin(frequencies, torch.arange(5, dtype=torch.int32))
    assert all(torch.equal(a, b) for a, b in zip(by_length, by_position, strict=True))
    assert tables.cos_sin(frequencies, 0)[0].shape == (0, 8)


def test_scaling_may_be_an_int_beyond_those_of_torch() -> None:
    cos, _ = tables.cos_sin(_F, 1, scaling=2**70)
    assert (cos == 2.0**70).all()


def test_tables_are_made_where_asked() -> None:
    cos, _ = tables.cos_sin(tables.default(rotary_dim=16)[0], 5, device="meta")
    assert cos.device.type == "meta" and cos.shape == (5, 8)


# --- bad input --------------------------------------------------------------------------------------------------------

_F = tables.default(rotary_dim=8)[0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tables.inv_freq("ntk", rotary_dim=8), ValueError, r"rope_type must be one of default, .*, got 'ntk'; "),
        (lambda: tables.inv_freq(["yarn"], rotary_dim=8), ValueError, r"rope_type must be one of .*, got \['yarn'\]; "),
        (lambda: tables.inv_freq(rotary_dim=2**70), ValueError, r"rotary_dim must be at most 2147483647, got 1180591620717411303424; "),
        (lambda: tables.cos_sin([1.0], 4), TypeError, r"inv_freq must be a torch.Tensor, got list; "),
        (lambda: tables.cos_sin(_F, 2**70), ValueError, r"positions must be at most 2147483647, got 1180591620717411303424; "),
        (lambda: tables.longrope(rotary_dim=8, short_factor=None, long_factor=[1.0] * 4, original_max_position_embeddings=8),
         TypeError, r"short_factor must be a sequence of numbers, got None; "),
        (lambda: tables.yarn(rotary_dim=8, factor=2.0, original_max_position_embeddings=8, mscale="x", mscale_all_dim=1.0),
         TypeError, r"mscale must be a number, got 'x'; "),
        (lambda: tables.yarn(rotary_dim=8, factor=2.0, original_max_position_embeddings=8, beta_fast=_F),
         TypeError, r"beta_fast must be a number, got Tensor; "),
        (lambda: tables.yarn(rotary_dim=8, factor=2.0, original_max_position_embeddings=8, truncate=None),
         TypeError, r"truncate must be a bool, got None; "),
        (lambda: tables.longrope(rotary_dim=8, short_factor=_F[0], long_factor=[1.0] * 4, original_max_position_embeddings=8),
         TypeError, r"short_factor must be a sequence of numbers, got Tensor; "),
        (lambda: tables.longrope(rotary_dim=8, short_factor=b"four", long_factor=[1.0] * 4, original_max_position_embeddings=8),
         TypeError, r"short_factor must be a sequence of numbers, got b'four'; "),
        (lambda: tables.from_config({"rope_type": ["yarn"]}, 8), ValueError, r"rope_type must be one of .*, got \['yarn'\]; "),
        (lambda: tables.from_config({}, "8"), TypeError, r"head_dim must be an int, got '8'; "),
        (lambda: tables.inv_freq(rotary_dim=7), ValueError, r"rotary_dim must be even, got 7; "),
        (lambda: tables.inv_freq(rotary_dim=0), ValueError, r"rotary_dim must be at least 2, got 0; "),
        (lambda: tables.inv_freq(rotary_dim=8.0), TypeError, r"rotary_dim must be an int, got 8.0; "),
        (lambda: tables.inv_freq(rotary_dim=8, base=1.0), ValueError, r"base must be finite and above 1, got 1.0; "),
        (lambda: tables.inv_freq(rotary_dim=8, base=10**400), ValueError, r"base must be finite and above 1, got 1000"),
        (lambda: tables.inv_freq(rotary_dim=8, base=math.nan), ValueError, r"base must be finite and above 1, got nan; "),
        (lambda: tables.inv_freq(rotary_dim=8, base="1e4"), TypeError, r"base must be a number, got '1e4'; "),
        (lambda: tables.inv_freq(rotary_dim=8, factor=2.0), TypeError, r"must be among rotary_dim, base, got 'factor'; "),
        (lambda: tables.inv_freq("linear", rotary_dim=8), TypeError, r"factor must be given for rope_type 'linear'"),
        (lambda: tables.linear(rotary_dim=8, factor=0.0), ValueError, r"factor must be finite and above 0, got 0.0; "),
        (
            lambda: tables.dynamic(rotary_dim=2, factor=2.0, max_position_embeddings=8),
            ValueError,
            r"rotary_dim must be at least 4 for 'dynamic', got 2; ",
        ),
        (
            lambda: tables.dynamic(rotary_dim=8, factor=0.5, max_position_embeddings=8),
            ValueError,
            r"factor must be finite and at least 1, got 0.5; ",
        ),
        (
            lambda: tables.dynamic(rotary_dim=8, factor=2.0, max_position_embeddings=8, seq_len=0),
            ValueError,
            r"seq_len must be at least 1, got 0; ",
        ),
        (
            lambda: tables.yarn(rotary_dim=8, original_max_position_embeddings=64),
            TypeError,
            r"factor or max_position_embeddings must be given for rope_type 'yarn', got None; ",
        ),
        (
            lambda: tables.yarn(rotary_dim=8, factor=2.0, original_max_position_embeddings=64, beta_fast=1, beta_slow=2),
            ValueError,
            r"beta_fast must be at least beta_slow = 2, got 1; ",
        ),
        (
            lambda: tables.yarn(rotary_dim=8, factor=2.0, original_max_position_embeddings=64, beta_fast=-1),
            ValueError,
            r"beta_fast must be finite and above 0, got -1; ",
        ),
        (
            lambda: tables.yarn(rotary_dim=8, factor=2.0, original_max_position_embeddings=64, beta_slow=-1),
            ValueError,
            r"beta_slow must be finite and above 0, got -1; ",
        ),
        (
            lambda: tables.longrope(
                rotary_dim=8, short_factor=[1.0] * 3, long_factor=[1.0] * 4, original_max_position_embeddings=64, factor=2.0
            ),
            ValueError,
            r"short_factor must have rotary_dim / 2 = 4 numbers, got 3; ",
        ),
        (
            lambda: tables.longrope(
                rotary_dim=4, short_factor=[1.0, 0.0], long_factor=[1.0] * 2, original_max_position_embeddings=64, factor=2.0
            ),
            ValueError,
            r"short_factor must be finite and above 0, got 0.0; ",
        ),
        (
            lambda: tables.from_config(LLAMA_31 | {"high_freq_factor": 1.0}, 128),
            ValueError,
            r"high_freq_factor must be above low_freq_factor = 1, got 1; ",
        ),
        (
            lambda: tables.proportional(rotary_dim=8, partial_rotary_factor=1.5),
            ValueError,
            r"partial_rotary_factor must be in \[0, 1\], got 1.5; ",
        ),
        (
            lambda: tables.proportional(rotary_dim=8, partial_rotary_factor=-0.5),
            ValueError,
            r"partial_rotary_factor must be finite and at least 0, got -0.5; ",
        ),
        (lambda: tables.from_config([], 64), TypeError, r"rope_parameters must be a mapping, got list; "),
        (
            lambda: tables.from_config({"full_attention": GEMMA_4}, 64),
            ValueError,
            r"must be one flat mapping, got one for each of \['full_attention'\]; ",
        ),
        (
            lambda: tables.from_config({"partial_rotary_factor": 0.3}, 64),
            ValueError,
            r"rotary_dim must be even, got 19; ",
        ),
        (lambda: tables.cos_sin(_F[None], 4), ValueError, r"inv_freq must be floating point of shape \(P,\), got .*\(1, 4\); "),
        (lambda: tables.cos_sin(_F, -1), ValueError, r"positions must be at least 0, got -1; "),
        (lambda: tables.cos_sin(_F, torch.ones(3)), TypeError, r"positions must be int32 or int64, got torch.float32; "),
        (lambda: tables.cos_sin(_F, 4, scaling=0.0), ValueError, r"scaling must be finite and above 0, got 0.0; "),
        (lambda: tables.fused_cos_sin(_F, 4, dtype=torch.int32), TypeError, r"dtype must be a floating-point dtype, got torch.int32; "),
        (lambda: tables.fused_cos_sin(_F, 4, dtype=_F), TypeError, r"dtype must be a floating-point dtype, got Tensor; "),
    ],
)  # fmt: skip
def test_bad_arguments_name_the_argument_the_contract_and_a_fix(
    call: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=r"^rope_tables: .*" + message):
        call()
