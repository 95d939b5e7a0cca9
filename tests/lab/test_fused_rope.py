"""RoPE fused with its neighbours, normalisation before or caching after; every form of both against float64."""

import sys
import types

import pytest
import torch

from fusewise.lab import Unsupported, plugin, targets, truth
from fusewise.lab.code.worker import Server
from fusewise.lab.plugin import Run
from fusewise.lab.problem import Task
from fusewise.lab.providers import fused_rope, pytorch
from fusewise.lab.targets import qk_norm_rope as norms
from fusewise.lab.targets import rope_and_cache as caches
from fusewise.ops.rope.cases import case as rope_case


def problem(op, case, pass_="fwd", dtype="bf16"):
    return targets.problem_for(Task(op, case, dtype, pass_, "cpu", 0))


NORMS = [c.name for c in norms.PRESETS["qk-norm-quick"]]
CACHES = [c.name for c in caches.PRESETS["cache-quick"]]


@pytest.mark.parametrize("pass_", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("name", NORMS[:3])
def test_norms_eager_and_ours_agree_with_float64_gradients_of_weights_too(name, pass_):
    p = problem("qk_norm_rope", name, pass_)
    program = p.program()
    assert truth.check(p, Run(program.function, program.enter, program.leave)).reason == ""
    assert truth.check(p, fused_rope.NormReference().build(p)).reason == ""
    forgets = Run(lambda *xs: fused_rope.NormReference().build(p).call(*xs[:2], xs[2] + 0.05, xs[3]))
    assert "more than twice" in truth.check(p, forgets).reason
    with pytest.raises(Unsupported, match="runs qk_norm_rope only, not rope"):
        fused_rope.NormReference().build(problem("rope", "cube-4", pass_, "fp32"))


def test_a_norm_is_a_norm():
    p = problem("qk_norm_rope", "qwen3-8b-decode-b16", dtype="fp32")
    q, k, q_weight, k_weight = p.tensors
    rotated = fused_rope.NormReference().build(p).call(q, k, torch.ones_like(q_weight), torch.ones_like(k_weight))
    for y in rotated:  # a rotation preserves the norm
        assert torch.allclose(y.pow(2).mean(-1), torch.ones(()), atol=1e-4)


def test_bytes_of_the_norm_counted_by_hand():
    found = next(c for c in norms.PRESETS["qk-norm-models"] if c.name == "olmo-2-7b-decode-b64")
    tokens = 64 * 2 * 32 * 128 * 2  # q and k
    table, ids, weights = 64 * 128 * 4, 64 * 8, 2 * 32 * 128 * 2
    assert found.bytes_min("fwd", "bf16") == 2 * tokens + table + ids + weights
    assert found.bytes_min("bwd", "bf16") == 3 * tokens + table + ids + 2 * weights
    assert found.bytes_min("fwd+bwd", "bf16") == found.bytes_min("fwd", "bf16") + found.bytes_min("bwd", "bf16")


@pytest.mark.parametrize("name", CACHES)
def test_caches_are_written_where_the_slots_say_and_nowhere_else(name):
    p = problem("rope_and_cache", name)
    program = p.program()
    eager = Run(program.function, program.enter, program.leave)
    assert truth.check(p, eager).reason == ""
    ours = fused_rope.CacheReference().build(p)
    assert truth.check(p, ours).reason == ""
    leaves = p.leaves(False)
    q, k, key_cache, value_cache = ours.call(*leaves)
    assert q is leaves[0] and key_cache is leaves[3]
    size = p.case.slots
    for cache, before, rows in ((key_cache, p.tensors[3], k), (value_cache, p.tensors[4], leaves[2])):
        kept = torch.ones(cache.shape[:2], dtype=torch.bool)
        kept[p.slots // size, p.slots % size] = False
        assert torch.equal(cache[kept], before[kept])
        assert torch.equal(cache[p.slots // size, p.slots % size].flatten(1), rows)
    skips = Run(lambda *xs: (*ours.call(*xs)[:2], xs[3].clone(), p.tensors[4]), in_place=True)
    assert "more than twice" in truth.check(p, skips).reason


def test_bytes_of_the_cache_counted_by_hand():
    found = next(c for c in caches.PRESETS["cache-serving"] if c.name == "glm-4-9b-cache-decode-b8")
    rotating = 8 * 34 * 64 * 2 * 2  # half of each head of q and k, read and written
    passing, cached = 8 * 2 * 64 * 2, 8 * 2 * 128 * 2  # of k, read for the cache; a head of k or v
    assert found.bytes_min("fwd", "bf16") == rotating + 8 * 64 * 4 + 8 * 8 + passing + 3 * cached + 8 * 8


def test_the_forms_compile_as_torchscript():
    for p in (problem("qk_norm_rope", NORMS[0]), problem("rope_and_cache", CACHES[0])):
        run = pytorch.TorchScript().build(p)
        assert isinstance(run.call, torch.jit.ScriptFunction)  # scripted, not traced
        assert truth.check(p, run).reason == ""


@pytest.mark.parametrize("name", CACHES)
def test_vllms_two_kernels_by_stand_ins(name, monkeypatch):
    p = problem("rope_and_cache", name)
    half = p.case.rope.pairing == "half"

    def rotate(positions, q, k, head_size, cache, is_neox):
        assert is_neox is half
        cos, sin = cache[positions][:, None].chunk(2, dim=-1)
        turn = caches.half_heads if is_neox else caches.interleaved_heads
        for x in (q, k):
            x.copy_(turn(x, cos, sin, head_size, 0, cache.shape[-1]))

    def store(k, v, key_cache, value_cache, slots, kind, k_scale, v_scale):
        assert kind == "auto" and k.dim() == 3
        caches.stored(k.flatten(1), v.flatten(1), key_cache, value_cache, slots, k.shape[-1])

    for module in ("vllm", "vllm._C"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setattr(torch.ops._C, "rotary_embedding", rotate, raising=False)
    monkeypatch.setattr(torch.ops._C_cache_ops, "reshape_and_cache_flash", store, raising=False)
    run = fused_rope.CacheVllm().build(p)
    assert truth.check(p, run).reason == ""


@pytest.mark.parametrize("name", [NORMS[0], NORMS[3]])  # running positions, and ids
def test_vllms_norm_by_a_stand_in(name, monkeypatch):
    p = problem("qk_norm_rope", name)

    def turn(qkv, heads_q, heads_k, heads_v, width, eps, q_weight, k_weight, cache, is_neox, positions):
        assert heads_v == 0 and is_neox and positions.dtype == torch.int64
        q, k = qkv.view(1, len(qkv), -1, width).split((heads_q, heads_k), 2)
        cos, sin = (torch.cat((t, t), -1)[None, :, None] for t in cache[positions].chunk(2, -1))
        for x, y in zip((q, k), norms.by_head(q, k, q_weight, k_weight, cos, sin, eps, 0.0), strict=True):
            x.copy_(y)

    for module in ("vllm", "vllm._C"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setattr(torch.ops._C, "fused_qk_norm_rope", turn, raising=False)
    assert truth.check(p, fused_rope.NormVllm().build(p)).reason == ""


@pytest.mark.parametrize(
    ("name", "pass_", "dtype", "reason"),
    [
        (NORMS[1], "fwd", "bf16", r"by the weight, not by the weight \+ 1"),
        (NORMS[2], "fwd", "bf16", "each head, not all heads"),
        (NORMS[0], "bwd", "bf16", "no backward"),
        (NORMS[0], "fwd", "fp32", "bfloat16 and float16 only"),
    ],
)
def test_norms_that_vllm_does_not_have(name, pass_, dtype, reason):
    with pytest.raises(Unsupported, match=reason):
        fused_rope.NormVllm().build(problem("qk_norm_rope", name, pass_, dtype))


@pytest.mark.parametrize("name", [CACHES[0], CACHES[-1]])
def test_ledgers_of_the_cache_write(name):
    p = problem("rope_and_cache", name)
    assert Server(fused_rope.CacheTriton()).ledger(p, "sm_90").bytes == p.bytes_min()
    assert Server(fused_rope.CacheCuda()).ledger(p, "sm_90").bytes == p.bytes_min()
    eager = Server(pytorch.Eager()).ledger(p, "sm_90")
    puts = [k for k in eager.kernels if "index_put_" in k.name]
    tokens, rope = p.case.tokens, p.case.rope
    assert [k.written for k in puts] == [tokens * rope.kv_heads * rope.head_dim * 2] * 2
    assert all(k.read < 1.2 * k.written for k in puts)


@pytest.mark.parametrize("name", NORMS)
def test_ledgers_of_the_norm(name):
    p = problem("qk_norm_rope", name)
    assert Server(fused_rope.NormTriton()).ledger(p, "sm_90").bytes == p.bytes_min()
    assert Server(fused_rope.NormCuda()).ledger(p, "sm_90").bytes == p.bytes_min()
    assert Server(pytorch.Eager()).ledger(p, "sm_90").excess > 10


def test_who_is_measured_by_default_and_who_cannot(request):
    assert {e.name for e in plugin.select(None, "rope_and_cache", "cpu")} >= {
        "eager",
        "fusewise-cuda",
        "vllm",
        "floor-copy",
    }
    assert "liger" not in {e.name for e in plugin.select(None, "qk_norm_rope", "cpu")}
    request.getfixturevalue("jax")
    from fusewise.lab.providers.xla import Jax

    with pytest.raises(Unsupported, match="its arrays never change"):
        Jax().build(problem("rope_and_cache", CACHES[0]))
    assert rope_case("llama-3-8b-serve-decode-b8").serving  # the base of the cache cases
