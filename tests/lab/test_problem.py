"""The incoming gradients of a backward that is checked and timed."""

import weakref

import torch

from fusewise.lab import worker
from fusewise.lab.plugin import Run
from fusewise.lab.problem import Task, handed_over
from fusewise.lab.targets import problem_for


class Doubled(torch.autograd.Function):
    """Overwrites the incoming gradient and records it in `seen`."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        ctx.seen.append((weakref.ref(dy), dy.clone()))
        dx = 2 * dy
        dy.zero_()
        return dx, None


def test_every_backward_has_a_gradient_that_nobody_else_holds():
    problem = problem_for(Task(op="gelu", case="gelu-256", dtype="fp32", pass_="bwd", device="cpu", seed=0))
    (wanted,) = problem.upstream
    seen = []
    work = worker.make_work(problem, Run(lambda x: Doubled.apply(x, seen)), 2)
    for i in range(4):
        (dx,) = work.step(work.begin(i))
        assert torch.equal(dx, 2 * wanted)
    assert len(seen) == 4
    for gone, value in seen:
        assert gone() is None
        assert torch.equal(value, wanted)


def test_outputs_may_depend_on_each_other():
    """An output may also be repeated, an unchanged input, a leaf, one with a hook, or without gradient."""
    x, leaf = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    gs = [torch.randn(3, 4) for _ in range(6)]

    def outputs():
        y = x.sin()
        hooked = 2 * y
        hooked.register_hook(lambda g: 3 * g)
        return y, y.exp(), y, leaf, leaf * y, hooked, y.detach()

    ys = outputs()
    given = handed_over(ys, [*gs, None])
    assert given[6] is None
    found = torch.autograd.grad(ys[:6], (x, leaf), given[:6])
    expected = torch.autograd.grad(outputs()[:6], (x, leaf), gs)
    torch.testing.assert_close(found, expected)


def test_a_gradient_comes_in_as_it_lies():
    """It has the strides and dtype of the output."""
    x = torch.randn(3, 4, requires_grad=True)
    seen = []
    (stand_in,) = handed_over([y := Doubled.apply(x.T, seen)], [torch.randn(3, 4, dtype=torch.float64).T])
    torch.autograd.grad(y, x, stand_in)
    ((_, value),) = seen
    assert (value.stride(), value.dtype) == (y.stride(), torch.float32)
