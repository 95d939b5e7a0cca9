"""The search of `fusewise tune`: its logic with constructed times, and the command."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

click = pytest.importorskip("click")
pytest.importorskip("triton")

from click.testing import CliRunner  # noqa: E402

from fusewise.cli import cli  # noqa: E402
from fusewise.lab import tune  # noqa: E402
from fusewise.lab.timing import Turn  # noqa: E402
from fusewise.ops._tuned import Job, Key, Tuned  # noqa: E402
from fusewise.ops.gated_linear import _cuda, _gluon, _op, _triton, tuning  # noqa: E402

KEY = Key("y", torch.float32, "", 8, 4, 4)


@dataclass(frozen=True)
class Tile:
    size: int


def forget() -> None:
    """Clear all results, as in a new process."""
    for store in (_cuda.CHOICE, _gluon.TUNED, _triton.TUNED):
        store.forget()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FUSEWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FUSEWISE_TUNED", raising=False)
    forget()
    yield
    forget()


class Clock:
    """Times by configuration, with relative noise."""

    def __init__(self, times: dict[int, float], noise: float = 0.002) -> None:
        self.times, self.noise, self.random, self.measured = times, noise, random.Random(1), []

    def __call__(self, candidate: tune.Candidate) -> float:
        self.measured.append(candidate.config.size)
        return self.times[candidate.config.size] * (1 + self.noise * self.random.gauss(0, 1))


def raced(times: dict[int, float], noise: float = 0.002, late: Any = lambda: False) -> tuple[tune.Result, Clock]:
    """The first configuration is the heuristic's."""
    candidates = [tune.Candidate(Tile(size), "ok") for size in times]
    clock = Clock(times, noise)
    ended = tune.race(candidates, candidates[0], clock, late, 0)
    return tune.judge(KEY, "impl", candidates, *ended), clock


def test_a_clear_winner_is_kept_and_ends_the_race() -> None:
    result, _ = raced({1: 100.0, 2: 90.0, 3: 97.0, 4: 120.0})
    assert result.winner.config == result.best.config == Tile(2) and result.verdict == "faster"
    assert result.stopped == "clear" and result.rounds == tune.MIN_ROUNDS
    assert result.gap == pytest.approx(100 / 90 - 1, abs=0.01)
    assert {c.config.size: c.status for c in result.candidates} == {1: "ok", 2: "ok", 3: "dropped", 4: "dropped"}


def test_a_heuristic_that_is_best_stays() -> None:
    result, _ = raced({1: 90.0, 2: 100.0, 3: 110.0})
    assert result.winner is result.best is result.heuristic and result.gap == 0 and result.stopped == "clear"


def test_a_difference_within_the_noise_changes_nothing() -> None:
    result, _ = raced({1: 100.0, 2: 97.5}, noise=0.1)
    assert result.winner is result.heuristic and result.best is not result.heuristic
    assert (result.verdict, result.stopped) == ("same", "clear")  # not ended while it was ambiguous
    told = f"  kept: the heuristic’s choice (the best is same; noise {100 * (result.noise or 0):.1f} %)"
    assert tune.lines(result)[-1] == told


def test_what_is_far_off_is_timed_once() -> None:
    result, clock = raced({1: 100.0, 2: 90.0, 3: 300.0})
    assert clock.measured.count(3) == 1
    assert result.candidates[2].status == "dropped" and result.candidates[2].us is None


@pytest.mark.parametrize(("time", "turns"), [(134.0, 1 + tune.MIN_ROUNDS), (136.0, 1)])
def test_far_off_is_half_as_long_again(time: float, turns: int) -> None:
    _, clock = raced({1: 100.0, 2: 90.0, 3: time}, noise=0.0)
    assert clock.measured.count(3) == turns


@pytest.mark.parametrize(("time", "stopped"), [(90.4, "rounds"), (90.5, "clear")])
def test_half_a_percent_is_a_clear_difference(time: float, stopped: str) -> None:
    result, _ = raced({1: 100.0, 2: 90.0, 3: time}, noise=0.0)
    assert (result.winner.config, result.stopped) == (Tile(2), stopped)


def test_who_was_dropped_is_not_the_best_though_the_machine_slowed_down_afterwards() -> None:
    candidates = [tune.Candidate(Tile(size), "ok") for size in (1, 2, 3)]
    candidates[2].status = "dropped"
    times = {1: [110.0] * 5 + [121.0] * 6, 2: [90.0] * 5 + [99.0] * 6, 3: [92.0] * 5}
    for candidate in candidates:
        candidate.rounds = dict(enumerate(times[candidate.config.size]))
    result = tune.judge(KEY, "impl", candidates, candidates[0].rounds, 11, "clear")
    assert result.best.config == result.winner.config == Tile(2)


def test_the_best_by_its_median_leaves_no_negative_gap() -> None:
    """Round by round it is mostly the slower one."""
    candidates = [tune.Candidate(Tile(1), "ok", "", {0: 1.0, 1: 10.0, 2: 10.0}), tune.Candidate(Tile(2), "ok")]
    candidates[1].rounds = {0: 9.0, 1: 9.0, 2: 11.0}
    result = tune.judge(KEY, "impl", candidates, candidates[0].rounds, 3, "time")
    assert result.best is candidates[1] and result.gap == 0.0


def test_a_result_as_text_and_as_json() -> None:
    result, _ = raced({1: 100.0, 2: 90.0, 3: 97.0}, noise=0.0)
    assert tune.lines(result) == [
        "y float32 8,4,4, impl: heuristic is within 11.1 % (clear after 5 rounds)",
        "  heuristic    100.00 µs  Tile(size=1)",
        "  best          90.00 µs  Tile(size=2)",
        "  kept: the best",
    ]
    plain = result.to_json()
    assert plain["ratio"] == [pytest.approx(100 / 90)] * 3 and plain["file"] == ""
    assert plain["candidates"][2] == {
        "config": {"size": 3}, "status": "dropped", "reason": "", "us": 97.0, "rounds": 5,
    }  # fmt: skip
    stays, _ = raced({1: 90.0, 2: 100.0}, noise=0.0)
    assert tune.lines(stays) == [
        "y float32 8,4,4, impl: heuristic is the best (clear after 5 rounds)",
        "  heuristic     90.00 µs  Tile(size=1)",
        "  kept: the heuristic’s choice",
    ]


@pytest.mark.parametrize(("wrong", "last"), [(4, "Tile(size=5)"), (6, "  and 2 more")])
def test_few_wrong_candidates_are_listed(wrong: int, last: str) -> None:
    result, _ = raced({1: 90.0, 2: 100.0})
    result.candidates += [tune.Candidate(Tile(2 + i), "wrong", f"Tile(size={2 + i})") for i in range(wrong)]
    found = tune.lines(result)
    assert len(found) == 3 + tune.TOLD + (wrong > tune.TOLD) and found[-1].endswith(last)


def test_the_heuristic_is_timed_twice_a_round_and_never_dropped() -> None:
    result, clock = raced({1: 300.0, 2: 90.0, 3: 91.0})
    assert clock.measured.count(1) == 1 + 2 * result.rounds
    turns = [tuple(clock.measured[i : i + 4]) for i in range(3, len(clock.measured), 4)]
    assert {tuple(sorted(turn)) for turn in turns} == {(1, 1, 2, 3)} and len(set(turns)) > 1  # in another order
    assert result.heuristic.status == "ok" and result.gap == pytest.approx(300 / 90 - 1, rel=0.02)


def test_the_time_limit_and_the_rounds_end_it() -> None:
    times = {size: 100.0 + 0.01 * size for size in range(1, 6)}
    late, _ = raced(times, 0.02, lambda: True)
    assert late.stopped == "time" and late.rounds == 3
    whole, _ = raced(times, 0.02)
    assert whole.stopped == "rounds" and whole.rounds == tune.MAX_ROUNDS


def test_the_same_times_give_the_same_choice_in_any_order_of_rounds() -> None:
    choices = set()
    for seed in range(5):
        candidates = [tune.Candidate(Tile(size), "ok") for size in (1, 2, 3)]
        ended = tune.race(candidates, candidates[0], Clock({1: 100.0, 2: 95.0, 3: 80.0}), lambda: False, seed)
        choices.add(tune.judge(KEY, "impl", candidates, *ended).winner.config)
    assert choices == {Tile(3)}


class FakeTimer:
    """Microseconds of the configuration in use."""

    def __init__(self, tuned: Tuned[Any], times: dict[int, float]) -> None:
        self.tuned, self.times = tuned, times

    def turn(self, work: Any, samples: int, calls: int) -> Turn:
        work.step(work.begin(0))
        return Turn([self.times[self.tuned.override.size]] * samples)


def job(times: dict[int, float], wrong: tuple[int, ...] = (), failing: tuple[int, ...] = ()) -> tuple[Job, FakeTimer]:
    """Doubles a vector; some configurations leave the last element unwritten, some raise."""
    tuned: Tuned[Any] = Tuned("op", "impl", [Path(__file__)], lambda key, device: [Tile(size) for size in times])
    x = torch.randn(8)
    y = torch.empty(8)

    def run() -> None:
        config = tuned.find(-1, KEY) or Tile(next(iter(times)))
        if config.size in failing:
            raise RuntimeError("out of resources: shared memory\nand more")
        end = 7 if config.size in wrong else 8
        y[:end] = 2 * x[:end]

    cpu = torch.device("cpu")
    made = Job(tuned, cpu, (y,), run, lambda: (2 * x.double(),), lambda: (2 * x,))
    return made, FakeTimer(tuned, times)


def test_wrong_and_failing_candidates_are_reported_and_dropped() -> None:
    made, timer = job({1: 100.0, 2: 50.0, 3: 40.0, 4: 60.0}, wrong=(2,), failing=(3,))
    result = tune.search(made, timer, 60.0, 0, lambda text: None)
    by = {c.config.size: c for c in result.candidates}
    assert (by[2].status, by[3].status) == ("wrong", "failed") and "inf" in by[2].reason
    assert by[3].reason == "RuntimeError: out of resources: shared memory"
    assert result.winner.config == Tile(4) and result.key == KEY
    assert (result.stopped, result.rounds) == ("clear", tune.MIN_ROUNDS)
    text = "\n".join(tune.lines(result))
    assert "wrong: Tile(size=2)" in text and "failed: Tile(size=3)" in text and "within 66.7 %" in text
    json.dumps(result.to_json())


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_a_heuristic_that_is_wrong_is_replaced(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, timer = job({1: 10.0, 2: 50.0}, **{"wrong" if status == "wrong" else "failing": (1,)})
    monkeypatch.setattr(tune, "timer", lambda device: timer)
    progress: list[str] = []
    (result,) = tune.tune(iter([made]), 60.0, 0, progress.append)
    assert result.winner.config == Tile(2) and result.gap is None and result.to_json()["ratio"] is None
    assert progress == ["y float32 8,4,4: 2 candidates", "y float32 8,4,4: 1 of them right, timing"]
    assert tune.lines(result)[:4] == [
        f"y float32 8,4,4, impl: heuristic is {status} (clear after 5 rounds)",
        "  heuristic            –  Tile(size=1)",
        "  best          50.00 µs  Tile(size=2)",
        "  kept: the best",
    ]
    assert made.tuned.find(-1, KEY) == Tile(2)


def test_a_call_that_fails_before_its_launch_is_an_error() -> None:
    made, timer = job({1: 10.0})
    broken = replace(made, run=lambda: 1 // 0)
    with pytest.raises(tune.Unable, match=r"a call must launch a kernel, got ZeroDivisionError"):
        tune.search(broken, timer, 60.0, 0, lambda text: None)


def test_the_check_has_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes a second: the first captures the key, and one more begins as the half ends."""
    calls: list[None] = []
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: len(calls)))
    made, timer = job({size: 10.0 + size for size in range(1, 21)})

    def run() -> None:
        calls.append(None)
        made.run()

    result = tune.search(replace(made, run=run), timer, 12.0, 0, lambda text: None)
    reached = [c.config.size for c in result.candidates if c.status != "not reached"]
    assert (reached, result.stopped) == ([*range(1, 8)], "time")


def test_nothing_right_is_an_error() -> None:
    made, timer = job({1: 10.0, 2: 50.0}, wrong=(1,), failing=(2,))
    with pytest.raises(tune.Unable, match="must have a candidate that is right"):
        tune.search(made, timer, 60.0, 0, lambda text: None)


def test_without_time_the_heuristic_alone_is_tried() -> None:
    made, timer = job({1: 10.0, 2: 5.0})
    result = tune.search(made, timer, 0.0, 0, lambda text: None)
    assert [c.status for c in result.candidates] == ["ok", "not reached"]
    assert (result.stopped, result.rounds) == ("time", 3)
    assert result.winner.config == Tile(1) and "1 candidates were not reached" in "\n".join(tune.lines(result))


def test_what_is_found_is_kept_for_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made, timer = job({1: 100.0, 2: 50.0})
    monkeypatch.setattr(tune, "timer", lambda device: timer)
    (result,) = tune.tune(iter([made]), 60.0, 0, lambda text: None)
    assert Path(result.file).is_file() and made.tuned.find(-1, KEY) == Tile(2)
    entry = json.loads(Path(result.file).read_text())["entries"][0]
    assert (entry["us"], entry["heuristic_us"], entry["rows"]) == (50.0, 100.0, 8)
    monkeypatch.setitem(tune.OPERATIONS, "geglu", SimpleNamespace(tuned=lambda where: [made.tuned]))

    def listed() -> list[str]:
        return tune.kept_lines(tune.kept_results("geglu", "cpu"), "cpu")

    assert listed() == [f"impl: 1 results in {result.file}", "  y float32 8,4,4: {'size': 2}"]
    monkeypatch.setenv("FUSEWISE_TUNED", "0")
    made.tuned.forget()
    assert listed() == [f"impl: 0 results in {result.file}", "  ignored: FUSEWISE_TUNED=0 is set"]


def test_results_are_kept_by_the_number_of_a_gpu() -> None:
    assert [tune._index(torch.device(name)) for name in ("cpu", "cuda", "cuda:0", "cuda:1")] == [-1, 0, 0, 1]


def test_candidates_are_timed_with_cold_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune.machine, "cache_bytes", lambda _: 2**20)
    assert tune.timer(torch.device("cpu")).flush.nbytes == 2**21


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli, arguments)


def test_help() -> None:
    found = invoke("tune", "--help")
    assert found.exit_code == 0
    for text in ("Exit codes:", "130", "Examples:", "--epilogue", "--list", "FUSEWISE_TUNED=0"):
        assert text in found.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tune",), "Missing argument 'TARGET'"),
        (("tune", "tango", "--shape", "1,1,1"), "target must be one of geglu, got 'tango'; try `tune geglu`"),
        (("tune", "geglu"), "give what to tune for, --case, --preset or --shape M,D,F, got none"),
        (
            ("tune", "geglu", "--case", "nope"),
            "name must be that of a case in a preset, got 'nope'; `fusewise study geglu",
        ),
        (("tune", "geglu", "--case", "llama-3-8b-trian"), "got 'llama-3-8b-trian'; try 'llama-3-8b-train'"),
        (("tune", "geglu", "--preset", "nope"), "preset must be one of geglu-memory"),
        (("tune", "geglu", "--shape", "1,2"), "shape must be three positive numbers, M,D,F, got (1, 2)"),
        (("tune", "geglu", "--shape", "0,2,3"), "shape must be three positive numbers"),
        (("tune", "geglu", "--shape", "a,b,c"), "is not numbers with commas"),
        (("tune", "geglu", "--shape", "1,2,3", "--dtype", "int8"), "dtype must be one of fp32, bf16, fp16, got 'int8'"),
        (("tune", "geglu", "--shape", "1,2,3", "--epilogue", "z"), "epilogue must be one of y, preact, gate, gradient"),
        (("tune", "geglu", "--shape", "1,2,3", "--device", "toaster"), "device must be cpu or cuda[:index]"),
    ],
)
def test_bad_command_lines_exit_2_with_a_fix(arguments: tuple[str, ...], words: str) -> None:
    found = invoke(*arguments)
    assert found.exit_code == 2
    assert words in " ".join(found.output.split())


def test_a_device_without_configurations_exits_1() -> None:
    found = invoke("tune", "geglu", "--shape", "8,16,16", "--device", "cpu")
    assert found.exit_code == 1 and "TRITON_INTERPRET=1" in found.output
    assert invoke("tune", "geglu", "--list", "--device", "cpu").output == "nothing can be tuned on cpu\n"


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [*((kernel, "bf16") for kernel in ("y", "preact", "gate", "gradient", "down")), ("y", "fp16"), ("gate", "fp32")],
)
def test_every_kernel_is_searched_in_the_interpreter(kernel: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real launches, checked against float64; few candidates and constructed times."""
    whole = _triton._space
    monkeypatch.setattr(_triton.TUNED, "space", lambda key, device: whole(key, device)[:3])

    class Timer:
        def turn(self, work: Any, samples: int, calls: int) -> Turn:
            slow = _triton.TUNED.override != _triton.TUNED.space(seen[0], -1)[2]
            return Turn([20.0 if slow else 10.0])

    seen: list[Key] = []
    asked = tune._key
    monkeypatch.setattr(tune, "_key", lambda made: seen.append(asked(made)) or seen[-1])
    monkeypatch.setattr(tune, "timer", lambda device: Timer())
    arguments = ("--shape", "20,24,40", "--epilogue", kernel, "--dtype", dtype, "--device", "cpu", "--json")
    found = CliRunner().invoke(cli, ("tune", "geglu", *arguments))
    assert found.exit_code == 0, found.output
    (result,) = json.loads(found.stdout)["results"]
    assert [c["status"] for c in result["candidates"]] in (["ok", "dropped", "ok"], ["ok", "ok", "ok"])
    assert result["kernel"] == kernel and result["kept"] == result["best"] == result["candidates"][2]["config"]
    assert result["gap"] == pytest.approx(1.0)
    listing = json.loads(invoke("tune", "geglu", "--list", "--device", "cpu", "--json").output)
    assert [e["config"] for e in listing[0]["entries"]] == [result["kept"]]
    forget()
    monkeypatch.setenv("FUSEWISE_TUNED", "0")
    (file,) = json.loads(invoke("tune", "geglu", "--list", "--device", "cpu", "--json").output)
    assert not file["entries"] and file["problem"] == "FUSEWISE_TUNED=0 is set"


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        (KeyboardInterrupt, 130, "interrupted; 1 results are kept"),
        (RuntimeError("out of memory"), 1, "tune: the device must run the search, got out of memory"),
    ],
)
def test_what_was_found_before_the_end_is_printed(
    ending: Any, code: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(to_json=lambda: {"kernel": "y", "file": "kept.json"})
        raise ending

    monkeypatch.setattr(tune, "tune", found)
    monkeypatch.setattr(tune, "jobs", lambda *_: iter(()))
    ended = invoke("tune", "geglu", "--device", "cpu", "--json")
    assert ended.exit_code == code
    assert json.loads(ended.stdout) == {"device": "cpu", "results": [{"kernel": "y", "file": "kept.json"}]}
    assert told in ended.stderr and "stored in kept.json" in ended.stderr


@pytest.mark.interpreter
def test_of_float32_whose_products_are_the_librarys_the_gate_is_searched() -> None:
    def kernels(dtype: str, *named: str) -> list[str]:
        made: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "_job", lambda found, dtype, kernel, device, impl: made.append(kernel))
            list(tuning.jobs(None, (64, 24, 40), (dtype,), named, torch.device("cpu")))
        return made

    assert kernels("bf16") == ["y", "preact", "gate", "gradient", "down"]
    assert kernels("fp32") == kernels("fp32", "gate") == ["gate"]
    with pytest.raises(ValueError, match=r"kernel must be gate in fp32, .* got 'y'; leave it out"):
        kernels("fp32", "y")


def test_what_has_one_configuration_is_left_out_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(*named: str) -> list[Any]:
        return list(tuning.jobs(None, (200, 24, 40), ("bf16",), named, torch.device("cpu")))

    monkeypatch.setattr(tuning, "_job", lambda *_: "cuda")
    assert of() == []
    with pytest.raises(
        ValueError, match=r"impl must be one that has configurations, .* which for y here is cuda; name another"
    ):
        of("y")


@pytest.mark.gpu
@pytest.mark.parametrize("named", [True, False], ids=["named", "auto"])
@pytest.mark.parametrize("kernel", ["y", "gate", "gradient"])
@pytest.mark.parametrize("rows", [16, 512])
def test_a_search_on_the_device(kernel: str, rows: int, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heuristic's choice and some random candidates: each is correct or does not fit, and a new process finds the
    saved result.
    """

    def few(space: Any) -> Any:
        def drawn(key: Key, device: int) -> list[Any]:
            first, *others = space(key, device)
            return [first, *random.Random(0).sample(others, min(6, len(others)))]

        return drawn

    for store in (_cuda.CHOICE, _gluon.TUNED, _triton.TUNED):
        monkeypatch.setattr(store, "space", few(store.space))
    arguments = ["--shape", f"{rows},512,1024", "--epilogue", kernel, "--device", "cuda", "--json"]
    if named:
        arguments += ["--impl", "triton" if _op.choice.unavailable("gluon", "cuda", torch.bfloat16) else "gluon"]
    elif kernel == "gate" and _op.choice.unavailable("cuda", "cuda", torch.bfloat16) is None:
        pytest.skip("by CUDA, with nothing to tune")
    found = invoke("tune", "geglu", *arguments)
    assert found.exit_code == 0, found.output
    (result,) = json.loads(found.stdout)["results"]
    status = [c["status"] for c in result["candidates"]]
    assert len(status) > 1 and "not reached" not in status
    assert status[0] == "ok" and "wrong" not in status and result["heuristic_us"] > 0
    forget()
    listed = json.loads(invoke("tune", "geglu", "--list", "--device", "cuda", "--json").stdout)
    assert [result["kept"]] == [entry["config"] for file in listed for entry in file["entries"]]
