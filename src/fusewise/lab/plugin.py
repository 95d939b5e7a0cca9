"""The provider interface, and discovery by name, entry point or `module:attribute`.

A provider is one way of running an operation. Third parties subclass `Provider` and register it in their package
metadata:

    [project.entry-points."fusewise.providers"]
    mine = "my_package.lab:MyRope"

Nothing here imports a provider's libraries; only its own worker process does.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fusewise.ops._common import dtype_name

from .analysis import TWIN
from .code.stage import Stage
from .ledger import Kernel
from .names import nearest
from .problem import Problem, as_tuple, same
from .reason import reason

ENTRY_POINTS = "fusewise.providers"
#: Length limit of a provider's name in characters.
LONGEST_NAME = 200

#: Built-in providers, in display order.
BUILT_IN = (
    "fusewise.lab.providers.floors:Copy",
    "fusewise.lab.providers.floors:MatMul",
    "fusewise.lab.providers.floors:Launch",
    "fusewise.lab.providers.floors:TritonLaunch",
    "fusewise.lab.providers.pytorch:Eager",
    "fusewise.lab.providers.pytorch:FusedGelu",
    "fusewise.lab.providers.pytorch:TorchScript",
    "fusewise.lab.providers.pytorch:TorchCompile",
    "fusewise.lab.providers.pytorch:TorchCompileTuned",
    "fusewise.lab.providers.pytorch:TorchCompileGraphs",
    "fusewise.lab.providers.thunder:Thunder",
    "fusewise.lab.providers.thunder:ThunderTorchCompile",
    "fusewise.lab.providers.thunder:ThunderNvFuser",
    "fusewise.lab.providers.xla:Jax",
    "fusewise.lab.providers.relax:Tvm",
    "fusewise.lab.providers.ours:Reference",
    "fusewise.lab.providers.ours:Cpu",
    "fusewise.lab.providers.ours:CpuInPlace",
    "fusewise.lab.providers.ours:Triton",
    "fusewise.lab.providers.ours:TritonInPlace",
    "fusewise.lab.providers.ours:TritonGathered",
    "fusewise.lab.providers.ours:Cuda",
    "fusewise.lab.providers.ours:CudaInPlace",
    "fusewise.lab.providers.ours:GatedReference",
    "fusewise.lab.providers.ours:GatedCpu",
    "fusewise.lab.providers.ours:GatedCpuRecompute",
    "fusewise.lab.providers.ours:GatedTriton",
    "fusewise.lab.providers.ours:GatedTritonRecompute",
    "fusewise.lab.providers.ours:GatedCuda",
    "fusewise.lab.providers.ours:GatedCudaRecompute",
    "fusewise.lab.providers.ours:GatedCudaTraining",
    "fusewise.lab.providers.ours:GatedGluon",
    "fusewise.lab.providers.ours:GatedGluonRecompute",
    "fusewise.lab.providers.fused_rope:NormReference",
    "fusewise.lab.providers.fused_rope:NormTriton",
    "fusewise.lab.providers.fused_rope:NormCuda",
    "fusewise.lab.providers.fused_rope:CacheReference",
    "fusewise.lab.providers.fused_rope:CacheTriton",
    "fusewise.lab.providers.fused_rope:CacheCuda",
    "fusewise.lab.providers.rope_peers:TransformerEngineUnfused",
    "fusewise.lab.providers.rope_peers:TransformerEngineFused",
    "fusewise.lab.providers.rope_peers:Liger",
    "fusewise.lab.providers.rope_peers:FlashAttn",
    "fusewise.lab.providers.rope_peers:Vllm",
    "fusewise.lab.providers.rope_peers:FlashInfer",
    "fusewise.lab.providers.rope_peers:Quack",
    "fusewise.lab.providers.rope_peers:Unsloth",
    "fusewise.lab.providers.fused_rope:NormVllm",
    "fusewise.lab.providers.fused_rope:CacheVllm",
    "fusewise.lab.providers.gated_peers:Liger",
    "fusewise.lab.providers.gated_peers:QuackInterleaved",
    "fusewise.lab.providers.gated_peers:QuackStacked",
    "fusewise.lab.providers.gated_peers:QuackMlp",
    "fusewise.lab.providers.gated_peers:QuackMlpRecompute",
    "fusewise.lab.providers.gated_peers:Unsloth",
    "fusewise.lab.providers.gated_peers:TransformerEngine",
)


class Missing(Exception):
    """The provider cannot run on this machine; the message says what to install or which device it needs."""


class Unsupported(Exception):
    """The provider cannot run this problem; the message says why."""


@dataclass(frozen=True)
class Vjp:
    """A backward outside torch's autograd. Arguments are those of `Run.call`.

    forward: arguments -> (result of call, state kept for backward). backward: (kept state, entered upstream gradients)
    -> gradients; timed. both: (arguments, entered upstream gradients) -> (result of call, gradients), in one; timed.
    enter: upstream gradients of the outputs -> the provider's own form. leave: gradients -> torch tensors, in the order
    of the problem's floating tensors.
    """

    forward: Callable[[tuple[Any, ...]], tuple[Any, Any]]
    backward: Callable[[Any, Any], Any]
    both: Callable[[tuple[Any, ...], Any], tuple[Any, Any]]
    enter: Callable[[tuple[Tensor, ...]], Any]
    leave: Callable[[Any], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Run:
    """One problem made callable: `call(*enter(*own(*problem.tensors)))`. Only `call` is timed; with a backward also
    `enter` and `leave`, if gradients flow through them.

    own: the problem's tensors -> the leaves that a user of the provider would keep (e.g. weights in its layout); same
        number and order.
    enter: those -> the arguments of call (views and tables).
    leave: result of call -> the outputs in the problem's form, for the check against float64.
    restore: gradients of what own returned -> gradients of the problem's tensors.
    vjp: a custom backward, for what torch's autograd does not see.
    in_place: call overwrites its arguments.
    backward: the outputs are differentiable with respect to the problem's tensors.
    checked: compare the outputs with the truth (False for floors, which compute nothing).
    form: the memory model that applies, for problems that have one; for gated units a `Form` of
        `fusewise.ops.gated_linear.cases`.
    torch_memory: torch allocates every tensor, so that its allocator knows the memory used.
    arithmetic: what is known of its rounding, or of its gradients; reported with an error that is too large.
    foreign: on a GPU, it uses streams unknown to torch, and every call waits for its results.
    """

    call: Callable[..., Any]
    enter: Callable[..., tuple[Any, ...]] = same
    leave: Callable[[Any], tuple[Tensor, ...]] = as_tuple
    in_place: bool = False
    backward: bool = True
    checked: bool = True
    own: Callable[..., tuple[Tensor, ...]] = same
    restore: Callable[..., tuple[Tensor, ...]] = same
    vjp: Vjp | None = None
    form: str = ""
    torch_memory: bool = True
    arithmetic: str = ""
    foreign: bool = False


class Provider:
    """One way of running operations. Subclasses set the fields and implement `build`."""

    name: ClassVar[str]
    module: ClassVar[str] = ""  # import name that must be found for the provider to be available
    packages: ClassVar[tuple[str, ...]] = ()  # distributions whose versions the rows record
    install: ClassVar[str] = ""  # command or sentence that says how to install it
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    ops: ClassVar[tuple[str, ...]] = ()  # targets it supports; () for any
    default: ClassVar[bool] = True  # measured if no providers are named; see `chosen`
    remembers: ClassVar[bool] = True  # may keep compiled code on disk, where a later process's first call finds it

    def check(self, device: str) -> None:
        """Raise Missing if the provider cannot run on `device` here. Imports nothing heavy."""
        kind = device.split(":")[0]
        if kind not in self.devices:
            raise Missing(f"runs on {' and '.join(self.devices)} only, not on {kind}")
        if self.module and not installed(self.module):
            raise Missing(f"{self.module} is not installed; {self.install}")

    def chosen(self, op: str, device: str) -> bool:
        """Whether it is measured for a target on a device if no providers are named."""
        return self.default and (not self.ops or op in self.ops)

    def build(self, problem: Problem) -> Run:
        """Make `problem` callable, or raise Unsupported (this problem) or Missing (this machine)."""
        raise NotImplementedError

    def stages(self, problem: Problem, target: str) -> Sequence[Stage]:
        """Every text its compiler generates from `problem` for `target` (cpu, sm_90, …), in pipeline order; see
        `code/`."""
        raise Unsupported("does not show its code")

    def traffic(self, problem: Problem, target: str) -> Sequence[Kernel]:
        """The kernels of one pass over `problem` on its device, with the bytes each reads and writes; see `ledger.py`.
        If the code cannot run there, as it would run on `target`."""
        raise Unsupported("does not report its memory traffic")

    def versions(self) -> dict[str, str]:
        """Versions of the provider's installed distributions."""
        found = {}
        for package in self.packages:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return found


P = TypeVar("P", bound=Problem)


def supported(provider: Provider, problem: Problem, kind: type[P]) -> P:
    """The problem, if it is of this kind and one of the provider's targets; else raises Unsupported."""
    if not isinstance(problem, kind) or problem.op not in provider.ops:
        raise Unsupported(f"{provider.name} runs {' and '.join(provider.ops)} only, not {problem.op}")
    return problem


def check_dtype(dtype: torch.dtype, taken: Sequence[torch.dtype]) -> None:
    """Raise Unsupported unless the dtype is one of those that a provider takes."""
    if dtype not in taken:
        raise Unsupported(f"takes {', '.join(map(dtype_name, taken))} only")


def versions(provider: Provider) -> dict[str, str]:
    """The provider's versions as strings; third-party code may return anything."""
    return {str(package): str(version) for package, version in provider.versions().items()}


def installed(module: str) -> bool:
    """Whether the module can be found, without importing it (its parents are imported)."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def require(module: str, install: str) -> Any:
    """Import `module` in a worker; any failure becomes Missing with the exception's text."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken binary package may raise anything at import
        there = installed(module.partition(".")[0])
        fix = "the version that is installed does not work here, try another" if there else install
        raise Missing(f"import {module} failed: {reason(error)}; {fix}") from error


def load(where: str) -> Provider:
    """The provider at `module:attribute` (a Provider subclass or instance)."""
    module, _, attribute = where.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    provider = found() if isinstance(found, type) else found
    if not isinstance(provider, Provider):
        raise TypeError(f"provider: {where} must be a fusewise.lab.Provider, got {type(provider).__name__}")
    name = provider.name
    plain = isinstance(name, str) and name.isprintable() and not {",", ":"} & {*name} and not name.endswith(TWIN)
    if not (plain and 0 < len(name) <= LONGEST_NAME):
        raise ValueError(
            f"provider: name must be 1 to {LONGEST_NAME} printable characters without comma and colon that do not end in "
            f"{TWIN}, got {name!r:.60} of {where}; rename it"
        )
    return provider


@dataclass(frozen=True)
class Entry:
    """A provider known to this installation: where it is, and the object or why it could not be loaded."""

    name: str
    where: str
    provider: Provider | None
    problem: str = ""


def known(extra: Iterable[str] = ()) -> list[Entry]:
    """Every provider: built-in, from installed packages, and `extra` ones given as `module:attribute`."""
    places = dict.fromkeys(BUILT_IN, "")
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        places.setdefault(point.value, point.name)
    for where in extra:
        places.setdefault(where, "")
    entries = []
    for where, name in places.items():
        try:
            provider = load(where)
            entries.append(Entry(provider.name, where, provider))
        except (Exception, SystemExit) as error:  # third-party code may raise anything; it becomes the reason of a row
            entries.append(Entry(name or where, where, None, reason(error)))
    return entries


def select(names: Iterable[str] | None, op: str, device: str) -> list[Entry]:
    """The entries for `names` (a name, or `module:attribute`); for None those measured by default for `op`.

    A library with kernels for several operations has several providers of the same name; the one for `op` is selected.
    """
    if names is None:
        return _apart(_measured_by_default(op, device))
    if isinstance(names, str):
        raise ValueError(f"study: providers must be a list of names, got the text {names!r}; write [{names!r}]")
    wanted = list(names) if isinstance(names, Iterable) else [names]
    if odd := [name for name in wanted if not isinstance(name, str)]:
        raise TypeError(f"study: providers must be a list of names, got {odd[0]!r}; write ['eager', 'torch.compile']")
    if not wanted:
        raise ValueError("study: providers must be one name at least, got none; leave it out for all that are here")
    entries = known(n for n in wanted if ":" in n)
    chosen: list[Entry] = []
    for name in wanted:
        named = [e for e in entries if name in (e.name, e.where)]
        if not named:
            fix = nearest(name, [e.name for e in entries if _runs(e, op)], "choose one")
            raise ValueError(f"study: providers must be among those of `fusewise providers`, got {name!r}; {fix}")
        one = next((e for e in named if _runs(e, op)), named[0])
        if one in chosen:
            continue
        if other := next((e for e in chosen if e.name == one.name), None):
            raise ValueError(
                f"study: providers must have names of their own, got {one.name!r} at {other.where} and {one.where}; "
                "leave one out"
            )
        chosen.append(one)
    return chosen


def _runs(entry: Entry, op: str) -> bool:
    """Whether the provider says that it runs the target, as far as it could be loaded."""
    return entry.provider is None or not entry.provider.ops or op in entry.provider.ops


def _measured_by_default(op: str, device: str) -> Iterator[Entry]:
    """The entries that opt in for this target and device, and those that could not be loaded."""
    for entry in known():
        try:
            if entry.provider is None or entry.provider.chosen(op, device):
                yield entry
        except Exception as error:  # as in `known`
            yield replace(entry, provider=None, problem=reason(error))


def _apart(entries: Iterable[Entry]) -> list[Entry]:
    """The entries with unique names. A duplicate gets its location as name, and an error: rows, samples and logs are
    keyed by name."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if other := found.get(entry.name):
            problem = f"its name must be its own, got {entry.name!r}, which {other.where} has; rename it"
            entry = replace(entry, name=entry.where, provider=None, problem=problem)
        found[entry.name] = entry
    return list(found.values())
