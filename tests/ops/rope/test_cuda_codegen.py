"""Machine code of the CUDA kernels, checked without a GPU: no register spills, planned occupancy, 16-byte accesses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusewise.ops.rope import _cuda

from .. import cuda_codegen


@pytest.fixture(scope="module")
def compiled() -> tuple[Path, str]:
    return cuda_codegen.compiled(_cuda)


def test_no_kernel_spills_and_all_fit(compiled: tuple[Path, str]) -> None:
    cuda_codegen.check_no_kernel_spills_and_all_fit(compiled[1], "rope_kernel")


@pytest.mark.parametrize(
    ("kernel", "vectors"),
    [
        ("fLb0ELb0ELi4E", 2),  # float32: 16 bytes of each half
        ("__nv_bfloat16Lb0ELb0ELi8E", 2),
        ("__halfLb1ELb1ELi4E", 1),  # interleaved: 16 bytes of pairs
        ("__nv_bfloat16Lb1ELb0ELi4E", 1),  # read interleaved, written as halves of 8 bytes
    ],
)
def test_widest_accesses(compiled: tuple[Path, str], kernel: str, vectors: int) -> None:
    for body in cuda_codegen.machine_code(compiled[0], kernel):
        loads = re.findall(r"LDG\.E\.128", body)
        stores = re.findall(r"STG\.E\.(64|128)", body)
        # At least one set of accesses for q and one for k, each as wide as the pairing allows.
        assert len(loads) >= 2 * vectors and len(stores) >= 2 * vectors, body.splitlines()[0]
