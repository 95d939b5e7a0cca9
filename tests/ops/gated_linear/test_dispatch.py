"""Dispatch of the gated linear unit: implementation, path, and how they are reported."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusewise
from fusewise._shared import host
from fusewise.ops.gated_linear import _op, _path
from fusewise.ops.gated_linear._problem import SAVES, Halves

X, WEIGHT = torch.randn(3, 16), torch.randn(32, 16)
CALLS = [
    (fusewise.geglu_linear, (X, WEIGHT), {}),
    (fusewise.gated_linear, (X, WEIGHT[:16]), {"w_gate": WEIGHT[16:], "activation": "silu"}),
    (fusewise.gated_mlp, (X, WEIGHT, None, torch.randn(16, 16)), {"activation": "silu"}),
    (fusewise.gated_mlp, (X, WEIGHT[:16], WEIGHT[16:], torch.randn(16, 16)), {"activation": "silu"}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), CALLS)
def test_what_auto_takes_is_what_runs(op: Any, args: Any, kwargs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for impl in ("cpu", "reference"):
        module = _op.implementation(impl)

        def recorded(*args: Any, impl: str = impl, forward: Any = module.forward) -> None:
            ran.append(impl)
            forward(*args)

        monkeypatch.setattr(module, "forward", recorded)
    told = fusewise.explain_dispatch(op, *args, **kwargs)
    assert told.op == op.__name__ and (told.path == "" or "it is not built; run `fusewise build`" in told.path)
    assert set(told.passed_over) == set(_op.IMPLEMENTATIONS) - {told.impl} and all(told.passed_over.values())
    with host.through_python():  # the fast path bypasses the module's `forward`
        op(*args, **kwargs)
    op(*args, **kwargs, impl="reference")
    wide = [None if x is None else x.double() for x in args]
    op(*wide, **{name: x.double() if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()})
    native = _op.unavailable("cpu", "cpu", torch.float32) is None
    assert ran == [told.impl, "reference", "reference"] and told.impl == ("cpu" if native else "reference")


@pytest.mark.parametrize(("op", "args", "kwargs"), CALLS)
def test_what_autocast_leaves_is_what_is_explained(op: Any, args: Any, kwargs: Any) -> None:
    wide = fusewise.explain_dispatch(op, *args, **kwargs)
    with torch.autocast("cpu", torch.bfloat16):
        told = fusewise.explain_dispatch(op, *args, **kwargs)
        assert op(*args, **kwargs).dtype == torch.bfloat16
    assert ("float32" in wide.reason, "bfloat16" in told.reason) == (True, True)


UNEQUAL = torch.randn(24, 16)  # 12 features of each half
ASKED = [
    (fusewise.geglu_linear, (X, UNEQUAL), {"approximate": "none"}),
    (fusewise.geglu_linear, (X, UNEQUAL), {"approximate": "tanh"}),
    (fusewise.gated_linear, (X, UNEQUAL), {"w_gate": torch.randn(24, 16), "activation": "relu"}),
    (fusewise.gated_mlp, (X, UNEQUAL, None, torch.randn(9, 12)), {"activation": "silu"}),
]


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("wanted", [None, 0, 1])
@pytest.mark.parametrize(("op", "args", "kwargs"), ASKED)
def test_an_implementation_is_asked_what_a_call_asks_it(
    op: Any, args: Any, kwargs: Any, wanted: int | None, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuses(hidden: int, matrices: tuple[torch.Tensor, ...], activation: str, kernel: str, **how: Any) -> None:
        asked.append((hidden, [m.shape for m in matrices], activation, kernel, how))

    taken = fusewise.explain_dispatch(op, *args, **kwargs, impl=impl).impl
    monkeypatch.setattr(_op.implementation(taken), "refuses", refuses, raising=False)
    args = [x if i != wanted else x.clone().requires_grad_() for i, x in enumerate(args)]
    for save in SAVES:
        asked.clear()
        assert fusewise.explain_dispatch(op, *args, **kwargs, save=save, impl=impl).impl == taken
        with host.through_python():
            op(*args, **kwargs, save=save, impl=impl)
        assert asked[0] == asked[1]


@pytest.mark.parametrize("device_type", ["xpu", "mps"])
def test_other_devices_run_the_reference(device_type: str) -> None:
    """Triton has a backend for Intel's GPUs, but torch.cuda, by which kernels are launched, does not know them."""
    assert _op.choice.choose(device_type, torch.bfloat16) == "reference"
    assert f"not on device type {device_type}" in str(_op.unavailable("triton", device_type, torch.bfloat16))


def test_a_named_implementation_never_falls_back() -> None:
    for op, args, kwargs in CALLS:
        with pytest.raises(
            ValueError, match=r"impl must be able to serve the tensors, got 'triton'.*TRITON_INTERPRET=1"
        ):
            op(*args, **kwargs, impl="triton")
        with pytest.raises(ValueError, match=r"impl must be able to serve float32 on cpu, got 'triton'"):
            fusewise.explain_dispatch(op, *args, **kwargs, impl="triton")
    spec = _op.Spec("silu", "stacked").encode()
    with pytest.raises(ValueError, match=r"gated_linear: impl must be able to serve the tensors, got 'triton'"):
        torch.ops.fusewise.gated_linear(X, WEIGHT, None, None, None, spec, "triton")  # as in a compiled graph


def test_a_named_implementation_that_refuses_the_products_serves_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose gradient is elementwise. By choice another serves that, too."""
    refusing = SimpleNamespace(refuses=lambda *_, **__: "too odd")
    modules = {"cuda": refusing, "reference": _op.implementation("reference")}
    monkeypatch.setattr(_op.choice, "able", lambda *_: modules)
    monkeypatch.setattr(_op.choice, "serving", lambda name, *_: modules[name])
    spec, dy, preact = _op.Spec("silu", "stacked"), torch.randn(3, 16), torch.randn(3, 32)
    products: list[Callable[[str], Any]] = [
        lambda impl: _op.keeping(impl, spec, X, Halves.of(spec, WEIGHT)),
        lambda impl: _op.taking_down_gradient(impl, spec, X, torch.randn(16, 16)),
    ]
    for of_product in products:
        assert of_product("auto") is modules["reference"]
        with pytest.raises(ValueError, match="got 'cuda': too odd"):
            of_product("cuda")
    assert _op.taking_gradient("cuda", spec, dy, preact, preact) is refusing
    assert _op.taking_gradient("auto", spec, dy, preact, preact) is modules["reference"]


@pytest.mark.interpreter
def test_the_way_through_triton_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(x: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> fusewise.Dispatch:
        return fusewise.explain_dispatch(fusewise.gated_linear, x, weight, impl="triton", activation="silu", **kwargs)

    x, weight, wide = X.half(), WEIGHT.half(), torch.randn(32, 19).half()
    aligned = told(x, weight)
    assert aligned.path.startswith("by TMA") and f"\n  {aligned.path}\n" in str(aligned)
    assert told(x, weight[:16]).path.startswith("by TMA")  # rows of y of just 16 bytes
    odd, odd_y = torch.randn(512, 17).half(), torch.randn(24, 16).half()  # 12 features out
    for call, lacking in (
        ((odd[:3], wide[:, :17]), "x and the value's weight and the gate's weight"),
        ((x, wide[:, 1:17]), "the value's weight and the gate's weight"),
        ((x, odd_y), r"y \(F = 12\)"),
    ):
        found = told(*call)
        assert found.impl == "triton"
        assert re.fullmatch(rf"through pointers: .* 16 bytes, which {lacking} lacks", found.path), found.path
    needs = "TMA needs starts and rows aligned to 16 bytes"
    assert told(odd, wide[:, :17]).path.startswith(
        f"copies of x and the value's weight and the gate's weight, by TMA: {needs}"
    )
    assert told(odd[:, :16], odd_y).path.startswith(f"copies of x, through pointers: {needs}, which y (F = 12) lacks")
    monkeypatch.setattr(_op.implementation("triton"), "_has_tma", lambda _: False)
    assert told(odd[:, :16], weight).path.startswith("copies of x, through pointers: the device has no TMA")
    monkeypatch.undo()
    assert "which the gate's weight lacks" in told(x, weight[:16], w_gate=wide[:16, :16]).path
    assert "platform's library" in told(X, WEIGHT).path


@pytest.mark.parametrize(
    ("x", "weight", "told"),
    [
        (torch.randn(3, 4), torch.tensor(1.0), "weight must have at least one dimension, got none"),
        (torch.randn(3, 0), torch.randn(8, 0), r"x must have at least one feature, got \(3, 0\)"),
        (torch.randn(3, 4).to_sparse(), torch.randn(8, 4), "x must be a strided tensor, got torch.sparse_coo"),
        (
            torch.randn(3, 4),
            torch.nested.nested_tensor([torch.randn(4)], layout=torch.jagged),
            "weight must be a strided tensor, got nested",
        ),
    ],
    ids=["no-dimension", "no-features", "sparse", "nested"],
)
def test_tensors_that_no_call_takes_are_named(x: torch.Tensor, weight: torch.Tensor, told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^explain_dispatch: {told}; pass the arguments of the call"):
        fusewise.explain_dispatch(fusewise.geglu_linear, x, weight)


def test_the_path_is_that_of_the_value_and_the_gate() -> None:
    """Whatever the names of the arguments and the order of the halves."""
    x, both, value, gate = torch.zeros(2, 3, 8), torch.zeros(10, 8), torch.zeros(5, 8), torch.ones(5, 8)
    both[5:] = 1
    alternating = torch.stack((gate, value), 1)
    calls: list[dict[str, Any]] = [
        {"weight": both, "gate_first": False},
        {"weight": both.flip(0), "gate_first": True},
        {"weight": alternating, "layout": "interleaved", "gate_first": True},
        {"weight": value, "w_gate": gate, "layout": "stacked", "gate_first": True},
        {"w_gate": gate, "w_up": value, "w_down": None, "gate_first": True},
        {"w_gate": both.flip(0), "w_up": None, "w_down": None, "gate_first": True},
        {"w_gate": alternating, "w_up": None, "w_down": None, "layout": "interleaved", "gate_first": True},
    ]
    for call in calls:
        rows, halves = _path._matrices({"x": x, **call})
        assert rows.shape == (6, 8) and torch.equal(halves.value, value) and torch.equal(halves.gate, gate)
