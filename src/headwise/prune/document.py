"""A report as data: sections of paragraphs, tables and lists, written as Markdown, as one HTML page and as plain text.

Every string is shown as it is: a model's name may be "<b>" or "| a |".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import html
from ..errors import CheckpointError
from ..files import write_atomically
from ..markdown import escape as escape_markdown
from ..markdown import fence
from ..terminal import escape_controls, one_line
from .report_html import STYLE, table_rows
from .report_html import escape as escape_html


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; the first column is text, the others are numbers."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Items:
    """A list, one line each."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Preformatted:
    """Lines in a fixed-width font, such as a plan or a command."""

    text: str


@dataclass(frozen=True)
class Picture:
    """An image file beside the report; not in the plain text."""

    file: str
    caption: str


Block = str | Table | Items | Preformatted | Picture


@dataclass(frozen=True)
class Section:
    """Blocks under a title; the first section of a report has none."""

    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    sections: list[Section]

    def markdown(self) -> str:
        parts = [f"# {escape_markdown(self.title)}"]
        for section in self.sections:
            parts += [f"## {escape_markdown(section.title)}"] if section.title else []
            parts += [_markdown(block) for block in section.blocks]
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        parts = [f"<h1>{escape_html(self.title)}</h1>"]
        for section in self.sections:
            parts += [f"<h2>{escape_html(section.title)}</h2>"] if section.title else []
            parts += [_html(block) for block in section.blocks]
        return html.page(one_line(self.title), "\n".join(parts), STYLE, images="'self' file:")[0]

    def text(self) -> str:
        """For a terminal."""
        parts = [one_line(self.title)]
        for section in self.sections:
            parts += [f"{one_line(section.title)}:"] if section.title else []
            parts += [_text(block) for block in section.blocks if not isinstance(block, Picture)]
        return "\n\n".join(parts)


def write_document(document: Document, values: dict[str, Any], folder: Path, name: str) -> None:
    """name.md, name.html and name.json in a directory."""
    contents = {
        ".md": document.markdown(),
        ".html": document.html(),
        ".json": json.dumps(values, indent=2) + "\n",
    }
    for ending, content in contents.items():
        with write_atomically(folder / f"{name}{ending}", CheckpointError) as file:
            file.write_text(content, encoding="utf-8")


def _markdown(block: Block) -> str:
    if isinstance(block, Table):
        lines = [block.header, ("---", *["--:"] * (len(block.header) - 1)), *block.rows]
        cells = [[cell if i == 1 else escape_markdown(cell) for cell in row] for i, row in enumerate(lines)]
        return "\n".join(f"| {' | '.join(row)} |" for row in cells)
    if isinstance(block, Items):
        return "\n".join(f"- {escape_markdown(line)}" for line in block.lines)
    if isinstance(block, Preformatted):
        return fence(escape_controls(block.text), "text")
    if isinstance(block, Picture):
        return f"![{escape_markdown(block.caption)}]({block.file})"
    return escape_markdown(block)


def _html(block: Block) -> str:
    if isinstance(block, Table):
        header = "".join(f"<th>{escape_html(cell)}</th>" for cell in block.header)
        return f"<table><thead><tr>{header}</tr></thead><tbody>{table_rows(block.rows)}</tbody></table>"
    if isinstance(block, Items):
        return "<ul>" + "".join(f"<li>{escape_html(line)}</li>" for line in block.lines) + "</ul>"
    if isinstance(block, Preformatted):
        return f"<pre>{html.escape(escape_controls(block.text))}</pre>"
    if isinstance(block, Picture):
        return f'<img src="{escape_html(block.file)}" alt="{escape_html(block.caption)}" width="800">'
    return f"<p>{escape_html(block)}</p>"


def _text(block: str | Table | Items | Preformatted) -> str:
    if isinstance(block, Table):
        rows = [[one_line(cell) for cell in row] for row in (block.header, *block.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            numbers = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join([f"{row[0]:<{widths[0]}}", *numbers]).rstrip())
        return "\n".join(lines)
    if isinstance(block, Items):
        return "\n".join(one_line(line) for line in block.lines)
    return escape_controls(block.text) if isinstance(block, Preformatted) else one_line(block)
