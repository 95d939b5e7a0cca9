"""Shell completion of TARGET and of the names of presets, cases and providers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from fusewise.lab.targets import Target


def target(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Target names and Python files. If none matches, the shell completes paths, including folders."""
    from fusewise.lab.targets import names

    folder, begun = os.path.split(incomplete)
    found = [name for name in names() if name.startswith(incomplete)]
    with suppress(OSError):  # the folder may not exist
        for name in sorted(os.listdir(folder or ".")):
            if name.startswith(begun) and name.endswith(".py"):
                found.append(os.path.join(folder, name))
    return [CompletionItem(text) for text in found] or [CompletionItem(incomplete, type="file")]


def tuned(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Targets whose kernels can be tuned."""
    from fusewise.lab.tune import OPERATIONS

    return _beginning(incomplete, OPERATIONS)


def preset(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Presets of the target before it."""
    return _of_target(context, incomplete, lambda made: made.presets())


def case(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Cases of the target before it."""
    return _of_target(
        context, incomplete, lambda made: [case.name for cases in made.presets().values() for case in cases]
    )


def provider(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Providers, in a comma-separated list the one after the last comma."""
    from fusewise.lab.plugin import known

    before, comma, begun = incomplete.rpartition(",")
    return _beginning(begun, (entry.name for entry in known()), before + comma)


def _of_target(
    context: click.Context, incomplete: str, named: Callable[[Target], Iterable[str]]
) -> list[CompletionItem]:
    from fusewise.lab.targets import resolve

    # click stops at the option that still has no value, before it comes to arguments
    target = context.params.get("target") or next(iter(context.args), "")
    with suppress(ValueError):  # no such target
        made, _preset = resolve(target)
        return _beginning(incomplete, named(made))
    return []


def _beginning(begun: str, names: Iterable[str], before: str = "") -> list[CompletionItem]:
    return [CompletionItem(before + name) for name in dict.fromkeys(names) if name.startswith(begun)]
