"""Tests the harness against known truth: real studies whose workers are replaced by a simulated machine.

The machine drifts by ten percent within a few rounds, every sample has noise, and one in fifty takes three times as
long. The study must report the values that were put in.
"""

import math
import random
import tempfile
import threading
from statistics import median
from time import sleep
from types import SimpleNamespace

import pytest
from builders import LIMITS

from fusewise.lab import plugin, seats, study
from fusewise.lab.options import Options
from fusewise.lab.problem import Task
from fusewise.lab.verdict import verdicts


class Machine:
    """Virtual time advances with every call; the machine's speed depends on it."""

    def __init__(self, times, spread, drift=0.1, seed=0):
        self.times, self.spread, self.drift = times, spread, drift
        self.random, self.now = random.Random(seed), 0.0

    def sample(self, provider):
        pace = 1 + self.drift * math.sin(self.now / 40_000) + self.drift * min(1.0, self.now / 1e7)
        stumble = 3.0 if self.random.random() < 0.02 else 1.0
        time = self.times[provider] * pace * stumble * math.exp(self.random.gauss(0, self.spread))
        self.now += 500 + time
        return time


class Fake(plugin.Provider):
    def __init__(self, name):
        self.name, self.remembers = name, name != "jax"


class Quiet:
    def __getattr__(self, _):
        return lambda *_: None


def studied(
    monkeypatch,
    out,
    times,
    groups=1,
    order=None,
    kind=Machine,
    asked=lambda _: None,
    told=lambda do, provider: None,
    proposed=lambda _: 5,
    looked=0,
    begun_again=0,
    limits=None,
    kept=None,
    **machine,
):
    """A study of the simulated machine. `order`: a fixed order of providers for every round. `asked`: called with every
    request, returns extra fields for its reply. `told`: likewise, with the provider's name, and also called when its
    process starts, is ready or stops. `proposed`: samples per turn that a provider asks for. `looked`: number of groups
    whose kernels are timed. `begun_again`: of those whose first calls are repeated; None: as by default. `limits`:
    further options. `kept`: limits of the machine, measured earlier.
    """
    device = kind(times, **machine)

    class Worker:
        def __init__(self, start, *_, **__):
            self.provider = start["provider"]
            told("start", self.provider)

        def ready(self):
            return {"ok": True, "versions": {}} | (told("ready", self.provider) or {})

        def ask(self, do, **fields):
            more = (asked(do) or {}) | (told(do, self.provider) or {})
            if not more.get("ok", True):
                return more
            if do == "warm":
                return {
                    "ok": True,
                    "status": "ok",
                    "estimate_us": times[self.provider],
                    "samples": proposed(self.provider),
                }
            if do != "round":
                return {"ok": True, "status": "ok", "shape": "q[4]", "bytes_min": 10**6, "flops_min": 10**5} | more
            return {
                "ok": True,
                "status": "ok",
                "device_us": [device.sample(self.provider) for _ in range(fields["samples"])],
                "host_us": None,
                "calls": fields["calls"],
            }

        def kill(self):
            pass

        def stop(self):
            told("stop", self.provider)

    monkeypatch.setattr(seats, "WorkerProcess", Worker)
    monkeypatch.setattr(study.limits, "kept", lambda _: kept)
    # All of it, validated, after every group, is most of the time of a hundred groups; other tests read what is saved.
    monkeypatch.setattr(study.record, "save", lambda *_: None)
    options = Options(
        op="rope",
        tasks=[Task("rope", f"cube-{i}", "fp32", "fwd", "cpu", 0) for i in range(groups)],
        providers=[plugin.Entry(name, name, Fake(name)) for name in times],
        device="cpu", out=out, seed=5, **{"min_rounds": 12, "max_rounds": 12, **(limits or {})},
    )  # fmt: skip
    made = study.Study(options, Quiet())
    made.looked = options.tasks[:looked]
    if begun_again is not None:
        made.begun_again = options.tasks[:begun_again]
    if order:
        made.random.sample = lambda seats, _: sorted(seats, key=lambda s: order.index(s.name))
    return made.run()


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


def test_inputs_are_made_side_by_side_before_anyone_is_prepared_alone(monkeypatch, tmp_path):
    both, alone, order = threading.Barrier(2, timeout=60), threading.Lock(), []

    def asked(do):
        order.append(do)
        if do == "load":
            both.wait()  # the second signal is on its way
        elif do == "prepare":
            assert alone.acquire(blocking=False)
            sleep(0.01)
            alone.release()

    monkeypatch.setattr(study.machine, "cores", lambda: 2)
    times = dict.fromkeys(("eager", "liger", "quack", "unsloth"), 100.0)
    made = studied(monkeypatch, tmp_path, times, groups=2, spread=0.01, asked=asked)
    assert {row.status for row in made.rows} == {"ok"}
    rounds = 12 * 5
    assert order == 2 * [*["load"] * 4, *["prepare"] * 5, *["warm"] * 5, *["round"] * rounds]


@pytest.mark.parametrize(
    ("fitting", "cores", "most"), [(2, 6, 2), (100, 6, 3), (None, 6, 3), (None, 64, 4), (None, 1, 1), (100, 64, 8)]
)
def test_no_more_are_prepared_side_by_side_than_memory_has_room_for(fitting, cores, most, monkeypatch, tmp_path):
    inside, seen, lock, full = [], [], threading.Lock(), threading.Event()

    def asked(do):
        if do in ("prepare", "first call"):
            with lock:
                inside.append(do)
                seen.append(len(inside))
                if len(inside) == most:
                    full.set()
            full.wait(10)
            sleep(0.02)  # one too many would come now
            with lock:
                inside.pop()
        return {"at_once": fitting + next(more)} if do == "load" and fitting else {"first_call_s": 9.0}

    more = iter((3, 0, 2, 1, *range(6)))
    monkeypatch.setattr(study.machine, "cores", lambda: cores)
    times = dict.fromkeys(("eager", "liger", "quack", "unsloth", *(f"p{i}" for i in range(6) if most > 4)), 100.0)
    made = studied(monkeypatch, tmp_path, times, spread=0.01, asked=asked, begun_again=1)
    assert {row.status for row in made.rows} == {"ok"} and max(seen) == most
    assert {row.first_call_again_s for row in made.rows} == {9.0}


def test_who_takes_about_as_long_has_as_many_samples_a_turn(monkeypatch, tmp_path):
    """A GPU at its power limit slows down during a turn: the median of a longer turn is larger."""

    class Tiring(Machine):
        def sample(self, provider):
            self.tired = self.tired + 1 if provider == self.last else 0
            self.last = provider
            return super().sample(provider) * (1 + 0.02 * self.tired)

        last, tired = "", 0

    counts = iter((10, 8, 9, 4, 9, 2, 9))  # what each would choose for itself
    times = {
        "floor-launch": 2.0,
        "floor-matmul": 90.0,
        "eager": 100.0,
        "liger": 100.0,
        "quack": 100.0,
        "unsloth": 900.0,
    }
    made = studied(monkeypatch, tmp_path, times, kind=Tiring, spread=0.002, proposed=lambda _: next(counts))
    samples = {m.provider: {len(r["device_us"]) for r in m.rounds} for m in made.measurements}
    alike = {name: {4} for name in ("floor-matmul", "eager", "liger", "quack", "eager#2")}
    assert samples == {**alike, "floor-launch": {10}, "unsloth": {2}}
    assert {m.provider: m.prepared["samples"] for m in made.measurements} == {n: s.pop() for n, s in samples.items()}
    verdicts = {r.provider: r.verdict_vs_best_other for r in made.rows}
    assert verdicts["liger"] == verdicts["quack"] == "same" and verdicts["unsloth"] == "slower"


def test_kernels_are_looked_at_behind_the_rounds_and_cost_no_row(monkeypatch, tmp_path):
    """Only for groups that have ledgers. A worker that dies in it is restarted for the next group."""
    order, deaths = [], iter([False, True, False])  # eager, liger, and eager's twin

    def asked(do):
        order.append(do)
        if do == "kernels":
            if next(deaths):
                raise study.WorkerFailed("killed by the profiler")
            return {"kernel_us": 8.0}
        return None

    made = studied(monkeypatch, tmp_path, {"eager": 10.0, "liger": 12.0}, groups=2, spread=0.01, asked=asked, looked=1)
    assert [(row.status, row.kernel_us) for row in made.rows] == [("ok", 8.0), ("ok", None), ("ok", None), ("ok", None)]
    shown = {"round": ".", "profiler": "P", "kernels": "K"}
    assert "".join(shown.get(do, "") for do in order) == "." * 36 + "PPPKKK" + "." * 36


def test_without_a_profiler_there_is_no_kernel_time(monkeypatch, tmp_path):
    def told(do, provider):
        if (do, provider) == ("profiler", "liger"):
            raise study.WorkerFailed("killed by the profiler")
        return {"kernel_us": 8.0} if do == "kernels" else {}

    made = studied(monkeypatch, tmp_path, {"eager": 10.0, "liger": 12.0}, spread=0.01, told=told, looked=1)
    assert [(row.status, row.kernel_us) for row in made.rows] == [("ok", 8.0), ("ok", None)]


def test_a_call_is_replayed_in_a_graph_and_who_cannot_be_captured_is_begun_anew(monkeypatch, tmp_path):
    """Last of all, since a failed capture may leave anything behind; and for later groups not tried again."""
    order = []
    graphs = iter([
        {"graph_us": 7.0, "leaving": False},
        {"graph_us": None, "graph_us_reason": "RuntimeError: captures", "leaving": True},
        {"graph_us": 7.5, "leaving": False},
    ] + 2 * [{"graph_us": 7.1, "leaving": False}])  # fmt: skip

    def asked(do):
        order.append(do)
        return next(graphs) if do == "graph" else {}

    made = studied(monkeypatch, tmp_path, {"eager": 10.0, "liger": 12.0}, groups=2, spread=0.01, asked=asked, looked=2)
    assert [(row.status, row.graph_us) for row in made.rows] == [("ok", 7.0), ("ok", None), ("ok", 7.1), ("ok", None)]
    why = [m.prepared.get("graph_us_reason") for m in made.measurements if m.provider == "liger"]
    assert why == ["RuntimeError: captures", None]
    shown = {"round": ".", "profiler": "P", "kernels": "K", "graph": "G"}
    rounds = "." * 36
    assert "".join(shown.get(do, "") for do in order) == f"{rounds}PPPKKKGGG{rounds}PKKKGG"


def test_long_first_calls_are_repeated_in_new_processes(monkeypatch, tmp_path):
    """After the rounds of the first group, those of providers that keep compiled code on disk; whatever happens there costs no
    row."""
    order, again = [], iter([2.5, study.WorkerFailed("died")])
    first = iter([1.9, 9.0, 2.0, 7.0, 9.0, *[9.0] * 5])  # eager, liger, quack, jax, and liger's twin

    def asked(do):
        order.append(do)
        if do == "prepare":
            return {"first_call_s": next(first)}
        if do == "first call":
            found = next(again)
            if isinstance(found, Exception):
                raise found
            return {"first_call_s": found}
        return {}

    times = {"eager": 10.0, "liger": 12.0, "quack": 12.0, "jax": 11.0}
    made = studied(
        monkeypatch,
        tmp_path,
        times,
        groups=2,
        spread=0.01,
        asked=asked,
        begun_again=None,
        told=lambda do, _: order.append(do) if do == "stop" else None,
    )
    assert [row.first_call_again_s for row in made.rows] == [None, 2.5, *[None] * 6]
    assert {row.status for row in made.rows} == {"ok"}
    why = next(m.prepared["first_call_again_reason"] for m in made.measurements if m.provider == "quack")
    assert why == "died"
    shown = {"prepare": "p", "round": ".", "first call": "f", "stop": "s"}  # the one that died needs no stop
    rounds = "." * 60
    assert "".join(shown.get(do, "") for do in order) == f"ppppp{rounds}ffsppppp{rounds}sssss"


FAILED = {"ok": False, "status": "failed", "reason": "an illegal access"}


@pytest.mark.parametrize("do", ["warm", "round"])
@pytest.mark.parametrize("leaving", [False, True])
def test_who_fails_while_it_is_timed_loses_a_row_and_if_it_must_its_process(do, leaving, monkeypatch, tmp_path):
    """Nothing more is asked of it in that group, however long its first call took."""
    events = []

    def told(what, provider):
        events.append((what, provider))
        if (what, provider) == (do, "liger") and events.count((do, "liger")) == 1:
            return FAILED | {"leaving": leaving}
        return {"first_call_s": 9.0} if what in ("prepare", "first call") else {}

    made = studied(
        monkeypatch, tmp_path, {"eager": 10.0, "liger": 12.0}, 2, spread=0.01, told=told, looked=1, begun_again=1
    )
    assert [row.status for row in made.rows] == ["ok", "failed", "ok", "ok"]
    assert made.rows[1].reason == "an illegal access" and made.rows[1].device_us is None
    lost = next(m for m in made.measurements if m.provider == "liger")
    assert (lost.rounds, lost.prepared["status"], lost.prepared["reason"]) == ([], "failed", "an illegal access")
    assert events.count(("start", "liger")) == 1 + leaving
    next_group = events.index(("prepare", "liger"), events.index((do, "liger")))
    assert events[:next_group].count((do, "liger")) == 1
    assert [provider for what, provider in events if what == "first call"] == ["eager"]


def test_all_may_fail_while_they_warm_up(monkeypatch, tmp_path):
    def asked(do):
        if do == "warm":
            raise study.WorkerFailed("died")

    made = studied(monkeypatch, tmp_path, {"eager": 10.0, "liger": 12.0}, spread=0.01, asked=asked)
    assert [(row.status, row.reason) for row in made.rows] == [("failed", "in the warm-up: died")] * 2


def test_whose_inputs_find_no_room_tries_again_and_who_fails_with_them_does_not(monkeypatch, tmp_path):
    prepared = []

    def told(do, provider):
        if do == "load" and provider != "quack":
            return FAILED | {"crowded": provider == "liger"}
        if do == "prepare":
            prepared.append(provider)
            return {"first_call_s": 0.5, "peak_bytes": 7, "held_bytes": 3}

    made = studied(monkeypatch, tmp_path, dict.fromkeys(("eager", "liger", "quack"), 10.0), spread=0.01, told=told)
    assert [row.status for row in made.rows] == ["failed", "ok", "ok"]
    assert sorted(prepared) == ["liger", "liger", "quack"]  # and the twin
    assert {(row.shape, row.bytes_min, row.flops_min) for row in made.rows} == {("q[4]", 10**6, 10**5)}
    found = [(row.first_call_s, row.peak_bytes, row.held_bytes) for row in made.rows]
    assert found == [(None, None, None), (0.5, 7, 3), (0.5, 7, 3)]


def test_a_group_that_nobody_runs_has_no_pair(monkeypatch, tmp_path):
    prepared = []

    def asked(do):
        prepared.extend([do] * (do == "prepare"))
        return FAILED if len(prepared) > 3 else {}

    made = studied(monkeypatch, tmp_path, {"eager": 10.0, "liger": 12.0}, 2, spread=0.01, asked=asked)
    assert [row.status for row in made.rows] == ["ok", "ok", "failed", "failed"]
    assert [m.provider for m in made.measurements] == ["eager", "liger", "eager#2", "eager", "liger"]


def test_truths_are_those_of_the_current_group(monkeypatch, tmp_path):
    (tmp_path / "caches").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "caches"))
    kept = []

    def asked(do):
        (truths,) = (tmp_path / "caches").glob("fusewise-study-*/truths")
        if do == "prepare":
            (truths / "x").mkdir(exist_ok=True)
        elif do == "warm":
            kept.append([*truths.iterdir()])

    studied(monkeypatch, tmp_path / "out", {"eager": 10.0}, spread=0.01, asked=asked)
    assert kept == [[], []] and not [*(tmp_path / "caches").iterdir()]


def test_the_pair_is_of_ours_while_it_runs_then_of_another(monkeypatch, tmp_path):
    """The second process ends with the pair."""
    events = []

    def told(do, provider):
        events.append((do, provider))
        if (do, provider) == ("prepare", "fusewise-cpu") and events.count((do, provider)) in (3, 4):
            return FAILED

    times = {"floor-copy": 5.0, "liger": 12.0, "eager": 20.0, "torch.compile": 11.0, "fusewise-cpu": 10.0}
    made = studied(monkeypatch, tmp_path, times, 3, spread=0.01, told=told)
    assert [m.provider for m in made.measurements if m.provider.endswith("#2")] == [
        "fusewise-cpu#2", "torch.compile#2", "torch.compile#2",
    ]  # fmt: skip
    begun = [i for i, event in enumerate(events) if event == ("start", "torch.compile")]
    assert len(begun) == 2 and events.index(("stop", "fusewise-cpu")) < begun[1]
    alone = studied(monkeypatch, tmp_path, times, spread=0.01, limits={"twin": False})
    assert [m.provider for m in alone.measurements] == list(times)


@pytest.mark.parametrize(
    ("device", "warm", "flush", "share", "shared"),
    [("cpu", False, 2**21, None, True), ("cpu", True, 0, None, True), ("cuda:1", False, 2**21, 0.5, False)],
)
def test_what_a_worker_is_told_as_it_starts(device, warm, flush, share, shared, monkeypatch, tmp_path):
    """On a CPU workers share float64 results, which eager's keeps; on a GPU its memory."""
    begun = []
    monkeypatch.setattr(seats, "WorkerProcess", lambda start, log, **more: begun.append((start, log.name, more)))
    monkeypatch.setattr(seats.machine, "cache_bytes", lambda _: 2**20)
    providers = [plugin.Entry("eager", seats.EAGER, Fake("eager")), plugin.Entry("a/b", "a:b", Fake("a/b"))]
    providers.append(plugin.Entry("gone", "a:gone", None, "AttributeError"))  # which has no process
    limits = {"timeout": 7.0, "memory_limit": 2**30}
    made = seats.Seats(
        Options(op="rope", tasks=[], providers=providers, device=device, out=tmp_path, warm=warm, **limits)
    )
    made.caches = tmp_path
    for seat in made.all:
        made.start(seat)
    for (start, log, more), where, name in zip(begun, (seats.EAGER, "a:b"), ("eager.log", "a_b.log"), strict=True):
        assert (start["provider"], start["device"], log) == (where, device, name)
        assert (start["flush_bytes"], start["device_memory_fraction"]) == (flush, share)
        assert (start["truths"], start["keeps_truths"]) == (str(made.truths) if shared else None, where == seats.EAGER)
        assert more == {**limits, "nursery": made.nursery}


def test_a_process_that_cannot_be_started_costs_its_rows_and_they_say_why(monkeypatch, tmp_path):
    def told(do, provider):
        if (do, provider) == ("start", "liger"):
            raise OSError(12, "Cannot allocate memory")

    made = studied(monkeypatch, tmp_path, {"eager": 10.0, "liger": 12.0}, groups=4, spread=0.01, told=told)
    assert [row.status for row in made.rows] == ["ok", "failed"] * 4
    why = "[Errno 12] Cannot allocate memory"
    assert [row.reason for row in made.rows[1::2]] == [
        f"the worker process could not be started: {why}",
        *[f"not started again after 3 failures in a row, the last: {why}"] * 3,
    ]


@pytest.mark.parametrize(("status", "processes"), [("missing", 1), ("failed", 3)])
def test_who_cannot_be_loaded_is_not_started_for_every_group(status, processes, monkeypatch, tmp_path):
    events = []

    def told(do, provider):
        events.append((do, provider))
        if (do, provider) == ("ready", "liger"):
            return {"ok": False, "status": status, "reason": "no library"}

    made = studied(monkeypatch, tmp_path, {"eager": 10.0, "liger": 12.0}, groups=5, spread=0.01, told=told)
    rows = [row for row in made.rows if row.provider == "liger"]
    assert [row.status for row in rows] == [status] * 5 and all("no library" in row.reason for row in rows)
    assert events.count(("start", "liger")) == events.count(("stop", "liger")) == processes


@pytest.mark.parametrize("leaving", [False, True])
def test_who_fails_to_prepare_has_a_new_process_if_it_must(leaving, monkeypatch, tmp_path):
    events = []

    def told(do, provider):
        events.append((do, provider))
        if (do, provider) == ("prepare", "liger") and events.count((do, provider)) == 1:
            return FAILED | {"leaving": leaving}

    made = studied(monkeypatch, tmp_path, {"eager": 10.0, "liger": 12.0}, groups=2, spread=0.01, told=told)
    assert [row.status for row in made.rows] == ["ok", "failed", "ok", "ok"]
    assert events.count(("start", "liger")) == events.count(("stop", "liger")) == 1 + leaving


@pytest.mark.parametrize("hung", [True, False])
def test_who_hangs_three_times_in_a_row_is_given_up(hung, monkeypatch, tmp_path):
    """Though it has run a problem: each time costs the time limit. One that only has to leave goes on."""
    replies = iter(("ok", "fails", "fails", "missing", "fails", "fails", "fails", "ok"))

    def told(do, provider):
        reply = next(replies) if (do, provider) == ("prepare", "liger") else "ok"
        if reply == "fails" and hung:
            failed = study.WorkerFailed("timed out")
            failed.hung = True
            raise failed
        if reply == "fails":
            return FAILED | {"leaving": True}
        return {"ok": False, "status": "missing", "reason": "on Sundays only"} if reply == "missing" else {}

    made = studied(monkeypatch, tmp_path, {"eager": 10.0, "liger": 12.0}, groups=8, spread=0.01, told=told)
    why = "timed out" if hung else "an illegal access"
    gone = f"not started again after 3 failures in a row, the last: {why}" if hung else ""
    said = [row.reason for row in made.rows if row.provider == "liger"]
    assert said == ["", *[why] * 2, "on Sundays only", *[why] * 3, gone]


def test_who_hangs_while_it_is_timed_is_given_up_too(monkeypatch, tmp_path):
    """Although it can be prepared each time."""
    turns = iter((True, False, False, True, False, False, False))  # in how many groups it answers

    def told(do, provider):
        if (do, provider) == ("warm", "liger") and not next(turns):
            failed = study.WorkerFailed("timed out")
            failed.hung = True
            raise failed
        return {}

    made = studied(monkeypatch, tmp_path, {"eager": 10.0, "liger": 12.0}, groups=8, spread=0.01, told=told)
    hung = "in the warm-up: timed out"
    gone = f"not started again after 3 failures in a row, the last: {hung}"
    said = [row.reason for row in made.rows if row.provider == "liger"]
    assert said == ["", hung, hung, "", hung, hung, hung, gone]


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (plugin.Missing("no library"), "missing", "no library"),
        (OSError("cannot look"), "failed", "OSError: cannot look"),
    ],
)
def test_who_is_known_to_be_missing_has_no_process(error, status, reason, monkeypatch, tmp_path):
    started = []

    def check(self, device):
        if self.name == "liger":
            raise error

    def told(do, provider):
        started.extend([provider] * (do == "start"))

    monkeypatch.setattr(Fake, "check", check)
    made = studied(monkeypatch, tmp_path, {"eager": 10.0, "liger": 12.0}, spread=0.01, told=told)
    assert [(row.status, row.reason) for row in made.rows] == [("ok", ""), (status, reason)]
    assert started == ["eager", "eager"]  # and its twin
