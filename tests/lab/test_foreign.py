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


def profile(events):
    """A finished profile that saw (device, start, duration)."""

    def event(device, start, duration):
        return SimpleNamespace(device_type=lambda: device, start_ns=lambda: start, duration_ns=lambda: duration)

    seen = [event(*e) for e in events]
    return SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: seen)))


KINDS = torch._C._autograd.DeviceType
HOST = (KINDS.CPU, 0, 100)


def test_kernels_are_what_ran_on_the_device():
    made = profile([HOST, (KINDS.CUDA, 10, 5), (KINDS.CUDA, 12, 10)])
    assert foreign.kernels(made) == [(10, 15), (12, 22)]
    assert foreign.busy(foreign.kernels(made)) == 12


@pytest.fixture
def timer(monkeypatch):
    """A timer on a GPU that is not there, what its profiler sees, and what its events say by calls a sample."""
    seen, by_events = [], {}

    @contextmanager
    def profiled(**_):
        yield profile(seen)

    class Events(foreign.CudaTimer):
        def turn(self, work, samples, calls):
            work.step(work.begin(0))
            return Turn([by_events.get(calls, 0.0)] * samples)

    monkeypatch.setattr(torch.profiler, "profile", profiled)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(foreign, "CudaTimer", Events)
    return foreign.ProfiledTimer(torch.device("cpu"), 2**10, lambda: {"sm": 1}), seen, by_events


WORK = Work(lambda i: i, lambda _: None)


def test_a_call_takes_its_share_of_the_time_in_which_kernels_ran(timer):
    timer, seen, _ = timer
    seen += [HOST, (KINDS.CUDA, 1000, 3000), (KINDS.CUDA, 5000, 1000)]
    assert timer.once(WORK) == pytest.approx(4e-6)
    turn = timer.turn(WORK, samples=2, calls=4)
    assert (turn.device_us, turn.host_us, turn.clocks) == (pytest.approx([1.0, 1.0]), None, {"sm": 1})


def test_the_kernels_of_a_call_alone(timer):
    timer, seen, by_events = timer
    by_events[1] = 3.5
    seen += [(KINDS.CUDA, 1000, 3000), (KINDS.CUDA, 5000, 1000)]
    assert timer.kernel_us(WORK, samples=3) == pytest.approx(4.0)


def test_the_starts_of_kernels_count_as_events_count_them(timer):
    """The smallest kernel: by the profiler 2 µs, by events 3.5 in samples of one call and 2.5 in a row of them."""
    timer, seen, by_events = timer
    seen.append((KINDS.CUDA, 1000, 2000))
    by_events |= {1: 3.5, foreign.ROW: 2 / foreign.ROW + 0.5}
    assert timer.turn(WORK, samples=1, calls=1).device_us == pytest.approx([3.5])
    seen.append((KINDS.CUDA, 5000, 1000))
    by_events.clear()  # measured once
    assert timer.turn(WORK, samples=2, calls=1).device_us == pytest.approx([3.0 + 1.5 + 0.5] * 2)


def test_events_that_are_quicker_than_the_profiler_take_nothing_away(timer):
    timer, seen, by_events = timer
    seen.append((KINDS.CUDA, 1000, 2000))
    by_events[1] = 1.0
    assert timer.turn(WORK, samples=1, calls=1).device_us == pytest.approx([2.0])


def test_a_call_of_which_no_kernel_was_seen_has_no_time(timer):
    timer, seen, _ = timer
    seen.append(HOST)
    for wanted in (lambda: timer.once(WORK), lambda: timer.turn(WORK, samples=2, calls=4)):
        with pytest.raises(RuntimeError, match=r"torch\.profiler saw no kernel of it"):
            wanted()


def negating(elements):
    """A timer on the GPU, and a kernel to be timed; the driver's copies take longer to start."""
    device = torch.device("cuda")
    a, b = torch.randn(2, elements, device=device).unbind()
    return foreign.ProfiledTimer(device, 2**28, lambda: None), Work(lambda _: None, lambda _: torch.neg(a, out=b))


@pytest.mark.gpu
def test_kernels_alone_take_no_longer_than_with_their_starts():
    """Nor less than memory that moves 10 TB/s would. How much of a call by itself is not its kernel depends: 4 of 7 us right
    behind the flush, which memory is still writing, on an H200."""
    timer, work = negating(2**20)
    foreign.begin()
    alone = timer.kernel_us(work, samples=9)
    by_events = sorted(timer.events.turn(work, samples=20, calls=1).device_us)[10]
    assert 2 * 4 * 2**20 / 10e6 < alone < by_events


@pytest.mark.gpu
def test_a_kernel_of_torch_takes_as_long_by_either_clock():
    """The same kernel, timed as what runs on a stream of torch and as what does not."""
    timer, work = negating(2**22)
    profiled = sorted(timer.turn(work, samples=20, calls=1).device_us)[10]
    by_events = sorted(timer.events.turn(work, samples=20, calls=1).device_us)[10]
    assert profiled == pytest.approx(by_events, rel=0.1)
