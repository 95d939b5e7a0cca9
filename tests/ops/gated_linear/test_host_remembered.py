"""Which training calls on a GPU the C++ fast path remembers, and what it leaves to Python. On a CPU, too: see `device` of conftest.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewise.ops.gated_linear import _cuda, _host, _op
from fusewise.ops.gated_linear._problem import Spec

KINDS = [(torch.bfloat16, "gelu_tanh"), (torch.float16, "silu")]
DTYPE, ACTIVATION = KINDS[0]
# Of no other test: what is remembered here stays.
FEATURES, HIDDEN, OUT = 104, 184, 72
WANTS = False, True, True, False, True  # to overwrite; the gradients of x, weight, w_gate and the biases

NAMES = {_host.KEEPING: "kept", _host.BACKWARD: "gradients", _host.MLP_BACKWARD: "mlp_gradients"}
jobs = pytest.mark.parametrize("job", NAMES, ids=NAMES.get)
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


def asked(
    job: int, device: str, rows: int = 40, features: int = FEATURES, hidden: int = HIDDEN, out: int = OUT, *, impl: str = "cuda",
    kind: tuple[torch.dtype, str] = KINDS[0], whole: int = 0, gate_first: bool = False,
) -> list[Any]:  # fmt: skip
    """The arguments of the function of `job`, for a stacked weight. Rows of dz, w_down, x and the weight are parts of those of
    matrices with `whole` columns, if that is not 0."""
    dtype, activation = kind

    def some(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, whole or columns).to(device, dtype)[:, :columns]

    weights = some(2 * hidden, features), None, None, None
    call = _host.arguments_of(some(rows, features), weights, Spec(activation, "stacked", gate_first), impl)
    preact = torch.randn(rows, 2 * hidden).to(device, dtype)
    dy, dz, w_down = torch.randn(rows, hidden).to(device, dtype), some(rows, out), some(out, hidden)
    before = {_host.KEEPING: (), _host.BACKWARD: (dy, preact, *WANTS), _host.MLP_BACKWARD: (dz, preact, *WANTS, True, True, w_down)}  # fmt: skip
    return [*before[job], *call]


@torch.no_grad()
def serves(job: int, arguments: list[Any]) -> bool:
    return getattr(_host, NAMES[job])(*arguments) is not None


@torch.no_grad()
def remember(job: int, arguments: list[Any]) -> None:
    _host.remember(job, *arguments)


@torch.no_grad()
def new(job: int, arguments: list[Any]) -> bool:
    found: bool = _host._new(job, *arguments)
    return found


@jobs
def test_what_differs_is_asked_for_anew(job: int, device: str) -> None:
    size = {"rows": 48 + job}  # of no other test
    assert new(job, asked(job, device, **size)) and not serves(job, asked(job, device, **size))
    remember(job, asked(job, device, **size))
    assert serves(job, asked(job, device, **size)) and not new(job, asked(job, device, **size))
    others: list[dict[str, Any]] = [
        {"rows": 47}, {"features": 80}, {"hidden": 136}, {"kind": (torch.float16, ACTIVATION)}, {"kind": (DTYPE, "silu")},
        {"whole": 256}, {"impl": "auto"}, {"gate_first": True}, *([{"out": 64}] if job == _host.MLP_BACKWARD else []),
    ]  # fmt: skip
    for other in others:
        given = asked(job, device, **{**size, **other})
        assert not serves(job, given) and new(job, given)
    for j in NAMES:
        if j != job:
            assert new(j, asked(j, device, **size))


@jobs
def test_what_tma_cannot_describe_is_pythons(job: int, device: str) -> None:
    """Like a cached call, but with an unaligned address, or rows that do not start at multiples of 16 bytes."""
    arguments = asked(job, device)
    remember(job, arguments)
    assert serves(job, arguments)
    for place, t in enumerate(arguments):
        if isinstance(t, Tensor):
            address = t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)
            rows = t.new_empty(t.shape[0], t.shape[1] + 1)[:, : t.shape[1]].copy_(t)
            for odd in (address, rows, t[:1].expand(t.shape)):
                given = [*arguments[:place], odd, *arguments[place + 1 :]]
                assert not serves(job, given) and not new(job, given)
    assert not new(job, asked(job, device, hidden=164))


@jobs
def test_products_that_python_pads_are_pythons(job: int, device: str) -> None:
    """Those of the backward, if features in or out are no multiple of eight. Kernels take such matrices, if rows are aligned."""
    features, out = asked(job, device, features=76, whole=128), asked(job, device, out=44, whole=128)
    assert new(job, features) is (job == _host.KEEPING)
    assert new(job, out) is (job != _host.MLP_BACKWARD)


@jobs
def test_what_has_no_launcher_is_pythons(job: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("keeping", "taking_gradient", "taking_down_gradient"):
        monkeypatch.setattr(_op, name, lambda *_: SimpleNamespace())
    arguments = asked(job, device, hidden=176)
    remember(job, arguments)
    assert not serves(job, arguments) and not new(job, arguments)


@jobs
def test_auto_is_kept_where_it_takes_cuda(job: int, device: str) -> None:
    """Up to 128 rows not behind a down projection."""
    for rows in (120, 150):
        arguments = asked(job, device, rows, impl="auto")
        remember(job, arguments)
        assert not new(job, arguments) and serves(job, arguments) is (rows == 150 or job != _host.MLP_BACKWARD)


@on_gpu
@jobs
def test_autocast_and_float32_are_pythons(job: int, device: str) -> None:
    arguments = asked(job, device)
    remember(job, arguments)
    assert serves(job, arguments)
    with torch.autocast("cuda", torch.float16):
        assert not serves(job, arguments) and not new(job, arguments)
    assert not new(job, asked(job, device, rows=88, kind=(torch.float32, ACTIVATION)))


@on_gpu
@jobs
def test_where_gluon_takes_less_time_it_is_python_that_asks_it(
    job: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for `impl="cuda"`; without a product there is nothing that it would do in less."""
    if (reason := _op.unavailable("gluon", "cuda", DTYPE)) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(_cuda, "_gluon_is_there", lambda: True)
    arguments = asked(job, device, 2048, 1024, 2048, 1024)
    remember(job, arguments)
    assert not new(job, arguments) and serves(job, arguments) is (job == _host.BACKWARD)
