"""Writes of a user's module to its buffers and parameters: every provider must perform them, and none may profit from
the writes of others.
"""

from dataclasses import replace

import pytest
import torch
from user_problems import FILE, WRITERS, eager, problem

from fusewise.lab import truth
from fusewise.lab.problem import Task
from fusewise.lab.providers.pytorch import Eager
from fusewise.lab.targets.user import User
from fusewise.lab.worker import Server

WRITES = [
    ("Counting", "fp32[8,4]", "buffer mean"),
    ("Setting", "fp32[8,4]", "buffer mean"),
    ("Scaling", "fp32[8,4]", "buffer scale"),
    ("normalised", "fp32[8,4]", "buffer running_mean"),
    ("LazilyNormalised", "fp32[8,4]", "buffer norm.running_mean"),
    ("spectral", "fp32[8,4]", "buffer weight_u"),
    ("Clamping", "fp32[8,4]", "parameter frozen"),
    ("Clamping", "bf16[8,4]", "parameter frozen"),
    ("Looking", "fp32[3,4]", "parameter table.weight"),
]


@pytest.mark.parametrize("pass_", ["fwd", "fwd+bwd"])
def test_a_buffer_among_the_outputs_has_the_value_of_its_own_call(pass_):
    p = problem(f"{WRITERS}:Telling", "fp32[8,4]", pass_=pass_)
    verdict = truth.check(p, eager(p))
    assert verdict.reason == ""
    assert verdict.errors.worst < 1e-6 and verdict.eager.others == 0


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize(("name", "text", "place"), WRITES)
def test_a_compiler_that_leaves_out_a_write_is_wrong(name, text, place, pass_):
    """No output shows it, and omitting it would be faster."""
    p = problem(f"{WRITERS}:{name}", text, dtype=text.split("[")[0], pass_=pass_)
    assert truth.check(p, eager(p)).reason == ""
    own = {**dict(p.function.named_parameters()), **dict(p.function.named_buffers())}

    def call(*xs):
        """Call it on copies, which take the writes; gradients pass through."""
        return torch.func.functional_call(p.function, {n: x.clone() for n, x in own.items()}, xs)

    without = replace(eager(p), call=call)
    assert truth.check(p, without).reason == f"it does not write to the {place}"
    assert truth.check(p, eager(p)).reason == ""


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize(("name", "text", "place"), WRITES)
def test_a_provider_that_writes_something_else_is_wrong(name, text, place, pass_):
    p = problem(f"{WRITERS}:{name}", text, dtype=text.split("[")[0], pass_=pass_)

    def call(*xs):
        found = p.function(*xs)
        state = {**dict(p.function.named_parameters()), **dict(p.function.named_buffers())}
        state[place.split()[1]].data.mul_(1.1)
        return found

    assert "more than twice eager's" in truth.check(p, replace(eager(p), call=call)).reason


@pytest.mark.parametrize("pass_", ["fwd", "fwd+bwd"])
def test_a_write_that_is_that_of_earlier_inputs_is_wrong(pass_):
    p, kept = problem(f"{WRITERS}:Counting", "fp32[8,4]", pass_=pass_), []

    def call(x):
        found = p.function(x)
        kept.append(p.function.mean.clone())
        p.function.mean.copy_(kept[0])
        return found

    reason = truth.check(p, replace(eager(p), call=call)).reason
    assert reason == "the buffer mean is that of earlier inputs: it stays the same when the inputs change"


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize(("name", "place"), [("Clamping", "parameter linear.bias"), ("normalised", "parameter bias")])
def test_a_write_that_eager_code_does_not_make_is_wrong(name, place, pass_):
    p = problem(f"{WRITERS}:{name}", "fp32[8,4]", pass_=pass_)

    def call(*xs):
        found = p.function(*xs).clone()
        dict(p.function.named_parameters())[place.split()[1]].data[-1] += 1
        return found

    reason = truth.check(p, replace(eager(p), call=call)).reason
    assert reason == f"it overwrites the {place}, which eager code leaves as it is"


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
def test_results_are_held_against_those_of_the_same_buffers(pass_):
    """Regardless of how often eager code, the truth and the provider were called before."""
    p = problem(f"{WRITERS}:Settling", "fp32[8,4]", pass_=pass_)
    for _ in range(2):
        verdict = truth.check(p, eager(p))
        assert verdict.reason == ""
        assert verdict.errors == verdict.eager
        assert verdict.errors.max < 1e-6


def test_an_exporter_takes_the_buffers_of_the_first_call():
    """The results are checked at the same buffers."""
    target = User(f"{WRITERS}:Settling", ("fp32[8,4]",))
    task = Task(target.name, target.case().name, "fp32", "fwd", "cpu", 0, target.detail(target.case()))

    taken = []

    class Exporter(Eager):
        def build(self, problem):
            taken.append(problem.function.scale.item())
            return super().build(problem)

    Server(Exporter(), "cpu", 0).answer({"do": "prepare", "task": task.to_json()})
    assert taken == [pytest.approx(1.0 - 1e-4, rel=1e-7)]


@pytest.mark.parametrize("name", ["Dropping", "Growing"])
def test_a_buffer_may_be_taken_away_or_grow(name):
    p = problem(f"{WRITERS}:{name}", "fp32[8,4]")
    assert truth.check(p, eager(p)).reason == ""


@pytest.mark.parametrize(("name", "place"), [("Clamping", "linear.weight"), ("Looking", "table.weight")])
def test_results_are_held_against_those_of_the_parameters_before(name, place):
    """Regardless of how often eager code, the truth and the provider were called before."""
    p = problem(f"{WRITERS}:{name}", "fp32[3,4]", pass_="fwd+bwd")
    before = dict(p.function.named_parameters())[place].detach().clone()
    for _ in range(2):
        assert truth.check(p, eager(p)).errors.max < 1e-6
        p.begin_anew()
        for function in (p.function, p.wide):
            assert torch.equal(dict(function.named_parameters())[place].float(), p.state[place])
    assert not torch.equal(before, p.state[place])


def test_a_write_to_a_parameter_is_bytes_that_move():
    p = problem(f"{WRITERS}:Clamping", "fp32[8,4]")
    read, written = 8 * 4 + 4 * 4 + 4, 8 * 4 + 4 * 4 + 4  # x, weight and bias; result, weight, frozen part
    assert p.bytes_min() == 4 * (read + written)


@pytest.mark.parametrize(
    ("name", "pass_", "one"),
    [
        ("Scaling", "bwd", True),
        ("Clamping", "bwd", True),
        ("Clamping", "fwd+bwd", False),  # a backward runs before the next forward
        ("Clamping", "fwd", False),
        ("normalised", "bwd", False),  # writes, but not to what its backward reads
        ("Net", "bwd", False),
    ],
)
def test_a_call_whose_backward_reads_what_the_next_one_writes_is_timed_alone(name, pass_, one):
    """After several forwards in a row, autograd would refuse the backward of all but the last."""
    target = User(f"{FILE}:Net", ("fp32[8,6]",)) if name == "Net" else User(f"{WRITERS}:{name}", ("fp32[8,4]",))
    task = Task(target.name, target.case().name, "fp32", pass_, "cpu", 0, target.detail(target.case()))
    server = Server(Eager(), "cpu", 0)
    reply = server.answer({"do": "prepare", "task": task.to_json()})
    assert reply["status"] == "ok", reply["reason"]
    assert (reply["calls_per_sample"] == 1) == one
    assert server.answer({"do": "warm"})["status"] == "ok"
    assert server.answer({"do": "round", "samples": 3})["status"] == "ok"
