from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from fusewise.lab import foreign

INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)


@given(INTERVALS)
def test_busy_time_is_the_number_of_moments_in_which_something_ran(intervals):
    assert foreign.busy(intervals) == len({moment for start, stop in intervals for moment in range(start, stop)})


def test_kernels_are_what_ran_on_the_device():
    def event(device, start, duration):
        return SimpleNamespace(device_type=lambda: device, start_ns=lambda: start, duration_ns=lambda: duration)

    kinds = torch._C._autograd.DeviceType
    events = [event(kinds.CPU, 0, 100), event(kinds.CUDA, 10, 5), event(kinds.CUDA, 12, 10)]
    profile = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))
    assert foreign.kernels(profile) == [(10, 15), (12, 22)]
    assert foreign.busy(foreign.kernels(profile)) == 12
