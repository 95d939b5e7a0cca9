"""Runs one pass over a problem exactly as the study times it, for tools that observe it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..plugin import Run
from ..problem import Problem
from ..worker import make_work


def steps(problem: Problem, run: Run) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """`before()` and `step(state)`: only `step` is timed; `before` returns its state."""
    work = make_work(problem, run, 1)
    return lambda: work.begin(0), work.step


def once(problem: Problem, run: Run) -> Any:
    """The whole pass, including the forward before a backward."""
    before, step = steps(problem, run)
    return step(before())


def runner(problem: Problem, run: Run) -> Callable[[Callable[..., Any]], Callable[[], Any]]:
    """For `graphs` and `inductor`: maps a compiled function to the pass that calls it instead of the run's own."""

    def with_function(compiled: Callable[..., Any]) -> Callable[[], Any]:
        same_but = Run(compiled, run.enter, run.leave, own=run.own, restore=run.restore)
        return lambda: once(problem, same_but)

    return with_function


def synchronize(problem: Problem) -> None:
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)
