import contextlib
from dataclasses import replace

from builders import row, study_record

from fusewise.lab import inside, plugin
from fusewise.lab.code.capture import Answer
from fusewise.lab.options import Options
from fusewise.lab.problem import Task


def task(case, dtype="fp32", pass_="fwd"):
    return Task("rope", case, dtype, pass_, "cpu", 0)


def asked(out, providers=()):
    return Options(op="rope", tasks=[task("cube-8")], providers=providers, device="cpu", out=out, profiled=("cube-8",))


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
    made = study_record([])
    inside.look(asked(tmp_path), made, lambda _: None, lambda _: None)
    assert (made.code, made.ledgers, list(tmp_path.iterdir())) == ([], [], [])


def test_a_finished_run_that_is_resumed_has_everything_once(tmp_path, monkeypatch):
    def ask(entry, requests, log, **_):
        found = {"calls": 10, "rows": [], "stages": [], "ledger": {"provider": entry.name}}
        return [Answer(entry.name, "ok", "", found) for _ in requests]

    monkeypatch.setattr(inside.capture, "ask", ask)
    monkeypatch.setattr(inside, "Nursery", lambda *_, **__: contextlib.ExitStack())
    (tmp_path / "code").mkdir()
    made = study_record([row("eager")])
    for _ in range(2):
        inside.look(asked(tmp_path, plugin.select(["eager"], "rope", "cpu")), made, lambda _: None, lambda _: None)
    assert (len(made.profiles), len(made.ledgers)) == (1, 1)


def test_what_failed_is_told_once_and_what_is_missing_is_not(tmp_path, monkeypatch):
    def ask(entry, requests, log, **_):
        status = {"stages": "missing", "traffic": "failed", "profile": "ok"}
        found = {"calls": 10, "rows": []}
        return [Answer(entry.name, status[r["do"]], "AttributeError: utils", found) for r in requests]

    monkeypatch.setattr(inside.capture, "ask", ask)
    monkeypatch.setattr(inside, "Nursery", lambda *_, **__: contextlib.ExitStack())
    (tmp_path / "code").mkdir()
    told = []
    options = asked(tmp_path, plugin.select(["eager"], "rope", "cpu"))
    options = replace(options, tasks=[task("cube-8"), task("cube-16")])
    inside.look(options, study_record([row("eager")]), lambda _: None, told.append)
    assert told == ["eager: no traffic ledger: AttributeError: utils"]
