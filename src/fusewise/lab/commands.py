"""Implements the commands, for the command line and for the Python API."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from . import analysis, folder, inside, plugin, record, targets, verdict
from .compare import Comparison
from .interruption import interruptible
from .options import Options
from .ranks import Rank
from .reason import reason
from .record import Json, Record
from .render import groups, html, idleness, markdown, printable, size, terminal
from .study import Study

#: Of a run directory.
WRITTEN = ("record.json", "rows.jsonl", "report.md", "report.html")


def run(
    options: Options, append_rows: Path | None = None, resume: bool = False, code: bool = True, alone: bool = True
) -> tuple[Record, Path]:
    """Measure, write the run directory; return the record and the path of the report. `resume`: continue an existing
    run. `code`: afterwards inspect the providers' code and memory traffic. `alone`: no other rank prints the messages
    that concern the whole study.

    Raises OSError if the directory cannot be written, folder.Refused if it belongs to another run. However the study
    ends, the rows measured so far are on disk and in the report.
    """
    there = _appendable(append_rows, options.out)
    with folder.claimed(options.out, resume), interruptible():
        before = folder.interrupted(options.out, resume)
        with terminal.Live(terminal.console(stderr=True), named=options.named) as live:
            study = Study(options, live, before)
            if alone and study.record.limits is None and not _limited(options):
                live.note(
                    "study: providers must have a floor where no limits of the machine are kept, got none, so no share of a limit "
                    "can be told; add floor-copy,floor-launch to the providers, or run `fusewise limits "
                    f"--device {options.device}` first"
                )
            try:
                study.run()
                if code:
                    _look(options, study.record, live)
            finally:
                report = render(study.record, options.out)
    _append(study.record, append_rows, options.out, there)
    return study.record, report


def _look(options: Options, found: Record, live: terminal.Live) -> None:
    """Inspect the providers of a study that has been measured, and save what the record gains."""
    found.account(*inside.look(options, found, live.looking, live.note))
    record.save(found, options.out)


def _limited(options: Options) -> bool:
    """Whether a floor that measures a limit is among the providers."""
    return any(entry.name == f"floor-{kind}" for entry in options.providers for kind in analysis.LIMITS)


def _appendable(path: Path | None, out: Path) -> set[tuple[str, str]]:
    """(run, id) of the rows already in a file, so that they are not appended twice; empty if the file cannot be read
    back, e.g. a pipe. Raises folder.Refused if the file cannot be appended to, or is one that the study writes itself:
    better now than after an hour. Leaves no new file behind.
    """
    if path is None:
        return set()
    if path.resolve() in [out.resolve() / own for own in WRITTEN]:
        raise folder.Refused(
            f"study: --append-rows must be a file other than those that the study writes, got {path}; choose another"
        )
    new = not path.exists()
    try:
        there = {(row.run, row.id) for row in record.rows_in(path)} if path.is_file() else set()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise folder.Refused(f"study: --append-rows must be a file to write to, got {error}; choose another") from None
    except ValueError as error:
        raise folder.Refused(f"study: --append-rows must be a file of rows, got {error}") from None
    return there


def _append(found: Record, path: Path | None, out: Path, there: Collection[tuple[str, str]]) -> None:
    """Append the rows that are not in `there`: resuming a finished study must not append them twice. Raises
    folder.Refused if the rows of a finished study cannot be appended after all.
    """
    if path is None:
        return
    try:
        record.append_rows(path, [row for row in found.rows if (row.run, row.id) not in there])
    except OSError as error:
        raise folder.Refused(
            f"study: --append-rows must be a file with room, got {error} for {path}; the study is done, add "
            f"{out / 'rows.jsonl'} to a file by hand"
        ) from None


def run_shared(
    rank: Rank, options: Options, append_rows: Path | None, resume: bool, code: bool
) -> tuple[Record, Path] | None:
    """Run this rank's share of a study. Rank 0 also gathers and writes the whole, inspects the providers, when no rank
    measures any more, and renders it; other ranks return None.
    """
    there: set[tuple[str, str]] = set()
    if rank.number == 0:
        there = _appendable(append_rows, options.out)
        folder.interrupted(options.out, resume)
    mine = rank.share(options)
    try:
        goes_on = resume and (mine.out / "record.json").exists()
        part, _ = run(mine, resume=goes_on, code=False, alone=rank.number == 0)
        rank.give(part)
    except BaseException:
        rank.give(None)  # so that no rank waits for a part that never comes
        raise
    whole = rank.gather(options)
    if whole is None:
        return None
    with folder.claimed(options.out), interruptible():
        (options.out / "rows.jsonl").unlink(missing_ok=True)
        record.append_rows(options.out / "rows.jsonl", whole.rows)
        record.save(whole, options.out)
        try:
            if code:
                with terminal.Live(terminal.console(stderr=True), named=options.named) as live:
                    _look(options, whole, live)
        finally:
            report = render(whole, options.out)
    _append(whole, append_rows, options.out, there)
    return whole, report


def render(found: Record, directory: Path) -> Path:
    """Write everything derived from a record; returns the path of the HTML report."""
    from .render import plots  # matplotlib takes half a second to import, and only reports need it

    names = plots.draw(found, directory)
    record.write_atomically(directory / "report.md", markdown.report(found, names))
    path = directory / "report.html"
    record.write_atomically(path, html.report(found))
    return path


def show(found: Record) -> None:
    """Print the tables of times and verdicts to standard output, and whether the machine was idle."""
    console = terminal.console()
    judged = verdict.verdicts(found)
    console.print(terminal.summary(found), "", terminal.verdict_table(judged), "", sep="\n")
    for line in (" ".join(verdict.summary(judged)), *idleness(found)):
        console.print(printable(line), markup=False, highlight=False)


def measured(found: Record) -> bool:
    """Whether any provider is correct and has a time; floors count only if nothing else was requested."""
    asked = [row for row in found.rows if not analysis.is_floor(row.provider)] or found.rows
    return any(row.status == "ok" for row in asked)


def as_json(found: Record) -> list[dict[str, Any]]:
    """A record as JSON-serialisable data: each group's verdict with its rows."""
    members = groups(found).values()
    return [
        {**verdict.to_json(judged), "rows": [{"id": row.id, **row.to_json()} for row in rows]}
        for judged, rows in zip(verdict.verdicts(found), members, strict=True)
    ]


def show_comparison(found: Comparison) -> None:
    """Print what changed between two runs to standard output."""
    console = terminal.console()
    console.print(terminal.comparison_table(found))
    for line in terminal.comparison_summary(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_limits(found: Json) -> None:
    terminal.console().print(terminal.limits_table(found))


def case_listing(
    target: str | None, inputs: Sequence[str] = (), preset: str | None = None, cases: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Every preset of a target (None: of all) with its cases, shapes and bytes, or only the requested ones."""
    if target is None:
        if inputs or preset or cases:
            raise ValueError("study: --list without a target must be alone, got other options, too; add the target")
        return [entry for name in targets.names() for entry in case_listing(name)]
    made, asked = targets.resolve(target, inputs, preset)
    presets = {asked: made.cases(asked)} if asked else made.presets()
    wanted = {made.case(name).name for name in cases}
    return [
        {
            "preset": name,
            "case": case.name,
            "dtypes": list(case.dtypes),
            "passes": list(case.passes),
            "shape": case.shape,
            "bytes": case.bytes_min("fwd", case.dtypes[0]),
        }
        for name, members in presets.items()
        for case in members
        if not wanted or case.name in wanted
    ]


def case_text(listing: list[dict[str, Any]]) -> str:
    lines = []
    for preset in dict.fromkeys(entry["preset"] for entry in listing):
        if preset:  # a function has none
            lines.append(preset)
        for entry in listing:
            if entry["preset"] == preset:
                kinds = f"{','.join(entry['dtypes'])} {','.join(entry['passes'])}"
                case, shape = printable(entry["case"]), printable(entry["shape"])
                lines.append(f"  {case:<28} {kinds:<14} {size(entry['bytes']):>9}  {shape}")
    return "\n".join(lines)


def provider_states(where: str) -> list[dict[str, Any]]:
    """The state of each known provider: whether it can run on device `where`, its versions, and if not, why."""
    found = []
    for entry in plugin.known():
        state, note, versions = "here", "", {}
        if entry.provider is None:
            state, note = "broken", entry.problem
        else:
            try:
                versions = plugin.versions(entry.provider)
                entry.provider.check(where)
                note = named_only(entry.provider, where)
            except plugin.Missing as error:
                state, note = "missing", str(error)
            except Exception as error:  # third-party packages may raise anything
                state, note = "broken", reason(error)
        targets_of = list(entry.provider.ops) if entry.provider is not None else []
        place = {"provider": entry.name, "targets": targets_of, "where": entry.where}
        found.append({**place, "state": state, "versions": versions, "note": note})
    return found


def named_only(provider: plugin.Provider, where: str) -> str:
    """The note on a provider that must be named to be measured, for some or all of its targets."""
    of = provider.ops or targets.names()
    named = [op for op in of if not provider.chosen(op, where)]
    if not named:
        return ""
    others = [op for op in of if op not in named]
    only = "measured only if named with --providers"
    if others and len(named) <= len(others):
        return f"for {', '.join(named)}, {only}"
    return only + (f", except for {', '.join(others)}" if others else "")


def show_providers(found: list[dict[str, Any]]) -> None:
    lines = [
        (
            "  ".join([e["provider"], *e["targets"]]),
            e["state"],
            e["note"],
            " ".join(f"{k} {v}" for k, v in e["versions"].items()),
        )
        for e in found
    ]
    terminal.console().print(terminal.provider_table(lines))
