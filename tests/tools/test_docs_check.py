"""The check of the built site finds what is wrong with a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.tools import load_tool

docs_check = load_tool("docs_check")
SHELL = '<!doctype html><html lang="en"><title>t</title><link rel="icon" href="data:,"><h1>t</h1>'
PAGES = {
    "good": '<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=" alt="a dot"><a href="good.html">here</a>',
    "image without alternative text": '<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">',
    "frame without a title": '<iframe src="good.html"></iframe>',
    "a second h1": "<h1>again</h1>",
    "console: broken": "<script>console.error('broken')</script>",
    "error: boom": "<script>throw new Error('boom')</script>",
    "console: Failed to load resource": '<script src="missing.js"></script>',
    "wider than the window": '<div style="width: 3000px">wide</div>',
    "from elsewhere": '<script src="http://localhost:9/x.js"></script>',
}


@pytest.mark.parametrize("problem", PAGES)
def test_a_problem_of_a_page_is_reported(problem: str, chromium: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(SHELL + PAGES[problem])
    (tmp_path / "good.html").write_text(SHELL)
    with docs_check.server(tmp_path) as address:
        found = docs_check.check_pages(chromium, address, ["page.html"], 800)
    assert found == [] if problem == "good" else any(problem in line for line in found), found


def test_a_page_without_links_cannot_be_used_by_keyboard(chromium: Any, tmp_path: Path) -> None:
    links = "".join(f'<a href="#{i}">link {i}</a>' for i in range(docs_check.TABS))
    for name, body in (("good", links), ("bad", "<p>words</p>")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(SHELL + body)
    with docs_check.server(tmp_path) as address:
        assert docs_check.check_keyboard(chromium, f"{address}/good") == []
        assert docs_check.check_keyboard(chromium, f"{address}/bad") != []
