"""Our own providers after `fusewise build`."""

import pytest

from fusewise._shared import build
from fusewise.lab import targets
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
