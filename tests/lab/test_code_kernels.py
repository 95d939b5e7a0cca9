"""The code of real kernels, ours and Inductor's, from source to machine code; GPU kernels without a GPU."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusewise
from fusewise.lab import plugin, targets
from fusewise.lab.code import ours, passes, triton_kernels
from fusewise.lab.code.stage import Stage
from fusewise.lab.problem import Task
from fusewise.lab.providers.ours import GatedCuda, GatedTriton
from fusewise.ops.gated_linear import _autograd, _cuda, _onednn, _products

SOURCE = Path(fusewise.__file__).parents[1]


def launched(op: str, case: str, dtype: str, target: str = "sm_90") -> list[triton_kernels.Launch]:
    problem = targets.problem_for(Task(op, case, dtype, "fwd", "cpu", 0))
    entry = plugin.select(["fusewise-triton"], op, "cpu")[0]
    assert entry.provider is not None
    run = entry.provider.build(problem)
    with ours._serving_any_device(problem, "triton", target), triton_kernels.recorded(target) as launches:
        passes.once(problem, run)
    return launches


@pytest.fixture(scope="module")
def rope() -> list[Stage]:
    (launch,) = launched("rope", "llama-3-8b-decode-b64", "bf16")
    return triton_kernels.stages(launch.compiled, "rope", "sm_90")


def test_every_stage_of_a_real_kernel(rope: list[Stage]) -> None:
    assert [stage.stage for stage in rope] == ["ttir", "ttgir", "llir", "ptx", "sass"]
    for stage, word in zip(rope, ("tt.load", "#ttg", "ptr addrspace(1)", "ld.global", "LDG"), strict=True):
        assert word in stage.text
        assert str(SOURCE) not in stage.text and "loc(" not in stage.text and "!dbg" not in stage.text


def test_lines_lead_to_the_kernels_source(rope: list[Stage]) -> None:
    kernel, angles = (f"fusewise/ops/rope/_triton_{name}.py" for name in ("kernel", "angles"))
    sources = {path: (SOURCE / path).read_text().splitlines() for path in (kernel, angles)}
    for stage in rope:
        texts = stage.text.splitlines()
        assert len(stage.lines) > 20
        for line, place in stage.lines.items():
            path, _, number = place.rpartition(":")
            assert 1 <= line <= len(texts)
            assert 1 <= int(number) <= len(sources[path])
    # In every stage, the stores map to the same source line.
    stores = {f"{kernel}:{number}" for number, line in enumerate(sources[kernel], start=1) if "tl.store(" in line}
    for stage, word in zip(rope, ("tt.store", "tt.store", "st.global", "st.global", "STG"), strict=True):
        places = {stage.lines.get(n) for n, line in enumerate(stage.text.splitlines(), start=1) if word in line}
        assert places <= stores, (stage.stage, places)


def test_the_rope_kernel_moves_sixteen_bytes_at_a_time(rope: list[Stage]) -> None:
    counts = rope[-1].counts
    assert counts["STG.128"] >= 1 and counts["LDG.128"] >= 1
    assert counts["spill_loads"] == counts["spill_stores"] == 0
    assert 0 < counts["registers"] <= 64


def test_the_gated_kernel_uses_tensor_cores_and_tma() -> None:
    (launch,) = launched("geglu", "quick-square", "bf16")
    counts = triton_kernels.stages(launch.compiled, "geglu", "sm_90")[-1].counts
    assert counts["HGMMA"] > 0 and counts["UTMALDG"] > 0
    assert (
        counts["shared_bytes"] == launch.compiled.metadata.shared > 48 * 1024
    )  # requested at launch, not in the binary


def test_a_gpu_without_tma_gets_the_kernel_that_it_would_run() -> None:
    (launch,) = launched("geglu", "quick-square", "bf16", "sm_80")
    counts = triton_kernels.stages(launch.compiled, "geglu", "sm_80")[-1].counts
    assert counts["HMMA"] > 0 and counts["LDGSTS.128"] > 0


@pytest.mark.parametrize("impl", ["gluon", "cuda"])
def test_kernels_for_one_gpu_are_not_shown_for_another(impl: str) -> None:
    problem = targets.problem_for(Task("geglu", "quick-square", "bf16", "fwd", "cpu", 0))
    (entry,) = plugin.select([f"fusewise-{impl}"], "geglu", "cpu")
    assert entry.provider is not None
    with pytest.raises(plugin.Unsupported, match="its kernels are for sm_90, not for sm_100"):
        entry.provider.stages(problem, "sm_100")


def test_a_launch_may_ask_for_properties_of_the_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Gluon's choice of tiles does for the memory's speed."""
    from triton.runtime import driver

    here = SimpleNamespace(utils=object())
    monkeypatch.setattr(driver, "_default", here)
    with triton_kernels.recorded("sm_90"):
        assert driver.active.utils is here.utils


def test_what_a_size_divides_decides_the_width_of_loads() -> None:
    """A masked copy: if n is a multiple of 16, the mask covers whole vectors."""
    from lab_triton import copy_kernel

    x, y = torch.zeros(4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    counts = {}
    for n in (4096, 4095):
        with triton_kernels.recorded("sm_90") as launches:
            copy_kernel[(4,)](x, y, n, BLOCK=1024, num_warps=4)
        counts[n] = triton_kernels.stages(launches[0].compiled, "copy", "sm_90")[-1].counts
        kernel = triton_kernels.kernel(launches[0])
        assert (kernel.read, kernel.written) == (8192, 8192)
    assert "LDG.128" in counts[4096] and "LDG.16" not in counts[4096]
    assert "LDG.16" in counts[4095] and "LDG.128" not in counts[4095]
    assert not y.any()  # nothing ran


def test_recording_leaves_triton_as_it_was() -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    before = driver._active, JITFunction.run
    launched("rope", "cube-4", "fp32")
    assert (driver._active, JITFunction.run) == before
    with pytest.raises(ValueError, match="impl must be able to serve"):
        fusewise.rope(torch.zeros(1, 4, 2, 8), inv_freq=torch.ones(4), impl="triton")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_our_cuda_kernels_from_source_to_machine_code() -> None:
    problem = targets.problem_for(Task("rope", "llama-3-8b-decode-b64", "bf16", "fwd", "cpu", 0))
    found = ours.cuda_stages(problem, "sm_90")
    assert [s.stage for s in found] == sorted((s.stage for s in found), key=["source", "ptx", "sass"].index)
    ptx, sass = ({s.part: s for s in found if s.stage == name} for name in ("ptx", "sass"))
    kernels = {"rope_kernel 8 wide, 1 heads", "rope_kernel 8 wide, 4 heads", "light_rope_kernel of 16 bytes"}
    assert set(ptx) == set(sass) == kernels
    widest = next(iter(sass.values()))
    assert widest.counts["LDG.128"] > 0 and widest.counts["spill_loads"] == 0
    for stage in (widest, ptx[widest.part]):
        assert any(place.startswith("fusewise/ops/rope/_cuda/") for place in stage.lines.values())
    assert {"rope.cu", "memory.cuh"} <= {s.part for s in found if s.stage == "source"}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_the_cuda_kernels_of_a_call_that_copies_a_part_of_each_head() -> None:
    """It uses 8-byte accesses, which the 16-byte kernel does not support, and partly the copy engine."""
    problem = targets.problem_for(Task("rope", "gpt-neox-20b-train", "fp16", "fwd", "cpu", 0))
    found = {s.part: s for s in ours.cuda_stages(problem, "sm_90") if s.stage == "sass"}
    assert set(found) == {
        "bulk_rope_kernel of 8 bytes",
        "rope_kernel 4 wide, 1 heads",
        "rope_kernel 4 wide, 8 heads",
        "light_rope_kernel of 8 bytes",
    }
    assert {"UBLKCP"} <= {name.split(".")[0] for name in found["bulk_rope_kernel of 8 bytes"].counts}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_the_cuda_kernels_of_a_serving_call() -> None:
    problem = targets.problem_for(Task("rope_and_cache", "glm-4-9b-cache-decode-b64", "bf16", "fwd", "cpu", 0))
    parts = {s.part for s in ours.cuda_stages(problem, "sm_90") if s.stage == "sass"}
    direct = {
        f"direct_rope_and_cache_kernel {of}" for of in ("2 wide, 1 heads, 2 at once", "4 wide, 2 heads, 2 at once")
    }
    assert {*direct, "rope_and_cache_kernel 4 wide, 1 heads"} <= parts
    assert not any(" 8 wide" in part or ", copies" in part for part in parts)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_the_cuda_kernels_of_a_norm() -> None:
    problem = targets.problem_for(Task("qk_norm_rope", "olmo-2-7b-decode-b64", "bf16", "fwd", "cpu", 0))
    parts = {s.part for s in ours.cuda_stages(problem, "sm_90") if s.stage == "sass"}
    direct = {f"direct_row_kernel {of}" for of in ("4 wide, 1 heads", "8 wide, 1 heads", "8 wide, 4 heads")}
    assert parts == {*direct, "norm_rope_kernel 4 wide", "norm_rope_kernel 8 wide"}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_the_gated_units_cuda_kernels_from_source_to_machine_code() -> None:
    problem = targets.problem_for(Task("geglu", "quick-square", "bf16", "fwd+bwd", "cpu", 0))
    found = ours.cuda_stages(problem, "sm_90")
    sideways = [f"y of {rows} rows sideways" for rows in (208, 192, 160, 144, 128)]
    epilogues = {f"gated_linear_kernel {name}" for name in ("y", "preact", "gradient", "down", *sideways)}
    for name in ("ptx", "sass"):
        assert {s.part for s in found if s.stage == name} == {*epilogues, "gate_gradient_kernel"}
    assert {"gated_linear.cu", "gate_gradient.cuh"} <= {s.part for s in found if s.stage == "source"}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
@pytest.mark.parametrize(("case", "pass_"), [("quick-square", "fwd+bwd"), ("quick-decode", "fwd")])
def test_float32_has_a_cuda_kernel_of_its_own(case: str, pass_: Any) -> None:
    found = ours.cuda_stages(targets.problem_for(Task("geglu", case, "fp32", pass_, "cpu", 0)), "sm_90")
    assert [(s.stage, s.part) for s in found if s.stage != "source"] == [
        ("ptx", "unit_kernel"),
        ("sass", "unit_kernel"),
    ]
    assert [s.part for s in found if s.stage == "source"] == [path.name for path in _cuda.FLOAT32_SOURCES]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_the_gated_units_cuda_kernels_of_few_rows() -> None:
    """They have as many columns as the problem's 16 rows need."""
    problem = targets.problem_for(Task("geglu", "quick-decode", "bf16", "fwd", "cpu", 0))
    parts = {s.part for s in ours.cuda_stages(problem, "sm_90") if s.stage == "sass" and "few_rows" in s.part}
    assert parts == {f"few_rows_kernel of 16 columns, tiles to {features} features" for features in (64, 128)}


def test_the_ledger_of_the_gated_units_cuda_kernels() -> None:
    """The forward writes pre-activations; a second kernel overwrites them with their gradient, computed from dy, and
    adds up the bias gradient. The two matrix products of the backward are torch's.
    """
    problem = targets.problem_for(Task("geglu", "memory-n8192-d1024", "bf16", "fwd+bwd", "cpu", 0))
    forward, gradient, *products = GatedCuda().traffic(problem.compact(), "sm_90")
    assert [kernel.name for kernel in (forward, gradient)] == ["gated_linear (cuda)"] * 2
    rows, features, hidden = 8192, 1024, 4096
    assert (
        forward.read == 2 * (rows * features + 2 * hidden * features + 2 * hidden)
        and forward.written == 2 * 3 * rows * hidden
    )
    assert gradient.read == 2 * 3 * rows * hidden and gradient.written == 2 * 2 * rows * hidden + 4 * 2 * hidden
    assert sum("mm" in kernel.name for kernel in products) == 2


@pytest.mark.parametrize(
    "name", ["eager", "torchscript", "torch.compile", "fusewise-triton", "fusewise-gluon", "fusewise-cuda"]
)
def test_every_ledger_tells_the_product_of_a_gated_unit(name: str) -> None:
    problem = targets.problem_for(Task("geglu", "quick-square", "bf16", "fwd", "cpu", 0))
    (entry,) = plugin.select([name], "geglu", "cpu")
    assert entry.provider is not None
    products = [kernel.product for kernel in entry.provider.traffic(problem.compact(), "sm_90")]
    case = problem.case  # type: ignore[attr-defined]
    (product,) = [product for product in products if product is not None]
    assert product[:2] == (2 * case.features * case.rows, 2 * case.features * 2 * case.hidden)


@pytest.mark.parametrize(
    ("name", "rows", "waves"),
    [  # rows of a pass; of 4096 features, those that 132 SMs compute at once, eight tiles high
        ("fusewise-triton", 8 * 128, 4096 / (132 / 8 * 128)),
        ("fusewise-gluon", 8 * 128, 4096 / (132 / 8 * 64)),
        ("fusewise-cuda", 8 * 256, 4096 / (66 / 8 * 96)),  # two SMs, a tile
        ("eager", 2048, 8192 / 2048),  # u and g as one
    ],
)
def test_a_product_is_told_with_the_order_of_its_tiles(name: str, rows: int, waves: float) -> None:
    problem = targets.problem_for(Task("geglu", "memory-n8192-d1024", "bf16", "fwd", "cpu", 0))
    (entry,) = plugin.select([name], "geglu", "cpu")
    assert entry.provider is not None
    (product,) = [k.product for k in entry.provider.traffic(problem.compact(), "sm_90") if k.product is not None]
    assert product[2:] == (8192 / rows, math.ceil(waves), 1)


@pytest.mark.parametrize(
    ("epilogue", "passes", "waves"),
    [  # of 6400 by 4096 features; 66 tiles of two SMs at once, eight high
        (_cuda.tiles.GRADIENT, 4, 6),  # 256 by 96
        (_cuda.tiles.DOWN, 4, 3),  # 256 by 192, of a single product
        (_cuda.tiles.SIDE_160, 5, 4),  # 160 by 128
        (_cuda.tiles.FEW, 4, 4),  # not in raster order
    ],
)
def test_each_kernel_in_cuda_has_its_tiles(epilogue: int, passes: int, waves: int) -> None:
    x, half = (
        torch.empty(6400, 1024, device="meta", dtype=torch.bfloat16),
        torch.empty(4096, 1024, device="meta").half(),
    )
    down = epilogue == _cuda.tiles.DOWN
    given = {"x": x, "value": half.mT if down else half, "gate": None if down else half, "epilogue": epilogue}
    product = ours._product_in_cuda(given)
    assert product is not None and product[2:] == (passes, waves, 1)
    assert product.weights == (1 if down else 2) * 2 * half.numel()


def test_a_down_projection_in_triton_is_told_with_its_order() -> None:
    dz, w_down = torch.empty(6400, 1024, device="meta").half(), torch.empty(1024, 4096, device="meta").half()
    given = {"dz_ptr": dz, "w_ptr": w_down, "BLOCK_M": 128, "BLOCK_F": 128, "GROUP_M": 8}
    product = ours._product_of(triton_kernels.Launch("down", given, (132,), None))
    assert product == (2 * dz.numel(), 2 * w_down.numel(), 7, 2, 1)  # 50 rows of tiles, 16.5 of 32 columns at once


def test_the_order_of_tiles_in_cuda_is_that_of_its_source() -> None:
    header = (Path(_cuda.__file__).parent / "tiles.cuh").read_text()
    assert f"GROUP_M = {_cuda.tiles.GROUP_M};" in header


def test_what_gluon_computes_in_less_time_is_in_the_ledger_as_its() -> None:
    """Even if this process asked before, of the machine it runs on, what Gluon computes here."""
    _cuda.lacks("forward", 2048, torch.empty(1024, 512, dtype=torch.bfloat16))
    problem = targets.problem_for(Task("geglu", "quick-square", "bf16", "fwd+bwd", "cpu", 0))
    forward, gradient, *_ = GatedCuda().traffic(problem.compact(), "sm_90")
    assert "preact" in forward.name and forward.name.endswith("gluon") and gradient.name == "gated_linear (cuda)"


def test_the_ledger_of_float32_has_the_products_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large problem and on a CPU with oneDNN, too: pre-activations are one tensor, and torch multiplies."""
    monkeypatch.setattr(_autograd, "LARGE_BYTES", 0)
    monkeypatch.setattr(_onednn, "there", lambda: True)
    problem = targets.problem_for(Task("geglu", "quick-square", "fp32", "fwd+bwd", "cpu", 0))
    names = [kernel.name for kernel in GatedCuda().traffic(problem.compact(), "sm_90")]
    gradients = ["gate_gradient_kernel", "aten.sum.IntList_out", "aten.mm.default", "aten.mm.default"]
    assert names == ["gated_linear (cuda)", *gradients]


def test_a_ledger_leaves_nothing_for_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What copies matrices is chosen for the ledger, too, and anew for a call on a CPU."""
    monkeypatch.setattr(_autograd, "LARGE_BYTES", 0)
    there = _products._choice.unavailable("triton", "cpu", torch.bfloat16)
    problem = targets.problem_for(Task("geglu", "quick-square", "bf16", "fwd+bwd", "cpu", 0))
    assert "copy_kernel" in [kernel.name for kernel in GatedTriton().traffic(problem.compact(), "sm_90")]
    assert _products._choice.unavailable("triton", "cpu", torch.bfloat16) == there


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump on this machine")
def test_inductors_cpp_kernels_have_machine_code() -> None:
    problem = targets.problem_for(Task("gelu", "gelu-256", "fp32", "fwd", "cpu", 0))
    found = plugin.select(["torch.compile"], "gelu", "cpu")[0].provider.stages(problem, "cpu")  # type: ignore[union-attr]
    cpp, assembly = (next(s for s in found if s.stage == name) for name in ("cpp", "assembly"))
    assert assembly.part == cpp.part and found.index(assembly) == found.index(cpp) + 1
    functions = re.findall(r"^[0-9a-f]+ <(.+)>:$", assembly.text, re.MULTILINE)
    assert functions and all(name.startswith("kernel") for name in functions)
    assert assembly.counts["instructions"] > 30


def test_only_its_own_functions_of_a_library(tmp_path: Path) -> None:
    problem = targets.problem_for(Task("rope", "cube-4", "fp32", "fwd", "cpu", 0))
    entry = plugin.select(["fusewise-cpu"], "rope", "cpu")[0]
    assert entry.provider is not None
    stages = ours.cpu_stages(problem, entry.provider.build(problem))
    assembly = stages[-1]
    assert assembly.stage == "assembly" and assembly.counts["instructions"] > 100
    named = re.findall(r"^[0-9a-f]+ <(.*)>:$", assembly.text, re.MULTILINE)
    assert "fusewise_rope" in named and not any("Bf16" in name or name.startswith("std::") for name in named)
    assert any(stage.language == "cpp" and "rope" in stage.part for stage in stages)
