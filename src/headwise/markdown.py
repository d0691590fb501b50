"""Texts from outside in Markdown: shown, never interpreted."""

from __future__ import annotations

import re

from .terminal import one_line

# what Markdown, or GitHub's form of it, reads as more than a character: HTML, links, tables, mathematics, mentions; a
# colon begins an emoji or continues an address only where no space follows
SPECIAL = re.compile(r"[\\`*_{}\[\]<>&|#!~$@]|:(?=\S)")


def escape(text: str) -> str:
    """A text from outside, such as a model's name, on one line and with no character that Markdown interprets."""
    return SPECIAL.sub(lambda character: "\\" + character[0], one_line(text))


def code_span(text: str) -> str:
    """A text from outside as a code span, delimited by more backticks than it has in a row."""
    text = one_line(text)
    ticks = _backticks(text, 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def fence(text: str, language: str) -> str:
    """A text from outside as a block of code."""
    ticks = _backticks(text, 3)
    return f"{ticks}{language}\n{text}\n{ticks}"


def _backticks(text: str, least: int) -> str:
    """More backticks than the text has in a row, at least `least`."""
    return "`" * max([least, *(1 + len(run) for run in re.findall("`+", text))])
