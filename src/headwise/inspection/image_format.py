"""How a vision model takes an image: by transformers' config, or by the layers of a model without, such as timm's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from ..errors import UnsupportedError
from ..models.structure.image_input import CONFIGS, as_pair, image_input

PLAIN = (0.5,)  # mean and deviation of pixels where nothing says them
NO_PROCESSOR = "no preprocessor_config.json: resized to {1} x {0} pixels and scaled by mean 0.5, deviation 0.5"
NO_CONFIG = "resized to {} x {} pixels and scaled by mean {}, deviation {}"


@dataclass(frozen=True)
class ImageFormat:
    """How a vision model takes an image.

    Attributes:
        argument: the name of the model's input.
        size: height and width; None where the model does not say them.
        patch: height and width of a patch; None where the tokens are no patches of a grid.
        channels: of the pixels.
        mean, deviation: what pixels from 0 to 1 are scaled by without an image processor, one or one per channel.
        note: what was done to an image without one, for the user.
    """

    argument: str
    size: tuple[int, int] | None
    patch: tuple[int, int] | None
    channels: int
    mean: np.ndarray
    deviation: np.ndarray
    note: str


def image_format(model: Any, name: str) -> ImageFormat:
    """How a model takes an image; name: what the user calls the model."""
    config = getattr(model, "config", None)
    if config is None:
        return _format_of_layers(model, name)
    size, patch = (as_pair(getattr(config, key, None)) for key in ("image_size", "patch_size"))
    note = "" if size is None else NO_PROCESSOR.format(*size)
    plain = np.array(PLAIN)
    return ImageFormat("pixel_values", size, patch, getattr(config, "num_channels", 3), plain, plain, note)


def _format_of_layers(model: nn.Module, name: str) -> ImageFormat:
    """By the model's attributes and its first convolution, whose stride is the patch."""
    inputs = image_input(model)
    if inputs is None:
        raise UnsupportedError(f"{name} does not say that it takes one image, and of which size (img_size)")
    ((argument, pixels),) = inputs.items()
    convolution = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    kernel, stride = tuple(convolution.kernel_size), tuple(convolution.stride)
    in_patches = kernel == stride and convolution.padding in (0, (0, 0), "valid")
    height, width = pixels.shape[-2:]
    config: Any = next((x for x in (getattr(model, key, None) for key in CONFIGS) if hasattr(x, "get")), {})
    mean, deviation = (np.array(config.get(key) or PLAIN, np.float64) for key in ("mean", "std"))
    note = NO_CONFIG.format(width, height, *(", ".join(f"{x:g}" for x in values) for values in (mean, deviation)))
    patch = (kernel[0], kernel[1]) if in_patches else None
    return ImageFormat(argument, (height, width), patch, pixels.shape[1], mean, deviation, note)
