"""What the C++ fast path of repeated calls refuses or leaves to Python: the second call raises what the first would."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusewise

from .host_calls import TABLE, empty_cache, into, qk, recalled  # noqa: F401 (a fixture)
from .support import assert_bits


def test_positions_and_an_offset_are_refused_the_second_time_too() -> None:
    q, k = qk()
    positions = torch.arange(4)
    fusewise.rope(q, k, **TABLE, positions=positions)
    with pytest.raises(ValueError, match="positions must be None when offset is given"):
        fusewise.rope(q, k, **TABLE, positions=positions, offset=1)


def test_what_equals_an_option_but_is_of_another_type_is_refused_the_second_time_too() -> None:
    q, k = qk()
    fusewise.rope(q, k, **TABLE, rotary_dim=16, rotary_start=0)
    for options in (
        {"rotary_dim": 16, "rotary_start": 0.0},
        {"rotary_dim": 16.0},
        {"rotary_dim": 16, "rotary_start": False},
        {"rotary_dim": 16, "inverse": 0},
    ):
        with pytest.raises(TypeError, match=r"must be (an int|a bool)"):
            fusewise.rope(q, k, **TABLE, **options)


def test_an_option_and_a_nul_is_refused_the_second_time_too() -> None:
    q, k = qk()
    fusewise.rope(q, k, **TABLE, pairing="half")
    with pytest.raises(ValueError, match="pairing must be one of"):
        fusewise.rope(q, k, **TABLE, pairing="half\0")


class Named(Tensor):
    pass


def test_tensors_that_are_not_plain_are_pythons() -> None:
    q, k = qk()
    fusewise.rope(q, k, **TABLE)
    fusewise.rope_(q, k, **TABLE)
    negative = torch.randn(2, 4, 3, 16, dtype=torch.complex64).conj().imag
    for other in (q.as_subclass(Named), negative, q.to("meta"), q.to_sparse(), [1.0], None):
        for function in (fusewise.rope, fusewise.rope_):
            assert recalled(function, other, k, **TABLE) is None
    assert recalled(fusewise.rope, torch.nn.Parameter(q), k, **TABLE) is not None
    grown = {name: x.clone().requires_grad_() for name, x in TABLE.items()}
    assert recalled(fusewise.rope, q, k, **grown) is None


def test_what_may_not_be_written_to_is_refused_the_second_time_too() -> None:
    """Same sizes and strides, but overlapping, a leaf, a view of a leaf, or an inference tensor."""
    storage = torch.randn(2, 4, 4, 16)
    q, k = storage[:, :, :3], storage[:, :, 3:]
    fusewise.rope_(q, k, **TABLE)
    assert recalled(fusewise.rope_, q, k, **TABLE) is not None
    before = storage.clone()
    with pytest.raises(ValueError, match="k must not overlap q"):
        fusewise.rope_(q, storage[:, :, 2:3], **TABLE)
    leaf = torch.randn(2, 4, 4, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="view of a leaf"):
        fusewise.rope_(leaf[:, :, :3], leaf[:, :, 3:], **TABLE)
    q, k = qk()
    fusewise.rope_(q, k, **TABLE)
    with pytest.raises(RuntimeError, match="leaf"):
        fusewise.rope_(q.detach().requires_grad_(), k, **TABLE)
    with torch.inference_mode():
        inferred = torch.randn(2, 4, 3, 16)
        fusewise.rope_(inferred, **TABLE)
        assert recalled(fusewise.rope_, inferred, **TABLE) is inferred
    with pytest.raises(RuntimeError, match="inference tensor"):
        fusewise.rope_(inferred, **TABLE)
    assert_bits(storage, before)


def test_neighbours_in_one_storage_are_told_by_their_distance() -> None:
    """A table behind q in the same storage is accepted; one that overlaps q is not."""
    storage = torch.cat((torch.randn(2 * 4 * 3 * 16), TABLE["cos"].flatten(), TABLE["sin"].flatten()))
    rows = 2 * TABLE["cos"].numel()
    cos, sin = storage[-rows:].view(2, *TABLE["cos"].shape)

    def q(first: int) -> Tensor:
        return storage[first : first + 384].view(2, 4, 3, 16)

    for _ in range(2):
        fusewise.rope_(q(0), cos=cos, sin=sin)
    assert recalled(fusewise.rope_, q(0), cos=cos, sin=sin) is not None
    before = storage.clone()
    for first in (8, 384):
        assert recalled(fusewise.rope_, q(first), cos=cos, sin=sin) is None
        with pytest.raises(ValueError, match="q must not overlap cos, which is read"):
            fusewise.rope_(q(first), cos=cos, sin=sin)
    assert_bits(storage, before)


def test_outputs_that_may_not_be_written_to_are_refused_the_second_time_too() -> None:
    """Same sizes and strides, but overlapping each other or an input, requiring grad, or of another type."""
    q, k = qk()
    storage = torch.zeros(2, 4, 5, 16)
    outs = storage[:, :, :3], storage[:, :, 3:4]
    for _ in range(2):
        fusewise.rope(q, k, **TABLE, out=outs)
    assert into(outs, q, k, **TABLE) is outs
    assert storage[:, :, 4].eq(0).all()
    before = storage.clone()
    with pytest.raises(ValueError, match="out for k must not overlap out for q"):
        fusewise.rope(q, k, **TABLE, out=(outs[0], storage[:, :, 2:3]))
    with pytest.raises(ValueError, match="out for q must not overlap an input"):
        fusewise.rope(outs[0], k, **TABLE, out=outs)
    with pytest.raises(ValueError, match="not require grad"):
        fusewise.rope(q, k, **TABLE, out=(outs[0], torch.zeros(2, 4, 1, 16, requires_grad=True)))
    with pytest.raises(ValueError, match="None where a gradient is wanted"):
        fusewise.rope(q.requires_grad_(), k, **TABLE, out=outs)
    q.requires_grad_(False)
    with pytest.raises(TypeError, match="be 2 tensor"):
        fusewise.rope(q, k, **TABLE, out=outs[0])
    with pytest.raises(ValueError, match="have the shape of q"):
        fusewise.rope(q, k, **TABLE, out=(outs[1], outs[1]))
    with torch.inference_mode():
        inferred = torch.zeros(2, 4, 3, 16), torch.zeros(2, 4, 1, 16)
        for _ in range(2):
            fusewise.rope(q, k, **TABLE, out=inferred)
    with pytest.raises(RuntimeError, match="inference tensor"):
        fusewise.rope(q, k, **TABLE, out=inferred)
    assert_bits(storage, before)
    for y, z in zip(fusewise.rope(q, k, **TABLE, out=list(outs)), outs, strict=True):
        assert y is z
