import dataclasses
import math
import random
from statistics import median

import pytest
from builders import measurement, row
from hypothesis import given
from hypothesis import strategies as st

from fusewise.lab import analysis

times = st.floats(min_value=0.5, max_value=1e6, allow_nan=False)


def noisy(generator, level, spread, rounds=12, samples=5):
    """A simulated device: the machine drifts, and a call takes `level` ± `spread`."""
    return [
        [level * (1 + 0.05 * i / rounds) * math.exp(generator.gauss(0, spread)) for _ in range(samples)]
        for i in range(rounds)
    ]


def compare(generator, factor, spread):
    """The verdict on a provider `factor` times as slow as its rival, measured together with an A/A pair."""
    measurements = [
        measurement("fusewise-cpu", noisy(generator, 100 * factor, spread)),
        measurement("fusewise-cpu#2", noisy(generator, 100 * factor, spread)),
        measurement("torch.compile", noisy(generator, 100, spread)),
    ]
    rows, _ = analysis.group_rows([row("fusewise-cpu"), row("torch.compile")], measurements)
    return rows[0].verdict_vs_best_other


@pytest.mark.parametrize("spread", [0.001, 0.01, 0.05])
def test_identical_providers_come_out_same(spread):
    generator = random.Random(1)
    verdicts = [compare(generator, 1.0, spread) for _ in range(100)]
    assert verdicts.count("same") >= 95, verdicts
    assert verdicts.count("faster") + verdicts.count("slower") <= 2


@pytest.mark.parametrize(("factor", "word"), [(0.8, "faster"), (1.25, "slower"), (0.95, "faster"), (1.05, "slower")])
def test_real_differences_are_told(factor, word):
    generator = random.Random(2)
    verdicts = [compare(generator, factor, 0.005) for _ in range(50)]
    assert verdicts.count(word) >= 48


@pytest.mark.parametrize(
    ("value", "low", "high", "noise", "word"),
    [
        (1.05, 1.02, 1.08, 0.01, "slower"),
        (1.05, 1.005, 1.08, 0.01, "ambiguous"),  # the interval overlaps the noise band, wherever its centre is
        (0.95, 0.92, 0.98, 0.01, "faster"),
        (0.95, 0.92, 0.995, 0.01, "ambiguous"),
        (1.012, 1.011, 1.013, 0.01, "slower"),
        (1.012, 1.011, 1.013, 0.012, "same"),  # only an interval entirely beyond the noise counts
        (1.0, 0.981, 1.019, 0.001, "same"),  # 2 % count as the same even on the quietest machine
        (1.0, 0.979, 1.019, 0.001, "ambiguous"),
        (1.0, 0.92, 1.08, 0.03, "same"),  # three times the noise
        (1.0, 0.905, 1.08, 0.03, "ambiguous"),  # and no more
        (1.0, 0.89, 1.0, 0.2, "ambiguous"),  # but 10 % never count as the same
        (0.6, 0.5, 0.75, 0.25, "ambiguous"),  # an interval that ends where the noise does is not beyond it
        (1.4, 1.25, 1.5, 0.25, "ambiguous"),
        (1.5, 1.4, 1.6, None, "ambiguous"),
    ],
)
def test_the_word_for_an_interval(value, low, high, noise, word):
    assert analysis.verdict(analysis.Ratio(value, low, high), noise) == word


def test_a_difference_within_the_noise_is_never_told():
    generator = random.Random(3)
    verdicts = {compare(generator, 1.01, 0.1) for _ in range(50)}
    assert verdicts <= {"same", "ambiguous"}


def test_without_an_aa_pair_nothing_is_decided():
    rows, comparisons = analysis.group_rows(
        [row("eager"), row("torch.compile")],
        [measurement("eager", [[2.0]] * 5), measurement("torch.compile", [[1.0]] * 5)],
    )
    assert [r.verdict_vs_best_other for r in rows] == ["ambiguous", "ambiguous"]
    assert comparisons[0]["ratio"] == 2.0
    assert comparisons[0]["noise"] is None


@given(st.lists(times, min_size=3, max_size=20), st.lists(times, min_size=3, max_size=20))
def test_ratio_lies_in_its_interval_and_inverts(a, b):
    rounds_a, rounds_b = dict(enumerate(a)), dict(enumerate(b))
    there = analysis.paired_ratio(rounds_a, rounds_b)
    assert there.low <= there.value <= there.high or math.isclose(there.low, there.high)
    shared = range(min(len(a), len(b)))
    assert there.value == pytest.approx(median(a[i] / b[i] for i in shared))
    same = analysis.paired_ratio(rounds_a, rounds_a)
    assert (same.low, same.value, same.high) == (1, 1, 1)


@given(st.lists(times, min_size=2, max_size=30))
def test_spread_measures_are_scale_free(values):
    doubled = [2 * v for v in values]
    assert analysis.iqr(doubled) == pytest.approx(2 * analysis.iqr(values), abs=1e-6)
    assert analysis.relative_standard_error(doubled) == pytest.approx(
        analysis.relative_standard_error(values), abs=1e-9
    )


def test_the_standard_error_is_that_of_the_mean():
    assert analysis.relative_standard_error([1.0, 2.0, 3.0, 4.0]) == pytest.approx(math.sqrt(5 / 3) / 2 / 2.5)
    assert analysis.relative_standard_error([1.0, 3.0]) == pytest.approx(0.5)
    assert analysis.iqr([1.0, 3.0]) == 1.0


def test_the_interval_holds_95_percent_of_a_bootstraps_medians():
    """Of 1001 different ratios, a bootstrap's median is the k-th or a smaller one if 501 or more of 1001 draws are."""
    count = 1001
    ways = [(n, math.comb(count, n)) for n in range(count // 2 + 1, count + 1)]

    def below(k):
        p = k / count
        return sum(of * p**n * (1 - p) ** (count - n) for n, of in ways)

    ones = dict.fromkeys(range(1, count + 1), 1.0)
    found, mirrored = (analysis.paired_ratio({k: abs(end - k) for k in ones}, ones) for end in (0, count + 1))
    low, high = (next(k for k in range(400, 600) if below(k) >= share) for share in (0.025, 0.975))
    assert (low, high) == (470, 532)
    assert found.value == 501 and abs(found.low - low) <= 2 and abs(found.high - high) <= 2
    assert (mirrored.low, mirrored.high) == (pytest.approx(1002 - found.high), pytest.approx(1002 - found.low))


def test_too_few_rounds_give_no_ratio():
    assert analysis.paired_ratio({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0}) is None
    assert analysis.relative_standard_error([1.0]) == math.inf
    assert analysis.iqr([1.0]) == 0.0


def test_pairing_uses_only_shared_rounds():
    ratio = analysis.paired_ratio({0: 2.0, 1: 2.0, 2: 2.0, 9: 500.0}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 7.0})
    assert ratio.value == 2.0


def test_our_rows_are_judged_by_others_and_others_by_all():
    times = {"floor-copy": 1.0, "fusewise-cpu": 2.0, "fusewise-reference": 3.0, "eager": 5.0, "torch.compile": 4.0}
    assert analysis.best_other("fusewise-cpu", times) == "torch.compile"
    assert analysis.best_other("eager", times) == "fusewise-cpu"
    assert analysis.best_other("fusewise-cpu", {"fusewise-cpu": 2.0, "floor-copy": 1.0}) is None


def test_the_binding_limit_is_the_slower_floor():
    assert analysis.limits({"floor-copy": 10.0, "floor-launch": 2.0, "eager": 1.0}) == ("copy", 10.0)
    assert analysis.limits({"floor-copy": 1.0, "floor-launch": 2.0}) == ("launch", 2.0)
    assert analysis.limits({"eager": 1.0}) is None
    assert analysis.limits({"eager": 1.0}, moves=False) is None
    assert analysis.limits({"floor-launch": 2.0}) is None
    assert analysis.limits({"floor-launch": 2.0}, moves=False) == ("launch", 2.0)
    assert analysis.limits({"floor-copy": 10.0, "floor-triton-launch": 12.0}) == ("copy", 10.0)


def test_what_binds_products_is_not_told_without_their_time():
    floors = {"floor-copy": 10.0, "floor-launch": 2.0}
    assert analysis.limits(floors, intensity=100.0) is None
    assert analysis.limits(floors, {"matmul": 30.0}, intensity=100.0) == ("matmul", 30.0)
    assert analysis.limits(floors, {"matmul": 3.0}, intensity=100.0) == ("copy", 10.0)
    product = {"bytes_min": 3 * 512 * 512 * 4, "flops_min": 2 * 512**3}
    times = [measurement("floor-copy", [[10.0]] * 4), measurement("eager", [[500.0]] * 4)]
    rows, _ = analysis.group_rows([row("floor-copy", error=None, **product), row("eager", **product)], times)
    assert [r.limit for r in rows] == [None, None]


@pytest.mark.parametrize(
    ("eager", "others", "lacking"),
    [
        ({"flops_min": 9_000}, [], True),
        ({"flops_min": 9_000}, [row("floor-copy"), row("floor-matmul", "failed")], True),
        ({"flops_min": 9_000}, [row("floor-matmul")], False),
        ({"flops_min": 9_000, "status": "wrong"}, [], False),
        ({"flops_min": 8_000}, [], False),
        ({"flops_min": None}, [], False),
        ({"flops_min": 9_000, "bytes_min": 0}, [], False),
    ],
)
def test_the_rate_of_matmuls_is_lacking_where_they_may_bind(eager, others, lacking):
    assert analysis.lacks_rate([row("eager", **{"bytes_min": 1_000, **eager}), *others]) is lacking


def test_a_dtype_that_a_processor_only_emulates_limits_nothing():
    """Its matmuls may be slower than RoPE in the same dtype, which has none."""
    emulated = {"copy_gb_s": 10.0, "launch_us": 1.0, "matmul_tflop_s": {"fp32": 0.5, "bf16": 0.001, "fp16": None}}
    rope = {"bytes_min": 10**6, "flops_min": 750_000}
    for dtype in ("bf16", "fp16", "fp32"):
        found = analysis.known_limits(emulated, row("eager", dtype=dtype, **rope))
        assert found["matmul"] == pytest.approx(1.5) and found["copy"] == pytest.approx(100.0)
    tensor_cores = {**emulated, "matmul_tflop_s": {"fp32": 0.5, "bf16": 5.0}}
    assert analysis.known_limits(tensor_cores, row("eager", dtype="bf16", **rope))["matmul"] == pytest.approx(0.15)
    assert "matmul" not in analysis.known_limits(emulated, row("eager", dtype="c64", **rope))


def test_what_was_not_measured_of_a_machine_limits_nothing():
    measured = {"copy_gb_s": 10.0, "launch_us": 1.0, "matmul_tflop_s": {"fp32": 0.5}}
    some = {"bytes_min": 10**6, "flops_min": 750_000}
    assert set(analysis.known_limits(measured, row("eager", **some))) == {"copy", "matmul", "launch"}
    for part, value in (("copy_gb_s", None), ("launch_us", None), ("matmul_tflop_s", {"fp32": None})):
        left = analysis.known_limits({**measured, part: value}, row("eager", **some))
        assert len(left) == 2 and part.split("_")[0] not in left
    assert set(analysis.known_limits(measured, row("eager", bytes_min=None, flops_min=None))) == {"launch"}


def test_group_rows_fill_times_shares_and_clocks():
    eager = measurement("eager", [[20.0, 22.0, 24.0]] * 4)
    for i, turn in enumerate(eager.rounds):
        turn |= {"host_us": 5.0 + i, "clocks": {"sm_mhz": 1000 + i, "throttle": 1 << i}}
    rows, _ = analysis.group_rows(
        [row("floor-copy", error=None), row("eager"), row("liger", "missing")],
        [measurement("floor-copy", [[11.0]] * 4), eager, measurement("liger", [])],
    )
    floor, timed, missing = rows
    assert floor.verdict_vs_best_other is None
    assert (timed.device_us, timed.host_us, timed.limit, timed.share_of_limit) == (22.0, 6.5, "copy", 0.5)
    assert timed.device_us_iqr == pytest.approx(4.0)
    assert timed.clocks == {"sm_mhz": 1001.5, "throttle": 15}
    assert (missing.device_us, missing.status, missing.reason) == (None, "missing", "because")


def test_a_cpu_has_no_throttle_reasons():
    rounds = [{"clocks": {"waiting_threads": value}} for value in (0.5, 0.1, 0.2)]
    assert analysis.summarise_clocks(rounds) == {"waiting_threads": 0.2}
    assert analysis.summarise_clocks(rounds[:1]) == {"waiting_threads": 0.5}
    timed = [
        dataclasses.replace(row("eager"), clocks=c)
        for c in (None, {"waiting_threads": 0.2}, {"waiting_threads": 0.1}, {"waiting_threads": 0.09})
    ]
    assert [analysis.disturbed(r) for r in timed] == [None, 0.2, 0.1, None]


def test_the_aa_pair_is_no_row_and_no_rival():
    pair = [measurement("eager", [[10.0]] * 5), measurement("eager#2", [[1.0]] * 5)]
    rows, comparisons = analysis.group_rows([row("eager"), row("right")], [*pair, measurement("right", [[10.0]] * 5)])
    assert {r.provider for r in rows} == {"eager", "right"}
    assert {c["other"] for c in comparisons if c["verdict"]} == {"eager", "right"}
    assert comparisons[0]["provider"] == "eager#2"
    assert comparisons[0]["noise"] == pytest.approx(0.9)


@pytest.mark.parametrize("original", [[], [[10.0]] * 2])
def test_half_an_aa_pair_tells_no_noise(original):
    names = ("eager#2", "right", "liger")
    measurements = [measurement("eager", original), *(measurement(name, [[10.0]] * 5) for name in names)]
    rows, comparisons = analysis.group_rows([row("eager", "failed"), row("right"), row("liger")], measurements)
    assert [r.verdict_vs_best_other for r in rows] == [None, "ambiguous", "ambiguous"]
    assert all(c["noise"] is None for c in comparisons)


@pytest.mark.parametrize(
    ("provider", "eager", "calls"),
    [
        ({"device_us": 10.0, "first_call_s": 2.0}, {"device_us": 20.0, "first_call_s": 1.0}, 100_001),
        ({"device_us": 19.5, "first_call_s": 2.0}, {"device_us": 20.0, "first_call_s": 1.0}, 2_000_001),
        ({"device_us": 0.5, "first_call_s": 2.0}, {"device_us": 0.75, "first_call_s": 1.0}, 4_000_001),
        ({"device_us": 20.0, "first_call_s": 2.0}, {"device_us": 20.0, "first_call_s": 1.0}, math.inf),
        ({"device_us": 20.0, "first_call_s": 1.0}, {"device_us": 20.0, "first_call_s": 1.0}, 1),
        # back to back, calls take the longer of device and host time
        ({"device_us": 1.0, "host_us": 30.0, "first_call_s": 2.0}, {"device_us": 9.0, "host_us": 50.0, "first_call_s": 1.0}, 50_001),
        ({"device_us": 1.0, "first_call_s": 2.0}, {"first_call_s": 1.0}, None),
        ({"first_call_s": 2.0}, {"device_us": 1.0, "first_call_s": 1.0}, None),
        ({"device_us": 1.0, "first_call_s": None}, {"device_us": 2.0, "first_call_s": 1.0}, None),
        ({"device_us": 1.0, "first_call_s": 1.0}, {"device_us": 2.0, "first_call_s": None}, None),
    ],
)  # fmt: skip
def test_when_a_compilation_has_paid_off(provider, eager, calls):
    mine = row("tvm", **provider)
    assert analysis.break_even(mine, row("eager", **eager)) == calls
    assert analysis.break_even(mine, None) is None
    again = dataclasses.replace(mine, first_call_again_s=mine.first_call_s, first_call_s=1000.0)
    assert analysis.break_even(again, row("eager", **eager), again=True) == calls
    if calls not in (None, 1, math.inf):  # as defined
        first = [mine.first_call_s, eager["first_call_s"]]
        each = [max(x["device_us"], x.get("host_us") or 0) for x in (provider, eager)]
        done = [[f + (n - 1) * t / 1e6 for f, t in zip(first, each, strict=True)] for n in (calls, calls - 1)]
        assert done[0][0] <= done[0][1] and done[1][0] > done[1][1]


def test_eager_code_and_floors_have_nothing_to_pay_off():
    eager = row("eager", device_us=9.0, first_call_s=0.1)
    assert analysis.break_even(eager, eager) is None
    assert analysis.break_even(row("floor-copy", device_us=1.0, first_call_s=0.2), eager) is None
