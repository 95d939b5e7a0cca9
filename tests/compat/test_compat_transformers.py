"""fusewise.compat.transformers against its documented semantics and the installed transformers, and the functions that Liger
has of the same models."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from compat_inputs import HK, HQ, B, D, T, once, pair, repeated, table, twice
from compat_statement import DEVICE, assert_gradient, assert_rotated, launches, randn, rotate
from torch import Tensor

from fusewise.compat import liger
from fusewise.compat import transformers as compat

# function: form of its tables, arguments of the reference
PAIRS = {
    "apply_rotary_pos_emb": (twice, {}),
    "apply_rotary_pos_emb_interleaved": (repeated, {"interleaved": True}),
    "apply_rotary_pos_emb_glm": (twice, {"interleaved": True}),
    "apply_rotary_pos_emb_interleave": (twice, {"interleaved": True, "to_half": True}),
    "apply_rotary_pos_emb_gpt_oss": (once, {}),
    "apply_rotary_pos_emb_openai_privacy_filter": (once, {"interleaved": True}),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("dtype", "batch"), [(torch.float32, 1), (torch.bfloat16, B)])
@pytest.mark.parametrize("width", [D, 8])
def test_pairs(name: str, layout: str, dtype: torch.dtype, batch: int, width: int) -> None:
    if name.endswith("interleave"):
        width = D  # rotates whole heads only
    form, kinds = PAIRS[name]
    function: Any = getattr(compat, name)
    q, k = pair(layout, dtype)
    q.requires_grad_()
    cos, sin = table(width, batch, dtype)
    dim = 1 if layout == "bhsd" else 2

    def statement(x: Tensor) -> Tensor:
        return rotate(x, cos.unsqueeze(dim), sin.unsqueeze(dim), **kinds)

    q_out, k_out = function(q, k, *form(cos, sin), unsqueeze_dim=dim)
    assert_rotated(q_out, statement(q))
    assert_rotated(k_out, statement(k))
    assert q_out.dtype == dtype
    assert_gradient(q_out, q, statement)
    fifth = function(q, k, *form(cos, sin), dim)  # unsqueeze_dim as the fifth argument, transformers 5
    older = function(q, k, *form(cos, sin), torch.arange(T), dim)  # position_ids as the fifth, transformers 4
    assert torch.equal(fifth[0], q_out)
    assert torch.equal(older[1], k_out)
    alone, nothing = function(q, None, *form(cos, sin), unsqueeze_dim=dim)
    assert torch.equal(alone, q_out)
    assert nothing is None


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("rows", [HQ, 40])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_position_ids_are_rows_of_two_dimensional_tables(name: str, rows: int, layout: str) -> None:
    """As before transformers 4.38, also if the number of rows equals the number of heads."""
    form, kinds = PAIRS[name]
    q, k = pair(layout)
    angles = torch.rand(rows, D // 2, device=DEVICE) * 6.3
    dim = 1 if layout == "bhsd" else 2
    for shape in ((B, T), (1, T)):
        position_ids = torch.randint(rows, shape, device=DEVICE)
        cos, sin = angles.cos()[position_ids].unsqueeze(dim), angles.sin()[position_ids].unsqueeze(dim)
        found = getattr(compat, name)(q, k, *form(angles.cos(), angles.sin()), position_ids, dim)
        for y, x in zip(found, (q, k), strict=True):
            assert_rotated(y, rotate(x, cos, sin, **kinds))
    with pytest.raises(ValueError, match=r"rope: positions must have shape .*, got \(3, 5\); "):
        getattr(compat, name)(q, k, *form(angles.cos(), angles.sin()), torch.zeros(3, T, dtype=torch.int64), dim)


def test_single_tensors() -> None:
    q, _ = pair()
    cos, sin = table(8)
    at = cos[:, None], sin[:, None]
    assert_rotated(compat.apply_rotary_pos_emb_single(q, *twice(cos, sin)), rotate(q, *at))
    c, s = twice(cos, sin)
    assert_rotated(compat.apply_rotary_pos_emb_qwen4_exp(q, cos=c, sin=s), rotate(q, *at))
    for y, x in zip(compat.apply_rotary_pos_emb_qwen4_exp(q, 2 * q, c, s, 1), (q, 2 * q), strict=True):
        assert_rotated(y, rotate(x, *at))
    trailing = rotate(q, *at, start=D - 8, interleaved=True)
    assert_rotated(compat.apply_rotary_pos_emb_deepseek_v4(q, cos, sin), trailing)
    x = q.transpose(1, 2)
    assert_rotated(
        compat.apply_rotary_pos_emb_gptj(x[..., :8], sin, cos),
        rotate(x[..., :8], cos[:, :, None], sin[:, :, None], interleaved=True),
    )
    nanochat, _ = compat.apply_rotary_pos_emb_nanochat(q, None, *twice(cos, sin))
    assert_rotated(nanochat, rotate(q, cos[:, None], -sin[:, None]))


@pytest.mark.parametrize("function", [compat.apply_rotary_pos_emb_vision, liger.liger_rotary_pos_emb_vision])
@pytest.mark.parametrize("width", [D, D // 2])
def test_vision(function: Any, width: int) -> None:
    cos, sin = table(width, 1)
    q, k = randn(T, HQ, D, dtype=torch.bfloat16), randn(T, HK, D, dtype=torch.bfloat16)
    for y, x in zip(function(q, k, *twice(cos[0], sin[0])), (q, k), strict=True):
        assert_rotated(y, rotate(x, cos[0][:, None], sin[0][:, None]))


def test_vision_with_a_batch_and_the_half_form_without() -> None:
    cos, sin = table(D)
    q, k = pair("bshd")
    y, _ = compat.apply_rotary_pos_emb_vision(q, k, *twice(cos, sin))
    assert_rotated(y, rotate(q, cos[:, :, None], sin[:, :, None]))
    y, _ = compat.apply_rotary_pos_emb(q[0], k[0], *twice(cos[0], sin[0]))
    assert_rotated(y, rotate(q[0], cos[0][:, None], sin[0][:, None]))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("source", ["transformers", "liger"])
def test_multimodal(layout: str, source: str) -> None:
    sections = [3, 1, 4]
    angles = torch.rand(3, B, T, D // 2, device=DEVICE) * 6.3
    axis = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2], device=DEVICE)
    mine = angles.gather(0, axis.expand(1, B, T, -1))[0]
    dim = 1 if layout == "bhsd" else 2
    q, k = pair(layout)
    q.requires_grad_()

    def statement(x: Tensor) -> Tensor:
        return rotate(x, mine.cos().unsqueeze(dim), mine.sin().unsqueeze(dim))

    tables = twice(angles.cos(), angles.sin())
    if source == "liger":
        if layout == "bshd":
            pytest.skip("Liger takes (B, H, T, D) alone")
        q_out, k_out = liger.liger_multimodal_rotary_pos_emb(q, k, *tables, sections)
        assert torch.equal(liger.LigerQwen2VLMRopeFunction.apply(q, k, *tables, sections)[0], q_out)
    else:
        q_out, k_out = compat.apply_multimodal_rotary_pos_emb(q, k, *tables, sections, dim)
    assert_rotated(q_out, statement(q))
    assert_rotated(k_out, statement(k))
    assert_gradient(q_out, q, statement)


@pytest.mark.parametrize(
    ("function", "dim"),
    [
        (compat.apply_rotary_emb_llama4, 2),
        (compat.apply_rotary_emb_deepseek_v2, 1),
        (liger.liger_llama4_text_rotary_pos_emb, 2),
        (liger.LigerLlama4RopeFunction.apply, 2),
    ],
)
def test_complex_tables(function: Any, dim: int) -> None:
    q, k = pair("bshd" if dim == 2 else "bhsd")
    cos, sin = table(D)
    freqs = torch.complex(cos, sin)
    for given, sign in ((freqs, 1), (freqs.conj(), -1)):  # conj() is lazy: memory holds the unconjugated imaginary part
        for y, x in zip(function(q, k, given), (q, k), strict=True):
            assert_rotated(y, rotate(x, cos.unsqueeze(dim), sign * sin.unsqueeze(dim), interleaved=True))


@pytest.mark.parametrize("function", [compat.vision_apply_rotary_emb, liger.liger_llama4_vision_rotary_pos_emb])
@pytest.mark.parametrize("shape", [(), (1,), (0, 2)])
def test_complex_tables_for_images(function: Any, shape: tuple[int, ...]) -> None:
    """(T, P), (T, 1, P) as in transformers, and (1, T, 1, P)."""
    q, k = pair("bshd")
    cos, sin = (x[0] for x in table(D))
    freqs = torch.complex(cos, sin)
    for dim in shape:
        freqs = freqs.unsqueeze(dim)
    for y, x in zip(function(q, k, freqs), (q, k), strict=True):
        assert_rotated(y, rotate(x, cos[:, None], sin[:, None], interleaved=True))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_of_a_head(layout: str, batch: int, parts: int) -> None:
    q, _ = pair(layout)
    q.requires_grad_()
    tables = [table(D // parts, batch) for _ in range(parts)]
    cos, sin = (torch.cat(twice(*each), -1) for each in zip(*tables, strict=True))
    dim, position_ids = 1 if layout == "bhsd" else 2, torch.zeros(B, T, parts)

    def statement(x: Tensor) -> Tensor:
        each = zip(x.chunk(parts, -1), tables, strict=True)
        return torch.cat([rotate(part, c.unsqueeze(dim), s.unsqueeze(dim)) for part, (c, s) in each], -1)

    y = compat.apply_multidimensional_rope(q, cos, sin, position_ids, dim)
    assert_rotated(y, statement(q))
    assert y.shape == q.shape and y.dtype == q.dtype
    assert_gradient(y, q, statement)


def test_parts_of_heads_without_elements() -> None:
    for batch, tokens, heads in ((0, T, HQ), (B, 0, HQ), (B, T, 0)):
        q, both, position_ids = randn(batch, tokens, heads, D), randn(batch, tokens, D), randn(batch, tokens, 2)
        assert compat.apply_multidimensional_rope(q, both, both, position_ids).shape == q.shape


@pytest.mark.parametrize("first", [0, 2, T])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_tokens_do_not_rotate(first: int, dtype: torch.dtype) -> None:
    q, k = pair(dtype=dtype)
    q.requires_grad_()
    cos, sin = (x[0, first:] for x in table(D))

    def statement(x: Tensor) -> Tensor:
        return torch.cat((x[:, :, :first].double(), rotate(x[:, :, first:], cos, sin)), 2)

    q_out, k_out = compat.apply_rotary_pos_emb_dinov3(q, k, *twice(cos, sin))
    assert_rotated(q_out, statement(q))
    assert_rotated(k_out, statement(k))
    assert torch.equal(q_out[:, :, :first], q[:, :, :first])
    assert_gradient(q_out, q, statement)


def test_tables_that_were_not_made_together() -> None:
    """cos and sin may differ in strides."""
    q, k = pair("bhsd")
    x, both = q.transpose(1, 2), [torch.cat((t, t), -1) for t in table(D)]
    three, one = [t.expand(3, B, T, D).contiguous() for t in both], [t[0] for t in both]
    calls: list[tuple[Any, list[Tensor]]] = [
        (lambda *t: compat.apply_rotary_pos_emb(q, k, *t)[0], both),
        (lambda *t: compat.apply_multimodal_rotary_pos_emb(q, k, *t, [2, 2, 4])[0], three),
        (lambda *t: compat.apply_multidimensional_rope(x, *t, x[..., :2]), both),
        (lambda *t: liger.liger_rotary_pos_emb(q, k, *t)[0], both),
        (lambda *t: liger.liger_multimodal_rotary_pos_emb(q, k, *t, [2, 2, 4])[0], three),
        (lambda *t: liger.liger_rotary_pos_emb_vision(x[0], x[0], *t)[0], one),
    ]
    for call, (cos, sin) in calls:
        cos_T, sin_T = (t.mT.contiguous().mT for t in (cos, sin))
        assert torch.equal(call(cos, sin_T), call(cos, sin))
        assert torch.equal(call(cos_T, sin), call(cos, sin))


def test_one_launch_and_nothing_else() -> None:
    q, k = pair()
    cos, sin = table(D)
    both, freqs = twice(cos, sin), torch.complex(cos, sin)
    for name, (form, _) in PAIRS.items():
        assert launches(getattr(compat, name), q, k, *form(cos, sin)) == {"fusewise::rope_qk": 1}
    assert launches(compat.apply_rotary_pos_emb_single, q, *both) == {"fusewise::rope": 1}
    assert launches(compat.apply_rotary_pos_emb_deepseek_v4, q, cos[..., :4], sin[..., :4]) == {"fusewise::rope": 1}
    patches = launches(compat.apply_rotary_pos_emb_dinov3, q, k, *(x[0, 2:] for x in both))
    assert patches["fusewise::rope_qk"] == 1
    assert patches.keys() <= {"fusewise::rope_qk", "aten::constant_pad_nd", "aten::fill_", "aten::copy_"}
    x, position_ids = q.transpose(1, 2), torch.zeros(B, T, 2)
    assert launches(compat.apply_multidimensional_rope, x, *both, position_ids) == {"fusewise::rope": 1}
    assert launches(liger.liger_rotary_pos_emb, q, k, *both) == {"fusewise::rope_qk": 1}
    complex_parts = launches(compat.apply_rotary_emb_deepseek_v2, q, k, freqs)
    assert {name for name in complex_parts if name not in ("aten::real", "aten::imag")} == {"fusewise::rope_qk"}
    three = [t.expand(3, B, T, D).contiguous() for t in both]
    multimodal = launches(compat.apply_multimodal_rotary_pos_emb, q, k, *three, [2, 2, 4])
    assert multimodal == {"fusewise::rope_qk": 1, "aten::arange": 1}


# Dynamo instantiates every autograd.Function it traces
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_compiles_to_one_graph(grad: bool) -> None:
    torch._dynamo.reset()

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        results = [getattr(compat, name)(q, k, *form(cos, sin)) for name, (form, _) in PAIRS.items()]
        results.append(liger.liger_rotary_pos_emb(q, k, *twice(cos, sin)))
        three = [t.expand(3, B, T, D).contiguous() for t in twice(cos, sin)]
        results.append(compat.apply_multimodal_rotary_pos_emb(q, k, *three, [2, 2, 4]))
        results.append(compat.apply_rotary_emb_deepseek_v2(q, k, torch.complex(cos, sin)))
        results.append(compat.apply_rotary_pos_emb_dinov3(q, k, *(x[0, 2:] for x in twice(cos, sin))))
        results.append((compat.apply_multidimensional_rope(q, *twice(cos, sin), three[0][..., :2], 1),))
        return tuple(y for both in results for y in both)

    q, k = (x.requires_grad_(grad) for x in pair())
    inputs = q, k, *table(D)
    eager, compiled = function(*inputs), torch.compile(function, backend="aot_eager", fullgraph=True)(*inputs)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b)
    if grad:
        g = [torch.randn_like(y) for y in eager]
        for a, b in zip(torch.autograd.grad(compiled, (q, k), g), torch.autograd.grad(eager, (q, k), g), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda q, k, c, s: compat.apply_rotary_pos_emb(q, k, c, s, unsqueeze_dim=3),
            ValueError,
            "unsqueeze_dim must be 1",
        ),
        (lambda q, k, c, s: compat.apply_rotary_pos_emb(q[0], k[0], c, s), ValueError, "unsqueeze_dim must be 1"),
        (
            lambda q, k, c, s: compat.apply_rotary_pos_emb(q, k, c, s, unsqueeze_dim=2),
            ValueError,
            "cos must have a row for",
        ),
        (
            lambda q, k, c, s: compat.apply_rotary_pos_emb(q, k, c[:, :1], s[:, :1]),
            ValueError,
            "cos must have a row for each",
        ),
        (lambda q, k, c, s: compat.apply_rotary_pos_emb(q, k, c, s[:1]), ValueError, "sin must have the shape of cos"),
        (lambda q, k, c, s: compat.apply_rotary_pos_emb(q, k.half(), c, s), TypeError, "k must have the dtype of q"),
        (
            lambda q, k, c, s: compat.apply_rotary_pos_emb_dinov3(q[:, :, :2], k[:, :, :2], c[0], s[0]),
            ValueError,
            "cos must have at most a row for each of the 2 tokens",
        ),
        (
            lambda q, k, c, s: compat.apply_multidimensional_rope(q, c, s, torch.zeros(B, T, 3), 1),
            ValueError,
            "position_ids must have a number of axes that divides D / 2 = 8",
        ),
        (
            lambda q, k, c, s: compat.apply_multidimensional_rope(q, c, s, torch.zeros(B, T, 2)),
            ValueError,
            "cos must have shape (1 | B, T, D)",
        ),
        (
            lambda q, k, c, s: compat.apply_multimodal_rotary_pos_emb(q, k, c, s, [8]),
            ValueError,
            "cos must have shape (3, B, T",
        ),
        (
            lambda q, k, c, s: liger.liger_rotary_pos_emb(q, k, c[:, :1], s[:, :1]),
            ValueError,
            "the table must have a row",
        ),
        (
            lambda q, k, c, s: liger.liger_llama4_text_rotary_pos_emb(q, k, c),
            TypeError,
            "freqs_cis must be complex, cos θ + i sin θ, got float32",
        ),
        (
            lambda q, k, c, s: liger.liger_rotary_pos_emb(q, k, c, s, rotary_dim=7),
            ValueError,
            "rotary_dim must be even",
        ),
    ],
)
def test_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=r", got .*; ") as raised:
        call(*pair(), *twice(*table(D)))
    assert message in str(raised.value)


# Models with the function that replaces theirs, the form of their tables, and their widths.
MODELS = [
    *[("apply_rotary_pos_emb", model, twice, D) for model in ("llama", "qwen3", "mistral", "gemma", "gemma2", "phi")],
    *[("apply_rotary_pos_emb", model, twice, D) for model in ("olmo2", "modernbert", "esm", "starcoder2")],
    *[("apply_rotary_pos_emb", model, twice, 8) for model in ("gpt_neox", "phi3", "glm4_moe", "nemotron")],
    ("apply_rotary_pos_emb_single", "gemma3n", twice, D),
    ("apply_rotary_pos_emb_qwen4_exp", "qwen4_exp", twice, 8),
    *[("apply_rotary_pos_emb_interleaved", model, repeated, D) for model in ("cohere", "cohere2", "blt")],
    *[("apply_rotary_pos_emb_glm", model, twice, 8) for model in ("glm", "glm4", "moonshine")],
    *[("apply_rotary_pos_emb_glm", model, twice, D) for model in ("helium", "ernie4_5")],
    *[("apply_rotary_pos_emb_interleave", model, twice, D) for model in ("deepseek_v3", "longcat_flash")],
    ("apply_rotary_pos_emb_gpt_oss", "gpt_oss", once, D),
    ("apply_rotary_pos_emb_openai_privacy_filter", "openai_privacy_filter", once, D),
    ("apply_rotary_pos_emb_gptj", "gptj", once, D),
    ("apply_rotary_pos_emb_nanochat", "nanochat", twice, D),
    ("apply_rotary_pos_emb_vision", "qwen2_vl", twice, D),
    ("apply_rotary_emb_llama4", "llama4", once, D),
    ("apply_rotary_emb_deepseek_v2", "deepseek_v2", once, D),
    ("apply_rotary_pos_emb_deepseek_v4", "deepseek_v4", once, 8),
]


@pytest.mark.parametrize(("ours", "model", "form", "width"), MODELS, ids=[m[1] for m in MODELS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_what_the_model_of_transformers_computes(ours: str, model: str, form: Any, width: int, dtype: Any) -> None:
    pytest.importorskip("transformers")
    try:
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    except ModuleNotFoundError:
        pytest.skip(f"the installed transformers has no {model}")
    name = next(n for n in (ours, "apply_rotary_pos_emb", "apply_rotary_emb") if hasattr(module, n))
    # On the CPU in float32, rounded once, the original is accurate to the last bits.
    q, k = (x.cpu() for x in pair("bshd" if ours.endswith(("llama4", "gptj", "vision")) else "bhsd", dtype))
    tables = form(*(t.cpu() for t in table(width)))
    if ours.endswith("vision"):
        q, k, tables = q[0], k[0], tuple(t[0] for t in tables)
    if ours.startswith("apply_rotary_emb"):
        tables = (torch.complex(*tables),)
    xs = (q,) if ours.endswith(("single", "gptj", "deepseek_v4")) else (q, k)
    expected = getattr(module, name)(*(x.float() for x in xs), *tables)
    actual = getattr(compat, ours)(*xs, *tables)
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (actual, expected)), strict=True):
        assert_rotated(a, b.double())


@pytest.mark.parametrize("model", ["dinov3_vit", "sapiens2"])
def test_is_what_models_with_first_tokens_compute(model: str) -> None:
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    q, k = (x.cpu() for x in pair())
    tables = tuple(x.cpu()[0, 2:] for x in twice(*table(D)))
    expected = module.apply_rotary_pos_emb(q, k, *tables)
    for a, b in zip(compat.apply_rotary_pos_emb_dinov3(q, k, *tables), expected, strict=True):
        assert_rotated(a, b.double())


@pytest.mark.parametrize(
    ("model", "name", "dim"),
    [
        ("sam3", "apply_rotary_pos_emb_2d", 1),
        ("edgetam_video", "apply_rotary_pos_emb_2d_self_attn", 1),
        ("inkling2", "apply_rotary_pos_emb_vision", -2),
    ],
)
def test_the_interleaved_form_under_other_names(model: str, name: str, dim: int) -> None:
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    q, k = (x.cpu() for x in pair("bhsd" if dim == 1 else "bshd"))
    tables = repeated(*(x.cpu() for x in table(D, 1)))
    if dim == -2:
        q, k, tables = q[0], k[0], tuple(x[0] for x in tables)
    expected = getattr(module, name)(q, k, *tables)
    for a, b in zip(compat.apply_rotary_pos_emb_interleaved(q, k, *tables, unsqueeze_dim=dim), expected, strict=True):
        assert_rotated(a, b.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_what_gemma4_computes(dtype: torch.dtype) -> None:
    module = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    q, _ = (x.cpu() for x in pair("bshd", dtype))
    cos, sin = (torch.cat(both, -1) for both in zip(*(twice(*table(D // 2)) for _ in range(2)), strict=True))
    arguments = cos.cpu(), sin.cpu(), torch.zeros(B, T, 2)
    expected = module.apply_multidimensional_rope(q.float(), *arguments)
    assert_rotated(compat.apply_multidimensional_rope(q, *arguments), expected.double())


@pytest.mark.parametrize("function", [compat.vision_apply_rotary_emb, liger.liger_llama4_vision_rotary_pos_emb])
def test_llama4_frequencies_that_a_cast_made_real(function: Any) -> None:
    """After a cast of the model to bfloat16 only cos θ is left; both elements of a pair are multiplied by it."""
    freqs = torch.polar(torch.ones(10, 1, 8), torch.rand(10, 1, 8)).to(DEVICE).real.bfloat16()
    q = torch.randn(2, 10, 4, 16, device=DEVICE).bfloat16()
    want = (q.float().view(2, 10, 4, 8, 2) * freqs.float()[None, ..., None]).view_as(q).bfloat16()
    for y in function(q, q, freqs):
        assert torch.equal(y, want)
