"""Dispatch: which implementation a call uses, and how it is reported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fusewise
from fusewise._shared import build, cuda
from fusewise.ops._choice import Choice
from fusewise.ops.rope import _auto, _host, _op

from ..a_gpu import as_dispatch_sees_it
from .support import Case, Place, assert_bits, make, make_table, require
from .test_matrix import CASES

Q = torch.randn(1, 4, 2, 16)
NEW = (torch.empty(0),)  # out of place: outputs other than the inputs
TABLE = make_table("half", 8, 1, torch.float32)


def test_auto_takes_the_first_that_serves() -> None:
    told = fusewise.explain_dispatch(fusewise.rope, Q, **TABLE)
    native = _op.unavailable("cpu", "cpu", torch.float32) is None
    assert told.impl == ("cpu" if native else "reference") == _op.choose("cpu", torch.float32)
    assert told.op == "rope"
    assert set(told.passed_over) == set(_op.IMPLEMENTATIONS) - {told.impl}
    assert all(told.passed_over.values())
    assert str(told).splitlines()[0] == f"rope: {told.impl}, {told.reason}"
    assert len(str(told).splitlines()) == len(_op.IMPLEMENTATIONS)


def test_float64_takes_the_reference() -> None:
    told = fusewise.explain_dispatch(fusewise.rope_, Q.double(), **TABLE)
    assert (told.op, told.impl) == ("rope_", "reference")
    assert "float64" in told.passed_over["cpu"]
    torch.testing.assert_close(
        fusewise.rope(Q.double(), **TABLE), fusewise.rope(Q.double(), **TABLE, impl="reference"), rtol=0, atol=0
    )


@pytest.mark.gpu
def test_a_gpu_takes_a_kernel() -> None:
    q = Q.cuda()
    told = fusewise.explain_dispatch(fusewise.rope, q)
    assert told.impl in ("triton", "cuda")
    assert _auto.serving("auto", (q,), NEW, "") is _op.choice.implementation(told.impl)


SHAPES = [  # q and k for which a CUDA thread handles several heads, or rows do not fill a block
    ((1, 2000, 32, 128), (1, 2000, 8, 128), {}),
    ((2, 700, 64, 96), (2, 700, 64, 96), {"rotary_dim": 24}),
    ((2, 1000, 32, 80), (2, 1000, 32, 80), {"rotary_dim": 32}),
    ((1, 1000, 128, 192), (1, 1000, 1, 64), {"rotary_dim": 64, "rotary_start": -64, "pairing": "interleaved_to_half"}),
    ((64, 1, 32, 128), (64, 1, 8, 128), {}),
]


def assert_bits_of(a: Tensor, b: Tensor) -> None:
    """Check bitwise equality; all NaNs are equal."""
    assert torch.equal(a.isnan(), b.isnan())
    assert_bits(a.nan_to_num(0), b.nan_to_num(0))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_auto_has_the_bits_of_triton_whatever_it_takes(case: Case) -> None:
    """Forward and backward. With tables, CUDA is bitwise equal too; angles computed in the kernel always use Triton."""
    for impl in ("triton", "cuda"):
        require(Place(impl, "cuda"))
    call = make(case, "cuda")
    computed = "inv_freq" in call.kwargs or "angles" in call.kwargs
    assert (fusewise.explain_dispatch(fusewise.rope, *call.xs, **call.kwargs).impl == "triton") == computed
    xs = tuple(x.detach().requires_grad_() for x in call.xs)
    results = {}
    for impl in ("triton", "auto") if computed else ("triton", "auto", "cuda"):
        ys = fusewise.rope(*xs, **call.kwargs, impl=impl)
        ys = ys if isinstance(ys, tuple) else (ys,)
        dys = results["triton"][: len(ys)] if results else tuple(torch.randn_like(y) for y in ys)
        results[impl] = (*dys, *(y.detach() for y in ys), *torch.autograd.grad(ys, xs, dys))
    for result in results.values():
        for y, want in zip(result, results["triton"], strict=True):
            assert_bits_of(y, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("q", "k", "options"), SHAPES, ids=str)
def test_cuda_has_the_bits_of_triton_where_it_has_work(
    q: tuple[int, ...], k: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    for impl in ("triton", "cuda"):
        require(Place(impl, "cuda"))
    xs = tuple(torch.randn(shape, device="cuda", dtype=dtype) for shape in (q, k))
    angles = torch.randn(q[1] + 1, options.get("rotary_dim", q[-1]) // 2, device="cuda")
    call = {"cos": angles.cos(), "sin": angles.sin(), **options, "offset": 1}
    for y, want in zip(fusewise.rope(*xs, **call, impl="cuda"), fusewise.rope(*xs, **call, impl="triton"), strict=True):
        assert_bits(y, want)


def test_what_auto_takes_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _host.forget()  # a repeated call would bypass the module's `launch`
    ran = []
    for impl in ("cpu", "reference"):
        module = _op.choice.implementation(impl)

        def recorded(*args: Any, impl: str = impl, launch: Any = module.launch) -> None:
            ran.append(impl)
            launch(*args)

        monkeypatch.setattr(module, "launch", recorded)
    fusewise.rope(Q, **TABLE)
    fusewise.rope(Q, **TABLE, impl="reference")
    fusewise.rope(Q.double(), **TABLE)
    assert ran == [fusewise.explain_dispatch(fusewise.rope, Q).impl, "reference", "reference"]


def test_a_named_implementation_never_falls_back() -> None:
    with pytest.raises(ValueError, match=r"impl must be able to serve the tensors, got 'triton'.*TRITON_INTERPRET=1"):
        fusewise.rope(Q, **TABLE, impl="triton")
    with pytest.raises(ValueError, match=r"impl must be able to serve the tensors, got 'cpu': cpu computes in float32"):
        fusewise.rope(Q.double(), **TABLE, impl="cpu")
    told = fusewise.explain_dispatch(fusewise.rope, Q, impl="reference")
    assert told.reason == "as requested"
    with pytest.raises(ValueError, match="impl must be able to serve float32 on cpu, got 'triton'"):
        fusewise.explain_dispatch(fusewise.rope, Q, impl="triton")
    for unknown in ("nosuch", ["triton"], None):
        with pytest.raises(ValueError, match=r"^rope: impl must be one of auto, triton, cuda, cpu, reference, got "):
            fusewise.explain_dispatch(fusewise.rope, Q, impl=unknown)


def test_the_operator_itself_refuses_too() -> None:
    """A compiled graph may run in another environment than its trace."""
    with pytest.raises(ValueError, match=r"impl must be able to serve the tensors, got 'triton'"):
        torch.ops.fusewise.rope(Q, *TABLE.values(), None, None, None, 0, "", "triton", [])


def test_a_missing_compiler_leaves_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a native kernel, auto falls back to the next implementation without an error."""
    reason = "no C++ compiler was found"

    def without(impl: str, device_type: str, dtype: torch.dtype) -> str | None:
        return None if impl == "reference" else reason

    _op.choose.cache_clear()
    monkeypatch.setattr(_op.choice, "unavailable", without)
    try:
        told = fusewise.explain_dispatch(fusewise.rope, Q)
        assert told.impl == "reference"
        assert told.passed_over["cpu"] == reason
    finally:
        _op.choose.cache_clear()


SMALL, LARGE = (1, 64, 32, 128), (8, 4096, 32, 128)
A_TABLE = {"cos": torch.ones(4096, 64), "sin": torch.ones(4096, 64)}
FREQUENCIES = {"inv_freq": torch.ones(64)}


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    yield from as_dispatch_sees_it(_op.choice, monkeypatch)


@pytest.mark.parametrize(
    ("built", "shape", "table", "dtype", "taken", "not_cuda"),
    [
        (True, SMALL, A_TABLE, torch.bfloat16, "cuda", ""),
        (True, SMALL, {"cos_sin": torch.ones(4096, 128)}, torch.float32, "cuda", ""),
        (False, SMALL, A_TABLE, torch.bfloat16, "triton", 'not built; run `fusewise build` or call with impl="cuda"'),
        (
            True,
            LARGE,
            A_TABLE,
            torch.bfloat16,
            "triton",
            "up to 256 MiB, dominated by host overhead; this one moves 512 MiB",
        ),
        (True, SMALL, FREQUENCIES, torch.bfloat16, "triton", "with angles computed in the kernel"),
    ],
)
def test_on_a_gpu_cuda_takes_small_calls_once_it_is_built(
    built: bool, shape: tuple[int, ...], table: dict[str, Any], dtype: torch.dtype, taken: str, not_cuda: str, a_gpu: list[str]
) -> None:  # fmt: skip
    a_gpu[:] = [] if built else a_gpu
    with FakeTensorMode():
        q = torch.empty(shape, dtype=dtype, device="cuda")
        told = fusewise.explain_dispatch(fusewise.rope, q, **table)
        assert told.impl == taken
        assert not_cuda in told.passed_over.get("cuda", "")
        assert ("triton" in told.passed_over) == (taken == "cuda")
        kind = {"cos": "", "cos_sin": "table=fused", "inv_freq": "table=inv_freq"}[next(iter(table))]
        assert _auto.serving("auto", (q,), NEW, kind) == taken
        for impl in ("triton", "cuda"):
            assert (
                _auto.serving(impl, (q,), NEW, kind)
                == impl
                == fusewise.explain_dispatch(fusewise.rope, q, impl=impl).impl
            )
        double = q.double()
        assert _auto.serving("auto", (double,), NEW, kind) == "triton"  # by preference order


def test_auto_takes_cuda_after_a_call_has_made_it(a_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        q = torch.empty(SMALL, device="cuda")
        assert _auto.serving("auto", (q,), NEW, "") == "triton"
        a_gpu.clear()
        assert _auto.serving("auto", (q,), NEW, "") == "triton", "looked for at every call"
        monkeypatch.setitem(build._LOADED, "rope-cuda", build.BuildError())
        assert _auto.serving("auto", (q,), NEW, "") == "cuda"


@pytest.mark.parametrize("why", ["no_gpu", "recipe", "unavailable"])
def test_why_auto_does_not_take_cuda(why: str, a_gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU, no compiler, or what was built does not run here."""
    a_gpu.clear()
    assert _op.choice._unready(0) is None

    def refuse(*_: Any) -> str:
        if why == "recipe":
            raise build.BuildError("a reason")
        return "a reason"

    owner = {"no_gpu": cuda, "recipe": _op.choice.implementation("cuda"), "unavailable": _op.choice}[why]
    monkeypatch.setattr(owner, why, refuse)
    assert _op.choice._unready(0) == "a reason"


def test_an_implementation_that_cannot_be_imported_leaves_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Choice("rope", ("triton", "reference"))
    monkeypatch.setitem(sys.modules, "fusewise.ops.rope._triton", None)
    assert str(choice.unavailable("triton", "cuda", torch.float32)).startswith("triton cannot be imported: ")
    assert choice.choose("cuda", torch.float32) == "reference"


def test_the_bound_is_of_bytes_read_and_written(a_gpu: list[str]) -> None:
    a_gpu.clear()
    with FakeTensorMode():
        q = torch.empty(1, _auto.MOST_BYTES_FOR_CUDA // 2048, 4, 64, device="cuda")
        assert 2 * q.nbytes == _auto.MOST_BYTES_FOR_CUDA
        assert _auto.serving("auto", (q,), NEW, "") == "cuda"
        assert _auto.serving("auto", (q, torch.empty(1, 1, 4, 64, device="cuda")), NEW, "") == "triton"


def test_in_place_a_part_of_the_head_is_all_that_moves(a_gpu: list[str]) -> None:
    a_gpu.clear()
    with FakeTensorMode():
        q = torch.empty(1, _auto.MOST_BYTES_FOR_CUDA // 1024, 4, 64, device="cuda")  # half of its traffic is the bound
        part = {"angles": None, "cos": torch.ones(9, 16), "sin": torch.ones(9, 16), "rotary_dim": 32}
        assert _auto.serving("auto", (q,), (q,), "rotary_dim=32") == "cuda"
        assert _auto.serving("auto", (q,), (q,), "rotary_dim=34") == "triton"
        assert _auto.serving("auto", (q,), (q,), "") == "triton"
        assert fusewise.explain_dispatch(fusewise.rope_, q, **part).impl == "cuda"


def test_a_graph_in_place_takes_what_an_eager_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes tensors that it writes to with one more dimension."""
    in_place = []

    def serving(impl: str, xs: tuple[Tensor, ...], ys: tuple[Tensor, ...], spec: str) -> Any:
        in_place.append([y is x for x, y in zip(xs, ys, strict=True)])
        return _op.choice.implementation("reference")

    monkeypatch.setattr(_auto, "serving", serving)
    monkeypatch.setattr(_host, "serving", serving)
    (q, k), call = (
        (torch.randn(1, 4, 2, 16, 1) for _ in range(2)),
        (*TABLE.values(), None, None, None, 0, "", "reference"),
    )
    _op._rope_(q, *call)
    _op._rope_qk_(q, k, *call)
    _op._rope_qk_out(Q, Q, *call, q, k)
    assert _host._planned(_host.IN_PLACE, (q, k, *call), (q, k)) is None
    assert in_place == [[True], [True, True], [False, False], [True, True]]


def test_cuda_takes_what_copies_a_part_of_the_head_at_any_size(a_gpu: list[str]) -> None:
    a_gpu.clear()
    with FakeTensorMode():
        q = torch.empty(1, _auto.MOST_BYTES_FOR_CUDA // 256, 4, 64, device="cuda", dtype=torch.bfloat16)
        for rotary_dim in (0, 64, 32, 24, 20, 18):
            taken = "cuda" if 0 < rotary_dim < 64 else "triton"
            assert _auto.serving("auto", (q,), NEW, f"rotary_dim={rotary_dim}" if rotary_dim else "") == taken
            assert _auto.serving("auto", (q,), (q,), f"rotary_dim={rotary_dim}" if rotary_dim else "") == "triton"
        table = {"cos": torch.ones(9, 16), "sin": torch.ones(9, 16), "rotary_dim": 32}
        told = fusewise.explain_dispatch(fusewise.rope, q, **table)
        assert (told.impl, told.passed_over["triton"]) == ("cuda", "it is for full rotation")
        assert fusewise.explain_dispatch(fusewise.rope_, q, **table).impl == "triton"
        computed = {"inv_freq": torch.ones(16), "rotary_dim": 32}
        assert fusewise.explain_dispatch(fusewise.rope, q, **computed).impl == "triton"


def test_explain_dispatch_refuses_what_it_cannot_explain() -> None:
    with pytest.raises(TypeError, match=r"^explain_dispatch: op must be one of fusewise.rope"):
        fusewise.explain_dispatch(torch.sin, Q)
    with pytest.raises(TypeError, match=r"^explain_dispatch: op must be one of .*, got \[\]; "):
        fusewise.explain_dispatch([], Q)
    with pytest.raises(TypeError, match=r"^explain_dispatch: args must be those of a call of rope, got missing .*'q'"):
        fusewise.explain_dispatch(fusewise.rope)
    with pytest.raises(TypeError, match=r"a call of rope, got an unexpected keyword argument 'base'; "):
        fusewise.explain_dispatch(fusewise.rope, Q, base=10000.0)
    with pytest.raises(TypeError, match=r"^explain_dispatch: q must be a torch.Tensor, got list; pass"):
        fusewise.explain_dispatch(fusewise.rope, [1.0], positions=torch.arange(4))
    with pytest.raises(TypeError, match=r"^explain_dispatch: weight must be a torch.Tensor, got NoneType; pass"):
        fusewise.explain_dispatch(fusewise.geglu_linear, torch.ones(2, 4), None)
    with pytest.raises(TypeError, match=r"^explain_dispatch: q must have dtype float32, .*float64, got int32; pass"):
        fusewise.explain_dispatch(fusewise.rope, Q.int(), **TABLE)


def test_q_decides_whatever_comes_first() -> None:
    positions = torch.arange(4)
    told = fusewise.explain_dispatch(fusewise.rope, positions=positions, q=Q)
    assert told == fusewise.explain_dispatch(fusewise.rope, Q, positions=positions)
    assert "float32" in told.reason
