"""The gates of fusewise.compat against float64 references. The gated MLPs are in test_compat_mlps.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from compat_statement import DEVICE, assert_same, gelu_tanh, launches, randn
from torch import Tensor
from torch.nn import functional

from fusewise.compat import flash_attn, flashinfer, liger, transformer_engine, vllm

DTYPES = [torch.float32, torch.bfloat16]


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
    # The selection of a Liger kernel is ignored.
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
        (x[:, :3], "out must not overlap x"),
        (randn(1, 3).expand(4, 3), "out must not have elements that share memory, .*; give it memory of its own"),
        (randn(3, 4).mT, "out must have rows of contiguous features"),
        (randn(4, 3).requires_grad_(), "out must not be given where a gradient is recorded"),
    ):
        before = out.detach().clone()
        with pytest.raises(ValueError, match=f"^silu_and_mul: {message}"):
            vllm.silu_and_mul(out, x)
        assert torch.equal(out, before)
    for out in (base[:, :2], randn(4, 3, 2).mT):
        with pytest.raises(ValueError, match=r"^silu_and_mul: out must have rows of contiguous features, each as far"):
            flashinfer.silu_and_mul(randn(4, 2, 6), out)
    with pytest.raises(TypeError, match=r"^silu_and_mul: out must have shape .*, got .* float64"):
        vllm.silu_and_mul(randn(4, 3).double(), x)
    with pytest.raises(ValueError, match=r"^silu_and_mul: out must not be given where a gradient is recorded"):
        vllm.silu_and_mul(randn(4, 3), x.clone().requires_grad_())
    with pytest.raises(ValueError, match=r"^GeluAndMul: approximate must be none or tanh, got 'erf'; "):
        vllm.GeluAndMul("erf")


@pytest.mark.parametrize("grad", [False, True])
def test_autograd_sees_a_gate_written_over_a_saved_tensor(grad: bool) -> None:
    x, weight = randn(4, 6), randn(4, 3).requires_grad_()
    for write in (vllm.silu_and_mul, lambda out, x: flashinfer.silu_and_mul(x, out)):
        out = randn(4, 3)
        loss = (weight * out).sum()
        with torch.set_grad_enabled(grad):
            write(out, x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        out = randn(4, 3)
        vllm.silu_and_mul(out, x)
    assert torch.equal(out, vllm.SiluAndMul()(x))


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
        few = [randn(2, width, dtype=torch.float64).requires_grad_() for width in (4, 8)]
        assert torch.autograd.gradcheck(lambda dy, x, f=backward: f(dy, x, None), few)
        assert launches(forward, x, None) == {"fusewise::gate": 1}
        assert launches(backward, dy, x, None) == {"fusewise::gate_grad": 1}
        for call, args in ((forward, (x,)), (backward, (dy, x))):
            for quantizer, got in (("fp8", "'fp8'"), (object(), "object;")):  # not its address
                with pytest.raises(ValueError, match=f"must be None: the result is not quantised here, got {got}"):
                    call(*args, quantizer)
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
