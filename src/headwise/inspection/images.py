"""From an image to the tokens of a vision model: special tokens, then a grid of patches."""

from __future__ import annotations

import base64
import inspect
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import HeadwiseError, UnsupportedError
from ..models.loading.quiet import quiet_transformers
from ..models.structure import attention_sites
from ..models.text_inputs import run_on_tokens
from ..models.watching import watch
from .image_format import ImageFormat, image_format
from .words import Words, single_token_words

MISSING = "images need Pillow; get it with: pip install 'headwise[images]'"
SMALL_PICTURE = 1 << 16  # pixels; a larger picture is embedded as JPEG, which is smaller than PNG
JPEG_QUALITY = 88
# parameters of the learned tokens in front of the patches, in their order, and what the tokens are called
SPECIAL_TOKENS = {
    "cls_token": "[CLS]",
    "class_embedding": "[CLS]",
    "class_token": "[CLS]",
    "distillation_token": "[DIST]",
    "dist_token": "[DIST]",
    "register_tokens": "[REG]",
    "reg_token": "[REG]",
}


@dataclass(frozen=True)
class ImageTokens:
    """An image as a vision model reads it: special tokens, then rows x columns patches.

    Attributes:
        title: the file's name.
        rows, columns: of the grid of patches, which are read row by row.
        special: the names of the tokens in front of the patches, such as "[CLS]".
        picture: the pixels that the model was given, as a data URI.
        after: the names of the tokens behind the patches, where a text follows.
    """

    title: str
    rows: int
    columns: int
    special: tuple[str, ...]
    picture: str
    after: tuple[str, ...] = ()

    @property
    def offset(self) -> int:
        """The position of the first patch."""
        return len(self.special)

    @property
    def names(self) -> tuple[str, ...]:
        """The tokens by name; a patch is "row,column" from 0."""
        patches = (f"{row},{column}" for row in range(self.rows) for column in range(self.columns))
        return (*self.special, *patches, *self.after)

    @property
    def words(self) -> Words:
        """Each token as a word by itself; special tokens are delimiters."""
        special = [place < self.offset for place in range(len(self.names))]
        return single_token_words(self.names, special)

    def patches(self, weights: np.ndarray) -> np.ndarray:
        """(..., T) weights to every token -> (..., rows, columns), those to the patches."""
        end = self.offset + self.rows * self.columns
        grid: np.ndarray = weights[..., self.offset : end].reshape(*weights.shape[:-1], self.rows, self.columns)
        return grid


def encode_image(
    image: Any, name: str, model: Any, processor: Any
) -> tuple[ImageTokens, dict[str, Any], tuple[str, ...]]:
    """The tokens that a vision model makes of an image, the model's inputs, and notes about them.

    Args:
        image: a file, or an image of Pillow.
        name: what the user calls the model.
        model: one that reads an image.
        processor: its image processor; without one the image is resized to the model's size, and scaled to -1 .. 1
            unless the model says how.
    """
    title, picture = open_image(image)
    form = image_format(model, name)
    notes: tuple[str, ...] = ()
    if processor is None:
        pixels, mean, std, notes = _plain_pixels(picture, form, name), form.mean, form.deviation, (form.note,)
    else:
        pixels, mean, std = _processed_pixels(picture, processor, name)
    height, width = pixels.shape[-2:]
    if form.patch is None:
        where = "has no patch_size in its config" if hasattr(model, "config") else "has a first layer of other patches"
        raise UnsupportedError(f"{name} {where}; its tokens are no patches of a grid")
    patch_height, patch_width = form.patch
    rows, columns = height // patch_height, width // patch_width
    in_patches = pixels[0, :, : rows * patch_height, : columns * patch_width]  # the model skips an incomplete patch
    picture_uri = _data_uri(in_patches.numpy(), mean, std)
    tokens = ImageTokens(title, rows, columns, _special_tokens(model), picture_uri)
    parameter = next(model.parameters())
    inputs: dict[str, Any] = {form.argument: pixels.to(parameter.device, parameter.dtype)}
    if (height, width) != form.size and _interpolates(model):
        inputs["interpolate_pos_encoding"] = True
    _check_count(tokens, _count_tokens(model, inputs), name)
    return tokens, inputs, notes


def open_image(image: Any) -> tuple[str, Any]:
    """A title, and the image of Pillow in RGB, upright; an error of one line for a file that is no image."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise HeadwiseError(MISSING) from error
    if not isinstance(image, (str, os.PathLike, Image.Image)):
        raise HeadwiseError(f"an image is a file or an image of Pillow, got {type(image).__name__}")
    if isinstance(image, Image.Image):
        return "image", ImageOps.exif_transpose(image).convert("RGB")
    path = Path(image)
    if not path.is_file():
        raise HeadwiseError(f"there is no image file {str(path)!r}")
    try:
        with Image.open(path) as file:
            return path.name, ImageOps.exif_transpose(file).convert("RGB")
    except UnidentifiedImageError as error:
        raise HeadwiseError(f"{str(path)!r} is no image that Pillow can read") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split())
        raise HeadwiseError(f"the image {str(path)!r} cannot be read: {reason}") from error


def _plain_pixels(picture: Any, form: ImageFormat, name: str) -> torch.Tensor:
    if form.size is None:
        raise UnsupportedError(
            f"{name} has no preprocessor_config.json, and its config no image_size; it needs its image processor"
        )
    (height, width), channels = form.size, form.channels
    if channels not in (1, 3):
        raise UnsupportedError(
            f"{name} reads images of {channels} channels, and an image has 1 or 3; it needs its image processor"
        )
    resized = np.asarray(picture.convert("L" if channels == 1 else "RGB").resize((width, height)), np.float32) / 255
    pixels = ((resized.reshape(height, width, channels) - form.mean) / form.deviation).transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(pixels, np.float32))[None]


def _processed_pixels(picture: Any, processor: Any, name: str) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """The pixels (1, C, height, width) that a processor makes, and the mean and deviation that it scaled them by."""
    processor = getattr(processor, "image_processor", processor)  # of a processor for images and text
    with quiet_transformers():
        pixels = processor(images=picture, return_tensors="pt")["pixel_values"]
    if pixels.dim() != 4 or len(pixels) != 1:
        raise UnsupportedError(
            f"{name} makes pixel_values of shape {tuple(pixels.shape)} of an image, not (1, channels, height, width)"
        )
    scaled = bool(getattr(processor, "do_normalize", False))
    mean = np.array(processor.image_mean if scaled else 0.0, np.float64)
    std = np.array(processor.image_std if scaled else 1.0, np.float64)
    return pixels, mean, std


def _interpolates(model: Any) -> bool:
    return "interpolate_pos_encoding" in inspect.signature(model.forward).parameters


def _special_tokens(model: Any) -> tuple[str, ...]:
    """The names of the learned tokens in front of the patches."""
    sizes = {path.rpartition(".")[2]: tensor.shape for path, tensor in model.named_parameters()}
    names: list[str] = []
    for parameter, name in SPECIAL_TOKENS.items():
        count = sizes[parameter][-2] if parameter in sizes and len(sizes[parameter]) > 1 else int(parameter in sizes)
        names += [f"{name[:-1]} {n}]" for n in range(count)] if name == "[REG]" else [name] * count
    return tuple(names)


class _TokensCountedError(Exception):
    """The first attention layer was reached, and the pass ends there."""


def _count_tokens(model: Any, inputs: dict[str, Any]) -> int:
    """The tokens that the first attention layer reads."""
    if not attention_sites(model):  # attention that no class declares is known once it has run
        with torch.no_grad(), watch(model):
            run_on_tokens(model, inputs)
    counts: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        counts.extend(value.shape[-2] for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        raise _TokensCountedError

    hooks = [site.module.register_forward_pre_hook(count, with_kwargs=True) for site in attention_sites(model)]
    try:
        with torch.no_grad():
            model(**inputs)
    except _TokensCountedError:
        return counts[0]
    finally:
        for hook in hooks:
            hook.remove()
    raise UnsupportedError(f"{type(model).__name__} has no attention layer that headwise knows")


def _check_count(tokens: ImageTokens, count: int, name: str) -> None:
    """Refuse a model whose tokens are not the special ones and the patches, such as one with windows or queries."""
    if count != len(tokens.names):
        special = f"{', '.join(tokens.special)} and " if tokens.special else ""
        raise UnsupportedError(
            f"{name} attends over {count} tokens, not over {special}{tokens.rows} x {tokens.columns} patches; "
            "which token is which patch is not known"
        )


def attention_classes(model: Any, delimiter: torch.Tensor) -> dict[str, Any]:
    """The special tokens among the keys as `watch` takes them, by kind where there are several."""
    kinds = {site.kind for site in attention_sites(model)}
    classes = {"delimiter": delimiter}
    return dict.fromkeys(kinds, classes) if len(kinds) > 1 else classes


def _data_uri(pixels: np.ndarray, mean: np.ndarray, std: np.ndarray) -> str:
    """Pixels (C, height, width) as the model was given them, unscaled again, as a data URI."""
    from PIL import Image

    values = pixels.transpose(1, 2, 0) * std + mean
    array = np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8)
    picture = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    kind = "png" if array.shape[0] * array.shape[1] <= SMALL_PICTURE else "jpeg"
    file = io.BytesIO()
    picture.save(file, kind, **({"quality": JPEG_QUALITY} if kind == "jpeg" else {}))
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
