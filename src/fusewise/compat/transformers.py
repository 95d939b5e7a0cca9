"""Drop-in replacements for `apply_rotary_pos_emb` and the gated MLPs of Hugging Face transformers' model files.

    from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb    # before
    from fusewise.compat.transformers import LlamaMLP, apply_rotary_pos_emb                # after

Each model file of transformers 4 and 5 defines its own rotary function. They follow the conventions below, one function
each. The result has the dtype of q; some models return the promoted dtype if the tables have another dtype.
Tables get no gradient. In `cat(f, f)` and `repeat_interleave(f, 2)` every angle f of a token occurs twice.
Shape legend: B batch, T tokens, H heads (q and k may differ), D head_dim, W table width.

    apply_rotary_pos_emb                llama and most others, also partial rotary: gpt_neox, phi3, glm4_moe, olmo, esm
    apply_rotary_pos_emb_single         gemma3n, gemma4: one tensor
    apply_rotary_pos_emb_qwen4_exp      one tensor or two
    apply_rotary_pos_emb_interleaved    cohere, cohere2, blt: interleaved pairs, tables `repeat_interleave(f, 2)`
    apply_rotary_pos_emb_glm            glm, glm4, ernie4_5, helium, moonshine: interleaved pairs, tables `cat(f, f)`
    apply_rotary_pos_emb_interleave     deepseek_v3, longcat_flash, glm4_moe_lite: reads interleaved, writes halves
    apply_rotary_pos_emb_deepseek_v4    one tensor, trailing features, interleaved
    apply_rotary_pos_emb_gpt_oss        tables that hold every angle once
    apply_rotary_pos_emb_openai_privacy_filter    the same with interleaved pairs
    apply_rotary_pos_emb_gptj           gptj, codegen: (tensor, sin, cos)
    apply_rotary_pos_emb_nanochat       nanochat: rotation by −θ
    apply_rotary_pos_emb_vision         the vision towers of qwen2_vl, glm4v and others: no batch, heads after tokens
    apply_rotary_pos_emb_dinov3         dinov3_vit: the first tokens do not rotate
    apply_multimodal_rotary_pos_emb     qwen2_vl and qwen2_5_vl of transformers 4
    apply_rotary_emb_llama4, apply_rotary_emb_deepseek_v2    complex tables
    vision_apply_rotary_emb             the vision tower of llama4: complex tables shared by all images
    apply_multidimensional_rope         the vision tower of gemma4: each part of a head by its own table

The MLPs have the five forms below, each named after its best-known model. Parameters keep their names, so checkpoints
load. The MLP runs as one operation, `gated_mlp`; a projection that is no longer a plain `nn.Linear` is called as a module,
and only the gate is fused. An activation that `gated_linear` does not have is rejected at construction.

    GemmaMLP         gate_proj, up_proj, down_proj without biases: mistral, qwen2, qwen3, olmo, cohere, stablelm
    Gemma2MLP        the same with `hidden_activation`: vaultgemma; gemma3 with this signature
    LlamaMLP         the same with biases if `mlp_bias`: granite, smollm3, helium, chameleon
    DeepseekV3MLP    the same with an intermediate_size argument: qwen2_moe, qwen3_moe, glm4_moe, dots1, longcat_flash
    Phi3MLP          gate_up_proj (gate first) and down_proj: glm, glm4, dia, phi4_multimodal
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from ..ops._common import fail, shown
from ..ops.gated_linear._problem import Activation
from ..ops.gated_linear.projections import mlp, stacked_mlp
from ._check import check_shape, check_tensor, explain, flag, setting, shape_of, whole, width
from ._shared import (
    activation_module,
    alike,
    complex_tables,
    cut,
    fused_activation,
    rotate_images,
    rotate_multimodal,
    rotate_pair,
)

Pair = tuple[Tensor, Tensor | None]


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> Pair:
    """Rotate the first W features of q and k, pairs (i, i + W / 2) (NeoX style), in one launch.

    Args:
        q, k: (B, H, T, D); (B, T, H, D) with unsqueeze_dim=2. k may be None and is then returned as None.
        cos, sin: (1 | B, T, W), `cat(f, f)`; (T, W) for q and k (T, H, D) without batch and unsqueeze_dim=1; (R, W) with
            position_ids, as before transformers 4.38.
        position_ids: (1 | B, T), rows of tables (R, W); ignored for other tables, as in transformers. An int is taken as
            unsqueeze_dim, which is the fifth parameter in transformers 5.
    """
    return _rotate(q, k, cos, sin, position_ids, unsqueeze_dim, per_column=1)


def apply_rotary_pos_emb_single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """`apply_rotary_pos_emb` for one tensor."""
    return _rotate(x, None, cos, sin, None, unsqueeze_dim, per_column=1)[0]


def apply_rotary_pos_emb_qwen4_exp(
    q: Tensor, k: Tensor | None = None, cos: Any = None, sin: Any = None, unsqueeze_dim: int = 1
) -> Tensor | Pair:
    """`apply_rotary_pos_emb`; without k it returns the rotated q alone, not a pair."""
    rotated = _rotate(q, k, cos, sin, None, unsqueeze_dim, per_column=1)
    return rotated[0] if k is None else rotated


def apply_rotary_pos_emb_interleaved(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> Pair:
    """`apply_rotary_pos_emb` with interleaved pairs (2i, 2i + 1) and tables (1 | B, T, W), `repeat_interleave(f, 2)`."""
    return _rotate(q, k, cos, sin, position_ids, unsqueeze_dim, per_column=1, pairing="interleaved")


def apply_rotary_pos_emb_glm(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> Pair:
    """`apply_rotary_pos_emb` with interleaved pairs (2i, 2i + 1) and tables (1 | B, T, W), `cat(f, f)`."""
    columns = shape_of("apply_rotary_pos_emb", "cos", cos, 2)[-1]
    cos, sin = cut("apply_rotary_pos_emb", cos, sin, lambda x: x.narrow(-1, 0, columns // 2))
    return _rotate(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim=columns, pairing="interleaved")


def apply_rotary_pos_emb_interleave(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> Pair:
    """`apply_rotary_pos_emb` that reads pairs (2i, 2i + 1) and writes pairs (i, i + D / 2) of whole heads.

    Args:
        cos, sin: (1 | B, T, D), `cat(f, f)`.
    """
    return _rotate(q, k, cos, sin, position_ids, unsqueeze_dim, pairing="interleaved_to_half")


def apply_rotary_pos_emb_deepseek_v4(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """Rotate the last 2W features of x, pairs (2i, 2i + 1), by tables (1 | B, T, W) that hold every angle once."""
    rotated = 2 * shape_of("apply_rotary_pos_emb", "cos", cos, 2)[-1]
    arguments: dict[str, Any] = {"rotary_dim": rotated, "rotary_start": -rotated, "pairing": "interleaved"}
    return _rotate(x, None, cos, sin, None, unsqueeze_dim, **arguments)[0]


def apply_rotary_pos_emb_gpt_oss(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> Pair:
    """`apply_rotary_pos_emb` of 2W features, pairs (i, i + W), by tables (1 | B, T, W) that hold every angle once."""
    return _rotate(q, k, cos, sin, position_ids, unsqueeze_dim, per_column=2)


def apply_rotary_pos_emb_openai_privacy_filter(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> Pair:
    """`apply_rotary_pos_emb_gpt_oss` with interleaved pairs (2i, 2i + 1)."""
    return _rotate(q, k, cos, sin, position_ids, unsqueeze_dim, per_column=2, pairing="interleaved")


def apply_rotary_pos_emb_gptj(tensor: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Rotate interleaved pairs (2i, 2i + 1) of tensor (B, T, H, 2W) by tables (1 | B, T, W) that hold every angle once."""
    return _rotate(tensor, None, cos, sin, None, 2, per_column=2, pairing="interleaved")[0]


def apply_rotary_pos_emb_nanochat(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> Pair:
    """`apply_rotary_pos_emb` by −θ."""
    return _rotate(q, k, cos, sin, position_ids, unsqueeze_dim, per_column=1, inverse=True)


def apply_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Rotate the first W features of q and k (T, H, D) by tables (T, W), or (B, T, H, D) by (B, T, W); `cat(f, f)`."""
    return _rotate(q, k, cos, sin, None, -2, per_column=1)


def apply_rotary_pos_emb_dinov3(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **kwargs: Any) -> Pair:
    """`apply_rotary_pos_emb` of the last S of the tokens of q and k (B, H, T, D) by tables (S, D), `cat(f, f)`.

    One launch; two small kernels put rows of the identity before the tables, for the class and register tokens.
    """
    op = "apply_rotary_pos_emb"
    tokens = check_shape(op, "q", q, "(B, H, T, D)", (None,) * 4, "pass the heads of the model")[2]
    patches, width = check_shape(op, "cos", cos, "(S, D)", (None, q.shape[3]), "pass the tables of the patches")
    check_shape(op, "sin", sin, "(S, D)", (patches, width), "build both tables the same way")
    if patches > tokens:
        fail(
            op, "cos", f"have at most a row for each of the {tokens} tokens", patches, "pass the tables of the patches"
        )
    first = (0, 0, tokens - patches, 0)
    return _rotate(q, k, pad(cos, first, value=1), pad(sin, first), None, 0)


def apply_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Any, unsqueeze_dim: int = 1
) -> Pair:
    """M-RoPE: rotate q and k by tables (3, B, T, D), `cat(f, f)`, of the temporal, height and width angles.

    One launch; an extra small kernel computes table row indices.

    Args:
        mrope_section: number of pairs per axis (t, h, w).
    """
    dims, table_dims = (len(shape_of("apply_rotary_pos_emb", name, x)) for name, x in (("q", q), ("cos", cos)))
    return rotate_multimodal(q, k, cos, sin, mrope_section, _layout(dims, table_dims - 1, unsqueeze_dim))


def apply_rotary_emb_llama4(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Pair:
    """Rotate interleaved pairs (2i, 2i + 1) of xq and xk (B, T, H, D) by complex freqs_cis (1 | B, T, D / 2)."""
    return rotate_pair(xq, xk, **complex_tables(freqs_cis, xq, 1), layout="bshd", pairing="interleaved")


def apply_rotary_emb_deepseek_v2(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Pair:
    """Rotate interleaved pairs (2i, 2i + 1) of xq and xk (B, H, T, D) by complex freqs_cis (1 | B, T, D / 2)."""
    return rotate_pair(xq, xk, **complex_tables(freqs_cis, xq, 2), layout="bhsd", pairing="interleaved")


def vision_apply_rotary_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> Pair:
    """Rotate interleaved pairs (2i, 2i + 1) of query and key (B, T, H, D) by complex freqs_ci (T, 1, D / 2).

    If a cast to a real dtype left only cos θ, both elements of a pair are multiplied by it, as in transformers.
    """
    tokens, pairs = shape_of("rope", "query", query, 4)[1], shape_of("rope", "freqs_ci", freqs_ci, 1)[-1]
    if freqs_ci.numel() != tokens * pairs:  # of a longer table, the first rows would be taken
        fix = "pass the angles of the image's tokens"
        fail("rope", "freqs_ci", f"have a row for each of the {tokens} tokens", tuple(freqs_ci.shape), fix)
    return rotate_images(query, key, freqs_ci)


def apply_multidimensional_rope(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, unsqueeze_dim: int = 2
) -> Tensor:
    """Rotate each of the N equal parts of every head by its own table, pairs (i, i + D / 2N); Gemma 4's vision tower.

    One launch: the parts of a head are the tokens of `rope`, and the tokens its batch. x is copied where (B, T) of it cannot be
    flattened, and the tables are where x has a batch and they have not.

    Args:
        x: (B, T, H, D); (B, H, T, D) with unsqueeze_dim=1.
        cos, sin: (1 | B, T, D), for each part its `cat(f, f)`.
        position_ids: (…, N), of which only N is used, as in transformers.
    """
    op = "apply_multidimensional_rope"
    sizes = check_shape(op, "x", x, "(B, T, H, D)", (None,) * 4, "pass the heads of the model")
    heads_first = _layout(4, 3, unsqueeze_dim) == "bhsd"
    batch, tokens, width = sizes[0], sizes[2 if heads_first else 1], sizes[3]
    explain(op, "position_ids", position_ids, 1)
    parts = position_ids.shape[-1]
    if not parts or width % (2 * parts):
        contract = f"have a number of axes that divides D / 2 = {width // 2} in its last dimension"
        fail(op, "position_ids", contract, tuple(position_ids.shape), "pass the model's position_ids")
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(op, name, table, "(1 | B, T, D)", ((1, batch), tokens, width), "pass the tables of the tokens of x")
    each = (parts, width // parts)
    cos, sin = (t.expand(batch, -1, -1).flatten(0, 1).unflatten(1, each) for t in alike(op, cos, sin))
    q = x.transpose(1, 2) if heads_first else x
    q, _ = rotate_pair(q.flatten(0, 1).unflatten(2, each), None, cos=cos, sin=sin, layout="bhsd")
    y: Tensor = q.flatten(2).unflatten(0, (batch, tokens))
    return y.transpose(1, 2) if heads_first else y


def _layout(dims: int, table_dims: int, unsqueeze_dim: int) -> str:
    """The layout of a q with `dims` dimensions: unsqueeze_dim inserts a head dimension into the table, which then
    broadcasts against q."""
    unsqueeze_dim = whole("apply_rotary_pos_emb", "unsqueeze_dim", unsqueeze_dim)
    head_dim = unsqueeze_dim if unsqueeze_dim < 0 else unsqueeze_dim - table_dims - 1
    layout = {(4, -3): "bhsd", (4, -2): "bshd", (3, -2): "thd"}.get((dims, head_dim))
    if layout is None:
        fail(
            "apply_rotary_pos_emb", "unsqueeze_dim", "be 1 for q (B, H, T, D) or 2 for (B, T, H, D)",
            f"{unsqueeze_dim} for {dims} dimensions and a table of {table_dims}", "name the head dimension of q",
        )  # fmt: skip
    return layout


def _rotate(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Any,
    unsqueeze_dim: int,
    per_column: int | None = None,
    **arguments: Any,
) -> Pair:
    """Rotate with layout and positions derived from the arguments; with `per_column`, rotary_dim = per_column · W."""
    op = "apply_rotary_pos_emb"
    shape, table = shape_of(op, "q", q), shape_of(op, "cos", cos, 2)
    if isinstance(position_ids, int):
        unsqueeze_dim, position_ids = position_ids, None
    indexed = position_ids is not None and len(table) == 2
    if indexed:
        check_tensor(op, "position_ids", position_ids)
    layout = _layout(len(shape), position_ids.dim() + 1 if indexed else len(table), unsqueeze_dim)
    tokens = shape[{"bhsd": -2, "bshd": -3, "thd": -3}[layout]]
    if indexed:
        arguments["positions"] = position_ids
    elif table[-2] != tokens:
        fail(
            op, "cos", f"have a row for each of the {tokens} tokens", tuple(table),
            "check unsqueeze_dim, or select the rows of the tokens",
        )  # fmt: skip
    if per_column is not None:
        arguments["rotary_dim"] = per_column * table[-1]
    cos, sin = alike(op, cos, sin)
    return rotate_pair(q, k, cos=cos, sin=sin, layout=layout, **arguments)


# Activation names of transformers; several are the same GELU written differently.
_ACTIVATIONS: dict[str, Activation] = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(
        ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "gelu_tanh"
    ),
    **dict.fromkeys(("silu", "swish"), "silu"),
    "relu": "relu", "sigmoid": "sigmoid", "linear": "identity",
}  # fmt: skip


def _activation(op: str, name: Any) -> Activation:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        fail(op, "config", f"name an activation of {', '.join(_ACTIVATIONS)}", shown(name), "use the model's own MLP")
    return _ACTIVATIONS[name]


class _SeparateMLP(nn.Module):
    """down_proj(up_proj(x) · act_fn(gate_proj(x)))."""

    def __init__(self, config: Any, activation: str, intermediate_size: int | None = None, bias: bool = False) -> None:
        super().__init__()
        op = type(self).__name__
        self.config, self.hidden_size = config, width(op, config, "hidden_size")
        self.intermediate_size = width(op, config, "intermediate_size", intermediate_size)
        act_fn = activation_module(_activation(op, activation))
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Tensor:
        activation = fused_activation(self.act_fn)
        if activation is not None:
            return mlp(x, self.gate_proj, self.up_proj, self.down_proj, activation=activation)
        z: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return z


class GemmaMLP(_SeparateMLP):
    """Without biases, `config.hidden_act`. Gemma of transformers 4: `config.hidden_activation`, tanh GELU if None."""

    def __init__(self, config: Any) -> None:
        activation = setting("GemmaMLP", config, "hidden_act")
        if hasattr(config, "hidden_activation"):  # such a config has `hidden_act` "gelu", which Gemma ignores
            activation = "gelu_pytorch_tanh" if config.hidden_activation is None else config.hidden_activation
        super().__init__(config, activation)


class Gemma2MLP(_SeparateMLP):
    """Without biases, `config.hidden_activation`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, setting("Gemma2MLP", config, "hidden_activation"))


class LlamaMLP(_SeparateMLP):
    """Biases if `config.mlp_bias`, `config.hidden_act`."""

    def __init__(self, config: Any) -> None:
        bias = flag("LlamaMLP", "config.mlp_bias", setting("LlamaMLP", config, "mlp_bias"))
        super().__init__(config, setting("LlamaMLP", config, "hidden_act"), bias=bias)


class DeepseekV3MLP(_SeparateMLP):
    """Without biases, `config.hidden_act`; intermediate_size overrides the config's."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__(config, setting("DeepseekV3MLP", config, "hidden_act"), intermediate_size)


class Phi3MLP(nn.Module):
    """gate_up_proj computes (gate, value), in this order; without biases, `config.hidden_act`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        activation_fn = activation_module(_activation("Phi3MLP", setting("Phi3MLP", config, "hidden_act")))
        self.config = config
        hidden, intermediate = (width("Phi3MLP", config, n) for n in ("hidden_size", "intermediate_size"))
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.activation_fn = activation_fn

    def forward(self, hidden_states: Tensor) -> Tensor:
        both, down, activation = self.gate_up_proj, self.down_proj, fused_activation(self.activation_fn)
        if activation is not None:
            return stacked_mlp(hidden_states, both, down, activation=activation, gate_first=True)
        gate, up = both(hidden_states).chunk(2, -1)
        z: Tensor = down(up * self.activation_fn(gate))
        return z
