"""PNG plots. Sweeps (cases named `<prefix>-<number>`) become lines over the number; other cases become marks at their
share of the limit.
"""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from ..analysis import is_floor, is_ours
from ..folder import file_name
from ..record import Record, Row, write_atomically
from . import gigabytes_per_second, measured, printable, shortened, sweep
from .charts import Look, look

#: Colours that colour-blind readers can distinguish (Okabe and Ito).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D00", "#444444")
#: Combined with the colours, these are unique for 48 providers.
MARKERS = ("o", "s", "^", "D", "v", "P")
#: Combined with the colours, these are unique for 32; floors, which are all black, take them from the end.
DASHES = ("-", "--", "-.", ":")
LONGEST_LABEL = 60  # characters of a name in a legend


@rc_context({"text.parse_math": False})  # a dollar sign in a device name is literal
def draw(record: Record, directory: Path) -> list[str]:
    """Write the plots of a record; returns their file names."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in record.rows:
        if row.device_us is not None:
            kinds.setdefault((row.dtype, row.pass_), []).append(row)
    looks = look(measured(record.rows))
    names = []
    for (dtype, pass_), rows in kinds.items():
        stem = file_name(f"{record.request['op']}-{dtype}-{pass_.replace('+', '-')}")
        caption = f"{pass_}, {dtype}, {record.request['cache']} cache, {record.environment['device_name']}"
        prefix = sweep(rows)
        if prefix is None and all(is_floor(row.provider) or row.share_of_limit is None for row in rows):
            continue
        if prefix is None:
            names.append(save(shares(rows, caption, looks), directory, f"{stem}-share.png"))
            continue
        title = f"{prefix} {caption}"
        names.append(save(lines(rows, title, prefix, "time, µs", looks), directory, f"{stem}-time.png"))
        names.append(save(lines(rows, title, prefix, "GB/s", looks), directory, f"{stem}-bandwidth.png"))
    return names


def lines(rows: Sequence[Row], title: str, label: str, quantity: str, looks: Look) -> Figure:
    """One line per provider over the number in the case name."""
    names = measured(rows)
    figure, axes = _figure(names, 4.6)
    for name in names:
        points = []
        for row in rows:
            value = row.device_us if quantity.startswith("time") else gigabytes_per_second(row)
            if row.provider == name and value is not None:
                points.append((int(row.case.rpartition("-")[2]), value))
        if not points:
            continue
        number = looks[name][0]
        style = DASHES[(-1 - number if is_floor(name) else number // len(COLOURS)) % len(DASHES)]
        colour = "#000000" if is_floor(name) else COLOURS[number % len(COLOURS)]
        xs, ys = zip(*sorted(points), strict=True)
        width = 2.4 if is_ours(name) else 1.3
        axes.plot(xs, ys, style, color=colour, linewidth=width, label=_label(name))
    if quantity.startswith("time"):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,g}")  # plain text: by default powers of ten are formulas
        axes.yaxis.set_minor_formatter(LogFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.set(title=printable(title), xlabel=printable(label), ylabel=quantity)
    axes.grid(alpha=0.3)
    _legend(figure, names)
    return figure


def shares(rows: Sequence[Row], title: str, looks: Look) -> Figure:
    """Share of the limit: a line per case, a mark per provider."""
    names = [name for name in measured(rows) if not is_floor(name)]
    cases = list(dict.fromkeys(row.case for row in rows))
    labels = [textwrap.fill(textwrap.shorten(printable(case), 100, placeholder=" …"), 34) for case in cases]
    height = sum(0.12 + 0.17 * (label.count("\n") + 1) for label in labels)
    figure, axes = _figure(names, 1.6 + height)
    for name in names:
        mine = [row for row in rows if row.provider == name and row.share_of_limit is not None]
        shift, colour = divmod(looks[name][0], len(COLOURS))
        marker, large = MARKERS[(shift + colour) % len(MARKERS)], 64 if is_ours(name) else 30
        axes.scatter(
            [100 * (row.share_of_limit or 0.0) for row in mine],
            [cases.index(row.case) for row in mine],
            s=large, marker=marker, color=COLOURS[colour], edgecolors="white", linewidths=0.5, label=_label(name), zorder=3,
        )  # fmt: skip
    axes.axvline(100, color="#000000", linewidth=0.8)
    axes.set_yticks(range(len(cases)), labels, fontsize="small")
    axes.set(ylim=(len(cases) - 0.5, -0.5), xlabel="share of the measured limit, %")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    figure.suptitle(printable(title), fontsize="medium")
    _legend(figure, names)
    return figure


def _figure(names: Sequence[str], height: float) -> tuple[Figure, Axes]:
    """A figure of that height in inches, and room below for the legend of so many names."""
    figure = Figure(figsize=(9, height + 0.2 * (len(names) // _columns(names))), layout="constrained")
    return figure, figure.subplots()


def _legend(figure: Figure, names: Sequence[str]) -> None:
    figure.legend(loc="outside lower center", ncols=_columns(names), fontsize="small")


def _columns(names: Sequence[str]) -> int:
    return max(1, min(4, 120 // (10 + max(len(_label(name)) for name in names))))


def _label(name: str) -> str:
    return shortened(printable(name), LONGEST_LABEL)


def save(figure: Figure, directory: Path, name: str) -> str:
    drawn = io.BytesIO()
    with warnings.catch_warnings():  # a glyph missing from all fonts becomes an empty box; the report has the text
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        figure.savefig(drawn, dpi=120, metadata={"Software": "fusewise"})
    write_atomically(directory / name, drawn.getvalue())
    return name
