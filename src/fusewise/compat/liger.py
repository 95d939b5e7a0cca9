"""Drop-in replacements for the RoPE, gates and MLPs of `liger_kernel.transformers`, `.functional`, `.ops`, `.megatron`.

    from liger_kernel.transformers.rope import liger_rotary_pos_emb    # before
    from liger_kernel.transformers import LigerSwiGLUMLP
    from fusewise.compat.liger import liger_rotary_pos_emb             # after
    from fusewise.compat.liger import LigerSwiGLUMLP

Liger overwrites q and k if their memory layout is (B, T, H, D), the inputs of a gate in backward, and incoming gradients.
These functions return the same values and gradients as new tensors and overwrite nothing. The MLPs keep Liger's
parameters and run as `gated_mlp`, which fuses the projections with the gate in forward and backward.
Shape legend: B batch, T tokens, H heads (q and k may differ), D head_dim, F gate features.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops._common import fail
from ._check import shape_of, whole
from ._liger_gate import LigerFusedGateUpSiLUMulFunction as LigerFusedGateUpSiLUMulFunction
from ._liger_gate import LigerGELUMulFunction as LigerGELUMulFunction
from ._liger_gate import LigerMLPFunction as LigerMLPFunction
from ._liger_gate import LigerSiLUMulFunction as LigerSiLUMulFunction
from ._liger_gate import geglu as geglu
from ._liger_gate import liger_geglu as liger_geglu
from ._liger_gate import liger_swiglu as liger_swiglu
from ._liger_gate import swiglu as swiglu
from ._liger_mlp import LigerBlockSparseTop2MLP as LigerBlockSparseTop2MLP
from ._liger_mlp import LigerFalconH1MLP as LigerFalconH1MLP
from ._liger_mlp import LigerFalconH1SwiGLUMLP as LigerFalconH1SwiGLUMLP
from ._liger_mlp import LigerGEGLUMLP as LigerGEGLUMLP
from ._liger_mlp import LigerGEGLUMLPForGemma4 as LigerGEGLUMLPForGemma4
from ._liger_mlp import LigerHunyuanV1SwiGLUMLP as LigerHunyuanV1SwiGLUMLP
from ._liger_mlp import LigerMegatronSwiGLU as LigerMegatronSwiGLU
from ._liger_mlp import LigerMLP as LigerMLP
from ._liger_mlp import LigerPhi3SwiGLUMLP as LigerPhi3SwiGLUMLP
from ._liger_mlp import LigerQwen3MoeSwiGLUMLP as LigerQwen3MoeSwiGLUMLP
from ._liger_mlp import LigerSwiGLUMLP as LigerSwiGLUMLP
from ._liger_mlp import LigerSwiGLUMLPForMuseGlimmer as LigerSwiGLUMLPForMuseGlimmer
from ._liger_mlp import LigerTiledGEGLUMLP as LigerTiledGEGLUMLP
from ._liger_mlp import LigerTiledSwiGLUMLP as LigerTiledSwiGLUMLP
from ._shared import alike, complex_tables, cut, rotate_images, rotate_multimodal, rotate_pair


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate the first rotary_dim features of q and k (B, H, T, D), pairs (i, i + rotary_dim / 2), in one launch.

    Args:
        cos, sin: (1 | B, T, W) or (T, W), `cat(f, f)`; or 4-D with size 1 at unsqueeze_dim, 1 or 2.
        position_ids: ignored, as in Liger.
        rotary_dim: None: W, at most D. Required if the tables hold every angle once, W = rotary_dim / 2 (GPT-OSS).
    """
    op = "liger_rotary_pos_emb"
    head_dim, shape = shape_of(op, "q", q, 1)[-1], shape_of(op, "cos", cos, 2)
    if len(shape) == 4:
        unsqueeze_dim = whole(op, "unsqueeze_dim", unsqueeze_dim)
        heads = next((dim for dim in (unsqueeze_dim, 1) if -4 <= dim < 4 and shape[dim] == 1), 2)
        cos, sin = cut(op, cos, sin, lambda x: x.squeeze(heads))
    columns = shape[-1]
    if rotary_dim is None:
        rotary_dim = min(columns, head_dim) // 2 * 2
    else:
        rotary_dim = whole(op, "rotary_dim", rotary_dim, 2)
    if columns not in (rotary_dim, rotary_dim // 2):
        pairs = rotary_dim // 2
        if pairs > columns:
            fail(op, "cos", f"have a column for each of {pairs} pairs", tuple(shape), "check rotary_dim")
        cos, sin = cut(op, cos, sin, lambda x: x.narrow(-1, 0, pairs))
    cos, sin = alike(op, cos, sin)
    return rotate_pair(q, k, cos=cos, sin=sin, layout="bhsd", rotary_dim=rotary_dim)


liger_rope = liger_rotary_pos_emb


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`liger_kernel.functional.rope`; impl, mode and backend select Liger's kernels and are ignored."""
    return liger_rotary_pos_emb(q, k, cos, sin, position_ids, unsqueeze_dim)


class LigerRopeFunction:
    """For callers of `LigerRopeFunction.apply`; not an autograd.Function, but differentiable."""

    apply = staticmethod(liger_rotary_pos_emb)


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k (B, H, T, D) by tables (1 | B, T, D / 2) that hold every angle once."""
    return liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=shape_of("liger_rotary_pos_emb", "q", q, 1)[-1])


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k (T, H, D) by tables (T, D), `cat(f, f)`; in float32, rounded once."""
    columns = shape_of("liger_rotary_pos_emb", "cos", cos, 2)[-1]
    cos, sin = alike("liger_rotary_pos_emb", cos, sin)
    return rotate_pair(q, k, cos=cos, sin=sin, layout="thd", rotary_dim=columns)


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Any, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor | None]:
    """M-RoPE: rotate q and k (B, H, T, D) by tables of the temporal, height and width angles.

    One launch; an extra small kernel computes table row indices.

    Args:
        cos, sin: (3, B, T, D), `cat(f, f)`.
        mrope_section: number of pairs per axis (t, h, w).
        unsqueeze_dim: ignored, as in Liger.
    """
    return rotate_multimodal(q, k, cos, sin, mrope_section, "bhsd")


liger_qwen2vl_mrope = liger_multimodal_rotary_pos_emb


class LigerQwen2VLMRopeFunction:
    """For callers of `LigerQwen2VLMRopeFunction.apply`."""

    apply = staticmethod(liger_multimodal_rotary_pos_emb)


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rotate interleaved pairs (2i, 2i + 1) of xq and xk (B, T, H, D) by complex freqs_cis ((1 | B,) R, D / 2), R >= T."""
    return rotate_pair(xq, xk, **complex_tables(freqs_cis, xq), layout="bshd", pairing="interleaved")


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rotate interleaved pairs of query and key (B, T, H, D) by freqs_ci, shared by the batch.

    Args:
        freqs_ci: complex (T, D / 2), (T, 1, D / 2) or (1, T, 1, D / 2). If casting the model to a real dtype left only cos θ,
            both elements of a pair are multiplied by it, as in Liger.
    """
    return rotate_images(query, key, freqs_ci)


class LigerLlama4RopeFunction:
    """For callers of `LigerLlama4RopeFunction.apply`; BLOCK_SIZE is ignored."""

    @staticmethod
    def apply(q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: int | None = None) -> tuple[Tensor, Tensor | None]:
        return liger_llama4_text_rotary_pos_emb(q, k, freqs_cis)
