"""How a study's time is spent: the arithmetic on constructed timings, and a whole study whose parts add up."""

import pytest
from test_study import run

from fusewise.lab import spent


def test_parts_that_came_one_after_another_stay_as_they_are():
    parts = [{"inputs": 1.0, "compiling": 4.0}, {"inputs": 2.0, "truth": 3.0}, {}]
    assert spent.scaled(parts, 12.0) == {"inputs": 3.0, "compiling": 4.0, "truth": 3.0}
    assert spent.scaled([], 5.0) == {}


def test_parts_that_overlapped_are_shares_of_the_time_that_passed():
    found = spent.scaled([{"compiling": 6.0}, {"compiling": 6.0, "truth": 8.0}], 10.0)
    assert found == pytest.approx({"compiling": 6.0, "truth": 4.0})
    assert sum(found.values()) == pytest.approx(10.0)


def test_what_nobody_claims_is_the_rest_and_the_whole_is_the_seconds():
    whole = spent.completed({"starting": 2.0, "measuring": 5.0}, 10.0)
    assert list(whole) == list(spent.PARTS)
    assert whole["rest"] == 3.0 and sum(whole.values()) == 10.0
    assert spent.completed({"measuring": 5.0}, 4.999)["rest"] == 0.0


def test_the_harness_own_share_is_what_is_neither_measuring_nor_compiling():
    constructed = {
        "starting": 6.0,
        "inputs": 1.0,
        "truth": 2.0,
        "compiling": 40.0,
        "measuring": 45.0,
        "code": 5.0,
        "rest": 1.0,
    }
    assert spent.own_share(constructed) == pytest.approx(0.10)
    assert spent.own_share({"measuring": 3.0, "rest": 1.0}) == 0.25
    assert spent.own_share({}) is None
    assert set(spent.OWN) < set(spent.PARTS) and not {"compiling", "measuring", "code"} & set(spent.OWN)


def test_a_part_counts_even_where_it_ends_in_an_error():
    parts = spent.Parts()
    with pytest.raises(RuntimeError), parts.part("compiling"):
        raise RuntimeError
    with parts.part("compiling"):
        pass
    assert list(parts.seconds) == ["compiling"] and parts.seconds["compiling"] > 0


def test_a_studys_parts_add_up_to_its_seconds_and_resuming_adds_to_both(tmp_path):
    made, _ = run(tmp_path / "one", ["floor-copy", "eager", "lab_fakes:Raising"])
    assert sum(made.spent.values()) == pytest.approx(made.seconds)
    assert made.spent["starting"] > 0.5  # a process has loaded torch, and so have the three forked from it
    assert made.spent["measuring"] > 0 and made.spent["compiling"] > 0 and made.spent["truth"] > 0
    eager = next(m for m in made.measurements if m.provider == "eager")
    assert {"inputs", "compiling", "truth", "measuring"} == set(eager.prepared["spent"])
    before = made.seconds
    made.account(5.0, {"code": 4.0})
    assert made.seconds == pytest.approx(before + 5.0) and made.spent["code"] == 4.0
    assert sum(made.spent.values()) == pytest.approx(made.seconds)
