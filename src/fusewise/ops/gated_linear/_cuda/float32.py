"""When `impl="cuda"` takes float32: with a kernel that needs no tensor cores (`float32.cu`) or, where products may round their operands to
tf32, with one that does (`tf32.cu`). Both make y, with pre-activations or without; gradients are left to Triton."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...._shared.gpu import processors_of, tf32_allowed
from .._chunks import FEW_ROWS
from .._problem import ALIGNED, odd

OTHERWISE = "triton"
TILE = 128  # rows, and features of each half, as in float32.cu; rows and columns of the library's
#: Row strides from which the rows of a tile may not be within 4 GiB: the kernel's offsets are 32 bits. Fewer rows may be further apart.
MOST_STRIDE = 1 << 23


class Costs(NamedTuple):
    """What a kernel and the platform's library, followed by the gate, cost, in units of what the library needs per feature for a tile of
    128 by 128."""

    high: int  # rows and features of a tile of ours, and how many SMs compute it
    across: int
    blocks: int
    tile: float  # per feature of x for a tile of ours
    ends: tuple[int, int]  # its beginning and end, in features of x: of y alone, and with pre-activations
    low: float  # the library's tile of 64 by 128
    library_ends: int
    gate: float  # per element of y
    launch: float  # of the gate


#: In float32 as measured on an H100, in tf32 on an H200.
FLOAT32 = Costs(TILE, TILE, 1, 1.92, (48, 48), 0.54, 0, 4.6e-5, 0.0)
TF32 = Costs(2 * TILE, 96, 2, 1.29, (40, 190), 0.6, 50, 2e-4, 90.0)


def refuses(hidden: int, matrices: tuple[Tensor, ...], *, by_choice: bool, kernel: str) -> str | None:
    """As in `_cuda`, but for whether the kernel is there."""
    x, costs = matrices[0], TF32 if tf32_allowed() else FLOAT32
    if costs is FLOAT32 and any(
        (min(matrix.shape[0], TILE) - 1) * matrix.stride(0) >= (TILE - 1) * MOST_STRIDE for matrix in matrices
    ):
        return f"rows must be less than {MOST_STRIDE} elements apart"
    if not by_choice:
        return None
    if kernel not in ("y", "preact"):
        return f"gradients of float32 are left to {OTHERWISE}"
    if x.shape[0] <= FEW_ROWS:
        return f"up to {FEW_ROWS} rows, reading the weight dominates, and the platform's library takes less time"
    if costs is TF32 and odd(hidden, matrices):  # copied; the library takes longer with them, too
        few = x.shape[0] <= costs.high
        return f"{ALIGNED}, and copying others pays off only from {costs.high + 1} rows on" if few else None
    if not pays(costs, x.shape[0], hidden, x.shape[1], processors_of(x.get_device()), alone=kernel == "y"):
        return "the platform's library takes less time at this size"
    return None


def pays(costs: Costs, rows: int, hidden: int, features: int, processors: int, *, alone: bool) -> bool:
    """Whether the kernel takes less time than the platform's library followed by the gate: estimates for the busiest SM. `alone`: without
    pre-activations."""

    def waves(high: int, columns: int, across: int, blocks: int = 1) -> int:
        return -(-(-(-rows // high) * -(-columns // across)) // (processors // blocks))

    ours = costs.tile * waves(costs.high, hidden, costs.across, costs.blocks) * (features + costs.ends[not alone])
    matmul = min(waves(TILE, 2 * hidden, TILE), costs.low * waves(TILE // 2, 2 * hidden, TILE))
    return ours <= matmul * (features + costs.library_ends) + costs.gate * rows * hidden + costs.launch
