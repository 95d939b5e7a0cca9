"""Machine code of the Triton kernel for sm_90, checked without a GPU: no spills, few registers, 16-byte loads and stores."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusewise.ops.rope._problem import Problem, Spec

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fusewise.ops.rope import _triton  # noqa: E402
from fusewise.ops.rope._triton_kernel import quotient  # noqa: E402

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
HOPPER, PROCESSORS = GPUTarget("cuda", 90, 32), 132


@dataclass(frozen=True)
class Code:
    """Statistics of a kernel's machine code."""

    registers: int
    stack: int
    shared: int
    ptx: str
    kernel: Any

    @functools.cached_property
    def instructions(self) -> Counter[str]:
        """Memory instructions with their width, as LDG.E.128. Disassembled lazily, as that is a fourth of the time."""
        return Counter(re.findall(r"\b((?:LDG|STG|LDL|STL)[.\w]*)", self.kernel.asm["sass"]))

    def widths(self, kind: str) -> Counter[int]:
        """The number of global loads (LDG) or stores (STG) by width in bits."""
        found: Counter[int] = Counter()
        for name, count in self.instructions.items():
            if name.startswith(kind):
                width = re.search(r"\.(64|128|U8|S8|U16|S16)", name)
                found[int(width[1].lstrip("US")) if width else 32] += count
        return found


def compile_problem(problem: Problem) -> Code:
    """Compile the kernel for a problem as for a launch on an H200."""
    _, bound = _triton.arguments(problem, PROCESSORS)
    return compile_kernel(_triton.rope_kernel, bound, num_warps=_triton.NUM_WARPS)


def compile_kernel(kernel: Any, bound: dict[str, Any], **options: int) -> Code:
    """Compile a kernel for its arguments: aligned pointers, the same specialization as a launch."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        value = bound[name]
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=HOPPER,
        options={**options, "enable_fp_fusion": True},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack, shared = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage).groups())  # type: ignore[union-attr]
    return Code(registers, stack, shared, compiled.asm["ptx"], compiled)


def problem(
    head_dim: int,
    dtype: torch.dtype,
    *,
    heads: tuple[int, int] = (32, 8),
    k_head_dim: int | None = None,
    rotary_dim: int = 0,
    table_dtype: torch.dtype = torch.float32,
    in_place: bool = False,
    positions: torch.Tensor | None = None,
    table: str = "cos_sin",
    tokens: int = 1024,
    gap: int = 0,
    **spec: Any,
) -> Problem:
    """A problem of training size, with `gap` features between heads; its data is never touched."""
    q, k = (
        torch.empty(4, tokens, count, width + gap, dtype=dtype)[..., :width]
        for count, width in zip(heads, (head_dim, k_head_dim or head_dim), strict=True)
    )
    pairs = (rotary_dim or head_dim) // 2
    angles = torch.empty((pairs,) if table == "inv_freq" else (tokens, pairs), dtype=table_dtype)
    ys = (q, k) if in_place else (torch.empty_like(q), torch.empty_like(k))
    sin = angles if table == "cos_sin" else None
    text = Spec(rotary_dim=rotary_dim, table=table, **spec).encode()  # type: ignore[arg-type]
    return Problem.build((q, k), ys, (angles, sin, positions, None, None, 0, text))


# A single k head is spread over all SMs and uses 16-byte vectors only from 32,768 tokens on.
WIDTHS = (64, 80, 96, 112, 128, 192, 256)
PROBLEMS: dict[str, Any] = {
    **{f"{d}-{name}": lambda d=d, t=t: problem(d, t) for d in WIDTHS for name, t in (("bf16", torch.bfloat16), ("fp32", torch.float32))},
    "60-fp32": lambda: problem(60, torch.float32, heads=(60, 60)),
    "128-fp16": lambda: problem(128, torch.float16),
    "128-bf16-table-bf16": lambda: problem(128, torch.bfloat16, table_dtype=torch.bfloat16),
    "80-leading-32": lambda: problem(80, torch.bfloat16, rotary_dim=32),
    "96-leading-24": lambda: problem(96, torch.bfloat16, rotary_dim=24, heads=(64, 64)),
    "128-trailing-64": lambda: problem(128, torch.bfloat16, rotary_dim=64, rotary_start=-64),
    "192-trailing-64-to-half": lambda: problem(
        192, torch.bfloat16, heads=(128, 1), k_head_dim=64, rotary_dim=64, rotary_start=-64, tokens=8192,
        pairing="interleaved_to_half",
    ),
    "128-interleaved": lambda: problem(128, torch.bfloat16, pairing="interleaved"),
    "64-interleaved-fp32": lambda: problem(64, torch.float32, pairing="interleaved"),
    "128-leading-64-interleaved": lambda: problem(128, torch.bfloat16, rotary_dim=64, pairing="interleaved", heads=(32, 2)),
    "128-inverse": lambda: problem(128, torch.bfloat16, inverse=True),
    "128-in-place": lambda: problem(128, torch.bfloat16, in_place=True),
    "128-in-place-interleaved": lambda: problem(128, torch.bfloat16, in_place=True, pairing="interleaved"),
    "128-ids": lambda: problem(128, torch.bfloat16, positions=torch.empty(4, 1024, dtype=torch.int64)),
    "64-heads-71-1": lambda: problem(64, torch.bfloat16, heads=(71, 1), tokens=8192),
    "128-bhsd": lambda: problem(128, torch.bfloat16, heads=(1024, 1024), tokens=32, layout="bhsd"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_spills_few_registers_wide_accesses(name: str) -> None:
    case = PROBLEMS[name]()
    code = compile_problem(case)
    assert code.stack == 0
    assert not any(instruction.startswith(("LDL", "STL")) for instruction in code.instructions)
    assert code.registers <= 64, "two thousand threads to a multiprocessor need 32 to 64 registers each"
    stores = code.widths("STG")
    assert set(stores) == {128}, f"stores of {dict(stores)} bits"
    loads = code.widths("LDG")
    assert loads[128] >= stores[128], f"loads of {dict(loads)} bits"  # for q and k: at least as many loads as stores


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_table_is_read_by_16_bytes(head_dim: int, dtype: torch.dtype) -> None:
    """Each thread loads its own values, without exchange between threads."""
    code = compile_problem(problem(head_dim, dtype))
    assert set(code.widths("LDG")) == {128}
    assert code.shared == 0


@pytest.mark.parametrize(
    "case",
    [
        problem(58, torch.float32, heads=(58, 58)),
        problem(96, torch.bfloat16, rotary_dim=24, heads=(64, 64), in_place=True),
    ],
    ids=["halves of 116 bytes", "halves of 24 bytes in place"],
)
def test_halves_that_are_aligned_unlike_each_other_have_one_layout(case: Problem) -> None:
    """The layout of the less aligned half, so that adjacent threads hold adjacent elements of both."""
    assert compile_problem(case).shared == 0


@pytest.mark.parametrize("table", ["inv_freq", "angles"])
def test_angles_cost_no_spills(table: str) -> None:
    """Argument reduction in float64, with the same loads and stores."""
    code = compile_problem(problem(128, torch.bfloat16, table=table))
    assert code.stack == 0
    assert not any(instruction.startswith(("LDL", "STL")) for instruction in code.instructions)
    assert set(code.widths("STG")) == {128}


def test_long_offsets_cost_no_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variant for more than 2^31 elements."""
    monkeypatch.setattr(_triton, "reach_of", lambda problem: 2**31)
    code = compile_problem(problem(128, torch.bfloat16))
    assert code.stack == 0
    assert set(code.widths("STG")) == {128}


def test_no_heads_of_q_beside_some_of_k_compile() -> None:
    """The flat variant, interleaved: the branch for q is compiled, too, and a tile of one feature has no pair."""
    compile_problem(problem(24, torch.bfloat16, heads=(0, 2), rotary_dim=8, pairing="interleaved"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pairs_at_any_address_compile(dtype: torch.dtype) -> None:
    """The flat variant, interleaved: heads an odd number of features apart are accessed by the feature, half a pair."""
    case = problem(24, dtype, rotary_dim=8, pairing="interleaved", gap=1)
    assert set(compile_problem(case).widths("STG")) == {8 * dtype.itemsize}


@given(divisor=st.integers(1, 2**31 - 1), n=st.integers(0, 2**31 - 1))
def test_division_is_exact(divisor: int, n: int) -> None:
    magic, shift = _triton.division(divisor)
    assert -(2**31) <= magic < 2**31
    for value in (n, n // divisor * divisor, max(0, n // divisor * divisor - 1)):
        assert (2 * value * (magic % 2**32) >> 32) >> shift == value // divisor


@triton.jit
def _quotients(n_ptr, to_ptr, magic, shift, COUNT: tl.constexpr):
    offs = tl.arange(0, COUNT)
    tl.store(to_ptr + offs, quotient(tl.load(n_ptr + offs), magic, shift))


@pytest.mark.interpreter
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 100, 2**20 + 1, 2**30 + 1, 2**31 - 1])
def test_the_kernel_divides_up_to_the_last_int32(divisor: int) -> None:
    """Products of 2^31 and more must not become negative."""
    most = 2**31 - 1
    n = torch.tensor([0, divisor - 1, divisor, 2**30, 3 << 29, most // divisor * divisor - 1, most - 1, most])
    to = torch.empty(8, dtype=torch.int32)
    _quotients[(1,)](n.int(), to, *_triton.division(divisor), COUNT=8)
    assert to.tolist() == (n // divisor).tolist()


@given(
    batch=st.integers(1, 100),
    tokens=st.integers(0, 10**6),
    bytes_per_token=st.integers(2, 10**6),
    table_bytes=st.integers(0, 2**12),
)
def test_stripes_divide_the_tokens(batch: int, tokens: int, bytes_per_token: int, table_bytes: int) -> None:
    stripe = _triton._stripe(batch, tokens, bytes_per_token, None)
    assert stripe >= 1 and tokens % stripe == 0
    if stripe < tokens:
        assert _triton.STRIPE_BYTES / 4 <= stripe * bytes_per_token <= _triton.STRIPE_BYTES
    stripe = _triton._stripe(batch, tokens, bytes_per_token, table_bytes)
    assert stripe >= 1 and tokens % stripe == 0
    if stripe < tokens:
        moved, read = stripe * bytes_per_token / _triton.STRIPE_BYTES, stripe * table_bytes / _triton.STRIPE_TABLE_BYTES
        assert max(moved, read) >= 1 / 4 and min(moved, read) <= 1


@pytest.mark.parametrize(
    ("tokens", "stripe"),
    [
        (512, 512),
        (1024, 512),
        (1088, 272),
        (1120, 280),
        (1152, 384),
        (1280, 320),
        (4096, 512),
        (1087, 1087),
        (1041, 347),
        (1042, 1042),
    ],
)
def test_stripes_of_a_sweep(tokens: int, stripe: int) -> None:
    """Eight heads of 256 in float32, q and k: 512 tokens move 16 MiB. The table has 1 KiB per token."""
    assert _triton._stripe(32, tokens, 2**15, None) == stripe
    assert _triton._stripe(32, tokens, 2**15, 2**10) == (2048 if tokens == 4096 else tokens)
