"""A named RoPE benchmark case: shapes, inputs, and the minimum bytes and flops by the mathematics.

Shape legend: B batch, T tokens of a sequence, H heads, D head width, P rotated pairs, R table rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from .._cases import DTYPES, Pass, by_pass, seed_of
from . import tables


@dataclass(frozen=True)
class RopeInputs:
    """The tensors of one case: q and k, the table, positions, and an upstream gradient per output."""

    q: Tensor
    k: Tensor | None
    cos: Tensor  # (R, P) float32, half width
    sin: Tensor
    positions: Tensor | None  # int64 (B, T), in a serving engine's form (B · T,); None: 0 … T-1, plus offset
    dq: Tensor
    dk: Tensor | None
    kwargs: dict[str, Any]  # keyword arguments of `fusewise.rope`, right for q and k together and for either alone
    cache: Tensor | None = None  # (R, 2P) float32, [cos ‖ sin]: the table as a serving engine keeps it

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """q, and k where there is one."""
        return (self.q,) if self.k is None else (self.q, self.k)

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """The upstream gradient of every operand, in their order."""
        return (self.dq,) if self.dk is None else (self.dq, self.dk)


@dataclass(frozen=True, kw_only=True)
class RopeCase:
    """One named RoPE problem. All counts follow from the mathematics, none from an implementation."""

    name: str
    batch: int
    seqlen: int
    heads: int
    kv_heads: int = 0  # heads of k; 0: q alone
    head_dim: int
    k_head_dim: int = 0  # 0: as q
    rotary_dim: int = 0  # 0: the whole head
    rotary_start: int = 0  # first rotated feature; negative counts from the end of each head
    pairing: Literal["half", "interleaved", "interleaved_to_half"] = "half"
    layout: Literal["bshd", "sbhd", "bhsd", "thd"] = "bshd"
    positions: Literal["arange", "offset", "ids"] = "arange"
    offset: int = 0  # position of the first token where positions is "offset"
    table_rows: int = 0  # 0: offset + seqlen
    rope_parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)  # transformers' keys
    dtypes: tuple[str, ...] = ("fp32",)
    passes: tuple[Pass, ...] = ("fwd", "bwd")
    serving: bool = False  # as serving engines call it: in place on tokens, int64 positions, one [cos ‖ sin] cache
    regime: Literal["train", "prefill", "decode", "sweep"] = "sweep"
    model: str = ""  # the published configuration it comes from; "": synthetic

    @property
    def rotated(self) -> int:
        """Rotated features of a head."""
        return self.rotary_dim or self.head_dim

    @property
    def rows(self) -> int:
        """Rows of the cos and sin table."""
        return self.table_rows or self.offset + self.seqlen

    @property
    def q_shape(self) -> tuple[int, ...]:
        return self._shape(self.heads, self.head_dim)

    @property
    def k_shape(self) -> tuple[int, ...] | None:
        return self._shape(self.kv_heads, self.k_head_dim or self.head_dim) if self.kv_heads else None

    @property
    def shape(self) -> str:
        """The shape in words, as records and reports show it."""
        shapes = [("q", self.q_shape)] + ([("k", self.k_shape)] if self.k_shape else [])
        words = [f"{name}[{','.join(map(str, sizes))}]" for name, sizes in shapes]
        if self.rotated != self.head_dim or self.rotary_start:
            words.append(f"rotary {self.rotated}{' trailing' if self.rotary_start < 0 else ''}")
        return " ".join([*words, self.layout, self.pairing, *(["in place"] if self.serving else [])])

    @property
    def elements(self) -> int:
        """Elements of q and k together."""
        k_width = self.kv_heads * (self.k_head_dim or self.head_dim)
        return self.batch * self.seqlen * (self.heads * self.head_dim + k_width)

    def bytes_min(self, direction: Pass, dtype: str) -> int:
        """Minimum DRAM traffic: q and k (or their gradients) read once and written once, including features that pass
        through unless the case is in place; every used table row read once in float32; position ids read once."""
        table_rows = min(self.rows, self.batch * self.seqlen) if self.positions == "ids" else self.seqlen
        table = table_rows * self.rotated * 4  # P cosines and P sines of a row
        ids = self.batch * self.seqlen * 8 if self.positions == "ids" or self.serving else 0
        rotated = self.batch * self.seqlen * (self.heads + self.kv_heads) * self.rotated
        moved = rotated if self.serving else self.elements
        once = 2 * moved * DTYPES[dtype].itemsize + table + ids
        return by_pass("rope_cases", direction, once, once)

    def flops_min(self, direction: Pass) -> int:
        """Four multiplications, one addition and one subtraction for each pair."""
        pairs = self.batch * self.seqlen * (self.heads + self.kv_heads) * self.rotated // 2
        return by_pass("rope_cases", direction, 6 * pairs, 6 * pairs)

    def output_bytes(self, dtype: str) -> int:
        """Memory that a call must allocate: the outputs (or the input gradients), and nothing in place. Nothing is
        saved for backward."""
        return 0 if self.serving else self.elements * DTYPES[dtype].itemsize

    def frequencies(self) -> tuple[Tensor, float]:
        """`(inv_freq, scaling)` of the case's rope_parameters, on the CPU."""
        return tables.from_config(
            {key: value for key, value in self.rope_parameters.items() if key != "partial_rotary_factor"}, self.rotated
        )

    def make_inputs(self, device: torch.device | str, dtype: str, seed: int = 0) -> RopeInputs:
        """The case's tensors: standard normal q, k and gradients, contiguous in the case's layout.

        Generated on `device` itself, since large cases hold gigabytes, by a generator seeded from `seed` and the case's
        name. So they are reproducible across processes for one kind of device and torch version, but differ between GPU
        and CPU. Position ids are distinct random rows of the table, generated on the CPU.
        """
        generator = torch.Generator(device).manual_seed(seed_of(self.name, seed))

        def normal(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[dtype])

        q, dq = normal(self.q_shape), normal(self.q_shape)
        k, dk = (normal(self.k_shape), normal(self.k_shape)) if self.k_shape else (None, None)
        inverse, scaling = self.frequencies()
        cos, sin = tables.cos_sin(inverse, self.rows, scaling=scaling, device=device)
        cache = torch.cat((cos, sin), dim=-1) if self.serving else None
        kwargs: dict[str, Any] = {"layout": self.layout, "pairing": self.pairing}
        kwargs |= {"cos": cos, "sin": sin} if cache is None else {"cos_sin": cache}
        if self.rotated != self.head_dim:
            kwargs |= {"rotary_dim": self.rotated, "rotary_start": self.rotary_start}
        positions = None
        if self.positions == "ids":
            ids = torch.Generator().manual_seed(seed_of(self.name + "/positions", seed))
            drawn = torch.randperm(self.rows, generator=ids)[: self.batch * self.seqlen]
            positions = (drawn if self.serving else drawn.view(self.batch, self.seqlen)).to(device)
        elif self.serving:
            positions = torch.arange(self.offset, self.offset + self.seqlen, device=device).repeat(self.batch)
        elif self.positions == "offset":
            kwargs["offset"] = self.offset
        if positions is not None:
            kwargs["positions"] = positions
        return RopeInputs(q, k, cos, sin, positions, dq, dk, kwargs, cache)

    def _shape(self, heads: int, width: int) -> tuple[int, ...]:
        sizes = {"b": self.batch, "s": self.seqlen, "h": heads, "d": width, "t": self.batch * self.seqlen}
        return tuple(sizes[letter] for letter in self.layout)
