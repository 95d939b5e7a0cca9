"""XLA through JAX: the StableHLO input, the optimised HLO, and the traffic of the latter.

Inside `watched` every function compiled by `jax.jit` is recorded with the arguments of its first call, and lowered
again for its texts afterwards. JAX compiles for the platform it runs on.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from ..ledger import Kernel
from ..plugin import Run
from ..problem import Problem
from . import locations, passes
from .locations import Lines, Place
from .stage import Stage, tidy

#: Instructions that move no data: they name, group or reinterpret values.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[Any, tuple[Any, ...]]]]:
    """Calls of jitted functions, including nested ones: each function once, with its arguments."""
    import jax

    calls: list[tuple[Any, tuple[Any, ...]]] = []
    jit = jax.jit

    def watching(function: Any, **options: Any) -> Any:
        jitted = jit(function, **options)

        def call(*arguments: Any) -> Any:
            if all(jitted is not known for known, _ in calls):
                calls.append((jitted, arguments))
            return jitted(*arguments)

        return call

    with mock.patch.object(jax, "jit", watching):
        yield calls


def stages(problem: Problem, build: Callable[[Problem], Run]) -> list[Stage]:
    """`stablehlo` and `hlo` of every function that the pass compiles."""
    with watched() as calls:
        passes.once(problem, build(problem))
    found = []
    for number, (jitted, arguments) in enumerate(calls, start=1):
        part = str(number) if len(calls) > 1 else ""
        lowered = jitted.lower(*arguments)
        text, lines = locations.mlir(lowered.as_text(debug_info=True))
        found.append(Stage(stage="stablehlo", language="mlir", part=part, text=tidy(text), lines=lines))
        compiled = lowered.compile()
        text, lines = hlo(compiled.as_text())
        found.append(
            Stage(stage="hlo", language="hlo", part=part, text=tidy(text), lines=lines, target=problem.device.type,
                  counts=_costs(compiled))
        )  # fmt: skip
    return found


def traffic(problem: Problem, build: Callable[[Problem], Run]) -> list[Kernel]:
    """The instructions of the compiled functions that the timed part of the pass calls."""
    with watched() as calls:
        before, step = passes.steps(problem, build(problem))
        state = before()
        calls.clear()
        step(state)
    return [k for jitted, arguments in calls for k in instructions(jitted.lower(*arguments).compile().as_text())]


def _costs(compiled: Any) -> dict[str, int]:
    """XLA's own cost analysis: bytes accessed, FLOPs, and temporary memory."""
    costs, memory = compiled.cost_analysis(), compiled.memory_analysis()
    costs = costs[0] if isinstance(costs, list) else costs or {}
    found = {name.replace(" ", "_"): int(costs[name]) for name in ("bytes accessed", "flops") if name in costs}
    if memory is not None:
        found |= {"temporary_bytes": int(memory.temp_size_in_bytes)}
    return found


def hlo(text: str) -> tuple[str, Lines]:
    """HLO without its tables of files and frames, and the locations from them."""
    tables: dict[str, dict[str, str]] = {}
    kept: list[str] = []
    section = None
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            section = tables.setdefault(line, {})
        elif section is not None and (entry := re.match(r"(\d+) (.*)", line)):
            section[entry[1]] = entry[2]
        elif line.strip() or (kept and kept[-1].strip()):
            section = None if line.strip() else section
            kept.append(line)
    names, places = tables.get("FileNames", {}), tables.get("FileLocations", {})
    frames = tables.get("StackFrames", {})

    def number(entry: str, field: str) -> str:
        match = re.search(rf"\b{field}=(\d+)", entry)
        return match[1] if match else ""

    def chain(frame: str) -> list[Place]:
        found: list[Place] = []
        while frame in frames and len(found) < 50:
            place = places.get(number(frames[frame], "file_location_id"), "")
            found.append((names.get(number(place, "file_name_id"), "?").strip('"'), int(number(place, "line") or 0)))
            above = number(frames[frame], "parent_frame_id")
            frame = "" if above == frame else above
        return found

    found: list[tuple[int, list[Place]]] = []
    for count, line in enumerate(kept, start=1):
        if at := re.search(r"stack_frame_id=(\d+)", line):
            found.append((count, chain(at[1])))
        elif at := re.search(r'source_file="([^"]+)" source_line=(\d+)', line):
            found.append((count, [(at[1], int(at[2]))]))
    return "\n".join(kept).strip() + "\n", locations.collected(found)


def instructions(text: str) -> list[Kernel]:
    """The data-moving instructions of the entry computation: operands read once, results written once."""
    entry = text[text.rindex("\nENTRY ") :] if "\nENTRY " in text else text
    sizes: dict[str, int] = {}
    kernels = []
    for line in entry.splitlines():
        match = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)", line)
        if match is None:
            continue
        name, shape, opcode, operands = match.groups()
        sizes[name] = size(shape)
        if opcode in FREE:
            continue
        inputs = dict.fromkeys(operand.split("%")[-1].strip() for operand in operands.split(","))
        origin = re.search(r'op_name="([^"]*)"', line)
        kernels.append(
            Kernel(
                name=re.sub(r"\.\d+$", "", name),
                read=sum(sizes.get(operand, 0) for operand in inputs),
                written=sizes[name],
                note=f"{opcode}: {origin[1]}" if origin else opcode,
            )
        )
    return kernels


def size(shape: str) -> int:
    """Bytes of an HLO shape: `f32[64,48]{1,0}`, or a tuple of such."""
    total = 0
    for kind, dimensions in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", shape):
        digits = re.search(r"\d+", kind)
        bits = _BITS.get(kind, int(digits[0]) if digits else 32)
        count = 1
        for dimension in filter(None, dimensions.split(",")):
            count *= int(dimension)
        total += -(-count * bits // 8)
    return total
