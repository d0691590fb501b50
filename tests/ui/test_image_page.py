"""The page of an image: the overlay is the watched weights; patches, keys and buttons choose who looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.inspection import ImageInspection, encode_image
from headwise.ui import capture, pack, page, payload
from headwise.ui.image_capture import run_image
from headwise.ui.widget import Page
from helpers import small_checkpoints, vision_checkpoints


@pytest.fixture(scope="module")
def model() -> Any:
    return vision_checkpoints.with_registers()


@pytest.fixture(scope="module")
def seen(model: Any) -> ImageInspection:
    result = headwise.inspect(image=vision_checkpoints.image(), model=model)
    assert isinstance(result, ImageInspection)
    return result


@pytest.fixture(scope="module")
def written(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "image.html"
    page.save(payload.data(run_image(vision_checkpoints.image(), model)), path)
    return path


def tip(shown: Any) -> str:
    shown.wait_for_selector(".hw-tip:not([hidden])")
    return str(shown.locator(".hw-tip").inner_text())


def await_address(shown: Any, part: str) -> None:
    """Wait until the address of the page has this part."""
    shown.wait_for_function("(part) => location.hash.includes(part)", arg=part)


def centre(shown: Any, row: int, column: int) -> tuple[float, float]:
    """Where a patch of the 5 x 5 is on the screen, once the picture has its size and nothing moves."""
    shown.wait_for_function("document.querySelector('.hw-picture').complete")
    shown.locator(".hw-overlay").hover(trial=True)  # waits until it stays in place
    box = shown.locator(".hw-overlay").bounding_box()
    return box["x"] + (column + 0.5) * box["width"] / 5, box["y"] + (row + 0.5) * box["height"] / 5


def overlay(shown: Any) -> np.ndarray:
    """(rows, columns, 4): red, green, blue and opacity of each patch."""
    pixels = shown.evaluate(
        """() => {
          const canvas = document.querySelector(".hw-overlay");
          return [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
        }"""
    )
    return np.array(pixels).reshape(5, 5, 4)


def brightness(pixels: np.ndarray) -> np.ndarray:
    return pixels[..., :3] @ np.array([0.2126, 0.7152, 0.0722])


def test_weights_on_hover_equal_those_of_inspect(tab: Any, written: Path, seen: ImageInspection) -> None:
    shown = tab().open(written, "view=image&heads=1.2&token=0")
    shown.locator(".hw-image").scroll_into_view_if_needed()
    weights = seen.patch_weights("1.2", "[CLS]")
    for row, column in ((0, 0), (1, 3), (4, 2)):
        shown.mouse.move(*centre(shown, row, column))
        text = tip(shown)
        assert f"[CLS] → patch {row},{column}" in text
        number = text.split()[-1].replace("−", "-")
        assert float(number) == pytest.approx(float(weights[row, column]), rel=0.051, abs=5.1e-5)  # as printed


def test_the_overlay_is_ordered_as_the_weights(tab: Any, written: Path, seen: ImageInspection) -> None:
    shown = tab().open(written, "view=image&heads=0.1&token=9")
    weights = seen.patch_weights("0.1", seen.words.names[9])
    bright = brightness(overlay(shown))
    assert np.unravel_index(bright.argmax(), bright.shape) == np.unravel_index(weights.argmax(), weights.shape)
    order = np.argsort(weights, axis=None)
    steps = np.diff(bright.ravel()[order])
    assert steps.min() >= -1.5  # a step of the ramp is rounded to whole colours


def test_a_click_and_arrow_keys_choose_the_patch_that_looks(tab: Any, written: Path, seen: ImageInspection) -> None:
    shown = tab().open(written, "view=image&heads=1.0&token=0")
    shown.locator(".hw-image").scroll_into_view_if_needed()
    assert shown.locator(".hw-patch").is_hidden()
    shown.mouse.click(*centre(shown, 2, 3))
    await_address(shown, "token=16")  # behind [CLS] and two registers
    assert shown.locator(".hw-patch").is_visible()
    shown.locator(".hw-image").focus()
    shown.keyboard.press("ArrowLeft")
    shown.keyboard.press("ArrowUp")
    await_address(shown, f"token={seen.find('1,2')}")
    assert "heads=1.0" in shown.url  # the keys did not go to another head
    bright = brightness(overlay(shown))
    weights = seen.patch_weights("1.0", "1,2")
    assert np.unravel_index(bright.argmax(), bright.shape) == np.unravel_index(weights.argmax(), weights.shape)


def test_special_tokens_are_buttons_with_their_weights(tab: Any, written: Path, seen: ImageInspection) -> None:
    shown = tab().open(written, "view=image&heads=1.0&token=9")
    buttons = shown.locator(".hw-special button")
    assert [name.split()[0] for name in buttons.all_inner_texts()] == ["[CLS]", "[REG", "[REG"]
    row = seen.matrix("1.0")[9]
    number = buttons.nth(0).locator("span").inner_text().replace("−", "-")
    assert float(number) == pytest.approx(float(row[0]), rel=0.051, abs=5.1e-5)
    buttons.nth(2).click()
    await_address(shown, "token=2")
    assert buttons.nth(2).get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_image_is_shown_with_its_description(tab: Any, written: Path, theme: str) -> None:
    shown = tab(color_scheme=theme).open(written)
    assert shown.locator('[role="tab"][aria-selected="true"]').inner_text() == "Image"
    picture = shown.locator(".hw-picture")
    assert picture.evaluate("(image) => image.complete && image.naturalWidth") == 30
    assert "as the model reads it, under the weights of head" in picture.get_attribute("alt")
    assert "from [CLS]" in picture.get_attribute("alt")


def test_the_map_shows_the_patches_of_every_head_and_leads_to_the_image(tab: Any, written: Path) -> None:
    shown = tab().open(written, "view=map&paint=thumbnail&token=0")
    sizes = shown.locator(".hw-grid canvas").evaluate_all("(all) => all.map(({ width, height }) => [width, height])")
    assert sizes == [[5, 5]] * 6
    shown.locator('.cell[data-head="1.1"]').click()
    assert shown.locator(".hw-image").is_visible()
    await_address(shown, "heads=1.1")


def test_pooling_looks_from_its_learned_query(tab: Any, tmp_path: Path) -> None:
    pass_ = run_image(vision_checkpoints.image(), vision_checkpoints.siglip())
    page.save(payload.data(pass_), tmp_path / "a.html")
    shown = tab().open(tmp_path / "a.html", "view=image&heads=head 0.1")
    assert shown.locator(".hw-special button").all_inner_texts() == ["[POOL]"]
    weights = pass_.layers[-1].rows([0])[1, 0].reshape(5, 5)
    bright = brightness(overlay(shown))
    assert np.unravel_index(bright.argmax(), bright.shape) == np.unravel_index(weights.argmax(), weights.shape)


def test_only_a_page_with_an_image_may_load_images(model: Any, minilm: tuple[Any, Any]) -> None:
    image = payload.data(run_image(vision_checkpoints.image(), model))
    text = payload.data(capture.run("A cat.", minilm[0], tokenizer=minilm[1]))
    assert "img-src data:;" in page.page(image)[1]
    assert "img-src 'none';" in page.page(text)[1]


def test_view_takes_an_image(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.ui.widget._widget_class", lambda: None)
    shown = headwise.view(image=vision_checkpoints.image(), model=model, off={1: [2]})
    assert isinstance(shown, Page)
    runs = shown.data["runs"]
    assert [run["off"] for run in runs] == [[[1, 2]], []]
    assert {key: runs[0]["texts"][0]["image"][key] for key in ("rows", "columns", "offset")} == {
        "rows": 5,
        "columns": 5,
        "offset": 3,
    }


def test_every_view_draws_an_image_compared_with_heads_off(tab: Any, model: Any, tmp_path: Path) -> None:
    image = vision_checkpoints.image()
    page.save(payload.data([run_image(image, model, off={1: [2]}), run_image(image, model)]), tmp_path / "a.html")
    shown = tab().open(tmp_path / "a.html")
    labels = shown.locator('[role="tab"]').all_inner_texts()
    assert labels == ["Image", "Map", "Head", "Steps", "Compare"]
    for label in labels:  # an error on the way fails the test when its tab closes
        shown.get_by_role("tab", name=label).click()
        assert shown.locator('[role="tab"][aria-selected="true"]').inner_text() == label


def test_heads_are_laid_over_each_other(tab: Any, written: Path, seen: ImageInspection) -> None:
    shown = tab().open(written, "view=image&heads=1.2,0.1&token=0")
    shown.locator(".hw-image").scroll_into_view_if_needed()
    shown.mouse.move(*centre(shown, 2, 1))
    lines = tip(shown)
    for head in ("1.2", "0.1"):
        assert f"head {head}" in lines
    pixels = overlay(shown)
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, 4)}) > 1


def test_a_large_page_says_which_patches_it_holds(
    tab: Any, model: Any, seen: ImageInspection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EXACT", "IMAGE_BYTES"):
        monkeypatch.setattr(pack, name, 0)
    monkeypatch.setattr(payload, "STEPS", {"links": 0})
    page.save(payload.data(run_image(vision_checkpoints.image(), model), heads=["0.0"]), tmp_path / "a.html")
    shown = tab().open(tmp_path / "a.html", "view=image&heads=1.2&token=0")
    assert "Of 25 patches this page holds the 8 strongest" in shown.locator(".hw-image-legend").inner_text()
    weights = seen.patch_weights("1.2", "[CLS]")
    row, column = np.unravel_index(weights.argmax(), weights.shape)
    shown.locator(".hw-image").scroll_into_view_if_needed()
    shown.mouse.move(*centre(shown, int(row), int(column)))
    assert float(tip(shown).split()[-1]) == pytest.approx(float(weights.max()), abs=5.1e-5 + 0.5 / 65535)
    shown.goto((tmp_path / "a.html").as_uri() + "#view=image&heads=0.0&token=0")
    shown.reload()
    shown.wait_for_selector(".hw-tabs")
    assert "computed from this head's queries and keys" in shown.locator(".hw-image-legend").inner_text()


# --- an image and a text ---


def test_text_tokens_look_at_patches_by_cross_attention(tab: Any, tmp_path: Path) -> None:
    model, tokenizer = vision_checkpoints.with_cross_attention(), small_checkpoints.byte_level()
    pass_ = run_image(vision_checkpoints.image(), model, tokenizer=tokenizer, target="a cat")
    assert [text.image is not None for text in pass_.texts] == [True, False]
    record = next(record for record in pass_.layers if record.kind == "cross")
    assert (record.source, record.target) == (1, 0)
    with torch.no_grad(), headwise.watch(model, weights=True) as watched:
        model(**_inputs(model, tokenizer))
    weights = next(layer for layer in watched.layers if layer.kind == "cross").weights[0].numpy()
    rows = record.rows(list(range(weights.shape[1])))
    assert abs(rows - weights).max() <= 8 * np.finfo(np.float32).eps  # the same float32 scores, summed in another order
    page.save(payload.data(pass_), tmp_path / "a.html")
    shown = tab().open(tmp_path / "a.html", "view=image&heads=cross 0.3&token=1")
    assert len(shown.locator(".hw-special button").all()) == len(pass_.texts[1].pieces)
    grid = rows[3, 1, 1:].reshape(5, 5)
    bright = brightness(overlay(shown))
    assert np.unravel_index(bright.argmax(), bright.shape) == np.unravel_index(grid.argmax(), grid.shape)


def _inputs(model: Any, tokenizer: Any) -> dict[str, Any]:
    tokens, inputs, _ = encode_image(vision_checkpoints.image(), "m", model.get_encoder(), None)
    assert tokens.rows == 5
    return {**inputs, "decoder_input_ids": torch.tensor([tokenizer("a cat")["input_ids"]])}


def test_text_tokens_look_at_patches_in_one_sequence(tab: Any, tmp_path: Path) -> None:
    tokenizer = small_checkpoints.metaspace()
    model = vision_checkpoints.in_one_sequence(image_token=366)
    pass_ = run_image(vision_checkpoints.image(), model, tokenizer=tokenizer, target="The animal")
    joint = pass_.texts[1]
    assert joint.image is not None and joint.image.offset == 1  # behind <s>
    assert joint.pieces[0] == "<s>" and joint.pieces[1:26] == joint.image.names[1:26]
    assert joint.ids.count(366) == 25
    record = next(record for record in pass_.layers if record.source == 1)
    last = len(joint.pieces) - 1
    grid = record.rows([last])[2, 0, 1:26].reshape(5, 5)
    page.save(payload.data(pass_), tmp_path / "a.html")
    shown = tab().open(tmp_path / "a.html", f"view=image&heads=language_model 0.2&token={last}")
    buttons = shown.locator(".hw-special button b").all_inner_texts()
    assert len(buttons) == len(joint.pieces) - 25
    bright = brightness(overlay(shown))
    assert np.unravel_index(bright.argmax(), bright.shape) == np.unravel_index(grid.argmax(), grid.shape)
    shown.locator(".hw-special button").first.click()  # <s> sees nothing behind itself
    assert "no weight on the image" in shown.locator(".hw-image-legend").inner_text()


def test_a_text_is_refused_where_it_does_not_attend_to_the_image() -> None:
    tokenizer = small_checkpoints.byte_level()
    for model in (vision_checkpoints.clip(), vision_checkpoints.vit()):
        with pytest.raises(UnsupportedError, match="no text token of .* attends to patches of an image"):
            run_image(vision_checkpoints.image(), model, tokenizer=tokenizer, target="a cat")


def test_a_text_beside_an_image_needs_a_tokenizer(model: Any) -> None:
    with pytest.raises(HeadwiseError, match="needs the model's tokenizer"):
        run_image(vision_checkpoints.image(), model, target="a cat")
