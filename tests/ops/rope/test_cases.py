"""The case registry: contents of the presets, definition of their counts, and reproducible inputs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from fusewise.ops.rope import cases as registry
from fusewise.ops.rope import tables
from fusewise.ops.rope.cases import PRESETS, RopeCase, case, cases

EVERY = [found for preset in PRESETS.values() for found in preset]
MODELS = ["llama-3-8b", "gemma-7b", "gemma-2-9b", "qwen2.5-7b", "mistral-7b", "phi-2", "gpt-neox-20b", "glm-4-9b", "deepseek-v3"]  # fmt: skip
SMALL = RopeCase(
    name="small", batch=2, seqlen=3, heads=4, kv_heads=2, head_dim=8, rotary_dim=4, positions="ids", table_rows=16,
    dtypes=("bf16",),
)  # fmt: skip


def test_a_name_means_one_case() -> None:
    by_name = {}
    for found in EVERY:
        assert by_name.setdefault(found.name, found) == found
        assert case(found.name) == found
        assert hash(found) == hash(by_name[found.name])


def test_presets_hold_the_rows_of_their_tables() -> None:
    cube = cases("rope-cube")
    assert [found.q_shape for found in cube] == [(n, n, n, n) for n in range(4, 65, 2)]
    seqlen = cases("rope-seqlen")
    assert [found.q_shape for found in seqlen] == [(32, n, 8, 256) for n in range(32, 2049, 32)]
    for found in cube + seqlen:
        assert found.dtypes == ("fp32",) and found.passes == ("fwd", "bwd") and found.k_shape is None
    names = [f"{m}-{s}" for m in MODELS for s in ("train", "prefill-8k", "decode-b1", "decode-b64", "decode-b256")]
    assert [found.name for found in cases("rope-models")] == names


def test_models_have_their_published_heads_widths_and_pairings() -> None:
    found = {m: case(f"{m}-train") for m in MODELS}
    heads = {m: (c.heads, c.kv_heads, c.head_dim, c.rotated, c.pairing) for m, c in found.items()}
    assert heads == {
        "llama-3-8b": (32, 8, 128, 128, "half"),
        "gemma-7b": (16, 16, 256, 256, "half"),
        "gemma-2-9b": (16, 8, 256, 256, "half"),
        "qwen2.5-7b": (28, 4, 128, 128, "half"),
        "mistral-7b": (32, 8, 128, 128, "half"),
        "phi-2": (32, 32, 80, 32, "half"),
        "gpt-neox-20b": (64, 64, 96, 24, "half"),
        "glm-4-9b": (32, 2, 128, 64, "interleaved"),
        "deepseek-v3": (128, 1, 192, 64, "interleaved_to_half"),
    }
    mla = found["deepseek-v3"]
    assert mla.q_shape == (2, 4096, 128, 192) and mla.k_shape == (2, 4096, 1, 64) and mla.rotary_start == -64
    assert tables.from_config(mla.rope_parameters, 64)[1] == 1.0


def test_partial_factors_of_the_configurations_give_the_rotary_width() -> None:
    for name in ("phi-2", "gpt-neox-20b", "glm-4-9b"):
        found = case(f"{name}-train")
        whole, _ = tables.from_config(found.rope_parameters, found.head_dim)
        assert torch.equal(whole, found.frequencies()[0]) and len(whole) == found.rotated // 2


def test_bytes_and_flops_of_a_case_counted_by_hand() -> None:
    # 2 * 3 tokens of (4 + 2) heads of 8 features: 288 elements; 2 pairs rotate in each of 36 heads
    assert SMALL.elements == 288
    ids = 6 * 8
    table = 6 * 2 * 2 * 4  # six rows in use, two cosines and two sines of four bytes
    assert SMALL.bytes_min("fwd", "bf16") == SMALL.bytes_min("bwd", "bf16") == 288 * 2 * 2 + table + ids
    assert SMALL.bytes_min("fwd+bwd", "fp32") == 2 * (288 * 4 * 2 + table + ids)
    assert SMALL.flops_min("fwd") == 36 * 2 * 6 and SMALL.flops_min("fwd+bwd") == 2 * SMALL.flops_min("fwd")
    assert SMALL.output_bytes("fp16") == 288 * 2


def test_serving_preset_has_decode_and_chunks_of_every_model() -> None:
    found = cases("rope-serving")
    mine = [c for c in found if c.name.startswith("llama-3-8b")]
    assert [c.batch for c in mine if c.regime == "decode"] == [1, 8, 64, 256, 1024]
    assert [c.seqlen for c in mine if c.regime == "prefill"] == [128, 256, 512, 1024, 2048, 4096, 8192]
    assert all(c.serving and c.passes == ("fwd",) and c.layout == "thd" for c in found)
    assert {c.name.split("-serve-")[0] for c in found} == set(MODELS)
    assert set(cases("rope-serving-quick")) <= set(found)


def test_serving_inputs_are_tokens_with_one_cache_and_a_position_each() -> None:
    decode, chunk = case("glm-4-9b-serve-decode-b8"), case("glm-4-9b-serve-prefill-128")
    for found, tokens in ((decode, 8), (chunk, 128)):
        inputs = found.make_inputs("cpu", "bf16")
        assert inputs.q.shape == (tokens, 32, 128) and inputs.k is not None and inputs.k.shape == (tokens, 2, 128)
        assert inputs.positions is not None and inputs.positions.dtype == torch.int64
        assert inputs.positions.shape == (tokens,) and inputs.cache is inputs.kwargs["cos_sin"]
        assert inputs.cache is not None and torch.equal(inputs.cache, torch.cat((inputs.cos, inputs.sin), dim=-1))
        assert inputs.cache.shape == (8192, 64) and "cos" not in inputs.kwargs and "offset" not in inputs.kwargs
    assert torch.equal(chunk.make_inputs("cpu", "bf16").kwargs["positions"], torch.arange(128))
    # in place only rotated features move: 8 tokens of 34 heads, 64 of 128 features, twice 2 bytes; 8 rows; 8 ids
    assert decode.bytes_min("fwd", "bf16") == 8 * 34 * 64 * 2 * 2 + 8 * 64 * 4 + 8 * 8
    assert decode.output_bytes("bf16") == 0


def test_quick_preset_covers_what_a_first_look_needs() -> None:
    quick = cases("rope-quick")
    moved = {(found, dtype): found.bytes_min("fwd", dtype) for found in quick for dtype in found.dtypes}
    assert all(2**20 <= count <= 100 * 2**20 for count in moved.values())
    assert any(count >= 64 * 2**20 for count in moved.values())
    assert {dtype for found in quick for dtype in found.dtypes} >= {"fp32", "bf16"}
    assert {found.pairing for found in quick} >= {"half", "interleaved"}
    assert any(found.rotated < found.head_dim for found in quick)
    assert any(found.regime == "decode" for found in quick)


def test_width_preset_moves_enough_to_judge_bandwidth() -> None:
    for found in cases("rope-widths"):
        assert all(found.bytes_min("fwd", dtype) >= 256 * 2**20 for dtype in found.dtypes), found.name


@pytest.mark.parametrize("name", ["cube-4", "glm-4-9b-step-512", "deepseek-v3-decode-b64", "phi-2-decode-b256"])
def test_inputs_have_the_shapes_and_positions_of_the_case(name: str) -> None:
    found = case(name)
    inputs = found.make_inputs("cpu", "bf16", seed=3)
    assert inputs.q.shape == inputs.dq.shape == found.q_shape and inputs.q.dtype == inputs.dq.dtype == torch.bfloat16
    assert (inputs.k is None) == (found.k_shape is None) and len(inputs.operands) == len(inputs.gradients)
    assert inputs.cos.shape == inputs.sin.shape == (found.rows, found.rotated // 2)
    for operand, gradient in zip(inputs.operands, inputs.gradients, strict=True):
        assert operand.shape == gradient.shape and not torch.equal(operand, gradient)
    if found.positions == "ids":
        assert inputs.positions is not None and inputs.positions is inputs.kwargs["positions"]
        assert inputs.positions.shape == (found.batch, found.seqlen)
        assert inputs.positions.unique().numel() == inputs.positions.numel()
        assert inputs.positions.min() >= 0 and inputs.positions.max() < found.rows


def test_inputs_depend_on_the_seed_and_the_case_and_nothing_else() -> None:
    inputs = SMALL.make_inputs("cpu", "fp32", seed=1)
    torch.manual_seed(12345)
    again = SMALL.make_inputs("cpu", "fp32", seed=1)
    other = SMALL.make_inputs("cpu", "fp32", seed=2)
    assert torch.equal(inputs.q, again.q) and torch.equal(inputs.gradients[1], again.gradients[1])
    assert inputs.positions is not None and again.positions is not None
    assert torch.equal(inputs.positions, again.positions)
    twin = dataclasses.replace(SMALL, name="twin").make_inputs("cpu", "fp32", seed=1)
    assert not torch.equal(inputs.q, other.q) and not torch.equal(inputs.q, twin.q)


def test_inputs_are_the_same_in_another_process() -> None:
    script = (
        "from fusewise.ops.rope.cases import case; i = case('cube-4').make_inputs('cpu', 'fp32', 7); "
        "print(i.q.sum().item().hex(), i.dq.sum().item().hex())"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    inputs = case("cube-4").make_inputs("cpu", "fp32", 7)
    assert run.stdout.split() == [inputs.q.sum().item().hex(), inputs.dq.sum().item().hex()]


@pytest.mark.parametrize(
    "name",
    ["cube-6", "glm-4-9b-decode-b64", "deepseek-v3-decode-b1", "phi-2-decode-b1", "deepseek-v3-serve-decode-b8"],
)
def test_the_op_accepts_the_inputs_and_rotates_what_the_case_says(name: str) -> None:
    rope = pytest.importorskip("fusewise").rope
    found = case(name)
    inputs = found.make_inputs("cpu", "fp32")
    result = rope(*inputs.operands, **inputs.kwargs, impl="reference")
    for x, y in zip(inputs.operands, result if inputs.k is not None else (result,), strict=True):
        start = found.rotary_start % x.shape[-1]
        rotated = slice(start, start + found.rotated)
        if x.shape[-1] == found.rotated:
            rotated = slice(None)
        # rotation preserves the norm of the rotated part (scaling 1 in these cases) and the other features
        torch.testing.assert_close(y[..., rotated].norm(dim=-1), x[..., rotated].norm(dim=-1))
        kept = torch.ones(x.shape[-1], dtype=torch.bool)
        kept[rotated] = False
        assert torch.equal(y[..., kept], x[..., kept])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^rope_cases: preset must be one of rope-cube, .*, got 'rope'; "):
        cases("rope")
    with pytest.raises(ValueError, match=r"^rope_cases: name must be that of a case in a preset, got 'cube-5'; "):
        case("cube-5")
    with pytest.raises(ValueError, match=r"^rope_cases: pass must be one of fwd, bwd, fwd\+bwd, got 'both'; "):
        SMALL.bytes_min("both", "fp32")  # type: ignore[arg-type]


def test_a_returned_list_is_the_callers_own() -> None:
    cases("rope-cube").clear()
    assert len(registry.PRESETS["rope-cube"]) == 31
