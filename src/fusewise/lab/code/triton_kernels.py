"""Triton kernels without a GPU: what a call would launch, compiled for any target, with every stage.

Inside `recorded` a launch runs through Triton's own specialisation and compilation for the target, and stops before
execution. So the code shown is exactly what a launch with these arguments would run.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .. import ledger
from . import disassembly, locations
from .stage import Stage, tidy

#: The stages that Triton's compilers keep, in order, with their languages. Gluon starts at ttgir.
STAGES = {"source": "mlir", "ttir": "mlir", "ttgir": "mlir", "llir": "llvm", "ptx": "ptx"}
#: Memory operations by their effect on the pointer or descriptor that is their first operand.
_READ = {
    "tt.load", "tt.descriptor_load", "tt.descriptor_gather",
    "ttg.async_copy_global_to_local", "ttng.async_tma_copy_global_to_local", "ttng.async_tma_gather",
}  # fmt: skip
_WRITTEN = {
    "tt.store", "tt.descriptor_store", "tt.descriptor_scatter",
    "ttng.async_tma_copy_local_to_global", "ttng.async_tma_store", "ttng.async_tma_scatter",
}  # fmt: skip
_BOTH = {"tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_reduce", "ttng.async_tma_reduce"}
#: KiB of shared memory that a thread block may have, by compute capability (CUDA programming guide, table of technical
#: specifications).
SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
_LOCATE = {"mlir": locations.mlir, "llvm": locations.llvm, "ptx": locations.ptx}


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's name in the binary, arguments by name, the grid, the compiled kernel."""

    name: str
    arguments: Mapping[str, Any]
    grid: tuple[int, ...]
    compiled: Any


def capability(target: str) -> int:
    """90 for "sm_90"."""
    match = re.fullmatch(r"sm_(\d{2,3})a?", target)
    if match is None:
        raise ValueError(f"code: target must be a GPU like sm_90, got {target!r}; try --target sm_90")
    return int(match[1])


def check(target: str) -> None:
    """ValueError unless `target` is a GPU that the tools on this machine know."""
    number, known = capability(target), disassembly.architectures()
    if known and number not in known:
        every = ", ".join(f"sm_{one}" for one in known)
        raise ValueError(f"code: target must be one of {every}, got {target!r}; choose one")


class _Absent:
    """Replaces Triton's driver for an absent GPU: reports its target and does nothing."""

    def __init__(self, target: Any) -> None:
        self.target = target

    @property
    def utils(self) -> Any:
        """Those of the GPU that is here, whose properties a launch may depend on."""
        from triton.runtime import driver

        return driver.default.utils

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, *_: object) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda


class _Inert:
    """Replaces a compiled kernel that a launcher caches: launching it does nothing."""

    def __getitem__(self, grid: object) -> _Inert:
        return self

    def __call__(self, *_: object, **__: object) -> None:
        return None


def gpu_target(target: str) -> Any:
    """`target` as a Triton GPUTarget."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", capability(target), 32)


@contextlib.contextmanager
def driver_for(target: str) -> Iterator[None]:
    """Make Triton believe that its device is `target`."""
    from triton.runtime import driver

    with mock.patch.object(driver, "_active", _Absent(gpu_target(target))):
        yield


@contextlib.contextmanager
def recorded(target: str, charge: Callable[[Launch], None] = lambda _: None) -> Iterator[list[Launch]]:
    """Compile every launch for `target` without running it; the list grows with each launch, which `charge` receives, too.
    Outputs stay unwritten."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    launch = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        # Bypass binaries already compiled for a device that is present.
        with mock.patch.object(self, "device_caches", defaultdict(self.create_binder)):
            compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        arguments = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        programs = grid(arguments) if callable(grid) else grid
        launches.append(Launch(compiled.metadata.name, arguments, tuple(programs), compiled))
        charge(launches[-1])
        return _Inert()

    with driver_for(target), mock.patch.object(JITFunction, "run", record), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")  # the user's setting
        yield launches


def stages(compiled: Any, part: str, target: str) -> list[Stage]:
    """Every text of a compiled kernel, from Triton IR to machine code."""
    found = []
    for name, language in STAGES.items():
        text = compiled.asm.get(name)
        if name == "source" or not isinstance(text, str):  # `source` is the IR before any pass and adds nothing to ttir
            continue
        text, lines = _LOCATE[language](text)
        counts = {"shared_bytes": int(compiled.metadata.shared)} if name == "ttgir" else {}
        counts |= {"num_warps": int(compiled.metadata.num_warps)} if name == "ttgir" else {}
        found.append(
            Stage(stage=name, language=language, text=tidy(text), part=part, target=target, lines=lines, counts=counts)
        )
    with contextlib.suppress(KeyError):
        cubin = compiled.asm["cubin"]
        code = disassembly.sass(cubin, part, target)
        # The cubin only knows statically sized shared memory; Triton requests its own at launch.
        shared = {"shared_bytes": max(int(compiled.metadata.shared), code.counts.get("shared_bytes", 0))}
        found.append(Stage(**{**vars(code), "counts": {**code.counts, **shared}}))
    return found


def accesses(text: str) -> dict[str, tuple[bool, bool]]:
    """For each pointer or descriptor argument of a kernel: whether the kernel reads it, and whether it writes it.

    `text` is TTIR, or TTGIR of a Gluon kernel. Pointers are tracked from the argument through arithmetic, broadcasts,
    selects, loop-carried variables, and captures of warp-specialised regions.
    """
    lines = [re.sub(r"\s*\bloc\((?:[^()]|\([^()]*\))*\)", "", line).strip() for line in text.splitlines()]
    signature = next((line for line in text.splitlines() if re.match(r"\s*tt\.func public @", line)), "")
    names = re.findall(r"%([\w.]+): !(?:tt\.ptr|tt\.tensordesc|ttng\.tensordesc)", signature)
    read: set[str] = set()
    written: set[str] = set()
    carried: dict[int, list[set[str]]] = {}  # line of a loop or branch → what its blocks yield, by position
    # Twice, so that a pointer yielded to the next iteration is known when the loop body is read.
    for _ in range(2):
        origins = {name: {name} for name in names}
        opened: list[tuple[int, list[str]]] = []
        captured: list[set[str]] = []
        for number, line in enumerate(lines):
            if not line or line.startswith(("tt.func", "#")):
                continue
            match = re.match(r"(?:(%[\w:#, %]+) = )?\"?([\w.]+)?(.*)$", line)
            results, name, rest = match.groups() if match else ("", "", "")
            targets = [t.partition(":")[0] for t in re.findall(r"%([\w.:]+)", results or "")]
            operands: list[set[str]] = [origins.get(operand, set()) for operand in re.findall(r"%([\w.]+)", rest)]
            first = operands[0] if operands else set()
            if name in _READ:
                read |= first
            elif name in _WRITTEN:
                written |= first
            elif name in _BOTH:
                read |= first
                written |= first
            if name == "ttg.warp_specialize":
                captured = operands
            elif re.match(r"partition\d+$", name or ""):  # block arguments correspond to the captures, in order
                inner = re.findall(r"%([\w.]+):", rest)
                origins.update(zip(inner, captured, strict=False))
            if name == "scf.yield" and opened:
                known = carried.setdefault(opened[-1][0], [])
                known += [set() for _ in range(len(operands) - len(known))]
                for so_far, more in zip(known, operands, strict=False):
                    so_far |= more
            for index, (variable, start) in enumerate(re.findall(r"%([\w.]+) = %([\w.]+)", rest)):
                earlier = carried.get(number, [])
                origins[variable] = origins.get(start, set()) | (earlier[index] if index < len(earlier) else set())
            for target in targets:
                origins[target] = set() if name in _READ else set().union(*operands)
            if line.startswith("}") and opened and not line.endswith("{"):
                begun, results_of = opened.pop()
                for target in results_of:
                    origins[target] = origins.get(target, set()).union(*carried.get(begun, []))
            elif line.endswith("{") and not line.startswith("}"):
                opened.append((number, targets))
    return {name: (name in read, name in written) for name in names}


def tensor_of(argument: Any) -> Tensor | None:
    """The tensor behind an argument: itself, or the base of a descriptor."""
    base = getattr(argument, "base", argument)
    return base if isinstance(base, Tensor) else None


def kernel(launch: Launch, used: Mapping[int, int] | None = None) -> ledger.Kernel:
    """A launch as a ledger entry. `used`: tensor address → most bytes of it that a call can need."""
    asm = launch.compiled.asm
    read = written = 0
    for name, (reads, writes) in accesses(asm.get("ttir") or asm["ttgir"]).items():
        argument = launch.arguments.get(name)
        tensor = None if argument is None else tensor_of(argument)
        if tensor is not None:
            size = min(ledger.extent(tensor), (used or {}).get(tensor.data_ptr(), 2**63))
            read += size * reads
            written += size * writes
    programs = " × ".join(str(n) for n in launch.grid if n != 1) or "1"
    return ledger.Kernel(name=launch.name, read=read, written=written, note=f"{programs} programs")
