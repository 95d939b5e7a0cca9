"""The in-place functions of fusewise.compat.flash_attn under autograd, transforms, views and torch.compile, each of which
could miss the write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compat_statement import assert_gradient, assert_rotated, assert_transforms, launches, rotate
from torch import Tensor

from fusewise.compat.flash_attn import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)

from .test_compat_flash_attn import B, D, H, T, randn, rows, table, tensor_offset


def test_derivatives_of_every_order_in_place() -> None:
    cos, sin = (t.double() for t in table(8))
    kv, qkv = randn(1, 2, 2, 1, 8).double().requires_grad_(), randn(1, 2, 4, 8).double().requires_grad_()
    for function, x in (
        (lambda x: apply_rotary_emb_kv_(x.clone(), cos, sin), kv),
        (lambda x: apply_rotary_emb_qkv_(x.clone(), cos, sin, num_heads_q=2), qkv),
        (lambda x: apply_rotary_emb(x.clone(), cos, sin, inplace=True), qkv),
    ):
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x)
        assert not torch.autograd.grad(function(x).sgn().sum(), x)[0].any()  # a ZeroTensor gradient


IN_PLACE: dict[str, tuple[tuple[int, ...], Any]] = {
    "one": ((B, T, H, D), lambda x, t, _: apply_rotary_emb(x, *t, inplace=True)),
    "stacked": ((B, T, 3, H, D), lambda x, t, _: apply_rotary_emb_qkv_(x, *t)),
    "with tables for k": ((B, T, 3, H, D), lambda x, t, k: apply_rotary_emb_qkv_(x, *t, *k)),
    "heads": ((B, T, 2 * H, D), lambda x, t, _: apply_rotary_emb_qkv_(x, *t, num_heads_q=H)),
    "kv": ((B, T, 2, H, D), lambda x, t, _: apply_rotary_emb_kv_(x, *t)),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # raised by torch
@pytest.mark.parametrize("form", IN_PLACE)
def test_transforms_in_place(form: str) -> None:
    shape, function = IN_PLACE[form]
    tables = table(), table(seed=1)
    assert_transforms(lambda x: function(x, *tables), randn(*shape))
    xs = randn(2, *shape)
    want = torch.stack([function(x.clone(), *tables) for x in xs])
    torch.func.vmap(lambda x: function(x, *tables))(xs)
    torch.testing.assert_close(xs, want)


@pytest.mark.parametrize("form", IN_PLACE)
def test_a_hook_may_bring_back_the_tables_in_another_dtype(form: str) -> None:
    shape, function = IN_PLACE[form]
    tables, x = (table(), table(seed=1)), randn(*shape).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, Tensor.double):
        y = function(x * 1, *tables)
    want = torch.autograd.grad(function(x * 1, *tables).pow(3).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(y.pow(3).sum(), x), want)


@pytest.mark.parametrize(
    "made", [lambda x: x, lambda x: x.view(x.shape), lambda x: x * 1], ids=["leaf", "view", "product"]
)
@pytest.mark.parametrize("form", IN_PLACE)
def test_a_result_is_rotated_in_place_again(form: str, made: Any) -> None:
    shape, function = IN_PLACE[form]
    tables, x = (table(), table(seed=1)), randn(*shape).requires_grad_()
    other, g = x.detach().clone().requires_grad_(), randn(*shape)
    want = function(function(other.clone(), *tables).clone(), *tables)
    y = function(function(made(x), *tables), *tables)
    assert torch.equal(y, want)
    torch.testing.assert_close(torch.autograd.grad(y, x, g), torch.autograd.grad(want, other, g))


@pytest.mark.parametrize("form", ["view of the whole", "slice", "view of a leaf"])
def test_in_place_through_a_view(form: str) -> None:
    cos, sin = table()
    source = randn(B, T, 3 * H * D).requires_grad_()
    hidden = source if form == "view of a leaf" else source * 2
    factor = 1 if form == "view of a leaf" else 2
    packed = hidden.view(B, T, 3, H, D)

    def statement(x: Tensor, parts: int) -> Tensor:
        q, k, v = (factor * x).view(B, T, 3, H, D).unbind(2)
        q, k = (rotate(t, rows(cos, 0), rows(sin, 0)) if i < parts else t for i, t in enumerate((q, k)))
        return torch.stack((q.double(), k.double(), v.double()), 2).flatten(2)

    if form == "slice":
        y = apply_rotary_emb(packed[:, :, 0], cos, sin, inplace=True)
        assert torch.equal(y, packed[:, :, 0])
        assert_gradient(hidden, source, lambda x: statement(x, 1))
        return
    y = apply_rotary_emb_qkv_(packed, cos, sin)
    assert y.data_ptr() == hidden.data_ptr()
    assert_gradient(y.flatten(2), source, lambda x: statement(x, 2))
    if form == "view of the whole":  # backward is one launch and the copy of v, and every alias has the gradient
        g = torch.randn_like(y)
        again = apply_rotary_emb_qkv_((source * 2).view(B, T, 3, H, D), cos, sin)
        counted = launches(torch.autograd.grad, again, source, g)
        assert counted == {"fusewise::rope_out": 1, "aten::copy_": 1, "aten::mul": 1}
        packed = (source * 2).view(B, T, 3, H, D)
        apply_rotary_emb_qkv_(packed, cos, sin)
        assert_gradient(packed.flatten(2), source, lambda x: statement(x, 2))


@pytest.mark.parametrize("of_a_leaf", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_place_on_a_leaf_that_views_a_tensor_without_its_gradient(dtype: torch.dtype, of_a_leaf: bool) -> None:
    cos, sin = (t.to(dtype) for t in table())
    base = randn(B * T, H, D).to(dtype).requires_grad_(of_a_leaf)
    before = base.detach().clone().view(B, T, H, D)
    with torch.set_grad_enabled(not of_a_leaf):
        x = base.view(B, T, H, D)
    x.requires_grad_()

    def statement(x: Tensor) -> Tensor:
        return rotate(x, rows(cos, 0), rows(sin, 0))

    y = apply_rotary_emb(x, cos, sin, inplace=True)
    assert y.data_ptr() == base.data_ptr()
    assert_rotated(y, statement(before))
    g = torch.randn_like(y)
    expected = torch.autograd.grad(statement(before.requires_grad_()), before, g.double())[0]
    torch.testing.assert_close(torch.autograd.grad(y, x, g)[0].double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "made", [lambda x: x.unbind(2), lambda x: x.flatten(2, 3).split(H, 2), tuple], ids=["unbind", "split", "rows"]
)
def test_in_place_on_one_of_several_views_made_at_once(made: Any) -> None:
    cos, sin = table()
    source = randn(B, T, 3, H, D).requires_grad_() if made is not tuple else randn(2, B, T, H, D).requires_grad_()
    q, *others = made(source * 2)
    before = q.detach().clone()
    with torch.no_grad():
        want = rotate(before, rows(cos, 0), rows(sin, 0))
    y = apply_rotary_emb(q, cos, sin, inplace=True)
    assert y.data_ptr() == q.data_ptr()
    assert_rotated(y, want)
    # the other views stay usable, and the returned tensor has the gradient
    g, g_other = torch.randn_like(y), torch.randn_like(y)
    found = torch.autograd.grad((y, others[-1]), source, (g, g_other))[0]
    twin = source.detach().clone().requires_grad_()
    first, *rest = made(twin.double() * 2)
    rotated = rotate(first, rows(cos, 0), rows(sin, 0))
    expected = torch.autograd.grad((rotated, rest[-1]), twin, (g.double(), g_other.double()))[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_inference_mode_leaves_the_graph_of_a_tensor_alone() -> None:
    """Even with gradients enabled in it, as eager writes do."""
    cos, sin = table()
    leaf = randn(B, T, 3, H, D).requires_grad_()
    for qkv in (leaf * 1, leaf):
        made_by = qkv.grad_fn
        with torch.inference_mode(), torch.enable_grad():
            want = rotate(qkv[:, :, 0].clone(), rows(cos, 0), rows(sin, 0)).clone()
            assert apply_rotary_emb_qkv_(qkv, cos, sin) is qkv
        assert qkv.grad_fn is made_by
        assert_rotated(qkv.detach()[:, :, 0], want)


def test_module_in_place_on_split_projections() -> None:
    w = randn(4 * D, 6).requires_grad_()
    x = randn(B, T, 6)
    rotary = RotaryEmbedding(D)

    def heads(w: Tensor, rotated: bool) -> tuple[Tensor, ...]:
        q, k, v = (y.unflatten(2, (-1, D)) for y in (x.to(w.dtype) @ w.T).split([2 * D, D, D], 2))
        if rotated:
            q, kv = rotary(q, torch.stack((k, v), 2))
            return q, kv[:, :, 0], v
        cos, sin = rotary._tables
        q, k = (rotate(y, rows(cos, 0), rows(sin, 0)) for y in (q, k))
        return q, k, v

    ours, gs = heads(w, True), [randn(B, T, h, D) for h in (2, 1, 1)]
    found = torch.autograd.grad(ours, w, gs)[0]
    twin = w.detach().double().requires_grad_()
    expected = torch.autograd.grad(heads(twin, False), twin, [g.double() for g in gs])[0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_offsets_changed_before_backward_are_noticed() -> None:
    offset = tensor_offset()
    y = apply_rotary_emb_qkv_(randn(B, T, 3, H, D).requires_grad_(), *table(), seqlen_offsets=offset)
    offset += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Dynamo instantiates every autograd.Function it traces
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_compiles_to_one_graph(grad: bool) -> None:
    torch._dynamo.reset()
    cos, sin = table()

    def function(x: Tensor, qkv: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
        x, qkv, kv = x * 1, qkv * 1, kv * 1
        y = apply_rotary_emb(x, cos, sin, inplace=True, seqlen_offsets=1)
        return (
            y,
            apply_rotary_emb(y, cos, sin),
            apply_rotary_emb_qkv_(qkv, cos, sin),
            apply_rotary_emb_kv_(kv, cos, sin),
            qkv,
        )

    inputs = [randn(B, T, H, D), randn(B, T, 3, H, D), randn(B, T, 2, H, D)]
    inputs = [x.requires_grad_(grad) for x in inputs]
    eager = function(*inputs)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*inputs)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b)
    if grad:
        g = [torch.randn_like(y) for y in eager]
        for a, b in zip(torch.autograd.grad(compiled, inputs, g), torch.autograd.grad(eager, inputs, g), strict=True):
            torch.testing.assert_close(a, b)
