"""The gates and gated MLPs of fusewise.compat against what they stand for, stated in float64 or by transformers itself."""

from __future__ import annotations

import copy
import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compat_statement import DEVICE, launches
from torch import Tensor, nn
from torch.nn import functional

from fusewise.compat import diffusers, flash_attn, flashinfer, liger, transformer_engine, transformers, vllm

DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def assert_same(ours: Any, statement: Any, leaves: list[Tensor], products: int = 0) -> None:
    """Results and gradients of `ours` are those of `statement` in float64: within one rounding for a gate, and one more
    for every product on the way."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y, true = ours(*leaves), statement(*wide)
    dy = torch.randn_like(y)
    given = dy.clone()
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    expected = [true, *torch.autograd.grad(true, wide, given.double())]
    assert torch.equal(dy, given), "an incoming gradient was overwritten"
    for result, exact in zip(found, expected, strict=True):
        eps = torch.finfo(y.dtype).eps
        size = float(exact.detach().abs().max())
        atol = 8 * torch.finfo(torch.float32).eps * max(size, 1.0) + products * eps * size
        assert result.dtype == y.dtype
        torch.testing.assert_close(result.double(), exact, rtol=0.51 * eps, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 2, 8), (9, 7, 41)])
def test_liger_gates(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a, b = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    for call, act in (
        (liger.liger_geglu, gelu_tanh), (liger.LigerGELUMulFunction.apply, gelu_tanh),
        (liger.liger_swiglu, functional.silu), (liger.LigerSiLUMulFunction.apply, functional.silu),
        (liger.geglu, gelu_tanh), (liger.swiglu, functional.silu),
    ):  # fmt: skip
        assert_same(call, lambda a, b, act=act: act(a) * b, [a, b])
        assert launches(call, a, b) == {"fusewise::gate": 1}
    both = torch.cat((a, b), -1)
    call = liger.LigerFusedGateUpSiLUMulFunction.apply
    for in_place in (False, True):
        before = both.clone()
        assert_same(lambda y, i=in_place: call(y, i), lambda y: functional.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1], [both])  # fmt: skip
        assert torch.equal(both, before)
    for scaled in (liger.LigerSiLUMulFunction.apply, liger.swiglu):
        assert_same(
            lambda a, b, f=scaled: f(a, b, 1.7, 0.85), lambda a, b: functional.silu(1.7 * a) * b * 0.85, [a, b], 2
        )
    # Which of Liger's kernels is wanted is without effect.
    assert torch.equal(liger.geglu(a, b, impl="nvidia-cutile", mode="chunked"), liger.liger_geglu(a, b))
    assert torch.equal(liger.swiglu(a, b, backend="cutedsl"), liger.liger_swiglu(a, b))


def test_flash_attn_gate_and_mlp() -> None:
    x, y = randn(3, 7, 24), randn(3, 7, 24)
    assert_same(flash_attn.swiglu, lambda x, y: functional.silu(x) * y, [x, y])
    assert flash_attn.SwiGLUFunction.apply is flash_attn.swiglu
    assert flash_attn.GatedMlp(24).fc1.weight.shape == (2 * 128, 24)
    assert flash_attn.GatedMlp(96).fc2.weight.shape == (96, 256)
    mlp = flash_attn.GatedMlp(24, return_residual=True).to(DEVICE)
    out, residual = mlp(x)
    assert residual is x
    mlp.return_residual = False
    assert torch.equal(out, mlp(x))
    for act, got in (
        (torch.tanh, "tanh"),
        (partial(functional.gelu, approximate="erf"), "partial"),
        (None, "NoneType"),
    ):
        with pytest.raises(ValueError, match=rf"^GatedMlp: activation must be .*, got {got}; use their GatedMlp$"):
            flash_attn.GatedMlp(24, activation=act)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_serving_engines(dtype: torch.dtype) -> None:
    x = randn(3, 5, 2 * 24, dtype=dtype)
    for name, act, first in (
        ("silu_and_mul", functional.silu, True), ("mul_and_silu", functional.silu, False),
        ("gelu_and_mul", functional.gelu, True), ("gelu_tanh_and_mul", gelu_tanh, True),
    ):  # fmt: skip

        def statement(x: Tensor, act: Any = act, first: bool = first) -> Tensor:
            a, b = x.chunk(2, -1)
            return act(a) * b if first else a * act(b)

        layer = {
            "silu_and_mul": vllm.SiluAndMul, "mul_and_silu": vllm.MulAndSilu, "gelu_and_mul": vllm.GeluAndMul,
            "gelu_tanh_and_mul": lambda: vllm.GeluAndMul("tanh"),
        }[name]()  # fmt: skip
        assert_same(layer, statement, [x])
        y = layer(x)
        outs = [torch.full_like(y, 7), torch.full((3, 5, 100), 7.0, device=DEVICE, dtype=dtype)[..., 4:28]]
        for out in outs:
            assert launches(getattr(vllm, name), out, x) == {"fusewise::gate_out": 1}
            assert torch.equal(out, y)
        assert (outs[1]._base == 7).sum() == 3 * 5 * 76, "features beside out were written"
        if name != "mul_and_silu":
            theirs = getattr(flashinfer, name)
            assert_same(theirs, statement, [x])
            out = torch.empty_like(y)
            assert theirs(x, out, enable_pdl=True) is out
            assert torch.equal(out, y)


def test_where_a_gate_is_not_written() -> None:
    x, base = randn(4, 6), randn(4, 4, 3)
    for out, message in (
        (randn(4, 4), r"out must have shape \(4, 3\), and dtype and device of x"),
        (randn(4, 3).double(), "out must have shape"),
        (x[:, :3], "out must not overlap x"),
        (randn(1, 3).expand(4, 3), "out must not have elements that share memory"),
        (randn(3, 4).mT, "out must have rows of contiguous features"),
        (randn(4, 3).requires_grad_(), "out must not be given where a gradient is recorded"),
    ):
        before = out.detach().clone()
        with pytest.raises(ValueError, match=f"^silu_and_mul: {message}"):
            vllm.silu_and_mul(out, x)
        assert torch.equal(out, before)
    with pytest.raises(ValueError, match=r"^silu_and_mul: out must have rows of contiguous features, each as far"):
        flashinfer.silu_and_mul(randn(4, 2, 6), base[:, :2])
    with pytest.raises(ValueError, match=r"^GeluAndMul: approximate must be none or tanh, got 'erf'; "):
        vllm.GeluAndMul("erf")


def test_gates_into_memory_compile_to_one_graph() -> None:
    torch._dynamo.reset()
    x, out = randn(4, 6), randn(4, 3)

    def function(x: Tensor, out: Tensor) -> Tensor:
        vllm.silu_and_mul(out, x)
        return out + flashinfer.gelu_and_mul(x)

    with torch.no_grad():
        expected = function(x, out.clone())
        found = torch.compile(function, backend="aot_eager", fullgraph=True)(x, out)
    torch.testing.assert_close(found, expected)
    assert torch.equal(out, vllm.SiluAndMul()(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "layer",
    [vllm.SiluAndMul(compile_native=False), vllm.MulAndSilu(), vllm.GeluAndMul(), vllm.GeluAndMul(approximate="tanh")],
)
def test_vllm_layers_have_a_native_form(layer: Any, dtype: torch.dtype) -> None:
    x, dy = randn(3, 7, 26, dtype=dtype), randn(3, 7, 13, dtype=dtype)
    leaves = [x.clone().requires_grad_() for _ in range(3)]
    y, cuda, native = (
        f(leaf) for f, leaf in zip((layer, layer.forward_cuda, layer.forward_native), leaves, strict=True)
    )
    grads = [torch.autograd.grad(z, leaf, dy)[0] for z, leaf in zip((y, cuda, native), leaves, strict=True)]
    assert torch.equal(y, cuda) and torch.equal(grads[0], grads[1])
    torch.testing.assert_close(y, native)
    torch.testing.assert_close(grads[0], grads[2])
    if isinstance(layer, vllm.SiluAndMul):
        assert torch.equal(vllm.SiluAndMul.forward_native(x), native)
    elif isinstance(layer, vllm.GeluAndMul):
        assert repr(layer) == f"GeluAndMul(approximate={layer.approximate!r})"


@pytest.mark.parametrize("dtype", DTYPES)
def test_transformer_engine_gates(dtype: torch.dtype) -> None:
    te = transformer_engine
    for name, act in (("glu", torch.sigmoid), ("geglu", gelu_tanh), ("reglu", torch.relu), ("swiglu", functional.silu)):

        def statement(x: Tensor, act: Any = act) -> Tensor:
            a, b = x.chunk(2, -1)
            return act(a) * b

        forward, backward = getattr(te, name), getattr(te, f"d{name}")
        module = {"glu": te.GLU, "geglu": te.GEGLU, "reglu": te.ReGLU, "swiglu": te.SwiGLU}[name]()
        for shape in ((74,), (2, 26), (4, 1, 64)):
            x = randn(*shape, dtype=dtype)
            assert_same(lambda x, f=forward: f(x, None), statement, [x])
            assert_same(module, statement, [x])
            leaf, dy = x.clone().requires_grad_(), randn(*shape[:-1], shape[-1] // 2, dtype=dtype)
            (dx,) = torch.autograd.grad(forward(leaf, None), leaf, dy)
            assert torch.equal(backward(dy, x, None), dx)
        wide = [t.double().requires_grad_() for t in (dy, x)]
        assert torch.autograd.gradcheck(lambda dy, x, f=backward: f(dy, x, None), wide)
        assert launches(forward, x, None) == {"fusewise::gate": 1}
        assert launches(backward, dy, x, None) == {"fusewise::gate_grad": 1}
        for call, args in ((forward, (x,)), (backward, (dy, x))):
            with pytest.raises(ValueError, match="quantizer must be None: the result is not quantised here, got fp8"):
                call(*args, "fp8")
    with torch.autocast(DEVICE, torch.bfloat16):
        assert te.GEGLU()(randn(3, 8)).dtype == te.SwiGLU(glu_interleave_size=2)(randn(3, 8)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["GLU", "GEGLU", "ReGLU", "SwiGLU"])
def test_transformer_engine_gates_keep_their_input_as_it_came(name: str) -> None:
    build, x = getattr(transformer_engine, name), randn(5, 26, dtype=torch.bfloat16)
    plain, cached = build(), build(cache_quantized_input=True)
    assert (plain.cache_quantized_input, cached.cache_quantized_input) == (False, True)
    dy, results = randn(5, 13, dtype=torch.bfloat16), []
    for module in (plain, cached):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, dy)))
    assert all(map(torch.equal, *results))


def test_transformer_engine_blocks_of_gates_and_values() -> None:
    module = transformer_engine.SwiGLU(glu_interleave_size=32)

    def statement(x: Tensor) -> Tensor:
        a, b = x.view(6, 3, 2, 32).unbind(2)
        return (functional.silu(a) * b).flatten(1)

    x = randn(6, 192)
    assert_same(module, statement, [x])
    assert launches(module, x) == {"fusewise::gate": 1}


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
    (lambda: liger.LigerGEGLUMLP(config(hidden_act="gelu")), separate(gelu_tanh)),  # the tanh form all the same
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
    assert sum(count.values()) - count.pop("aten::dropout", 0) == 2, count  # and the product behind it


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


def test_another_unit_in_the_feed_forward_layer_of_flux2_is_called() -> None:
    module, x = diffusers.Flux2FeedForward(24).to(DEVICE), randn(5, 24)
    module.act_fn = nn.GLU()
    torch.testing.assert_close(module(x), module.linear_out(functional.glu(module.linear_in(x))))


class Scaled(nn.Module):
    """Stands for an adapted or quantised projection: more than the weight that it shows."""

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


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does
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


def test_weights_that_were_put_there_transposed() -> None:
    """As several test suites do; such a weight is copied."""
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
    """Liger binds them to the modules of a model that was built already."""
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
