"""Providers that each misbehave in one way; imported by worker processes through PYTHONPATH."""

import os
import signal
import time

import torch

import fusewise
from fusewise.lab import Missing, Provider, Run, Unsupported


class Right(Provider):
    """Correct and quick: a typical third-party provider."""

    name = "right"
    packages = ("torch",)

    def build(self, problem):
        return Run(lambda *xs: fusewise.rope(*xs, **problem.inputs.kwargs, impl="reference"))


class Namesake(Right):
    """Has the same name as another provider."""

    name = "eager"


class Wrong(Right):
    name = "wrong"

    def build(self, problem):
        right = super().build(problem)
        return Run(lambda *xs: right.call(*xs) * 1.001)


class Unwritten(Right):
    """Leaves half of its output uninitialised."""

    name = "unwritten"

    def build(self, problem):
        def call(q):
            out = torch.full_like(q, float("nan"))
            out[: q.shape[0] // 2] = q[: q.shape[0] // 2]
            return out

        return Run(call)


class Shapeless(Right):
    name = "shapeless"

    def build(self, problem):
        return Run(lambda q: q[..., :1])


class Mutating(Right):
    """Correct, but overwrites its input without declaring it."""

    name = "mutating"

    def build(self, problem):
        right = super().build(problem)

        def call(q):
            out = right.call(q)
            q.zero_()
            return out

        return Run(call)


class Versioned(Right):
    """Reports its version as a number."""

    name = "versioned"

    def versions(self):
        return {"a": 3}


class Speechless(Right):
    """Cannot run the problem and gives no reason."""

    name = "speechless"

    def build(self, problem):
        raise Unsupported


class Raising(Right):
    name = "raising"

    def build(self, problem):
        raise RuntimeError("no kernel <for> | this\nsecond line")


class Crammed(Right):
    """Always runs out of memory."""

    name = "crammed"

    def build(self, problem):
        raise torch.OutOfMemoryError("no room for 2 GiB")


class Crowded(Right):
    """Runs out of memory while others prepare."""

    name = "crowded"
    asked = 0

    def build(self, problem):
        self.asked += 1
        if self.asked == 1:
            raise torch.OutOfMemoryError("no room for 2 GiB")
        return super().build(problem)


class Picky(Right):
    name = "picky"

    def build(self, problem):
        raise Unsupported("runs on Sundays only")


class Absent(Right):
    name, module, install = "absent", "no_such_module_anywhere", "pip install no-such-module"


class AbsentOnImport(Right):
    name = "absent-on-import"

    def check(self, device):
        if os.environ.get("TORCHINDUCTOR_CACHE_DIR"):  # set in workers only: the coordinator cannot tell
            raise Missing("its shared library does not load")


class BrokenCheck(Right):
    name = "broken-check"

    def check(self, device):
        raise RuntimeError("cannot even look")


class BrokenVersions(Right):
    name = "broken-versions"

    def versions(self):
        raise RuntimeError("knows no version")


class BrokenChoice(Right):
    name = "broken-choice"

    def chosen(self, op, device):
        raise RuntimeError("cannot choose")


class Segfault(Right):
    name = "segfault"

    def build(self, problem):
        os.kill(os.getpid(), signal.SIGSEGV)


class SegfaultLater(Right):
    """Correct on small problems; crashes on large ones."""

    name = "segfault-later"

    def build(self, problem):
        if problem.case.head_dim > 8:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().build(problem)


class DiesInRounds(Right):
    """Passes the check; dies in the first timed round."""

    name = "dies-in-rounds"

    def build(self, problem):
        right, calls = super().build(problem), 0

        def call(*xs):
            nonlocal calls
            calls += 1
            if calls > 25:
                os._exit(7)
            return right.call(*xs)

        return Run(call)


class Hang(Right):
    name = "hang"

    def build(self, problem):
        time.sleep(3600)


class SlowLater(Right):
    """Quick on small problems; sleeps on large ones."""

    name = "slow-later"

    def build(self, problem):
        if problem.case.head_dim > 8:
            time.sleep(3600)
        return super().build(problem)


class SlowIfAsked(SlowLater):
    """SlowLater if an environment variable says so, else Right."""

    name = "slow-if-asked"

    def build(self, problem):
        return super().build(problem) if os.environ.get("FAKES_ARE_SLOW") else Right.build(self, problem)


class SlowToShow(Right):
    """Runs quickly; producing its code takes an hour."""

    name = "slow-to-show"

    def stages(self, *_, **__):
        time.sleep(3600)


class Hungry(Right):
    """Grows to 3 GiB of resident memory, then waits."""

    name = "hungry"

    def build(self, problem):
        self.eaten = torch.ones(3 * 2**30, dtype=torch.uint8)
        time.sleep(3600)


class Mapped(Right):
    """Prints what memory its process has mapped, and its environment."""

    name = "mapped"

    def build(self, problem):
        with open("/proc/self/maps") as maps:
            print(maps.read(), dict(os.environ))
        return super().build(problem)


class Babbling(Right):
    """Prints, and writes garbage into every open pipe."""

    name = "babbling"

    def build(self, problem):
        print("hello from a chatty library")
        for descriptor in range(3, 32):
            try:
                os.write(descriptor, b'garbage\n[1, 2]\n{"id": 99}\n')
            except OSError:
                continue
        return super().build(problem)


not_a_provider = object()
