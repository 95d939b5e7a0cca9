"""The rotary functions, gates and gated MLPs of `liger_kernel.transformers`, `liger_kernel.functional` and `liger_kernel.ops`.

    from liger_kernel.transformers.rope import liger_rotary_pos_emb    # before
    from liger_kernel.transformers import LigerSwiGLUMLP
    from fusewise.compat.liger import liger_rotary_pos_emb             # after
    from fusewise.compat.liger import LigerSwiGLUMLP

Theirs overwrite q and k where their memory is (B, T, H, D), the inputs of a gate in its backward, and incoming
gradients; these return the same values and gradients as new tensors and overwrite nothing. The MLPs have the
parameters of theirs and compute the two projections with the gate, and the gradient of all three, as `gated_mlp` does.
Shape legend: B batch, T tokens, H heads (q and k may differ), D head_dim, F features of a gate.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ..ops._common import fail, shown
from ..ops.gated_linear import gated_mlp
from ..ops.gated_linear._gate import gate, stacked_gate
from ..ops.gated_linear._validate import check_features, validated
from ..ops.gated_linear.projections import is_plain, mlp, stacked_mlp
from ..ops.gated_linear.reference import as_autocast
from ._check import WRONG, flag, number, setting, shape_of, whole, width
from ._shared import complex_tables, cut, rotate_images, rotate_multimodal, rotate_pair, unit_stride


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
        cos, sin: (1 | B, T, W) or (T, W), every angle twice (`cat(f, f)`); 4-D with a dimension of 1 at unsqueeze_dim,
            1 or 2.
        position_ids: without effect, as there.
        rotary_dim: None: W. Given where the tables hold every angle once, W = rotary_dim / 2 (GPT-OSS).
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
    """`liger_kernel.functional.rope`; impl, mode and backend name kernels that are not here, and are without effect."""
    return liger_rotary_pos_emb(q, k, cos, sin, position_ids, unsqueeze_dim)


class LigerRopeFunction:
    """For callers of `LigerRopeFunction.apply`; not an autograd function, but what it stands for."""

    apply = staticmethod(liger_rotary_pos_emb)


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rotate whole heads of q and k (B, H, T, D) with tables (1 | B, T, D / 2) that hold every angle once."""
    return liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=shape_of("liger_rotary_pos_emb", "q", q, 1)[-1])


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k (T, H, D) with tables (T, D) that hold every angle twice; in float32, rounded once."""
    columns = shape_of("liger_rotary_pos_emb", "cos", cos, 2)[-1]
    return rotate_pair(q, k, cos=cos, sin=sin, layout="thd", rotary_dim=columns)


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Any, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Rotate q and k (B, H, T, D) with tables (3, B, T, D) of the temporal, height and width angles, each twice.

    mrope_section is the number of pairs of each; unsqueeze_dim is without effect, as there. One small kernel besides the
    launch numbers the rows of the tables.
    """
    return rotate_multimodal(q, k, cos, sin, mrope_section, "bhsd")


liger_qwen2vl_mrope = liger_multimodal_rotary_pos_emb


class LigerQwen2VLMRopeFunction:
    """For callers of `LigerQwen2VLMRopeFunction.apply`."""

    apply = staticmethod(liger_multimodal_rotary_pos_emb)


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rotate pairs (2i, 2i + 1) of xq and xk (B, T, H, D) by complex freqs_cis ((1 | B,) R, D / 2), R >= T."""
    return rotate_pair(xq, xk, **complex_tables(freqs_cis), layout="bshd", pairing="interleaved")


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor | None]:
    """The same with complex freqs_ci (T, D / 2), (T, 1, D / 2) or (1, T, 1, D / 2), of all batch entries. What a cast of the model
    to a real dtype left of them, cos θ, multiplies both elements of a pair, as there."""
    return rotate_images(query, key, freqs_ci)


class LigerLlama4RopeFunction:
    """For callers of `LigerLlama4RopeFunction.apply`; BLOCK_SIZE is without effect."""

    @staticmethod
    def apply(q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: int | None = None) -> tuple[Tensor, Tensor | None]:
        return liger_llama4_text_rotary_pos_emb(q, k, freqs_cis)


def _is_one(name: str, factor: float) -> bool:
    """Whether the argument of that name leaves everything as it is."""
    if not isinstance(factor, (int, float)):
        number("liger_swiglu", name, factor)
    return bool(factor == 1.0)


def _multiplied(name: str, x: Tensor, factor: float) -> Tensor:
    """x times the argument of that name."""
    if _is_one(name, factor):
        return x
    try:
        return x * factor
    except WRONG:
        check_features("liger_swiglu", "a", x)
        number("liger_swiglu", name, factor)
        raise


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """gelu_tanh(a) · b, (..., F) each, in their dtype."""
    return gate(b, a, "gelu_tanh", op="liger_geglu")


def geglu(
    a: Tensor, b: Tensor, *, impl: str | None = None, mode: str | None = None, backend: str | None = None
) -> Tensor:
    """`liger_kernel.functional.geglu`; impl, mode and backend are without effect."""
    return liger_geglu(a, b)


class LigerGELUMulFunction:
    """For callers of `LigerGELUMulFunction.apply`; a and b are saved and never written to."""

    apply = staticmethod(liger_geglu)


def _silu_mul(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    """silu(a · gate_multiplier) · b · down_multiplier; each factor that is not 1 is a kernel besides."""
    y = gate(b, _multiplied("gate_multiplier", a, gate_multiplier), "silu", op="liger_swiglu")
    return _multiplied("down_multiplier", y, down_multiplier)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) · b, (..., F) each, in their dtype."""
    return _silu_mul(a, b)


def swiglu(
    a: Tensor,
    b: Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    *,
    impl: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """`liger_kernel.functional.swiglu`; impl, mode and backend are without effect."""
    return _silu_mul(a, b, gate_multiplier, down_multiplier)


class LigerSiLUMulFunction:
    """For callers of `LigerSiLUMulFunction.apply`."""

    apply = staticmethod(_silu_mul)


def _stacked_silu_mul(y: Tensor, in_place: bool = False) -> Tensor:
    """silu of the first half of y (..., 2F), times the second; in_place is without effect: y is never overwritten."""
    return stacked_gate(y, "silu", gate_first=True, op="liger_swiglu")


class LigerFusedGateUpSiLUMulFunction:
    """For callers of `LigerFusedGateUpSiLUMulFunction.apply`."""

    apply = staticmethod(_stacked_silu_mul)


def _mlp(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> Tensor:
    """The SwiGLU MLP of (..., D), both multipliers as in `LigerSiLUMulFunction`; that of the gate undoes the fusion."""
    weights = {"gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight}
    gate_weight, up_weight, down_weight = (unit_stride(w, name, "gated_mlp") for name, w in weights.items())
    if _is_one("gate_multiplier", gate_multiplier):
        z = gated_mlp(input, gate_weight, up_weight, down_weight, activation="silu")
    else:
        try:
            a, b = functional.linear(input, gate_weight), functional.linear(input, up_weight)
            z = functional.linear(_silu_mul(a, b, gate_multiplier), down_weight)
        except WRONG:
            _explain_mlp(input, gate_weight, up_weight, down_weight)
            raise
    return _multiplied("down_multiplier", z, down_multiplier)


def _explain_mlp(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> None:
    """Where their products failed: what `gated_mlp` would have said of them."""
    x, gate_weight, up_weight, down_weight = as_autocast(x, gate_weight, up_weight, down_weight)
    weights = {"w_up": up_weight, "w_gate": gate_weight, "b_up": None, "b_gate": None}
    options = "silu", "stacked", False, "preact", "auto"
    validated("gated_mlp", x, {**weights, "w_down": down_weight, "b_down": None}, options)


class LigerMLPFunction:
    """For callers of `LigerMLPFunction.apply`."""

    apply = staticmethod(_mlp)


class LigerGEGLUMLP(nn.Module):
    """The MLP of Gemma, with the tanh form whatever `config` says, as there; the whole of it one operation."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._build(config)

    def _build(self, config: Any, intermediate_size: int | None = None, bias: bool = False) -> None:
        """Of the configuration's width where none is given."""
        op = type(self).__name__
        self.config, self.hidden_size = config, width(op, config, "hidden_size")
        self.intermediate_size = width(op, config, "intermediate_size", intermediate_size)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    # Liger binds the forward of this class and of those below to modules that are none of theirs: all it needs of self is
    # what a model's own MLP has.
    def forward(self, x: Tensor) -> Tensor:
        return mlp(x, self.gate_proj, self.up_proj, self.down_proj, activation="gelu_tanh")


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """The same, twice as wide in layers that share keys and values, where the configuration wants that."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        nn.Module.__init__(self)
        op = "LigerGEGLUMLPForGemma4"
        layers, shared = (
            whole(op, f"config.{name}", getattr(config, name, 0))
            for name in ("num_hidden_layers", "num_kv_shared_layers")
        )
        shares = layer_idx is not None and shared > 0 and whole(op, "layer_idx", layer_idx) >= layers - shared
        wide = shares and flag(op, "config.use_double_wide_mlp", getattr(config, "use_double_wide_mlp", False))
        self._build(config, width(op, config, "intermediate_size") * (2 if wide else 1))


class LigerSwiGLUMLP(LigerGEGLUMLP):
    """The MLP of Llama and most others, without biases, of a width of its own where one is given; one operation."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        nn.Module.__init__(self)
        self._build(config, intermediate_size)

    def _build(self, config: Any, intermediate_size: int | None = None, bias: bool = False) -> None:
        _check_silu(type(self).__name__, config)
        super()._build(config, intermediate_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        return mlp(x, self.gate_proj, self.up_proj, self.down_proj, activation="silu")


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """The same, of a configuration that says `hidden_activation`."""

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        named = getattr(config, "hidden_activation", None)
        _check_silu(type(self).__name__, config, "hidden_activation" if named else "hidden_act")
        LigerGEGLUMLP._build(self, config)


class LigerMLP(LigerSwiGLUMLP):
    """The same, of the configuration's width: what Liger fuses in this class alone is fused in all of these."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """The same as `LigerSwiGLUMLP`."""


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """The same, with Hunyuan's arguments."""

    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerFalconH1SwiGLUMLP(LigerSwiGLUMLP):
    """The MLP of Falcon-H1: `mlp_multipliers` scale the gate before its activation, which undoes the fusion, and the
    result, its bias included."""

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        op = type(self).__name__
        self._build(config, bias=flag(op, "config.mlp_bias", getattr(config, "mlp_bias", False)))
        multipliers = setting(op, config, "mlp_multipliers")
        try:
            self.gate_multiplier, self.down_multiplier = (number(op, "config.mlp_multipliers", f) for f in multipliers)
        except WRONG:
            contract, fix = "be the factors of the gate and of the result", "pass the model's configuration"
            fail(op, "config.mlp_multipliers", contract, shown(multipliers), fix, TypeError)

    def forward(self, x: Tensor) -> Tensor:
        projections = self.gate_proj, self.up_proj, self.down_proj
        if self.gate_multiplier == 1.0:
            z = mlp(x, *projections, activation="silu")
        else:
            try:
                z = self.down_proj(_silu_mul(self.gate_proj(x), self.up_proj(x), self.gate_multiplier))
            except WRONG:
                if is_plain(*projections):
                    _explain_mlp(x, *(projection.weight for projection in projections))
                raise
        return _multiplied("down_multiplier", z, self.down_multiplier)


class LigerFalconH1MLP(LigerFalconH1SwiGLUMLP):
    """The same."""


class LigerPhi3SwiGLUMLP(nn.Module):
    """The MLP of Phi-3, whose gate_up_proj holds the gate and then the value; one operation."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        op = "LigerPhi3SwiGLUMLP"
        _check_silu(op, config)
        self.config = config
        self.hidden_size, self.intermediate_size = (width(op, config, n) for n in ("hidden_size", "intermediate_size"))
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return stacked_mlp(x, self.gate_up_proj, self.down_proj, activation="silu", gate_first=True)


class LigerBlockSparseTop2MLP(nn.Module):
    """An expert of Mixtral in transformers 4: w1 the gate, w3 the value, w2 down; one operation."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        op = "LigerBlockSparseTop2MLP"
        _check_silu(op, config)
        self.ffn_dim, self.hidden_dim = (width(op, config, n) for n in ("intermediate_size", "hidden_size"))
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return mlp(x, self.w1, self.w3, self.w2, activation="silu")


def _check_silu(op: str, config: Any, name: str = "hidden_act") -> None:
    act = setting(op, config, name)
    if not isinstance(act, str) or act not in ("silu", "swish"):
        fail(op, "config", f"have {name} silu or swish", shown(act), "use the model's own MLP")
