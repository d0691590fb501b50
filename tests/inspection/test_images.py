"""`headwise.inspect(image=...)`: the patches, the special tokens, and the weights between them."""

from __future__ import annotations

import base64
import builtins
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import nn

import headwise
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.inspection import ImageInspection, encode_image
from headwise.inspection.image_terminal import draw_patches
from headwise.models.structure.image_model import image_model
from headwise.ui.image_capture import run_image
from helpers import small_checkpoints, vision_checkpoints
from helpers.undeclared_models import WIDTH, Einsum, inputs_of_layers, merge, split

ROUNDING = float(np.finfo(np.float32).eps)  # of a weight of at most 1, computed in float64 and stored in float32


def inspect(model: Any, **options: Any) -> ImageInspection:
    result = headwise.inspect(image=vision_checkpoints.image(), model=model, **options)
    assert isinstance(result, ImageInspection)
    return result


def own_weights(model: Any, processor: Any = None) -> list[np.ndarray]:
    """The weights (H, T, T) of each layer that transformers returns."""
    body, _ = image_model(model)
    _, inputs, _ = encode_image(vision_checkpoints.image(), "m", body, processor)
    body.set_attn_implementation("eager")
    softmax = torch.nn.functional.softmax
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        # eager attention rounds its scores to float32; here it stays in float64
        patch.setattr(torch.nn.functional, "softmax", lambda scores, dim, dtype=None: softmax(scores, dim=dim))
        return [layer[0].numpy() for layer in body(**inputs, output_attentions=True).attentions]


@pytest.mark.parametrize("name", vision_checkpoints.MODELS)
def test_patch_weights_are_the_models_own(name: str) -> None:
    build, special = vision_checkpoints.MODELS[name]
    model = build().double()
    seen = inspect(model)
    assert (seen.image.special, seen.image.rows, seen.image.columns) == (special, 5, 5)
    for layer, weights in enumerate(own_weights(model)):
        for head, matrix in enumerate(weights):
            for source, row in zip(seen.words.names, matrix, strict=True):
                patches = row[len(special) :].reshape(5, 5)
                assert abs(seen.patch_weights((layer, head), source) - patches).max() <= ROUNDING


class PlainVision(nn.Module):
    """A vision transformer without a config, of attention that no class declares."""

    def __init__(self, special: tuple[str, ...] = ("cls_token",), patch: Any = 6, **options: Any) -> None:
        super().__init__()
        self.img_size = (18, 30)
        self.patch_embed = nn.Conv2d(3, WIDTH, patch, **{"stride": patch, **options})
        for number, name in enumerate(special):
            self.register_parameter(name, nn.Parameter(torch.randn(1, number + 1, WIDTH)))
        self.special = special
        self.blocks = nn.ModuleList(Einsum() for _ in range(2))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embed(pixels).flatten(2).mT
        x = torch.cat([*(getattr(self, name).expand(len(pixels), -1, -1) for name in self.special), patches], 1)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("special", [(), ("cls_token",), ("class_token", "reg_token")])
def test_a_model_without_a_config_shows_the_patches_of_its_first_layer(special: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = PlainVision(special).double().eval()
    model.pretrained_cfg = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    names = {"cls_token": ["[CLS]"], "class_token": ["[CLS]"], "reg_token": ["[REG 0]", "[REG 1]"]}
    seen = inspect(model)
    expected_names = [name for parameter in model.special for name in names[parameter]]
    assert (list(seen.image.special), seen.image.rows, seen.image.columns) == (expected_names, 3, 5)
    assert seen.notes == ("resized to 30 x 18 pixels and scaled by mean 0.1, 0.2, 0.3, deviation 0.4, 0.5, 0.6",)
    picture = np.asarray(vision_checkpoints.image().resize((30, 18)), np.float32) / 255
    pixels = torch.from_numpy(((picture - [0.1, 0.2, 0.3]) / [0.4, 0.5, 0.6]).astype(np.float32).transpose(2, 0, 1))
    inputs = inputs_of_layers(model, list(model.blocks), pixels[None].double())
    for layer, (block, x) in enumerate(zip(model.blocks, inputs, strict=True)):
        for head, matrix in enumerate(block.weights_by_hand(x)[0].numpy()):
            for source, row in zip(seen.words.names, matrix, strict=True):
                patches = row[len(expected_names) :].reshape(3, 5)
                assert abs(seen.patch_weights((layer, head), source) - patches).max() <= ROUNDING


def test_the_view_shows_a_model_without_a_config_over_its_patches() -> None:
    shown = run_image(vision_checkpoints.image(), PlainVision().eval())
    assert shown.texts[0].image is not None
    assert (shown.texts[0].image.rows, shown.texts[0].image.columns) == (3, 5)
    assert [record.reading.q.shape[1:3] for record in shown.layers] == [(3, 16), (3, 16)]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (PlainVision(stride=3), "PlainVision has a first layer of other patches; its tokens are no patches of a grid"),
        (PlainVision(("query",)), "PlainVision attends over 16 tokens, not over 3 x 5 patches"),
        (nn.Linear(3, 3), "Linear does not say that it takes one image, of which size; an image needs a vision model"),
    ],
)
def test_a_model_without_a_config_whose_tokens_are_not_known_is_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        inspect(model)


def test_a_model_whose_attention_between_patches_is_not_seen_is_refused_with_the_reason() -> None:
    class Mixed(Einsum):
        def mix(self, x: Any, q: Any, k: Any, v: Any) -> Any:
            weights = (split(q) @ split(k).mT).softmax(-1)
            return merge((weights * weights) @ split(v))

    model = PlainVision()
    model.blocks = nn.ModuleList([Mixed()])
    with pytest.raises(
        UnsupportedError, match="none of its attention layers .* it changes its weights between softmax"
    ):
        inspect(model)


def test_an_oblong_image_has_rows_and_columns_apart() -> None:
    model = vision_checkpoints.vit(image_size=[18, 42]).double()
    seen = inspect(model)
    assert (seen.image.rows, seen.image.columns) == (3, 7)
    row = own_weights(model)[1][2][seen.find("2,5")]
    assert seen.find("2,5") == 1 + 2 * 7 + 5
    assert abs(seen.patch_weights("1.2", "2,5").ravel() - row[1:]).max() <= ROUNDING


def test_positions_are_interpolated_for_an_image_of_another_size() -> None:
    processor = transformers.ViTImageProcessor(size={"height": 24, "width": 36})
    model = vision_checkpoints.vit().double()
    seen = inspect(model, processor=processor)
    assert (seen.image.rows, seen.image.columns) == (4, 6)
    weights = own_weights(model, processor)
    assert abs(seen.patch_weights("0.1", "[CLS]").ravel() - weights[0][1, 0, 1:]).max() <= ROUNDING


def test_without_special_tokens_the_mean_over_patches_is_shown() -> None:
    model = vision_checkpoints.siglip().double()
    seen = inspect(model)
    assert seen.sources == [None]
    mean = own_weights(model)[1][0].mean(0).reshape(5, 5)
    assert abs(seen.patch_weights("1.0") - mean).max() <= 5 * ROUNDING  # 25 float32 weights are summed and divided
    assert "the mean over all patches" in str(seen)
    assert any("pools the patches is left out" in note for note in seen.notes)


def test_the_tower_of_a_model_for_images_and_text_is_named() -> None:
    assert any("vision tower" in note for note in inspect(vision_checkpoints.clip()).notes)


# --- pixels ---


def picture(seen: ImageInspection) -> np.ndarray:
    head, _, data = seen.image.picture.partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_the_processor_of_the_directory_makes_the_pixels(tmp_path: Path) -> None:
    vision_checkpoints.vit().save_pretrained(tmp_path)
    processor = transformers.ViTImageProcessor(size={"height": 30, "width": 30}, image_mean=[0.1, 0.2, 0.3])
    processor.save_pretrained(tmp_path)
    path = vision_checkpoints.save_image(tmp_path / "a.png")
    seen = headwise.inspect(image=path, model=tmp_path)
    assert isinstance(seen, ImageInspection)
    assert not any("preprocessor_config" in note for note in seen.notes)
    pixels = processor(images=vision_checkpoints.image(), return_tensors="pt")["pixel_values"][0].numpy()
    unscaled = pixels.transpose(1, 2, 0) * 0.5 + np.array([0.1, 0.2, 0.3])
    assert abs(picture(seen) / 255 - unscaled).max() <= 0.5 / 255 + 1e-6  # rounded to a byte
    weights = inspect(headwise.load(tmp_path), processor=processor).matrix("1.1")
    assert np.array_equal(seen.matrix("1.1"), weights)


def test_without_a_processor_the_image_is_resized_and_a_note_says_so() -> None:
    seen = inspect(vision_checkpoints.vit())
    assert seen.notes == (
        "no preprocessor_config.json: resized to 30 x 30 pixels and scaled by mean 0.5, deviation 0.5",
    )
    assert np.array_equal(picture(seen), np.asarray(vision_checkpoints.image().resize((30, 30))))


def test_pixels_of_an_incomplete_patch_are_not_in_the_picture() -> None:
    processor = transformers.ViTImageProcessor(size={"height": 31, "width": 35})
    model = transformers.Dinov2Model(transformers.Dinov2Config(**vision_checkpoints.SIZES)).eval()
    seen = inspect(model, processor=processor)
    assert (seen.image.rows, seen.image.columns) == (5, 5)
    assert picture(seen).shape == (30, 30, 3)


def test_an_image_with_transparency_or_a_palette_is_read() -> None:
    model = vision_checkpoints.vit()
    for mode in ("RGBA", "P", "L", "1"):
        assert headwise.inspect(image=vision_checkpoints.image().convert(mode), model=model).tokens == 26


# --- what it gives ---


def test_json_has_the_grid_and_the_strongest_patches_of_every_head() -> None:
    seen = inspect(vision_checkpoints.with_registers(), token=["[CLS]", "3,4"])
    data = seen.to_json()
    assert data["grid"] == {"rows": 5, "columns": 5, "offset": 3}
    assert [followed["from"] for followed in data["followed"]] == ["[CLS]", "3,4"]
    for followed in data["followed"]:
        assert sorted(head["head"] for head in followed["heads"]) == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
        for head in followed["heads"]:
            grid = seen.patch_weights(head["head"], followed["from"])
            best = head["patches"][0]
            assert best["weight"] == round(float(grid.max()), 6)
            assert grid[best["row"], best["column"]] == grid.max()
            assert head["share"] == round(float(grid.sum()), 6)


def test_blocks_in_the_terminal_follow_the_weights() -> None:
    grid = np.array([[0.0, 0.1], [0.4, 0.2]])
    assert draw_patches(grid, 80, colour=False).plain == "  ░░\n██▒▒"
    assert draw_patches(grid, 1, colour=False).plain == "█"


def test_the_printed_page_names_the_strongest_head() -> None:
    seen = inspect(vision_checkpoints.vit())
    (layer, head), grid = seen.strongest_heads("[CLS]")[0]
    assert grid.max() == max(seen.patch_weights(other, "[CLS]").max() for other in seen.heads)
    assert f"Head {layer}.{head} from [CLS] (the largest weight of any head)" in str(seen)


# --- what is refused ---


def test_text_models_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="BertModel takes input_ids, not images; an image needs a vision model"):
        headwise.inspect(image=vision_checkpoints.image(), model=transformers.BertModel(small_checkpoints.bert()))


def test_the_default_model_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="the default model reads text; give model="):
        headwise.inspect(image=vision_checkpoints.image())


def test_a_text_beside_an_image_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="a text or an image, not both"):
        headwise.inspect("A cat.", vision_checkpoints.vit(), image=vision_checkpoints.image())


def test_attention_in_windows_is_refused() -> None:
    sizes: Any = {"image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [1, 1], "num_heads": [3, 3]}
    model = transformers.SwinModel(transformers.SwinConfig(**sizes, window_size=4))
    with pytest.raises(UnsupportedError, match="attends over 16 tokens, not over 8 x 8 patches"):
        inspect(model)


def test_learned_tokens_behind_the_patches_are_refused() -> None:
    sizes = {**vision_checkpoints.SIZES, "image_size": [30, 30], "num_detection_tokens": 7}
    model = transformers.YolosModel(transformers.YolosConfig(**sizes)).eval()
    with pytest.raises(UnsupportedError, match=r"attends over 33 tokens, not over \[CLS\] and 5 x 5 patches"):
        inspect(model)


def test_pillow_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_pillow(name: str, *args: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "PIL":
            raise ImportError(name)
        return real(name, *args, **options)

    model = vision_checkpoints.vit()
    monkeypatch.setattr(builtins, "__import__", without_pillow)
    with pytest.raises(HeadwiseError, match=r"images need Pillow; get it with: pip install 'headwise\[images\]'"):
        headwise.inspect(image="a.png", model=model)
