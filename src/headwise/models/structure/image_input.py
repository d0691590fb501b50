"""A random image for a vision model without a config, such as timm's."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

SIZES = ("img_size", "image_size", "input_size")  # attributes in which models and their patch embeddings keep it
CONFIGS = ("pretrained_cfg", "default_cfg")  # timm's


def image_input(model: nn.Module) -> dict[str, Tensor] | None:
    """{argument: (1, channels, height, width)}; None where the model takes more, or does not say what it takes."""
    convolution = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    size = _image_size(model)
    parameters = inspect.signature(model.forward).parameters.values()
    arguments = [x.name for x in parameters if x.default is x.empty and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    if convolution is None or size is None or len(arguments) != 1:
        return None
    random, like = torch.Generator().manual_seed(0), convolution.weight
    pixels = torch.randn(1, convolution.in_channels, *size, generator=random)
    return {arguments[0]: pixels.to(like.device, like.dtype)}


def _image_size(model: nn.Module) -> tuple[int, int] | None:
    """Height and width, by the first module that says it, else by timm's description of the weights."""
    for module in model.modules():
        for name in SIZES:
            if (size := as_pair(getattr(module, name, None))) is not None:
                return size
    for name in CONFIGS:
        config: Any = getattr(model, name, None)
        channels_and_size = config.get("input_size") if hasattr(config, "get") else None
        if isinstance(channels_and_size, (tuple, list)) and len(channels_and_size) == 3:
            return as_pair(tuple(channels_and_size[1:]))
    return None


def as_pair(size: Any) -> tuple[int, int] | None:
    """A size as height and width; None where it is neither one number nor two."""
    if isinstance(size, int) and not isinstance(size, bool):
        return size, size
    if isinstance(size, (tuple, list)) and len(size) == 2 and all(isinstance(n, int) for n in size):
        return size[0], size[1]
    return None
