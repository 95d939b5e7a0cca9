"""Shell completion of TARGET."""

from __future__ import annotations

import os
from contextlib import suppress

import click
from click.shell_completion import CompletionItem


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
