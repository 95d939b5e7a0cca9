"""The HTML report as text: complete, self-contained, and safe whatever the record contains."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from builders import HOSTILE, LIMITS, full_record, measurement, row, study_record

from fusewise.lab import record
from fusewise.lab.ledger import Kernel, Ledger
from fusewise.lab.render import charts, html, markdown, script, svg

VOID = {"meta", "link", "input", "br", "img"}


class Page(HTMLParser):
    """Collects elements, attributes, ids and text; fails on elements that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links, self.open, self.text = [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.ids += [v for k, v in attributes if k == "id"]
        self.links += [v for k, v in attributes if k in ("href", "src", "xlink:href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def plain():
    text = html.report(full_record())
    return text, Page(text)


@pytest.fixture(scope="module")
def hostile():
    text = html.report(full_record(hostile=HOSTILE))
    return text, Page(text)


def test_everything_is_there(plain):
    text, page = plain
    for part in ("verdict", "charts", "glance", "cases", "rows", "code", "where", "help"):
        assert part in page.ids
    said = " ".join("".join(page.text).split())
    assert "A hand-written kernel is worth it in 6 (6 fusewise-cpu)." in said
    assert "moves 5.00 times the bytes, in 5 kernels" in said
    assert "cut short" not in said
    for title in (
        "Time, fp32 fwd",
        "Share of the limit, fp32 fwd",
        "Bandwidth over size, fp32 bwd",
        "Roofline, fp32 fwd",
        "Memory",
        "Memory traffic",
    ):
        assert f'aria-label="{title}"' in text
    assert "copy 796 GB/s" in text
    assert 'role="img"' not in text  # charts have links, which an image hides from screen readers
    assert "matmul 0.500 TFLOP/s" in text


def test_lines_join_the_cases_of_a_sweep_and_no_others(plain):
    assert "<polyline" in plain[0]
    others = [
        row("eager", case=case, device_us=9.0, bytes_min=size) for case, size in (("decode", 10**4), ("train", 10**8))
    ]
    text = html.report(study_record(others))
    assert "Bandwidth over size" in text
    assert "<polyline" not in text


def test_every_number_leads_to_a_row_that_is_there(plain):
    text, page = plain
    made = full_record()
    rows = [i for i in page.ids if i.startswith("row-")]
    assert len(rows) == len(made.rows) == len(set(rows))
    assert all(link[1:] in page.ids for link in page.links if link.startswith("#"))
    wanted = made.rows[7]
    assert re.search(rf'id="row-7".*?<code>{re.escape(wanted.id)}</code>', text, re.DOTALL)
    assert len(page.ids) == len(set(page.ids))


def test_nothing_is_loaded_and_only_our_own_script_may_run(plain):
    text, page = plain
    assert {link for link in page.links if not link.startswith("#")} == {"data:,"}
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert not [a for _, a in page.tags if any(k == "style" or k.startswith("on") for k in a)]


def test_hostile_names_stay_text(plain, hostile):
    text, page = hostile
    assert [t for t, _ in page.tags] == [t for t, _ in plain[1].tags]
    assert sorted(set(page.ids)) == sorted(set(plain[1].ids))
    assert "<script>document" not in text
    assert "<img" not in text
    assert HOSTILE in "".join(page.text)


def test_a_name_does_not_turn_the_text_behind_it_around():
    turning = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # Bidi_Control
    made = full_record(hostile=turning)
    made.request["title"] = made.environment["device_name"] = turning
    page = html.report(made)
    assert not set(turning) & set(page)
    assert f"<h1>{12 * chr(0xFFFD)} <small>" in page


def test_a_scheme_in_a_name_becomes_no_link():
    made = study_record([row("javascript:alert(1)", device_us=1.0), row("eager", device_us=2.0, case="javascript:x")])
    page = Page(html.report(made))
    assert all(link.startswith(("#row-", "#case-", "data:,")) or link[1:] in page.ids for link in page.links)
    assert "javascript:alert(1)" in "".join(page.text)


def test_data_inside_the_script_element_cannot_end_it(hostile):
    data = {"</script>": ["<!--", "\u2028", "&lt;", '"', "]]>"]}
    text = str(html.embedded(data))
    assert json.loads(text) == data
    assert not set("<>&\u2028") & set(text)


def test_a_record_of_little_renders():
    nothing = html.report(study_record([row("liger", "missing")]))
    assert "No provider has a time." in nothing
    assert "Providers without a time" in nothing and '<td class="reason">because</td>' in nothing
    assert "Nothing was measured" in html.report(study_record([], finished=False, seconds=None))


def test_a_typical_report_is_far_below_five_megabytes():
    assert len(html.report(full_record(cases=10)).encode()) < 2_000_000


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("values", [[1e-3], [1.0, 1.0], [0.2, 3e9], [5, 7, 9], [1.5], [2.6, 3.4], [4.1e5, 7.6e5]])
def test_axes_hold_their_values_and_have_ticks(values, log):
    axis = svg.span(values, "x", log)
    assert all(0 <= axis.at(v) <= 1 for v in values)
    assert all(-1e-9 <= axis.at(t) <= 1 + 1e-9 for t in axis.ticks())
    assert 3 <= len(axis.ticks()) <= 14


@pytest.mark.parametrize(
    ("value", "label"),
    [(2e-7, "2e-07"), (0.5, "0.5"), (999, "999"), (1e3, "1k"), (2e6, "2M"), (5e9, "5G"), (1e12, "1T")],
)
def test_tick_labels_are_short(value, label):
    assert svg.short(value) == label


@pytest.mark.parametrize(
    ("prepared", "axis", "label"),
    [
        ({}, "minimum bytes", "7.63 MiB minimum"),
        ({"predicted_peak_bytes": 0}, "minimum bytes", "7.63 MiB minimum"),
        ({"predicted_peak_bytes": 2048}, "bytes predicted", "2.00 KiB predicted"),
    ],
)
def test_memory_is_drawn_over_the_prediction_or_else_the_minimum(prepared, axis, label):
    made = study_record(
        [row("eager", device_us=1.0, peak_bytes=3072)], [measurement("eager", [[1.0]], prepared=prepared)]
    )
    made.rows.append(row("jax", device_us=1.0, peak_bytes=4096))  # without a prediction
    anchors = {r.id: "row-0" for r in made.rows}
    drawn = str(charts.memory(made, charts.look(["eager", "jax"]), anchors))
    assert re.findall("<title>(Time|Memory)", "".join(charts.charts(made, anchors))) == ["Time", "Memory"]
    assert f">{axis} (log scale)<" in drawn and f"peak 3.00 KiB, {label}<" in drawn


def chart(name, rows, *rest):
    """A chart's marks, by provider or case, and what else is passed to draw it."""
    looks = charts.look(list(dict.fromkeys(r.provider for r in rows)))
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("dots", "scatter"):
            patch.setattr(svg, kind, lambda title, *found, **named: (*found[:-1], named))
        return getattr(charts, name)(rows, "", looks, {r.id: r.id for r in rows}, *rest)


FLOORS = [
    row(f"floor-{kind}", case=case, device_us=us, flops_min=flops)
    for kind, flops in (("copy", 1), ("matmul", 2_000_000_000))
    for case, us in (("a", 10.0 if kind == "copy" else 1000.0), ("b", 2000.0))
]


@pytest.mark.parametrize(
    ("floors", "limits", "lines", "low", "high"),
    [
        (FLOORS, LIMITS, [(0.125, 1e11, 2.5, 2e12, "copy 800 GB/s"), (2.5, 2e12, 200, 2e12, "matmul 2.00 TFLOP/s")], 1e11, 2e12),
        ([], LIMITS, [(0.125, 1.25e11, 1, 1e12, "copy 1,000 GB/s"), (1, 1e12, 200, 1e12, "matmul 1.00 TFLOP/s")], 1.25e11, 1e12),
        (FLOORS[:2], None, [(0.125, 1e11, 200, 1.6e14, "copy 800 GB/s")], 1e11, 1.6e14),
        (FLOORS[2:], None, [(0.125, 2e12, 200, 2e12, "matmul 2.00 TFLOP/s")], 2e11, 2e12),
        ([], None, [], 2e11, 1e12),
    ],
)  # fmt: skip
def test_a_roofline_is_of_the_fastest_floors_or_else_of_the_limits(floors, limits, lines, low, high):
    rows = [
        row("eager", case="a", device_us=20.0, flops_min=4_000_000),
        row("eager", case="b", device_us=400.0, flops_min=400_000_000),
    ]
    x, y, series, found = chart("roofline", [*rows, *floors], limits)
    assert {name: [(m.x, m.y, m.anchor) for m in marks] for name, marks in series.items()} == {
        "eager": [(0.5, 2e11, rows[0].id), (50.0, 1e12, rows[1].id)]
    }
    assert [m.label.partition(": ")[2] for m in series["eager"]] == ["200 GFLOP/s", "1,000 GFLOP/s"]
    assert [(line.x0, line.y0, line.x1, line.y1, line.label) for line in found["lines"]] == [
        (*map(pytest.approx, ends), label) for *ends, label in lines
    ]
    assert (x.low, x.high, y.low, y.high) == pytest.approx((0.125, 200, low / 1.25, high * 1.25))


def test_times_shares_and_rates_are_those_of_their_rows():
    rows = [
        row(name, case=case, bytes_min=size, device_us=us, device_us_iqr=0.5, share_of_limit=10.0 / us)
        for case, size in (("a-1", 8_000_000), ("b-2", 16_000_000))
        for name, us in (("floor-copy", 10.0), ("eager", 40.0))
    ]
    axis, lines, _ = chart("times", rows)
    assert {case: {name: m.x for name, m in marks.items()} for case, marks in lines.items()} == {
        case: {"floor-copy": 10.0, "eager": 40.0} for case in ("a-1", "b-2")
    }
    assert (axis.low, axis.high, lines["a-1"]["eager"].anchor) == (8.0, 50.0, rows[1].id)
    assert lines["a-1"]["eager"].label == "eager, a-1 fp32 fwd: 40.0 ± 0.500 µs"
    axis, lines, named = chart("shares", rows)
    assert {case: {name: m.x for name, m in marks.items()} for case, marks in lines.items()} == {
        "a-1": {"eager": 25.0}, "b-2": {"eager": 25.0}
    }  # fmt: skip
    assert (axis.high, named) == (108.0, {"limit": 100.0})
    x, y, series, named = chart("bandwidth", rows)
    assert {name: [(m.x, m.y) for m in marks] for name, marks in series.items()} == {
        "floor-copy": [(8e6, 800.0), (16e6, 1600.0)], "eager": [(8e6, 200.0), (16e6, 400.0)]
    }  # fmt: skip
    assert (x.low, x.high, y.high, named) == (6.4e6, 2e7, 1600.0 * 1.08, {"joined": False})
    assert chart("bandwidth", [*rows, row("eager", case="empty", bytes_min=0, device_us=1.0)])[2] == series
    assert chart("shares", rows[:2]) is chart("bandwidth", rows[:2]) is None


@pytest.mark.parametrize(("minimum", "most"), [(None, 700.0), (100, 700.0), (1000, 1000.0)])
def test_a_piece_of_traffic_is_what_its_kernel_reads_and_writes(minimum, most, monkeypatch):
    monkeypatch.setattr(svg, "stacks", lambda title, *found: found)
    kernels = [{"name": "a", "read": 300, "written": 200}, {"name": "b", "read": None, "written": 200}]
    axis, bars, least = charts.ledger([{"provider": "eager", "kernels": kernels}], minimum)
    assert bars == {"eager": [("a: reads 300 B, writes 200 B", 500.0), ("b: reads 0 B, writes 200 B", 200.0)]}
    assert (axis.low, axis.high, axis.log, least) == (0.0, most * 1.08, False, minimum)
    assert charts.ledger([], None) is None


def test_48_providers_have_markers_of_their_own():
    assert len({svg.marker(i) for i in range(48)}) == 48


@pytest.mark.parametrize("log", [True, False])
def test_marks_bars_and_limits_lie_beside_the_labels_of_their_values(log):
    axis = svg.Axis("x", 1.0 if log else 0.0, 100.0, log)
    mark, look = svg.Mark(20, 20, "m", "row"), {"p": (0, "")}
    dots = str(svg.dots("t", axis, {"case": {"p": mark}}, look, limit=100))
    bars = str(svg.stacks("t", svg.Axis("x", 0.0, 100.0, False), {"p": [("a", 40.0), ("b", 20.0)]}, 60))
    spread = str(svg.scatter("t", axis, axis, {"p": [mark]}, look))

    def label(chart, text):
        return float(re.search(rf'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">{text}<', chart)[1])

    def limit(chart):
        x1, x2 = re.search(r'<line x1="([\d.]+)" x2="([\d.]+)"[^>]*class="limit"', chart).groups()
        return float(x1) if x1 == x2 else None

    def marked(chart):
        return tuple(map(float, re.search(r"translate\(([\d.]+) ([\d.]+)\)", chart).groups()))

    assert marked(dots)[0] == label(dots, "20") and limit(dots) == label(dots, "100")
    boxes = [tuple(map(float, found)) for found in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', bars)]
    assert boxes[1][0] == label(bars, "40") and boxes[1][0] + boxes[1][1] + 1 == pytest.approx(limit(bars), abs=0.2)
    assert limit(bars) == label(bars, "60")
    start = "1" if log else "0"
    name = float(re.search(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="end"><title>case', dots)[1])
    assert name < label(dots, start)
    across, up = marked(spread)
    assert across == label(spread, "20")
    assert up == float(re.search(r'y="([\d.]+)" text-anchor="end">20<', spread)[1]) - 4


def test_all_of_a_chart_lies_inside_of_its_frame():
    axis = svg.Axis("x", 1.0, 1000.0)
    marks, look = [svg.Mark(at, at, "m", "row") for at in (1.0, 1000.0)], {"p": (0, "")}
    for drawn in (
        svg.dots("t", axis, {f"case-{n}": {"p": marks[n % 2]} for n in range(4)}, look, limit=1000),
        svg.stacks(
            "t", svg.Axis("x", 0.0, 1000.0, False), {f"p{n}": [("a", 400.0), ("b", 600.0)] for n in range(4)}, 1000
        ),
        svg.dots("t", svg.Axis("x", 0.0, 0.00016, False), {"case": {}}, look),  # a long label at its right edge
        svg.scatter("t", axis, axis, {"p": marks}, look, joined=True),
    ):
        width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn).groups())
        places = [(float(x), float(y)) for x, y in re.findall(r"translate\(([-\d.]+) ([-\d.]+)\)", drawn)]
        for axis_, most in (("x", width), ("y", height)):
            found = [float(at) for at in re.findall(rf' {axis_}[12]?="([-\d.]+)"', drawn)]
            found += [place[axis_ == "y"] for place in places]
            assert min(found) >= 0 and max(found) <= most
        for x, text in re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">([^<]+)<', drawn):
            assert float(x) + svg.CHARACTER * len(text) / 2 <= width
    assert svg.scatter("t", axis, axis, {"p": marks}, look, joined=True).count("<polyline") == 1
    assert svg.Axis("x", 1.0, 1000.0).ticks() == [f * 10**e for e in range(3) for f in (1, 2, 5)] + [1000]
    assert svg.Axis("x", 1.0, 10000.0).ticks() == [10**e for e in range(5)]


@pytest.mark.parametrize("ends", [(2.0, 99.0), (99.0, 99.9)])
def test_labels_of_limit_lines_are_whole_and_apart(ends):
    """Whether the lines meet at the left edge of the chart or at the right."""
    x, y = svg.Axis("x", 1.0, 100.0), svg.Axis("y", 1.0, 100.0)
    lines = [svg.Line(1.0, 1.0, end, 50.0, f"a limit of {end} GB/s") for end in ends]
    texts = re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)"[^>]*class="limit">([^<]*)<', svg.scatter("t", x, y, {}, {}, lines=lines)
    )
    (first, above, words), (second, below, _) = texts
    assert float(first) - svg.CHARACTER * len(words) >= svg.LEFT
    assert abs(float(above) - float(below)) >= svg.LINE or float(second) - float(first) >= svg.CHARACTER * len(words)


def test_an_element_escapes_text_and_attributes():
    assert str(svg.el("text", "<&", x=1, class_="a", data_x='"')) == (
        '<text x="1" class="a" data-x="&#34;">&lt;&amp;</text>'
    )


def test_a_row_prints_itself_as_a_program_that_measures_it_again(tmp_path):
    made = study_record([row("eager", case="cube-4", device_us=3.0)])
    made.request |= {"rounds": [3, 3], "cache": "warm"}
    program = tmp_path / "again.py"
    program.write_text(script.program(made, made.rows[0]))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True, timeout=120)
    assert "'status': 'ok'" in done.stdout
    assert "us per call here; the record has 3.0 on test" in done.stdout
    made.rows[0] = row("eager", case="no such case", device_us=3.0)
    program.write_text(script.program(made, made.rows[0]))
    assert subprocess.run([sys.executable, program], capture_output=True, check=False, timeout=120).returncode == 1


def test_a_hostile_row_is_only_literals_in_its_program():
    import ast

    nasty = "'''\"\"\"\n__import__('os').system('touch owned') #{x}" + HOSTILE
    made = study_record([row(nasty, case=nasty, device=nasty, device_us=1.0)])
    tree = ast.parse(script.program(made, made.rows[0]))
    values = {n.targets[0].id: ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign)}
    assert values["PROVIDER"] == nasty
    assert values["TASK"]["case"] == nasty
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "__import__"]


def test_an_old_record_renders(tmp_path):
    old = full_record().to_json()
    for name in ("code", "ledgers", "limits", "resumed"):
        del old[name]
    old["schema"] = 1
    (tmp_path / "record.json").write_text(json.dumps(old))
    assert "cube-4" in html.report(record.read(tmp_path))


def test_a_row_has_a_cell_in_each_column_and_its_number_to_sort_by():
    times = {"device_us": 10.0, "device_us_iqr": 0.25, "host_us": 6.0, "kernel_us": 9.0, "graph_us": 9.5}
    first = {"first_call_s": 3.0, "first_call_again_s": 1.5, "peak_bytes": 2048, "held_bytes": 1024}
    judged = {"limit": "copy", "share_of_limit": 0.8, "verdict_vs_best_other": "faster"}
    whole = row("liger", **times, **first, **judged, error=1.5e-7, error_eager=2.5e-7)
    made = study_record([row("eager", device_us=20.0, first_call_s=1.0), whole])
    assert html._line(made, whole, "row-1", [{"device_us": [1.0, 2.0]}, {"device_us": [3.0]}])["cells"] == [
        *((text, None) for text in ("cube-8", "fp32", "fwd", "liger", "ok")), ("10.0", 10.0), ("0.250", 0.25),
        ("80 %", 0.8), ("copy", None), ("800", 800.0), ("faster", None), ("1.50e-07", 1.5e-7), ("2.50e-07", 2.5e-7),
        ("6.00", 6.0), ("9.00", 9.0), ("9.50", 9.5), ("3.00", 3.0), ("1.50", 1.5), ("200,001", 200_001.0),
        ("50,001", 50_001.0), ("2.00 KiB", 2048.0), ("1.00 KiB", 1024.0),
    ]  # fmt: skip
    bare = html._line(made, row("jax", "missing", bytes_min=None), "row-2", [])["cells"]
    assert bare[5:] == [("–", None)] * 17
    names = [column.name for column in html.ROW_COLUMNS]
    floors = [row(f"floor-{kind}", device_us=8.0, limit="copy", share_of_limit=1.0) for kind in ("copy", "matmul")]
    slow = row("thunder", device_us=30.0, first_call_s=4.0)
    found = [dict(zip(names, html._line(made, one, "", [])["cells"], strict=True)) for one in (*floors, slow)]
    assert [line["of limit"] for line in found] == [("100 %", 1.0), ("–", None), ("–", None)]
    assert [line["even after"] for line in found] == [("–", None), ("–", None), ("never", html.NEVER)]


def test_a_glance_has_the_fastest_of_each_case_that_is_no_floor():
    rows = [row("floor-copy", device_us=5.0), row("eager", device_us=20.0), row("liger", device_us=10.0)]
    rows += [row("eager", "wrong", case="b"), row("liger", device_us=12.0, case="b")]
    (table,) = html._glances(study_record(rows), {r.id: r.id for r in rows})
    assert (table["title"], table["names"]) == ("fp32 fwd", ["floor-copy", "eager", "liger"])
    assert [[cell["text"] for cell in line["cells"]] for line in table["lines"]] == [
        ["5.00", "20.0", "10.0"], ["–", "wrong", "12.0"],
    ]  # fmt: skip
    assert [[cell["best"] for cell in line["cells"]] for line in table["lines"]] == 2 * [[False, False, True]]


def test_a_providers_traffic_is_the_sum_of_its_kernels():
    kernels = (Kernel(name="a", read=3, written=5), Kernel(name="b", read=2, written=10))
    found = Ledger(op="rope", case="a", dtype="fp32", pass_="fwd", provider="jax", kernels=kernels, bytes_min=8)
    assert html._sum(found) == {
        "provider": "jax", "kernels": 2, "read": 5, "written": 15, "bytes": 20, "excess": 2.5,
    }  # fmt: skip


def test_facts_of_the_run_and_of_the_machine():
    made = full_record()
    made.resumed, made.request["title"] = ["2026-01-02", "2026-01-03"], "é"
    facts = dict(html._facts(made))
    assert {
        "run": "r1", "finished": "yes", "resumed": "2026-01-02, 2026-01-03", "seconds": "1.50", "cores": "2",
        "cache bytes": "1.00 MiB", "torch": "2.13.0", "limits measured": "2026-01-01", "copy GB/s": "800",
        "triad GB/s": "750", "matmul TFLOP/s": "fp32 0.500, bf16 –", "launch µs": "2.00",
    }.items() <= facts.items()  # fmt: skip
    assert "&#34;title&#34;: &#34;é&#34;" in html.report(made)
    made.limits, made.finished = {**made.limits, "matmul_tflop_s": {}}, False
    facts = dict(html._facts(made))
    assert (facts["matmul TFLOP/s"], facts["finished"]) == ("–", "no: cut short")


def test_operations_are_unknown_in_the_case_that_has_them():
    prepared = {"flops_unknown": ["aten.sort"]}
    measured = [measurement("eager", [[9.0]], case=case, prepared=of) for case, of in (("a", {}), ("b", prepared))]
    text = html.report(
        study_record([row("eager", case=m.case, flops_min=None, device_us=9.0) for m in measured], measured)
    )
    before, behind = text.split('<details id="case-row-1"')
    said = "minimum traffic 7.63 MiB, an unknown number of operations (aten.sort)."
    assert said in behind and "minimum traffic 7.63 MiB." in before


def test_a_stage_says_what_tells_it_from_others_and_where_its_lines_come_from():
    stage = {"provider": "jax", "stage": "hlo", "order": 1, "language": "hlo", "text": "x", "case": "a"}
    lines = {"10": "f.py:2", "1": "f.py:1", "2": "f.py:1", "4": "f.py:1", "3": "f.py:1", "6": "f.py:1"}
    code = [
        stage | {"lines": lines, "counts": {"registers": 4}},
        stage | {"order": 0, "part": "1", "lines": {"1": "f.py:2"}},
    ]
    assert [found["name"] for found in html._stages(code)] == ["jax · hlo (1)", "jax · hlo"]
    assert [found["name"] for found in html._stages([stage, stage | {"case": "b"}])] == [
        "jax · hlo (a)",
        "jax · hlo (b)",
    ]
    assert html._code(code) == {
        "places": ["f.py:2", "f.py:1"],
        "stages": [
            {"runs": [[1, 1, 0]], "counts": {}},
            {"runs": [[1, 4, 1], [6, 1, 1], [10, 1, 0]], "counts": {"registers": 4}},
        ],
    }


def test_what_a_compilation_costs_and_when_it_has_paid_off():
    compiled = row("torch.compile", device_us=10.0, first_call_s=3.0, first_call_again_s=1.5, graph_us=9.5)
    rows = [row("eager", device_us=20.0, first_call_s=1.0), compiled, row("thunder", device_us=30.0, first_call_s=4.0)]
    made = study_record(rows)
    names = [column.name for column in html.ROW_COLUMNS]
    asked = ("graph µs", "first call s", "again s", "even after", "again even after")
    lines = [dict(zip(names, html._line(made, one, "row-0", [])["cells"], strict=True)) for one in rows]
    assert [[line[name][0] for name in asked] for line in lines] == [
        ["–", "1.00", "–", "–", "–"],
        ["9.50", "3.00", "1.50", "200,001", "50,001"],
        ["–", "4.00", "–", "never", "–"],
    ]
    said = markdown.report(made)
    assert "| 9.50 | 3.00 | 1.50 | 200,001 (50,001) |" in said and "| – | 4.00 | – | never |" in said
