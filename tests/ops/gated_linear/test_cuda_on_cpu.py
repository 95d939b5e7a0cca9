"""The CUDA kernel source, compiled for the CPU, against the reference. Asynchronous operations complete at once or as late as
allowed. Tensor core rounding is not modeled."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewise._shared import cuda
from fusewise.ops.gated_linear import _cuda, reference
from fusewise.ops.gated_linear._cuda import tiles
from fusewise.ops.gated_linear._problem import Halves, Spec, new_preact, split_preact

from .. import cuda_on_cpu

KINDS = [(torch.bfloat16, "gelu_tanh"), (torch.float16, "silu")]
# (M, D, F): less than a tile and less than a K step; ragged in every dimension, with several passes through the ring buffer and by
# both warp groups; one row more than two tiles.
SHAPES = [(1, 8, 8), (150, 456, 296), (257, 64, 104)]
TIMES = [{"late": False, "backwards": True}, {"late": True}, {"late": True, "backwards": True}]
Play = Callable[..., None]


@pytest.fixture(params=KINDS, ids=lambda kind: kind[1])
def kind(request: pytest.FixtureRequest) -> tuple[torch.dtype, str]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def play(kind: tuple[torch.dtype, str], monkeypatch: pytest.MonkeyPatch) -> Play:
    """Use the kernels for CPU tensors; call the fixture to configure them. With two SMs one cluster processes all tiles."""
    kernels = cuda_on_cpu.library(_cuda, "fusewise_gated_linear", cuda.PARTS, *_cuda.one(*kind))
    monkeypatch.setattr(_cuda, "_kernel", lambda *_: kernels)
    monkeypatch.setattr(_cuda, "processors_of", lambda _: 2)
    return lambda **how: kernels.plays(**{"processors": 2, **how})


class Operands:
    """Views of larger matrices, which must stay unchanged elsewhere, and the results of the reference."""

    def __init__(self, shape: tuple[int, int, int], kind: tuple[torch.dtype, str], bias: bool = True) -> None:
        rows, features, hidden = shape
        dtype, activation = kind
        self.spec = Spec(activation, "stacked")
        self.x = torch.randn(rows, features + 8, dtype=dtype)[:, :features]
        weight = (torch.randn(2 * hidden, features) / features**0.5).to(dtype)
        self.halves = Halves.of(self.spec, weight, None, torch.randn(2 * hidden, dtype=dtype) if bias else None)
        self.dy = torch.randn(rows, hidden, dtype=dtype)
        self.preact = torch.randn_like(new_preact(self.x, hidden, self.spec))
        self.w_down = (torch.randn(features, hidden) / features**0.5).to(dtype)
        self.around = torch.full((rows + 2, hidden), 7.0, dtype=dtype)
        self.y = self.around[1:-1].fill_(torch.nan)
        self.made = torch.full_like(self.preact, torch.nan)
        self.dbias = torch.full((2, hidden), torch.nan)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(self.dy), torch.empty_like(self.preact), torch.empty_like(self.dbias)

    def check(self, y: Tensor | None, made: Tensor | None, dbias: Tensor | None) -> None:
        assert bool((self.around[0] == 7.0).all() and (self.around[-1] == 7.0).all())
        if y is not None:
            torch.testing.assert_close(self.y, y, rtol=1e-2, atol=1e-2)
        if made is not None:
            torch.testing.assert_close(self.made, made, rtol=1e-2, atol=1e-2)
        if dbias is not None:
            # Sums of terms that are rounded later: each differs by at most half an ulp.
            terms = torch.stack([part.float().abs().sum(0) for part in split_preact(self.made, self.spec)])
            assert ((self.dbias - dbias).abs() <= 2**-8 * terms + 1e-5).all()


shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def timed(*hows: Any) -> list[Any]:
    """(kind, how): no kernel waits for other things with another dtype or activation, so the second kind needs one order only."""
    return [*((KINDS[0], how) for how in hows), (KINDS[1], hows[-1])]


def named(value: Any) -> str:
    if isinstance(value, tuple) and value in KINDS:
        return str(value[1])
    return "-".join(name for name, on in value.items() if on) if isinstance(value, dict) else str(value)


times = pytest.mark.parametrize(("kind", "how"), timed(*TIMES), ids=named)


@shapes
@times
@pytest.mark.parametrize("made", ["y", "preact", "gradient", "down"])
def test_every_epilogue(
    made: str, shape: tuple[int, int, int], how: dict[str, bool], kind: tuple[torch.dtype, str], play: Play
) -> None:
    play(**how)
    of = Operands(shape, kind)
    y, preact, dbias = of.expected()
    if made == "y":
        _cuda._run(tiles.Y, of.spec.activation, of.x, of.halves.value, of.halves.gate, of.halves[2:], of.y)
        reference.forward(of.x, of.halves, of.spec, y, None)
        of.check(y, None, None)
    elif made == "preact":
        outputs = split_preact(of.made, of.spec)
        _cuda._run(
            tiles.PREACT, of.spec.activation, of.x, of.halves.value, of.halves.gate, of.halves[2:], of.y, outputs
        )
        reference.forward(of.x, of.halves, of.spec, y, preact)
        of.check(y, preact, None)
    elif made == "gradient":
        _cuda.recompute_gradient(of.dy, of.x, of.halves, of.made, of.spec, of.dbias)
        reference.recompute_gradient(of.dy, of.x, of.halves, preact, of.spec, dbias)
        of.check(None, preact, dbias)
    else:
        _cuda.down_gradient(of.x, of.w_down, of.preact, of.y, of.made, of.spec, of.dbias)
        reference.down_gradient(of.x, of.w_down, of.preact, y, preact, of.spec, dbias)
        of.check(y, preact, dbias)


@shapes
@pytest.mark.parametrize(
    ("kind", "device"), timed((2, TIMES[0]), (2, TIMES[1]), (4, TIMES[1]), (4, TIMES[2])), ids=named
)
@pytest.mark.parametrize("on_side", tiles.SIDEWAYS, ids=lambda on_side: str(on_side.rows))
def test_tiles_on_their_side(
    on_side: Any, device: tuple[int, dict[str, bool]], shape: tuple[int, int, int], kind: tuple[torch.dtype, str],
    play: Play,
) -> None:  # fmt: skip
    """With two clusters, a last tile alone is halved: one of whole rows, one with a single row, and one with none in its half."""
    processors, how = device
    play(processors=processors, **how)
    of = Operands(shape, kind)
    y, *_ = of.expected()
    _cuda._run(on_side.epilogue, of.spec.activation, of.x, of.halves.value, of.halves.gate, of.halves[2:], of.y)
    reference.forward(of.x, of.halves, of.spec, y, None)
    of.check(y, None, None)


# (M, D, F) and the tile width: for each number of columns, tiles of up to 64 features and of more; a partial tile, several passes
# through the ring buffer, a last stage partly beyond D, one row, and the maximum number of rows.
FEW = [
    ((1, 8, 8), 8),
    ((16, 456, 296), 40),
    ((3, 456, 296), 112),
    ((17, 200, 264), 112),
    ((20, 72, 264), 64),
    ((33, 1160, 200), 64),
    ((64, 328, 264), 128),
    ((65, 72, 104), 48),
    ((128, 328, 264), 120),
    ((130, 520, 80), 64),
    ((160, 328, 264), 72),
    ((176, 200, 136), 112),
    ((208, 136, 80), 48),
]


@pytest.mark.parametrize(
    ("kind", "how", "bias"), [*((*given, True) for given in timed(*TIMES)), (KINDS[0], TIMES[-1], False)], ids=named
)
@pytest.mark.parametrize(("shape", "width"), FEW, ids=str)
def test_few_rows(
    shape: tuple[int, int, int], width: int, kind: tuple[torch.dtype, str], how: dict[str, bool], bias: bool,
    play: Play,
) -> None:  # fmt: skip
    """With the tiles chosen for two SMs, and with tiles that leave one of them idle at the end; y alone and with pre-activations.
    Nothing waits for a bias, so one order suffices without it."""
    play(**how)
    of = Operands(shape, kind, bias)
    y, preact, _ = of.expected()
    reference.forward(of.x, of.halves, of.spec, y, preact)
    given = tiles.FEW, of.spec.activation, of.x, of.halves.value, of.halves.gate, of.halves[2:], of.y
    _cuda._run(*given, width=width)
    of.check(y, None, None)
    of.y.fill_(torch.nan)
    _cuda.forward(of.x, of.halves, of.spec, of.y, None)
    of.check(y, None, None)
    of.y.fill_(torch.nan)
    if shape[0] > tiles.STREAM_ROWS:
        with pytest.raises(AssertionError, match="invalid value"):
            _cuda._run(*given, split_preact(of.made, of.spec), width=width)
        return
    _cuda._run(*given, split_preact(of.made, of.spec), width=width)
    of.check(y, preact, None)
    of.y.fill_(torch.nan)
    _cuda.forward(of.x, of.halves, of.spec, of.y, of.made.fill_(torch.nan))
    of.check(y, preact, None)


NONE = -1  # of the mistakes below


# Replacements in the source: where MISTAKE is true, something is not waited for.
MISTAKES = [
    ("products.cuh", "shared.free[last]", "shared.free[MISTAKE ? slot : last]"),  # overwrites what a product still reads
    (  # overwrites what a store still reads
        "epilogues.cuh",
        "at.template wait_stores<A::BUFFERS - 1>();",
        "MISTAKE ? at.template wait_stores<A::BUFFERS>() : at.template wait_stores<A::BUFFERS - 1>();",
    ),
    ("products.cuh", "if (A::OWNERS > 1 && thread == 0) tma", "if (A::OWNERS > 1 && thread == 0 && !MISTAKE) tma"),
    ("products.cuh", "mbarrier_arrive_expect_tx(ready, x_bytes", "mbarrier_arrive_expect_tx(ready, (1 + MISTAKE) * x_bytes"),
    ("few_rows.cuh", "shared.free[last]", "shared.free[MISTAKE ? at.slot : last]"),
    ("few_rows.cuh", "mbarrier_arrive_expect_tx(ready, (2 *", "mbarrier_arrive_expect_tx(ready, ((2 - MISTAKE) *"),
    ("few_rows.cuh", "if (last >= 0 && first)", "if (last >= MISTAKE && first)"),
    ("few_rows.cuh", "grid_dependency_wait();\n  Turn<S::COUNT>", "if (!MISTAKE) grid_dependency_wait();\n  Turn<S::COUNT>"),
]  # fmt: skip
# So that clusters wait for each other in small problems.
SYNC = ("tiles.cuh", "SYNC_STEPS = 48, SYNC_WAVES = 16", "SYNC_STEPS = 11, SYNC_WAVES = 2")


@pytest.fixture(scope="module")
def build_changed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One build for all replacements, each of which would take as long to build alone."""
    texts = {source.name: source.read_text() for source in _cuda.SOURCES}
    for number, (file, right, changed) in enumerate((*MISTAKES, SYNC)):
        assert right in texts[file]
        texts[file] = texts[file].replace(right, changed.replace("MISTAKE", f"(on_cpu::mistake == {number})"))
    folder = tmp_path_factory.mktemp("changed")
    for name, text in texts.items():
        (folder / name).write_text(text)
    sources = SimpleNamespace(SOURCES=[folder / name for name in texts])
    return cuda_on_cpu.library(sources, "fusewise_gated_linear", cuda.PARTS, *_cuda.one(*KINDS[0]))


@pytest.fixture
def changed(build_changed: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels that wait for each other in small problems and make the mistake that they are told, or `NONE`."""
    monkeypatch.setattr(_cuda, "_kernel", lambda *_: build_changed)
    build_changed.waits()  # forgets those of other tests
    return build_changed


@pytest.mark.parametrize("how", TIMES[1:], ids=str)
def test_clusters_keep_together(how: dict[str, bool], changed: Any) -> None:
    """A single cluster, and one of two that waits in vain for the other, which only runs after the first has ended."""
    of = Operands((800, 648, 200), KINDS[0])  # 4 by 3 pairs of tiles
    # A single cluster never waits in vain. The first of two times out once; the second is in step with its only arrival, then times out.
    for processors, waits in ((2, (11, 0)), (4, (1, 2))):
        changed.plays(processors=processors, **how)
        y, preact, dbias = of.expected()
        _cuda.forward(of.x, of.halves, of.spec, of.y, of.made)
        reference.forward(of.x, of.halves, of.spec, y, preact)
        of.check(y, preact, None)
        assert changed.waits() == waits
        _cuda.recompute_gradient(of.dy, of.x, of.halves, of.made, of.spec, of.dbias)
        reference.recompute_gradient(of.dy, of.x, of.halves, preact, of.spec, dbias)
        of.check(None, preact, dbias)
        assert changed.waits() == waits


def late(kernels: Any, few: bool, mistake: int) -> None:
    """What `few_rows.cuh` or `products.cuh` and `epilogues.cuh` compute, if asynchronous operations run as late as possible."""
    kernels.plays(processors=2, late=True, mistake=mistake)
    of = Operands((60, 1160, 264) if few else (150, 456, 296), KINDS[0])
    y, preact, dbias = of.expected()
    if few:
        reference.forward(of.x, of.halves, of.spec, y, None)
        _cuda.forward(of.x, of.halves, of.spec, of.y, None)
        return of.check(y, None, None)
    reference.recompute_gradient(of.dy, of.x, of.halves, preact, of.spec, dbias)
    _cuda.recompute_gradient(of.dy, of.x, of.halves, of.made, of.spec, of.dbias)
    of.check(None, preact, dbias)


@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_the_machine_finds_what_is_not_waited_for(mistake: int, changed: Any) -> None:
    with pytest.raises(AssertionError, match=r"are not close|all threads wait for each other|before the kernel ahead"):
        late(changed, MISTAKES[mistake][0] == "few_rows.cuh", mistake)


@pytest.mark.parametrize("few", [False, True])
def test_without_a_mistake_it_finds_nothing(few: bool, changed: Any) -> None:
    late(changed, few, NONE)


@pytest.mark.parametrize("how", [{"backwards": False}, {"backwards": True}], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("rows", [1, 70, 300])
def test_gradient_of_the_gate_alone(
    rows: int, sums: bool, in_place: bool, how: dict[str, bool], kind: tuple[torch.dtype, str], play: Play
) -> None:
    play(**how)
    of = Operands((rows, 8, 296), kind)
    _, preact, dbias = of.expected()
    reference.gradient(of.dy, of.preact, preact, of.spec, dbias)
    if in_place:
        of.made.copy_(of.preact)
    _cuda.gradient(of.dy, of.made if in_place else of.preact, of.made, of.spec, of.dbias if sums else None)
    of.check(None, preact, dbias if sums else None)
