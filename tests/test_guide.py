"""The guide: its figures come from its code or the lab, and the notebook matches the pages."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as Tree
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from helpers.tools import load_tool

guide = load_tool("guide")
ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"\d+\.\d+|\d{1,3}(?:,\d{3})+")
TARGET = re.compile(r"\]\([^)]+\)")
PAGES = {page.name: page.read_text(encoding="utf-8") for page in guide.pages()}
LAB = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "lab").glob("*.md")))


def unfounded(page: str, also: str = "") -> list[str]:
    """Figures in a page's prose that none of its outputs shows, nor `also`."""
    shown = "\n".join(text for language, text in FENCE.findall(page) if language in ("text", "console")) + also
    prose = re.sub(r"`[^`]*`", "", TARGET.sub("", FENCE.sub("", page)))
    return [figure for figure in FIGURE.findall(prose) if not re.search(rf"(?<!\d){re.escape(figure)}(?!\d)", shown)]


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_was_printed_or_measured(name: str) -> None:
    assert not unfounded(PAGES[name], LAB)


def test_the_index_lists_every_page_and_each_leads_to_the_next() -> None:
    names = [name for name in PAGES if name != "README.md"]
    assert re.findall(r"^\d+\. \[.*?\]\((.*?)\)", PAGES["README.md"], re.MULTILINE) == names
    for name, following in zip(names, [*names[1:], "README.md"], strict=True):
        assert f"]({following})" in PAGES[name].splitlines()[-1]


@pytest.mark.parametrize("drawing", sorted(guide.GUIDE.glob("*.svg")), ids=lambda path: path.name)
def test_drawings_are_well_formed_and_have_a_dark_mode(drawing: Path) -> None:
    root = Tree.parse(drawing).getroot()
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert "prefers-color-scheme: dark" in drawing.read_text(encoding="utf-8")


def test_the_notebook_matches_the_pages() -> None:
    assert guide.NOTEBOOK.read_text(encoding="utf-8") == guide.as_text(guide.notebook(list(PAGES.values())))


def test_the_notebook_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    book = nbformat.read(guide.NOTEBOOK, as_version=4)
    nbformat.validate(book)
    shown = [list(map(printed, cell.outputs)) for cell in book.cells if cell.cell_type == "code"]
    NotebookClient(book, timeout=120, coalesce_streams=True, resources={"metadata": {"path": str(tmp_path)}}).execute()
    ran = [list(map(printed, cell.outputs)) for cell in book.cells if cell.cell_type == "code"]
    assert ran == shown


def printed(output: nbformat.NotebookNode) -> tuple[str, str]:
    return output.get("name", output.output_type), output.get("text", "")


# --- the checks themselves ---


def test_a_figure_without_a_source_is_caught() -> None:
    page = "Seen: 0.68 and 1,024, not 0.69.\n\n```text\n0.68 10.69\n```\n\n```python\nx = 0.69\n```\n"
    assert unfounded(page) == ["1,024", "0.69"]
    assert unfounded(page, "1,024") == ["0.69"]


def test_outputs_are_written_where_blocks_print() -> None:
    page = "# T\n\n```python\nx = 1\n```\n\nAnd\n\n```python\nprint(x)\n```\n\n```text\n7\n```\n\nEnd.\n"
    fresh = guide.with_outputs(page, "page")
    assert fresh == page.replace("7", "1")
    assert guide.with_outputs(fresh, "page") == fresh
    assert guide.with_outputs(fresh.replace("print(x)", "x = 2"), "page").count("```text") == 0


def test_a_notebook_has_cells_and_outputs() -> None:
    notebook = guide.notebook(["# T\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\nEnd.\n"])
    nbformat.validate(nbformat.reads(json.dumps(notebook), as_version=4))
    assert [cell["cell_type"] for cell in notebook["cells"]] == ["markdown", "code", "markdown"]
    assert notebook["cells"][1]["outputs"][0]["text"] == ["1\n"]
