"""Shared by the named cases of all operations: dtypes and passes by name, seeds, and lookup of cases.

The cases themselves are in `rope/cases.py` and `gated_linear/cases.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeVar

import torch

Pass = Literal["fwd", "bwd", "fwd+bwd"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: What a case can be measured in: also float32 whose matmuls may round their operands to tf32.
PRECISIONS: dict[str, torch.dtype] = {**DTYPES, "tf32": torch.float32}


class Named(Protocol):
    """A case."""

    @property
    def name(self) -> str: ...


Case = TypeVar("Case", bound=Named)


def by_pass(op: str, direction: Pass, forward: int, backward: int) -> int:
    """The count (bytes or operations) of a pass from those of forward and backward."""
    counts = {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}
    if direction not in counts:
        raise ValueError(f"{op}: pass must be one of {', '.join(counts)}, got {direction!r}; choose one")
    return counts[direction]


def seed_of(name: str, seed: int) -> int:
    """A seed specific to the case and, unlike `hash`, the same in every process."""
    return zlib.crc32(f"{seed}/{name}".encode())


def of_preset(op: str, presets: Mapping[str, Sequence[Case]], preset: str) -> list[Case]:
    """The cases of a preset, in the order of its table."""
    if preset not in presets:
        raise ValueError(f"{op}: preset must be one of {', '.join(presets)}, got {preset!r}; choose one")
    return list(presets[preset])


def of_name(op: str, presets: Mapping[str, Sequence[Case]], name: str) -> Case:
    """The case of that name, from whichever preset has it."""
    for preset in presets.values():
        for found in preset:
            if found.name == name:
                return found
    raise ValueError(
        f"{op}: name must be that of a case in a preset, got {name!r}; list them with cases(preset) for one of "
        f"{', '.join(presets)}"
    )
