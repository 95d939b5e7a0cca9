"""The coordinator: asks every provider to prepare, hands out one round at a time, and keeps the record. Worker
processes are managed in `seats.py`.

Only one provider runs at any moment. Within a group (case, dtype, pass) every round visits each provider once, in a
fresh random order, so that machine drift affects all of them alike. A failing provider loses only its own row.
"""

from __future__ import annotations

import datetime
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any, Protocol

from . import analysis, folder, inside, limits, machine, record, spent
from .options import Options, new_id, request
from .problem import Task
from .process import WorkerFailed
from .record import Json, Measurement, Record, Row
from .seats import Seat, Seats

#: A provider that takes this many times as long as the fastest has turns of at most this many seconds after the first
#: round. If even one sample takes longer, it is dropped after as many rounds as a comparison needs: more would not change
#: the result and would cost the others time.
HOPELESS, HOPELESS_SECONDS, FEWEST_ROUNDS = 10.0, 0.025, 3
#: Providers that take at most ALIKE times as long as the fastest, and floors that take at least 1 / ALIKE of its time,
#: use the same number of samples per turn.
ALIKE = 2.0
#: A first call of so many seconds is repeated in a second process: does the compiler remember?
LONG_FIRST_CALL_S = 2.0
#: A sample of the fastest provider has no more calls than take so many seconds: the clock needs no more.
SAMPLE_SECONDS = 0.05
#: Turns keep at least so many samples where the fewest rounds with all of them would exceed the time limit.
FEWEST_SAMPLES = 2


class Listener(Protocol):
    """Callbacks for a progress display."""

    def group(self, index: int, total: int, task: Task) -> None: ...

    def provider(self, name: str, status: str, reason: str) -> None: ...

    def round(self, number: int, times: Mapping[str, float]) -> None: ...

    def rows(self, rows: Sequence[Row]) -> None: ...

    def note(self, text: str) -> None: ...


def _samples(warmed: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Samples per turn, by provider. A GPU at its power limit slows down within a turn, so providers about as fast as
    the fastest all use the smallest number that any of them asks for. The others use their own.
    """
    fastest = min((found["estimate_us"] for name, found in warmed.items() if not analysis.is_floor(name)), default=0.0)
    alike = {n for n, found in warmed.items() if fastest <= ALIKE * found["estimate_us"] <= ALIKE**2 * fastest}
    common = min((warmed[name]["samples"] for name in alike), default=0)
    return {name: common if name in alike else int(found["samples"]) for name, found in warmed.items()}


def _calls(warmed: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Calls per sample, by provider: as many as the problem's size asks for, but fewer if even the fastest takes long. A
    hopeless provider's sample has no more calls than its turn has time for, and that of its twin as many.
    """
    estimates = {name: found["estimate_us"] for name, found in warmed.items()}
    fastest = min((us for name, us in estimates.items() if not analysis.is_floor(name)), default=0.0)
    calls: int = min((found.get("calls_per_sample", 1) for found in warmed.values()), default=1)
    if fastest:
        calls = min(calls, int(SAMPLE_SECONDS * 1e6 / fastest))
    fitting: dict[str, int] = {}
    for name, us in estimates.items():
        if us > HOPELESS * fastest > 0:
            own = name.removesuffix(analysis.TWIN)
            fitting[own] = min(int(HOPELESS_SECONDS * 1e6 / us), fitting.get(own, calls))
    return {name: max(1, min(calls, fitting.get(name.removesuffix(analysis.TWIN), calls))) for name in warmed}


def _in_time(own: Mapping[str, int], seconds: float, left: float) -> dict[str, int]:
    """Samples per turn, by provider, if the remaining rounds of `own` take `seconds` and only `left` are left."""
    fits = min(1.0, max(0.0, left) / max(seconds, 1e-9))
    return {name: min(count, max(FEWEST_SAMPLES, int(count * fits))) for name, count in own.items()}


def _slow(measurement: Measurement, fastest_us: float) -> bool:
    """Whether a provider was far slower in every round: on a busy machine anyone can be slow in one."""
    return all(median(turn["device_us"]) > HOPELESS * fastest_us for turn in measurement.rounds)


def share(left: float, groups: int, preparing: Sequence[float]) -> float:
    """Seconds for the rounds of this group, with `left` seconds for it and all later groups. Later groups also need to
    be prepared: each is assumed to take as long as the quickest so far, excluding the first, which includes one-time
    compilation.
    """
    return max(0.0, left - (groups - 1) * min(preparing[1:], default=0.0)) / groups


class Study:
    """One run. `run()` returns the record, which is also saved to the run directory after every group."""

    def __init__(self, options: Options, listener: Listener, before: Record | None = None) -> None:
        """`before`: the record of an interrupted run to resume, of the same request on the same machine."""
        self.options = options
        self.listener = listener
        self.device_name = machine.device_name(options.device)
        created = datetime.datetime.now(datetime.timezone.utc)
        now = created.isoformat(timespec="seconds")
        self.record = Record(
            run=options.run or new_id(created),
            created=now,
            request=request(options),
            environment=machine.environment(options.device),
            limits=limits.kept(options.device),
        )
        if before is not None:
            folder.check_same(before, self.record.request, self.record.environment)
            before.resumed.append(now)
            before.request, before.finished = self.record.request, False
            self.record = before
        self.looked = inside.chosen(options.tasks) if options.device.startswith("cuda") else []
        self.begun_again = options.tasks[:1]
        done = {row.key for row in self.record.rows}
        self.tasks = [task for task in options.tasks if task.key not in done]
        self.random = random.Random(options.seed)
        self.seats = Seats(options)
        self.deadline = math.inf
        self.preparing: list[float] = []  # seconds before the first round of each group
        self.spent = spent.Parts()
        self.asked_limits = False

    def run(self) -> Record:
        options = self.options
        started = time.monotonic()
        if options.time_limit is not None:
            self.deadline = started + options.time_limit
        (options.out / "logs").mkdir(parents=True, exist_ok=True)
        (options.out / "rows.jsonl").unlink(missing_ok=True)  # not emptied: a symlink must not be followed
        record.append_rows(options.out / "rows.jsonl", self.record.rows)
        record.save(self.record, options.out)  # an unwritable directory should fail now, not after an hour
        try:
            with self.seats.open():
                with self.spent.part("starting"):
                    for seat in self.seats.all if self.tasks else []:
                        self.seats.start(seat)
                for index, task in enumerate(self.tasks):
                    self.listener.group(index, len(self.tasks), task)
                    self._group(task, len(self.tasks) - index)
                self.record.finished = True
        finally:
            self.record.account(time.monotonic() - started, self.spent.seconds)
            record.save(self.record, options.out)
        return self.record

    def _group(self, task: Task, groups_left: int) -> None:
        """Prepare, measure and record one task with every provider."""
        begun = time.monotonic()
        with self._accounted():
            replies = self.seats.side_by_side(machine.cores(), self.seats.all, task, "load")
        with self._accounted():
            able = [s for s in self.seats.all if replies[s.name]["ok"] or replies[s.name].get("crowded")]
            fitting = min((reply["at_once"] for reply in replies.values() if "at_once" in reply), default=4)
            last = self.seats.twin  # most likely this task's, too
            replies |= self._prepare_all(task, [*able, *([last] if last else [])], fitting)
            twin = self.seats.seat_twin(replies)
            seats = [*self.seats.all, *([twin] if twin else [])]
            if twin is not None and twin is not last:
                replies[twin.name] = self.seats.prepare(twin, task)
        self.seats.forget_truths()
        self._tell(seats, replies)
        measurements = {
            seat.name: Measurement(
                op=task.op,
                case=task.case,
                dtype=task.dtype,
                pass_=task.pass_,
                provider=seat.name,
                prepared={k: v for k, v in replies[seat.name].items() if k not in ("id", "ok", "versions")},
            )
            for seat in seats
        }
        running = [seat for seat in seats if replies[seat.name]["ok"]]
        now = time.monotonic()
        due = now + share(self.deadline - now, groups_left, self.preparing)
        self.preparing.append(now - begun)
        with self.spent.part("measuring"):
            self._rounds(running, measurements, replies, due)
            for seat in running:
                if replies[seat.name]["ok"]:
                    seat.failures = 0
            self._tell([seat for seat in running if not replies[seat.name]["ok"]], replies)
            if task in self.looked:
                timed = [seat for seat in running if replies[seat.name]["ok"]]
                self._kernels(timed, measurements)
                self._graphs([s for s in timed if s.worker is not None and s.capturable], measurements)
        if task in self.begun_again:
            with self._accounted():
                self._begin_again(task, [s for s in running if replies[s.name]["ok"]], fitting, measurements)
        shape = next((r["shape"] for r in replies.values() if "shape" in r), "")
        known: dict[str, Any] = next((r for r in replies.values() if "bytes_min" in r), {})
        rows = [self._row(task, seat, replies[seat.name], shape, known) for seat in self.seats.all]
        kept = [m for m in measurements.values() if m.rounds or m.prepared["status"] != "missing"]
        if self.record.limits is None and analysis.lacks_rate(rows):
            self.record.limits = self._limits()
        rows, comparisons = analysis.group_rows(rows, kept, self.record.limits)
        self.record.add(rows, kept, comparisons)
        record.append_rows(self.options.out / "rows.jsonl", rows)
        record.save(self.record, self.options.out)
        self.listener.rows(rows)

    def _tell(self, seats: Sequence[Seat], replies: Mapping[str, Mapping[str, Any]]) -> None:
        for seat in seats:
            self.listener.provider(seat.name, replies[seat.name]["status"], replies[seat.name].get("reason", ""))

    @contextmanager
    def _accounted(self) -> Iterator[None]:
        """Distribute the time spent inside over the workers' activities."""
        begun = time.monotonic()
        yield
        self.spent.add(spent.scaled(self.seats.busy, time.monotonic() - begun))
        self.seats.busy.clear()

    def _prepare_all(self, task: Task, seats: Sequence[Seat], fitting: int) -> dict[str, dict[str, Any]]:
        """Prepare the seats that have loaded their inputs; returns their replies. With enough cores these first calls
        overlap; timed rounds never do. `fitting`: number of checks that fit on a GPU at the same time.
        """
        replies = self.seats.side_by_side(min(machine.cores() // 2, fitting), seats, task, "prepare")
        for seat in seats:  # retry alone what did not fit next to the others' reference results
            if replies[seat.name].get("crowded"):
                replies[seat.name] = self.seats.prepare(seat, task)
            if replies[seat.name].get("crowded") and len(seats) > 1:
                replies[seat.name]["reason"] += "; a study's providers share the memory: name fewer with --providers"
        return replies

    def _rounds(
        self,
        seats: list[Seat],
        measurements: Mapping[str, Measurement],
        replies: dict[str, dict[str, Any]],
        due: float,
    ) -> None:
        """Run rounds until all times are precise enough or time is up; if the fewest rounds would take until after
        `due`, their turns are shorter. A failing worker loses its samples."""
        options = self.options
        stop = min(due, time.monotonic() + options.group_seconds)

        def asked(seat: Seat, do: str, when: str, **fields: Any) -> dict[str, Any] | None:
            assert seat.worker is not None
            try:
                reply = seat.worker.ask(do, **fields)
            except WorkerFailed as error:
                reply = self.seats.failure(seat, f"in {when}: {error}", error.hung)
            if reply["ok"]:
                return {k: v for k, v in reply.items() if k not in ("id", "ok", "status")}
            if reply.get("leaving"):
                self.seats.stop(seat)
            replies[seat.name] = reply
            measurements[seat.name].rounds.clear()
            measurements[seat.name].prepared |= {"status": reply["status"], "reason": reply["reason"]}
            return None

        for seat in seats:
            measurements[seat.name].prepared |= asked(seat, "warm", "the warm-up") or {}
        seats = [s for s in seats if replies[s.name]["ok"]]
        warmed = {s.name: measurements[s.name].prepared for s in seats}
        samples, calls = _samples(warmed), _calls(warmed)
        for name, count in samples.items():
            measurements[name].prepared |= {"samples": count, "calls_per_sample": calls[name]}
        own, took = dict(samples), dict[str, float]()  # seconds per sample in the last turn
        patient = seats  # the providers that still take part in every round
        for number in range(options.max_rounds):
            for seat in self.random.sample(patient, len(patient)):
                begun = time.monotonic()
                turn = asked(seat, "round", f"round {number}", samples=samples[seat.name], calls=calls[seat.name])
                took[seat.name] = (time.monotonic() - begun) / samples[seat.name]
                if turn is None:
                    seats = [s for s in seats if s is not seat]
                    patient = [s for s in patient if s is not seat]
                else:
                    measurements[seat.name].rounds.append({"round": number, **turn})
            medians = {s.name: list(analysis.round_medians(measurements[s.name]).values()) for s in patient}
            self.listener.round(number, {name: values[-1] for name, values in medians.items()})
            times = {n: median(v) for n, v in medians.items() if not analysis.is_floor(n)}
            slow = {n for n in times if _slow(measurements[n], min(times.values()))}
            for name in times:
                most = max(1, int(HOPELESS_SECONDS / max(took[name], 1e-9)))
                samples[name] = min(own[name], most) if name in slow else own[name]
            if number == 0:
                rest = (options.min_rounds - 1) * sum(took[s.name] * samples[s.name] for s in patient)
                own = _in_time(own, rest, due - time.monotonic())
                samples = {name: min(count, own[name]) for name, count in samples.items()}
            if number + 1 >= FEWEST_ROUNDS:
                left = {name for name in slow if took[name] > HOPELESS_SECONDS}
                for name in left:
                    measurements[name].prepared["left_after_rounds"] = number + 1
                patient = [s for s in patient if s.name not in left]
            if not seats or number + 1 < options.min_rounds:
                continue
            precise = all(analysis.relative_standard_error(v) <= options.precision for v in medians.values())
            if precise or time.monotonic() > stop:
                return

    def _kernels(self, seats: Sequence[Seat], measurements: Mapping[str, Measurement]) -> None:
        """Measure kernel times after the last round, so that no profiler is active while a call is timed. Workers
        without a profiler start it in parallel.
        """
        new = [seat for seat in seats if not seat.profiling]
        begun = self.seats.together(len(new), new, lambda seat: self._afterwards(seat, "profiler"))
        for seat in new:
            seat.profiling = begun[seat.name]["ok"]
        for seat in seats:
            if seat.profiling and (reply := self._afterwards(seat, "kernels"))["ok"]:
                found = {key: value for key, value in reply.items() if key not in ("id", "ok", "status")}
                measurements[seat.name].prepared |= found

    def _graphs(self, seats: Sequence[Seat], measurements: Mapping[str, Measurement]) -> None:
        """Time calls in CUDA graphs, after everything else: a failed capture leaves a process in an unknown state, so
        it is replaced, and the provider not asked again."""
        for seat in seats:
            reply = self._afterwards(seat, "graph")
            seat.capturable = reply.get("graph_us") is not None
            if reply["ok"]:
                found: dict[str, Any] = {key: reply[key] for key in ("graph_us", "graph_us_reason") if key in reply}
                measurements[seat.name].prepared |= found
                if reply.get("leaving"):
                    self.seats.stop(seat)

    def _limits(self) -> Json | None:
        """The machine's limits, measured now: a function's matmuls have no floor of their own. Only once: if it fails,
        the verdict says what is missing."""
        if self.asked_limits:
            return None
        self.asked_limits = True
        self.listener.note("measuring this machine's limits, which later studies will find kept")
        with self.spent.part("measuring"):
            return limits.measure_apart(
                self.options.device, self.options.out / "logs" / "limits.log", self.options.timeout
            )

    def _afterwards(self, seat: Seat, do: str) -> dict[str, Any]:
        """The reply to a request after the last round, which cannot cost a row."""
        assert seat.worker is not None
        try:
            return seat.worker.ask(do)
        except WorkerFailed as error:
            return self.seats.failure(seat, f"after the last round, for {do}: {error}")

    def _begin_again(
        self, task: Task, seats: Sequence[Seat], fitting: int, measurements: Mapping[str, Measurement]
    ) -> None:
        """Repeat the first calls that took long in new processes, which find whatever the compilers keep on disk."""
        long = {s.name for s in seats if measurements[s.name].prepared["first_call_s"] >= LONG_FIRST_CALL_S}
        remember = [
            seat for seat in self.seats.all if seat.entry.provider is not None and seat.entry.provider.remembers
        ]
        again = self.seats.anew(seat for seat in remember if seat.name in long)
        replies = self.seats.side_by_side(min(machine.cores() // 2, fitting), again, task, "first call")
        for seat in again:
            self.seats.stop(seat)
            reply = replies[seat.name]
            measurements[seat.name].prepared |= (
                {"first_call_again_s": reply["first_call_s"]}
                if reply["ok"]
                else {"first_call_again_s": None, "first_call_again_reason": reply["reason"]}
            )

    def _row(self, task: Task, seat: Seat, reply: Mapping[str, Any], shape: str, known: Mapping[str, Any]) -> Row:
        ok = reply["status"] == "ok"
        row = Row(
            op=task.op,
            case=task.case,
            shape=shape,
            dtype=task.dtype,
            pass_=task.pass_,
            provider=seat.name,
            status=reply["status"],
            reason="" if ok else reply["reason"] or "no reason was given",
            bytes_min=known.get("bytes_min"),
            flops_min=known.get("flops_min"),
            error=reply.get("error"),
            error_eager=reply.get("error_eager"),
            versions={"torch": self.record.environment["versions"]["torch"], **seat.versions},
            device=self.device_name,
            run=self.record.run,
        )
        if not ok:
            return row
        return replace(
            row,
            first_call_s=reply.get("first_call_s"),
            peak_bytes=reply.get("peak_bytes"),
            held_bytes=reply.get("held_bytes"),
        )
