import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusewise.lab import memory, targets, truth
from fusewise.lab.counting import counted
from fusewise.lab.errors import equal
from fusewise.lab.plugin import Run
from fusewise.lab.problem import Task
from fusewise.lab.providers.pytorch import Eager
from fusewise.lab.targets.rope import RopeProblem
from fusewise.lab.truth import Errors, Yardstick


def problem(case="cube-8", dtype="fp32", pass_="fwd"):
    return RopeProblem(Task("rope", case, dtype, pass_, "cpu", 0))


def right(p):
    return lambda *xs: p.eager(xs)


def test_problems_are_the_same_in_every_process_and_differ_by_seed():
    first, again = problem(), problem()
    other = RopeProblem(Task("rope", "cube-8", "fp32", "fwd", "cpu", 1))
    assert torch.equal(first.tensors[0], again.tensors[0])
    assert torch.equal(first.upstream[0], again.upstream[0])
    assert not torch.equal(first.tensors[0], other.tensors[0])


@pytest.mark.parametrize("case", ["cube-8", "phi-2-decode-b64", "glm-4-9b-decode-b1", "deepseek-v3-decode-b1"])
@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
def test_eager_forms_agree_with_float64(case, pass_):
    p = problem(case, "fp32", pass_)
    verdict = truth.check(p, Run(right(p)))
    assert verdict.reason == ""
    assert 0 < verdict.errors.max < 1e-6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda y: y * 1.001, "more than twice eager's"),
        (lambda y: y.clone().index_fill_(0, torch.tensor([1]), math.nan), "NaN where float64's result is not, in "),
        (lambda y: y[..., :2], "outputs have shapes"),
    ],
)
def test_wrong_results_are_told(change, words):
    p = problem()
    verdict = truth.check(p, Run(lambda *xs: tuple(change(y) for y in p.eager(xs))))
    assert words in verdict.reason


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
def test_results_have_poisoned_memory_each(pass_, monkeypatch):
    p, full, places = problem("phi-2-decode-b64", pass_=pass_), torch.full, {}

    def filled(shape, value, **options):
        made = full(shape, value, **options)
        assert made.isnan().all()
        places[made.data_ptr()] = made.shape
        return made

    monkeypatch.setattr(torch, "full", filled)
    truth.poison(p)
    gradients = [x.shape for x in p.tensors] if pass_ != "fwd" else []
    assert sorted(places.values()) == sorted([*(g.shape for g in p.upstream), *gradients])


class Scaled(torch.autograd.Function):
    """Returns x, with a gradient that is off by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None


def test_a_wrong_gradient_behind_a_right_output_is_told():
    p = problem(pass_="bwd")
    assert (
        "more than twice" in truth.check(p, Run(lambda *xs: tuple(Scaled.apply(y, 0.99) for y in p.eager(xs)))).reason
    )
    p = problem(pass_="fwd")
    assert truth.check(p, Run(lambda *xs: tuple(Scaled.apply(y, 0.99) for y in p.eager(xs)))).reason == ""


@pytest.mark.parametrize(
    ("found", "eager", "terms", "words", "silent"),
    [
        (Errors(1.0, 1.0), Errors(1e-7, 1e-7), 1, "error 1 (rms 1) is more than twice eager's 1e-07 (rms 1e-07)", " terms"),
        (Errors(1.0, 1.0), Errors(1e-7, 1e-7), 5, "band 1.79e-07 of sums of 5 terms", "counting as"),
        (Errors(1.0, 1.0), Errors(0.5, 1e-7), 1, f", eager's counting as 0.1 at most: {truth.ANOTHER}", " terms"),
        (Errors(1.0, 1.0), Errors(1e-7, 0.5), 1, f", eager's counting as 0.1 at most: {truth.ANOTHER}", " terms"),
        (Errors(1.0, 1.0), Errors(0.1, 0.1), 1, "eager's 0.1 (rms 0.1) plus", "counting as"),
        (Errors(0, 0, 60, 100), Errors(0, 0, 10, 100), 1, "60 of 100 integers differ from float64's, 10 of", "count as"),
        (Errors(0, 0, 60, 100), Errors(0, 0, 11, 100), 1, f"11 of eager's do, which count as 0.1 at most: {truth.ANOTHER};", "error"),
    ],
)  # fmt: skip
def test_a_reason_says_what_was_allowed(found, eager, terms, words, silent, monkeypatch):
    monkeypatch.setattr(truth, "expected", lambda *_: ([], Yardstick(eager, terms)))
    monkeypatch.setattr(truth, "errors", lambda *_: found)
    p = problem()
    reason = truth.check(p, Run(right(p))).reason
    assert words in reason and silent not in reason


def test_an_overwritten_input_must_be_declared():
    p = problem()

    def call(q):
        result = p.eager((q,))[0]
        return (q.copy_(result),)

    assert "overwrites" in truth.check(p, Run(call)).reason
    assert truth.check(p, Run(call, in_place=True)).reason == ""


@pytest.mark.parametrize("number", [0, 1])
def test_one_of_several_inputs_overwritten_is_told(number):
    p = problem("phi-2-decode-b64")

    def call(*xs):
        found = p.eager(xs)
        xs[number].view(-1)[-1] += 1
        return found

    assert "overwrites its inputs" in truth.check(p, Run(call)).reason


def test_memory_is_poisoned_before_every_call(monkeypatch):
    p, order, poison = problem(), [], truth.poison
    monkeypatch.setattr(truth, "poison", lambda problem: order.append("poison") or poison(problem))
    assert truth.check(p, Run(lambda *xs: order.append("call") or p.eager(xs))).reason == ""
    assert order == ["poison", "call"] * 2


@pytest.mark.parametrize(("by_eager", "most"), [(0, 0), (1, 5), (4, 14), (9, 27), (50, 29)])
def test_twice_as_many_integers_may_differ_and_some_by_chance(by_eager, most):
    """50 of 100 count as 10."""
    eager = Yardstick(Errors(0.0, 0.0, by_eager, 100))
    assert truth.within(Errors(0.0, 0.0, most, 100), eager, torch.float32)
    assert not truth.within(Errors(0.0, 0.0, most + 1, 100), eager, torch.float32)
    assert Errors(0.005, 0.001, most, 100).worst == max(0.005, most / 100)


def test_the_rule_has_a_band_for_one_rounding_and_no_more():
    eager = Yardstick(Errors(0.0, 0.0))
    half_ulp = torch.finfo(torch.bfloat16).eps / 2
    assert truth.within(Errors(half_ulp, half_ulp), eager, torch.bfloat16)
    assert not truth.within(Errors(1.01 * half_ulp, 0.0), eager, torch.bfloat16)
    assert not truth.within(Errors(0.0, 1.01 * half_ulp), eager, torch.bfloat16)
    eager = Yardstick(Errors(1e-3, 1e-3))
    assert truth.within(Errors(2e-3, 2e-3), eager, torch.float32)
    assert not truth.within(Errors(2.001e-3, 0.0), eager, torch.float32)
    assert not truth.within(Errors(0.0, 2.001e-3), eager, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "sums"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-24), (torch.float64, 2.0**-53)]
)
def test_the_band_is_wider_where_more_terms_are_added(dtype, sums):
    assert truth.band(dtype) == truth.band(dtype, 1) == torch.finfo(dtype).eps / 2
    assert truth.band(dtype, 1025) - truth.band(dtype) == pytest.approx(32 * sums)


@pytest.mark.parametrize(
    ("product", "right"),
    [
        (lambda x, w: (x.double() @ w.double()).float(), True),
        (lambda x, w: x @ w, True),
        (lambda x, w: one_after_another(x, w), True),
        (lambda x, w: x[:, 1:] @ w[1:], False),
        (lambda x, w: (x.bfloat16() @ w.bfloat16()).float(), False),
        (lambda x, w: rounded(x, 2**13) @ rounded(w, 2**13), False),
    ],
    ids=["rounded-once", "blocks", "one-after-another", "a-term-less", "bf16", "tf32"],
)
def test_another_order_of_summation_is_right_and_another_precision_is_not(product, right):
    torch.manual_seed(0)
    x, w = torch.randn(64, 4096), torch.randn(4096, 64)
    true = x.double() @ w.double()
    by_eager, counter = counted(lambda: x @ w)
    yardstick = Yardstick(truth.errors([by_eager], [true]), counter.terms)
    assert truth.within(truth.errors([product(x, w)], [true]), yardstick, torch.float32) == right


def one_after_another(x, w):
    total = torch.zeros(len(x), w.shape[1])
    for k in range(x.shape[1]):
        total += x[:, k, None] * w[k]
    return total


def rounded(x, ulps):
    """Reduce precision by this many units in the last place."""
    bits = x.view(torch.int32)
    return ((bits + ulps // 2) // ulps * ulps).view(torch.float32)


@pytest.mark.parametrize("far", [0.21, 0.5, math.inf])
def test_eager_code_that_is_far_off_excuses_nobody(far):
    assert not truth.within(Errors(far, far), Yardstick(Errors(far, far)), torch.bfloat16)
    assert truth.within(Errors(0.1, 0.1), Yardstick(Errors(far, far)), torch.bfloat16)


def test_errors_are_relative_and_never_hidden():
    true = torch.tensor([4.0, 0.0], dtype=torch.float64)
    assert truth.errors([torch.tensor([4.0, 1.0])], [true]).max == 0.25
    assert truth.errors([torch.tensor([4.0, math.inf])], [true]) == Errors(math.inf, math.inf)
    assert truth.errors([torch.zeros(0)], [torch.zeros(0, dtype=torch.float64)]) == Errors(0.0, 0.0)
    odd = torch.tensor([math.inf, math.nan, -math.inf, 4.0], dtype=torch.float64)
    assert truth.errors([odd.float() + torch.tensor([0, 0, 0, 1.0])], [odd]) == Errors(0.25, 0.25)
    for place in range(3):  # a wrong infinity, or a finite value where the truth is infinite
        assert truth.errors([odd.float().index_fill(0, torch.tensor(place), 7.0)], [odd]) == Errors(math.inf, math.inf)
    assert truth.errors([-odd.float()], [odd]) == Errors(math.inf, math.inf)
    for strange, words in (
        ([math.inf, 1.0, -math.inf, 4.0], "finite where float64's result is not, in 1 of 4"),
        ([math.inf, math.nan, math.nan, math.nan], "NaN where float64's result is not, in 2 of 4"),
        ([math.inf, math.nan, -math.inf, math.inf], "infinite where float64's result is not, in 1 of 4"),
        ([math.inf, math.nan, 3.0, 4.0], "finite where float64's result is not, in 1 of 4"),
        ([-math.inf, math.nan, -math.inf, 4.0], "infinities have another sign"),
    ):
        assert words in truth.errors([torch.tensor(strange)], [odd]).unlike
    huge = torch.tensor([1e308], dtype=torch.float64)
    assert truth.errors([-huge], [huge]).unlike == "the error overflows float64"
    for result, kind in ((odd, "real"), (odd + 0j, "complex")):
        other = odd + 0j if kind == "real" else odd
        assert truth.errors([result, result], [other, result]).unlike == f"a result is {kind}"
    zero = torch.zeros(2, dtype=torch.float64)
    assert truth.errors([torch.tensor([0.0, 0.5])], [zero]) == Errors(0.5, 0.5)


@pytest.mark.parametrize("unit", [1.0, 2.0**20])
def test_what_float64_leaves_of_zero_is_no_measure(unit):
    large, nothing = unit * torch.tensor([2.0, -1.0]), unit * torch.tensor([3e-17, -2e-17])
    truths = [large.double(), nothing.double()]
    found = truth.errors([large, unit * torch.tensor([2e-8, 0.0])], truths)
    assert 0 < found.rms < found.max < 1.1e-8
    assert truth.errors([large, unit * torch.tensor([0.5, 0.0])], truths).max == pytest.approx(0.25)
    small = unit * torch.tensor([2e-9, 1e-9])  # small, but not zero
    assert truth.errors([large, small * 2], [large.double(), small.double()]).max == pytest.approx(1.0)
    assert truth.errors([large, torch.tensor([0.0, 0.5])], [large.double(), 0 * small.double()]).max == 0.5  # zero
    counts = torch.tensor([1, 0])
    found = truth.errors([large * 1e15, counts * 2], [large.double() * 1e15, counts])
    assert (found.others, found.whole) == (1, 2)


def test_what_is_known_of_a_providers_arithmetic_is_told_with_its_error():
    p = targets.problem_for(Task("gelu", "gelu-5x5", "fp32", "fwd", "cpu", 0))
    wrong = truth.check(p, Run(lambda x: x * 0.9, arithmetic="it multiplies by 0.9"))
    assert wrong.reason.endswith("; it multiplies by 0.9")
    right = truth.check(p, Run(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), arithmetic="nothing"))
    assert right.reason == ""


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export, called by its importer
def test_tvms_products_are_sums_of_one_term_after_another_and_right():
    pytest.importorskip("tvm")
    from fusewise.lab.providers.relax import Tvm

    p = targets.problem_for(Task("geglu", "quick-decode", "fp32", "fwd", "cpu", 0))
    found = truth.check(p, Tvm().build(p))
    assert found.reason == ""
    assert found.errors.max > truth.allowed(found.eager.max, torch.float32)  # too large without the allowance for sums
    x, weight = (t.double() for t in p.tensors)
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for k in range(x.shape[1]):  # fused multiply-add: exact product, one rounding of the sum
        total = (total + x[:, k, None] * weight[:, k]).float().double()
    value, gate = total.float().chunk(2, dim=-1)
    by_hand = truth.errors([value * torch.nn.functional.silu(gate)], p.truth((x, weight)))
    assert by_hand.max == pytest.approx(found.errors.max, rel=0.02)
    assert by_hand.max > 2 * found.eager.max


def test_xlas_tanh_on_a_cpu_is_as_far_off_as_its_row_says(jax):
    x = 2 * torch.randn(2**17)
    exact = x.double().tanh()
    place = torch.nextafter(exact.abs().float(), torch.tensor(math.inf)).double() - exact.abs().float().double()

    def off(found):
        return ((found.double() - exact).abs() / place).max()

    theirs = torch.from_dlpack(jax.jit(jax.numpy.tanh)(jax.numpy.asarray(x.numpy())))
    assert 2 < off(theirs) < 4.5
    assert off(x.tanh()) < 1


LARGE = [
    ("gelu", "gelu-64", "fwd"),
    ("gelu", "gelu-64", "bwd"),
    ("geglu", "quick-diffusers", "fwd"),
    ("geglu", "quick-diffusers", "fwd+bwd"),
    ("gated_mlp", "mlp-swiglu", "bwd"),
]


def large(op, case, pass_, monkeypatch, most, piece):
    """A problem whose truth is computed in pieces if it has `most` bytes or more."""
    monkeypatch.setattr(truth, "MOST_BYTES", most)
    monkeypatch.setattr(truth, "PIECE_BYTES", piece)
    return targets.problem_for(Task(op, case, "fp32", pass_, "cpu", 0))


class Widest(TorchDispatchMode):
    """Records the size of the largest float64 tensor created."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
                self.most = max(self.most, x.numel())
        return made


@pytest.mark.parametrize(("op", "case", "pass_"), LARGE)
def test_some_rows_at_a_time_the_errors_are_those_of_the_whole(op, case, pass_, monkeypatch):
    p = large(op, case, pass_, monkeypatch, 2**40, 0)
    assert truth.pieces(p) == []
    whole = truth.check(p, Eager().build(p))
    rows = len(p.tensors[0])
    size = 8 * sum(x.numel() for x in (*p.upstream, *p.tensors[:1]))
    p = large(op, case, pass_, monkeypatch, 1000, size // 7)  # not a divisor of the number of rows
    ranges = [range(*some.indices(rows)) for some in truth.pieces(p)]
    assert len(ranges) > 3 and [row for some in ranges for row in some] == list(range(rows))
    with Widest() as seen:
        found = truth.check(p, Eager().build(p))
    for name in ("errors", "eager"):
        for norm in ("max", "rms"):
            expected = getattr(getattr(whole, name), norm)
            assert getattr(getattr(found, name), norm) == pytest.approx(expected, rel=1e-6) and expected > 0
    assert found.errors == found.eager and found.reason == ""
    shared = max((x.numel() for x in p.tensors[1:]), default=0)
    assert seen.most <= max(shared, 2 * p.upstream[0].numel() // 3)  # value and gate of a piece are one tensor


def test_what_rows_do_not_share_alone_is_computed_as_a_whole(monkeypatch):
    monkeypatch.setattr(truth, "MOST_BYTES", 0)
    assert truth.pieces(problem()) == []
    assert truth.check(problem(), Run(right(problem()))).reason == ""


@pytest.mark.parametrize("row", [0, 63])
def test_one_wrong_row_of_a_large_problem_is_told(row, monkeypatch):
    p = large("gelu", "gelu-64", "fwd", monkeypatch, 0, 2**12)

    def call(change):
        def called(x):
            y = torch.nn.functional.gelu(x, approximate="tanh")
            y[row] = change(y[row])
            return y

        return Run(called)

    assert len(truth.pieces(p)) == 8
    assert truth.check(p, call(lambda y: y)).reason == ""
    assert "more than twice eager's" in truth.check(p, call(lambda y: y * 1.001)).reason
    strange = truth.check(p, call(lambda y: y * math.nan))
    assert strange.errors == Errors(math.inf, math.inf)
    assert strange.reason.startswith("NaN where float64's result is not, in ")
    told = truth.check(p, Run(lambda x: x * math.nan, arithmetic="it has no infinities"))
    assert told.reason.endswith("elements looked at; it has no infinities")
    narrow = truth.check(p, Run(lambda x: x[:, 1:]))
    assert "outputs have shapes" in narrow.reason and 0 < narrow.eager.max < 1e-6


def test_a_wrong_gradient_of_what_all_rows_share_is_told(monkeypatch):
    p = large("geglu", "quick-diffusers", "bwd", monkeypatch, 0, 2**20)

    for place in range(3):
        run = Run(
            lambda *xs, at=place: p.eager(tuple(Scaled.apply(x, 1.001) if i == at else x for i, x in enumerate(xs)))
        )
        assert "more than twice eager's" in truth.check(p, run).reason


@pytest.mark.parametrize(
    ("call", "most"),
    [
        # The reference result, the input, and three that the formula needs: half of x and two of the sum's.
        (None, 5),
        # No more than the reference's own.
        (lambda x: torch.nn.functional.gelu(x, approximate="tanh"), 4),
    ],
)
def test_the_check_of_a_large_problem_takes_no_more_than_the_calls(call, most, monkeypatch):
    """In multiples of one tensor's bytes, in addition to the problem's own; docs/measuring.md relies on this."""
    p = large("gelu", "gelu-1024", "fwd", monkeypatch, 0, 2**16)
    size = p.tensors[0].numel() * 4
    verdict, grown = memory.growth(lambda: truth.check(p, Run(call) if call else Eager().build(p)), torch.device("cpu"))
    assert verdict.reason == ""
    assert most - 0.5 < grown.peak / size < most + 0.5 and grown.kept < 2**12


@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2**17,), (2**16, 3), (0,), (2, 0)])
def test_equality_takes_nan_for_itself_and_compares_shapes_and_the_last_element(shape):
    a = torch.randn(shape)
    assert equal(a, a.clone()) and not equal(a, a[None])
    if a.numel():
        a.view(-1)[0] = math.nan
        b = a.clone()
        assert equal(a, b)
        b.view(-1)[-1] = 7.0
        assert not equal(a, b)
