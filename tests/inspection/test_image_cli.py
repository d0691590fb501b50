"""`headwise inspect --image`: what it draws and writes, and how mistakes read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwise.cli import main
from helpers import small_checkpoints, vision_checkpoints


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("vit")
    vision_checkpoints.vit().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(vision_checkpoints.save_image(tmp_path_factory.mktemp("image") / "noise.png"))


def error(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that a refused call writes."""
    assert main(["inspect", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headwise: ") and err.count("\n") == 1
    return err


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["inspect", *args]) == 0
    return capsys.readouterr().out


def test_an_image_is_drawn_in_the_width_of_the_terminal(
    vit: str, image: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = shown(capsys, "--image", image, "--model", vit)
    assert max(map(len, out.splitlines())) <= 60
    assert "noise.png" in out and "from [CLS] (the largest weight of any head)" in out
    assert "██" in out


def test_one_head_is_drawn_from_a_patch(vit: str, image: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--image", image, "--model", vit, "--head", "1.2", "--token", "3,4")
    assert "Head 1.2 from 3,4\n" in out
    assert "Heads by" not in out


def test_json_of_an_image(vit: str, image: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(shown(capsys, "--image", image, "--model", vit, "--json"))
    assert data["image"] == "noise.png"
    assert data["grid"] == {"rows": 5, "columns": 5, "offset": 1}
    assert len(data["followed"][0]["heads"]) == 6


def test_the_page_of_an_image_is_written(
    vit: str, image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.html"
    assert shown(capsys, "--image", image, "--model", vit, "--html", str(path), "--off", "1.2") == ""
    assert "img-src data:;" in path.read_text()


def test_a_file_that_is_no_image_is_refused(vit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.png"
    path.write_text("no image")
    assert f"{str(path)!r} is no image that Pillow can read" in error(capsys, "--image", str(path), "--model", vit)


def test_an_incomplete_image_is_refused(
    vit: str, image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(Path(image).read_bytes()[:400])
    assert f"the image {str(path)!r} cannot be read: " in error(capsys, "--image", str(path), "--model", vit)


def test_a_missing_image_is_refused(vit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no image file" in error(capsys, "--image", str(tmp_path / "a.png"), "--model", vit)


def test_an_image_for_a_text_model_is_refused(image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(small_checkpoints.save_small_model("gpt2", tmp_path))
    capsys.readouterr()  # transformers' progress
    assert "takes input_ids, not images" in error(capsys, "--image", image, "--model", model)


def test_a_text_for_a_vision_model_is_refused(vit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "it is a vision model's; give --image FILE" in error(capsys, "A cat.", "--model", vit)


def test_a_text_for_a_model_of_two_towers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vision_checkpoints.clip().save_pretrained(tmp_path)
    small_checkpoints.byte_level().save_pretrained(tmp_path)
    capsys.readouterr()  # transformers' progress
    assert "CLIPModel has attention of several kinds (text_model, vision_model)" in error(
        capsys, "A cat.", "--model", str(tmp_path)
    )


def test_a_text_beside_an_image_is_for_the_page(vit: str, image: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--target is for the page" in error(capsys, "--image", image, "--model", vit, "--target", "a cat")


@pytest.mark.parametrize("option", [("A cat.",), ("--example", "animal"), ("--pieces",)])
def test_options_of_texts_are_refused_beside_an_image(
    option: tuple[str, ...], vit: str, image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--image takes the place of the text" in error(capsys, *option, "--image", image, "--model", vit)


def test_a_patch_outside_of_the_image_is_refused(vit: str, image: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no word '5,0'" in error(capsys, "--image", image, "--model", vit, "--token", "5,0")
