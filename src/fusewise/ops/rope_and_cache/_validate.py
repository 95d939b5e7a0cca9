"""Validation of `rope_and_cache_`: `rope`'s own for q, k and the table, and here that of v, the caches and the slots.

Every message has the form `<op>: <argument> must <contract with numbers>, got <value>; <one fix>`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._shared.memo import Memo
from .._common import as_int, check_bool, check_one_of, fail, jit_traces, kinds, recording, span, transforms_active
from .._overlap import overlaps, overlaps_itself
from ..rope._problem import LAYOUTS, layout_dims
from ..rope._validate import (
    DEFAULTS,
    INTS,
    MAX_HEAD_DIM,
    check_tensor,
    check_unit_stride,
    dtype_of,
    given_table,
    shape_of,
    validated_as_far,
)
from ._op import choice
from ._problem import CACHE_LAYOUTS

OP = "rope_and_cache_"
MOST_SLOTS = 2**31 - 1
# The arguments that may be tensors: those of this operation, then those of rope.
NAMES = ("q", "k", "v", "key_cache", "value_cache", "slot_mapping", "block_table", *tuple(DEFAULTS)[:8])


@dataclass(frozen=True, eq=False)
class _Passed:
    """A call that passed all checks except those of addresses, valid for tensors with the same metadata."""

    spec: str
    reach: float  # the largest int offset for which it is valid
    extents: list[int]  # bytes from the first element to the end of the last, for every tensor of the call


_PASSED: Memo[tuple[Any, ...], _Passed] = Memo(4096)
# Of such a call: pairs of tensors (by index, with their distance) that do not overlap although their address ranges do, like q, k
# and v that are views of one tensor; and sets of addresses known to be free of overlap: one for each layer of a model.
_APART: Memo[tuple[_Passed, int, int, int], None] = Memo(4096)
_ADDRESSES: Memo[tuple[_Passed, tuple[int, ...]], None] = Memo(1 << 16)


def validated(
    q: Any,
    k: Any,
    v: Any,
    key_cache: Any,
    value_cache: Any,
    slots: Any,
    block_table: Any,
    cache_layout: str,
    write_k: bool,
    options: tuple[Any, ...],
) -> tuple[tuple[Any, ...], tuple[Any, ...], float]:
    """Check a call; `options` are rope's in the order of its DEFAULTS. Returns the arguments of the operators (q, k and
    v with heads, the caches with slots before heads, slots, block_table), those shared with rope, and the largest int
    offset for which the check holds."""
    if transforms_active():
        fix = "call it outside, or use rope and write k and v yourself"
        fail(OP, "q, k and v", "not be under a torch.func transform or forward mode", "one of them", fix, RuntimeError)
    given = (q, k, v, key_cache, value_cache, slots, block_table, *options[:8])
    # A fake tensor has no address, and the compiler plans its own memory.
    tracing = torch.compiler.is_compiling() or isinstance(q, torch._subclasses.FakeTensor)
    key, passed = (None, None) if tracing or jit_traces() else _remembered(given, cache_layout, write_k, options)
    offset = as_int(options[6])
    if passed is not None and not isinstance(offset, Tensor) and not 0 <= offset <= passed.reach:
        passed = None
    if passed is None:
        _check_kinds(q, k, v, key_cache, value_cache, cache_layout)
        check_one_of(OP, "layout", options[11], LAYOUTS)
    if cache_layout == "hnd":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    layout = options[11]
    if layout == "thd":
        q, k = _heads("q", q, key_cache, "key_cache"), _heads("k", k, key_cache, "key_cache")
        v = _heads("v", v, value_cache, "value_cache")
    tensors = (q, k, v, key_cache, value_cache, slots, block_table)
    if passed is None:
        call, reach = validated_as_far(OP, q, k, (*options[:-1], "auto"))
        _check_values(k, v, layout)
        _check_caches(k, v, key_cache, value_cache, layout)
        _check_places(q, key_cache, slots, block_table, layout, options)
        check_bool(OP, "write_k", write_k, "pass True to rotate k in place, too")
        choice.check(OP, q, options[-1])
        _check_writable({"q": q, "k": k, "v": v, "key_cache": key_cache, "value_cache": value_cache}, write_k)
        if tracing:
            return tensors, (*call[:-1], options[-1]), reach
        passed = _Passed(call[-2], reach, [_extent(x) if isinstance(x, Tensor) else 0 for x in given])
        if key is not None:
            _PASSED[key] = passed
    _check_apart(given, passed, {0, 1, 3, 4} if write_k else {0, 3, 4})
    cos, sin, cos_sin, angles, inv_freq, positions, _, cu_seqlens = options[:8]
    offsets = offset if isinstance(offset, Tensor) else None
    table = given_table(cos, cos_sin, angles, inv_freq)
    call = table, sin, positions, offsets, cu_seqlens, offset if offsets is None else 0, passed.spec, options[-1]
    return tensors, call, passed.reach


def _remembered(
    given: tuple[Any, ...], cache_layout: Any, write_k: Any, options: tuple[Any, ...]
) -> tuple[tuple[Any, ...] | None, _Passed | None]:
    """The key, made of everything the checks examine except addresses and the value of an int offset, and the cached
    result."""
    try:
        key = (
            *[
                (x.shape, x.stride(), x.dtype, x.device, x.layout, x.is_neg(), x.requires_grad, x.is_inference())
                if isinstance(x, Tensor) else x if i < 13 else type(x)
                for i, x in enumerate(given)
            ],
            cache_layout, write_k, type(write_k), *options[8:], *kinds(options[8:]),
            recording(), torch.is_inference_mode_enabled(),
        )  # fmt: skip
        return key, _PASSED.get(key)
    except (TypeError, RuntimeError):
        return None, None  # an argument has no strides or is not hashable: the checks report it


def _check_kinds(q: Any, k: Any, v: Any, key_cache: Any, value_cache: Any, cache_layout: Any) -> None:
    """Check that tensors are tensors, and caches have four dimensions."""
    for name, x in (("q", q), ("k", k), ("v", v), ("key_cache", key_cache), ("value_cache", value_cache)):
        check_tensor(OP, name, x)  # dtype and device are checked later
    check_one_of(OP, "cache_layout", cache_layout, CACHE_LAYOUTS)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dim() != 4:
            form = "(blocks, block_size, heads, D)" if cache_layout == "nhd" else "(blocks, heads, block_size, D)"
            fix = (
                f"take {name} out of a combined cache by unbind or an index; a contiguous cache has a block a sequence"
            )
            fail(OP, name, f"have 4 dimensions, {form}", shape_of(cache), fix)


def _heads(name: str, x: Tensor, cache: Tensor, cache_name: str) -> Tensor:
    """View x as (tokens, heads, D), with the D of the cache."""
    if x.dim() != 2:
        return x
    width = cache.shape[-1]
    if width == 0 or x.shape[-1] % width:
        fail(
            OP, name, f"have heads as wide as those of {cache_name}, {width}, in its {x.shape[-1]} features", shape_of(x),
            f"pass {name} as (tokens, heads, D)",
        )  # fmt: skip
    check_unit_stride(OP, name, x)
    return x.view(x.shape[0], x.shape[1] // width, width)


def _check_values(k: Tensor, v: Tensor, layout: str) -> None:
    if v.dtype != k.dtype:
        fail(OP, "v", f"have the dtype of k, {dtype_of(k)}", dtype_of(v), f"call v.to(torch.{dtype_of(k)})", TypeError)
    if v.device != k.device:
        fail(OP, "v", f"be on the device of k, {k.device}", v.device, f"call v.to({str(k.device)!r})")
    if v.shape[:-1] != k.shape[:-1]:
        form = f"{shape_of(k)[:-1]} and a width"
        fail(
            OP, "v", f"have the tokens and heads of k in layout {layout}, {form}", shape_of(v), "check the layout of v"
        )
    if not 1 <= v.shape[-1] <= MAX_HEAD_DIM:
        fail(OP, "v", f"have a head_dim from 1 to {MAX_HEAD_DIM}", v.shape[-1], "pass the values of the heads")
    check_unit_stride(OP, "v", v)


def _check_caches(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, layout: str) -> None:
    heads = k.shape[layout_dims(layout)[2]]
    for name, cache, x_name, x in (("key_cache", key_cache, "k", k), ("value_cache", value_cache, "v", v)):
        if cache.dtype != x.dtype:
            fix = (
                "quantised caches are not supported" if cache.element_size() == 1 else f"allocate {name} in that dtype"
            )
            fail(OP, name, f"have the dtype of {x_name}, {dtype_of(x)}", dtype_of(cache), fix, TypeError)
        if cache.device != x.device:
            fail(OP, name, f"be on the device of {x_name}, {x.device}", cache.device, "allocate the caches there")
        if cache.shape[2] != heads or cache.shape[3] != x.shape[-1]:
            fail(
                OP, name, f"have the heads of {x_name}, {heads} of {x.shape[-1]} features",
                f"{cache.shape[2]} of {cache.shape[3]} features", 'say cache_layout="hnd" where heads come before slots',
            )  # fmt: skip
        if cache.shape[-1] != 1 and cache.stride(-1) != 1 and cache.numel() > 0:
            fail(
                OP, name, "have a contiguous last dimension (stride 1)", f"strides {cache.stride()}",
                "allocate it with the features of a head last",
            )  # fmt: skip
    if key_cache.shape[:2] != value_cache.shape[:2]:
        fail(
            OP, "value_cache", f"have the blocks and slots of key_cache, {shape_of(key_cache)[:2]}",
            shape_of(value_cache)[:2], "allocate both caches alike",
        )  # fmt: skip
    if key_cache.shape[0] * key_cache.shape[1] > MOST_SLOTS:
        fail(
            OP, "key_cache", f"have at most {MOST_SLOTS} slots", key_cache.shape[0] * key_cache.shape[1],
            "divide the cache",
        )  # fmt: skip


def _check_places(
    q: Tensor, key_cache: Tensor, slots: Any, block_table: Any, layout: str, options: tuple[Any, ...]
) -> None:
    b_dim, t_dim, _ = layout_dims(layout)
    tokens, cu_seqlens = q.shape[t_dim], options[7]
    for name, x in (("slot_mapping", slots), ("block_table", block_table)):
        if x is not None:
            check_tensor(OP, name, x, INTS, q.device)
    if slots is not None:
        if block_table is not None:
            fail(OP, "block_table", "be None where there is a slot_mapping", shape_of(block_table), "pass one of them")
        if b_dim is None:
            if slots.dim() != 1 or slots.shape[0] > tokens:
                fail(
                    OP, "slot_mapping", f"have shape ({tokens},), or fewer entries where tokens are padded", shape_of(slots),
                    "pass a slot a token",
                )  # fmt: skip
        elif shape_of(slots) != (q.shape[b_dim], tokens):
            fail(OP, "slot_mapping", f"have shape {(q.shape[b_dim], tokens)}", shape_of(slots), "pass a slot a token")
        return
    if options[8] is not None:
        fail(OP, "slot_mapping", "come with sections: axes have positions of their own", "None", "pass a slot a token")
    sequences = q.shape[b_dim] if b_dim is not None else tokens if cu_seqlens is None else cu_seqlens.shape[0] - 1
    each = "batch entry" if b_dim is not None else "token" if cu_seqlens is None else "sequence"
    if block_table is None:
        if key_cache.shape[0] < sequences:
            fail(
                OP, "key_cache", f"have a block for every {each}, {sequences}, without slot_mapping and block_table",
                key_cache.shape[0], "pass a slot_mapping, a block_table or, for packed sequences, cu_seqlens",
            )  # fmt: skip
        return
    if block_table.dim() != 2 or block_table.shape[0] != sequences:
        fail(
            OP, "block_table", f"have shape ({sequences}, blocks), a row for every {each}", shape_of(block_table),
            "pass a slot_mapping, or cu_seqlens for packed sequences",
        )  # fmt: skip
    if block_table.shape[1] * key_cache.shape[1] > MOST_SLOTS:
        fail(
            OP, "block_table", f"have at most {MOST_SLOTS} slots a sequence", block_table.shape[1] * key_cache.shape[1],
            "cut it to the blocks in use",
        )  # fmt: skip


def _check_writable(named: dict[str, Tensor], write_k: bool) -> None:
    """No tensor requires a gradient, and each written one may be written to."""
    for name, x in named.items():
        if x.requires_grad and recording():
            fix = "call it under torch.no_grad(), or use rope, which has a gradient, and write k and v yourself"
            fail(
                OP,
                name,
                "not require grad: a write into a cache has no gradient",
                "requires_grad=True",
                fix,
                RuntimeError,
            )
        if torch.compiler.is_compiling() or name == "v" or (name == "k" and not write_k):
            continue
        if x.is_inference() and not torch.is_inference_mode_enabled():
            fail(OP, name, "not be an inference tensor outside inference mode", "one", f"clone {name}", RuntimeError)
        if overlaps_itself(x):
            fail(
                OP, name, "not have elements that share memory, being written to", f"strides {x.stride()}",
                f"call {name}.contiguous()",
            )  # fmt: skip


def _check_apart(given: tuple[Any, ...], passed: _Passed, written: set[int]) -> None:
    """Written tensors overlap no other tensor of the call. Disjoint address ranges need no exact test."""
    addresses = tuple([x.data_ptr() if isinstance(x, Tensor) else 0 for x in given])
    if (passed, addresses) in _ADDRESSES:
        return
    under_way: list[tuple[int, int]] = []
    for start, i in sorted((start, i) for i, start in enumerate(addresses) if passed.extents[i]):
        under_way = [(before, j) for before, j in under_way if before + passed.extents[j] > start]
        for before, j in under_way:
            if (i not in written and j not in written) or (passed, i, j, start - before) in _APART:
                continue
            if overlaps(given[i], given[j]):
                one, other = (min(i, j), max(i, j)) if {i, j} <= written else (i, j) if i in written else (j, i)
                fail(
                    OP, NAMES[other], f"not overlap {NAMES[one]}, which is written to", "shared memory",
                    f"clone {NAMES[other]}",
                )  # fmt: skip
            _APART[passed, i, j, start - before] = None
        under_way.append((start, i))
    _ADDRESSES[passed, addresses] = None


def _extent(x: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    return x.element_size() * span(x.shape, x.stride()) if x.numel() else 0
