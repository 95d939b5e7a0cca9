"""In-place and out= RoPE under torch.compile: mutations that a graph could get wrong or drop are correct or rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import fusewise
from fusewise.ops._register import _COPIES_WRONGLY

from .support import Place, assert_bits, require
from .test_compile import COS, SIN, TABLE, _cold, tensors  # noqa: F401 (a fixture)

# torch.compile instantiates autograd.Function when it traces one.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


# A trace does not see the implementation, so two represent all.
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_compiled_in_place_without_gradients(impl: str) -> None:
    require(Place(impl, "cpu"))
    q, k = tensors()
    want = fusewise.rope(q, k, **TABLE, impl=impl)

    def f(q: Tensor, k: Tensor) -> Tensor:
        y, z = fusewise.rope_(q, k, **TABLE, impl=impl)
        return y.sum() + z.sum()

    total = torch.compile(f, fullgraph=True, backend="aot_eager")(q, k)
    assert_bits(q, want[0])
    assert_bits(k, want[1])
    assert_bits(total, want[0].sum() + want[1].sum())


def test_compiled_in_place_where_the_length_depends_on_data() -> None:
    q, k = tensors()

    def f(kept: Tensor) -> tuple[Tensor, Tensor]:
        return fusewise.rope_(q[:, kept], k[:, kept], inv_freq=torch.ones(8))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        for count in (3, 0):
            kept = torch.arange(6) < count
            for y, want in zip(compiled(kept), f(kept), strict=True):
                assert_bits(y, want)


def test_compiled_in_place_of_packed_views() -> None:
    qkv = torch.randn(2, 6, 7, 16)
    want = torch.cat((*fusewise.rope(qkv[:, :, :4], qkv[:, :, 4:6], **TABLE), qkv[:, :, 6:]), 2)

    def f(qkv: Tensor) -> None:
        fusewise.rope_(qkv[:, :, :4], qkv[:, :, 4:6], **TABLE)

    torch.compile(f, fullgraph=True, backend="aot_eager")(qkv)
    assert_bits(qkv, want)


def test_compiled_into_outputs() -> None:
    q, k = tensors()
    outs = torch.empty_like(q), torch.empty_like(k)
    f = torch.compile(lambda q, k, *outs: fusewise.rope(q, k, **TABLE, out=outs), fullgraph=True, backend="aot_eager")
    f(q, k, *outs)
    for out, y in zip(outs, fusewise.rope(q, k, **TABLE), strict=True):
        assert_bits(out, y)


@pytest.mark.parametrize("into", ["in place", "out"])
def test_compiled_writes_into_parts_of_one_tensor(into: str) -> None:
    """Graph inputs that share a storage, one with a storage offset: torch 2.11 copies the second tensor that an operator
    mutates from the wrong offset."""
    q, k, both = torch.randn(2, 6, 4, 16), torch.randn(2, 6, 4, 16), torch.zeros(2, 2, 6, 4, 16)

    def write(y: torch.Tensor, z: torch.Tensor) -> None:
        if into == "in place":
            fusewise.rope_(y, z, **TABLE)
        else:
            fusewise.rope(q, k, **TABLE, out=(y, z))

    both.copy_(torch.stack((q, k)))
    with torch.no_grad():
        torch.compile(write, fullgraph=True)(both[0], both[1])
    for y, z in zip(both, fusewise.rope(q, k, **TABLE), strict=True):
        torch.testing.assert_close(y, z, rtol=0, atol=0)


PARTS = {
    "in-place": lambda x: fusewise.rope_(
        x[..., :4, :], x[..., 4:6, :], **TABLE, layout="bshd" if x.dim() == 4 else "thd"
    ),
    "one-in-place": lambda x: fusewise.rope_(x[0, :, 1:4] if x.dim() == 4 else x[:, 1:4], **TABLE, layout="thd"),
    "out": lambda x: fusewise.rope(
        x[..., 4:6, :] * 1, **TABLE, layout="bshd" if x.dim() == 4 else "thd", out=x[..., :2, :]
    ),
}
INPUTS = {
    "entry": lambda x: x[1, None],
    "entries": lambda x: x[1:],
    "tokens": lambda x: x[:, 2:],
    "packed-tokens": lambda x: x[1, 2:],
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("place", INPUTS)
@pytest.mark.parametrize("write", PARTS)
def test_compiled_writes_into_parts_of_an_input_with_a_storage_offset(write: str, place: str, backend: str) -> None:
    """Torch 2.13 takes the storage offset of a part for its start within the graph's input."""
    x = torch.randn(3, 8, 7, 16)
    want = x.clone()
    PARTS[write](INPUTS[place](want))
    with torch.no_grad():
        torch.compile(PARTS[write], fullgraph=True, backend=backend)(INPUTS[place](x))
    torch.testing.assert_close(x, want, rtol=0, atol=0)


GROWING = {
    "heads": lambda x: fusewise.rope_(x[:, :4], x[:, 4:6], **TABLE, layout="bhsd"),
    "entries": lambda x: fusewise.rope(x[:1] * 1, **TABLE, layout="bhsd", out=x[1:]),
    "tokens": lambda x: fusewise.rope_(x[:, :, -2:], **TABLE, layout="bhsd"),
}


@pytest.mark.parametrize("write", GROWING)
def test_compiled_writes_into_parts_at_a_distance_that_grows(write: str) -> None:
    """Torch 2.13 lowers a storage offset that is not a constant to 0."""
    f = torch.compile(GROWING[write], fullgraph=True, dynamic=True, backend="inductor")
    for tokens in (4, 8):
        x = torch.randn(2, 7, tokens, 16)
        want = x.clone()
        GROWING[write](want)
        # Torch's caches do not know of lowerings.
        with (
            torch.no_grad(),
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            f(x)
        torch.testing.assert_close(x, want, rtol=0, atol=0)


SHARED = {
    "q must not have elements that share memory": lambda x: fusewise.rope_(x[:, :, :1].expand(-1, -1, 3, -1), **TABLE),
    "k must not overlap q": lambda x: fusewise.rope_(x[:, :, :3], x[:, :, 2:], **TABLE),
    "out for q must not have elements": lambda x: fusewise.rope(
        x[:, :, :2] * 1, **TABLE, out=x[:, :, :1].expand(-1, -1, 2, -1)
    ),
    "out for k must not overlap out for q": lambda x: fusewise.rope(
        x[:, :, :2] * 1, x[:, :, 2:] * 1, **TABLE, out=(x[:, :, :2], x[:, :, 1:3])
    ),
}


@pytest.mark.skipif(_COPIES_WRONGLY, reason="before torch 2.13 a graph writes to no tensor of the caller")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("message", SHARED)
def test_compiled_writes_into_shared_memory_are_refused(message: str, dynamic: bool) -> None:
    f, x = SHARED[message], torch.randn(2, 6, 4, 16)
    with pytest.raises(Exception, match=f"rope_?: {message}"):
        torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=dynamic)(x)
    with pytest.raises(ValueError, match=f"^rope_?: {message}"):
        f(x)


@pytest.mark.skipif(_COPIES_WRONGLY, reason="before torch 2.13 a graph writes to no tensor of the caller")
def test_compiled_for_tensors_apart_refuses_those_that_share() -> None:
    """A graph must not accept inputs it was not compiled for."""
    x = torch.randn(2, 6, 4, 16)
    f = torch.compile(lambda q, k: fusewise.rope_(q, k, **TABLE), backend="aot_eager")
    f(x[:, :, :3].clone(), x[:, :, 2:].clone())
    with pytest.raises(Exception, match="rope_: k must not overlap q"):
        f(x[:, :, :3], x[:, :, 2:])


def test_no_recompilation_in_place_while_the_sequence_grows() -> None:
    counter = CompileCounter()
    f = torch.compile(
        lambda x: fusewise.rope_(x[:, :, :3], x[:, :, 3:], **TABLE), fullgraph=True, dynamic=True, backend=counter
    )
    for tokens in (5, 6, 17, 64, 33, 2):
        x = torch.randn(2, tokens, 4, 16)
        want = fusewise.rope(x, **TABLE)
        f(x)
        assert_bits(x, want)
    assert counter.frame_count == 1


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # dynamo looks at it
def test_compiled_in_place_with_gradients_is_refused() -> None:
    """torch.compile would silently drop the mutation from the autograd graph: fullgraph raises an error; otherwise the graph
    breaks and the call runs eagerly and is correct."""
    leaves = tensors(requires_grad=True)
    dys = tuple(torch.randn_like(x) for x in leaves)

    def f(q: Tensor, k: Tensor) -> Any:
        return fusewise.rope_(q * 1, k * 1, **TABLE)

    with pytest.raises(
        Exception, match=r"rope_: q and k must not require grad under torch.compile, got requires_grad=True; use rope"
    ):
        torch.compile(f, fullgraph=True, backend="aot_eager")(*leaves)
    ys = torch.compile(f, backend="aot_eager")(*leaves)
    want = torch.autograd.grad(fusewise.rope(*leaves, **TABLE), leaves, dys)
    for a, b in zip(torch.autograd.grad(ys, leaves, dys), want, strict=True):
        assert_bits(a, b)


def test_compiled_in_place_under_a_transform_is_refused() -> None:
    def changed(q: Tensor) -> Tensor:
        y = q * 1.0
        return (fusewise.rope_(y, cos=COS, sin=SIN) ** 3).sum()

    with pytest.raises(Exception, match=r"rope_: q and k must not require grad|Observed exception"):
        torch.compile(torch.func.grad(changed), backend="aot_eager", fullgraph=True)(torch.randn(2, 6, 4, 16))
