"""RoPE as torch operators: opcheck, fake and meta tensors, torch.export, and one operator per call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusewise

from .support import Operators, Place, assert_bits, places, require
from .test_compile import COS, FREQ, SIN, TABLE, _cold, tensors  # noqa: F401 (a fixture)

# torch.compile instantiates autograd.Function when it traces one.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

OPERATORS = ["rope", "rope_qk", "rope_out", "rope_qk_out", "rope_", "rope_qk_"]
SPECS: dict[str, tuple[Any, ...]] = {  # the arguments after the rotated tensors, except impl
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
    """Shape, strides, dtype and device are right without data."""
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


@pytest.mark.parametrize("place", [p for p in places(interpreted=False) if p.values[0].device == "cpu"])
def test_a_call_is_one_operator(place: Place) -> None:
    """q and k out of place, out=, in place: one operator and no other."""
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
    """An exported program guards only shapes; wrong strides must not cause out-of-bounds reads."""
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
