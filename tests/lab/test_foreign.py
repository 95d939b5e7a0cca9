import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusewise.lab import foreign
from fusewise.lab.timing import Turn, Work

INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)


@given(INTERVALS)
def test_busy_time_is_the_number_of_moments_in_which_something_ran(intervals):
    assert foreign.busy(intervals) == len({moment for start, stop in intervals for moment in range(start, stop)})


KINDS = torch._C._autograd.DeviceType
MARK = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def profile(events):
    """A finished profile with the given events: (device, start, duration, name)."""

    def event(device, start, duration, name="work"):
        return SimpleNamespace(
            device_type=lambda: device, start_ns=lambda: start, duration_ns=lambda: duration, name=lambda: name
        )

    seen = [event(*e) for e in events]
    return SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: seen)))


HOST = (KINDS.CPU, 0, 100)


def test_kernels_are_what_ran_on_the_device():
    made = profile([HOST, (KINDS.CUDA, 12, 10), (KINDS.CUDA, 10, 5, "first")])
    assert foreign.kernels(made) == [((10, 15), "first"), ((12, 22), "work")]


def test_samples_are_what_ran_between_marks():
    """Independent of the profiler's order; work before the first mark (a flush) or between samples is excluded."""
    told = [(KINDS.CUDA, at, 1, MARK) for at in (10, 20, 30, 40, 50, 60)]
    told += [(KINDS.CUDA, at, 2) for at in (33, 5, 12, 25, 11, 70)] + [HOST]
    assert foreign.between_marks(profile(told)) == [[(11, 13), (12, 14)], [(33, 35)], []]


class Device:
    """A simulated GPU. `seen`: the profiler's events; `kernels`: (start, duration) of the kernels of a call."""

    def __init__(self):
        self.now, self.seen, self.kernels, self.profiles = 0, [], [], 0

    def ran(self, kernels, name="work"):
        self.seen += [(KINDS.CUDA, self.now + start, duration, name) for start, duration in kernels]
        self.now += 1_000_000

    @contextmanager
    def profile(self, **_):
        self.profiles += 1
        first = len(self.seen)
        made = profile([])
        yield made
        made.profiler = profile(self.seen[first:]).profiler


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.profiler, "profile", device.profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: device.ran([(0, 500)], MARK))
    device.work = Work(lambda i: device.ran([(0, 9000)]), lambda _: device.ran(device.kernels))
    return device


@pytest.fixture
def timer(monkeypatch, device):
    """A timer on the simulated GPU, and its event times by calls per sample; the smallest kernel takes 2 µs by the
    profiler.
    """
    by_events = {}

    class Events(foreign.CudaTimer):
        def turn(self, work, samples, calls):
            return Turn([by_events.get(calls, 0.0)] * samples)

    class Timer(foreign.ProfiledTimer):
        def _seen(self, work, samples, calls):
            if work is device.work:
                return super()._seen(work, samples, calls)
            return [[(0, 2000)] for _ in range(samples)]

    monkeypatch.setattr(foreign, "CudaTimer", Events)
    return Timer(torch.device("cpu"), 2**10, lambda: {"sm": 1}), by_events


def test_a_call_takes_its_share_of_the_time_in_which_kernels_ran(timer, device):
    timer, _ = timer
    device.kernels = [(0, 3000), (4000, 1000)]
    turn = timer.turn(device.work, samples=2, calls=4)
    assert (turn.device_us, turn.host_us, turn.clocks) == (pytest.approx([4.0, 4.0]), None, {"sm": 1})
    assert device.profiles == 1  # starting and stopping one takes milliseconds


def test_an_estimate_is_the_time_that_the_caller_waits(timer, device, monkeypatch):
    """As of every provider: a study compares them."""
    timer, _ = timer
    clock = iter((1.0, 1.25))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert timer.once(device.work) == 0.25
    assert not device.profiles


def test_the_kernels_of_a_call_alone(timer, device):
    timer, by_events = timer
    by_events[1] = 3.5
    device.kernels = [(0, 3000), (4000, 1000)]
    assert timer.kernel_us(device.work, samples=3) == pytest.approx(4.0)


def test_the_starts_of_kernels_count_as_events_count_them(timer, device):
    """The smallest kernel takes 2 µs by the profiler; by events 3.5 in samples of one call and 2.5 back to back."""
    timer, by_events = timer
    device.kernels = [(0, 2000)]
    by_events |= {1: 3.5, foreign.ROW: 2 / foreign.ROW + 0.5}
    assert timer.turn(device.work, samples=1, calls=1).device_us == pytest.approx([3.5])
    device.kernels.append((5000, 1000))
    by_events.clear()  # measured once
    assert timer.turn(device.work, samples=2, calls=1).device_us == pytest.approx([3.0 + 1.5 + 0.5] * 2)


def test_events_that_are_quicker_than_the_profiler_take_nothing_away(timer, device):
    timer, by_events = timer
    device.kernels = [(0, 2000)]
    by_events[1] = 1.0
    assert timer.turn(device.work, samples=1, calls=1).device_us == pytest.approx([2.0])


def test_a_call_of_which_no_kernel_was_seen_has_no_time(timer, device):
    timer, _ = timer
    with pytest.raises(RuntimeError, match=r"torch\.profiler recorded no kernel of it"):
        timer.turn(device.work, samples=2, calls=4)


def test_a_sample_that_the_profiler_has_lost_is_missed(timer, device, monkeypatch):
    timer, _ = timer
    device.kernels = [(0, 2000)]
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    with pytest.raises(RuntimeError, match=r"torch\.profiler recorded no kernel of it"):
        timer.turn(device.work, samples=2, calls=1)


def negating(elements):
    """A timer on the GPU and a kernel to time; the driver's copies take longer to start."""
    device = torch.device("cuda")
    a, b = torch.randn(2, elements, device=device).unbind()
    return foreign.ProfiledTimer(device, 2**28, lambda: None), Work(lambda _: None, lambda _: torch.neg(a, out=b))


@pytest.mark.gpu
def test_kernels_alone_take_no_longer_than_with_their_starts():
    """Lower bound: memory at 10 TB/s. The share of a single call that is not kernel time varies: 4 of 7 µs on an H200
    right after the flush, whose writes memory is still draining.
    """
    timer, work = negating(2**20)
    foreign.begin()
    alone = timer.kernel_us(work, samples=9)
    by_events = sorted(timer.events.turn(work, samples=20, calls=1).device_us)[10]
    assert 2 * 4 * 2**20 / 10e6 < alone < by_events


@pytest.mark.gpu
def test_a_kernel_of_torch_takes_as_long_by_either_clock():
    """The same kernel, timed as work on torch's stream and as work on a foreign one."""
    timer, work = negating(2**22)
    profiled = sorted(timer.turn(work, samples=20, calls=1).device_us)[10]
    by_events = sorted(timer.events.turn(work, samples=20, calls=1).device_us)[10]
    assert profiled == pytest.approx(by_events, rel=0.1)
