"""From raw samples to numbers and words. Pure functions: no clock, no device, no file.

A provider's time is the median over rounds of the round's median. Two providers are compared round by round, since
what disturbs a machine disturbs neighbours in time alike: the ratio is the median of the paired ratios, its interval a
bootstrap over rounds. The run's A/A pair, one provider measured as if it were two, says how far from 1 a ratio comes
out when nothing differs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles, stdev
from typing import Any

import numpy as np

from .record import Json, Measurement, Row

#: Ratios this close to 1 may be called the same however quiet the machine: nobody chooses a kernel for less.
SAME = 0.02
#: And no ratio farther off than this is, however noisy.
NEVER_SAME = 0.10
#: So many threads that waited for a core, on average while a provider was timed, say that something else had it.
DISTURBED = 0.1
#: Suffix of the second of the A/A pair.
TWIN = "#2"
BOOTSTRAP_DRAWS = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """time(a) / time(b): the median over paired rounds and the interval it lies in."""

    value: float
    low: float
    high: float


def iqr(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return high - low


def round_medians(measurement: Measurement) -> dict[int, float]:
    """Median of each round's samples, by round."""
    return {int(r["round"]): median(r["device_us"]) for r in measurement.rounds}


def relative_standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean over the mean; infinite for fewer than two values."""
    if len(values) < 2:
        return math.inf
    return stdev(values) / math.sqrt(len(values)) / fmean(values)


def paired_ratio(a: Mapping[int, float], b: Mapping[int, float]) -> Ratio | None:
    """The ratio of two providers over the rounds they share; None for fewer than three."""
    shared = sorted(a.keys() & b.keys())
    if len(shared) < 3:
        return None
    ratios = np.array([a[i] / b[i] for i in shared])
    generator = np.random.default_rng(len(shared))  # the same samples always give the same interval
    draws = np.median(ratios[generator.integers(0, len(ratios), (BOOTSTRAP_DRAWS, len(ratios)))], axis=1)
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def noise_floor(same: Ratio | None) -> float | None:
    """How far from 1 the A/A pair's interval reaches."""
    return None if same is None else max(abs(same.low - 1), abs(same.high - 1))


def verdict(ratio: Ratio | None, noise: float | None) -> str:
    """faster or slower: the whole interval lies beyond the noise. same: all of it within three times the noise,
    taken as at least 2 % and at most 10 %. ambiguous: anything else, and everything where no noise floor is known."""
    if ratio is None or noise is None:
        return "ambiguous"
    if ratio.high < 1 - noise:
        return "faster"
    if ratio.low > 1 + noise:
        return "slower"
    tolerance = min(NEVER_SAME, max(SAME, 3 * noise))
    return "same" if 1 - tolerance <= ratio.low and ratio.high <= 1 + tolerance else "ambiguous"


def is_floor(provider: str) -> bool:
    return provider.startswith("floor-")


def is_ours(provider: str) -> bool:
    return provider.startswith("fusewise")


def best_other(provider: str, times: Mapping[str, float]) -> str | None:
    """The fastest provider that `provider` is to be judged by: no floor, not itself, and for ours none of ours."""
    others = {
        name: time
        for name, time in times.items()
        if name != provider and not is_floor(name) and not (is_ours(provider) and is_ours(name))
    }
    return min(others, key=lambda name: others[name]) if others else None


#: What bounds a call from below. Other floors say what one of its parts costs, as `floor-triton-launch` that of its host.
LIMITS = ("copy", "matmul", "launch")


def limits(times: Mapping[str, float], known: Mapping[str, float] | None = None) -> tuple[str, float] | None:
    """The limit that binds: moving the bytes, the products, or starting anything at all. Those measured beside the
    group count; `known` ones, of this machine at another time, where the group has none of their kind."""
    measured = {**(known or {}), **{kind: times[f"floor-{kind}"] for kind in LIMITS if f"floor-{kind}" in times}}
    if not measured:
        return None
    name = max(measured, key=lambda n: measured[n])
    return name, measured[name]


def known_limits(found: Json | None, row: Row) -> dict[str, float]:
    """Microseconds that the bytes and products of `row` take at the rates that `fusewise limits` found."""
    if found is None:
        return {}
    times: dict[str, float] = {}
    if found["copy_gb_s"] and row.bytes_min:
        times["copy"] = row.bytes_min / found["copy_gb_s"] / 1e3
    if (rate := found["matmul_tflop_s"].get(row.dtype)) and row.flops_min:
        times["matmul"] = row.flops_min / rate / 1e6
    if found["launch_us"]:
        times["launch"] = found["launch_us"]
    return times


def summarise_clocks(rounds: Iterable[Json]) -> dict[str, Any] | None:
    """Medians of what was read during the rounds; throttle reasons are united."""
    readings = [r["clocks"] for r in rounds if r.get("clocks")]
    if not readings:
        return None
    found: dict[str, Any] = {
        name: median(reading[name] for reading in readings) for name in readings[0] if name != "throttle"
    }
    if "throttle" in readings[0]:
        found["throttle"] = functools.reduce(operator.or_, (reading["throttle"] for reading in readings))
    return found


def disturbed(row: Row) -> float | None:
    """How many threads waited for a core while a row was timed, if that is enough to have lengthened its time."""
    waiting = (row.clocks or {}).get("waiting_threads", 0.0)
    return waiting if waiting >= DISTURBED else None


def group_rows(
    rows: Sequence[Row], measurements: Sequence[Measurement], machine: Json | None = None
) -> tuple[list[Row], list[Json]]:
    """Complete the rows of one group (op, case, dtype, pass) from its measurements, and say what was compared.

    `rows` have their status and what the preparation found; those that are ok get times, shares and verdicts. `machine`
    is what `fusewise limits` found, for the kinds of limit that the group has no floor of.
    """
    rounds = {m.provider: round_medians(m) for m in measurements if m.rounds}
    times = {name: median(values.values()) for name, values in rounds.items()}
    twins = [name for name in rounds if name.endswith(TWIN)]
    comparisons: list[Json] = []
    noise = None

    def compared(a: str, b: str, ratio: Ratio, word: str | None) -> Json:
        op, case, dtype, pass_ = measurements[0].key
        group = {"op": op, "case": case, "dtype": dtype, "pass": pass_}
        interval = {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
        return {**group, "provider": a, "other": b, **interval, "noise": noise, "verdict": word}

    for twin in twins:
        original = twin.removesuffix(TWIN)
        same = paired_ratio(rounds[twin], rounds[original]) if original in rounds else None
        noise = noise_floor(same)
        if same is not None:
            comparisons.append(compared(twin, original, same, None))
    times = {name: time for name, time in times.items() if name not in twins}
    limit = limits(times, known_limits(machine, rows[0]) if rows else None)
    by_name = {m.provider: m for m in measurements}
    finished = []
    for row in rows:
        if row.status != "ok" or row.provider not in times:
            finished.append(row)
            continue
        samples = by_name[row.provider].rounds
        hosts = [r["host_us"] for r in samples if r.get("host_us")]
        word = None
        rival = best_other(row.provider, times)
        if not is_floor(row.provider) and rival is not None:
            ratio = paired_ratio(rounds[row.provider], rounds[rival])
            word = verdict(ratio, noise)
            if ratio is not None:
                comparisons.append(compared(row.provider, rival, ratio, word))
        finished.append(
            replace(
                row,
                device_us=times[row.provider],
                device_us_iqr=iqr([t for r in samples for t in r["device_us"]]),
                host_us=median(hosts) if hosts else None,
                kernel_us=by_name[row.provider].prepared.get("kernel_us"),
                limit=None if limit is None else limit[0],
                share_of_limit=None if limit is None else limit[1] / times[row.provider],
                verdict_vs_best_other=word,
                clocks=summarise_clocks(samples),
            )
        )
    return finished, comparisons
