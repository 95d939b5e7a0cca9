"""The C++ fast path of repeated calls: same results as Python, fallback to Python for anything else, no false matches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusewise
from fusewise._shared import build
from fusewise.ops.rope import _host, _op, api

from .host_calls import TABLE, by_python, empty_cache, into, qk, recalled, tensors  # noqa: F401 (a fixture)
from .oracle import Call
from .support import Case, Operators, Place, assert_bits, copy_of, in_threads, make, make_table, require
from .test_matrix import CASES


def again(call: Call, **more: Any) -> Call:
    """The same call with copied tensors, which have other addresses."""
    xs, _ = copy_of(call.xs)
    names = [name for name, value in call.kwargs.items() if isinstance(value, Tensor)]
    copies, _ = copy_of(tuple(call.kwargs[name] for name in names))
    return Call(xs, {**call.kwargs, **dict(zip(names, copies, strict=True)), **more})


SERVED = [case for case in CASES if case.name != "table-inv_freq-before-0"]  # a negative offset goes through Python


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_the_second_call_has_the_bits_of_the_first(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of place, in place, and the gradient, for every kind of call."""
    require(Place(device, device))  # native implementations are named after their device
    call = make(case, device)
    call.kwargs["impl"] = device
    expected = by_python(monkeypatch, lambda: tensors(fusewise.rope(*call.xs, **call.kwargs)))
    fusewise.rope(*call.xs, **call.kwargs)
    other = again(call)
    for y, want in zip(tensors(recalled(fusewise.rope, *other.xs, **other.kwargs)), expected, strict=True):
        assert_bits(y, want)
        assert y.stride() == want.stride()
        assert not y.requires_grad

    dys = tuple(torch.randn_like(y) for y in expected)

    def gradients() -> tuple[Tensor, ...]:
        xs = tuple(x.detach().requires_grad_() for x in again(call).xs)
        return torch.autograd.grad(tensors(fusewise.rope(*xs, **call.kwargs)), xs, dys)

    def handed_over() -> tuple[Tensor, ...]:
        """Gradients without other references are rotated in place."""
        xs = tuple(x.detach().requires_grad_() for x in again(call).xs)
        ys = tensors(fusewise.rope(*xs, **call.kwargs))
        places = []
        for y, dy in zip(ys, dys, strict=True):
            alone = [dy.clone()]
            places.append(alone[0].data_ptr())
            y.register_hook(lambda _, alone=alone: alone.pop())
        grads = torch.autograd.grad(ys, xs, dys)
        assert [dx.data_ptr() for dx in grads] == places
        return grads

    want_grads = by_python(monkeypatch, gradients)
    for grads in (gradients(), handed_over()):
        for dx, want in zip(grads, want_grads, strict=True):
            assert_bits(dx, want)
            assert dx.stride() == want.stride()

    for outs in (tuple(torch.full_like(y, float("nan")) for y in expected) for _ in range(2)):
        out = outs if len(outs) == 2 else outs[0]
        assert fusewise.rope(*call.xs, **call.kwargs, out=out) is out
        for y, want in zip(outs, expected, strict=True):
            assert_bits(y, want)
            assert y._version > 0
    assert into(out, *call.xs, **call.kwargs) is out
    assert len(outs) == 2 or into(outs, *call.xs, **call.kwargs) is out

    first, second = again(call), again(call)
    if case.memory == "expanded":  # its elements share memory, so it cannot be written to
        return
    fusewise.rope_(*first.xs, **first.kwargs)
    returned = tensors(recalled(fusewise.rope_, *second.xs, **second.kwargs))
    for x, y, before, want in zip(second.xs, returned, first.xs, expected, strict=True):
        assert x is y
        assert_bits(x, want)
        assert x._version == before._version > 0


def test_the_second_call_does_not_pass_python(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = qk(requires_grad=True)
    fusewise.rope(q, k, **TABLE)
    monkeypatch.setattr(api, "validated_as_far", lambda *_: pytest.fail("validated again"))
    monkeypatch.setattr(_op, "gradients", lambda *_: pytest.fail("gradients in Python"))
    q_out, k_out = fusewise.rope(q, k, **TABLE)
    torch.autograd.backward((q_out, k_out), (q_out.detach(), k_out.detach()))
    assert q.grad is not None and k.grad is not None
    torch.testing.assert_close(q.grad, q.detach())  # the inverse of the rotation


CHANGED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another length": lambda a: a | {"q": torch.randn(2, 5, 3, 16), "k": torch.randn(2, 5, 1, 16)},
    "another dtype": lambda a: a | {"q": a["q"].bfloat16(), "k": a["k"].bfloat16()},
    "other strides": lambda a: a | {"q": torch.randn(2, 3, 4, 16).transpose(1, 2)},
    "no k": lambda a: a | {"k": None},
    "a shorter table": lambda a: a | {"cos": a["cos"][:9], "sin": a["sin"][:9]},
    "a table of another dtype": lambda a: a | {"cos": a["cos"].half(), "sin": a["sin"].half()},
    "another scale": lambda a: a | {"cos": None, "sin": None, "angles": a["cos"], "scale": 2.0},
    "inverse": lambda a: a | {"inverse": True},
    "another pairing": lambda a: a | {"pairing": "interleaved"},
    "another layout": lambda a: a | {"layout": "sbhd"},
    "positions": lambda a: a | {"positions": torch.tensor([3, 1, 4, 1])},
    "narrower": lambda a: a | {"rotary_dim": 16, "rotary_start": 0},
    "a list": lambda a: a | {"context_parallel": [0, 1]},
}


@pytest.mark.parametrize("change", CHANGED)
def test_another_call_is_not_this_one(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"q": qk()[0], "k": qk()[1], **TABLE}
    fusewise.rope(**arguments)
    other = CHANGED[change](arguments)
    q, k, *_ = other.pop("q"), other.pop("k")
    xs = (q,) if k is None else (q, k)
    assert recalled(fusewise.rope, *xs, **other) is None
    expected = by_python(monkeypatch, lambda: tensors(fusewise.rope(*xs, **other)))
    for _ in range(2):
        for y, want in zip(tensors(fusewise.rope(*xs, **other)), expected, strict=True):
            assert_bits(y, want)


def test_equal_options_need_not_be_the_same_objects() -> None:
    q, k = qk()
    fusewise.rope(q, k, **TABLE, layout="bshd", context_parallel=(0, 1), rotary_dim=16)
    layout = "".join(["bs", "hd"])
    assert layout is not "bshd"  # noqa: F632
    options = {"layout": layout, "context_parallel": tuple(range(2)), "rotary_dim": int("16")}
    assert recalled(fusewise.rope, q, k, **TABLE, **options) is not None


def test_an_offset_is_recalled_as_far_as_the_table_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = qk()
    rows = len(TABLE["cos"])
    fusewise.rope(q, k, **TABLE, offset=2)
    for offset in (0, 7, rows - 4):
        expected = by_python(monkeypatch, lambda offset=offset: fusewise.rope(q, k, **TABLE, offset=offset))
        for y, want in zip(recalled(fusewise.rope, q, k, **TABLE, offset=offset), expected, strict=True):
            assert_bits(y, want)
    for offset in (rows - 3, -1, 2**70):
        assert recalled(fusewise.rope, q, k, **TABLE, offset=offset) is None
        with pytest.raises((ValueError, OverflowError)):
            fusewise.rope(q, k, **TABLE, offset=offset)


def test_who_watches_sees_the_operator() -> None:
    """Dispatch modes, torch.func, forward-mode AD and profilers still see the call."""
    q, k = qk()
    fusewise.rope(q, k, **TABLE)
    with Operators() as watching:
        fusewise.rope(q, k, **TABLE)
    assert watching.names == {"fusewise::rope_qk": 1}
    with torch.device("cpu"):  # a torch function mode
        assert recalled(fusewise.rope, q, k, **TABLE) is None
    with torch.autograd.forward_ad.dual_level():
        assert recalled(fusewise.rope, q, k, **TABLE) is None
    mapped = torch.func.vmap(lambda x: fusewise.rope(x, **TABLE))(torch.stack([q, q]))
    assert_bits(mapped[1], fusewise.rope(q, **TABLE))
    assert recalled(fusewise.rope, q, k, **TABLE) is not None
    with torch.profiler.profile() as profile:
        fusewise.rope(q, k, **TABLE)
    assert "fusewise::rope_qk" in {event.name for event in profile.events()}


# --- Several at once -------------------------------------------------------------------------------------------------


def test_threads_share_what_is_remembered() -> None:
    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(300):
            x = torch.randn(1, 1 + i % 7, 2, 16, generator=generator)
            back = fusewise.rope(fusewise.rope(x, **TABLE), **TABLE, inverse=True)
            torch.testing.assert_close(back, x)
            if i % 50 == 0:
                _host.forget()

    in_threads(work)


FORKED = """
import os, sys, torch, fusewise
torch.set_num_threads(2)
x, f = torch.randn(1, 4000, 8, 64), torch.ones(32)
ys = [fusewise.rope(x, inv_freq=f, impl="cpu") for _ in range(2)]
child = os.fork()
if child == 0:
    y = fusewise.rope(x, inv_freq=f, impl="cpu")
    torch.set_num_threads(1)  # torch's own threads are the parent's
    os._exit(0 if torch.equal(y, ys[1]) else 1)
print(os.waitpid(child, 0)[1], torch.equal(*ys))
"""


def test_a_forked_child_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.stdout == "0 True\n", done.stderr


def test_without_it_every_call_goes_through_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host, "unavailable", lambda *_: "no headers of Python")
    q, k = qk()
    for _ in range(2):
        torch.testing.assert_close(fusewise.rope(q, k, **TABLE), fusewise.rope(q, k, **TABLE, impl="reference"))
        assert recalled(fusewise.rope, q, k, **TABLE) is None


# --- On a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_it_goes_to_the_current_stream() -> None:
    """Launches are ordered on the caller's current stream and can be captured into a CUDA graph."""
    require(Place("cuda", "cuda"))
    q = torch.randn(8, 4096, 8, 128, device="cuda")
    table = {name: x.cuda() for name, x in make_table("half", 64, 1, torch.float32).items()}
    table = {name: x[5:6].expand(4096, -1).contiguous() for name, x in table.items()}
    fusewise.rope_(q, **table, impl="cuda")
    want = fusewise.rope(torch.ones_like(q), **table, impl="cuda")
    fusewise.rope(q, **table, impl="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        q.fill_(1)
        y = recalled(fusewise.rope, q, **table, impl="cuda")
        assert recalled(fusewise.rope_, q, **table, impl="cuda") is q
    stream.synchronize()
    assert_bits(y, want)
    assert_bits(q, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = recalled(fusewise.rope, q, **table, impl="cuda")
    q.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert_bits(y, want)


@pytest.mark.gpu
def test_the_device_of_the_tensors_need_not_be_current() -> None:
    require(Place("cuda", "cuda"))
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    results = []
    for device in ("cuda:0", "cuda:1", "cuda:1"):
        q = torch.arange(2 * 4 * 3 * 16.0, device=device).view(2, 4, 3, 16).requires_grad_()
        table = {name: x.to(device) for name, x in TABLE.items()}
        y = fusewise.rope(q, **table, impl="cuda")
        (dq,) = torch.autograd.grad(y, q, torch.ones_like(y))
        assert y.device == dq.device == q.device
        results.append((y.detach().cpu(), dq.cpu()))
        assert torch.cuda.current_device() == 0
    for y, dq in results[1:]:
        assert_bits(y, results[0][0])
        assert_bits(dq, results[0][1])


def test_a_build_in_this_process_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`fusewise.native.build()` after the first call."""
    with monkeypatch.context() as patch:
        patch.setattr(_host, "extension", lambda: None)
        patch.setattr(build, "_BUILT", [])
        patch.setattr(build, "built", lambda *_: bool(build._BUILT))
        _host._unavailable.cache_clear()
        assert _host._unavailable(False, build.loads()) == "it is not built; run `fusewise build`"
        build._BUILT.append(tmp_path)
        assert _host._unavailable(False, build.loads()) is None
    _host._unavailable.cache_clear()
