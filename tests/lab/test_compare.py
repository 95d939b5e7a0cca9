"""Comparison of two runs, from constructed records: regressions, noise, and undecidable changes."""

import dataclasses
import json
import random

import pytest
from builders import measurement, row, study_record
from click.testing import CliRunner

from fusewise.cli import cli
from fusewise.lab import analysis, compare, record


def run(times, noise=0.001, seed=0, spread=0.002, missing=(), broken=(), clocks=None, waiting=None, **fields):
    generator = random.Random(seed)
    times = {"floor-copy": 10.0, **times, "eager#2": times["eager"] * (1 + noise)}
    measurements = [
        measurement(name, [[time * (1 + generator.gauss(0, 0 if "#" in name or name == "eager" else spread))] for _ in range(12)])
        for name, time in times.items()
    ]  # fmt: skip
    for m in measurements:
        for turn in m.rounds:
            turn["clocks"] = None if clocks is None else {"sm_mhz": clocks, "throttle": 0}
            turn["clocks"] = turn["clocks"] if waiting is None else {"waiting_threads": waiting}
    rows = [row(name, **fields) for name in times if "#" not in name]
    rows += [row(name, "missing", **fields) for name in missing] + [row(name, "failed", **fields) for name in broken]
    rows, comparisons = analysis.group_rows(rows, measurements)
    return study_record(rows, measurements, comparisons)


def compared(before, after, **options):
    return compare.compare(compare.side(before, "a"), compare.side(after, "b"), **options)


def words(found):
    return {change.provider: change.verdict for change in found.changes}


def test_slower_beyond_noise_is_a_regression_and_faster_is_none():
    found = compared(
        run({"eager": 50.0, "liger": 20.0, "jax": 30.0}), run({"eager": 50.0, "liger": 22.0, "jax": 27.0}, seed=1)
    )
    assert words(found) == {"eager": "same", "liger": "slower", "jax": "faster"}
    assert found.exit_code() == 1
    (change,) = [c for c in found.changes if c.provider == "liger"]
    assert change.low < change.ratio < change.high
    assert change.ratio == pytest.approx(1.1, rel=0.01)


def test_a_difference_within_the_noise_of_either_run_is_none():
    noisy = run({"eager": 50.0, "liger": 22.0}, noise=0.2, seed=1)
    for pair in ((run({"eager": 50.0, "liger": 20.0}), noisy), (noisy, run({"eager": 50.0, "liger": 20.0}))):
        found = compared(*pair)
        assert words(found)["liger"] in ("same", "ambiguous")
        assert found.exit_code() == 0
    assert compared(run({"eager": 50.0}), run({"eager": 53.0}), tolerance=0.1).exit_code() == 0


def test_identical_runs_are_the_same_in_95_of_100():
    verdicts = []
    for seed in range(100):
        a, b = (run({"eager": 50.0, "liger": 20.0}, seed=2 * seed + i, spread=0.01) for i in (0, 1))
        verdicts.append(words(compared(a, b))["liger"])
    assert verdicts.count("same") >= 95
    assert verdicts.count("slower") <= 1


def test_ambiguous_is_a_failure_only_when_strict():
    found = compared(
        run({"eager": 50.0, "liger": 20.0}, spread=0.2), run({"eager": 50.0, "liger": 23.0}, spread=0.2, seed=3)
    )
    assert words(found)["liger"] == "ambiguous"
    assert (found.exit_code(), found.exit_code(strict=True)) == (0, 1)


def test_what_broke_is_a_regression_what_is_not_installed_is_none():
    before = run({"eager": 50.0, "liger": 20.0, "quack": 30.0}, broken=["jax", "tvm"])
    after = run({"eager": 50.0, "jax": 20.0}, missing=["quack"], broken=["liger", "tvm"])
    found = compared(before, after)
    assert words(found) == {"eager": "same", "liger": "broken", "jax": "mended", "tvm": "still broken"}
    assert found.exit_code() == 1
    assert next(c.note for c in found.changes if c.provider == "liger") == "because"


def test_a_difference_that_the_clock_explains_is_ambiguous():
    found = compared(run({"eager": 50.0}, clocks=1900), run({"eager": 60.0}, clocks=1583))
    assert words(found) == {"eager": "ambiguous"}
    assert found.changes[0].note == "the clock was 1900 MHz before, 1583 after; in clock cycles it is not slower"
    assert words(compared(run({"eager": 50.0}, clocks=1900), run({"eager": 60.0}, clocks=1890))) == {"eager": "slower"}


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ((60.0, 1583), (50.0, 1900), "ambiguous"),
        ((75.0, 1583), (50.0, 1900), "faster"),  # by more than the clock
        ((50.0, 1900), (75.0, 1583), "slower"),
        ((50.0, 1900), (51.6, 1845), "ambiguous"),  # 3 % matter
        ((50.0, 1900), (51.2, 1880), "slower"),  # 1 % does not
        ((50.0, 1900), (60.0, 2300), "slower"),  # although the clock was higher
        ((50.0, 1900), (50.0, 1583), "same"),
    ],
)
def test_what_the_clock_explains_either_way(before, after, word):
    sides = (run({"eager": time}, clocks=mhz) for time, mhz in (before, after))
    assert words(compared(*sides)) == {"eager": word}


def test_a_difference_beside_threads_that_waited_for_a_core_is_ambiguous():
    idle, busy = run({"eager": 50.0}, waiting=0.01), run({"eager": 60.0}, waiting=1.5)
    found = compared(idle, busy)
    assert words(found) == {"eager": "ambiguous"}
    assert found.changes[0].note == "the machine was busy: 1.50 of its threads waited for a core, on average"
    assert words(compared(busy, idle)) == {"eager": "ambiguous"}
    slower_still = run({"eager": 70.0}, waiting=0.01)
    assert words(compared(busy, slower_still)) == {"eager": "slower"}  # the wait does not explain it
    assert words(compared(idle, run({"eager": 60.0}, clocks=1583))) == {"eager": "slower"}  # of one clock only


def test_notes_say_what_else_changed():
    names = ("jax", "numpy", "python", "torch", "triton", "tvm")
    before, after = (
        run({"eager": 50.0}, versions=dict.fromkeys(names[1:], "2.10")),
        run({"eager": 50.0}, versions=dict.fromkeys(names[:-1], "2.11"), device="other"),
    )
    for i, r in enumerate(after.rows):
        after.rows[i] = dataclasses.replace(r, device_us=r.device_us * 1.5)
    after.request["cache"], before.environment["torch_threads"], after.environment["torch_threads"] = "warm", 2, 1
    notes = compared(before, after).notes
    assert {"cache: cold before, warm after", "torch threads: 2 before, 1 after"} <= set(notes)
    changed = ["none before, 2.11", *["2.10 before, 2.11"] * 4, "2.10 before, none"]
    expected = [f"{name}: {words} after" for name, words in zip(names, changed, strict=True)]
    assert [*notes[:7]] == ["device: test before, other after", *expected]
    assert any(note.startswith("the machine itself changed: copying takes 1.5") for note in notes)
    slower = compared(run({"eager": 50.0}), run({"eager": 75.0})).notes
    assert not any("machine" in note for note in slower)  # its floor takes as long as before


def test_rows_without_samples_are_compared_by_their_spread(tmp_path):
    files = []
    for name, time, spread in (("a", 20.0, 0.2), ("b", 23.0, 0.2), ("c", 23.0, 8.0)):
        files.append(tmp_path / f"{name}.jsonl")
        record.append_rows(
            files[-1], [row("liger", device_us=999.0), row("liger", device_us=time, device_us_iqr=spread)]
        )
    a, b, c = map(compare.read, files)
    assert words(compare.compare(a, b)) == {"liger": "slower"}
    assert words(compare.compare(a, c)) == {"liger": "ambiguous"}
    assert "no A/A pair before and after: the noise is taken to be the tolerance" in compare.compare(a, b).notes
    assert "1 of the rows after do not count: later ones have the same key" in compare.compare(a, b).notes
    measured = compare.side(run({"eager": 50.0, "liger": 23.0}), "measured")
    told = "no A/A pair before: the noise is taken to be the other side's or the tolerance"
    assert told in compare.compare(a, measured).notes
    assert words(compare.compare(a, measured)) == {"liger": "slower"}
    assert words(compare.compare(measured, a)) == {"liger": "faster"}
    assert words(compare.compare(measured, c)) == {"liger": "ambiguous"}  # whatever the samples of the other say
    assert not any("A/A" in note for note in compare.compare(measured, measured).notes)


@pytest.mark.parametrize(("iqrs", "spread"), [((3.0, 4.0), 0.25), ((None, 4.0), 0.2), ((None, None), 0.0)])
def test_the_interval_of_rows_without_samples(iqrs, spread):
    sides = (compare.side(study_record([row("liger", device_us=10.0, device_us_iqr=iqr)]), "") for iqr in iqrs)
    (change,) = compare.compare(*sides).changes
    assert (change.ratio, change.low, change.high) == (1.0, pytest.approx(1 / (1 + spread)), pytest.approx(1 + spread))


def test_the_interval_of_samples_holds_95_percent_of_a_bootstraps_medians():
    """Their exact quantiles are in test_analysis.py."""
    rounds = [[float(k)] for k in range(1, 1002)]
    varied, mirrored = (
        study_record([row("liger", device_us=501.0)], [measurement("liger", values)])
        for values in (rounds, rounds[::-1])
    )
    constant = study_record([row("liger", device_us=1.0)], [measurement("liger", [[1.0]] * 1001)])
    (change,) = compared(constant, varied).changes
    assert change.ratio == 501 and abs(change.low - 470) <= 2 and abs(change.high - 532) <= 2
    (other,) = compared(constant, mirrored).changes
    assert (other.low, other.high) == (pytest.approx(1002 - change.high), pytest.approx(1002 - change.low))
    (change,) = compared(varied, constant).changes
    assert abs(1 / change.low - 532) <= 2 and abs(1 / change.high - 470) <= 2
    (change,) = compared(varied, varied).changes  # drawn independently, though they are the same
    assert change.low < 0.94 and change.high > 1.06


@pytest.mark.parametrize(("rounds", "low"), [((2, 3), 0.9), ((3, 2), 0.9), ((3, 3), 1.0)])
def test_fewer_than_three_rounds_are_compared_by_their_spread(rounds, low):
    rows = [row("liger", device_us=1.0, device_us_iqr=0.2 / 0.9)]
    sides = (study_record(rows, [measurement("liger", [[1.0]] * count)]) for count in rounds)
    assert compared(*sides).changes[0].low == pytest.approx(low, rel=0.05)


def test_relative_to_the_floor_a_slower_machine_is_no_regression():
    before, after = run({"eager": 50.0, "liger": 20.0}), run({"floor-copy": 15.0, "eager": 75.0, "liger": 33.0})
    before.measurements[0].rounds.pop()  # the floor stopped a round before the others
    sides = compare.side(before, "a"), compare.side(after, "b")
    assert words(compare.compare(*sides)) == {"eager": "slower", "liger": "slower"}
    found = compare.compare(*map(compare.relative, sides))
    assert words(found) == {"eager": "same", "liger": "slower"}
    assert found.changes[1].ratio == pytest.approx(1.1, rel=0.01)
    assert found.changes[0].before_us == pytest.approx(5.0, rel=0.01)
    shared = {"limit": "copy", "share_of_limit": 0.5}
    rows = [
        row("floor-copy", device_us=10.0),
        row("liger", device_us=20.0, device_us_iqr=0.4, **shared),
        row("jax", "failed"),
        row("tvm", device_us=3.0, limit="copy"),
    ]
    for without in (study_record(rows), study_record([dataclasses.replace(r, device_us_iqr=None) for r in rows])):
        scaled = compare.relative(compare.side(without, "a")).rows
        liger = next(r for r in scaled.values() if r.provider == "liger")
        assert (liger.device_us, liger.device_us_iqr) == (
            2.0,
            pytest.approx(0.04) if without.rows[1].device_us_iqr else None,
        )
        assert [(r.provider, r.device_us) for r in scaled.values()] == [("floor-copy", 10), ("liger", 2), ("jax", None)]
    for floors in ([], [row("floor-copy", "failed")]):  # the limit is then the machine's kept one, of another time
        without_floor = study_record([*floors, *rows[1:]])
        scaled = compare.relative(compare.side(without_floor, "a")).rows
        assert [r.provider for r in scaled.values() if r not in floors] == ["jax"]
    # Beside floors of which another binds, a copy takes as long as it took.
    faster = run({"floor-copy": 10.0, "floor-matmul": 15.0, "eager": 50.0})
    sides = [compare.relative(compare.side(r, "")) for r in (run({"floor-matmul": 20.0, "eager": 50.0}), faster)]
    assert not any("machine" in note for note in compare.compare(*sides).notes)
    assert any(note.startswith("the machine itself changed: copying takes 1.500") for note in found.notes)
    bare = study_record([row("eager", device_us=3.0)])
    assert compare.relative(compare.side(bare, "a")).rows == {}


def saved(folder, made):
    folder.mkdir()
    record.save(made, folder)
    return str(folder)


def test_the_command_prints_a_table_or_json_and_its_exit_code_is_the_verdict(tmp_path):
    a = saved(tmp_path / "a", run({"eager": 50.0, "liger": 20.0}))
    b = saved(tmp_path / "b", run({"eager": 50.0, "liger": 25.0}, seed=1))
    result = CliRunner().invoke(cli, ["compare", a, b])
    assert result.exit_code == 1
    assert "slower" in result.output
    assert "liger" in result.output
    assert CliRunner().invoke(cli, ["compare", a, a]).exit_code == 0
    assert CliRunner().invoke(cli, ["compare", a, b, "--tolerance", "0.5"]).exit_code == 0
    found = json.loads(CliRunner().invoke(cli, ["compare", a, b, "--json"]).stdout)
    assert {c["provider"]: c["verdict"] for c in found["changes"]} == {"eager": "same", "liger": "slower"}
    assert found["exit_code"] == 1
    assert {"op", "case", "dtype", "pass", "ratio", "low", "high", "noise"} <= found["changes"][0].keys()


@pytest.mark.parametrize(
    ("time", "told"),
    [
        ("1e308", "device_us: must be at least 1e-18 and at most 1e+18, got 1e+308; "),
        ("1e999", "device_us: must be a finite number or null, got inf; "),
        ("-1e999", "device_us: must be a finite number or null, got -inf; "),
        ("NaN", "NaN is no JSON; "),
        ("Infinity", "Infinity is no JSON; "),
    ],
)
def test_a_time_beyond_all_use_is_told_with_its_value(tmp_path, time, told):
    """JSON allows any number, and Python reads 1e999 as infinity."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row("eager", device_us=0.125).to_json()).replace("0.125", time) + "\n")
    result = CliRunner().invoke(cli, ["compare", str(path), str(path)])
    assert result.exit_code == 2
    assert f"rows.jsonl must be a row, got this fault: {told}" in " ".join(result.output.split())


def test_what_cannot_be_compared_exits_2_with_words(tmp_path):
    a = saved(tmp_path / "a", run({"eager": 50.0}))
    other = saved(tmp_path / "b", study_record([row("eager", case="another", device_us=1.0)]))
    garbage = tmp_path / "x.jsonl"
    garbage.write_text("no json\n")
    for arguments, said in (
        ((a, str(tmp_path / "nowhere")), "nowhere"),
        ((a, str(garbage)), "must be a row"),
        ((a, other), "no row in common"),
        ((other, other, "--relative"), "must share rows, with floors in both"),
        ((a, a, "--tolerance", "nan"), "nan is not in the range"),
    ):
        result = CliRunner().invoke(cli, ["compare", *arguments])
        assert result.exit_code == 2, result.output
        assert said in " ".join(result.output.split())
