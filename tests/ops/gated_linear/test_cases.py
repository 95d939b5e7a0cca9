"""The case registry: contents of the presets, definition of their counts, and reproducible inputs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from fusewise.ops.gated_linear import gated_linear
from fusewise.ops.gated_linear.cases import PRESETS, GatedCase, case, cases

EVERY = [found for preset in PRESETS.values() for found in preset]
SMALL = GatedCase(name="small", rows=6, features=4, hidden=5, bias=True, dtypes=("bf16",))


def test_a_name_means_one_case() -> None:
    by_name: dict[str, GatedCase] = {}
    for found in EVERY:
        assert by_name.setdefault(found.name, found) == found and case(found.name) == found


def test_the_memory_preset_is_the_grid_of_its_table() -> None:
    grid = [(found.rows, found.features) for found in cases("geglu-memory")]
    assert grid == [(n * 1024, d * 1024) for d in (1, 2, 4, 8) for n in (1, 2, 4, 8, 16, 32, 64)]
    for found in cases("geglu-memory"):
        assert found.hidden == 4 * found.features and found.bias and found.passes == ("fwd", "fwd+bwd")
        assert found.saved_ratio == pytest.approx(found.rows / (2 * (found.features + 1)))


def test_models_have_their_published_widths_and_gates() -> None:
    found = {name: case(f"{name}-train") for name in ("gemma-2b", "gemma-7b", "gemma-2-9b", "llama-3-8b", "llama-3-70b", "mistral-7b", "phi-3-mini", "sdxl-640", "sdxl-1280", "flux2-klein-4b")}  # fmt: skip
    assert {name: (c.features, c.hidden, c.activation, c.bias, c.gate_first) for name, c in found.items()} == {
        "gemma-2b": (2048, 16384, "gelu_tanh", False, True),
        "gemma-7b": (3072, 24576, "gelu_tanh", False, True),
        "gemma-2-9b": (3584, 14336, "gelu_tanh", False, True),
        "llama-3-8b": (4096, 14336, "silu", False, True),
        "llama-3-70b": (8192, 28672, "silu", False, True),
        "mistral-7b": (4096, 14336, "silu", False, True),
        "phi-3-mini": (3072, 8192, "silu", False, True),
        "sdxl-640": (640, 2560, "gelu", True, False),
        "sdxl-1280": (1280, 5120, "gelu", True, False),
        "flux2-klein-4b": (3072, 9216, "silu", False, True),
    }
    assert [case(f"llama-3-8b-decode-b{rows}").rows for rows in (1, 16, 64, 128)] == [1, 16, 64, 128]
    assert not any(c.name.startswith("sdxl") and c.regime == "decode" for c in EVERY)


def test_bytes_and_flops_of_a_case_counted_by_hand() -> None:
    x, weight, y = 6 * 4, 10 * 4 + 10, 6 * 5
    assert SMALL.weight_elements == weight
    assert SMALL.bytes_min("fwd", "bf16") == 2 * (x + weight + y)
    assert SMALL.bytes_min("bwd", "fp32") == 4 * (2 * (x + weight) + y)
    assert SMALL.bytes_min("fwd+bwd", "fp32") == SMALL.bytes_min("fwd", "fp32") + SMALL.bytes_min("bwd", "fp32")
    assert SMALL.flops_min("fwd") == 2 * 6 * 10 * 4 and SMALL.flops_min("fwd+bwd") == 3 * SMALL.flops_min("fwd")
    assert SMALL.output_bytes("fp16") == 2 * y and SMALL.gradient_bytes("fp16") == 2 * (x + weight)


def test_predictions_for_each_form_in_units_of_one_output() -> None:
    """At (16384, 4096) an output is 512 MiB; measured: 2048, 1536, 512 MiB forward, 3072 and 2560 MiB with backward."""
    found, mib = case("memory-n16384-d4096"), 2**20
    forward = {form: found.predicted_bytes("fwd", "bf16", form) // mib for form in ("eager", "two-kernels", "fused")}
    assert forward == {"eager": 2048, "two-kernels": 1536, "fused": 512}
    train = [
        found.predicted_bytes("fwd+bwd", "bf16", form) for form in ("eager", "two-kernels", "fused", "fused-recompute")
    ]
    gradients = found.gradient_bytes("bf16")
    # Bytes of half of dW and db: one of two pre-activations is freed before the other half.
    half = found.weight_elements
    assert train == [3072 * mib, 2560 * mib, 1536 * mib + gradients - half, 1024 * mib + gradients]
    small = case("memory-n1024-d1024")  # small enough that the recomputed gradient is not split
    recomputed = small.predicted_bytes("fwd+bwd", "bf16", "fused-recompute")
    assert recomputed == small.predicted_bytes("fwd+bwd", "bf16", "fused") == 24 * mib + small.gradient_bytes("bf16")


def test_on_a_cpu_a_chunk_of_the_gate_comes_on_top() -> None:
    found, mib = case("memory-n1024-d1024"), 2**20
    assert found.predicted_bytes("fwd", "fp32", "chunked") == (16 + 8) * mib  # 512 rows of 4096
    assert found.predicted_bytes("fwd", "fp32", "chunked-recompute") == (16 + 8) * mib
    for form, plain in (("chunked", "fused"), ("chunked-recompute", "fused-recompute")):
        assert found.predicted_bytes("fwd+bwd", "fp32", form) == found.predicted_bytes("fwd+bwd", "fp32", plain)
    decode = case("quick-decode")
    assert decode.predicted_bytes("fwd", "fp32", "chunked") == 3 * decode.output_bytes("fp32")


def test_onednn_needs_more_memory_where_it_computes_dw() -> None:
    found = case("quick-square")
    for suffix in ("", "-recompute"):
        plain, apart, dw = (
            found.predicted_bytes("fwd+bwd", "fp32", f"chunked{way}{suffix}") for way in ("", "-apart", "-apart-dw")
        )
        assert plain == apart == dw - found.apart_bytes("fp32") < dw


def test_float32_by_the_library_needs_both_pre_activations_in_inference_too() -> None:
    found = case("shapes-aligned")
    h = found.output_bytes("fp32")
    for form, plain in (("unfused", "fused"), ("unfused-recompute", "fused-recompute")):
        assert found.predicted_bytes("fwd", "fp32", form) == 3 * h
        trained = found.predicted_bytes("fwd+bwd", "fp32", plain)
        assert found.predicted_bytes("fwd+bwd", "fp32", form) == max(3 * h, trained)
    assert found.predicted_bytes("fwd+bwd", "fp32", "fused") == 3 * h + found.gradient_bytes("fp32")
    assert found.predicted_bytes("fwd+bwd", "fp32", "fused-recompute") == 2 * h + found.gradient_bytes("fp32")


@pytest.mark.parametrize("name", ["quick-diffusers", "quick-swiglu", "quick-decode"])
def test_the_op_accepts_the_inputs(name: str) -> None:
    found = case(name)
    inputs = found.make_inputs("cpu", "fp32", seed=3)
    assert len(inputs.operands) == 2 + found.bias and inputs.operands[0].shape == (found.rows, found.features)
    y = gated_linear(*inputs.operands, **inputs.kwargs)
    assert y.shape == inputs.gradients[0].shape == (found.rows, found.hidden)
    first, second = torch.nn.functional.linear(*inputs.operands).chunk(2, -1)
    value, gate = (second, first) if found.gate_first else (first, second)
    act = torch.nn.functional.silu if found.activation == "silu" else torch.nn.functional.gelu
    torch.testing.assert_close(y, value * act(gate), rtol=1e-4, atol=1e-4)
    assert 0.8 < float(gate.std()) < 1.7  # unit variance, with or without bias


def test_inputs_depend_on_the_seed_and_the_case_and_nothing_else() -> None:
    inputs = SMALL.make_inputs("cpu", "fp32", seed=1)
    torch.manual_seed(12345)
    again = SMALL.make_inputs("cpu", "fp32", seed=1)
    assert all(torch.equal(a, b) for a, b in zip(inputs.operands, again.operands, strict=True))
    other = SMALL.make_inputs("cpu", "fp32", seed=2)
    twin = dataclasses.replace(SMALL, name="twin").make_inputs("cpu", "fp32", seed=1)
    assert not torch.equal(inputs.operands[0], other.operands[0]) and not torch.equal(
        inputs.operands[0], twin.operands[0]
    )


def test_inputs_are_the_same_in_another_process() -> None:
    script = (
        "from fusewise.ops.gated_linear.cases import case; i = case('quick-decode').make_inputs('cpu', 'fp32', 7); "
        "print(i.operands[1].sum().item().hex(), i.gradients[0].sum().item().hex())"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    inputs = case("quick-decode").make_inputs("cpu", "fp32", 7)
    assert run.stdout.split() == [inputs.operands[1].sum().item().hex(), inputs.gradients[0].sum().item().hex()]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^gated_cases: preset must be one of geglu-memory, .*, got 'geglu'; "):
        cases("geglu")
    with pytest.raises(ValueError, match=r"^gated_cases: name must be that of a case in a preset, got 'memory'; "):
        case("memory")
    with pytest.raises(ValueError, match=r"^gated_cases: pass must be one of fwd, bwd, fwd\+bwd, got 'both'; "):
        SMALL.bytes_min("both", "fp32")  # type: ignore[arg-type]


def test_a_returned_list_is_the_callers_own() -> None:
    cases("geglu-quick").clear()
    assert len(PRESETS["geglu-quick"]) == 5
