"""One pass over a problem, as the study times it, for whoever looks at what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..plugin import Run
from ..problem import Problem
from ..worker import make_work


def steps(problem: Problem, run: Run) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """`before()` and `step(state)`: what is timed is `step` alone, what it needs is what `before` returned."""
    work = make_work(problem, run, 1)
    return lambda: work.begin(0), work.step


def once(problem: Problem, run: Run) -> Any:
    """The whole pass, a forward before a backward included."""
    before, step = steps(problem, run)
    return step(before())


def runner(problem: Problem, run: Run) -> Callable[[Callable[..., Any]], Callable[[], Any]]:
    """For `graphs` and `inductor`: a compiled function -> the pass with it in the place of the run's own."""

    def with_function(compiled: Callable[..., Any]) -> Callable[[], Any]:
        same_but = Run(compiled, run.enter, run.leave, own=run.own, restore=run.restore)
        return lambda: once(problem, same_but)

    return with_function


def synchronize(problem: Problem) -> None:
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)
