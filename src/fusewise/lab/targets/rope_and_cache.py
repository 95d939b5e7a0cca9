"""RoPE of q and k plus the write of k and v into a paged KV cache, as in a serving engine between projections and
attention. Forward only, in place: q, k and the caches are overwritten.

Shape legend: N tokens, H heads of q, G of k and v, D head width; caches (blocks, S, G, D) with S slots per block.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import fusewise
from fusewise.ops.rope.cases import RopeCase
from fusewise.ops.rope.cases import case as rope_case

from ..problem import DTYPES, Pass, Problem, Program, Task
from . import Case, CaseProblem, Target
from .rope import passing_bytes
from .rope_serving import half_heads, interleaved_heads


@dataclass(frozen=True, kw_only=True)
class CacheCase:
    """A serving case of RoPE, and a cache with room for twice its tokens."""

    rope: RopeCase
    slots: int = 16  # per block

    @property
    def name(self) -> str:
        return self.rope.name.replace("-serve-", "-cache-")

    @property
    def tokens(self) -> int:
        return self.rope.batch * self.rope.seqlen

    @property
    def blocks(self) -> int:
        return max(8, -(-2 * self.tokens // self.slots))

    @property
    def shape(self) -> str:
        return f"{self.rope.shape} cache[{self.blocks},{self.slots},{self.rope.kv_heads},{self.rope.head_dim}]"

    @property
    def dtypes(self) -> tuple[str, ...]:
        return self.rope.dtypes

    @property
    def passes(self) -> Sequence[Pass]:
        return ("fwd",)

    def bytes_min(self, direction: Pass, dtype: str) -> int:
        """In place: reads and writes what rotates of q and k, reads what passes through of k; writes k and v to the
        caches, reads v; reads table rows, position and slot ids once."""
        heads = self.tokens * self.rope.kv_heads * DTYPES[dtype].itemsize
        passing = heads * (self.rope.head_dim - self.rope.rotated)
        return self.rope.bytes_min(direction, dtype) + passing + 3 * heads * self.rope.head_dim + 8 * self.tokens

    def flops_min(self, direction: Pass) -> int:
        return self.rope.flops_min(direction)


def _cases(names: Sequence[str]) -> list[CacheCase]:
    return [CacheCase(rope=rope_case(name)) for name in names]


_DECODE = (1, 8, 64, 256, 1024)
PRESETS: dict[str, list[CacheCase]] = {
    "cache-quick": _cases(
        ["llama-3-8b-serve-decode-b8", "llama-3-8b-serve-decode-b64", "llama-3-8b-serve-prefill-256", "glm-4-9b-serve-decode-b64"]
    ),
    "cache-serving": _cases(
        [f"{model}-serve-decode-b{batch}" for model in ("llama-3-8b", "qwen2.5-7b", "glm-4-9b") for batch in _DECODE]
        + [f"llama-3-8b-serve-prefill-{128 * 4**k}" for k in range(4)]
    ),
}  # fmt: skip


class RopeAndCache(Target):
    """Rotation and cache write in one operation."""

    name = "rope_and_cache"
    default_preset = "cache-quick"
    hurried: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "cache-quick": {"time_limit": 60.0, "max_rounds": 10},
        "cache-serving": {"time_limit": 300.0},
    }

    def presets(self) -> Mapping[str, Sequence[Case]]:
        return PRESETS

    def problem(self, task: Task) -> Problem:
        return CacheWriteProblem(task)


class CacheWriteProblem(CaseProblem[CacheCase]):
    """Tensors: q (N, H · D), k and v (N, G · D), and the two caches, initially random."""

    overwrites = True

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.case = next(c for cases in PRESETS.values() for c in cases if c.name == task.case)
        case, self.inputs = self.case, self.case.rope.make_inputs(self.device, task.dtype, task.seed)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{task.seed}/{task.case}/cache".encode()))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

        q, k = self.inputs.operands
        cache = (case.blocks, case.slots, *k.shape[1:])
        self.tensors = (q.flatten(1), k.flatten(1), normal(*k.shape).flatten(1), normal(*cache), normal(*cache))
        self.upstream = tuple(map(torch.empty_like, (self.tensors[i] for i in (0, 1, 3, 4))))  # one per output
        drawn = torch.Generator().manual_seed(zlib.crc32(f"{task.seed}/{task.case}/slots".encode()))
        #: The slot of every token: distinct, anywhere in the cache.
        self.slots = torch.randperm(case.blocks * case.slots, generator=drawn)[: case.tokens].to(self.device)

    def written(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors that the operation overwrites, which are its outputs."""
        q, k, _, key_cache, value_cache = tensors
        return q, k, key_cache, value_cache

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `fusewise.rope_and_cache_` without the caches."""
        return {**self.inputs.kwargs, "slot_mapping": self.slots}

    def untouched(self) -> tuple[int, int]:
        """Features that pass through need no read or write in q; in k they are read, for the cache."""
        q, k = (passing_bytes(x, self.case.rope.rotated) for x in self.inputs.operands)
        return q, q + k

    def compact(self) -> CacheWriteProblem:
        """With caches that hold exactly the tokens."""
        assert self.inputs.cache is not None
        tokens, (q, k, v, *_) = self.case.tokens, self.tensors
        table, running = self.inputs.cache[self.inputs.kwargs["positions"]], torch.arange(tokens, device=self.device)
        cos, sin = table.chunk(2, dim=-1)
        kwargs = {**self.inputs.kwargs, "cos_sin": table, "positions": running}
        small = copy.copy(self)
        small.inputs = replace(self.inputs, cos=cos, sin=sin, cache=table, positions=running, kwargs=kwargs)
        heads = (1, *self.inputs.operands[1].shape)
        small.tensors, small.slots = (q, k, v, k.view(heads).clone(), v.view(heads).clone()), running
        small.upstream = tuple(map(torch.empty_like, (small.tensors[i] for i in (0, 1, 3, 4))))
        return small

    def truth(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v, key_cache, value_cache = tensors
        q, k, v = (x.view(len(x), -1, self.case.rope.head_dim) for x in (q, k, v))
        q_rotated, k_rotated = fusewise.rope(q, k, **self.inputs.kwargs, impl="reference")
        key_cache, value_cache = key_cache.clone(), value_cache.clone()
        key_cache.view(-1, *key_cache.shape[2:])[self.slots] = k_rotated
        value_cache.view(-1, *value_cache.shape[2:])[self.slots] = v
        return q_rotated.flatten(1), k_rotated.flatten(1), key_cache, value_cache

    def program(self) -> Program:
        """As in vLLM without its kernels: rotation into new tensors with rows of a cache in the tensors' dtype, then
        one indexed in-place write per cache."""
        assert self.inputs.cache is not None
        table = self.inputs.cache.to(self.dtype)
        rotate = {"half": write_half, "interleaved": write_interleaved}[self.case.rope.pairing]
        numbers = (self.case.rope.head_dim, self.case.rope.rotated)
        return Program(rotate, lambda *xs: (*xs, self.inputs.kwargs["positions"], table, self.slots, *numbers))


# The eager forms; they must also script.


def stored(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, head: int) -> None:
    """Write k and v (N, G · D) to their slots of (blocks, S, G, D)."""
    size = key_cache.shape[1]
    block, entry = torch.div(slots, size, rounding_mode="floor"), slots % size
    key_cache[block, entry] = k.view(k.shape[0], -1, head)
    value_cache[block, entry] = v.view(v.shape[0], -1, head)


def write_half(
    q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, positions: Tensor, table: Tensor,
    slots: Tensor, head: int, width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Features (a ‖ b) of each head rotated, k and v cached."""
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    q, k = half_heads(q, cos, sin, head, 0, width), half_heads(k, cos, sin, head, 0, width)
    stored(k, v, key_cache, value_cache, slots, head)
    return q, k, key_cache, value_cache


def write_interleaved(
    q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, positions: Tensor, table: Tensor,
    slots: Tensor, head: int, width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same on adjacent features."""
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    q, k = interleaved_heads(q, cos, sin, head, 0, width), interleaved_heads(k, cos, sin, head, 0, width)
    stored(k, v, key_cache, value_cache, slots, head)
    return q, k, key_cache, value_cache
