"""What a call must satisfy: one check an argument, one error a mistake, nothing written before all have passed.

Every message has the form `<op>: <argument> must <contract with numbers>, got <value>; <one fix>`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ._op import IMPLEMENTATIONS, unavailable
from ._problem import LAYOUTS, PAIRINGS, Spec, layout_dims

MAX_HEAD_DIM = 512
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTS = (torch.int32, torch.int64)


def fail(op: str, argument: str, contract: str, got: object, fix: str, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{op}: {argument} must {contract}, got {got}; {fix}")


def dtype_of(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def shape_of(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


# The arguments of `rope` that make its spec and its operator call, with their defaults.
DEFAULTS: dict[str, Any] = {
    "cos": None, "sin": None, "cos_sin": None, "angles": None, "inv_freq": None, "positions": None, "offset": 0,
    "cu_seqlens": None, "sections": None, "sections_interleaved": False, "context_parallel": None, "layout": "bshd",
    "pairing": "half", "rotary_dim": None, "rotary_start": 0, "scale": 1.0, "inverse": False, "impl": "auto",
}  # fmt: skip

# Calls that passed validation, by everything but the values of tensors and of an int offset: the encoded spec and the
# largest offset. Training sees one key, serving a few hundred; the bound is there only against a leak.
_VALIDATED: dict[tuple[Any, ...], tuple[str, float]] = {}
_VALIDATED_MAX = 4096


def validated(op: str, q: Tensor, k: Tensor | None, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Validate a call (`options` in the order of DEFAULTS) and return the arguments that follow the rotated tensors in
    every operator: table, sin, positions, offsets, cu_seqlens, offset, spec, impl."""
    return validated_as_far(op, q, k, options)[0]


def validated_as_far(op: str, q: Tensor, k: Tensor | None, options: tuple[Any, ...]) -> tuple[tuple[Any, ...], float]:
    """The same, and the largest int offset for which it holds."""
    cos, sin, cos_sin, angles, inv_freq, positions, offset, cu_seqlens, *rest = options
    offsets = offset if isinstance(offset, Tensor) else None
    spec: str | None = None
    max_offset = 0.0
    key: tuple[Any, ...] | None = None
    if not torch.compiler.is_compiling():
        try:
            key = (
                (q.shape, q.stride(), q.dtype, q.device),
                None if k is None else (k.shape, k.stride(), k.dtype, k.device),
                *[
                    None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
                    for x in (cos, sin, cos_sin, angles, inv_freq, positions, cu_seqlens)
                ],
                type(offset) if offsets is None else (offsets.shape, offsets.dtype, offsets.device),
                *rest,
                *map(type, rest),  # 0.0 equals 0, and is not an int
            )
            spec, max_offset = _VALIDATED.get(key, (None, 0.0))
            if offsets is None and spec is not None and not 0 <= offset <= max_offset:
                spec = None
        except (AttributeError, TypeError):
            key = None  # something is not a tensor or cannot be hashed: validation names it
    if spec is None:
        sections, interleaved, context_parallel, layout, pairing, rotary_dim, start, scale, inverse, impl = rest
        # Names written out: a look at a dictionary of the module is a guard for each of them in a compiled graph.
        arguments = {
            "cos": cos, "sin": sin, "cos_sin": cos_sin, "angles": angles, "inv_freq": inv_freq, "positions": positions,
            "offset": offset, "offset_tensor": offsets, "cu_seqlens": cu_seqlens, "sections": sections,
            "sections_interleaved": interleaved, "context_parallel": context_parallel, "layout": layout, "pairing": pairing,
            "rotary_dim": rotary_dim, "rotary_start": start, "scale": scale, "inverse": inverse, "impl": impl,
        }  # fmt: skip
        checked, max_offset = _check(op, q, k, arguments)
        spec = checked.encode()
        if key is not None:
            if len(_VALIDATED) >= _VALIDATED_MAX:
                _VALIDATED.clear()
            _VALIDATED[key] = spec, max_offset
    table = cos if cos is not None else cos_sin if cos_sin is not None else angles if angles is not None else inv_freq
    call = table, sin, positions, offsets, cu_seqlens, 0 if offsets is not None else offset, spec, rest[-1]
    return call, max_offset


def _check(op: str, q: Tensor, k: Tensor | None, a: dict[str, Any]) -> tuple[Spec, float]:
    """Check the call `a` (the keyword arguments of `rope`) on q and k; return its spec and the largest int offset for
    which the check holds, so that a decode loop is validated once."""
    _check_tensors(op, q, k, a["layout"], a["rotary_dim"] is not None)
    pairing, head_dim = a["pairing"], q.shape[-1]
    if pairing not in PAIRINGS:
        fail(op, "pairing", f"be one of {', '.join(PAIRINGS)}", repr(pairing), "choose one of them")
    rotary_dim, start = _check_rotary(op, head_dim, a["rotary_dim"], a["rotary_start"])
    if k is not None:
        _check_rotary(op, k.shape[-1], rotary_dim, a["rotary_start"])
    b_dim, t_dim, _ = layout_dims(a["layout"])
    batch, tokens = 1 if b_dim is None else q.shape[b_dim], q.shape[t_dim]
    sections = _check_sections(op, a["sections"], a["sections_interleaved"], rotary_dim // 2, a["positions"])
    rank, size = _check_context_parallel(op, a["context_parallel"], tokens, a["cu_seqlens"])
    _check_positions(op, q, batch, tokens, a)
    table, duplicated, rows = _check_table(op, q, batch, rotary_dim, a)
    scale = a["scale"]
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or scale != scale or abs(scale) == float("inf"):
        fail(op, "scale", "be a finite number", repr(scale), "pass the attention scaling of the frequencies", TypeError)
    if scale != 1.0 and table in ("cos_sin", "fused"):
        fail(op, "scale", "be 1.0 with a cos and sin table", scale, "scale the table itself")
    max_offset = float("inf") if a["positions"] is None else 0.0
    if rows is not None and a["positions"] is None and a["offset_tensor"] is None and a["cu_seqlens"] is None:
        max_offset = _check_reach(op, a["offset"], tokens, rank, size, rows)
    _check_impl(op, q, a["impl"])
    spec = Spec(
        layout=a["layout"],
        pairing=pairing,
        rotary_dim=0 if a["rotary_dim"] is None else int(rotary_dim),
        rotary_start=int(start),
        table=table,  # type: ignore[arg-type]
        duplicated=duplicated,
        scale=float(scale),
        sections=sections,
        sections_interleaved=bool(a["sections_interleaved"]),
        cp_rank=rank,
        cp_size=size,
        inverse=bool(a["inverse"]),
    )
    return spec, max_offset


def _check_tensors(op: str, q: Tensor, k: Tensor | None, layout: str, partial: bool) -> None:
    if layout not in LAYOUTS:
        fail(op, "layout", f"be one of {', '.join(LAYOUTS)}", repr(layout), "choose one of them")
    rank = 3 if layout == "thd" else 4
    for name, x in (("q", q), ("k", k)):
        if x is None and name == "k":
            continue
        if not isinstance(x, Tensor):
            fail(op, name, "be a torch.Tensor", type(x).__name__, f"pass a tensor for {name}", TypeError)
        if x.dtype not in FLOATS:
            kinds = "float32, bfloat16, float16 or float64"
            fail(op, name, f"have dtype {kinds}", dtype_of(x), f"convert {name} first", TypeError)
        if x.layout != torch.strided:
            fail(op, name, "be a strided tensor", x.layout, f"call {name}.to_dense()", TypeError)
        if x.dim() != rank:
            fail(
                op,
                name,
                f"have {rank} dimensions in layout {layout}",
                f"shape {shape_of(x)}",
                "reshape it or name its layout",
            )
        if x.shape[-1] != 1 and x.stride(-1) != 1 and x.numel() > 0:
            fail(
                op,
                name,
                "have a contiguous last dimension (stride 1)",
                f"strides {x.stride()}",
                f"call {name}.contiguous()",
            )
    for name, x in (("q", q), ("k", k)):
        if x is not None and (x.shape[-1] % 2 or not 2 <= x.shape[-1] <= MAX_HEAD_DIM):
            fail(
                op, name, f"have an even head_dim from 2 to {MAX_HEAD_DIM}", x.shape[-1],
                "pad the head or rotate a slice of it",
            )  # fmt: skip
    if k is None:
        return
    _, t_dim, h_dim = layout_dims(layout)
    if k.shape[-1] != q.shape[-1] and not partial:
        fail(
            op,
            "k",
            f"have the head_dim of q, {q.shape[-1]}",
            k.shape[-1],
            "pass rotary_dim where heads differ in width",
        )
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
        fail(op, "rotary_dim", "be an int", repr(rotary_dim), "pass the number of rotated features", TypeError)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        fail(op, "rotary_dim", f"be even and from 2 to head_dim = {head_dim}", rotary_dim, "pass the rotated width")
    if not _is_int(start):
        fail(op, "rotary_start", "be an int", repr(start), "pass the first rotated feature", TypeError)
    first = start + head_dim if start < 0 else start
    if not 0 <= first <= head_dim - rotary_dim:
        fail(
            op, "rotary_start", f"leave room for rotary_dim = {rotary_dim} of head_dim = {head_dim} features", start,
            f"use 0 for the leading part or {-rotary_dim} for the trailing part",
        )  # fmt: skip
    return rotary_dim, start


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _check_index_tensor(op: str, name: str, value: Any, q: Tensor) -> None:
    if not isinstance(value, Tensor):
        fail(op, name, "be an int32 or int64 tensor", type(value).__name__, f"pass torch.tensor({name})", TypeError)
    if value.dtype not in INTS:
        fail(op, name, "have dtype int32 or int64", dtype_of(value), f"call {name}.to(torch.int32)", TypeError)
    if value.device != q.device:
        fail(op, name, f"be on the device of q, {q.device}", value.device, f"call {name}.to({str(q.device)!r})")


def _check_sections(
    op: str, sections: Any, interleaved: Any, pairs: int, positions: Any
) -> tuple[int, int, int] | None:
    if sections is None:
        if interleaved:
            fail(op, "sections_interleaved", "come with sections", "sections=None", "pass sections=(t, h, w)")
        return None
    ok = isinstance(sections, (tuple, list)) and len(sections) == 3 and all(_is_int(s) and s >= 0 for s in sections)
    if not ok or sum(sections) != pairs:
        fail(
            op, "sections", f"be three numbers of pairs (t, h, w) that sum to rotary_dim / 2 = {pairs}", repr(sections),
            "pass the model's mrope_section",
        )  # fmt: skip
    if positions is None:
        fail(op, "sections", "come with positions of shape (3, T) or (3, B, T)", "positions=None", "pass positions")
    t, h, w = (int(s) for s in sections)
    return t, h, w


def _check_context_parallel(op: str, value: Any, tokens: int, cu_seqlens: Any) -> tuple[int, int]:
    if value is None:
        return 0, 1
    ok = isinstance(value, (tuple, list)) and len(value) == 2 and all(_is_int(v) for v in value)
    if not ok or not 0 <= value[0] < value[1]:
        fail(op, "context_parallel", "be (rank, size) with 0 <= rank < size", repr(value), "pass e.g. (0, 2)")
    if value[1] > 1 and cu_seqlens is None and tokens % 2:
        fail(
            op,
            "context_parallel",
            "cut every rank's tokens into two equal chunks",
            f"{tokens} tokens",
            "pad to an even number",
        )
    return int(value[0]), int(value[1])


def _check_positions(op: str, q: Tensor, batch: int, tokens: int, a: dict[str, Any]) -> None:
    positions, cu_seqlens, offsets = a["positions"], a["cu_seqlens"], a["offset_tensor"]
    if positions is not None:
        _check_index_tensor(op, "positions", positions, q)
        for name in ("cu_seqlens", "context_parallel", "offset"):
            given = (
                a[name] is not None
                if name != "offset"
                else not (_is_int(a["offset"]) and a["offset"] == 0) or offsets is not None
            )
            if given:
                fail(
                    op,
                    "positions",
                    f"be None when {name} is given",
                    shape_of(positions),
                    f"add {name} to the positions yourself",
                )
        axes = () if a["sections"] is None else (3,)
        shape = shape_of(positions)
        allowed = [(*axes, tokens), (*axes, batch, tokens), (*axes, 1, tokens)]
        if shape not in allowed:
            fail(
                op, "positions", f"have shape {allowed[0]} or {allowed[1]}", shape,
                "pass a position for every token" + (" and axis" if axes else ""),
            )  # fmt: skip
    sequences = batch
    if cu_seqlens is not None:
        _check_index_tensor(op, "cu_seqlens", cu_seqlens, q)
        if a["layout"] != "thd":
            fail(op, "cu_seqlens", "come with layout thd", f"layout {a['layout']}", "pack the tokens as (tokens, H, D)")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            fail(
                op,
                "cu_seqlens",
                "have shape (sequences + 1,)",
                shape_of(cu_seqlens),
                "pass [0, len_0, len_0 + len_1, ...]",
            )
        sequences = cu_seqlens.shape[0] - 1
    if offsets is not None:
        _check_index_tensor(op, "offset", offsets, q)
        if shape_of(offsets) != (sequences,):
            fail(
                op,
                "offset",
                f"be an int or have shape ({sequences},), one a sequence",
                shape_of(offsets),
                "pass one offset a sequence",
            )
    elif not _is_int(a["offset"]):
        fail(op, "offset", "be an int or an integer tensor", repr(a["offset"]), "pass the first position", TypeError)
    elif a["offset"] < 0 and a["inv_freq"] is None:
        fail(op, "offset", "be >= 0 with a table", a["offset"], "tables start at position 0; use inv_freq")


def _check_table(op: str, q: Tensor, batch: int, rotary_dim: int, a: dict[str, Any]) -> tuple[str, bool, int | None]:
    """The table's kind, whether its columns are duplicated, and its rows (None: every position)."""
    given = [name for name in ("cos", "cos_sin", "angles", "inv_freq") if a[name] is not None]
    if len(given) != 1 or (a["sin"] is None) != (a["cos"] is None):
        have = [name for name in ("cos", "sin", "cos_sin", "angles", "inv_freq") if a[name] is not None]
        fail(
            op, "the table", "be exactly one of cos and sin, cos_sin, angles, inv_freq", " and ".join(have) or "none of them",
            "pass one of the four",
        )  # fmt: skip
    pairs = rotary_dim // 2
    for name in ("sin", *given):
        table = a[name]
        if table is None:
            continue
        if not isinstance(table, Tensor):
            fail(op, name, "be a torch.Tensor", type(table).__name__, f"pass a tensor for {name}", TypeError)
        if table.dtype not in FLOATS:
            fail(
                op,
                name,
                "have dtype float32, bfloat16, float16 or float64",
                dtype_of(table),
                f"call {name}.float()",
                TypeError,
            )
        if table.dtype == torch.float64 and q.dtype != torch.float64:
            fail(
                op,
                name,
                "have dtype float32, bfloat16 or float16 for such a q",
                "float64",
                f"call {name}.float()",
                TypeError,
            )
        if table.device != q.device:
            fail(op, name, f"be on the device of q, {q.device}", table.device, f"call {name}.to({str(q.device)!r})")
        if table.requires_grad:
            fail(
                op,
                name,
                "not require grad: no gradient of the table is computed",
                "requires_grad=True",
                f"call {name}.detach()",
            )
    name = given[0]
    table = a[name]
    if name == "inv_freq":
        if shape_of(table) != (pairs,):
            fail(op, name, f"have shape (P,) = ({pairs},)", shape_of(table), "pass one frequency a rotated pair")
        return "inv_freq", False, None
    widths = {"cos": (pairs, 2 * pairs), "angles": (pairs, 2 * pairs), "cos_sin": (2 * pairs,)}[name]
    if (
        table.dim() not in (2, 3)
        or table.shape[-1] not in widths
        or (table.dim() == 3 and table.shape[0] not in (1, batch))
    ):
        form = {
            "cos_sin": f"(T, 2P) or (1 | B, T, 2P), 2P = {2 * pairs}, B = {batch}",
        }.get(name, f"(T, P) or (1 | B, T, P) with P = {pairs} (or 2P = {2 * pairs} duplicated) and B = {batch}")  # fmt: skip
        fix = "pass the half-width table" if name != "cos_sin" else "pass [cos | sin] side by side"
        if a["rotary_dim"] is None and table.dim() in (2, 3):
            fix += ", and rotary_dim if only a part of the head rotates"
        fail(op, name, f"have shape {form}", shape_of(table), fix)
    if name == "cos":
        sin = a["sin"]
        if shape_of(sin) != shape_of(table):
            fail(
                op, "sin", f"have the shape of cos, {shape_of(table)}", shape_of(sin), "build both tables the same way"
            )
        if sin.dtype != table.dtype:
            fail(
                op,
                "sin",
                f"have the dtype of cos, {dtype_of(table)}",
                dtype_of(sin),
                f"call sin.to(torch.{dtype_of(table)})",
                TypeError,
            )
        if sin.stride() != table.stride():
            fail(op, "sin", f"have the strides of cos, {table.stride()}", sin.stride(), "call .contiguous() on both")
    kind = {"cos": "cos_sin", "cos_sin": "fused", "angles": "angles"}[name]
    if name != "cos_sin" and table.shape[-1] == 2 * pairs:
        return kind, True, table.shape[-2]
    return kind, False, table.shape[-2]


def _check_reach(op: str, offset: int, tokens: int, rank: int, size: int, rows: int) -> float:
    """Check that positions offset, offset + 1, ... have a row each; returns the largest offset that passes."""
    if tokens == 0:
        return float("inf")
    span = tokens if size == 1 else tokens // 2 * (2 * size - rank)
    if offset + span > rows:
        fail(
            op, "the table", f"have a row for each of the positions up to {offset + span - 1}", f"{rows} rows",
            "build a longer table or use inv_freq",
        )  # fmt: skip
    return rows - span


def _check_impl(op: str, q: Tensor, impl: Any) -> None:
    if impl == "auto":
        return
    if impl not in IMPLEMENTATIONS:
        fail(op, "impl", f"be auto or one of {', '.join(IMPLEMENTATIONS)}", repr(impl), 'use impl="auto"')
    if torch.compiler.is_compiling():
        return  # the operator checks the device when it runs; a probe of the machine cannot be traced
    reason = unavailable(impl, q.device.type, q.dtype)
    if reason is not None:
        fail(op, "impl", "be able to serve the tensors", f"{impl!r}: {reason}", 'use impl="auto"')
