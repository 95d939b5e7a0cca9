"""RoPE in the form of serving engines: which providers support it, which are correct, and which give a reason."""

import dataclasses
import sys
import types

import pytest
import torch

from fusewise.lab import Unsupported, commands, plan, seats, targets, truth
from fusewise.lab.code.worker import Server
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
SMALL = {name: dataclasses.replace(case(name), heads=4, kv_heads=1, table_rows=256) for name in NAMES}


def problem(name, pass_="fwd", dtype="bf16"):
    return targets.problem_for(Task("rope", name, dtype, pass_, "cpu", 0))


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Fewer heads and rows, in this process."""
    monkeypatch.setattr(rope, "case", SMALL.__getitem__)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_engines_own_python_agrees_with_float64_and_scripts_and_has_a_twin_in_jax(name, dtype, request):
    p = problem(name, dtype=dtype)
    program = p.program()
    assert [x.dim() for x in p.tensors] == [2, 2]
    assert program.enter(*p.tensors)[2].dtype == torch.int64
    assert truth.check(p, Run(program.function, program.enter, program.leave)).reason == ""
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        scripted = torch.jit.script(program.function)
    eager = p.eager(p.tensors)
    assert all(map(torch.equal, scripted(*program.enter(*p.tensors)), eager))
    request.getfixturevalue("jax")
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


def test_the_quick_preset_runs_on_a_cpu_and_its_report_has_the_section(monkeypatch, tmp_path):
    # The first call's time is not read here, and with a cache of its own it is half a minute of compiling.
    monkeypatch.delitem(seats.CACHES, "FUSEWISE_CACHE_DIR")
    request = plan.Request(
        target="rope-serving-quick", providers=["floor-copy", "eager", "fusewise-cpu", "liger"], device="cpu", warm=True,
        rounds=(3, 3), out=tmp_path,
    )  # fmt: skip
    made, report = commands.run(plan.options(request, tmp_path))
    status = {(row.case, row.provider): row.status for row in made.rows}
    assert len(status) == 4 * 4
    assert {s for (_, p), s in status.items() if p != "liger"} == {"ok"}
    assert {s for (_, p), s in status.items() if p == "liger"} == {"missing"}
    assert [p["provider"] for p in made.profiles] == ["eager", "fusewise-cpu"]
    assert any("rope" in line["name"] for line in made.profiles[1]["rows"])
    assert (tmp_path / "profiles").is_dir() and len(list((tmp_path / "profiles").glob("*/flame.svg"))) == 2
    assert made.spent["code"] > 0 and sum(made.spent.values()) == pytest.approx(made.seconds)
    assert (
        "There are no host times" in report.read_text()
        and "Profiles of llama-3-8b-serve-decode-b64" in report.read_text()
    )
    eager, ours = (next(e for e in made.ledgers if e["provider"] == p and "decode-b64" in e["case"]) for p in ("eager", "fusewise-cpu"))  # fmt: skip
    moved = sum(k["read"] + k["written"] for k in ours["kernels"])
    assert 0.99 < moved / ours["bytes_min"] < 1.01
    assert sum(k["read"] + k["written"] for k in eager["kernels"]) > 3 * moved


@pytest.mark.parametrize("name", NAMES)
def test_ledgers_count_the_rows_in_use_and_what_rotates(name):
    p = problem(name)
    for provider in (ours.Cpu(), ours.Cuda()):
        assert Server(provider).ledger(p, "sm_90").bytes == p.bytes_min()
    eager = Server(pytorch.Eager()).ledger(p, "sm_90")
    lookup = next(k for k in eager.kernels if "index_select" in k.name)
    tokens = p.tensors[0].shape[0]
    assert lookup.written == tokens * p.case.rotated * 2 and lookup.read == lookup.written + tokens * 8
    assert eager.bytes > 2 * p.bytes_min()
    small = p.compact()
    assert small.inputs.cache.shape[0] == tokens < p.inputs.cache.shape[0]
    assert all(map(torch.equal, small.eager(small.tensors), p.eager(p.tensors)))


def test_a_compiled_lookup_reads_no_more_of_the_cache_than_it_uses():
    ledger = Server(pytorch.TorchCompile()).ledger(problem(NAMES[0]), "sm_90")
    assert ledger.excess < 1.01
