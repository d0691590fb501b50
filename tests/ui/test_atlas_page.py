"""The atlas's page in a real browser: it draws without a network, and its numbers are the atlas's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwise.roles.atlas.bundled import bundled_atlas
from headwise.ui.atlas import save_page


def test_atlas_page_shows_the_numbers_of_the_atlas(tab: Callable[..., Any], tmp_path: Path) -> None:
    atlas = bundled_atlas("minilm")
    assert atlas is not None
    name = '</script><b><!--\u2028"><style>* { display: none }</style>'
    nasty = dataclasses.replace(atlas, model=name)
    save_page(nasty, tmp_path / "atlas.html")
    shown = tab()
    shown.page.goto((tmp_path / "atlas.html").as_uri())
    assert shown.page.locator("h1").text_content() == f"{name}: what its heads do"
    cells = shown.page.locator(".grid button")
    assert cells.count() == 72
    assert cells.nth(2).inner_text() == f"{atlas.scores['previous']['self'][0, 2]:.2f}"
    cells.nth(2).click()
    assert "self 0.2: previous" in shown.page.locator("#detail h2").inner_text()
    shown.page.get_by_role("button", name="broad", exact=True).click()
    assert cells.nth(7).inner_text() == f"{atlas.scores['broad']['self'][0, 7]:.2f}"
    shown.page.select_option("#score", "entropy")
    assert cells.nth(0).inner_text() == f"{atlas.scores['entropy']['self'][0, 0]:.2f}"
    assert shown.page.locator("svg.similar g title").count() == 72
    assert len(shown.requested) == 1  # itself


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("model", ["minilm", "smollm2"])
def test_labels_of_heads_that_look_alike_do_not_overlap(
    model: str, width: int, tab: Callable[..., Any], tmp_path: Path
) -> None:
    atlas = bundled_atlas(model)
    assert atlas is not None
    save_page(atlas, tmp_path / "atlas.html")
    shown = tab().page
    shown.set_viewport_size({"width": width, "height": 900})
    shown.goto((tmp_path / "atlas.html").as_uri())
    boxes = shown.locator("svg.similar text").evaluate_all(
        "texts => texts.map(text => text.getBoundingClientRect()).map(({x, y, right, bottom}) => [x, y, right, bottom])"
    )
    assert len(boxes) > 30
    slack = 2.0  # pixels: a line's box is higher than its digits
    for index, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[:index]:
            across = min(right, other[2]) - max(left, other[0])
            down = min(bottom, other[3]) - max(top, other[1])
            assert across <= slack or down <= slack, (boxes[index], other)


def test_the_grid_of_an_atlas_is_one_stop_and_arrow_keys_move_in_it(tab: Callable[..., Any], tmp_path: Path) -> None:
    atlas = bundled_atlas("minilm")
    assert atlas is not None
    save_page(atlas, tmp_path / "atlas.html")
    shown = tab().page
    shown.goto((tmp_path / "atlas.html").as_uri())
    assert shown.locator(".grid button[tabindex='0']").count() == 1
    shown.locator("#score").focus()
    shown.keyboard.press("Tab")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft", "ArrowLeft"):
        shown.keyboard.press(key)
    shown.keyboard.press("Enter")
    assert shown.locator("#detail h2").inner_text().startswith("self 1.0: ")
    shown.keyboard.press("Tab")
    assert shown.evaluate("document.activeElement.closest('.grid')") is None


def test_a_page_keeps_the_theme_that_was_chosen(tab: Callable[..., Any], tmp_path: Path) -> None:
    atlas = bundled_atlas("minilm")
    assert atlas is not None
    save_page(atlas, tmp_path / "atlas.html")
    shown = tab(color_scheme="light").page
    shown.goto((tmp_path / "atlas.html").as_uri())
    colour = "() => getComputedStyle(document.querySelector('.grid button')).backgroundColor"
    light = shown.evaluate(colour)
    shown.get_by_role("button", name="dark").click()
    assert shown.evaluate(colour) != light and shown.locator("main").get_attribute("data-theme") == "dark"
    shown.emulate_media(color_scheme="dark")
    shown.emulate_media(color_scheme="light")
    assert shown.locator("main").get_attribute("data-theme") == "dark"
