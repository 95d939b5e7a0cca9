"""RoPE as operators of torch: opcheck, fake and meta tensors, torch.compile, torch.export."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import fusewise
from fusewise.ops._register import _COPIES_WRONGLY

from .support import Operators, Place, assert_bits, make_table, places, require

# torch.compile itself makes an instance of autograd.Function where it traces one.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

# An implementation is nothing that a trace sees: two stand for all.
on_the_cpu = pytest.mark.parametrize("impl", ["reference", "cpu"])

TABLE = make_table("half", 8, 2, torch.float32)
COS, SIN = TABLE["cos"], TABLE["sin"]
FREQ = make_table("inv_freq", 8, 2, torch.float32)["inv_freq"]


@pytest.fixture(autouse=True)
def _cold() -> None:
    torch._dynamo.reset()


def tensors(requires_grad: bool = False, tokens: int = 6) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, tokens, 4, 16), torch.randn(2, tokens, 2, 16)
    return q.requires_grad_(requires_grad), k.requires_grad_(requires_grad)


OPERATORS = ["rope", "rope_qk", "rope_out", "rope_qk_out", "rope_", "rope_qk_"]
SPECS: dict[str, tuple[Any, ...]] = {  # the arguments after the rotated tensors, without the implementation
    "table": (COS, SIN, None, None, None, 3, ""),
    "fused-transposed": (torch.cat((COS, SIN), -1), None, None, None, None, 0, "pairing=interleaved_to_half table=fused inverse=True"),
    "frequencies-ids": (FREQ, None, torch.arange(6), None, None, 0, "table=inv_freq scale=1.5"),
    "offsets-partial": (COS[:, :3], SIN[:, :3], None, torch.tensor([0, 7]), None, 0, "rotary_dim=6 rotary_start=-6"),
}  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str, spec: str) -> None:
    """Schema, autograd registration, fake tensor, and the same under aot_dispatch with dynamic shapes."""
    q, k = tensors()
    xs = (q, k) if "qk" in name else (q,)
    outs: tuple[Any, ...] = ()
    if "out" in name:
        outs = tuple(torch.empty_like(x) for x in xs)
    elif not name.endswith("_"):
        outs = tuple([] for _ in xs)
    torch.library.opcheck(getattr(torch.ops.fusewise, name).default, (*xs, *SPECS[spec], "reference", *outs))


def test_opcheck_with_strides() -> None:
    q, _ = tensors()
    strides = list(q.transpose(1, 2).contiguous().transpose(1, 2).stride())
    y = torch.ops.fusewise.rope(q, *SPECS["table"], "reference", strides)
    assert list(y.stride()) == strides
    torch.library.opcheck(torch.ops.fusewise.rope.default, (q, *SPECS["table"], "reference", strides))


@pytest.mark.parametrize("dims", [(0, 1), (1, 2), None])
def test_fake_and_meta_tensors(dims: tuple[int, int] | None) -> None:
    """Shape, strides, dtype and device without a byte of data."""
    q, k = (x if dims is None else x.transpose(*dims) for x in tensors())
    layout = {None: "bshd", (0, 1): "sbhd", (1, 2): "bhsd"}[dims]
    real = fusewise.rope(q, k, **TABLE, layout=layout)
    meta = fusewise.rope(q.to("meta"), k.to("meta"), cos=COS.to("meta"), sin=SIN.to("meta"), layout=layout)
    with FakeTensorMode() as mode:
        fake = fusewise.rope(
            *(mode.from_tensor(x) for x in (q, k)), cos=mode.from_tensor(COS), sin=mode.from_tensor(SIN), layout=layout
        )
        fusewise.rope_(mode.from_tensor(q), cos=mode.from_tensor(COS), sin=mode.from_tensor(SIN), layout=layout)
    for r, *others in zip(real, meta, fake, strict=True):
        for other in others:
            assert (other.shape, other.stride(), other.dtype) == (r.shape, r.stride(), r.dtype)
    assert meta[0].is_meta


COLD = """
import torch, fusewise
q, k = torch.randn(2, 6, 4, 16), torch.randn(2, 6, 2, 16)
inv_freq = 10000.0 ** -(torch.arange(0, 16, 2) / 16)

@torch.compile(fullgraph=True, backend={backend!r})
def f(q, k):
    y, z = fusewise.rope(q * 2, k, inv_freq=inv_freq)
    return y + 1, z

leaves = q.requires_grad_(), k.requires_grad_()
y, z = f(*leaves)
(y.sum() + z.square().sum()).backward()
got = y.detach(), z.detach(), q.grad, k.grad
leaves = q.detach().requires_grad_(), k.detach().requires_grad_()
y, z = fusewise.rope(leaves[0] * 2, leaves[1], inv_freq=inv_freq)
y = y + 1
want = y.detach(), z.detach(), *torch.autograd.grad(y.sum() + z.square().sum(), leaves)
for a, b in zip(got, want):
    assert torch.equal(a, b), (a - b).abs().max()
print("right")
"""


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_is_the_very_first_call(backend: str) -> None:
    """In a fresh process, before the operator or anything behind it has run: forward, backward, no graph break."""
    done = subprocess.run(
        [sys.executable, "-c", COLD.format(backend=backend)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "right\n"


CALLS: dict[str, dict[str, Any]] = {
    "table": TABLE,
    "duplicated-interleaved": {**make_table("duplicated", 8, 2, torch.float32, "interleaved"), "pairing": "interleaved"},
    "to-half": {**make_table("fused", 4, 2, torch.float32), "pairing": "interleaved_to_half", "rotary_dim": 8, "rotary_start": -8},
    "frequencies": {"inv_freq": FREQ, "scale": 1.5},
    "offset": {**TABLE, "offset": 3},
    "offsets": {**TABLE, "offset": torch.tensor([3, 9])},
    "ids": {**TABLE, "positions": torch.tensor([5, 1, 63, 64, 0, 2])},
    "sections": {**TABLE, "positions": torch.arange(36).view(3, 2, 6), "sections": (2, 3, 3), "sections_interleaved": True},
    "context-parallel": {**TABLE, "context_parallel": (1, 2)},
    "inverse": {**TABLE, "inverse": True},
}  # fmt: skip


# An implementation is nothing that a trace sees: one of them has numbers for shapes as well as symbols.
@pytest.mark.parametrize(("impl", "dynamic"), [("cpu", False), ("cpu", True), ("reference", True)])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_gives_the_same_bits(name: str, impl: str, dynamic: bool) -> None:
    """Forward and backward, whole graph."""
    require(Place(impl, "cpu"))
    kwargs = {**CALLS[name], "impl": impl}
    leaves = tensors(requires_grad=True)
    want = fusewise.rope(*leaves, **kwargs)
    dys = tuple(torch.randn_like(y) for y in want)
    gradients = torch.autograd.grad(want, leaves, dys)
    f = torch.compile(lambda q, k: fusewise.rope(q, k, **kwargs), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    ys = f(*leaves)
    for a, b in zip((*ys, *torch.autograd.grad(ys, leaves, dys)), (*want, *gradients), strict=True):
        assert_bits(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("wanted", [0, 1])
def test_compiled_with_one_that_requires_no_grad(wanted: int) -> None:
    xs = tuple(x.requires_grad_(i == wanted) for i, x in enumerate(tensors()))
    ys = torch.compile(lambda q, k: fusewise.rope(q, k, **TABLE), fullgraph=True, backend="aot_eager")(*xs)
    assert [y.requires_grad for y in ys] == [i == wanted for i in range(2)]
    for got, want in zip(ys, fusewise.rope(*xs, **TABLE), strict=True):
        assert_bits(got, want)
    dy = torch.randn_like(xs[wanted])
    (want,) = torch.autograd.grad(fusewise.rope(xs[wanted], **TABLE), xs[wanted], dy)
    assert_bits(torch.autograd.grad(ys[wanted], xs[wanted], dy)[0], want)


def test_compiled_packed_sequences() -> None:
    x = torch.randn(11, 3, 16)
    cu_seqlens = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    kwargs: dict[str, Any] = {**TABLE, "layout": "thd", "cu_seqlens": cu_seqlens}
    f = torch.compile(lambda x: fusewise.rope(x, **kwargs), fullgraph=True, backend="aot_eager", dynamic=True)
    assert_bits(f(x), fusewise.rope(x, **kwargs))


@pytest.mark.parametrize("table", ["running", "ids", "frequencies"])
def test_no_recompilation_while_the_sequence_grows(table: str) -> None:
    counter = CompileCounter()
    f = torch.compile(fusewise.rope, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 6, 17, 64, 33, 2):
        kwargs: dict[str, Any] = TABLE if table != "frequencies" else {"inv_freq": FREQ}
        if table == "ids":
            kwargs = {**kwargs, "positions": torch.arange(tokens)}
        q, k = tensors(tokens=tokens)
        for a, b in zip(f(q, k, **kwargs), fusewise.rope(q, k, **kwargs), strict=True):
            assert_bits(a, b)
    assert counter.frame_count == 1


def test_no_recompilation_in_a_decode_loop() -> None:
    """The offset is a symbol: one token at a time, one graph."""
    counter = CompileCounter()
    f = torch.compile(
        lambda q, offset: fusewise.rope(q, **TABLE, offset=offset), fullgraph=True, dynamic=True, backend=counter
    )
    q, _ = tensors(tokens=1)
    for offset in (7, 8, 9, 40, 63):
        assert_bits(f(q, offset), fusewise.rope(q, **TABLE, offset=offset))
    assert counter.frame_count == 1


def test_compiled_without_gradients_takes_a_table_that_requires_one() -> None:
    q, k = tensors()
    frequencies = torch.nn.Parameter(FREQ.clone())
    f = torch.compile(fusewise.rope, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for a, b in zip(f(q, k, inv_freq=frequencies), fusewise.rope(q, k, inv_freq=FREQ), strict=True):
            assert_bits(a, b)
    with pytest.raises(Exception, match="rope: inv_freq must not require grad"):
        f(q, k, inv_freq=frequencies)


def test_compiled_errors_are_those_of_the_call() -> None:
    q, k = tensors()
    f = torch.compile(fusewise.rope, backend="eager")
    with pytest.raises(ValueError, match=r"^rope: rotary_dim must be even"):
        f(q, k, **TABLE, rotary_dim=7)


@on_the_cpu
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


def test_compiled_in_place_of_packed_views() -> None:
    qkv = torch.randn(2, 6, 7, 16)
    want = torch.cat((*fusewise.rope(qkv[:, :, :4], qkv[:, :, 4:6], **TABLE), qkv[:, :, 6:]), 2)

    def f(qkv: Tensor) -> None:
        fusewise.rope_(qkv[:, :, :4], qkv[:, :, 4:6], **TABLE)

    torch.compile(f, fullgraph=True, backend="aot_eager")(qkv)
    assert_bits(qkv, want)


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
    """A graph may not serve what it was not made for."""
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
    """torch.compile would leave the mutation out of the graph of gradients and say nothing: a whole graph is refused, and
    where the graph may break, the call runs outside it and is right."""
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


CUBED = torch.randn(2, 6, 4, 16)


def cubed(q: Tensor) -> Tensor:
    return (fusewise.rope(q, cos=COS, sin=SIN) ** 3).sum()


@pytest.mark.parametrize(
    "transformed",
    [
        torch.func.grad(cubed),
        torch.func.grad(lambda q: (torch.func.grad(cubed)(q) ** 2).sum()),
        torch.func.vmap(torch.func.grad(lambda x: cubed(x[None]))),
        lambda q: torch.func.vjp(cubed, q)[1](torch.tensor(2.0))[0],
        lambda q: torch.func.jvp(lambda q: fusewise.rope(q, cos=COS, sin=SIN), (q,), (CUBED,))[1],
    ],
    ids=["grad", "grad-grad", "vmap-grad", "vjp", "jvp"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, where it traces jvp
def test_compiled_transforms(transformed: Any) -> None:
    """An operator in a transform that is traced would be a constant: gradients of zero, without a word."""
    q = torch.randn(2, 6, 4, 16)
    found = torch.compile(transformed, backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(found, transformed(q), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_compiled_transforms_do_not_recompile_while_the_sequence_grows(pairing: Any) -> None:
    counter = CompileCounter()
    mapped = torch.func.vmap(lambda q: fusewise.rope(q, inv_freq=FREQ, pairing=pairing))
    f = torch.compile(mapped, fullgraph=True, backend=counter)
    for tokens in (5, 6, 17, 64):
        q = torch.randn(3, 2, tokens, 4, 16)
        torch.testing.assert_close(f(q), mapped(q))
    assert counter.frame_count <= 2  # one for the first length, one for all


def test_compiled_in_place_under_a_transform_is_refused() -> None:
    def changed(q: Tensor) -> Tensor:
        y = q * 1.0
        return (fusewise.rope_(y, cos=COS, sin=SIN) ** 3).sum()

    with pytest.raises(Exception, match=r"rope_: q and k must not require grad|Observed exception"):
        torch.compile(torch.func.grad(changed), backend="aot_eager", fullgraph=True)(torch.randn(2, 6, 4, 16))


def test_compiled_into_outputs() -> None:
    q, k = tensors()
    outs = torch.empty_like(q), torch.empty_like(k)
    f = torch.compile(lambda q, k, *outs: fusewise.rope(q, k, **TABLE, out=outs), fullgraph=True, backend="aot_eager")
    f(q, k, *outs)
    for out, y in zip(outs, fusewise.rope(q, k, **TABLE), strict=True):
        assert_bits(out, y)


def test_compiled_with_another_operation_in_between() -> None:
    """The graph keeps the strides that the operator was given: a transposed q, its gradient alike."""
    q, k = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors())

    def f(q: Tensor, k: Tensor) -> Tensor:
        y, z = fusewise.rope(q.cos(), k, **TABLE)
        return torch.einsum("bthd,bshd->bhts", y[:, :, :2], z)

    dy = torch.randn(2, 2, 6, 6)
    want = torch.autograd.grad(f(q, k), (q, k), dy)
    got = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(q, k), (q, k), dy)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


class Rotation(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Any:
        return fusewise.rope(q, k, inv_freq=FREQ)


def test_export_keeps_the_operator() -> None:
    q, k = tensors()
    tokens = torch.export.Dim("tokens", min=2, max=1024)
    program = torch.export.export(Rotation(), (q, k), dynamic_shapes={"q": {1: tokens}, "k": {1: tokens}})
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "fusewise.rope_qk.default" in names
    q, k = tensors(tokens=9)
    for a, b in zip(program.module()(q, k), fusewise.rope(q, k, inv_freq=FREQ), strict=True):
        assert_bits(a, b)


class TableRotation(torch.nn.Module):
    def forward(self, q: Tensor, cos: Tensor, sin: Tensor, offset: Tensor) -> Any:
        return fusewise.rope(q, cos=cos, sin=sin, offset=offset)


def test_an_exported_program_refuses_strides_that_it_was_not_validated_for() -> None:
    """It looks at shapes alone; memory must not be read where there is none."""
    q, cos, sin, offset = tensors()[0], TABLE["cos"], TABLE["sin"], torch.tensor([3, 5])
    program = torch.export.export(TableRotation(), (q, cos, sin, offset)).module()
    assert_bits(program(q, cos, sin, offset), fusewise.rope(q, cos=cos, sin=sin, offset=offset))
    for _ in range(2):
        with pytest.raises(ValueError, match="rope: q and k must have a contiguous last dimension"):
            program(q.mT.contiguous().mT, cos, sin, offset)
        with pytest.raises(ValueError, match="rope: sin must have the strides of cos"):
            program(q, cos, sin.mT.contiguous().mT, offset)
        with pytest.raises(ValueError, match="rope: offset must have a contiguous last dimension"):
            program(q, cos, sin, offset[:1].expand(2))


@pytest.mark.parametrize("place", [p for p in places(interpreted=False) if p.values[0].device == "cpu"])
def test_a_call_is_one_operator(place: Place) -> None:
    """q and k out of place, into outputs, in place: one operator, and nothing before or after it."""
    require(place)
    q, k = tensors()
    outs = torch.empty_like(q), torch.empty_like(k)
    for expected, call in {
        "fusewise::rope_qk": lambda: fusewise.rope(q, k, **TABLE, impl=place.impl),
        "fusewise::rope": lambda: fusewise.rope(q, **TABLE, impl=place.impl),
        "fusewise::rope_qk_out": lambda: fusewise.rope(q, k, **TABLE, impl=place.impl, out=outs),
        "fusewise::rope_qk_": lambda: fusewise.rope_(q, k, **TABLE, impl=place.impl),
        "fusewise::rope_": lambda: fusewise.rope_(q, **TABLE, impl=place.impl),
    }.items():
        with Operators() as ran:
            call()
        assert ran.names == {expected: 1}


@pytest.mark.parametrize("into", ["in place", "out"])
def test_compiled_writes_into_parts_of_one_tensor(into: str) -> None:
    """Inputs of a graph that share a storage, of which one does not begin with it: torch 2.11 copies the second one that an
    operator writes to from the wrong place."""
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


def test_a_tensor_in_two_places_of_one_call_compiles() -> None:
    q = tensors(requires_grad=True)[0]

    def tied(q: Tensor) -> Any:
        return fusewise.rope(q, q, cos=COS, sin=COS)

    found, usual = torch.compile(tied, fullgraph=True, backend="aot_eager")(q), tied(q)
    dys = torch.randn_like(q), torch.randn_like(q)
    for a, b in zip(
        (*found, *torch.autograd.grad(found, q, dys)), (*usual, *torch.autograd.grad(usual, q, dys)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_one_pair_compiles_where_sizes_are_symbols() -> None:
    q, cos, sin = torch.randn(2, 3, 2, 2), torch.randn(9, 1), torch.randn(9, 1)
    compiled = torch.compile(
        lambda q, cos, sin: fusewise.rope(q, cos=cos, sin=sin), fullgraph=True, backend="aot_eager", dynamic=True
    )
    torch.testing.assert_close(compiled(q, cos, sin), fusewise.rope(q, cos=cos, sin=sin))
