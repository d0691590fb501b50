"""Renew the guide: run every python block of its pages, write its output below it, and make the notebook: `make guide`.

A python block that prints is followed by a text block with exactly what it printed. In the notebook the python blocks
are the code cells and the text blocks their outputs; everything else is Markdown.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parents[1] / "docs" / "guide"
NOTEBOOK = GUIDE / "guide.ipynb"
CODE = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\n\n^```text\n(?P<output>.*?)^```$)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A python block of a page, with the output that the page shows below it (None: no output)."""

    line: int  # of the page, of the opening fence
    code: str
    output: str | None
    span: tuple[int, int]  # of the code and the output in the page's text


def pages() -> list[Path]:
    """The index, then the pages by their numbers."""
    return [GUIDE / "README.md", *sorted(GUIDE.glob("[0-9]*.md"))]


def blocks(text: str) -> Iterator[Block]:
    """The python blocks of a page, in order."""
    for match in CODE.finditer(text):
        yield Block(text.count("\n", 0, match.start("code")), match["code"], match["output"], match.span())


def run(text: str, name: str) -> Iterator[tuple[Block, str]]:
    """Run the blocks of a page one after the other in one namespace; gives each with its output."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(text):
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            exec(compile("\n" * block.line + block.code, name, "exec"), names)
        yield block, stdout.getvalue()


def with_outputs(text: str, name: str) -> str:
    """The page with the current outputs of its blocks."""
    parts, end = [], 0
    for block, stdout in run(text, name):
        output = f"\n\n```text\n{stdout}```" if stdout else ""
        parts += [text[end : block.span[0]], f"```python\n{block.code}```{output}"]
        end = block.span[1]
    return "".join([*parts, text[end:]])


def notebook(texts: list[str]) -> dict[str, Any]:
    """Pages as one notebook (format 4.5)."""
    cells: list[dict[str, Any]] = []

    def add(kind: str, source: str, **fields: Any) -> None:
        lines = source.strip("\n").splitlines(keepends=True)
        if lines:
            cells.append({"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": lines, **fields})

    for text in texts:
        end = 0
        for block in blocks(text):
            add("markdown", text[end : block.span[0]])
            output = (block.output or "").splitlines(keepends=True)
            outputs = [{"output_type": "stream", "name": "stdout", "text": output}] if output else []
            add("code", block.code, execution_count=None, outputs=outputs)
            end = block.span[1]
        add("markdown", text[end:])
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": python}, "nbformat": 4, "nbformat_minor": 5}


def as_text(book: dict[str, Any]) -> str:
    """The content of the notebook's file."""
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def main(prefixes: tuple[str, ...]) -> None:
    """Run the pages whose names start with one of the prefixes, or all pages, and write the notebook."""
    texts = {page: page.read_text(encoding="utf-8") for page in pages()}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for page, text in texts.items():
            if page.name.startswith(prefixes or ("",)):
                texts[page] = with_outputs(text, str(page))
                page.write_text(texts[page], encoding="utf-8")
    NOTEBOOK.write_text(as_text(notebook(list(texts.values()))), encoding="utf-8")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
