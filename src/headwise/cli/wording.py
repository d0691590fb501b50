"""What the library says in the words of the command line: `truncate=True` is `--truncate` here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

# Python arguments that the library recommends; the commands have options of the same names
ARGUMENTS = (
    "allow_empty", "device", "host", "image", "keep", "length", "out", "overwrite", "port", "step", "token", "truncate",
)  # fmt: skip
OTHER_NAMES = {"length": "context"}  # arguments whose options have another name
ARGUMENT = re.compile(
    rf"""\b(?P<name>{"|".join(ARGUMENTS)})=(?:True\b|"(?P<quoted>[^"]*)"|(?P<value>[\w.]+))?|\bto_json\(\)"""
    r"|(?<=give )(?P<bare>head_dim)\b"
)


def name_options(message: str) -> str:
    """A message with the options of the command line in place of Python arguments and methods.

    `truncate=True` becomes `--truncate`, `keep=0.2` becomes `--keep 0.2`, `port=` becomes `--port`, and `to_json()`
    becomes `--json`.
    """
    return ARGUMENT.sub(_option, message)


def name_options_in(drawing: RenderableType) -> RenderableType:
    """The same for a drawing: a text, or a group of drawings."""
    from rich.console import Group
    from rich.text import Text

    if isinstance(drawing, Group):
        return Group(*map(name_options_in, drawing.renderables))
    return _reword(drawing) if isinstance(drawing, Text) else drawing


def _reword(text: Text) -> Text:
    from rich.text import Span, Text

    result, end = text.blank_copy(), 0
    for match in ARGUMENT.finditer(text.plain):
        option = _option(match)
        styles = [span.style for span in text.spans if span.start <= match.start() < span.end]
        result.append_text(text[end : match.start()])
        result.append_text(Text(option, spans=[Span(0, len(option), style) for style in styles]))
        end = match.end()
    return result.append_text(text[end:]) if end else text


def _option(match: re.Match[str]) -> str:
    if match["bare"]:
        return "--head-dim"
    if match["name"] is None:
        return "--json"
    value = match["quoted"] or match["value"]
    name = OTHER_NAMES.get(match["name"], match["name"])
    return f"--{name.replace('_', '-')}" + (f" {value}" if value else "")
