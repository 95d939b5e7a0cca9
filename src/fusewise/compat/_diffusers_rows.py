"""The rotary functions of diffusers whose angles differ between heads, or between parts of a head.

Formula, dtypes and errors are those of `_diffusers_rope`. Each slice with its own angles is passed to `rope` as one token, by
strides alone: parts of the hidden width in LTX, heads in LTX-2 and Mochi, thirds of a head in Allegro.
Shape legend: B batch, S tokens, H heads, D head_dim, C = H · D, R table rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops._common import dtype_name, fail
from ..ops.rope._validate import MAX_HEAD_DIM
from ._check import check_shape, shape_of
from ._diffusers_rope import OF_TOKENS, both_tables, rotated, table_dtype
from ._shared import alike


def _one(x: Tensor, dim: int) -> bool:
    """Whether dimensions dim and dim + 1 of x can be flattened without a copy."""
    return x.shape[dim] == 1 or x.shape[dim + 1] == 1 or x.stride(dim) == x.shape[dim + 1] * x.stride(dim + 1)


def _by_rows(op: str, x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """Rotate x (B, S, G, D) by tables (1 | B, S, G, …), one row per group g of token s."""
    cos, sin = alike(op, cos.to(table_dtype(x, cos)), sin.to(table_dtype(x, sin)))
    if all(_one(t, 1) for t in (x, cos, sin)):
        y = rotated(op, x.flatten(1, 2).unsqueeze(2), cos.flatten(1, 2), sin.flatten(1, 2), "bshd", pairing)
        return y.squeeze(2).view(x.shape)
    if cos.shape[0] == 1:  # angles shared by the batch: pass the batch as the heads of `rope`
        return rotated(op, x.transpose(0, 1), cos[0], sin[0], "bhsd", pairing).transpose(0, 1)
    y = rotated(op, x.flatten(0, 1).unsqueeze(2), cos.flatten(0, 1), sin.flatten(0, 1), "bshd", pairing)
    return y.squeeze(2).view(x.shape)


def apply_rotary_emb_ltx(x: Tensor, freqs: Any) -> Tensor:
    """Rotate interleaved pairs (2i, 2i + 1) over the whole hidden width of x (B, S, C); `apply_rotary_emb` of LTX-Video.

    One launch, on views that split the width into heads of up to 512 features. x is copied only if the tables differ between
    sequences and neither (S, parts of a token) nor (B, S) of x can be flattened.

    Args:
        freqs: (cos, sin), each (1 | B, S, C), `repeat_interleave(f, 2)`.
    """
    return _over_the_width("apply_rotary_emb_ltx", x, freqs)


def apply_interleaved_rotary_emb(x: Tensor, freqs: Any) -> Tensor:
    """`apply_rotary_emb_ltx` under its name in LTX-2."""
    return _over_the_width("apply_interleaved_rotary_emb", x, freqs)


def _over_the_width(op: str, x: Tensor, freqs: Any) -> Tensor:
    batch, tokens, width = check_shape(
        op, "x", x, "(B, S, C)", (None, None, None), "pass it before it is cut into heads"
    )
    if width % 2 or not width:
        fail(op, "x", "have an even number of features, at least 2", width, "pass the whole hidden width")
    cos, sin = both_tables(op, "freqs", freqs)
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(op, name, table, "(1 | B, S, C)", ((1, batch), tokens, width), OF_TOKENS)
    part = next(n for n in range(min(width, MAX_HEAD_DIM) // 2 * 2, 0, -2) if width % n == 0)
    x, cos, sin = (t.unflatten(2, (width // part, part)) for t in (x, cos, sin))
    return _by_rows(op, x, cos, sin, "interleaved").flatten(2)


def apply_split_rotary_emb(x: Tensor, freqs: Any) -> Tensor:
    """Rotate pairs (i, i + D / 2) of each head of x (B, S, C) by per-head tables, as in LTX-2.

    One launch on views. x is copied as in `apply_rotary_emb_ltx`. Tables that differ between sequences are copied if they are
    contiguous as (B, H, S, D / 2); those of LTX-2 are transposed from (B, S, H, D / 2) and are not.

    Args:
        x: (B, S, H · D), or (B, H, S, D).
        freqs: (cos, sin), each (1 | B, H, S, D / 2), every angle once; or (1 | B, S, C / 2), for pairs (i, i + C / 2) of
            x (B, S, C) with C <= 512.
    """
    op = "apply_split_rotary_emb"
    cos, sin = both_tables(op, "freqs", freqs)
    shape, fix = shape_of(op, "x", x), "pass the tables of the model"
    if len(shape) == 4:
        batch, heads, tokens, width = check_shape(op, "x", x, "(B, H, S, D)", (None,) * 4, fix)
        for name, table in (("cos", cos), ("sin", sin)):
            sizes = (1, batch), heads, tokens, width // 2
            check_shape(op, name, table, "(1 | B, H, S, D / 2)", sizes, fix)
        return _by_rows(op, x, cos, sin, "half")
    batch, tokens, width = check_shape(op, "x", x, "(B, S, C)", (None, None, None), "pass (B, S, C) or (B, H, S, D)")
    if len(shape_of(op, "cos", cos)) == 3:
        for name, table in (("cos", cos), ("sin", sin)):
            check_shape(op, name, table, "(1 | B, S, C / 2)", ((1, batch), tokens, width // 2), fix)
        return rotated(op, x.unsqueeze(2), cos, sin, "bshd", "half").squeeze(2)
    heads = check_shape(op, "cos", cos, "(1 | B, H, S, D / 2)", ((1, batch), None, tokens, None), fix)[1]
    if not heads or width % (2 * heads):
        fail(op, "x", f"have an even number of features for each of {heads} heads", width, fix)
    for name, table in (("cos", cos), ("sin", sin)):
        sizes = (1, batch), heads, tokens, width // heads // 2
        check_shape(op, name, table, "(1 | B, H, S, D / 2)", sizes, fix)
    x = x.unflatten(2, (heads, width // heads))
    return _by_rows(op, x, cos.transpose(1, 2), sin.transpose(1, 2), "half").flatten(2)


def apply_rotary_emb_mochi(x: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Rotate interleaved pairs (2i, 2i + 1) of x (B, S, H, D); `apply_rotary_emb` inside Mochi's attention processor.

    Args:
        freqs_cos, freqs_sin: (S, H, D / 2), every angle once. Mochi learns its frequencies; detach tables that require grad.
    """
    op = "apply_rotary_emb_mochi"
    _, tokens, heads, width = check_shape(op, "x", x, "(B, S, H, D)", (None,) * 4, "pass (B, S, H, D)")
    for name, table in (("freqs_cos", freqs_cos), ("freqs_sin", freqs_sin)):
        check_shape(op, name, table, "(S, H, D / 2)", (tokens, heads, width // 2), OF_TOKENS)
    return _by_rows(op, x, freqs_cos[None], freqs_sin[None], "interleaved")


def apply_rotary_emb_allegro(x: Tensor, freqs_cis: Any, positions: Any) -> Tensor:
    """3-D RoPE of Allegro: rotate each third of every head of x (B, H, S, D) by its own position, pairs (i, i + D / 6).

    One launch; extra small kernels concatenate the three tables and compute row indices. x is copied if neither (S, thirds)
    nor (B, S) of x can be flattened.

    Args:
        freqs_cis: ((cos, sin), (cos, sin), (cos, sin)) of time, height and width, each (R, D / 3), `cat(f, f)`; R may differ.
        positions: three int32 or int64 tensors (1 | B, S) of table rows. A position outside its table makes that third NaN.
    """
    op = "apply_rotary_emb_allegro"
    batch, _, tokens, width = check_shape(op, "x", x, "(B, H, S, D)", (None,) * 4, "pass (B, H, S, D)")
    if width % 6:
        fail(op, "x", "have a head_dim of three even thirds", width, "pass the heads of the model")
    for name, three in (("freqs_cis", freqs_cis), ("positions", positions)):
        if not isinstance(three, (tuple, list, Tensor)) or len(three) != 3:
            fail(op, name, "be three, of time, height and width", type(three).__name__, "pass all three", TypeError)
    tables: list[tuple[Tensor, Tensor]] = []
    rows: list[Tensor] = []
    first = 0
    for both, at in zip(freqs_cis, positions, strict=True):
        cos, sin = both_tables(op, "freqs_cis", both)
        count = check_shape(op, "cos", cos, "(R, D / 3)", (None, width // 3), "pass the tables of the model")[0]
        check_shape(op, "sin", sin, "(R, D / 3)", (count, width // 3), "build both tables the same way")
        check_shape(op, "positions", at, "(1 | B, S)", ((1, batch), tokens), "pass a position for every token")
        if at.dtype not in (torch.int32, torch.int64):
            fail(op, "positions", "have dtype int32 or int64", dtype_name(at.dtype), "call .long()", TypeError)
        like = tables[0][0] if tables else cos
        for name, one in (("cos", cos), ("sin", sin), ("positions", at)):
            if one.device != x.device:
                fail(op, name, f"be on the device of x, {x.device}", one.device, f"move it with .to({str(x.device)!r})")
            if one is not at and one.dtype != like.dtype:  # cat would promote to the wider dtype
                fix = "build all tables the same way"
                contract = f"have the dtype of the first table, {dtype_name(like.dtype)}"
                fail(op, name, contract, dtype_name(one.dtype), fix, TypeError)
        tables.append((cos, sin))
        rows.append(torch.where((at >= 0) & (at < count), at + first, -1))
        first += count
    cos, sin = (torch.cat(same) for same in zip(*tables, strict=True))  # `rotated` converts float64
    thirds = x.unflatten(3, (3, width // 3))
    lines = torch.stack(torch.broadcast_tensors(*rows), -1)
    if _one(thirds, 2):
        y = rotated(op, thirds.flatten(2, 3), cos, sin, "bhsd", "half", positions=lines.flatten(1))
        return y.view(thirds.shape).flatten(3)
    by_token = thirds.transpose(1, 2).flatten(0, 1)
    at = lines.expand(batch, tokens, 3).flatten(0, 1)
    y = rotated(op, by_token, cos, sin, "bhsd", "half", positions=at)
    return y.view(batch, tokens, *by_token.shape[1:]).transpose(1, 2).flatten(3)
