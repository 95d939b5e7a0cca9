"""Providers that return valid or invalid code stages; imported by worker processes through PYTHONPATH."""

import os
import signal

from fusewise.lab import Provider
from fusewise.lab.code import Stage
from fusewise.lab.ledger import Kernel


class Shown(Provider):
    name = "shown"

    def stages(self, problem, target):
        return [
            Stage(stage="text", language="python", text=f"{problem.task.case} for {target}\n", lines={1: "a.py:1"}),
            Stage(stage="text", language="cpp", part="a/b <c>", text="<script>alert(1)</script>\n", counts={"n": 1}),
        ]

    def traffic(self, problem, target):
        return [Kernel(name="k", read=problem.bytes_min(), written=0)]


class Segfault(Shown):
    name = "segfault"

    def stages(self, problem, target):
        os.kill(os.getpid(), signal.SIGSEGV)


class Raising(Shown):
    name = "raising"

    def stages(self, problem, target):
        raise RuntimeError("no code <for> you\nsecond line")


class Absent(Shown):
    name, module, install = "absent", "no_such_module_anywhere", "pip install no-such-module"
