"""When `impl="cuda"` takes float32: with a kernel that needs no tensor cores (`float32.cu`) or, where products may round their operands to
tf32, with one that does (`tf32.cu`). Both make y, with pre-activations or without; gradients are left to Triton."""

from __future__ import annotations

from torch import Tensor

from ...._shared.gpu import processors_of, tf32_allowed
from .._chunks import FEW_ROWS

OTHERWISE = "triton"
TILE = 128  # rows, and features of each half, as in float32.cu
#: Row strides from which the rows of a tile may not be within 4 GiB: the kernel's offsets are 32 bits. Fewer rows may be further apart.
MOST_STRIDE = 1 << 23


def refuses(hidden: int, matrices: tuple[Tensor, ...], *, by_choice: bool) -> str | None:
    """As in `_cuda`, but for whether the kernel is there."""
    x = matrices[0]
    if not tf32_allowed() and any(
        (min(matrix.shape[0], TILE) - 1) * matrix.stride(0) >= (TILE - 1) * MOST_STRIDE for matrix in matrices
    ):
        return f"rows must be less than {MOST_STRIDE} elements apart"
    if not by_choice:
        return None
    if len(matrices) != 3:  # not just x and the weights
        return f"gradients of float32 are left to {OTHERWISE}"
    if x.shape[0] <= FEW_ROWS:
        return f"up to {FEW_ROWS} rows, reading the weight dominates, and the platform's library takes less time"
    if tf32_allowed():
        return "tf32 is allowed, for which the platform's library has tensor cores"
    if not pays(x.shape[0], hidden, x.shape[1], processors_of(x.get_device())):
        return "the platform's library takes less time at this size"
    return None


def pays(rows: int, hidden: int, features: int, processors: int) -> bool:
    """Whether the kernel takes less time than the platform's library followed by the gate.

    Estimates for the busiest SM, in units of what it needs per feature for a matmul tile of 128 by 128; ours are two, and begin and
    end in the time of 48 features. Measured on an H100: the library takes 1.04 units, or with 64 rows 0.54 of that, and the gate as
    long as it does for 4.6e-5 features per element of y.
    """

    def waves(high: int, columns: int) -> int:
        return -(-(-(-rows // high) * -(-columns // TILE)) // processors)

    ours = 2 * waves(TILE, hidden) * (features + 48)
    matmul = min(waves(TILE, 2 * hidden), 0.54 * waves(TILE // 2, 2 * hidden)) * features
    return ours <= 1.04 * (matmul + 4.6e-5 * rows * hidden)
