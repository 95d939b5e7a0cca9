"""Autograd and torch.func transforms: gradients against the float64 reference, and what backward must not modify."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusewise
from fusewise.ops.rope import _host, _op, reference

from .support import RECORDING_NOTHING, Place, assert_bits, make_table, places, require

every_place = pytest.mark.parametrize("place", places(interpreted=False))
every_place_and_the_interpreter = pytest.mark.parametrize("place", places())
on_the_cpu = pytest.mark.parametrize("place", [p for p in places(interpreted=False) if p.values[0].device == "cpu"])

# Forward-mode AD in torch scripts its decompositions on first use.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

TABLE = make_table("half", 5, 2, torch.float32)
OPTIONS: dict[str, Any] = {"rotary_dim": 10, "rotary_start": 3, "pairing": "interleaved_to_half"}


def inputs(place: Place, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    require(place, dtype)
    q, k = (torch.randn(2, 4, heads, 16).to(place.device, dtype).requires_grad_() for heads in (3, 1))
    table = {name: x.to(place.device) for name, x in TABLE.items()}
    return q, k, {**table, **OPTIONS, "impl": place.impl, **more}


def exact_gradients(
    f: Callable[..., Any], xs: tuple[Tensor, ...], dys: tuple[Tensor, ...], kwargs: dict[str, Any]
) -> Any:
    """Gradients through the reference in float64."""
    doubles = tuple(x.detach().double().requires_grad_() for x in xs)
    kwargs = {
        name: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for name, v in kwargs.items()
        if name != "impl"
    }
    ys = f(*doubles, **kwargs)
    return torch.autograd.grad(ys, doubles, [dy.double() for dy in dys])


def close(actual: Tensor, exact: Tensor) -> None:
    """Allow one rounding plus float32 arithmetic; upstream gradients here are of magnitude 1 to 4."""
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(
        actual.double(), exact.double(), rtol=eps / 2, atol=16 * 2.0**-23 if eps < 1e-3 else 2.0**-20
    )


@every_place_and_the_interpreter
def test_gradient_of_a_sum(place: Place) -> None:
    """The gradient of y.sum() is one expanded element: strides 0, last dimension not contiguous."""
    q, k, kwargs = inputs(place)
    y, z = fusewise.rope(q, k, **kwargs)
    dq, dk = torch.autograd.grad(y.sum() + 2 * z.sum(), (q, k))
    want = exact_gradients(reference.rope, (q, k), (torch.ones_like(y), torch.full_like(z, 2)), kwargs)
    close(dq, want[0])
    close(dk, want[1])
    assert dq.is_contiguous()


@every_place
def test_gradient_without_memory(place: Place) -> None:
    """The gradient of sgn is a ZeroTensor, which torch passes to an operator as one expanded element."""
    q, k, kwargs = inputs(place)
    for rotate in (fusewise.rope, lambda q, k, **options: fusewise.rope_(q.clone(), k.clone(), **options)):
        y, z = rotate(q, k, **kwargs)
        dq, dk = torch.autograd.grad(y.sgn().sum() + z.sum(), (q, k))
        assert not dq.any() and dq.stride() == q.stride()
        close(dk, exact_gradients(reference.rope, (k,), (torch.ones_like(z),), kwargs)[0])
    d = torch.func.vmap(torch.func.grad(lambda q: fusewise.rope(q, **kwargs).sgn().sum()))(q.detach()[None])
    assert not d.any()


@every_place
@pytest.mark.parametrize("strides", ["expanded-batch", "transposed", "sliced"])
def test_upstream_gradient_of_any_strides(place: Place, strides: str) -> None:
    q, k, kwargs = inputs(place)
    y, z = fusewise.rope(q, k, **kwargs)
    make: dict[str, Callable[[Tensor], Tensor]] = {
        "expanded-batch": lambda y: torch.randn_like(y[:1]).expand_as(y),
        "transposed": lambda y: torch.randn_like(y.transpose(1, 2).contiguous()).transpose(1, 2),
        "sliced": lambda y: torch.randn(*y.shape[:-1], 19, device=y.device)[..., 2:18],
    }
    dy, dz = make[strides](y), make[strides](z)
    given = dy.clone(), dz.clone()
    gradients = torch.autograd.grad((y, z), (q, k), (dy, dz))
    for gradient, want, x in zip(
        gradients, exact_gradients(reference.rope, (q, k), (dy, dz), kwargs), (q, k), strict=True
    ):
        close(gradient, want)
        assert gradient.stride() == x.stride()
    assert_bits(dy, given[0])
    assert_bits(dz, given[1])


@every_place
def test_only_one_gradient_is_wanted(place: Place) -> None:
    q, k, kwargs = inputs(place)
    for wanted in (0, 1):
        xs = tuple(x if i == wanted else x.detach() for i, x in enumerate((q, k)))
        ys = fusewise.rope(*xs, **kwargs)
        dy = torch.randn_like(ys[wanted])
        (gradient,) = torch.autograd.grad(ys[wanted], xs[wanted], dy)
        alone = fusewise.rope(xs[wanted], **kwargs)
        close(gradient, torch.autograd.grad(alone, xs[wanted], dy)[0])
    y, _ = fusewise.rope(q, k, **kwargs)  # one output unused: its input's gradient is None or zeros
    dq, dk = torch.autograd.grad(y.sum(), (q, k), allow_unused=True)
    assert dk is None or not dk.any()
    assert dq.any()


@every_place
@pytest.mark.parametrize("wanted", [0, 1])
def test_what_requires_no_grad_gets_none(place: Place, wanted: int) -> None:
    """Nor does its rotation require grad; also in double backward."""
    q, k, kwargs = inputs(place)
    ys = fusewise.rope(*(x if i == wanted else x.detach() for i, x in enumerate((q, k))), **kwargs)
    assert [y.requires_grad for y in ys] == [i == wanted for i in range(2)]
    assert ys[1 - wanted].is_leaf
    ys = fusewise.rope(q, k, **kwargs)
    dys = (torch.randn_like(y).requires_grad_(i == wanted) for i, y in enumerate(ys))
    dxs = torch.autograd.grad(ys, (q, k), tuple(dys), create_graph=True)
    assert [dx.requires_grad for dx in dxs] == [i == wanted for i in range(2)]


@every_place
@pytest.mark.parametrize("layout", ["bhsd", "sbhd"])
def test_gradients_have_the_strides_of_their_inputs(place: Place, layout: str) -> None:
    """Also if the incoming gradient has other strides: q is a transposed view."""
    require(place)
    dims = (1, 2) if layout == "bhsd" else (0, 1)
    table = {name: x.to(place.device) for name, x in make_table("half", 8, 2, torch.float32).items()}
    q = torch.randn(2, 4, 3, 16, device=place.device).transpose(*dims).requires_grad_()
    y = fusewise.rope(q, **table, layout=layout, impl=place.impl)
    dy = torch.randn(y.shape, device=place.device)
    assert dy.stride() != q.stride()
    (dq,) = torch.autograd.grad(y, q, dy)
    assert y.stride() == q.stride()
    assert dq.stride() == q.stride()


@every_place
def test_retained_graph_gives_equal_bits(place: Place) -> None:
    """Backward twice: the first one must not modify what it reads."""
    q, k, kwargs = inputs(place, torch.bfloat16)
    ys = fusewise.rope(q, k, **kwargs)
    dys = tuple(torch.randn_like(y) for y in ys)
    given = [dy.clone() for dy in dys]
    tables = {name: kwargs[name].clone() for name in ("cos", "sin")}
    first = torch.autograd.grad(ys, (q, k), dys, retain_graph=True)
    second = torch.autograd.grad(ys, (q, k), dys)
    for a, b in zip(first, second, strict=True):
        assert_bits(a, b)
    for dy, old in zip(dys, given, strict=True):
        assert_bits(dy, old)
    for name, table in tables.items():
        assert_bits(kwargs[name], table)


def test_nothing_of_q_or_k_is_saved() -> None:
    place = Place("reference", "cpu")
    q, k, kwargs = inputs(place)
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fusewise.rope(q, k, **kwargs)
    assert {x.data_ptr() for x in saved} == {kwargs["cos"].data_ptr(), kwargs["sin"].data_ptr()}


def every_second(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The change of every second tensor: of sin, not of cos."""
    count = itertools.count()
    return lambda x: change(x) if next(count) % 2 else x


# What may come back from a saved-tensor hook, besides the tensor itself.
BROUGHT_BACK: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "float64": lambda: Tensor.double,
    "sin alone in float64": lambda: every_second(Tensor.double),
    "strides": lambda: lambda x: torch.stack((x, x), -1)[..., 0],
    "strides of sin alone": lambda: every_second(lambda x: x.t().contiguous().t()),
}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("brought_back", BROUGHT_BACK)
@every_place_and_the_interpreter
def test_a_hook_may_bring_back_another_dtype_or_other_strides(place: Place, brought_back: str, quick: bool) -> None:
    """Of the table and of the integers that say where tokens are."""
    q, k, kwargs = inputs(place)
    positions, offset = (torch.tensor(x, device=place.device, dtype=torch.int32) for x in ([3, 0, 4, 1], [2, 0]))
    dys = torch.randn_like(q), torch.randn_like(k)
    for where in ({"positions": positions}, {"offset": offset}):
        want = torch.autograd.grad(fusewise.rope(q, k, **kwargs, **where), (q, k), dys)
        with contextlib.nullcontext() if quick else _host.through_python():
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, BROUGHT_BACK[brought_back]()):
                ys = fusewise.rope(q, k, **kwargs, **where)
            for found, gradient in zip(torch.autograd.grad(ys, (q, k), dys), want, strict=True):
                assert_bits(found, gradient)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("wrong", [Tensor.flatten, lambda x: x[..., :2], lambda x: x.to("meta")])
@every_place
def test_a_hook_must_bring_back_shape_and_device(place: Place, wrong: Callable[[Tensor], Tensor], quick: bool) -> None:
    """A kernel would read other memory."""
    q, _, kwargs = inputs(place)
    fusewise.rope(q, **kwargs)
    with contextlib.nullcontext() if quick else _host.through_python():
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, wrong):
            y = fusewise.rope(q, **kwargs)
        with pytest.raises(
            ValueError, match=r"^rope: what a saved-tensor hook returns must have the shape and device of "
        ):
            y.sum().backward()


@every_place
def test_double_backward(place: Place) -> None:
    """The gradient is linear in the upstream gradient: its derivative is the rotation again."""
    q, k, kwargs = inputs(place)
    ys = fusewise.rope(q, k, **kwargs)
    dys = tuple(torch.randn_like(y).requires_grad_() for y in ys)
    gradients = torch.autograd.grad(ys, (q, k), dys, create_graph=True)
    vs = tuple(torch.randn_like(x) for x in (q, k))
    for back, forth in zip(torch.autograd.grad(gradients, dys, vs), fusewise.rope(*vs, **kwargs), strict=True):
        assert_bits(back, forth)


def test_gradgradcheck_through_the_operator() -> None:
    table = {name: x.double() for name, x in TABLE.items()}
    xs = tuple(torch.randn(1, 2, heads, 14, dtype=torch.float64).requires_grad_() for heads in (2, 1))
    f = lambda q, k: fusewise.rope(q, k, **table, **OPTIONS)  # noqa: E731
    assert torch.autograd.gradcheck(
        f, xs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(f, xs)


@every_place
def test_forward_mode(place: Place) -> None:
    q, k, kwargs = inputs(place)
    tangents = torch.randn_like(q), torch.randn_like(k)
    want = fusewise.rope(*tangents, **kwargs)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), t) for x, t in zip((q, k), tangents, strict=True)]
        for y, t in zip(fusewise.rope(*duals, **kwargs), want, strict=True):
            assert_bits(forward_ad.unpack_dual(y).tangent, t)


def test_forward_mode_with_one_tangent() -> None:
    """The output for the input without a tangent has a zero tangent."""
    q, k, kwargs = inputs(Place("reference", "cpu"))
    q, k = q.detach(), k.detach()
    for i, x in enumerate((q, k)):
        primals = (lambda x: fusewise.rope(x, k, **kwargs)) if i == 0 else (lambda x: fusewise.rope(q, x, **kwargs))
        ys, tangents = torch.func.jvp(primals, (x,), (x,))
        assert_bits(tangents[i], ys[i])
        assert not tangents[1 - i].any()


def test_tables_have_no_tangent_and_say_so() -> None:
    q, _, kwargs = inputs(Place("reference", "cpu"))
    with pytest.raises(ValueError, match=r"^rope: the table must not have a tangent.*got one; detach"):
        torch.func.jvp(lambda cos: fusewise.rope(q, **{**kwargs, "cos": cos}), (kwargs["cos"],), (kwargs["cos"],))


@every_place
def test_func_transforms(place: Place) -> None:
    """torch.func: vjp, jvp, vmap over both inputs or one, Jacobians and a Hessian."""
    q, k, kwargs = inputs(place)
    q, k = q.detach(), k.detach()

    def f(q: Tensor, k: Tensor) -> Any:
        return fusewise.rope(q, k, **kwargs)

    y, z = f(q, k)
    dys = torch.randn_like(y), torch.randn_like(z)
    _, vjp = torch.func.vjp(f, q, k)
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
    for a, b in zip(vjp(dys), torch.autograd.grad(f(*leaves), leaves, dys), strict=True):
        assert_bits(a, b)
    _, tangents = torch.func.jvp(f, (q, k), (2 * q, 3 * k))
    close(tangents[0], 2 * y)
    close(tangents[1], 3 * z)

    many = torch.stack([q, 2 * q, 3 * q], dim=1)
    ys, zs = torch.func.vmap(f, in_dims=(1, None), out_dims=(1, 0))(many, k)
    for i in range(3):
        assert_bits(ys[:, i], f((i + 1) * q, k)[0])
        assert_bits(zs[i], z)
    ys, _ = torch.func.vmap(f, in_dims=-1, out_dims=-1)(torch.stack([q, 2 * q], -1), torch.stack([k, k], -1))
    assert_bits(ys[..., 1], f(2 * q, k)[0])  # the batch dimension lies within the heads
    ys, _ = torch.func.vmap(f)(torch.stack([q, 2 * q]), torch.stack([k, k]))
    assert_bits(ys[1], f(2 * q, k)[0])
    gradients = torch.func.vmap(torch.func.grad(lambda q: fusewise.rope(q, **kwargs).square().sum()))(
        torch.stack([q, 2 * q])
    )
    close(gradients[1] / 4, q.double())  # rotation preserves the norm: the gradient of |y|² is 2 x

    small = q[:1, :1, :1]
    hessian = torch.func.hessian(lambda x: fusewise.rope(x, **kwargs).square().sum())(small).reshape(16, 16)
    close(hessian, 2 * torch.eye(16, device=q.device))
    rotation = torch.func.jacrev(lambda x: fusewise.rope(x, **kwargs))(small).reshape(16, 16)
    close(rotation, torch.func.jacfwd(lambda x: fusewise.rope(x, **kwargs))(small).reshape(16, 16))
    close(rotation @ rotation.T, torch.eye(16, device=q.device))


def test_vmap_over_positions_and_tables() -> None:
    """Batched tables or positions take one call per entry."""
    q, _, kwargs = inputs(Place("reference", "cpu"))
    rows = torch.tensor([[0, 1, 2, 3], [9, 9, 0, 1], [63, 64, 1, 2]])
    ys = torch.func.vmap(lambda p: fusewise.rope(q.detach(), **kwargs, positions=p))(rows)
    for y, p in zip(ys, rows, strict=True):
        assert_bits(y, fusewise.rope(q.detach(), **kwargs, positions=p))


def test_vmap_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vmap dimension of q and k is folded into the heads: one launch, not one per entry."""
    q, k, kwargs = inputs(Place("reference", "cpu"))
    calls = []
    launch = _op._launch

    def counted(*args: Any) -> None:
        calls.append(args)
        launch(*args)

    monkeypatch.setattr(_op, "_launch", counted)
    torch.func.vmap(lambda q, k: fusewise.rope(q, k, **kwargs))(
        torch.stack([q, q, q]).detach(), torch.stack([k, k, k]).detach()
    )
    assert len(calls) == 1


@every_place
def test_autocast_changes_nothing(place: Place) -> None:
    """The operator keeps the dtype of its inputs; gradients flow through the casts around it."""
    q, _, kwargs = inputs(place)
    with torch.autocast(place.device, dtype=torch.bfloat16):
        y = fusewise.rope(q, **kwargs)
        product = torch.nn.functional.linear(q, torch.eye(16, device=q.device))  # bfloat16 under autocast
        z = fusewise.rope(product, **kwargs)
    assert y.dtype == torch.float32
    assert z.dtype == torch.bfloat16
    assert_bits(y, fusewise.rope(q, **kwargs))
    (dq,) = torch.autograd.grad(z.sum(), q)
    assert dq.dtype == torch.float32
    assert dq.any()


@every_place
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(place: Place, reentrant: bool) -> None:
    q, k, kwargs = inputs(place)

    def f(q: Tensor, k: Tensor) -> Tensor:
        y, z = fusewise.rope(q * 1, k * 1, **kwargs)
        return (y * y.cos()).sum() + (z * z).sum()

    want = torch.autograd.grad(f(q, k), (q, k))
    checkpoint(f, q, k, use_reentrant=reentrant).backward()
    assert_bits(q.grad, want[0])
    assert_bits(k.grad, want[1])


@on_the_cpu
def test_in_place_under_checkpointing(place: Place) -> None:
    """Intermediate values are rotated in place, again in the recomputation, and gradients stay correct."""
    q, k, kwargs = inputs(place)

    def block(q: Tensor, k: Tensor, rope: Callable[..., Any]) -> Tensor:
        y, z = rope(q * 2, k * 3, **kwargs)
        return (y * y.cos()).sum() + (z * z).sum()

    want = torch.autograd.grad(block(q, k, fusewise.rope), (q, k))
    checkpoint(block, q, k, fusewise.rope_, use_reentrant=False).backward()
    assert_bits(q.grad, want[0])
    assert_bits(k.grad, want[1])


@every_place
def test_accumulates_into_shared_inputs(place: Place) -> None:
    """q and k may be one tensor: its gradient is the sum."""
    q, _, kwargs = inputs(place)
    y, z = fusewise.rope(q, q, **kwargs)
    assert_bits(y, z)
    (dq,) = torch.autograd.grad((y, z), q, (torch.ones_like(y), torch.ones_like(z)))
    (once,) = torch.autograd.grad(fusewise.rope(q, **kwargs), q, torch.ones_like(y))
    assert_bits(dq, once + once)


@pytest.mark.parametrize("name", ["cos", "sin", "cos_sin", "angles", "inv_freq"])
def test_tables_get_no_gradient_and_say_so(name: str) -> None:
    q = torch.randn(1, 4, 2, 16)
    kind = {"cos_sin": "fused", "angles": "angles", "inv_freq": "inv_freq"}.get(name, "half")
    table = make_table(kind, 8, 1, torch.float32)
    table[name].requires_grad_()
    with pytest.raises(
        ValueError, match=rf"^rope: {name} must not require grad.*got requires_grad=True; call {name}.detach"
    ):
        fusewise.rope(q, **table)


@every_place
def test_tables_may_require_grad_where_none_is_recorded(place: Place) -> None:
    """As for frequencies that are model parameters. A repeated call is still rejected if a gradient is recorded."""
    q, k, kwargs = inputs(place)
    want = fusewise.rope(q, k, **kwargs)
    kwargs = {**kwargs, "cos": kwargs["cos"].clone().requires_grad_()}
    for _ in range(2):
        for mode in RECORDING_NOTHING:
            with mode():
                for y, w in zip(fusewise.rope(q, k, **kwargs), want, strict=True):
                    assert_bits(y.clone(), w.detach())
        with pytest.raises(ValueError, match=r"^rope: cos must not require grad"):
            fusewise.rope(q, k, **kwargs)


def test_inference_mode_and_no_grad_record_nothing() -> None:
    q, k, kwargs = inputs(Place("reference", "cpu"))
    want = fusewise.rope(q, k, **kwargs)
    for mode in RECORDING_NOTHING:
        with mode():
            ys = fusewise.rope(q, k, **kwargs)
        for y, w in zip(ys, want, strict=True):
            assert not y.requires_grad
            assert_bits(y.detach().clone(), w.detach())


@pytest.mark.parametrize("k_dim", [0, None])
@pytest.mark.parametrize("entries", [0, 1, 3])
def test_vmap_over_any_number_of_entries(entries: int, k_dim: int | None) -> None:
    """Also 0 and 1, which must not be mistaken for an unbatched operand; also with batched positions."""
    q, k, kwargs = inputs(Place("reference", "cpu"))
    qs = torch.randn(entries, *q.shape)
    ks = torch.randn(entries, *k.shape) if k_dim == 0 else k.detach()
    positions = torch.arange(q.shape[1]).expand(entries, -1)
    kwargs = {**kwargs, "positions": None}
    for call, more in (
        (lambda q, k, _: fusewise.rope(q, k, **kwargs), None),
        (lambda q, k, p: fusewise.rope(q, k, **{**kwargs, "positions": p}), 0),
    ):
        ys, zs = torch.func.vmap(call, in_dims=(0, k_dim, more))(qs, ks, positions if more == 0 else None)
        assert (ys.shape, zs.shape) == (qs.shape, (entries, *k.shape))
        for i in range(entries):
            want = fusewise.rope(qs[i], ks[i] if k_dim == 0 else ks, **kwargs)
            assert_bits(ys[i], want[0])
            assert_bits(zs[i], want[1])
    with pytest.raises(ValueError, match=r"^rope: out must be None under a torch.func transform"):
        torch.func.vmap(lambda q: fusewise.rope(q, **kwargs, out=q))(torch.randn(2, *q.shape))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_jit_trace_serves_other_sizes_and_records_gradients(in_place: bool) -> None:
    """Torch traces twice, the second time without gradients, and compares. In place, the two differ: autograd's records
    a copy."""
    q, k, kwargs = inputs(Place("reference", "cpu"))
    kwargs = {name: x for name, x in kwargs.items() if name != "positions"}

    def function(q: Tensor, k: Tensor) -> Any:
        return fusewise.rope_(q * 1, k * 1, **kwargs) if in_place else fusewise.rope(q, k, **kwargs)

    traced = torch.jit.trace(function, (q, k), check_trace=not in_place)
    q, k = (x.detach()[:, :3].repeat(2, 1, 1, 1).requires_grad_() for x in (q, k))
    ys, wants = traced(q, k), function(q, k)
    gradients = [torch.autograd.grad([z.square().sum() for z in zs], (q, k)) for zs in (ys, wants)]
    for found, want in zip((*ys, *gradients[0]), (*wants, *gradients[1]), strict=True):
        assert_bits(found.detach(), want.detach())
