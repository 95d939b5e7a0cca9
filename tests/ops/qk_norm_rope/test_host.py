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
from fusewise.ops.qk_norm_rope import _cuda, _op
from fusewise.ops.rope import _host
from fusewise.ops.rope._validate import DEFAULTS

from .. import cuda_on_cpu
from ..rope.support import Case, Operators, assert_bits, wider
from .machine import simulated as simulated
from .support import NormCase, build
from .test_cuda_on_cpu import operation

pytestmark = pytest.mark.usefixtures("simulated")


def given(**more: Any) -> dict[str, Any]:
    made = build(NormCase(Case(name="host")))
    (q, k), (q_weight, k_weight) = made.xs, made.weights
    return {"q": q, "k": k, "q_weight": q_weight, "k_weight": k_weight, **made.rotation, **made.norm, **more}


def recalled(arguments: dict[str, Any]) -> Any:
    """The result of the fast path, or None if it does not accept a call."""
    a = {"eps": 1e-6, "weight_offset": 0.0, "norm": "head", **arguments}
    q, k, *own = (a.pop(name) for name in ("q", "k", "q_weight", "k_weight", "eps", "weight_offset", "norm"))
    return _host.qk_norm_rope(q, k, *{**DEFAULTS, **a}.values(), *own)


def by_python(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    with _host.through_python():
        return tuple(fusewise.qk_norm_rope(**arguments))


CHANGED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "strides of q": lambda a: a | {"q": wider(a["q"])},
    "fewer tokens": lambda a: a | {name: a[name][:, :3] for name in ("q", "k")},
    "a shorter table": lambda a: a | {name: a[name][:40] for name in ("cos", "sin")},
    "a table of another dtype": lambda a: a | {name: a[name].bfloat16() for name in ("cos", "sin")},
    "positions": lambda a: a | {"positions": torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])},
    "pairing": lambda a: a | {"pairing": "interleaved"},
    "weights of another dtype": lambda a: a | {name: a[name].half() for name in ("q_weight", "k_weight")},
    "one weight of another dtype": lambda a: a | {"k_weight": a["k_weight"].half()},
    "no weights": lambda a: a | {"q_weight": None, "k_weight": None},
    "weight_offset": lambda a: a | {"weight_offset": 1.0},
    "eps": lambda a: a | {"eps": 0.25},
    "all heads": lambda a: (
        a | {"norm": "all", "q_weight": a["q_weight"].repeat(4), "k_weight": a["k_weight"].repeat(2)}
    ),
    "another dtype": lambda a: a | {name: a[name].bfloat16() for name in ("q", "k")},
}


@pytest.mark.parametrize("change", CHANGED)
def test_another_call_is_not_this_one(change: str) -> None:
    fusewise.qk_norm_rope(**given())
    changed = CHANGED[change](given())
    expected = by_python(changed)
    assert recalled(changed) is None
    first = fusewise.qk_norm_rope(**changed)
    second = recalled(changed)
    for one, other, want in zip(first, second, expected, strict=True):
        assert_bits(one, want)
        assert_bits(other, want)


def test_equal_calls_are_recalled_with_other_values() -> None:
    """An int offset is not part of the key; it matches as long as it is within the table. The int 0 is another eps than 0.0."""
    first = given()
    fusewise.qk_norm_rope(**first)
    rows = len(first["cos"])
    for offset in (0, 9, rows - 5):
        call = given(offset=offset)
        for one, want in zip(recalled(call), by_python(call), strict=True):
            assert_bits(one, want)
    for change in (
        {"offset": rows - 4},
        {"offset": -1},
        {"offset": True},
        {"eps": 0},
        {"norm": b"head"},
        {"eps": None},
    ):
        assert recalled(given() | change) is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "eps below 0": ({"eps": -1.0}, "eps must be at least 0"),
    "a bool": ({"weight_offset": True}, "weight_offset must be a float or an int"),
    "another norm": ({"norm": "row"}, "norm must be one of head, all"),
    "a weight on another device": ({"q_weight": torch.empty(16, device="meta")}, "q_weight must be on"),
    "one weight": ({"k_weight": None}, "k_weight must be given"),
    "a short weight": ({"q_weight": torch.ones(8)}, "q_weight must be contiguous, of shape"),
    "a list": ({"q_weight": [1.0] * 16}, "q_weight must be a torch.Tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_after_a_call_that_was_right(name: str) -> None:
    change, message = REFUSED[name]
    fusewise.qk_norm_rope(**given())
    assert recalled(given()) is not None
    assert recalled(given() | change) is None
    with pytest.raises((TypeError, ValueError), match=message):
        fusewise.qk_norm_rope(**(given() | change))


def test_calls_that_record_gradients_are_recalled() -> None:
    for name in ("q", "k", "q_weight", "k_weight"):
        call = given()
        call[name] = call[name].requires_grad_()
        fusewise.qk_norm_rope(**given())
        ys, of_name = recalled(call), 0 if name.startswith("q") else 1
        assert [y.requires_grad for y in ys] == [i == of_name for i in range(2)]
        for y, want in zip(ys, by_python(call), strict=True):
            assert_bits(y.detach(), want.detach())
        with torch.no_grad():  # Python's caches see whether a tensor requires grad, the extension does not
            for y, want in zip(recalled(call), ys, strict=True):
                assert_bits(y, want.detach())
                assert not y.requires_grad
    with torch.inference_mode():
        call = given()
        fusewise.qk_norm_rope(**call)
        assert all(y.is_inference() for y in recalled(call))


class Named(Tensor):
    pass


def test_who_watches_sees_the_operator() -> None:
    call = given()
    fusewise.qk_norm_rope(**call)
    with Operators() as watching:
        fusewise.qk_norm_rope(**call)
    assert watching.names == {"fusewise::qk_norm_rope": 1}
    with torch.profiler.profile() as profile:
        assert recalled(call) is not None
    assert "fusewise::qk_norm_rope" in {event.name for event in profile.events()}
    with torch.device("cpu"):  # a torch function mode
        assert recalled(call) is None
    with torch.autograd.forward_ad.dual_level():
        assert recalled(call) is None
    assert recalled({**call, "q_weight": call["q_weight"].as_subclass(Named)}) is None
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in call.items()}
        assert recalled(fakes) is None
        fusewise.qk_norm_rope(**fakes)
    assert recalled(call) is not None


def test_an_error_of_the_launch_is_an_error(simulated: cuda_on_cpu.Library) -> None:
    failing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: 9)
    fusewise.qk_norm_rope(**given())
    address = ctypes.cast(failing, ctypes.c_void_p).value
    made = build(NormCase(Case(name="host")))
    operator, arguments = operation(made)
    operator(*arguments)
    _, explain = simulated.addresses()
    (partials,) = simulated.addresses("partials")
    leaf = given()
    leaf["q"].requires_grad_()
    y, _ = recalled(leaf)
    _host.extension().on_cuda(_host.NORMED, address, explain, address, partials)
    for run in (lambda: recalled(given()), lambda: operator(*arguments), lambda: y.sum().backward()):
        with pytest.raises(RuntimeError, match=r"^qk_norm_rope: the CUDA launch .* got invalid configuration"):
            run()
    _cuda.register(_host.extension())
    assert recalled(given()) is not None


def test_the_reference_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op.choice, "serving", lambda *_: _op.choice.implementation("reference"))
    for _ in range(2):
        fusewise.qk_norm_rope(**given())
    assert recalled(given()) is None
    operator, arguments = operation(build(NormCase(Case(name="host"))))
    first, *others = (operator(*arguments) for _ in range(3))
    for ys in others:
        for y, want in zip(ys, first, strict=True):
            assert_bits(y, want)


def test_another_operator_call_is_not_this_one() -> None:
    """Everything that a plan depends on is in the key of the operator."""
    made = build(NormCase(Case(name="host")))
    operator, (xs, weights, *rest) = operation(made)
    cos, *_, impl = rest
    calls: list[tuple[Any, ...]] = [
        (xs, weights, *rest),
        (xs[:1], weights[:1], *rest),
        (xs, [], *rest),
        (xs, [weight.half() for weight in weights], *rest),
        ([wider(x) for x in xs], weights, *rest),
        (xs, weights, *rest[:-4], 0.25, *rest[-3:]),
        (xs, weights, *rest[:-3], 1.0, *rest[-2:]),
        (xs, [weights[0].repeat(4), weights[1].repeat(2)], *rest[:-2], "all", impl),
        (xs, weights, *rest[:6], "pairing=interleaved", *rest[7:]),
        (xs, weights, cos.bfloat16(), rest[1].bfloat16(), *rest[2:]),
    ]
    with _host.through_python():
        wanted = [operator(*call) for call in calls]
    for _ in range(3):
        for call, want in zip(calls, wanted, strict=True):
            for y, exact in zip(operator(*call), want, strict=True):
                assert_bits(y, exact)
    leaf = weights[0].clone().requires_grad_()
    assert operator(xs, [leaf, weights[1]], *rest)[0].requires_grad
