"""What can be studied, by name: a target makes a `Problem` of a `Task` and knows its presets of cases.

A target is one file with a `Target` and a `Problem`; `rope.py` beside this is an example. Ours are in BUILT_IN, a
package adds its own by an entry point:

    [project.entry-points."fusewise.targets"]
    softmax = "my_package.lab:Softmax"

What has a colon in it is a function of the user's own (`user.py`). Providers need nothing but the problem: compilers take
`Problem.program()`, adapters of one operation's libraries the views that its problem offers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from ..names import nearest
from ..problem import Pass, Problem, Task
from ..reason import reason

ENTRY_POINTS = "fusewise.targets"

BUILT_IN = {
    "rope": "fusewise.lab.targets.rope:Rope",
    "geglu": "fusewise.lab.targets.geglu:Geglu",
    "gelu": "fusewise.lab.targets.gelu:Gelu",
    "qk_norm_rope": "fusewise.lab.targets.qk_norm_rope:QkNormRope",
    "rope_and_cache": "fusewise.lab.targets.rope_and_cache:RopeAndCache",
    "gated_mlp": "fusewise.lab.targets.gated_mlp:GatedMlp",
}


class Case(Protocol):
    """One named problem of a target, before there is a tensor."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> str: ...

    @property
    def dtypes(self) -> Sequence[str]: ...

    @property
    def passes(self) -> Sequence[Pass]: ...

    def bytes_min(self, direction: Pass, dtype: str, /) -> int: ...


class Target:
    """An operation that can be studied. Subclasses set the fields and write `presets` and `problem`."""

    name: str  # what `fusewise study NAME` says and what rows carry as `op`
    default_preset: ClassVar[str] = ""
    #: Options (`options.Options`) of presets that are to end within minutes.
    hurried: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    #: Cases of presets whose record has every provider's profile, too.
    profiled: ClassVar[Mapping[str, Sequence[str]]] = {}

    def presets(self) -> Mapping[str, Sequence[Case]]:
        """Named sets of cases, in the order in which they are listed."""
        raise NotImplementedError

    def problem(self, task: Task) -> Problem:
        """The tensors and the mathematics of a task; called in the provider's own process."""
        raise NotImplementedError

    def verify(self, tasks: Sequence[Task], timeout: float, memory_limit: int | None) -> Collection[Pass]:
        """Raise ValueError for what would fail in every provider's process; the passes that only a call shows not to be there.
        Called once, before anything is measured."""
        return ()

    def detail(self, case: Case) -> Mapping[str, Any]:
        """Plain JSON that `problem` needs beyond the case's name."""
        return {}

    def cases(self, preset: str) -> Sequence[Case]:
        """The cases of a preset, in the order of its table."""
        presets = self.presets()
        if preset not in presets:
            raise ValueError(
                f"study: preset must be one of {', '.join(presets)}, got {preset!r}; {nearest(preset, presets, 'choose one')}"
            )
        return presets[preset]

    def case(self, name: str) -> Case:
        """The case of that name, from whichever preset has it."""
        for cases in self.presets().values():
            for found in cases:
                if found.name == name:
                    return found
        every = [found.name for cases in self.presets().values() for found in cases]
        fix = nearest(name, every, f"`fusewise study {self.name} --list` has them")
        raise ValueError(f"study: name must be that of a case in a preset, got {name!r}; {fix}")


class Counted(Case, Protocol):
    """A case that knows its operations, too."""

    def flops_min(self, direction: Pass, /) -> int: ...


Of = TypeVar("Of", bound=Counted)


class CaseProblem(Problem, Generic[Of]):
    """A problem whose shape and least bytes and operations are those of its case."""

    case: Of

    def shape(self) -> str:
        return self.case.shape

    def bytes_min(self) -> int:
        return self.case.bytes_min(self.task.pass_, self.task.dtype)

    def flops_min(self) -> int:
        return self.case.flops_min(self.task.pass_)


def names() -> list[str]:
    """Every target's name, ours first."""
    return list(dict.fromkeys([*BUILT_IN, *(p.name for p in importlib.metadata.entry_points(group=ENTRY_POINTS))]))


def find(name: str) -> Target:
    """The target of that name. ValueError for one that is unknown or broken."""
    where = BUILT_IN.get(name)
    if where is None:
        where = next((p.value for p in importlib.metadata.entry_points(group=ENTRY_POINTS) if p.name == name), None)
    if where is None:
        other = f"try {name}:my_function" if name.endswith(".py") else "try rope or my_file.py:my_function"
        fix = nearest(name, names(), other)
        raise ValueError(f"study: target must be one of {', '.join(names())}, got {name!r}; {fix}")
    module, _, attribute = where.partition(":")
    try:
        target = getattr(importlib.import_module(module), attribute)()
        if not isinstance(target, Target):
            raise TypeError(f"no fusewise.lab.Target but {type(target).__name__}")
        target.presets()
    except Exception as error:  # someone else's package may raise anything
        raise ValueError(
            f"study: target {name} must be importable with its presets, got {reason(error)} at {where}; mend or uninstall "
            "its package"
        ) from error
    return target


def resolve(name: str, inputs: Sequence[str] = ()) -> tuple[Target, str | None]:
    """The target of a name, or of a preset's name together with that preset, or a user's function with its inputs."""
    if ":" in name:
        from .user import User

        return User(name, inputs), None
    if inputs:
        raise ValueError(f"study: inputs must be those of a function, got target {name!r}; try my_file.py:my_function")
    if name not in names():
        for known in names():
            with suppress(ValueError):  # a target that is broken is told to whoever asks for it
                if name in (target := find(known)).presets():
                    return target, name
    return find(name), None


def problem_for(task: Task) -> Problem:
    """The task's problem, made by its target."""
    if ":" in task.op:
        from .user import UserProblem

        return UserProblem(task)
    return find(task.op).problem(task)
