"""Generated sections of Markdown files: a generator rewrites what is between two marker comments.

<!-- NAME:begin -->
(generated)
<!-- NAME:end -->
"""

from __future__ import annotations

from pathlib import Path

from headwise.errors import HeadwiseError
from headwise.files import write_atomically


def markers(name: str) -> tuple[str, str]:
    """The comments before and after the section of that name."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def replace_section(text: str, name: str, content: str, page: str = "the page") -> str:
    """A page's text with the section of that name replaced.

    Args:
        text: the whole page, with both markers once and in order.
        name: of the section.
        content: what goes between the markers, without a newline at its ends.
        page: what an error calls the page.
    """
    begin, end = markers(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise HeadwiseError(f"{page} needs one line {begin} and after it one line {end}; the section goes between them")
    before, after = text[: text.index(begin)], text[text.index(end) :]
    return f"{before}{begin}\n{content}\n{after}"


def write_section(page: Path, name: str, content: str) -> None:
    """Replace the section of that name in a file, which is replaced whole or not at all."""
    text = replace_section(page.read_text(encoding="utf-8"), name, content, str(page))
    with write_atomically(page) as file:
        file.write_text(text, encoding="utf-8")
