"""`rope_` and `out=`: what is written, what autograd records, and that a rejected call writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fusewise
from fusewise.ops._overlap import overlaps, overlaps_itself
from fusewise.ops.rope._validate import DEFAULTS
from fusewise.ops.rope._written import check_written

from .support import Place, assert_bits, make_table, places, require

every_place = pytest.mark.parametrize("place", places(interpreted=False))

TABLE = make_table("half", 8, 2, torch.float32)


def table(place: Place, **more: Any) -> dict[str, Any]:
    require(place)
    return {**{name: x.to(place.device) for name, x in TABLE.items()}, "impl": place.impl, **more}


def refused(error: type[Exception], message: str, x: Tensor, call: Callable[[], Any]) -> None:
    """Check that the call raises and leaves x's storage unchanged."""
    flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.detach().untyped_storage())
    before, version = flat.clone(), None if x.is_inference() else x._version
    with pytest.raises(error, match=message):
        call()
    assert_bits(flat, before)
    assert version is None or x._version == version


@pytest.mark.parametrize("name", ["rope_", "rope_qk_", "rope_out", "rope_qk_out"])
def test_schema_says_what_is_written(name: str) -> None:
    schema = getattr(torch.ops.fusewise, name).default._schema
    assert schema.is_mutable
    written = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
    assert (
        written
        == {"rope_": {"q"}, "rope_qk_": {"q", "k"}, "rope_out": {"q_out"}, "rope_qk_out": {"q_out", "k_out"}}[name]
    )
    assert not schema.returns


def test_functional_schemas_write_nothing() -> None:
    assert not torch.ops.fusewise.rope.default._schema.is_mutable
    assert not torch.ops.fusewise.rope_qk.default._schema.is_mutable


@every_place
def test_version_counters(place: Place) -> None:
    kwargs = table(place)
    q, k = torch.randn(2, 4, 3, 16, device=place.device), torch.randn(2, 4, 1, 16, device=place.device)
    q_out = torch.empty_like(q)
    fusewise.rope(q, k, **kwargs)
    fusewise.rope(q, **kwargs, out=q_out)
    assert (q._version, k._version) == (0, 0)
    assert q_out._version >= 1
    fusewise.rope_(q, k, **kwargs)
    assert q._version >= 1
    assert k._version >= 1
    assert kwargs["cos"]._version == 0


@every_place
def test_gradient_of_a_mutation(place: Place) -> None:
    """Gradients through the in-place write are bitwise equal to out of place."""
    kwargs = table(place)
    leaves = tuple(torch.randn(2, 4, h, 16, device=place.device).requires_grad_() for h in (3, 1))
    dys = tuple(torch.randn_like(x) for x in leaves)
    want = torch.autograd.grad([2 * y for y in fusewise.rope(*(x * 3 for x in leaves), **kwargs)], leaves, dys)
    q, k = (x * 3 for x in leaves)
    y, z = fusewise.rope_(q, k, **kwargs)
    assert y is q
    assert z is k
    given = [dy.clone() for dy in dys]
    for a, b in zip(torch.autograd.grad([2 * q, 2 * k], leaves, dys), want, strict=True):
        assert_bits(a, b)
    for dy, old in zip(dys, given, strict=True):
        assert_bits(dy, old)


@every_place
@pytest.mark.parametrize("both", [True, False])
def test_gradient_through_views_of_packed_qkv(place: Place, both: bool) -> None:
    """q and k are rotated inside a packed qkv tensor; v passes through."""
    kwargs = table(place)
    leaf = torch.randn(2, 4, 6, 16, device=place.device).requires_grad_()
    dy = torch.randn_like(leaf)
    whole = leaf * 1
    parts = [fusewise.rope(whole[:, :, :3], **kwargs), fusewise.rope(whole[:, :, 3:4], **kwargs), whole[:, :, 4:]]
    parts[1] = parts[1] if both else whole[:, :, 3:4]
    out_of_place = torch.cat(parts, 2)
    (want,) = torch.autograd.grad(out_of_place, leaf, dy)
    qkv = leaf * 1
    fusewise.rope_(qkv[:, :, :3], qkv[:, :, 3:4] if both else None, **kwargs)
    assert_bits(qkv.detach(), out_of_place.detach())
    (dqkv,) = torch.autograd.grad(qkv, leaf, dy)
    assert_bits(dqkv, want)


@pytest.mark.parametrize("together", [False, True])
def test_gradients_retained_before_the_write(together: bool) -> None:
    """They are those of the rotated tensors, as after torch's own in-place functions. Torch cannot do this where a tensor
    changes its place among the results of the functions that it comes from: k, here the only one, or the second before."""
    leaf = torch.randn(1, 4, 3, 16, requires_grad=True)
    for _ in range(2):
        q, k = fusewise.rope(leaf, leaf, **TABLE) if together else (leaf * 1, leaf * 2)
        q.retain_grad()
        k.retain_grad()
        fusewise.rope_(q, k, **TABLE)
        (q.square().sum() + k.exp().sum()).backward()
        for gradient, want in zip((q.grad, k.grad), (2 * q, k.exp()), strict=True):
            torch.testing.assert_close(gradient, want.detach())


def test_what_does_not_require_grad_stays_so() -> None:
    """With q requiring grad, k is written and remains a leaf."""
    q, k = torch.randn(1, 4, 2, 16).requires_grad_() * 1, torch.randn(1, 4, 2, 16)
    want = fusewise.rope(k, **TABLE)
    fusewise.rope_(q, k, **TABLE)
    assert_bits(k, want)
    assert k.is_leaf
    assert not k.requires_grad
    assert q.requires_grad


@every_place
@pytest.mark.parametrize("recorded", [True, False])
def test_what_saved_the_old_values_raises_in_backward(place: Place, recorded: bool) -> None:
    leaf = torch.randn(1, 4, 2, 16, device=place.device).requires_grad_()
    q = leaf * 1
    square = q * q  # saves q
    with torch.set_grad_enabled(recorded):
        fusewise.rope_(q, **table(place))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


HISTORY = {
    "a leaf": lambda x: x,
    "a view of a leaf": lambda x: x[:, :, :2],
    "one of split": lambda x: (x * 1).split(2, 2)[0],
    "one of unbind": lambda x: (x * 1).unflatten(2, (2, 2)).unbind(2)[0],
    "one of chunk": lambda x: (x * 1).chunk(2, 2)[1],
}


@pytest.mark.parametrize("kind", HISTORY)
@pytest.mark.parametrize("place_of", ["q", "k"])
def test_histories_that_autograd_cannot_follow(kind: str, place_of: str) -> None:
    """torch rejects these too, but only after the write."""
    x = HISTORY[kind](torch.randn(1, 4, 4, 16, requires_grad=True))
    other = torch.randn(1, 4, 1, 16)
    tensors = (x, other) if place_of == "q" else (other, x)
    refused(
        RuntimeError,
        rf"^rope_: {place_of} must not be .*, got .*; .*use rope$",
        x,
        lambda: fusewise.rope_(*tensors, **TABLE),
    )
    with torch.no_grad():
        fusewise.rope_(*tensors, **TABLE)  # nothing is recorded


def test_views_made_without_gradients() -> None:
    x = torch.randn(1, 4, 4, 16, requires_grad=True) * 1
    with torch.no_grad():
        view = x[:, :, :2]
    refused(RuntimeError, r"^rope_: q must not be .*, got .*; .*use rope$", x, lambda: fusewise.rope_(view, **TABLE))


def test_inference_tensors() -> None:
    with torch.inference_mode():
        x = torch.randn(1, 4, 2, 16)
        fusewise.rope_(x, **TABLE)
    message = "must not be an inference tensor outside inference mode, got one; clone"
    refused(RuntimeError, f"^rope_: q {message} q$", x, lambda: fusewise.rope_(x, **TABLE))
    refused(
        RuntimeError, f"^rope: out for q {message}", x, lambda: fusewise.rope(torch.randn(1, 4, 2, 16), **TABLE, out=x)
    )


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # raised by torch
def test_transforms_and_forward_mode() -> None:
    message = r"^rope_: q and k must not be under a torch.func transform or forward mode, got one of them; use rope$"
    x = torch.randn(2, 4, 2, 16)
    refused(RuntimeError, message, x, lambda: torch.func.vmap(lambda x: fusewise.rope_(x[None], **TABLE))(x))
    refused(RuntimeError, message, x, lambda: torch.func.grad(lambda x: fusewise.rope_(x.clone(), **TABLE).sum())(x))
    with forward_ad.dual_level():
        refused(RuntimeError, message, x, lambda: fusewise.rope_(forward_ad.make_dual(x, x.clone()), **TABLE))


def one_element_shared() -> tuple[Tensor, ...]:
    flat = torch.randn(255)
    return flat[:128].view(1, 4, 2, 16), flat[127:].view(1, 4, 2, 16)


def packed(first: slice, second: slice) -> tuple[Tensor, ...]:
    x = torch.randn(1, 4, 4, 16)
    return x[:, :, first], x[:, :, second]


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("q must not have elements that share memory", lambda: (torch.randn(1, 4, 2, 16).expand(2, 4, 2, 16),)),
        ("q must not have elements that share memory", lambda: (torch.randn(160).as_strided((1, 4, 3, 16), (0, 40, 8, 1)),)),
        ("k must not have elements that share memory", lambda: (torch.randn(1, 4, 2, 16), torch.randn(1, 4, 1, 16).expand(1, 4, 2, 16))),
        ("k must not overlap q", lambda: packed(slice(0, 3), slice(2, 4))),
        ("k must not overlap q", lambda: packed(slice(0, 4), slice(0, 4))),
        ("k must not overlap q", one_element_shared),
    ],
    ids=["expanded", "sliding-heads", "expanded-key", "shared-head", "same", "one-element"],
)  # fmt: skip
def test_shared_memory_is_refused(message: str, make: Callable[[], tuple[Tensor, ...]]) -> None:
    tensors = make()
    pattern = rf"^rope_: {message}.*, got .*; (call|clone) "
    refused(ValueError, pattern, tensors[0], lambda: fusewise.rope_(*tensors, **TABLE))
    fusewise.rope(*tensors, **TABLE)  # allowed as inputs


def test_outputs_that_share_memory_are_refused() -> None:
    q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 4, 1, 16)
    one = torch.empty(1, 4, 3, 16)
    message = r"^rope: out for q must not overlap an input, got shared memory; use rope_"
    refused(ValueError, message, q, lambda: fusewise.rope(q, **TABLE, out=q))
    refused(ValueError, message, q, lambda: fusewise.rope(q, k, **TABLE, out=(q, one[:, :, 2:])))
    message = r"^rope: out for k must not overlap an input"
    refused(ValueError, message, q, lambda: fusewise.rope(q, k, **TABLE, out=(torch.empty_like(q), q[:, :, 1:])))
    message = r"^rope: out for k must not overlap out for q, both being written to, got shared memory; clone"
    refused(ValueError, message, one, lambda: fusewise.rope(q, k, **TABLE, out=(one[:, :, :2], one[:, :, 1:2])))
    expanded = torch.empty(1, 1, 2, 16).expand(1, 4, 2, 16)
    refused(
        ValueError,
        r"^rope: out for q must not have elements that share .*; give it memory of its own$",
        expanded,
        lambda: fusewise.rope(q, **TABLE, out=expanded),
    )
    fusewise.rope(q, k, **TABLE, out=(one[:, :, :2], one[:, :, 2:]))  # adjacent in one buffer is fine


def beside(x: Tensor, *sizes: int) -> Tensor:
    """A tensor that shares the memory of x, from its third element on."""
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).as_strided(sizes, (sizes[-1], 1), 2)


READ: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "cos": lambda x: {"cos": beside(x, 6, 8), "sin": torch.zeros(6, 8)},
    "sin": lambda x: {"cos": torch.zeros(6, 8), "sin": beside(x, 6, 8)},
    "cos_sin": lambda x: {"cos_sin": beside(x, 5, 16)},
    "angles": lambda x: {"angles": beside(x, 6, 8)},
    "inv_freq": lambda x: {"inv_freq": beside(x, 1, 8)[0]},
    "positions": lambda x: {**TABLE, "positions": x.view(torch.int32)[0, :, 0, 0]},
    "offset": lambda x: {**TABLE, "offset": x.view(torch.int64)[0, 3:, 1, 0]},
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("again", [False, True])
def test_what_is_read_may_not_be_written_to(name: str, again: bool) -> None:
    """Also after a valid call that differs only in the addresses of its tensors."""
    q, k = torch.zeros(1, 4, 2, 16), torch.zeros(1, 4, 1, 16)
    options, out = READ[name](q), (torch.empty_like(q), torch.empty_like(k))
    if again:
        apart = {key: x.clone().as_strided(x.shape, x.stride()) if x.is_contiguous() else
                 torch.zeros(99, dtype=x.dtype).as_strided(x.shape, x.stride()) for key, x in options.items()}  # fmt: skip
        for _ in range(2):
            fusewise.rope_(q.clone(), k, **apart)
            fusewise.rope(q, k, **apart, out=out)
    message = rf"^rope_: q must not overlap {name}, which is read, got shared memory; clone {name}$"
    refused(ValueError, message, q, lambda: fusewise.rope_(q, k, **options))
    message = message.replace("rope_: q", "rope: out for q")
    refused(ValueError, message, q, lambda: fusewise.rope(out[0], k, **options, out=(q, out[1])))
    message = message.replace("out for q", "out for k")
    refused(ValueError, message, q, lambda: fusewise.rope(k, out[0], **options, out=(out[1], q)))
    fusewise.rope(q, k, **options)  # reading the same memory twice is fine


def test_memory_that_two_storages_share_is_seen() -> None:
    array = torch.zeros(200).numpy()
    q, cos = torch.from_numpy(array[:128]).view(1, 4, 2, 16), torch.from_numpy(array[120:184]).view(8, 8)
    sin = torch.zeros(8, 8)
    fusewise.rope_(q.clone(), cos=cos, sin=sin)
    refused(ValueError, "q must not overlap cos", q, lambda: fusewise.rope_(q, cos=cos, sin=sin))


@pytest.mark.parametrize("fake", [True, False])
def test_tensors_without_memory_overlap_by_storage(fake: bool) -> None:
    with FakeTensorMode() if fake else torch.device("meta"):
        x = torch.empty(2, 4, 6, 16)
        q, k, other = x[:, :, :3], x[:, :, 3:], torch.empty(2, 4, 6, 16)[:, :, 3:]  # at the offset of k
        assert overlaps(x, k) and overlaps(x[:, :, 3:5], k)
        assert not any(overlaps(a, b) for a, b in ((q, k), (q, other), (other, q), (k, other)))
        fusewise.rope_(q, k, inv_freq=torch.empty(8))
        with pytest.raises(ValueError, match="k must not overlap q"):
            fusewise.rope_(q, x[:, :, 2:], inv_freq=torch.empty(8))
        fusewise.rope_(q, inv_freq=torch.empty(8))
        with pytest.raises(ValueError, match="q must not overlap inv_freq"):  # in sizes the call that was valid
            fusewise.rope_(q, inv_freq=x.view(-1)[:8])


def test_neighbours_in_packed_memory_do_not_overlap() -> None:
    """Address ranges interleave but elements do not overlap: every layout of packed qkv is accepted."""
    qkv = torch.randn(2, 4, 6, 16)
    assert not overlaps(qkv[:, :, :3], qkv[:, :, 3:5])
    assert not overlaps(qkv[..., :8], qkv[..., 8:])
    assert not overlaps(qkv[:, ::2], qkv[:, 1::2])
    assert overlaps(qkv[:, ::2], qkv[:, 2:])
    assert overlaps(qkv, qkv[1:, 3:, 5:, 15:])
    assert not overlaps(qkv[:0], qkv)
    large = torch.empty(2, 4096, 48, 128, device="meta")
    assert not overlaps(large[..., :64], large[..., 64:]) and not overlaps(large[:, :, :32], large[:, :, 32:40])
    windows = qkv.as_strided((3, 3), (4, 4))  # to element 16, by equal strides
    assert overlaps(windows, qkv[0, 0, 1, :1]) and not overlaps(windows, qkv[0, 0, 1, 1:])
    assert not overlaps_itself(qkv.permute(3, 1, 0, 2))
    double, (_, second, third, _) = qkv.view(torch.float64)[0, 0, 0, 0], qkv[0, 0, 0, :4]
    assert overlaps(double, second) and overlaps(second, double)  # a part of an element
    assert not overlaps(double, third) and not overlaps(third, double)
    eighth, ninth = qkv.view(torch.uint8)[0, 0, 0, 7:9]
    assert overlaps(double, eighth) and overlaps(eighth, double)
    assert not overlaps(double, ninth) and not overlaps(ninth, double)


def test_nothing_is_written_when_a_later_argument_is_wrong() -> None:
    """Validation completes before the first write, even if only the last argument is invalid."""
    q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 4, 1, 16)
    for wrong in (
        {"impl": "nosuch"},
        {"scale": 2.0},
        {"positions": torch.zeros(3, dtype=torch.int64)},
        {"rotary_start": 2},
    ):
        refused((TypeError, ValueError), "^rope_: ", q, lambda wrong=wrong: fusewise.rope_(q, k, **{**TABLE, **wrong}))  # type: ignore[arg-type]


@every_place
def test_into_outputs_records_no_gradient(place: Place) -> None:
    kwargs = table(place)
    q = torch.randn(1, 4, 2, 16, device=place.device).requires_grad_()
    out = torch.empty_like(q.detach())
    refused(ValueError, r"^rope: out must be None where a gradient is wanted, got out=; call rope without out= or under",
            out, lambda: fusewise.rope(q, **kwargs, out=out))  # fmt: skip
    with torch.no_grad():
        assert fusewise.rope(q, **kwargs, out=out) is out
    assert_bits(out, fusewise.rope(q.detach(), **kwargs))


def test_what_was_apart_once_is_looked_at_again_elsewhere() -> None:
    """Cached checks depend on memory: the same shapes on other memory are checked again, and errors are not cached."""
    memory = torch.randn(3 * 2 * 8 * 4 * 16)
    q, angles = memory[: 2 * 8 * 4 * 16].view(2, 8, 4, 16), torch.randn(8, 8)
    shared = memory[-8 * 8 :].view(8, 8)
    for _ in range(2):
        fusewise.rope_(q, cos=angles.cos(), sin=angles.sin(), impl="reference")
        fusewise.rope_(q, cos=shared, sin=angles, impl="reference")
        with pytest.raises(ValueError, match="q must not overlap cos, which is read"):
            fusewise.rope_(memory[-2 * 8 * 4 * 16 :].view(2, 8, 4, 16), cos=shared, sin=angles, impl="reference")


def test_what_is_read_twice_may_not_be_written() -> None:
    """The same three tensors, with one more of them written."""
    q, table = torch.randn(4, 2, 8), torch.rand(4, 4)
    rest = [None] * (len(DEFAULTS) - 2)
    check_written("rope_", (q,), (table, table, *rest))
    with pytest.raises(ValueError, match="k must not overlap cos, which is read"):
        check_written("rope_", (q, table), (table, None, *rest))
