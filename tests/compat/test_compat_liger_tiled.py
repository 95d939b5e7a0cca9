"""The tiled MLPs and Megatron's gate of fusewise.compat.liger against float64 references."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compat_statement import DEVICE, assert_same, check_named, gelu_tanh, launches, randn
from torch import Tensor, nn
from torch.nn import functional

from fusewise.compat import liger

D, F = 8, 20
CONFIG = SimpleNamespace(hidden_size=D, intermediate_size=F)
KINDS = [(liger.LigerTiledGEGLUMLP, gelu_tanh), (liger.LigerTiledSwiGLUMLP, functional.silu)]


def statement(module: Any, act: Any, x: Tensor) -> Tensor:
    z: Tensor = module.down_proj(act(module.gate_proj(x)) * module.up_proj(x))
    return z


@pytest.mark.parametrize(("kind", "act"), KINDS)
@pytest.mark.parametrize("shape", [(19, D), (2, 19, D), (2, 2, 3, D), (0, D)])
@pytest.mark.parametrize("shards", [None, 1, 4, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients(
    kind: Any, act: Any, shape: tuple[int, ...], shards: int | None, dtype: torch.dtype
) -> None:
    module = kind(CONFIG, shards).to(DEVICE, dtype)
    wide = copy.deepcopy(module).double()
    names, parameters = zip(*module.named_parameters(), strict=True)

    def ours(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))

    def truth(x: Tensor, *values: Tensor) -> Tensor:
        for name, value in zip(names, values, strict=True):
            projection = getattr(wide, name.removesuffix(".weight"))
            del projection._parameters["weight"]
            projection.weight = value
        return statement(wide, act, x)

    x = randn(*shape, dtype=dtype)
    if not x.numel():
        assert ours(x, *parameters).shape == x.shape
        return
    # Accumulation rounds weight gradients once per shard.
    assert_same(ours, truth, [x, *parameters], products=4 + min(shards or 3, x.numel() // D))


@pytest.mark.parametrize(("kind", "act"), KINDS)
def test_parts_are_operations_of_their_own(kind: Any, act: Any) -> None:
    for shape, shards, parts in (
        ((19, D), None, 3),
        ((2, 16, D), None, 2),
        ((2, 16, D), 4, 4),
        ((8, D), None, 1),
        ((3, D), 9, 3),
    ):
        module, x = kind(CONFIG, shards).to(DEVICE), randn(*shape)
        with torch.no_grad():
            counted = launches(module, x)
        joined = {"aten::cat": 1} if parts > 1 else {}
        assert counted == {"fusewise::gated_linear": parts, "aten::mm": parts, **joined}


@pytest.mark.parametrize(("kind", "act"), KINDS)
def test_nothing_is_held_but_x(kind: Any, act: Any) -> None:
    module, x, held = kind(CONFIG, 4).to(DEVICE), randn(2, 16, D).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        y = module(x)
    memory = {p.untyped_storage().data_ptr() for p in (x, *module.parameters())}
    assert held
    assert {t.untyped_storage().data_ptr() for t in held} <= memory
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo
@pytest.mark.parametrize(("kind", "act"), KINDS)
def test_compiled_in_one_graph(kind: Any, act: Any) -> None:
    module, x = kind(CONFIG).to(DEVICE), randn(2, 19, D).requires_grad_()
    y = torch.compile(lambda x: module(x), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, statement(module, act, x))
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx, torch.autograd.grad(statement(module, act, x), x, dy)[0])


def test_a_projection_with_a_hook_is_called_for_every_part() -> None:
    module, x, seen = liger.LigerTiledSwiGLUMLP(CONFIG, 3).to(DEVICE), randn(9, D), []
    module.down_proj.register_forward_hook(lambda _, args, y: seen.append(args[0].shape) or 2 * y)
    torch.testing.assert_close(module(x), 2 * statement(copy_without_hooks(module), functional.silu, x))
    assert seen == [(3, F)] * 3


def copy_without_hooks(module: Any) -> Any:
    plain = copy.deepcopy(module)
    plain.down_proj._forward_hooks.clear()
    return plain


@pytest.mark.parametrize(
    ("kind", "act", "message"),
    [
        (liger.LigerTiledGEGLUMLP, "silu", "config must have hidden_act gelu, gelu_new or gelu_pytorch_tanh, got 'silu'; "),
        (liger.LigerTiledSwiGLUMLP, "gelu", "config must have hidden_act silu or swish, got 'gelu'; "),
        (liger.LigerTiledSwiGLUMLP, 1, "config must have hidden_act silu or swish, got 1; "),
    ],
)  # fmt: skip
def test_activations(kind: Any, act: Any, message: str) -> None:
    wrong = SimpleNamespace(**vars(CONFIG), hidden_act=act)
    assert check_named(kind, {"config": wrong}) == f"{kind.__name__}: {message}use the model's own MLP"
    for right in ("gelu", "gelu_new", "gelu_pytorch_tanh") if kind is liger.LigerTiledGEGLUMLP else ("silu", "swish"):
        kind(SimpleNamespace(**vars(CONFIG), hidden_act=right))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("kind", "act"), KINDS)
def test_bad_input(kind: Any, act: Any) -> None:
    module, x = kind(CONFIG), torch.randn(4, D)
    for wrong in ("0", None, 1.5, x[0], x[0, 0], x[:, :-1], x.to_sparse(), torch.nested.nested_tensor([x, x])):
        check_named(module, {"x": wrong})
    assert "x must have at least 2 dimensions, got shape (8,); " in check_named(module, {"x": x[0]})
    for shards in ("4", 4.0, [4], True):
        assert "num_shards must be an int, got " in check_named(kind, {"config": CONFIG, "num_shards": shards})
    check_named(kind, {"config": None})
    assert torch.equal(kind(CONFIG, 0)(x).isnan(), torch.zeros(4, D, dtype=torch.bool))  # one shard, as in Liger


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 2 * F), (3, 2, 2 * F)])
def test_the_gate_of_megatron(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate = liger.LigerMegatronSwiGLU(in_place=True)
    assert not list(gate.parameters())
    x = randn(*shape, dtype=dtype)
    assert_same(gate, lambda x: functional.silu(x[..., :F]) * x[..., F:], [x])
    counted = launches(gate, x)
    assert sum(counted.values()) == 1 and next(iter(counted)).startswith("fusewise::")
    compiled = torch.compile(gate, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, None, False, False), gate(x))


def test_what_megatron_does_itself() -> None:
    seen: list[Any] = []

    def theirs(*arguments: Any) -> Tensor:
        seen.append(arguments)
        return arguments[0]

    x, bias = randn(3, 2 * F), randn(2 * F)
    gate = liger.LigerMegatronSwiGLU(theirs)
    assert gate(x).shape == (3, F) and not seen
    calls: list[tuple[Any, ...]] = [(x, bias, False, False), (x, None, True, False), (x, None, False, True)]
    for call in calls:
        assert gate(*call) is x
    assert seen == calls
    alone = liger.LigerMegatronSwiGLU()
    arguments = {"input": x, "bias": None, "fp8_input_store": False, "cpu_offload_input": False}
    for name, wrong in (("bias", bias), ("fp8_input_store", True), ("cpu_offload_input", 1)):
        assert f"LigerMegatronSwiGLU: {name} must be " in check_named(alone, arguments, **{name: wrong})
    for wrong in ("0", None, randn(3, 2 * F - 1), randn(2 * F, 3)[:, :0].mT.to_sparse()):
        check_named(alone, {"input": wrong})
    assert isinstance(alone, nn.Module)
