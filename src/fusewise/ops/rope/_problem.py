"""A normalized RoPE call, as every implementation receives it.

Shape legend: B batch, T tokens of a sequence, H heads, D features of a head, P rotated pairs, R table rows.

`Spec` holds everything that is not a tensor. It passes through the registered operators as a short string, which keeps
their schemas small and traced graphs readable. `Problem` adds the tensors with resolved strides: every supported layout
becomes a (B, T, H, D) shape that differs only in strides.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .._common import known

Layout = Literal["bshd", "sbhd", "bhsd", "thd"]
Pairing = Literal["half", "interleaved", "interleaved_to_half", "half_to_interleaved"]
Table = Literal["cos_sin", "fused", "angles", "inv_freq"]

LAYOUTS: tuple[str, ...] = get_args(Layout)
PAIRINGS: tuple[str, ...] = get_args(Pairing)

# The validated arguments of every operator after the tensors to rotate:
#   cos        the table: cos, the fused [cos | sin] cache, the angles or the inverse frequencies, according to the spec
#   sin        the sine table if the spec's table is cos_sin
#   positions, offsets, cu_seqlens, offset    see `Problem`
#   spec       `Spec.encode()`
Rotation = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, int, str]

# The backward of a rotation that reads interleaved pairs and writes halves reads halves and writes interleaved pairs.
TRANSPOSED = {"interleaved_to_half": "half_to_interleaved", "half_to_interleaved": "interleaved_to_half"}
_TRANSPOSED_WORDS = {f"pairing={there}": f"pairing={back}" for there, back in TRANSPOSED.items()}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Everything about a call that is not a tensor; the defaults are a whole-head rotation of (B, T, H, D) tensors."""

    layout: Layout = "bshd"
    pairing: Pairing = "half"
    rotary_dim: int = 0  # 0: the whole head
    rotary_start: int = 0  # first rotated feature; negative counts from the end of the head
    table: Table = "cos_sin"
    duplicated: bool = False  # the table has 2P columns, every angle twice
    scale: float = 1.0  # factor of cos and sin made from angles or frequencies
    sections: tuple[int, int, int] | None = None  # pairs that follow the t, h and w positions (M-RoPE)
    sections_interleaved: bool = False
    cp_rank: int = 0
    cp_size: int = 1
    inverse: bool = False

    def encode(self) -> str:
        """The fields that differ from their defaults, as `name=value` words.

        Unrolled by hand: torch.compile traces this, and `dataclasses.fields` would add six guards per field.
        """
        words = []
        if self.layout != "bshd":
            words.append("layout=" + self.layout)  # no f-string: it would format a str enum as its member name
        if self.pairing != "half":
            words.append("pairing=" + self.pairing)
        if self.rotary_dim != 0:
            words.append(f"rotary_dim={self.rotary_dim}")
        if self.rotary_start != 0:
            words.append(f"rotary_start={self.rotary_start}")
        if self.table != "cos_sin":
            words.append(f"table={self.table}")
        if self.duplicated:
            words.append("duplicated=True")
        if self.scale != 1.0:
            words.append(f"scale={self.scale}")
        if self.sections is not None:
            words.append(f"sections={','.join([f'{number}' for number in self.sections])}")
        if self.sections_interleaved:
            words.append("sections_interleaved=True")
        if self.cp_rank != 0:
            words.append(f"cp_rank={self.cp_rank}")
        if self.cp_size != 1:
            words.append(f"cp_size={self.cp_size}")
        if self.inverse:
            words.append("inverse=True")
        return " ".join(words)

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def decode(text: str) -> Spec:
        """The inverse of `encode`."""
        values: dict[str, object] = {}
        for word in text.split():
            name, value = word.split("=", 1)
            values[name] = _parse(getattr(Spec, name), value)
        return Spec(**values)  # type: ignore[arg-type]

    @property
    def pairs_in(self) -> str:
        return "interleaved" if self.pairing.startswith("interleaved") else "half"

    @property
    def pairs_out(self) -> str:
        return "interleaved" if self.pairing.endswith("interleaved") else "half"


def _parse(default: object, text: str) -> object:
    """Parse a field by the type of its default; the only field whose default is None is `sections`."""
    if isinstance(default, bool):
        return text == "True"
    if isinstance(default, (int, float, str)):
        return type(default)(text)
    return tuple(map(int, text.split(",")))


def transposed_spec(text: str) -> str:
    """The encoded spec of the transposed map, which backward applies to the gradient.

    Works on the text: torch.compile traces this and would trace through the cache of `decode`.
    """
    flag = "inverse=True"
    words = text.split()
    words = [word for word in words if word != flag] if flag in words else [*words, flag]
    return " ".join([_TRANSPOSED_WORDS.get(word, word) for word in words])


def layout_dims(layout: str) -> tuple[int | None, int, int]:
    """Dimension indices of (B, T, H) in `layout`; None for a layout without a batch."""
    return {"bshd": (0, 1, 2), "sbhd": (1, 0, 2), "bhsd": (0, 2, 1), "thd": (None, 0, 1)}[layout]


def rotated_rank(spec: str) -> int:
    """The number of dimensions of q and k, with an encoded spec."""
    return 3 if Spec.decode(spec).layout == "thd" else 4


def same_strides(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of the same shape have the same memory layout. Strides of size-1 dimensions are ignored, and all
    strides where there are no elements: `.contiguous()` would not change them."""
    return (
        x.stride() == y.stride()
        or all(a == b or size <= 1 for a, b, size in zip(x.stride(), y.stride(), x.shape, strict=True))
        or known(x.numel() == 0)
    )


@dataclass(frozen=True)
class Operand:
    """A tensor to rotate and its output; strides in elements, in (B, T, H) order."""

    x: Tensor
    y: Tensor
    heads: int
    head_dim: int
    start: int  # the first rotated feature
    x_strides: tuple[int, int, int]
    y_strides: tuple[int, int, int]


@dataclass(frozen=True)
class Problem:
    """A call with its layout resolved: (B, T, H, D) operands, a (B | 1, R, P) table or P frequencies, positions.

    `cos` and `sin` are views with P entries of any stride in the last dimension; for angles `sin` is `cos`, for
    frequencies both are the (P,) frequencies. The table row of token t in batch entry b is

    - `positions[a, b, t]` if positions are given, a being the M-RoPE axis of the pair,
    - otherwise `offset + offsets[b] + t`, after the context-parallel chunk map. With `cu_seqlens`, t counts from the
      start of its sequence and `offsets` has one entry per sequence.

    A row outside [0, R) makes the rotated features NaN. Tokens past `cu_seqlens[-1]` pass through unrotated.
    """

    spec: Spec
    operands: tuple[Operand, ...]
    batch: int
    tokens: int
    pairs: int
    cos: Tensor
    sin: Tensor
    table_strides: tuple[int, int, int]  # batch, row, pair; in elements
    rows: int
    positions: Tensor | None
    position_strides: tuple[int, int, int]  # axis, batch, token
    offset: int
    offsets: Tensor | None
    cu_seqlens: Tensor | None

    @staticmethod
    def build(xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], rotation: Rotation) -> Problem:
        """Resolve the spec against validated tensors. Strides are checked again: an exported program may get other tensors."""
        cos, sin, positions, offsets, cu_seqlens, offset, text = rotation
        # torch.compile traces through lru_cache and warns about it.
        spec = Spec.decode.__wrapped__(text) if torch.compiler.is_compiling() else Spec.decode(text)
        for name, tensors in (("q and k", (*xs, *ys)), ("offset", (offsets,)), ("cu_seqlens", (cu_seqlens,))):
            for x in tensors:
                if x is not None and x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel() > 0:
                    raise ValueError(
                        f"rope: {name} must have a contiguous last dimension (stride 1), got strides {x.stride()}; "
                        "call .contiguous()"
                    )
        if sin is not None and not same_strides(cos, sin):
            raise ValueError(
                f"rope: sin must have the strides of cos, {cos.stride()}, got {sin.stride()}; call .contiguous() on both"
            )
        b_dim, t_dim, h_dim = layout_dims(spec.layout)

        def strides(x: Tensor) -> tuple[int, int, int]:
            return (0 if b_dim is None else x.stride(b_dim), x.stride(t_dim), x.stride(h_dim))

        q = xs[0]
        rotary_dim = spec.rotary_dim or q.shape[-1]
        pairs = rotary_dim // 2
        if spec.table == "inv_freq":
            cos_view = sin_view = cos
            table_strides, rows = (0, 0, cos.stride(-1)), 2**31 - 1
        else:
            if spec.table == "fused":
                cos_view, sin_view = cos[..., :pairs], cos[..., pairs:]
            elif spec.duplicated and spec.pairs_in == spec.pairs_out == "interleaved":
                cos_view = cos[..., ::2]
                sin_view = cos_view if sin is None else sin[..., ::2]
            else:
                cos_view = cos[..., :pairs]
                sin_view = cos_view if sin is None else sin[..., :pairs]
            batched = cos_view.dim() == 3 and cos_view.shape[0] > 1
            table_strides = (cos_view.stride(0) if batched else 0, cos_view.stride(-2), cos_view.stride(-1))
            rows = cos_view.shape[-2]
        return Problem(
            spec=spec,
            operands=tuple(
                Operand(x, y, x.shape[h_dim], x.shape[-1], spec.rotary_start % x.shape[-1], strides(x), strides(y))
                for x, y in zip(xs, ys, strict=True)
            ),
            batch=1 if b_dim is None else q.shape[b_dim],
            tokens=q.shape[t_dim],
            pairs=pairs,
            cos=cos_view,
            sin=sin_view,
            table_strides=table_strides,
            rows=rows,
            positions=positions,
            position_strides=(0, 0, 0) if positions is None else _position_strides(positions, spec),
            offset=offset,
            offsets=offsets,
            cu_seqlens=cu_seqlens,
        )


def _position_strides(positions: Tensor, spec: Spec) -> tuple[int, int, int]:
    axis = 0 if spec.sections is None else positions.stride(0)
    per_batch = positions.dim() == (2 if spec.sections is None else 3)
    batch = positions.stride(-2) if per_batch and positions.shape[-2] > 1 else 0
    return axis, batch, positions.stride(-1)
