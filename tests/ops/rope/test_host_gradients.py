"""Autograd around the C++ fast path of repeated calls: same gradients as through Python, for any caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

import fusewise

from .host_calls import TABLE, by_python, empty_cache, qk, recalled  # noqa: F401 (a fixture)
from .support import assert_bits


def losses(function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """The gradients of a loss of `function(q, k)`, as one flat tensor."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 4, n, 16, generator=generator, requires_grad=True) for n in (3, 1))
    q_out, k_out = function(q, k)
    loss = (q_out**3).sum() + (k_out.transpose(1, 2) ** 2).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, (q, k))])


def remembered(**kwargs: Any) -> dict[str, Any]:
    fusewise.rope(*qk(), **kwargs)
    fusewise.rope(qk()[0], **kwargs)
    return kwargs


def retained(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    q, k = q * 2, k * 2
    k.retain_grad()
    return fusewise.rope_(q, k, **TABLE)  # type: ignore[no-any-return]


GRADIENTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "plain": lambda q, k: fusewise.rope(q, k, **TABLE),
    "twice": lambda q, k: fusewise.rope(*fusewise.rope(q, k, **TABLE), **TABLE, offset=3),
    "checkpoint": lambda q, k: checkpoint(lambda q, k: fusewise.rope(q, k, **TABLE), q, k, use_reentrant=False),
    "in place": lambda q, k: fusewise.rope_(q * 2, k * 2, **TABLE),
    "in place on views": lambda q, k: fusewise.rope_((q * 2)[:], (k * 2)[:], **TABLE),
    "in place after retain_grad": retained,
    "one of them": lambda q, k: (fusewise.rope(q, **TABLE), k),
    "one that requires none": lambda q, k: (fusewise.rope(q, k.detach(), **TABLE)[0], k),
    "only one is used": lambda q, k: (fusewise.rope(q, k, **TABLE)[0], k),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_python(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = by_python(monkeypatch, lambda: losses(GRADIENTS[name]))
    losses(GRADIENTS[name])
    torch.testing.assert_close(losses(GRADIENTS[name]), expected, rtol=0, atol=0)


def test_gradients_have_the_layout_of_their_tensors() -> None:
    remembered(**TABLE)
    q = torch.randn(2, 3, 4, 16).transpose(1, 2).requires_grad_()
    for _ in range(2):
        y = fusewise.rope(q, **TABLE)
        (dq,) = torch.autograd.grad(y, q, torch.randn(2, 4, 3, 16))
        assert dq.stride() == q.stride() == y.stride()
        (dq,) = torch.autograd.grad(fusewise.rope(q, **TABLE).sum(), q)  # an expanded scalar
        assert dq.stride() == q.stride()


def test_inference_mode_records_nothing_even_with_gradients_enabled() -> None:
    remembered(**TABLE)
    xs = qk(requires_grad=True)
    expected = fusewise.rope(*xs, **TABLE)
    with torch.inference_mode(), torch.enable_grad():
        assert recalled(fusewise.rope, *xs, **TABLE) is not None
        ys = fusewise.rope(*xs, **TABLE)
    for y, z in zip(ys, expected, strict=True):
        assert y.is_inference() and not y.requires_grad
        assert_bits(y, z.detach())


@pytest.mark.parametrize("wanted", [0, 1])
def test_what_requires_no_grad_gets_none(wanted: int) -> None:
    remembered(**TABLE)
    xs = tuple(x.requires_grad_(i == wanted) for i, x in enumerate(qk()))
    ys = fusewise.rope(*xs, **TABLE)
    assert [y.requires_grad for y in ys] == [i == wanted for i in range(2)]
    assert ys[1 - wanted].is_leaf
    dys = qk()
    (expected,) = torch.autograd.grad(fusewise.rope(xs[wanted], **TABLE), xs[wanted], dys[wanted])
    assert_bits(torch.autograd.grad(ys[wanted], xs[wanted], dys[wanted])[0], expected)
    xs = qk(requires_grad=True)
    ys = fusewise.rope(*xs, **TABLE)
    with torch.profiler.profile() as profile:  # only the requested one of two gradients is computed
        (dx,) = torch.autograd.grad(ys, xs[wanted], dys)
    assert [event.name for event in profile.events() if event.name.startswith("fusewise::")] == ["fusewise::rope"]
    assert_bits(dx, expected)


def test_double_backward() -> None:
    remembered(**TABLE)
    q, k = (x.double().float().requires_grad_() for x in qk())
    y, _ = fusewise.rope(q, k, **TABLE)
    (dq,) = torch.autograd.grad((y**3).sum() / 3, q, create_graph=True)  # Rᵀ (R q)²
    (ddq,) = torch.autograd.grad(dq.sum(), q)
    with torch.no_grad():
        ones = fusewise.rope(torch.ones_like(q), **TABLE)
        expected = fusewise.rope(2 * fusewise.rope(q, **TABLE) * ones, **TABLE, inverse=True)
    torch.testing.assert_close(ddq, expected)


def test_a_batch_of_gradients() -> None:
    remembered(**TABLE)
    q, _ = qk(requires_grad=True)
    y = fusewise.rope(q, **TABLE)
    dys = torch.randn(3, *y.shape)
    (batch,) = torch.autograd.grad(y, q, dys, is_grads_batched=True, retain_graph=True)
    for dq, dy in zip(batch, dys, strict=True):
        assert_bits(dq, torch.autograd.grad(y, q, dy, retain_graph=True)[0])


@pytest.mark.parametrize(
    "dy", [torch.ones(2, 4, 3, 16).double(), torch.ones(2, 4, 3, 64), torch.ones(2, 99, 3, 16), torch.ones(16)]
)
def test_the_node_takes_a_gradient_like_the_rotation_alone(dy: Tensor) -> None:
    """The autograd engine ensures this; a direct call of the node must check it."""
    fusewise.rope(qk()[0], **TABLE)
    y = fusewise.rope(qk()[0].requires_grad_(), **TABLE)
    with pytest.raises(
        ValueError, match=r"^rope: the gradient must have the shape, dtype and device of the result, got \["
    ):
        y.grad_fn(dy)


def test_compiled_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    remembered(**TABLE)
    q, k = qk(requires_grad=True)
    dys = qk()
    expected = torch.autograd.grad(fusewise.rope(q, k, **TABLE), (q, k), dys)
    outs = fusewise.rope(q, k, **TABLE)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        torch.autograd.backward(outs, dys)
    for x, want in zip((q, k), expected, strict=True):
        assert x.grad is not None
        assert_bits(x.grad, want)


def test_what_is_saved_is_watched() -> None:
    """Saved-tensor hooks see the table; modifying it is an error, and so is a second backward."""
    remembered(**TABLE)
    q, _ = qk(requires_grad=True)
    packed: list[Tensor] = []

    def pack(x: Tensor) -> int:
        packed.append(x)
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
        y = fusewise.rope(q, **TABLE)
    assert [x.data_ptr() for x in packed] == [x.data_ptr() for x in TABLE.values()]
    assert_bits(
        torch.autograd.grad(y, q, y.detach())[0], torch.autograd.grad(fusewise.rope(q, **TABLE), q, y.detach())[0]
    )
    table = {name: x.clone() for name, x in TABLE.items()}
    y = fusewise.rope(q, **table)
    table["cos"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = fusewise.rope(q, **TABLE)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def packed(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def spread(x: Tensor) -> Tensor:
    """x with a different stride than in the call."""
    return torch.stack((x, x), dim=-1)[..., 0]


@pytest.mark.parametrize("unpack", [packed, spread, Tensor.bfloat16], ids=["packed", "spread", "rounded"])
def test_what_a_hook_gives_back_may_be_laid_out_otherwise(unpack: Callable[[Tensor], Tensor]) -> None:
    """As from `save_on_cpu` with a slice of a cache: the cached plan assumes the original strides and dtype."""
    cache = torch.cat(tuple(TABLE.values()), dim=-1)
    cos, sin = cache.chunk(2, dim=-1)
    remembered(cos=cos, sin=sin)
    q, _ = qk(requires_grad=True)
    dy, _ = qk()
    want = torch.autograd.grad(fusewise.rope(q, cos=unpack(cos).float(), sin=unpack(sin).float()), q, dy)[0]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        y = fusewise.rope(q, cos=cos, sin=sin)
    torch.testing.assert_close(torch.autograd.grad(y, q, dy)[0], want)


def test_what_has_saved_the_old_values_raises() -> None:
    q, k = qk()
    fusewise.rope_(q, k, **TABLE)
    w = torch.randn(2, 4, 3, 16, requires_grad=True)
    product = q * w
    fusewise.rope_(q, k, **TABLE)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_long_chain_is_taken_apart_without_recursion() -> None:
    x = torch.randn(1, 1, 1, 2, requires_grad=True)
    f = torch.ones(1)
    y = x
    for _ in range(30_000):
        y = fusewise.rope(y, inv_freq=f)
    del y
