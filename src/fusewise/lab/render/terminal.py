"""The terminal: live progress while it measures (on standard error, only on a terminal) and a table at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..analysis import is_floor, is_ours
from ..compare import Comparison
from ..problem import Task
from ..record import Json, Record, Row
from ..verdict import Verdict
from . import measured, number, percent, printable


def plain(text: str) -> str:
    """Text from a record or a provider as the terminal shows it: no markup, no control characters."""
    return escape(printable(text))


def console(stderr: bool = False) -> Console:
    """A console for the functions below, in which `my.py:mask:` is no picture of a mask: with tables as wide as they need to be
    where no terminal limits them."""
    made = Console(stderr=stderr, emoji=False)
    return made if made.is_terminal else Console(stderr=stderr, emoji=False, width=200)


class Live:
    """Follows a study. Off a terminal it writes one plain line a group. `named`: whether each provider was asked for by name,
    so that one that is missing is not left out without a word."""

    def __init__(self, console: Console, *, named: bool = False) -> None:
        self.console = console
        self.worth_telling = ("wrong", "failed", "missing") if named else ("wrong", "failed")
        self.title = ""
        self.told: set[tuple[str, str]] = set()
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

    def group(self, index: int, total: int, task: Task) -> None:
        self.title = plain(f"{task.case} {task.dtype} {task.pass_}")
        self.progress.update(
            self.bar, description=f"{self.title}: first calls and checks", completed=index, total=total
        )

    def looking(self, name: str) -> None:
        self.progress.update(self.bar, description=f"code and traffic: {plain(name)}")

    def provider(self, name: str, status: str, reason: str) -> None:
        if status in self.worth_telling and (name, reason) not in self.told:
            self.told.add((name, reason))
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


def summary(record: Record) -> Table:
    """A line a group, a column a provider: microseconds, the fastest in bold."""
    names = measured(record.rows)
    table = Table(title=plain(f"{record.request['title']}: microseconds a call, {record.request['cache']} cache"))
    table.add_column("case", overflow="fold")
    for name in names:
        table.add_column(
            plain(name),
            justify="right",
            overflow="fold",
            style="dim" if is_floor(name) else "cyan" if is_ours(name) else "",
        )
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
        table.add_row(plain(" ".join(key)), *cells)
    return table


def verdict_table(found: Sequence[Verdict]) -> Table:
    """A line a group: what binds it, how near the best comes, and whether a kernel is worth it."""
    table = Table(title="verdict")
    for column in ("case", "bound by", "at least µs", "fastest", "left over the best compiler", "worth a kernel"):
        table.add_column(column, overflow="fold")
    for v in found:
        fastest = f"{v.gaps[0].provider} {number(v.gaps[0].time_us)} µs" if v.gaps else "–"
        worth = v.worth + (f": {v.kernel}" if v.kernel else "")
        cells = (" ".join(v.key[1:]), v.bound, number(v.minimum_us), fastest, percent(v.left), worth)
        table.add_row(*(plain(cell) for cell in cells))
    return table


STYLES = {"slower": "red", "broken": "red", "faster": "green", "mended": "green", "ambiguous": "yellow"}


def comparison_table(found: Comparison) -> Table:
    """A line a row that both runs have, the regressions first."""
    table = Table(title=plain(f"{found.before} → {found.after}"))
    for column in ("case", "provider", f"before {found.unit}", f"after {found.unit}", "ratio", "noise", "verdict"):
        table.add_column(column, overflow="fold")
    order = list(STYLES)
    lines = sorted(found.changes, key=lambda c: order.index(c.verdict) if c.verdict in order else len(order))
    for c in lines:
        ratio = "–" if c.ratio is None else f"{c.ratio:.3f} [{c.low:.3f}, {c.high:.3f}]"
        said = c.verdict + (f": {c.note}" if c.note else "")
        cells = (f"{c.case} {c.dtype} {c.pass_}", c.provider, number(c.before_us), number(c.after_us), ratio)
        table.add_row(*(plain(x) for x in (*cells, percent(c.noise), said)), style=STYLES.get(c.verdict, ""))
    return table


def comparison_summary(found: Comparison) -> list[str]:
    words = [c.verdict for c in found.changes]
    counted = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    alone = f"; {found.only_before} rows only before, {found.only_after} only after"
    return [f"{len(words)} compared: {counted}{alone}", *map(printable, found.notes)]


def limits_table(found: Json) -> Table:
    """What the machine can do, as measured."""
    table = Table(title=plain(f"limits of {found['device']}, measured {found['created']}"))
    for column in ("limit", "measured"):
        table.add_column(column)
    table.add_row("copy", f"{number(found['copy_gb_s'])} GB/s")
    table.add_row("triad", f"{number(found['triad_gb_s'])} GB/s")
    for name, rate in found["matmul_tflop_s"].items():
        table.add_row(plain(f"matmul {name}"), f"{number(rate)} TFLOP/s")
    table.add_row("launch", f"{number(found['launch_us'])} µs")
    for name, value in (found["clocks"] or {}).items():
        table.add_row(plain(name.replace("_", " ")), plain(str(value)))
    return table


def provider_table(lines: Sequence[tuple[str, str, str, str]]) -> Table:
    """Name, state, versions and what to do."""
    table = Table()
    for column in ("provider", "state", "versions", "note"):
        table.add_column(column, overflow="fold")
    for line in lines:
        table.add_row(*(plain(cell) for cell in line))
    return table
