"""The GELU target: the tanh form written out, the smallest function on which compilers differ.

    y = x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))        Hendrycks & Gimpel, arXiv 1606.08415

Written out it is nine operations, so eager code reads and writes the tensor many times; fused it is one read and one
write. Sizes range from 5 × 5 elements (launch-bound) to 4 GiB (memory-bound).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..problem import PRECISIONS, Pass, Problem, Program, Task
from . import Case, CaseProblem, Target


@dataclass(frozen=True)
class GeluCase:
    """A tensor of `rows` × `columns`."""

    name: str
    rows: int
    columns: int
    dtypes: tuple[str, ...] = ("fp32",)
    passes: tuple[Pass, ...] = ("fwd", "bwd")

    @property
    def shape(self) -> str:
        return f"x[{self.rows},{self.columns}]"

    def bytes_min(self, direction: Pass, dtype: str) -> int:
        """Forward reads x and writes y; backward reads x and dy and writes dx."""
        tensors = {"fwd": 2, "bwd": 3, "fwd+bwd": 5}[direction]
        return tensors * self.rows * self.columns * PRECISIONS[dtype].itemsize

    def flops_min(self, direction: Pass) -> int:
        """Operations of the formula with tanh as one: 9 per element; 16 in backward, which recomputes the forward's
        tanh."""
        each = {"fwd": 9, "bwd": 16, "fwd+bwd": 25}[direction]
        return each * self.rows * self.columns


def square(side: int, passes: tuple[Pass, ...] = ("fwd", "bwd")) -> GeluCase:
    return GeluCase(f"gelu-{side}", side, side, passes=passes)


FIVE = GeluCase("gelu-5x5", 5, 5)
PRESETS: dict[str, list[GeluCase]] = {
    "gelu-quick": [FIVE, square(256), square(4096, ("fwd",))],
    # 1 KiB to 4 GiB of float32 by factors of four; the largest has no backward, which exceeds the memory of most GPUs
    "gelu-sizes": [FIVE, *(square(2**k) for k in range(4, 15)), square(2**15, ("fwd",))],
}


def gelu(x: Tensor) -> Tensor:
    """The tanh form, transcribed from the formula."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def jax_gelu() -> Callable[..., Any]:
    """The same in jax.numpy; only called in a process that has JAX."""
    import jax.numpy as jnp

    return lambda x: 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class Gelu(Target):
    """The tanh form of GELU on one tensor."""

    name = "gelu"
    default_preset = "gelu-quick"
    hurried: ClassVar[Mapping[str, Mapping[str, Any]]] = {"gelu-quick": {"time_limit": 40.0, "max_rounds": 10}}

    def presets(self) -> Mapping[str, Sequence[Case]]:
        return PRESETS

    def problem(self, task: Task) -> Problem:
        return GeluProblem(task)


class GeluProblem(CaseProblem[GeluCase]):
    by_rows = frozenset({0})

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.case = next(c for cases in PRESETS.values() for c in cases if c.name == task.case)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{task.seed}/{task.case}".encode()))

        def normal() -> Tensor:
            shape = (self.case.rows, self.case.columns)
            return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

        self.tensors, self.upstream = (normal(),), (normal(),)

    def truth(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (gelu(*tensors),)

    def program(self) -> Program:
        return Program(gelu)

    def jax(self) -> Callable[..., Any]:
        return jax_gelu()
