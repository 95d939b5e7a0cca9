"""Types and callbacks of options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class Folder(click.Path):
    """The name of a folder; not empty, which would mean the current one."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it must have a name, or be left out", param, ctx)
        return super().convert(value, param, ctx)


def names(_: click.Context, __: click.Parameter, value: str | None) -> list[str] | None:
    """The names between commas; None if the option is left out."""
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]
