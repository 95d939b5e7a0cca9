"""The C++ fast path of repeated calls: a call that differs in any respect does not match and is validated again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fusewise
from fusewise.ops.rope import _host
from fusewise.ops.rope._validate import DEFAULTS
from fusewise.ops.rope_and_cache import _cuda, _native, _op

from .. import cuda_on_cpu
from ..rope.support import Operators, assert_bits, wider
from .cases import CASES, Case, Made, make
from .machine import simulated  # noqa: F401 (a fixture)
from .test_cuda_on_cpu import called, operation

pytestmark = pytest.mark.usefixtures("simulated")

CASE = CASES["vllm"]
OWN = ("key_cache", "value_cache", "slot_mapping", "block_table", "cache_layout", "write_k")


def given(made: Made, **more: Any) -> dict[str, Any]:
    return {"q": made.q, "k": made.k, "v": made.v, **made.arguments(), **more}


def recalled(arguments: dict[str, Any]) -> bool:
    """Whether the fast path accepts a call."""
    a = {"slot_mapping": None, "block_table": None, "cache_layout": "nhd", "write_k": True, **arguments}
    q, k, v, *own = (a.pop(name) for name in ("q", "k", "v", *OWN))
    options = {**DEFAULTS, "layout": "thd", **a}
    return _host.rope_and_cache_(q, k, *options.values(), v, *own) is True


def by_python(arguments: dict[str, Any]) -> None:
    with _host.through_python():
        fusewise.rope_and_cache_(**arguments)


CHANGED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "strides of q": lambda a: a | {"q": wider(a["q"])},
    "strides of v": lambda a: a | {"v": wider(a["v"])},
    "strides of a cache": lambda a: a | {"value_cache": wider(a["value_cache"])},
    "fewer blocks": lambda a: a | {name: a[name][:4] for name in ("key_cache", "value_cache")},
    "no block": lambda a: a | {name: a[name][:0] for name in ("key_cache", "value_cache")},
    "other blocks": lambda a: a | {name: a[name].reshape(12, 2, 2, 16) for name in ("key_cache", "value_cache")},
    "fewer tokens": lambda a: a | {name: a[name][:3] for name in ("q", "k", "v", "slot_mapping", "positions")},
    "fewer slots": lambda a: a | {"slot_mapping": a["slot_mapping"][:3]},
    "slots of 32 bits": lambda a: a | {"slot_mapping": a["slot_mapping"].int()},
    "strides of slots": lambda a: a | {"slot_mapping": a["slot_mapping"].repeat_interleave(2)[::2]},
    "positions of 32 bits": lambda a: a | {"positions": a["positions"].int()},
    "a block table": lambda a: a | {"slot_mapping": None, "block_table": torch.arange(5)[:, None], "positions": torch.arange(5) % 4},
    "a shorter table": lambda a: a | {"cos_sin": a["cos_sin"][:40]},
    "a table of another dtype": lambda a: a | {"cos_sin": a["cos_sin"].bfloat16()},
    "flat": lambda a: a | {name: a[name].flatten(1) for name in ("q", "k", "v")},
    "k kept": lambda a: a | {"write_k": False},
    "pairing": lambda a: a | {"pairing": "interleaved"},
    "caches apart": lambda a: a | {"value_cache": a["value_cache"].clone()},
    "one packed tensor": lambda a: a | dict(zip("qkv", torch.cat((a["q"], a["k"], a["v"]), 1).split((4, 2, 2), 1), strict=True)),
    "another dtype": lambda a: a | {name: a[name].bfloat16() for name in ("q", "k", "v", "key_cache", "value_cache")},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGED)
def test_another_call_is_not_this_one(change: str) -> None:
    called(make(CASE))
    calls = []
    for _ in range(3):
        torch.manual_seed(1)
        calls.append(CHANGED[change](given(make(CASE))))
    first, second, third = calls
    by_python(first)
    assert not recalled(second)
    fusewise.rope_and_cache_(**second)
    assert recalled(third)
    for name in ("q", "k", "v", "key_cache", "value_cache"):
        assert_bits(second[name], first[name])
        assert_bits(third[name], first[name])


def overlapping(made: Made, first: int) -> dict[str, Any]:
    """k and v in one buffer, v from `first` on."""
    buffer = torch.zeros(320)
    return given(made, k=buffer[:160].view(5, 2, 16), v=buffer[first : first + 160].view(5, 2, 16))


REFUSED: dict[str, tuple[Callable[[Made], dict[str, Any]], str]] = {
    "v in k": (lambda made: overlapping(made, 80), "v must not overlap k, which is written to"),
    "one cache": (lambda made: given(made, value_cache=made.key_cache), "value_cache must not overlap key_cache"),
    "slots in a cache": (
        lambda made: given(made, slot_mapping=made.key_cache.view(torch.int64).flatten()[:5]),
        "slot_mapping must not overlap key_cache",
    ),
    "table in a cache": (
        lambda made: given(made, cos_sin=made.value_cache.flatten()[: 64 * 16 // 2].view(32, 16)),
        "cos_sin must not overlap value_cache",
    ),
    "q that is a leaf": (lambda made: given(made, q=made.q.requires_grad_()), "q must not require grad"),
    "a cache that is a leaf": (lambda made: given(made, key_cache=made.key_cache.clone().requires_grad_()), "key_cache must not require grad"),
    "q twice in memory": (lambda made: given(made, q=made.q[:, :1].expand(5, 4, 16)), "q must not have elements that share"),
    "a cache elsewhere": (lambda made: given(made, key_cache=made.key_cache.to("meta")), "key_cache must be on the device of k"),
    "write_k of 1": (lambda made: given(made, write_k=1), "write_k must be a bool"),
    "no v": (lambda made: given(made, v=None), "v must be a torch.Tensor"),
    "no cache": (lambda made: given(made, key_cache=None), "key_cache must be a torch.Tensor"),
    "no k": (lambda made: given(made, k=None), "k must be a torch.Tensor"),
    "slots of bools": (lambda made: given(made, slot_mapping=made.kwargs["slot_mapping"].bool()), "slot_mapping must have dtype"),
    "a cache of other heads": (lambda made: given(made, key_cache=made.key_cache[:, :, :1]), "key_cache must have the heads of k"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_after_a_call_that_was_right(name: str) -> None:
    change, message = REFUSED[name]
    for first in (given(make(CASE)), overlapping(make(CASE), 160)):
        for _ in range(2):
            fusewise.rope_and_cache_(**first)
        assert recalled(first)
        made = make(CASE)
        arguments = change(made)
        before = [x.detach().clone() for x in made.written()]
        assert not recalled(arguments)
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            fusewise.rope_and_cache_(**arguments)
        for x, old in zip(made.written(), before, strict=True):
            assert_bits(x.detach(), old)


def test_equal_calls_are_recalled_with_other_values() -> None:
    """Slots, positions and an int offset are not part of the key; an offset matches as long as it is within the table."""
    case = Case(name="", layout="bshd", blocks=2, block_size=16)
    first = given(make(case), offset=3)
    fusewise.rope_and_cache_(**first)
    rows = len(first["cos_sin"])
    for offset in (0, 9, rows - 5):
        one, other = given(make(case), offset=offset), None
        other = {name: x.clone() if isinstance(x, Tensor) else x for name, x in one.items()}
        by_python(other)
        assert recalled(one)
        for name in ("q", "k", "v", "key_cache", "value_cache"):
            assert_bits(one[name], other[name])
    for offset in (rows - 4, -1, 2**70, True):
        assert not recalled(given(make(case), offset=offset))


def test_gradients_and_modes() -> None:
    """A leaf is written under no_grad and rejected otherwise; inference tensors only work in inference mode."""
    made = make(CASE)
    called(made)
    leaf = given(made, q=made.q.requires_grad_())
    assert not recalled(leaf)
    with torch.no_grad():
        fusewise.rope_and_cache_(**leaf)
        assert recalled(leaf)
    assert not recalled(leaf)
    with torch.inference_mode():
        inferred = given(make(CASE))
        fusewise.rope_and_cache_(**inferred)
        assert recalled(inferred)
    assert not recalled(inferred)
    with pytest.raises(RuntimeError, match="inference tensor"):
        fusewise.rope_and_cache_(**inferred)


class Named(Tensor):
    pass


def test_who_watches_sees_the_operator() -> None:
    made = make(CASE)
    called(made)
    arguments = given(made)
    for keeps, name in ((False, "fusewise::rope_and_cache_"), (True, "fusewise::rope_and_cache_keep_k_")):
        one = {**arguments, "write_k": not keeps}
        fusewise.rope_and_cache_(**one)
        with Operators() as watching:
            fusewise.rope_and_cache_(**one)
        assert watching.names == {name: 1}
        with torch.profiler.profile() as profile:
            assert recalled(one)
        assert name in {event.name for event in profile.events()}
    with torch.device("cpu"):  # a torch function mode
        assert not recalled(arguments)
    with torch.autograd.forward_ad.dual_level():
        assert not recalled(arguments)
    assert not recalled({**arguments, "q": made.q.as_subclass(Named)})
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        assert not recalled(fakes)
        fusewise.rope_and_cache_(**fakes)
    assert recalled(arguments)


def test_an_error_of_the_launch_is_an_error(simulated: cuda_on_cpu.Library, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The fast path and the operator raise if the launch returns an error code."""
    failing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: 9)
    made = make(CASE)
    called(made)
    operator, arguments = operation(made)
    operator(*arguments)
    address = ctypes.cast(failing, ctypes.c_void_p).value
    _host.extension().on_cuda(_host.CACHED, address, simulated.addresses()[1])
    for run in (lambda: recalled(given(made)), lambda: operator(*arguments)):
        with pytest.raises(RuntimeError, match=r"^rope_and_cache_: the CUDA launch .* got invalid configuration"):
            run()
    _cuda.register(_host.extension())
    assert recalled(given(made))


def test_plans_are_found_again_by_python_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the extension is unavailable."""
    monkeypatch.setattr(_host, "unavailable", lambda *_: "no headers of Python")
    made = make(CASE)
    with _host.through_python():
        called(made)
        monkeypatch.setattr(_native.CacheProblem, "build", lambda *_: pytest.fail("planned again"))
        called(made)
    assert not recalled(given(made))


def test_the_reference_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op.choice, "serving", lambda *_: _op.choice.implementation("reference"))
    made = make(CASE)
    for _ in range(2):
        called(made)
    assert not recalled(given(made))
    operator, arguments = operation(made, "reference")
    for _ in range(3):
        operator(*arguments)
