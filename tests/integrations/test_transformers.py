"""A patched transformers model: same results within rounding, nothing else changed, and fully reversible.

Every family is a two-layer model with random weights, compared with itself in float64.
"""

from __future__ import annotations

import copy
import functools
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewise
from fusewise.integrations.transformers import Patch, patch

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 2,
}  # fmt: skip
NO_GATE = "it has no modules gate_proj and up_proj, or gate_up_proj, before down_proj"
# model: configuration, replacement of its rotation function, outcome for its MLP
FAMILIES: dict[str, tuple[dict[str, Any], str, str]] = {
    "Llama": ({**GROUPED, "mlp_bias": True}, "apply_rotary_pos_emb", "silu"),
    "Mistral": (GROUPED, "apply_rotary_pos_emb", "silu"),
    "Qwen2": (GROUPED, "apply_rotary_pos_emb", "silu"),
    "Qwen3": (HEADS, "apply_rotary_pos_emb", "silu"),
    "Gemma": (HEADS, "apply_rotary_pos_emb", "gelu_tanh"),
    "Gemma2": (HEADS, "apply_rotary_pos_emb", "gelu_tanh"),
    "Phi3": ({**GROUPED, "partial_rotary_factor": 0.5}, "apply_rotary_pos_emb", "silu"),
    "Glm": (HEADS, "apply_rotary_pos_emb_glm", "silu"),
    "Cohere": (GROUPED, "apply_rotary_pos_emb_interleaved", "silu"),
    "GPTNeoX": (SMALL, "apply_rotary_pos_emb", NO_GATE),
    "GPTJ": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 50},
        "apply_rotary_pos_emb_gptj",
        NO_GATE,
    ),
    "DeepseekV2": ({**GROUPED, **LATENT}, "apply_rotary_emb_deepseek_v2", "silu"),
    "GPT2": ({"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50}, "", NO_GATE),
}
# Qwen2.5 shares its class with Qwen2, Llama 2 with Llama 3.
TOKENS = torch.arange(20).view(2, 10) + 3


def build(family: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[family][0], **options})
    causal = {"GPTNeoX": "GPTNeoXForCausalLM", "GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    model: nn.Module = getattr(transformers, causal)(config).eval()  # no dropout
    return model


def results(model: Any, tokens: Tensor = TOKENS) -> list[Tensor]:
    """The logits and the gradient of every parameter, in float64."""
    model.zero_grad()
    output = model(tokens, labels=tokens, use_cache=False)
    output.loss.backward()
    return [t.detach().double() for t in (output.logits, *(p.grad for p in model.parameters() if p.grad is not None))]


def forwards(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family: str, dtype: torch.dtype) -> None:
    """Errors are at most twice the model's own, plus one rounding; removing the patch restores it bitwise. Tensors of
    few numbers may have a small own error by luck: for them the median over all tensors counts, relative to the largest
    value.
    """
    model = build(family).to(dtype)
    truth, own = results(copy.deepcopy(model).double()), results(model)
    with patch(model) as handle:
        given = results(model)
    assert bool(handle.replaced) == (family != "GPT2")
    assert len(given) == len(own) == len(truth)
    scales = [right.abs().max() for right in truth]
    errors = [(theirs - right).abs().max() for right, theirs in zip(truth, own, strict=True)]
    usual = median(float(error / scale) for error, scale in zip(errors, scales, strict=True) if scale)
    for right, ours, error, scale in zip(truth, given, errors, scales, strict=True):
        assert (ours - right).abs().max() <= 2 * max(error, usual * scale) + torch.finfo(dtype).eps * scale
    assert all(map(torch.equal, own, results(model)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_report_names_every_module(family: str) -> None:
    _, rotation, mlp = FAMILIES[family]
    handle = patch(build(family))
    said = {entry.name: entry.what for entry in handle.replaced} | {entry.name: entry.why for entry in handle.left}
    theirs = "apply_rotary_emb" if family == "DeepseekV2" else "apply_rotary_pos_emb"
    attention = f"{theirs} by {rotation}" if rotation else "it calls no rotary function"
    gated = mlp if mlp == NO_GATE else f"gated_mlp, {mlp}"
    assert len(said) == 4
    for name, text in said.items():
        assert text == (gated if name.endswith("mlp") else attention)
    assert len(handle.replaced) == 2 * (bool(rotation) + (mlp != NO_GATE))
    assert f"{attention} (" in str(handle) and " and 1 more)" in str(handle)


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the fusewise operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fusewise":
            self.calls.append(func.name())
        return func(*args, **(kwargs or {}))


def test_what_is_replaced_is_called() -> None:
    """Each operator is called as often as there are layers; an unpatched model calls none."""
    model, other = build("Llama"), build("Llama")
    with patch(model), torch.no_grad(), Count() as seen:
        other(TOKENS)
        assert not seen.calls
        model(TOKENS)
    assert seen.calls.count("fusewise::rope_qk") == 2
    assert sum("gated" in name for name in seen.calls) >= 2


def test_only_this_model_changes() -> None:
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama)), dict(vars(modeling_llama.LlamaAttention)), dict(vars(modeling_llama.LlamaMLP))
    model = build("Llama")
    state, keys = {k: v.data_ptr() for k, v in model.state_dict().items()}, list(vars(model.model.layers[0].mlp))
    handle = patch(model)
    after = dict(vars(modeling_llama)), dict(vars(modeling_llama.LlamaAttention)), dict(vars(modeling_llama.LlamaMLP))
    assert after == before
    assert {k: v.data_ptr() for k, v in model.state_dict().items()} == state
    assert forwards(model) == [f"model.layers.{i}.{part}" for i in (0, 1) for part in ("self_attn", "mlp")]
    handle.remove()
    assert forwards(model) == [] and list(vars(model.model.layers[0].mlp)) == keys
    handle.remove()


def test_one_part_of_a_model_and_one_kind_of_module() -> None:
    model = build("Llama")
    assert [entry.type for entry in patch(model.model.layers[1], mlp=False).replaced] == ["LlamaAttention"]
    assert forwards(model) == ["model.layers.1.self_attn"]
    assert [entry.type for entry in patch(model.model.layers[0], rope=False).replaced] == ["LlamaMLP"]


def test_threads_with_and_without() -> None:
    model = build("Llama")
    other = copy.deepcopy(model)
    with torch.no_grad():
        own = other(TOKENS).logits
        with patch(model):
            ours = model(TOKENS).logits
            seen: dict[str, list[Tensor]] = {"own": [], "ours": []}

            def run(name: str, which: Any) -> None:
                with torch.no_grad():
                    seen[name] += [which(TOKENS).logits for _ in range(20)]

            threads = [threading.Thread(target=run, args=a) for a in (("own", other), ("ours", model))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert not torch.equal(own, ours)
    assert all(torch.equal(x, own) for x in seen["own"]) and len(seen["own"]) == 20
    assert all(torch.equal(x, ours) for x in seen["ours"]) and len(seen["ours"]) == 20


def test_compiled_whole_before_and_after() -> None:
    """Patching an already compiled model takes effect; removing the patch finds the first graph again."""
    targets: list[set[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        targets.append({str(node.target) for node in graph.graph.nodes if "fusewise" in str(node.target)})
        return graph.forward

    model = build("Qwen3").requires_grad_(False)
    own = model(TOKENS, use_cache=False).logits
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(compiled(TOKENS, use_cache=False).logits, own) and targets == [set()]
    with patch(model):
        ours = model(TOKENS, use_cache=False).logits
        assert torch.equal(compiled(TOKENS, use_cache=False).logits, ours) and len(targets) == 2
        assert any("rope_qk" in name for name in targets[1]) and any("gated" in name for name in targets[1])
    assert torch.equal(compiled(TOKENS, use_cache=False).logits, own) and len(targets) == 2
    torch._dynamo.reset()


def test_greedy_generation_with_a_cache() -> None:
    model: Any = build("Llama")
    arguments: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(TOKENS)}
    own = model.generate(TOKENS, **arguments)
    with patch(model):
        assert torch.equal(model.generate(TOKENS, **arguments), own)


@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"
)  # by transformers 5.23
def test_autocast_and_checkpointing() -> None:
    model: Any = build("Llama").train()
    truth = results(copy.deepcopy(model).double())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with torch.autocast("cpu", torch.bfloat16):
        own = results(model)
        with patch(model, save="input"):
            ours = results(model)
    for right, theirs, given in zip(truth, own, ours, strict=True):
        band = torch.finfo(torch.bfloat16).eps * right.abs().max()
        assert (given - right).abs().max() <= 2 * (theirs - right).abs().max() + band


def test_projections_with_hooks_are_called() -> None:
    model: Any = build("Llama")
    handle, seen = patch(model), []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model(TOKENS)
    assert seen == [(2, 10, 48)]
    handle.remove()


def test_forwards_of_others_are_not_touched() -> None:
    model: Any = build("Llama")
    mlp = model.model.layers[0].mlp
    mlp.forward = own = lambda x: x
    with patch(model) as handle:
        assert [(entry.name, entry.why) for entry in handle.left] == [
            ("model.layers.0.mlp", "it has a forward of its own")
        ]
        assert mlp.forward is own
    assert mlp.forward is own


def renamed(old: str, new: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that renames an argument, as transformers 5.24 applies to every attention."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_new_name(*args: Any, **kwargs: Any) -> Any:
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return with_new_name

    return decorate


def test_a_decorated_forward_keeps_its_decorators() -> None:
    """The decorators are copied: the class and its other instances keep their own."""
    llama = transformers.models.llama.modeling_llama
    no_grad = torch.no_grad()

    class Attention(llama.LlamaAttention):  # type: ignore[misc, name-defined]
        forward = no_grad(renamed("seen", "attention_mask")(llama.LlamaAttention.forward))

    class Mlp(llama.LlamaMLP):  # type: ignore[misc, name-defined]
        forward = renamed("features", "x")(llama.LlamaMLP.forward)

    model: Any = build("Llama")
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    attention.__class__, mlp.__class__ = Attention, Mlp
    x, position_ids = torch.randn(2, 10, 32, requires_grad=True), torch.arange(10)[None]
    position_embeddings = model.model.rotary_emb(x, position_ids)

    def results() -> list[Tensor]:
        y, _ = attention(x, position_embeddings=position_embeddings, seen=None)
        assert not y.requires_grad
        return [y, mlp(features=x)]

    own, before = results(), Attention.forward
    with patch(model) as handle:
        said = {entry.name: entry.what for entry in handle.replaced}
        assert said["model.layers.0.self_attn"] == "apply_rotary_pos_emb by apply_rotary_pos_emb"
        assert said["model.layers.0.mlp"] == "gated_mlp, silu"
        with Count() as seen:
            ours = results()
        assert [name.partition("::")[2] for name in seen.calls] == ["rope_qk", "gated_linear_preact"]
        assert Attention.forward is before
    torch.testing.assert_close(ours, own)
    assert all(map(torch.equal, own, results()))


def test_a_forward_that_is_no_function_is_left() -> None:
    class Decorator:
        def __init__(self, function: Callable[..., Any]) -> None:
            functools.update_wrapper(self, function)

        def __get__(self, module: Any, _: Any = None) -> Any:
            return self if module is None else functools.partial(self.__wrapped__, module)

    llama = transformers.models.llama.modeling_llama
    model: Any = build("Llama")
    model.model.layers[0].mlp.__class__ = type("Mlp", (llama.LlamaMLP,), {"forward": Decorator(llama.LlamaMLP.forward)})
    (left,) = patch(model).left
    assert (left.name, left.why) == ("model.layers.0.mlp", "its forward is decorated by more than functions")


def test_what_is_not_known_is_left() -> None:
    handle = patch(build("Llama", hidden_act="quick_gelu"))
    assert {entry.why for entry in handle.left} == {"its forward is no gated MLP with an activation of fusewise"}

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return apply_rotary_by_nothing(q, k, cos, sin)

    (left,) = patch(Attention()).left
    assert left.why == "its apply_rotary_by_nothing rotates in no way that fusewise.compat.transformers knows"


def apply_rotary_by_nothing(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos - q * sin, k * cos - k * sin


def raises_index_error(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    raise IndexError("these tables have four dimensions")


def rotates_one(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return (transformers.models.llama.modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)[0],)


def returns_a_list(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return [q, k]


apply_rotary_tried: Any = None


@pytest.mark.parametrize("function", [raises_index_error, rotates_one, returns_a_list])
def test_whatever_a_rotation_raises_or_returns_it_is_left(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return apply_rotary_tried(q, k, cos, sin)

    monkeypatch.setitem(globals(), "apply_rotary_tried", function)
    (left,) = patch(Attention()).left
    assert left.why == "its apply_rotary_tried rotates in no way that fusewise.compat.transformers knows"


def test_names_of_methods_and_names_that_are_nowhere_are_no_functions() -> None:
    class OwnAttention(nn.Module):
        def apply_rotary_by_nothing(self, x: Tensor) -> Tensor:  # named like a global of the module
            return x

        def forward(self, x: Tensor) -> Tensor:
            return self.apply_rotary_by_nothing(x)

    class NowhereAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if self.training else apply_rotary_not_installed(x)  # type: ignore[name-defined]  # noqa: F821

    model = nn.Sequential(OwnAttention(), NowhereAttention())
    assert [left.why for left in patch(model).left] == 2 * ["it calls no rotary function"]


class Asserts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[0] == 7
        return x


class Returns(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return (x,)


def test_whatever_an_mlp_raises_or_returns_it_is_left() -> None:
    for module in (Asserts(), Returns()):
        for name in ("gate_proj", "up_proj", "down_proj"):
            module.add_module(name, nn.Linear(4, 4))
        (left,) = patch(module).left
        assert left.why == "its forward is no gated MLP with an activation of fusewise"


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # deprecated; a FutureWarning in torch 2.15
def test_a_scripted_mlp_is_left() -> None:
    module = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("gate_proj", "up_proj", "down_proj")})
    module.forward = nn.Identity().forward
    (left,) = patch(torch.jit.trace(module, torch.ones(4))).left
    assert left.why == "it is scripted"


def test_conflicts_are_errors() -> None:
    model: Any = build("Llama")
    handle: Patch = patch(model)
    with pytest.raises(ValueError, match=r"^patch: model must not be patched already, got a patched LlamaAttention; "):
        patch(model)
    mlp = model.model.layers[1].mlp
    ours, mlp.forward = mlp.forward, lambda x: x
    with pytest.raises(RuntimeError, match=r"^remove: .*, got another in model\.layers\.1\.mlp; undo first"):
        handle.remove()
    assert len(forwards(model)) == 4
    mlp.forward = ours
    handle.remove()
    assert forwards(model) == []


def test_what_cannot_be_patched_is_named_before_anything_changes() -> None:
    with pytest.raises(TypeError, match=r"^patch: model must be a torch\.nn\.Module, got str; "):
        patch("meta-llama/Meta-Llama-3-8B")  # type: ignore[arg-type]
    model = build("Llama")
    with pytest.raises(ValueError, match=r"^patch: save must be one of preact, input, got 'all'; "):
        patch(model, save="all")  # type: ignore[arg-type]
    assert forwards(model) == []


def test_a_deep_copy_stays_patched_with_its_own_weights() -> None:
    model: Any = build("Llama")
    with patch(model), torch.no_grad():
        copied = copy.deepcopy(model)
        assert torch.equal(copied(TOKENS).logits, model(TOKENS).logits)
        copied.model.layers[0].mlp.up_proj.weight.zero_()
        assert not torch.equal(copied(TOKENS).logits, model(TOKENS).logits)
    assert forwards(model) == [] and len(forwards(copied)) == 4


def test_a_model_that_was_saved_patched_is_loaded_unpatched() -> None:
    model = build("Llama")
    expected = model(TOKENS).logits
    saved = io.BytesIO()
    with patch(model) as handle:
        torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert torch.equal(loaded(TOKENS).logits, expected)
    with patch(loaded) as again:
        assert again.replaced == handle.replaced
    assert not forwards(loaded)
    assert torch.equal(loaded(TOKENS).logits, expected)


def test_random_numbers_are_not_used() -> None:
    before = torch.random.get_rng_state()
    with torch.device("meta"):
        model = build("Llama")
        torch.random.set_rng_state(before)
        assert len(patch(model).replaced) == 4
    assert torch.equal(torch.random.get_rng_state(), before)


def test_importing_it_does_not_import_transformers() -> None:
    source = str(Path(fusewise.__file__).parent.parent)
    code = (
        "import sys, torch; before = set(sys.modules); import fusewise.integrations.transformers; "
        "print([n for n in sys.modules if n not in before and n.startswith(('transformers', 'thunder', 'triton'))])"
    )
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "[]\n"
