"""Batched gradients, torch.func, compiled transforms, export and meta tensors, each against eager code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fusewise import gated_linear, gated_mlp, geglu_linear
from fusewise.nn import GatedLinear, GatedMLP
from fusewise.ops.gated_linear._gate import gate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),  # torch's forward mode
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo
    pytest.mark.filterwarnings(
        "ignore:There is a performance drop:UserWarning"
    ),  # vmap of an operator without a batching rule
]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def eager_unit(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    u, g = functional.linear(x, w, b).chunk(2, -1)
    return u * functional.gelu(g, approximate="tanh")


def eager_mlp(x: Tensor, w: Tensor, w_down: Tensor) -> Tensor:
    g, u = functional.linear(x, w).chunk(2, -1)
    return functional.linear(u * functional.silu(g), w_down)


def eager_gate(u: Tensor, g: Tensor) -> Tensor:
    return u * torch.sigmoid(g)


def mlp(x: Tensor, w: Tensor, w_down: Tensor) -> Tensor:
    return gated_mlp(x, w, None, w_down, activation="silu")


FUNCTIONS: dict[str, tuple[Any, Any, tuple[Tensor, ...]]] = {
    "unit": (geglu_linear, eager_unit, (randn(4, 6), randn(10, 6), randn(10))),
    "unit, input": (lambda *a: geglu_linear(*a, save="input"), eager_unit, (randn(4, 6), randn(10, 6), randn(10))),
    "mlp": (mlp, eager_mlp, (randn(4, 6), randn(10, 6), randn(3, 5))),
    "gate": (lambda u, g: gate(u, g, "sigmoid"), eager_gate, (randn(4, 6), randn(4, 6))),
}


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_batch_of_gradients_at_a_time(name: str) -> None:
    ours, usual, inputs = FUNCTIONS[name]
    leaves = [t.clone().requires_grad_() for t in inputs]

    def batched(of: Any) -> tuple[Tensor, ...]:
        y = of(*leaves).sum(0)
        return torch.autograd.grad(y, leaves, torch.eye(len(y), device=DEVICE), is_grads_batched=True)

    close(batched(ours), batched(usual))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_func(name: str) -> None:
    ours, usual, inputs = FUNCTIONS[name]
    every = tuple(range(len(inputs)))
    tangents = tuple(torch.randn_like(t) for t in inputs)
    in_dims = (0, *(0 if t.shape == inputs[0].shape else None for t in inputs[1:]))
    for transformed in (
        lambda f: torch.func.grad(lambda *a: f(*a).square().sum(), every)(*inputs),
        lambda f: torch.func.jvp(f, inputs, tangents),
        lambda f: torch.func.vmap(f, in_dims)(*inputs),
        lambda f: torch.func.hessian(lambda x: f(x, *inputs[1:]).sum())(inputs[0]),
        lambda f: torch.func.jacrev(f)(*inputs),
    ):
        close(transformed(ours), transformed(usual))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_transform(name: str) -> None:
    """Inside a transform, traced leaves do not require grad; relying on that, all gradients would be zero."""
    ours, usual, inputs = FUNCTIONS[name]
    torch._dynamo.reset()
    compiled = torch.compile(torch.func.grad(lambda x: ours(x, *inputs[1:]).square().sum()), backend="aot_eager")
    close(compiled(inputs[0]), torch.func.grad(lambda x: usual(x, *inputs[1:]).square().sum())(inputs[0]))


def test_gradients_of_every_sample() -> None:
    module = GatedMLP(6, 5, activation="gelu", device=DEVICE)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x = randn(4, 6)

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, (row,)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i, row in enumerate(x):
        one = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        y = functional.gelu(row @ one["gate_proj.weight"].T) * (row @ one["up_proj.weight"].T)
        usual = torch.autograd.grad((y @ one["down_proj.weight"].T).square().sum(), list(one.values()))
        close([found[name][i] for name in one], list(usual))


def test_modules_compile_whole_and_again_at_most_once() -> None:
    """The first different number of rows compiles a dynamic graph for all."""
    module = GatedMLP(16, 24, bias=True, activation="gelu_tanh", device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for rows in (5, 6, 40, 2, 33):
        x = randn(rows, 16).requires_grad_()
        leaves = [x, *module.parameters()]
        found = torch.autograd.grad(compiled(x).square().sum(), leaves)
        y = module.up_proj(x) * functional.gelu(module.gate_proj(x), approximate="tanh")
        close(found, torch.autograd.grad(module.down_proj(y).square().sum(), leaves))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("build", [GatedMLP, GatedLinear])
def test_an_exported_module_computes_the_same_and_keeps_nothing_for_backward(build: Any, strict: bool) -> None:
    module = build(16, 8, activation="gelu", device=DEVICE)
    rows = torch.export.Dim("rows", min=2, max=1000)
    exported = torch.export.export(module, (randn(5, 16),), dynamic_shapes={"x": {0: rows}}, strict=strict)
    targets = [str(node.target) for node in exported.graph.nodes if "fusewise" in str(node.target)]
    assert targets == ["fusewise.gated_linear.default"]
    x = randn(9, 16)
    close(exported.module()(x), module(x))


def test_meta_tensors_give_shapes() -> None:
    x, w, w_down = (torch.empty(shape, device="meta") for shape in ((2, 3, 16), (8, 16), (5, 4)))
    assert gated_linear(x, w, activation="silu").shape == (2, 3, 4)
    assert gated_mlp(x, w, None, w_down, activation="silu").shape == (2, 3, 5)
    assert gate(x, x, "silu").is_meta
    x.requires_grad_()
    y = gated_linear(x, w, activation="silu", save="input")
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize("save", ["preact", "input"])
def test_selective_checkpointing_may_keep_the_operator(save: Any) -> None:
    x, w, b = (t.clone().requires_grad_() for t in FUNCTIONS["unit"][2])

    def policy(_context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        ours = "gated_linear" in str(op)
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    y = checkpoint(
        lambda *a: geglu_linear(*a, save=save).relu(), x, w, b, use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )  # fmt: skip
    usual = torch.autograd.grad(eager_unit(x, w, b).relu().square().sum(), (x, w, b))
    close(torch.autograd.grad(y.square().sum(), (x, w, b)), usual)


def test_one_weight_used_twice() -> None:
    x, w, b = (t.clone().requires_grad_() for t in (randn(4, 5), randn(10, 5), randn(10)))

    def twice(f: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(f(f(x, w, b), w, b).square().sum(), (x, w, b))

    close(twice(geglu_linear), twice(eager_unit))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo
def test_a_tensor_in_two_places_of_one_call_compiles() -> None:
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((3, 8), (8, 8), (8,)))

    def tied(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return gated_mlp(x, weight, weight, weight, b_gate=bias, b_up=bias, b_down=bias, activation="silu")

    torch._dynamo.reset()
    found = torch.compile(tied, fullgraph=True, backend="aot_eager")(x, weight, bias)
    usual = tied(x, weight, bias)
    torch.testing.assert_close(found, usual)
    for a, b in zip(*(torch.autograd.grad(z.sum(), (x, weight, bias)) for z in (found, usual)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo
@pytest.mark.parametrize("hidden", [1, 2])
def test_a_bias_shaped_as_its_weight_compiles_where_sizes_are_symbols(hidden: int) -> None:
    x, weight, bias = randn(3, 8), randn(2, hidden, 8), randn(2, hidden)
    torch._dynamo.reset()
    compiled = torch.compile(gated_linear, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(
        compiled(x, weight, bias, activation="silu"), gated_linear(x, weight, bias, activation="silu")
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("save", ["preact", "input"])
def test_a_jit_trace_serves_other_sizes(save: Any) -> None:
    """Torch traces twice, the second time without gradients, and compares."""
    module = GatedMLP(16, 8, activation="silu", save=save)
    traced = torch.jit.trace(module, (randn(2, 3, 16),))
    x = randn(4, 5, 16)
    y, expected = traced(x), module(x)
    close(y, expected)
    weights = [*module.parameters()]
    for found, want in zip(*(torch.autograd.grad(z.square().sum(), weights) for z in (y, expected)), strict=True):
        close(found, want)


@pytest.mark.parametrize("compiled", [False, True])
def test_vmap_over_any_dimension_of_the_weights(compiled: bool) -> None:
    """The batch dimension may lie between the rows of a weight, or within them."""
    x = torch.randn(4, 8, device=DEVICE)
    weight, bias = torch.randn(2, 12, 8, device=DEVICE), torch.randn(2, 12, device=DEVICE)
    w_down = torch.randn(2, 5, 6, device=DEVICE)

    def both(weight: Tensor, bias: Tensor, w_down: Tensor) -> tuple[Tensor, Tensor]:
        z = gated_mlp(x, weight, None, w_down, b_gate=bias, activation="silu")
        return geglu_linear(x, weight, bias), z

    def gradients(*weights: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *args: sum(t.sum() for t in both(*args)), (0, 1, 2))(*weights)

    def batched(*weights: Tensor) -> tuple[Tensor, ...]:
        of_halves = torch.func.vmap(both, (2, 1, 2))(weights[0].unflatten(0, (2, 6)).movedim(3, 2), *weights[1:])
        return *torch.func.vmap(both, (2, 1, 2))(*weights), *of_halves, *torch.func.vmap(gradients, (2, 1, 2))(*weights)

    run = torch.compile(batched, fullgraph=True, backend="aot_eager") if compiled else batched
    found = run(*(t.movedim(0, -1).contiguous() for t in (weight, bias, w_down)))
    for i in range(2):
        y_and_z = both(weight[i], bias[i], w_down[i])
        for part, expected in zip(found, (*y_and_z, *y_and_z, *gradients(weight[i], bias[i], w_down[i])), strict=True):
            torch.testing.assert_close(part[i], expected, atol=1e-4, rtol=1e-4)
