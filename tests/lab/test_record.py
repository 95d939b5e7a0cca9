import copy
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from builders import full_record, gpu_record, measurement, row, study_record
from hypothesis import given, settings
from hypothesis import strategies as st

from fusewise.lab import analysis, commands, compare, folder, record, schema, verdict
from fusewise.lab.render import html, markdown, script, terminal

FIELDS = [
    "op", "case", "shape", "dtype", "pass", "provider", "status", "reason", "device_us", "device_us_iqr", "host_us",
    "first_call_s", "bytes_min", "flops_min", "peak_bytes", "held_bytes", "limit", "share_of_limit", "error",
    "error_eager", "verdict_vs_best_other", "versions", "device", "clocks", "run",
]  # fmt: skip


def complete():
    measurements = [measurement(name, [[10.0, 11.0]] * 4) for name in ("floor-copy", "eager", "eager#2", "right")]
    rows, comparisons = analysis.group_rows(
        [
            row("floor-copy", error=None),
            row("eager"),
            row("right"),
            row("bad", "wrong", error=0.5),
            row("no", "missing"),
        ],
        measurements,
    )
    return study_record(rows, measurements, comparisons)


def test_a_row_has_exactly_the_published_fields():
    assert list(row("eager").to_json()) == FIELDS
    assert list(row("eager", kernel_us=9.5).to_json()) == [*FIELDS, "kernel_us"]
    rare = {"kernel_us": 9.5, "graph_us": 9.0, "first_call_again_s": 0.5}
    assert list(row("eager", **rare).to_json()) == [*FIELDS, *rare]


def test_round_trip(tmp_path):
    before = complete()
    record.save(before, tmp_path)
    assert record.read(tmp_path) == before
    assert record.read(tmp_path / "record.json") == before
    assert not [p for p in tmp_path.iterdir() if p.name != "record.json"]


def test_the_schema_accepts_what_is_written_and_refuses_what_is_not():
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema.schema())
    validator.check_schema(schema.schema())
    good = complete().to_json()
    validator.validate(good)

    def refused(change):
        data = json.loads(json.dumps(good))
        change(data)
        return not validator.is_valid(data)

    assert refused(lambda d: d.update(schema=1))
    assert refused(lambda d: d["rows"][0].pop("run"))
    assert refused(lambda d: d["rows"][0].update(status="fine"))
    assert refused(lambda d: d["rows"][0].update(device_us=0))
    assert refused(lambda d: d["rows"][0].update(extra=1))
    assert refused(lambda d: d["rows"][-1].update(reason=""))
    assert refused(lambda d: d["rows"][-1].update(device_us=3.0))
    assert refused(lambda d: d["measurements"][0]["rounds"][0].update(device_us=[]))


@pytest.mark.parametrize("change", [{"kind": "something"}, {"schema": 99}])
def test_other_files_are_refused_with_words(change):
    with pytest.raises(ValueError, match=r"^record: (kind|schema) must be .*, got .*; "):
        record.Record.from_json({**complete().to_json(), **change})


def test_the_schema_accepts_code_ledgers_and_limits():
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema.schema())
    good = full_record().to_json()
    validator.validate(good)
    for name in ("code", "ledgers"):
        assert not validator.is_valid({**good, name: [{**good[name][0], "provider": 3}]})
    assert not validator.is_valid({**good, "limits": {"copy_gb_s": 3}})
    assert not validator.is_valid({k: v for k, v in good.items() if k != "resumed"})


def test_the_schema_accepts_profiles_and_what_the_time_went_into():
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema.schema())
    good = gpu_record().to_json()
    validator.validate(good)
    assert not validator.is_valid({**good, "spent": {"truth": -1.0}})
    assert not validator.is_valid({**good, "profiles": [{**good["profiles"][0], "rows": [{"name": "x"}]}]})


def test_a_record_of_version_1_is_read_as_todays():
    now = complete()
    old = {
        k: v for k, v in now.to_json().items() if k not in ("code", "ledgers", "profiles", "spent", "limits", "resumed")
    }
    old["schema"] = 1
    assert record.Record.from_json(old) == now
    assert old["schema"] == 1
    second = {k: v for k, v in now.to_json().items() if k not in ("profiles", "spent")}
    assert record.Record.from_json({**second, "schema": 2}) == now
    assert set(record.MIGRATIONS) == set(range(1, record.SCHEMA_VERSION))


def test_a_record_has_one_row_of_each_id():
    data = study_record([row("eager", device_us=1.0), row("eager", device_us=2.0)]).to_json()
    with pytest.raises(
        ValueError, match=r"^record: it must have one row of each id, got several of 'rope/cube-8/fp32/fwd/eager'; "
    ):
        record.Record.from_json(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "NaN",
        "[" * 100_000,
        json.dumps({**study_record([]).to_json(), "seconds": math.nan}),
        json.dumps({**study_record([]).to_json(), "seconds": -math.inf}),
        '{"kind": "fusewise.record", "schema": 2}',
        '{"kind": 3}',
    ],
)
def test_what_is_no_record_is_refused_with_words(tmp_path, text):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(ValueError, match=r"^record: .* must .*, got .*; "):
        record.read(tmp_path)


HOSTILE_VALUES = [
    None,
    True,
    -1,
    0,
    1.5,
    1e-200,
    5e-324,
    10**400,
    "",
    "x",
    "x" * 5000,
    "\ud800",
    [],
    [None],
    {},
    {"a": 1},
]


SMALL = [full_record(1).to_json(), gpu_record().to_json()]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_changed_record_is_refused_or_can_be_shown(data):
    """Refused by exactly the rules of JSON Schema, of which our validator implements the part that the schema uses."""
    jsonschema = pytest.importorskip("jsonschema")
    changed = copy.deepcopy(SMALL[data.draw(st.integers(0, 1))])
    # Draw the place key by key, so that rare fields are hit as often as the many samples.
    where, key = changed, None
    while isinstance(where, (dict, list)) and where and (key is None or data.draw(st.integers(0, 3))):
        inside, key = where, data.draw(st.sampled_from(list(where) if isinstance(where, dict) else range(len(where))))
        where = inside[key]
    inside[key] = data.draw(st.sampled_from(HOSTILE_VALUES))
    if not jsonschema.Draft202012Validator(schema.schema()).is_valid(changed):
        with pytest.raises(ValueError, match=r"^record: .{,500}$"):  # whatever the size of what is wrong
            record.Record.from_json(changed)
        return
    found = record.Record.from_json(changed)
    html.report(found)
    markdown.report(found)
    terminal.summary(found)
    verdict.summary(verdict.verdicts(found))
    json.dumps(commands.as_json(found), allow_nan=False)
    sides = compare.side(found, "a"), compare.side(record.Record.from_json(SMALL[0]), "b")
    for before, after in (sides, [compare.relative(side) for side in sides]):
        terminal.comparison_table(compare.compare(before, after))
    if found.rows:
        script.program(found, found.rows[0])


def test_the_schema_uses_what_is_understood():
    def keywords(rules):
        for name, rule in rules.items():
            yield name
            if name in ("properties", "$defs"):
                for inner in rule.values():
                    yield from keywords(inner)
            elif name in ("allOf", "anyOf"):
                for inner in rule:
                    yield from keywords(inner)
            elif isinstance(rule, dict) and name in (
                "items",
                "additionalProperties",
                "propertyNames",
                "if",
                "then",
                "else",
            ):
                yield from keywords(rule)

    assert set(keywords(schema.schema())) <= schema.SILENT | set(schema._BY_KEYWORD)


def test_every_number_has_a_range():
    """No value may overflow a double, which code that computes with it would hit."""

    def without(rules):
        if isinstance(rules, dict):
            kinds = rules.get("type", [])
            ranged = {"minimum", "exclusiveMinimum"} & rules.keys() and "maximum" in rules
            if {"number", "integer"} & {*([kinds] if isinstance(kinds, str) else kinds)} and not ranged:
                yield rules
        for inner in rules.values() if isinstance(rules, dict) else rules if isinstance(rules, list) else ():
            yield from without(inner)

    # the required time of a finished row; its range is on the nullable definition
    assert list(without(schema.schema())) == [{"type": "number"}]


def nested(depth):
    found = {}
    for _ in range(depth):
        found = {"a": found}
    return found


TASK = {"op": "rope", "case": "cube-8", "dtype": "fp32", "pass_": "fwd"}
STAGE = {"provider": "eager", "stage": "source", "order": 0, "language": "python", "text": "x = 1"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda d: d["rows"][3].update(device_us="3"),
            r"rows\[3\].device_us: must be a finite number or null, got '3'; name another",
        ),
        (
            lambda d: d["rows"][0].update(device_us=1e300),
            r"rows\[0\].device_us: must be at least 1e-18 and at most 1e\+18, got 1e\+300",
        ),
        (lambda d: d.pop("run"), "must have run"),
        (
            lambda d: d["request"].update(precision=math.inf),
            r"request\.precision: must be .* a finite number .* got inf; ",
        ),
        (
            lambda d: d["request"].update(tasks=[{**TASK, "detail": {"a": [1e308, -math.inf]}}]),
            r"request\.tasks\[0\]\.detail\.a\[1\]: must be .* a finite number .* got -inf; ",
        ),
        (
            lambda d: d.update(code=[STAGE | {"lines": {"1": "a.py:1", "first": "a.py:1"}}]),
            r"code\[0\]\.lines\.first: must match .*, got 'first'",
        ),
        (lambda d: d.update(more=1), "must not have 'more'"),
        (lambda d: d["spent"].update({"\x1b[2J": "x"}), r"spent\.'\\x1b\[2J': must be a finite number, got 'x'"),
        (lambda d: d.update(code=[STAGE | {"lines": {"\x1b": "a"}}]), r"code\[0\]\.lines\.'\\x1b': must match"),
        (lambda d: d["rows"][0].update(share_of_limit=5e-324), r"rows\[0\].share_of_limit: must be at least 1e-18"),
        (
            lambda d: d.update(code=[STAGE | {"pass": {"a": 1}}]),
            r"code\[0\]\.pass: must be one of fwd, bwd, fwd\+bwd, got dict of 1",
        ),
        (
            lambda d: d.update(code=[STAGE | {"counts": {"spill": 10**400}}]),
            r"code\[0\]\.counts\.spill: must be at least -1e\+30 and at most 1e\+30, got 1000",
        ),
        (lambda d: d["request"].update(deep=nested(900)), "must be nested no more than 64 deep"),
        (lambda d: d["request"].update(cache="tepid"), "request.cache: must be one of cold, warm, got 'tepid'"),
    ],
)
def test_a_fault_is_told_with_its_place(change, words):
    data = complete().to_json()
    change(data)
    with pytest.raises(ValueError, match=words):
        record.Record.from_json(data)


@pytest.mark.parametrize("end", [1e-18, 1e18])
def test_a_number_may_be_at_either_end_of_its_range(end):
    made = study_record([row("eager", device_us=end)])
    assert record.Record.from_json(made.to_json()) == made


@pytest.mark.parametrize("version", [True, 3.5, "3", [3], None])
def test_a_version_is_an_integer(version):
    with pytest.raises(ValueError, match="schema must be 1 to 5"):
        record.Record.from_json({**complete().to_json(), "schema": version})


@pytest.mark.parametrize("version", [3, 4])
def test_rows_with_and_without_what_later_versions_added_are_read(version, tmp_path):
    made = complete()
    assert record.Record.from_json({**made.to_json(), "schema": version}) == made
    made.rows[0] = replace(made.rows[0], kernel_us=9.5, graph_us=9.0, first_call_again_s=0.5)
    record.append_rows(tmp_path / "rows.jsonl", made.rows)
    assert record.read_rows(tmp_path / "rows.jsonl") == record.Record.from_json(made.to_json()).rows == made.rows


def test_rows_are_read_from_records_and_from_published_files(tmp_path):
    made = complete()
    record.save(made, tmp_path)
    published = tmp_path / "cpu.jsonl"
    record.append_rows(published, made.rows)
    assert record.read_rows(tmp_path) == record.read_rows(published) == made.rows
    published.write_text(published.read_text().removesuffix("\n"))  # as some editors leave it
    record.append_rows(published, made.rows)
    assert record.read_rows(published) == 2 * made.rows
    record.append_rows(Path("/dev/null"), made.rows)
    read_end, write_end = os.pipe()
    record.append_rows(Path(f"/dev/fd/{write_end}"), made.rows[:1])
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        assert pipe.read() == json.dumps(made.rows[0].to_json()) + "\n"
    for text in ('{"op": 1}', "[]", json.dumps({**made.rows[0].to_json(), "versions": 3})):
        published.write_text(f"{text}\n")
        with pytest.raises(
            ValueError, match=r"^record: line 1 of .* must be a row, got this fault: [^;]*; mend the file$"
        ):
            record.read_rows(published)
    published.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"^record: .*cpu.jsonl must be a file of rows, got .*; "):
        record.read_rows(published)


def test_rows_end_where_a_line_of_the_file_does(tmp_path):
    path, rows = tmp_path / "rows.jsonl", complete().rows
    odd = {**rows[0].to_json(), "shape": "a\u2028b\x85c"}
    path.write_text(
        json.dumps(odd, ensure_ascii=False) + "\n" + json.dumps(rows[1].to_json()) + "\r\n\n", encoding="utf-8"
    )
    assert record.read_rows(path) == [replace(rows[0], shape="a\u2028b\x85c"), rows[1]]
    path.write_text("")
    assert record.read_rows(path) == []


def test_a_folder_without_a_record_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"^record: .* must be a run directory, got one without record.json; "):
        record.read(tmp_path)


def test_numbers_that_json_has_not_are_refused(tmp_path):
    broken = complete()
    broken.seconds = float("nan")
    with pytest.raises(ValueError, match="seconds: must be a finite number or null, got nan"):
        record.save(broken, tmp_path)
    broken.seconds, broken.measurements[0].prepared["more"] = None, math.inf
    with pytest.raises(ValueError, match="not JSON compliant"):
        record.save(broken, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    made = complete()
    made.request["title"] = "x" * 4001
    with pytest.raises(
        ValueError, match=r"^record: .*: request\.title: must have a length of 0 to 4000, got 4001; mend the"
    ):
        record.save(made, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_group_that_no_record_may_have_is_not_added():
    made = study_record([])
    for rows, measurements, words in (
        ([row("eager", device_us=1.0, versions={"a": 3})], [], "versions.a: must be string, got 3; mend the provider"),
        ([row("eager", device_us=1.0)], [measurement("", [[1.0]])], "provider: must have a length of 1 to 4000, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            made.add(rows, measurements, [])
    assert made == study_record([])


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x"
    monkeypatch.setattr(record.tempfile, "tempdir", "/no/such/folder")  # of another file system, mostly
    record.write_atomically(path, "old")
    assert path.stat().st_mode & 0o777 == 0o644  # not as of a temporary file, for its owner alone

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        record.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_rows_append_one_a_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = complete().rows
    record.append_rows(path, rows[:2])
    record.append_rows(path, rows[2:])
    lines = path.read_text().splitlines()
    assert [record.Row.from_json(json.loads(line)) for line in lines] == rows


def test_reading_a_record_runs_nothing_that_is_in_it(tmp_path):
    """A record is data: hostile text in it remains text."""
    hostile = study_record([row("__import__('os').system('touch owned')", "failed", reason="!!python/object")])
    record.save(hostile, tmp_path)
    code = "import sys, pathlib, fusewise.lab.record as r; print(r.read(pathlib.Path(sys.argv[1])).rows[0].reason)"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.strip() == "!!python/object"
    assert not (tmp_path / "owned").exists()


def test_a_folder_of_someone_else_is_read_and_locked_with_care(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / ".lock").symlink_to(mine)
    with pytest.raises(OSError, match="symbolic links"), folder.claimed(tmp_path):
        pass
    assert mine.read_text() == "mine"
    os.mkfifo(tmp_path / "record.json")  # reading it would wait for ever
    with pytest.raises(ValueError, match=r"got one without record\.json"):
        record.read(tmp_path)
