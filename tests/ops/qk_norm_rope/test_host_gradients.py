"""Autograd around the C++ fast path of repeated calls: same gradients as through Python, for any caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from fusewise.ops.qk_norm_rope import _cuda, _op, api
from fusewise.ops.rope import _host

from ..rope.support import Case, Operators, assert_bits
from .machine import simulated as simulated
from .support import Made, NormCase, build
from .test_cuda_on_cpu import operation

NAMES = ("q", "k", "q_weight", "k_weight")
CASES = {
    "heads": NormCase(Case(name="heads", head_dim=64, dtype="bf16")),
    "all": NormCase(Case(name="all", head_dim=32, layout="bhsd", memory="swapped"), "all", 1.0),
    "q alone": NormCase(Case(name="alone", head_dim=32, kv_heads=None)),
    "no weights": NormCase(Case(name="bare", head_dim=32), weight_dtype=None),
    "of Triton": NormCase(Case(name="triton", head_dim=24, rotary_dim=10, options={"rotary_start": -10})),
}


@pytest.fixture(autouse=True)
def _others(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that no kernel serves go to the reference."""
    reference = _op.choice.implementation("reference")
    serving = _op.choice.serving
    monkeypatch.setattr(
        _op.choice, "serving", lambda impl, *kind: reference if impl == "reference" else serving(impl, *kind)
    )
    monkeypatch.setattr(_op.choice, "able", lambda *_: iter(("reference",)))


def remembered(made: Made, monkeypatch: pytest.MonkeyPatch) -> Made:
    made.call(made.xs, made.weights)
    monkeypatch.setattr(api, "validated", lambda *_: pytest.fail("validated again"))
    return made


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_python(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(CASES[name])
    with _host.through_python():
        want = made.run("auto")
    remembered(made, monkeypatch)
    for _ in range(2):
        got = made.run("auto")
        for x, exact in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
            assert_bits(x.detach(), exact.detach())
            assert x.stride() == exact.stride()


def leaves_of(made: Made) -> tuple[Tensor, ...]:
    return tuple(x.detach().clone().requires_grad_() for x in (*made.xs, *made.weights))


def outputs(made: Made, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made.call(leaves[: len(made.xs)], leaves[len(made.xs) :])


@pytest.mark.parametrize("wanted", NAMES)
def test_only_what_is_wanted(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(CASES["heads"])
    _, want = made.run("auto")
    remembered(made, monkeypatch)
    leaves, i = leaves_of(made), NAMES.index(wanted)
    (only,) = torch.autograd.grad(outputs(made, leaves), leaves[i], made.dys)
    assert_bits(only, want[i])
    frozen = tuple(x if j == i else x.detach() for j, x in enumerate(leaves))
    ys = outputs(made, frozen)
    assert [y.requires_grad for y in ys] == [i % 2 == 0, i % 2 == 1]
    assert ys[1 - i % 2].is_leaf
    assert_bits(torch.autograd.grad(ys[i % 2], frozen[i], made.dys[i % 2])[0], want[i])
    unused = torch.autograd.grad(outputs(made, leaves)[0], leaves, made.dys[0], allow_unused=True)
    assert [x is None for x in unused] == [False, True, False, True]


def test_one_operator_and_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    made = remembered(build(CASES["heads"]), monkeypatch)
    leaves = leaves_of(made)
    ys = outputs(made, leaves)
    assert {y.grad_fn.name() for y in ys} == {"QkNormRopeBackward"}
    with torch.profiler.profile() as profile:
        torch.autograd.grad(ys, leaves, made.dys)
    assert [e.name for e in profile.events() if e.name.startswith("fusewise::")] == ["fusewise::qk_norm_rope_grad"]
    ys = outputs(made, leaves)
    with Operators() as watching:  # who watches sees the operator
        torch.autograd.grad(ys, leaves, made.dys)
    assert watching.names["fusewise::qk_norm_rope_grad"] == 1


@pytest.mark.parametrize("of_weights", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_their_operator(name: str, of_weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In C++ from the second call on, unless no kernel serves it."""
    made = build(CASES[name])
    _, (xs, weights, *rest) = operation(made)
    call = (list(made.dys), xs, weights, *rest, of_weights)
    with _host.through_python():
        want = _op._op_grad(*call)
    assert len(want) == len(xs) + (len(weights) if of_weights else 0)
    _op._op_grad(*call)
    if name != "of Triton":
        monkeypatch.setattr(_cuda, "backward", lambda *_: pytest.fail("launched by Python"))
    for _ in range(2):
        for x, exact in zip(_op._op_grad(*call), want, strict=True):
            assert_bits(x, exact)
            assert x.stride() == exact.stride()


def test_the_operator_takes_gradients_in_any_layout() -> None:
    """An exported program may pass them; the autograd function copies such ones."""
    made = build(CASES["heads"])
    _, (xs, weights, *rest) = operation(made)
    swapped = [dy.transpose(-1, -2).contiguous().transpose(-1, -2) for dy in made.dys]
    for _ in range(2):
        got, want = (_op._op_grad(list(dys), xs, weights, *rest, True) for dys in (swapped, made.dys))
        for x, exact in zip(got, want, strict=True):
            torch.testing.assert_close(x, exact)


def test_gradients_of_gradients_and_batches_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(CASES["all"])

    def second(leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(sum((y**3).sum() for y in outputs(made, leaves)), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    with _host.through_python():
        want = second(leaves_of(made))
    leaves = leaves_of(made)
    outputs(made, leaves)
    for x, exact in zip(second(leaves), want, strict=True):
        torch.testing.assert_close(x, exact)
    ys = outputs(remembered(made, monkeypatch), leaves)
    batches = tuple(torch.randn(2, *y.shape) for y in ys)
    together = torch.autograd.grad(ys, leaves, batches, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        alone = torch.autograd.grad(ys, leaves, tuple(batch[i] for batch in batches), retain_graph=True)
        for x, one in zip(together, alone, strict=True):
            torch.testing.assert_close(x[i], one)


@pytest.mark.parametrize("case", ["heads", "q alone"])
def test_compiled_autograd(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(CASES[case])
    _, want = made.run("auto")
    leaves = leaves_of(remembered(made, monkeypatch))
    ys = outputs(made, leaves)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        torch.autograd.backward(ys, made.dys)
    for x, exact in zip(leaves, want, strict=True):
        assert x.grad is not None
        assert_bits(x.grad, exact)


def test_checkpoints_and_expanded_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(CASES["heads"])
    _, want = made.run("auto")
    leaves = leaves_of(remembered(made, monkeypatch))
    ys = checkpoint(lambda *given: outputs(made, given), *leaves, use_reentrant=False)
    for x, exact in zip(torch.autograd.grad(ys, leaves, made.dys), want, strict=True):
        assert_bits(x, exact)
    ones = torch.autograd.grad(outputs(made, leaves), leaves, [torch.ones_like(y) for y in ys])
    for x, exact in zip(torch.autograd.grad(sum(y.sum() for y in outputs(made, leaves)), leaves), ones, strict=True):
        assert_bits(x, exact)


def test_what_is_saved_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved-tensor hooks see the inputs and the table; modifying one is an error, and so is a second backward."""
    made = remembered(build(CASES["heads"]), monkeypatch)
    leaves, packed = leaves_of(made), []

    def pack(x: Tensor) -> int:
        packed.append(x)
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
        outputs(made, leaves)
    table = [made.rotation["cos"], made.rotation["sin"]]
    assert sorted(x.data_ptr() for x in packed) == sorted(x.data_ptr() for x in (*table, *leaves))
    ys = outputs(made, leaves)
    with torch.no_grad():
        leaves[2].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(ys, leaves, made.dys)
    ys = outputs(made, leaves)
    torch.autograd.grad(ys, leaves, made.dys)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(ys, leaves, made.dys)


@pytest.mark.parametrize("unpack", [lambda x: torch.stack((x, x), -1)[..., 0], lambda x: x.double().to(x.dtype).t().contiguous().t() if x.dim() == 2 else x.clone(), Tensor.float], ids=["spread", "packed", "float"])  # fmt: skip
def test_what_a_hook_gives_back_may_be_laid_out_otherwise(
    unpack: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build(CASES["heads"])
    _, want = made.run("auto")
    leaves = leaves_of(remembered(made, monkeypatch))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        ys = outputs(made, leaves)
    for x, exact in zip(torch.autograd.grad(ys, leaves, made.dys), want, strict=True):
        torch.testing.assert_close(x, exact)


@pytest.mark.parametrize("wrong", [Tensor.flatten, lambda x: x.to("meta")])
def test_what_a_hook_gives_back_must_have_shape_and_device(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(CASES["heads"])
    leaves = leaves_of(remembered(made, monkeypatch))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, wrong):
        ys = outputs(made, leaves)
    with pytest.raises(
        ValueError, match=r"^qk_norm_rope: what a saved-tensor hook returns must have the shape and device of "
    ):
        torch.autograd.grad(ys, leaves, made.dys)


@pytest.mark.parametrize("wrong", [lambda dy: dy.double(), lambda dy: dy[:, :1], lambda dy: dy.flatten()])
def test_the_node_takes_a_gradient_like_the_output_alone(
    wrong: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The autograd engine ensures this; a direct call of the node must check it."""
    made = remembered(build(CASES["heads"]), monkeypatch)
    y, _ = outputs(made, leaves_of(made))
    with pytest.raises(
        ValueError, match=r"^qk_norm_rope: the gradient must have the shape, dtype and device of the res"
    ):
        y.grad_fn(wrong(made.dys[0]), made.dys[1])


def test_a_checkpoint_of_the_first_call() -> None:
    """Python records it, C++ its recomputation: both must save the same tensors in the same order."""
    made = build(CASES["heads"])
    _, want = made.run("reference")
    leaves = leaves_of(made)
    _host.forget()
    ys = checkpoint(lambda *given: outputs(made, given), *leaves, use_reentrant=False)
    for x, exact in zip(torch.autograd.grad(ys, leaves, made.dys), want, strict=True):
        torch.testing.assert_close(x, exact)
