"""The Triton kernels: every configuration the heuristic can choose, in the interpreter and compiled for Hopper without a GPU."""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from fusewise.ops.gated_linear import _triton, _triton_gate, reference
from fusewise.ops.gated_linear._problem import Halves, Spec, new_preact, split_preact

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SHARED = 227 * 1024  # bytes of shared memory a program may have on sm_90
SPEC = Spec("gelu_tanh", "stacked")

# (rows, features, hidden): decode, a wave's worth of small tiles, and the sizes that the largest tiles are for.
SIZES = [(1, 4096, 14336), (64, 2048, 4096), (512, 4096, 2048), (2048, 1024, 4096), (16384, 4096, 16384)]


def every_configuration() -> list[tuple[str, bool, _triton.Config]]:
    """(epilogue, tma, configuration) for everything the heuristic chooses over small and large sizes."""
    found = {}
    for epilogue, tma in itertools.product(("y", "preact", "gradient", "down"), (True, False)):
        sizes = (1, 16, 40, 64, 65, 256, 1024, 4096, 65536)
        for rows, hidden in itertools.product(sizes, (512, 2048, 8192, 10240, 16384, 17408, 24576, 32768)):
            config = _triton.choose(rows, hidden, 132, epilogue=epilogue, tma=tma)
            found[epilogue, tma, config] = None
    return list(found)


EVERY = every_configuration()


def test_the_heuristic_is_deterministic_and_grows_with_the_shape() -> None:
    chosen = [_triton.choose(m, f, 132, epilogue="y") for m, _, f in SIZES]
    assert chosen == [_triton.choose(m, f, 132, epilogue="y") for m, _, f in SIZES]
    areas = [config.block_m * config.block_f for config in chosen]
    assert areas == sorted(areas) and chosen[-1].block_m == chosen[-1].block_f == 128
    assert chosen[0].block_m == 16 and chosen[1].block_m == 64


def test_few_rows_take_the_first_tile_that_runs_at_once() -> None:
    """Every tile of the tables is chosen somewhere, and shares a key's space with the others."""
    for epilogue, table in (("y", _triton._FEW_ROWS), ("down", _triton._FEW_ROWS_DOWN)):
        for rows, known in table.items():
            tiles = [config for config, _ in known]
            found = {_triton.choose(rows, f, 132, epilogue=epilogue) for f in range(512, 40960, 512)}
            assert found == set(tiles)
            assert set(tiles) <= set(_triton.configurations(rows, 4096, 132, epilogue=epilogue, tma=True))
            first, resident = known[0]
            most = resident * 132 * first.block_f
            assert _triton.choose(rows, most, 132, epilogue=epilogue) == first
            assert _triton.choose(rows, most + 1, 132, epilogue=epilogue) != first
    assert _triton.choose(3, 4096, 132, epilogue="y").block_m == 16


def test_few_rows_avoid_a_nearly_empty_last_wave() -> None:
    """Of 64 rows by 17408 features, tiles of 32 features would leave 16 to the third wave."""
    assert _triton.choose(64, 16896, 132, epilogue="y").block_f == 32
    assert _triton.choose(64, 17408, 132, epilogue="y").block_f == 16


def test_sums_are_few_and_every_multiprocessor_has_work() -> None:
    for rows, hidden, sums in itertools.product((1, 300, 4096, 65536), (64, 136, 1024, 32768), (False, True)):
        config = _triton.choose_gate(rows, hidden, 132, sums=sums)
        assert config.rows % config.block_m == 0 and config.block_m * config.block_f == 1024
        programs = -(-rows // config.rows) * -(-hidden // config.block_f)
        assert config.rows == config.block_m or programs >= 132
        assert config.rows <= max(64 if sums else 16, config.block_m)
    large = [_triton.choose_gate(65536, 32768, 132, sums=sums) for sums in (True, False)]
    assert [(config.rows, config.block_f) for config in large] == [(64, 128), (16, 128)]


@pytest.mark.parametrize("function", ["gate", "gate_gradient_into"])
def test_without_sums_programs_have_few_rows(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[bool] = []

    def choose(*size: int, sums: bool) -> Any:
        chosen.append(sums)
        return _triton.choose_gate(*size, sums=sums)

    monkeypatch.setattr(_triton_gate, "choose_gate", choose)
    monkeypatch.setattr(_triton_gate, "launch", lambda *_, **__: None)
    tensors = torch.empty(3 if function == "gate" else 5, 64, 128)
    getattr(_triton_gate, function)(*tensors, "silu")
    assert chosen == [False]


def operands(rows: int, features: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Halves, Tensor]:
    x, weight, bias = (
        torch.randn(rows, features),
        torch.randn(2 * hidden, features) / features**0.5,
        torch.randn(2 * hidden),
    )
    return x.to(dtype), Halves.of(SPEC, weight.to(dtype), None, bias.to(dtype)), torch.randn(rows, hidden).to(dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize(("epilogue", "tma", "config"), EVERY, ids=str)
def test_every_configuration_is_right(epilogue: str, tma: bool, config: _triton.Config, monkeypatch: Any) -> None:
    """Two tiles and a ragged rest in every dimension; always float32, since this tests the indexing."""
    monkeypatch.setattr(_triton, "choose", lambda *_, **__: config)
    monkeypatch.setattr(_triton, "_has_tma", lambda _: tma)
    monkeypatch.setattr(_triton, "by_library", lambda _: False)
    monkeypatch.setattr(_triton, "processors_of", lambda _: 3)  # programs take several tiles each
    rows, features, hidden = 2 * config.block_m + 5, config.block_d + 8, 2 * config.block_f + 12
    x, halves, dy = operands(rows, features, hidden, torch.float32)
    results = []
    for module in (_triton, reference):
        y, preact = torch.full((rows, hidden), torch.nan), new_preact(x, hidden, SPEC).fill_(torch.nan)
        dbias = torch.full((2, hidden), torch.nan)
        if epilogue == "gradient":
            module.recompute_gradient(dy, x, halves, preact, SPEC, dbias)
            results.append((preact, dbias))
        elif epilogue == "down":
            preact.copy_(torch.cat((dy, dy.flip(0)), 1))
            module.down_gradient(x, halves.value.mT.contiguous(), preact, y, preact, SPEC, dbias)
            results.append((y, preact, dbias))
        else:
            module.forward(x, halves, SPEC, y, preact if epilogue == "preact" else None)
            results.append((y, preact) if epilogue == "preact" else (y,))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.interpreter
@pytest.mark.parametrize(("rows", "stride"), [(3, 2**30), (2, 2**31)])
def test_rows_beyond_int32(rows: int, stride: int, monkeypatch: Any) -> None:
    """A row 2³¹ elements after the first, in every operand; the memory between them is never touched."""
    monkeypatch.setattr(_triton, "_has_tma", lambda _: False)
    memory, end = torch.empty(2**31 + 1024, dtype=torch.float16), 0

    def far(rows: Tensor) -> Tensor:
        nonlocal end
        start, end = end, end + rows.shape[1]
        return memory.as_strided(rows.shape, (stride, 1), start).copy_(rows)

    features, hidden = 16, 8
    x, halves, dy = operands(rows, features, hidden, torch.float16)
    dz, w_down = x.flip(0), halves.gate.mT.contiguous()
    u, g = torch.randn(2, rows, hidden).half()
    results = []
    for module, placed in ((_triton, far), (reference, torch.clone)):
        gated, remade, down = (placed(torch.zeros_like(dy)) for _ in range(3))
        kept, again, d_again, d_down = (placed(new_preact(x, hidden, SPEC).zero_()) for _ in range(4))
        module.gate(placed(u), placed(g), gated, "silu")
        module.forward(placed(x), halves, SPEC, remade, kept)
        module.recompute_gradient(placed(dy), placed(x), halves, again, SPEC, None)
        module.gradient(placed(dy), kept, d_again, SPEC, None)
        module.down_gradient(placed(dz), w_down, kept, down, d_down, SPEC, None)
        results.append((gated, remade, kept, again, d_again, down, d_down))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("unaligned", ["x_ptr", "w_value_ptr", "w_gate_ptr"])
def test_from_512_rows_on_unaligned_operands_are_copied(unaligned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(_triton, "_has_tma", lambda _: True)
    monkeypatch.setattr(_triton, "_start", lambda kernel, grid, config, arguments, device: started.append(arguments))
    for rows in (511, 512):
        sizes = {"x_ptr": rows, "w_value_ptr": 64, "w_gate_ptr": 64}
        of = {name: torch.randn(n, 40 + (name == unaligned)).bfloat16()[:, :40] for name, n in sizes.items()}
        halves = Halves(of["w_value_ptr"], of["w_gate_ptr"], None, None)
        _triton.forward(of["x_ptr"], halves, SPEC, empty(rows, 64, dtype=torch.bfloat16), None)
        assert started[-1]["TMA"] is (rows == 512)
        for name, matrix in of.items():
            given = started[-1][name]
            assert rows == 511 or torch.equal(given.base, matrix)
    assert len(started) == 2


def test_no_rows_start_nothing(monkeypatch: Any) -> None:
    for module, kernels in (
        (_triton, ("gated_linear_kernel", "down_gradient_kernel")),
        (_triton_gate, ("gate_kernel", "gate_gradient_kernel", "copy_kernel")),
    ):
        for kernel in kernels:
            monkeypatch.setattr(module, kernel, None)  # cannot be launched
    x, y, preact, weight, dbias = (torch.ones(*size) for size in ((0, 64), (0, 32), (0, 64), (64, 64), (3, 2, 32)))
    halves = Halves.of(SPEC, weight)
    _triton.forward(x, halves, SPEC, y, None)
    _triton.forward(x, halves, SPEC, y, preact)
    _triton.gradient(y, preact, preact, SPEC, dbias[0])
    _triton.recompute_gradient(y, x, halves, preact, SPEC, dbias[1])
    _triton.down_gradient(x, weight[:, :32], preact, y, preact, SPEC, dbias[2])
    _triton.gate(y, y, y, "silu")
    _triton.gate_gradient_into(y, y, y, y, y, "silu")
    _triton.copy_into(x, y)
    _triton.copy_into(weight, weight[:, :0])
    assert not dbias.any()


HOPPER = GPUTarget("cuda", 90, 32)


def compiled(kernel: Any, config: Any, arguments: dict[str, Any], target: GPUTarget = HOPPER) -> Any:
    """A kernel compiled for a GPU from the arguments of a launch."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        value, parameter = arguments[name], kernel.params[index]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{NAMES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, Tensor):
            signature[name] = f"*{NAMES[value.dtype]}"
            attributes[index,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[index,] = [["tt.divisibility", 16]]
    options = {"num_warps": config.num_warps, "num_stages": getattr(config, "num_stages", 3)}
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)


def resources(kernel: Any) -> tuple[int, Counter[str]]:
    """Bytes of stack (spilled registers) and instruction counts by name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack is not None, usage
    return int(stack[1]), Counter(re.findall(r"\b(HGMMA|HMMA|FFMA|UTMALDG|UTMASTG|LDL|STL)", kernel.asm["sass"]))


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


# All configurations; erf GELU for the tiles of large problems.
COMPILED = [
    (*chosen, activation)
    for chosen in EVERY
    for activation in ("gelu_tanh", "gelu")
    if activation == "gelu_tanh" or (chosen[1], chosen[2].block_f) == (True, 128)
]


def compiled_epilogue(
    epilogue: str, tma: bool, config: _triton.Config, activation: str, target: GPUTarget = HOPPER
) -> Any:
    """The kernel of a configuration, with bias and sums where its epilogue takes them."""
    dtype = torch.bfloat16
    rows, features, hidden = 4096, 1024, 4096
    x, preact, y = (
        empty(rows, features, dtype=dtype),
        empty(rows, 2 * hidden, dtype=dtype),
        empty(rows, hidden, dtype=dtype),
    )
    halves = split_preact(preact, SPEC)
    sums = empty(-(-rows // config.block_m), 2, hidden, dtype=torch.float32)
    if epilogue == "down":
        w_down = empty(features, hidden, dtype=dtype)
        _, arguments = _triton.down_arguments(
            x, w_down, halves, y, halves, config, 132, activation=activation, tma=tma, dbias=sums
        )  # fmt: skip
        return compiled(_triton.down_gradient_kernel, config, arguments, target)
    weight, bias = empty(2 * hidden, features, dtype=dtype), empty(2 * hidden, dtype=dtype)
    _, arguments = _triton.linear_arguments(
        x, Halves.of(SPEC, weight, None, bias), config, 132, epilogue=epilogue, activation=activation, tma=tma,
        y=None if epilogue == "gradient" else y, preact=None if epilogue == "y" else halves,
        dy=y if epilogue == "gradient" else None, dbias=sums if epilogue == "gradient" else None,
    )  # fmt: skip
    return compiled(_triton.gated_linear_kernel, config, arguments, target)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize(("epilogue", "tma", "config", "activation"), COMPILED, ids=str)
def test_compiles_for_hopper_without_spills(epilogue: str, tma: bool, config: _triton.Config, activation: str) -> None:
    kernel = compiled_epilogue(epilogue, tma, config, activation)
    stack, instructions = resources(kernel)
    assert kernel.metadata.shared <= SHARED
    # A few spilled words outside the loop are harmless; the tiles for large problems have none.
    assert stack <= (0 if tma and config.block_m > 64 else 64), instructions
    if tma:
        assert instructions["UTMALDG"] and instructions["UTMASTG"]
    if config.block_m >= 64:
        assert instructions["HGMMA"] and not instructions["HMMA"]
    else:
        assert instructions["HGMMA"] or instructions["HMMA"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("rows", [1, 20, 64, 256, 4096])
@pytest.mark.parametrize("epilogue", ["y", "preact", "gradient", "down"])
@pytest.mark.parametrize(
    ("target", "shared", "tma"),
    [
        (GPUTarget("cuda", 120, 32), 99 << 10, True),  # consumer Blackwell
        (GPUTarget("cuda", 86, 32), 99 << 10, False),
        (GPUTarget("hip", "gfx942", 64), 64 << 10, False),  # MI300
    ],
    ids=lambda value: value.arch if isinstance(value, GPUTarget) else "",
)
def test_a_gpu_with_less_shared_memory_gets_what_fits(
    target: GPUTarget, shared: int, tma: bool, epilogue: str, rows: int
) -> None:
    config = _triton.choose(rows, 4096, 128, shared, epilogue=epilogue, tma=tma)
    found = compiled_epilogue(epilogue, tma, config, "silu", target).metadata.shared
    assert found <= _triton.shared_bytes(config, epilogue=epilogue, tma=tma) <= shared
    assert config.num_stages >= 3


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("hidden", [4096, 8200])  # a multiple of 16 elements, and of 8
@pytest.mark.parametrize("forward", [True, False])
def test_the_elementwise_kernels_move_16_bytes_a_thread(forward: bool, hidden: int) -> None:
    config = _triton.choose_gate(16384, hidden, 132, sums=True)
    preact, dy = empty(16384, 2 * hidden, dtype=torch.bfloat16), empty(16384, hidden, dtype=torch.bfloat16)
    halves = split_preact(preact, SPEC)
    if forward:
        _, arguments = _triton_gate.forward_gate_arguments(*halves, dy, config, "silu")
        kernel = compiled(_triton_gate.gate_kernel, config, arguments)
    else:
        _, arguments = _triton_gate.gate_arguments(dy, halves, halves, config, "silu", preact.float())
        kernel = compiled(_triton_gate.gate_gradient_kernel, config, arguments)
    stack, _ = resources(kernel)
    moves = Counter(re.findall(r"\b(?:LDG|STG)\.E[.\w]*?\.?(128|64|U16)?\b", kernel.asm["sass"]))
    assert stack == 0 and moves["128"] == (3 if forward else 5) and not moves["U16"], moves


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
def test_without_tma_products_move_16_bytes_a_thread() -> None:
    """D and F multiples of 8, but not of 16."""
    config = _triton.Config(64, 64, 64, 4, 4)
    x, weight, y = (empty(*shape, dtype=torch.bfloat16) for shape in ((4096, 1032), (2 * 4104, 1032), (4096, 4104)))
    _, arguments = _triton.linear_arguments(
        x, Halves.of(SPEC, weight), config, 132, epilogue="y", activation="silu", tma=False, y=y, preact=None, dy=None,
        dbias=None,
    )  # fmt: skip
    kernel = compiled(_triton.gated_linear_kernel, config, arguments)
    moves = set(re.findall(r"\b(?:LDGSTS|LDG|STG)\.[.\w]*", kernel.asm["sass"]))
    assert moves == {"LDGSTS.E.BYPASS.128", "STG.E.128"}, moves


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize(
    ("columns", "stride", "to_columns", "to_stride", "width"),
    [(2049, 2049, 2056, 2112, "U16"), (2056, 2056, 2049, 2049, "U16"), (2052, 2052, 2056, 2112, "64"), (2056, 2112, 2056, 2056, "128")],
)  # fmt: skip
def test_a_copy_is_of_neighbours_many_at_once(
    columns: int, stride: int, to_columns: int, to_stride: int, width: str
) -> None:
    """Accesses as wide as both sides allow, no shared memory, and all 16 loads of a thread issued before the first is used."""
    x, to = (empty(8192, n, dtype=torch.bfloat16) for n in (stride, to_stride))
    _, arguments = _triton_gate.copy_arguments(x[:, :columns], to[:, :to_columns])
    kernel = compiled(_triton_gate.copy_kernel, _triton_gate.COPY, arguments)
    stack, _ = resources(kernel)
    moves = re.findall(r"\b((?:LDG|STG|LDS|STS)\.[.\w]*)", kernel.asm["sass"])
    times = 16 // {"U16": 1, "64": 4, "128": 8}[width]
    assert stack == 0 and moves == [f"LDG.E.{width}"] * times + [f"STG.E.{width}"] * times, moves
    each = 1 if width == "U16" else int(width) // 16
    assert f"sizePerThread = [1, {each}], threadsPerWarp = [1, 32]" in kernel.asm["ttgir"]
