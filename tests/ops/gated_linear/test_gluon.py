"""The Gluon kernels: chosen and rejected calls, configurations and launches."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton

from fusewise.ops._tuned import Key
from fusewise.ops.gated_linear import _gluon, _gluon_few, _op, geglu_linear
from fusewise.ops.gated_linear._problem import Halves, Spec, split_preact

SHARED = 227 * 1024  # bytes of shared memory a program may have on sm_90
EPILOGUES = ("y", "preact", "gradient", "down")
STACKED = Spec("gelu_tanh", "stacked")


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
        x: Tensor, weight: Tensor, *others: Tensor, hidden: int = 128, by_choice: bool = True, kernel: str = "y"
    ) -> str | None:
        return _gluon.refuses(hidden, (x, weight[:128], weight[128:], *others), "silu", kernel, by_choice=by_choice)

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
    assert refused(x[:64], weight) is None and refused(x[:64], weight, kernel="preact", by_choice=False) is None
    assert "64 rows" in str(refused(x[:64], weight, kernel="preact"))


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


def test_without_a_hopper_it_says_why() -> None:
    assert "Hopper" in str(_op.unavailable("gluon", "cpu", torch.bfloat16))
    assert _op.unavailable("gluon", "cpu", torch.float32) == "gluon takes bfloat16 and float16, not float32"
    with pytest.raises(ValueError, match=r"impl must .* got 'gluon'.*Hopper"):
        geglu_linear(empty(4, 8), empty(16, 8), impl="gluon")


def test_configurations_differ_in_what_a_search_may_vary() -> None:
    for epilogue in EPILOGUES:
        found = _gluon.configurations(epilogue)
        assert len(set(found)) == len(found) > 1
        assert _gluon.choose(epilogue) in {dataclasses.replace(c, group_m=8) for c in found}
