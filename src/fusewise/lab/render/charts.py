"""The charts of a record: time, bandwidth over size, roofline, memory, and the traffic ledger of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from ..analysis import is_floor, is_ours, matmul_rate
from ..record import Json, Record, Row
from ..verdict import moved
from . import gigabytes_per_second, measured, number, percent, size, svg, sweep
from .svg import Line, Mark

#: Series number and CSS classes of every provider.
Look = Mapping[str, tuple[int, str]]


def look(names: Sequence[str]) -> dict[str, tuple[int, str]]:
    """A series number and CSS class per provider, the same in all charts of a report."""
    rivals = [name for name in names if not is_floor(name)]
    found = {name: (i, "ours" if is_ours(name) else "") for i, name in enumerate(rivals)}
    floors = [name for name in names if is_floor(name)]
    return found | {name: (i, "floor") for i, name in enumerate(floors)}


def charts(record: Record, anchors: Mapping[str, str]) -> list[Markup]:
    """All charts except ledgers, grouped by dtype and pass; `anchors` maps row ids to the anchors of their lines."""
    looks = look(measured(record.rows))
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in record.rows:
        if row.device_us is not None:
            kinds.setdefault((row.dtype, row.pass_), []).append(row)
    drawn: list[Markup | None] = []
    for (dtype, pass_), rows in kinds.items():
        suffix = f"{dtype} {pass_}"
        drawn.append(times(rows, suffix, looks, anchors))
        drawn.append(shares(rows, suffix, looks, anchors))
        drawn.append(bandwidth(rows, suffix, looks, anchors))
        drawn.append(roofline(rows, suffix, looks, anchors, record.limits))
    drawn.append(memory(record, looks, anchors))
    return [chart for chart in drawn if chart is not None]


def says(row: Row, what: str) -> str:
    return f"{row.provider}, {row.case} {row.dtype} {row.pass_}: {what}"


def times(rows: Sequence[Row], suffix: str, looks: Look, anchors: Mapping[str, str]) -> Markup:
    lines: dict[str, dict[str, Mark]] = {}
    for row in rows:
        value = row.device_us or 0.0
        label = says(row, f"{number(value)} ± {number(row.device_us_iqr)} µs")
        lines.setdefault(row.case, {})[row.provider] = Mark(value, 0.0, label, anchors[row.id])
    axis = svg.span([m.x for marks in lines.values() for m in marks.values()], "µs per call; left is better")
    return svg.dots(f"Time, {suffix}", axis, lines, looks)


def shares(rows: Sequence[Row], suffix: str, looks: Look, anchors: Mapping[str, str]) -> Markup | None:
    """The share of the binding limit, comparable across sizes; None for a single case or without a known limit."""
    lines: dict[str, dict[str, Mark]] = {}
    for row in rows:
        if row.share_of_limit is not None and not is_floor(row.provider):
            mark = Mark(
                100 * row.share_of_limit, 0.0, says(row, f"{percent(row.share_of_limit)} of the limit"), anchors[row.id]
            )
            lines.setdefault(row.case, {})[row.provider] = mark
    if len(lines) < 2:
        return None
    values = [m.x for marks in lines.values() for m in marks.values()]
    axis = svg.span([100.0, *values], "share of the binding limit, %; right is better", log=False)
    return svg.dots(f"Share of the limit, {suffix}", axis, lines, looks, limit=100.0)


def _series(
    rows: Sequence[Row], points: Mapping[str, tuple[float, float, str]], anchors: Mapping[str, str]
) -> dict[str, list[Mark]]:
    """Marks by provider, sorted by x; `points` maps row ids to x, y and label."""
    found: dict[str, list[Mark]] = {}
    for row in rows:
        if row.id in points:
            x, y, label = points[row.id]
            found.setdefault(row.provider, []).append(Mark(x, y, says(row, label), anchors[row.id]))
    return {name: sorted(marks, key=lambda m: m.x) for name, marks in found.items()}


def bandwidth(rows: Sequence[Row], suffix: str, looks: Look, anchors: Mapping[str, str]) -> Markup | None:
    """Achieved bytes per second over the minimum bytes; None if all cases have the same size."""
    points = {}
    for row in rows:
        rate = gigabytes_per_second(row)
        if rate is not None and row.bytes_min:
            points[row.id] = (float(row.bytes_min), rate, f"{number(rate)} GB/s of {size(row.bytes_min)}")
    if len({x for x, _, _ in points.values()}) < 2:
        return None
    x = svg.span([p[0] for p in points.values()], "minimum bytes")
    y = svg.span([p[1] for p in points.values()], "GB/s", log=False)
    series = _series(rows, points, anchors)
    # Lines only connect cases of one family; elsewhere they would suggest values that were never measured.
    return svg.scatter(f"Bandwidth over size, {suffix}", x, y, series, looks, joined=sweep(rows) is not None)


def roofline(
    rows: Sequence[Row], suffix: str, looks: Look, anchors: Mapping[str, str], limits: Json | None
) -> Markup | None:
    """Operations per second over operations per byte, under this machine's roofs."""
    points = {}
    for row in rows:
        if row.flops_min and row.bytes_min and row.device_us and not is_floor(row.provider):
            rate = 1e6 * row.flops_min / row.device_us
            points[row.id] = (row.flops_min / row.bytes_min, rate, f"{number(rate / 1e9)} GFLOP/s")
    if not points:
        return None
    copies = [gigabytes_per_second(r) or 0.0 for r in rows if r.provider == "floor-copy"]
    copy = 1e9 * max(copies, default=(limits or {}).get("copy_gb_s") or 0.0)
    products = [
        1e6 * r.flops_min / r.device_us for r in rows if r.provider == "floor-matmul" and r.flops_min and r.device_us
    ]
    matmul = max(products, default=1e12 * matmul_rate(limits, rows[0].dtype) if limits else 0.0)
    xs = [p[0] for p in points.values()]
    left, right = min(xs) / 4, max(xs) * 4
    lines, tops = [], [p[1] for p in points.values()]
    if copy:
        knee = min(right, matmul / copy) if matmul else right
        if knee > left:
            lines.append(Line(left, copy * left, knee, copy * knee, f"copy {number(copy / 1e9)} GB/s"))
            tops += [copy * left, copy * knee]
    if matmul:
        start = max(left, matmul / copy) if copy else left
        if start < right:
            lines.append(Line(start, matmul, right, matmul, f"matmul {number(matmul / 1e12)} TFLOP/s"))
            tops.append(matmul)
    x = svg.Axis("operations per byte, minimum", left, right)
    series = _series(rows, points, anchors)
    return svg.scatter(f"Roofline, {suffix}", x, svg.span(tops, "operations per second"), series, looks, lines=lines)


def memory(record: Record, looks: Look, anchors: Mapping[str, str]) -> Markup | None:
    """Measured peak bytes over predicted; over the minimum bytes if the target predicts nothing."""
    predicted = {
        (*m.key, m.provider): m.prepared["predicted_peak_bytes"]
        for m in record.measurements
        if isinstance(m.prepared.get("predicted_peak_bytes"), int) and m.prepared["predicted_peak_bytes"] > 0
    }
    points = {}
    for row in record.rows:
        expected = predicted.get((*row.key, row.provider)) if predicted else row.bytes_min
        if expected and row.peak_bytes and row.device_us is not None:
            what = "predicted" if predicted else "minimum"
            label = f"peak {size(row.peak_bytes)}, {size(expected)} {what}"
            points[row.id] = (float(expected), float(row.peak_bytes), label)
    if not points:
        return None
    everything = [v for x, y, _ in points.values() for v in (x, y)]
    label = "bytes predicted" if predicted else "minimum bytes"
    x, y = svg.span(everything, label), svg.span(everything, "peak bytes measured")
    lines = [Line(x.low, y.low, x.high, y.high, "equal")]
    series = _series(record.rows, points, anchors)
    return svg.scatter("Memory", x, y, series, looks, lines=lines)


def ledger(entries: Sequence[Json], minimum: int | None) -> Markup | None:
    """Bytes read and written by each provider of a group, split by kernel."""
    bars = {}
    for entry in entries:
        pieces = []
        for kernel in entry["kernels"]:
            read, written = kernel["read"] or 0, kernel["written"] or 0
            pieces.append((f"{kernel['name']}: reads {size(read)}, writes {size(written)}", float(read + written)))
        bars[entry["provider"]] = pieces
    most = max([moved(entry) for entry in entries] + [minimum or 0], default=0)
    if not most:
        return None
    axis = svg.span([float(most)], "bytes read and written, one segment per kernel; the line is the minimum", log=False)
    return svg.stacks("Memory traffic", axis, bars, minimum)
