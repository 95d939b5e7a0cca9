"""What the tests of RoPE share: an oracle, calls to make, the error budget, and ways to look at memory.

The oracle shares nothing with the package: positions by loops over Python integers, angles as fractions reduced by a
π of sixty digits, the rotation as a product of complex numbers. Shape legend: B batch, T tokens, H heads, D features of
a head, P rotated pairs, R table rows.
"""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusewise.ops.rope._op import IMPLEMENTATIONS, unavailable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
ROWS = 64
BASE = 10_000.0
Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # the elements of pairs, of every token and head
TWO_PI = 2 * Fraction("3.14159265358979323846264338327950288419716939937510582097494459")


# Implementations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """An implementation and the device whose tensors it gets; on a CPU, Triton is the interpreter."""

    impl: str
    device: str

    def __str__(self) -> str:
        return f"{self.impl}-{'interpreter' if (self.impl, self.device) == ('triton', 'cpu') else self.device}"


def places(*, compiled: bool = True, interpreted: bool = True) -> list[Any]:
    """Every implementation on every device it serves, as parameters with the mark that says where they can run. A new
    implementation joins by being listed in the operator."""
    devices = {"reference": ("cpu", "cuda"), "cpu": ("cpu",), "triton": ("cpu", "cuda")}
    found = []
    for impl in IMPLEMENTATIONS:
        for device in devices.get(impl, ("cuda",)):
            place = Place(impl, device)
            interpreter = (impl, device) == ("triton", "cpu")
            if interpreted if interpreter else compiled:
                marks = [pytest.mark.gpu] if device == "cuda" else [pytest.mark.interpreter] if interpreter else []
                found.append(pytest.param(place, marks=marks, id=str(place)))
    return found


def require(place: Place, dtype: torch.dtype = torch.float32) -> None:
    """Skip where the implementation cannot serve: a native kernel without a compiler."""
    reason = unavailable(place.impl, place.device, dtype)
    if reason is not None:
        pytest.skip(reason)


# Calls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call by what distinguishes it; `make` gives it tensors."""

    name: str
    batch: int = 2
    tokens: int = 5
    heads: int = 4
    kv_heads: int | None = 2  # None: q alone
    head_dim: int = 16
    k_head_dim: int | None = None
    layout: str = "bshd"
    memory: str = "contiguous"
    dtype: str = "fp32"
    table: str = "half"
    table_dtype: str = "fp32"
    pairing: str = "half"
    rotary_dim: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # further keyword arguments; tensors of the CPU

    @property
    def pairs(self) -> int:
        return (self.rotary_dim or self.head_dim) // 2


@dataclass(frozen=True)
class Call:
    """The rotated tensors and the keyword arguments of a call."""

    xs: tuple[Tensor, ...]
    kwargs: dict[str, Any]

    def double(self) -> Call:
        """The same in float64: the values are those that the rounded inputs have."""
        kwargs = {
            name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in self.kwargs.items()
        }
        return Call(tuple(x.detach().double() for x in self.xs), kwargs)


def make(case: Case, device: str = "cpu") -> Call:
    """Tensors for a case; the same values on every device."""
    shape = functools.partial(_shape, case.layout, case.batch, case.tokens)
    dtype = DTYPES[case.dtype]
    heads = [(case.heads, case.head_dim)]
    if case.kv_heads is not None:
        heads.append((case.kv_heads, case.k_head_dim or case.head_dim))
    if case.memory == "packed":
        h_dim = 1 if case.layout in ("bhsd", "thd") else 2
        widths = [count for count, _ in heads]
        qkv = torch.randn(shape(sum(widths) + 1, case.head_dim), dtype=torch.float32).to(dtype).to(device)
        xs = tuple(qkv.split([*widths, 1], dim=h_dim)[: len(heads)])
    else:
        xs = tuple(allocate(shape(*h), case.memory, dtype, device) for h in heads)
    kwargs = {
        **make_table(case.table, case.pairs, case.batch, DTYPES[case.table_dtype], case.pairing),
        "layout": case.layout, "pairing": case.pairing, "rotary_dim": case.rotary_dim, **case.options,
    }  # fmt: skip
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    for name in ("cos", "sin", "positions"):  # strides survive a copy to a device only where memory is dense
        if isinstance(kwargs.get(name), Tensor) and moved[name].stride() != kwargs[name].stride():
            moved[name] = copy_of((kwargs[name],), device)[0][0]
    return Call(xs, moved)


def _shape(layout: str, batch: int, tokens: int, heads: int, width: int) -> tuple[int, ...]:
    return {
        "bshd": (batch, tokens, heads, width),
        "sbhd": (tokens, batch, heads, width),
        "bhsd": (batch, heads, tokens, width),
        "thd": (tokens, heads, width),
    }[layout]


def allocate(shape: tuple[int, ...], memory: str, dtype: torch.dtype, device: str) -> Tensor:
    """Random values in memory of a kind: every stride and alignment that a caller's view may have."""
    *outer, width = shape

    def randn(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=torch.float32).to(dtype).to(device)

    if memory == "contiguous":
        return randn(*shape)
    if memory == "misaligned":  # off by one element from an aligned address
        return randn(math.prod(shape) + 1)[1:].view(shape)
    if memory == "sliced":  # part of a wider head, aligned
        return randn(*outer, width + 24)[..., 8 : 8 + width]
    if memory == "odd":  # nothing aligned: odd strides, odd start
        return randn(*outer, width + 3)[..., 1 : 1 + width]
    if memory == "swapped":  # the two dimensions before the heads' features in the other order
        return randn(*outer[:-2], outer[-1], outer[-2], width).transpose(-2, -3)
    if memory == "outer-swapped":  # the first two dimensions in the other order
        return randn(outer[1], outer[0], *shape[2:]).transpose(0, 1)
    if memory == "gaps":  # every second token and head
        return randn(*(2 * n for n in outer), width)[tuple(slice(None, None, 2) for _ in outer)]
    if memory == "expanded":
        return randn(1, *shape[1:]).expand(shape)
    raise ValueError(f"no such memory: {memory}")


def make_table(kind: str, pairs: int, batch: int, dtype: torch.dtype, pairing: str = "half") -> dict[str, Tensor]:
    """One form of the table as keyword arguments; rows are not those of a sensible rotation but all different, so that
    no two entries can stand for each other."""
    inv_freq = BASE ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    if kind == "inv_freq":
        return {"inv_freq": inv_freq.to(dtype)}
    if kind == "inv_freq-strided":
        return {"inv_freq": inv_freq.to(dtype).repeat_interleave(2)[::2]}
    angles = torch.arange(ROWS, dtype=torch.float64)[:, None] * inv_freq
    if "batched" in kind:
        angles = torch.stack([angles + 0.1 * b for b in range(batch)])
    if "lead" in kind:
        angles = angles[None]
    if kind == "complex":
        pairs_of = torch.view_as_real(torch.polar(torch.ones_like(angles), angles).to(torch.complex64))
        return {"cos": pairs_of[..., 0], "sin": pairs_of[..., 1]}
    if "duplicated" in kind:
        repeated = pairing == "interleaved"
        angles = angles.repeat_interleave(2, -1) if repeated else torch.cat((angles, angles), -1)
        # Only one half may be read: the other is not the rotation's.
        unread = torch.zeros(angles.shape[-1], dtype=torch.bool)
        unread[slice(1, None, 2) if repeated else slice(pairs, None)] = True
    if "angles" in kind:
        return {"angles": angles.to(dtype)}
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if "duplicated" in kind:
        cos[..., unread] = sin[..., unread] = float("nan")
    if "fused" in kind:
        return {"cos_sin": torch.cat((cos, sin), -1)}
    if "strided" in kind:  # rows and columns apart, and nothing aligned
        cos, sin = (torch.stack((x, x), -1).repeat_interleave(2, -3)[..., ::2, :, 1] for x in (cos, sin))
    return {"cos": cos, "sin": sin}


# The oracle -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What a call has to give for one tensor, in its shape."""

    exact: Tensor  # float64; NaN where the position has no table row
    eager: Tensor  # the same-dtype composition of torch functions a user would write
    size: Tensor  # float64: the modulus of the feature's pair, to which errors of float32 arithmetic are relative
    rotated: Tensor  # bool
    passed: Tensor  # elsewhere: the bits of x, regrouped in a padding token if the output's pairing is another
    angle_error: float  # what float64 arithmetic leaves of the largest angle, in radians


def expected(call: Call) -> tuple[Expected, ...]:
    """The oracle, for each tensor of a call."""
    pairs = (call.kwargs.get("rotary_dim") or call.xs[0].shape[-1]) // 2
    return tuple(_expected(x.detach(), call.kwargs, pairs) for x in call.xs)


def _expected(x: Tensor, kwargs: dict[str, Any], pairs: int) -> Expected:
    layout = kwargs.get("layout", "bshd")
    x_BTHD = to_bthd(x.cpu(), layout)
    turn_BTP, padding_T, largest = _turns(kwargs, x_BTHD.shape[0], x_BTHD.shape[1], pairs)
    turn = turn_BTP[:, :, None]
    cos, sin = turn.real.to(x.dtype), turn.imag.to(x.dtype)

    def product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.complex(a.double(), b.double()) * turn
        return z.real, z.imag

    def eager(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * cos - b * sin, b * cos + a * sin

    def modulus(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.complex(a.double(), b.double()).abs() * turn.abs().nan_to_num(1.0)
        return z, z

    def identity(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a, b

    rotated = torch.zeros(x_BTHD.shape, dtype=torch.bool)
    first = kwargs.get("rotary_start", 0) % x.shape[-1]
    rotated[:, [not padding for padding in padding_T], :, first : first + 2 * pairs] = True

    def apply(rotate: Rotate, otherwise: Tensor) -> Tensor:
        return from_bthd(_apply(x_BTHD, otherwise, rotate, kwargs, pairs, padding_T), layout).to(x.device)

    return Expected(
        exact=apply(product, x_BTHD.double()),
        eager=apply(eager, x_BTHD),
        size=apply(modulus, x_BTHD.double().abs()),
        rotated=from_bthd(rotated, layout).to(x.device),
        passed=apply(identity, x_BTHD),
        angle_error=largest * 2.0**-52,
    )


def _apply(
    x: Tensor,
    otherwise: Tensor,
    rotate: Rotate,
    kwargs: dict[str, Any],
    pairs: int,
    padding: list[bool],
) -> Tensor:
    """`otherwise` with the rotated features of x replaced by `rotate` of their pairs."""
    first = kwargs.get("rotary_start", 0) % x.shape[-1]
    pairing = kwargs.get("pairing", "half")
    part = x[..., first : first + 2 * pairs]
    interleaved = pairing in ("interleaved", "interleaved_to_half")
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :pairs], part[..., pairs:])
    interleaved = pairing in ("interleaved", "half_to_interleaved")

    def join(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)

    y = join(*rotate(a, b))
    y[:, padding] = join(a, b)[:, padding].to(y.dtype)
    result = otherwise.clone().to(y.dtype)
    result[..., first : first + 2 * pairs] = y
    return result


def _turns(kwargs: dict[str, Any], batch: int, tokens: int, pairs: int) -> tuple[Tensor, list[bool], float]:
    """e^{iθ} of every token and pair, complex128 (B, T, P); which tokens are padding; the largest angle."""
    kwargs = {name: v.cpu() if isinstance(v, Tensor) else v for name, v in kwargs.items()}
    axes = section_axes(kwargs.get("sections"), kwargs.get("sections_interleaved", False), pairs)
    turns = torch.ones(batch, tokens, pairs, dtype=torch.complex128)
    padding = [False] * tokens
    largest = 0.0
    for b in range(batch):
        for t in range(tokens):
            place = position(kwargs, b, t, tokens)
            if place is None:
                padding[t] = True
                continue
            rows = torch.stack([_row(kwargs, b, p, pairs) for p in place])
            turns[b, t] = rows.gather(0, axes[None])[0]
            if "inv_freq" in kwargs and pairs:
                largest = max(largest, max(map(abs, place)) * float(kwargs["inv_freq"].max()))
    return (turns.conj() if kwargs.get("inverse") else turns).resolve_conj(), padding, largest


def section_axes(sections: tuple[int, int, int] | None, interleaved: bool, pairs: int) -> Tensor:
    """The position axis of each pair: blocks (Qwen2-VL), or dealt in turn with what is left over on t (Qwen3-VL)."""
    if sections is None:
        return torch.zeros(pairs, dtype=torch.int64)
    t, h, w = sections
    if not interleaved:
        return torch.tensor([0] * t + [1] * h + [2] * w)
    axes = [0] * pairs
    for axis, count in ((1, h), (2, w)):
        for pair in range(axis, min(3 * count, pairs), 3):
            axes[pair] = axis
    return torch.tensor(axes)


def position(kwargs: dict[str, Any], b: int, t: int, tokens: int) -> tuple[int, int, int] | None:
    """The (t, h, w) position of token t of batch entry b; None past the last sequence."""
    positions = kwargs.get("positions")
    if positions is not None:
        axes = list(positions) if kwargs.get("sections") else [positions] * 3
        p_t, p_h, p_w = (int(p[t] if p.dim() == 1 else p[b % len(p), t]) for p in axes)
        return p_t, p_h, p_w
    rank, size = kwargs.get("context_parallel") or (0, 1)
    sequence, local, length = b, t, tokens
    if kwargs.get("cu_seqlens") is not None:
        bounds = [bound // size for bound in kwargs["cu_seqlens"].tolist()]
        if t >= bounds[-1]:
            return None
        sequence = next(s for s in range(len(bounds) - 1) if bounds[s] <= t < bounds[s + 1])
        local, length = t - bounds[sequence], bounds[sequence + 1] - bounds[sequence]
    whole = list(range(length * size))
    if size > 1:
        chunks = [whole[c * length // 2 : (c + 1) * length // 2] for c in range(2 * size)]
        whole = chunks[rank] + chunks[2 * size - 1 - rank]
    offset = kwargs.get("offset", 0)
    place = whole[local] + (int(offset[sequence]) if isinstance(offset, Tensor) else offset)
    return place, place, place


def _row(kwargs: dict[str, Any], b: int, place: int, pairs: int) -> Tensor:
    """e^{iθ} of every pair at a position, complex128 (P,)."""
    scale = kwargs.get("scale", 1.0)
    if "inv_freq" in kwargs:
        return torch.tensor([exact_turn(place, f) for f in kwargs["inv_freq"].tolist()], dtype=torch.complex128) * scale
    table = next(kwargs[name] for name in ("cos", "cos_sin", "angles") if name in kwargs)
    if not 0 <= place < table.shape[-2]:
        return torch.full((pairs,), complex("nan+nanj"), dtype=torch.complex128)

    def entries(table: Tensor) -> Tensor:
        row = (table if table.dim() == 2 else table[b % len(table)])[place].double()
        if len(row) == pairs:
            return row
        return row[::2] if kwargs.get("pairing") == "interleaved" else row[:pairs]

    if "angles" in kwargs:
        return torch.polar(torch.ones(pairs, dtype=torch.float64), entries(table)) * scale
    if "cos_sin" in kwargs:
        row = (table if table.dim() == 2 else table[b % len(table)])[place].double()
        return torch.complex(row[:pairs], row[pairs:])
    return torch.complex(entries(table), entries(kwargs["sin"]))


@functools.cache
def exact_turn(place: int, frequency: float) -> complex:
    """e^{i · place · frequency}, the product exact and reduced exactly."""
    angle = place * Fraction(frequency)
    reduced = float(angle - round(angle / TWO_PI) * TWO_PI)
    return complex(math.cos(reduced), math.sin(reduced))


def to_bthd(x: Tensor, layout: str) -> Tensor:
    return x[None] if layout == "thd" else x.movedim({"bshd": 1, "sbhd": 0, "bhsd": 2}[layout], 1)


def from_bthd(x: Tensor, layout: str) -> Tensor:
    return x[0] if layout == "thd" else x.movedim(1, {"bshd": 1, "sbhd": 0, "bhsd": 2}[layout])


# The error budget -------------------------------------------------------------------------------------------------


def assert_right(y: Tensor, x: Tensor, want: Expected) -> None:
    """y is the rotation of x: what does not rotate has the bits of x, what has no table row is NaN, and the rest is
    within the budget."""
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert_bits(y[~want.rotated], want.passed[~want.rotated])
    actual, exact, eager, size = (part[want.rotated] for part in (y, want.exact, want.eager, want.size))
    assert torch.equal(actual.isnan(), exact.isnan()), "NaN where there is a table row, or none where there is no row"
    there = ~exact.isnan()
    assert_within_budget(actual[there], exact[there], eager[there])
    assert_rounded_once(actual[there], exact[there], size[there], want.angle_error)


def assert_within_budget(actual: Tensor, exact: Tensor, eager: Tensor) -> None:
    """The error is at most twice that of same-dtype eager plus half a unit in the last place, in maximum and RMS."""
    if actual.numel() == 0:
        return
    half_unit = torch.finfo(actual.dtype).eps / 2
    norms = {"maximum": lambda e: e.abs().max(), "RMS": lambda e: e.square().mean().sqrt()}
    for name, norm in norms.items():
        error, of_eager, band = norm(actual - exact), norm(eager - exact), half_unit * norm(exact)
        assert error <= 2 * (of_eager + band), f"{name} error {error:.3e}; eager {of_eager:.3e}, rounding {band:.3e}"


def assert_rounded_once(actual: Tensor, exact: Tensor, size: Tensor, angle_error: float = 0.0) -> None:
    """Element by element: one rounding to the dtype, after arithmetic in float32 (float64 for float64), of which cos
    and sin, two products and a sum each contribute at most half a unit in the last place of the pair's modulus."""
    arithmetic = torch.finfo(torch.float64 if actual.dtype == torch.float64 else torch.float32)
    info = torch.finfo(actual.dtype)
    # Triton's interpreter cuts a float32 off where a GPU rounds it to bfloat16.
    unit = info.eps if INTERPRETER and actual.dtype == torch.bfloat16 else info.eps / 2
    allowed = unit * exact.abs() + (2 * arithmetic.eps + angle_error) * size + info.tiny * info.eps
    error = (actual.double() - exact).abs()
    if error.numel():
        worst = int((error - allowed).argmax())
        assert error[worst] <= allowed[worst], (
            f"got {actual[worst]}, exactly {exact[worst]}, allowed {allowed[worst]:.3e}"
        )


def assert_bits(a: Tensor, b: Tensor) -> None:
    """Equal bit for bit, NaNs and signs of zeros included."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    assert torch.equal(a.contiguous().view(integers), b.contiguous().view(integers)), "bits differ"


# Memory -----------------------------------------------------------------------------------------------------------


def copy_of(xs: tuple[Tensor, ...], device: str | None = None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """The tensors again, with the same strides and start in copies of their whole storages, and those storages; what
    shares a storage shares one again."""
    storages: dict[int, Tensor] = {}
    copies = []
    for x in xs:
        key = x.untyped_storage().data_ptr()
        if key not in storages:
            flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.detach().untyped_storage())
            storages[key] = flat.clone() if device is None else flat.to(device, copy=True)
        copies.append(storages[key].as_strided(x.shape, x.stride(), x.storage_offset()))
    return tuple(copies), list(storages.values())


def poisoned_like(xs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """`copy_of` filled with NaN."""
    copies, storages = copy_of(xs)
    for storage in storages:
        storage.fill_(float("nan"))
    return copies, storages


def assert_neighbours(before: list[Tensor], after: list[Tensor], xs: tuple[Tensor, ...]) -> None:
    """Outside the tensors xs, which are views of them, storages have the bits that they had."""
    for old, new in zip(before, after, strict=True):
        untouched = torch.ones(new.shape, dtype=torch.bool, device=new.device)
        for x in xs:
            if x.untyped_storage().data_ptr() == new.untyped_storage().data_ptr():
                untouched.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
        assert_bits(old[untouched], new[untouched])


class Operators(TorchDispatchMode):
    """Counts the operators that run inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func.name())] += 1
        return func(*args, **(kwargs or {}))


def pairs_of(xs: tuple[Any, ...], result: Any) -> Iterator[tuple[Any, Any]]:
    """(input, output) of a call that returns one tensor for q, or a tuple for q and k."""
    return zip(xs, result if isinstance(result, tuple) else (result,), strict=True)
