import importlib.metadata
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusewise._shared import host
from fusewise.lab import memory, plan, targets, truth
from fusewise.lab.options import request as as_kept
from fusewise.lab.plugin import Run, Unsupported
from fusewise.lab.problem import Task
from fusewise.lab.providers import floors, ours
from fusewise.lab.targets import gated_mlp, geglu, gelu
from fusewise.lab.worker import make_work
from fusewise.ops.gated_linear import _onednn
from fusewise.ops.gated_linear.cases import GatedCase

with_onednn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this build of torch has no oneDNN",
)


def problem(op, case, dtype="fp32", pass_="fwd", seed=0):
    return targets.problem_for(Task(op, case, dtype, pass_, "cpu", seed))


def program_of(p):
    program = p.program()
    return Run(program.function, program.enter, program.leave)


def test_targets_are_found_by_name_and_by_a_preset():
    assert targets.names()[:6] == ["rope", "geglu", "gelu", "qk_norm_rope", "rope_and_cache", "gated_mlp"]
    target, preset = targets.resolve("geglu-memory")
    assert (target.name, preset) == ("geglu", "geglu-memory")
    assert targets.resolve("gelu")[1] is None
    assert targets.resolve("gelu", (), "gelu-sizes")[1] == "gelu-sizes"
    with pytest.raises(ValueError, match="preset must be named once, got 'gelu-quick' as target and 'gelu-sizes'"):
        targets.resolve("gelu-quick", (), "gelu-sizes")
    with pytest.raises(ValueError, match=r"target must be one of rope, geglu, gelu.*, got 'tango'"):
        targets.find("tango")
    assert targets.resolve("cache-serving")[0].name == "rope_and_cache"


def test_a_broken_target_of_another_package_is_told_where_it_is_asked_for(monkeypatch):
    places = {"bad": "nowhere:X", "hopeless": "fusewise.lab:Target", "odd": "builtins:int"}
    points = [importlib.metadata.EntryPoint(name, place, targets.ENTRY_POINTS) for name, place in places.items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: points)
    for name, words in (
        ("bad", "ModuleNotFoundError: "),
        ("hopeless", "NotImplementedError: "),
        ("odd", "TypeError: no f"),
    ):
        with pytest.raises(ValueError, match=f"^study: target {name} must be importable with its presets, got {words}"):
            targets.resolve(name)
    assert targets.resolve("mlp-quick")[0].name == "gated_mlp"
    with pytest.raises(ValueError, match="got 'rpoe'; try 'rope'"):
        targets.resolve("rpoe")


@pytest.mark.parametrize("name", list(targets.BUILT_IN))
def test_every_case_of_a_target_has_bytes_and_a_name_of_its_own(name):
    target = targets.find(name)
    assert target.default_preset in target.presets()
    assert set(target.hurried) <= set(target.presets())
    for preset in target.presets():
        cases = target.cases(preset)
        assert len({c.name for c in cases}) == len(cases)
        assert all(c.bytes_min(p, d) > 0 for c in cases for p in c.passes for d in c.dtypes)
    with pytest.raises(ValueError, match="preset must be one of"):
        target.cases("nope")
    with pytest.raises(ValueError, match="name must be that of a case in a preset"):
        target.case("nope")


def test_gelu_goes_from_five_by_five_to_four_gibibytes():
    cases = targets.find("gelu").cases("gelu-sizes")
    sizes = [c.rows * c.columns * 4 for c in cases]
    assert cases[0].shape == "x[5,5]"
    assert sizes[1:] == [1024 * 4**k for k in range(12)]
    assert sizes[-1] == 4 * 2**30


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
def test_gelu_written_out_is_gelu(pass_):
    p = problem("gelu", "gelu-5x5", "bf16", pass_)
    assert truth.check(p, program_of(p)).reason == ""
    fused = truth.check(p, Run(lambda x: torch.nn.functional.gelu(x, approximate="tanh")))
    assert fused.reason == ""
    exact = problem("gelu", "gelu-256", "fp32", pass_)
    assert "more than twice" in truth.check(exact, Run(torch.nn.functional.gelu)).reason  # erf is another function
    assert p.bytes_min() == {"fwd": 2, "bwd": 3, "fwd+bwd": 5}[pass_] * 25 * 2


def test_pytorchs_own_gelu_is_one_read_and_one_write_and_no_compiler():
    from fusewise.lab.code.worker import Server
    from fusewise.lab.plugin import Unsupported
    from fusewise.lab.providers.pytorch import FusedGelu
    from fusewise.lab.verdict import is_compiler

    p = problem("gelu", "gelu-256")
    assert truth.check(p, FusedGelu().build(p)).reason == ""
    assert Server(FusedGelu()).ledger(p, "sm_90").excess == 1.0
    assert [s.stage for s in FusedGelu().stages(p, "sm_90")] == ["source", "aten"]
    assert not is_compiler(FusedGelu.name)
    assert FusedGelu().chosen("gelu", "cpu") and not FusedGelu().chosen("rope", "cpu")
    with pytest.raises(Unsupported, match="computes gelu only"):
        FusedGelu().build(problem("rope", "cube-4"))


SMALL = {
    f"{act}-{first}-{bias}": GatedCase(
        name=f"{act}-{first}-{bias}", rows=4, features=6, hidden=8, activation=act, gate_first=first, bias=bias
    )
    for act in geglu.ACTIVATE
    for first in (True, False)
    for bias in (True, False)
}


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(geglu, "case", SMALL.__getitem__)


def assert_scripted_and_jax_agree(p, request):
    """They must agree with eager code, which has been checked before."""
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        scripted = torch.jit.script(p.program().function)
    assert torch.allclose(scripted(*p.tensors), p.eager(p.tensors)[0])
    dlpack = request.getfixturevalue("jax").dlpack
    found = torch.utils.dlpack.from_dlpack(p.jax()(*(dlpack.from_dlpack(x) for x in p.tensors)))
    assert torch.allclose(found, p.eager(p.tensors)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", list(SMALL))
def test_every_form_of_the_gated_unit_agrees_with_float64(name, request):
    p = problem("geglu", name, "fp32", "fwd+bwd")
    assert truth.check(p, program_of(p)).reason == ""
    assert_scripted_and_jax_agree(p, request)


def test_float32_is_not_fused_by_triton(monkeypatch):
    made = GatedCase(name="small", rows=5, features=8, hidden=8, dtypes=("fp32", "bf16"))
    monkeypatch.setattr(geglu, "case", lambda name: made)
    for provider, suffix in ((ours.GatedTriton, ""), (ours.GatedTritonRecompute, "-recompute")):
        assert provider().build(problem("geglu", "small", "fp32", "fwd+bwd")).form == "unfused" + suffix
        assert provider().build(problem("geglu", "small", "bf16", "fwd+bwd")).form == "fused" + suffix
    for provider, suffix in ((ours.GatedCuda, ""), (ours.GatedCudaRecompute, "-recompute")):
        assert provider().build(problem("geglu", "small", "fp32", "fwd+bwd")).form == "fused" + suffix


@pytest.mark.usefixtures("_small")
def test_views_and_orders_of_the_weight():
    p = problem("geglu", "gelu-False-True")
    _, weight, bias = p.tensors
    value, gate, value_bias, gate_bias = p.halves(weight, bias)
    assert (value.data_ptr(), gate.data_ptr()) == (weight.data_ptr(), weight[8:].data_ptr())
    assert torch.equal(gate_bias, bias[8:]) and torch.equal(value_bias, bias[:8])
    assert torch.equal(p.swapped(p.tensors)[1], torch.cat((gate, value)))
    _, rows, biases = p.interleaved(p.tensors)
    assert torch.equal(rows[::2], gate) and torch.equal(rows[1::2], value)
    assert torch.equal(biases[::2], gate_bias)
    first = problem("geglu", "gelu-True-False")
    assert torch.equal(first.halves(first.tensors[1])[1], first.tensors[1][:8])


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(("pass_", "flops"), [("fwd", 1), ("bwd", 2), ("fwd+bwd", 3)])
def test_the_bare_products_are_those_of_the_pass(pass_, flops):
    p = problem("geglu", "gelu-False-True", pass_=pass_)
    pairs = p.products(p.tensors)
    assert sum(2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in pairs) == p.flops_min() == flops * 2 * 4 * 6 * 16
    assert all(torch.mm(a, b).abs().max() > 0 for a, b in pairs)


def test_the_memory_model_is_the_writeups():
    p = problem("geglu", "memory-n1024-d1024", "bf16", "fwd")
    y = 1024 * 4096 * 2
    assert p.memory("eager") == {"saved_ratio": 1024 / (2 * 1025), "predicted_peak_bytes": 4 * y}
    assert p.memory("fused")["predicted_peak_bytes"] == y
    p.task = Task("geglu", p.task.case, "bf16", "fwd+bwd", "cpu", 0)
    assert p.memory("two-kernels")["predicted_held_bytes"] == 2 * y
    assert p.memory("fused-recompute")["predicted_held_bytes"] == 0
    assert p.memory("") == {"saved_ratio": 1024 / (2 * 1025)}


@pytest.fixture
def _small_mlps(monkeypatch):
    monkeypatch.setattr(
        gated_mlp, "PRESETS", {"small": [gated_mlp.MlpCase(replace(c, out=c.features)) for c in SMALL.values()]}
    )


@pytest.mark.usefixtures("_small_mlps")
@pytest.mark.parametrize("name", ["gelu-False-True", "silu-True-False"])
def test_every_form_of_the_mlp_agrees_with_float64(name, request):
    p = problem("gated_mlp", name, "fp32", "fwd+bwd")
    assert truth.check(p, program_of(p)).reason == ""
    ours = Run(lambda *xs: p.operation(*xs, save="input", impl="reference"))
    assert truth.check(p, ours).reason == ""
    forgets = Run(lambda *xs: p.operation(*xs[:-1], xs[-1] * 1.01, impl="reference"))
    assert "more than twice" in truth.check(p, forgets).reason
    assert_scripted_and_jax_agree(p, request)


@pytest.mark.usefixtures("_small_mlps")
@pytest.mark.parametrize(("pass_", "flops"), [("fwd", 1), ("bwd", 2), ("fwd+bwd", 3)])
def test_bytes_and_products_of_an_mlp_counted_by_hand(pass_, flops):
    p = problem("gated_mlp", "gelu-False-True", pass_=pass_)
    pairs = p.products(p.tensors)
    assert sum(2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in pairs) == p.flops_min() == flops * 2 * 4 * 6 * 24
    x, weights, z = 4 * 6, 16 * 6 + 16 + 6 * 8, 4 * 6
    forward, backward = x + weights + z, 2 * (x + weights) + z
    assert p.bytes_min() == 4 * {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[pass_]


def test_the_memory_model_of_an_mlp_is_what_was_measured():
    """On an H200 with N = 16384: MiB of eager code and of torch.compile, and what they keep for the backward."""
    mib = 2**20
    for d, eager, compiled in ((1024, (808, 512), (680, 384)), (2048, (1632, 1024), (1376, 768))):
        p = gated_mlp.GatedMlp().case(f"mlp-n16384-d{d}")
        h = p.unit.output_bytes("bf16")
        for form, (peak, held) in (("eager", eager), ("two-kernels", compiled)):
            assert p.predicted_bytes("fwd+bwd", "bf16", form) == peak * mib
            assert gated_mlp.HELD[form] * h == held * mib
        assert p.predicted_bytes("fwd+bwd", "bf16", "fused") <= 0.75 * compiled[0] * mib
        assert p.predicted_bytes("fwd", "bf16", "fused") == h + h // 4


def test_in_float32_on_a_gpu_an_mlp_needs_a_quarter_of_ys_gradient():
    p = gated_mlp.GatedMlp().case("mlp-n16384-d1024")
    for dtype, share in (("fp32", 1 / 4), ("bf16", 0)):
        h, z = p.unit.output_bytes(dtype), p.output_bytes(dtype)
        for form in ("fused", "fused-recompute", "unfused", "unfused-recompute"):
            down = p.down_elements * h // (p.unit.rows * p.unit.hidden)
            assert p.predicted_bytes("fwd+bwd", dtype, form) == z + down + (3 + share) * h


@pytest.mark.parametrize(
    "way", ["", pytest.param("-apart", marks=with_onednn), pytest.param("-apart-dw", marks=with_onednn)]
)
@pytest.mark.parametrize("save", ["preact", "input"])
def test_the_memory_of_our_mlp_is_what_the_model_says(save, way, monkeypatch):
    monkeypatch.setattr(_onednn, "there", lambda: way != "")
    monkeypatch.setattr(_onednn, "takes_transposed", lambda: way == "-apart-dw")
    p = problem("gated_mlp", "mlp-swiglu", pass_="fwd+bwd")
    run = Run(lambda *xs: p.operation(*xs, save=save))
    form = f"chunked{way}{'-recompute' if save == 'input' else ''}"
    found = p.memory(form)
    leaves = p.leaves(True)
    with host.through_python():  # C++ was told whether oneDNN is there when it was loaded
        grown = memory.peak_bytes(make_work(p, run, 1), p.device)
        held = memory.held_bytes(lambda: (run.call(*leaves),), leaves, p.device)
    assert found["predicted_peak_bytes"] <= grown <= 1.02 * found["predicted_peak_bytes"]
    assert found["predicted_held_bytes"] == held == gated_mlp.HELD[form] * p.case.output_bytes("fp32")


def test_a_case_of_another_shape_has_a_name_of_its_own(tmp_path, monkeypatch):
    for rows, names in ((5, ["gelu-5x5"]), (6, None)):
        monkeypatch.setitem(gelu.PRESETS, "mine", [gelu.FIVE, gelu.GeluCase("gelu-5x5", rows, 5)])
        request = plan.Request(target="mine", device="cpu", passes="fwd")
        if names is None:
            with pytest.raises(ValueError, match=r"names of their own, got 'gelu-5x5' for x\[5,5\] and for x\[6,5\]; "):
                plan.options(request, tmp_path)
        else:
            assert [task.case for task in plan.options(request, tmp_path).tasks] == names


def test_matmuls_that_a_problem_does_not_name_have_no_floor():
    """An empty call would take the place of the matmuls' time."""
    task = Task(op="gelu", case="gelu-5x5", dtype="fp32", pass_="fwd", device="cpu", seed=0)
    with pytest.raises(Unsupported, match="knows no matmuls"):
        floors.MatMul().build(targets.problem_for(task))
    unit = targets.problem_for(replace(task, op="geglu", case="quick-decode"))
    assert floors.MatMul().build(unit).enter is not None


@pytest.mark.parametrize(
    ("asked", "resolved"),
    [
        ({}, {"title": "rope-quick", "time_limit": 60.0, "min_rounds": 5, "max_rounds": 10, "named": True, "twin": True}),
        ({"rounds": (3, 7), "time_limit": 0}, {"title": "rope-quick", "time_limit": 0, "min_rounds": 3, "max_rounds": 7}),
        ({"preset": "rope-seqlen"}, {"title": "rope-seqlen", "time_limit": None, "max_rounds": 30, "profiled": ("seqlen-512",)}),
        ({"cases": ["cube-4", "cube-6", "cube-4"]}, {"title": "cube-4, cube-6", "time_limit": None, "profiled": (), "warm": False, "seed": 0}),
        ({"memory_limit": 0.5, "timeout": 7}, {"memory_limit": 2**29, "timeout": 7}),
        ({"warm": True, "seed": -(2**63)}, {"warm": True, "seed": -(2**63)}),
        ({"providers": None}, {"named": False}),
    ],
)  # fmt: skip
def test_what_is_left_out_is_the_presets(asked, resolved, tmp_path):
    request = plan.Request(target="rope", device="cpu", **{"providers": ["eager"], **asked})
    found = plan.options(request, tmp_path)
    assert {name: getattr(found, name) for name in resolved} == resolved
    assert {task.seed for task in found.tasks} == {found.seed} and found.out == tmp_path
    kept = as_kept(found)
    assert (kept["cache"], kept["rounds"]) == ("warm" if found.warm else "cold", [found.min_rounds, found.max_rounds])


@pytest.mark.parametrize(
    ("asked", "groups"),
    [
        ({"dtypes": ["fp32", "fp32"]}, ["fp32 fwd", "fp32 bwd"]),
        ({"passes": "bwd"}, ["fp32 bwd"]),
        ({"passes": "both", "dtypes": ["bf16", "fp32", "bf16"]}, ["bf16 fwd", "bf16 bwd", "fp32 fwd", "fp32 bwd"]),
        ({"passes": "fwd+bwd"}, ["fp32 fwd+bwd"]),
    ],
)
def test_what_is_named_twice_is_measured_once(asked, groups, tmp_path):
    request = plan.Request(target="rope", cases=["cube-8", "cube-4", "cube-8"], device="cpu", **asked)
    options = plan.options(request, tmp_path)
    assert [f"{t.case} {t.dtype} {t.pass_}" for t in options.tasks] == [
        f"{c} {g}" for c in ("cube-8", "cube-4") for g in groups
    ]
    assert options.title == "cube-8, cube-4"


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({}, "fusewise-runs/rope-quick-{id}"),
        ({"preset": "rope-cube"}, "fusewise-runs/rope-cube-{id}"),
        ({"cases": ["cube-4"]}, "fusewise-runs/cases-{id}"),
        ({"preset": "rope-cube", "out": Path("here")}, "here"),
    ],
)
def test_a_run_is_named_after_its_preset(asked, name):
    request = plan.Request(target="rope", **asked)
    found, again = (str(plan.run_directory(request)) for _ in range(2))
    assert re.fullmatch(name.replace("{id}", r"\d{8}T\d{6}-[0-9a-f]{8}"), found)
    assert (found == again) == ("out" in asked), "studies that start together have each their own"
