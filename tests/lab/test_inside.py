from builders import study_record

from fusewise.lab import inside
from fusewise.lab.problem import Task


def task(case, dtype="fp32", pass_="fwd"):
    return Task("rope", case, dtype, pass_, "cpu", 0)


def test_ledgers_are_made_for_one_of_each_dtype_and_pass_first():
    sweep = [task(f"cube-{n}", pass_=p) for n in range(10) for p in ("fwd", "bwd")] + [task("model", "bf16")]
    chosen = inside.chosen(sweep)
    assert len(chosen) == inside.LEDGER_TASKS
    assert [sweep.index(t) for t in chosen] == [0, 1, 2, 3, 4, 20]
    assert inside.chosen(sweep[:2]) == sweep[:2]


def test_a_long_listing_is_cut_and_says_by_how_much():
    assert inside.cut("short") == "short"
    text = inside.cut("x" * (inside.LONGEST_TEXT + 5))
    assert text.endswith("\n… 5 more characters in the file\n")
    assert len(text) < inside.LONGEST_TEXT + 50


def test_nothing_right_means_nothing_to_look_into(tmp_path):
    class Options:
        providers, tasks, out, device = (), [task("cube-4")], tmp_path, "cpu"

    made = study_record([])
    inside.look(Options, made, lambda _: None)
    assert (made.code, made.ledgers, list(tmp_path.iterdir())) == ([], [], [])
