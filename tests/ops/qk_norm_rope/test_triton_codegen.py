"""Machine code of the Triton kernels for sm_90, checked without a GPU: no spills, few registers, 16-byte loads and stores."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fusewise.ops.qk_norm_rope._problem import Norm
from fusewise.ops.rope._problem import Problem, Spec

triton = pytest.importorskip("triton")
from fusewise.ops.qk_norm_rope import _triton  # noqa: E402

from ..rope.test_triton_codegen import PROCESSORS, Code, compile_kernel  # noqa: E402


def launch_of(
    head_dim: int,
    *,
    backward: bool,
    dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int] = (32, 8),
    over: str = "head",
    rotary_dim: int = 0,
    weight_dtype: torch.dtype | None = None,
    weight_grad: bool = True,
    where: dict[str, torch.Tensor] | None = None,
    **spec: Any,
) -> tuple[Any, int, dict[str, Any], dict[str, int]]:
    """The launch for a training size; nothing is allocated."""
    rows = (16384,) if spec.get("layout") == "thd" else (4, 4096)
    xs = tuple(torch.empty(*rows, count, head_dim, dtype=dtype, device="meta") for count in heads)
    pairs = (rotary_dim or head_dim) // 2
    table = spec.get("table", "cos_sin")
    angles = torch.empty((pairs,) if table == "inv_freq" else (4096, pairs), device="meta")
    sin = angles if table == "cos_sin" else None
    norm = Norm(1e-6, 0.0, over)
    weights = [
        torch.empty(norm.width(x, spec.get("layout", "bshd")), dtype=weight_dtype or dtype, device="meta") for x in xs
    ]
    given = {"positions": None, "offsets": None, "cu_seqlens": None, **(where or {})}
    ys = tuple(torch.empty_like(x) for x in xs)
    problem = Problem.build(xs, ys, (angles, sin, *given.values(), 0, Spec(rotary_dim=rotary_dim, **spec).encode()))
    partials = tuple(torch.empty(1, device="meta") for _ in xs) if weight_grad else ()
    dys = ys if backward else ()
    return _triton.arguments(problem, weights, norm, PROCESSORS, dys, partials if backward else ())


def compiled(launch: tuple[Any, int, dict[str, Any], dict[str, int]]) -> Code:
    kernel, _, bound, options = launch
    return compile_kernel(kernel, bound, **options)


MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "qwen3-fp32-weights": {"head_dim": 128, "weight_dtype": torch.float32},
    "qwen3-fp32": {"head_dim": 128, "dtype": torch.float32},
    "gemma3": {"head_dim": 256, "heads": (16, 8)},
    "qwen3-next": {"head_dim": 256, "heads": (16, 2), "rotary_dim": 64},
    "glm4-moe": {"head_dim": 128, "heads": (96, 8), "rotary_dim": 64},
    "interleaved": {"head_dim": 128, "pairing": "interleaved"},
    "olmo2-7b": {"head_dim": 128, "heads": (32, 32), "over": "all"},
    "olmo2-32b": {"head_dim": 128, "heads": (40, 8), "over": "all"},
}
# An SM has 65,536 registers: these limits allow 1024 threads forward and 512 backward, which also keeps the sums for the
# weights; half of that if a program handles all heads of a token.
REGISTERS = {"head": (64, 128), "all": (128, 255)}
# Bytes per thread that the flat form's backward may spill, for any source of angles, so that all programs run concurrently.
SPILLED = 64


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_no_spills_few_registers_wide_accesses(name: str, backward: bool) -> None:
    model = MODELS[name]
    code = compiled(launch_of(**model, backward=backward, weight_grad=False))
    assert code.stack == 0
    assert not any(instruction.startswith(("LDL", "STL")) for instruction in code.instructions)
    limit = REGISTERS[model.get("over", "head")][backward]
    assert code.registers <= limit + (16 if "rotary_dim" in model else 0)
    stores, loads = code.widths("STG"), code.widths("LDG")
    assert set(stores) == {128}, f"stores of {dict(stores)} bits"
    assert loads[128] >= (2 if backward else 1) * stores[128], f"loads of {dict(loads)} bits"


@pytest.mark.parametrize("name", MODELS)
def test_the_sums_for_the_weights_fit(name: str) -> None:
    model = MODELS[name]
    code = compiled(launch_of(**model, backward=True))
    assert code.stack <= (16 if "rotary_dim" in model else 0)  # with triton 3.9; none with 3.6
    assert code.registers <= REGISTERS[model.get("over", "head")][1]
    assert code.widths("STG")[128] > 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_threads_of_a_row_have_the_same_sum(name: str, backward: bool) -> None:
    """Bitwise equal, so it does not matter which thread writes it to shared memory: shuffled values are added, never fused into
    an FMA with a product of the receiving thread."""
    code = compiled(launch_of(**MODELS[name], backward=backward))
    handed = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+),", code.ptx))
    added = re.findall(r"add\.f32\s+%\w+, (%\w+), (%\w+);", code.ptx)
    assert handed and handed <= {register for pair in added for register in pair}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("weight_grad", [True, False], ids=["weights", "fixed-weights"])
def test_all_programs_of_a_backward_run_at_once(name: str, weight_grad: bool) -> None:
    """The number of programs is what fits with this register count: with more registers the last ones would form a second
    wave, as long as the first."""
    launch = launch_of(**MODELS[name], backward=True, weight_grad=weight_grad)
    _, programs, _, options = launch
    of_a_warp = triton.cdiv(32 * compiled(launch).registers, 256) * 256
    assert triton.cdiv(programs, PROCESSORS) * options["num_warps"] <= 65536 // of_a_warp


def ids(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int64, device="meta")


SOURCES: dict[str, dict[str, Any]] = {
    "ids": {"where": {"positions": ids(4, 4096)}},
    "sections": {"where": {"positions": ids(3, 4, 4096)}, "sections": (24, 20, 20), "sections_interleaved": True},
    "offsets": {"where": {"offsets": ids(4)}},
    "packed": {"where": {"cu_seqlens": ids(9)}, "layout": "thd"},
    "context-parallel": {"cp_rank": 1, "cp_size": 2},
    "frequencies": {"table": "inv_freq"},
    "angles": {"table": "angles"},
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("form", ["pairs", "flat"])
def test_any_source_of_angles(source: str, form: str) -> None:
    """Backward with weight sums: the pair form spills at most one value, in the search for a token's sequence."""
    options = {**SOURCES[source], "rotary_dim": 64 if form == "flat" else 0}
    if source == "sections" and form == "flat":
        options["sections"] = (12, 10, 10)
    code = compiled(launch_of(128, backward=True, **options))
    assert code.stack <= (SPILLED if form == "flat" else 8 if source == "packed" else 0)


def test_adding_up_partial_sums() -> None:
    weights = [torch.empty(128, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    partials = [torch.empty(1056 * 128, device="meta") for _ in range(2)]
    code = compiled(_triton.sum_arguments(partials, weights, (841, 211)))
    assert code.stack == 0
    assert code.widths("LDG")[128] > 0
