"""What a provider is: one way of running an operation, found by name, by entry point or by `module:attribute`.

A third party adds one by subclassing `Provider` and naming it in its own package metadata:

    [project.entry-points."fusewise.providers"]
    mine = "my_package.lab:MyRope"

Nothing here imports a provider's libraries: that happens in the provider's own worker process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from .analysis import TWIN
from .code.stage import Stage
from .ledger import Kernel
from .names import nearest
from .problem import Problem, as_tuple, same
from .reason import reason

ENTRY_POINTS = "fusewise.providers"
#: Characters of a provider's name.
LONGEST_NAME = 200

#: Our own providers, in the order in which tables show them.
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
    "fusewise.lab.providers.ours:GatedGluon",
    "fusewise.lab.providers.ours:GatedGluonRecompute",
    "fusewise.lab.providers.fused_rope:NormReference",
    "fusewise.lab.providers.fused_rope:NormTriton",
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
    """The provider cannot run on this machine; the message says what to install or which device it wants."""


class Unsupported(Exception):
    """The provider cannot run this problem; the message says why."""


@dataclass(frozen=True)
class Vjp:
    """A backward outside of torch's autograd. Arguments are those of `Run.call`.

    forward: arguments -> (what call returns, what is kept for backward).
    backward: (what was kept, entered upstream gradients) -> gradients; timed.
    both: (arguments, entered upstream gradients) -> (what call returns, gradients), in one; timed.
    enter: upstream gradients of the outputs -> their own form.
    leave: gradients -> torch tensors, those of the problem's floating tensors in their order.
    """

    forward: Callable[[tuple[Any, ...]], tuple[Any, Any]]
    backward: Callable[[Any, Any], Any]
    both: Callable[[tuple[Any, ...], Any], tuple[Any, Any]]
    enter: Callable[[tuple[Tensor, ...]], Any]
    leave: Callable[[Any], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Run:
    """One problem made callable: `call(*enter(*own(*problem.tensors)))` is timed in `call` alone; with a backward, where
    gradients flow through them, in `enter` and `leave` too.

    own: the problem's tensors -> the tensors that a user of the provider would keep (weights in its order), of which
        gradients are taken; as many, in the same order.
    enter: those -> the arguments of call (views and tables).
    leave: what call returned -> the outputs in the problem's own form, for the check against float64.
    restore: gradients of what own returned -> gradients of the problem's tensors.
    vjp: a backward of its own, for what torch's autograd does not see.
    in_place: call overwrites its arguments.
    backward: the outputs are differentiable with respect to the problem's tensors.
    checked: the outputs are to be held against the truth (floors compute nothing and say False).
    form: how it is computed, for problems with a model of their memory: for gated units eager, two-kernels, fused,
        fused-recompute, chunked or chunked-recompute.
    torch_memory: every tensor it makes is torch's, so that torch knows how much memory it takes.
    arithmetic: what is known of how it rounds, told with an error that is too large.
    foreign: on a GPU it works on streams that torch does not know, and every call waits for its results.
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
    """One way of running operations. Subclasses set the fields and write `build`."""

    name: ClassVar[str]
    module: ClassVar[str] = ""  # import name that must be found for the provider to be here at all
    packages: ClassVar[tuple[str, ...]] = ()  # distributions whose versions its rows carry
    install: ClassVar[str] = ""  # the command or sentence that brings a missing one
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    ops: ClassVar[tuple[str, ...]] = ()  # targets that it is for; () for any
    default: ClassVar[bool] = True  # measured when no providers are named; see `chosen`

    def check(self, device: str) -> None:
        """Raise Missing when the provider cannot run on `device` here. Imports nothing heavy."""
        kind = device.split(":")[0]
        if kind not in self.devices:
            raise Missing(f"runs on {' and '.join(self.devices)} only, not on {kind}")
        if self.module and not installed(self.module):
            raise Missing(f"{self.module} is not installed; {self.install}")

    def chosen(self, op: str, device: str) -> bool:
        """Whether it is measured for a target on a device when no providers are named."""
        return self.default and (not self.ops or op in self.ops)

    def build(self, problem: Problem) -> Run:
        """Make `problem` callable, or raise Unsupported (this problem) or Missing (this machine)."""
        raise NotImplementedError

    def stages(self, problem: Problem, target: str) -> Sequence[Stage]:
        """Every text that its compiler makes of `problem` for `target` (cpu, sm_90, …), first to last; see `code/`."""
        raise Unsupported("does not show its code")

    def traffic(self, problem: Problem, target: str) -> Sequence[Kernel]:
        """The kernels of one pass over `problem` on its device, with the bytes that each reads and writes; see `ledger.py`.
        What cannot run there is told as it would run on `target`."""
        raise Unsupported("does not tell what it reads and writes")

    def versions(self) -> dict[str, str]:
        """Versions of the distributions the provider stands on, those that are installed."""
        found = {}
        for package in self.packages:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return found


def versions(provider: Provider) -> dict[str, str]:
    """What a provider, perhaps another package's, says of its versions, as the texts that a record has."""
    return {str(package): str(version) for package, version in provider.versions().items()}


def installed(module: str) -> bool:
    """Whether a module is there to be imported; it is not, but its parents are."""
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
    """Every provider: ours, those of installed packages, and `extra` ones given as `module:attribute`."""
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
        except Exception as error:  # someone else's package may raise anything; it becomes a row with this reason
            entries.append(Entry(name or where, where, None, reason(error)))
    return entries


def select(names: Iterable[str] | None, op: str, device: str) -> list[Entry]:
    """The entries for `names` (a name, or `module:attribute`), or for None all that are measured for `op` by default.

    A library with kernels for several operations has a provider of one name for each; the one for `op` is meant.
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
            fix = nearest(name, [e.name for e in entries], "choose one")
            raise ValueError(f"study: providers must be among those of `fusewise providers`, got {name!r}; {fix}")
        fitting = (e for e in named if e.provider is None or not e.provider.ops or op in e.provider.ops)
        one = next(fitting, named[0])
        if one in chosen:
            continue
        if other := next((e for e in chosen if e.name == one.name), None):
            raise ValueError(
                f"study: providers must have names of their own, got {one.name!r} at {other.where} and {one.where}; "
                "leave one out"
            )
        chosen.append(one)
    return chosen


def _measured_by_default(op: str, device: str) -> Iterator[Entry]:
    """Those that say so, and those that can say nothing."""
    for entry in known():
        try:
            if entry.provider is None or entry.provider.chosen(op, device):
                yield entry
        except Exception as error:  # as in `known`
            yield replace(entry, provider=None, problem=reason(error))


def _apart(entries: Iterable[Entry]) -> list[Entry]:
    """The entries, but for those that have the name of one before, which come to nothing under their place's: a name is
    what rows, samples and logs are kept under."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if other := found.get(entry.name):
            problem = f"its name must be its own, got {entry.name!r}, which {other.where} has; rename it"
            entry = replace(entry, name=entry.where, provider=None, problem=problem)
        found[entry.name] = entry
    return list(found.values())
