"""The charts of a report: what each draws of its rows, its axes and labels, and where its marks lie."""

import re

import pytest
from builders import LIMITS, measurement, row, study_record

from fusewise.lab.render import charts, svg


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
