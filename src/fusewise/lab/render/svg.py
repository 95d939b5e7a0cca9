"""Charts as inline SVG: all text is escaped, colours follow the page's theme, every mark links to its row.

The page's content security policy forbids style attributes, so marks carry classes: `s0` … `s7` are the series'
colours; `ours` and `floor` mark those providers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from . import shortened

WIDTH = 720
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 30, 44
SERIES = 8
LONGEST_LABEL = 36  # characters of a name next to its bar
FEWEST_TICKS = 3
CHARACTER, LINE = 6.4, 13.0  # about as wide and as high as a label's text
#: Marker outlines in a 10 × 10 box around the origin, distinguishable without colour; with colours unique for 48 series.
SHAPES = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0",
    "M-3.6,-3.6h7.2v7.2h-7.2z",
    "M0,-4.8L4.4,3.4L-4.4,3.4z",
    "M0,-5L5,0L0,5L-5,0z",
    "M0,4.8L4.4,-3.4L-4.4,-3.4z",
    "M-4.4,-1.6h2.8v-2.8h3.2v2.8h2.8v3.2h-2.8v2.8h-3.2v-2.8h-2.8z",
)


def el(tag: str, *children: Markup | str, **attributes: object) -> Markup:
    """An element; `_` in attribute names becomes `-`, a trailing one is dropped (class_). Everything is escaped."""
    named = Markup("").join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), value)
        for name, value in attributes.items()
        if value is not None
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(tag), named, Markup("").join(escape(child) for child in children))


@dataclass(frozen=True)
class Mark:
    """One value of a provider: position, label, and the anchor of its row."""

    x: float
    y: float
    label: str
    anchor: str


@dataclass(frozen=True)
class Line:
    """A straight limit line between two points, labelled at its end."""

    x0: float
    y0: float
    x1: float
    y1: float
    label: str


@dataclass(frozen=True)
class Axis:
    """One axis: label, range, and whether it is logarithmic."""

    label: str
    low: float
    high: float
    log: bool = True

    def at(self, value: float) -> float:
        """The relative position of `value` on the axis, 0 to 1."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values, at least three of them: on a logarithmic axis 1, 2 and 5 times powers of ten or, where it is
        too short for those, equal steps."""
        found: list[float] = []
        if self.log:
            low, high = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            factors = (1, 2, 5) if high - low <= 3 else (1,)
            all_ = [f * 10.0**e for e in range(low, high + 1) for f in factors]
            found = [t for t in all_ if self.low <= t * (1 + 1e-9) and t <= self.high * (1 + 1e-9)]
        if len(found) < FEWEST_TICKS:
            step = _step(self.high - self.low)
            found = [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return found


def _step(span: float) -> float:
    """A round step that gives three to nine ticks."""
    rough = span / 8
    power = 10.0 ** math.floor(math.log10(rough))
    return next(f * power for f in (1, 2, 5, 10) if f * power >= rough)


def span(values: Sequence[float], label: str, log: bool = True) -> Axis:
    """An axis that contains all values: with padding at both ends if logarithmic, from zero otherwise."""
    if not log:
        return Axis(label, 0.0, max(values) * 1.08, False)
    low, high = min(values), max(values)
    return Axis(label, low / 1.25, high * 1.25)


def short(value: float) -> str:
    """A tick label: 1000 as 1k, 2e6 as 2M."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{letter}"
    return f"{value:g}"


def frame(title: str, height: float, *parts: Markup) -> Markup:
    return el(
        "svg",
        el("title", title),
        el("text", title, x=LEFT, y=16, class_="title"),
        *parts,
        viewBox=f"0 0 {WIDTH} {height:g}",
        role="group",  # not an image: that would hide the links in it from screen readers
        aria_label=title,
        class_="chart",
    )


def grid(x: Axis, y: Axis | None, height: float, left: float = LEFT) -> Markup:
    """Labelled grid lines; without `y` only the vertical ones."""
    bottom, right = height - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in x.ticks():
        at = left + x.at(tick) * (right - left)
        parts.append(el("line", x1=_n(at), x2=_n(at), y1=TOP, y2=_n(bottom), class_="grid"))
        inside = min(at, WIDTH - CHARACTER * len(short(tick)) / 2)  # a label at the right edge is not cut
        parts.append(el("text", short(tick), x=_n(inside), y=_n(bottom + 16), text_anchor="middle"))
    middle = (left + right) / 2
    parts.append(el("text", named(x), x=_n(middle), y=_n(bottom + 36), text_anchor="middle", class_="axis"))
    for tick in y.ticks() if y else ():
        at = bottom - (y.at(tick) if y else 0) * (bottom - TOP)
        parts.append(el("line", x1=_n(left), x2=_n(right), y1=_n(at), y2=_n(at), class_="grid"))
        parts.append(el("text", short(tick), x=_n(left - 6), y=_n(at + 4), text_anchor="end"))
    if y:
        middle = (TOP + bottom) / 2
        turned = f"rotate(-90 14 {_n(middle)})"
        parts.append(el("text", named(y), x=14, y=_n(middle), text_anchor="middle", transform=turned, class_="axis"))
    return Markup("").join(parts)


def named(axis: Axis) -> str:
    return f"{axis.label} (log scale)" if axis.log else axis.label


def marker(series: int, classes: str = "") -> Markup:
    """A series' marker, drawn around the origin. Each round of the colours starts at the next shape."""
    shift, colour = divmod(series, SERIES)
    shape = SHAPES[(shift + colour) % len(SHAPES)]
    return el("path", d=shape, class_=f"s{colour} {classes}".strip())


def linked(mark: Mark, x: float, y: float, series: int, classes: str) -> Markup:
    dot = el("g", marker(series, classes), transform=f"translate({_n(x)} {_n(y)})")
    return el("a", el("title", mark.label), dot, href=f"#{mark.anchor}")  # the title is also its accessible name


def scatter(
    title: str,
    x: Axis,
    y: Axis,
    series: Mapping[str, Sequence[Mark]],
    look: Mapping[str, tuple[int, str]],
    *,
    joined: bool = False,
    lines: Sequence[Line] = (),
) -> Markup:
    """Scatter chart; optionally each series is joined by a line. `look` gives each series its number and classes."""
    height = 360.0
    bottom, right = height - BOTTOM, WIDTH - RIGHT

    def place(px: float, py: float) -> tuple[float, float]:
        return LEFT + x.at(px) * (right - LEFT), bottom - y.at(py) * (bottom - TOP)

    parts = [grid(x, y, height)]
    labels: list[tuple[float, float, float]] = []  # left, right, baseline
    for line in lines:
        (x0, y0), (x1, y1) = place(line.x0, line.y0), place(line.x1, line.y1)
        parts.append(el("line", x1=_n(x0), y1=_n(y0), x2=_n(x1), y2=_n(y1), class_="limit"))
        wide, at = CHARACTER * len(line.label), y1 - 5
        end = max(x1 - 4, LEFT + 4 + wide)  # within the chart even if the line ends at its left edge
        while any(left < end and end - wide < right and abs(at - other) < LINE for left, right, other in labels):
            at -= LINE
        labels.append((end - wide, end, at))
        parts.append(el("text", line.label, x=_n(end), y=_n(at), text_anchor="end", class_="limit"))
    for name, marks in series.items():
        number, classes = look[name]
        if joined and len(marks) > 1:
            path = " ".join(f"{_n(a)},{_n(b)}" for a, b in (place(m.x, m.y) for m in marks))
            parts.append(el("polyline", points=path, class_=f"s{number % SERIES} {classes}".strip()))
        parts += [linked(m, *place(m.x, m.y), number, classes) for m in marks]
    return frame(title, height, *parts)


def dots(
    title: str,
    x: Axis,
    lines: Mapping[str, Mapping[str, Mark]],
    look: Mapping[str, tuple[int, str]],
    limit: float | None = None,
) -> Markup:
    """A line per case, a mark per provider; a vertical line at the limit."""
    left = min(260.0, 24 + 6.6 * max(len(name) for name in lines))
    height = TOP + BOTTOM + 22.0 * len(lines)
    parts = [grid(x, None, height, left=left)]
    for i, (name, marks) in enumerate(lines.items()):
        at = TOP + 22.0 * (i + 0.5)
        parts.append(beside(name, left, at + 4))
        parts.append(el("line", x1=_n(left), x2=WIDTH - RIGHT, y1=_n(at), y2=_n(at), class_="grid"))
        for provider, mark in marks.items():
            number, classes = look[provider]
            parts.append(linked(mark, left + x.at(mark.x) * (WIDTH - RIGHT - left), at, number, classes))
    if limit is not None:
        at = left + x.at(limit) * (WIDTH - RIGHT - left)
        parts.append(el("line", x1=_n(at), x2=_n(at), y1=TOP, y2=_n(height - BOTTOM), class_="limit"))
    return frame(title, height, *parts)


def stacks(title: str, axis: Axis, bars: Mapping[str, Sequence[tuple[str, float]]], minimum: float | None) -> Markup:
    """A stacked bar per provider with a piece per kernel; the vertical line is the minimum."""
    left = min(260.0, 24 + 6.6 * max(len(name) for name in bars))
    height = TOP + BOTTOM + 26.0 * len(bars)
    wide = WIDTH - RIGHT - left
    parts = [grid(axis, None, height, left=left)]
    for i, (name, pieces) in enumerate(bars.items()):
        top, reached = TOP + 26.0 * i + 4, 0.0
        parts.append(beside(name, left, top + 13))
        for j, (label, value) in enumerate(pieces):
            start, end = left + axis.at(reached) * wide, left + axis.at(reached + value) * wide
            box = el("rect", el("title", label), x=_n(start), y=_n(top), width=_n(max(0.5, end - start - 1)), height=18,
                     class_=f"piece{j % 2}")  # fmt: skip
            parts.append(box)
            reached += value
    if minimum is not None:
        at = left + axis.at(minimum) * wide
        parts.append(el("line", x1=_n(at), x2=_n(at), y1=TOP, y2=_n(height - BOTTOM), class_="limit"))
    return frame(title, height, *parts)


def beside(name: str, left: float, y: float) -> Markup:
    """The name left of its line or bar, shortened to fit; a pointer shows the whole."""
    return el("text", el("title", name), shortened(name, LONGEST_LABEL), x=_n(left - 8), y=_n(y), text_anchor="end")


def _n(value: float) -> str:
    """A coordinate with one decimal: a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")
