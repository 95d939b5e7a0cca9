"""Finds and imports a user's function by its location, `path.py:function` or `package.module:function`, and binds
inputs to its parameters. A module class is instantiated without arguments, under a fixed seed."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..names import nearest
from . import inputs

#: Packages whose modules are not executed twice.
NEVER_ANEW = ("torch", "fusewise")


def absolute(place: str) -> str:
    """`place` with the file's absolute path, which is valid in every process; a module's name is unchanged."""
    path, _, attribute = place.rpartition(":")
    if not attribute or not path:
        raise ValueError(
            f"study: target must be FILE.py:NAME or MODULE:NAME, got {place!r}; try my_file.py:my_function"
        )
    if not path.endswith(".py"):
        return place
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"study: target must be in a file that exists, got {path!r}; check the path")
    return f"{file}:{attribute}"


def load(place: str, seed: int = 0, path: Sequence[str] = ()) -> Callable[..., Any]:
    """The function or module at `place`, with `path` added to the import path. ValueError if there is none; exceptions
    raised on import propagate."""
    where, _, attribute = place.rpartition(":")
    torch.manual_seed(seed)  # for parameters initialised on import, or below
    if where.endswith(".py"):
        file = Path(where)
        if (file.parent / "__init__.py").is_file():  # part of a package: relative imports must work
            root, parts = file.parent, [file.stem] if file.stem != "__init__" else []
            while (root / "__init__.py").is_file():
                root, parts = root.parent, [root.name, *parts]
            sys.path[:] = dict.fromkeys([str(root), *sys.path, "", *path])  # another package may have the same name
            module = importlib.import_module(".".join(parts))
        else:
            name = re.sub(r"\W", "_", f"_fusewise_study_{file.stem}")  # compilers write it into programs
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            sys.path[:] = dict.fromkeys([str(file.parent), *sys.path, ""])  # as if the file were run
            spec.loader.exec_module(module)
    else:
        sys.path[:] = dict.fromkeys(["", *sys.path, *path])
        module = importlib.import_module(where)
    try:
        found = functools.reduce(getattr, attribute.split("."), module)
    except AttributeError:
        fix = nearest(attribute, [name for name in vars(module) if not name.startswith("_")], "check its name")
        raise ValueError(f"study: {attribute} must be defined at the top of {where}, got no such name; {fix}") from None
    compiled: Any = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ())
    if isinstance(found, compiled):  # unwrap torch.compile, which does not trace a copy of its module
        found = found._orig_mod
    found = uncompiled(found)  # once a dispatch mode has seen it, torch.compile would refuse it
    made: Any = found
    if isinstance(found, nn.Module):
        made = copied(found)  # a study casts and calls it, and the imported one is needed again for the next dtype
    elif isinstance(found, type) and issubclass(found, nn.Module):
        try:
            made = found()
        except TypeError as error:
            raise ValueError(
                f"study: {attribute} must be a module that is made without arguments, got {error}; "
                f"name an instance made in your file: layer = {attribute}(...)"
            ) from None
    if isinstance(made, type):
        raise ValueError(
            f"study: target must be a function or module, got the class {attribute}; name an instance made in your file, or "
            f"a function of it, as {attribute}.apply"
        )
    if not callable(made):
        raise ValueError(f"study: target must be a function or module, got {type(made).__name__}; name another")
    return made  # type: ignore[no-any-return]


def uncompiled(function: Any) -> Any:
    """The function that torch.compile was given, if it made this one. The module tells, and no attribute alone, since
    functools.wraps copies those."""
    inside = isinstance(function, types.FunctionType) and function.__globals__["__name__"] == "torch._dynamo.eval_frame"
    if inside and hasattr(function, "get_compiler_config"):  # torch.compiler.disable is there, too
        return function._torchdynamo_orig_callable
    return function


def anew(place: str, seed: int = 0, path: Sequence[str] = ()) -> Callable[..., Any]:
    """As `load`, from a module that is executed once more, so that nothing is left of earlier calls. ImportError where
    that is not possible: packages and torch."""
    where = place.rpartition(":")[0]
    kept = {
        name: module
        for name, module in sys.modules.items()
        if name == where or (where.endswith(".py") and getattr(module, "__file__", None) == where)
    }
    if any(hasattr(module, "__path__") or name.partition(".")[0] in NEVER_ANEW for name, module in kept.items()):
        raise ImportError(f"{where} cannot be executed again")
    for name in kept:
        del sys.modules[name]
    try:
        return load(place, seed, path)
    finally:
        sys.modules.update(kept)


def copied(module: nn.Module) -> nn.Module:
    """A copy with its own leaf parameters, since those of a copied scripted module are derived from the old ones.
    Non-leaf tensors that a module keeps from a call, as weight_norm does, cannot be deep-copied with their history, so
    they are detached."""
    kept = [
        x for part in module.modules() for x in vars(part).values() if isinstance(x, torch.Tensor) and not x.is_leaf
    ]
    made = copy.deepcopy(module, {id(x): x.detach().clone() for x in kept})
    for p in made.parameters():
        if not p.is_leaf:
            p.detach_().requires_grad_()
    return made


def parameters(function: Callable[..., Any], count: int) -> dict[str, Any]:
    """The positional parameters with their defaults, extended to `count` by numbered names for *args and for functions
    not written in Python."""
    signature = _signature(function)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = {p.name: p.default for p in signature if p.kind in kinds}
    for rest in (p.name for p in signature if p.kind == inspect.Parameter.VAR_POSITIONAL):
        found |= {f"{rest}{i}": inspect.Parameter.empty for i in range(count - len(found))}
    return found


#: For functions not written in Python that have no signature.
UNKNOWN = [inspect.Parameter("input", inspect.Parameter.VAR_POSITIONAL)]


def _signature(function: Callable[..., Any]) -> list[inspect.Parameter]:
    of: Any = function
    if isinstance(function, nn.Module):
        of = function.forward
    elif isinstance(function, type) and issubclass(function, nn.Module):
        of = functools.partial(function.forward, None)  # binds self
    try:
        return list(inspect.signature(of).parameters.values())
    except ValueError:
        return UNKNOWN


def tells(function: Callable[..., Any]) -> bool:
    """Whether it has a signature, so that inputs can be given by name."""
    return _signature(function) is not UNKNOWN


def arguments(function: Callable[..., Any], texts: Sequence[str]) -> list[tuple[str, inputs.Spec]]:
    """The inputs in the order of the function's parameters. ValueError if they do not match."""
    named = [p for p in _signature(function) if p.kind == inspect.Parameter.KEYWORD_ONLY]
    given_names = [inputs.parse(text)[0] for text in texts]
    if needed := [p.name for p in named if p.default is inspect.Parameter.empty or p.name in given_names]:
        raise ValueError(
            f"study: a function must take its arguments by position, got {', '.join(needed)} by keyword only; wrap it in a "
            "function that gives it"
        )
    if not tells(function) and (names := [text for text, name in zip(texts, given_names, strict=True) if name]):
        raise ValueError(
            f"study: inputs must be without names where a function does not tell its parameters, got {names[0]!r}; give them in order"
        )
    known = parameters(function, len(texts))
    given = dict(inputs.bound(list(known), texts))
    specs: list[tuple[str, inputs.Spec]] = []
    for name, default in known.items():
        if len(given) == len([n for n, _ in specs if n in given]):
            break
        spec = given.get(name, default)
        if name not in given and not (spec is None or isinstance(spec, bool | int | float | str)):
            raise ValueError(
                f"study: inputs must leave out no parameter before the last one given, got {list(given)} of {list(known)}; add it"
            )
        specs.append((name, spec))
    if absent := [n for n, default in [*known.items()][len(specs) :] if default is inspect.Parameter.empty]:
        raise ValueError(
            f"study: inputs must be given for every parameter without a default, got none for {', '.join(absent)}; "
            "give it, too"
        )
    return specs
