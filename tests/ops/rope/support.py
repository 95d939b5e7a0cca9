"""Shared helpers of the RoPE tests: implementations, test cases, the error budget, and memory checks."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusewise.ops.rope._op import IMPLEMENTATIONS, unavailable

from .oracle import Call, Expected

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
ROWS = 64
BASE = 10_000.0


@contextlib.contextmanager
def inference_with_gradients() -> Iterator[None]:
    with torch.inference_mode(), torch.enable_grad():
        yield


#: In all of these autograd records nothing.
RECORDING_NOTHING = (torch.no_grad, torch.inference_mode, inference_with_gradients)


@dataclass(frozen=True)
class Place:
    """An implementation and the device it runs on; Triton on a CPU is the interpreter."""

    impl: str
    device: str

    def __str__(self) -> str:
        return f"{self.impl}-{'interpreter' if (self.impl, self.device) == ('triton', 'cpu') else self.device}"


def places(*, compiled: bool = True, interpreted: bool = True) -> list[Any]:
    """All implementations on all devices they support, as parameters with marks for where they can run. Includes every
    implementation listed in the operator."""
    alone = {"cpu": ("cpu",), "cuda": ("cuda",)}
    found = []
    for impl in IMPLEMENTATIONS:
        for device in alone.get(impl, ("cpu", "cuda")):
            place = Place(impl, device)
            interpreter = (impl, device) == ("triton", "cpu")
            if interpreted if interpreter else compiled:
                marks = [pytest.mark.gpu] if device == "cuda" else [pytest.mark.interpreter] if interpreter else []
                found.append(pytest.param(place, marks=marks, id=str(place)))
    return found


def require(place: Place, dtype: torch.dtype = torch.float32) -> None:
    """Skip if the implementation is unavailable, as a native kernel without a compiler."""
    reason = unavailable(place.impl, place.device, dtype)
    if reason is not None:
        pytest.skip(reason)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The description of a call; `make` creates its tensors."""

    name: str
    batch: int = 2
    tokens: int = 5
    heads: int = 4
    kv_heads: int | None = 2  # None: no k
    head_dim: int = 16
    k_head_dim: int | None = None
    layout: str = "bshd"
    memory: str = "contiguous"
    dtype: str = "fp32"
    table: str = "half"
    table_dtype: str = "fp32"
    pairing: str = "half"
    rotary_dim: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # further keyword arguments; CPU tensors

    @property
    def pairs(self) -> int:
        return (self.rotary_dim or self.head_dim) // 2


def in_threads(work: Callable[[int], None], count: int = 4) -> None:
    """Run `work(seed)` in several threads concurrently; none may fail or hang."""
    wrong: list[BaseException] = []

    def caught(seed: int) -> None:
        try:
            work(seed)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=caught, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


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
    for name in ("cos", "sin", "positions"):  # a copy to a device preserves strides only of dense tensors
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
    """Random values with a given memory layout; the kinds cover the strides and alignments of callers' views."""
    *outer, width = shape

    def randn(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=torch.float32).to(dtype).to(device)

    if memory == "contiguous":
        return randn(*shape)
    if memory == "misaligned":  # one element past an aligned address
        return randn(math.prod(shape) + 1)[1:].view(shape)
    if memory == "sliced":  # aligned slice of a wider head
        return randn(*outer, width + 24)[..., 8 : 8 + width]
    if memory == "odd":  # unaligned: odd strides, odd start
        return randn(*outer, width + 3)[..., 1 : 1 + width]
    if memory == "swapped":  # the two dimensions before head_dim are transposed in memory
        return randn(*outer[:-2], outer[-1], outer[-2], width).transpose(-2, -3)
    if memory == "outer-swapped":  # the first two dimensions are transposed in memory
        return randn(outer[1], outer[0], *shape[2:]).transpose(0, 1)
    if memory == "gaps":  # every second token and head
        return randn(*(2 * n for n in outer), width)[tuple(slice(None, None, 2) for _ in outer)]
    if memory == "expanded":
        return randn(1, *shape[1:]).expand(shape)
    raise ValueError(f"no such memory: {memory}")


def make_table(kind: str, pairs: int, batch: int, dtype: torch.dtype, pairing: str = "half") -> dict[str, Tensor]:
    """One form of the table as keyword arguments. Entries are all different rather than realistic, so that no entry can be
    confused with another."""
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
        # Only one copy may be read; make the other invalid.
        unread = torch.zeros(angles.shape[-1], dtype=torch.bool)
        unread[slice(1, None, 2) if repeated else slice(pairs, None)] = True
    if "angles" in kind:
        return {"angles": angles.to(dtype)}
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if "duplicated" in kind:
        cos[..., unread] = sin[..., unread] = float("nan")
    if "fused" in kind:
        return {"cos_sin": torch.cat((cos, sin), -1)}
    if "strided" in kind:  # strided rows and columns, unaligned
        cos, sin = (torch.stack((x, x), -1).repeat_interleave(2, -3)[..., ::2, :, 1] for x in (cos, sin))
    return {"cos": cos, "sin": sin}


def assert_right(y: Tensor, x: Tensor, want: Expected) -> None:
    """Check that y is the rotation of x: unrotated features are bitwise equal, positions outside the table give NaN, and the
    rest is within the error budget."""
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert_bits(y[~want.rotated], want.passed[~want.rotated])
    actual, exact, eager, size = (part[want.rotated] for part in (y, want.exact, want.eager, want.size))
    assert torch.equal(actual.isnan(), exact.isnan()), "NaN where there is a table row, or none where there is no row"
    there = ~exact.isnan()
    assert_within_budget(actual[there], exact[there], eager[there], want.angle_error)
    assert_rounded_once(actual[there], exact[there], size[there], want.angle_error)


def assert_within_budget(actual: Tensor, exact: Tensor, eager: Tensor, angle_error: float = 0.0) -> None:
    """Check that the error is at most twice that of same-dtype eager code plus half an ulp, in maximum and RMS. Eager code
    gets exact angles here, so the float64 angle error is added."""
    if actual.numel() == 0:
        return
    half_unit = torch.finfo(actual.dtype).eps / 2
    norms = {"maximum": lambda e: e.abs().max(), "RMS": lambda e: e.square().mean().sqrt()}
    for name, norm in norms.items():
        error, of_eager = norm(actual - exact), norm(eager - exact)
        band = (half_unit + angle_error) * norm(exact)
        assert error <= 2 * (of_eager + band), f"{name} error {error:.3e}; eager {of_eager:.3e}, rounding {band:.3e}"


def assert_rounded_once(actual: Tensor, exact: Tensor, size: Tensor, angle_error: float = 0.0) -> None:
    """Check elementwise: one rounding to the dtype after float32 (float64 for float64) arithmetic, in which cos and sin, two
    products and a sum each contribute at most half an ulp of the pair's modulus."""
    arithmetic = torch.finfo(torch.float64 if actual.dtype == torch.float64 else torch.float32)
    info = torch.finfo(actual.dtype)
    # Triton's interpreter truncates float32 to bfloat16 where a GPU rounds.
    unit = info.eps if INTERPRETER and actual.dtype == torch.bfloat16 else info.eps / 2
    allowed = unit * exact.abs() + (2 * arithmetic.eps + angle_error) * size + info.tiny * info.eps
    error = (actual.double() - exact).abs()
    if error.numel():
        worst = int((error - allowed).argmax())
        assert error[worst] <= allowed[worst], (
            f"got {actual[worst]}, exactly {exact[worst]}, allowed {allowed[worst]:.3e}"
        )


def wider(x: Tensor) -> Tensor:
    """x with other strides."""
    y = x.new_zeros(*x.shape[:-2], x.shape[-2] + 1, x.shape[-1])[..., :-1, :]
    y.copy_(x)
    return y


def assert_bits(a: Tensor, b: Tensor) -> None:
    """Check bitwise equality, including NaNs and signed zeros."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    assert torch.equal(a.contiguous().view(integers), b.contiguous().view(integers)), "bits differ"


def copy_of(xs: tuple[Tensor, ...], device: str | None = None) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Clone tensors with their whole storages, keeping strides, storage offsets and storage sharing; also return the new
    storages."""
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
    """Check that storages are unchanged outside xs, which are views of them."""
    for old, new in zip(before, after, strict=True):
        untouched = torch.ones(new.shape, dtype=torch.bool, device=new.device)
        for x in xs:
            if x.untyped_storage().data_ptr() == new.untyped_storage().data_ptr():
                untouched.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
        assert_bits(old[untouched], new[untouched])


class Operators(TorchDispatchMode):
    """Count dispatched operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func.name())] += 1
        return func(*args, **(kwargs or {}))


def pairs_of(xs: tuple[Any, ...], result: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (input, output) of a call that returns one tensor for q, or a tuple for q and k."""
    return zip(xs, result if isinstance(result, tuple) else (result,), strict=True)
