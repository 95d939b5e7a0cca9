"""Bound launches of Triton's kernels are for the strides that were checked, since a program that torch.export made guards only
shapes, and for everything else that they were bound with. So are the packed plans of native code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewise.ops.qk_norm_rope._problem import Norm
from fusewise.ops.rope import _native as rope_native
from fusewise.ops.rope._problem import Rotation, Spec
from fusewise.ops.rope_and_cache import _native as cache_native

from .rope.support import INTERPRETER

pytest.importorskip("triton")
from fusewise.ops.qk_norm_rope import _triton as norm
from fusewise.ops.rope import _triton as rope
from fusewise.ops.rope_and_cache import _triton as cache

TENSORS: dict[str, Tensor] = {name: torch.randn(6, heads, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
TENSORS |= {name: torch.randn(2, 8, 2, 16) for name in ("key_cache", "value_cache")}
TENSORS |= {what.format(n): torch.randn(TENSORS[n].shape) for what in ("d{}", "{}_out") for n in ("q", "k")}
ROTATION: dict[str, Any] = {
    "cos": torch.randn(16, 8), "sin": torch.randn(16, 8), "positions": None, "offset": torch.tensor([3, 5]),
    "cu_seqlens": torch.tensor([0, 2, 6]), "first": 0, "spec": Spec(layout="thd").encode(),
}  # fmt: skip
OWN: dict[str, Any] = {
    "weights": True,
    "norm": Norm(1e-6, 0.0, "head"),
    "slots": None,
    "block_table": None,
    "write_k": True,
}
CALL = {**TENSORS, **ROTATION, **OWN}


def _rotation(call: dict[str, Any]) -> Rotation:
    return tuple(call[name] for name in ROTATION)  # type: ignore[return-value]


def _operands(call: dict[str, Any]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    names = ("q", "k") if call["k"] is not None else ("q",)
    return tuple(call[n] for n in names), tuple(call[f"{n}_out"] for n in names)


def _of_cache(call: dict[str, Any]) -> tuple[Any, ...]:
    own = (call[name] for name in ("q", "k", "v", "key_cache", "value_cache", "slots", "block_table"))
    return *own, *_rotation(call), call["write_k"]


def _norm(call: dict[str, Any], backward: bool) -> None:
    xs = [call["q"], call["k"]]
    ys, weights = [torch.empty_like(x) for x in xs], [torch.ones(16)] * 2 if call["weights"] else []
    if backward:
        norm.backward([call["dq"], call["dk"]], xs, ys, weights, [], _rotation(call), call["norm"])
    else:
        norm.forward(xs, ys, weights, _rotation(call), call["norm"])


LAUNCHES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "rope": lambda call: rope.launch(*_operands(call), _rotation(call)),
    "qk_norm_rope": lambda call: _norm(call, False),
    "qk_norm_rope_grad": lambda call: _norm(call, True),
    "rope_and_cache_": lambda call: cache.launch(*_of_cache(call)),
}  # fmt: skip


PACKED: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "rope": lambda call: rope_native.planned(*_operands(call), _rotation(call))[0],
    "rope_and_cache_": lambda call: cache_native.planned(*_of_cache(call))[0],
}


class Compiled:
    """Stands in for a compiled kernel."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *values, stream: None


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """The bound launches of all operations; nothing is launched."""
    found: dict[Any, Any] = {}
    for module in (rope, norm, cache):
        monkeypatch.setattr(module, "_PLANS", found)
    for module in (rope, cache):
        monkeypatch.setattr(module, "_launch_unbound", lambda problem: Compiled())
    monkeypatch.setattr(norm, "_launch", lambda *arguments: (Compiled(), 1, ()))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    return found


compiled = pytest.mark.skipif(INTERPRETER, reason="the interpreter has no launches to bind")


@compiled
@pytest.mark.parametrize("name", ["sin", "offset", "cu_seqlens"])
@pytest.mark.parametrize(
    "run", [*LAUNCHES.values(), *PACKED.values()], ids=[*LAUNCHES, *(f"packed {op}" for op in PACKED)]
)
def test_other_strides_are_checked_again(
    run: Callable[[dict[str, Any]], Any], name: str, plans: dict[Any, Any]
) -> None:
    for _ in range(2):  # the second is bound
        run(CALL)
    strided: Tensor = CALL[name].repeat_interleave(2, -1)[..., ::2]
    with pytest.raises(ValueError, match=rf"{name} must have (a contiguous last dimension|the strides of cos)"):
        run({**CALL, name: strided})


def apart(x: Tensor) -> Tensor:
    """x with other strides, aligned to 16 bytes."""
    return x.new_zeros(*x.shape[:-1], x.shape[-1] + 8)[..., : x.shape[-1]].copy_(x)


def unaligned(x: Tensor) -> Tensor:
    """x at an address that is no multiple of 16 bytes."""
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


IDS, ROWS = torch.arange(6), torch.zeros(6, 1, dtype=torch.int64)
OF_TOKENS = ("q", "k", "v", "dq", "dk", "q_out", "k_out")
BATCH: dict[str, Any] = {n: TENSORS[n].unflatten(0, (2, 3)) for n in OF_TOKENS}
OF_CACHE = ("v", "key_cache", "value_cache")
# A call, and one that must not be launched as the first was, although the tensors have the same shapes: the operations that take it.
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "dtype": ({}, {n: x.half() for n, x in TENSORS.items()}, tuple(LAUNCHES)),
    **{f"strides of {n}": ({}, {n: apart(CALL[n])}, tuple(LAUNCHES)) for n in ("q", "k")},
    **{f"strides of {n}": ({}, {n: apart(CALL[n])}, ("rope",)) for n in ("q_out", "k_out")},
    **{f"heads of {n}": ({}, {m: CALL[m][:, :1] for m in (n, f"d{n}", f"{n}_out")}, ("rope", "qk_norm_rope", "qk_norm_rope_grad"))
       for n in ("q", "k")},
    **{f"{n} beside": ({"q_out": CALL["q"], "k_out": CALL["k"]}, {f"{n}_out": CALL[f"{n}_out"]}, ("rope",)) for n in ("q", "k")},
    "q alone": ({n: CALL["q"].clone() for n in ("k", "k_out")}, {"k": None}, ("rope",)),
    **{f"strides of {n}": ({}, {n: apart(CALL[n])}, ("rope_and_cache_",)) for n in OF_CACHE},
    **{f"strides of {n}": ({}, {n: apart(CALL[n])}, ("qk_norm_rope_grad",)) for n in ("dq", "dk")},
    "tokens": ({"offset": None, "cu_seqlens": None}, {n: TENSORS[n][:4] for n in OF_TOKENS}, tuple(LAUNCHES)),
    "dtype of the table": ({}, {n: CALL[n].half() for n in ("cos", "sin")}, tuple(LAUNCHES)),
    "rows of the table": ({}, {n: CALL[n][:12] for n in ("cos", "sin")}, tuple(LAUNCHES)),
    "strides of the table": ({}, {n: apart(CALL[n]) for n in ("cos", "sin")}, tuple(LAUNCHES)),
    "strides of angles": ({"sin": None, "spec": Spec(layout="thd", table="angles").encode()}, {"cos": apart(CALL["cos"])}, tuple(LAUNCHES)),
    "address of sin": ({}, {"sin": unaligned(CALL["sin"])}, tuple(LAUNCHES)),
    **{f"dtype of {n}": ({}, {n: CALL[n].int()}, tuple(LAUNCHES)) for n in ("offset", "cu_seqlens")},
    **{f"address of {n}": ({}, {n: unaligned(CALL[n])}, tuple(LAUNCHES)) for n in ("offset", "cu_seqlens")},
    "no offset": ({}, {"offset": None}, tuple(LAUNCHES)),
    "sequences": ({"offset": None}, {"cu_seqlens": torch.tensor([0, 2, 4, 6])}, tuple(LAUNCHES)),
    **{f"{what} positions": ({"offset": None, "cu_seqlens": None, "positions": IDS}, {"positions": x}, tuple(LAUNCHES))
       for what, x in (("int32", IDS.int()), ("strided", apart(IDS[:, None])[:, 0]), ("unaligned", unaligned(IDS)), ("no", None))},
    "shared positions": ({**BATCH, "offset": None, "cu_seqlens": None, "spec": "", "positions": IDS.view(2, 3)}, {"positions": IDS.view(2, 3)[:1]}, tuple(LAUNCHES)),
    **{f"{what} slots": ({"slots": IDS}, {"slots": x}, ("rope_and_cache_",))
       for what, x in (("int32", IDS.int()), ("strided", apart(IDS[:, None])[:, 0]), ("unaligned", unaligned(IDS)), ("fewer", IDS[:4]), ("no", None))},
    **{f"{what} block table": ({"cu_seqlens": None, "offset": None, "block_table": ROWS}, {"block_table": x}, ("rope_and_cache_",))
       for what, x in (("int32", ROWS.int()), ("strided", apart(ROWS)), ("unaligned", unaligned(ROWS)), ("wide", ROWS.expand(6, 2)), ("no", None))},
    "no sequences": ({"offset": None}, {"cu_seqlens": None}, tuple(LAUNCHES)),
    "width of v": ({}, {"v": TENSORS["v"][..., :8]}, ("rope_and_cache_",)),
    "blocks": ({}, {n: CALL[n][:1] for n in ("key_cache", "value_cache")}, ("rope_and_cache_",)),
    "layout": ({**BATCH, "offset": None, "cu_seqlens": None, "spec": ""}, {"spec": Spec(layout="sbhd").encode()}, tuple(LAUNCHES)),
    "spec": ({}, {"spec": Spec(layout="thd", pairing="interleaved").encode()}, tuple(LAUNCHES)),
    **{f"norm {n}": ({}, {"norm": Norm(*n)}, ("qk_norm_rope", "qk_norm_rope_grad")) for n in ((1e-5, 0.0, "head"), (1e-6, 1.0, "head"))},
    "no weights": ({}, {"weights": False}, ("qk_norm_rope", "qk_norm_rope_grad")),
    "k unwritten": ({}, {"write_k": False}, ("rope_and_cache_",)),
}  # fmt: skip


@compiled
@pytest.mark.parametrize(("op", "name"), [(op, name) for name, (*_, ops) in DIFFERENT.items() for op in ops])
def test_a_different_call_is_bound_anew(op: str, name: str, plans: dict[Any, Any]) -> None:
    base, change, _ = DIFFERENT[name]
    for _ in range(2):
        LAUNCHES[op]({**CALL, **base})
    assert len(plans) == 1
    LAUNCHES[op]({**CALL, **base, **change})
    assert len(plans) == 2


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for name, (*_, ops) in DIFFERENT.items() for op in ops if op in PACKED]
)
def test_a_different_call_is_packed_anew(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, change, _ = DIFFERENT[name]

    def forget() -> None:
        monkeypatch.setattr(rope_native, "_PLANS", {})
        monkeypatch.setattr(cache_native, "_PLACES", {})

    forget()
    PACKED[op]({**CALL, **base})
    found = PACKED[op]({**CALL, **base, **change})
    forget()
    assert found == PACKED[op]({**CALL, **base, **change})
