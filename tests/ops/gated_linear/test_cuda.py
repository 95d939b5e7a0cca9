"""The CUDA kernels of the gated linear unit: rejected calls, packed launch arguments, machine code for Hopper without a GPU, and
results on a GPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusewise
from fusewise._shared import build, cuda
from fusewise.lab.truth import errors
from fusewise.ops.gated_linear import _cuda, _op, geglu_linear, reference
from fusewise.ops.gated_linear._cuda import tiles
from fusewise.ops.gated_linear._problem import ACTIVATIONS, Halves, Spec, new_preact, split_preact

from .. import cuda_codegen

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == _cuda.CAPABILITY
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="no Hopper GPU")]
STACKED = Spec("gelu_tanh", "stacked")
EPILOGUES = ("y", "preact", "gradient", "down", "gate")


def halves(x: Tensor, weight: Tensor, bias: Tensor | None = None, spec: Spec = STACKED) -> Halves:
    return Halves.of(spec, weight, None, bias)


def refused(
    x: Tensor, weight: Tensor, *others: Tensor, hidden: int = 128, by_choice: bool = True, activation: str = "silu"
) -> str | None:
    value, gate = weight.chunk(2)
    return _cuda.refuses(hidden, (x, value, gate, *others), activation, by_choice=by_choice)


def test_what_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, "_kernel", lambda *_: None)
    x, weight = (torch.empty(rows, 64, dtype=torch.bfloat16) for rows in (129, 256))
    assert refused(x, weight) is None
    assert "128 rows" in str(refused(x[:128], weight)) and refused(x[:128], weight, by_choice=False) is None


@pytest.mark.parametrize(
    ("rows", "hidden", "columns", "by_others"),
    [
        (129, 14336, 160, False),
        (160, 28672, 160, False),
        (190, 16384, 192, False),
        (256, 8192, 128, True),
        (256, 11008, 0, False),
        (256, 14336, 0, True),
        (320, 28672, 160, False),
        (384, 28672, 192, False),
        (512, 14336, 0, True),
        (640, 11008, 160, True),
        (700, 64, 128, False),  # one wave of either
        (4096, 14336, 0, False),
        (8192, 2560, 0, True),
        (16384, 4096, 0, False),
        (32768, 32768, 0, False),
    ],
)  # fmt: skip
def test_the_tiles_of_y_follow_from_its_rounds(rows: int, hidden: int, columns: int, by_others: bool) -> None:
    """The fastest tiles measured on an H200, or within 3 % of them. columns == 0 means upright tiles."""
    found = tiles.for_y(rows, hidden, 132)
    assert found == (tiles.UPRIGHT if columns == 0 else next(t for t in tiles.SIDEWAYS if t.columns == columns))
    assert tiles.gluon_takes_less(rows, hidden, 132) is by_others


def test_epilogues_have_the_headers_numbers() -> None:
    (names,) = re.findall(r"enum Epilogue \{([^}]*)\}", (_cuda.FOLDER / "plan.h").read_text())
    assert [getattr(tiles, name.strip()) for name in names.split(",")] == list(range(9))
    assert [t.columns for t in tiles.SIDEWAYS] == [int(name[-3:]) for name in names.split(", ") if "SIDE" in name]


def test_what_gluon_makes_in_fewer_rounds_is_its(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Gluon is available and y is the only output."""
    x, weight = torch.empty(512, 64, dtype=torch.bfloat16), torch.empty(2 * 14336, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(_cuda, "_kernel", lambda *_: None)
    for there in (True, False):
        monkeypatch.setattr(_cuda, "_gluon_is_there", lambda there=there: there)
        for alone in (True, False):
            told = _cuda.refuses(14336, (x, *weight.chunk(2)), "silu", by_choice=True, alone=alone)
            assert ("fewer waves" in str(told)) is (there and alone)
        assert _cuda.refuses(14336, (x, *weight.chunk(2)), "silu", by_choice=False, alone=True) is None
        assert _cuda.refuses(14336, (x[:16], *weight.chunk(2)), "silu", by_choice=True, alone=True) is None


def test_a_failed_build_is_told_and_auto_takes_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiler's message; and the build is not retried in the same process."""
    broken = tmp_path / "nvcc"
    broken.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec echo broken 1.0\necho x >> {tmp_path}/tries\necho "no such GPU" >&2\nexit 3\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("NVCC", str(broken))
    monkeypatch.setenv("FUSEWISE_CACHE_DIR", str(tmp_path / "cache"))
    build.compiler.cache_clear()
    _cuda._kernel.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(_cuda, "unavailable", lambda device_type: None)
            for cached in ("unavailable", "choose", "serving"):
                getattr(_op.choice, cached).cache_clear()
            x, weight = (torch.randn(rows, 64, dtype=torch.bfloat16) for rows in (200, 256))
            told = fusewise.explain_dispatch(geglu_linear, x, weight)
            assert told.impl in ("cpu", "reference") and "no such GPU" in told.passed_over["cuda"]
            for _ in range(2):
                with pytest.raises(
                    ValueError, match=r"gated_linear: impl must be able to serve .*'cuda'(.|\n)*exited with 3"
                ):
                    geglu_linear(x, weight, impl="cuda")
            assert torch.equal(geglu_linear(x, weight), geglu_linear(x, weight, impl=told.impl))
        assert (tmp_path / "tries").read_text().split() == ["x"]
    finally:
        build.compiler.cache_clear()
        _cuda._kernel.cache_clear()
        for cached in ("unavailable", "choose", "serving"):
            getattr(_op.choice, cached).cache_clear()


def test_what_it_lacks_is_that_of_the_implementation_it_names() -> None:
    shallow, deep, odd = torch.empty(1, _cuda.DEEP - 8), torch.empty(1, _cuda.DEEP), torch.empty(1, _cuda.DEEP + 1)
    for x, left in ((shallow, {"down_gradient"}), (deep, set()), (odd, {"gradient"})):
        for function in ("forward", "recompute_gradient", "gradient", "down_gradient"):
            assert _cuda.lacks(function, x, x, x) is (function in left)
            if function not in left:
                assert _op.having(function, _cuda, x, x, x) is _cuda
    wide = torch.empty(1, _cuda.DEEP + 1)[:, 1:]
    assert _cuda.lacks("gradient", deep, deep, wide) and not _cuda.lacks("forward", wide)
    assert _cuda.OTHERWISE in _op.IMPLEMENTATIONS and _op.having("gradient", reference, odd) is reference


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, int]]:
    """The launch arguments passed to the library, by their names in plan.h; nothing runs."""
    header = _cuda.FOLDER / "plan.h"
    text = re.sub(r"//.*", "", header.read_text())
    names = {
        struct: re.findall(
            r"\*?(\w+)\s*[,;]", text[text.index(f"struct {struct}") : text.index("};", text.index(f"struct {struct}"))]
        )
        for struct in ("Plan", "Call")
    }
    fields = ", ".join(f"plan->{name}" for name in names["Plan"])
    addresses = ", ".join(f"(int64_t)call->{name}" for name in names["Call"])
    source = tmp_path / "echo.cpp"
    source.write_text(
        f'#include "{header}"\nextern "C" __attribute__((visibility("default"))) void echo(const Plan* plan, const Call* call, '
        f"int64_t* to) {{ const int64_t all[] = {{{fields}, {addresses}}}; for (int64_t x : all) *to++ = x; }}"
    )
    monkeypatch.setenv("FUSEWISE_CACHE_DIR", str(tmp_path / "cache"))
    try:
        echo = build.library("echo", (source,), build.cxx(), build.NATIVE_FLAGS).echo
    except build.BuildError as error:
        pytest.skip(str(error))
    echo.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
    seen: list[dict[str, int]] = []
    both = [*names["Plan"], *names["Call"]]

    class Library(cuda.Library):
        def __init__(self) -> None:
            pass

        def launch(self, plan: bytes, call: bytes, device: int, op: str) -> None:
            to = (ctypes.c_int64 * len(both))()
            echo(plan, call, to)
            seen.append(dict(zip(both, to, strict=True)))

    monkeypatch.setattr(_cuda, "_kernel", lambda *_: Library())
    return seen


def test_calls_are_packed_as_the_header_has_them(packed: list[dict[str, int]]) -> None:
    spec = Spec("silu", "interleaved", gate_first=True)
    x, dy = torch.empty(300, 80, dtype=torch.float16)[:, :64], torch.empty(300, 96, dtype=torch.float16)
    weight, bias = torch.empty(192, 64, dtype=torch.float16), torch.empty(192, dtype=torch.float16)
    w_down = torch.empty(64, 104, dtype=torch.float16)[:, :96]
    of = halves(x, weight, bias, spec)
    y, preact, made, dbias = torch.empty_like(dy), *(new_preact(x, 96, spec) for _ in range(2)), torch.empty(2, 96)
    _cuda.forward(x, of, spec, y, None)
    _cuda.forward(x, of, spec, y, preact)
    _cuda.recompute_gradient(dy, x, of, preact, spec, dbias)
    _cuda.recompute_gradient(dy, x, of._replace(value_bias=None, gate_bias=None), preact, spec, None)
    _cuda.down_gradient(x, w_down, preact, y, made, spec, dbias)
    _cuda.gradient(dy, preact, made, spec, dbias)

    def tensors(**named: Tensor) -> dict[str, int]:
        biases = [name for name in named if name.endswith("bias")]
        addresses = {name: t.data_ptr() for name, t in named.items()}
        return addresses | {
            f"{name}_stride": t.stride(0) for name, t in named.items() if t.dim() == 2 or name in biases
        }

    u, g = split_preact(preact, spec)
    du, dg = split_preact(made, spec)
    nothing = dict.fromkeys(packed[0], 0) | {
        "rows": 300,
        "hidden": 96,
        "depth": 64,
        "activation": ACTIVATIONS.index("silu"),
    }
    weights = tensors(x=x, value=weight[1::2], gate=weight[::2])
    biases = tensors(value_bias=bias[1::2], gate_bias=bias[::2])
    summed = [{"sums": packed[i]["sums"], "dbias": dbias.data_ptr()} for i in (2, 4, 5)]
    assert all(each["sums"] != 0 for each in summed)
    assert packed == [
        {**nothing, **weights, **biases, **tensors(y=y), "epilogue": 6},  # sideways tiles
        {**nothing, **weights, **biases, **tensors(y=y, u=u, g=g), "epilogue": 1},
        {**nothing, **weights, **biases, **tensors(u=u, g=g, first=dy), **summed[0], "epilogue": 2},
        {**nothing, **weights, **tensors(u=u, g=g, first=dy), "epilogue": 2},
        {**nothing, **tensors(x=x, value=w_down, y=y, u=du, g=dg, first=u, second=g), **summed[1], "epilogue": 3},
        {**nothing, **tensors(x=dy, u=du, g=dg, first=u, second=g), **summed[2], "depth": 96, "epilogue": 7},
    ]


@pytest.mark.parametrize("odd", ["x", "weight", "hidden"])
def test_what_tma_cannot_describe_is_copied(packed: list[dict[str, int]], odd: str) -> None:
    """Operands are copied to aligned rows before; outputs are computed in temporary memory and copied back."""
    features, hidden = (68 if odd == "weight" else 64), (95 if odd == "hidden" else 96)
    x = (
        torch.randn(200, 80, dtype=torch.float16)[:, 1:65]
        if odd == "x"
        else torch.randn(200, features, dtype=torch.float16)
    )
    weight, dy = torch.randn(2 * hidden, features, dtype=torch.float16), torch.randn(200, hidden, dtype=torch.float16)
    y, preact, spec = torch.zeros_like(dy), new_preact(x, hidden, STACKED), STACKED
    _cuda.forward(x, halves(x, weight), spec, y, preact)
    _cuda.recompute_gradient(dy, x, halves(x, weight), preact, spec, None)
    _cuda.down_gradient(x, weight.T.contiguous()[:, :hidden], preact, y, preact, spec, None)
    for call in packed:
        for name in ("x", "value", "gate", "y", "u", "g", "first", "second"):
            assert call[name] % 16 == 0 and call[f"{name}_stride"] * 2 % 16 == 0, (name, call)


def test_no_rows_start_nothing(packed: list[dict[str, int]]) -> None:
    x, weight, dbias = torch.empty(0, 64), torch.empty(64, 64), torch.ones(2, 32)
    _cuda.forward(x, halves(x, weight), STACKED, torch.empty(0, 32), None)
    _cuda.recompute_gradient(torch.empty(0, 32), x, halves(x, weight), torch.empty(0, 64), STACKED, dbias)
    _cuda.down_gradient(x, weight[:, :32], torch.empty(0, 64), torch.empty(0, 32), torch.empty(0, 64), STACKED, None)
    _cuda.gradient(torch.empty(0, 32), torch.empty(0, 64), torch.empty(0, 64), STACKED, dbias)
    assert packed == [] and not dbias.any()


@pytest.fixture(scope="module", params=[(torch.bfloat16, "gelu_tanh"), (torch.float16, "gelu")], ids=["bf16", "fp16"])
def compiled(request: pytest.FixtureRequest) -> tuple[Path, str]:
    return cuda_codegen.prepared(lambda: _cuda.recipe(*request.param))


def test_what_they_compile_to(compiled: tuple[Path, str]) -> None:
    """No spills in the y kernel, and never inside the matmul loop; a step is eight consecutive tensor core instructions; weights
    are multicast to two blocks; results are stored by TMA. Kernels without a matmul move 16 bytes per thread."""
    path, said = compiled
    assert "serialized" not in said
    bodies = cuda_codegen.listing(path, "sm_90a")
    kernels = {
        found[1]: body
        for body in bodies
        if (found := re.search(r"gated_linear_kernelILb\dELi(\d)", body.splitlines()[0]))
    }
    assert set(kernels) == {"0", "1", "2", "3", "4", "5", "6"}  # the last three: y with sideways tiles
    streams = [body for body in bodies if "few_rows_kernel" in body.splitlines()[0]]
    assert len(streams) == 10  # tiles of 64 and of 128 features, each for 16, 32, 64, 128 and 160 columns
    for body in streams:
        assert not re.search(r"\b(LDL|STL)\b", body) and "STG.E.128" in body and "STSM.16.MT88.4" in body
        assert {*re.findall(r"HGMMA.64x(\d+)x16", body)} <= {"16", "32", "64", "128", "160"}
        assert "UTMALDG.2D" in body and "ACQBULK" in body  # waits for the previous kernel
    (gate,) = (body for body in bodies if "gate_gradient_kernel" in body.splitlines()[0])
    assert not re.search(r"\b(LDL|STL)\b", gate)
    assert {*re.findall(r"\b(?:LDG|STG)\.E\S*", gate)} == {"LDG.E.128", "STG.E.128", "STG.E"}  # STG.E: the sums
    for epilogue, body in kernels.items():
        code = [line for line in body.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/ +\S", line)]
        columns = {"5": 160, "6": 128}.get(epilogue, 192)
        products = [i for i, line in enumerate(code) if f"HGMMA.64x{columns}x16" in line]
        assert len(products) == 8 and products[-1] - products[0] < 120
        spills = [i for i, line in enumerate(code) if re.search(r"\b(LDL|STL)\b", line)]
        assert len(spills) <= {"2": 60, "3": 60, "1": 4}.get(epilogue, 0)
        assert not [i for i in spills if products[0] <= i <= products[-1]]
        stores = "STSM.16.MT88.4" if epilogue in ("4", "5", "6") else "STSM.16.M88.4"
        assert "UTMALDG.2D.MULTICAST" in body and stores in body and "UTMASTG.2D" in body
        assert not re.search(
            r"MEMBAR\S*GPU", "\n".join(code[products[0] : products[-1] + 20])
        )  # would wait for all memory operations


def outcome(module: Any, epilogue: str, x: Tensor, of: Halves, dy: Tensor, spec: Spec) -> list[Tensor]:
    """All outputs of an implementation."""
    hidden = of.value.shape[0]
    y, preact = torch.full_like(dy, torch.nan), new_preact(x, hidden, spec).fill_(torch.nan)
    dbias = (
        None
        if of.value_bias is None
        else torch.full((2, hidden), torch.nan, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    )
    if epilogue == "y":
        module.forward(x, of, spec, y, None)
        return [y]
    if epilogue == "preact":
        module.forward(x, of, spec, y, preact)
        return [y, *split_preact(preact, spec)]
    if epilogue in ("down", "gate"):  # from given pre-activations, in place
        for half, kept in zip(split_preact(preact, spec), (dy.roll(1, 1), dy.flip(0)), strict=True):
            half.copy_(kept)
    if epilogue == "down":
        module.down_gradient(x, of.value.mT.contiguous(), preact, y, preact, spec, dbias)
    elif epilogue == "gate":
        _op.having("gradient", module, dy, *split_preact(preact, spec)).gradient(dy, preact, preact, spec, dbias)
    else:
        module.recompute_gradient(dy, x, of, preact, spec, dbias)
    made = [y] if epilogue == "down" else []
    return [*made, *split_preact(preact, spec), *([] if dbias is None else [dbias])]


def assert_right(epilogue: str, shape: tuple[int, int, int], dtype: torch.dtype, spec: Spec, bias: bool = True) -> None:
    """Allow twice the error of the float32 formula with a rounded result, plus one rounding; results must be deterministic."""
    rows, features, hidden = shape
    torch.manual_seed(0)
    x, dy = (torch.randn(rows, n, device="cuda", dtype=dtype) for n in (features, hidden))
    shaped = (2 * hidden, features) if spec.fused else (hidden, 2, features)
    weight = torch.randn(shaped, device="cuda", dtype=dtype) / features**0.5
    b = torch.randn(shaped[:-1], device="cuda", dtype=dtype) if bias else None

    def of(to: torch.dtype) -> tuple[Any, ...]:
        return x.to(to), Halves.of(spec, weight.to(to), None, None if b is None else b.to(to)), dy.to(to), spec

    assert _cuda.refuses(hidden, (x, *Halves.of(spec, weight)[:2]), spec.activation, by_choice=False) is None
    found = outcome(_cuda, epilogue, *of(dtype))
    usual, true = outcome(reference, epilogue, *of(dtype)), outcome(reference, epilogue, *of(torch.float64))
    for mine, other, truth in zip(found, usual, true, strict=True):
        error, allowed = errors([mine], [truth]), errors([other.to(dtype)], [truth])
        for kind in ("max", "rms"):
            band = torch.finfo(dtype).eps / 2
            assert getattr(error, kind) <= 2 * getattr(allowed, kind) + band, (epilogue, shape, error, allowed)
    for _ in range(3):
        for one, two in zip(found, outcome(_cuda, epilogue, *of(dtype)), strict=True):
            assert torch.equal(one, two)


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("epilogue", EPILOGUES)
    @pytest.mark.parametrize(
        "shape",
        [
            (1, 8, 8),
            (129, 72, 104),
            (300, 520, 96),
            (4096, 1024, 4096),
            (777, 8, 5000),
            (20000, 64, 640),
            (200, 77, 131),
            (150, 136, 14336),
            (192, 64, 14341),
            (311, 72, 24576),
            (400, 200, 14336),
        ],
        ids=str,
    )
    def test_shapes(self, epilogue: str, shape: tuple[int, int, int]) -> None:
        """Ragged sizes, one tile, several waves of tiles per SM, rows that are not multiples of 16 bytes, and y with sideways tiles
        of 128, 160 and 192 rows."""
        assert_right(epilogue, shape, torch.bfloat16, Spec("silu", "stacked"))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations(self, activation: str, dtype: torch.dtype) -> None:
        for epilogue in EPILOGUES:
            assert_right(epilogue, (700, 264, 520), dtype, Spec(activation, "stacked", gate_first=True))

    @pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
    def test_interleaved_weights_are_read_in_place(self, bias: bool) -> None:
        for epilogue in EPILOGUES:
            assert_right(
                epilogue, (500, 128, 200), torch.bfloat16, Spec("gelu_tanh", "interleaved", gate_first=True), bias
            )

    def test_a_bias_of_infinity_stays_where_it_is(self) -> None:
        """Padding rows beyond the last must not turn a sum into NaN."""
        x, weight = torch.randn(200, 64, device="cuda").half(), torch.randn(256, 64, device="cuda").half()
        bias = torch.zeros(256, device="cuda").half()
        bias[:128] = torch.inf
        dy, dbias = torch.zeros(200, 128, device="cuda").half(), torch.empty(2, 128, device="cuda")
        dy[:, ::2] = 1.0
        spec = Spec("sigmoid", "stacked")
        _cuda.recompute_gradient(dy, x, halves(x, weight, bias, spec), new_preact(x, 128, spec), spec, dbias)
        assert dbias[0].isfinite().all() and dbias[0, ::2].gt(0).all() and not dbias[0, 1::2].any()

    @pytest.mark.parametrize("save", ["preact", "input"])
    def test_the_whole_operation(self, save: Any) -> None:
        """Gradients together with the implementation that dispatch names for the rest."""
        x, weight, bias = (
            (torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 8).requires_grad_()
            for shape in ((1000, 64), (1024, 64), (1024,))
        )
        told = fusewise.explain_dispatch(geglu_linear, x, weight, bias, save=save)
        assert told.impl == "cuda" and "gluon" in told.path
        dy = torch.randn(1000, 512, device="cuda", dtype=torch.bfloat16)
        results = {}
        for impl in ("auto", "cuda", "gluon"):
            y = geglu_linear(x, weight, bias, save=save, impl=impl)
            results[impl] = [y, *torch.autograd.grad(y, (x, weight, bias), dy)]
        for one, two, three in zip(*results.values(), strict=True):
            assert torch.equal(one, two)
            torch.testing.assert_close(one, three, rtol=2e-2, atol=2e-2)
        assert torch.equal(results["cuda"][0], results["gluon"][0])  # the same summation order

    @pytest.mark.parametrize("rows", [16, 300])
    def test_a_thread_of_its_own(self, rows: int) -> None:
        """The kernel launch may be the thread's first CUDA call."""
        x, weight = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for n in (rows, 256))
        expected = geglu_linear(x, weight, impl="cuda")
        with ThreadPoolExecutor(1) as thread:
            assert torch.equal(thread.submit(geglu_linear, x, weight, impl="cuda").result(), expected)

    def test_a_graph_replays_on_new_values_and_other_streams_do_not_mix(self) -> None:
        x, weight = (torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16) for rows in (600, 2048))
        geglu_linear(x, weight, impl="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = geglu_linear(x, weight, impl="cuda")
        x.copy_(torch.randn_like(x))
        graph.replay()
        expected = geglu_linear(x, weight, impl="cuda")
        assert torch.equal(y, expected)
        streams = [torch.cuda.Stream() for _ in range(4)]
        torch.cuda.synchronize()
        made = []
        for stream in streams:
            with torch.cuda.stream(stream):
                made.append(geglu_linear(x, weight, impl="cuda"))
        torch.cuda.synchronize()
        assert all(torch.equal(one, expected) for one in made)


def test_without_a_choice_it_has_every_dtype_and_activation(tmp_path: Path) -> None:
    """As built by CMake."""
    try:
        nvcc = build.nvcc().needed()
    except build.BuildError as error:
        pytest.skip(str(error))
    to = tmp_path / "all.ptx"
    done = subprocess.run(
        [*nvcc, "-std=c++17", "-arch=sm_90a", "-ptx", str(_cuda.SOURCES[0]), "-o", str(to)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall(r"\.entry \w*(gated_linear_kernelI\w+)", to.read_text()))) == 2 * 7 * len(ACTIVATIONS)
