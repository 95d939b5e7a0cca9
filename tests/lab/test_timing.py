import contextlib
import gc
import math
import os
import subprocess
import sys
import time
import warnings
import weakref
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch

from fusewise.lab import machine, memory, timing
from fusewise.lab.timing import HOST_CALLS, RESOLUTION_US, CpuTimer, CudaTimer, Turn, Uncaptured, Work, calls_per_sample


class Clock:
    """A clock that only advances by calls of `sleep`: under load a real one would measure other processes."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def perf_counter_ns(self):
        return round(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


def test_a_known_time_is_reported(clock):
    turn = CpuTimer(0).turn(Work(lambda i: i, lambda _: clock.sleep(0.01)), samples=3, calls=1)
    assert turn.device_us == pytest.approx([10_000] * 3)
    assert turn.host_us is None


def test_a_sample_of_several_calls_is_a_time_a_call(clock):
    turn = CpuTimer(0).turn(Work(lambda i: i, lambda _: clock.sleep(0.005)), samples=2, calls=4)
    assert turn.device_us == pytest.approx([5_000] * 2)


def test_a_real_clock_is_read():
    turn = CpuTimer(0).turn(Work(lambda i: i, lambda _: time.sleep(0.01)), samples=2, calls=1)
    assert min(turn.device_us) >= 10_000


def test_a_turn_tells_how_many_threads_waited_for_a_core(clock, monkeypatch):
    # Before and after each sample. In the first sample all threads share one core; in the second turn a thread ends.
    waited = iter([1.0, 1.5, 1.5, 1.65, 1.65, 1.8, 5.0, 4.0, None, None])
    monkeypatch.setattr(timing.machine, "waited_s", lambda: next(waited))
    work = Work(lambda i: i, lambda _: clock.sleep(0.1))
    assert CpuTimer(0).turn(work, samples=3, calls=1).clocks == {"waiting_threads": 1.5}
    assert CpuTimer(0).turn(work, samples=1, calls=1).clocks == {"waiting_threads": 0.0}
    assert CpuTimer(0).turn(work, samples=1, calls=1).clocks is None  # not available here


@pytest.mark.skipif(machine.waited_s() is None, reason="this system does not tell how long threads wait")
def test_threads_of_one_core_wait_for_each_other():
    """Two processes pinned to the first available core: each gets half of the time."""
    program = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    burn = subprocess.Popen([sys.executable, "-c", program + "while True: pass"])
    try:
        code = program + (
            "import time; from fusewise.lab import machine, timing\n"
            "work = timing.Work(lambda i: i, lambda _: [i * i for i in range(3_000_000)])\n"
            "print(timing.CpuTimer(0).turn(work, samples=1, calls=1).clocks['waiting_threads'])"
        )
        told = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    finally:
        burn.kill()
        burn.wait()
    assert told > 0.2


def test_beginnings_are_not_timed_and_every_call_has_its_own(clock):
    begun = []

    def begin(i):
        begun.append(i)
        clock.sleep(0.02)
        return i

    turn = CpuTimer(0).turn(Work(begin, lambda _: None), samples=2, calls=3)
    assert begun == [0, 1, 2, 0, 1, 2]
    assert turn.device_us == [0, 0]


def test_the_flush_is_not_timed_and_touches_the_whole_buffer(clock):
    class Slow(torch.Tensor):
        def add_(self, other):
            clock.sleep(1.0)
            return super().add_(other)

    timer = CpuTimer(2**20)
    timer.flush = timer.flush.as_subclass(Slow)
    turn = timer.turn(Work(lambda i: i, lambda _: None), samples=2, calls=1)
    assert turn.device_us == [0, 0]
    assert clock.now == 2.0
    assert bool((timer.flush == 2.0).all())


def test_processes_that_take_turns_flush_with_the_same_memory():
    file = os.memfd_create("flush")
    try:
        os.truncate(file, 2**20 + 2)  # a cache may have any size
        one, other = CpuTimer(2**20 + 2, file), CpuTimer(2**20 + 2, file)
    finally:
        os.close(file)
    one.turn(Work(lambda i: i, lambda _: None), samples=2, calls=1)
    other.turn(Work(lambda i: i, lambda _: None), samples=1, calls=1)
    assert one.flush.numel() == 2**18 and bool((one.flush == 3.0).all())


@pytest.mark.parametrize(("device", "small", "medium"), [("cpu", 2**16, 2**20), ("cuda:0", 2**23, 2**26)])
def test_small_problems_are_averaged_more(device, small, medium):
    sizes = (0, small, small + 1, medium, medium + 1)
    assert [calls_per_sample(size, device) for size in sizes] == [16, 16, 4, 4, 1]


def test_a_first_call_takes_its_seconds():
    assert 0.02 <= CpuTimer(0).once(Work(lambda i: 0.02, time.sleep)) < 10


def test_memory_counts_peak_and_kept():
    def work():
        temporary = torch.ones(2**20)  # 4 MiB
        return temporary[: 2**18].clone()  # 1 MiB

    _, grown = memory.growth(work, torch.device("cpu"))
    assert 5 * 2**20 <= grown.peak < 5 * 2**20 + 2**16
    assert 2**20 <= grown.kept < 2**20 + 2**16


def test_held_bytes_are_what_forward_saves_beyond_inputs_and_outputs():
    x = torch.ones(2**18, requires_grad=True)  # 1 MiB
    assert memory.held_bytes(lambda: (x.exp().sin(),), (x,), torch.device("cpu")) == pytest.approx(2**20, abs=2**14)
    assert memory.held_bytes(lambda: (x * 2.0,), (x,), torch.device("cpu")) < 2**14


class FakeCuda:
    """A stream with a clock: work takes known device time, events add `pair`, and a hold with too few cycles ends
    before everything is queued, as does any hold after which more than `queue` events are recorded.
    """

    def __init__(self, hold_needed=0, pair=0.0, queue=math.inf):
        self.hold_needed = hold_needed
        self.pair = pair
        self.queue = queue
        self.queued = 0
        self.now = 0.0
        self.held = False
        self.holds = []

    def synchronize(self, device=None):
        self.held = False

    def _sleep(self, cycles):
        self.holds.append(cycles)
        self.held = cycles >= self.hold_needed
        self.queued = 0

    def Event(self, enable_timing):
        cuda = self

        class Event:
            def record(self):
                cuda.now += cuda.pair
                cuda.queued += 1
                self.at = cuda.now

            def query(self):
                return not cuda.held or cuda.queued > cuda.queue

            def elapsed_time(self, other):
                return (other.at - self.at) / 1000

        return Event()

    def serve(self, monkeypatch):
        for name in ("synchronize", "_sleep", "Event"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        return self


@pytest.fixture
def host(monkeypatch):
    """Simulated host time in seconds, independent of the load; a hold derives its length from it."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize("timer", [CpuTimer(0), CudaTimer(torch.device("cpu"), 0, lambda: None)])
def test_the_garbage_collector_is_off_while_timing_and_on_after(timer, monkeypatch):
    FakeCuda().serve(monkeypatch)
    seen = []
    timer.turn(Work(lambda i: i, lambda _: seen.append(gc.isenabled())), samples=1, calls=1)
    assert seen and not any(seen)
    assert gc.isenabled()


def test_the_flush_of_a_gpu_is_before_each_sample_and_not_timed(monkeypatch):
    cuda, order = FakeCuda().serve(monkeypatch), []

    def fill(buffer):
        cuda.now += 100.0
        order.append(buffer.numel())

    def step(_):
        cuda.now += 7.0
        order.append("step")

    monkeypatch.setattr(timing, "fill_cache", fill)
    timer = CudaTimer(torch.device("cpu"), 4096, lambda: None)
    timer.pair_us = 0.0
    assert timer.turn(Work(lambda i: i, step), samples=2, calls=2).device_us == [7.0, 7.0]
    assert order[:6] == 2 * [1024, "step", "step"] and 1024 not in order[6:]


def test_one_call_of_a_gpu_is_timed_to_its_end_and_nothing_before(monkeypatch, host):
    def synchronize(_):
        host[0] += sum(busy)
        busy.clear()

    busy = [8.0]  # seconds until the device has done what was queued before
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    timer = CudaTimer(torch.device("cpu"), 0, lambda: None)
    assert timer.once(Work(lambda i: i, lambda _: busy.append(0.75))) == 0.75


@pytest.mark.parametrize(("hold_needed", "attempts"), [(0, 1), (1_500_000, 3)])
def test_the_stream_is_held_longer_until_everything_is_queued(monkeypatch, host, hold_needed, attempts):
    cuda = FakeCuda(hold_needed).serve(monkeypatch)
    timer = CudaTimer(torch.device("cpu"), 4096, lambda: {"sm_mhz": 1980})
    assert timer.pair_us == 0.0
    cuda.holds.clear()
    begun = []

    def step(_):
        cuda.now += 7.0  # microseconds on the device
        host[0] += 1e-5

    turn = timer.turn(Work(lambda i: begun.append(i), step), samples=3, calls=4)
    assert turn.device_us == [7.0, 7.0, 7.0]
    assert turn.held
    assert len(cuda.holds) == attempts
    assert cuda.holds == sorted(cuda.holds)
    assert turn.clocks == {"sm_mhz": 1980}
    assert 0 < turn.host_us < 1000
    assert begun[:12] == [0, 1, 2, 3] * 3


def test_one_sample_is_held_at_a_time_if_the_launch_queue_takes_no_more(monkeypatch, host):
    """Of eight samples, with two events each, three would fit. A search for them would cost a provider that cannot be held
    at all more tries than its samples take."""
    cuda = FakeCuda(queue=7).serve(monkeypatch)
    timer = CudaTimer(torch.device("cpu"), 4096, lambda: None)
    timer.pair_us = 0.0

    def step(us):
        cuda.now += us
        host[0] += 1e-3

    work = Work(lambda i: 7.0, step)
    assert timer.turn(work, samples=8, calls=1) == Turn([7.0] * 8, ANY, held=True)
    cuda.holds.clear()
    assert timer.turn(work, samples=8, calls=1) == Turn([7.0] * 8, ANY, held=True)
    assert len(cuda.holds) == 8
    kept = weakref.ref(work)
    del work
    assert kept() is None  # with the tensors of a problem, while other providers prepare the next


@pytest.mark.parametrize(
    ("ms", "tries"), [(20, [600_000, 100_000_000, 56_600_000, 100_000_000]), (80, [600_000, 100_000_000])]
)
def test_what_cannot_be_held_follows_the_host_and_is_not_tried_again(monkeypatch, host, ms, tries):
    """Three samples of 20 ms take longer to queue than the longest hold, 50 ms, and one does not, which is tried too.
    Each hold is tried twice, since a first call may be slow."""
    cuda = FakeCuda(hold_needed=math.inf).serve(monkeypatch)
    timer = CudaTimer(torch.device("cpu"), 4096, lambda: None)
    timer.pair_us = 0.0

    def step(us):
        cuda.now += us
        host[0] += ms / 1e3

    work = Work(lambda i: 7.0, step)
    assert timer.turn(work, samples=3, calls=1) == Turn([7.0] * 3, ANY, held=False)
    assert cuda.holds == tries
    assert timer.turn(work, samples=3, calls=1) == Turn([7.0] * 3, ANY, held=False)
    assert cuda.holds == tries


def test_what_was_held_before_is_tried_again_in_the_next_turn(monkeypatch, host):
    cuda = FakeCuda().serve(monkeypatch)
    timer = CudaTimer(torch.device("cpu"), 4096, lambda: None)
    timer.pair_us = 0.0

    def step(_):
        host[0] += 1e-5

    work, found = Work(lambda i: None, step), []
    for needed in (0, math.inf, 0):  # in the second turn the host is always late
        cuda.hold_needed = needed
        found.append(timer.turn(work, samples=3, calls=1).held)
    assert found == [True, False, True]


@pytest.mark.parametrize("calls", [1, 4])
def test_what_two_events_are_apart_by_themselves_is_no_time_of_a_call(monkeypatch, calls):
    cuda = FakeCuda(pair=1.25).serve(monkeypatch)
    timer = CudaTimer(torch.device("cpu"), 4096, lambda: None)

    def step(us):
        cuda.now += us

    assert timer.turn(Work(lambda i: 7.0, step), samples=3, calls=calls).device_us == pytest.approx([7.0] * 3)
    assert timer.turn(Work(lambda i: 0.0, step), samples=3, calls=calls).device_us == [RESOLUTION_US / calls] * 3


def test_of_events_that_the_host_kept_apart_nothing_is_taken_off(monkeypatch):
    FakeCuda(hold_needed=math.inf, pair=50.0).serve(monkeypatch)
    timer = CudaTimer(torch.device("cpu"), 4096, lambda: None)
    turn = timer.turn(Work(lambda i: i, lambda _: None), samples=2, calls=1)
    assert turn.device_us == [50.0, 50.0]
    assert not turn.held


def graphs(monkeypatch, cuda, done):
    """Captures on streams that append their names to the list returned; a replay takes four times 7 µs."""
    stream = ["current"]

    @contextlib.contextmanager
    def entered(name):
        stream.append(name)
        yield
        stream.pop()

    class Graph:
        def replay(self):
            done.append("replay")
            cuda.now += 4 * 7.0

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "current")
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(wait_stream=done.append))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: entered("side"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: entered("captured"))
    return stream


def test_a_graph_has_the_calls_of_a_sample_captured_once_and_replayed(monkeypatch):
    """On a stream of its own, where the forward before a backward runs, too."""
    cuda, done = FakeCuda(pair=1.25).serve(monkeypatch), []
    stream = graphs(monkeypatch, cuda, done)
    timer = CudaTimer(torch.device("cpu"), 4096, lambda: None)
    work = Work(lambda i: done.append((stream[-1], "begin", i)) or i, lambda i: done.append((stream[-1], "step", i)))
    assert timer.graph_us(work, samples=3, calls=4) == pytest.approx(7.0)
    first, begun = [("side", "begin", 0), ("side", "step", 0)], [("side", "begin", i) for i in range(4)]
    assert done == ["current", *first, *begun, *[("captured", "step", i) for i in range(4)], *["replay"] * 4]


def test_an_empty_graph_is_no_time_and_other_warnings_are_passed_on(monkeypatch):
    stream = graphs(monkeypatch, FakeCuda().serve(monkeypatch), [])
    timer = CudaTimer(torch.device("cpu"), 0, lambda: None)

    def warned(text):
        return Work(lambda i: i, lambda _: warnings.warn(text, stacklevel=1) if stream[-1] == "captured" else None)

    with pytest.raises(Uncaptured, match="captures no kernel"):
        timer.graph_us(warned(f"{timing.EMPTY}. This usually means"), samples=3, calls=4)
    with pytest.warns(UserWarning, match="a library's own"):
        assert timer.graph_us(warned("a library's own"), samples=3, calls=4) == 7.0


@pytest.mark.parametrize(("us", "calls"), [(900, 20), (2500, 9), (7000, 5)])
def test_the_host_is_measured_in_fewer_calls_where_they_are_long(monkeypatch, us, calls):
    FakeCuda().serve(monkeypatch)
    now, made = [0], []
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])

    def step(_):
        now[0] += 1000 * us
        made.append(us)

    timer = CudaTimer(torch.device("cpu"), 0, lambda: None)
    assert timer._host(Work(lambda i: i, step)) == us
    assert len(made) == calls


def test_host_time_holds_the_call_and_nothing_else(monkeypatch):
    """What runs between two readings of the clock, counted rather than timed: another process cannot decide."""
    FakeCuda().serve(monkeypatch)
    timer = CudaTimer(torch.device("cpu"), 0, lambda: None)
    ran = []

    def step(state):
        return state

    def trace(frame, event, argument):
        ran.append(argument if event.startswith("c_") else frame.f_code)

    sys.setprofile(trace)
    try:
        timer._host(Work(lambda i: i, step))
    finally:
        sys.setprofile(None)
    readings = [i for i, what in enumerate(ran) if what is time.perf_counter_ns][1::2]  # each is entered and left
    timed = [ran[start + 1 : end - 1] for start, end in zip(readings[::2], readings[1::2], strict=True)]
    assert timed == [[step.__code__] * 2] * HOST_CALLS


def bare_us(call):
    """Microseconds per call in a bare loop: the median, since on a busy machine there is hardly a loop without a slow call."""
    clock = [time.perf_counter_ns()]
    for _ in range(HOST_CALLS):
        call(None)
        clock.append(time.perf_counter_ns())
    return median(stop - start for start, stop in pairwise(clock)) / 1e3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_host_time_of_a_launch_is_that_of_a_bare_loop():
    timer = CudaTimer(torch.device("cuda:0"), 0, lambda: None)
    x = torch.zeros(64, device="cuda")

    def call(_):
        return x.add_(1.0)

    tries = []
    for _ in range(60):  # other processes disturb most of them
        torch.cuda.synchronize()
        tries.append((timer.turn(Work(lambda i: i, call), samples=1, calls=1).host_us, bare_us(call)))
    assert min(host for host, _ in tries) == pytest.approx(min(bare for _, bare in tries), abs=1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_launches_on_its_own_stream_is_not_captured_and_harms_no_later_capture():
    timer = CudaTimer(torch.device("cuda:0"), 0, lambda: None)
    x = torch.zeros(64, device="cuda")
    mine = torch.cuda.Stream()

    def elsewhere(_):
        with torch.cuda.stream(mine):
            x.add_(1.0)

    def here(_):
        x.add_(1.0)

    with pytest.raises(Uncaptured, match="another stream"):
        timer.graph_us(Work(lambda i: i, elsewhere), samples=3, calls=2)
    torch.cuda.synchronize()
    assert x[0].item() == 3.0  # one call to warm up and two that ran at once
    assert timer.graph_us(Work(lambda i: i, here), samples=3, calls=2) < 100
    assert timer.turn(Work(lambda i: i, elsewhere), samples=2, calls=1).held is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_times_the_device_and_not_the_host():
    timer = CudaTimer(torch.device("cuda:0"), 2 * torch.cuda.get_device_properties(0).L2_cache_size, lambda: None)
    x = torch.randn(2**28, device="cuda")  # 1 GiB: at least 0.3 ms on any GPU

    def late(_):
        time.sleep(0.002)  # a host that is slower than the device
        return x.mul_(1.0)

    turn = timer.turn(Work(lambda i: i, late), samples=4, calls=1)
    direct = timer.turn(Work(lambda i: i, lambda _: x.mul_(1.0)), samples=4, calls=1)
    assert turn.held
    assert direct.held
    assert min(turn.device_us) == pytest.approx(min(direct.device_us), rel=0.1)  # other processes may use the GPU, too
    assert turn.host_us > 2000 > direct.host_us


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_call_is_cold_and_writes_back_no_line_of_the_flush(monkeypatch):
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    x = torch.randn(cache // 8, device="cuda")  # half of the cache

    def median_us(flush_bytes):
        timer = CudaTimer(torch.device("cuda:0"), flush_bytes, lambda: None)
        return sorted(timer.turn(Work(lambda i: i, lambda _: torch.amax(x, dim=0)), samples=21, calls=1).device_us)[10]

    warm, cold = median_us(0), median_us(2 * cache)
    monkeypatch.setattr(timing, "fill_cache", lambda buffer: buffer.zero_())
    assert 1.1 * warm < cold < median_us(2 * cache)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_calls_are_replayed_in_a_graph_forward_and_backward():
    timer = CudaTimer(torch.device("cuda:0"), 2 * torch.cuda.get_device_properties(0).L2_cache_size, lambda: None)
    x = torch.randn(2**26, device="cuda", requires_grad=True)
    upstream = torch.randn_like(x)
    forward = Work(lambda i: x, lambda x: x * 2.0)
    backward = Work(lambda i: x * 2.0, lambda y: torch.autograd.grad(y, x, upstream))
    for work in (forward, backward):
        for calls in (1, 4):
            queued = timer.turn(work, samples=9, calls=calls).device_us
            assert timer.graph_us(work, 9, calls) == pytest.approx(median(queued), rel=0.1)
    with pytest.raises(Uncaptured, match="another stream"):
        timer.graph_us(Work(lambda i: x, lambda x: x), 3, 1)
