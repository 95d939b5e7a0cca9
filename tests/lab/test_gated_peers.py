"""The adapters of gated units, against stand-ins that follow each library's documented contract in plain torch.

This covers what an adapter passes and how it reads the result: which half is the gate, row order, shapes, overwritten
buffers, gradients.
"""

import sys
import types
from dataclasses import replace

import pytest
import torch
from adapters import is_right_or_refuses
from torch.nn import functional

from fusewise.lab import Missing, Unsupported, targets, truth
from fusewise.lab.problem import Task
from fusewise.lab.providers import gated_peers as peers
from fusewise.lab.providers import ours
from fusewise.lab.targets import gated_mlp as mlps
from fusewise.lab.targets import geglu as target
from fusewise.ops.gated_linear import _op
from fusewise.ops.gated_linear.cases import GatedCase

CASES = {
    "geglu": GatedCase(name="geglu", rows=6, features=8, hidden=10, bias=True),
    "swiglu": GatedCase(name="swiglu", rows=6, features=8, hidden=10, activation="silu", gate_first=True),
    "erf": GatedCase(name="erf", rows=6, features=8, hidden=10, activation="gelu", bias=True, gate_first=True),
}
ACTIVATE = {
    "geglu": lambda g: functional.gelu(g, approximate="tanh"),
    "swiglu": functional.silu,
    "exact": functional.gelu,
}


def gradients(name, gate, value, dy):
    """dgate and dvalue of act(gate) · value."""
    with torch.enable_grad():
        leaves = gate.detach().requires_grad_(), value.detach().requires_grad_()
        return torch.autograd.grad(ACTIVATE[name](leaves[0]) * leaves[1], leaves, dy)


def liger(name):
    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            assert a.is_contiguous() and b.is_contiguous()
            ctx.save_for_backward(a, b)
            return ACTIVATE[name](a) * b

        @staticmethod
        def backward(ctx, dc):
            a, b = ctx.saved_tensors
            da, db = gradients(name, a, b, dc)
            return a.copy_(da), b.copy_(db)  # overwrites what it saved

    return Gate


def unsloth(name):
    def forward(gate, up):
        assert gate.dim() == 3 and gate.is_contiguous() and up.is_contiguous()
        return ACTIVATE[name](gate) * up

    def backward(dw, e, g):
        assert e.dim() == 2 and dw.is_contiguous()
        de, dg = gradients(name, e, g, dw)
        return dw.copy_(ACTIVATE[name](e) * g), e.copy_(dg), g.copy_(de)

    return forward, backward


def transformer_engine(name):
    def forward(z, quantizer):
        assert quantizer is None
        gate, value = z.chunk(2, -1)
        return ACTIVATE[name](gate) * value

    def backward(dy, z, quantizer):
        assert quantizer is None
        return torch.cat(gradients(name, *z.chunk(2, -1), dy), -1)

    return forward, backward


def gemm_gated(a, b, *, bias=None, activation, store_preact, concat_layout=None):
    """QuACK: columns of gate and value interleaved, or two halves with concat_layout."""
    assert not store_preact and b.stride(0) == 1
    if concat_layout is not None:
        assert concat_layout == (("B",) if bias is None else ("B", "bias"))
    z = a @ b if bias is None else a @ b + bias
    gate, value = z.chunk(2, -1) if concat_layout else (z[:, ::2], z[:, 1::2])
    return None, ACTIVATE[activation](gate) * value


def mlp_func(x, weight1, weight2, *, activation, recompute):
    """QuACK: rows of gate and value interleaved, no bias."""
    z = functional.linear(x, weight1)
    return functional.linear(ACTIVATE[activation](z[:, ::2]) * z[:, 1::2], weight2)


STAND_INS = {
    "liger_kernel.ops.geglu": {"LigerGELUMulFunction": liger("geglu")},
    "liger_kernel.ops.swiglu": {"LigerSiLUMulFunction": liger("swiglu")},
    "unsloth.kernels.geglu": {
        f"geglu_{form}_{way}_kernel": unsloth(name)[way == "backward"]
        for form, name in (("approx", "geglu"), ("exact", "exact"))
        for way in ("forward", "backward")
    },
    "unsloth.kernels.swiglu": dict(
        zip(("swiglu_fg_kernel", "swiglu_DWf_DW_dfg_kernel"), unsloth("swiglu"), strict=True)
    ),
    "transformer_engine.pytorch": {},
    "transformer_engine_torch": {
        prefix + name: transformer_engine(name)[bool(prefix)] for name in ("geglu", "swiglu") for prefix in ("", "d")
    },
    "quack.gemm_interface": {"gemm_gated": gemm_gated},
    "quack.mlp": {"mlp_func": mlp_func},
}


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    for path, functions in STAND_INS.items():
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            if name not in STAND_INS or name == path:
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        for name, function in functions.items():
            setattr(sys.modules[path], name, function)
    monkeypatch.setattr(target, "case", CASES.__getitem__)
    monkeypatch.setattr(mlps, "PRESETS", {"small": [mlps.MlpCase(replace(c, out=c.features)) for c in CASES.values()]})


PROVIDERS = [peers.Liger, peers.Unsloth, peers.TransformerEngine, peers.QuackInterleaved, peers.QuackStacked]


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("peer", PROVIDERS, ids=lambda p: p.name)
def test_an_adapter_is_right_or_says_that_it_cannot(peer, name, pass_):
    problem = target.GatedProblem(Task("geglu", name, "bf16", pass_, "cpu", 0))
    cannot = (name == "erf" and peer is not peers.Unsloth) or (pass_ != "fwd" and not peer.backward)
    is_right_or_refuses(peer, problem, cannot)


@pytest.mark.parametrize("peer", PROVIDERS, ids=lambda p: p.name)
def test_a_wrong_half_is_found(peer, monkeypatch):
    """The check distinguishes gate from value: with the halves of the case swapped every adapter is wrong."""
    problem = target.GatedProblem(Task("geglu", "geglu", "bf16", "fwd", "cpu", 0))
    run = peer().build(problem)
    monkeypatch.setitem(problem.kwargs, "gate_first", True)
    assert "more than twice eager's" in truth.check(problem, run).reason


MLPS = [peers.Liger, peers.Unsloth, peers.TransformerEngine, peers.QuackMlp, peers.QuackMlpRecompute]


@pytest.mark.parametrize("pass_", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("peer", MLPS, ids=lambda p: p.name)
def test_an_adapter_of_an_mlp_is_right_or_says_that_it_cannot(peer, name, pass_):
    problem = mlps.GatedMlpProblem(Task("gated_mlp", name, "bf16", pass_, "cpu", 0))
    quack = issubclass(peer, peers.QuackMlp)
    cannot = name != "swiglu" if quack else name == "erf" and peer is not peers.Unsloth
    is_right_or_refuses(peer, problem, cannot or (peer is peers.QuackMlpRecompute and pass_ == "fwd"))


def test_a_wrong_half_of_an_mlp_is_found(monkeypatch):
    problem = mlps.GatedMlpProblem(Task("gated_mlp", "swiglu", "bf16", "fwd+bwd", "cpu", 0))
    run = peers.QuackMlp().build(problem)
    monkeypatch.setattr(problem, "interleaved", lambda xs: (xs[0], torch.stack(xs[1].chunk(2)[::-1], 1).flatten(0, 1)))
    assert "more than twice eager's" in truth.check(problem, run).reason


def test_a_problem_of_another_kind_is_refused():
    with pytest.raises(Unsupported, match="liger runs geglu and gated_mlp only, not gelu"):
        peers.Liger().build(targets.problem_for(Task("gelu", "gelu-5x5", "fp32", "fwd", "cpu", 0)))
    with pytest.raises(Unsupported, match="quack-stacked runs geglu only, not gated_mlp"):
        peers.QuackStacked().build(mlps.GatedMlpProblem(Task("gated_mlp", "swiglu", "bf16", "fwd", "cpu", 0)))


def test_what_a_library_lacks_is_its_reason(monkeypatch):
    monkeypatch.delitem(sys.modules, "quack.gemm_interface")
    monkeypatch.delitem(sys.modules, "quack")
    problem = target.GatedProblem(Task("geglu", "geglu", "bf16", "fwd", "cpu", 0))
    with pytest.raises(Missing, match=r"import quack.gemm_interface failed: .*; pip install quack-kernels"):
        peers.QuackStacked().build(problem)


@pytest.mark.parametrize("provider", [ours.GatedCuda, ours.GatedGluon, ours.GatedTriton])
def test_what_ours_cannot_serve_is_told_before_it_runs(provider, monkeypatch):
    problem = target.GatedProblem(Task("geglu", "geglu", "bf16", "fwd", "cpu", 0))
    provider().build(problem)  # to inspect its code without a GPU
    problem.device = torch.device("cuda")
    monkeypatch.setattr(_op.choice, "unavailable", lambda impl, device_type, dtype: f"{impl} is for another GPU")
    with pytest.raises(Unsupported, match=f"{provider.impl} is for another GPU"):
        provider().build(problem)
    if provider is ours.GatedGluon:
        with pytest.raises(Unsupported, match="takes bfloat16, float16 only"):
            provider().build(target.GatedProblem(Task("geglu", "geglu", "fp32", "fwd", "cpu", 0)))
