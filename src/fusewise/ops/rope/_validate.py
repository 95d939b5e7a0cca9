"""Validation of a RoPE call: one check per argument, one error per mistake, all before anything is written.

Every message has the form `<op>: <argument> must <contract with numbers>, got <value>; <one fix>`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._shared.memo import Memo
from .._common import (
    FLOATS,
    KERNEL_FLOATS,
    MAX_POSITION,
    as_int,
    check_bool,
    check_number,
    check_one_of,
    check_strided,
    dtype_name,
    fail,
    jit_traces,
    kinds,
    known,
    recording,
    shown,
)
from ._op import choice
from ._problem import LAYOUTS, PAIRINGS, Spec, layout_dims, same_strides

MAX_HEAD_DIM = 512
INTS = (torch.int32, torch.int64)


def dtype_of(x: Tensor) -> str:
    return dtype_name(x.dtype)


def shape_of(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def given_table(cos: Any, cos_sin: Any, angles: Any, inv_freq: Any) -> Any:
    """The form of the table that was given: exactly one, as validation ensures."""
    return cos if cos is not None else cos_sin if cos_sin is not None else angles if angles is not None else inv_freq


# The arguments of `rope` that determine its spec and its operator call, with their defaults.
DEFAULTS: dict[str, Any] = {
    "cos": None, "sin": None, "cos_sin": None, "angles": None, "inv_freq": None, "positions": None, "offset": 0,
    "cu_seqlens": None, "sections": None, "sections_interleaved": False, "context_parallel": None, "layout": "bshd",
    "pairing": "half", "rotary_dim": None, "rotary_start": 0, "scale": 1.0, "inverse": False, "impl": "auto",
}  # fmt: skip

# Calls that passed validation, keyed by everything except the values of tensors and of an int offset: the encoded spec
# and the largest valid offset. Training uses one key, serving a few hundred; the bound only guards against a leak.
_VALIDATED: Memo[tuple[Any, ...], tuple[str, float]] = Memo(4096)


def validated(op: str, q: Tensor, k: Tensor | None, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Validate a call (`options` in the order of DEFAULTS) and return the arguments that follow the rotated tensors in
    every operator: table, sin, positions, offsets, cu_seqlens, offset, spec, impl."""
    return validated_as_far(op, q, k, options)[0]


def validated_as_far(op: str, q: Tensor, k: Tensor | None, options: tuple[Any, ...]) -> tuple[tuple[Any, ...], float]:
    """The same, together with the largest int offset for which it is valid."""
    cos, sin, cos_sin, angles, inv_freq, positions, offset, cu_seqlens, *rest = options
    offset = as_int(offset)
    offsets = offset if isinstance(offset, Tensor) else None
    spec: str | None = None
    max_offset = 0.0
    key: tuple[Any, ...] | None = None
    if not (torch.compiler.is_compiling() or jit_traces()):
        try:
            key = (
                *[
                    None
                    if x is None
                    else (x.shape, x.stride(), x.dtype, x.device, x.layout, x.requires_grad, x.is_neg())
                    for x in (q, k, cos, sin, cos_sin, angles, inv_freq, positions, offsets, cu_seqlens)
                ],
                type(offset),
                recording(),
                *rest,
                *kinds(rest),
            )
            spec, max_offset = _VALIDATED.get(key, (None, 0.0))
            if offsets is None and spec is not None and not 0 <= offset <= max_offset:
                spec = None
        except (AttributeError, TypeError, RuntimeError):
            key = None  # an argument is not a tensor, has no strides or is not hashable: validation reports it
    if spec is None:
        sections, interleaved, context_parallel, layout, pairing, rotary_dim, start, scale, inverse, impl = rest
        # Spelled out: zipping with DEFAULTS would add a guard per name to a compiled graph.
        arguments = {
            "cos": cos, "sin": sin, "cos_sin": cos_sin, "angles": angles, "inv_freq": inv_freq, "positions": positions,
            "offset": offset, "offset_tensor": offsets, "cu_seqlens": cu_seqlens, "sections": sections,
            "sections_interleaved": interleaved, "context_parallel": context_parallel, "layout": layout, "pairing": pairing,
            "rotary_dim": rotary_dim, "rotary_start": start, "scale": scale, "inverse": inverse, "impl": impl,
        }  # fmt: skip
        checked, max_offset = _check(op, q, k, arguments)
        spec = checked.encode()
        if key is not None:
            _VALIDATED[key] = spec, max_offset
    table = given_table(cos, cos_sin, angles, inv_freq)
    call = table, sin, positions, offsets, cu_seqlens, 0 if offsets is not None else offset, spec, rest[-1]
    return call, max_offset


def _check(op: str, q: Tensor, k: Tensor | None, a: dict[str, Any]) -> tuple[Spec, float]:
    """Check the call `a` (the keyword arguments of `rope`) on q and k; return its spec and the largest int offset for
    which the check holds, so that a decode loop is validated once."""
    _check_rotated(op, q, k, a["layout"], a["rotary_dim"] is not None)
    pairing, scale = a["pairing"], a["scale"]
    check_one_of(op, "pairing", pairing, PAIRINGS)
    width, start, sections = a["rotary_dim"], a["rotary_start"], a["sections"]
    # Of `torch.jit.trace`, widths read from a tensor's shape are tensors; a trace is for one width.
    of = _traced_width if jit_traces() else as_int
    sections = tuple(map(of, sections)) if isinstance(sections, (tuple, list)) else sections
    rotary_dim, start = _check_rotary(op, q.shape[-1], of(width), of(start))
    if jit_traces():
        rotary_dim = int(rotary_dim)
    if k is not None:
        _check_rotary(op, k.shape[-1], rotary_dim, start)
    for name in ("sections_interleaved", "inverse"):
        check_bool(op, name, a[name], "pass True or False")
    b_dim, t_dim, _ = layout_dims(a["layout"])
    batch, tokens = 1 if b_dim is None else q.shape[b_dim], q.shape[t_dim]
    sections = _check_sections(op, sections, a["sections_interleaved"], rotary_dim // 2, a["positions"])
    rank, size = _check_context_parallel(op, a["context_parallel"], tokens, a["cu_seqlens"])
    _check_positions(op, q, batch, tokens, a)
    table, duplicated, rows = _check_table(op, q, batch, rotary_dim, a)
    check_number(op, "scale", scale, "pass the attention scaling of the frequencies")
    if scale != 1.0 and table in ("cos_sin", "fused"):
        fail(op, "scale", "be 1.0 with a cos and sin table", scale, "scale the table itself")
    max_offset = 0.0 if a["positions"] is not None else float(MAX_POSITION)
    # A packed sequence may have all tokens; without a table that is all there is to check.
    if a["positions"] is None and a["offset_tensor"] is None and (a["cu_seqlens"] is None or rows is None):
        max_offset = _check_reach(op, a["offset"], tokens, rank, size, rows)
    choice.check(op, q, a["impl"])
    spec = Spec(
        layout=a["layout"],
        pairing=pairing,
        rotary_dim=0 if a["rotary_dim"] is None else int(rotary_dim),
        rotary_start=int(start),
        table=table,  # type: ignore[arg-type]
        duplicated=duplicated,
        scale=float(scale),
        sections=sections,
        sections_interleaved=a["sections_interleaved"],
        cp_rank=rank,
        cp_size=size,
        inverse=a["inverse"],
    )
    return spec, max_offset


def check_tensor(
    op: str,
    name: str,
    x: Any,
    dtypes: tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
    fix: str | None = None,
) -> None:
    """x must be a plain strided tensor, of one of the dtypes and on the device where these are given. `fix` replaces the
    advice of the errors, which is to make a copy: the result for an output would go there."""
    check_strided(op, name, x, fix)
    if dtypes is not None and x.dtype not in dtypes:
        *others, last = map(dtype_name, dtypes)
        allowed = f"{', '.join(others)} or {last}" if others else last
        advice = f"convert it with .to({dtypes[0]})"
        if x.is_complex():  # which would lose the imaginary parts
            advice = f"call torch.view_as_real({name}).flatten(-2)"
            if name in ("cos", "cos_sin", "angles"):
                advice = f"pass cos={name}.real, sin={name}.imag"
        fail(op, name, f"have dtype {allowed}", dtype_of(x), fix or advice, TypeError)
    if not torch.compiler.is_compiling() and x.is_neg():
        fail(op, name, "not be a lazily negated view, as x.conj().imag is", "one", fix or "call .resolve_neg()")
    if device is not None and x.device != device:
        fail(op, name, f"be on the device of q, {device}", x.device, fix or f"move it with .to({str(device)!r})")


def check_unit_stride(op: str, name: str, x: Tensor, fix: str = "call .contiguous()") -> None:
    if x.shape[-1] != 1 and x.stride(-1) != 1 and x.numel() > 0:
        fail(op, name, "have a contiguous last dimension (stride 1)", f"strides {x.stride()}", fix)


def _check_rotated(op: str, q: Tensor, k: Tensor | None, layout: str, partial: bool) -> None:
    check_one_of(op, "layout", layout, LAYOUTS)
    rank = 3 if layout == "thd" else 4
    for name, x in (("q", q),) if k is None else (("q", q), ("k", k)):
        check_tensor(op, name, x, FLOATS, None)
        if x.dim() != rank:
            got = f"shape {shape_of(x)}"
            fail(op, name, f"have {rank} dimensions in layout {layout}", got, "reshape it or name its layout")
        check_unit_stride(op, name, x)
        if x.shape[-1] % 2 or not 2 <= x.shape[-1] <= MAX_HEAD_DIM:
            contract = f"have an even head_dim from 2 to {MAX_HEAD_DIM}"
            fail(op, name, contract, x.shape[-1], "pad the head or rotate a slice of it")
    if k is None:
        return
    if k.shape[-1] != q.shape[-1] and not partial:
        contract = f"have the head_dim of q, {q.shape[-1]}"
        fail(op, "k", contract, k.shape[-1], "pass rotary_dim where heads differ in width")
    _, t_dim, h_dim = layout_dims(layout)
    for dim in range(rank - 1):
        if dim != h_dim and k.shape[dim] != q.shape[dim]:
            what = "tokens" if dim == t_dim else "batch entries"
            fail(
                op, "k", f"have as many {what} as q ({q.shape[dim]}) in layout {layout}", shape_of(k),
                "check the layout, or rotate q and k in two calls",
            )  # fmt: skip
    if k.dtype != q.dtype:
        fail(op, "k", f"have the dtype of q, {dtype_of(q)}", dtype_of(k), f"call k.to(torch.{dtype_of(q)})", TypeError)
    if k.device != q.device:
        fail(op, "k", f"be on the device of q, {q.device}", k.device, f"call k.to({str(q.device)!r})")


def _check_rotary(op: str, head_dim: int, rotary_dim: Any, start: Any) -> tuple[int, int]:
    if rotary_dim is None:
        rotary_dim = head_dim
    elif not _is_int(rotary_dim):
        fail(op, "rotary_dim", "be an int", shown(rotary_dim), "pass the number of rotated features", TypeError)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        fail(op, "rotary_dim", f"be even and from 2 to head_dim = {head_dim}", rotary_dim, "pass the rotated width")
    if not _is_int(start):
        fail(op, "rotary_start", "be an int", shown(start), "pass the first rotated feature", TypeError)
    first = start + head_dim if start < 0 else start
    if not 0 <= first <= head_dim - rotary_dim:
        fail(
            op, "rotary_start", f"leave room for rotary_dim = {rotary_dim} of head_dim = {head_dim} features", start,
            f"use 0 for the leading part or {-rotary_dim} for the trailing part",
        )  # fmt: skip
    return rotary_dim, start


def _traced_width(x: Any) -> Any:
    return int(x) if isinstance(x, Tensor) and not x.dim() else as_int(x)


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _check_sections(
    op: str, sections: Any, interleaved: bool, pairs: int, positions: Any
) -> tuple[int, int, int] | None:
    if sections is None:
        if interleaved:
            fail(op, "sections_interleaved", "come with sections", "sections=None", "pass sections=(t, h, w)")
        return None
    ok = isinstance(sections, (tuple, list)) and len(sections) == 3 and all(_is_int(s) and s >= 0 for s in sections)
    if not ok or sum(sections) != pairs:
        fail(
            op, "sections", f"be three numbers of pairs (t, h, w) that sum to rotary_dim / 2 = {pairs}", shown(sections),
            "pass the model's mrope_section",
        )  # fmt: skip
    if positions is None:
        fail(op, "sections", "come with positions of shape (3, T) or (3, B, T)", "positions=None", "pass positions")
    t, h, w = (int(s) for s in sections)
    return t, h, w


def _check_context_parallel(op: str, value: Any, tokens: int, cu_seqlens: Any) -> tuple[int, int]:
    if value is None:
        return 0, 1
    if isinstance(value, (tuple, list)):
        value = tuple(map(as_int, value))
    ok = isinstance(value, tuple) and len(value) == 2 and all(_is_int(v) for v in value)
    if not ok or not 0 <= value[0] < value[1] <= MAX_POSITION:
        fail(op, "context_parallel", "be (rank, size) with 0 <= rank < size", shown(value), "pass e.g. (0, 2)")
    if value[1] > 1 and cu_seqlens is None and tokens % 2:
        contract = "cut every rank's tokens into two equal chunks"
        fail(op, "context_parallel", contract, f"{tokens} tokens", "pad to an even number")
    return int(value[0]), int(value[1])


def _check_positions(op: str, q: Tensor, batch: int, tokens: int, a: dict[str, Any]) -> None:
    positions, cu_seqlens, offset = a["positions"], a["cu_seqlens"], a["offset"]
    if positions is not None:
        check_tensor(op, "positions", positions, INTS, q.device)
        given = {
            "cu_seqlens": cu_seqlens is not None,
            "context_parallel": a["context_parallel"] is not None,
            "offset": a["offset_tensor"] is not None or not (_is_int(offset) and offset == 0),
        }
        for name, there in given.items():
            if there:
                fix = f"add {name} to the positions yourself"
                fail(op, "positions", f"be None when {name} is given", shape_of(positions), fix)
        axes = () if a["sections"] is None else (3,)
        shape = shape_of(positions)
        allowed = [(*axes, tokens), (*axes, batch, tokens), (*axes, 1, tokens)]
        # Not `in`: torch.compile would not guard on dynamic sizes. Tuples of other lengths are compared up to where they end,
        # which would tie the tokens to the batch in an export.
        if not any(len(shape) == len(one) and shape == one for one in allowed):
            fix = "pass a position for every token" + (" and axis" if axes else "")
            fail(op, "positions", f"have shape {allowed[0]} or {allowed[1]}", shape, fix)
    sequences = batch
    if cu_seqlens is not None:
        check_tensor(op, "cu_seqlens", cu_seqlens, INTS, q.device)
        if a["layout"] != "thd":
            fail(op, "cu_seqlens", "come with layout thd", f"layout {a['layout']}", "pack the tokens as (tokens, H, D)")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            fix = "pass [0, len_0, len_0 + len_1, ...]"
            fail(op, "cu_seqlens", "have shape (sequences + 1,)", shape_of(cu_seqlens), fix)
        _check_contiguous(op, "cu_seqlens", cu_seqlens)
        sequences = cu_seqlens.shape[0] - 1
    if a["offset_tensor"] is not None:
        check_tensor(op, "offset", offset, INTS, q.device)
        if shape_of(offset) != (sequences,):
            contract = f"be an int or have shape ({sequences},), one a sequence"
            fail(op, "offset", contract, shape_of(offset), "pass one offset a sequence")
        _check_contiguous(op, "offset", offset)
    elif not _is_int(offset):
        fail(op, "offset", "be an int or an integer tensor", shown(offset), "pass the first position", TypeError)
    elif offset < 0 and a["inv_freq"] is None:
        fail(op, "offset", "be >= 0 with a table", offset, "tables start at position 0; use inv_freq")
    elif isinstance(offset, int) and not torch.compiler.is_compiling() and abs(offset) > MAX_POSITION:
        fail(op, "offset", "be a position below 2^31", offset, "pass the first position")


def _check_contiguous(op: str, name: str, x: Tensor) -> None:
    if x.stride(0) != 1 and x.shape[0] > 1:
        fail(op, name, "be contiguous", f"strides {x.stride()}", "call .contiguous()")


def _check_table(op: str, q: Tensor, batch: int, rotary_dim: int, a: dict[str, Any]) -> tuple[str, bool, int | None]:
    """The table's kind, whether its columns are duplicated, and its rows (None: every position)."""
    given = [name for name in ("cos", "cos_sin", "angles", "inv_freq") if a[name] is not None]
    if len(given) != 1 or (a["sin"] is None) != (a["cos"] is None):
        have = [name for name in ("cos", "sin", "cos_sin", "angles", "inv_freq") if a[name] is not None]
        contract = "be exactly one of cos and sin, cos_sin, angles, inv_freq"
        fail(op, "the table", contract, " and ".join(have) or "none of them", "pass one of the four")
    dtypes = FLOATS if q.dtype == torch.float64 else KERNEL_FLOATS
    for name in ("sin", *given):
        table = a[name]
        if table is None:
            continue
        check_tensor(op, name, table, dtypes, q.device)
        if table.requires_grad and recording():
            contract = "not require grad: no gradient of the table is computed"
            fail(op, name, contract, "requires_grad=True", f"call {name}.detach()")
    pairs, name = rotary_dim // 2, given[0]
    table = a[name]
    if name == "inv_freq":
        if shape_of(table) != (pairs,):
            fail(op, name, f"have shape (P,) = ({pairs},)", shape_of(table), "pass one frequency a rotated pair")
        return "inv_freq", False, None
    widths = {"cos": (pairs, 2 * pairs), "angles": (pairs, 2 * pairs), "cos_sin": (2 * pairs,)}[name]
    batched = table.dim() == 3
    if (
        not (batched or table.dim() == 2)
        or not any(table.shape[-1] == width for width in widths)
        or (batched and table.shape[0] != 1 and table.shape[0] != batch)
    ):
        form = f"(R, P) or (1 | B, R, P) with P = {pairs} (or 2P = {2 * pairs} duplicated) and B = {batch}"
        fix = "pass the half-width table"
        if name == "cos_sin":
            form = f"(R, 2P) or (1 | B, R, 2P), 2P = {2 * pairs}, B = {batch}"
            fix = "pass [cos | sin] side by side"
        if table.dim() not in (2, 3):
            fix = "reshape it, without a dimension for the heads"
        elif any(table.shape[-1] == width for width in widths):
            fix = "pass one table for all sequences, or one for each"
        elif a["rotary_dim"] is None:
            fix += ", and rotary_dim if only a part of the head rotates"
        fail(op, name, f"have shape {form}", shape_of(table), fix)
    if name == "cos":
        sin = a["sin"]
        if shape_of(sin) != shape_of(table):
            contract = f"have the shape of cos, {shape_of(table)}"
            fail(op, "sin", contract, shape_of(sin), "build both tables the same way")
        if sin.dtype != table.dtype:
            fix = f"call sin.to(torch.{dtype_of(table)})"
            fail(op, "sin", f"have the dtype of cos, {dtype_of(table)}", dtype_of(sin), fix, TypeError)
        if not same_strides(sin, table):
            fail(op, "sin", f"have the strides of cos, {table.stride()}", sin.stride(), "call .contiguous() on both")
    kind = {"cos": "cos_sin", "cos_sin": "fused", "angles": "angles"}[name]
    return kind, name != "cos_sin" and table.shape[-1] == 2 * pairs, table.shape[-2]


def _check_reach(op: str, offset: int, tokens: int, rank: int, size: int, rows: int | None) -> float:
    """Check that positions offset, offset + 1, ... have a row each or, without a table, are below the limit of the kernels'
    32-bit counters; returns the largest offset that passes."""
    if known(tokens == 0):
        return float(MAX_POSITION)
    span = tokens if size == 1 else tokens // 2 * (2 * size - rank)
    if rows is None:
        # Under tracing this would add a guard on every length.
        if not torch.compiler.is_compiling() and offset + span > MAX_POSITION + 1:
            contract = f"leave the {span} positions from it on below 2^31"
            fail(op, "offset", contract, offset, "pass the first position")
        return MAX_POSITION + 1 - span
    if known(offset + span > rows):
        contract = f"have a row for each of the positions up to {offset + span - 1}"
        fail(op, "the table", contract, f"{rows} rows", "build a longer table or use inv_freq")
    return rows - span
