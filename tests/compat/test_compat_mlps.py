"""The gated MLPs of fusewise.compat against float64 references or transformers itself."""

from __future__ import annotations

import copy
import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compat_statement import DEVICE, assert_same, gelu_tanh, launches, randn
from torch import Tensor, nn
from torch.nn import functional

from fusewise.compat import diffusers, flash_attn, liger, transformers

DTYPES = [torch.float32, torch.bfloat16]


CONFIG: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "hidden_act": "silu", "mlp_bias": False, "mlp_multipliers": (1.0, 1.0),
}  # fmt: skip


def config(**changed: Any) -> Any:
    return SimpleNamespace(**{**CONFIG, **changed})


def separate(act: Any, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Any:
    def statement(module: Any, x: Tensor) -> Tensor:
        gate, up, down = (getattr(module, name) for name in names)
        out: Tensor = down(act(gate(x)) * up(x))
        return out

    return statement


def stacked(act: Any, names: tuple[str, str], gate_first: bool = True) -> Any:
    def statement(module: Any, x: Tensor) -> Tensor:
        first, second = module.get_submodule(names[0])(x).chunk(2, -1)
        out: Tensor = module.get_submodule(names[1])(act(first) * second if gate_first else first * act(second))
        return out

    return statement


def glu(x: Tensor, act: Any, gate_first: bool = True) -> Tensor:
    first, second = x.chunk(2, -1)
    y: Tensor = act(first) * second if gate_first else first * act(second)
    return y


def falcon(module: Any, x: Tensor) -> Tensor:
    y = functional.silu(1.7 * module.gate_proj(x)) * module.up_proj(x)
    out: Tensor = 0.85 * module.down_proj(y)
    return out


SILU = separate(functional.silu)
PHI3_OF = partial(stacked, names=("gate_up_proj", "down_proj"))
PHI3 = PHI3_OF(functional.silu)
DOUBLE = {"use_double_wide_mlp": True, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
MLPS: list[tuple[Any, Any]] = [
    (lambda: liger.LigerGEGLUMLP(config(hidden_act="gelu")), separate(gelu_tanh)),  # tanh GELU nevertheless
    (lambda: liger.LigerGEGLUMLPForGemma4(config(**DOUBLE), 2), separate(gelu_tanh)),
    (lambda: liger.LigerSwiGLUMLP(config()), SILU),
    (lambda: liger.LigerSwiGLUMLP(config(), intermediate_size=16), SILU),
    (lambda: liger.LigerMLP(config(hidden_act="swish")), SILU),
    (lambda: liger.LigerSwiGLUMLPForMuseGlimmer(config(hidden_act="gelu", hidden_activation="silu")), SILU),
    (lambda: liger.LigerQwen3MoeSwiGLUMLP(config(), 16), SILU),
    (lambda: liger.LigerHunyuanV1SwiGLUMLP(config(), 3, True), SILU),
    (lambda: liger.LigerFalconH1SwiGLUMLP(config(mlp_bias=True)), SILU),
    (lambda: liger.LigerFalconH1MLP(config(mlp_multipliers=(1.7, 0.85))), falcon),
    (lambda: liger.LigerFalconH1SwiGLUMLP(config(mlp_bias=True, mlp_multipliers=(1.7, 0.85))), falcon),
    (lambda: liger.LigerPhi3SwiGLUMLP(config()), PHI3),
    (lambda: liger.LigerBlockSparseTop2MLP(config()), separate(functional.silu, ("w1", "w3", "w2"))),
    (lambda: transformers.GemmaMLP(config(hidden_act="gelu_pytorch_tanh")), separate(gelu_tanh)),
    (lambda: transformers.GemmaMLP(config(hidden_act="gelu", hidden_activation=None)), separate(gelu_tanh)),
    (lambda: transformers.GemmaMLP(config(hidden_act="gelu", hidden_activation="silu")), SILU),
    (lambda: transformers.Gemma2MLP(config(hidden_activation="gelu")), separate(functional.gelu)),
    (lambda: transformers.LlamaMLP(config(mlp_bias=True)), SILU),
    (lambda: transformers.LlamaMLP(config(hidden_act="relu")), separate(torch.relu)),
    (lambda: transformers.DeepseekV3MLP(config(), 16), SILU),
    (lambda: transformers.Phi3MLP(config()), PHI3),
    (lambda: flash_attn.GatedMlp(24), stacked(torch.sigmoid, ("fc1", "fc2"), False)),
    (lambda: flash_attn.GatedMlp(24, 30, 8, functional.silu, False, multiple_of=16), stacked(functional.silu, ("fc1", "fc2"), False)),
    (lambda: flash_attn.GatedMlp(24, 40, activation=partial(functional.gelu, approximate="tanh")), stacked(gelu_tanh, ("fc1", "fc2"), False)),
    (lambda: flash_attn.GatedMlp(24, 40, activation=nn.GELU()), stacked(functional.gelu, ("fc1", "fc2"), False)),
    (lambda: diffusers.FeedForward(24), stacked(functional.gelu, ("net.0.proj", "net.2"), False)),
    (lambda: diffusers.FeedForward(24, 8, 2, 0.5, "swiglu", True, 32, False).eval(), stacked(functional.silu, ("net.0.proj", "net.2"), False)),
    (lambda: diffusers.Flux2FeedForward(24), stacked(functional.silu, ("linear_in", "linear_out"))),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("build", "statement"), MLPS)
def test_mlps(build: Any, statement: Any, dtype: torch.dtype) -> None:
    module = build().to(DEVICE, dtype)
    wide = copy.deepcopy(module).double()
    x = randn(2, 9, 24, dtype=dtype)
    names, parameters = zip(*module.named_parameters(), strict=True)

    def ours(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))

    def truth(x: Tensor, *values: Tensor) -> Tensor:
        for name, value in zip(names, values, strict=True):
            owner, _, leaf = name.rpartition(".")
            del wide.get_submodule(owner)._parameters[leaf]
            setattr(wide.get_submodule(owner), leaf, value)
        return statement(wide, x)

    assert_same(ours, truth, [x, *parameters], products=4)


@pytest.mark.parametrize("build", [build for build, statement in MLPS if statement is not falcon])
def test_mlps_are_one_operation(build: Any) -> None:
    module = build().to(DEVICE)
    with torch.no_grad():
        count = launches(module, randn(5, 24))
    assert {name: n for name, n in count.items() if name.startswith("fusewise")} == {"fusewise::gated_linear": 1}
    assert sum(count.values()) - count.pop("aten::dropout", 0) == 2, count  # and the down projection


@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [
        *[
            (transformers.LlamaMLP, {"hidden_act": act}, "act_fn")
            for act in ("silu", "gelu", "gelu_new", "relu", "linear")
        ],
        (transformers.Gemma2MLP, {"hidden_activation": "sigmoid"}, "act_fn"),
        (transformers.Phi3MLP, {}, "activation_fn"),
    ],
)
def test_the_activation_is_a_module_that_may_be_replaced(kind: Any, fields: dict[str, str], name: str) -> None:
    module = kind(config(**fields)).to(DEVICE)
    x = randn(5, 24)
    assert not [key for key in module.state_dict() if name in key]

    def statement(act: Any) -> Tensor:
        if kind is transformers.Phi3MLP:
            return PHI3_OF(act)(module, x)
        return separate(act)(module, x)

    torch.testing.assert_close(module(x), statement(getattr(module, name)))
    setattr(module, name, nn.Softsign())
    torch.testing.assert_close(module(x), statement(functional.softsign))
    setattr(module, name, nn.SiLU())
    torch.testing.assert_close(module(x), statement(functional.silu))
    getattr(module, name).register_forward_hook(lambda _module, _args, y: 2 * y)
    torch.testing.assert_close(module(x), statement(lambda x: 2 * functional.silu(x)))
    assert launches(module, x).get("fusewise::gated_linear") is None
    delattr(module, name)
    setattr(module, name, torch.tanh)  # a function, which has no hooks
    torch.testing.assert_close(module(x), statement(torch.tanh))


@pytest.mark.parametrize(
    ("build", "name", "statement"),
    [
        (lambda: diffusers.SwiGLU(24, 16), "activation", lambda m, x, act: glu(m.proj(x), act, gate_first=False)),
        (
            lambda: diffusers.FeedForward(24, activation_fn="swiglu"),
            "net.0.activation",
            lambda m, x, act: m.net[2](glu(m.net[0].proj(x), act, gate_first=False)),
        ),
        (lambda: diffusers.Flux2SwiGLU(), "gate_fn", lambda m, x, act: glu(x, act)),
        (
            lambda: diffusers.Flux2FeedForward(24),
            "act_fn.gate_fn",
            lambda m, x, act: m.linear_out(glu(m.linear_in(x), act)),
        ),
    ],
)
def test_the_activation_of_diffusers_may_be_replaced(build: Any, name: str, statement: Any) -> None:
    module, x = build().to(DEVICE), randn(5, 24)
    owner, _, leaf = name.rpartition(".")
    assert type(module.get_submodule(name)) is nn.SiLU
    torch.testing.assert_close(module(x), statement(module, x, functional.silu))
    for other, act in ((nn.Softsign(), functional.softsign), (nn.ReLU(), torch.relu)):
        setattr(module.get_submodule(owner), leaf, other)
        torch.testing.assert_close(module(x), statement(module, x, act))
    delattr(module.get_submodule(owner), leaf)
    setattr(module.get_submodule(owner), leaf, torch.tanh)
    torch.testing.assert_close(module(x), statement(module, x, torch.tanh))


@pytest.mark.parametrize("first", [functional.gelu, nn.GELU()])
def test_the_activation_of_flash_attn_may_be_replaced(first: Any) -> None:
    module, x = flash_attn.GatedMlp(24, activation=first).to(DEVICE), randn(5, 24)

    def statement(act: Any) -> Tensor:
        return stacked(act, ("fc1", "fc2"), False)(module, x)

    torch.testing.assert_close(module(x), statement(functional.gelu))
    replacements = (functional.silu, torch.tanh) if first is functional.gelu else (nn.SiLU(), nn.Tanh())
    for act in replacements:
        module.activation = act
        torch.testing.assert_close(module(x), statement(act))
    if isinstance(first, nn.Module):
        module.activation = nn.SiLU()
        module.activation.register_forward_hook(lambda _module, _args, y: 2 * y)
        torch.testing.assert_close(module(x), statement(lambda x: 2 * functional.silu(x)))


def test_another_unit_in_the_feed_forward_layer_of_flux2_is_called() -> None:
    module, x = diffusers.Flux2FeedForward(24).to(DEVICE), randn(5, 24)
    module.act_fn = nn.GLU()
    torch.testing.assert_close(module(x), module.linear_out(functional.glu(module.linear_in(x))))


class Scaled(nn.Module):
    """Stand-in for an adapted or quantized projection: computes more than its weight suggests."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.weight, self.bias = inner, inner.weight, inner.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = 2 * self.inner(x)
        return y


def hooked(linear: nn.Linear) -> nn.Linear:
    linear.register_forward_hook(lambda _module, _args, y: 2 * y)
    return linear


def overridden(linear: nn.Linear) -> nn.Linear:
    linear.forward = lambda x: 2 * functional.linear(x, linear.weight, linear.bias)  # type: ignore[method-assign]
    return linear


@pytest.mark.parametrize("change", [Scaled, hooked, overridden])
@pytest.mark.parametrize(("build", "statement"), MLPS)
def test_a_projection_that_is_more_than_its_weight_is_called(build: Any, statement: Any, change: Any) -> None:
    module = build().to(DEVICE)
    paths = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    x = randn(3, 24)
    for path in paths:
        changed = copy.deepcopy(module)
        owner, _, leaf = path.rpartition(".")
        setattr(changed.get_submodule(owner), leaf, change(changed.get_submodule(path)))
        torch.testing.assert_close(changed(x), statement(changed, x))
        assert not torch.allclose(changed(x), module(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo
def test_hooks_of_all_modules_see_every_part() -> None:
    seen: list[str] = []

    def note(module: nn.Module, *_: Any) -> None:
        seen.extend(name for name, child in mlp.named_children() if child is module)

    mlp = transformers.LlamaMLP(config()).to(DEVICE)
    x = randn(3, 24).requires_grad_()
    registers = nn.modules.module
    for register in (
        registers.register_module_forward_pre_hook, registers.register_module_forward_hook,
        registers.register_module_full_backward_pre_hook, registers.register_module_full_backward_hook,
    ):  # fmt: skip
        with register(note):
            mlp(x).sum().backward()
        assert sorted(seen) == ["act_fn", "down_proj", "gate_proj", "up_proj"], register.__name__
        seen.clear()
    with registers.register_module_forward_hook(lambda module, _, y: 2 * y if module is mlp.up_proj else None):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: mlp(x), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), SILU(mlp, x))
    with torch.no_grad():
        assert launches(mlp, x)["fusewise::gated_linear"] == 1


def test_a_unit_with_hooks_or_dropout_is_called() -> None:
    x, seen = randn(3, 24), []
    layer = diffusers.FeedForward(24).to(DEVICE)
    layer.net[0].register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(layer(x), stacked(functional.gelu, ("net.0.proj", "net.2"), False)(layer, x))
    assert seen == [1]
    layer = diffusers.Flux2FeedForward(24).to(DEVICE)
    layer.act_fn.register_forward_hook(lambda *_: seen.append(2))
    torch.testing.assert_close(layer(x), stacked(functional.silu, ("linear_in", "linear_out"))(layer, x))
    assert seen == [1, 2]
    layer = diffusers.FeedForward(24, dropout=0.5, final_dropout=True).to(DEVICE)
    assert float((layer(randn(50, 24)) == 0).float().mean()) == pytest.approx(0.5, abs=0.1)
    assert not torch.equal(layer(x), layer(x)) and torch.equal(layer.eval()(x), layer(x))


class AlwaysDropout(nn.Dropout):
    """As for samples of a model's uncertainty."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.dropout(input, self.p, training=True)


def test_a_dropout_of_another_class_is_called() -> None:
    layer = diffusers.FeedForward(24).to(DEVICE)
    layer.net[1] = AlwaysDropout(1.0)
    assert torch.equal(layer.eval()(randn(3, 24)), layer.net[2].bias.expand(3, 24))


def test_weights_that_were_put_there_transposed() -> None:
    """As several test suites set them; such a weight is copied."""
    module = transformers.LlamaMLP(config()).to(DEVICE)
    for linear in (module.gate_proj, module.up_proj, module.down_proj):
        linear.weight.data = linear.weight.data.T.contiguous().T
    x = randn(5, 24)
    torch.testing.assert_close(module(x), SILU(module, x))
    module(x).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in module.parameters())


THEIRS = [
    ("gemma", "GemmaMLP", "GemmaConfig", {"hidden_act": "gelu_pytorch_tanh"}, "GemmaMLP"),
    ("mistral", "MistralMLP", "MistralConfig", {}, "GemmaMLP"),
    ("qwen2", "Qwen2MLP", "Qwen2Config", {}, "GemmaMLP"),
    ("qwen3", "Qwen3MLP", "Qwen3Config", {}, "GemmaMLP"),
    ("olmo2", "Olmo2MLP", "Olmo2Config", {}, "GemmaMLP"),
    ("gemma2", "Gemma2MLP", "Gemma2Config", {}, "Gemma2MLP"),
    ("gemma3", "Gemma3MLP", "Gemma3TextConfig", {}, "Gemma2MLP"),
    ("llama", "LlamaMLP", "LlamaConfig", {"mlp_bias": True}, "LlamaMLP"),
    ("llama", "LlamaMLP", "LlamaConfig", {"hidden_act": "gelu"}, "LlamaMLP"),
    ("llama", "LlamaMLP", "LlamaConfig", {"hidden_act": "gelu_new"}, "LlamaMLP"),
    ("llama", "LlamaMLP", "LlamaConfig", {"hidden_act": "gelu_fast"}, "LlamaMLP"),
    ("llama", "LlamaMLP", "LlamaConfig", {"hidden_act": "gelu_accurate"}, "LlamaMLP"),
    ("llama", "LlamaMLP", "LlamaConfig", {"hidden_act": "sigmoid"}, "LlamaMLP"),
    ("llama", "LlamaMLP", "LlamaConfig", {"hidden_act": "linear"}, "LlamaMLP"),
    ("granite", "GraniteMLP", "GraniteConfig", {}, "LlamaMLP"),
    ("deepseek_v3", "DeepseekV3MLP", "DeepseekV3Config", {}, "DeepseekV3MLP"),
    ("qwen3_moe", "Qwen3MoeMLP", "Qwen3MoeConfig", {}, "DeepseekV3MLP"),
    ("phi3", "Phi3MLP", "Phi3Config", {"pad_token_id": 0}, "Phi3MLP"),
    ("glm", "GlmMLP", "GlmConfig", {}, "Phi3MLP"),
]


@pytest.mark.parametrize(("model", "theirs", "configuration", "changed", "ours"), THEIRS)
def test_mlps_of_transformers(model: str, theirs: str, configuration: str, changed: dict[str, Any], ours: str) -> None:
    pytest.importorskip("transformers")
    package = f"transformers.models.{model}"
    settings = getattr(importlib.import_module(f"{package}.configuration_{model}"), configuration)(
        hidden_size=24, intermediate_size=40, num_attention_heads=2, num_key_value_heads=1, **changed
    )
    usual = getattr(importlib.import_module(f"{package}.modeling_{model}"), theirs)(settings).to(DEVICE)
    module = getattr(transformers, ours)(settings).to(DEVICE)
    module.load_state_dict(usual.state_dict())
    usual.load_state_dict(module.state_dict())
    x, dy = randn(2, 9, 24), randn(2, 9, 24)
    outcomes = []
    for mlp in (module, usual):
        leaf = x.clone().requires_grad_()
        y = mlp(leaf)
        y.backward(dy)
        outcomes.append([y.detach(), leaf.grad, *(p.grad for p in mlp.parameters())])
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-5)


THEIR_MODULES = [
    ("llama", "LlamaMLP", "LlamaConfig", {}, "LigerSwiGLUMLP"),
    ("llama", "LlamaMLP", "LlamaConfig", {"mlp_bias": True}, "LigerMLP"),
    ("qwen3_moe", "Qwen3MoeMLP", "Qwen3MoeConfig", {}, "LigerQwen3MoeSwiGLUMLP"),
    ("hunyuan_v1_dense", "HunYuanDenseV1MLP", "HunYuanDenseV1Config", {}, "LigerHunyuanV1SwiGLUMLP"),
    ("phi3", "Phi3MLP", "Phi3Config", {"pad_token_id": 0}, "LigerPhi3SwiGLUMLP"),
    ("falcon_h1", "FalconH1MLP", "FalconH1Config", {}, "LigerFalconH1SwiGLUMLP"),
    ("falcon_h1", "FalconH1MLP", "FalconH1Config", {"mlp_multipliers": [1.7, 0.85]}, "LigerFalconH1MLP"),
    ("gemma", "GemmaMLP", "GemmaConfig", {"hidden_act": "gelu_pytorch_tanh"}, "LigerGEGLUMLP"),
    ("gemma3", "Gemma3MLP", "Gemma3TextConfig", {}, "LigerGEGLUMLPForGemma4"),
]


@pytest.mark.parametrize(("model", "theirs", "configuration", "changed", "ours"), THEIR_MODULES)
def test_liger_forwards_of_modules_that_are_not_liger_s(
    model: str, theirs: str, configuration: str, changed: dict[str, Any], ours: str
) -> None:
    """Liger patches them onto the modules of an existing model."""
    pytest.importorskip("transformers")
    package = f"transformers.models.{model}"
    settings = getattr(importlib.import_module(f"{package}.configuration_{model}"), configuration)(
        hidden_size=24, intermediate_size=40, num_attention_heads=2, num_key_value_heads=1, **changed
    )
    module = getattr(importlib.import_module(f"{package}.modeling_{model}"), theirs)(settings).to(DEVICE)
    x = randn(2, 9, 24)
    usual = module(x)
    forward = getattr(liger, ours).forward
    module.forward = forward.__get__(module)
    torch.testing.assert_close(module(x), usual, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert launches(module, x).keys() & {"fusewise::gated_linear", "fusewise::gate"}


def test_activations_that_are_not_here_are_refused_when_the_module_is_built() -> None:
    for build in (transformers.LlamaMLP, transformers.Phi3MLP):
        with pytest.raises(ValueError, match=rf"{build.__name__}: config must name an activation of .*, got 'relu2'"):
            build(config(hidden_act="relu2"))
    for build in (liger.LigerSwiGLUMLP, liger.LigerPhi3SwiGLUMLP, liger.LigerBlockSparseTop2MLP, liger.LigerMLP):
        with pytest.raises(
            ValueError, match=rf"{build.__name__}: config must have hidden_act silu or swish, got 'gelu'"
        ):
            build(config(hidden_act="gelu"))
    with pytest.raises(ValueError, match="FeedForward: activation_fn must be geglu or swiglu, got 'gelu'"):
        diffusers.FeedForward(8, activation_fn="gelu")


def test_diffusers_units_alone() -> None:
    for unit, act in ((diffusers.GEGLU, functional.gelu), (diffusers.SwiGLU, functional.silu)):
        for bias in (True, False):
            module = unit(24, 40, bias).to(DEVICE)

            def statement(x: Tensor, module: Any = module, act: Any = act) -> Tensor:
                b = None if module.proj.bias is None else module.proj.bias.double()
                u, g = functional.linear(x, module.proj.weight.double(), b).chunk(2, -1)
                return u * act(g)

            assert_same(module, statement, [randn(2, 5, 24)], products=2)
            assert sorted(module.state_dict()) == ["proj.bias", "proj.weight"][not bias :]
    assert_same(
        diffusers.Flux2SwiGLU(), lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], [randn(3, 8)]
    )
    torch.testing.assert_close(diffusers.GEGLU(4, 4)(torch.ones(1, 4), 1.0).shape, torch.Size([1, 4]))
