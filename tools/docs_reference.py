"""The generated pages of the site: the API from docstrings, the command line from --help."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import click

import headwise
from headwise.cli.app import app

# title of a page -> the modules whose public names it has, by the beginning of their path in the package
GROUPS = {
    "Attention": ("attention.functional", "attention.stats", "attention.reference"),
    "Modules, caches, positions": ("attention.nn",),
    "Models": ("models",),
    "Inspection and view": ("inspection", "ui"),
    "Atlas and relations": ("roles",),
    "Attribution, patching, circuits": ("circuits",),
    "Pruning and plans": ("prune", "plans"),
    "Recorder": ("recorder",),
    "Ranks": ("scale",),
    "Cards and shapes": ("card", "shapes", "heads"),
    "Errors": ("errors",),
}
OTHERS = "Other names"  # a public name of a module that no group has
INTRODUCTION = "Generated from the docstrings. Import names from `headwise` by the path in the heading."
WIDTH = 80  # columns of the command line's help


def api_pages() -> dict[str, str]:
    """Title -> Markdown of each page of the API reference; together they have every public name once."""
    pages: dict[str, list[str]] = {}
    for name, location in headwise._LOCATIONS.items():
        pages.setdefault(group_of(location), []).append(name)
    ordered = [title for title in (*GROUPS, OTHERS) if title in pages]
    return {title: _api_page(title, sorted(pages[title], key=_order)) for title in ordered}


def group_of(location: str) -> str:
    """The page that a module of the package belongs to."""
    for title, prefixes in GROUPS.items():
        if any(f"{location}.".startswith(f"{prefix}.") for prefix in prefixes):
            return title
    return OTHERS


def _order(name: str) -> tuple[bool, bool, str]:
    """Functions before classes before modules."""
    return name in headwise._MODULES, name[0].isupper(), name.lower()


def _api_page(title: str, names: list[str]) -> str:
    shown = {id(getattr(headwise, name)) for name in names}
    parts = [f"# {title}", INTRODUCTION]
    for name in names:
        value = getattr(headwise, name)
        if not isinstance(value, ModuleType):
            parts.append(entry(value, f"headwise.{name}"))
            continue
        parts.append(f"## headwise.{name} {{ #headwise.{name} }}\n\n{_summary(value)}")
        parts += [
            entry(member, f"headwise.{name}.{member_name}", level=3)
            for member_name, member in members(value)
            if id(member) not in shown
        ]
    return "\n\n".join(parts) + "\n"


def members(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The public functions and classes of a module."""
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
    ]
    for name in names:
        if not name.startswith("_"):
            yield name, getattr(module, name)


def entry(value: Any, path: str, level: int = 2) -> str:
    """The directive that mkdocstrings replaces by the documentation of a function or class."""
    home = f"{value.__module__}.{value.__qualname__}"
    assert inspect.getmodule(value) is importlib.import_module(value.__module__), home
    label = path if level == 2 else path.rpartition(".")[2]  # below its module's name, and the column is narrow
    return f"::: {home}\n    options:\n      heading: {path}\n      toc_label: {label}\n      heading_level: {level}"


def _summary(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().partition("\n\n")[0].replace("\n", " ")


def command_page() -> str:
    """Every command with the text that --help prints."""
    parts = [
        "# Command line",
        "Generated from `headwise COMMAND --help`. Results go to stdout, everything else to stderr.",
    ]
    for path, text in command_helps():
        parts.append(f"## {path}\n\n```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def command_helps() -> Iterator[tuple[str, str]]:
    """The words of every command, and the help that it prints."""
    yield from _helps(app, click.Context(app, info_name="headwise", terminal_width=WIDTH, **app.context_settings))


def _helps(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _helps(child, click.Context(child, parent=context, info_name=name, terminal_width=WIDTH))
