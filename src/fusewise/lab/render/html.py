"""`report.html`: the whole study in one self-contained file that needs no network.

A jinja2 template with autoescaping; a content security policy forbids all network access and any script but its own.
The page is readable without the script, which adds sorting, filtering and the code browser.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ..analysis import TWIN, break_even, flops_unknown, is_floor, is_ours
from ..ledger import Ledger
from ..record import Json, Record, Row
from ..spent import PARTS, own_share
from ..verdict import Verdict, sentences, summary, verdicts
from . import (
    BIDIRECTIONAL,
    WITHOUT_TIME,
    calls,
    charts,
    eager_of,
    fact,
    gigabytes_per_second,
    groups,
    host,
    idleness,
    ledgers,
    measured,
    number,
    percent,
    script,
    size,
    svg,
    without_time,
)

#: Sort key of a number of calls that is infinite.
NEVER = 1e30
#: Text of a table cell and its sort key; without a number, cells sort by their text.
Cell = tuple[str, float | None]


@dataclass(frozen=True)
class Column:
    """A column of a sortable table."""

    name: str
    title: str = ""  # long form, shown on hover


ROW_COLUMNS = (
    Column("case"),
    Column("dtype"),
    Column("pass"),
    Column("provider"),
    Column("status"),
    Column("time µs", "median over rounds, device time of one call"),
    Column("± µs", "interquartile range of all samples"),
    Column("of limit", "time of the binding limit over that of the provider"),
    Column("limit"),
    Column("GB/s", "minimum bytes over the time"),
    Column("against the best other", "faster, slower, same or ambiguous"),
    Column("error", "largest error against float64, relative"),
    Column("eager's error"),
    Column("host µs", "host time per call: host overhead"),
    Column("kernels µs", "kernel time of one isolated call, from the profiler"),
    Column("graph µs", "device time of a call in a replayed CUDA graph"),
    Column("first call s", "building and first call, compilation included"),
    Column("again s", "the same in a second process, with what the compiler kept on disk"),
    Column("even after", "calls after which a program is done no later than with eager code, first call included"),
    Column("again even after", "the same with the first call of a second process"),
    Column("peak", "most bytes allocated at once during the call"),
    Column("held", "bytes saved for the backward"),
)


def report(record: Record) -> str:
    """Render the record as one HTML file."""
    anchors = {row.id: f"row-{i}" for i, row in enumerate(record.rows)}
    judged = verdicts(record)
    looks = charts.look(measured(record.rows))
    samples = {(*m.key, m.provider): m.rounds for m in record.measurements}
    css, js = _resource("report.css"), _resource("report.js")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"number": number, "size": size, "percent": percent, "json": embedded, "within": within}
    template = environment.from_string(_resource("report.html.j2"))
    page = template.render(
        record=record,
        css=Markup(css),
        js=Markup(js),
        css_hash=_hash(css),
        js_hash=_hash(js),
        warnings=idleness(record),
        summary=summary(judged),
        judged=judged,
        groups=[_group(v, rows, record, anchors) for v, rows in zip(judged, groups(record).values(), strict=True)],
        charts=charts.charts(record, anchors),
        legend=[_legend(name, looks[name]) for name in measured(record.rows)],
        glances=_glances(record, anchors),
        absent_columns=WITHOUT_TIME,
        absent=without_time(record.rows),
        hosts=_hosts(record, anchors),
        row_columns=ROW_COLUMNS,
        rows=[_line(record, row, anchors[row.id], samples.get((*row.key, row.provider), [])) for row in record.rows],
        stages=_stages(record.code),
        code_of=" ".join(str(record.code[0].get(name, "")) for name in ("case", "dtype", "pass")).strip()
        if record.code
        else "",
        code=_code(record.code),
        main=script.MAIN,
        facts=_facts(record),
        spent=_spent(record),
        own=own_share(record.spent),
        request=json.dumps(record.request, indent=1, ensure_ascii=False),
    )
    return page.translate(BIDIRECTIONAL)


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The hash by which the content security policy allows our own script and style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def embedded(data: Any) -> Markup:
    """JSON that is safe inside a script element: nothing in it can close the element or start a comment."""
    text = json.dumps(data, separators=(",", ":"))  # ASCII: U+2028 and similar are already escaped
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def within(text: str) -> Markup:
    """Text escaped for element content, where quotes can stay as they are: code is full of them."""
    return Markup(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _legend(name: str, look: tuple[int, str]) -> dict[str, Any]:
    mark = svg.el("svg", svg.marker(*look), viewBox="-6 -6 12 12", width=12, height=12, aria_hidden="true")
    return {"name": name, "mark": mark}


def _group(judged: Verdict, rows: Sequence[Row], record: Record, anchors: Mapping[str, str]) -> dict[str, Any]:
    """Template data for the section of one group."""
    key = judged.key
    mine = [c for c in record.comparisons if (c["op"], c["case"], c["dtype"], c["pass"]) == key]
    entries = [e for e in record.ledgers if (e["op"], e["case"], e["dtype"], e["pass"]) == key]
    cache = ledgers.cache_of(record.environment)
    return {
        "anchor": f"case-{anchors[rows[0].id]}",
        "name": " · ".join(key[1:]),
        "shape": rows[0].shape,
        "bytes_min": rows[0].bytes_min,
        "flops_min": rows[0].flops_min,
        "flops_unknown": flops_unknown(m for m in record.measurements if m.key == key),
        "verdict": judged,
        "sentences": sentences(judged),
        "gaps": [(gap, anchors[gap.row]) for gap in judged.gaps],
        "pair": next((c for c in mine if c["provider"].endswith(TWIN)), None),
        "comparisons": [c for c in mine if not c["provider"].endswith(TWIN)],
        "ledger": charts.ledger(entries, rows[0].bytes_min) if entries else None,
        "entries": entries,
        "again": [f"{e['provider']}: {said}" for e in entries if (said := ledgers.again(Ledger.from_json(e), cache))],
        "sums": [(_sum(Ledger.from_json(e)), anchors.get("/".join((*key, e["provider"])))) for e in entries],
    }


def _sum(found: Ledger) -> dict[str, Any]:
    """A provider's traffic in total."""
    read = sum(kernel.read for kernel in found.kernels)
    sizes = {"kernels": len(found.kernels), "read": read, "written": found.bytes - read, "bytes": found.bytes}
    return {"provider": found.provider, "excess": found.excess, **sizes}


def _glances(record: Record, anchors: Mapping[str, str]) -> list[dict[str, Any]]:
    """One table for each dtype and pass: a row per case, a column per provider."""
    kinds: dict[tuple[str, str], dict[str, dict[str, Row]]] = {}
    for row in record.rows:
        kinds.setdefault((row.dtype, row.pass_), {}).setdefault(row.case, {})[row.provider] = row
    found = []
    for (dtype, pass_), cases in kinds.items():
        names = measured(row for members in cases.values() for row in members.values())
        lines = []
        for case, members in cases.items():
            rivals = [r.device_us for r in members.values() if r.device_us is not None and not is_floor(r.provider)]
            cells: list[dict[str, Any]] = []
            for name in names:
                mine = members.get(name)
                if mine is None:
                    cells.append({"text": "–", "value": None, "anchor": None, "best": False})
                    continue
                time = mine.device_us
                cells.append(
                    {
                        "text": mine.status if time is None else number(time),
                        "value": time,
                        "anchor": anchors[mine.id],
                        "best": bool(rivals) and time == min(rivals),
                    }
                )
            lines.append({"case": case, "cells": cells})
        found.append({"title": f"{dtype} {pass_}", "names": names, "lines": lines})
    return found


def _hosts(record: Record, anchors: Mapping[str, str]) -> dict[str, Any] | None:
    """Template data for the host and device section; None if there is nothing to show."""
    if not host.shown(record):
        return None
    found = host.groups(record.rows)
    return {
        "said": [*host.answer(found), *filter(None, [host.lack(record)])],
        "columns": host.COLUMNS,
        "groups": [
            {
                "name": group.name,
                "said": host.waits(group),
                "lines": [(group.cells(line), anchors[line.row]) for line in group.lines],
            }
            for group in found
        ],
        "profile_columns": host.PROFILE_COLUMNS,
        "profiles": [
            (name, [(p["provider"], p["calls"], host.profile_lines(p)) for p in beside])
            for name, beside in host.profiles(record)
        ],
    }


def _spent(record: Record) -> list[tuple[str, float, str]]:
    """How the study's time was spent: the activity, its seconds, and what it includes."""
    return [(name, record.spent[name], PARTS[name]) for name in PARTS if name in record.spent]


def _line(record: Record, row: Row, anchor: str, samples: Sequence[Json]) -> dict[str, Any]:
    """One row with everything that belongs to it: cells, samples, and the program that measures it again."""
    rate = gigabytes_per_second(row)
    eager = eager_of(row, record.rows)
    even, even_again = break_even(row, eager), break_even(row, eager, again=True)
    share = None if is_floor(row.provider) and row.provider != f"floor-{row.limit}" else row.share_of_limit
    cells: list[Cell] = [
        *((text, None) for text in (row.case, row.dtype, row.pass_, row.provider, row.status)),
        (number(row.device_us), row.device_us),
        (number(row.device_us_iqr), row.device_us_iqr),
        (percent(share), share),
        (row.limit or "–", None),
        (number(rate), rate),
        (row.verdict_vs_best_other or "–", None),
        ("–" if row.error is None else f"{row.error:.2e}", row.error),
        ("–" if row.error_eager is None else f"{row.error_eager:.2e}", row.error_eager),
        (number(row.host_us), row.host_us),
        (number(row.kernel_us), row.kernel_us),
        (number(row.graph_us), row.graph_us),
        (number(row.first_call_s), row.first_call_s),
        (number(row.first_call_again_s), row.first_call_again_s),
        *((calls(count), count and min(count, NEVER)) for count in (even, even_again)),
        (size(row.peak_bytes), row.peak_bytes),
        (size(row.held_bytes), row.held_bytes),
    ]
    return {
        "anchor": anchor,
        "row": row,
        "cells": [(text, None if value is None else float(f"{value:.6g}")) for text, value in cells],  # sort keys
        "ours": is_ours(row.provider),
        "rounds": len(samples),
        "samples": sum(len(turn["device_us"]) for turn in samples),
        "versions": " ".join(f"{name} {version}" for name, version in row.versions.items()),
        "clocks": " ".join(f"{name} {value}" for name, value in (row.clocks or {}).items()),
        "program": script.head(record, row) if row.status == "ok" else None,
    }


def _ordered(code: Sequence[Json]) -> list[Json]:
    providers = list(dict.fromkeys(stage["provider"] for stage in code))
    return sorted(code, key=lambda stage: (providers.index(stage["provider"]), stage["order"]))


def _stages(code: Sequence[Json]) -> list[dict[str, str]]:
    """Name and text of every stage, in display order."""
    found = []
    telling = [n for n in ("case", "dtype", "pass") if len({stage.get(n) for stage in code}) > 1]
    for stage in _ordered(code):
        of = [str(stage[name]) for name in (*telling, "part", "target") if stage.get(name)]
        where = f" ({' '.join(of)})" if of else ""
        found.append(
            {
                "name": f"{stage['provider']} · {stage['stage']}{where}",
                **{k: str(stage[k]) for k in ("language", "text")},
            }
        )
    return found


def _code(code: Sequence[Json]) -> Json:
    """What the code browser knows of every stage: its counts, and which source its lines come from, run-length encoded
    as (first line, count, source number). Written out these would be a third of the page.
    """
    places: dict[str, int] = {}
    stages = []
    for stage in _ordered(code):
        runs: list[list[int]] = []
        for line, place in sorted((int(line), place) for line, place in stage.get("lines", {}).items()):
            number = places.setdefault(place, len(places))
            if runs and runs[-1][2] == number and sum(runs[-1][:2]) == line:
                runs[-1][1] += 1
            else:
                runs.append([line, 1, number])
        stages.append({"runs": runs, "counts": stage.get("counts", {})})
    return {"places": list(places), "stages": stages}


def _facts(record: Record) -> list[tuple[str, str]]:
    """Where and how the record was made, one line per fact."""
    environment = dict(record.environment)
    versions = environment.pop("versions", {})
    facts = [
        ("run", record.run),
        ("created", record.created),
        ("finished", "yes" if record.finished else "no: cut short"),
    ]
    facts += [("resumed", ", ".join(record.resumed))] if record.resumed else []
    facts += [("seconds", number(record.seconds))] if record.seconds is not None else []
    facts += [(name.replace("_", " "), fact(name, value)) for name, value in environment.items() if value is not None]
    facts += [(name, str(version)) for name, version in versions.items()]
    if record.limits is not None:
        matmul = ", ".join(f"{name} {number(rate)}" for name, rate in record.limits["matmul_tflop_s"].items())
        facts += [
            ("limits measured", record.limits["created"]),
            ("copy GB/s", number(record.limits["copy_gb_s"])),
            ("triad GB/s", number(record.limits["triad_gb_s"])),
            ("matmul TFLOP/s", matmul or "–"),
            ("launch µs", number(record.limits["launch_us"])),
        ]
    return facts
