"""Groups of commands whose modules are imported when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """Commands that are modules of a package, each under the name `command`; a module is imported when it is used."""

    def __init__(self, *args: Any, package: str, modules: Sequence[str], **options: Any) -> None:
        super().__init__(*args, **options)
        self.package, self.modules = package, tuple(modules)

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.modules)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.modules:
            return None
        command: click.Command = import_module(f".{name}", self.package).command
        return command
