"""Autograd and compiler support: repeated and double backward, transforms, tracing, memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fusewise._shared import host
from fusewise.ops.gated_linear import _autograd, _op, _products, gated_linear, gated_mlp, geglu_linear
from fusewise.ops.gated_linear._gate import stacked_gate
from fusewise.ops.gated_linear._problem import ACTIVATIONS, SAVES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def leaves(
    dtype: torch.dtype = torch.float32, rows: int = 6, features: int = 5, hidden: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()

    return leaf(rows, features), leaf(2 * hidden, features), leaf(2 * hidden)


def eager(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    value, gate = functional.linear(x, weight, bias).chunk(2, -1)
    return value * functional.gelu(gate, approximate="tanh")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_and_gradgradcheck(activation: str) -> None:
    inputs = leaves(torch.float64)
    for save in SAVES:

        def call(*a: Any, save: str = save) -> Tensor:
            return gated_linear(*a, activation=activation, save=save)

        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize(("layout", "gate_first"), [("stacked", True), ("interleaved", False), ("interleaved", True)])
def test_second_gradients_of_other_layouts(layout: str, gate_first: bool) -> None:
    def call(*a: Any) -> Tensor:
        return gated_linear(*a, activation="silu", layout=layout, gate_first=gate_first)

    assert torch.autograd.gradgradcheck(call, leaves(torch.float64, 3, 3, 2))


def test_second_gradients_of_separate_weights() -> None:
    x, weight, bias = leaves(torch.float64, 3, 3, 2)
    parts = [t.detach().clone().requires_grad_() for t in (*weight.chunk(2), *bias.chunk(2))]

    def call(x: Tensor, value: Tensor, gate: Tensor, b_value: Tensor, b_gate: Tensor) -> Tensor:
        return gated_linear(x, value, b_value, w_gate=gate, b_gate=b_gate, activation="gelu")

    assert torch.autograd.gradcheck(call, (x, *parts)) and torch.autograd.gradgradcheck(call, (x, *parts))


@pytest.mark.parametrize("save", SAVES)
def test_second_gradients_in_float32_match_eager(save: str) -> None:
    inputs = leaves()
    dy = torch.randn(6, 4, device=DEVICE)

    def second(of: Any) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(of(*inputs), inputs, dy, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    torch.testing.assert_close(second(lambda *a: geglu_linear(*a, save=save)), second(eager), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("save", SAVES)
def test_a_retained_graph_gives_the_same_gradients_again(save: str) -> None:
    inputs = leaves()
    y = geglu_linear(*inputs, save=save)
    dy = torch.randn_like(y)
    runs = [torch.autograd.grad(y, inputs, dy, retain_graph=keep) for keep in (True, True, False)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, inputs, dy)


def test_gradients_accumulate() -> None:
    inputs = leaves()
    geglu_linear(*inputs).sum().backward()
    once = [leaf.grad.clone() for leaf in inputs if leaf.grad is not None]
    geglu_linear(*inputs).sum().backward()
    for leaf, gradient in zip(inputs, once, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * gradient)


def test_the_incoming_gradient_is_not_written_to() -> None:
    inputs = leaves()
    for save in SAVES:
        y = geglu_linear(*inputs, save=save)
        dy = torch.randn_like(y)
        before = dy.clone()
        y.backward(dy)
        assert torch.equal(dy, before)


def test_a_weight_changed_before_backward_raises() -> None:
    x, weight, bias = leaves()
    y = geglu_linear(x, weight, bias)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def held(save: str, bias: bool = True) -> int:
    """Bytes saved by forward in addition to its inputs and y."""
    x, weight, b = leaves(torch.bfloat16, 64, 32, 48)
    own = {t.untyped_storage().data_ptr() for t in (x, weight, b)}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = geglu_linear(x, weight, b if bias else None, save=save)
    kept.pop(y.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def test_held_memory_is_the_contract() -> None:
    assert held("preact") == 64 * 2 * 48 * 2
    assert held("input") == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    inputs = leaves()
    dy = torch.randn(6, 4, device=DEVICE)
    plain = torch.autograd.grad(geglu_linear(*inputs), inputs, dy)
    for leaf in inputs:
        leaf.grad = None
    checkpoint(geglu_linear, *inputs, use_reentrant=reentrant).backward(dy)
    assert all(torch.equal(a.grad, b) for a, b in zip(inputs, plain, strict=True))


FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "linear": (geglu_linear, lambda x, weight, bias: eager(x, weight, bias)),
    "mlp": (
        lambda x, weight, bias: gated_mlp(x, weight, None, weight[:3, :4], activation="gelu_tanh", gate_first=False),
        lambda x, weight, bias: functional.linear(eager(x, weight, None), weight[:3, :4]),
    ),
    "gate": (
        lambda x, weight, bias: stacked_gate(functional.linear(x, weight, bias), "gelu_tanh", gate_first=False),
        lambda x, weight, bias: eager(x, weight, bias),
    ),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo
@pytest.mark.parametrize("how", ["called", "compiled"])
@pytest.mark.parametrize("shape", [(5,), (6, 5), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_result_may_be_modified_in_place(name: str, shape: tuple[int, ...], how: str) -> None:
    """Like the result of nn.Linear, also in training: in-place residual additions and dropout rely on it."""
    torch._dynamo.reset()
    _, weight, bias = leaves()
    x = torch.randn(shape, device=DEVICE, requires_grad=True)
    found = []
    for function in FUNCTIONS[name]:

        def step(function: Any = function) -> Tensor:
            y: Tensor = function(x, weight, bias)
            y += 1
            y[..., 0].mul_(2)
            return y.square().sum()

        run = torch.compile(step, backend="aot_eager", fullgraph=True) if how == "compiled" else step
        found.append(torch.autograd.grad(run(), (x, weight)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("where", ["gate", "products"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("mlp", [False, True])
def test_a_backward_that_failed_midway_does_not_go_on(
    mlp: bool, apart: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the gradient has overwritten the pre-activations and would be mistaken for them."""
    x, weight, bias = leaves()
    if apart:
        monkeypatch.setattr(_autograd, "LARGE_BYTES", 0)  # separate tensors for value and gate
    y = gated_mlp(x, weight, None, weight[:3, :4], activation="gelu") if mlp else geglu_linear(x, weight, bias)

    def fail(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        if where == "gate":
            patched.setattr(_op, "op_down_grad_" if mlp else "op_grad_", fail)
        for product in ("product", "transposed"):
            patched.setattr(_products, product, fail)
        with host.through_python(), pytest.raises(torch.OutOfMemoryError):
            y.sum().backward()
    freed = "backward through the graph a second time"
    with pytest.raises(
        RuntimeError, match=freed if apart and where == "products" and not mlp else "modified by an inplace operation"
    ):
        y.sum().backward()


@pytest.mark.parametrize("mlp", [False, True])
@pytest.mark.parametrize("builtin", [False, True])
def test_what_a_hook_keeps_is_not_overwritten(mlp: bool, builtin: bool) -> None:
    """`builtin`: the hook is a list method, which has no module."""
    x, weight, bias = leaves()
    down = torch.randn(3, 4, device=DEVICE, requires_grad=True)
    kept: list[Tensor] = []
    in_turn = iter(kept)

    def pack(t: Tensor) -> None:
        kept.append(t)

    with torch.autograd.graph.saved_tensors_hooks(kept.append if builtin else pack, lambda _: next(in_turn)):
        y = gated_mlp(x, weight, None, down, activation="gelu") if mlp else geglu_linear(x, weight, bias)
    before = [t.detach().clone() for t in kept]
    y.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


@pytest.mark.parametrize(
    ("dtype", "pack", "unpack"),
    [
        pytest.param(torch.float32, lambda t: torch.stack((t, t), -1), lambda t: t[..., 0], id="strides"),
        pytest.param(torch.bfloat16, lambda t: t.float(), lambda t: t, id="dtype"),
    ],
)
@pytest.mark.parametrize("mlp", [False, True])
@pytest.mark.parametrize("save", SAVES)
def test_a_hook_may_bring_back_other_strides_or_another_dtype(
    mlp: bool, save: Any, dtype: torch.dtype, pack: Any, unpack: Any
) -> None:
    x, *stacked = leaves(dtype)
    weight, bias = (t.detach().unflatten(0, (2, 4)).requires_grad_() for t in stacked)
    down = torch.randn(3, 4, device=DEVICE, dtype=dtype, requires_grad=True)
    inputs = (x, weight, down) if mlp else (x, weight, bias)

    def call() -> Tensor:
        if mlp:
            return gated_mlp(x, weight, None, down, activation="gelu", save=save)
        return geglu_linear(*inputs, save=save)

    expected = torch.autograd.grad(call().square().sum(), inputs)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = call()
    for found, gradient in zip(torch.autograd.grad(y.square().sum(), inputs), expected, strict=True):
        torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize("wrong", [Tensor.flatten, lambda t: t[..., :2], lambda t: t[:2], lambda t: t.to("meta")])
@pytest.mark.parametrize("op", ["gated_linear", "gated_mlp", "gate"])
def test_a_hook_must_bring_back_shape_and_device(op: str, wrong: Any) -> None:
    """Kernels would read other memory."""
    x, weight, bias = leaves()
    calls: dict[str, Any] = {
        "gated_linear": lambda: geglu_linear(x, weight, bias),
        "gated_mlp": lambda: gated_mlp(x, weight, None, weight[:3, :4], activation="silu"),
        "gate": lambda: stacked_gate(weight.t(), "silu", gate_first=True),
    }
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, wrong):
        y = calls[op]()
    contract = f"^{op}: what a saved-tensor hook returns must have the shape and device of "
    with pytest.raises(ValueError, match=contract):
        y.sum().backward()


@pytest.mark.parametrize("how", ["checkpoint", "save_on_cpu"])
def test_what_hooks_of_torch_keep_for_backward_alone_is_overwritten(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They use saved tensors only once."""
    inputs, answers = leaves(), []
    ask = _autograd.may_overwrite
    monkeypatch.setattr(_autograd, "may_overwrite", lambda *args: answers.append(ask(*args)) or answers[-1])
    if how == "checkpoint":
        y = checkpoint(geglu_linear, *inputs, use_reentrant=False)
    else:
        with torch.autograd.graph.save_on_cpu():
            y = geglu_linear(*inputs)
    y.sum().backward()
    assert answers == [True]


def test_inference_mode_records_nothing_even_with_gradients_enabled() -> None:
    """As with `F.linear`; its tensors could not be saved for a backward."""
    x, weight, bias = leaves()
    w_down = torch.randn(3, 4, device=DEVICE)

    def results(x: Tensor) -> list[Tensor]:
        stacked = stacked_gate(functional.linear(x, weight), "silu", gate_first=True)
        return [geglu_linear(x, weight, bias), gated_mlp(x, weight, None, w_down, activation="silu"), stacked]

    expected = results(x)
    with torch.inference_mode(), torch.enable_grad():
        found = results(x.clone())
    for y, true in zip(found, expected, strict=True):
        assert not y.requires_grad
        torch.testing.assert_close(y.clone(), true.detach())


def test_saved_tensors_on_the_host() -> None:
    inputs = leaves()
    dy = torch.randn(6, 4, device=DEVICE)
    plain = torch.autograd.grad(geglu_linear(*inputs), inputs, dy)
    with torch.autograd.graph.save_on_cpu():
        y = geglu_linear(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(y, inputs, dy), plain, strict=True))


def test_autocast_casts_as_linear_does() -> None:
    inputs = leaves()
    with torch.autocast(DEVICE, torch.bfloat16):
        y, usual = geglu_linear(*inputs), eager(*inputs)
        assert y.dtype == usual.dtype == torch.bfloat16
        gradients = torch.autograd.grad(y.float().sum(), inputs)
        double = geglu_linear(*(t.double() for t in inputs))
    torch.testing.assert_close(y, usual, rtol=0.05, atol=0.05)
    assert all(g.dtype == torch.float32 for g in gradients) and double.dtype == torch.float64


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("mlp", [False, True])
def test_backward_under_autocast_keeps_its_dtypes(mlp: bool, create_graph: bool) -> None:
    inputs = leaves()
    y, usual = geglu_linear(*inputs), eager(*inputs)
    if mlp:
        inputs = *inputs, torch.randn(8, y.shape[-1], device=DEVICE, requires_grad=True)
        x, weight, bias, down = inputs
        y = gated_mlp(x, weight, None, down, b_gate=bias, activation="gelu_tanh", gate_first=False)
        usual = functional.linear(usual, down)
    dy = torch.randn_like(y)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = torch.autograd.grad(y, inputs, dy, create_graph=create_graph)
    # Allows another summation order in float32; a bfloat16 matmul would be off by a hundred times that.
    torch.testing.assert_close(found, torch.autograd.grad(usual, inputs, dy), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # raised by torch's forward-mode AD
def test_transforms_go_through_the_formula() -> None:
    x, weight, bias = (t.detach() for t in leaves())
    torch.testing.assert_close(torch.func.vmap(geglu_linear, (0, None, None))(x, weight, bias), eager(x, weight, bias))
    stack = weight.expand(3, -1, -1) * torch.arange(1.0, 4.0, device=DEVICE)[:, None, None]
    each = torch.stack([eager(x, w, bias) for w in stack])
    torch.testing.assert_close(torch.func.vmap(geglu_linear, (None, 0, None))(x, stack, bias), each)
    tangents = tuple(torch.randn_like(t) for t in (x, weight, bias))
    found, usual = (torch.func.jvp(f, (x, weight, bias), tangents) for f in (geglu_linear, eager))
    torch.testing.assert_close(found, usual)
    gradients = [
        torch.func.grad(lambda *a, f=f: f(*a).square().sum(), (0, 1, 2))(x, weight, bias) for f in (geglu_linear, eager)
    ]
    torch.testing.assert_close(*gradients)
    if _op.unavailable("cpu", DEVICE, torch.float32) is None:
        down = torch.ones(3, weight.shape[0] // 2, device=DEVICE)
        for call in (
            lambda row: geglu_linear(row, weight, bias, impl="cpu"),
            lambda row: gated_mlp(row, weight, None, down, activation="silu", impl="cpu"),
        ):
            with pytest.raises(RuntimeError, match="impl must be auto or reference under forward mode"):
                torch.func.vmap(call)(x)


def operator_calls() -> list[tuple[Any, tuple[Any, ...]]]:
    x, weight, bias = (t.detach() for t in leaves(rows=8, features=16, hidden=8))
    dy, dz, w_down = (
        torch.randn(8, 8, device=DEVICE),
        torch.randn(8, 12, device=DEVICE),
        torch.randn(12, 8, device=DEVICE),
    )
    ops, calls = torch.ops.fusewise, []
    for text in ("gelu_tanh/stacked/value_first", "silu/interleaved/gate_first", "gelu/separate/value_first"):
        spec = _op.Spec.decode(text)
        tensors = (weight, None, bias, None)
        if spec.layout == "separate":
            tensors = (weight[:8], weight[8:], bias[:8], bias[8:])
        preact = torch.randn_like(_op.new_preact(x, 8, spec))
        pair = torch.randn_like(dy), torch.randn_like(dy)
        calls += [
            (ops.gated_linear.default, (x, *tensors, text, "auto")),
            (ops.gated_linear_preact.default, (x, *tensors, text, "auto")),
            (ops.gated_linear_grad.default, (dy, preact, text, "auto", True)),
            (ops.gated_linear_preact_into.default, (x, *tensors, text, "auto", *pair)),
            (ops.gated_linear_grad_.default, (dy, *pair, text, "auto", False)),
            (ops.gated_linear_recompute_grad.default, (dy, x, *tensors, text, "auto", True)),
            (ops.gated_linear_recompute_grad_into.default, (dy, x, *tensors, text, "auto", True, *pair)),
            (ops.gated_linear_down_grad.default, (dz, w_down, preact, text, "auto", True)),
            (ops.gated_linear_down_grad_.default, (dz, w_down, preact, text, "auto", True)),
        ]
    return calls


@pytest.mark.parametrize(("op", "args"), operator_calls(), ids=lambda value: getattr(value, "__name__", ""))
def test_opcheck(op: Any, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised by Dynamo
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("layout", ["stacked", "interleaved"])
def test_compiles_whole_and_once_for_all_row_counts(layout: str, save: str) -> None:
    _, weight, bias = leaves(features=16, hidden=8)
    order = torch.arange(16) if layout == "stacked" else torch.arange(16).view(2, 8).T.reshape(-1)

    def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = gated_linear(x, weight[order], bias[order], activation="gelu_tanh", layout=layout, save=save)  # type: ignore[arg-type]
        return y.square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    torch._dynamo.utils.counters.clear()
    for rows in (6, 7, 40):
        x = torch.randn(2, rows, 16, device=DEVICE, requires_grad=True)
        found = torch.autograd.grad(compiled(x, weight, bias), (x, weight, bias))
        usual = torch.autograd.grad(eager(x, weight, bias).square().sum(), (x, weight, bias))
        torch.testing.assert_close(found, usual, rtol=1e-3, atol=1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_fake_tensors_give_shapes_without_a_kernel() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, 5, 16, dtype=torch.bfloat16, requires_grad=True)
        for save, weight in itertools.product(SAVES, (torch.empty(24, 16, dtype=torch.bfloat16, requires_grad=True),)):
            y = geglu_linear(x, weight, save=save)
            dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
            assert y.shape == (3, 5, 12) and dx.shape == x.shape and dweight.shape == weight.shape
