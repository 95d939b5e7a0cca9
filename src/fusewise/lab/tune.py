"""`fusewise tune`: finds the best configuration of each kernel on this machine and stores it for later calls.

For every kernel and shape, each candidate of the configuration space is first checked against float64 by the rule of
`truth.py`; wrong and failing ones are reported and dropped. The rest are timed in interleaved rounds in random order,
with the heuristic's choice twice per round (an A/A test for the noise floor), until there is a clear winner or the
rounds or the time run out. Clear losers are dropped early. The winner is stored only if it beats the heuristic's choice
beyond the noise, otherwise that choice is: tuning never causes a regression.

To add an operation, write a module with `jobs` (see `ops/gated_linear/tuning.py`) and add it to OPERATIONS.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from fusewise.ops._common import dtype_name
from fusewise.ops._tuned import Found, Job, Key, Watch, enabled
from fusewise.ops.gated_linear import tuning as gated_linear

from . import machine, targets, truth
from .analysis import Ratio, noise_floor, paired_ratio, verdict
from .counting import counted
from .errors import errors
from .reason import reason
from .record import Json
from .timing import CpuTimer, CudaTimer, Timer, Work

OPERATIONS: dict[str, Any] = {"geglu": gated_linear}

MIN_ROUNDS = 5
MAX_ROUNDS = 40
SAMPLES = 3
#: A candidate is dropped when it is slower than the leader by at least this share, with confidence.
LOSES = 0.005
#: A candidate is dropped at once if its first turn takes this many times the fastest one's.
FAR = 1.5
#: Wrong or failed candidates listed per kernel in the text output; the JSON has all.
TOLD = 4


@dataclass(eq=False)
class Candidate:
    """One configuration and its outcome: "ok", "dropped" (too slow), "wrong", "failed" or "not reached"."""

    config: Any
    status: str = "not reached"
    reason: str = ""
    rounds: dict[int, float] = field(default_factory=dict)

    @property
    def us(self) -> float | None:
        return median(self.rounds.values()) if self.rounds else None

    def to_json(self) -> Json:
        return {
            "config": asdict(self.config),
            "status": self.status,
            "reason": self.reason,
            "us": self.us,
            "rounds": len(self.rounds),
        }


@dataclass
class Result:
    """The search for one kernel at one shape. `ratio` is the heuristic's time over the best's, in paired rounds."""

    key: Key
    impl: str
    candidates: list[Candidate]
    winner: Candidate
    best: Candidate
    ratio: Ratio | None
    noise: float | None
    verdict: str  # of the best against the heuristic's choice
    rounds: int
    stopped: str  # "clear", "rounds" or "time"
    file: str = ""

    @property
    def heuristic(self) -> Candidate:
        return self.candidates[0]

    @property
    def gap(self) -> float | None:
        """How much slower the heuristic's choice is than the best; None if either has no time."""
        if self.best is self.heuristic:
            return 0.0
        return None if self.ratio is None else max(0.0, self.ratio.value - 1)

    def to_json(self) -> Json:
        return {
            **self.key._asdict(),
            "dtype": dtype_name(self.key.dtype),
            "impl": self.impl,
            "heuristic": asdict(self.heuristic.config),
            "heuristic_us": self.heuristic.us,
            "best": asdict(self.best.config),
            "best_us": self.best.us,
            "gap": self.gap,
            "ratio": None if self.ratio is None else [self.ratio.value, self.ratio.low, self.ratio.high],
            "noise": self.noise,
            "verdict": self.verdict,
            "kept": asdict(self.winner.config),
            "rounds": self.rounds,
            "stopped": self.stopped,
            "file": self.file,
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }


class Unable(Exception):
    """Nothing can be tuned here, or no candidate is correct; the message says why."""


def target(name: str) -> str:
    """Validate the name of a tunable operation; ValueError for any other."""
    if name not in OPERATIONS:
        raise ValueError(f"tune: target must be one of {', '.join(OPERATIONS)}, got {name!r}; try `tune geglu`")
    return name


def jobs(
    name: str, cases: Sequence[str], preset: str | None, shapes: Sequence[Sequence[int]], dtypes: Sequence[str],
    kernels: Sequence[str], device: str, impl: str | None,
) -> Iterator[Job]:  # fmt: skip
    """The jobs of a command line. Everything is validated before the first job is created.

    Raises:
        ValueError: an unknown name or an invalid shape.
        Unable: no implementation with configurations serves this device.
    """
    operation, known = OPERATIONS[target(name)], targets.find(name)
    named = [*map(known.case, cases), *(known.cases(preset) if preset else [])]
    wanted: list[tuple[str | None, Sequence[int] | None]] = [(case.name, None) for case in named]
    wanted += [(None, shape) for shape in shapes]
    if not wanted:
        raise ValueError(
            f"tune: give what to tune for, --case, --preset or --shape {operation.SHAPE}, got none of them"
        )
    for case, shape in wanted:
        operation.check(case, shape, dtypes, kernels)
    where = torch.device(device)
    if not operation.tuned(where):
        reasons = "; ".join(operation.unavailable(where))
        raise Unable(f"tune: {device} must be served by an implementation that has configurations: {reasons}")
    return (job for case, shape in wanted for job in operation.jobs(case, shape, dtypes, kernels, where, impl))


def tune(jobs: Iterator[Job], time_limit: float, seed: int, progress: Callable[[str], None]) -> Iterator[Result]:
    """Tune each job and store its result. `time_limit`: seconds per kernel; `progress` receives lines of progress.

    Raises:
        Unable: no candidate of a kernel is correct, or no implementation has configurations for it.
        cache.Refused: the result cannot be written.
    """
    for job in jobs:
        cuda = job.device.type == "cuda"
        with torch.no_grad(), torch.cuda.device(job.device) if cuda else contextlib.nullcontext():
            result = search(job, timer(job.device), time_limit, seed, progress)
        winner, heuristic = result.winner.us, result.heuristic.us
        if winner is not None:
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            found = Found(winner, heuristic or winner, result.rounds, now)
            result.file = str(job.tuned.keep(_index(job.device), result.key, result.winner.config, found))
        del job  # free its tensors before the next job's are made
        yield result


def search(job: Job, timer: Timer, time_limit: float, seed: int, progress: Callable[[str], None]) -> Result:
    """Check the candidates, then race them."""
    deadline = time.monotonic() + time_limit
    key = _key(job)
    candidates = [Candidate(config) for config in job.tuned.space(key, _index(job.device))]
    progress(f"{key}: {len(candidates)} candidates")
    _check(job, candidates, time.monotonic() + time_limit / 2)
    right = [candidate for candidate in candidates if candidate.status == "ok"]
    if not right:
        raise Unable(f"tune: {key} must have a candidate that is right, got none: {candidates[0].reason}")
    progress(f"{key}: {len(right)} of them right, timing")
    works = {candidate: Work(lambda i: None, lambda _: job.run()) for candidate in right}

    def measure(candidate: Candidate) -> float:
        with job.tuned.using(candidate.config):
            return median(timer.turn(works[candidate], SAMPLES, 1).device_us)

    twin, rounds, stopped = race(right, candidates[0], measure, lambda: time.monotonic() > deadline, seed)
    return judge(key, job.tuned.impl, candidates, twin, rounds, stopped)


def _key(job: Job) -> Key:
    """The key by which a launch looks up its configuration, captured from a launch."""
    watch = Watch()
    try:
        with job.tuned.using(watch):
            job.run()
    except Exception as error:  # the heuristic's own choice may fail to run
        if not watch.keys:
            raise Unable(f"tune: a call must launch a kernel, got {error!r}") from error
    return watch.keys[0]


def _check(job: Job, candidates: Sequence[Candidate], deadline: float) -> None:
    """Check candidates against float64: always the first, the others until half of the time is used."""
    truths = job.truths()
    terms = counted(job.plain)[1].terms
    yardstick, dtype = truth.Yardstick(errors(job.plain(), truths), terms), job.outputs[0].dtype
    for candidate in candidates:
        if candidate is not candidates[0] and time.monotonic() > deadline:
            break
        for output in job.outputs:
            output.fill_(math.nan)
        try:
            with job.tuned.using(candidate.config):
                job.run()
            found = errors(job.outputs, truths)
        except Exception as error:  # any compiler or driver error only disqualifies the candidate
            candidate.status, candidate.reason = "failed", reason(error)
            continue
        if truth.within(found, yardstick, dtype):
            candidate.status = "ok"
        else:
            candidate.status = "wrong"
            candidate.reason = f"error {found.max:.3g} (rms {found.rms:.3g}), eager's {yardstick.errors.max:.3g} ({yardstick.errors.rms:.3g})"


def race(
    candidates: Sequence[Candidate],
    heuristic: Candidate,
    measure: Callable[[Candidate], float],
    late: Callable[[], bool],
    seed: int,
) -> tuple[dict[int, float], int, str]:
    """Time candidates in rounds until there is a clear winner. Returns the second timings of the heuristic's choice,
    the number of rounds, and why it stopped. The heuristic's choice is never dropped for its time."""
    order = random.Random(seed)
    running = list(candidates)
    twin: dict[int, float] = {}
    # Caches and clocks are still unsettled after compilation, so the first turn only rules out what is far off.
    first = {candidate: measure(candidate) for candidate in running}
    for candidate in running:
        if candidate is not heuristic and first[candidate] > FAR * min(first.values()):
            candidate.status = "dropped"
    running = [c for c in running if c.status == "ok"]
    for number in range(MAX_ROUNDS):
        entrants = [*running, None] if heuristic in running else list(running)
        order.shuffle(entrants)
        for entrant in entrants:
            if entrant is None:
                twin[number] = measure(heuristic)
            else:
                entrant.rounds[number] = measure(entrant)
        if number + 1 >= MIN_ROUNDS:
            leader = min(running, key=_time)
            for candidate in running:
                ratio = paired_ratio(candidate.rounds, leader.rounds)
                if candidate not in (leader, heuristic) and ratio is not None and ratio.low > 1 + LOSES:
                    candidate.status = "dropped"
            running = [c for c in running if c.status == "ok"]
            if set(running) <= {leader, heuristic} and (leader is heuristic or _decided(leader, heuristic, twin)):
                return twin, number + 1, "clear"
        if number + 1 >= 3 and late():
            return twin, number + 1, "time"
    return twin, MAX_ROUNDS, "rounds"


def _time(candidate: Candidate) -> float:
    return math.inf if candidate.us is None else candidate.us


def _decided(leader: Candidate, heuristic: Candidate, twin: dict[int, float]) -> bool:
    """Whether the comparison of the leader with the heuristic's choice is settled, either way."""
    if not heuristic.rounds:  # the heuristic's choice is wrong or failed
        return True
    noise = noise_floor(paired_ratio(twin, heuristic.rounds))
    return verdict(paired_ratio(leader.rounds, heuristic.rounds), noise) != "ambiguous"


def judge(
    key: Key, impl: str, candidates: list[Candidate], twin: dict[int, float], rounds: int, stopped: str
) -> Result:
    """The best is the fastest candidate that was never dropped. It wins if it beats the heuristic's choice beyond the
    noise, or if that choice is not correct; otherwise the heuristic's choice wins."""
    heuristic = candidates[0]
    best = min((c for c in candidates if c.status == "ok"), key=_time)
    if heuristic.status != "ok":
        return Result(key, impl, candidates, best, best, None, None, "faster", rounds, stopped)
    noise = noise_floor(paired_ratio(twin, heuristic.rounds))
    word = "same" if best is heuristic else verdict(paired_ratio(best.rounds, heuristic.rounds), noise)
    winner = best if word == "faster" else heuristic
    ratio = paired_ratio(heuristic.rounds, best.rounds)
    return Result(key, impl, candidates, winner, best, ratio, noise, word, rounds, stopped)


class _Device(CudaTimer):
    """Skips the host-overhead loop, which tuning does not need."""

    def _host(self, work: Work) -> float:
        return 0.0


def timer(device: torch.device) -> Timer:
    """Cold caches, as a kernel inside a model finds them."""
    flush = 2 * machine.cache_bytes(str(device))
    return _Device(device, flush, lambda: None) if device.type == "cuda" else CpuTimer(flush)


def _index(device: torch.device) -> int:
    return -1 if device.type == "cpu" else device.index or 0


def kept_results(target: str, device: str) -> list[Json]:
    """The stored results in use on this device: per implementation its file and entries."""
    where = torch.device(device)
    found = []
    for tuned in OPERATIONS[target].tuned(where):
        entries = tuned.known(_index(where))
        found.append(
            {
                "impl": tuned.impl,
                "file": str(tuned.path(_index(where))),
                "problem": tuned.problems.get(_index(where), "" if enabled() else "FUSEWISE_TUNED=0 is set"),
                "entries": [{"for": str(key), "config": asdict(config)} for key, config in entries.items()],
            }
        )
    return found


def kept_lines(found: list[Json], device: str) -> list[str]:
    """The stored results as text."""
    said = []
    for file in found:
        said.append(f"{file['impl']}: {len(file['entries'])} results in {file['file']}")
        said += [f"  ignored: {file['problem']}"] if file["problem"] else []
        said += [f"  {entry['for']}: {entry['config']}" for entry in file["entries"]]
    return said or [f"nothing can be tuned on {device}"]


def lines(result: Result) -> list[str]:
    """One result as text."""
    gap = result.gap
    said = (
        "is the best"
        if gap == 0
        else f"is {result.heuristic.status}"
        if gap is None
        else f"is within {100 * gap:.1f} %"
    )
    best, heuristic = result.best, result.heuristic
    found = [f"{result.key}, {result.impl}: heuristic {said} ({result.stopped} after {result.rounds} rounds)"]
    for name, candidate in (("heuristic", heuristic), ("best", best))[: 1 if best is heuristic else 2]:
        time_us = "–" if candidate.us is None else f"{candidate.us:.2f} µs"
        found.append(f"  {name:<10}{time_us:>12}  {candidate.config}")
    found.append(
        f"  kept: {'the best' if result.winner is best and best is not heuristic else 'the heuristic’s choice'}"
    )
    if result.winner is not best:
        found[-1] += f" (the best is {result.verdict}; noise {100 * (result.noise or 0):.1f} %)"
    bad = [c for c in result.candidates if c.status in ("wrong", "failed")]
    found += [f"  {c.status}: {c.config}: {c.reason}" for c in bad[:TOLD]]
    if len(bad) > TOLD:
        found.append(f"  and {len(bad) - TOLD} more")
    skipped = sum(c.status == "not reached" for c in result.candidates)
    if skipped:
        found.append(f"  {skipped} candidates were not reached: raise --time-limit")
    return found
