"""The gated MLPs of `liger_kernel.transformers` and the gate of `liger_kernel.megatron`; exported by `compat.liger`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops._common import fail, shown
from ..ops.gated_linear._gate import stacked_gate
from ..ops.gated_linear._problem import Activation
from ..ops.gated_linear.projections import is_plain, mlp, stacked_mlp
from ._check import WRONG, explain, flag, number, setting, whole, width
from ._liger_gate import explain_mlp, multiplied, silu_mul


class LigerGEGLUMLP(nn.Module):
    """The MLP of Gemma as one operation; always tanh GELU regardless of `config`, as in Liger."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._build(config)

    def _build(self, config: Any, intermediate_size: int | None = None, bias: bool = False) -> None:
        """Create the projections; intermediate_size None: `config.intermediate_size`."""
        op = type(self).__name__
        self.config, self.hidden_size = config, width(op, config, "hidden_size")
        self.intermediate_size = width(op, config, "intermediate_size", intermediate_size)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    # Liger patches this forward, and those below, onto a model's own MLP instances, so it may only use attributes that
    # those have.
    def forward(self, x: Tensor) -> Tensor:
        return mlp(x, self.gate_proj, self.up_proj, self.down_proj, activation="gelu_tanh")


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """`LigerGEGLUMLP`, twice as wide in layers with shared KV if `config.use_double_wide_mlp`."""

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
    """The MLP of Llama and most others as one operation, without biases.

    Args:
        intermediate_size: None: `config.intermediate_size`.
    """

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        nn.Module.__init__(self)
        self._build(config, intermediate_size)

    def _build(self, config: Any, intermediate_size: int | None = None, bias: bool = False) -> None:
        _check_silu(type(self).__name__, config)
        super()._build(config, intermediate_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        return mlp(x, self.gate_proj, self.up_proj, self.down_proj, activation="silu")


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` for a config with `hidden_activation`."""

    def __init__(self, config: Any) -> None:
        nn.Module.__init__(self)
        named = getattr(config, "hidden_activation", None)
        _check_silu(type(self).__name__, config, "hidden_activation" if named else "hidden_act")
        LigerGEGLUMLP._build(self, config)


class LigerMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` with the config's width. What Liger fuses only in this class is fused in all classes here."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` under another name."""


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` with Hunyuan's arguments."""

    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerFalconH1SwiGLUMLP(LigerSwiGLUMLP):
    """The MLP of Falcon-H1: `mlp_multipliers` scale the gate before its activation and the result including its bias.

    A gate multiplier other than 1 disables fusion.
    """

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
                z = self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x), self.gate_multiplier))
            except WRONG:
                if is_plain(*projections):
                    explain_mlp(x, *(projection.weight for projection in projections))
                raise
        return multiplied("down_multiplier", z, self.down_multiplier)


class LigerFalconH1MLP(LigerFalconH1SwiGLUMLP):
    """`LigerFalconH1SwiGLUMLP` under another name."""


class LigerPhi3SwiGLUMLP(nn.Module):
    """The MLP of Phi-3 as one operation; gate_up_proj computes (gate, value), in this order."""

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
    """An expert of Mixtral in transformers 4 as one operation: w1 is the gate, w3 the value, w2 the down projection."""

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


class LigerTiledGEGLUMLP(LigerGEGLUMLP):
    """`LigerGEGLUMLP` for long sequences x (..., T, D): the rows are processed in shards, each one operation.

    Only x is saved; backward recomputes the pre-activations (2F elements per row) shard by shard, so at most one shard's are
    in memory at a time. One copy concatenates the results. Weight gradients are accumulated over the shards in the weights'
    dtype. A projection that is not a plain `nn.Linear` saves what its own backward needs.

    Args:
        num_shards: number of shards, at most the number of rows; None: ceil(T / D), so that with one sequence a shard has at
            most D rows.
    """

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        nn.Module.__init__(self)
        op = type(self).__name__
        self.num_shards = None if num_shards is None else whole(op, "num_shards", num_shards)
        self._check(op, config)
        self._build(config)

    def _check(self, op: str, config: Any) -> None:
        act = getattr(config, "hidden_act", "gelu")
        if not isinstance(act, str) or act not in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
            contract = "have hidden_act gelu, gelu_new or gelu_pytorch_tanh"
            fail(op, "config", contract, shown(act), "use the model's own MLP")

    def forward(self, x: Tensor) -> Tensor:
        return self._tiled(x, "gelu_tanh")

    def _tiled(self, x: Tensor, activation: Activation) -> Tensor:
        op = type(self).__name__
        explain(op, "x", x, 2)
        tokens, features = x.shape[-2:]
        shards = -(-tokens // max(features, 1)) if self.num_shards is None else whole(op, "num_shards", self.num_shards)
        rows = x.flatten(0, -2)
        parts = [
            mlp(part, self.gate_proj, self.up_proj, self.down_proj, activation=activation, save="input")
            for part in rows.chunk(max(shards, 1))
        ]
        z = parts[0] if len(parts) == 1 else torch.cat(parts)
        return z.view(*x.shape[:-1], z.shape[-1])


class LigerTiledSwiGLUMLP(LigerTiledGEGLUMLP):
    """`LigerSwiGLUMLP`, sharded like `LigerTiledGEGLUMLP`."""

    def _check(self, op: str, config: Any) -> None:
        if hasattr(config, "hidden_act"):
            _check_silu(op, config)

    def forward(self, x: Tensor) -> Tensor:
        return self._tiled(x, "silu")


class LigerMegatronSwiGLU(nn.Module):
    """silu(g) · u with (g, u) the halves of input (..., 2F); called like Megatron's `bias_swiglu_impl`, no parameters.

    Replaces `liger_kernel.megatron.LigerMegatronSwiGLU`.

    Args:
        fallback_impl: Megatron's own function, called if there is a bias, fp8_input_store or cpu_offload_input; None: an error.
        in_place: ignored; input is never overwritten.
    """

    def __init__(self, fallback_impl: Callable[..., Tensor] | None = None, in_place: bool = False) -> None:
        super().__init__()
        self.fallback_impl, self.in_place = fallback_impl, in_place

    def forward(
        self, input: Tensor, bias: Tensor | None = None, fp8_input_store: bool = False, cpu_offload_input: bool = False
    ) -> Tensor:
        op = "LigerMegatronSwiGLU"
        wanted = {
            "bias": bias is not None,
            "fp8_input_store": flag(op, "fp8_input_store", fp8_input_store),
            "cpu_offload_input": flag(op, "cpu_offload_input", cpu_offload_input),
        }
        for name, there in wanted.items():
            if there:
                if self.fallback_impl is not None:
                    return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input)
                contract = f"be {'None' if name == 'bias' else 'False'} without a fallback_impl"
                got = "a bias" if name == "bias" else shown(wanted[name])
                fail(op, name, contract, got, "pass Megatron's bias_swiglu_impl as fallback_impl")
        return stacked_gate(input, "silu", gate_first=True, op=op, name="input")


def _check_silu(op: str, config: Any, name: str = "hidden_act") -> None:
    act = setting(op, config, name)
    if not isinstance(act, str) or act not in ("silu", "swish"):
        fail(op, "config", f"have {name} silu or swish", shown(act), "use the model's own MLP")
