"""Reports as data: Markdown, HTML and plain text show every string as it is, whatever it contains."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from headwise import CheckpointError
from headwise.prune.document import Document, Items, Picture, Preformatted, Section, Table, write_document
from headwise.prune.pieces import Pieces
from headwise.terminal import one_line

HOSTILE = (
    "<b>", "<img src=x onerror=alert(1)>", "[a](javascript:alert(1))", "![a](http://x.test/)", "`a`", "``` \n# b",
    "a | b", "*a* _b_ ~~c~~", "&lt;b&gt;", "a\n\n# b", "\x1b]52;c;eA==\x07", "$a$ @b", "{title}", "</style><script>",
)  # fmt: skip


def make_document(text: str) -> Document:
    table = Table((text, "number"), [(text, "1"), ("b", "2")])
    return Document(text, [Section("", [text, table]), Section(text, [Items([text, "c"]), Preformatted(text)])])


@pytest.mark.parametrize("text", HOSTILE)
def test_every_form_of_a_document_shows_strings_and_interprets_none(text: str) -> None:
    document, shown = make_document(text), one_line(text)
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(document.markdown())
    inline = [child for token in tokens for child in token.children or []]
    types = {token.type for token in [*tokens, *inline]}
    assert not types & {"html_block", "html_inline", "link_open", "image", "em_open", "strong_open", "code_inline"}
    contents = ["".join(child.content for child in token.children or []) for token in tokens if token.type == "inline"]
    assert contents == [shown, shown, shown, "number", shown, "1", "b", "2", shown, shown, "c"]
    page = document.html()
    assert page.count(html.escape(shown)) >= 6 and "<script" not in page and "<img" not in page and "\x1b" not in page
    assert "\x1b" not in document.text() and shown in document.text()


def test_the_plain_text_of_a_table_is_aligned() -> None:
    document = Document("a", [Section("", [Table(("", "x"), [("long name", "1"), ("b", "22")])])])
    assert document.text() == "a\n\n            x\nlong name   1\nb          22"


def test_a_picture_is_a_file_beside_the_page_and_not_in_the_text() -> None:
    document = Document("a", [Section("", [Picture("curve.png", "a curve")])])
    assert "![a curve](curve.png)" in document.markdown() and '<img src="curve.png" alt="a curve"' in document.html()
    assert document.text() == "a"


def test_the_three_files_of_a_document_are_written(tmp_path: Path) -> None:
    write_document(make_document("a"), {"b": 1}, tmp_path, "report")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]
    assert json.loads((tmp_path / "report.json").read_text()) == {"b": 1}


def test_a_piece_is_measured_once_per_content_and_key(tmp_path: Path) -> None:
    values = iter(range(9))
    pieces = Pieces(tmp_path / "pieces", {"model": "a"})
    assert [pieces.piece("x", {"n": n}, lambda: next(values)) for n in (1, 2, 1)] == [0, 1, 0]
    assert pieces.piece("y", {"n": 1}, lambda: next(values)) == 2
    assert Pieces(tmp_path / "pieces", {"model": "b"}).piece("x", {"n": 1}, lambda: next(values)) == 3
    assert Pieces(tmp_path / "pieces", {"model": "a"}).piece("x", {"n": 1}, lambda: next(values)) == 0
    pieces.remove()
    assert not (tmp_path / "pieces").exists()


def test_a_broken_piece_is_named_with_what_to_do(tmp_path: Path) -> None:
    pieces = Pieces(tmp_path, {})
    pieces.place("x", {}).write_text("{")
    with pytest.raises(CheckpointError, match=r"x-.*\.json' cannot be read .*; delete it to measure again"):
        pieces.piece("x", {}, lambda: 1)
