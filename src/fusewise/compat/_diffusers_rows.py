"""The rotary functions of diffusers whose angles differ between the heads of a token, or between parts of a head.

The mathematics, the dtypes and the errors are those of `_diffusers_rope`. What has angles of its own is a token of `rope`, by
strides alone: the parts of a hidden width in LTX, the heads in LTX-2 and Mochi, the thirds of a head in Allegro.
Shape legend: B batch, S tokens, H heads, D head_dim, C = H · D, R rows of a table.
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
    """Whether dimensions dim and dim + 1 are one of the memory of x."""
    return x.shape[dim] == 1 or x.shape[dim + 1] == 1 or x.stride(dim) == x.shape[dim + 1] * x.stride(dim + 1)


def _by_rows(op: str, x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """x (B, S, G, D) with tables (1 | B, S, G, …): a row for each part g of each token s."""
    cos, sin = alike(op, cos.to(table_dtype(x, cos)), sin.to(table_dtype(x, sin)))
    if all(_one(t, 1) for t in (x, cos, sin)):
        y = rotated(op, x.flatten(1, 2).unsqueeze(2), cos.flatten(1, 2), sin.flatten(1, 2), "bshd", pairing)
        return y.squeeze(2).view(x.shape)
    if cos.shape[0] == 1:  # what differs in the batch alone has the same angles, as heads have
        return rotated(op, x.transpose(0, 1), cos[0], sin[0], "bhsd", pairing).transpose(0, 1)
    y = rotated(op, x.flatten(0, 1).unsqueeze(2), cos.flatten(0, 1), sin.flatten(0, 1), "bshd", pairing)
    return y.squeeze(2).view(x.shape)


def apply_rotary_emb_ltx(x: Tensor, freqs: Any) -> Tensor:
    """Rotate pairs (2i, 2i + 1) of the whole hidden width of x (B, S, C); `apply_rotary_emb` of LTX-Video.

    Views of x and of the tables, in which the width is cut into heads of up to 512 features, go into one launch. Only of tables
    of their own for every sequence and an x in which neither the parts of a token nor the tokens of all sequences lie at
    equal distances, a copy is made.

    Args:
        freqs: (cos, sin), each (1 | B, S, C), every angle twice, side by side.
    """
    return _over_the_width("apply_rotary_emb_ltx", x, freqs)


def apply_interleaved_rotary_emb(x: Tensor, freqs: Any) -> Tensor:
    """`apply_rotary_emb_ltx`, as LTX-2 calls it."""
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
    """Rotate pairs (i, i + D / 2) of every head of x (B, S, C) with tables of its own; of LTX-2.

    One launch of views, but for what `apply_rotary_emb_ltx` copies, and for tables that are not of one sequence and lie
    in memory as their shape has it: LTX-2 makes them with the heads behind the tokens.

    Args:
        x: (B, S, H · D), or (B, H, S, D).
        freqs: (cos, sin), each (1 | B, H, S, D / 2), every angle once; or (1 | B, S, C / 2), for pairs (i, i + C / 2) of
            x (B, S, C) of up to 512 features.
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
    """Rotate pairs (2i, 2i + 1) of x (B, S, H, D); `apply_rotary_emb` inside Mochi's attention processor.

    Args:
        freqs_cos, freqs_sin: (S, H, D / 2), every angle once. Mochi learns its frequencies: detach tables that require grad.
    """
    op = "apply_rotary_emb_mochi"
    _, tokens, heads, width = check_shape(op, "x", x, "(B, S, H, D)", (None,) * 4, "pass (B, S, H, D)")
    for name, table in (("freqs_cos", freqs_cos), ("freqs_sin", freqs_sin)):
        check_shape(op, name, table, "(S, H, D / 2)", (tokens, heads, width // 2), OF_TOKENS)
    return _by_rows(op, x, freqs_cos[None], freqs_sin[None], "interleaved")


def apply_rotary_emb_allegro(x: Tensor, freqs_cis: Any, positions: Any) -> Tensor:
    """Rotate each third of every head of x (B, H, S, D) by its own position, pairs (i, i + D / 6) of the third.

    One launch; small kernels besides join the three tables and number their rows. x is copied where neither the tokens of a
    head nor those of all sequences lie at equal distances.

    Args:
        freqs_cis: ((cos, sin), (cos, sin), (cos, sin)) of time, height and width, each (R, D / 3), `cat(f, f)`; R differs.
        positions: three int32 or int64 tensors (1 | B, S), the rows of the tokens. Without a row the third is NaN.
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
            if one is not at and one.dtype != like.dtype:  # joined, both would be of the wider one
                fix = "build all tables the same way"
                contract = f"have the dtype of the first table, {dtype_name(like.dtype)}"
                fail(op, name, contract, dtype_name(one.dtype), fix, TypeError)
        tables.append((cos, sin))
        rows.append(torch.where((at >= 0) & (at < count), at + first, -1))
        first += count
    cos, sin = (torch.cat(same) for same in zip(*tables, strict=True))  # `rotated` converts what is in float64
    thirds = x.unflatten(3, (3, width // 3))
    lines = torch.stack(rows, -1)
    if _one(thirds, 2):
        y = rotated(op, thirds.flatten(2, 3), cos, sin, "bhsd", "half", positions=lines.flatten(1))
        return y.view(thirds.shape).flatten(3)
    by_token = thirds.transpose(1, 2).flatten(0, 1)
    at = lines.expand(batch, tokens, 3).flatten(0, 1)
    y = rotated(op, by_token, cos, sin, "bhsd", "half", positions=at)
    return y.view(batch, tokens, *by_token.shape[1:]).transpose(1, 2).flatten(3)
