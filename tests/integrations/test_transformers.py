"""A patched transformers model: same results within rounding, nothing else changed, and fully reversible.

Every family is a two-layer model with random weights, compared with itself in float64.
"""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fusewise
from fusewise.integrations.transformers import Patch, patch

from .small_models import FAMILIES, TOKENS, Count, build, forwards


def results(model: Any, tokens: Tensor = TOKENS) -> list[Tensor]:
    """The logits and the gradient of every parameter, in float64."""
    model.zero_grad()
    output = model(tokens, labels=tokens, use_cache=False)
    output.loss.backward()
    return [t.detach().double() for t in (output.logits, *(p.grad for p in model.parameters() if p.grad is not None))]


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


@pytest.mark.parametrize(("family", "name"), [("Llama", "act_fn"), ("Phi3", "activation_fn")])
def test_activations_that_are_replaced_or_have_hooks_are_called(family: str, name: str) -> None:
    model: Any = build(family)
    mlp = model.model.layers[0].mlp
    own, seen = getattr(mlp, name), []
    setattr(mlp, name, torch.nn.Tanh())
    replaced = model(TOKENS).logits
    setattr(mlp, name, own)
    with patch(model):
        hook = own.register_forward_hook(lambda module, args, output: seen.append(output.shape))
        model(TOKENS)
        assert seen == [(2, 10, 48)]
        hook.remove()
        setattr(mlp, name, torch.nn.Tanh())
        torch.testing.assert_close(model(TOKENS).logits, replaced, rtol=1e-4, atol=1e-5)
        setattr(mlp, name, own)
        with Count() as count:
            model(TOKENS)
        assert sum("gated_linear" in operator for operator in count.calls) == 2


def test_an_activation_of_the_same_class_may_compute_another_function() -> None:
    model: Any = build("Llama")
    mlp = model.model.layers[0].mlp
    x = torch.randn(5, mlp.gate_proj.in_features)
    mlp.act_fn = torch.nn.GELU("tanh")
    tanh = mlp(x)
    mlp.act_fn = torch.nn.GELU()
    with patch(model):
        torch.testing.assert_close(mlp(x), mlp.down_proj(functional.gelu(mlp.gate_proj(x)) * mlp.up_proj(x)))
        mlp.act_fn = torch.nn.GELU("tanh")
        assert torch.equal(mlp(x), tanh)


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
