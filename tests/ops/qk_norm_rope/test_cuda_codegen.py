"""Machine code of the CUDA kernels, checked without a GPU: no register spills, 16-byte accesses, loads before their use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusewise.ops.qk_norm_rope import _cuda

from .. import cuda_codegen

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled() -> tuple[Path, str]:
    return cuda_codegen.compiled(_cuda)


@pytest.mark.parametrize("kernel", ["direct_heads_kernel", "direct_row_kernel", "norm_rope_kernel", "backward_kernel"])
def test_no_kernel_spills_and_all_fit(compiled: tuple[Path, str], kernel: str) -> None:
    cuda_codegen.check_no_kernel_spills_and_all_fit(compiled[1], kernel, resident=512)


@pytest.mark.parametrize(
    ("kernel", "reads", "narrower", "stores"),
    [
        # Half pairing: two accesses per head and for the weights; a row of cos and of sin takes one in 16 bits, two in float32.
        ("direct_heads_kernelI13__nv_bfloat16S1_S1_Lb0ELi8ELi4E", 2 * 4 + 2 + 2, 0, 2 * 4),
        ("direct_heads_kernelI13__nv_bfloat16S1_fLb0ELi8ELi1E", 2 + 2 + 4, 0, 2),
        ("direct_heads_kernelI13__nv_bfloat16ffLb0ELi8ELi1E", 2 + 4 + 4, 0, 2),
        ("direct_heads_kernelI6__halfS1_fLb1ELi4ELi8E", 8 + 1 + 2, 0, 8),
        ("direct_heads_kernelIfffLb0ELi4ELi1E", 2 + 2 + 2, 0, 2),
        ("direct_row_kernelI13__nv_bfloat16S1_fLb0ELi8ELi4E", 2 * 4 + 2 * 4 + 4, 0, 2 * 4),
        # Chunks of half the width, for few tokens.
        ("direct_heads_kernelI13__nv_bfloat16S1_fLb0ELi4ELi1E", 2, 2 + 2, 0),
    ],
)
def test_widest_accesses(compiled: tuple[Path, str], kernel: str, reads: int, narrower: int, stores: int) -> None:
    for body in cuda_codegen.machine_code(compiled[0], kernel):
        assert len(re.findall(r"LDG\.E\.128", body)) == reads, body.splitlines()[0]
        assert len(re.findall(r"LDG\.E\.64 ", body)) >= narrower, body.splitlines()[0]
        assert len(re.findall(r"STG\.E\.128", body)) == stores, body.splitlines()[0]


def test_nothing_is_waited_for_between_the_loads_of_few_tokens(compiled: tuple[Path, str]) -> None:
    """No branch lies between the loads of x, the weights and the table, except around the position."""
    for table in "f", "S1_":
        (body,) = cuda_codegen.machine_code(compiled[0], f"direct_heads_kernelI13__nv_bfloat16S1_{table}Lb0ELi4ELi1E")
        code = [line for line in body.splitlines() if re.search(r"/\*[0-9a-f]{4}\*/", line)]
        loads = [i for i, line in enumerate(code) if "LDG.E" in line]
        wide = [i for i in loads if re.search(r"LDG\.E\.(64|128)", code[i])]
        between = code[wide[0] : wide[-1]]
        assert len(wide) >= 6
        assert not [line for line in between if re.search(r"\b(BRA|BSYNC|SHFL|BAR)\b", line)]


@pytest.mark.parametrize(
    ("kernel", "copies", "weights", "table", "stores"),
    [
        # x and dy are copied to shared memory, for all steps but one of those in flight before the loop and for one in it; weights are
        # loaded in either dtype; there is a table row per step, if rows have several warps one more before the loop. Two heads per
        # step share it.
        ("backward_kernelI13__nv_bfloat16fLb0ELb0E", 2 * 8, 2 + 4, 4, 4),
        ("backward_kernelI6__halfS1_Lb0ELb1E", 4 * 4, 2 + 4, 2 * 2, 2),
        ("backward_kernelI13__nv_bfloat16fLb1ELb0E", 2 * 4, 1 + 2, 2, 2),
        ("backward_kernelIffLb0ELb0E", 2 * 8, 2, 2, 4),
    ],
)
def test_accesses_of_the_backward(
    compiled: tuple[Path, str], kernel: str, copies: int, weights: int, table: int, stores: int
) -> None:
    """All of 16 bytes, in the loop for q and in that for k."""
    (body,) = cuda_codegen.machine_code(compiled[0], kernel)
    assert len(re.findall(r"LDGSTS\S*\.128", body)) == 2 * copies
    assert len(re.findall(r"LDG\.E\.128", body)) == 2 * (weights + table)
    assert len(re.findall(r"STG\.E\.128", body)) >= 2 * stores
    assert not re.findall(r"LDG\.E\.64 ", body)
