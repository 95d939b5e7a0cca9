"""A user's function as a target: `path.py:function` or `package.module:function`, with inputs as text.

Worker processes receive the function's location (`functions.py`) and a description of its arguments (`inputs.py`),
never code or values: each imports the file or module itself and draws the same arguments (`user_problem.py`).
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..interruption import interruptible
from ..names import shortened
from ..problem import DTYPES, Pass, Problem, Task
from ..process import WorkerFailed, WorkerProcess
from . import Case, Target, functions, inputs
from .user_problem import NO_BACKWARD, VERIFY, UserProblem, replaceable_dtype

#: Counts as a float32 input, since its parts are float32.
COMPLEX = "c64"
#: Limit on a case's name in characters; the row's shape lists all inputs.
LONGEST_CASE = 1000


@dataclass(frozen=True)
class UserCase:
    """One set of arguments of one function."""

    name: str  # the inputs as text, shortened if long
    dtypes: tuple[str, ...]
    passes: tuple[Pass, ...]
    input_bytes: int

    @property
    def shape(self) -> str:
        return self.name

    def bytes_min(self, direction: Pass, dtype: str) -> int:
        """Bytes of the inputs; output sizes are only known to the problem, after a run."""
        return self.input_bytes


class User(Target):
    """The function at `place`, called with arguments described by `texts`."""

    multiplies = True  # perhaps

    def __init__(self, place: str, texts: Sequence[str] = ()) -> None:
        self.place, self.texts = functions.absolute(place), tuple(texts)
        path, _, attribute = self.place.rpartition(":")
        self.name = f"{Path(path).name}:{attribute}"

    def presets(self) -> Mapping[str, Sequence[Case]]:
        return {self.default_preset: [self.case()]}

    def cases(self, preset: str) -> Sequence[Case]:
        if preset != self.default_preset:
            raise ValueError(f"study: a function must be given without --preset, got {preset!r}; leave it out")
        return super().cases(preset)

    def case(self, name: str = "") -> Case:
        """The only case: the dtype of the first input with a study dtype, and a backward if an input can have a
        gradient."""
        specs = [inputs.parse(text) for text in self.texts]
        tensors = [spec for _, spec in specs if isinstance(spec, inputs.TensorSpec)]
        able = [spec for spec in tensors if spec.dtype in (*DTYPES, COMPLEX)]
        if not able:
            raise ValueError(
                f"study: {self.name} must have a tensor of {', '.join((*DTYPES, COMPLEX))} among its inputs, got "
                f"{list(self.texts)}; give one, such as x=fp32[1024,1024]"
            )
        passes: tuple[Pass, ...] = ("fwd", "bwd") if any(not spec.fixed for spec in able) else ("fwd",)
        text = shortened(" ".join(inputs.written(*spec) for spec in specs), LONGEST_CASE)
        if name not in ("", text):
            raise ValueError(f"study: a function must be given without --case, got {name!r}; say it with --input")
        return UserCase(text, (replaceable_dtype(specs) or "fp32",), passes, sum(spec.bytes for spec in tensors))

    def detail(self, case: Case) -> Mapping[str, Any]:
        file = Path(self.place.rpartition(":")[0])
        # Identifies the function, so that only the same one is resumed. A module's file is only known where it is
        # imported.
        source = hashlib.sha256(file.read_bytes()).hexdigest() if file.suffix == ".py" else None
        return {"place": self.place, "source": source, "inputs": list(self.texts), "path": [p for p in sys.path if p]}

    def problem(self, task: Task) -> Problem:
        return UserProblem(task)

    def verify(self, tasks: Sequence[Task], timeout: float, memory_limit: int | None) -> Collection[Pass]:
        """Import the function and run it in a process like a provider's. One task that can be made suffices: the others
        get rows with their reasons. Whether a backward exists is tested once."""
        start = {"provider": "fusewise.lab.providers.pytorch:Eager", "device": tasks[0].device, "flush_bytes": 0}
        worker: WorkerProcess | None = None
        reasons = []
        with interruptible(), tempfile.TemporaryDirectory(prefix="fusewise-check-") as folder:
            try:
                worker = WorkerProcess(start, Path(folder) / "log", timeout=timeout, memory_limit=memory_limit)
                worker.ready()
                for task in tasks:
                    reply = worker.ask("load", task=replace(task, detail={**task.detail, VERIFY: True}).to_json())
                    if not reply["ok"]:
                        reasons.append(reply["reason"])
                    elif task.pass_ != "fwd" or not (backward := [t for t in tasks if t.pass_ != "fwd"]):
                        return ()
                    else:
                        reply = worker.ask("load", task=backward[0].to_json())
                        return () if reply["ok"] or NO_BACKWARD not in reply["reason"] else {t.pass_ for t in backward}
            except WorkerFailed as error:
                fix = "take out what ends or overfills the process"
                if "the limit is" in str(error):
                    fix = "give it smaller inputs or a larger --memory-limit"
                if error.hung:
                    fix = "put what its file runs under `if __name__ == '__main__':`, or give it smaller inputs or a longer timeout"
                raise ValueError(
                    f"study: {self.name} must be importable and run on its inputs, got no answer: {error}; {fix}"
                ) from None
            finally:
                if worker is not None:
                    worker.stop()
        own = re.fullmatch(r"\w+: (study: .*)", reasons[0])
        raise ValueError(
            own[1]
            if own
            else f"study: {self.name} must be importable and run on its inputs, got {reasons[0]}; run it by hand"
        )
