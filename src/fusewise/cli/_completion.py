"""What a shell completes TARGET with."""

from __future__ import annotations

import os
from contextlib import suppress

import click
from click.shell_completion import CompletionItem


def target(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Targets by name and files of Python. Where none begins so, whatever the shell finds: it goes through folders by itself."""
    from fusewise.lab.targets import names

    folder, begun = os.path.split(incomplete)
    found = [name for name in names() if name.startswith(incomplete)]
    with suppress(OSError):  # there may be no such folder
        for name in sorted(os.listdir(folder or ".")):
            if name.startswith(begun) and name.endswith(".py"):
                found.append(os.path.join(folder, name))
    return [CompletionItem(text) for text in found] or [CompletionItem(incomplete, type="file")]
