"""Turns a record into verdicts: what bounds each operation, how far each provider is from that bound, and whether a
hand-written kernel is worth it.

Pure functions of a record. docs/report.md lists the rules in the order they are tried; every threshold is a constant
below. Where the data do not support a statement, the verdict is "cannot tell" plus what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from . import analysis
from .analysis import Ratio, is_floor, is_ours
from .problem import PRECISIONS
from .record import Json, Measurement, Record, Row
from .render import groups, number, percent, size
from .truth import allowed

#: Share of the limit from which a hand-written kernel is no longer worth it.
ENOUGH = 0.9
#: A product that takes up to this many times the copy of the problem's bytes is waiting for memory: with few rows, the
#: weights are nearly all the traffic.
WAITS = 1.25
#: A copy that takes less than this many times the launch of an empty kernel, which it includes, moves its bytes in less
#: time than it takes to launch.
LAUNCHES = 2.0
#: Microseconds. A copy that takes less than this may be mostly its launch, whose time is not known then.
SHORT = 10.0
#: A provider this many times faster than the limit disproves the limit: the floor ran from another cache level or on a
#: busier machine.
BEYOND = 1.5
#: Traffic beyond this many times the minimum is reported as a cause.
EXCESS = 1.1
#: Launches are a cause from this share of the time, and so is a clock this much below the other providers'.
NOTICEABLE = 0.1
#: A compiler whose error is at most this many times the allowed one may be just as fast once fixed (a more accurate
#: tanh costs little), so its missing time leaves the verdict open.
NEARLY = 10.0
#: Microseconds. Below this, event overhead is not separable from the kernel.
MEASUREMENT_FLOOR = 5.0
#: Providers without a hand-written kernel: those that compile or run the user's own code, and our plain-torch
#: reference.
COMPILERS = ("eager", "torchscript", "torch.compile", "thunder", "jax", "xla", "tvm", "fusewise-reference")

Bound = Literal["memory", "compute", "launch", "cannot tell"]
Worth = Literal["yes", "no", "try", "cannot tell"]
BOUND_BY: dict[str | None, Bound] = {"copy": "memory", "matmul": "compute", "launch": "launch"}
DOING: dict[Bound, str] = {
    "memory": "memory-bound: moving its bytes takes longer than computing on them",
    "compute": "compute-bound: its matmuls take longer than moving its bytes",
    "launch": "launch-bound: launching any kernel takes longer than moving its bytes or its matmuls",
    "cannot tell": "of unknown bound: the record has no floor and no limit of this machine that holds for it",
}


@dataclass(frozen=True)
class Gap:
    """How far one correct provider is from the minimum, and why."""

    provider: str
    row: str  # row id
    time_us: float
    factor: float | None  # time / minimum
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """The verdict on one group (op, case, dtype, pass)."""

    key: tuple[str, str, str, str]
    bound: Bound
    minimum_us: float | None
    gaps: tuple[Gap, ...]  # fastest first
    saved_bytes: int | None  # eager's traffic beyond the minimum: the most that fusion can save
    left: float | None  # share of the best compiler's time above the minimum
    worth: Worth
    kernel: str | None  # the hand-written kernel that is worth it
    why: str


def to_json(verdict: Verdict) -> Json:
    """The verdict as plain JSON, including its sentences."""
    plain = asdict(verdict)
    op, case, dtype, pass_ = plain.pop("key")
    return {"op": op, "case": case, "dtype": dtype, "pass": pass_, **plain, "sentences": sentences(verdict)}


def verdicts(record: Record) -> list[Verdict]:
    """One verdict per group, in the order measured."""
    own: dict[tuple[str, str, str, str], list[Measurement]] = {}  # a search of all per row takes seconds
    for measurement in record.measurements:
        own.setdefault(measurement.key, []).append(measurement)
    return [_verdict(key, rows, replace(record, measurements=own.get(key, []))) for key, rows in groups(record).items()]


def is_compiler(provider: str) -> bool:
    return any(provider == name or provider.startswith(f"{name}-") for name in COMPILERS)


def _verdict(key: tuple[str, str, str, str], rows: Sequence[Row], record: Record) -> Verdict:
    """The verdict on a group with these rows. The measurements of `record` are the group's alone."""
    timed = sorted((r for r in rows if r.device_us is not None and not is_floor(r.provider)), key=_time)
    # Floors have the group's limit, too: it is known even if no provider is right.
    limited = next((r for r in rows if None not in (r.device_us, r.limit, r.share_of_limit)), None)
    minimum = _time(limited) * (limited.share_of_limit or 0.0) if limited else None
    launch = next((r.device_us for r in rows if r.provider == "floor-launch"), None)
    if launch is None:
        launch = analysis.known_limits(record.limits, rows[0]).get("launch")
    bound = _bound(limited, minimum, launch, rows)
    missed = [row.provider for row in rows if is_compiler(row.provider) and _nearly_right(row)]
    unknown = analysis.flops_unknown(record.measurements)
    overwriting = {m.provider for m in record.measurements if m.prepared.get("in_place")}
    fastest = next((r for r in timed if r.provider not in overwriting), None)  # in place fewer bytes may suffice
    beyond = fastest if fastest is not None and minimum is not None and _share(minimum, fastest) > BEYOND else None
    if (
        beyond is not None
        and bound in ("memory", "launch")
        and launch is not None
        and 1 / BEYOND <= _time(beyond) / launch < LAUNCHES  # below, the launch is disproved as well
    ):
        bound, minimum, beyond = "launch", launch, None
    worth, kernel, why = _worth(key, timed, missed, bound, minimum, beyond, unknown, record)
    best = next((r for r in timed if is_compiler(r.provider)), None)
    if beyond is not None:
        bound, minimum = "cannot tell", None  # a disproved floor must not be used below
    if unknown and worth != "no":
        bound, minimum = "cannot tell", None  # computing may take longer than moving the bytes
    ledgers = {entry["provider"]: entry for entry in record.ledgers if _belongs(entry, key)}
    gaps = []
    for row in timed:
        factor = None if minimum is None else _time(row) / minimum
        causes = _causes(row, factor, ledgers.get(row.provider), launch, timed, record)
        gaps.append(Gap(row.provider, row.id, _time(row), factor, tuple(causes)))
    left = None if best is None or minimum is None else max(0.0, 1 - minimum / _time(best))
    saved = _saved(ledgers.get("eager"), rows[0].bytes_min)
    return Verdict(key, bound, minimum, tuple(gaps), saved, left, worth, kernel, why)


def _bound(limited: Row | None, minimum: float | None, launch: float | None, rows: Sequence[Row]) -> Bound:
    bound = "cannot tell" if limited is None else BOUND_BY.get(limited.limit, "cannot tell")
    floors = {row.provider: row.device_us for row in rows}
    product, copy = (floors.get(f"floor-{kind}") for kind in ("matmul", "copy"))
    if bound == "compute" and product is not None and copy is not None and product <= WAITS * copy:
        return "memory"
    if bound == "memory" and copy is not None and launch is not None and copy < LAUNCHES * launch:
        return "launch"
    if bound == "memory" and copy is not None and launch is None and minimum is not None and minimum < SHORT:
        return "cannot tell"
    return bound


def _nearly_right(row: Row) -> bool:
    """Whether the result is wrong by a small factor only."""
    if row.status != "wrong" or row.dtype not in PRECISIONS or row.error is None or row.error_eager is None:
        return False
    return row.error <= NEARLY * allowed(row.error_eager, PRECISIONS[row.dtype])


def _time(row: Row) -> float:
    assert row.device_us is not None
    return row.device_us


def _share(minimum: float, row: Row) -> float:
    """Share of the limit, rounded as `percent` shows it, so that no sentence contradicts the rule that it reports."""
    return float(f"{minimum / _time(row):.3g}")


def _belongs(entry: Json, key: tuple[str, str, str, str]) -> bool:
    return (entry["op"], entry["case"], entry["dtype"], entry["pass"]) == key


def moved(ledger: Json) -> int:
    """Bytes read and written by all kernels of a ledger."""
    return sum((kernel["read"] or 0) + (kernel["written"] or 0) for kernel in ledger["kernels"])


def _saved(eager: Json | None, bytes_min: int | None) -> int | None:
    return None if eager is None or bytes_min is None else max(0, moved(eager) - bytes_min)


def _causes(
    row: Row, factor: float | None, ledger: Json | None, launch: float | None, timed: Sequence[Row], record: Record
) -> list[str]:
    """Everything in the record that makes this provider slower than the minimum or its time less certain."""
    causes = []
    if ledger is not None and row.bytes_min is not None:
        total, count = moved(ledger), len(ledger["kernels"])
        if total > EXCESS * row.bytes_min:
            times = f"{number(total / row.bytes_min)} times the bytes" if row.bytes_min else ""
            what = times or f"{size(total)}, where no byte has to move"
            causes.append(f"moves {what}, in {count} kernel{'s' if count > 1 else ''}")
        if launch is not None and count > 1 and (count - 1) * launch / _time(row) > NOTICEABLE:
            share = (count - 1) * launch / _time(row)
            causes.append(f"launches {count} kernels instead of one: {percent(min(1.0, share))} of its time")
    for stage in record.code:
        if stage["provider"] == row.provider and _of_row(stage, row) and _count(stage, "spill") > 0:
            causes.append(f"spills registers ({stage['stage']})")
    if row.host_us is not None and row.host_us > _time(row):
        causes.append(f"host overhead: a call takes {number(row.host_us)} µs on the host, longer than on the device")
    own = [m for m in record.measurements if m.provider == row.provider]
    if factor is not None and factor < 1 / BEYOND and any(m.prepared.get("in_place") for m in own):
        causes.append("works in place, which moves less than the minimum")
    if any(turn.get("held") is False for m in own for turn in m.rounds):
        causes.append("its time includes host overhead: too many launches to queue")
    clocks = {r.provider: r.clocks["sm_mhz"] for r in timed if r.clocks and "sm_mhz" in r.clocks}
    if row.provider in clocks and clocks[row.provider] < (1 - NOTICEABLE) * max(clocks.values()):
        causes.append(f"its clock was lower: {number(clocks[row.provider], 4)} MHz")
    if (waiting := analysis.disturbed(row)) is not None:
        causes.append(f"{number(waiting)} of its threads waited for a core, on average")
    if _time(row) < MEASUREMENT_FLOOR and row.device.startswith("NVIDIA"):
        causes.append("too short to measure precisely")
    if factor is not None and factor <= 1 / ENOUGH:
        return causes or ["at the limit"]
    least = "no minimum of bytes" if row.bytes_min is None else "its memory traffic is minimal"
    return causes or [f"cause unknown: {least if ledger else 'no traffic ledger'}"]


def _of_row(stage: Json, row: Row) -> bool:
    """Stages belong to one group or, without group fields, to all groups of the provider."""
    mine: Mapping[str, Any] = {"op": row.op, "case": row.case, "dtype": row.dtype, "pass": row.pass_}
    return all(stage.get(name, value) == value for name, value in mine.items())


def _count(stage: Json, word: str) -> float:
    """Sum of the counts whose name contains `word`."""
    found = (v for name, v in stage.get("counts", {}).items() if word in name)
    return sum(v for v in found if isinstance(v, (int, float)))


def _worth(
    key: tuple[str, str, str, str],
    timed: Sequence[Row],
    missed: Sequence[str],
    bound: Bound,
    minimum: float | None,
    beyond: Row | None,
    unknown: Sequence[str],
    record: Record,
) -> tuple[Worth, str | None, str]:
    """Whether a hand-written kernel is worth it, which one, and why. The first matching rule decides. `missed`:
    compilers without a time because they are slightly wrong. `beyond`: what disproves the minimum. `unknown`: operators
    without a known number of FLOPs."""
    if not timed:
        return "cannot tell", None, "no provider has a correct result and a time"
    if minimum is None:
        # without a device it would measure the GPU of a machine that has one
        limits = "`fusewise limits --device cpu`" if record.environment.get("device") == "cpu" else "`fusewise limits`"
        matmuls = any(m.provider == "floor-matmul" and m.rounds for m in record.measurements)
        if analysis.intensity(timed[0]) > analysis.INTENSE and not matmuls:
            return "cannot tell", None, f"no limit is known: its matmuls were not measured; run {limits}"
        floor = "floor-launch" if timed[0].bytes_min == 0 else "floor-copy"  # nothing to copy where no byte has to move
        return "cannot tell", None, f"no limit is known; add {floor} to the providers, or run {limits}"
    noise = next((c["noise"] for c in record.comparisons if _belongs(c, key)), None)  # the same for all of a group
    if noise is None:
        return "cannot tell", None, "no A/A pair was measured, so the noise is unknown"
    compilers = [row for row in timed if is_compiler(row.provider)]
    if not compilers:
        return "cannot tell", None, "no compiler was measured; add eager or torch.compile to the providers"
    waiting = sum(analysis.disturbed(row) is not None for row in timed)
    if 2 * waiting > len(timed):  # how many threads, the gaps say: a summary names each reason once
        return "cannot tell", None, "threads of most providers waited for a core; run it again on an idle machine"
    best = compilers[0]
    reach = _share(minimum, best)
    graph = "" if record.environment["device"] == "cpu" else " or capture a CUDA graph"
    launching = f"it is launch-bound; fuse it with its neighbours{graph}"
    if best.limit == "launch" and beyond is None and (not unknown or reach >= ENOUGH):
        return "no", None, launching
    by_hand = [row for row in timed if not is_compiler(row.provider)]
    words = {row.provider: _against(row, best, noise, record) for row in by_hand}
    better = [row for row in by_hand if words[row.provider][1] == "faster"]
    # A kernel that is clearly faster shows that the compiler is not at its limit, whatever the floors took.
    shown = any(_time(row) < ENOUGH * _time(best) for row in better)
    if reach >= ENOUGH and beyond is None and not shown:
        return "no", None, f"{best.provider} is at {percent(reach)} of the limit"
    untimed = f"not timed, since wrong by at most {NEARLY:g} times the allowed error: {', '.join(missed)}"
    if better:
        chosen = next((row for row in better if is_ours(row.provider)), better[0])
        ratio = words[chosen.provider][0]
        assert ratio is not None
        why = f"{chosen.provider} takes {_interval(ratio)} of the time of {best.provider}"
        if chosen is not better[0]:
            why += f", {better[0].provider} {number(_time(better[0]) / _time(best))}"
        return "yes", chosen.provider, f"{why}; {untimed}" if missed else why
    if beyond is not None:
        why = f"{beyond.provider} is at {percent(_share(minimum, beyond))} of the floor's speed, so the floor is not a limit"
        return "cannot tell", None, why
    if unknown:
        why = f"the FLOPs of {', '.join(unknown)} are unknown: computing may take longer than moving the bytes, {number(minimum)} µs"
        return "cannot tell", None, why
    if bound == "launch":
        return "no", None, launching
    if bound == "cannot tell":
        return (
            "cannot tell",
            None,
            f"launching may take most of the {number(minimum)} µs; add floor-launch to the providers",
        )
    if missed:
        rest = f"the best other compiler, {best.provider}, is at {percent(reach)} of the limit"
        return "cannot tell", None, f"{untimed}; {rest}"
    if 1 / reach - 1 <= noise:
        return "cannot tell", None, f"the time left to gain is within the noise of this run, {percent(noise)}"
    if any(word == "ambiguous" for _, word in words.values()):
        named = next(name for name, (_, word) in words.items() if word == "ambiguous")
        return "cannot tell", None, f"{named} against {best.provider} is ambiguous; measure more rounds"
    room = f"{best.provider} is at {percent(reach)} of the limit"
    if not by_hand:
        return "try", None, f"{room} and no hand-written kernel was measured"
    return "try", None, f"{room}, and no hand-written kernel measured here is faster"


def _against(row: Row, other: Row, noise: float, record: Record) -> tuple[Ratio | None, str]:
    """Paired ratio of two providers of one group from the raw samples, and the word for it."""
    pair = (row.provider, other.provider)
    rounds = {m.provider: analysis.round_medians(m) for m in record.measurements if m.provider in pair}
    ratio = analysis.paired_ratio(*(rounds.get(name, {}) for name in pair))
    return ratio, analysis.verdict(ratio, noise)


def _interval(ratio: Ratio) -> str:
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


WORTH_WORDS: dict[Worth, str] = {
    "yes": "A hand-written kernel is worth it",
    "no": "A hand-written kernel is not worth it",
    "try": "A hand-written kernel may be worth trying",
    "cannot tell": "Whether a hand-written kernel is worth it is unknown",
}


def sentences(verdict: Verdict) -> list[str]:
    """The verdict on one group in prose, one statement per sentence."""
    said = [f"It is {DOING[verdict.bound]}."]
    if verdict.minimum_us is not None:
        said.append(f"The minimum is {number(verdict.minimum_us)} µs.")
    if verdict.gaps:
        first = verdict.gaps[0]
        share = "" if first.factor is None else f", {number(first.factor)} times the minimum"
        said.append(f"The fastest provider is {first.provider}: {number(first.time_us)} µs{share}.")
    if verdict.saved_bytes is not None:
        saved = f"up to {size(verdict.saved_bytes)}" if verdict.saved_bytes else "none"
        said.append(f"Fusion can save {saved} of eager's memory traffic.")
    if verdict.left is not None:
        said.append(f"The best compiler spends {percent(verdict.left)} of its time above the minimum.")
    named = f": {verdict.kernel}" if verdict.kernel else ""
    return [*said, f"{WORTH_WORDS[verdict.worth]}{named} ({verdict.why})."]


def summary(found: Sequence[Verdict]) -> list[str]:
    """The whole study in a few sentences."""
    if not found:
        return ["Nothing was measured, so there is no verdict."]

    def counted(values: Sequence[str]) -> str:
        return ", ".join(f"{values.count(value)} {value}" for value in dict.fromkeys(values))

    bounds = ["of unknown bound" if v.bound == "cannot tell" else f"{v.bound}-bound" for v in found]
    said = [f"Of {len(found)} comparison{'s' if len(found) > 1 else ''}: {counted(bounds)}."]
    for worth, words in WORTH_WORDS.items():
        these = [v for v in found if v.worth == worth]
        if these:
            kernels = [v.kernel for v in these if v.kernel]
            whys = list(dict.fromkeys(v.why for v in these))
            some = "; ".join([*whys[:2], *([f"and {len(whys) - 2} more"] if len(whys) > 2 else [])])
            said.append(f"{words} in {len(these)} ({counted(kernels) if kernels else some}).")
    return said
