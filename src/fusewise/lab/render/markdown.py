"""`report.md`: the whole study for a plain text viewer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..analysis import TWIN, break_even, is_floor
from ..ledger import Ledger
from ..record import Json, Record, Row
from ..spent import PARTS, own_share
from ..verdict import Verdict, sentences, summary, verdicts
from . import (
    WITHOUT_TIME,
    calls,
    eager_of,
    fact,
    gigabytes_per_second,
    groups,
    host,
    idleness,
    ledgers,
    measured,
    memory,
    number,
    percent,
    printable,
    size,
    without_time,
)

HOW_TO_READ = """\
- **time**: median over rounds of the device time of one call, microseconds, ± the interquartile range of all samples.
  {cache} On a CPU it is the wall time of the call.
- **of limit**: the time of the binding limit over that of the provider. The limits are `floor-copy` (`dst.copy_(src)` of the
  minimum bytes), `floor-matmul` (the bare matmuls) and `floor-launch` (launch latency), measured on this machine: in the same
  rounds, or by `fusewise limits`.
- **GB/s**: the minimum bytes that the operation must move, over the time. Extra traffic of a provider does not count.
- **against the best other**: time over that of the fastest other provider (for fusewise: one that is not fusewise), the
  95 % interval, and the verdict: faster or slower only beyond the noise of this run's A/A pair, *same* when the interval
  lies within three times that noise (taken as 2 % to 10 %), else *ambiguous*.
- **error**: largest deviation from float64 over the largest true value, and eager's in brackets. A provider whose error
  exceeds twice eager's plus the roundings of the result and of the longest sum is *wrong* and gets no time.
- **kernels**: kernel time of one isolated call, from the profiler (CUPTI). *Time* also includes launch latency and, for large
  problems, power throttling after many calls. Measured for a few cases, on a GPU only.
- **host**: host overhead, microseconds of host time per call in a loop that does not wait for the device (CUDA only).
- **graph**: device time of a call in a CUDA graph that is replayed; for a few cases, on a GPU only.
- **first call**: seconds from building to the end of the first call; compiler caches were empty at the start of the run.
  **again**: the same in a second process, with what the compiler kept on disk; for the first case, where the first took
  two seconds or more and the provider keeps compiled code.
- **even after**: calls after which a program is done no later than with eager code, both from their first call on; in brackets
  with the first call of a second process.
- **peak**: most bytes allocated at once during the call, outputs included; **held**: bytes that a forward saves for its
  backward, beyond inputs and outputs."""


def report(record: Record, plots: Sequence[str] = ()) -> str:
    """Render the record as Markdown; `plots` are the file names of pictures next to it."""
    request, rows = record.request, record.rows
    judged = verdicts(record)
    parts = [
        f"# fusewise study: {text(request['title'] or request['op'])}",
        opening(record),
        "## Verdict",
        *conclusions(judged),
        *(f"![{text(name)}]({name})" for name in plots),
        "## Times at a glance",
        *summaries(record),
        "## Where it was measured",
        environment(record),
        *(f"**{warning}**" for warning in idleness(record)),
        "## Limits of this machine",
        limits(rows),
        "## Providers without a time",
        absent(rows),
        "## Case by case",
        *(section(v, members, record.comparisons) for v, members in zip(judged, groups(record).values(), strict=True)),
        *traffic(record),
        *memories(record),
        *hosts(record),
        *spent_on(record),
        "## How to read it",
        HOW_TO_READ.format(
            cache="The cache is warm: the previous call filled it."
            if request["cache"] == "warm"
            else f"The cache is cold: before each sample, memory of twice its size is {flushed(record)}."
        ),
    ]
    return "\n\n".join(parts) + "\n"


def traffic(record: Record) -> list[str]:
    """The ledgers: one table per group."""
    if not record.ledgers:
        return []
    parts = ["## Where the memory traffic goes", "Bytes that each kernel must read and write, every tensor once."]
    by_group: dict[tuple[str, ...], list[Ledger]] = {}
    for entry in record.ledgers:
        found = Ledger.from_json(entry)
        by_group.setdefault((found.case, found.dtype, found.pass_), []).append(found)
    for key, members in by_group.items():
        lines = [[text(found.provider), *map(text, line)] for found in members for line in ledgers.table(found)]
        parts += [f"### Traffic of {text(' '.join(key))}", table(["provider", *ledgers.HEADER], lines)]
        cache = ledgers.cache_of(record.environment)
        more = [f"{text(m.provider)}: {said}" for m in members if (said := ledgers.again(m, cache))]
        parts += ["; ".join(more) + "."] if more else []
    return parts


def memories(record: Record) -> list[str]:
    """Predicted and measured memory, for targets with a memory model."""
    lines = [[text(cell) for cell in line] for line in memory.lines(record)]
    if not lines:
        return []
    note = (
        "**saved / parameters**: elements of activations that fusing saves over those of the parameters, N / (2 (d + 1)) for "
        "a hidden width of 4 d. **predicted**: bytes beyond the inputs, from how the provider computes it."
    )
    return ["## Memory, predicted and measured", note, table(memory.COLUMNS, lines)]


def hosts(record: Record) -> list[str]:
    """Host and device times, and the profiles."""
    if not host.shown(record):
        return []
    found = host.groups(record.rows)
    parts = ["## Host against device", *map(text, host.answer(found)), *map(text, filter(None, [host.lack(record)]))]
    for group in found:
        lines = [[text(cell) for cell, _ in group.cells(line)] for line in group.lines]
        parts += [f"### {text(group.name)}", text(host.waits(group)), table(host.COLUMNS, lines)]
    for name, beside in host.profiles(record):
        for profile in beside:
            lines = [[text(cell) for cell, _ in line] for line in host.profile_lines(profile)]
            seen = table(host.PROFILE_COLUMNS, lines) if lines else "torch.profiler recorded no operator and no kernel."
            parts += [f"### Profile of {text(name)}: {text(profile['provider'])}", seen]
    return parts


def flushed(record: Record) -> str:
    return "overwritten" if record.environment["device"] == "cpu" else "read"


def spent_on(record: Record) -> list[str]:
    """How the study's time was spent."""
    own = own_share(record.spent)
    if own is None:
        return []
    lines = [[name, number(record.spent[name]), PARTS[name]] for name in PARTS if name in record.spent]
    said = f"{percent(own)} of it is the harness's own: everything except measuring, compiling and code."
    return ["## Where the time went", said, table(["part", "seconds", "includes"], lines)]


def opening(record: Record) -> str:
    """What was run, and whether it finished."""
    ok = len({row.provider for row in record.rows if row.status == "ok" and not is_floor(row.provider)})
    state = "" if record.finished else " **The run was cut short; the rows below are complete.**"
    seconds = "" if record.seconds is None else f" in {record.seconds:.0f} s"
    state += (
        f" It was resumed {len(record.resumed)} time{'s' if len(record.resumed) > 1 else ''}." if record.resumed else ""
    )
    count = len(groups(record))
    return (
        f"Run `{text(record.run)}` of {text(record.created)} on {text(record.environment['device_name'])}: "
        f"{count} comparison{'' if count == 1 else 's'}, {ok} provider{'' if ok == 1 else 's'} measured{seconds}.{state}"
    )


def conclusions(judged: Sequence[Verdict]) -> list[str]:
    """The study in a few sentences, and one line per group."""
    lines = [
        [
            text(" ".join(v.key[1:])),
            v.bound,
            number(v.minimum_us),
            f"{text(v.gaps[0].provider)} {number(v.gaps[0].time_us)}" if v.gaps else "–",
            percent(v.left),
            size(v.saved_bytes),
            f"{v.worth}{f': {text(v.kernel)}' if v.kernel else ''}",
        ]
        for v in judged
    ]
    columns = ["case", "bound by", "minimum µs", "fastest µs", "left to gain over the best compiler"]
    columns += ["fusion saves up to", "worth a kernel"]
    return [text(" ".join(summary(judged))), table(columns, lines)]


def summaries(record: Record) -> list[str]:
    """One table for each dtype and pass: a row per case, a column per provider; the fastest provider in bold."""
    parts = []
    by_kind: dict[tuple[str, str], dict[str, dict[str, Row]]] = {}
    for row in record.rows:
        by_kind.setdefault((row.dtype, row.pass_), {}).setdefault(row.case, {})[row.provider] = row
    for (dtype, pass_), cases in by_kind.items():
        names = measured(row for members in cases.values() for row in members.values())
        lines = []
        for case, members in cases.items():
            times = {name: members[name].device_us for name in names if name in members}
            rivals = [t for name, t in times.items() if t is not None and not is_floor(name)]
            cells = []
            for name in names:
                cell = number(times.get(name)) if name in members else "–"
                if name in members and members[name].status != "ok":
                    cell = members[name].status
                cells.append(f"**{cell}**" if rivals and times.get(name) == min(rivals) else cell)
            lines.append([text(case), *cells])
        parts.append(f"### {text(dtype)} {pass_}, microseconds")
        parts.append(table(["case", *map(text, names)], lines))
    return parts


def section(judged: Verdict, rows: Sequence[Row], comparisons: Sequence[Json]) -> str:
    """One group: every provider that was measured or found wrong, with all known values."""
    key = judged.key
    _, case, dtype, pass_ = key
    mine = [c for c in comparisons if (c["op"], c["case"], c["dtype"], c["pass"]) == key]
    against = {c["provider"]: c for c in mine}
    twin = next((c for c in mine if c["provider"].endswith(TWIN)), None)
    noise = (
        f"A/A pair ({text(twin['other'])} twice): {twin['ratio']:.3f} [{twin['low']:.3f}, {twin['high']:.3f}]."
        if twin
        else "No A/A pair was measured, so the noise is unknown and there are no verdicts."
    )
    head = rows[0]
    lines = [
        line(row, against.get(row.provider), eager_of(row, rows))
        for row in sorted(rows, key=lambda r: (r.device_us is None, r.device_us or 0.0))
        if row.status in ("ok", "wrong")
    ]
    columns = ["provider", "time µs", "kernels µs", "of limit", "GB/s", "against the best other", "error (eager)"]
    columns += ["host µs", "graph µs", "first call s", "again s", "even after", "peak", "held"]
    return "\n\n".join(
        [
            f"### {text(case)} · {text(dtype)} · {pass_}",
            f"{text(head.shape)}; minimum traffic {size(head.bytes_min)}. {noise}",
            text(" ".join(sentences(judged))),
            table(columns, lines),
            "\n".join(f"- {text(gap.provider)}: {text('; '.join(gap.causes))}" for gap in judged.gaps),
        ]
    )


def line(row: Row, comparison: Json | None, eager: Row | None) -> list[str]:
    if row.status == "wrong":
        return [text(row.provider), "wrong", "", "", "", text(row.reason), errors(row), *[""] * 7]
    verdict = row.verdict_vs_best_other or "–"
    # For a floor that is not the binding one the share has no meaning.
    share = None if is_floor(row.provider) and row.provider != f"floor-{row.limit}" else row.share_of_limit
    if comparison is not None:
        c = comparison
        verdict = f"{verdict}: {c['ratio']:.3f} [{c['low']:.3f}, {c['high']:.3f}] × {text(c['other'])}"
    return [
        text(row.provider),
        f"{number(row.device_us)} ± {number(row.device_us_iqr)}",
        number(row.kernel_us),
        percent(share),
        number(gigabytes_per_second(row)),
        verdict,
        errors(row),
        number(row.host_us),
        number(row.graph_us),
        number(row.first_call_s),
        number(row.first_call_again_s),
        evens(row, eager),
        size(row.peak_bytes),
        size(row.held_bytes),
    ]


def evens(row: Row, eager: Row | None) -> str:
    """Calls to break even, and in brackets those of a second process."""
    again = break_even(row, eager, again=True)
    return calls(break_even(row, eager)) + ("" if again is None else f" ({calls(again)})")


def errors(row: Row) -> str:
    if row.error is None and row.error_eager is None:
        return "–"
    found = "not finite" if row.error is None else f"{row.error:.2e}"
    return f"{found} ({row.error_eager:.2e})" if row.error_eager is not None else found


def limits(rows: Iterable[Row]) -> str:
    """The best values that the floors reached."""
    copies = [(gigabytes_per_second(r), r) for r in rows if r.provider == "floor-copy" and r.device_us]
    launches = [r for r in rows if r.provider == "floor-launch" and r.device_us]
    lines = []
    if copies:
        rate, row = max(copies, key=lambda pair: pair[0] or 0.0)
        lines.append(["copy bandwidth", f"{number(rate)} GB/s", f"{size(row.bytes_min)} ({text(row.case)})"])
    if launches:
        row = min(launches, key=lambda r: r.device_us or 0.0)
        host = "" if row.host_us is None else f", host {number(row.host_us)} µs"
        lines.append(["launch floor", f"{number(row.device_us)} µs{host}", text(row.case)])
    return table(["limit", "best measured", "at"], lines) if lines else "No floor was measured."


def absent(rows: Iterable[Row]) -> str:
    lines = [[text(name), status, str(n), text(reason)] for name, status, n, reason in without_time(rows)]
    return table(WITHOUT_TIME, lines) if lines else "None: every provider has a time in every case."


def environment(record: Record) -> str:
    found = dict(record.environment)
    versions = found.pop("versions", {})
    lines = [
        [text(name.replace("_", " ")), text(fact(name, value))] for name, value in found.items() if value is not None
    ]
    lines += [[text(name), text(version)] for name, version in versions.items()]
    lines += [["seed", str(record.request["seed"])], ["cache", text(record.request["cache"])]]
    return table(["", ""], lines)


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; numbers right-aligned, the first column left-aligned."""
    rule = ["---", *("---:" for _ in columns[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [columns, rule, *lines])


def text(value: str) -> str:
    """Text from a record, escaped for a Markdown table and for the HTML made from it."""
    for old, new in (
        ("\\", "\\\\"),  # first: the others are escaped with it
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("|", "\\|"),
        ("`", "'"),
        ("[", "\\["),
        ("]", "\\]"),
        ("*", "\\*"),
        ("~", "\\~"),
    ):
        value = value.replace(old, new)
    value = re.sub(r"(?<!\w)_+|_+(?!\w)", lambda run: run[0].replace("_", "\\_"), value)  # within words they are text
    return " ".join(printable(value).split())
