"""The CUDA kernels of the gated linear unit: the choice of tiles, rejected calls, and packed launch arguments."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusewise
from fusewise._shared import build, cuda
from fusewise.ops._tuned import Found, Key, Tuned, Watch
from fusewise.ops.gated_linear import _cuda, _op, geglu_linear, reference, tuning
from fusewise.ops.gated_linear._cuda import tiles
from fusewise.ops.gated_linear._problem import ACTIVATIONS, Halves, Spec, new_preact, split_preact

STACKED = Spec("gelu_tanh", "stacked")


def halves(weight: Tensor, bias: Tensor | None = None, spec: Spec = STACKED) -> Halves:
    return Halves.of(spec, weight, None, bias)


def refused(
    x: Tensor, weight: Tensor, *others: Tensor, hidden: int = 128, by_choice: bool = True, activation: str = "silu",
    kernel: str = "preact",
) -> str | None:  # fmt: skip
    value, gate = weight.chunk(2)
    return _cuda.refuses(hidden, (x, value, gate, *others), activation, kernel, by_choice=by_choice)


def test_what_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, "_kernel", lambda *_: None)
    x, weight = (torch.empty(rows, 64, dtype=torch.bfloat16) for rows in (129, 256))
    assert refused(x, weight) is None
    for kernel in ("gradient", "down"):
        assert refused(x, weight, kernel=kernel) is None
        assert "128 rows" in str(refused(x[:128], weight, kernel=kernel))
        assert refused(x[:128], weight, kernel=kernel, by_choice=False) is None
    for kernel in ("y", "preact", "gate"):
        assert refused(x[:128], weight, kernel=kernel) is None


@pytest.mark.parametrize(
    ("rows", "depth", "hidden", "columns", "by_others"),
    [
        (129, 4096, 14336, 144, False),
        (160, 8192, 28672, 160, False),
        (190, 2048, 16384, 192, False),
        (256, 3072, 8192, 128, True),
        (320, 8192, 28672, 160, False),
        (384, 7168, 2048, 192, False),  # halved in the only wave: Gluon's took 13 % longer
        (384, 8192, 28672, 192, False),
        (512, 4096, 14336, 128, True),
        (700, 64, 64, 128, False),  # one wave of either
        (1024, 1024, 4096, 128, True),
        (1024, 2048, 8192, 208, True),
        (1024, 8192, 32768, 0, False),
        (4096, 1024, 4096, 208, True),
        (8192, 640, 2560, 160, True),
        (8192, 1024, 4096, 0, False),
        (16384, 4096, 16384, 0, False),
        (32768, 8192, 32768, 0, False),
    ],
)  # fmt: skip
def test_the_tiles_of_y_follow_from_its_rounds(
    rows: int, depth: int, hidden: int, columns: int, by_others: bool
) -> None:
    """The fastest tiles measured on an H200, or within 3 % of them. columns == 0 means upright tiles."""
    found = tiles.for_y(rows, hidden, 132)
    assert found == (tiles.UPRIGHT if columns == 0 else next(t for t in tiles.SIDEWAYS if t.columns == columns))
    assert tiles.gluon_takes_less("y", rows, depth, hidden, 132) is by_others


@pytest.mark.parametrize(
    ("kernel", "rows", "depth", "hidden", "by_others"),
    [
        ("preact", 1024, 1024, 4096, True),  # 33 µs for 30
        ("preact", 16384, 1024, 4096, False),
        ("preact", 302, 3072, 24576, False),  # 196 for 221: a row of tiles with few rows stores less
        ("preact", 576, 2048, 16384, False),  # 138 for 146
        ("preact", 320, 1280, 5120, True),
        ("gradient", 1024, 1024, 4096, True),  # 39 for 31
        ("gradient", 1024, 2048, 8192, True),
        ("gradient", 8192, 640, 2560, True),  # here an epilogue takes longer than a main loop
        ("gradient", 16384, 1024, 4096, False),
        ("gradient", 16384, 2048, 8192, False),
        ("down", 16384, 2048, 8192, True),
        ("down", 512, 4096, 14336, True),  # 121 for 108
        ("down", 16384, 3072, 24576, False),
        ("down", 16384, 4096, 14336, False),
    ],
)
def test_whose_tiles_are_faster_with_gradients(
    kernel: str, rows: int, depth: int, hidden: int, by_others: bool
) -> None:
    """As measured on an H200 without bias gradients, within 3 %."""
    assert tiles.gluon_takes_less(kernel, rows, depth, hidden, 132) is by_others


@pytest.mark.parametrize("gluon", [True, False])
@pytest.mark.parametrize("kernel", [*tiles.RACES])
@pytest.mark.parametrize(
    ("rows", "depth", "hidden"), [(1, 64, 64), (160, 4096, 14336), (512, 4096, 14336), (16384, 1024, 4096)]
)
def test_all_that_may_compute_a_kernel(rows: int, depth: int, hidden: int, kernel: str, gluon: bool) -> None:
    """`fusewise tune` tries the heuristic's choice first, then every other."""
    found = tiles.configurations(kernel, rows, depth, hidden, 132, gluon=gluon)
    assert found[0] == tiles.choose(kernel, rows, depth, hidden, 132, gluon=gluon)
    assert len(found) == len(set(found)) and (tiles.Config("gluon") in found) is gluon
    kinds = {config.tiles for config in found} - {"gluon"}
    streamed = rows <= {"y": 208, "preact": 128}.get(kernel, 0)
    assert kinds == {"upright", *(["sideways"] if kernel == "y" else []), *(["stream"] if streamed else [])}
    assert kernel != "y" or len([c for c in found if c.tiles == "sideways"]) == len(tiles.SIDEWAYS)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stores a result for a kernel of 512 rows, 4096 features in and 14336 out, as `fusewise tune` does."""
    monkeypatch.delenv("FUSEWISE_TUNED", raising=False)
    monkeypatch.setenv("FUSEWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_cuda, "processors_of", lambda _: 132)
    monkeypatch.setattr(_cuda, "_gluon_is_there", lambda: True)
    monkeypatch.setattr(_cuda, "_kernel", lambda *_: None)
    monkeypatch.setattr(_cuda, "CHOICE", Tuned("gated_linear", "cuda", (), _cuda._space, ("torch",)))
    found = Found(10.0, 12.5, 7, "2026-01-01T00:00:00+00:00")

    def keep(kernel: str, *config: Any) -> None:
        key = Key(kernel, torch.bfloat16, "", 512, 4096, 14336)
        _cuda.CHOICE.keep(-1, key, tiles.Config(*config), found)

    return keep


def test_a_call_takes_the_tiles_that_were_tuned_for_its_shape_alone(stored: Callable[..., None]) -> None:
    x = torch.empty(512, 4096, dtype=torch.bfloat16)
    others = torch.empty(28672, 4096, dtype=torch.bfloat16).chunk(2)
    of = Halves.of(STACKED, torch.cat(others), None)

    def left(x: Tensor) -> bool:
        return _cuda.refuses(14336, (x, *others), "silu", "y", by_choice=True) is not None

    assert left(x) and _cuda._forward_by("y", x, 14336) == (tiles.SIDE_128, 0)
    assert "tuned" not in _cuda.path(x, of)
    stored("y", "sideways", 192)
    assert not left(x) and _cuda._forward_by("y", x, 14336) == (tiles.SIDE_192, 0) and left(x.half())
    assert "configuration tuned on this machine for y" in _cuda.path(x, of)
    stored("y", "upright")
    assert not left(x) and _cuda._forward_by("y", x, 14336) == (tiles.Y, 0)
    stored("y", "gluon")  # in calls that name no implementation
    assert left(x) and _cuda._forward_by("y", x, 14336) == (tiles.SIDE_128, 0)
    for kernel, function in (("preact", "forward"), ("gradient", "recompute_gradient"), ("down", "down_gradient")):
        for config in ("upright", "gluon"):
            stored(kernel, config)
            assert _cuda.lacks(function, 14336, x) is (config == "gluon")


def test_a_search_runs_what_a_call_would(stored: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the dispatch, which looks the choice up: CUDA's tiles, or Gluon's kernel."""
    ran: list[Any] = []
    monkeypatch.setattr(_cuda, "_run", lambda epilogue, *_, width=0, **__: ran.append((epilogue, width)))
    gluon = SimpleNamespace(**{
        name: lambda *_: ran.append("gluon") for name in ("forward", "recompute_gradient", "down_gradient")
    })  # fmt: skip
    monkeypatch.setattr(_op.choice, "able", lambda *_: ("cuda", "gluon"))
    modules = {"cuda": _cuda, "gluon": gluon}
    monkeypatch.setattr(_op.choice, "serving", lambda name, *_: modules[name])
    monkeypatch.setattr(_op.choice, "implementation", lambda name: modules.get(name))
    monkeypatch.setattr(_op.choice, "unavailable", lambda *_: None)
    for kernel, epilogue in (
        ("y", tiles.Y),
        ("preact", tiles.PREACT),
        ("gradient", tiles.GRADIENT),
        ("down", tiles.DOWN),
    ):
        (job,) = tuning.jobs(None, (512, 64, 136), ("bf16",), (kernel,), torch.device("cpu"), "auto")
        assert job.tuned is _cuda.CHOICE
        with job.tuned.using(watch := Watch()):
            job.run()
        assert watch.keys[0] == Key(kernel, torch.bfloat16, "", 512, 64, 136)
        for config, expected in ((tiles.Config("upright"), (epilogue, 0)), (tiles.Config("gluon"), "gluon")):
            with job.tuned.using(config):
                job.run()
            assert ran[-1] == expected
    with pytest.raises(ValueError, match="which for gate here is cuda"):
        list(tuning.jobs(None, (512, 64, 136), ("bf16",), ("gate",), torch.device("cpu"), "auto"))


def test_epilogues_have_the_headers_numbers() -> None:
    (names,) = re.findall(r"enum Epilogue \{([^}]*)\}", (_cuda.FOLDER / "plan.h").read_text())
    assert [getattr(tiles, name.strip()) for name in names.split(",")] == list(range(13))
    assert [t.columns for t in tiles.SIDEWAYS] == [int(name[-3:]) for name in names.split(", ") if "SIDE" in name]


def test_what_gluon_makes_in_less_time_is_its(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Gluon is available and y is the only output."""
    x, weight = torch.empty(512, 64, dtype=torch.bfloat16), torch.empty(2 * 14336, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(_cuda, "_kernel", lambda *_: None)
    for there in (True, False):
        monkeypatch.setattr(_cuda, "_gluon_is_there", lambda there=there: there)
        for kernel in ("y", "preact"):
            told = refused(x, weight, hidden=14336, kernel=kernel)
            assert ("take less time" in str(told)) is (there and kernel == "y")
        assert refused(x, weight, hidden=14336, kernel="y", by_choice=False) is None
        assert refused(x[:16], weight, hidden=14336, kernel="y") is None


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


def test_what_it_lacks_is_that_of_the_implementation_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Gluon computes in less time, and elementwise gradients of unaligned matrices."""
    monkeypatch.setattr(_cuda, "processors_of", lambda _: 132)
    few, many = (torch.empty(*size, dtype=torch.bfloat16) for size in ((1024, 2048), (16384, 3072)))
    for there in (True, False):
        monkeypatch.setattr(_cuda, "_gluon_is_there", lambda there=there: there)
        for x, left in ((few, {*_cuda.SHARED}), (many, set()), (few[:128], set())):
            for function in _cuda.SHARED:
                leaves = there and function in left
                assert _cuda.lacks(function, 8192, x) is leaves
                if not leaves:
                    assert _op.having(function, _cuda, 8192, x) is _cuda
    dy, wide = (torch.empty(1, n, dtype=torch.bfloat16) for n in (4096, 4097))
    assert _cuda.lacks("gradient", 4096, dy, dy, wide[:, 1:])
    assert _cuda.lacks("gradient", 4097, *[wide] * 3)
    assert not _cuda.lacks("gradient", 4096, dy, dy, dy)
    assert _op.having("gradient", reference, 4096, dy) is reference
    assert [_cuda.otherwise(dtype) for dtype in _cuda.DTYPES] == ["gluon", "gluon", "triton"]
    for function in ("forward", "gradient", "recompute_gradient", "down_gradient"):
        assert _cuda.lacks(function, 4096, dy.float(), dy.float(), dy.float()) is (function != "forward")


@pytest.mark.parametrize("dtype", _cuda.DTYPES, ids=str)
def test_sizes_that_are_not_counted_in_32_bits_are_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, "_kernel", lambda *_: None)
    for rows, features, hidden in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        for beyond in (False, True):
            sizes = [_cuda.MOST + beyond if size else 128 for size in (rows, features, hidden)]
            x, weight = (torch.empty(size, sizes[1], dtype=dtype, device="meta") for size in (sizes[0], sizes[2]))
            told = _cuda.refuses(sizes[2], (x, weight, weight), "silu", "y", by_choice=False)
            far = features and dtype == torch.float32  # rows that long are too far apart for its kernel
            assert ("at most 2147483392" if beyond else "apart" if far else "None") in str(told)


@pytest.mark.parametrize("dtype", _cuda.DTYPES)
def test_a_library_has_the_function_that_is_looked_up(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "Library", lambda recipe, name: (recipe[1][0].read_text(), name))
    text, name = _cuda._kernel.__wrapped__(dtype, "silu")  # type: ignore[misc]
    assert f"int {name}(const Plan*" in text and f"int {name}_probe()" in text


@pytest.mark.parametrize("dtype", _cuda.DTYPES)
def test_a_library_of_any_dtype_serves_without_nvcc(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((cuda, "no_gpu"), (cuda, "not_hopper")):
        monkeypatch.setattr(module, name, lambda _: None)
    monkeypatch.setattr(build, "nvcc", lambda: SimpleNamespace(missing="no nvcc"))
    there = _cuda.recipe(dtype, "silu")[::3]
    monkeypatch.setattr(build, "built", lambda *recipe: recipe[::3] == there)
    assert _cuda.unavailable("cuda") is None
    monkeypatch.setattr(build, "built", lambda *_: False)
    assert _cuda.unavailable("cuda") == "no nvcc"


def test_what_is_left_to_gluon_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, "processors_of", lambda _: 132)
    monkeypatch.setattr(_cuda, "_gluon_is_there", lambda: True)
    x, weight = torch.empty(2, 16384, 2048, dtype=torch.bfloat16)
    of = halves(weight)
    told = _cuda.path(x, of)
    assert "gradients behind a down projection are computed by gluon" in told and "recomputing" not in told
    assert "gluon" not in _cuda.path(x[:0], of)
    assert "gradients by triton" in _cuda.path(x[:8].float(), halves(weight[:8].float()))


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
    of = halves(weight, bias, spec)
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
        {**nothing, **weights, **biases, **tensors(y=y), "epilogue": tiles.SIDE_128},
        {**nothing, **weights, **biases, **tensors(y=y, u=u, g=g), "epilogue": tiles.PREACT},
        {**nothing, **weights, **biases, **tensors(u=u, g=g, first=dy), **summed[0], "epilogue": tiles.GRADIENT},
        {**nothing, **weights, **tensors(u=u, g=g, first=dy), "epilogue": tiles.GRADIENT},
        {
            **nothing,
            **tensors(x=x, value=w_down, y=y, u=du, g=dg, first=u, second=g),
            **summed[1],
            "epilogue": tiles.DOWN,
        },
        {**nothing, **tensors(x=dy, u=du, g=dg, first=u, second=g), **summed[2], "depth": 96, "epilogue": tiles.GATE},
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
    _cuda.forward(x, halves(weight), spec, y, preact)
    _cuda.recompute_gradient(dy, x, halves(weight), preact, spec, None)
    _cuda.down_gradient(x, weight.T.contiguous()[:, :hidden], preact, y, preact, spec, None)
    for call in packed:
        for name in ("x", "value", "gate", "y", "u", "g", "first", "second"):
            assert call[name] % 16 == 0 and call[f"{name}_stride"] * 2 % 16 == 0, (name, call)


def test_no_rows_start_nothing(packed: list[dict[str, int]]) -> None:
    x, weight, dbias = torch.empty(0, 64), torch.empty(64, 64), torch.ones(2, 32)
    _cuda.forward(x, halves(weight), STACKED, torch.empty(0, 32), None)
    _cuda.recompute_gradient(torch.empty(0, 32), x, halves(weight), torch.empty(0, 64), STACKED, dbias)
    _cuda.down_gradient(x, weight[:, :32], torch.empty(0, 64), torch.empty(0, 32), torch.empty(0, 64), STACKED, None)
    _cuda.gradient(torch.empty(0, 32), torch.empty(0, 64), torch.empty(0, 64), STACKED, dbias)
    assert packed == [] and not dbias.any()
