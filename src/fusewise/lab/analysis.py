"""Statistics: from raw samples to times, ratios and verdict words. Pure functions: no clock, no device, no files.

A provider's time is the median over rounds of each round's median. Providers are compared pairwise within rounds,
because a disturbance affects samples close in time alike: the ratio is the median of the per-round ratios, with a
bootstrap confidence interval over rounds. Each run includes an A/A test, one provider measured as if it were two; how
far its ratio strays from 1 is the noise floor.
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

#: Ratios within this of 1 may be called "same" even on a quiet machine: nobody picks a kernel over 2 %.
SAME = 0.02
#: Ratios further from 1 than this are never called "same", however noisy the machine.
NEVER_SAME = 0.10
#: This many runnable threads waiting for a core, on average while a provider was timed, mean that something else was
#: using the CPU.
DISTURBED = 0.1
#: Suffix of the second provider of the A/A pair.
TWIN = "#2"
BOOTSTRAP_DRAWS = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """time(a) / time(b): median over paired rounds, and its confidence interval."""

    value: float
    low: float
    high: float


def iqr(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return high - low


def round_medians(measurement: Measurement) -> dict[int, float]:
    """Median of the samples of each round, by round number."""
    return {int(r["round"]): median(r["device_us"]) for r in measurement.rounds}


def relative_standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean over the mean; infinite for fewer than two values."""
    if len(values) < 2:
        return math.inf
    return stdev(values) / math.sqrt(len(values)) / fmean(values)


def paired_ratio(a: Mapping[int, float], b: Mapping[int, float]) -> Ratio | None:
    """The ratio over the rounds that both providers have; None for fewer than three."""
    shared = sorted(a.keys() & b.keys())
    if len(shared) < 3:
        return None
    ratios = np.array([a[i] / b[i] for i in shared])
    generator = np.random.default_rng(len(shared))  # fixed seed: the same samples always give the same interval
    draws = np.median(ratios[generator.integers(0, len(ratios), (BOOTSTRAP_DRAWS, len(ratios)))], axis=1)
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def noise_floor(same: Ratio | None) -> float | None:
    """How far the interval of the A/A pair reaches from 1."""
    return None if same is None else max(abs(same.low - 1), abs(same.high - 1))


def verdict(ratio: Ratio | None, noise: float | None) -> str:
    """ "faster" or "slower": the whole interval lies beyond the noise. "same": the whole interval lies within three
    times the noise, clamped to between 2 % and 10 %. "ambiguous": anything else, and always where the noise floor is
    unknown."""
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
    """The fastest provider to judge `provider` by: not a floor, not itself, and for one of ours none of ours."""
    others = {
        name: time
        for name, time in times.items()
        if name != provider and not is_floor(name) and not (is_ours(provider) and is_ours(name))
    }
    return min(others, key=lambda name: others[name]) if others else None


#: Floors that bound a call from below. Others, such as `floor-triton-launch` (host overhead), measure one component.
LIMITS = ("copy", "matmul", "launch")


#: Arithmetic intensity (FLOP per byte) from which an operation may be compute-bound: the ridge point of every machine is
#: at about ten or more, even in float32.
INTENSE = 8.0


def limits(
    times: Mapping[str, float], known: Mapping[str, float] | None = None, intensity: float = 0.0, moves: bool = True
) -> tuple[str, float] | None:
    """The binding limit: memory traffic, products or launch latency. Floors measured within the group take precedence
    over `known` limits measured earlier on this machine. None where it is undetermined: without a time for the bytes, if
    any have to move (`moves`), and at high arithmetic intensity (`intensity`) without one for the products."""
    measured = {**(known or {}), **{kind: times[f"floor-{kind}"] for kind in LIMITS if f"floor-{kind}" in times}}
    if not measured or ("copy" not in measured and moves) or ("matmul" not in measured and intensity > INTENSE):
        return None
    name = max(measured, key=lambda n: measured[n])
    return name, measured[name]


def intensity(row: Row) -> float:
    """Arithmetic intensity of the operation itself: minimum FLOPs over minimum bytes."""
    return (row.flops_min or 0) / row.bytes_min if row.bytes_min else 0.0


def lacks_rate(rows: Sequence[Row]) -> bool:
    """Whether the limit of a group cannot be told before the rate of the device's matmuls is known."""
    measured = any(row.provider == "floor-matmul" and row.status == "ok" for row in rows)
    return any(row.status == "ok" for row in rows) and intensity(rows[0]) > INTENSE and not measured


def flops_unknown(measurements: Iterable[Measurement]) -> list[str]:
    """Names of the operators because of which the FLOPs of the group are unknown; computing may then take longer than
    its limit says."""
    return next((m.prepared["flops_unknown"] for m in measurements if m.prepared.get("flops_unknown")), [])


def known_limits(found: Json | None, row: Row) -> dict[str, float]:
    """Microseconds for the minimum bytes and FLOPs of `row`, and for a launch, at the rates measured by `fusewise
    limits`."""
    if found is None:
        return {}
    times: dict[str, float] = {}
    if found["copy_gb_s"] and row.bytes_min:
        times["copy"] = row.bytes_min / found["copy_gb_s"] / 1e3
    if (rate := matmul_rate(found, row.dtype)) and row.flops_min:
        times["matmul"] = row.flops_min / rate / 1e6
    if found["launch_us"]:
        times["launch"] = found["launch_us"]
    return times


def matmul_rate(found: Json, dtype: str) -> float:
    """TFLOP/s that `fusewise limits` measured for the dtype, or for float32 where that is faster, as on a CPU that
    only emulates bf16: a program may widen its operands, so the slower rate limits nothing. 0 if unknown."""
    rates = found["matmul_tflop_s"]
    return max(rates[dtype] or 0.0, rates.get("fp32") or 0.0) if dtype in rates else 0.0


def summarise_clocks(rounds: Iterable[Json]) -> dict[str, Any] | None:
    """Medians of the readings taken during the rounds; throttle reasons are OR-ed."""
    readings = [r["clocks"] for r in rounds if r.get("clocks")]
    if not readings:
        return None
    found: dict[str, Any] = {
        name: median(reading[name] for reading in readings) for name in readings[0] if name != "throttle"
    }
    if "throttle" in readings[0]:
        found["throttle"] = functools.reduce(operator.or_, (reading["throttle"] for reading in readings))
    return found


def break_even(row: Row, eager: Row | None, again: bool = False) -> float | None:
    """After how many calls a program is done no later with this provider than with eager code, both from their first
    call on; inf if never, None if unknown. `again`: the first call is that of a second process, with filled caches.
    """
    first = row.first_call_again_s if again else row.first_call_s
    if eager is None or first is None or eager.first_call_s is None or row is eager or is_floor(row.provider):
        return None
    if row.device_us is None or eager.device_us is None:
        return None
    # Back-to-back calls take the longer of device and host time.
    gain_us = max(eager.device_us, eager.host_us or 0.0) - max(row.device_us, row.host_us or 0.0)
    extra_us = (first - eager.first_call_s) * 1e6
    if extra_us <= 0 <= gain_us:
        return 1.0
    return 1.0 + math.ceil(extra_us / gain_us) if gain_us > 0 else math.inf


def disturbed(row: Row) -> float | None:
    """Threads that waited for a core while the row was timed, if enough to have inflated its time."""
    waiting = (row.clocks or {}).get("waiting_threads", 0.0)
    return waiting if waiting >= DISTURBED else None


def group_rows(
    rows: Sequence[Row], measurements: Sequence[Measurement], machine: Json | None = None
) -> tuple[list[Row], list[Json]]:
    """Complete the rows of one group (op, case, dtype, pass) from its measurements, and list the comparisons made.

    `rows` come with their status and the results of the preparation; those that are ok get times, shares and verdicts.
    `machine` holds what `fusewise limits` measured, for kinds of limit that have no floor in the group.
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
    # With unknown FLOPs it is the time of the bytes, which no implementation can go below either.
    first = rows[0]
    limit = limits(times, known_limits(machine, first), intensity(first), moves=first.bytes_min != 0)
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
                graph_us=by_name[row.provider].prepared.get("graph_us"),
                first_call_again_s=by_name[row.provider].prepared.get("first_call_again_s"),
                limit=None if limit is None else limit[0],
                share_of_limit=None if limit is None else limit[1] / times[row.provider],
                verdict_vs_best_other=word,
                clocks=summarise_clocks(samples),
            )
        )
    return finished, comparisons
