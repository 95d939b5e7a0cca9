"""The Gluon kernels: chosen and rejected calls, machine code for Hopper without a GPU, and results on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import tempfile
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

import fusewise
from fusewise.lab.truth import errors
from fusewise.ops._tuned import Key
from fusewise.ops.gated_linear import _autograd, _cuda, _gluon, _gluon_few, _op, geglu_linear, reference
from fusewise.ops.gated_linear._problem import ACTIVATIONS, Halves, Spec, new_preact, split_preact

NAMES = {torch.int32: "i32", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SHARED = 227 * 1024  # bytes of shared memory a program may have on sm_90
# Bytes of code, mostly the loops of the two warp groups: beyond 128 KiB they miss the instruction cache.
INSTRUCTIONS = 80 * 1024
# Bytes that ptxas of Triton 3.8 spills around the gradient behind a down projection; those of 3.6 and 3.9 spill none.
SPILLED = 40
EPILOGUES = ("y", "preact", "gradient", "down")
STACKED = Spec("gelu_tanh", "stacked")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="no Hopper GPU")]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def test_choices_are_among_the_configurations_and_fit() -> None:
    for epilogue in EPILOGUES:
        every = _gluon.configurations(epilogue)
        assert _gluon.choose(epilogue) in every
        writes, reads = {"y": (2, 0), "preact": (3, 0), "gradient": (2, 1), "down": (3, 2)}[epilogue]
        for config in every:
            assert (config.ahead > 0) == (reads > 0)
            ring = config.stages * (128 + 128) * config.block_d * 2
            assert ring + (writes + 2 * config.ahead * reads) * 64 * 64 * 2 <= SHARED


@pytest.mark.parametrize("sums", [True, False])
def test_the_elementwise_kernel_fills_the_device(sums: bool) -> None:
    for rows, hidden in ((1, 64), (300, 136), (512, 14336), (2048, 5120), (16384, 4096), (65536, 32768)):
        config = _gluon.choose_gate(rows, hidden, 132, sums=sums)
        assert config.block_m * config.block_f in (1024, 2048) and config.rows % config.block_m == 0
        programs = -(-rows // config.rows) * -(-hidden // config.block_f)
        assert config.rows == config.block_m or programs >= 2 * 132
        assert _gluon.gate_configurations(rows, hidden, 132, sums=sums)[0] == config


@pytest.mark.parametrize(
    ("epilogue", "rows", "depth", "hidden", "drifts"),
    [
        ("y", 1024, 4096, 14336, False), ("y", 16384, 1024, 4096, False), ("y", 1024, 3072, 24576, True), ("y", 65536, 640, 2560, True),
        ("preact", 4096, 1536, 6144, False), ("preact", 65536, 640, 2560, False), ("preact", 16384, 1280, 5120, True),
        ("gradient", 4096, 2048, 8192, False), ("gradient", 4096, 2048, 16384, True),
        ("down", 16384, 3072, 12288, False), ("down", 16384, 4096, 14336, True),
    ],
)  # fmt: skip
def test_programs_keep_in_step_where_that_took_less_time(
    epilogue: str, rows: int, depth: int, hidden: int, drifts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H100: notes/gated-linear-h200.md. An H200, with faster memory, need not."""
    assert _gluon.drifts(epilogue, rows, depth, hidden, 132) == drifts
    key = Key(epilogue, torch.bfloat16, "", rows, depth, hidden)
    assert not _gluon._default(key, -1).in_step
    monkeypatch.setattr(_gluon, "_has_fast_memory", lambda _: False)
    assert _gluon._default(key, -1).in_step == drifts


@pytest.mark.parametrize(
    ("clock", "width", "fast"), [(2619000, 5120, False), (3201000, 6144, True)], ids=["H100", "H200"]
)
def test_the_memory_of_an_h200_is_fast(clock: int, width: int, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {"mem_clock_rate": clock, "mem_bus_width": width}
    utils = SimpleNamespace(get_device_properties=lambda _: properties)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    assert _gluon._has_fast_memory.__wrapped__(0) == fast


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("epilogue", ["y", "preact"])
def test_a_repeated_launch_has_the_first_ones_arguments(
    epilogue: str, in_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At other addresses, and with a counter of its own, at zero, where programs keep in step: in inference mode and outside it."""
    calls: list[list[Any]] = []

    class Kernel:  # compiled, and then bound to a grid
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(
                *args: Any, stream: int | None = None, num_warps: int = 0, enable_fp_fusion: bool = False, **given: Any
            ) -> Kernel:
                assert enable_fp_fusion == (stream is None)  # compiled with it: Triton's default is about to change
                calls.append([*args, *given.values()])
                return self

            return run

    monkeypatch.setattr(_gluon, "gated_linear_kernel", Kernel())
    monkeypatch.setattr(_gluon, "choose", lambda *_, **__: _gluon.Config(6, 0, in_step=in_step))
    monkeypatch.setattr(_gluon, "_PLANS", {})
    monkeypatch.setattr(_gluon, "launches_directly", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    halves = Halves.of(STACKED, empty(512, 64), None, empty(512))
    tensors = [(empty(300, 64), empty(300, 256), empty(300, 512)) for _ in range(2)]
    for mode, (x, y, preact) in zip((torch.inference_mode, torch.no_grad), tensors, strict=True):
        with mode():
            _gluon.forward(x, halves, STACKED, y, preact if epilogue == "preact" else None)
    first, second = calls
    assert len(first) == len(second)
    counters = [a for call in calls for a in call if isinstance(a, Tensor) and a.dtype == torch.int32]
    assert len({c.data_ptr() for c in counters}) == len(counters) == (2 if in_step else 0) and not any(counters)
    (plan,) = _gluon._PLANS.values()
    assert not any(isinstance(value, Tensor) for value in plan.rest)
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        if isinstance(one, _gluon.TensorDescriptor):
            assert {**vars(one), "base": other.base} == vars(other)
        elif isinstance(one, Tensor):
            assert (one.dtype == torch.int32) == (one is not other), index
        else:
            assert one == other
    bases = [a.base.data_ptr() for a in second if isinstance(a, _gluon.TensorDescriptor)]
    x, y, preact = tensors[1]
    u, g = split_preact(preact, STACKED)
    written = [y, u, g] if epilogue == "preact" else [y]
    assert bases == [t.data_ptr() for t in (x, halves.value, halves.gate, *written)]


def test_with_sums_little_is_left_to_reduce() -> None:
    """Of few rows, each multiprocessor has as many programs; of many, each sum is one of 256 rows."""
    for rows, hidden in ((512, 14336), (1024, 4096)):
        config = _gluon.choose_gate(rows, hidden, 132, sums=True)
        assert (
            3 * 132 <= -(-rows // config.rows) * -(-hidden // config.block_f) <= 4 * 132 + -(-hidden // config.block_f)
        )
    assert _gluon.choose_gate(16384, 4096, 132, sums=True).rows == 256


def test_what_tma_cannot_describe_is_left_to_triton_where_rows_are_few() -> None:
    x, weight = empty(300, 64), empty(256, 64)

    def refused(
        x: Tensor, weight: Tensor, *others: Tensor, hidden: int = 128, by_choice: bool = True, alone: bool = True
    ) -> str | None:
        return _gluon.refuses(
            hidden, (x, weight[:128], weight[128:], *others), "silu", by_choice=by_choice, alone=alone
        )

    odd = [
        ((x, weight), {"hidden": 132}),
        ((empty(300, 68)[:, :64], weight), {}),
        ((empty(300 * 64 + 1)[1:].view(300, 64), weight), {}),
        ((x, weight, empty(1, 128).expand(300, 128)), {}),
    ]
    for matrices, options in odd:
        assert refused(*matrices, **options) is None
        few = matrices[0][:128]
        assert "16 bytes" in str(refused(few, *matrices[1:], **options)) and "129" in str(
            refused(few, weight, hidden=132)
        )
        assert refused(few, *matrices[1:], by_choice=False, **options) is None
    assert refused(x[:64], weight) is None and refused(x[:64], weight, alone=False, by_choice=False) is None
    assert "64 rows" in str(refused(x[:64], weight, alone=False))


def test_few_rows_share_the_weights_evenly_and_fit() -> None:
    for rows in (1, 3, 16, 33, 64, 65, 128):
        assert rows <= _gluon_few.columns(rows) <= max(8, 2 * rows)
        for hidden in (8, 136, 4096, 11008, 14336, 28672):
            every = _gluon_few.configurations(rows, hidden, 132)
            assert every[0] == _gluon_few.choose(rows, hidden, 132) and len(set(every)) == len(every)
            for config in every:
                ring = config.stages * config.chunks * (2 * config.half + _gluon_few.columns(rows)) * 64 * 2
                assert config.stages >= 2 and config.width % 8 == 0 and ring <= _gluon_few.SHARED
            if hidden >= 4096:
                tiles = -(-hidden // every[0].width)
                assert -(-tiles // 132) * every[0].width <= 1.08 * hidden / 132 + 8


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize(
    ("rows", "hidden"), [(1, 14336), (16, 24576), (64, 28672), (64, 8192), (72, 18944), (128, 8192)]
)
def test_few_rows_compile_for_hopper_without_spills(rows: int, hidden: int) -> None:
    x, weight, bias, y = empty(rows, 4096), empty(2 * hidden, 4096), empty(2 * hidden), empty(rows, hidden)
    halves = Halves.of(STACKED, weight, None, bias)
    config = _gluon_few.choose(rows, hidden, 132)
    _, arguments = _gluon_few.arguments(
        x, halves.value, halves.gate, (halves.value_bias, halves.gate_bias), y, config, 132, "gelu_tanh", _gluon._map
    )
    kernel = compiled(_gluon.few_rows_kernel, arguments)
    stack, _, instructions = machine_code(kernel)
    columns = _gluon_few.columns(rows)
    products = {name: n for name, n in instructions.items() if name.startswith("HGMMA")}
    assert stack == 0 and kernel.metadata.shared <= SHARED
    assert list(products) == [f"HGMMA.64x{columns}x16.F32.BF16"], products
    stores = [name for name in instructions if name.startswith("STG")]
    assert stores == ["STG.E.128"], stores


def test_without_a_hopper_it_says_why() -> None:
    assert "Hopper" in str(_op.unavailable("gluon", "cpu", torch.bfloat16))
    assert _op.unavailable("gluon", "cpu", torch.float32) == "gluon takes bfloat16 and float16, not float32"
    with pytest.raises(ValueError, match=r"impl must .* got 'gluon'.*Hopper"):
        geglu_linear(empty(4, 8), empty(16, 8), impl="gluon")


def compiled(kernel: Any, arguments: dict[str, Any]) -> Any:
    """A kernel compiled for sm_90 from the arguments of a launch."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        value, parameter = arguments[name], kernel.params[index]
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = f"*{NAMES[value.dtype]}"
            attributes[index,] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[index,] = [["tt.divisibility", 16]]
        else:
            signature[name] = f"tensordesc<{NAMES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
    source = GluonASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": _gluon.NUM_WARPS})


def machine_code(kernel: Any) -> tuple[int, int, Counter[str]]:
    """Bytes of stack, bytes of code, and instruction counts by name with modifiers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run(
                [triton.knobs.nvidia.cuobjdump.path, flag, file.name], capture_output=True, text=True, check=True
            ).stdout
            for flag in ("-res-usage", "-sass")
        )
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack is not None, usage
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][\w.]*)", sass)
    return int(stack[1]), 16 * len(instructions), Counter(instructions)


COMPILED = [
    *itertools.product(EPILOGUES, ("gelu_tanh",), (torch.bfloat16,), (False,)),
    *itertools.product(("gradient", "down"), ("gelu",), (torch.bfloat16,), (True,)),
    ("y", "silu", torch.float16, True),
]


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize(("epilogue", "activation", "dtype", "in_step"), COMPILED, ids=str)
def test_compiles_for_hopper_without_spills(epilogue: str, activation: str, dtype: torch.dtype, in_step: bool) -> None:
    rows, features, hidden = 4096, 1024, 4096
    x, y, preact = (
        empty(rows, features, dtype=dtype),
        empty(rows, hidden, dtype=dtype),
        empty(rows, 2 * hidden, dtype=dtype),
    )
    halves = Halves.of(STACKED, empty(2 * hidden, features, dtype=dtype), None, empty(2 * hidden, dtype=dtype))
    outputs, sums = split_preact(preact, STACKED), empty(rows // 64, 2, hidden, dtype=torch.float32)
    down, gradient = epilogue == "down", epilogue == "gradient"
    _, arguments = _gluon.arguments(
        x, empty(features, hidden, dtype=dtype) if down else halves.value, None if down else halves.gate,
        _gluon.choose(epilogue, in_step=in_step), 132, epilogue=epilogue, activation=activation,
        hidden=hidden, y=None if gradient else y, outputs=(None, None) if epilogue == "y" else outputs,
        inputs=outputs if down else (y, None) if gradient else (None, None),
        bias=(None, None) if down else (halves.value_bias, halves.gate_bias), sums=sums if down or gradient else None,
        arrivals=empty(1, dtype=torch.int32) if in_step else None,
    )  # fmt: skip
    kernel = compiled(_gluon.gated_linear_kernel, arguments)
    stack, code, instructions = machine_code(kernel)
    assert stack <= (SPILLED if epilogue == "down" and triton.__version__.startswith("3.8.") else 0)
    assert kernel.metadata.shared <= SHARED and code <= INSTRUCTIONS
    type_name = "BF16" if dtype == torch.bfloat16 else "F16"  # for float16 the name has the accumulator type
    products = {name: n for name, n in instructions.items() if name.startswith("HGMMA")}
    # Two warp groups, 2 × 64 rows, a depth of 64 in four steps.
    assert sum(products.values()) == 16 and all(name.startswith("HGMMA.64x128x16.F32") for name in products), products
    assert dtype == torch.float16 or all(type_name in name for name in products)
    # Per warp group: epilogues without a gradient unroll two pieces, the others loop over them.
    stored = {"y": 2 * 1, "preact": 2 * 3, "gradient": 2, "down": 3}[epilogue]
    assert sum(n for name, n in instructions.items() if name.startswith("UTMASTG")) == 2 * stored
    assert any(name.startswith("STSM") for name in instructions)
    assert instructions["REDG.E.ADD.STRONG.GPU"] == in_step


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
@pytest.mark.parametrize("hidden", [4096, 8200])  # a multiple of 16 elements, and of 8
@pytest.mark.parametrize("summed", [True, False])
def test_the_elementwise_kernel_moves_16_bytes_a_thread(summed: bool, hidden: int) -> None:
    preact, dy = empty(16384, 2 * hidden), empty(16384, hidden)
    halves = split_preact(preact, STACKED)
    sums = empty(132, 2, hidden, dtype=torch.float32) if summed else None
    config = _gluon.choose_gate(16384, hidden, 132, sums=summed)
    _, arguments = _gluon.gate_arguments(dy, halves, halves, config, "gelu_tanh", sums)
    stack, _, instructions = machine_code(compiled(_gluon.gate_gradient_kernel, arguments))
    moved = Counter(name for name in instructions.elements() if name.startswith(("LDG", "STG")))
    assert stack == 0 and all(name.endswith(".128") for name in moved), moved
    # Three tensors, two rows of a thread, of this block and of the next one.
    assert sum(n for name, n in moved.items() if name.startswith("LDG")) == 12


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")
def test_where_rows_are_not_aligned_threads_of_a_warp_are_neighbours() -> None:
    """Each thread moves one element at a time, so the threads of a warp must cover whole memory sectors."""
    preact, dy = empty(16384, 8190), empty(16384, 4095)
    halves = split_preact(preact, STACKED)
    config = _gluon.choose_gate(16384, 4095, 132, sums=False)
    _, arguments = _gluon.gate_arguments(dy, halves, halves, config, "gelu_tanh", None)
    kernel = compiled(_gluon.gate_gradient_kernel, arguments)
    stack, _, instructions = machine_code(kernel)
    assert stack == 0 and instructions["LDG.E.U16"] == 48, instructions
    assert "sizePerThread = [1, 1], threadsPerWarp = [1, 32]" in kernel.asm["ttgir"]


# On the GPU.

EVERY = [(epilogue, config) for epilogue in EPILOGUES for config in _gluon.configurations(epilogue)]


def make(rows: int, features: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device="cuda").mul_(scale).to(dtype)

    return (
        normal(rows, features),
        normal(2 * hidden, features, scale=features**-0.5),
        normal(2 * hidden),
        normal(rows, hidden),
    )


def outcome(
    module: Any, epilogue: str, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, spec: Spec
) -> tuple[Tensor, ...]:
    """The outputs of an epilogue, written to NaN-filled memory."""
    hidden = dy.shape[1]
    halves = Halves.of(spec, weight, None, bias)
    y = torch.full_like(dy, torch.nan)
    preact = new_preact(x, hidden, spec).fill_(torch.nan)
    dbias = torch.full((2, hidden), torch.nan, device="cuda", dtype=torch.promote_types(x.dtype, torch.float32))
    if epilogue == "gradient":
        module.recompute_gradient(dy, x, halves, preact, spec, dbias)
        return preact, dbias
    if epilogue == "down":
        preact.copy_(torch.cat((dy, dy.flip(0)), 1))
        module.down_gradient(x, halves.value.mT.contiguous(), preact, y, preact, spec, dbias)
        return y, preact, dbias
    if epilogue == "elementwise":
        before = torch.cat((dy, dy.flip(0)), 1)
        module.gradient(dy, before, preact, spec, dbias)
        return preact, dbias
    module.forward(x, halves, spec, y, preact if epilogue == "preact" else None)
    return (y, preact) if epilogue == "preact" else (y,)


def assert_right(epilogue: str, shape: tuple[int, int, int], dtype: torch.dtype, spec: Spec) -> None:
    """Allow twice the error of the float32 formula with a rounded result, plus one rounding for sums of rounded terms."""
    tensors = make(*shape, dtype)
    found = outcome(_gluon, epilogue, *tensors, spec)
    usual = outcome(reference, epilogue, *tensors, spec)
    true = outcome(reference, epilogue, *(t.double() for t in tensors), spec)
    for mine, other, truth in zip(found, usual, true, strict=True):
        error, allowed = errors([mine], [truth]), errors([other.to(dtype)], [truth])
        for of in ("max", "rms"):
            band = torch.finfo(dtype).eps / 2
            assert getattr(error, of) <= 2 * getattr(allowed, of) + band, (epilogue, shape, error, allowed)
    for one, two in zip(found, outcome(_gluon, epilogue, *tensors, spec), strict=True):
        assert torch.equal(one, two)  # deterministic


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("shape", [(1, 8, 8), (128, 64, 128), (300, 72, 264), (1111, 520, 1000)], ids=str)
    @pytest.mark.parametrize(("epilogue", "config"), EVERY, ids=str)
    def test_every_configuration(
        self, epilogue: str, config: _gluon.Config, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_gluon, "choose", lambda *_, **__: config)
        monkeypatch.setattr(_gluon, "_PLANS", {})
        monkeypatch.setattr(_gluon, "processors_of", lambda _: 7)  # programs take several tiles each
        assert_right(epilogue, shape, torch.bfloat16, STACKED)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("epilogue", [*EPILOGUES, "elementwise"])
    def test_every_activation(self, epilogue: str, activation: str, dtype: torch.dtype) -> None:
        assert_right(epilogue, (700, 264, 520), dtype, Spec(activation, "stacked", gate_first=True))

    @pytest.mark.parametrize(
        "shape",
        [
            (1, 8, 8),
            (3, 520, 1000),
            (16, 2048, 8192),
            (33, 1032, 3000),
            (64, 4096, 14336),
            (65, 1032, 3000),
            (100, 520, 11008),
            (128, 4096, 14336),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_few_rows(self, shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        for activation in ACTIVATIONS:
            assert_right("y", shape, dtype, Spec(activation, "stacked", gate_first=True))
        every = _gluon_few.configurations(shape[0], shape[2], _gluon.processors_of(0))
        for config in every:
            monkeypatch.setattr(_gluon, "_PLANS", {})
            monkeypatch.setattr(_gluon_few, "choose", lambda *_, config=config: config)
            assert_right("y", shape, dtype, STACKED)

    def test_a_large_problem(self) -> None:
        """Several tiles per SM, and several passes through the ring buffer."""
        for epilogue in (*EPILOGUES, "elementwise"):
            assert_right(epilogue, (8192, 1024, 4096), torch.bfloat16, STACKED)

    def test_it_is_chosen_where_it_can_serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And if the CUDA implementation is unavailable."""
        monkeypatch.setattr(_cuda, "refuses", lambda *_, **__: "not here")
        x, weight, *_ = make(128, 64, 128, torch.bfloat16)
        assert fusewise.explain_dispatch(geglu_linear, x, weight).impl == "gluon"
        assert fusewise.explain_dispatch(geglu_linear, x[:16], weight).impl == "gluon"
        training = weight.detach().clone().requires_grad_()
        assert fusewise.explain_dispatch(geglu_linear, x[:16], training).impl == "triton"
        assert fusewise.explain_dispatch(geglu_linear, x[:16], training, save="input").impl == "gluon"
        assert fusewise.explain_dispatch(geglu_linear, x.float(), weight.float()).impl == "triton"
        told = fusewise.explain_dispatch(geglu_linear, x[:, :60], weight[:, :60])
        assert told.impl == "triton" if x[:, :60].stride(0) * 2 % 16 else told.impl == "gluon"
        told = fusewise.explain_dispatch(geglu_linear, x.repeat(2, 1), weight[:252], impl="gluon")
        assert told.impl == "gluon" and "copied" in told.path
        told = fusewise.explain_dispatch(geglu_linear, x[:100], weight[:252])
        assert told.impl == "triton" and "16 bytes" in told.passed_over["gluon"]

    @pytest.mark.parametrize("shape", [(300, 81, 135), (5, 81, 135)], ids=str)
    @pytest.mark.parametrize("epilogue", [*EPILOGUES, "elementwise"])
    def test_what_tma_cannot_describe_is_copied(self, epilogue: str, shape: tuple[int, int, int]) -> None:
        assert_right(epilogue, shape, torch.bfloat16, STACKED)

    @pytest.mark.parametrize("save", ["preact", "input"])
    @pytest.mark.parametrize("layout", ["stacked", "interleaved", "separate"])
    @pytest.mark.parametrize("large", [False, True])
    def test_through_autograd(self, large: bool, layout: str, save: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        if large:
            monkeypatch.setattr(_autograd, "LARGE_BYTES", 0)
        x, weight, bias, dy = make(200, 136, 264, torch.bfloat16)
        if layout == "separate":
            weights: dict[str, Any] = {
                "weight": weight[:264].clone(), "w_gate": weight[264:].clone(), "bias": bias[:264].clone(), "b_gate": bias[264:].clone(),
            }  # fmt: skip
        else:
            weights = {"weight": weight, "bias": bias, "layout": layout}
        results = []
        for impl in ("gluon", "reference"):
            leaves = {"x": x, **weights}
            leaves = {k: v.detach().clone().requires_grad_() if isinstance(v, Tensor) else v for k, v in leaves.items()}
            y = fusewise.gated_linear(**leaves, activation="silu", impl=impl, save=save)
            grads = torch.autograd.grad(y, [v for v in leaves.values() if isinstance(v, Tensor)], dy)
            results.append((y.detach(), *grads))
        for mine, other in zip(*results, strict=True):
            difference = errors([mine], [other.double()])
            assert difference.rms <= 2e-2 and difference.max <= 5e-2

    def test_launches_in_step_may_overlap_and_be_replayed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On streams whose programs wait for SMs, and in a CUDA graph."""
        config = _gluon.choose("y", in_step=True)
        monkeypatch.setattr(_gluon, "choose", lambda *_, **__: config)
        x, weight, bias, _ = make(4096, 136, 1024, torch.bfloat16)
        expected = geglu_linear(x, weight, bias, impl="gluon")
        streams = [torch.cuda.Stream() for _ in range(3)]
        found = []
        for _ in range(64):
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    found.append(geglu_linear(x, weight, bias, impl="gluon"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = geglu_linear(x, weight, bias, impl="gluon")
        for _ in range(3):
            captured.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured, expected)
        assert all(torch.equal(y, expected) for y in found)

    def test_a_repeated_call_finds_other_addresses(self) -> None:
        """A cached launch plan holds no tensor."""
        for _ in range(3):
            assert_right("preact", (256, 64, 128), torch.bfloat16, STACKED)
        assert all(t is None or t.base is None for plan in _gluon._PLANS.values() for t in plan[1])


def test_configurations_differ_in_what_a_search_may_vary() -> None:
    for epilogue in EPILOGUES:
        found = _gluon.configurations(epilogue)
        assert len(set(found)) == len(found) > 1
        assert _gluon.choose(epilogue) in {dataclasses.replace(c, group_m=8) for c in found}
