"""Every invalid argument raises one error in the common form, before anything is written."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import fusewise
from fusewise._shared.memo import Memo
from fusewise.ops.rope_and_cache import _validate

from ..rope.support import RECORDING_NOTHING, assert_bits
from .cases import CASES, Made, make

Change = Callable[[Made], dict[str, Any]]


def replaced(**kwargs: Any) -> Change:
    return lambda made: kwargs


def without(*names: str) -> Change:
    return lambda made: dict.fromkeys(names)


def tensor(name: str, change: Callable[[Tensor], Any]) -> Change:
    def apply(made: Made) -> dict[str, Any]:
        if name in made.kwargs:
            return {name: change(made.kwargs[name])}
        return {name: change(getattr(made, name))}

    return apply


def overlapping(name: str, other: str) -> Change:
    """Replace `name` by a view of the memory of `other`."""

    def apply(made: Made) -> dict[str, Any]:
        x, y = getattr(made, name, made.kwargs.get(name)), getattr(made, other)
        flat = y.untyped_storage()
        return {name: torch.empty(0, dtype=x.dtype).set_(flat, y.storage_offset(), x.shape)}

    return apply


def slots_that_end_in_the_cache(made: Made) -> dict[str, Any]:
    memory = torch.zeros(made.key_cache.numel() + 4)
    return {"key_cache": memory[4:].view(made.key_cache.shape), "slot_mapping": memory.view(torch.int32)[:5]}


# Of the case "hnd": q (5, 4, 16), k and v (5, 2, 16), caches (6, 2, 4, 16), slot_mapping (5,); the change, and the error.
MISTAKES: dict[str, tuple[Change, type[Exception], str]] = {
    "q is no tensor": (replaced(q=1), TypeError, "q must be a torch.Tensor, got int; pass a tensor for q"),
    "no k": (replaced(k=None), TypeError, "k must be a torch.Tensor, got NoneType"),
    "no cache": (replaced(value_cache=None), TypeError, "value_cache must be a torch.Tensor, got NoneType"),
    "cache layout": (replaced(cache_layout="dhn"), ValueError, "cache_layout must be one of nhd, hnd, got 'dhn'"),
    "cache layouts": (replaced(cache_layout=numpy.array(["nhd", "hnd"])), ValueError, r"cache_layout must be one of nhd, hnd, got array\("),
    "layouts": (replaced(layout=numpy.array(["thd", "bshd"])), ValueError, r"layout must be one of .*, got array\("),
    "combined cache": (tensor("key_cache", lambda x: x[None]), ValueError, r"key_cache must have 4 dimensions, \(blocks, heads, block_size, D\), got \(1, 6, 2, 4, 16\); take key_cache out"),
    "flat width": (tensor("q", lambda x: x.flatten(1)[:, :60]), ValueError, r"q must have heads as wide as those of key_cache, 16, in its 60 features, got \(5, 60\)"),
    "flat stride": (tensor("v", lambda x: x.flatten(1).repeat_interleave(2, 1)[:, ::2]), ValueError, r"v must have a contiguous last dimension \(stride 1\), got strides \(64, 2\); call .contiguous\(\)"),
    "rope's own": (replaced(rotary_dim=3), ValueError, "rotary_dim must be even and from 2 to head_dim = 16, got 3"),
    "k of other tokens": (tensor("k", lambda x: x[:4]), ValueError, "k must have as many tokens as q"),
    "dtype of v": (tensor("v", Tensor.half), TypeError, r"v must have the dtype of k, float32, got float16; call v.to\(torch.float32\)"),
    "device of v": (tensor("v", lambda x: x.to("meta")), ValueError, "v must be on the device of k, cpu, got meta"),
    "sparse v": (tensor("v", Tensor.to_sparse), TypeError, "v must be a strided tensor, got torch.sparse_coo"),
    "negated v": (tensor("v", torch._neg_view), ValueError, "v must not be a lazily negated view"),
    "negated cache": (tensor("value_cache", torch._neg_view), ValueError, "value_cache must not be a lazily negated view"),
    "sparse slots": (tensor("slot_mapping", Tensor.to_sparse), TypeError, "slot_mapping must be a strided tensor, got torch.sparse_coo"),
    "tokens of v": (tensor("v", lambda x: x[:4]), ValueError, r"v must have the tokens and heads of k in layout thd, \(5, 2\) and a width, got \(4, 2, 16\)"),
    "width of v": (tensor("v", lambda x: x.new_zeros(5, 2, 513)), ValueError, "v must have a head_dim from 1 to 512, got 513"),
    "stride of v": (tensor("v", lambda x: x.repeat_interleave(2, -1)[..., ::2]), ValueError, r"v must have a contiguous last dimension \(stride 1\), got strides"),
    "dtype of a cache": (tensor("key_cache", Tensor.double), TypeError, "key_cache must have the dtype of k, float32, got float64; allocate key_cache in that dtype"),
    "fp8 cache": (tensor("value_cache", lambda x: x.to(torch.float8_e4m3fn)), TypeError, "value_cache must have the dtype of v, float32, got float8_e4m3fn; quantised caches are not supported"),
    "device of a cache": (tensor("key_cache", lambda x: x.to("meta")), ValueError, "key_cache must be on the device of k, cpu, got meta"),
    "sparse cache": (tensor("key_cache", Tensor.to_sparse), TypeError, "key_cache must be a strided tensor, got torch.sparse_coo"),
    "heads of a cache": (tensor("key_cache", lambda x: x[:, :1]), ValueError, "key_cache must have the heads of k, 2 of 16 features, got 1 of 16 features; say cache_layout="),
    "width of a cache": (tensor("value_cache", lambda x: x[..., :8]), ValueError, "value_cache must have the heads of v, 2 of 16 features, got 2 of 8 features; say cache_layout="),
    "flat, a cache without features": (lambda made: {"q": made.q.flatten(1), "key_cache": made.key_cache[..., :0]}, ValueError, r"q must have heads as wide as those of key_cache, 0, in its 64 features, got \(5, 64\)"),
    "too large caches": (lambda made: dict.fromkeys(("key_cache", "value_cache"), made.key_cache[:1].expand(2**29, 2, 4, 16)), ValueError, "key_cache must have at most 2147483647 slots, got 2147483648; divide the cache"),
    "layout of the caches": (replaced(cache_layout="nhd"), ValueError, "key_cache must have the heads of k, 2 of 16 features, got 4 of 16 features; say cache_layout="),
    "stride of a cache": (tensor("value_cache", lambda x: x.repeat_interleave(2, -1)[..., ::2]), ValueError, r"value_cache must have a contiguous last dimension \(stride 1\), got strides .*; allocate it with the features of a head last"),
    "unlike caches": (tensor("value_cache", lambda x: x[:5]), ValueError, r"value_cache must have the blocks and slots of key_cache, \(6, 4\), got \(5, 4\)"),
    "slots no tensor": (replaced(slot_mapping=[1]), TypeError, "slot_mapping must be a torch.Tensor, got list"),
    "slots of floats": (tensor("slot_mapping", Tensor.float), TypeError, "slot_mapping must have dtype int32 or int64, got float32"),
    "slots elsewhere": (tensor("slot_mapping", lambda x: x.to("meta")), ValueError, "slot_mapping must be on the device of q, cpu, got meta"),
    "too many slots": (tensor("slot_mapping", lambda x: x.repeat(2)), ValueError, r"slot_mapping must have shape \(5,\), or fewer entries where tokens are padded, got \(10,\); pass a slot a token"),
    "slots in two dimensions": (tensor("slot_mapping", lambda x: x[None]), ValueError, r"slot_mapping must have shape \(5,\), or fewer .* got \(1, 5\)"),
    "slots and a table": (replaced(block_table=torch.zeros(5, 1, dtype=torch.int32)), ValueError, r"block_table must be None where there is a slot_mapping, got \(5, 1\); pass one of them"),
    "slots and no tensor": (replaced(block_table=[1]), TypeError, "block_table must be a torch.Tensor, got list; pass a tensor for block_table"),
    "sections without slots": (replaced(slot_mapping=None, sections=(4, 2, 2), positions=torch.zeros(3, 5, dtype=torch.int64)), ValueError, "slot_mapping must come with sections: axes have positions of their own, got None"),
    "contiguous, too few blocks": (lambda made: {"slot_mapping": None, "key_cache": made.key_cache[:4], "value_cache": made.value_cache[:4]}, ValueError, "key_cache must have a block for every token, 5, without slot_mapping and block_table, got 4"),
    "table of other rows": (replaced(slot_mapping=None, block_table=torch.zeros(4, 1, dtype=torch.int32)), ValueError, r"block_table must have shape \(5, blocks\), a row for every token, got \(4, 1\)"),
    "table of sequences": (replaced(slot_mapping=None, cu_seqlens=torch.tensor([0, 2, 5]), block_table=torch.zeros(5, 1, dtype=torch.int32)), ValueError, r"block_table must have shape \(2, blocks\), a row for every sequence, got \(5, 1\)"),
    "table in one dimension": (replaced(slot_mapping=None, block_table=torch.zeros(5, dtype=torch.int32)), ValueError, r"block_table must have shape \(5, blocks\), a row for every token, got \(5,\)"),
    "table too long": (replaced(slot_mapping=None, block_table=torch.zeros(5, 1, dtype=torch.int32).expand(5, 2**29)), ValueError, "block_table must have at most 2147483647 slots a sequence, got 2147483648"),
    "table of floats": (replaced(slot_mapping=None, block_table=torch.zeros(5, 1)), TypeError, "block_table must have dtype int32 or int64, got float32"),
    "write_k": (replaced(write_k=1), TypeError, "write_k must be a bool, got 1; pass True to rotate k in place, too"),
    "no such impl": (replaced(impl="fast"), ValueError, "impl must be one of auto, triton, cuda, reference, got 'fast'"),
    "impl that cannot": (replaced(impl="cuda"), ValueError, "impl must be able to serve the tensors, got 'cuda': cuda runs on NVIDIA GPUs, not on device type cpu; use impl="),
    "q requires grad": (tensor("q", lambda x: x.clone().requires_grad_()), RuntimeError, "q must not require grad: a write into a cache has no gradient, got requires_grad=True; call it under torch.no_grad"),
    "v requires grad": (tensor("v", lambda x: x.clone().requires_grad_()), RuntimeError, "v must not require grad"),
    "a cache requires grad": (tensor("key_cache", lambda x: x.clone().requires_grad_()), RuntimeError, "key_cache must not require grad"),
    "folded q": (tensor("q", lambda x: x[:, :1].expand(5, 4, 16)), ValueError, r"q must not have elements that share memory, being written to, got strides \(64, 0, 1\)"),
    "folded q, keeping k": (lambda made: {"q": made.q[:, :1].expand(5, 4, 16), "write_k": False}, ValueError, "q must not have elements that share memory"),
    "folded cache": (tensor("value_cache", lambda x: x[:1].expand(6, 2, 4, 16)), ValueError, "value_cache must not have elements that share memory"),
    "k in q": (overlapping("k", "q"), ValueError, "k must not overlap q, which is written to, got shared memory; clone k"),
    "v in k": (overlapping("v", "k"), ValueError, "v must not overlap k, which is written to"),
    "v in the cache": (overlapping("v", "value_cache"), ValueError, "v must not overlap value_cache, which is written to"),
    "v in the other cache": (lambda made: {**overlapping("v", "key_cache")(made), "write_k": False}, ValueError, "v must not overlap key_cache, which is written to"),
    "one cache for both": (lambda made: {"value_cache": made.key_cache}, ValueError, "value_cache must not overlap key_cache, which is written to"),
    "slots in the cache": (lambda made: {"slot_mapping": made.key_cache.view(torch.int32).flatten()[:5]}, ValueError, "slot_mapping must not overlap key_cache, which is written to"),
    "a slot at the end of the cache": (lambda made: {"slot_mapping": made.key_cache.view(torch.int32).flatten()[-1:]}, ValueError, "slot_mapping must not overlap key_cache, which is written to"),
    "slots that end in the cache": (slots_that_end_in_the_cache, ValueError, "slot_mapping must not overlap key_cache, which is written to"),
    "table in q": (lambda made: {"cos_sin": made.q.view(20, 16)}, ValueError, "cos_sin must not overlap q, which is written to"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_one_error_and_nothing_written(name: str) -> None:
    change, error, message = MISTAKES[name]
    made, _ = make(CASES["hnd"]).copy()
    right = {"q": made.q, "k": made.k, "v": made.v, **made.arguments()}
    fusewise.rope_and_cache_(**right)  # cached as valid, which the other call must not be, even if it fails twice
    given = {**right, **change(made)}
    before = [x.clone() for x in made.written()]
    for _ in range(2):
        with pytest.raises(error, match=rf"^rope_and_cache_: {message}") as raised:
            fusewise.rope_and_cache_(**given)
        assert re.fullmatch(r"rope_and_cache_: .+ must .+, got .+; .+", str(raised.value))
    for x, old in zip(made.written(), before, strict=True):
        assert_bits(x, old)


def test_slots_of_other_batches() -> None:
    made = make(CASES["batched slots"])
    arguments = {**made.arguments(), "slot_mapping": made.kwargs["slot_mapping"].flatten()}
    with pytest.raises(ValueError, match=r"slot_mapping must have shape \(2, 5\), got \(10,\)"):
        fusewise.rope_and_cache_(made.q, made.k, made.v, **arguments)


def test_what_was_right_once_is_looked_at_again() -> None:
    """Checks are cached by type, not by address: newly shared memory is still detected."""
    made = make(CASES["hnd"])
    buffer = torch.zeros(320)
    k, v, shared = (buffer[first : first + 160].view(5, 2, 16) for first in (0, 160, 80))
    fusewise.rope_and_cache_(made.q, k, v, **made.arguments())
    with pytest.raises(ValueError, match="v must not overlap k, which is written to"):
        fusewise.rope_and_cache_(made.q, k, shared, **made.arguments())
    with pytest.raises(TypeError, match="rotary_start must be an int"):
        fusewise.rope_and_cache_(made.q, k, v, **made.arguments(), rotary_start=False)  # equals the default
    for offset, message in ((60, "positions up to 64"), (-1, "offset must be >= 0"), (True, "offset must be an int")):
        fusewise.rope_and_cache_(made.q, k, v, **made.arguments(), offset=59)
        with pytest.raises((ValueError, TypeError), match=message):
            fusewise.rope_and_cache_(made.q, k, v, **made.arguments(), offset=offset)
    made.q.requires_grad_()
    with pytest.raises(RuntimeError, match="q must not require grad"):
        fusewise.rope_and_cache_(made.q, made.k, made.v, **made.arguments())


def test_tensors_that_are_only_read_may_share_memory() -> None:
    """With each other, and within themselves."""
    made = make(CASES["hnd"])
    again, _ = made.copy()
    slots = made.kwargs["slot_mapping"]
    shared = {"slot_mapping": slots, "positions": slots, "inv_freq": torch.ones(1).expand(8), "cos_sin": None}
    apart = {**shared, "positions": slots.clone(), "inv_freq": torch.ones(8)}
    v = made.v[:1].expand(made.v.shape)
    fusewise.rope_and_cache_(made.q, made.k, v, **{**made.arguments(), **shared})
    fusewise.rope_and_cache_(again.q, again.k, v.contiguous(), **{**again.arguments(), **apart})
    for x, alone in zip(made.written(), again.written(), strict=True):
        assert_bits(x, alone)


def test_the_addresses_of_all_calls_have_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server calls with some thousand numbers of tokens, and tensors of new addresses each time."""
    remembered = Memo(4)
    monkeypatch.setattr(_validate, "_ADDRESSES", remembered)
    kept = []
    for tokens in (5, 4, 3):
        for _ in range(3):
            made = make(CASES["hnd"])
            kept.append(made)
            arguments = {**made.arguments(), "slot_mapping": made.kwargs["slot_mapping"][:tokens]}
            fusewise.rope_and_cache_(*(x[:tokens] for x in (made.q, made.k, made.v)), **arguments)
    assert 0 < len(remembered) <= 4


def test_sparse_slots_are_not_those_of_stride_0() -> None:
    """A 1-D sparse tensor reports the strides of an expanded one."""
    made = make(CASES["hnd"])
    slots = made.kwargs["slot_mapping"][:1].expand(5)
    fusewise.rope_and_cache_(made.q, made.k, made.v, **{**made.arguments(), "slot_mapping": slots})
    with pytest.raises(TypeError, match="slot_mapping must be a strided tensor"):
        fusewise.rope_and_cache_(made.q, made.k, made.v, **{**made.arguments(), "slot_mapping": slots.to_sparse()})


def test_no_grad_and_inference_mode_serve() -> None:
    for mode in RECORDING_NOTHING:
        made = make(CASES["hnd"])
        q, before = made.q.requires_grad_(), made.q.detach().clone()
        with mode():
            fusewise.rope_and_cache_(q, made.k, made.v, **made.arguments())
        assert not torch.equal(q.detach(), before)


def test_inference_tensors_stay_in_inference_mode() -> None:
    for mode in (contextlib.nullcontext, torch.inference_mode):  # the first call is remembered outside inference mode
        with mode():
            made = make(CASES["hnd"])
            fusewise.rope_and_cache_(made.q, made.k, made.v, **made.arguments())
    for mode in (contextlib.nullcontext, torch.no_grad):
        with mode(), pytest.raises(RuntimeError, match="q must not be an inference tensor outside inference mode"):
            fusewise.rope_and_cache_(made.q, made.k, made.v, **made.arguments())


def test_transforms_are_refused() -> None:
    made = make(CASES["hnd"])
    with pytest.raises(RuntimeError, match=r"must not be under a torch\.func transform or forward mode"):
        torch.func.vmap(lambda q: fusewise.rope_and_cache_(q, made.k, made.v, **made.arguments()))(made.q[None])


def test_versions_tell_of_the_write() -> None:
    """Version counters are bumped, so autograd detects that a saved tensor was modified."""
    made = make(CASES["hnd"])
    versions = [x._version for x in made.written()]
    fusewise.rope_and_cache_(made.q, made.k, made.v, **made.arguments())
    assert [x._version > version for x, version in zip(made.written(), versions, strict=True)] == [
        True,
        True,
        False,
        True,
        True,
    ]
