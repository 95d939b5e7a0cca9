"""The smallest Triton kernel with the arguments of a real one: what `kernel[grid](…)` costs before any work is done."""

# mypy: disable-error-code="import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _nothing_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, tokens, q_heads, k_heads,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_qob, stride_qot, stride_qoh, stride_kob, stride_kot, stride_koh,
    BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) > tokens:
        tl.store(q_out_ptr, tl.load(q_ptr))


def bare_launch(x: Any) -> None:
    """Start the kernel on `x`, a CUDA tensor that it neither reads nor writes."""
    _nothing_kernel[(1,)](x, x, x, x, x, x, 4096, 32, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, BLOCK=64, HALF=True)
