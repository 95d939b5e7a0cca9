"""`liger_kernel.transformers.rope`, `….qwen2vl_mrope`, `….llama4_rope`, and `liger_kernel.ops.LigerRopeFunction`.

    from liger_kernel.transformers.rope import liger_rotary_pos_emb    # before
    from fusewise.compat.liger import liger_rotary_pos_emb             # after

Theirs overwrites q and k where their memory is (B, T, H, D), and the incoming gradients; these return the same values
and gradients as new tensors and overwrite nothing.
Shape legend: B batch, T tokens, H heads (q and k may differ), D head_dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._shared import rotate_multimodal, rotate_pair


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate the first features of q and k (B, H, T, D), pairs (i, i + rotary_dim / 2), in one launch.

    Args:
        cos, sin: (1 | B, T, W) or (T, W), every angle twice (`cat(f, f)`); 4-D with a dimension of 1 at unsqueeze_dim.
        position_ids: without effect, as there.
        rotary_dim: None: W. Given where the tables hold every angle once, W = rotary_dim / 2 (GPT-OSS).
    """
    if cos.dim() == 4:
        squeezed = unsqueeze_dim if cos.shape[unsqueeze_dim] == 1 else 1
        cos, sin = cos.squeeze(squeezed), sin.squeeze(squeezed)
    width = cos.shape[-1]
    if rotary_dim is None:
        rotary_dim = min(width, q.shape[-1]) // 2 * 2
    if width not in (rotary_dim, rotary_dim // 2):
        cos, sin = cos[..., : rotary_dim // 2], sin[..., : rotary_dim // 2]
    return rotate_pair(q, k, cos=cos, sin=sin, layout="bhsd", rotary_dim=rotary_dim)


liger_rope = liger_rotary_pos_emb


class LigerRopeFunction:
    """For callers of `LigerRopeFunction.apply`; not an autograd function, but what it stands for."""

    apply = staticmethod(liger_rotary_pos_emb)


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rotate whole heads of q and k (B, H, T, D) with tables (1 | B, T, D / 2) that hold every angle once."""
    return liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k (T, H, D) with tables (T, D) that hold every angle twice; in float32, rounded once."""
    return rotate_pair(q, k, cos=cos, sin=sin, layout="thd", rotary_dim=cos.shape[-1])


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Any, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k (B, H, T, D) with tables (3, B, T, D) of the temporal, height and width angles, each twice.

    mrope_section is the number of pairs of each. One small kernel besides the launch numbers the rows of the tables.
    """
    return rotate_multimodal(q, k, cos, sin, mrope_section, "bhsd")


class LigerQwen2VLMRopeFunction:
    """For callers of `LigerQwen2VLMRopeFunction.apply`."""

    apply = staticmethod(liger_multimodal_rotary_pos_emb)


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rotate pairs (2i, 2i + 1) of xq and xk (B, T, H, D) by complex freqs_cis ((1 | B,) R, D / 2), R >= T."""
    return rotate_pair(xq, xk, cos=freqs_cis.real, sin=freqs_cis.imag, layout="bshd", pairing="interleaved")
