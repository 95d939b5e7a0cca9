"""The processes of a study of a simulated machine: what each is asked for and when, and what its failures cost."""

import tempfile
import threading
from time import sleep

import pytest
from simulated import Fake, Machine, studied

from fusewise.lab import plugin, seats, study
from fusewise.lab.options import Options


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
    for (start, log, more), where, name in zip(
        begun, (seats.EAGER, "a:b"), ("eager.log", "a_b-07f4401c.log"), strict=True
    ):
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
