"""RoPE in the form of serving engines: who can take it, who is right, and who says why not."""

import dataclasses
import sys
import types

import pytest
import torch

from fusewise.lab import Unsupported, targets, truth
from fusewise.lab.plugin import Run
from fusewise.lab.problem import Task
from fusewise.lab.providers import floors, ours, pytorch
from fusewise.lab.providers import rope_peers as peers
from fusewise.lab.targets import rope, rope_serving
from fusewise.ops.rope.cases import case

NAMES = (
    "llama-3-8b-serve-decode-b8",
    "phi-2-serve-prefill-128",
    "glm-4-9b-serve-decode-b8",
    "deepseek-v3-serve-decode-b8",
)
SMALL = {name: dataclasses.replace(case(name), heads=4, kv_heads=1, table_rows=128) for name in NAMES}


def problem(name, pass_="fwd", dtype="bf16"):
    return targets.problem_for(Task("rope", name, dtype, pass_, "cpu", 0))


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(rope, "case", SMALL.__getitem__)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_engines_own_python_agrees_with_float64_and_scripts_and_has_a_twin_in_jax(name, dtype):
    p = problem(name, dtype=dtype)
    program = p.program()
    assert [x.dim() for x in p.tensors] == [2, 2]
    assert program.enter(*p.tensors)[2].dtype == torch.int64
    assert truth.check(p, Run(program.function, program.enter, program.leave)).reason == ""
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = torch.jit.script(program.function)
    eager = p.eager(p.tensors)
    assert all(map(torch.equal, scripted(*program.enter(*p.tensors)), eager))
    pytest.importorskip("jax")
    from fusewise.lab.providers.xla import Jax

    run = Jax().build(p)
    assert truth.check(p, run).reason == ""


@pytest.mark.parametrize("name", NAMES)
def test_ours_overwrite_the_flat_tensors(name):
    p = problem(name)
    run = ours.Cpu().build(p)
    assert truth.check(p, run).reason == ""
    flat = p.leaves(False)
    found = run.call(*flat)
    assert all(x is y for x, y in zip(flat, found, strict=True)) and run.in_place
    assert not any(map(torch.equal, flat, p.tensors))
    with pytest.raises(Unsupported, match="in place anyway: see fusewise-cpu"):
        ours.CpuInPlace().build(p)
    with pytest.raises(Unsupported, match="not positions and a cache"):
        ours.TritonGathered().build(p)


def flat(positions, q, k, head_size, cache, is_neox):
    """vLLM's and FlashInfer's kernel in plain torch."""
    cos, sin = cache[positions].float()[:, None].chunk(2, dim=-1)
    width = cache.shape[-1]
    first, second = (
        (slice(0, width // 2), slice(width // 2, width)) if is_neox else (slice(0, width, 2), slice(1, width, 2))
    )
    for x in (q, k):
        heads = x.view(x.shape[0], -1, head_size)
        a, b = heads[..., first].float(), heads[..., second].float()
        heads[..., first], heads[..., second] = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_of_serving_engines_take_it_as_it_is(name, monkeypatch):
    p = problem(name)
    for module in ("flashinfer", "flashinfer.rope", "vllm", "vllm._C"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    sys.modules["flashinfer.rope"].apply_rope_with_cos_sin_cache_inplace = flat
    monkeypatch.setattr(torch.ops._C, "rotary_embedding", flat, raising=False)
    for peer in (peers.FlashInfer(), peers.Vllm()):
        if name.startswith("deepseek"):
            with pytest.raises(Unsupported, match="pairs features half or interleaved"):
                peer.build(p)
            continue
        run = peer.build(p)
        flat_tensors = p.leaves(False)
        assert run.call(*flat_tensors)[0] is flat_tensors[0] and run.in_place
        assert truth.check(p, run).reason == ""


@pytest.mark.parametrize(
    ("peer", "lacks"),
    [
        (peers.TransformerEngineFused, "takes angles"),
        (peers.Liger, "takes the rows of cos and sin"),
        (peers.FlashAttn, "takes cos and sin apart"),
        (peers.Quack, "takes cos and sin apart"),
        (peers.Unsloth, "each angle twice"),
    ],
)
def test_a_library_without_the_form_says_what_it_takes(peer, lacks):
    with pytest.raises(Unsupported, match=f"{lacks}.*, not positions, one cos and sin cache"):
        peer().build(problem(NAMES[0]))


def test_the_floor_copies_what_has_to_move_in_place():
    p = problem("phi-2-serve-prefill-128")
    moved = floors.Copy().build(p).enter()[0]
    assert 2 * moved.numel() * 4 == p.bytes_min() == SMALL["phi-2-serve-prefill-128"].bytes_min("fwd", "bf16")
    out_of_place = pytorch.Eager().build(p).call(*p.program().enter(*p.tensors))
    assert p.bytes_min() < 2 * sum(y.numel() * y.element_size() for y in out_of_place)
    assert isinstance(p, rope_serving.ServingProblem)
