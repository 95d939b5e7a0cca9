"""Shared reference results: read back exactly, written by one process only; nothing is stored that should not be."""

import pytest
import torch
from test_study import run

from fusewise.lab import targets, truth, truths
from fusewise.lab.plugin import Run
from fusewise.lab.problem import Task


def problem(pass_="fwd", case="cube-4"):
    return targets.problem_for(Task("rope", case, "fp32", pass_, "cpu", 0))


def eager(p):
    program = p.program()
    return Run(program.function, program.enter, program.leave)


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
def test_what_was_kept_is_what_was_computed_and_is_not_computed_again(tmp_path, monkeypatch, pass_):
    p = problem(pass_)
    computed = truth.expected(p)
    first = truth.check(p, eager(p), truths.Truths(tmp_path, keeps=True))
    monkeypatch.setattr(p, "truth", lambda _: pytest.fail("computed again"))
    found, errors = truth.expected(p, truths.Truths(tmp_path))
    assert all(map(torch.equal, found, computed[0])) and errors == computed[1]
    assert truth.check(p, eager(p), truths.Truths(tmp_path)) == first
    found[0].zero_()  # a private copy
    assert not torch.equal(truth.expected(p, truths.Truths(tmp_path))[0][0], found[0])


def test_another_task_another_seed_or_pass_has_its_own(tmp_path):
    keeper = truths.Truths(tmp_path, keeps=True)
    truth.expected(problem(), keeper)
    assert keeper.found(problem().task) is not None
    for other in (problem("bwd").task, problem(case="cube-6").task, Task("rope", "cube-4", "fp32", "fwd", "cpu", 1)):
        assert keeper.found(other) is None


def test_who_may_not_keep_does_not_and_what_is_odd_is_not_kept(tmp_path, monkeypatch):
    p = problem()
    truth.expected(p, truths.Truths(tmp_path))
    keeper = truths.Truths(tmp_path, keeps=True)
    right = [torch.ones(4, dtype=torch.float64)]
    keeper.keep(p.task, right, (float("inf"), 0.0))
    keeper.keep(p.task, [*right, torch.ones(4)], (0.0, 0.0))
    monkeypatch.setattr(truths, "MOST_BYTES", 8)
    keeper.keep(p.task, right, (0.0, 0.0))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    empty = torch.empty(0, 3, dtype=torch.float64)
    keeper.keep(p.task, [*right, empty], (0.25, 0.125))
    tensors, errors = keeper.found(p.task)
    assert [x.shape for x in tensors] == [(4,), (0, 3)] and errors == (0.25, 0.125)


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path):
    keeper = truths.Truths(tmp_path / "taken", keeps=True)
    keeper.folder.mkdir()
    keeper._place(problem().task).mkdir()
    (keeper._place(problem().task) / "something").touch()  # blocks the rename
    expected = truth.expected(problem(), keeper)[0]
    assert all(map(torch.equal, expected, truth.expected(problem())[0]))
    assert len(list(keeper.folder.iterdir())) == 1


def test_a_study_judges_as_before_and_leaves_nothing(tmp_path):
    made, _ = run(tmp_path / "one", ["lab_fakes:Wrong", "eager", "lab_fakes:Right", "lab_fakes:Wrong"])
    status = {row.provider: row.status for row in made.rows}
    assert status == {"wrong": "wrong", "eager": "ok", "right": "ok"}
    assert len({row.error_eager for row in made.rows}) == 1
