"""Terminal output: live progress during measurement (on standard error, only on a terminal) and the final tables."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..analysis import is_floor, is_ours
from ..compare import Comparison
from ..problem import Task
from ..record import Json, Record, Row
from ..verdict import Verdict
from . import measured, number, percent, printable


def plain(text: str) -> str:
    """Text from a record or provider, safe for the terminal: no markup, no control characters."""
    return escape(printable(text))


class _Console(Console):
    """Leaves it to the command what a reader who has seen enough, such as `| head`, means; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def console(stderr: bool = False) -> Console:
    """A console for the functions below, with emoji codes disabled (`my.py:mask:` is a path). If no terminal limits the
    width, tables are as wide as they need.
    """
    made = _Console(stderr=stderr, emoji=False)
    return made if made.is_terminal else _Console(stderr=stderr, emoji=False, width=200)


class Live:
    """Shows progress. Off a terminal it writes one plain line per group. `named`: whether the providers were requested
    by name; a missing one must then be reported.
    """

    def __init__(self, console: Console, *, named: bool = False) -> None:
        self.console = console
        self.worth_telling = ("wrong", "failed", "missing") if named else ("wrong", "failed")
        self.title = ""
        self.reported: set[tuple[str, str]] = set()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.bar = self.progress.add_task("starting workers", total=None)

    def __enter__(self) -> Live:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def note(self, text: str) -> None:
        self.console.print(plain(text), highlight=False, soft_wrap=True)

    def group(self, index: int, total: int, task: Task) -> None:
        self.title = plain(f"{task.case} {task.dtype} {task.pass_}")
        self.progress.update(
            self.bar, description=f"{self.title}: first calls and checks", completed=index, total=total
        )

    def looking(self, name: str) -> None:
        self.progress.update(self.bar, description=f"code and traffic: {plain(name)}")

    def provider(self, name: str, status: str, reason: str) -> None:
        if status in self.worth_telling and (name, reason) not in self.reported:
            self.reported.add((name, reason))
            self.console.print(
                f"{self.title}: [bold]{plain(name)} {status}[/]: {plain(reason)}", highlight=False, soft_wrap=True
            )

    def round(self, number: int, times: Mapping[str, float]) -> None:
        self.progress.update(self.bar, description=f"{self.title}: round {number + 1}, {len(times)} providers")

    def rows(self, rows: Sequence[Row]) -> None:
        timed = [row for row in rows if row.device_us is not None and not is_floor(row.provider)]
        self.progress.advance(self.bar)
        if timed:
            best = min(timed, key=lambda row: row.device_us or 0.0)
            share = f", {percent(best.share_of_limit)} of {best.limit}" if best.limit else ""
            fastest = f"{plain(best.provider)} {number(best.device_us)} µs{share}"
            self.console.print(f"{self.title}: {len(timed)} timed, fastest {fastest}", highlight=False, soft_wrap=True)


@dataclass
class Column:
    name: str
    right: bool = False
    style: str = ""
    folds: bool = False  # wraps between words if the table is too wide

    def widths(self, texts: Iterable[str]) -> tuple[int, int]:
        """Minimum and maximum width of the column for the given texts."""
        lines = [Text.from_markup(text).plain for text in (self.name, *texts)]
        most = max(map(cell_len, lines))
        return max(cell_len(word) for line in lines for word in line.split() or [""]) if self.folds else most, most


GAP = 2  # between columns


PLAIN: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "collapse_padding": True}


@dataclass
class Columns:
    """A table that is split into several, one below the other, if the terminal is too narrow; each repeats the first
    `keys` columns. Names and cells are markup.
    """

    title: str
    columns: Sequence[Column]
    keys: int = 1
    lines: list[tuple[Sequence[str], str]] = field(default_factory=list)  # cells and line style

    def add(self, *cells: str, style: str = "") -> None:
        self.lines.append((cells, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | str]:
        asked = [column.widths(cells[i] for cells, _ in self.lines) for i, column in enumerate(self.columns)]
        for nth, chosen in enumerate(self._chosen(asked, options.max_width)):
            if nth > 0:
                yield ""
            if self.title and nth == 0:
                yield f"[bold]{self.title}[/]"  # on its own line: above a narrow table it would wrap
            table = Table(**PLAIN)
            left = options.max_width + GAP - sum(asked[i][0] + GAP for i in chosen)
            for i in chosen:
                column, (least, most) = self.columns[i], asked[i]
                width = least + min(most - least, max(0, left))
                left -= width - least
                justify: Literal["left", "right"] = "right" if column.right else "left"
                table.add_column(column.name, overflow="fold", justify=justify, style=column.style, width=width)
            for cells, style in self.lines:
                table.add_row(*(cells[i] for i in chosen), style=style)
            yield table

    def _chosen(self, asked: Sequence[tuple[int, int]], width: int) -> list[list[int]]:
        """The columns of each of the tables."""
        keys = list(range(self.keys))
        tables = [[*keys]]
        for i in range(self.keys, len(self.columns)):
            if len(tables[-1]) > self.keys and sum(asked[j][0] + GAP for j in [*tables[-1], i]) - GAP > width:
                tables.append([*keys])
            tables[-1].append(i)
        return tables


def summary(record: Record) -> Columns:
    """A line per group, a column per provider: microseconds, the fastest in bold."""
    names = measured(record.rows)
    styles = ("dim" if is_floor(name) else "cyan" if is_ours(name) else "" for name in names)
    columns = [Column(plain(name), right=True, style=style) for name, style in zip(names, styles, strict=True)]
    title = plain(f"{record.request['title']}: microseconds per call, {record.request['cache']} cache")
    table = Columns(title, [Column("case"), *columns])
    by_group: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in record.rows:
        by_group.setdefault((row.case, row.dtype, row.pass_), {})[row.provider] = row
    for key, members in by_group.items():
        rivals = [r.device_us for r in members.values() if r.device_us and not is_floor(r.provider)]
        cells = []
        for name in names:
            mine = members.get(name)
            if mine is None or mine.device_us is None:
                cells.append("–" if mine is None else mine.status)
            else:
                value = number(mine.device_us)
                cells.append(f"[bold]{value}[/]" if mine.device_us == min(rivals, default=None) else value)
        table.add(plain(" ".join(key)), *cells)
    return table


def verdict_table(found: Sequence[Verdict]) -> Columns:
    """A line per group: the binding limit, how close the best provider comes, and whether a kernel is worth it."""
    names = ("case", "bound by", "minimum µs", "fastest", "left to gain over the best compiler", "worth a kernel")
    table = Columns("verdict", [Column(name, folds=True) for name in names])
    for v in found:
        fastest = f"{v.gaps[0].provider} {number(v.gaps[0].time_us)} µs" if v.gaps else "–"
        worth = v.worth + (f": {v.kernel}" if v.kernel else "")
        cells = (" ".join(v.key[1:]), v.bound, number(v.minimum_us), fastest, percent(v.left), worth)
        table.add(*(plain(cell) for cell in cells))
    return table


STYLES = {"slower": "red", "broken": "red", "faster": "green", "mended": "green", "ambiguous": "yellow"}


def comparison_table(found: Comparison) -> Columns:
    """A line per row that both runs have, regressions first."""
    names = ("case", "provider", f"before {found.unit}", f"after {found.unit}", "ratio", "noise", "verdict")
    columns = [Column(plain(name), folds=name not in ("provider", "ratio", "noise")) for name in names]
    table = Columns(plain(f"{found.before} → {found.after}"), columns, keys=2)
    order = list(STYLES)
    lines = sorted(found.changes, key=lambda c: order.index(c.verdict) if c.verdict in order else len(order))
    several = len({c.op for c in lines}) > 1  # operations may have cases of one name
    for c in lines:
        ratio = "–" if c.ratio is None else f"{c.ratio:.3f} [{c.low:.3f}, {c.high:.3f}]"
        said = c.verdict + (f": {c.note}" if c.note else "")
        case = f"{f'{c.op} ' if several else ''}{c.case} {c.dtype} {c.pass_}"
        cells = (case, c.provider, number(c.before_us), number(c.after_us), ratio)
        table.add(*(plain(x) for x in (*cells, percent(c.noise), said)), style=STYLES.get(c.verdict, ""))
    return table


def comparison_summary(found: Comparison) -> list[str]:
    words = [c.verdict for c in found.changes]
    counted = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    alone = f"; {found.only_before} rows only before, {found.only_after} only after"
    return [f"{len(words)} compared: {counted}{alone}", *map(printable, found.notes)]


def limits_table(found: Json) -> Columns:
    """The measured limits of the machine."""
    title = plain(f"limits of {found['device']}, measured {found['created']}")
    table = Columns(title, [Column("limit"), Column("measured")])
    table.add("copy", f"{number(found['copy_gb_s'])} GB/s")
    table.add("triad", f"{number(found['triad_gb_s'])} GB/s")
    for name, rate in found["matmul_tflop_s"].items():
        table.add(plain(f"matmul {name}"), f"{number(rate)} TFLOP/s")
    table.add("launch", f"{number(found['launch_us'])} µs")
    for name, value in (found["clocks"] or {}).items():
        table.add(plain(name.replace("_", " ")), plain(str(value)))
    return table


def provider_table(lines: Sequence[tuple[str, str, str, str]]) -> Columns:
    """Name, state, note and versions."""
    table = Columns("", [Column(name, folds=True) for name in ("provider", "state", "note", "versions")])
    for line in lines:
        table.add(*(plain(cell) for cell in line))
    return table
