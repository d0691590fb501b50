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

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        similar = self.similar_names(args[0])
        if similar:
            context.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(similar)}?")
        return super().resolve_command(context, args)

    def similar_names(self, name: str) -> list[str]:
        """The commands of which a name may be a misspelling; none where it is a command or an option."""
        import difflib

        return [] if name in self.modules or name.startswith("-") else difflib.get_close_matches(name, self.modules, 2)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.modules:
            return None
        command: click.Command = import_module(f".{name}", self.package).command
        return command
