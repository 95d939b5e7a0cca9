import dataclasses
import io
import math
from pathlib import Path

import pytest
from builders import LIMITS, measurement, row, study_record
from rich.console import Console

from fusewise.lab import analysis, commands, compare, verdict
from fusewise.lab.api import Result
from fusewise.lab.problem import Task
from fusewise.lab.render import (
    calls,
    charts,
    gigabytes_per_second,
    html,
    idleness,
    markdown,
    measured,
    number,
    percent,
    plots,
    shortened,
    size,
    terminal,
)


def sweep_record():
    rows, measurements, comparisons = [], [], []
    for n in (4, 8, 16):
        key = {"case": f"cube-{n}"}
        names = {"floor-copy": 1, "floor-launch": 0.5, "eager": 3, "fusewise-cpu": 1.2, "fusewise-cpu#2": 1.2}
        some = [measurement(name, [[factor * n]] * 5, **key) for name, factor in names.items()]
        group = [row(name, **key, error=None if name.startswith("floor") else 1e-7) for name in list(names)[:-1]]
        group += [row("liger", "missing", **key, reason="liger_kernel is not installed; pip install liger-kernel")]
        group += [row("bad", "wrong", **key, error=0.5, error_eager=1e-7, reason="error 0.5 is more than twice")]
        group, compared = analysis.group_rows(group, some)
        rows, measurements, comparisons = rows + group, measurements + some, comparisons + compared
    return study_record(rows, measurements, comparisons)


def test_report_says_what_was_measured_and_what_was_not():
    report = markdown.report(sweep_record(), ["a.png"])
    assert report.startswith("# fusewise study: rope-cube\n")
    assert "| case | floor-copy | floor-launch | eager | fusewise-cpu |" in report
    assert "| cube-8 | 8.00 | 4.00 | 24.0 | **9.60** |" in report
    assert "| liger | missing | 3 | liger_kernel is not installed; pip install liger-kernel |" in report
    assert "faster: 0.400 [0.400, 0.400] × eager" in report
    assert "A/A pair (fusewise-cpu twice): 1.000 [1.000, 1.000]." in report
    assert "| bad | wrong |" in report
    assert "![a.png](a.png)" in report
    assert "cut short" not in report
    assert "not idle" not in report


def test_report_and_terminal_have_the_verdict():
    record = sweep_record()
    report = markdown.report(record)
    assert "A hand-written kernel is worth it in 3 (3 fusewise-cpu)." in report
    assert "| cube-8 fp32 fwd | memory | 8.00 | fusewise-cpu 9.60 | 66.7 % | – | yes: fusewise-cpu |" in report
    assert "- eager: cause unknown: no traffic ledger" in report
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(terminal.verdict_table(verdict.verdicts(record)))
    assert "yes: fusewise-cpu" in console.export_text()


def test_report_of_an_interrupted_run_and_a_busy_machine_says_so():
    record = sweep_record()
    record.finished = False
    record.resumed = ["2026-01-01T00:10:00+00:00", "2026-01-01T00:20:00+00:00"]
    record.environment["load_average"] = 3.0
    for report in (markdown.report(record), html.report(record)):
        assert "cut short" in report and "It was resumed 2 times." in report
        assert "not idle when the study began (load 3.0 on 2 cores)" in report


@pytest.mark.parametrize(
    ("cases", "device", "seconds", "words"),
    [("a", "cpu", 1.5, "1 comparison, 1 provider measured in 2 s."), ("ab", "cuda:0", None, "2 comparisons, 1 provider measured.")],
)  # fmt: skip
def test_a_report_counts_comparisons_and_providers_but_no_floors(cases, device, seconds, words):
    made = study_record(
        [row(name, case=c, device_us=1.0) for c in cases for name in ("floor-copy", "floor-launch", "eager")]
    )
    made.seconds, made.environment["device"] = seconds, device
    assert words in markdown.opening(made)
    assert markdown.flushed(made) == ("overwritten" if device == "cpu" else "read")


def test_the_best_of_the_floors_is_shown_and_a_share_where_it_has_a_meaning():
    copies = [row("floor-copy", case=c, device_us=us) for c, us in (("a", 20.0), ("b", 10.0))]
    slow, fast = row("floor-launch", case="a", device_us=4.0), row("floor-launch", case="b", device_us=2.0, host_us=3.0)
    found = markdown.limits([*copies, slow, fast])
    assert (
        "| copy bandwidth | 800 GB/s | 7.63 MiB (b) |" in found
        and "| launch floor | 2.00 µs, host 3.00 µs | b |" in found
    )
    assert "| launch floor | 4.00 µs | a |" in markdown.limits([slow])
    for provider, shown in (("floor-copy", "50 %"), ("floor-launch", "–"), ("eager", "50 %")):
        assert markdown.line(row(provider, limit="copy", share_of_limit=0.5), None, None)[3] == shown
    for error, eager, shown in ((None, None, "–"), (1e-3, None, "1.00e-03"), (None, 1e-7, "not finite (1.00e-07)")):
        assert markdown.errors(row("a", error=error, error_eager=eager)) == shown


@pytest.mark.parametrize(
    ("waited", "load", "cores", "said"),
    [(2, 0.9, 2, ""), (3, None, None, "in 3 of 5 rows"), (0, 1.0, 2, "load 1.0 on 2 cores"), (0, None, 2, ""), (0, 9.0, None, "")],
)  # fmt: skip
def test_a_machine_is_busy_if_most_rows_waited_or_half_of_its_cores_had_work(waited, load, cores, said):
    made = study_record(
        [row(f"p{n}", device_us=1.0, clocks={"waiting_threads": 0.5 if n < waited else 0.0}) for n in range(5)]
    )
    made.environment |= {"load_average": load, "cores": cores}
    found = idleness(made)
    assert said in found[0] if said else not found


def test_everything_that_shows_times_says_where_most_threads_waited(capsys):
    record = sweep_record()
    record.rows = [dataclasses.replace(r, clocks={"waiting_threads": 0.5}) for r in record.rows]
    timed = sum(r.device_us is not None for r in record.rows)
    said = f"not idle: in {timed} of {timed} rows up to 0.500 threads of a provider waited for a core on average"
    assert said in markdown.report(record) and said in html.report(record)
    made = Result(record, Path("report.html"))
    assert said in repr(made) and said in made._repr_html_()
    commands.show(record)
    assert said in capsys.readouterr().out


def test_text_from_a_record_cannot_break_out_of_its_cell():
    hostile = row("<script>alert(1)</script>", "failed", reason="a | b\n# heading `code` [x](javascript:y)")
    report = markdown.report(study_record([hostile]))
    assert "<script>" not in report
    assert "\n# heading" not in report
    line = next(line for line in report.splitlines() if "failed" in line and line.startswith("| &lt;script"))
    assert line.replace("\\|", "").count("|") == 5
    assert "[x](" not in line


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("__init__() of rope_ and _half", r"\_\_init\_\_() of rope\_ and \_half"),
        ("float* x, ~y~ and *z", r"float\* x, \~y\~ and \*z"),
        ("torch_compile __a__b", r"torch_compile \_\_a__b"),
    ],
)
def test_nothing_in_a_record_is_emphasis_in_the_markdown(said, written):
    assert f"| {written} |" in markdown.report(study_record([row("eager", "failed", reason=said)]))


def test_a_terminal_obeys_nothing_that_a_record_says(capsys):
    nasty = "\x1b]0;owned\x07\x1b[2J[red]name\r\n\x9b31m"
    record = study_record([row(nasty, case=nasty, device_us=1.0), row(f"{nasty}2", "failed", reason=nasty)])
    record.request["title"] = nasty
    found = compare.compare(compare.side(record, nasty), compare.side(record, nasty))
    console = Console(width=120, file=io.StringIO(), force_terminal=False)
    for table in (
        terminal.summary(record),
        terminal.verdict_table(verdict.verdicts(record)),
        terminal.comparison_table(found),
    ):
        console.print(table)
    with terminal.Live(console) as live:
        live.provider(nasty, "failed", nasty)
        live.rows(record.rows)
    said = console.file.getvalue() + markdown.report(record) + "\n".join(terminal.comparison_summary(found))
    assert "[red]" in said
    assert not {c for c in said if not c.isprintable() and c != "\n"}


@pytest.mark.parametrize(("ops", "heads"), [(["rope"], ["cube-8"]), (["geglu", "mlp"], ["geglu", "mlp"])])
def test_a_comparison_of_several_operations_names_them(ops, heads):
    side = compare.side(study_record([row("eager", op=op, device_us=1.0) for op in ops]), "a")
    lines = terminal.comparison_table(compare.compare(side, side)).lines
    assert [cells[0].split()[0] for cells, _ in lines] == heads


def test_every_line_of_every_table_has_as_many_cells_as_its_head():
    width = None
    for line in markdown.report(sweep_record()).splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = line.replace("\\|", "").count("|")
        assert width in (None, cells), line
        width = cells


def test_sweeps_become_lines_and_others_bars(tmp_path):
    record = sweep_record()
    assert plots.draw(record, tmp_path) == ["rope-fp32-fwd-time.png", "rope-fp32-fwd-bandwidth.png"]
    for i, r in enumerate(record.rows):
        object.__setattr__(r, "case", "one" if i % 2 else "other")
    assert plots.draw(record, tmp_path) == ["rope-fp32-fwd-share.png"]
    record.environment["device_name"] = "$\\frac{$"  # text, not a formula
    assert plots.draw(record, tmp_path) == ["rope-fp32-fwd-share.png"]
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000


def test_a_plot_of_many_cases_can_be_read(tmp_path):
    """45 cases of 48 providers: one or two pages high, no two providers look the same, long names stay inside the
    picture.
    """
    names = [f"p{i}" for i in range(48)]
    rows = [row(name, case=f"model-{i % 9}-{'long ' * 30}{i}", device_us=1.0, limit="copy", share_of_limit=0.1 + i / 50)
            for i in range(45) for name in names]  # fmt: skip
    drawn = plots.shares(rows, "title", charts.look(names))
    looks = {(tuple(c.get_facecolor()[0]), c.get_paths()[0].vertices.tobytes()) for c in drawn.axes[0].collections}
    assert len(looks) == len(names)
    assert drawn.get_figheight() < 45
    assert all(len(line) <= 34 for label in drawn.axes[0].get_yticklabels() for line in label.get_text().splitlines())


def test_lines_of_floors_differ_and_powers_of_ten_are_plain():
    rows = sweep_record().rows
    axes = plots.lines(rows, "title", "cube", "time, µs", charts.look(measured(rows))).axes[0]
    assert axes.yaxis.get_major_formatter()(1000.0) == "1,000"
    assert axes.yaxis.get_minor_formatter()(20.0) == "20"
    floors = [line.get_linestyle() for line in axes.lines if line.get_label().startswith("floor-")]
    assert len(floors) == len(set(floors)) == 2


def test_lines_of_32_providers_and_4_floors_differ_in_every_plot():
    """Also in one from which the first are absent."""
    names = [*(f"floor-{i}" for i in range(4)), *(f"p{i}" for i in range(32))]
    rows = [row(name, case=f"cube-{n}", device_us=1.0) for n in (1, 2, 4) for name in names]
    looks = {}
    for some in (rows, [r for r in rows if r.provider not in names[:9]]):
        drawn = plots.lines(some, "title", "cube", "time, µs", charts.look(names))
        (axes,), (legend,) = drawn.axes, drawn.legends
        drawn.draw_without_rendering()
        assert legend.get_window_extent().y0 >= 0 and legend.get_window_extent().y1 <= axes.get_window_extent().y0
        assert axes.get_window_extent().height > drawn.bbox.height / 2
        looks[len(some)] = {line.get_label(): (line.get_color(), line.get_linestyle()) for line in axes.lines}
    every, rest = looks.values()
    assert len(set(every.values())) == 36 and rest == {name: every[name] for name in names[9:]}


def test_a_legend_of_long_names_is_whole_and_tells_them_apart():
    names = [f"package.{'module.' * 20}:kernel_{i}" for i in range(5)]
    rows = [row(name, device_us=1.0, share_of_limit=0.5) for name in names]
    drawn = plots.shares(rows, "title", charts.look(names))
    drawn.draw_without_rendering()
    (legend,) = drawn.legends
    assert drawn.bbox.x0 <= legend.get_window_extent().x0 and legend.get_window_extent().x1 <= drawn.bbox.x1
    assert len({text.get_text() for text in legend.get_texts()}) == 5


def test_letters_that_no_font_has_are_no_warning(tmp_path):
    made = study_record([row("数据🎉", case="函数", device_us=2.0, share_of_limit=0.5)])
    assert plots.draw(made, tmp_path) == ["rope-fp32-fwd-share.png"]


def test_plots_lie_in_their_folder_whatever_the_record_says(tmp_path):
    made = study_record([row("eager", device_us=1.0, share_of_limit=0.5, dtype="../../x", case="a" * 3000)])
    made.request["op"] = "/../../y:z " + "long" * 200
    (name,) = plots.draw(made, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert len(name) < 143


@pytest.mark.parametrize("fields", [{"provider": "floor-copy", "share_of_limit": 1.0}, {"provider": "eager"}])
def test_rows_without_a_share_have_no_plot_of_shares(tmp_path, fields):
    assert plots.draw(study_record([row(**fields, device_us=1.0)]), tmp_path) == []


def test_an_empty_record_renders(tmp_path):
    record = study_record([row("liger", "missing")])
    assert plots.draw(record, tmp_path) == []
    assert "No floor was measured." in markdown.report(record)


def test_terminal_table_has_a_column_a_provider():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(terminal.summary(sweep_record()))
    text = console.export_text()
    assert "fusewise-cpu" in text
    assert "cube-16 fp32 fwd" in text
    assert "19.2" in text


@pytest.mark.parametrize("width", [300, 80, 60])
def test_a_terminal_of_any_width_has_names_and_times_whole(width):
    """Columns that do not fit move to another table below, which repeats the case names."""
    names = ["eager", "torch.compile-max-autotune", "fusewise-cpu", *(f"provider-of-others-{i}" for i in range(9))]
    record = study_record(
        [row(name, case="a-model-prefill-8k", device_us=123456.0 + i) for i, name in enumerate(names)]
    )
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(terminal.summary(record))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    title = lines.index("rope-cube: microseconds per call, cold cache")
    assert title == 0 and "microseconds" not in " ".join(lines[1:])
    words = " ".join(lines).split()
    assert set(names) <= set(words)
    assert {f"{123456 + i:,}" for i in range(len(names))} <= set(words)
    tables = words.count("case")
    assert (tables == 1) == (width == 300)
    assert words.count("a-model-prefill-8k") == tables
    assert lines.count("") == tables - 1  # between them


@pytest.mark.parametrize(("folds", "least"), [(False, 11), (True, 7)])
def test_a_column_is_as_wide_as_its_text_or_where_it_folds_as_its_longest_word(folds, least):
    assert terminal.Column("a name", folds=folds).widths(["[bold]two longest[/]", "", "数据"]) == (least, 11)
    assert terminal.Column("", folds=folds).widths([""]) == (0, 0)


def test_a_table_of_limits_has_every_rate():
    found = {**LIMITS, "matmul_tflop_s": {"fp32": 1.0, "bf16": None}, "clocks": {"sm_mhz": 1980}}
    assert [cells for cells, _ in terminal.limits_table(found).lines] == [
        ("copy", "1,000 GB/s"), ("triad", "900 GB/s"), ("matmul fp32", "1.00 TFLOP/s"), ("matmul bf16", "– TFLOP/s"),
        ("launch", "2.00 µs"), ("sm mhz", "1980"),
    ]  # fmt: skip


def test_a_comparison_has_regressions_first_and_what_is_noted():
    times = {"same": (10.0, 10.0), "quick": (10.0, 5.0), "slow": (10.0, 20.0)}
    before, after = ([row(name, device_us=both[i]) for name, both in times.items()] for i in (0, 1))
    sides = [*before, row("bad", device_us=1.0)], [*after, row("bad", "failed")]
    table = terminal.comparison_table(compare.compare(*(compare.side(study_record(rows), "a") for rows in sides)))
    assert [(cells[1], *cells[4:], style) for cells, style in table.lines] == [
        ("slow", "2.000 [2.000, 2.000]", "2 %", "slower", "red"), ("bad", "–", "–", "broken: because", "red"),
        ("quick", "0.500 [0.500, 0.500]", "2 %", "faster", "green"), ("same", "1.000 [1.000, 1.000]", "2 %", "same", ""),
    ]  # fmt: skip


def test_columns_of_words_fold_between_them():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal.verdict_table(verdict.verdicts(sweep_record())))
    text = console.export_text()
    assert text.split().count("case") == 1
    assert {"compiler", "fusewise-cpu", "cube-16"} <= set(text.split())
    empty = terminal.verdict_table([])
    console.print(empty)
    assert empty.lines == []


def test_a_name_is_no_picture(capsys):
    record = sweep_record()
    record.request["title"] = "my.py:mask"
    commands.show(record)
    with terminal.Live(terminal.console(stderr=True)) as live:
        live.provider("eager", "failed", "my.py:key: no such key")
    shown = capsys.readouterr()
    assert "my.py:mask: microseconds" in shown.out
    assert "my.py:key: no such key" in shown.err


def test_live_progress_says_what_is_done():
    live = terminal.Live(Console(file=io.StringIO(), force_terminal=True))
    (bar,) = live.progress.tasks
    said = []
    for told in (
        lambda: live.group(2, 5, Task("rope", "[red]", "fp32", "fwd", "cpu", 0)),
        lambda: live.round(3, {"eager": 1.0, "liger": 2.0}),
        lambda: live.rows([]),
        lambda: live.looking("[red]"),
    ):
        told()
        said.append((bar.description, bar.completed, bar.total))
    assert said == [
        ("\\[red] fp32 fwd: first calls and checks", 2, 5), ("\\[red] fp32 fwd: round 4, 2 providers", 2, 5),
        ("\\[red] fp32 fwd: round 4, 2 providers", 3, 5), ("code and traffic: \\[red]", 3, 5),
    ]  # fmt: skip


def test_live_progress_off_a_terminal_writes_plain_lines(capsys):
    record = sweep_record()
    console = Console(stderr=True, force_terminal=False, width=60)
    with terminal.Live(console) as live:
        live.title = "cube-4"
        live.provider("bad", "failed", "a [red]reason[/red] that is longer than the sixty columns of this terminal")
        live.provider("bad", "failed", "a [red]reason[/red] that is longer than the sixty columns of this terminal")
        live.rows(record.rows[:6])
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[0].startswith("cube-4: bad failed: a [red]reason[/red] that is longer")
    assert lines[1:] == ["cube-4: 2 timed, fastest fusewise-cpu 4.80 µs, 83.3 % of copy"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (0.0123, "0.0123"), (0.123, "0.123"), (1.5, "1.50"), (12.34, "12.3"), (1234.5, "1,234"),
     (1e7, "10,000,000"), (1e9, "1.00e+09"), (1e10, "1.00e+10"), (1e-3, "0.00100"), (1e-7, "1.00e-07")],
)  # fmt: skip
def test_numbers(value, text):
    assert number(value) == text


def test_units():
    assert size(None) == "–"
    assert size(512) == "512 B"
    assert (size(1023), size(1024), size(1025)) == ("1,023 B", "1.00 KiB", "1.00 KiB")
    assert size(3 * 2**20) == "3.00 MiB"
    assert size(5 * 2**40) == "5,120 GiB"
    assert percent(0.975) == "97.5 %"
    assert percent(15.5) == "1,550 %"
    assert gigabytes_per_second(row("eager", device_us=1000.0, bytes_min=2_000_000)) == 2.0
    assert gigabytes_per_second(row("floor-launch", device_us=1.0)) is None
    assert gigabytes_per_second(row("eager", device_us=1.0, bytes_min=None)) is None
    assert [calls(n) for n in (None, math.inf, 0.0, 1234.5, 999_999, 1e6, 1e9)] == [
        "–", "never", "0", "1,234", "999,999", "1,000,000", "1.00e+09",
    ]  # fmt: skip
    assert [shortened("abcdef", most) for most in (3, 4, 5, 6)] == ["a…f", "a…ef", "ab…ef", "abcdef"]


def test_what_is_no_utf8_is_drawn_and_written(tmp_path):
    measurements = [
        measurement(name, [[n * 10.0]] * 5, case="\ud800x") for n, name in enumerate(("floor-copy", "eager"), 1)
    ]
    rows, _ = analysis.group_rows([row(m.provider, case="\ud800x") for m in measurements], measurements)
    made = study_record(rows, measurements)
    made.request |= {"title": "\udce9", "places": {"eager": "\udce9:f"}}
    assert commands.render(made, tmp_path).read_text(encoding="utf-8").count("\\udce9:f")
    assert (tmp_path / "rope-fp32-fwd-share.png").exists()


def test_a_dtype_and_a_backslash_cannot_leave_their_place_in_the_markdown():
    hostile = "<b>|`x`"
    report = markdown.report(study_record([row("a\\|b\\[c](d)", device_us=1.0, dtype=hostile)]))
    assert hostile not in report
    assert report.count("&lt;b&gt;\\|'x'") == 3
    assert "| a\\\\\\|b\\\\\\[c\\](d) |" in report
