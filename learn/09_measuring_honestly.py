"""Measuring honestly: cold caches, interleaved rounds, and a pair that must not differ.

Three things make most published speedups wrong:

    warm caches     a loop over one small tensor measures the cache; in a model other tensors evict it between calls
    drift           if A runs before B, they also differ in clock, temperature and other load
    no noise floor  a difference means nothing until you know how much the same code differs from itself

So: flush the cache before every sample, run the candidates in random order in every round, compare medians, and measure
one of them twice under two names. The difference of those two is the noise floor.
"""

import random
import statistics
import time

import torch

torch.manual_seed(0)
random.seed(0)
torch.set_num_threads(1)  # with more, every sample waits for the slowest thread and the load on its core
eviction = torch.empty(64 * 2**20, dtype=torch.uint8)  # larger than the last-level cache of most processors


def microseconds(function, cold=True):
    if cold:
        eviction.add_(1)
    start = time.perf_counter_ns()
    function()
    return (time.perf_counter_ns() - start) / 1000


def measure(candidates, rounds):
    """Samples of every candidate; each round runs all of them in random order."""
    samples = {name: [] for name in candidates}
    for function in candidates.values():
        function()  # warm-up: first calls allocate, import and compile
    for _ in range(rounds):
        for name, function in random.sample(list(candidates.items()), len(candidates)):
            samples[name].append(microseconds(function))
    return samples


def compare(samples, a, b):
    """The median ratio of a to b and its 99 % bootstrap confidence interval over the rounds."""
    ratios = [x / y for x, y in zip(samples[a], samples[b], strict=True)]
    resampled = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(1000))
    return statistics.median(ratios), resampled[5], resampled[-6]


# 1. The cache: copy a tensor of half a megabyte.
small = torch.randn(2**17)
target = torch.empty_like(small)
times = {True: [], False: []}
for _ in range(41):
    for cold in random.sample([True, False], 2):
        target.copy_(small)
        times[cold].append(microseconds(lambda: target.copy_(small), cold))
cold, warm = statistics.median(times[True]), statistics.median(times[False])
print(f"the same copy: {warm:.0f} µs warm, {cold:.0f} µs cold")
assert cold > warm

# 2. The candidates: a rotation as most models write it, the same under another name, and in float64.
B, T, H, D = 1, 64, 8, 64  # small: larger buffers go back to the OS, and new ones page-fault
x = torch.randn(B, T, H, D)
angles = torch.outer(torch.arange(T), 10000.0 ** (-torch.arange(0, D, 2) / D))
cos2, sin2 = (torch.cat((table, table), -1)[:, None] for table in (angles.cos(), angles.sin()))


def rotated(x):
    a, b = x.chunk(2, dim=-1)
    return x * cos2 + torch.cat((-b, a), dim=-1) * sin2


def usual():
    return rotated(x)


def in_double():
    return rotated(x.double()).float()  # "to be on the safe side"


assert torch.allclose(usual(), in_double(), atol=1e-6)  # only time correct code

samples = measure({"usual": usual, "usual again": usual, "in double": in_double}, rounds=41)
for name, values in samples.items():
    quarters = statistics.quantiles(values, n=4)
    print(f"{name:13} median {quarters[1]:7.0f} µs, half of all samples in {quarters[0]:.0f} to {quarters[2]:.0f}")

# 3. First the noise floor, then the difference.
same, low, high = compare(samples, "usual again", "usual")
noise = max(abs(low - 1), abs(high - 1))
print(
    f"the same code twice: ratio {same:.3f}, between {low:.3f} and {high:.3f}: nothing below {noise:.1%} can be told here"
)

ratio, low, high = compare(samples, "in double", "usual")
verdict = "slower" if low > 1 + noise else "faster" if high < 1 - noise else "same or cannot tell"
print(f"in double against usual: ratio {ratio:.2f}, between {low:.2f} and {high:.2f}: {verdict}")
assert high > 1  # it cannot be faster: it moves twice the bytes
