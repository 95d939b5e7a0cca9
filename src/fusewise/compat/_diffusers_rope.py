"""The rotary functions of diffusers whose angles are shared by all heads of a token; exported by `compat.diffusers`.

For elements (a, b) of a pair and the angle θ of its token and frequency:

    (y_a, y_b) = (x_a cos θ − x_b sin θ, x_b cos θ + x_a sin θ)

Computed in float32 (float64 if x is float64) and rounded once to the dtype of x. In diffusers, some models round the tables
and the products, others rotate in float64. Tables are float32, bfloat16, float16 or complex64; float64 and complex128 tables
are converted unless x is float64. Tables get no gradient. `cat(f, f)` and `repeat_interleave(f, 2)` are tables in which every
angle f of a token occurs twice; one copy is read.
Errors are TypeError or ValueError: `<function or rope>: <argument> must <contract>, got <value>; <one fix>`.
Shape legend: B batch, S tokens, H heads, D head_dim, P pairs, W = 2P rotated features, R table rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops._common import dtype_name, fail
from ._check import check_shape, flag, shape_of, whole
from ._shared import alike, complex_tables, rotate_pair

Pair = tuple[Tensor, Tensor | None]
OF_TOKENS = "pass that of the tokens"
_BSHD: Any = "(B, S, H, D)", (None,) * 4, "pass (B, S, H, D), the heads behind the tokens"
_BHSD: Any = "(B, H, S, D)", (None,) * 4, "pass (B, H, S, D), the heads before the tokens"


def apply_rotary_emb(
    x: Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1, sequence_dim: int = 2
) -> Tensor:
    """Rotate x (B, H, S, D), or (B, S, H, D) with sequence_dim=1. A 3-D x gives a result with B = 1, as in diffusers.

    Replaces `diffusers.models.embeddings.apply_rotary_emb`, used by Flux, HunyuanVideo, CogVideoX, Bria, Chroma and most others.

    Args:
        freqs_cis: (cos, sin), each (1 | S, D), every angle twice; with use_real=False complex (1 | B, S, D / 2) for
            x (B, S, H, D). float64 tables (Lumina) are converted unless x is float64.
        use_real_unbind_dim: -1: pairs (2i, 2i + 1), tables `repeat_interleave(f, 2)`; -2: pairs (i, i + D / 2), `cat(f, f)`.
    """
    op = "apply_rotary_emb"
    if not flag(op, "use_real", use_real):
        return _rotated_by_complex(op, x, freqs_cis, batched=True)
    if whole(op, "sequence_dim", sequence_dim) not in (1, 2):
        fail(op, "sequence_dim", "be 1 or 2", sequence_dim, "name the dimension of the tokens")
    return _rotated_by_pairs(op, x, freqs_cis, use_real_unbind_dim, "bhsd" if sequence_dim == 2 else "bshd")


def apply_rotary_emb_qwen(x: Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1) -> Tensor:
    """`apply_rotary_emb_qwen` of Qwen-Image.

    Args:
        x: (B, H, S, D) as in `apply_rotary_emb`; (B, S, H, D) with use_real=False.
        freqs_cis: (cos, sin) as in `apply_rotary_emb`; complex (S, D / 2) with use_real=False.
    """
    op = "apply_rotary_emb_qwen"
    if not flag(op, "use_real", use_real):
        return _rotated_by_complex(op, x, freqs_cis, batched=False)
    return _rotated_by_pairs(op, x, freqs_cis, use_real_unbind_dim, "bhsd")


def _rotated_by_pairs(op: str, x: Tensor, tables: Any, unbind_dim: int, layout: str) -> Tensor:
    if whole(op, "use_real_unbind_dim", unbind_dim) not in (-1, -2):
        fail(op, "use_real_unbind_dim", "be -1 or -2", unbind_dim, "pass that of the model")
    if not isinstance(tables, (tuple, list)) or len(tables) != 2:
        fail(op, "freqs_cis", "be (cos, sin)", type(tables).__name__, "pass both tables, or use_real=False", TypeError)
    if len(shape := shape_of(op, "x", x, 3)) == 3:
        x, shape = x[None], torch.Size((1, *shape))
    tokens, width = shape[2 if layout == "bhsd" else 1], shape[3]
    for name, table in zip(("cos", "sin"), tables, strict=True):
        fix = "check sequence_dim, or cut the tables to the tokens"
        check_shape(op, name, table, "(1 | S, D)", ((1, tokens), width), fix)
    cos, sin = (table.to(x.device).expand(tokens, width) for table in tables)
    return rotated(op, x, cos, sin, layout, "interleaved" if unbind_dim == -1 else "half", rotary_dim=width)


def _rotated_by_complex(op: str, x: Tensor, freqs_cis: Tensor, batched: bool) -> Tensor:
    """Rotate x (B, S, H, D) by complex freqs_cis ((1 | B,) S, D / 2), with the batch dimension or without."""
    batch, tokens, _, width = check_shape(op, "x", x, *_BSHD)
    form, sizes = (
        ("(1 | B, S, D / 2)", ((1, batch), tokens, width // 2)) if batched else ("(S, D / 2)", (tokens, width // 2))
    )
    check_shape(op, "freqs_cis", freqs_cis, form, sizes, OF_TOKENS)
    return by_complex(x, freqs_cis, "bshd")


def table_dtype(x: Tensor, table: Tensor) -> torch.dtype:
    """The dtype of the table; float32 for float64, complex64 for complex128, unless x is float64."""
    narrower = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    return table.dtype if x.dtype == torch.float64 else narrower.get(table.dtype, table.dtype)


def rotated(op: str, x: Tensor, cos: Tensor, sin: Tensor, layout: str, pairing: str, **options: Any) -> Tensor:
    """Rotate x by tables (R, …) or (1 | B, R, …) of any float dtype and strides."""
    return _rotated_both(op, x, None, cos, sin, layout, pairing, **options)[0]


def _rotated_both(
    op: str, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, layout: str, pairing: str, **options: Any
) -> Pair:
    cos, sin = alike(op, cos.to(table_dtype(q, cos)), sin.to(table_dtype(q, sin)))
    return rotate_pair(q, k, cos=cos, sin=sin, layout=layout, pairing=pairing, **options)


def by_complex(x: Tensor, freqs: Tensor, layout: str, **options: Any) -> Tensor:
    """Rotate interleaved pairs of x by complex tables."""
    tables = complex_tables(freqs.to(table_dtype(x, freqs)))
    return rotate_pair(x, None, **tables, layout=layout, pairing="interleaved", **options)[0]


def both_tables(op: str, name: str, tables: Any) -> tuple[Any, Any]:
    """Unpack an argument (cos, sin)."""
    if not isinstance(tables, (tuple, list)) or len(tables) != 2:
        fail(op, name, "be (cos, sin)", type(tables).__name__, "pass both tables", TypeError)
    return tables[0], tables[1]


def apply_rotary_emb_wan(hidden_states: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Rotate interleaved pairs (2i, 2i + 1) of hidden_states (B, S, H, D).

    Replaces `apply_rotary_emb` inside the attention processors of Wan, Wan-Animate, ChronoEdit, SkyReels-V2 and SANA-Video.

    Args:
        freqs_cos, freqs_sin: (1 | B, S, 1, D), `repeat_interleave(f, 2)`. Column 2i of freqs_cos and 2i + 1 of freqs_sin are read.
    """
    op = "apply_rotary_emb_wan"
    batch, tokens, _, width = check_shape(op, "hidden_states", hidden_states, *_BSHD)
    for name, table in (("freqs_cos", freqs_cos), ("freqs_sin", freqs_sin)):
        check_shape(op, name, table, "(1 | B, S, 1, D)", ((1, batch), tokens, 1, width), OF_TOKENS)
    cos, sin = freqs_cos[:, :, 0, 0::2], freqs_sin[:, :, 0, 1::2]
    return rotated(op, hidden_states, cos, sin, "bshd", "interleaved")


def apply_rotary_emb_transposed(hidden_states: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate interleaved pairs (2i, 2i + 1) of hidden_states (B, S, H, D), as in Helios.

    Args:
        freqs_cis: (1 | B, S, 2D), D columns of cos, then D of sin, each `repeat_interleave(f, 2)`. Columns 2i (cos) and
            D + 2i + 1 (sin) are read.
    """
    op = "apply_rotary_emb_transposed"
    batch, tokens, _, width = check_shape(op, "hidden_states", hidden_states, *_BSHD)
    check_shape(op, "freqs_cis", freqs_cis, "(1 | B, S, 2D)", ((1, batch), tokens, 2 * width), OF_TOKENS)
    cos, sin = freqs_cis[..., :width:2], freqs_cis[..., width + 1 :: 2]
    return rotated(op, hidden_states, cos, sin, "bshd", "interleaved")


def apply_rotary_emb_qwen_neuron(x: Tensor, freqs: Tensor) -> Tensor:
    """Rotate interleaved pairs (2i, 2i + 1) of x (B, S, H, D) by angles freqs (S, D / 2) in radians, as in Qwen-Image."""
    op = "apply_rotary_emb_qwen_neuron"
    _, tokens, _, width = check_shape(op, "x", x, *_BSHD)
    check_shape(op, "freqs", freqs, "(S, D / 2)", (tokens, width // 2), OF_TOKENS)
    angles = freqs.to(table_dtype(x, freqs))
    return rotate_pair(x, None, angles=angles, layout="bshd", pairing="interleaved")[0]


def apply_rotary_emb_anyflow(hidden_states: Tensor, freqs: Tensor) -> Tensor:
    """Rotate interleaved pairs (2i, 2i + 1) of hidden_states (B, H, S, D) by complex freqs (1 | B, 1, S, D / 2).

    Replaces `apply_rotary_emb` of AnyFlow, and of Wan before July 2025.
    """
    op = "apply_rotary_emb_anyflow"
    batch, _, tokens, width = check_shape(op, "hidden_states", hidden_states, *_BHSD)
    return by_complex(hidden_states, _of_tokens(op, freqs, batch, tokens, width), "bhsd")


def apply_rotary_emb_sana_wm(hidden_states: Tensor, freqs: Tensor) -> Tensor:
    """`apply_rotary_emb_anyflow` for hidden_states (B, H, D, S), features before tokens; `_apply_rotary_emb` of SANA-WM.

    In the result, as in diffusers, the features of a token are contiguous. Where those of hidden_states are not, it is copied.
    """
    op = "apply_rotary_emb_sana_wm"
    form = "(B, H, D, S)", (None,) * 4, "pass (B, H, D, S), the tokens last"
    batch, _, width, tokens = check_shape(op, "hidden_states", hidden_states, *form)
    freqs = _of_tokens(op, freqs, batch, tokens, width)
    return by_complex(hidden_states.transpose(2, 3), freqs, "bhsd").transpose(2, 3)


def _of_tokens(op: str, freqs: Tensor, batch: int, tokens: int, width: int) -> Tensor:
    """Check complex freqs (1 | B, 1, S, D / 2) and return them without the dimension of the heads."""
    check_shape(op, "freqs", freqs, "(1 | B, 1, S, D / 2)", ((1, batch), 1, tokens, width // 2), OF_TOKENS)
    return freqs[:, 0]


def apply_rotary_emb_joyimage(xq: Tensor, xk: Tensor, freqs_cis: Any) -> Pair:
    """Rotate interleaved pairs (2i, 2i + 1) of xq and xk (B, S, H, D) in one launch; `_apply_rotary_emb` of JoyImage.

    Args:
        freqs_cis: (cos, sin), each (S, D), `repeat_interleave(f, 2)`.
    """
    return _joyimage("apply_rotary_emb_joyimage", xq, xk, freqs_cis, batched=False)


def apply_rotary_emb_batched(xq: Tensor, xk: Tensor, freqs_cis: Any) -> Pair:
    """`apply_rotary_emb_joyimage` with tables (1 | B, S, D); `_apply_rotary_emb_batched` of JoyImage's edit model."""
    return _joyimage("apply_rotary_emb_batched", xq, xk, freqs_cis, batched=True)


def _joyimage(op: str, xq: Tensor, xk: Tensor, freqs_cis: Any, batched: bool) -> Pair:
    batch, tokens, _, width = check_shape(op, "xq", xq, *_BSHD)
    check_shape(op, "xk", xk, "(B, S, H, D)", (batch, tokens, None, width), "rotate q and k that differ in two calls")
    cos, sin = both_tables(op, "freqs_cis", freqs_cis)
    form, sizes = ("(1 | B, S, D)", ((1, batch), tokens, width)) if batched else ("(S, D)", (tokens, width))
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(op, name, table, form, sizes, OF_TOKENS)
    return _rotated_both(op, xq, xk, cos.to(xq.device), sin.to(xq.device), "bshd", "interleaved")


def apply_rotary_emb_minimax_h3(hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Partial rotary: rotate the first W features of hidden_states (B, S, H, D), pairs (i, i + W / 2); the rest is copied.

    Replaces `_apply_rotary_emb` of MiniMax-H3.

    Args:
        cos, sin: (S, W), `cat(f, f)`.
    """
    return _leading("apply_rotary_emb_minimax_h3", "hidden_states", hidden_states, cos, sin, "bshd")


def apply_partial_rotary_emb_minimax_music3(hidden_states: Tensor, rotary_emb: Any) -> Tensor:
    """`apply_rotary_emb_minimax_h3` with rotary_emb = (cos, sin); `_apply_partial_rotary_emb` of MiniMax-Music3."""
    op = "apply_partial_rotary_emb_minimax_music3"
    return _leading(op, "hidden_states", hidden_states, *both_tables(op, "rotary_emb", rotary_emb), "bshd")


def apply_partial_rotary_emb(x: Tensor, freqs_cis: Any) -> Tensor:
    """`apply_rotary_emb_minimax_h3` for x (B, H, S, D), freqs_cis = (cos, sin); a method of `StableAudioAttnProcessor2_0`."""
    op = "apply_partial_rotary_emb"
    cos, sin = both_tables(op, "freqs_cis", freqs_cis)
    return _leading(op, "x", x, cos, sin, "bhsd")


def _leading(op: str, name: str, x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    form: Any = _BSHD if layout == "bshd" else _BHSD
    tokens = check_shape(op, name, x, *form)[1 if layout == "bshd" else 2]
    width = check_shape(op, "cos", cos, "(S, W)", (tokens, None), OF_TOKENS)[1]
    check_shape(op, "sin", sin, "(S, W)", (tokens, width), "build both tables the same way")
    cos, sin = cos.to(x.device), sin.to(x.device)
    return rotated(op, x, cos, sin, layout, "half", rotary_dim=width)


def apply_rotary_partial(t: Tensor, freqs: Tensor) -> Tensor:
    """Partial rotary: rotate the first W features of t (B, S, H, D), pairs (i, i + W / 2), by angles in radians.

    Replaces `_apply_rotary_partial` of Stable Audio 3 and of the SAME autoencoder.

    Args:
        freqs: (R, W), R >= S, `cat(f, f)`. The last S rows are used.
    """
    op = "apply_rotary_partial"
    tokens = check_shape(op, "t", t, *_BSHD)[1]
    rows, width = check_shape(op, "freqs", freqs, "(R, W)", (None, None), "pass the angles of the positions")
    if rows < tokens:
        fail(op, "freqs", f"have at least S = {tokens} rows", rows, "pass the angles of all tokens")
    angles = freqs[rows - tokens :].to(table_dtype(t, freqs))
    return rotate_pair(t, None, angles=angles, layout="bshd", rotary_dim=width)[0]


def apply_rope_hidream(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Pair:
    """Rotate interleaved pairs (2i, 2i + 1) of xq and xk (B, S, H, D) in one launch; `apply_rope` of HiDream.

    Args:
        freqs_cis: (1 | B, S, 1, D / 2, 2, 2), a matrix [[cos θ, −sin θ], [sin θ, cos θ]] per pair; its first column is read.
    """
    op = "apply_rope_hidream"
    batch, tokens, _, width = check_shape(op, "xq", xq, *_BSHD)
    check_shape(op, "xk", xk, "(B, S, H, D)", (batch, tokens, None, width), "rotate q and k that differ in two calls")
    sizes = (1, batch), tokens, 1, width // 2, 2, 2
    check_shape(op, "freqs_cis", freqs_cis, "(1 | B, S, 1, D / 2, 2, 2)", sizes, OF_TOKENS)
    return _rotated_both(op, xq, xk, *_columns(freqs_cis[:, :, 0]), "bshd", "interleaved")


def apply_rope_prx(xq: Tensor, freqs_cis: Tensor) -> Tensor:
    """`apply_rope_hidream` for one xq (B, H, S, D) and freqs_cis (1 | B, 1, S, D / 2, 2, 2); `apply_rope` of PRX."""
    op = "apply_rope_prx"
    batch, _, tokens, width = check_shape(op, "xq", xq, *_BHSD)
    sizes = (1, batch), 1, tokens, width // 2, 2, 2
    check_shape(op, "freqs_cis", freqs_cis, "(1 | B, 1, S, D / 2, 2, 2)", sizes, OF_TOKENS)
    return rotated(op, xq, *_columns(freqs_cis[:, 0].to(xq.device)), "bhsd", "interleaved")


def apply_rotary_kandinsky5(x: Tensor, rope: Tensor) -> Tensor:
    """`apply_rope_hidream` for one x (B, S, H, D) and rope ((1 | B,) S, 1, D / 2, 2, 2); `apply_rotary` of
    Kandinsky 6, and inside Kandinsky 5's attention processor, which rounds to bfloat16 for any dtype of x."""
    op = "apply_rotary_kandinsky5"
    batch, tokens, _, width = check_shape(op, "x", x, *_BSHD)
    if len(shape_of(op, "rope", rope)) == 5:
        rope = rope[None]
    sizes = (1, batch), tokens, 1, width // 2, 2, 2
    check_shape(op, "rope", rope, "(1 | B, S, 1, D / 2, 2, 2)", sizes, OF_TOKENS)
    return rotated(op, x, *_columns(rope[:, :, 0]), "bshd", "interleaved")


def _columns(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Views of cos θ and sin θ in rotation matrices."""
    return matrices[..., 0, 0], matrices[..., 1, 0]


def apply_rotary_pos_emb_kolors(x: Tensor, rope_cache: Tensor) -> Tensor:
    """Rotate the first 2P features of x (S, B, H, D), pairs (2i, 2i + 1); `apply_rotary_pos_emb` of Kolors' text encoder.

    Args:
        rope_cache: (R, 1 | B, P, 2), R >= S, of (cos θ, sin θ). The first S rows are used.
    """
    op = "apply_rotary_pos_emb_kolors"
    tokens, batch, *_ = check_shape(op, "x", x, "(S, B, H, D)", (None,) * 4, "pass the tokens first")
    form, sizes = "(R, 1 | B, P, 2)", (None, (1, batch), None, 2)
    rows, _, pairs, _ = check_shape(op, "rope_cache", rope_cache, form, sizes, "pass the cache of the model")
    if rows < tokens:
        fail(op, "rope_cache", f"have at least S = {tokens} rows", rows, "build a longer cache")
    cos, sin = rope_cache[:tokens].transpose(0, 1).unbind(-1)
    return rotated(op, x, cos, sin, "sbhd", "interleaved", rotary_dim=2 * pairs)


def rope_apply(x: Tensor, grid_sizes: Tensor, freqs: Tensor, time_stride: int = 1) -> Tensor:
    """3-D RoPE of Wan-Animate 2: rotate interleaved pairs of x (B, S, H, D) by each token's frame, row and column.

    The first pairs use the frame index, the next D / 2 // 3 the row, the last D / 2 // 3 the column. Tokens beyond the
    F · Y · X of a grid pass through. The result has the dtype of x (diffusers: float32). Extra small kernels compute the
    table rows of the tokens and append a row to the table; diffusers synchronizes with the device instead.

    Args:
        grid_sizes: integers (B, 3), (F, Y, X) of each sequence, on any device.
        freqs: complex (R, D / 2); row r is for frame, row or column r. An index outside the table gives NaN.
        time_stride: frame f uses row f · time_stride.
    """
    op = "rope_apply"
    batch, tokens, _, width = check_shape(op, "x", x, *_BSHD)
    check_shape(op, "grid_sizes", grid_sizes, "(B, 3)", (batch, 3), "pass the grid of every sequence")
    if grid_sizes.is_floating_point() or grid_sizes.is_complex() or grid_sizes.dtype == torch.bool:
        fail(op, "grid_sizes", "have an integer dtype", dtype_name(grid_sizes.dtype), "pass whole numbers", TypeError)
    rows, pairs = check_shape(op, "freqs", freqs, "(R, D / 2)", (None, width // 2), "pass one column a pair")
    stride = whole(op, "time_stride", time_stride, 0)
    frames, height, columns = grid_sizes.to(x.device, torch.int64).T.unsqueeze(-1).unbind(0)  # each (B, 1)
    plane, at = height * columns, torch.arange(tokens, device=x.device)
    in_frame = at % plane.clamp_min(1)
    frame, row, column = at // plane.clamp_min(1), in_frame // columns.clamp_min(1), in_frame % columns.clamp_min(1)
    axes = torch.stack((frame * stride, row, column))
    axes = torch.where(axes < rows, axes, -1)  # outside the table: NaN
    axes = torch.where(at < frames * plane, axes, rows)  # padding: the appended row, the identity
    freqs = freqs.to(table_dtype(x, freqs))
    freqs = torch.cat((freqs, freqs.new_ones(1, pairs)))
    sections = pairs - 2 * (pairs // 3), pairs // 3, pairs // 3
    tables = complex_tables(freqs)
    return rotate_pair(x, None, **tables, positions=axes, sections=sections, layout="bshd", pairing="interleaved")[0]
