"""Drop-in replacements for `flash_attn.layers.rotary`, `flash_attn.ops.triton.rotary.apply_rotary`,
`flash_attn.modules.mlp.GatedMlp` and `flash_attn.ops.activations.swiglu`.

    from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_qkv_      # before
    from fusewise.compat.flash_attn import apply_rotary_emb, apply_rotary_emb_qkv_    # after

Tables are half width (R, rotary_dim / 2), row r for position r. Shape legend: B batch, T tokens, H heads, D head_dim.

In place under autograd: the input is overwritten and the returned tensor carries the gradient, also if the input is a
leaf, as in flash-attn. Unlike in flash-attn, backward does not overwrite the incoming gradient but allocates a new one;
for a packed tensor it takes one launch and one copy of v. torch.compile cannot see a mutation inside an autograd
function, so there a call that needs a gradient rotates out of place and copies the result into the input.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..ops._common import fail, shown
from ..ops.rope import rope, rope_
from ._check import WRONG, explain, flag, number, shape_of, whole
from ._flash_attn_mlp import GatedMlp as GatedMlp
from ._flash_attn_mlp import SwiGLUFunction as SwiGLUFunction
from ._flash_attn_mlp import swiglu as swiglu
from ._packed import KV, Parts, Q, alike_in_kind, check_all, rotate_in_place
from ._shared import alike, check_rows, pairing, unit_stride


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first rotary_dim features of x (B, T, H, D), or of packed x (tokens, H, D) with cu_seqlens (B + 1,).

    Args:
        interleaved: pairs (2i, 2i + 1), GPT-J style; else (i, i + rotary_dim / 2), NeoX style.
        seqlen_offsets: position of each sequence's first token: an int, or an integer tensor (B,).
        max_seqlen: used only to check the number of table rows.
    """
    call = _call(cos, sin, interleaved, seqlen_offsets, cu_seqlens, max_seqlen)
    if inplace is not False and flag("apply_rotary_emb", "inplace", inplace):
        return rotate_in_place(x, Q, call, None)
    rotated: Tensor = rope(unit_stride(x, "x"), **call)
    return rotated


apply_rotary_emb_func = apply_rotary_emb


class ApplyRotaryEmb:
    """For callers of `ApplyRotaryEmb.apply`."""

    apply = staticmethod(apply_rotary_emb)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate x (..., T, H, D) by tables (T, P), or x (B, T, H, D) by (1 | B, T, P).

    Unlike in flash-attn, the arithmetic is float32 or wider and the result has the dtype of x.
    """
    op = "apply_rotary_emb_torch"
    shape, table = shape_of(op, "x", x, 3), shape_of(op, "cos", cos, 2)
    cos, sin = alike(op, cos, sin)
    order = pairing(op, "interleaved", interleaved)
    layout: Literal["bshd", "thd"] = "bshd"
    x = unit_stride(x, "x")
    if len(shape) == 3 and len(table) == 2:
        layout = "thd"
    elif len(shape) != 4:
        if len(table) > 2:
            fail(op, "cos", f"have shape (T, P) for x of {len(shape)} dimensions", tuple(table), "flatten x to 4")
        x = x.flatten(0, -4)
    check_rows(op, "cos", cos, shape[-3])
    rotated: Tensor = rope(x, cos=cos, sin=sin, pairing=order, rotary_dim=2 * table[-1], layout=layout)
    return rotated.view(shape)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k of qkv in place, in one launch; qkv (B, T, 3, H, D), or (B, T, num_heads_q + 2 · num_heads_k, D).

    With cos_k and sin_k (XPos), k uses those tables in a second launch.
    """
    op = "apply_rotary_emb_qkv_"
    shape = shape_of(op, "qkv", qkv)
    if len(shape) == 5:
        if shape[2] != 3:
            fail(op, "qkv", "have shape (B, T, 3, H, D)", tuple(shape), "stack q, k and v in dim 2")
        parts: Parts = (0, 1, 2)
    elif len(shape) == 4:
        heads = shape[2]
        if num_heads_q is not None:
            num_heads_q = whole(op, "num_heads_q", num_heads_q)
        if num_heads_q is None or num_heads_q < 1 or num_heads_q >= heads or (heads - num_heads_q) % 2:
            fail(
                op, "num_heads_q", f"leave an even number of the {heads} heads to k and v", num_heads_q,
                "pass the number of q heads",
            )  # fmt: skip
        heads_k = (heads - num_heads_q) // 2
        parts = ((0, num_heads_q), (num_heads_q, heads_k), (num_heads_q + heads_k, heads_k))
    else:
        fail(op, "qkv", "have 4 or 5 dimensions", tuple(shape), "pass the packed projection")
    call = _call(cos, sin, interleaved, seqlen_offsets)
    tables_k = None
    if cos_k is not None or sin_k is not None:
        tables_k = _tables(cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, "_k")
        if not all(map(alike_in_kind, tables_k, (call["cos"], call["sin"]))):
            check_all(qkv, parts, call, tables_k)
    return rotate_in_place(qkv, parts, call, tables_k)


class ApplyRotaryEmbQKV_:  # noqa: N801
    """For callers of `ApplyRotaryEmbQKV_.apply`."""

    apply = staticmethod(apply_rotary_emb_qkv_)


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotate k of kv (B, T, 2, H, D) in place."""
    _kv_shape(kv)
    return rotate_in_place(kv, KV, _call(cos, sin, interleaved, seqlen_offsets), None)


class ApplyRotaryEmbKV_:  # noqa: N801
    """For callers of `ApplyRotaryEmbKV_.apply`."""

    apply = staticmethod(apply_rotary_emb_kv_)


def _kv_shape(kv: Tensor) -> torch.Size:
    shape = shape_of("apply_rotary_emb_kv_", "kv", kv)
    if len(shape) != 5 or shape[2] != 2:
        fail("apply_rotary_emb_kv_", "kv", "have shape (B, T, 2, H, D)", tuple(shape), "stack k and v in dim 2")
    return shape


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """The function below `apply_rotary_emb`; differentiable out of place, unlike flash-attn's. `conjugate` rotates by −θ."""
    call = _call(cos, sin, interleaved, seqlen_offsets, cu_seqlens, max_seqlen)
    inverse = flag("apply_rotary", "conjugate", conjugate)
    if inplace is not False and flag("apply_rotary", "inplace", inplace):
        rope_(x, **call, inverse=inverse)
        return x
    rotated: Tensor = rope(unit_stride(x, "x"), **call, inverse=inverse)
    return rotated


def _call(
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    offset: int | Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> dict[str, Any]:
    """Convert flash-attn's arguments to those of `rope`."""
    op = "apply_rotary_emb"
    cos, sin = _tables(cos, sin)
    if isinstance(offset, Tensor):
        try:
            offset = offset.contiguous()
        except WRONG:
            explain(op, "seqlen_offsets", offset)
            raise
    order = pairing(op, "interleaved", interleaved)
    call = {"cos": cos, "sin": sin, "pairing": order, "rotary_dim": 2 * cos.shape[1], "offset": offset}
    if cu_seqlens is not None:
        if max_seqlen is not None:
            first = 0 if isinstance(offset, Tensor) else offset
            try:
                too_short = bool(first + max_seqlen > cos.shape[0])
            except WRONG:
                whole(op, "seqlen_offsets", first)
                whole(op, "max_seqlen", max_seqlen)
                raise
            if too_short:
                contract = f"have a row for each of {first} + max_seqlen = {first + max_seqlen} positions"
                fail(op, "cos", contract, f"{cos.shape[0]} rows", "build a longer table")
        call["cu_seqlens"], call["layout"] = cu_seqlens, "thd"
    return call


def _tables(cos: Tensor, sin: Tensor, of: str = "") -> tuple[Tensor, Tensor]:
    """Check the arguments cos{of} and sin{of}, both (R, rotary_dim / 2), and return them with equal strides."""
    op = "apply_rotary_emb"
    try:
        if cos.dim() == 2 and cos.stride() == sin.stride():
            return cos, sin
    except WRONG:
        explain(op, f"cos{of}", cos)
    shape = shape_of(op, f"cos{of}", cos)
    if len(shape) != 2:
        fix = "pass one table for all sequences"
        fail(op, f"cos{of}", "have shape (R, rotary_dim / 2)", tuple(shape), fix)
    return alike(op, cos, sin, of)


def _rounded(index: int) -> property:
    """A cached table, as flash-attn's modules and tests read it: in the dtype of the last call, None before the first."""

    def read(self: RotaryEmbedding) -> Tensor | None:
        return self._tables[index].to(self._dtype) if index < len(self._tables) else None

    return property(read)


class RotaryEmbedding(nn.Module):
    """`flash_attn.layers.rotary.RotaryEmbedding`: cos/sin cache of frequencies base^(−2i / dim), applied in place.

    With scale_base, XPos (arXiv 2212.10554): q is multiplied and k divided by s_i^((p − R / 2) / scale_base), where
    s_i = (2i + 0.4 dim) / 1.4 dim, p is the position and R the number of table rows.

    Tables are float32 for any dtype of qkv (flash-attn rounds them to it). They are built on first use, and rebuilt for a
    longer sequence or another device. Frequencies come from the buffer inv_freq, or, if that was cast, from
    `_compute_inv_freq`, which a subclass may override.

    Args:
        pos_idx_in_fp32: an argument of flash-attn 2.0 to 2.7.4, there before device. False: positions and angles have the
            dtype of inv_freq.
    """

    inv_freq: Tensor
    _cos_cached, _sin_cached, _cos_k_cached, _sin_k_cached = map(_rounded, range(4))
    _seq_len_cached = property(lambda self: self._tables[0].shape[0] if self._tables else 0)

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
        *,
        pos_idx_in_fp32: bool = True,
    ) -> None:
        super().__init__()
        op = "RotaryEmbedding"
        if isinstance(device, bool):
            fail(op, "device", "be a device or None", device, "pass pos_idx_in_fp32 by its name")
        if device is not None:
            try:
                torch.device(device)
            except WRONG:
                fail(op, "device", "be a device or None", shown(device), 'pass one as torch names it, as "cuda:0"')
        number(op, "dim", dim, 0)
        if scale_base is not None:
            number(op, "scale_base", scale_base)
        self.dim, self.base, self.interleaved, self.scale_base = dim, number(op, "base", base), interleaved, scale_base
        self.pos_idx_in_fp32 = flag(op, "pos_idx_in_fp32", pos_idx_in_fp32)
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._growth(device), persistent=False)
        self._tables: tuple[Tensor, ...] = ()
        self._dtype = torch.float32

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        exponents = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return self.base ** (exponents / -self.dim)

    def _growth(self, device: Any) -> Tensor:
        steps = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return (steps + 0.4 * self.dim) / (1.4 * self.dim)

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryEmbedding:
        on_meta = self.inv_freq.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if on_meta:  # meta tensors have no data to move
            device = self.inv_freq.device
            self.inv_freq = self._compute_inv_freq(device)
            self.scale = None if self.scale_base is None else self._growth(device)
        return self

    @torch.inference_mode(False)  # cached: a later call may need gradients
    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Build `_tables`: (cos, sin), with XPos (cos, sin, cos_k, sin_k), each (>= seqlen, dim / 2), on device."""
        seqlen = whole("RotaryEmbedding", "max_seqlen", seqlen, 0)
        self._dtype = dtype or torch.float32
        device = device or self.inv_freq.device
        fake = self._tables and isinstance(self._tables[0], torch._subclasses.FakeTensor)  # left by a finished trace
        kept = () if fake else self._tables
        if kept and kept[0].shape[0] >= seqlen and kept[0].device == device:
            return
        inv_freq = self.inv_freq.to(device)
        if self.pos_idx_in_fp32 and inv_freq.dtype != torch.float32:
            inv_freq = self._compute_inv_freq(device)
        positions = torch.arange(seqlen, device=device, dtype=inv_freq.dtype)
        angles = torch.outer(positions, inv_freq)
        cos, sin = angles.cos().float(), angles.sin().float()
        self._tables = cos, sin
        if self.scale_base is not None:  # not the buffer: it may be bfloat16
            power = (torch.arange(seqlen, device=device, dtype=torch.float32) - seqlen // 2) / self.scale_base
            growth = self._growth(device) ** power[:, None]
            self._tables = cos * growth, sin * growth, cos / growth, sin / growth

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate qkv in place, as `apply_rotary_emb_qkv_`. With kv (B, T, 2, H, D), qkv is q (B, T, H, D).

        Args:
            max_seqlen: table rows; required on the first call if seqlen_offset is a tensor.
        """
        op = "RotaryEmbedding"
        shape = shape_of(op, "qkv", qkv, 2)
        if max_seqlen is None:
            by_tensor = isinstance(seqlen_offset, Tensor)
            if by_tensor and not self._tables:
                fail(op, "max_seqlen", "be given with a tensor of offsets", None, "pass the largest length")
            try:
                max_seqlen = 0 if by_tensor else shape[1] + whole(op, "seqlen_offset", seqlen_offset, 0)
            except WRONG:
                explain(op, "qkv", qkv)
                raise
        self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        cos, sin, *tables_k = self._tables
        cos_k, sin_k = tables_k or (None, None)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        _kv_shape(kv)
        call = call_k = _call(cos, sin, self.interleaved, seqlen_offset)
        if cos_k is not None and sin_k is not None:
            call_k = {**call, "cos": cos_k, "sin": sin_k}
        check_all(kv, KV, call_k, None)
        return rotate_in_place(qkv, Q, call, None), rotate_in_place(kv, KV, call_k, None)
