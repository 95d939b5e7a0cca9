"""Drop-in replacements for vLLM's RoPE and gates: custom ops and layers of `vllm.model_executor.layers`.

    from vllm._custom_ops import rotary_embedding                                    # before
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from fusewise.compat.vllm import SiluAndMul, get_rope, rotary_embedding          # after

The gates `torch.ops._C.silu_and_mul(out, x)` and so on are functions of the same name.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..ops._common import fail, shown
from ..ops.gated_linear._gate import stacked_gate
from ..ops.gated_linear._problem import Activation
from ._check import check_tensor, flag
from ._shared import gate_of_halves
from ._vllm_axes import BailingMRotaryEmbedding as BailingMRotaryEmbedding
from ._vllm_axes import Ernie4_5_VLRotaryEmbedding as Ernie4_5_VLRotaryEmbedding
from ._vllm_axes import Llama4VisionRotaryEmbedding as Llama4VisionRotaryEmbedding
from ._vllm_axes import MRotaryEmbeddingInterleaved as MRotaryEmbeddingInterleaved
from ._vllm_axes import XDRotaryEmbedding as XDRotaryEmbedding
from ._vllm_chunks import DualChunkRotaryEmbedding as DualChunkRotaryEmbedding
from ._vllm_get_rope import get_rope as get_rope
from ._vllm_mrope import MRotaryEmbedding as MRotaryEmbedding
from ._vllm_mrope import apply_interleaved_rope as apply_interleaved_rope
from ._vllm_mrope import triton_mrope as triton_mrope
from ._vllm_rope import ApplyRotaryEmb as ApplyRotaryEmb
from ._vllm_rope import RotaryEmbedding as RotaryEmbedding
from ._vllm_rope import packed_qk_rope_ as packed_qk_rope_
from ._vllm_rope import rotary_embedding as rotary_embedding
from ._vllm_scaling import DynamicNTKAlphaRotaryEmbedding as DynamicNTKAlphaRotaryEmbedding
from ._vllm_scaling import DynamicNTKScalingRotaryEmbedding as DynamicNTKScalingRotaryEmbedding
from ._vllm_scaling import Gemma4RotaryEmbedding as Gemma4RotaryEmbedding
from ._vllm_scaling import LinearScalingRotaryEmbedding as LinearScalingRotaryEmbedding
from ._vllm_scaling import Llama3RotaryEmbedding as Llama3RotaryEmbedding
from ._vllm_scaling import NTKScalingRotaryEmbedding as NTKScalingRotaryEmbedding
from ._vllm_scaling import Phi3LongRoPEScaledRotaryEmbedding as Phi3LongRoPEScaledRotaryEmbedding
from ._vllm_yarn import DeepseekScalingRotaryEmbedding as DeepseekScalingRotaryEmbedding
from ._vllm_yarn import DeepseekV4ScalingRotaryEmbedding as DeepseekV4ScalingRotaryEmbedding
from ._vllm_yarn import YaRNScalingRotaryEmbedding as YaRNScalingRotaryEmbedding


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    """Write silu(g) · u to out (..., F), (g, u) the halves of x (..., 2F). No gradient is recorded."""
    _write("silu_and_mul", out, x, "silu")


def mul_and_silu(out: Tensor, x: Tensor) -> None:
    """`silu_and_mul` with the halves swapped: the second is activated."""
    _write("mul_and_silu", out, x, "silu", gate_first=False)


def gelu_and_mul(out: Tensor, x: Tensor) -> None:
    """`silu_and_mul` with exact (erf) GELU."""
    _write("gelu_and_mul", out, x, "gelu")


def gelu_tanh_and_mul(out: Tensor, x: Tensor) -> None:
    """`silu_and_mul` with tanh GELU."""
    _write("gelu_tanh_and_mul", out, x, "gelu_tanh")


def _write(op: str, out: Tensor, x: Tensor, activation: Activation, gate_first: bool = True) -> None:
    check_tensor(op, "out", out)
    gate_of_halves(op, x, activation, out, gate_first, "x")


def _gate(op: str, x: Tensor, activation: Activation, gate_first: bool = True, impl: str = "auto") -> Tensor:
    return stacked_gate(x, activation, gate_first=gate_first, op=op, impl=impl)


# `forward_native` computes `forward` with torch operations and rounds once; vLLM's also rounds the activation.


class SiluAndMul(nn.Module):
    """silu(g) · u with (g, u) the halves of x (..., 2F); differentiable. compile_native is ignored."""

    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__()
        flag("SiluAndMul", "compile_native", compile_native)

    def forward(self, x: Tensor) -> Tensor:
        return _gate("SiluAndMul", x, "silu")

    forward_cuda = forward

    @staticmethod
    def forward_native(x: Tensor) -> Tensor:
        return _gate("SiluAndMul", x, "silu", impl="reference")


class MulAndSilu(nn.Module):
    """u · silu(g) with (u, g) the halves of x (..., 2F); differentiable."""

    def forward(self, x: Tensor) -> Tensor:
        return _gate("MulAndSilu", x, "silu", gate_first=False)

    forward_cuda = forward

    def forward_native(self, x: Tensor) -> Tensor:
        return _gate("MulAndSilu", x, "silu", gate_first=False, impl="reference")


class GeluAndMul(nn.Module):
    """gelu(g) · u with (g, u) the halves of x (..., 2F); differentiable.

    Args:
        approximate: "none" (erf) or "tanh".
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        if not isinstance(approximate, str) or approximate not in ("none", "tanh"):
            fail("GeluAndMul", "approximate", "be none or tanh", shown(approximate), "pass one of them")
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return _gate("GeluAndMul", x, "gelu" if self.approximate == "none" else "gelu_tanh")

    forward_cuda = forward

    def forward_native(self, x: Tensor) -> Tensor:
        return _gate("GeluAndMul", x, "gelu" if self.approximate == "none" else "gelu_tanh", impl="reference")

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"
