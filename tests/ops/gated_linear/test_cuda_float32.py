"""The CUDA kernel of the gated linear unit in float32: when it is taken, its source compiled for the CPU, and its machine code."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest
import torch

from fusewise.ops._tuned import Key
from fusewise.ops.gated_linear import _cuda, reference
from fusewise.ops.gated_linear._cuda import tiles
from fusewise.ops.gated_linear._problem import ACTIVATIONS, Halves, Spec, new_preact, split_preact

from .. import cuda_codegen, cuda_on_cpu
from .test_cuda import refused
from .test_cuda_on_cpu import NONE, TIMES, named


def test_float32_is_taken_where_the_library_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda, "_kernel", lambda *_: None)
    monkeypatch.setattr(_cuda.float32, "processors_of", lambda _: 132)

    def told(rows: int, features: int = 512, hidden: int = 8192) -> str | None:
        return refused(torch.empty(rows, features), torch.empty(2 * hidden, features), hidden=hidden)

    assert told(8192) is None and told(8192, 511, 8191) is None and told(65, 4096, 132 * 128) is None
    assert "reading the weight dominates" in str(told(64, 4096, 132 * 128))
    assert "library takes less time" in str(told(65, 4096, 8192))  # half of the SMs would be idle
    x, weight = torch.empty(8192, 512), torch.empty(16384, 512)
    assert refused(x[:8], weight, by_choice=False) is None and refused(x, weight, hidden=8192) is None
    assert "left to triton" in str(refused(x, weight, x, hidden=8192, kernel="gradient"))  # a gradient
    assert "left to triton" in str(_cuda.refuses(8192, (x,), "silu", "gate", by_choice=True))
    far = torch.empty(1, device="meta").as_strided((200, 1), (1 << 23, 1))
    for by_choice, rows in itertools.product((True, False), (128, 129)):
        assert "8388608 elements apart" in str(
            _cuda.refuses(8192, (x, far[:rows], x), "silu", "y", by_choice=by_choice)
        )
    assert _cuda.refuses(8192, (far[:127], far[:1], far[:1]), "silu", "y", by_choice=False) is None
    monkeypatch.setattr(_cuda, "_gluon_is_there", lambda: True)
    wide = torch.empty(1024, 2048)
    assert _cuda._config("y", wide.bfloat16(), 8192).tiles == "gluon"  # none of whose tiles takes float32
    assert _cuda.refuses(8192, (wide, wide, wide), "silu", "y", by_choice=True) is None
    monkeypatch.setattr(_cuda.float32, "tf32_allowed", lambda: True)
    assert told(1024, 1024, 4096) is None and refused(x, weight, by_choice=False) is None
    assert "reading the weight dominates" in str(told(64, 4096, 132 * 96))
    assert "library takes less time" in str(told(257, 4096, 4096))
    assert told(257, 2047, 8192) is None and told(257, 2048, 8191) is None  # the library takes longer with those
    assert "from 257 rows on" in str(told(256, 2047, 8192)) and "from 257 rows on" in str(told(256, 2048, 8191))
    beside = torch.empty(1536, 320), torch.empty(1280, 320)
    for kernel in ("y", "preact"):  # storing pre-activations, too, takes longer than the library's whole epilogue
        reason = _cuda.refuses(1280, (beside[0], beside[1], beside[1]), "silu", kernel, by_choice=True)
        assert (reason is None) == (kernel == "y")
    assert "left to triton" in str(_cuda.refuses(8192, (x,), "silu", "gate", by_choice=True))
    assert _cuda.refuses(8192, (x, far, x), "silu", "y", by_choice=False) is None  # TMA reaches those


@pytest.mark.parametrize(
    ("rows", "features", "hidden", "expected"),
    [
        (8192, 2048, 8192, True),
        (16384, 1024, 4096, True),
        (1 << 17, 8192, 8192, True),
        (128, 2048, 8192, False),  # 64 tiles
        (128, 2048, 132 * 128, True),
        (300, 3072, 9216, False),  # 84 rows of our last tiles are empty
        (1024, 640, 2560, False),  # 160 tiles, two waves
        (256, 2048, 8192, True),
        (128, 128, 9216, False),  # beginning and end take 27 % of the time
        (1, 1, 1, False),
    ],
)
def test_float32_pays_by_waves(rows: int, features: int, hidden: int, expected: bool) -> None:
    for alone in (True, False):
        assert _cuda.float32.pays(_cuda.float32.FLOAT32, rows, hidden, features, 132, alone=alone) is expected


@pytest.mark.parametrize(
    ("rows", "features", "hidden", "y", "preact"),
    [  # as measured; waves are of pairs of SMs, with 256 rows and 96 features each
        (16384, 1024, 4096, True, True),
        (768, 4096, 4096, True, True),
        (1536, 8192, 2048, True, True),
        (2048, 320, 1280, True, True),
        (128, 2048, 8192, False, False),  # half of the rows of each tile are empty
        (257, 4096, 4096, False, False),  # as are those of the second one
        (1024, 8192, 2048, False, False),  # 88 tiles, two waves
        (1536, 320, 1280, True, False),
        (65, 320, 1280, False, False),
    ],
)
def test_tf32_pays_by_waves(rows: int, features: int, hidden: int, y: bool, preact: bool) -> None:
    for alone, expected in ((True, y), (False, preact)):
        assert _cuda.float32.pays(_cuda.float32.TF32, rows, hidden, features, 132, alone=alone) is expected


def test_the_host_fast_path_leaves_float32_to_python() -> None:
    x = torch.empty(8192, 8)
    for kernel in ("y", "preact", "gate", "down"):
        assert _cuda.launcher(kernel, x, 8192, "silu") == (0, 0, 0, 0)


def test_float32_has_nothing_to_tune() -> None:
    for kernel in tiles.RACES:
        assert _cuda._space(Key(kernel, torch.float32, "", 8192, 2048, 8192), -1) == []


# (M, D, F): a single element; ragged in every dimension, several tiles and passes through the ring buffer; whole tiles and stages.
FLOAT32 = [(1, 1, 1), (150, 133, 270), (257, 37, 130), (256, 96, 128)]


def in_float32(shape: tuple[int, int, int], activation: str, bias: bool = True, preact: bool = True) -> None:
    """The kernel on views of larger matrices with any strides, against float64."""
    rows, features, hidden = shape
    spec = Spec(activation, "stacked")
    x = torch.randn(rows, features + 3)[:, 1 : features + 1]
    weight = (torch.randn(2 * hidden, features + 1) / features**0.5)[:, 1:]
    of = Halves.of(Spec(activation, "interleaved"), weight, None, torch.randn(2 * hidden) if bias else None)
    around = torch.full((rows + 2, hidden + 1), 7.0)
    y = around[1:-1, :hidden].fill_(torch.nan)
    made = new_preact(x, hidden, spec).fill_(torch.nan)
    _cuda._run(
        tiles.PREACT, activation, x, of.value, of.gate, of[2:], y, split_preact(made, spec) if preact else (None, None)
    )
    exact = Halves(*(None if t is None else t.double() for t in of))
    true, preact_of = torch.empty_like(y, dtype=torch.float64), new_preact(x.double(), hidden, spec)
    reference.forward(x.double(), exact, spec, true, preact_of)
    torch.testing.assert_close(y, true.float(), rtol=1e-5, atol=1e-5)
    if preact:
        torch.testing.assert_close(made, preact_of.float(), rtol=1e-5, atol=1e-5)
    else:
        assert made.isnan().all()
    around[1:-1, :hidden] = 7.0
    assert bool((around == 7.0).all())


@pytest.mark.parametrize("how", TIMES, ids=named)
@pytest.mark.parametrize("shape", FLOAT32, ids=str)
def test_float32(shape: tuple[int, int, int], how: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    only = _cuda.one(torch.float32, "gelu_tanh")
    kernels = cuda_on_cpu.library(SimpleNamespace(SOURCES=_cuda.FLOAT32_SOURCES), "fusewise_gated_float32", *only)
    monkeypatch.setattr(_cuda, "_kernel", lambda *_: kernels.plays(**how))
    for copies in ("aligned", "aligned_output"):
        monkeypatch.setattr(_cuda, copies, None)  # nothing is copied
    in_float32(shape, "gelu_tanh")
    in_float32(shape, "gelu_tanh", bias=False, preact=False)


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "gelu_tanh"])
def test_activations_of_float32(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To float32's precision, and what eager code makes of infinities and NaN."""
    only = _cuda.one(torch.float32, activation)
    kernels = cuda_on_cpu.library(SimpleNamespace(SOURCES=_cuda.FLOAT32_SOURCES), "fusewise_gated_float32", *only)
    monkeypatch.setattr(_cuda, "_kernel", lambda *_: kernels.plays())
    in_float32((130, 20, 140), activation)
    g = torch.tensor(
        [-torch.inf, -200.0, -90.0, -13.0, -5.0, -1e-30, 0.0, 1e-30, 5.0, 13.0, 90.0, 200.0, torch.inf, torch.nan]
    )
    x, of = g[:, None], Halves(torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1), torch.zeros(1))
    finite = g.isfinite()
    y = torch.empty(len(g), 1)
    _cuda._run(tiles.Y, activation, x, of.value, of.gate, of[2:], y)
    true = reference.ACTIVATE[activation](g.double())
    torch.testing.assert_close(y[finite, 0], true[finite].float(), rtol=2e-6, atol=1e-36)


FLOAT32_MISTAKES = [  # a stage is read before it has arrived, or before others' copies have, or overwritten while it is read
    ("        wait_for_copies<STAGES - 3>();", "        if (!MISTAKE) wait_for_copies<STAGES - 3>();"),
    ("        __syncthreads();\n      }", "        if (!MISTAKE) __syncthreads();\n      }"),
    ("filled = (STAGES - 2) * STAGE", "filled = (MISTAKE ? STAGES - 4 : STAGES - 2) * STAGE"),
]


@pytest.mark.parametrize("mistake", range(-1, len(FLOAT32_MISTAKES)))
def test_the_machine_finds_what_float32_does_not_wait_for(
    mistake: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {source.name: source.read_text() for source in _cuda.FLOAT32_SOURCES}
    for number, (right, changed) in enumerate(FLOAT32_MISTAKES):
        assert texts["float32.cu"].count(right) == 1
        texts["float32.cu"] = texts["float32.cu"].replace(
            right, changed.replace("MISTAKE", f"(on_cpu::mistake == {number})")
        )
    folder = tmp_path_factory.mktemp("changed")
    for name, text in texts.items():
        (folder / name).write_text(text)
    sources = SimpleNamespace(SOURCES=[folder / name for name in texts])
    kernels = cuda_on_cpu.library(sources, "fusewise_gated_float32", *_cuda.one(torch.float32, "silu"))
    monkeypatch.setattr(_cuda, "_kernel", lambda *_: kernels.plays(late=True, mistake=mistake))
    if mistake == NONE:
        return in_float32((150, 133, 270), "silu")
    with pytest.raises(AssertionError, match="are not close"):
        in_float32((150, 133, 270), "silu")


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_the_loop_of_float32_is_nothing_but_products(activation: str) -> None:
    """A stage of 16 columns: 2048 products, six reads of four words per column, 24 asynchronous copies. What else there is takes issue
    slots, of which 92 % are the products'."""
    path, said = cuda_codegen.prepared(lambda: _cuda.recipe(torch.float32, activation))
    assert "0 bytes spill stores" in said and int(re.findall(r"Used (\d+) registers", said)[-1]) <= 255
    (body,) = (body for body in cuda_codegen.listing(path, "sm_90a") if "unit_kernel" in body.splitlines()[0])
    code = [line for line in body.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/ +\S", line)]
    products = [i for i, line in enumerate(code) if "FFMA" in line]
    barriers = [i for i, line in enumerate(code) if "BAR.SYNC" in line]
    assert len(barriers) == 2 and not [line for line in code if re.search(r"\b(LDL|STL)\b", line)]
    inside = [i for i in products if barriers[0] < i < barriers[1] + 140]  # the last column comes after the barrier
    assert len(inside) == 2048
    loop = code[inside[0] : inside[-1] + 1]
    assert sum("LDS.128" in line for line in loop) in range(96, 109) and sum("LDGSTS" in line for line in loop) == 24
    assert len(loop) <= 2048 / 0.915
