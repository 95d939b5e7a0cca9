"""A simulated machine: real studies whose workers are replaced by one with known times.

It drifts by ten percent within a few rounds, every sample has noise, and one in fifty takes three times as long.
"""

import math
import random

from fusewise.lab import plugin, seats, study
from fusewise.lab.options import Options
from fusewise.lab.problem import Task


class Machine:
    """Virtual time advances with every call; the machine's speed depends on it."""

    def __init__(self, times, spread, drift=0.1, seed=0):
        self.times, self.spread, self.drift = times, spread, drift
        self.random, self.now = random.Random(seed), 0.0

    def sample(self, provider):
        pace = 1 + self.drift * math.sin(self.now / 40_000) + self.drift * min(1.0, self.now / 1e7)
        stumble = 3.0 if self.random.random() < 0.02 else 1.0
        time = self.times[provider] * pace * stumble * math.exp(self.random.gauss(0, self.spread))
        self.now += 500 + time
        return time


class Fake(plugin.Provider):
    def __init__(self, name):
        self.name, self.remembers = name, name != "jax"


class Quiet:
    def __getattr__(self, _):
        return lambda *_: None


def studied(
    monkeypatch,
    out,
    times,
    groups=1,
    order=None,
    kind=Machine,
    asked=lambda _: None,
    told=lambda do, provider: None,
    proposed=lambda _: 5,
    looked=0,
    begun_again=0,
    limits=None,
    kept=None,
    **machine,
):
    """A study of the simulated machine. `order`: a fixed order of providers for every round. `asked`: called with every
    request, returns extra fields for its reply. `told`: likewise, with the provider's name, and also called when its
    process starts, is ready or stops. `proposed`: samples per turn that a provider asks for. `looked`: number of groups
    whose kernels are timed. `begun_again`: of those whose first calls are repeated; None: as by default. `limits`:
    further options. `kept`: limits of the machine, measured earlier.
    """
    device = kind(times, **machine)

    class Worker:
        def __init__(self, start, *_, **__):
            self.provider = start["provider"]
            told("start", self.provider)

        def ready(self):
            return {"ok": True, "versions": {}} | (told("ready", self.provider) or {})

        def ask(self, do, **fields):
            more = (asked(do) or {}) | (told(do, self.provider) or {})
            if not more.get("ok", True):
                return more
            if do == "warm":
                return {
                    "ok": True,
                    "status": "ok",
                    "estimate_us": times[self.provider],
                    "samples": proposed(self.provider),
                }
            if do != "round":
                return {"ok": True, "status": "ok", "shape": "q[4]", "bytes_min": 10**6, "flops_min": 10**5} | more
            return {
                "ok": True,
                "status": "ok",
                "device_us": [device.sample(self.provider) for _ in range(fields["samples"])],
                "host_us": None,
                "calls": fields["calls"],
            }

        def kill(self):
            pass

        def stop(self):
            told("stop", self.provider)

    monkeypatch.setattr(seats, "WorkerProcess", Worker)
    monkeypatch.setattr(study.limits, "kept", lambda _: kept)
    # All of it, validated, after every group, is most of the time of a hundred groups; other tests read what is saved.
    monkeypatch.setattr(study.record, "save", lambda *_: None)
    options = Options(
        op="rope",
        tasks=[Task("rope", f"cube-{i}", "fp32", "fwd", "cpu", 0) for i in range(groups)],
        providers=[plugin.Entry(name, name, Fake(name)) for name in times],
        device="cpu", out=out, seed=5, **{"min_rounds": 12, "max_rounds": 12, **(limits or {})},
    )  # fmt: skip
    made = study.Study(options, Quiet())
    made.looked = options.tasks[:looked]
    if begun_again is not None:
        made.begun_again = options.tasks[:begun_again]
    if order:
        made.random.sample = lambda seats, _: sorted(seats, key=lambda s: order.index(s.name))
    return made.run()
