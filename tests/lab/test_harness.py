"""Tests the harness against known truth: studies of a simulated machine must report the values that were put in."""

import math
from statistics import median
from types import SimpleNamespace

import pytest
from builders import LIMITS
from simulated import Machine, Quiet, studied

from fusewise.lab import study
from fusewise.lab.verdict import verdicts


@pytest.mark.parametrize("spread", [0.002, 0.01, 0.05])
def test_identical_providers_are_the_same_in_95_of_100(monkeypatch, tmp_path, spread):
    made = studied(monkeypatch, tmp_path, {"eager": 100.0, "liger": 100.0}, groups=100, spread=spread)
    words = [row.verdict_vs_best_other for row in made.rows if row.provider == "liger"]
    assert words.count("same") >= 95, words
    assert words.count("faster") + words.count("slower") <= 2


@pytest.mark.parametrize(("factor", "word"), [(0.9, "faster"), (0.95, "faster"), (1.05, "slower"), (1.5, "slower")])
def test_known_differences_are_found_under_drift_and_noise(monkeypatch, tmp_path, factor, word):
    made = studied(monkeypatch, tmp_path, {"eager": 100.0, "liger": 100.0 * factor}, groups=50, spread=0.004)
    words = [row.verdict_vs_best_other for row in made.rows if row.provider == "liger"]
    assert words.count(word) >= 48, words


def test_a_difference_of_half_the_noise_is_not_told(monkeypatch, tmp_path):
    made = studied(monkeypatch, tmp_path, {"eager": 100.0, "liger": 101.2}, groups=50, spread=0.04)
    noises = [c["noise"] for c in made.comparisons if c["provider"].endswith("#2")]
    assert 0.018 < median(noises) < 0.03
    words = [row.verdict_vs_best_other for row in made.rows if row.provider == "liger"]
    assert words.count("faster") + words.count("slower") <= 2


@pytest.mark.parametrize(("fastest_us", "calls"), [(100.0, 16), (20_000.0, 2), (400_000.0, 1)])
def test_samples_have_fewer_calls_where_even_the_fastest_takes_long(monkeypatch, tmp_path, fastest_us, calls):
    times = {"eager": 3 * fastest_us, "liger": fastest_us, "floor-copy": 1.0}
    made = studied(monkeypatch, tmp_path, times, spread=0.01, asked=lambda _: {"calls_per_sample": 16})
    assert {m.prepared["calls_per_sample"] for m in made.measurements} == {calls}
    assert {turn["calls"] for m in made.measurements for turn in m.rounds} == {calls}


@pytest.mark.parametrize(
    ("flops", "floor", "found", "limit", "measured"),
    [
        (10**5, "floor-copy", LIMITS, "copy", 0),
        (10**8, "floor-copy", LIMITS, "matmul", 1),  # once for both groups
        (10**8, "floor-copy", None, None, 1),  # it failed, and is not tried again
        (10**8, "floor-matmul", LIMITS, None, 0),  # the copy has no time
    ],
)
def test_the_rate_of_matmuls_without_a_floor_is_measured(monkeypatch, tmp_path, flops, floor, found, limit, measured):
    asked, said = [], []
    monkeypatch.setattr(study.limits, "measure_apart", lambda device, *_: asked.append(device) or found)
    monkeypatch.setattr(Quiet, "note", lambda _, text: said.append(text), raising=False)
    times = {"eager": 300.0, floor: 50.0}
    made = studied(monkeypatch, tmp_path, times, groups=2, spread=0.01, asked=lambda _: {"flops_min": flops})
    assert asked == ["cpu"] * measured and len(said) == measured
    assert [row.limit for row in made.rows if row.provider == "eager"] == [limit, limit]


def test_limits_of_the_machine_are_those_that_are_kept(monkeypatch, tmp_path):
    made = studied(monkeypatch, tmp_path, {"eager": 10.0, "liger": 12.0}, spread=0.01, kept=LIMITS)
    assert made.limits == LIMITS and [row.limit for row in made.rows] == ["launch", "launch"]


@pytest.mark.parametrize(("us", "calls"), [(900.0, 16), (1100.0, 16), (5000.0, 5), (90_000.0, 1)])
def test_samples_of_a_hopeless_provider_take_no_longer_than_its_turns(monkeypatch, tmp_path, us, calls):
    times = {"eager": us, "liger": 100.0, "floor-copy": 1.0}
    made = studied(monkeypatch, tmp_path, times, spread=0.01, asked=lambda _: {"calls_per_sample": 16})
    by_name = {m.provider.removesuffix("#2"): m.prepared["calls_per_sample"] for m in made.measurements}
    assert by_name == {"eager": calls, "liger": 16, "floor-copy": 16}


@pytest.mark.parametrize("slower", ["eager", "eager#2"])
def test_an_a_a_pair_has_as_many_calls_per_sample(slower):
    """Its ratio is the noise of all: two calls may launch more than can be held, one less."""
    warmed = {name: {"estimate_us": 12_400.0, "calls_per_sample": 16} for name in ("eager", "eager#2")}
    warmed |= {"liger": {"estimate_us": 100.0, "calls_per_sample": 16}}
    warmed[slower]["estimate_us"] = 12_600.0
    assert study._calls(warmed) == {"eager": 1, "eager#2": 1, "liger": 16}


@pytest.mark.parametrize(("us", "calls"), [(10_000.0, 16), (10_001.0, 2)])
def test_hopeless_is_who_takes_more_than_ten_times_as_long(us, calls):
    warmed = {name: {"estimate_us": t, "calls_per_sample": 16} for name, t in {"eager": us, "liger": 1000.0}.items()}
    assert study._calls(warmed) == {"eager": calls, "liger": 16}


def test_alike_is_who_takes_at_most_twice_or_at_least_half_as_long():
    asks = {
        "floor-launch": (49.9, 2),
        "floor-copy": (50.0, 8),
        "eager": (100.0, 9),
        "liger": (200.0, 7),
        "tvm": (201.0, 3),
    }
    warmed = {name: {"estimate_us": us, "samples": samples} for name, (us, samples) in asks.items()}
    assert study._samples(warmed) == {"floor-launch": 2, "floor-copy": 7, "eager": 7, "liger": 7, "tvm": 3}


def test_turns_of_one_sample_stay_so_however_little_time_is_left():
    asks = {"eager": 10, "tvm": 1}
    assert study._in_time(asks, 10.0, 20.0) == asks
    assert study._in_time(asks, 10.0, 5.0) == {"eager": 5, "tvm": 1}
    assert study._in_time(asks, 10.0, -1.0) == {"eager": 2, "tvm": 1}


def test_floors_can_be_measured_alone(monkeypatch, tmp_path):
    times = {"floor-copy": 5000.0, "floor-launch": 5.0}
    made = studied(monkeypatch, tmp_path, times, spread=0.01, asked=lambda _: {"calls_per_sample": 16})
    assert [row.status for row in made.rows] == ["ok", "ok"]
    assert [(m.prepared["samples"], m.prepared["calls_per_sample"]) for m in made.measurements] == [(5, 16)] * 2


def timed(monkeypatch, kind):
    """The machine, with its virtual time as the study's clock."""

    class Timed(kind):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            monkeypatch.setattr(study, "time", SimpleNamespace(monotonic=lambda: self.now / 1e6))

    return Timed


def test_a_hopelessly_slow_provider_has_few_samples_or_three_rounds_and_its_verdict(monkeypatch, tmp_path):
    """After the first round the turns of one that takes more than ten times as long fit into 25 ms, or have one sample, and end
    with the third round."""
    times = {"floor-copy": 9.0, "eager": 100.0, "liger": 1010.0, "thunder": 1.8e4, "tvm": 8e4}
    made = studied(monkeypatch, tmp_path, times, kind=timed(monkeypatch, Machine), spread=0.004, drift=0.0)
    turns = {m.provider: [len(turn["device_us"]) for turn in m.rounds] for m in made.measurements}
    whole = dict.fromkeys(("floor-copy", "eager", "eager#2", "liger"), [5] * 12)
    assert {name: turns[name] for name in whole} == whole
    assert turns["thunder"][0] == 5 and set(turns["thunder"][1:]) <= {1, 2} and turns["tvm"] == [5, 1, 1]
    left = {m.provider: m.prepared.get("left_after_rounds") for m in made.measurements}
    assert left == {**dict.fromkeys((*whole, "thunder")), "tvm": 3}
    (row,) = (r for r in made.rows if r.provider == "tvm")
    assert (row.status, row.verdict_vs_best_other) == ("ok", "slower")
    assert row.device_us == pytest.approx(8e4, rel=0.3)


def test_nobody_is_hopeless_beside_a_floor(monkeypatch, tmp_path):
    times = {"floor-launch": 9.0, "eager": 3e4, "liger": 3e4}
    made = studied(monkeypatch, tmp_path, times, kind=timed(monkeypatch, Machine), spread=0.004)
    assert {m.provider: [len(turn["device_us"]) for turn in m.rounds] for m in made.measurements} == dict.fromkeys(
        (*times, "eager#2"), [5] * 12
    )


@pytest.mark.parametrize(("share", "samples"), [(math.inf, 10), (1.1, 10), (0.6, 5), (0.1, 2), (0.0, 2)])
def test_the_fewest_rounds_have_shorter_turns_where_time_is_short(monkeypatch, tmp_path, share, samples):
    """`share`: the time limit as a share of what twelve rounds of ten samples take. One far slower has fewer anyway."""
    times = {"floor-copy": 90.0, "eager": 100.0, "liger": 120.0, "tvm": 8e3}
    whole = 1e-6 * (12 * 10 * (590 + 2 * 600 + 620) + (10 + 11 * 3) * 8500)
    made = studied(
        monkeypatch,
        tmp_path,
        times,
        kind=timed(monkeypatch, Machine),
        proposed=lambda name: 10,
        spread=0.0,
        drift=0.0,
        limits={"time_limit": share * whole},
    )
    turns = {m.provider: [len(turn["device_us"]) for turn in m.rounds] for m in made.measurements}
    alike = ("floor-copy", "eager", "eager#2", "liger")
    assert [turns[name] for name in alike] == [[10, *[samples] * 11]] * 4
    assert turns["tvm"][0] == 10 and 1 <= max(turns["tvm"][1:]) <= min(3, samples)


class Unsteady(Machine):
    """One provider takes half to one and a half times as long, by chance."""

    def sample(self, provider):
        return super().sample(provider) * (self.random.uniform(0.5, 1.5) if provider == "liger" else 1.0)


@pytest.mark.parametrize(
    ("kind", "limits", "count"),
    [
        (Machine, {}, 5),
        (Unsteady, {}, 30),
        (Unsteady, {"precision": 1.0}, 5),
        (Unsteady, {"group_seconds": 7.5 * 9e-3}, 8),
        (Unsteady, {"group_seconds": 0.0}, 5),
        (Unsteady, {"time_limit": 7.5 * 9e-3}, 8),
    ],
)
def test_rounds_end_once_all_times_are_precise_or_time_is_up(monkeypatch, tmp_path, kind, limits, count):
    """Whoever is precise waits for the others. A round takes 9 ms."""
    times = {"eager": 100.0, "liger": 100.0}
    machine = {"kind": timed(monkeypatch, kind), "spread": 0.0, "drift": 0.0}
    made = studied(monkeypatch, tmp_path, times, limits={"min_rounds": 5, "max_rounds": 30, **limits}, **machine)
    assert [len(m.rounds) for m in made.measurements] == [count] * 3


def test_groups_share_the_time_that_their_preparation_leaves(monkeypatch, tmp_path):
    """A group takes 2.25 s to prepare, which is known from the second on, and a round 6 ms."""

    class Paced(Machine):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.now = 5e6
            machines.append(self)

        def sample(self, provider):
            self.now += 600
            return self.random.uniform(50.0, 150.0)

    def asked(do):
        part, seconds = {"load": ("inputs", 0.25), "prepare": ("compiling", 1.0)}.get(do, ("", 0.0))
        machines[0].now += 1e6 * seconds
        return {"spent": {part: 2 * seconds}} if part else {}  # as if two had done it side by side

    machines = []
    limits = {"min_rounds": 5, "max_rounds": 30, "time_limit": 4 * 2.25 + 2 * 30 * 6e-3 + 2 * 7.75 * 6e-3}
    kind = timed(monkeypatch, Paced)
    made = studied(monkeypatch, tmp_path, {"eager": 100.0}, 4, kind=kind, spread=0.0, asked=asked, limits=limits)
    assert [len(m.rounds) for m in made.measurements if m.provider == "eager"] == [30, 30, 8, 8]
    assert made.spent["inputs"] == pytest.approx(4 * 0.25, rel=0.1)
    assert made.spent["compiling"] == pytest.approx(4 * 2 * 1.0, rel=0.1)
    assert made.seconds == pytest.approx(9.0 + 76 * 6e-3)
    assert sum(made.spent.values()) == pytest.approx(made.seconds)


@pytest.mark.parametrize(("stalled", "samples"), [(0, [5, 1, *[5] * 10]), (2, [5] * 12)])
def test_one_round_on_a_busy_machine_makes_nobody_hopeless(monkeypatch, tmp_path, stalled, samples):
    """After the first round it seems so, and the second is short."""

    class Stalled(Machine):
        """One provider waits for a core during one of its turns of five samples."""

        count = 0

        def sample(self, provider):
            self.count += provider == "liger"
            waits = provider == "liger" and 5 * stalled < self.count <= 5 * stalled + 5
            self.now += 5e4 * waits
            return super().sample(provider) + 5e4 * waits

    kind = timed(monkeypatch, Stalled)
    made = studied(monkeypatch, tmp_path, {"eager": 100.0, "liger": 100.0}, kind=kind, spread=0.004)
    assert {len(m.rounds) for m in made.measurements} == {12}
    (found,) = (m for m in made.measurements if m.provider == "liger")
    assert [len(turn["device_us"]) for turn in found.rounds] == samples
    assert min(found.rounds[stalled]["device_us"]) > 5e4


def test_the_verdict_is_what_was_put_in(monkeypatch, tmp_path):
    times = {"floor-copy": 100.0, "floor-launch": 5.0, "eager": 400.0, "torch.compile": 150.0, "fusewise-cpu": 110.0}
    made = studied(monkeypatch, tmp_path, times, spread=0.004)
    shares = {row.provider: row.share_of_limit for row in made.rows}
    for name, time in times.items():
        assert shares[name] == pytest.approx(100 / time, rel=0.03)
    (found,) = verdicts(made)
    assert (found.bound, found.worth, found.kernel) == ("memory", "yes", "fusewise-cpu")
    assert found.left == pytest.approx(1 / 3, abs=0.02)
    assert [gap.provider for gap in found.gaps] == ["fusewise-cpu", "torch.compile", "eager"]


def test_rounds_are_drawn_anew_because_a_fixed_order_is_misled(monkeypatch, tmp_path):
    """A machine that is quick after a rest and slow after a heavy neighbour: in a fixed order the same provider always
    pays.
    """

    class Heated(Machine):
        def sample(self, provider):
            time = self.times[provider] * (1.15 if self.last == "heavy" and provider != "heavy" else 1.0)
            self.last = provider if provider == "heavy" or self.count % 5 == 4 else self.last
            self.count += 1
            return time * math.exp(self.random.gauss(0, self.spread))

        last, count = "", 0

    times = {"eager": 100.0, "liger": 100.0, "heavy": 900.0}
    fixed = studied(
        monkeypatch, tmp_path / "a", times, kind=Heated, order=["heavy", "liger", "eager", "eager#2"], spread=0.002
    )
    drawn = studied(monkeypatch, tmp_path / "b", times, kind=Heated, spread=0.002)
    word = {
        name: {r.provider: r.verdict_vs_best_other for r in made.rows}["liger"]
        for name, made in (("fixed", fixed), ("drawn", drawn))
    }
    assert word["fixed"] == "slower"
    assert word["drawn"] != "slower"
