"""Machine code of the CUDA kernel, checked without a GPU: no register spills, planned occupancy, 16-byte accesses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusewise.ops.rope_and_cache import _cuda

from .. import cuda_codegen

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled() -> tuple[Path, str]:
    return cuda_codegen.compiled(_cuda)


def test_no_kernel_spills_and_all_fit(compiled: tuple[Path, str]) -> None:
    cuda_codegen.check_no_kernel_spills_and_all_fit(compiled[1], "rope_and_cache_kernel")


@pytest.mark.parametrize(
    ("kernel", "loads", "stores"),
    [
        # q, k and v: two 16-byte accesses each for pairing half, one for interleaved; k is written twice.
        ("IfLb0ELb0ELi4ELi1E", 6, 8),
        ("__nv_bfloat16Lb0ELb0ELi8ELi1E", 6, 8),
        ("__halfLb1ELb1ELi4ELi1E", 3, 4),
        # q, k and v alike, in three places; a table row takes two accesses in 16 bits, four in float32, or narrower ones.
        ("direct_rope_and_cache_kernelI13__nv_bfloat16S1_Lb0ELi8ELi1ELi8E", 2 + 2, 6),
        ("direct_rope_and_cache_kernelI13__nv_bfloat16fLb0ELi8ELi1ELi8E", 2 + 4, 6),
        ("direct_rope_and_cache_kernelI13__nv_bfloat16fLb0ELi8ELi1ELi2E", 2, 6),
        ("direct_rope_and_cache_kernelI6__halffLb1ELi4ELi2ELi2E", 2, 4),
    ],
)
def test_widest_accesses(compiled: tuple[Path, str], kernel: str, loads: int, stores: int) -> None:
    for body in cuda_codegen.machine_code(compiled[0], kernel):
        assert len(re.findall(r"LDG\.E\.128", body)) >= loads, body.splitlines()[0]
        assert len(re.findall(r"STG\.E\.128", body)) >= stores, body.splitlines()[0]
