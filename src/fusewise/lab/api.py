"""Studies from Python: `fusewise.study(function, *arguments)` and its result, which a notebook shows as a table."""

from __future__ import annotations

import ast
import dis
import html
import inspect
import math
import os
import sys
import textwrap
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from . import commands, plan
from .names import nearest
from .nursery import WORKER
from .record import Record, Row
from .render import groups, idleness, number, percent, printable
from .targets import functions, inputs


class Result:
    """A finished study: the record, its rows, and the path of the report. A notebook shows it as a table."""

    def __init__(self, record: Record, report: Path) -> None:
        self.record = record
        self.report = report

    @property
    def rows(self) -> list[Row]:
        return self.record.rows

    def _lines(self) -> list[list[str]]:
        """One line per row, the fastest of each group first."""
        found = []
        for row in self._sorted():
            time = number(row.device_us) if row.device_us is not None else row.status
            error = "–" if row.error is None else f"{row.error:.2e}"
            share = percent(row.share_of_limit)
            found.append(
                [row.case, row.dtype, row.pass_, row.provider, time, share, error, row.verdict_vs_best_other or "–"]
            )
        return found

    def _sorted(self) -> list[Row]:
        by_time = [
            sorted(g, key=lambda r: (r.device_us is None, r.device_us or 0.0)) for g in groups(self.record).values()
        ]
        return [row for group in by_time for row in group]

    def _remarks(self) -> list[str]:
        """Why rows have no time, each reason once (as table cells they would make the table wider than any screen), and whether
        the machine was idle."""
        reasons = (f"{row.provider} {row.status}: {row.reason}" for row in self._sorted() if row.device_us is None)
        return [*dict.fromkeys(reasons), *idleness(self.record)]

    columns = ("case", "dtype", "pass", "provider", "time µs", "of limit", "error", "against the best other")

    def __repr__(self) -> str:
        table = [list(self.columns), *self._lines()]
        widths = [max(len(line[i]) for line in table) for i in range(len(self.columns))]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
        )
        return "\n".join(map(printable, [*lines, *self._remarks(), f"report: {self.report}"]))

    def _repr_html_(self) -> str:
        def text(value: str) -> str:
            return html.escape(printable(value))

        def cells(line: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{text(cell)}</{tag}>" for cell in line) + "</tr>"

        head, body = cells(self.columns, "th"), "".join(cells(line, "td") for line in self._lines())
        remarks = "".join(f"<p>{text(remark)}</p>" for remark in self._remarks())
        report = text(str(self.report))
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>{remarks}<p>report: <code>{report}</code></p>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self._repr_html_()}


def study(
    function: Callable[..., Any],
    *arguments: Any,
    providers: Sequence[str] | None = None,
    passes: str | None = None,
    out: str | Path | None = None,
    rounds: int | tuple[int, int] | None = None,
    time_limit: float | None = None,
    timeout: float = 300.0,
    warm: bool = False,
    seed: int = 0,
    code: bool = True,
    **unknown: Any,
) -> Result:
    """Run `function(*arguments)` through every available compiler: correctness, speed, and distance from hardware
    limits.

    Each provider runs in its own process, which imports the function by file or module and name and draws arguments
    like those given: same dtype, shape, strides and range, other values. A notebook function is written to a file
    beside the run directory together with the imports and constants that it needs.

    Args:
        function: a top-level function of a file or module, or a class of a module; takes one tensor or more.
        arguments: tensors, numbers, strings, bools, None. If tensors require gradients, the backward is measured too.
            The device of the first tensor is used.
        providers, passes, out, rounds, time_limit, timeout, warm, seed, code: as the options of `fusewise study`;
            `rounds` is a number or (MIN, MAX).

    Raises:
        TypeError, ValueError: the function cannot be imported or run by another process, the arguments cannot be
            recreated, or an option is invalid.
        OSError: the run directory cannot be written.
        RuntimeError: called while a study's own process imports the file; put the call under
            `if __name__ == "__main__":`.

    Example:
        >>> fusewise.study(my_function, torch.randn(4096, 4096), providers=["eager", "torch.compile"])
    """
    if os.environ.get(WORKER):
        raise RuntimeError(
            "study: must not be called while a study imports the file; put the call under `if __name__ == '__main__':`"
        )
    if not callable(function):
        raise TypeError(f"study: function must be one that can be called, got {function!r}; give the function itself")
    if unknown:
        _refuse(next(iter(unknown)), function)
    low_high = (rounds, rounds) if isinstance(rounds, int) else rounds
    two = isinstance(low_high, tuple | list) and [type(n) for n in low_high] == [int, int]
    if rounds is not None and not two:
        raise TypeError(f"study: rounds must be a number or (MIN, MAX), got {rounds!r}; try (5, 30)")
    if out is not None and (not isinstance(out, str | Path) or out == ""):
        raise TypeError(f"study: out must be the path of a folder, got {out!r}; give it a name, or leave it out")
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    differentiable = any(value.requires_grad for value in tensors)
    specs = [inputs.spec_of(value, fixed_unless_wanted=differentiable) for value in arguments]
    known = functions.parameters(function, len(specs)) if functions.tells(function) else {}
    names = [*known, *[""] * len(specs)]  # one too many is reported with the command line's message
    texts = [inputs.written(name, spec) for name, spec in zip(names, specs, strict=False)]
    if not tensors:
        raise ValueError(f"study: arguments must have a tensor among them, got {len(arguments)} without one; add one")
    name = getattr(function, "__name__", type(function).__name__)
    directory = Path(out) if out is not None else plan.new_directory(name)
    if (directory / "record.json").exists():
        raise ValueError(f"study: out must be a new folder, got {directory}, which has a run; choose another")
    request = plan.Request(
        target=place(function, directory),
        inputs=texts,
        providers=providers,
        passes=passes or (None if differentiable else "fwd"),
        device=str(tensors[0].device),
        rounds=low_high,
        time_limit=time_limit,
        timeout=timeout,
        warm=warm,
        seed=seed,
    )
    return Result(*commands.run(plan.options(request, directory), code=code))


def _refuse(option: str, function: Callable[..., Any]) -> NoReturn:
    """Raise a TypeError for an unknown option, which may be meant for the function."""
    options = [p.name for p in inspect.signature(study).parameters.values() if p.kind == inspect.Parameter.KEYWORD_ONLY]
    if option in functions.parameters(function, 0):
        fix = f"give the function its {option} by position"
    else:
        fix = nearest(option, options, "give a function's own arguments by position")
    raise TypeError(f"study: options must be among {', '.join(options)}, got {option!r}; {fix}")


def place(function: Callable[..., Any], directory: Path) -> str:
    """`FILE.py:NAME` or `MODULE:NAME`, by which another process imports the function."""
    if isinstance(function, nn.Module):
        raise TypeError(
            "study: function must be one that another process can import, got a module's instance; "
            "give its class, or the name of the instance on the command line: fusewise study FILE.py:NAME"
        )
    module = inspect.getmodule(function)
    file = getattr(module, "__file__", None)
    main = module is not None and module.__name__ == "__main__"
    notebook = main and (file is None or not Path(file).is_file())  # of a class the function alone would be written
    names = [getattr(function, kind, "") for kind in ("__name__" if notebook else "__qualname__", "__name__")]
    name = next((n for n in names if module is not None and _named(module, n) is function), None)
    if name is None or module is None:  # a lambda, a bound method, the result of a decorator or transform
        other = next((n for n in names if module is not None and n and _named(module, n) is not None), None)
        got = f"{names[0] or repr(function)}, which is not" if other is None else f"one made of the {other} there"
        raise ValueError(
            f"study: function must be defined at the top of a file or cell, got {got}; define a function there that calls it"
        )
    if not main:
        return f"{module.__name__}:{name}"
    if file is not None and not notebook:
        if Path(file).suffix != ".py":
            raise ValueError(f"study: function must be in a file NAME.py, got {Path(file).name!r}; rename it")
        return f"{Path(file).resolve()}:{name}"
    source = written(function)
    folder = directory.with_name(f"{directory.name}-source")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    return f"{path}:{name}"


def _named(module: types.ModuleType, name: str) -> Any:
    """Look up a dotted name in a module; None if there is nothing."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def written(function: Callable[..., Any]) -> str:
    """The text of a file with the function's source and everything it looks up by name: modules, importable functions,
    plain constants, and other functions of the same notebook.
    """
    lines: dict[str, str] = {}
    sources: list[str] = []
    begun: set[str] = set()
    lazy: set[str] = set()

    def add(of: Any, name: str) -> None:
        of = functions.uncompiled(of)
        try:
            source = textwrap.dedent(inspect.getsource(of))
            defined = ast.parse(source).body[0]
        except (OSError, TypeError, SyntaxError):
            raise ValueError(
                f"study: function must have source that can be read, got {of.__name__} without; save it to a file and import it"
            ) from None
        if not _is_whole(defined, of, name):
            raise ValueError(
                f"study: function must be as its definition says, and so must those it uses, got {name}, made from another; "
                "decorate that where it is defined and use it by its name, or save the function to a file"
            )
        if source in begun:
            return
        begun.add(source)
        inner = inspect.unwrap(of)
        if inner.__code__.co_freevars:
            raise ValueError(
                f"study: function must use modules, functions and constants only, got {', '.join(inner.__code__.co_freevars)} "
                f"of the function that made {of.__name__}; make it an argument, or save the function to a file"
            )
        if inner.__code__.co_flags & annotations.compiler_flag:
            lazy.add("from __future__ import annotations")
        known = inner.__globals__
        for name in _names(compile(source, "<notebook>", "exec", dont_inherit=True)):
            if name in known:
                need(name, known[name])
        sources.append(source)  # after what it uses, which a decorator or a default needs first

    def need(name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            lines[name] = f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
        elif isinstance(value, types.FunctionType) and value.__module__ == "__main__":
            add(value, name)
        elif (there := _importable(value, name)) is not None:
            lines[name] = f"from {value.__module__} import {there} as {name}"
        else:
            try:
                lines[name] = f"import torch\n{name} = {_constant(value)}"
            except TypeError:
                fix = (
                    "save both to a file"
                    if isinstance(value, type)
                    else "make it an argument, or save the function to a file"
                )
                raise ValueError(
                    f"study: function must use modules, functions and constants only, got {name} of type "
                    f"{type(value).__name__}; {fix}"
                ) from None

    add(function, getattr(function, "__name__", ""))
    return "\n".join([*lazy, *lines.values(), "", *sources])


def _is_whole(defined: ast.stmt, function: Any, name: str) -> bool:
    """Whether the statement, where the function's source is, makes all of it, under this name: functools.wraps lets a
    function that was wrapped later, or under another name, have the source of the one inside."""
    wrapped = 0
    while hasattr(function, "__wrapped__"):
        function, wrapped = function.__wrapped__, wrapped + 1
    if isinstance(defined, ast.FunctionDef | ast.AsyncFunctionDef):
        return defined.name == name and wrapped <= len(defined.decorator_list)
    names = [of.id for of in ast.walk(defined) if isinstance(of, ast.Name) and isinstance(of.ctx, ast.Store)]
    return name in names and not (wrapped and isinstance(getattr(defined, "value", None), ast.Lambda))


def _importable(value: Any, name: str) -> str | None:
    """The name of the value in its module: its own or, as where a decorator kept that of another, `name`."""
    module = sys.modules.get(str(getattr(value, "__module__", None)))
    names = [getattr(value, "__name__", ""), name] if module is not None and module.__name__ != "__main__" else []
    return next((n for n in names if str(n).isidentifier() and getattr(module, n, None) is value), None)


def _constant(value: Any) -> str:
    """An expression for the value. Subclasses (IntEnum, NumPy's float64) become the plain number or string. Raises
    TypeError if there is none.
    """
    if isinstance(value, float):
        return float.__repr__(value) if math.isfinite(value) else f"float('{float(value)}')"
    if isinstance(value, complex):
        return f"complex({_constant(value.real)}, {_constant(value.imag)})"
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)
    if isinstance(value, str):
        return str.__repr__(value)
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    if value is None or isinstance(value, bool | torch.dtype):
        return repr(value)
    if isinstance(value, tuple):  # not a list, which a function may mutate
        return f"({''.join(f'{_constant(item)}, ' for item in value)})"
    raise TypeError(f"no constant: {type(value).__name__}")


_LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")


def _names(code: types.CodeType) -> list[str]:
    """Names that the code and nested code look up as globals, not as attributes; in a function's source this includes
    decorators, defaults and annotations.
    """
    inner = [name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names(constant)]
    return [*(step.argval for step in dis.get_instructions(code) if step.opname in _LOADS), *inner]
