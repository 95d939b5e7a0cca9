"""QKNormRope: a module that holds the weights of `fusewise.qk_norm_rope`; the rotation comes from a `RotaryEmbedding`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops._common import check_count, check_number, check_one_of, fail, shown, unit_stride
from ..ops.qk_norm_rope import qk_norm_rope
from ..ops.qk_norm_rope._op import IMPLEMENTATIONS
from ..ops.qk_norm_rope._problem import OVERS, Over
from .rope import RotaryEmbedding


class QKNormRope(nn.Module):
    """RMSNorm of q and k with a weight each, then the rotation, as attention layers apply them before the QK product.

    Args:
        rotary: the rotation; can be shared by all layers of a model. Its `impl` is not used.
        heads: numbers of heads of q and k, (H, KV), for `norm="all"`, which has a weight per feature of all heads.
        eps, weight_offset, norm, impl: as in `fusewise.qk_norm_rope`.
        device, dtype: of the parameters.

    The parameters `q_weight` and `k_weight` are initialized so that weight + weight_offset is 1: (D,) each, or for
    `norm="all"` (H · D,) and (KV · D,), D being the head_dim of `rotary`.

    Raises:
        TypeError, ValueError: at construction `QKNormRope: …` for its own options; at a call as `fusewise.qk_norm_rope`.

    Example:
        >>> attend = QKNormRope(RotaryEmbedding(64, base=1000000.0))
        >>> q, k = attend(torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64))
    """

    q_weight: Tensor
    k_weight: Tensor

    def __init__(
        self,
        rotary: RotaryEmbedding,
        *,
        heads: tuple[int, int] | None = None,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        norm: Over = "head",
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not (hasattr(rotary, "head_dim") and hasattr(rotary, "arguments")):  # torch.compile wraps modules
            raise TypeError(f"QKNormRope: rotary must be a RotaryEmbedding, got {type(rotary).__name__}; make one")
        check_one_of("QKNormRope", "norm", norm, OVERS)
        check_one_of("QKNormRope", "impl", impl, ("auto", *IMPLEMENTATIONS))
        for option, value in (("eps", eps), ("weight_offset", weight_offset)):
            check_number("QKNormRope", option, value, f"pass the model's {option}")
        if eps < 0:
            fail("QKNormRope", "eps", "be at least 0", eps, "pass the model's rms_norm_eps")
        both = isinstance(heads, (tuple, list)) and len(heads) == 2
        if not (heads is None if norm == "head" else both):
            wanted = "be None" if norm == "head" else "be (heads of q, heads of k)"
            raise ValueError(
                f'QKNormRope: heads must {wanted} for norm="{norm}", got {shown(heads)}; pass it for "all" alone'
            )
        self.rotary, self.eps, self.weight_offset, self.norm, self.impl = rotary, eps, weight_offset, norm, impl
        for name, count in zip(("q_weight", "k_weight"), heads or (1, 1), strict=True):
            features = check_count("QKNormRope", "heads", count) * rotary.head_dim
            self.register_parameter(name, nn.Parameter(torch.empty(features, device=device, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weights so that weight + weight_offset is 1."""
        for weight in (self.q_weight, self.k_weight):
            nn.init.constant_(weight, 1.0 - self.weight_offset)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor | None = None,
        *,
        offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        context_parallel: tuple[int, int] | None = None,
    ) -> Any:
        """(q, k), normalized and rotated. Arguments as in `fusewise.qk_norm_rope`."""
        rotation = self.rotary.arguments(
            q, positions, offset=offset, cu_seqlens=cu_seqlens, context_parallel=context_parallel
        )
        arguments = {**rotation, "impl": self.impl}
        return qk_norm_rope(
            q, k, unit_stride(self.q_weight), unit_stride(self.k_weight), eps=self.eps, weight_offset=self.weight_offset,
            norm=self.norm, **arguments,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"eps={self.eps:g}, weight_offset={self.weight_offset:g}, norm={self.norm!r}"
