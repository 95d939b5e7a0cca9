"""Targets: what can be studied, by name. A target turns a `Task` into a `Problem` and defines presets of cases.

A target is one module with a `Target` and a `Problem`; `rope.py` is an example. Ours are in BUILT_IN; a package adds
its own by an entry point:

    [project.entry-points."fusewise.targets"]
    softmax = "my_package.lab:Softmax"

A name with a colon is a user's function (`user.py`). Providers need only the problem: compilers take
`Problem.program()`, adapters of operation-specific libraries the views that its problem offers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from ..names import nearest
from ..problem import Pass, Problem, Task, reset_precision, set_precision
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
    """One named problem of a target, before any tensor exists."""

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
    """An operation that can be studied. Subclasses set the fields and implement `presets` and `problem`."""

    name: str  # the NAME of `fusewise study NAME`, and the `op` of rows
    default_preset: ClassVar[str] = ""
    #: Options (`options.Options`) of presets that should finish within minutes.
    hurried: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    #: Per preset, the cases whose record also gets every provider's profile.
    profiled: ClassVar[Mapping[str, Sequence[str]]] = {}
    #: Whether it multiplies matrices, so that float32 can be measured in tf32, too.
    multiplies: ClassVar[bool] = False

    def presets(self) -> Mapping[str, Sequence[Case]]:
        """Named sets of cases, in display order."""
        raise NotImplementedError

    def problem(self, task: Task) -> Problem:
        """The tensors and the mathematics of a task; called in the provider's own process."""
        raise NotImplementedError

    def verify(self, tasks: Sequence[Task], timeout: float, memory_limit: int | None) -> Collection[Pass]:
        """Raise ValueError for what would fail in every provider's process. Returns passes that turn out not to exist.
        Called once, before anything is measured."""
        return ()

    def detail(self, case: Case) -> Mapping[str, Any]:
        """Plain JSON that `problem` needs besides the case's name."""
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
        """The case of that name, from any preset."""
        for cases in self.presets().values():
            for found in cases:
                if found.name == name:
                    return found
        every = [found.name for cases in self.presets().values() for found in cases]
        fix = nearest(name, every, f"`fusewise study {self.name} --list` has them")
        raise ValueError(f"study: name must be that of a case in a preset, got {name!r}; {fix}")


class Counted(Case, Protocol):
    """A case that also knows its FLOPs."""

    def flops_min(self, direction: Pass, /) -> int: ...


Of = TypeVar("Of", bound=Counted)


class CaseProblem(Problem, Generic[Of]):
    """A problem whose shape and minimum bytes and FLOPs are those of its case."""

    case: Of

    def shape(self) -> str:
        return self.case.shape

    def bytes_min(self) -> int:
        return self.case.bytes_min(self.task.pass_, self.task.dtype)

    def flops_min(self) -> int:
        return self.case.flops_min(self.task.pass_)


def names() -> list[str]:
    """Names of all targets, built-in ones first."""
    return list(dict.fromkeys([*BUILT_IN, *(p.name for p in importlib.metadata.entry_points(group=ENTRY_POINTS))]))


def find(name: str) -> Target:
    """The target of that name. ValueError if it is unknown or broken."""
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
    except Exception as error:  # third-party code may raise anything
        raise ValueError(
            f"study: target {name} must be importable with its presets, got {reason(error)} at {where}; mend or uninstall "
            "its package"
        ) from error
    return target


def resolve(name: str, inputs: Sequence[str] = (), preset: str | None = None) -> tuple[Target, str | None]:
    """Resolve the name of a target (with `preset`), of a preset (then with that preset), or of a user's function with its
    inputs."""
    if ":" in name:
        from .user import User

        return User(name, inputs), preset
    if inputs:
        raise ValueError(f"study: inputs must be those of a function, got target {name!r}; try my_file.py:my_function")
    target = None if name in names() else _of_preset(name)
    if target is None:
        return find(name), preset
    if preset not in (None, name):
        raise ValueError(f"study: preset must be named once, got {name!r} as target and {preset!r}; leave one out")
    return target, name


def _of_preset(name: str) -> Target | None:
    """The target that has a preset of that name."""
    for known in names():
        with suppress(ValueError):  # a broken target is reported only to whoever asks for it
            if name in (target := find(known)).presets():
                return target
    return None


def problem_for(task: Task) -> Problem:
    """The task's problem, made by its target. Sets the precision of float32 matmuls that it is to be measured with, after
    all imports: what those set is the process's own."""
    reset_precision()
    if ":" in task.op:
        from .user_problem import UserProblem

        return UserProblem(task)
    target = find(task.op)
    set_precision(task.dtype)
    return target.problem(task)
