"""Python: the source of a function and of what it calls, and its bytecode."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

from .stage import Stage, foreign, short, tidy


def functions(function: Callable[..., Any]) -> list[FunctionType]:
    """The Python functions that `function` consists of, itself first: those it refers to, except library functions."""
    found: list[FunctionType] = []
    waiting: list[Any] = [function]
    while waiting:
        candidate = inspect.unwrap(waiting.pop(0)) if callable(waiting[0]) else waiting.pop(0)
        forward = getattr(candidate, "forward", None)
        candidate = forward if not inspect.isroutine(candidate) and inspect.ismethod(forward) else candidate
        candidate = getattr(candidate, "__func__", candidate)
        if not isinstance(candidate, FunctionType) or candidate in found:
            continue
        if found and foreign(short(candidate.__code__.co_filename)):
            continue
        found.append(candidate)
        waiting += _named(candidate)
    return found


def _named(function: FunctionType) -> Iterator[Any]:
    """What a function can call: globals, attributes of modules it names, and closure variables."""
    names = function.__code__.co_names
    for name in names:
        value = function.__globals__.get(name)
        yield value
        if inspect.ismodule(value):
            yield from (getattr(value, other, None) for other in names)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty: its variable has no value yet, or lost it
            if cell.cell_contents is not function:
                yield cell.cell_contents


def stages(function: Callable[..., Any]) -> list[Stage]:
    """`source` and `bytecode`."""
    parts = functions(function)
    return [found for found in (source(parts), bytecode([(f.__name__, f.__code__) for f in parts])) if found.text]


def source(parts: list[FunctionType]) -> Stage:
    """The source text of the functions."""
    kept: list[str] = []
    lines: dict[int, str] = {}
    for function in parts:
        try:
            text, first = inspect.getsourcelines(function)
        except (OSError, TypeError):  # generated, without a file
            continue
        path = short(function.__code__.co_filename)
        if kept:
            kept.append("")
        for number, line in enumerate(text, start=first):
            kept.append(line.rstrip("\n"))
            lines[len(kept)] = f"{path}:{number}"
    return Stage(stage="source", language="python", text="".join(f"{line}\n" for line in kept), lines=lines)


def bytecode(parts: list[tuple[str, CodeType]], stage: str = "bytecode") -> Stage:
    """The instructions of code objects, each under its name: source line where one begins, offset, instruction."""
    kept: list[str] = []
    lines: dict[int, str] = {}
    instructions = 0
    for name, code in parts:
        path = short(code.co_filename)
        kept += [""] * bool(kept) + [f"{name}:"]
        starts = {offset: line for offset, line in dis.findlinestarts(code) if line}
        here = None
        for instruction in dis.get_instructions(code):
            begins = starts.get(instruction.offset)
            here = begins or here
            mark = ">>" if instruction.is_jump_target else "  "
            text = f"{begins or '':>6} {mark} {instruction.offset:>4} {instruction.opname:<24} {instruction.argrepr}"
            kept.append(tidy(text.rstrip()))
            instructions += 1
            if here is not None:
                lines[len(kept)] = f"{path}:{here}"
    text = "".join(f"{line}\n" for line in kept)
    return Stage(stage=stage, language="bytecode", text=text, lines=lines, counts={"instructions": instructions})
