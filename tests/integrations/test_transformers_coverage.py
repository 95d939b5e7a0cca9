"""Which modules of a transformers model a patch replaces, which it leaves, and the reasons it gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusewise.integrations.transformers import patch

from .small_models import FAMILIES, HEADS, NO_GATE, Count, build, transformers


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


def test_a_report_of_nothing_says_so() -> None:
    assert str(patch(nn.Linear(2, 2))) == "nothing to replace"


def test_tables_with_every_angle_once_for_interleaved_pairs() -> None:
    """A layer's attention of OpenAI's privacy filter."""
    module = pytest.importorskip("transformers.models.openai_privacy_filter.modeling_openai_privacy_filter")
    config = transformers.OpenAIPrivacyFilterConfig(**HEADS)
    (entry,) = patch(module.OpenAIPrivacyFilterAttention(config)).replaced
    assert entry.what == "apply_rotary_pos_emb by apply_rotary_pos_emb_openai_privacy_filter"


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


def test_a_rotation_of_q_alone_or_q_and_k() -> None:
    """Qwen4's indexer rotates its q alone, and a block of keys, with the function that its attention calls with both."""
    qwen4 = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    theirs = qwen4.apply_rotary_pos_emb

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return apply_rotary_tried(q, cos=cos, sin=sin), *apply_rotary_tried(q, k, cos, sin)

    model, (q, k) = Attention(), torch.randn(2, 2, 3, 5, 16)
    tables = torch.randn(2, 5, 4).repeat(1, 1, 2).unbind(0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(globals(), "apply_rotary_tried", theirs)
        own = model(q, k, *(table[None] for table in tables))
        with patch(model) as handle:
            assert handle.replaced[0].what == "apply_rotary_tried by apply_rotary_pos_emb_qwen4_exp"
            torch.testing.assert_close(model(q, k, *(table[None] for table in tables)), own)


@pytest.mark.parametrize("case", ["learned tables", "fewer tokens of q"])
def test_a_call_that_our_function_does_not_support_is_the_models_own(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLCD learns the angle of its class token; muse_glimmer_assistant's keys have the context's tokens, too."""
    if case == "learned tables":
        theirs = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    else:
        muse = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")
        theirs = muse.apply_rotary_pos_emb

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return apply_rotary_tried(q, k, cos, sin)

    monkeypatch.setitem(globals(), "apply_rotary_tried", theirs)
    model, (q, k) = Attention(), torch.randn(2, 1, 2, 5, 8)
    angles = torch.randn(1, 5, 4).repeat(1, 1, 2).requires_grad_(case == "learned tables")
    arguments = (q if case == "learned tables" else q[:, :, 3:], k, angles.cos(), angles.sin())
    own = model(*arguments)
    with patch(model) as handle:
        assert handle.replaced[0].what == "apply_rotary_tried by apply_rotary_pos_emb"
        assert all(map(torch.equal, model(*arguments), own))


@pytest.mark.parametrize(
    ("model", "shape", "last", "named"),
    [
        ("llama", (2, 0, 5, 8), (), {}),
        ("llama", (2, 0, 5, 8), (), {"unsqueeze_dim": -3}),
        ("llama", (2, 5, 0, 8), (2,), {}),
        ("llama", (2, 5, 0, 8), (), {"unsqueeze_dim": -2}),
        ("llama", (5, 0, 8), (), {"unsqueeze_dim": 1}),
        ("exaone4_5", (5, 0, 8), (), {}),
    ],
)
def test_q_and_k_of_different_heads_are_rotated_by_ours(
    model: str, shape: tuple[int, ...], last: Any, named: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped keys have fewer heads than q, before or behind the tokens (EXAONE's vision tower), but as many tokens."""
    called: list[str] = []
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    theirs = getattr(module, "apply_rotary_pos_emb" if model == "llama" else "apply_rotary_pos_emb_vision")

    def apply(*args: Any, **options: Any) -> Any:
        called.append(model)
        return theirs(*args, **options)

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return apply_rotary_tried(q, k, cos, sin, *last, **named)

    monkeypatch.setitem(globals(), "apply_rotary_tried", apply)
    attention = Attention()
    q, k = (torch.randn([n or heads for n in shape]) for heads in (4, 2))
    angles = torch.randn(*(n for n in shape[:-1] if n), 4)
    tables = torch.cat((angles, angles), -1)
    arguments = q, k, tables.cos(), tables.sin()
    own = attention(*arguments)
    with patch(attention):
        called.clear()
        torch.testing.assert_close(attention(*arguments), own)
        assert not called


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


class Clamps(nn.Module):
    """Bounded beyond all pre-activations but those of outliers."""

    def forward(self, x: Tensor) -> Any:
        gate, up = self.gate_proj(x).clamp(max=100), self.up_proj(x).clamp(-100, 100)
        return self.down_proj(nn.functional.silu(gate) * up)


def test_whatever_an_mlp_raises_or_returns_it_is_left() -> None:
    for module in (Asserts(), Returns(), Clamps()):
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
