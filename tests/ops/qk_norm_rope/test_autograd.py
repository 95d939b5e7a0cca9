"""Gradients: exact in float64, of any order and combination, deterministic, and with minimal saved tensors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import fusewise
from fusewise.ops.qk_norm_rope import _op
from fusewise.ops.rope._problem import PAIRINGS

from ..gpu_memory import peak_above, settled
from ..rope.support import Case, Operators, Place, make_table
from .support import NormCase, build, places
from .support import small_device as small_device

pytestmark = pytest.mark.usefixtures("small_device")

FREQ = make_table("inv_freq", 8, 2, torch.float64)["inv_freq"]


def leaves(norm: str, tokens: int = 3) -> tuple[Tensor, ...]:
    heads = 2 if norm == "all" else 1
    shapes = [(1, tokens, 2, 16), (1, tokens, 1, 16), (16 * heads,), (16,)]
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("norm", ["head", "all"])
@pytest.mark.parametrize("kwargs", [{}, {"rotary_dim": 8, "rotary_start": 4}, {"pairing": "interleaved_to_half"}, {"weight_offset": 1.0, "layout": "bhsd"}], ids=str)  # fmt: skip
def test_gradcheck(norm: str, kwargs: dict[str, Any]) -> None:
    q, k, q_weight, k_weight = leaves(norm)
    if kwargs.get("layout") == "bhsd":
        q, k = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k))
    inv_freq = FREQ[: kwargs.get("rotary_dim", 16) // 2]

    def f(*tensors: Tensor) -> Any:
        return fusewise.qk_norm_rope(*tensors, inv_freq=inv_freq, norm=norm, **kwargs)

    assert torch.autograd.gradcheck(f, (q, k, q_weight, k_weight))
    assert torch.autograd.gradgradcheck(f, (q, k, q_weight, k_weight))


@pytest.mark.parametrize("place", places())
@pytest.mark.parametrize("norm", ["head", "all"])
def test_any_of_the_gradients(norm: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gradient is independent of which others are requested and which outputs have one; outputs that no requested input
    contributes to have none. Those of weights are computed only where one is requested."""
    made = build(NormCase(Case(name="some", batch=1, tokens=3, heads=2, kv_heads=1), norm), place.device)
    _, want = made.run(place.impl)
    asked, run = [], _op._op_grad
    monkeypatch.setattr(_op, "_op_grad", lambda *args: asked.append((len(args[0]), args[-1])) or run(*args))
    for wanted in itertools.product([False, True], repeat=4):
        if not any(wanted):
            continue
        tensors = [x.detach().requires_grad_(n) for x, n in zip((*made.xs, *made.weights), wanted, strict=True)]
        ys = made.call(tuple(tensors[:2]), tuple(tensors[2:]), impl=place.impl)
        needed = [x for x in tensors if x.requires_grad]
        of_needed = [g for g, n in zip(want, wanted, strict=True) if n]
        assert [y.requires_grad for y in ys] == [wanted[i] or wanted[2 + i] for i in range(2)]
        outs, dys = zip(*((y, dy) for y, dy in zip(ys, made.dys, strict=True) if y.requires_grad), strict=True)
        for got, exact in zip(torch.autograd.grad(outs, needed, dys), of_needed, strict=True):
            assert torch.equal(got, exact)
        assert set(asked) <= {(len(outs), wanted[2] or wanted[3])}
        asked.clear()
    for i in (0, 1):  # only one output: the other's gradient is None, not zero
        tensors = [x.detach().requires_grad_() for x in (*made.xs, *made.weights)]
        ys = made.call(tuple(tensors[:2]), tuple(tensors[2:]), impl=place.impl)
        got = torch.autograd.grad(ys[i], tensors, made.dys[i], allow_unused=True)
        assert [g is None for g in got] == [i == 1, i == 0] * 2
        assert torch.equal(got[i], want[i])
        torch.testing.assert_close(got[2 + i], want[2 + i])


@pytest.mark.parametrize("place", places())
def test_expanded_gradient(place: Place) -> None:
    """The gradient of a sum is expanded, with strides 0."""
    made = build(NormCase(Case(name="sum", tokens=2)), place.device)
    tensors = [x.detach().requires_grad_() for x in (*made.xs, *made.weights)]
    ys = made.call(tuple(tensors[:2]), tuple(tensors[2:]), impl=place.impl)
    got = torch.autograd.grad(sum(y.sum() for y in ys), tensors)
    ys = made.call(tuple(tensors[:2]), tuple(tensors[2:]), impl=place.impl)
    want = torch.autograd.grad(ys, tensors, [torch.ones_like(y) for y in ys])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("unpack", [lambda t: torch.stack((t, t), -1)[..., 0], Tensor.float, Tensor.double])
@pytest.mark.parametrize("place", places())
def test_a_hook_may_bring_back_other_strides_or_another_dtype(place: Place, unpack: Any) -> None:
    case = Case(
        name="hook", batch=1, tokens=3, heads=2, kv_heads=1, dtype="bf16", options={"offset": torch.tensor([2])}
    )
    made = build(NormCase(case), place.device)
    tensors = [x.detach().requires_grad_() for x in (*made.xs, *made.weights)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        ys = made.call(tuple(tensors[:2]), tuple(tensors[2:]), impl=place.impl)
    for got, exact in zip(torch.autograd.grad(ys, tensors, made.dys), made.run(place.impl)[1], strict=True):
        torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("place", places())
def test_gradient_without_memory(place: Place) -> None:
    """The gradient of sgn is a ZeroTensor."""
    made = build(NormCase(Case(name="sgn", tokens=2)), place.device)
    tensors = [x.detach().requires_grad_() for x in (*made.xs, *made.weights)]
    ys = made.call(tuple(tensors[:2]), tuple(tensors[2:]), impl=place.impl)
    dq, dk, dq_weight, dk_weight = torch.autograd.grad(ys[0].sgn().sum() + ys[1].sum(), tensors)
    assert not dq.any() and not dq_weight.any() and dk.any() and dk_weight.any()


@pytest.mark.parametrize("place", places())
@pytest.mark.parametrize("norm", ["head", "all"])
def test_the_same_bits_each_time(norm: str, place: Place) -> None:
    made = build(NormCase(Case(name="bits", tokens=17 if place.impl == "reference" else 5), norm), place.device)
    first = made.run(place.impl)
    for _ in range(3):
        again = made.run(place.impl)
        for a, b in zip((*first[0], *first[1]), (*again[0], *again[1]), strict=True):
            assert torch.equal(a, b)


def test_held_for_backward_are_the_inputs() -> None:
    """Saved are q, k, their weights and the table, and no computed tensor."""
    made = build(NormCase(Case(name="held")))
    tensors = [x.detach().requires_grad_() for x in (*made.xs, *made.weights)]
    held: list[int] = []

    def pack(x: Tensor) -> Tensor:
        held.append(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        made.call(tuple(tensors[:2]), tuple(tensors[2:]))
    given = [*tensors, made.rotation["cos"], made.rotation["sin"]]
    assert sorted(held) == sorted(x.untyped_storage().data_ptr() for x in given)


def test_one_operator_each_way() -> None:
    """No copy, view or allocation outside the operator."""
    made = build(NormCase(Case(name="operators", memory="packed")))
    with Operators() as forward, torch.no_grad():
        made.call(made.xs, made.weights)
    assert forward.names["fusewise::qk_norm_rope"] == 1
    tensors = [x.detach().requires_grad_() for x in (*made.xs, *made.weights)]
    ys = made.call(tuple(tensors[:2]), tuple(tensors[2:]))
    with Operators() as backward:
        torch.autograd.grad(ys, tensors, made.dys)
    assert backward.names["fusewise::qk_norm_rope_grad"] == 1
    assert not {n for n in backward.names if n.startswith("fusewise")} - {"fusewise::qk_norm_rope_grad"}


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "cuda"])
@pytest.mark.parametrize("norm", ["head", "all"])
def test_memory(norm: str, impl: str) -> None:
    """Allocations are the outputs, and in backward the gradients and the partial sums of the weight gradients."""
    case = Case(name="memory", batch=16, tokens=64, heads=16, kv_heads=4, head_dim=128, dtype="bf16", table="fused")
    made = build(NormCase(case, norm), "cuda")
    made.run(impl)
    tensors = [x.detach().requires_grad_() for x in (*made.xs, *made.weights)]

    def allocated(f: Any) -> tuple[int, Any]:
        before = settled()
        result = f()
        return peak_above(before), result

    bytes_of = sum(x.numel() * x.element_size() for x in made.xs)
    peak, ys = allocated(lambda: made.call(tuple(tensors[:2]), tuple(tensors[2:]), impl=impl))
    assert peak == bytes_of
    peak, _ = allocated(lambda: torch.autograd.grad(ys, tensors, made.dys))
    programs = 8 * torch.cuda.get_device_properties(0).multi_processor_count
    widest = max(weight.numel() for weight in made.weights)
    assert bytes_of < peak <= bytes_of + 4 * programs * widest + 4096


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # raised by torch
def test_transforms() -> None:
    """Forward-mode AD, vmap and torch.func gradients use the formula in torch operations."""
    q, k, q_weight, k_weight = (x.detach() for x in leaves("head"))

    def f(*tensors: Tensor) -> Tensor:
        y, z = fusewise.qk_norm_rope(*tensors, inv_freq=FREQ)
        return (y.square().sum() + z.exp().sum()).sqrt()

    tensors = (q, k, q_weight, k_weight)
    want = torch.autograd.grad(f(*(x.requires_grad_() for x in tensors)), tensors)
    tensors = tuple(x.detach() for x in tensors)
    for a, b in zip(grad(f, argnums=(0, 1, 2, 3))(*tensors), want, strict=True):
        torch.testing.assert_close(a, b)
    directions = tuple(torch.randn_like(x) for x in tensors)
    _, tangent = jvp(f, tensors, directions)
    torch.testing.assert_close(tangent, sum((a * b).sum() for a, b in zip(want, directions, strict=True)))
    mapped = vmap(f, in_dims=(0, None, None, None))(torch.stack((q, 2 * q)).detach(), *tensors[1:])
    torch.testing.assert_close(mapped, torch.stack((f(*tensors), f(2 * tensors[0], *tensors[1:]))))
    mapped = vmap(f, in_dims=(-1, None, None, None))(torch.stack((q, 2 * q), -1).detach(), *tensors[1:])
    torch.testing.assert_close(mapped, torch.stack((f(*tensors), f(2 * tensors[0], *tensors[1:]))))


@pytest.mark.parametrize("compiled", [False, True])
def test_vmap_over_any_dimension_of_the_weights(compiled: bool) -> None:
    """The batch dimension may lie within a weight."""
    q, k, *weights = (x.detach() for x in leaves("head"))
    many = [torch.stack((w, 2 * w, -w), 1) for w in weights]

    def f(*weights: Tensor) -> tuple[Tensor, Tensor]:
        y: tuple[Tensor, Tensor] = fusewise.qk_norm_rope(q, k, *weights, inv_freq=FREQ)
        return y

    def batched(*weights: Tensor) -> tuple[Tensor, ...]:
        gradients = grad(lambda *args: sum(y.square().sum() for y in f(*args)), (0, 1))
        return *vmap(f, 1)(*weights), *vmap(gradients, 1)(*weights)

    y, z, *of_weights = (torch.compile(batched, fullgraph=True, backend="aot_eager") if compiled else batched)(*many)
    for i in range(3):
        leaf = [w[:, i].contiguous().requires_grad_() for w in many]
        one = f(*leaf)
        want = torch.autograd.grad(sum(y.square().sum() for y in one), leaf)
        for a, b in zip((y[i], z[i], *(g[i] for g in of_weights)), (*one, *want), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("norm", ["head", "all"])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_batches_of_gradients(norm: str, pairing: str) -> None:
    """Batched gradients, as for torch.autograd.functional.jacobian, equal the gradients one by one."""
    tensors = leaves(norm)
    ys = fusewise.qk_norm_rope(*tensors, inv_freq=FREQ, norm=norm, pairing=pairing)
    batches = [torch.randn(3, *y.shape, dtype=y.dtype) for y in ys]
    together = torch.autograd.grad(ys, tensors, batches, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        alone = torch.autograd.grad(ys, tensors, [batch[i] for batch in batches], retain_graph=True)
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[i], b)


@pytest.mark.parametrize("constant", [0, 1])
def test_batches_of_one_of_two_gradients(constant: int) -> None:
    """The gradient of one result may be no batch: that of a sign is zero whatever comes in."""
    tensors = leaves("head")
    ys = list(fusewise.qk_norm_rope(*tensors, inv_freq=FREQ))
    ys[constant] = ys[constant].sgn()
    batches = [torch.randn(3, *y.shape, dtype=y.dtype) for y in ys]
    together = torch.autograd.grad(ys, tensors, batches, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        alone = torch.autograd.grad(ys, tensors, [batch[i] for batch in batches], retain_graph=True)
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[i], b)


def test_tables_may_require_grad_where_none_is_recorded() -> None:
    tensors, frequencies = leaves("head"), FREQ.clone().requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            fusewise.qk_norm_rope(*tensors, inv_freq=frequencies)
        with pytest.raises(ValueError, match=r"^qk_norm_rope: inv_freq must not require grad"):
            fusewise.qk_norm_rope(*tensors, inv_freq=frequencies)


def test_inference_mode_records_nothing_even_with_gradients_enabled() -> None:
    tensors = leaves("head")
    expected = fusewise.qk_norm_rope(*tensors, inv_freq=FREQ)
    with torch.inference_mode(), torch.enable_grad():
        found = fusewise.qk_norm_rope(*(t.clone() for t in tensors[:2]), *tensors[2:], inv_freq=FREQ)
    for y, true in zip(found, expected, strict=True):
        assert not y.requires_grad
        torch.testing.assert_close(y.clone(), true.detach())


def test_compiled_transform() -> None:
    tensors = tuple(x.detach() for x in leaves("all"))

    def f(*tensors: Tensor) -> Tensor:
        y, z = fusewise.qk_norm_rope(*tensors, inv_freq=FREQ, norm="all")
        return y.pow(3).sum() + z.sum()

    compiled = torch.compile(grad(f, argnums=(0, 2)), fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(*tensors), grad(f, argnums=(0, 2))(*tensors), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_changes_nothing() -> None:
    """Tensors are not cast: 16-bit q and k with float32 weights."""
    made = build(NormCase(Case(name="autocast", dtype="bf16")))
    want = made.run("auto")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = made.run("auto")
    for a, b in zip((*want[0], *want[1]), (*got[0], *got[1]), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_checkpointing() -> None:
    made = build(NormCase(Case(name="checkpoint")))
    _, want = made.run("auto")
    tensors = [x.detach().requires_grad_() for x in (*made.xs, *made.weights)]
    ys = torch.utils.checkpoint.checkpoint(lambda *t: made.call(t[:2], t[2:]), *tensors, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(ys, tensors, made.dys), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_jit_trace_serves_other_sizes_and_records_gradients() -> None:
    def f(*tensors: Tensor) -> Any:
        return fusewise.qk_norm_rope(*tensors, inv_freq=FREQ)

    traced, tensors = torch.jit.trace(f, leaves("head")), leaves("head", tokens=5)
    ys, wants = traced(*tensors), f(*tensors)
    gradients = [torch.autograd.grad([z.square().sum() for z in zs], tensors) for zs in (ys, wants)]
    torch.testing.assert_close((ys, gradients[0]), (wants, gradients[1]), rtol=0, atol=0)
