"""A repeated launch gets the same arguments as an uncached one: new pointers, the rest from the cached plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fusewise.ops.qk_norm_rope._problem import Norm
from fusewise.ops.rope._problem import Problem, Spec

from ..rope.support import Case, make_table
from .support import INTERPRETER, NormCase, build

pytest.importorskip("triton")
from fusewise.ops.qk_norm_rope import _triton


class Recorder:
    """Stand-in for compiled kernels that records launches by kernel name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def launch(self, x: Tensor, kernel: Any, grid: int, bound: dict[str, Any], options: dict[str, int]) -> Any:
        values = tuple(bound[parameter.name] for parameter in kernel.params)
        name = kernel.fn.__name__
        self.calls.append((name, tuple(v.data_ptr() if isinstance(v, Tensor) else v for v in values)))

        class Compiled:
            def __getitem__(_, grid: tuple[int, int, int]) -> Any:  # noqa: N805
                return lambda *values, stream: self.calls.append((name, values))

        return Compiled(), grid, values


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(_triton, "_launch", found.launch)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    _triton._PLANS.clear()
    yield found
    _triton._PLANS.clear()


IDS = torch.arange(5)
ROTATIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "table": ({"cos": "half"}, Spec()),
    "fused": ({"cos": "fused"}, Spec(table="fused")),
    "angles-offset": ({"cos": "angles", "offset": 7}, Spec(table="angles")),
    "frequencies-ids": ({"cos": "inv_freq", "positions": IDS}, Spec(table="inv_freq")),
}


@pytest.mark.skipif(INTERPRETER, reason="the interpreter has no launches to bind")
@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("heads", [(4, 2), (4, None)], ids=str)
@pytest.mark.parametrize("weights", ["wanted", "frozen", "none"])
def test_bound_arguments(name: str, heads: tuple[int, int | None], weights: str, recorder: Recorder) -> None:
    given, spec = ROTATIONS[name]
    table = list(make_table(given["cos"], 8, 2, torch.float32).values())
    norm = Norm(1e-6, 1.0, "head")

    def call() -> tuple[Any, ...]:
        """Run forward and backward with tensors at new addresses; return them."""
        case = NormCase(
            Case(name="plan", heads=heads[0], kv_heads=heads[1]),
            weight_dtype=None if weights == "none" else torch.float32,
        )
        made = build(case)
        cos, sin = table[0].clone(), table[1].clone() if len(table) == 2 else None
        rotation = (cos, sin, given.get("positions"), None, None, given.get("offset", 0), spec.encode())
        _triton.forward(made.xs, [torch.empty_like(x) for x in made.xs], made.weights, rotation, norm)
        dxs, dws = [torch.empty_like(x) for x in made.xs], [torch.empty_like(w) for w in made.weights]
        _triton.backward(made.dys, made.xs, dxs, made.weights, dws if weights == "wanted" else [], rotation, norm)
        return made, dxs, dws, rotation  # kept alive, so that no address is reused

    first = call()
    long = recorder.calls[:]
    assert len(_triton._PLANS) == 2
    recorder.calls.clear()
    second = call()
    short = recorder.calls[:]
    _triton._PLANS.clear()
    assert [n for n, _ in short] == [n for n, _ in long]
    addresses = {id(t): t.data_ptr() for t in (*second[0].xs, *second[0].weights, *second[1], *second[2])}
    assert not set(addresses.values()) & {t.data_ptr() for t in (*first[0].xs, *first[0].weights, *first[1])}

    # The uncached path on the second call's tensors: outputs and partial sums are new, the rest must be equal.
    made, dxs, dws, rotation = second
    recorder.calls.clear()
    ys = [torch.empty_like(x) for x in made.xs]
    _triton.forward(made.xs, ys, made.weights, rotation, norm)
    _triton.backward(made.dys, made.xs, dxs, made.weights, dws if weights == "wanted" else [], rotation, norm)
    fresh = {"forward_kernel": (2, 3), "backward_kernel": (8, 9), "sum_kernel": (0, 1)}
    if weights != "wanted":
        fresh["backward_kernel"] = ()
    for (kernel, got), (_, want) in zip(short, recorder.calls, strict=True):
        assert len(got) == len(want)
        different = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
        assert set(different) <= set(fresh[kernel]), f"{kernel}: arguments {different}"


@pytest.mark.skipif(INTERPRETER, reason="the interpreter has no launches to bind")
def test_what_is_not_aligned_goes_the_long_way(recorder: Recorder) -> None:
    made = build(NormCase(Case(name="odd", memory="misaligned", kv_heads=None)))
    rotation = (*make_table("half", 8, 2, torch.float32).values(), None, None, None, 0, "")
    for _ in range(2):
        _triton.forward(
            made.xs, [torch.empty_like(x) for x in made.xs], made.weights, rotation, Norm(1e-6, 0.0, "head")
        )
    assert not _triton._PLANS
    assert len(recorder.calls) == 2


@given(
    tokens=st.integers(0, 20_000), heads=st.tuples(st.integers(1, 70), st.integers(1, 70)), over=st.sampled_from(["head", "all"]),
    programs=st.integers(1, 16), processors=st.integers(1, 132),
)  # fmt: skip
def test_programs_share_the_tiles(
    tokens: int, heads: tuple[int, int], over: str, programs: int, processors: int
) -> None:
    """Every tile exactly once, the same number per program except the last ones, and no more programs than fit."""
    xs = tuple(torch.empty(1, tokens, count, 64, dtype=torch.bfloat16, device="meta") for count in heads)
    angles = torch.empty(max(tokens, 1), 32, device="meta")
    problem = Problem.build(xs, xs, (angles, angles, None, None, None, 0, Spec().encode()))
    config = replace(_triton.choose(problem, Norm(1e-6, 0.0, over), True, processors), programs=programs)
    counts = _triton.split(problem, config, processors)
    tiles = [-(-tokens // t.block_t) * -(-h // t.block_h) for t, h in zip(config.tiles, heads, strict=True)]
    assert sum(counts) <= max(programs * processors, 2)
    for count, of_tensor in zip(counts, tiles, strict=True):
        assert (count == 0) == (of_tensor == 0)
    each = max(1, *(-(-of_tensor // max(count, 1)) for count, of_tensor in zip(counts, tiles, strict=True)))
    for count, of_tensor in zip(counts, tiles, strict=True):
        assert count == -(-of_tensor // each)
