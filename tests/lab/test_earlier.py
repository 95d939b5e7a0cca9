"""Results of earlier inputs, in a provider's outputs and gradients."""

import math

import pytest
import torch
import user_problems

from fusewise.lab import earlier, targets, truth
from fusewise.lab.plugin import Run
from fusewise.lab.problem import Task


def problem(op, case, pass_="fwd"):
    return targets.problem_for(Task(op, case, "fp32", pass_, "cpu", 0))


def remembering(p, of):
    """Eager code whose results are kept; `of` makes a key of the first argument."""
    results = {}

    def call(*xs):
        if of(xs[0]) not in results:
            results[of(xs[0])] = tuple(y.detach() for y in p.eager(xs))
        return results[of(xs[0])]

    return call


@pytest.mark.parametrize("of", [torch.Tensor.data_ptr, id, lambda x: x.shape, lambda x: x.flatten()[0].item()])
@pytest.mark.parametrize(("op", "case"), [("rope", "cube-8"), ("gelu", "gelu-5x5"), ("geglu", "quick-square")])
def test_results_of_earlier_inputs_are_wrong(op, case, of):
    p = problem(op, case)
    verdict = truth.check(p, Run(remembering(p, of)))
    assert "that of earlier inputs: it stays the same when the inputs change" in verdict.reason
    assert verdict.errors.max < 1e-6  # for the first inputs it was right


@pytest.mark.parametrize("elements", [2**16, 2**15, 2**14 - 1, 1000, 3])
def test_results_of_earlier_inputs_are_wrong_in_a_sample_too(elements, monkeypatch):
    monkeypatch.setattr(earlier, "MANY", elements)
    p = problem("gelu", "gelu-256")
    assert "that of earlier inputs" in truth.check(p, Run(remembering(p, id))).reason
    assert truth.check(p, user_problems.eager(p)).reason == ""


@pytest.mark.parametrize("elements", [2**14, 2**12, 2**12 + 1, 1000])
def test_a_sample_has_elements_of_every_column(elements, monkeypatch):
    monkeypatch.setattr(earlier, "MANY", elements)
    columns = earlier.sample(torch.arange(64).repeat(1024)).unique()
    assert len(columns) == 64


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("loss", ["fp32[64,64]", "fp32[64,64]"]),  # changes by a few percent
        ("every_second", ["fp32[64,64]"]),
        ("first_column", ["fp32[64,64]"]),
    ],
)
def test_results_of_earlier_inputs_are_wrong_however_little_changes(name, texts):
    p = user_problems.problem(name, *texts)
    assert "that of earlier inputs" in truth.check(p, Run(remembering(p, id))).reason
    assert truth.check(p, user_problems.eager(p)).reason == ""


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        ([0] * 9, [1] * 9, True),
        ([0] * 8, [1] * 8, False),  # by chance
        ([0] * 100, [1] * 10 + [0] * 90, False),
        ([0] * 100, [1] * 11 + [0] * 89, True),
        ([1.0] * 100, [1.0] * 99 + [1.02], True),  # of floats, one is enough
        ([1.0] * 100, [1.0] * 99 + [1.005], False),
    ],
)
def test_by_how_much_results_must_change_to_tell(before, after, differs):
    others = torch.arange(3), torch.ones(3)
    then, now = ([*others, torch.tensor(x)] for x in (before, after))
    assert earlier.differs(then, now, 2, 0.01) == differs
    assert not earlier.differs(then, now, 0, 0.01) and not earlier.differs(then, now, 1, 0.01)


def test_integers_of_earlier_inputs_are_wrong():
    p = user_problems.problem("arg_largest", "fp32[64,64]")
    assert "that of earlier inputs" in truth.check(p, Run(remembering(p, id))).reason
    assert truth.check(p, user_problems.eager(p)).reason == ""


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (7,), (4, 2), (3, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_other_values_are_of_the_same_range_and_order_and_only_the_first_stays(shape, dtype):
    x = torch.arange(math.prod(shape)).to(dtype).view(shape)
    y = earlier.other(x)
    assert (x != y).flatten().tolist() == [False, *[True] * (x.numel() - 1)]
    assert torch.equal(y.flatten().sort().values, y.flatten()) and torch.isin(y, x).all()
    assert torch.equal(x, torch.arange(math.prod(shape)).to(dtype).view(shape))
    assert torch.equal(earlier.alter_floats(x.clone()), y if dtype.is_floating_point else x)  # indices fit together


@pytest.mark.parametrize(("value", "other"), [(4.0, 3.0), (0.0, 0.75), (math.inf, math.inf), (4, 4)])
@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (5,), (3, 0)])
def test_other_values_of_a_constant_are_smaller_or_not_zero_and_integers_the_same(value, other, shape):
    assert torch.equal(earlier.other(torch.full(shape, value)), torch.full(shape, other))


class RemembersGradient(torch.autograd.Function):
    """Eager code whose gradients are those of the first backward, as where a captured graph reads the gradient that was
    there when it was captured."""

    @staticmethod
    def forward(ctx, p, kept, *xs):
        ctx.rest = p, kept
        ctx.save_for_backward(*xs)
        ys = p.eager(xs)
        return ys if len(ys) > 1 else ys[0]

    @staticmethod
    def backward(ctx, *dys):
        p, kept = ctx.rest
        if not kept:
            xs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in ctx.saved_tensors)
            with torch.enable_grad():
                kept += torch.autograd.grad(p.eager(xs), xs, dys)
        return None, None, *(g.clone() for g in kept)


@pytest.mark.parametrize("pass_", ["bwd", "fwd+bwd"])
@pytest.mark.parametrize(
    ("op", "case", "which"),
    [
        ("rope", "cube-8", "the gradient"),
        ("gelu", "gelu-5x5", "the gradient"),
        ("geglu", "quick-square", "gradient 1 of 3"),
    ],
)
def test_gradients_of_an_earlier_backward_are_wrong(op, case, which, pass_):
    p = problem(op, case, pass_)
    kept = []

    def call(*xs):
        ys = RemembersGradient.apply(p, kept, *xs)
        return ys if isinstance(ys, tuple) else (ys,)

    verdict = truth.check(p, Run(call))
    change = "the inputs and the outputs' gradients change"
    assert verdict.reason == f"{which} is that of earlier inputs: it stays the same when {change}"
    assert verdict.errors.max < 1e-4  # for the first inputs they were right


@pytest.mark.parametrize("pass_", ["bwd", "fwd+bwd"])
def test_a_gradient_that_is_always_the_same_is_right(pass_):
    """Eager code's stays the same, too."""
    p = problem("gelu", "gelu-5x5", pass_)
    p.eager = p.truth = lambda xs: (xs[0].detach() * 2 + xs[0].sum() * 0,)
    assert truth.check(p, Run(lambda *xs: p.eager(xs))).reason == ""


def test_a_gradient_of_which_rounding_alone_is_left_may_be_zero():
    """As a compiler may find out; eager code's changes, but is rounding error."""
    p = user_problems.problem("with_a_bias_that_cancels", "fp32[64,64]", "fp32[64,1]", pass_="bwd")
    assert 0 < truth.results(p, False)[1].abs().max() < 1e-5
    assert truth.check(p, Run(lambda x, bias: p.eager((x, bias.detach())))).reason == ""


def test_a_result_of_earlier_inputs_is_found_behind_state_that_calls_write():
    """The state is reset before the inputs change; else the result would change with it."""
    p = problem("gelu", "gelu-5x5")
    calls, kept, formula, wide = [0], [], p.eager, p.truth
    p.begin_anew = lambda: calls.__setitem__(0, 0)

    def counted_by(function):
        def call(xs):
            calls[0] += 1
            return tuple(calls[0] * y for y in function(xs))

        return call

    def first(xs):
        kept[:] = kept or formula(xs)
        return kept

    p.eager, p.truth = counted_by(formula), counted_by(wide)
    assert "that of earlier inputs" in truth.check(p, Run(lambda *xs: counted_by(first)(xs))).reason


def test_one_of_several_results_that_is_of_earlier_inputs_is_named():
    p, kept = problem("rope", "phi-2-decode-b64"), []

    def call(*xs):
        q, k = p.eager(xs)
        kept.append(k.clone())
        return q, kept[0]

    assert truth.check(p, Run(call)).reason.startswith("output 2 of 2 is that of earlier inputs")


@pytest.mark.parametrize("in_place", [False, True])
def test_results_in_one_buffer_are_right(in_place):
    """As of CUDA graphs, which overwrite the results of the last call; and those of kernels that work in place."""
    p = problem("rope", "cube-8")
    buffers = [torch.empty_like(x) for x in p.tensors]

    def call(*xs):
        return tuple(b.copy_(y) for b, y in zip(xs if in_place else buffers, p.eager(xs), strict=True))

    assert truth.check(p, Run(call, in_place=in_place)).reason == ""


def test_weights_in_another_order_change_with_their_originals():
    p = problem("geglu", "quick-square")
    own = Run(
        lambda x, w, *rest: p.eager((x, w.t().contiguous(), *rest)),
        own=lambda x, w, *rest: (x, w.t().contiguous(), *rest),
    )
    assert truth.check(p, own).reason == ""
    stale = remembering(p, lambda x: x.shape)
    run = Run(lambda x, w, *rest: stale(x, w.t().contiguous(), *rest), own=own.own)
    assert "earlier inputs" in truth.check(p, run).reason
