"""Machine code of the CUDA kernels, checked without a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from fusewise._shared import build
from fusewise.ops.gated_linear import _cuda
from fusewise.ops.gated_linear._cuda import tiles
from fusewise.ops.gated_linear._problem import ACTIVATIONS

from .. import cuda_codegen


@pytest.fixture(scope="module", params=[(torch.bfloat16, "gelu_tanh"), (torch.float16, "gelu")], ids=["bf16", "fp16"])
def compiled(request: pytest.FixtureRequest) -> tuple[Path, str]:
    return cuda_codegen.prepared(lambda: _cuda.recipe(*request.param))


def test_what_they_compile_to(compiled: tuple[Path, str]) -> None:
    """Spills in the gradient of a down projection alone, and never inside the matmul loop; a step is eight consecutive tensor core
    instructions; weights are multicast to two blocks; results are stored by TMA. Kernels without a matmul move 16 bytes per thread."""
    path, said = compiled
    assert "serialized" not in said
    bodies = cuda_codegen.listing(path, "sm_90a")
    kernels = {
        found[1]: body
        for body in bodies
        if (found := re.search(r"gated_linear_kernelILb\dELi(\d)", body.splitlines()[0]))
    }
    sideways = {str(of.epilogue): of.columns for of in tiles.SIDEWAYS}
    assert set(kernels) == {"0", "1", "2", "3", *sideways}
    streams = [body for body in bodies if "few_rows_kernel" in body.splitlines()[0]]
    assert len(streams) == 2 * len(tiles.STREAM_COLUMNS)  # tiles of 64 and of 128 features
    for body in streams:
        assert not re.search(r"\b(LDL|STL)\b", body) and "STG.E.128" in body and "STSM.16.MT88.4" in body
        assert {*re.findall(r"HGMMA.64x(\d+)x16", body)} <= {*map(str, tiles.STREAM_COLUMNS)}
        assert "UTMALDG.2D" in body and "ACQBULK" in body  # waits for the previous kernel
    (gate,) = (body for body in bodies if "gate_gradient_kernel" in body.splitlines()[0])
    assert not re.search(r"\b(LDL|STL)\b", gate)
    assert {*re.findall(r"\b(?:LDG|STG)\.E\S*", gate)} == {"LDG.E.128", "STG.E.128", "STG.E"}  # STG.E: the sums
    for epilogue, body in kernels.items():
        code = [line for line in body.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/ +\S", line)]
        spills = [i for i, line in enumerate(code) if re.search(r"\b(LDL|STL)\b", line)]
        assert len(spills) <= (8 if epilogue == str(tiles.DOWN) else 0)
        whole = sideways.get(epilogue, 192)
        for columns in (whole, whole // 2) if epilogue in sideways else (whole,):
            products = [i for i, line in enumerate(code) if f"HGMMA.64x{columns}x16" in line]
            assert len(products) == 8 and products[-1] - products[0] < 120
            assert not [i for i in spills if products[0] <= i <= products[-1]]
            # Descriptors are computed where wgmma reads them.
            assert not [line for line in code[products[0] - 20 : products[-1]] if "R2UR" in line]
        stores = "STSM.16.MT88.4" if epilogue in sideways else "STSM.16.M88.4"
        assert "UTMALDG.2D.MULTICAST" in body and stores in body and "UTMASTG.2D" in body
        assert not re.search(
            r"MEMBAR\S*GPU", "\n".join(code[products[0] : products[-1] + 20])
        )  # would wait for all memory operations


@pytest.mark.parametrize(
    ("source", "kernel", "count"),
    [
        (_cuda.SOURCES[0], "gated_linear_kernelI", 2 * 9 * len(ACTIVATIONS)),
        (_cuda.FLOAT32_SOURCES[0], "unit_kernelI", 6),
    ],
)
def test_without_a_choice_it_has_every_dtype_and_activation(
    source: Path, kernel: str, count: int, tmp_path: Path
) -> None:
    """As built by CMake; unoptimised, since the kernels are only counted."""
    try:
        nvcc = build.nvcc().needed()
    except build.BuildError as error:
        pytest.skip(str(error))
    to = tmp_path / "all.ptx"
    done = subprocess.run(
        [*nvcc, "-std=c++17", "-arch=sm_90a", "-ptx", "-Xcicc", "-O0", str(source), "-o", str(to)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall(rf"\.entry \w*({kernel}\w+)", to.read_text()))) == count
