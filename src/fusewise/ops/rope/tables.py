"""Inverse frequencies of every RoPE variant in use, and cos/sin tables made from them. Imports only torch.

    angle(position p, pair i) = p * inv_freq[i]        table entry = scaling * cos(angle), scaling * sin(angle)

One function per variant, named as in the `rope_type` field of a transformers configuration, with that configuration's
keys as keyword arguments: `default`, `linear`, `dynamic`, `yarn`, `longrope`, `llama3`, `proportional`. All return
`(inv_freq, scaling)`: float32 inverse frequencies (P,) on the CPU, in radians per position, and the factor applied to
cos and sin (`attention_scaling`; 1.0 except for yarn and longrope). Everything is computed in float64 and rounded once.
P = rotary_dim / 2 rotated pairs, R table rows.

A wrong type is a TypeError and a value out of range a ValueError, `rope_tables: <argument> must <contract>, got
<value>; <one fix>`. Nothing is cached: a caller that needs a table again keeps it, as `fusewise.nn.RotaryEmbedding` does.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from .._common import MAX_POSITION, check_bool, check_count, check_one_of, shown

Frequencies = tuple[Tensor, float]


def default(*, rotary_dim: int, base: float = 10000.0) -> Frequencies:
    """inv_freq[i] = base^(-2i / rotary_dim), scaling 1 (RoFormer, arXiv:2104.09864).

    Args:
        rotary_dim: number of rotated features, even, at least 2; with partial rotation only the rotated part.
        base: `rope_theta`, above 1.
    """
    return _inverse_powers(rotary_dim, base).float(), 1.0


def linear(*, rotary_dim: int, base: float = 10000.0, factor: float) -> Frequencies:
    """inv_freq[i] = base^(-2i / rotary_dim) / factor, scaling 1: position interpolation (arXiv:2306.15595); factor above 0."""
    return (_inverse_powers(rotary_dim, base) / _number("factor", factor, above=0)).float(), 1.0


def dynamic(
    *,
    rotary_dim: int,
    base: float = 10000.0,
    factor: float,
    max_position_embeddings: int,
    seq_len: int | None = None,
) -> Frequencies:
    """`default` with the base increased to base * (factor * L / M - factor + 1)^(rotary_dim / (rotary_dim - 2)),
    scaling 1: NTK-aware interpolation, M = max_position_embeddings, L = max(seq_len, M).

    Up to M positions this equals `default`; a longer sequence needs other frequencies.
    """
    dim = _rotary_dim(rotary_dim)
    if dim < 4:
        raise ValueError(f"rope_tables: rotary_dim must be at least 4 for 'dynamic', got {dim}; use 'default'")
    trained = _count("max_position_embeddings", max_position_embeddings)
    length = max(trained, 0 if seq_len is None else _count("seq_len", seq_len))
    growth = _number("factor", factor, at_least=1) * (length / trained) - (factor - 1)
    grown = _number("base", base, above=1) * growth ** (dim / (dim - 2))
    return _inverse_powers(dim, grown).float(), 1.0


def yarn(
    *,
    rotary_dim: int,
    base: float = 10000.0,
    factor: float | None = None,
    original_max_position_embeddings: int,
    max_position_embeddings: int | None = None,
    attention_factor: float | None = None,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> Frequencies:
    """inv_freq = f * (1 - ramp) + f / factor * ramp with f of `default` (YaRN, arXiv:2309.00071).

    ramp[i] = clamp((i - low) / (high - low), 0, 1), where low and high are the pairs that rotate beta_fast (32) and
    beta_slow (1) times over the original context: pair(n) = rotary_dim ln(original / (2 pi n)) / (2 ln base), rounded
    outwards if `truncate`. Scaling: `attention_factor` if given; else m(mscale) / m(mscale_all_dim) if both are given and
    not zero (DeepSeek); else m(1); m(s) = 1 + 0.1 s ln(factor).

    Args:
        factor: None: max_position_embeddings / original_max_position_embeddings.
    """
    dim, base = _rotary_dim(rotary_dim), _number("base", base, above=1)
    original = _count("original_max_position_embeddings", original_max_position_embeddings)
    factor = _context_ratio("yarn", factor, max_position_embeddings, original)
    fast = _number("beta_fast", _given(beta_fast, 32), above=0)
    slow = _number("beta_slow", _given(beta_slow, 1), above=0)
    check_bool("rope_tables", "truncate", truncate, "pass the configuration's truncate")
    if fast < slow:
        raise ValueError(f"rope_tables: beta_fast must be at least beta_slow = {slow:g}, got {fast:g}; swap the two")

    def pair_turning(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_turning(fast), pair_turning(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(0, 1)
    trained = _inverse_powers(dim, base)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 1.0 + 0.1 * weight * math.log(factor)

    of_some, of_all = _given(mscale, None), _given(mscale_all_dim, None)
    if attention_factor is not None:
        scaling = _number("attention_factor", attention_factor, above=0)
    elif of_some is not None and of_all is not None:
        scaling = magnitude(_number("mscale", of_some, at_least=0)) / magnitude(
            _number("mscale_all_dim", of_all, at_least=0)
        )
    else:
        scaling = magnitude(1.0)
    return (trained * (1 - ramp) + trained / factor * ramp).float(), scaling


def longrope(
    *,
    rotary_dim: int,
    base: float = 10000.0,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position_embeddings: int,
    max_position_embeddings: int | None = None,
    factor: float | None = None,
    attention_factor: float | None = None,
    seq_len: int | None = None,
) -> Frequencies:
    """inv_freq[i] = base^(-2i / rotary_dim) / ext[i] (LongRoPE, arXiv:2402.13753); ext is `long_factor` if seq_len is
    above original_max_position_embeddings, else `short_factor`, P numbers each.

    Scaling: `attention_factor` if given, else sqrt(1 + ln(factor) / ln(original)) for factor > 1, else 1.

    Args:
        factor: None: max_position_embeddings / original_max_position_embeddings.
        seq_len: None: the short factors.
    """
    dim = _rotary_dim(rotary_dim)
    original = _count("original_max_position_embeddings", original_max_position_embeddings, least=2)
    lists = {"short_factor": short_factor, "long_factor": long_factor}
    for name, values in lists.items():
        counted = (
            isinstance(values, Sized) and getattr(values, "shape", None) != ()
        )  # a zero-dimensional array has no length
        if not counted or isinstance(values, (str, bytes)):
            raise TypeError(f"rope_tables: {name} must be a sequence of numbers, got {shown(values)}; pass a list")
        if len(values) != dim // 2:
            raise ValueError(
                f"rope_tables: {name} must have rotary_dim / 2 = {dim // 2} numbers, got {len(values)}; "
                "give one for each rotated pair"
            )
        for value in values:
            _number(name, value, above=0)
    longer = seq_len is not None and _count("seq_len", seq_len) > original
    extension = torch.tensor([*lists["long_factor" if longer else "short_factor"]], dtype=torch.float64, device="cpu")
    if attention_factor is not None:
        scaling = _number("attention_factor", attention_factor, above=0)
    else:
        ratio = _context_ratio("longrope", factor, max_position_embeddings, original)
        scaling = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    return (_inverse_powers(dim, base) / extension).float(), scaling


def llama3(
    *,
    rotary_dim: int,
    base: float = 10000.0,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Frequencies:
    """inv_freq = f / factor * (1 - s) + f * s with f of `default`, scaling 1 (Llama 3.1 report, arXiv:2407.21783).

    s = clamp((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1), where turns =
    original_max_position_embeddings * f / (2 pi) is the number of rotations of a pair over the original context: slow
    pairs are interpolated, fast ones kept.
    """
    low = _number("low_freq_factor", low_freq_factor, above=0)
    high = _number("high_freq_factor", high_freq_factor, above=0)
    if high <= low:
        raise ValueError(
            f"rope_tables: high_freq_factor must be above low_freq_factor = {low:g}, got {high:g}; swap the two"
        )
    original = _count("original_max_position_embeddings", original_max_position_embeddings)
    trained = _inverse_powers(rotary_dim, base)
    kept = ((original * trained / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return (trained / _number("factor", factor, above=0) * (1 - kept) + trained * kept).float(), 1.0


def proportional(
    *, rotary_dim: int, base: float = 10000.0, partial_rotary_factor: float = 1.0, factor: float = 1.0
) -> Frequencies:
    """inv_freq[i] = base^(-2i / rotary_dim) / factor for i < A = floor(partial_rotary_factor * rotary_dim / 2) and 0 for
    the others, scaling 1 (Gemma 4's full-attention layers).

    This is not partial rotation: `rotary_dim` and the exponent's divisor are the whole head, and the "half" pairing is
    (i, i + rotary_dim / 2) over the whole head; the zero frequencies leave features A … rotary_dim / 2 - 1 and their
    partners unchanged. Partial rotation rotates the first 2A features, pairs (i, i + A), with exponent divisor 2A.
    """
    dim = _rotary_dim(rotary_dim)
    share = _number("partial_rotary_factor", partial_rotary_factor, at_least=0)
    if share > 1:
        raise ValueError(f"rope_tables: partial_rotary_factor must be in [0, 1], got {share:g}; give the share rotated")
    inverse = _inverse_powers(dim, base) / _number("factor", factor, above=0)
    inverse[int(share * dim // 2) :] = 0
    return inverse.float(), 1.0


BUILDERS: dict[str, Callable[..., Frequencies]] = {
    "default": default,
    "linear": linear,
    "dynamic": dynamic,
    "yarn": yarn,
    "longrope": longrope,
    "llama3": llama3,
    "proportional": proportional,
}

# other names of the same formulas in published configurations: multimodal default and early Phi-3 longrope
_ALIASES = {"mrope": "default", "su": "longrope"}


def inv_freq(rope_type: str = "default", *, rotary_dim: int, base: float = 10000.0, **parameters: Any) -> Frequencies:
    """`(inv_freq, scaling)` of the builder named `rope_type`; `rotary_dim` and `base` as in `default`, `parameters` are that
    builder's other keyword arguments.

    Raises:
        ValueError: unknown rope_type, or a value out of range.
        TypeError: an unknown or missing parameter, or one of the wrong type.
    """
    builder = _builder(rope_type)
    accepted = inspect.signature(builder).parameters
    for name in parameters:
        if name not in accepted:
            raise TypeError(
                f"rope_tables: parameters of rope_type {rope_type!r} must be among {', '.join(accepted)}, got {name!r}; "
                "rename or remove it"
            )
    for name, parameter in accepted.items():
        if parameter.default is parameter.empty and name != "rotary_dim" and parameters.get(name) is None:
            raise TypeError(f"rope_tables: {name} must be given for rope_type {rope_type!r}, got None; pass {name}=")
    return builder(rotary_dim=rotary_dim, base=base, **parameters)


def arguments_from_config(
    rope_parameters: Mapping[str, Any],
    head_dim: int,
    seq_len: int | None = None,
    *,
    max_position_embeddings: int | None = None,
) -> dict[str, Any]:
    """The arguments of `inv_freq` for the `rope_parameters` (or older `rope_scaling`) of a model configuration.

    Args:
        rope_parameters: flat dictionary with transformers' keys; `rope_type` or the older `type` (absent: "default"),
            `rope_theta` (absent: 10000), `partial_rotary_factor` (absent: 1; the rotary width is then
            int(head_dim * partial_rotary_factor), except for "proportional", which covers the whole head). Keys that the
            type does not use are ignored, as configurations contain model-specific keys.
        head_dim: features of a head.
        seq_len: current sequence length; only "dynamic" and "longrope" depend on it.
        max_position_embeddings: the configuration's field of that name; needed by "dynamic", and if `factor`
            (yarn, longrope) or `original_max_position_embeddings` (yarn, longrope, llama3) is absent from the dictionary.
    """
    if not isinstance(rope_parameters, Mapping):
        kind = type(rope_parameters).__name__
        raise TypeError(f"rope_tables: rope_parameters must be a mapping, got {kind}; pass the dictionary")
    if rope_parameters and all(isinstance(value, Mapping) for value in rope_parameters.values()):
        layer_types = list(rope_parameters)
        raise ValueError(
            f"rope_tables: rope_parameters must be one flat mapping, got one for each of {layer_types}; "
            f"pass rope_parameters[{layer_types[0]!r}]"
        )
    rope_type = rope_parameters.get("rope_type") or rope_parameters.get("type") or "default"
    if isinstance(rope_type, str):
        rope_type = _ALIASES.get(rope_type, rope_type)
    accepted = inspect.signature(_builder(rope_type)).parameters.keys() - {"rotary_dim", "base"}
    given = {key: value for key, value in rope_parameters.items() if key in accepted and value is not None}
    if max_position_embeddings is not None:
        given["max_position_embeddings"] = max_position_embeddings
        given.setdefault("original_max_position_embeddings", max_position_embeddings)
    if seq_len is not None:
        given["seq_len"] = seq_len
    theta, share = rope_parameters.get("rope_theta"), rope_parameters.get("partial_rotary_factor")
    if share is None or "partial_rotary_factor" in accepted:
        share = 1.0
    return {
        "rope_type": rope_type,
        "rotary_dim": int(_count("head_dim", head_dim) * _number("partial_rotary_factor", share, above=0)),
        "base": 10000.0 if theta is None else theta,
        **{key: value for key, value in given.items() if key in accepted},
    }


def from_config(
    rope_parameters: Mapping[str, Any],
    head_dim: int,
    seq_len: int | None = None,
    *,
    max_position_embeddings: int | None = None,
) -> Frequencies:
    """`(inv_freq, scaling)` of a model configuration; arguments as in `arguments_from_config`."""
    return inv_freq(
        **arguments_from_config(rope_parameters, head_dim, seq_len, max_position_embeddings=max_position_embeddings)
    )


def cos_sin(
    inv_freq: Tensor,
    positions: int | Tensor,
    *,
    scaling: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Half-width tables `(cos, sin)`, each `scaling * cos(p * inv_freq)`, of shape (*positions.shape, P).

    Angles, cos and sin are computed in float64 and rounded to `dtype` once: a float32 frequency times a position is
    exact in float64 below 2^29 positions, so the table is correctly rounded at any length in use.

    Args:
        inv_freq: (P,) floating point.
        positions: int R for the rows 0 … R - 1, or an integer tensor of any shape.
        device: device of the tables; None: that of `positions` if it is a tensor, else of `inv_freq`.
    """
    cos, sin = _cos_sin_float64(inv_freq, positions, scaling, dtype, device)
    return cos.to(dtype), sin.to(dtype)


def fused_cos_sin(
    inv_freq: Tensor,
    positions: int | Tensor,
    *,
    scaling: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """The table [cos | sin] of shape (*positions.shape, 2P), the cache format of the serving engines; as `cos_sin`."""
    return torch.cat(_cos_sin_float64(inv_freq, positions, scaling, dtype, device), dim=-1).to(dtype)


def _cos_sin_float64(
    inv_freq: Tensor, positions: int | Tensor, scaling: float, dtype: torch.dtype, device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"rope_tables: dtype must be a floating-point dtype, got {shown(dtype)}; use torch.float32")
    if not isinstance(inv_freq, Tensor):
        kind = type(inv_freq).__name__
        raise TypeError(f"rope_tables: inv_freq must be a torch.Tensor, got {kind}; pass a tensor for inv_freq")
    if inv_freq.dim() != 1 or not inv_freq.is_floating_point():
        raise ValueError(
            f"rope_tables: inv_freq must be floating point of shape (P,), got {inv_freq.dtype} {tuple(inv_freq.shape)}; "
            "pass one frequency for each rotated pair"
        )
    scaling = _number("scaling", scaling, above=0)
    if isinstance(positions, Tensor):
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise TypeError(f"rope_tables: positions must be int32 or int64, got {positions.dtype}; convert them")
        rows = positions.to(device)
    else:
        rows = torch.arange(
            _count("positions", positions, least=0, most=MAX_POSITION), device=device or inv_freq.device
        )
    angles = rows.double()[..., None] * inv_freq.to(rows.device, torch.float64)
    return angles.cos() * scaling, angles.sin() * scaling


def _inverse_powers(rotary_dim: int, base: float) -> Tensor:
    dim = _rotary_dim(rotary_dim)
    return _number("base", base, above=1) ** (torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / -dim)


def _builder(rope_type: str) -> Callable[..., Frequencies]:
    check_one_of("rope_tables", "rope_type", rope_type, BUILDERS)
    return BUILDERS[rope_type]


def _context_ratio(rope_type: str, factor: float | None, extended: int | None, original: int) -> float:
    if factor is not None:
        return _number("factor", factor, above=0)
    if extended is None:
        given = "or max_position_embeddings must be given"
        raise TypeError(f"rope_tables: factor {given} for rope_type {rope_type!r}, got None; pass one of them")
    return _count("max_position_embeddings", extended) / original


def _rotary_dim(value: int) -> int:
    dim = _count("rotary_dim", value, least=2, most=MAX_POSITION)
    if dim % 2:
        raise ValueError(f"rope_tables: rotary_dim must be even, got {dim}; rotate {dim - 1} features")
    return dim


def _count(name: str, value: int, least: int = 1, most: int | None = None) -> int:
    return check_count("rope_tables", name, value, least, most)


def _given(value: Any, default: Any) -> Any:
    """The default for None and for zero, with which configurations omit a number."""
    return default if value is None or (isinstance(value, (int, float)) and value == 0) else value


def _number(name: str, value: float, *, above: float | None = None, at_least: float | None = None) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"rope_tables: {name} must be a number, got {shown(value)}; convert it")
    too_small = (above is not None and value <= above) or (at_least is not None and value < at_least)
    if too_small or not abs(value) <= sys.float_info.max:
        bound = f"above {above:g}" if above is not None else f"at least {at_least:g}"
        raise ValueError(f"rope_tables: {name} must be finite and {bound}, got {value}; correct it")
    return float(value)
