"""Our own providers after `fusewise build`."""

import pytest

from fusewise._shared import build
from fusewise.lab import targets, truth
from fusewise.lab.plugin import Unsupported
from fusewise.lab.problem import Task
from fusewise.lab.providers import ours

CALLS = [
    (ours.Cpu, Task("rope", "llama-3-8b-decode-b64", "bf16", "fwd", "cpu", 0), "rope-host"),
    (ours.CpuInPlace, Task("rope", "llama-3-8b-decode-b64", "bf16", "fwd", "cpu", 0), "rope-host"),
    (ours.GatedCpu, Task("geglu", "quick-decode", "bf16", "fwd", "cpu", 0), "gated-host"),
]


@pytest.mark.parametrize(("provider", "task", "name"), CALLS, ids=lambda x: getattr(x, "__name__", None))
def test_repeated_calls_on_a_cpu_go_to_the_kernel_in_cpp(provider, task, name, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(build, "prepared", lambda *recipe: asked.append(recipe[0]))
    problem = targets.problem_for(task)
    provider().build(problem)
    assert asked == [name]
    monkeypatch.setattr(build, "prepared", lambda *_: (_ for _ in ()).throw(build.BuildError("no compiler")))
    provider().build(problem)  # if it cannot be built, they are measured without it
    assert capsys.readouterr().out == "calls go through Python: no compiler\n"


def test_the_forward_of_training_writes_and_keeps_the_pre_activations():
    """On a CPU the kernel is not run, so the call is the CPU's."""
    problem = targets.problem_for(Task("geglu", "quick-decode", "bf16", "fwd", "cpu", 0))
    rows, hidden = problem.output_shapes()[0]
    run = type("OnCpu", (ours.GatedCudaTraining,), {"impl": "cpu"})().build(problem)
    assert truth.check(problem, run).reason == ""
    y = run.call(*run.enter(*run.own(*problem.leaves(False))))
    assert (rows, 2 * hidden) in [x.shape for x in y.grad_fn.saved_tensors if x is not None]
    size = 2 * rows * hidden
    assert problem.memory(run.form)["predicted_peak_bytes"] == 3 * size
    [kernel] = ours.GatedCudaTraining().traffic(problem, "sm_90")
    assert kernel.written == 3 * size
    backward = targets.problem_for(Task("geglu", "quick-decode", "bf16", "fwd+bwd", "cpu", 0))
    with pytest.raises(Unsupported, match="see fusewise-cuda"):
        ours.GatedCudaTraining().build(backward)
